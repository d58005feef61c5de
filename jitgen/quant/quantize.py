"""Turns a weight into codes and scales with ``quantize``.

Three methods find a group's scale and zero-point; all of them take the error of the scale *as stored*, after rounding
to the format's kind of scales.

``"absmax"`` maps the largest magnitude to the largest code or, in formats with zero-points, the range of the values to
the range of the codes.

``"mse"`` tries several candidates and takes the one with the least squared error. In symmetric integer formats with one
more negative than positive code, some of them map the value of largest magnitude to the most negative code, with a
negative scale if that value is positive (the technique of llama.cpp's Q4_0). Every candidate is also tried with smaller
ranges (``SHRINK``), which clip the extremes for a finer step. For codes of few bits, and floating-point zero-points,
the best one is then improved by least squares: with the codes fixed, the best scale is ``sum(w v) / sum(v^2)`` (a step
of Lloyd's algorithm). Formats with kernels of their own keep the candidate.

``"hqq"`` fits the zero-points of a format that has them (Badri and Shaji, "Half-Quadratic Quantization of Large Machine
Learning Models"): with the scale of ``"absmax"`` it minimises ``|w - (q - z) s|^p``, p = 0.7, by alternating between a
generalised soft threshold of the error and the zero-point that is best in the mean.

``"mse"`` is the default of every format; ``docs/formats.md`` has the measured table that justifies it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch

from jitgen.errors import FormatError
from jitgen.quant import layouts
from jitgen.quant.activations import check_activation
from jitgen.quant.decode import decode_rows, row_chunks
from jitgen.quant.formats import (
    E8M0_BIAS,
    SCALES,
    Float,
    Format,
    Integer,
    check_group_size,
    check_matrices,
    find,
    geometry,
    round_up,
)
from jitgen.quant.layouts import Tensors, portable
from jitgen.quant.qtensor import QTensor

WEIGHT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
METHODS = ("absmax", "mse", "hqq")
SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8)
"""The ranges that are tried for codes of fewer than 8 bits, as fractions of the full range."""
SHRINK_8_BIT = (1.0, 0.996, 0.98)
"""The same for codes of 8 bits, whose step is so fine that clipping rarely reduces the error."""
SHRINK_4_BIT = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
"""The same for codes of 4 bits (MiniLM, int4, groups of 32: 21.35 dB; the best of twenty steps of 0.02 has 21.41)."""
SHRINK_FEW_BITS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
"""The same for codes of at most 3 bits, where clipping is most of the gain."""
COMPARED = 15
"""Bounds between values that are compared with each number in turn on a CPU; among more, and on a GPU, where each
comparison is a pass over memory, a number's place is searched."""
REFINED_BITS = 4
"""Codes of at most this many bits have their scales improved by least squares, and so do floating-point zero-points."""
REFINEMENTS = 3
"""Steps of least squares; each has new codes for the scale, and then a new scale for the codes."""
HQQ_STEPS, HQQ_POWER, HQQ_BETA, HQQ_GROWTH = 20, 0.7, 10.0, 1.01
"""The number of steps, p, the first weight of the quadratic term and its growth by step, as the authors' code has
them."""


