"""Matrix products with a quantised weight outside ``jitgen.jit``: an undecorated model after ``quantize_``.

``F.linear``, ``x @ w.T``, ``torch.matmul`` and ``addmm`` all call ``linear``. It runs a generated kernel
(``call/eager_linear.py`` registers ``kernel``), and plain torch on the dequantised weight where a gradient is required,
where torch is tracing, or where the operands are of a kind that kernels do not take.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from jitgen.quant.storage import StoredWeight

kernel: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor] | None = None
"""``(x, weight, bias or None) -> y``: ``F.linear`` by a generated kernel."""

dequantizes: ContextVar[bool] = ContextVar("dequantizes", default=False)
"""Whether products dequantise and leave the rest to torch, as a reference must."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def linear(x: torch.Tensor, weight: StoredWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x[..., K] @ W[N, K].T + bias``, of x's dtype; ``weight`` is not transposed."""
    if kernel is not None and _kernel_takes(x, weight, bias):
        return kernel(x, weight, bias)
    return F.linear(x, weight.dequantize(x.dtype), bias)


def _kernel_takes(x: torch.Tensor, weight: StoredWeight, bias: torch.Tensor | None) -> bool:
    if dequantizes.get():
        return False
    operands = (x,) if bias is None else (x, bias)
    if torch.is_grad_enabled() and any(operand.requires_grad for operand in operands):
        return False
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type):
        return False
    if x.dtype not in _DTYPES or x.device.type not in ("cpu", "cuda") or not x.dim():
        return False
    return all(type(o) in (torch.Tensor, torch.nn.Parameter) and o.device == weight.device for o in operands)
