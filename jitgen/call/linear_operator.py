"""Registers ``jitgen::linear``, the product with a quantised weight as an operator of torch.

::

    jitgen::linear(Tensor x, Tensor[] weight, Tensor? bias, str token) -> Tensor

Where torch traces, ``F.linear`` with a quantised weight is this operator (``quant/eager.py``). It has the tensors of
the weight as arguments, so that graphs of torch's know what they read; the token says what they mean. A decorated
function that has it in its graph computes it within its own kernels (``trace/contractions.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from jitgen.call.eager_linear import quantized_linear
from jitgen.errors import UnsupportedError
from jitgen.quant.token import COMPUTED, from_text

if TYPE_CHECKING:
    from jitgen.quant.qtensor import QTensor

_LIBRARY = torch.library.Library("jitgen", "FRAGMENT")
_LIBRARY.define(
    "linear(Tensor x, Tensor[] weight, Tensor? bias, str token) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)
_weights: Any = WeakTensorKeyDictionary()
"""Weights of earlier calls by their first tensor. They refer to other tensors of the same memory, so that the key can
die."""


def _made(tensors: Sequence[torch.Tensor], text: str) -> QTensor:
    """Builds the weight of ``tensors``, which ``text`` describes."""
    from jitgen.quant.qtensor import QTensor  # jitgen.jit imports this module, and few programs have such a weight

    return QTensor.wrap(tuple(tensors), from_text(text, tensors[0].device))


def _weight(tensors: Sequence[torch.Tensor], text: str) -> QTensor:
    """Returns the weight that consists of ``tensors``, in the layout that kernels read once it has been multiplied
    with.

    Weights that a graph computes are not remembered: Inductor writes other numbers to the memory of a tensor that it
    needs no more, without a change of its version.
    """
    if text.startswith(COMPUTED):
        return _made(tensors, text)
    versions = tuple(tensor._version for tensor in tensors if not tensor.is_inference())
    weight = _weights.get(tensors[0])
    if weight is None or weight[:2] != (text, versions):
        weight = text, versions, _made([tensor.detach() for tensor in tensors], text)
        _weights[tensors[0]] = weight
    return weight[2]


def _run(x: torch.Tensor, weight: Sequence[torch.Tensor], bias: torch.Tensor | None, token: str) -> torch.Tensor:
    plain = x.detach() if type(x) is not torch.Tensor else x
    with torch.no_grad():
        whole = _weight(weight, token)
        product = quantized_linear.plain(plain, whole) if bias is None else quantized_linear.biased(plain, whole, bias)
        return product.contiguous()


def _shape(x: torch.Tensor, weight: Sequence[torch.Tensor], bias: torch.Tensor | None, token: str) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], from_text(token, x.device).shape[0]))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, _, ctx.token = inputs
    ctx.dtype = x.dtype
    ctx.save_for_backward(*weight)


def _gradients(ctx: Any, grad: torch.Tensor) -> Any:
    """Returns the gradients of the activation (by a product with the dense weight) and of the bias."""
    grad_x = grad_bias = None
    if ctx.needs_input_grad[0]:
        weight = _made(ctx.saved_tensors, ctx.token)
        grad_x = grad @ weight.dequantize(ctx.dtype)
    if ctx.needs_input_grad[2]:
        grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0)
    return grad_x, [None] * len(ctx.saved_tensors), grad_bias, None


def _batched(
    info: Any, dims: Any, x: torch.Tensor, weight: Sequence[torch.Tensor], bias: torch.Tensor | None, token: str
) -> tuple[torch.Tensor, int]:
    """Implements ``torch.vmap`` over the activation, whose batch is further rows, and over the bias."""
    of_x, of_weight, of_bias, _ = dims
    if any(dim is not None for dim in of_weight):
        raise UnsupportedError("vmap over a quantised weight; dequantise it, or map over the activation alone")
    x = x.expand(info.batch_size, *x.shape) if of_x is None else x.movedim(of_x, 0)
    if of_bias is None or bias is None:
        return torch.ops.jitgen.linear(x, weight, bias, token), 0
    product = torch.ops.jitgen.linear(x, weight, None, token)
    bias = bias.movedim(of_bias, 0)
    return product + bias.reshape(len(bias), *(1 for _ in product.shape[2:]), -1), 0


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("linear", _run, _key)
torch.library.register_fake("jitgen::linear", _shape, lib=_LIBRARY)
torch.library.register_autograd("jitgen::linear", _gradients, setup_context=_remember, lib=_LIBRARY)
torch.library.register_vmap("jitgen::linear", _batched, lib=_LIBRARY)