def quantize(
    weight: torch.Tensor,
    format: str,
    group_size: int | None = None,
    *,
    layout: str | None = None,
    method: str = "mse",
    activation: str | None = None,
    input_scale: float | torch.Tensor | None = None,
    importance: torch.Tensor | None = None,
) -> QTensor:
    """Quantises ``weight``.

    Args:
        weight: ``[N, K]``, the orientation of ``nn.Linear``, in float64, float32, bfloat16 or float16, on any device.
            N and K may be any sizes, including 0; K is padded to whole groups. ``[experts, N, K]`` is as many
            matrices, of which ``weight[i]`` is one.
        format: a row of ``docs/formats.md``, such as ``"int4"`` (symmetric), ``"uint4"`` (with zero-points) or
            ``"mxfp4"``, perhaps with qualifiers.
        group_size: the number of consecutive columns that share a scale: 32, 64, 128 or another multiple of 32; None
            means one scale per row, or the group size of a format that has only one.
        layout: the memory layout of the result. The default is the portable one; a kernel converts it when it first
            takes the weight.
        method: how scales and zero-points are found: ``"absmax"``, ``"mse"`` or ``"hqq"`` (this module's docstring).
        activation: ``"int8"`` or ``"fp8_e4m3"`` has products quantise what they multiply with this weight: each row to
            codes and a scale, when it is multiplied, or with ``".block128"`` behind it each 128 columns of a row. The
            weight's codes must be numbers of that kind. None leaves activations as they are.
        input_scale: with ``activation``, the one scale of all activations, a number above 0: values beyond the largest
            code times this saturate. The format of the result is then ``".static"``.
        importance: of each column, [K]: the factor of its squared error where the method is ``"mse"``, such as the mean
            square of the activations that it multiplies.

    Returns:
        a ``QTensor`` of the weight's shape, dtype and device. It does not refer to ``weight``.

    Raises:
        FormatError: the weight is no floating-point tensor of two or three dimensions, or has values that are not
            finite, or there is no such format, group size, method or activation.
        UnsupportedError: there is no such layout.
    """
    row = find(format)
    group_size = check_group_size(group_size, row)
    check_method(method, row)
    check_activation(activation, row, group_size, weight.shape[-1] if isinstance(weight, torch.Tensor) else None)
    if input_scale is not None and activation is None:
        raise FormatError("input_scale is for activations that are quantised: pass activation='int8' or 'fp8_e4m3' too")
    target = layouts.find(layout or "portable").name
    _check(weight, row)
    experts = weight.shape[0] if weight.dim() == 3 else None
    with torch.no_grad():
        matrix = weight.detach()
        if experts is not None:
            matrix = (matrix if experts else matrix.new_zeros(1, *matrix.shape[1:])).flatten(0, 1)
        shape = (matrix.shape[0], matrix.shape[1])
        tensors = _encode(matrix, row, group_size, method, importance)
        tensors = layouts.convert(tensors, "portable", target, row, group_size, shape)
    facts = {"layout": target, "experts": experts, "activation": activation}
    made = QTensor(tensors, row.name, group_size, shape, weight.dtype, **facts)  # type: ignore[arg-type]
    return made if input_scale is None else made.with_input_scale(input_scale)


_EXTRAS = {
    "ordered": "quantize stores columns as they are",
    "smoothed": "the result's with_smoothing(...) takes factors of an activation's columns",
    "static": "input_scale=... has a weight keep a scale of activations",
}
"""What a weight has such a tensor by, in place of the qualifier of its format's name."""


def check_method(method: str, format: Format | None = None) -> None:
    """Raises FormatError, with the list of known names, unless ``method`` is one, and one for ``format``."""
    if method not in METHODS:
        raise FormatError(f"unknown method {method!r}; expected one of {', '.join(METHODS)}")
    if method == "hqq" and format is not None and not format.zero_point:
        raise FormatError(f"hqq fits zero-points, and {format.name} has none; use a uint format, or another method")


def sqnr(weight: torch.Tensor, quantized: QTensor) -> float:
    """Returns the signal-to-noise ratio in dB: 10 log10(sum w^2 / sum (w - dequantised w)^2); inf if there is no
    noise."""
    with torch.no_grad():
        plain = quantized.stored_in("portable")
        token = plain.token
        format, shape = find(token.format), token.weight_shape
        dense = weight.detach().reshape(shape)
        signal = noise = torch.zeros((), dtype=torch.float64, device=weight.device)
        for rows in row_chunks(*shape, weight.device):
            exact = dense[rows].double()
            decoded = decode_rows(format, token.group_size, shape, plain.tensors, rows, torch.float64)
            signal = signal + exact.square().sum()
            noise = noise + (exact - decoded).square().sum()
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
    if weight.dim() not in (2, 3):
        raise FormatError(
            f"the weight has {weight.dim()} dimensions, {tuple(weight.shape)}; quantize takes [N, K] as nn.Linear has "
            "it, or [experts, N, K]: reshape it"
        )
    if weight.dim() == 3:
        check_matrices(format, weight.shape[1])
    for qualifier, instead in _EXTRAS.items():
        if getattr(format, qualifier):
            raise FormatError(f"{instead}; use {format.stored.name}, without .{qualifier}")


