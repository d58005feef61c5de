"""``quantize``: a weight becomes codes and scales, rounded to nearest.

Each group's scale is the candidate that gives the least squared error *as stored*, that is after rounding to the
format's scale dtype. Candidates map the largest magnitude to the largest code, or, where there is one more negative
code than positive ones, the value of largest magnitude to that code (llama.cpp's Q4_0: the scale may be negative); and
ranges a few percent smaller, which clip the extremes for a finer step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from jitgen.errors import FormatError
from jitgen.quant import layouts
from jitgen.quant.decode import decode_rows, row_chunks
from jitgen.quant.formats import Format, check_group_size, find, geometry
from jitgen.quant.layouts import Parts, portable
from jitgen.quant.qtensor import QTensor

WEIGHT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Ranges that are tried, as fractions of the whole."""
SHRINK_8_BIT = (1.0, 0.98)
"""With 8 bits the step is so fine that clipping costs more than it gains, but for odd groups."""


def quantize(weight: torch.Tensor, format: str, group_size: int | None = None, *, layout: str | None = None) -> QTensor:
    """Quantise a weight.

    Args:
        weight: ``[N, K]`` (``nn.Linear``'s orientation), float64, float32, bfloat16 or float16, on any device. Any N
            and K, 0 included; K is padded to whole groups.
        format: ``"int8"``, ``"int4"`` (symmetric) or ``"uint4"`` (with zero-points).
        group_size: consecutive columns that share a scale: 32, 64, 128 or another multiple of 32; None for one scale
            per row.
        layout: how the codes lie; the default is the portable one, which every kernel's layout is made from.

    Returns:
        a ``QTensor`` of the weight's shape, dtype and device. The weight is read, never kept.

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
        parts = _encode(weight.detach(), row, group_size)
        parts = layouts.convert(parts, "portable", target, row, group_size, shape)
    return QTensor(parts, row.name, group_size, shape, weight.dtype, layout=target)


def sqnr(weight: torch.Tensor, quantized: QTensor) -> float:
    """Signal to quantisation noise in dB: 10 log10(sum w^2 / sum (w - dequantised w)^2); inf without noise."""
    with torch.no_grad():
        plain = quantized.with_layout("portable")
        format, shape = find(plain.format), plain.token.weight_shape
        dense = weight.detach()
        signal = noise = torch.zeros((), dtype=torch.float64, device=weight.device)
        for rows in row_chunks(*shape, weight.device):
            exact = dense[rows].double()
            found = decode_rows(
                format, plain.group_size, shape, tuple(part[rows] for part in plain.parts), torch.float64
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


def _encode(weight: torch.Tensor, format: Format, group_size: int | None) -> Parts:
    shape = (weight.shape[0], weight.shape[1])
    sizes = geometry(group_size, shape)
    compute = torch.float64 if weight.dtype == torch.float64 else torch.float32
    parts = portable.empty(format, group_size, shape, weight.device)
    finite = torch.ones((), dtype=torch.bool, device=weight.device)
    fits = finite
    for rows in row_chunks(sizes.rows, sizes.padded_columns, weight.device):
        values = weight.new_zeros((rows.stop - rows.start, sizes.padded_columns), dtype=compute)
        values[:, : sizes.columns] = weight[rows]
        finite = finite & values.isfinite().all()
        grouped = values.unflatten(-1, (sizes.groups, sizes.group))
        scales, zeros = _best(grouped, format)
        fits = fits & (scales.abs() < format.scale_limit).all()
        codes = _round(grouped, scales, zeros, format)
        parts[0][rows] = portable.pack_codes(format, codes.flatten(-2))
        parts[1][rows] = scales.squeeze(-1)
        if format.zero_point:
            parts[2][rows] = zeros.squeeze(-1)
    if weight.device.type == "meta":
        return parts
    if not finite:
        raise FormatError("the weight has values that are NaN or infinite; quantise one that is finite everywhere")
    if not fits:
        raise FormatError(
            f"the weight has values too large for {format.name}, whose scales of {format.scale_dtype} are below "
            f"{format.scale_limit:g}; scale it down"
        )
    return parts


def _round(values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, format: Format) -> torch.Tensor:
    """The codes nearest to ``values``, as floats."""
    codes = values / torch.where(scales == 0, 1.0, scales)
    return codes.round_().add_(zeros).clamp_(format.low, format.high)


def _best(values: torch.Tensor, format: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Per group of ``values`` [rows, groups, group]: the best candidate's scale, as stored, and zero-point.

    Both are [rows, groups, 1], of the dtype of ``values``.
    """
    if not values.shape[-1]:
        nothing = values.new_zeros((*values.shape[:-1], 1))
        return nothing, nothing
    # Relative to the largest magnitude, so that squares neither overflow nor vanish.
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
    """Pairs of scales, as stored, and zero-points."""

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
    none = torch.zeros_like(magnitude)
    for fraction in fractions:
        yield stored(magnitude * (fraction / format.high)), none
    if -format.low > format.high:
        extreme = torch.where(values.amax(-1, keepdim=True) == magnitude, magnitude, -magnitude)
        for fraction in fractions:
            yield stored(extreme * (fraction / format.low)), none
