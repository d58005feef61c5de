"""Matrix products with a quantised weight outside ``jitgen.jit``: an undecorated model after ``quantize_``.

``linear`` is the one place through which ``F.linear``, ``x @ w.T``, ``torch.matmul`` and ``addmm`` go. It is a
generated kernel (``api.py`` registers ``quant.kernel``), and plain torch on the dequantised weight where a gradient is
asked for, where torch is tracing, or where the operands are of a kind that kernels do not take.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from jitgen import quant
from jitgen.quant.qtensor import QTensor

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def linear(x: torch.Tensor, weight: QTensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x[..., K] @ W[N, K].T + bias``, of x's dtype; ``weight`` is not transposed."""
    if quant.kernel is not None and _kernel_takes(x, weight, bias):
        return quant.kernel(x, weight, bias)
    return F.linear(x, weight.dequantize(x.dtype), bias)


def _kernel_takes(x: torch.Tensor, weight: QTensor, bias: torch.Tensor | None) -> bool:
    if quant.plain.get():
        return False
    operands = (x,) if bias is None else (x, bias)
    if torch.is_grad_enabled() and any(operand.requires_grad for operand in operands):
        return False
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type):
        return False
    if x.dtype not in _DTYPES or x.device.type not in ("cpu", "cuda") or not x.dim():
        return False
    return all(type(o) in (torch.Tensor, torch.nn.Parameter) and o.device == weight.device for o in operands)