def _encode(
    weight: torch.Tensor, format: Format, group_size: int | None, method: str, importance: torch.Tensor | None = None
) -> Tensors:
    """Encodes ``weight`` in the portable layout; FormatError if the format cannot represent it."""
    shape = (weight.shape[0], weight.shape[1])
    sizes = geometry(group_size, shape)
    compute = torch.float64 if weight.dtype == torch.float64 else torch.float32
    tensors = portable.empty(format, group_size, shape, weight.device)
    named = dict(zip(format.tensor_names, tensors, strict=True))
    finite = torch.ones((), dtype=torch.bool, device=weight.device)
    fits = finite
    factor = torch.ones((), dtype=compute, device=weight.device)
    if format.tensor_scale:
        factor = _tensor_scale(weight, format).to(compute)
        named["tensor_scale"].copy_(factor)
    if importance is not None:
        if importance.shape != shape[1:]:
            raise FormatError(f"importance is of {shape[1]} columns, and not {list(importance.shape)}")
        padding = importance.new_zeros(sizes.padded_columns - sizes.columns)
        importance = (
            torch.cat([importance, padding]).to(weight.device, compute).unflatten(-1, (sizes.groups, sizes.group))
        )
    for rows in _row_chunks(format, sizes.rows, sizes.padded_columns, weight.device):
        values = weight.new_zeros((rows.stop - rows.start, sizes.padded_columns), dtype=compute)
        values[:, : sizes.columns] = weight[rows]
        finite = finite & values.isfinite().all()
        grouped = values.unflatten(-1, (sizes.groups, sizes.group))
        shared, sharing = _shared(grouped, format)
        weights = importance.repeat(1, sharing) if importance is not None else None
        scales, zeros = best_scales(shared / factor if format.tensor_scale else shared, format, method, weights)
        fits = fits & _fits(scales, format)
        first = rows.start // format.scale_rows if format.scale_rows else 0
        at = slice(first, first + scales.shape[0])
        named["scales"][at] = stored_scales(scales.squeeze(-1), format)
        if format.zero_point:
            named["zeros"][at] = zeros.squeeze(-1).to(format.zero_dtype)
        if sharing > 1:
            scales, zeros = (tensor.repeat_interleave(sharing, 0)[: grouped.shape[0]] for tensor in (scales, zeros))
        codes = _codes(grouped, scales * factor if format.tensor_scale else scales, zeros, format)
        named["codes"][rows] = portable.pack_codes(format, codes.flatten(-2))
    if weight.device.type == "meta":
        return tensors
    if not finite:
        raise FormatError("the weight has values that are NaN or infinite; quantise one that is finite everywhere")
    if not fits:
        limit = min(format.scale_limit, SCALES[format.scale].largest)
        raise FormatError(
            f"the weight has values too large for {format.name}, whose scales of {format.scale_dtype} are below "
            f"{limit:g}; scale it down"
        )
    if format.scale == "float16" and not named["scales"].any() and weight.any():
        raise FormatError(
            f"the weight has values too small for {format.name}: every scale of float16 is 0; scale it up, or take a "
            "format with scales of bfloat16 or float32"
        )
    return tensors


def _tensor_scale(weight: torch.Tensor, format: Format) -> torch.Tensor:
    """Returns the float32 factor that makes the largest magnitude the largest code times the largest scale; 1 for
    zeros."""
    if not weight.numel():
        return torch.ones((), device=weight.device)
    factor = (weight.abs().amax().double() / (format.high * SCALES[format.scale].largest)).float()
    return torch.where((factor > 0) & factor.isfinite(), factor, 1.0)


