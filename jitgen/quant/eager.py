"""Multiplies with a quantised weight outside ``jitgen.jit``, as an undecorated model does after ``quantize_``.

``F.linear``, ``x @ w.T``, ``torch.matmul`` and ``addmm`` all call ``linear``. It runs a generated kernel, where torch
traces an operator that does, and plain torch on the dequantised weight where the operands are of a kind that kernels do
not take. That is slower than the dense layer was, so ``fallback`` says so. Gradients flow to activations and biases.

``kernels`` is the registry of what runs. ``jitgen.api`` fills it when it is imported, which is before the first
quantised weight exists, however that comes into the process.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad

from jitgen.errors import UnsupportedError
from jitgen.ir.views import ROW_TILE
from jitgen.quant import activations
from jitgen.quant.fakes import is_symbolic, with_fakes
from jitgen.quant.token import COMPUTED

if TYPE_CHECKING:
    from jitgen.quant.qtensor import QTensor


class Kernels:
    """Holds the generated kernels of products with a quantised weight outside ``jitgen.jit``.

    Attributes:
        plain: ``(x, weight) -> y``, as ``F.linear``.
        biased: ``(x, weight, bias) -> y``, as ``F.linear``.
        embedding: ``(indices, weight) -> rows``, as ``F.embedding``.
        grouped: ``(x, weight, offs) -> y``, as ``torch._grouped_mm``.
        layout_of: returns the layout in which they read a weight.
        note_fallback: takes the reason and the remedy of each product that runs in torch.
    """

    plain: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    biased: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    embedding: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    grouped: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    layout_of: Callable[[QTensor], str]
    note_fallback: Callable[[str, str], None]
    _are_registered = False

    def register(self, **kernels: Callable[..., Any]) -> None:
        """Enters all of the attributes."""
        self.__dict__.update(kernels)
        self._are_registered = True

    def prepare(self) -> None:
        """Has the kernels registered. Whatever makes a quantised weight calls this, as a product may follow."""
        if not self._are_registered:
            importlib.import_module("jitgen.api")  # by name: the modules that make kernels are above this one


kernels = Kernels()

dequantizes: ContextVar[bool] = ContextVar("dequantizes", default=False)
"""Whether products dequantise and leave the rest to torch, as a reference must."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def linear(x: torch.Tensor, weight: QTensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Returns ``x[..., K] @ W[N, K].T + bias``, of x's dtype; ``weight`` is not transposed."""
    if x.dtype in DTYPES and not x.is_meta and torch.is_autocast_enabled(x.device.type):
        return _autocast(x, weight, bias)
    if dequantizes.get() or x.is_meta:
        return reference(x, weight, bias)
    if torch.compiler.is_compiling() and not is_functorch_wrapped_tensor(x):
        return operator(x, weight, bias)
    obstacle = _obstacle(x, weight, bias)
    if obstacle is None:
        return kernels.plain(x, weight) if bias is None else kernels.biased(x, weight, bias)
    if is_symbolic(x):
        return operator(x, weight, bias)
    if x.is_floating_point() and x.itemsize == 1:
        raise UnsupportedError(
            f"a product with a quantised weight: {'; '.join(obstacle)}. The weight would be rounded to {x.dtype}"
        )
    result = reference(x, weight, bias)
    fallback(*obstacle)
    return result


def takes_groups(x: torch.Tensor, weight: QTensor, offs: torch.Tensor) -> bool:
    """Returns whether a kernel multiplies groups of rows of ``x`` by the matrices of ``weight``: not where torch
    traces, or where the matrices have parts of the blocks of rows that kernels read."""
    if dequantizes.get() or torch.compiler.is_compiling() or _obstacle(x, weight, None) is not None:
        return False
    rows = weight.token.weight_shape[0] // max(weight.token.experts or 1, 1)
    return type(offs) is torch.Tensor and offs.device == x.device == weight.token.device and rows % ROW_TILE == 0


def reference(x: torch.Tensor, weight: QTensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Computes ``linear`` in torch, on the dequantised weight."""
    if weight.smoothing is not None:
        return reference(activations.smoothed(x, weight.smoothing), weight.with_smoothing(None), bias)
    if weight.token.activation is not None:
        dense = weight.dequantize(torch.promote_types(x.dtype, torch.float32))
        return activations.linear(x, dense, bias, weight.token.activation, weight.input_scale)
    return F.linear(x, weight.dequantize(x.dtype), bias)


def _autocast(x: torch.Tensor, weight: QTensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Computes ``linear`` in the dtype to which autocast converts products."""
    device = x.device.type
    dtype = torch.get_autocast_dtype(device)
    with torch.autocast(device, enabled=False):
        return linear(x.to(dtype), weight, None if bias is None else bias.to(dtype))


def operator(x: torch.Tensor, weight: QTensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Calls ``linear`` where torch traces, as the operator ``jitgen::linear`` (``call/linear_operator.py``)."""
    tensors, text = list(weight.stored.tensors), weight.stored.token.text
    if torch.compiler.is_exporting():
        tensors = [getattr(weight, name) for name in weight.portable_names]
        text = weight.token.replace(layout="portable").text
    if not weight.is_argument and (torch.compiler.is_compiling() or any(map(is_symbolic, tensors))):
        text = COMPUTED + text
    x, bias, *tensors = with_fakes([x, bias, *tensors])
    return torch.ops.jitgen.linear(x, tensors, bias, text)


def fallback(reason: str, remedy: str) -> None:
    """Says that a product runs in torch, and why."""
    if not dequantizes.get():
        kernels.note_fallback(reason, remedy)


def _obstacle(x: torch.Tensor, weight: QTensor, bias: torch.Tensor | None) -> tuple[str, str] | None:
    """Returns the reason why no kernel takes these operands, and the remedy; None where one does."""
    if x.dtype not in DTYPES:
        return f"its input is of {x.dtype}", f"cast it to one of {', '.join(map(str, DTYPES))}"
    if x.device.type not in ("cpu", "cuda"):
        return f"its input is on {x.device.type}", "move it, and the weight, to cpu or cuda"
    operands = (x,) if bias is None else (x, bias)
    for operand in operands:
        if type(operand) in (torch.Tensor, torch.nn.Parameter):
            continue
        if not (is_functorch_wrapped_tensor(x) and is_symbolic(operand)):  # a call of kernels takes both
            return f"an operand is a {type(operand).__name__}", "pass a plain tensor"
    if forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(operand).tangent is not None for operand in operands
    ):
        return "an operand has a tangent of forward-mode AD", "call the layer outside of dual_level()"
    return None
