"""Gathers and decodes rows of a quantised weight where they lie: ``F.embedding`` as torch operations on its tensors.

``rows`` computes the address of each code in the layout of a kernel's backend, so that an embedding reads the codes
that a tied output layer multiplies. It is plain torch on integers and floats: eager torch runs it, and a trace makes
one kernel of it. ``ADDRESSES`` has a function for each layout; the layouts' modules document what they compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from jitgen.errors import UnsupportedError
from jitgen.quant.formats import Float, Format, Integer, Table, find, geometry
from jitgen.quant.layouts.planes import columns_of_unit
from jitgen.quant.token import Token

OUT_OF_RANGE = 1 << 40
"""A row that no weight has: a kernel on a CPU raises IndexError for it, as it does for every gather."""


PLAIN = ("rows", "blocks")
"""Layouts whose codes are in row-major order."""


def rows(tensors: Sequence[Tensor], token: Token, index: Tensor) -> Tensor:
    """Returns the rows that ``index`` (int32 or int64, any shape) numbers, ``[*index.shape, K]`` of the weight's dtype.

    Numbers are those of ``dequantize``: computed in float32 (float64 for that dtype) and rounded once.

    Raises:
        UnsupportedError: the weight is transposed, or of three dimensions, or has its columns in another order.
    """
    format = find(token.format)
    if token.transposed or token.experts is not None or format.ordered or token.layout not in (*ADDRESSES, *PLAIN):
        raise UnsupportedError(
            f"an embedding of a weight of {format.name} in the layout {token.layout!r} that is transposed, of three "
            "dimensions or has its columns in another order; dequantise it"
        )
    compute = torch.float64 if token.dtype == torch.float64 else torch.float32
    named = dict(zip(format.tensor_names, tensors, strict=True))
    sizes = geometry(token.group_size, token.weight_shape)
    number = index.long().unsqueeze(-1)
    # Blocks have rows of padding, and an embedding does not count from the end: both are out of range.
    row = torch.where((number >= 0) & (number < sizes.rows), number, OUT_OF_RANGE)
    column = torch.arange(sizes.columns, device=token.device)
    group = column // sizes.group

    def of_group(name: str) -> Tensor:
        inner = ((row & 7) << 1) + (row >> 3 & 1) if token.layout in ("mma", "mma8") else row & 15
        tensor = named[name]
        if token.layout == "rows":
            return tensor[row, group]
        if token.layout == "blocks":
            return tensor[row // (format.scale_rows or sizes.rows), group]
        return tensor[row >> 4, row & 15, group] if token.layout == "interleaved" else tensor[row >> 4, group, inner]

    if token.layout in PLAIN:
        values = named["codes"][row, column].to(compute)
    else:
        code = ADDRESSES[token.layout](format, named["codes"], sizes.padded_columns, row, column)
        values = _value(format, code, compute)
    if format.zero_point:
        values = values - of_group("zeros").to(compute)
    scales = _scale(format, of_group("scales"), compute)
    if format.tensor_scale:
        scales = scales * named["tensor_scale"][row >> 4, row & 15].to(compute)
    if format.smoothed:
        scales = scales * named["smoothing"][0, column].to(compute)
    return (values * scales).to(token.dtype)


# ------------------------------------------------------------------------------------------------------------ addresses
# Each returns the codes as unsigned integers (those in two's complement with a bias of half their range).


def _fields(format: Format, read: Callable[[int, int], tuple[Tensor, Tensor | int]]) -> Tensor:
    """Joins the codes of bit planes: ``read(width, first)`` returns what has a plane's bits, and the shift to them."""
    codes: Tensor | None = None
    for width, first in format.planes:
        word, shift = read(width, first)
        bits = (word.int() >> shift & ((1 << width) - 1)) << first
        codes = bits if codes is None else codes | bits
    assert codes is not None
    return codes