def _row_chunks(format: Format, rows: int, columns: int, device: torch.device) -> list[slice]:
    """Cuts ``rows`` into slices; rows that share scales are in one of them."""
    chunks = row_chunks(rows, columns, device)
    if format.scale_rows == 1 or not chunks:
        return chunks
    step = round_up(chunks[0].stop, format.scale_rows) if format.scale_rows else rows
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _shared(grouped: torch.Tensor, format: Format) -> tuple[torch.Tensor, int]:
    """Returns the values that share a scale, [sets of rows, groups, values], and the number of rows that do."""
    if format.scale_rows == 1:
        return grouped, 1
    rows, groups, group = grouped.shape
    sharing = format.scale_rows or max(rows, 1)
    sets = -(-rows // sharing)
    whole = grouped.new_zeros(sets * sharing, groups, group)
    whole[:rows] = grouped
    return whole.view(sets, sharing, groups, group).transpose(1, 2).reshape(sets, groups, sharing * group), sharing


def _fits(scales: torch.Tensor, format: Format) -> torch.Tensor:
    limit = min(format.scale_limit, SCALES[format.scale].largest)
    magnitudes = scales.abs()
    return (magnitudes < limit if format.scale_limit < math.inf else magnitudes <= limit).all()


# -------------------------------------------------------------------------------------------------------------- codes


def _round(values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, format: Format) -> torch.Tensor:
    """Rounds ``values / scales + zeros`` to the nearest values of codes in use."""
    codes = values / torch.where(scales == 0, 1.0, scales)
    code = format.code
    if isinstance(code, Float) and codes.dtype == torch.float32:
        return _nearest_floats(codes, code, format.high)
    if not isinstance(code, Integer):
        return format.finite_values.to(values.device, values.dtype)[_nearest(codes, format)]
    if format.zeros == "float":
        return codes.add_(zeros).round_().clamp_(code.low, code.high)
    if code.step == 1:
        return codes.round_().add_(zeros).clamp_(code.low, code.high)
    return codes.sub_(code.low).div_(code.step).round_().mul_(code.step).add_(code.low).clamp_(code.low, code.high)


def _nearest(codes: torch.Tensor, format: Format) -> torch.Tensor:
    """Returns, for each number, the index of the nearest of ``format.finite_values``."""
    values = format.finite_values.to(codes.dtype)
    between = (values[1:] + values[:-1]) / 2
    if len(between) > COMPARED or codes.is_cuda:
        return torch.bucketize(codes, between.to(codes.device), out_int32=True)
    index = torch.zeros(codes.shape, dtype=torch.uint8, device=codes.device)
    for bound in between.tolist():
        index += codes > bound
    return index.int()


def _nearest_floats(codes: torch.Tensor, code: Float, high: float) -> torch.Tensor:
    """Rounds ``codes`` (float32) to the nearest floats of ``code``, ties to even; ``high`` is the largest.

    A number is rounded to a multiple of the distance of floats around it: its power of two, which its exponent bits
    are, times 2^-mantissa, and at least that of the subnormals.
    """
    codes = codes.clamp_(-high, high)
    distance = (codes.view(torch.int32) & 0x7F800000).view(torch.float32)
    distance = distance.mul_(2.0**-code.mantissa).clamp_(min=2.0 ** (1 - code.bias - code.mantissa))
    return codes.div_(distance).round_().mul_(distance)


def _float_patterns(values: torch.Tensor, code: Float, bits: int) -> torch.Tensor:
    """Returns the bit patterns, uint8, of float32 ``values`` that are floats of ``code``."""
    size = values.abs()
    normal = (size.view(torch.int32) >> (23 - code.mantissa)) - ((127 - code.bias) << code.mantissa)
    subnormal = (size * 2.0 ** (code.bias - 1 + code.mantissa)).int()
    magnitude = torch.where(size >= 2.0 ** (1 - code.bias), normal, subnormal)
    return (magnitude | (values < 0).int() << (bits - 1)).to(torch.uint8)


def _codes(values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, format: Format) -> torch.Tensor:
    """Returns the codes, one to an element, as ``portable.pack_codes`` takes them."""
    code = format.code
    if isinstance(code, Float) and values.dtype == torch.float32:
        return _float_patterns(_round(values, scales, zeros, format), code, format.bits)
    if not isinstance(code, Integer):
        rounded = _nearest(values / torch.where(scales == 0, 1.0, scales), format)
        return _patterns(format).to(values.device)[rounded]
    rounded = _round(values, scales, zeros, format)
    return rounded if code.step == 1 else rounded.sub_(code.low).div_(code.step)


@functools.cache
def _patterns(format: Format) -> torch.Tensor:
    """Returns the bit pattern of each of ``format.finite_values``, uint8; of the two zeros of a float the positive
    one."""
    values = format.values
    order = [int((values == value).nonzero()[0]) for value in format.finite_values]
    return torch.tensor(order, dtype=torch.uint8)


# ------------------------------------------------------------------------------------------------------------- scales


def stored_scales(scales: torch.Tensor, format: Format) -> torch.Tensor:
    """Returns ``scales``, numbers of the format's kind of scales, as they are stored."""
    if format.scale == "e8m0":
        return (torch.log2(scales).round() + E8M0_BIAS).clamp_(0, 2 * E8M0_BIAS).to(torch.uint8)
    if format.scale == "e4m3":
        return scales.to(torch.float8_e4m3fn).view(torch.uint8)
    return scales.to(format.scale_dtype)


def rounded_scales(scales: torch.Tensor, format: Format) -> torch.Tensor:
    """Rounds ``scales`` to the format's kind of scales."""
    if format.scale == "e8m0":
        return torch.exp2(torch.log2(scales).round().clamp(-E8M0_BIAS, 2 * E8M0_BIAS))
    if format.scale == "e4m3":
        largest = SCALES["e4m3"].largest
        return scales.clamp(-largest, largest).to(torch.float8_e4m3fn).to(scales.dtype)
    return scales.to(format.scale_dtype).to(scales.dtype)


def best_scales(
    values: torch.Tensor, format: Format, method: str, importance: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the stored scale and the zero-point for each group of ``values`` [rows, groups, group].

    Both are [rows, groups, 1], in the dtype of ``values``. ``importance`` [groups, group] has the factors of squared
    errors.
    """
    if not values.shape[-1]:
        zero = values.new_zeros((*values.shape[:-1], 1))
        return zero, zero
    # Errors are taken relative to the largest magnitude, so that their squares neither overflow nor underflow.
    magnitude = values.abs().amax(-1, keepdim=True)
    unit = torch.where(magnitude == 0, 1.0, magnitude)
    if method == "hqq":
        return _half_quadratic(values, unit, format)
    best: tuple[torch.Tensor, torch.Tensor] | None = None
    least = magnitude
    for scales, zeros in _tried(values, magnitude, format, method):
        difference = _round(values, scales, zeros, format).sub_(zeros).mul_(scales).sub_(values).div_(unit)
        squares = difference.square_()
        error = (squares if importance is None else squares.mul_(importance)).sum(-1, keepdim=True)
        if best is None:
            best, least = (scales, zeros), error
        else:
            better = error < least
            best = torch.where(better, scales, best[0]), torch.where(better, zeros, best[1])
            least = torch.where(better, error, least)
    assert best is not None
    if (
        method == "mse"
        and importance is None
        and not format.tiled
        and (format.bits <= REFINED_BITS or format.zeros == "float")
    ):
        return _refined(values, unit, *best, least, format)
    return best


def _tried(
    values: torch.Tensor, magnitude: torch.Tensor, format: Format, method: str
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields the candidates of a method."""
    candidates = _candidates(values, magnitude, format)
    if method == "mse":
        yield from candidates
    else:
        yield next(candidates)


def _refined(
    values: torch.Tensor,
    unit: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    least: torch.Tensor,
    format: Format,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Improves scales and floating-point zero-points by least squares, where that reduces the error."""
    normal = values / unit
    for _ in range(REFINEMENTS):
        codes = _round(values, scales, zeros, format)
        # A line w = s (q - z) through the pairs of code and value; a zero-point that is no float stays as it is.
        origin = codes.mean(-1, keepdim=True) if format.zeros == "float" else zeros
        chosen = codes - origin
        power = chosen.square().sum(-1, keepdim=True)
        slope = (normal * chosen).sum(-1, keepdim=True) / torch.where(power == 0, 1.0, power)
        fitted = rounded_scales(slope * unit, format)
        moved = zeros
        if format.zeros == "float":
            step = torch.where(fitted == 0, unit, fitted) / unit
            moved = _stored_zeros(origin - normal.mean(-1, keepdim=True) / step, format)
        difference = _round(values, fitted, moved, format).sub_(moved).mul_(fitted).sub_(values).div_(unit)
        error = difference.square_().sum(-1, keepdim=True)
        better = (error < least) & moved.isfinite() & (fitted != 0)
        scales, zeros = torch.where(better, fitted, scales), torch.where(better, moved, zeros)
        least = torch.where(better, error, least)
    return scales, zeros


def _half_quadratic(values: torch.Tensor, unit: torch.Tensor, format: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Fits HQQ's zero-points for the scales of ``"absmax"``; see this module's docstring."""
    code = format.code
    assert isinstance(code, Integer)
    low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    spread = high / code.high - low / code.high
    spread = torch.where(spread == 0, high.abs() / code.high, spread)
    scales = rounded_scales(spread, format)
    step = torch.where(scales == 0, 1.0, scales)
    zeros = _stored_zeros(-low / step, format)
    best, least, beta = zeros, None, HQQ_BETA
    for _ in range(HQQ_STEPS):
        codes = (values / step + zeros).round_().clamp_(code.low, code.high)
        error = (values - (codes - zeros) * scales) / unit
        total = error.abs().pow_(HQQ_POWER).sum(-1, keepdim=True)
        if least is None:
            least = total
        else:
            best, least = torch.where(total < least, zeros, best), torch.minimum(total, least)
        size = error.abs()
        shrunk = error.sign() * (size - size.clamp(min=1e-8).pow(HQQ_POWER - 1) / beta).clamp_(min=0)
        zeros = _stored_zeros((codes - (values - shrunk * unit) / step).mean(-1, keepdim=True), format)
        beta *= HQQ_GROWTH
    return scales, best


def _stored_zeros(zeros: torch.Tensor, format: Format) -> torch.Tensor:
    """Returns ``zeros`` as the format stores them."""
    if format.zeros == "float":
        return zeros.to(format.zero_dtype).to(zeros.dtype)
    return zeros.round().clamp_(0, format.high)


def _candidates(
    values: torch.Tensor, magnitude: torch.Tensor, format: Format
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields pairs of stored scales and zero-points to try. The first one is that of ``"absmax"``."""
    shrinks = {8: SHRINK_8_BIT, 7: SHRINK, 6: SHRINK, 5: SHRINK, 4: SHRINK_4_BIT}
    fractions = shrinks.get(format.bits, SHRINK_FEW_BITS)
    no_zeros = torch.zeros_like(magnitude)
    code = format.code
    if format.scale == "e8m0":
        # The nearest powers of two that clip nothing, and that clip the largest magnitude.
        exact = torch.log2(torch.where(magnitude == 0, 1.0, magnitude) / format.high)
        exponent = torch.where(magnitude == 0, -float(E8M0_BIAS), exact.ceil())
        for less in (0, 1):
            yield torch.exp2((exponent - less).clamp_(-E8M0_BIAS, 2 * E8M0_BIAS)), no_zeros
        return
    if format.zero_point:
        low, high = values.amin(-1, keepdim=True).clamp_(max=0), values.amax(-1, keepdim=True).clamp_(min=0)
        for fraction in fractions:
            scales = rounded_scales((high / format.high - low / format.high) * fraction, format)
            zeros = (low / torch.where(scales == 0, 1.0, scales)).mul_(-fraction)
            yield scales, _stored_zeros(zeros, format)
        return
    if isinstance(code, Integer) and code.step != 1:
        # The best scale of two values that differ in their sign alone is the mean magnitude.
        yield rounded_scales(values.abs().mean(-1, keepdim=True), format), no_zeros
        return
    for fraction in fractions:
        yield rounded_scales(magnitude * (fraction / format.high), format), no_zeros
    if isinstance(code, Integer) and -code.low > code.high:
        extreme = torch.where(values.amax(-1, keepdim=True) == magnitude, magnitude, -magnitude)
        for fraction in fractions:
            yield rounded_scales(extreme * (fraction / code.low), format), no_zeros
