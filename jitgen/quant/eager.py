"""Matrix products with a quantised weight outside ``jitgen.jit``: an undecorated model after ``quantize_``.

``F.linear``, ``x @ w.T``, ``torch.matmul`` and ``addmm`` all call ``linear``. It runs a generated kernel, where torch
traces an operator that does, and plain torch on the dequantised weight where the operands are of a kind that kernels do
not take. That is slower than the dense layer was, so ``fallback`` says so. Gradients flow to activations and biases.

The kernels (``plain``, ``biased``, ``embedding``) are registered by ``call/eager_linear.py`` before the first quantised
weight exists, however it comes into the process: ``prepare``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from jitgen.errors import UnsupportedError
from jitgen.quant.fakes import with_fakes

if TYPE_CHECKING:
    from jitgen.quant.storage import StoredWeight

register_products: Callable[[], None] | None = None
"""Registers what follows. The package ``jitgen`` sets it, because the modules that do are above this one."""

plain: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
"""``(x, weight) -> y``: ``F.linear`` by a generated kernel."""

biased: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None = None
"""The same of ``(x, weight, bias)``."""

embedding: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
"""``(indices, weight) -> rows``: ``F.embedding`` by a generated kernel."""

fallbacks: Callable[[str, str], None] | None = None
"""Takes the reason and the remedy of each product that runs in torch (``call/eager_linear.py`` registers it)."""

layout_of: Callable[[StoredWeight], str] | None = None
"""The layout in which kernels read a weight (``call/eager_linear.py`` registers it)."""

dequantizes: ContextVar[bool] = ContextVar("dequantizes", default=False)
"""Whether products dequantise and leave the rest to torch, as a reference must."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def prepare() -> None:
    """Have the kernels of products registered. Whatever makes a quantised weight calls this: a product may follow."""
    if plain is None and register_products is not None:
        register_products()


def linear(x: torch.Tensor, weight: StoredWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x[..., K] @ W[N, K].T + bias``, of x's dtype; ``weight`` is not transposed."""
    if plain is not None and biased is not None and not dequantizes.get() and not x.is_meta:
        if torch.is_autocast_enabled(x.device.type) and x.dtype in DTYPES:
            return _autocast(x, weight, bias)
        if torch.compiler.is_compiling():
            return operator(x, weight, bias)
        obstacle = _obstacle(x, weight, bias)
        if obstacle is None:
            return plain(x, weight) if bias is None else biased(x, weight, bias)
        if _is_fake(x):
            return operator(x, weight, bias)
        if x.is_floating_point() and x.itemsize == 1:
            raise UnsupportedError(
                f"a product with a quantised weight: {'; '.join(obstacle)}. The weight would be rounded to {x.dtype}"
            )
        result = F.linear(x, weight.dequantize(x.dtype), bias)
        fallback(*obstacle)
        return result
    return F.linear(x, weight.dequantize(x.dtype), bias)


def _is_fake(x: torch.Tensor) -> bool:
    """Whether ``x`` stands for a tensor that torch will have; some versions trace outside of ``is_compiling``."""
    return type(x).__name__ == "FakeTensor"


def _autocast(x: torch.Tensor, weight: StoredWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """``linear`` as autocast has it: of the dtype that it converts products to."""
    device = x.device.type
    dtype = torch.get_autocast_dtype(device)
    with torch.autocast(device, enabled=False):
        return linear(x.to(dtype), weight, None if bias is None else bias.to(dtype))


def operator(x: torch.Tensor, weight: StoredWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """``linear`` where torch traces: the operator ``jitgen::linear``, which ``call/linear_operator.py`` defines."""
    tensors, text = list(weight.stored.tensors), weight.stored.token.text
    if torch.compiler.is_exporting():
        tensors = [getattr(weight, name) for name in weight.portable_names]
        text = weight.token.replace(layout="portable").text
    x, bias, *tensors = with_fakes([x, bias, *tensors])
    return torch.ops.jitgen.linear(x, tensors, bias, text)


def fallback(reason: str, remedy: str) -> None:
    """Say that a product runs in torch, and why."""
    if fallbacks is not None and not dequantizes.get():
        fallbacks(reason, remedy)


def _obstacle(x: torch.Tensor, weight: StoredWeight, bias: torch.Tensor | None) -> tuple[str, str] | None:
    """The reason why no kernel takes these operands, and the remedy; None where one does."""
    if x.dtype not in DTYPES:
        return f"its input is of {x.dtype}", f"cast it to one of {', '.join(map(str, DTYPES))}"
    if x.device.type not in ("cpu", "cuda"):
        return f"its input is on {x.device.type}", "move it, and the weight, to cpu or cuda"
    operands = (x,) if bias is None else (x, bias)
    for operand in operands:
        if type(operand) not in (torch.Tensor, torch.nn.Parameter):
            return f"an operand is a {type(operand).__name__}", "pass a plain tensor"
    if forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(operand).tangent is not None for operand in operands
    ):
        return "an operand has a tangent of forward-mode AD", "call the layer outside of dual_level()"
    return None
