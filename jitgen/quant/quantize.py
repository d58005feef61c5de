"""``quantize`` turns a weight into codes and scales, by rounding to nearest.

Several candidate scales are tried for each group, and the one with the least squared error is chosen. The error is that
of the scale *as stored*, after rounding to the format's scale dtype. A candidate maps the largest magnitude to the
largest code or, in formats with zero-points, the range of the values to the range of the codes. In symmetric formats
with one more negative than positive code, others map the value of largest magnitude to the most negative code, with a
negative scale if that value is positive (the technique of llama.cpp's Q4_0). Every candidate is also tried with smaller
ranges (``SHRINK``), which clip the extremes for a finer step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from jitgen.errors import FormatError
from jitgen.quant import layouts
from jitgen.quant.decode import decode_rows, row_chunks
from jitgen.quant.formats import Format, check_group_size, find, geometry
from jitgen.quant.layouts import Tensors, portable
from jitgen.quant.qtensor import QTensor

WEIGHT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8)
"""The ranges that are tried for codes of fewer than 8 bits, as fractions of the full range."""
SHRINK_8_BIT = (1.0, 0.98)
"""The same for codes of 8 bits, whose step is so fine that clipping rarely reduces the error."""


def quantize(weight: torch.Tensor, format: str, group_size: int | None = None, *, layout: str | None = None) -> QTensor:
    """Quantise ``weight``.

    Args:
        weight: ``[N, K]``, the orientation of ``nn.Linear``, in float64, float32, bfloat16 or float16, on any device.
            N and K may be any sizes, including 0; K is padded to whole groups.
        format: ``"int8"``, ``"int4"`` (symmetric) or ``"uint4"`` (with zero-points).
        group_size: the number of consecutive columns that share a scale: 32, 64, 128 or another multiple of 32; None
            means one scale per row.
        layout: the memory layout of the result. The default is the portable one; a kernel converts it when it first
            takes the weight.

    Returns:
        a ``QTensor`` of the weight's shape, dtype and device. It does not refer to ``weight``.

    Raises:
        FormatError: the weight is not a 2-D floating-point tensor or has values that are not finite, or there is no
            such format or group size. UnsupportedError: there is no such layout.
    """
    row = find(format)
    check_group_size(group_size)
    target = layouts.find(layout or "portable").name
    _check(weight, row)
    shape = (weight.shape[0], weight.shape[1])
    with torch.no_grad():
        tensors = _encode(weight.detach(), row, group_size)
        tensors = layouts.convert(tensors, "portable", target, row, group_size, shape)
    return QTensor(tensors, row.name, group_size, shape, weight.dtype, layout=target)


def sqnr(weight: torch.Tensor, quantized: QTensor) -> float:
    """The signal-to-noise ratio in dB: 10 log10(sum w^2 / sum (w - dequantised w)^2); inf if there is no noise."""
    with torch.no_grad():
        plain = quantized.with_layout("portable")
        format, shape = find(plain.format), plain.token.weight_shape
        dense = weight.detach()
        signal = noise = torch.zeros((), dtype=torch.float64, device=weight.device)
        for rows in row_chunks(*shape, weight.device):
            exact = dense[rows].double()
            found = decode_rows(
                format, plain.group_size, shape, tuple(tensor[rows] for tensor in plain.tensors), torch.float64
            )
            signal = signal + exact.square().sum()
            noise = noise + (exact - found).square().sum()
    ratio = float(signal) / float(noise) if float(noise) else math.inf
    return 10 * math.log10(ratio) if ratio else -math.inf


def _check(weight: torch.Tensor, format: Format) -> None:
    if isinstance(weight, QTensor):
        raise FormatError(f"the weight is quantised already, as {weight!r}; call .dequantize() on it first")
    if not isinstance(weight, torch.Tensor):
        raise FormatError(f"quantize takes a torch.Tensor, not {type(weight).__name__}")
    if weight.dtype not in WEIGHT_DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in WEIGHT_DTYPES)
        raise FormatError(f"the weight is of {weight.dtype}; quantize takes {names}: convert it with .to() first")
    if weight.layout != torch.strided:
        raise FormatError(f"the weight is of layout {weight.layout}; quantize takes strided ones: .to_dense() it first")
    if weight.dim() != 2:
        raise FormatError(
            f"the weight has {weight.dim()} dimensions, {tuple(weight.shape)}; quantize takes [N, K] as nn.Linear has "
            "it: reshape it, or quantise each matrix of a batch"
        )


def _encode(weight: torch.Tensor, format: Format, group_size: int | None) -> Tensors:
    """``weight`` in the portable layout; FormatError if the format cannot represent it."""
    shape = (weight.shape[0], weight.shape[1])
    sizes = geometry(group_size, shape)
    compute = torch.float64 if weight.dtype == torch.float64 else torch.float32
    tensors = portable.empty(format, group_size, shape, weight.device)
    finite = torch.ones((), dtype=torch.bool, device=weight.device)
    fits = finite
    for rows in row_chunks(sizes.rows, sizes.padded_columns, weight.device):
        values = weight.new_zeros((rows.stop - rows.start, sizes.padded_columns), dtype=compute)
        values[:, : sizes.columns] = weight[rows]
        finite = finite & values.isfinite().all()
        grouped = values.unflatten(-1, (sizes.groups, sizes.group))
        scales, zeros = _best_scales(grouped, format)
        fits = fits & (scales.abs() < format.scale_limit).all()
        codes = _round(grouped, scales, zeros, format)
        tensors[0][rows] = portable.pack_codes(format, codes.flatten(-2))
        tensors[1][rows] = scales.squeeze(-1)
        if format.zero_point:
            tensors[2][rows] = zeros.squeeze(-1)
    if weight.device.type == "meta":
        return tensors
    if not finite:
        raise FormatError("the weight has values that are NaN or infinite; quantise one that is finite everywhere")
    if not fits:
        raise FormatError(
            f"the weight has values too large for {format.name}, whose scales of {format.scale_dtype} are below "
            f"{format.scale_limit:g}; scale it down"
        )
    return tensors


def _round(values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, format: Format) -> torch.Tensor:
    """The codes in use that are nearest to ``values / scales + zeros``, as floats."""
    codes = values / torch.where(scales == 0, 1.0, scales)
    return codes.round_().add_(zeros).clamp_(format.low, format.high)


def _best_scales(values: torch.Tensor, format: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """For each group of ``values`` [rows, groups, group], the scale, as stored, and zero-point of the best candidate.

    Both are [rows, groups, 1], in the dtype of ``values``.
    """
    if not values.shape[-1]:
        zero = values.new_zeros((*values.shape[:-1], 1))
        return zero, zero
    # Errors are taken relative to the largest magnitude, so that their squares neither overflow nor underflow.
    magnitude = values.abs().amax(-1, keepdim=True)
    unit = torch.where(magnitude == 0, 1.0, magnitude)
    best: tuple[torch.Tensor, torch.Tensor] | None = None
    least = magnitude
    for scales, zeros in _candidates(values, magnitude, format):
        difference = _round(values, scales, zeros, format).sub_(zeros).mul_(scales).sub_(values).div_(unit)
        error = difference.square_().sum(-1, keepdim=True)
        if best is None:
            best, least = (scales, zeros), error
        else:
            better = error < least
            best = torch.where(better, scales, best[0]), torch.where(better, zeros, best[1])
            least = torch.where(better, error, least)
    assert best is not None
    return best


def _candidates(
    values: torch.Tensor, magnitude: torch.Tensor, format: Format
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The candidates: pairs of scales, as stored, and zero-points."""

    def stored(scales: torch.Tensor) -> torch.Tensor:
        return scales.to(format.scale_dtype).to(values.dtype)

    fractions = SHRINK if format.bits < 8 else SHRINK_8_BIT
    if format.zero_point:
        low, high = values.amin(-1, keepdim=True).clamp_(max=0), values.amax(-1, keepdim=True).clamp_(min=0)
        for fraction in fractions:
            scales = stored((high / format.high - low / format.high) * fraction)
            zeros = (low / torch.where(scales == 0, 1.0, scales)).mul_(-fraction).round_()
            yield scales, zeros.clamp_(format.low, format.high)
        return
    no_zeros = torch.zeros_like(magnitude)
    for fraction in fractions:
        yield stored(magnitude * (fraction / format.high)), no_zeros
    if -format.low > format.high:
        extreme = torch.where(values.amax(-1, keepdim=True) == magnitude, magnitude, -magnitude)
        for fraction in fractions:
            yield stored(extreme * (fraction / format.low)), no_zeros
