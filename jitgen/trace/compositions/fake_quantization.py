"""Rounds floats to what integer codes stand for, as quantisation-aware training has it: torch's ``fake_quantize_*``.

The codes are integers in the graph where a byte has them, so that a product of two such operands is one of the codes.
A NaN has the least code; the gradient passes straight through between the least and the largest code, and is 0 outside.
Torch's checks of the elements of zero-points are left out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jitgen.ir.custom_gradients import with_gradient
from jitgen.trace.compositions.checks import require_float
from jitgen.trace.table import composition


@composition("fake_quantize_per_tensor_affine")
def per_tensor(input: Tensor, scale: Any, zero_point: Any, quant_min: int, quant_max: int) -> Tensor:
    _require_range(quant_min, quant_max)
    if not isinstance(zero_point, Tensor) and not quant_min <= zero_point <= quant_max:
        raise ValueError(f"the zero-point {zero_point} is not between {quant_min} and {quant_max}, as torch demands")
    for value in (scale, zero_point):
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"a scale and a zero-point of the tensor are expected, got shape {tuple(value.shape)}")
    one = [value.reshape(()) if isinstance(value, Tensor) else value for value in (scale, zero_point)]
    return _rounded(input, one[0], one[1], quant_min, quant_max)


@composition("fake_quantize_per_channel_affine")
def per_channel(input: Tensor, scale: Tensor, zero_point: Tensor, axis: int, quant_min: int, quant_max: int) -> Tensor:
    _require_range(quant_min, quant_max)
    if not 0 <= axis < input.dim():
        raise IndexError(f"axis {axis} of a tensor of {input.dim()} dimensions")
    shape = [1] * input.dim()
    shape[axis] = input.shape[axis]
    for value in (scale, zero_point):
        if value.dim() != 1 or value.shape[0] != input.shape[axis]:
            raise ValueError(f"one scale and zero-point of each of {input.shape[axis]} channels are expected")
    return _rounded(input, scale.reshape(shape), zero_point.reshape(shape), quant_min, quant_max)


def _require_range(least: int, largest: int) -> None:
    if least > largest:
        raise ValueError(f"quant_min {least} is above quant_max {largest}")


def _rounded(input: Tensor, scale: Any, zero_point: Any, least: int, largest: int) -> Tensor:
    """Computes torch's steps: times the float32 reciprocal of the scale, rounded, and then shifted.

    What codes stand for is float32 in torch for every dtype.
    """
    require_float(input)
    wide = torch.promote_types(input.dtype, torch.float32)
    if not isinstance(scale, Tensor):
        scale = torch.full((), scale, dtype=torch.float32)
    scale = scale.float()
    zeros = zero_point.to(wide) if isinstance(zero_point, Tensor) else zero_point
    steps = (input.to(wide) * scale.reciprocal()).round() + zeros
    inside = (steps >= least) & (steps <= largest)
    codes = torch.where(steps.isnan(), least, steps.clamp(least, largest))
    byte = next((dtype for dtype in (torch.int8, torch.uint8) if _holds(dtype, least, largest)), None)
    codes = codes if byte is None else codes.to(byte)
    value = (codes.float() - (zeros.float() if isinstance(zeros, Tensor) else zeros)) * scale
    return with_gradient(value.to(input.dtype), input, inside.to(input.dtype))


def _holds(dtype: torch.dtype, least: int, largest: int) -> bool:
    limits = torch.iinfo(dtype)
    return limits.min <= least and largest <= limits.max