def _cpu(format: Format, codes: Tensor, columns: int, row: Tensor, column: Tensor) -> Tensor:
    block, inner = row >> 4, row & 15
    if format.tiled and format.bits == 4:
        nibble = (column >> 1 & 3) + ((column & 1) << 2)
        return codes[block, column >> 3, (inner << 2) + (nibble >> 1)].int() >> ((nibble & 1) << 2).int() & 15
    if format.tiled:
        byte = ((column & 1) << 1) + (column >> 1 & 1)
        return codes[block, column >> 2, (inner << 2) + byte].int() & 255
    unit = columns_of_unit(format)

    def read(width: int, first: int) -> tuple[Tensor, Tensor]:
        within, fields = column % unit, 32 // width
        field = within % fields
        byte = 2 * unit * first + ((within // fields * 16 + inner) << 2) + (field & 3)
        return codes[block, column // unit, byte], (width * (field >> 2)).int()

    return _fields(format, read)


def _biased(format: Format, codes: Tensor) -> Tensor:
    """Adds the bias to 8-bit codes in two's complement, which these layouts store without."""
    return codes ^ 128 if format.signed else codes


def _mma(format: Format, codes: Tensor, columns: int, row: Tensor, column: Tensor) -> Tensor:
    block, half = row >> 4, row >> 3 & 1
    lane = ((row & 7) << 2) + (column >> 1 & 3)
    pair, eighth = column & 1, column >> 3 & 1
    if format.tiled and format.bits == 4:
        byte = ((column >> 4 & 3) << 2) + eighth + (pair << 1)
        return codes[block, column >> 6, lane, byte].int() >> (half << 2).int() & 15
    if format.tiled:
        byte = ((column >> 4 & 1) << 3) + (eighth << 2) + (pair << 1) + half
        return _biased(format, codes[block, column >> 5, lane, byte].int() & 255)
    register = ((column >> 4 & 3) << 2) + (eighth << 1) + half

    def read(width: int, first: int) -> tuple[Tensor, Tensor]:
        fields = 16 // width
        bit = (pair << 4) + width * (register % fields)
        byte = (register // fields << 2) + (bit >> 3)
        if width == 8:  # a lane's 32 bytes are in two halves
            at = ((byte >> 4) * 32 + lane << 4) + (byte & 15)
        else:
            at = lane * width * 4 + byte
        return codes[block, column >> 6, at + 128 * first], (bit & 7).int()

    return _fields(format, read)


def _interleaved(format: Format, codes: Tensor, columns: int, row: Tensor, column: Tensor) -> Tensor:
    block, inner = row >> 4, row & 15
    step, eighth, thread, pair = column >> 4 & 1, column >> 3 & 1, column >> 1 & 3, column & 1
    if format.tiled and format.bits == 4:
        shift = (((step << 1) + eighth) << 2) + (pair << 4)
        return codes[block, inner, (column >> 5 << 2) + thread] >> shift.int() & 15
    if format.tiled:
        word = (column >> 5 << 3) + (thread << 1) + step
        return _biased(format, codes[block, inner, word] >> ((eighth + (pair << 1)) << 3).int() & 255)

    def read(width: int, first: int) -> tuple[Tensor, Tensor]:
        fields = 32 // width
        return codes[block, inner, columns * first // 32 + column // fields], (column % fields * width).int()

    return _fields(format, read)


def _mma8(format: Format, codes: Tensor, columns: int, row: Tensor, column: Tensor) -> Tensor:
    if not format.tiled or format.bits != 4:
        return _mma(format, codes, columns, row, column)
    within = column % 16  # column 4t + 2j + q is where "mma" has 8q + 2t + j
    stored = (within & 1) * 8 + (within >> 2) * 2 + (within >> 1 & 1)
    return _mma(format, codes, columns, row, column - within + stored)


ADDRESSES: dict[str, Callable[[Format, Tensor, int, Tensor, Tensor], Tensor]] = {
    "cpu": _cpu,
    "mma": _mma,
    "mma8": _mma8,
    "interleaved": _interleaved,
}
"""By layout, the function that reads the codes at ``row`` and ``column``, which broadcast; the weight has so many
padded columns."""


# --------------------------------------------------------------------------------------------------------------- values


def _value(format: Format, code: Tensor, compute: torch.dtype) -> Tensor:
    """Returns the values of codes; ``Format.values`` is the reference."""
    if isinstance(format.code, Integer):
        biased = -(1 << (format.bits - 1)) if format.signed else format.first
        values = code.to(compute)
        values = values * format.code.step if format.code.step != 1 else values
        return values + biased if biased else values
    if isinstance(format.code, Float):
        return _small_float(format.code, format.bits, code, compute)
    return _of_table(format.code, code, compute)


def _small_float(code: Float, bits: int, patterns: Tensor, compute: torch.dtype) -> Tensor:
    """Decodes a sign, an exponent and a mantissa: mantissa times a power of two, each factor and product exact."""
    exponent = patterns >> code.mantissa & ((1 << code.exponent) - 1)
    fraction = patterns & ((1 << code.mantissa) - 1)
    normal = torch.clamp(exponent, max=1)
    magnitude = (fraction + (normal << code.mantissa)).to(compute) * 2.0 ** (1 - code.bias - code.mantissa)
    power = exponent - normal
    for bit in range(code.exponent):
        magnitude = torch.where((power >> bit & 1) == 1, magnitude * 2.0 ** (1 << bit), magnitude)
    return torch.where((patterns >> (bits - 1) & 1) == 1, -magnitude, magnitude)


def _of_table(code: Table, patterns: Tensor, compute: torch.dtype) -> Tensor:
    """Looks codes up in a table by halves: the highest bit chooses between two."""

    def among(first: int, count: int) -> Tensor:
        if count == 1:
            return torch.full((), code.values[first], dtype=compute, device=patterns.device)
        half = count // 2
        return torch.where((patterns & half) != 0, among(first + half, half), among(first, half))

    return among(0, len(code.values))


def _scale(format: Format, scales: Tensor, compute: torch.dtype) -> Tensor:
    if format.scale == "e4m3":
        return _small_float(Float(4, 3, 7, "nan"), 8, scales.int(), compute)
    if format.scale != "e8m0":
        return scales.to(compute)
    # 2^(byte - 127) by its bits: 2^127 is the largest factor, and 2^-127, which is subnormal, comes last.
    power, product = scales.int(), torch.ones((), dtype=compute, device=scales.device)
    high = (power >> 7 & 1) == 1
    for bit in range(7):
        product = torch.where((power >> bit & 1) == 1, product * 2.0 ** (1 << bit), product)
    return torch.where(high, product * 2.0, product * 2.0**-64 * 2.0**-63)
