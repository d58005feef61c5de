"""Quantises a weight column by column, and moves what each loses to the columns after it: GPTQ.

Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers". With H the
sum of x^T x over a calibration's rows, the error of column k is taken from the later columns by the rows of the upper
Cholesky factor of H's inverse, which minimises the error of the product. Scales of a group are found by the weighted
squared error of its columns as they are when its turn comes.
"""

from __future__ import annotations

import torch

from jitgen.errors import FormatError
from jitgen.quant.formats import Format, Integer, geometry
from jitgen.quant.layouts import portable
from jitgen.quant.qtensor import QTensor
from jitgen.quant.quantize import best_scales, stored_scales

DAMPING = 0.01
"""What is added to H's diagonal, as a part of its mean, so that it has an inverse."""
COLUMNS = 128
"""Columns after which the others get what these have lost at once."""


def with_feedback(
    weight: torch.Tensor, products: torch.Tensor, format: Format, group_size: int | None, activation: str | None
) -> QTensor:
    """Quantises ``weight`` (N, K); ``products`` is H, (K, K).

    Raises:
        FormatError: codes of ``format`` are no consecutive integers, or rows share scales; ``products`` are not finite.
    """
    code = format.code
    if not isinstance(code, Integer) or code.step != 1 or format.zeros == "float" or format.scale_rows != 1:
        raise FormatError(f"gptq is for integers with a scale for each row or group, and not for {format.name}")
    shape = (weight.shape[0], weight.shape[1])
    sizes = geometry(group_size, shape)
    named = dict(zip(format.tensor_names, portable.empty(format, group_size, shape, weight.device), strict=True))
    left = weight.detach().float().clone()
    spread, importance = _factor(products.to(left.device)), products.diagonal().to(left.device)
    codes = left.new_zeros(shape[0], sizes.padded_columns)
    group = group_size or max(shape[1], 1)
    scales = zeros = left.new_zeros(shape[0], 1)
    for first in range(0, shape[1], COLUMNS):
        last = min(first + COLUMNS, shape[1])
        errors = left.new_zeros(shape[0], last - first)
        for column in range(first, last):
            if column % group == 0:
                number, end = column // group, min(column + group, shape[1])
                values = left.new_zeros(shape[0], 1, sizes.group)
                weights = left.new_zeros(1, sizes.group)
                values[:, 0, : end - column], weights[0, : end - column] = left[:, column:end], importance[column:end]
                best = best_scales(values, format, "mse", weights)
                scales, zeros = (tensor[:, 0] for tensor in best)
                named["scales"][:, number] = stored_scales(scales[:, 0], format)
                if format.zero_point:
                    named["zeros"][:, number] = zeros[:, 0].to(format.zero_dtype)
                codes[:, column : column + sizes.group] = zeros  # columns of padding are 0
            steps = left[:, column : column + 1] / torch.where(scales == 0, 1.0, scales)
            chosen = (steps.round() + zeros).clamp(code.low, code.high)
            codes[:, column : column + 1] = chosen
            error = (left[:, column : column + 1] - (chosen - zeros) * scales) / spread[column, column]
            left[:, column:last] -= error * spread[column, column:last]
            errors[:, column - first] = error[:, 0]
        left[:, last:] -= errors @ spread[first:last, last:]
    named["codes"] = portable.pack_codes(format, codes)
    tensors = tuple(named[name] for name in format.tensor_names)
    return QTensor(tensors, format.name, group_size, shape, weight.dtype, activation=activation)


def _factor(products: torch.Tensor) -> torch.Tensor:
    """Returns the upper Cholesky factor of the inverse of damped ``products``, float32.

    Raises:
        FormatError: ``products`` are not finite, so that no damping makes them invertible.
    """
    wide = products.double()
    if not bool(wide.isfinite().all()):
        raise FormatError(
            "what the weight has multiplied in calibration is infinite or NaN, or its squares are: calibrate on "
            "batches whose activations are finite, or with another method than gptq"
        )
    diagonal = wide.diagonal()
    diagonal[diagonal == 0] = 1.0  # a column that nothing has multiplied
    damping = DAMPING * diagonal.mean()
    while True:
        factor, problem = torch.linalg.cholesky_ex(wide + damping * torch.eye(len(wide), device=wide.device).double())
        if not bool(problem):
            break
        damping *= 10
    inverse = torch.cholesky_inverse(factor)
    return torch.linalg.cholesky(inverse, upper=True).float()
