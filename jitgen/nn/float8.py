"""Defines ``Float8Linear``, a Linear whose products are of 8-bit floats in training, and its gradients too.

What it computes is plain PyTorch: an ``autograd.Function`` whose three products are each quantise, multiply and scale,
and which passes gradients straight through the rounding. Activations and weights are float8_e4m3fn, gradients
float8_e5m2, which has more range (Micikevicius et al., "FP8 formats for deep learning"). Scales are found at each call:
one of a tensor, or one of each row along which a product sums.

A generated kernel quantises an operand, and another multiplies and scales: by the tensor cores where a GPU has products
of 8-bit floats. Rows that are all 0 have the smallest scale, and numbers beyond the largest code do not occur.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from jitgen.call.function import JitFunction
from jitgen.errors import UnsupportedError
from jitgen.quant.activations import Activation, codes_of, scales_of
from jitgen.quant.qtensor import QTensor

SCALINGS = ("row", "tensor")


def _quantized(x: torch.Tensor, dtype: torch.dtype, by_row: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the codes of ``x`` (rows, K) and their scales: (rows, 1), or (1, 1)."""
    kind = Activation("float8", dtype)
    scales = scales_of(x, kind, by_row)
    return codes_of(x, scales, kind), scales


def _product(
    x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, weight_dtype: torch.dtype, by_row: bool
) -> torch.Tensor:
    """Returns ``x`` (M, K) times the transpose of ``weight`` (N, K), both quantised along K, in the dtype of ``x``."""
    codes, scales = _quantized(x, dtype, by_row)
    weight_codes, weight_scales = _quantized(weight, weight_dtype, by_row)
    return ((codes.float() @ weight_codes.float().T) * scales * weight_scales.T).to(x.dtype)


_kernel = JitFunction(_product)


class _Float8Product(torch.autograd.Function):
    """Multiplies ``x`` (M, K) by the transpose of ``weight`` (N, K) in 8-bit floats, and its gradients by them too."""

    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor, by_row: bool) -> torch.Tensor:
        return _kernel(x, weight, torch.float8_e4m3fn, torch.float8_e4m3fn, by_row)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, weight, ctx.by_row = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = _kernel(grad, weight.T, torch.float8_e5m2, torch.float8_e4m3fn, ctx.by_row)
        if ctx.needs_input_grad[1]:
            of_weight = _kernel(grad.T, x.T, torch.float8_e5m2, torch.float8_e4m3fn, ctx.by_row)
        return of_x, of_weight, None


class Float8Linear(nn.Linear):
    """Multiplies 8-bit floats as a Linear, in its forward and in its gradients; weights stay as they are.

    Args:
        scaling: ``"row"``, a scale for each row of either operand of a product, or ``"tensor"``, one for each operand.
        The others are those of ``nn.Linear``.

    Its kernels are its own: a function that ``jitgen.jit`` decorates calls it outside (TraceError). ``jitgen.compile``
    and ``torch.compile`` take a model that has such layers. ``quantize_`` and ``calibrate`` take them as Linears.

    Raises:
        UnsupportedError: there is no such scaling, or the layer is called with a tensor that is not of floats or has
            another number of columns.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        scaling: str = "row",
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        if scaling not in SCALINGS:
            raise UnsupportedError(f"unknown scaling {scaling!r}; expected one of {', '.join(map(repr, SCALINGS))}")
        self.scaling = scaling

    @classmethod
    def sharing(cls, linear: nn.Linear, scaling: str = "row") -> Float8Linear:
        """Returns such a layer that shares the parameters of ``linear``."""
        made = cls(linear.in_features, linear.out_features, False, "meta", linear.weight.dtype, scaling)
        made.weight, made.bias = linear.weight, linear.bias
        return made.train(linear.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if not input.is_floating_point() or not input.dim() or input.shape[-1] != self.in_features:
            raise UnsupportedError(
                f"Float8Linear takes floats of shape (..., {self.in_features}), not {input.dtype} of shape "
                f"{tuple(input.shape)}"
            )
        if isinstance(weight, QTensor):  # of a model that quantize_ took when it was trained
            return F.linear(input, weight, self.bias)
        if torch.is_autocast_enabled(input.device.type):
            dtype = torch.get_autocast_dtype(input.device.type)
            input, weight = input.to(dtype), weight.to(dtype)
        if not input.numel() or not weight.numel():
            return F.linear(input, weight, self.bias)
        rows = input.reshape(-1, self.in_features)
        product: torch.Tensor = _Float8Product.apply(rows, weight, self.scaling == "row")
        result = product.reshape(*input.shape[:-1], self.out_features)
        return result if self.bias is None else result + self.bias.to(result.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scaling={self.scaling!r}"


def convert_linears(model: nn.Module, scaling: str = "row", filter_fn: Any = None) -> list[str]:
    """Makes the Linears of ``model`` ``Float8Linear``s, in place, with the same parameters; returns their names.

    Args:
        filter_fn: ``(module, fully qualified name) -> bool`` selects them; None selects all but ``Float8Linear``s.
    """
    names = []
    for name, module in list(model.named_modules()):
        for leaf, child in list(module.named_children()):
            full = f"{name}.{leaf}".lstrip(".")
            if type(child) is nn.Linear and (filter_fn is None or filter_fn(child, full)):
                setattr(module, leaf, Float8Linear.sharing(child, scaling))
                names.append(full)
    return names
