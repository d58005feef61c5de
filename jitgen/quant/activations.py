"""Quantises the activations of products with quantised weights, as ``quantize(..., activation="int8")`` asks for.

An activation becomes codes, int8 from -127 to 127 or float8_e4m3fn, and float32 scales. By default each row (a token)
has a scale of its own, its largest magnitude over the largest code. ``"fp8_e4m3.block128"`` has one for every 128
columns of a row, and ``"mxfp8"`` one that is a power of two for every 32. ``"fp8_e4m3.most1200"`` bounds the magnitude
that a row's scale is for, here by 1200, and larger values saturate (FBGEMM's ``activation_scale_ub``). With a weight of
a format that is ``.static`` the scale is a tensor of the weight, found by calibration, and values beyond the largest
code times the scale saturate.
With one that is ``.smoothed`` an activation's columns are multiplied by a tensor of the weight first, whose columns
were divided by it: SmoothQuant's factors, where whatever returns the activation cannot take them.

The sum of products of codes over a group of the weight, which for int8 is exact, is multiplied by the group's scale;
groups are added up, and the total is multiplied by the row's scale, in float32. The formulas here are plain torch,
which the reference runs and a trace turns into kernels.

Gradients pass straight through: they are those of the product with the activation as it was.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace

import torch

from jitgen.errors import FormatError
from jitgen.quant.codes import BLOCK, Code
from jitgen.quant.formats import Float, Format, Integer

MOST_COLUMNS = 2**16
"""The largest group of columns: sums of so many products of codes are int32."""
SMALLEST_SCALE = 2.0**-126
"""The smallest scale, of which the reciprocal is finite: rows below it lose bits, and one of zeros has it."""


@dataclass(frozen=True)
class Activation:
    """Describes a kind of quantised activations.

    Attributes:
        name: what ``quantize`` takes.
        dtype: of the codes.
        block: the number of columns that share a scale; None for a whole row.
        powers: whether scales are powers of two.
        most: the largest magnitude that a scale is for, beyond which values saturate; None for no bound.
    """

    name: str
    dtype: torch.dtype
    block: int | None = None
    powers: bool = False
    most: float | None = None

    @property
    def is_integer(self) -> bool:
        return self.dtype == torch.int8

    @property
    def largest(self) -> float:
        """Returns the largest code, and the magnitude of the least one."""
        return float(Code(self.dtype).largest)


MX_BLOCK = 32
"""Columns of a row that share a scale in the formats of OCP's Microscaling (MX) specification."""
ACTIVATIONS = {
    kind.name: kind
    for kind in (
        Activation("int8", torch.int8),
        Activation("fp8_e4m3", torch.float8_e4m3fn),
        Activation(f"int8.block{BLOCK}", torch.int8, BLOCK),
        Activation(f"fp8_e4m3.block{BLOCK}", torch.float8_e4m3fn, BLOCK),
        Activation(f"fp8_e4m3.block{BLOCK}.powers", torch.float8_e4m3fn, BLOCK, powers=True),
        Activation("mxfp8", torch.float8_e4m3fn, MX_BLOCK, powers=True),
    )
}
BOUND = ".most"
"""What follows the name of a kind with a scale for each row, with a number behind it, where that bounds its scales."""


_NUMBER = re.compile(r"(?=[0-9.]*[1-9])[0-9]+(\.[0-9]+)?(e[+-]?[0-9]{1,2})?")
"""A number above 0, as ``bounded`` writes it."""


@functools.lru_cache(maxsize=256)
def kind_of(name: str) -> Activation:
    """Returns the kind of activations called ``name``.

    Raises:
        FormatError: there is none.
    """
    base, separator, most = name.partition(BOUND) if isinstance(name, str) else (name, "", "")
    kind = ACTIVATIONS.get(base)
    if kind is not None and separator and kind.block is None and _NUMBER.fullmatch(most):
        kind = replace(kind, name=name, most=float(most))
    elif separator:
        kind = None
    if kind is None:
        raise FormatError(
            f"unknown activation {name!r}; expected None, which leaves activations as they are, or "
            f"{', '.join(map(repr, ACTIVATIONS))}"
        )
    return kind


def bounded(kind: str, most: float) -> str:
    """Returns the name of ``kind`` with scales for magnitudes up to ``most``."""
    return f"{kind}{BOUND}{most:.9g}"


BLOCKS_OF_ROWS = frozenset({BLOCK, MX_BLOCK})
"""Elements of a row that share a scale, where rows have several."""


def check_activation(
    activation: str | None, format: Format, group_size: int | None, columns: int | None = None
) -> str | None:
    """Returns ``activation`` if products of weights of ``format`` may quantise theirs so. ``columns`` is K, if known.

    Raises:
        FormatError: there is no such kind of activation, or the weight's codes are no numbers of it.
    """
    if activation is None:
        return None
    kind = kind_of(activation if isinstance(activation, str) else repr(activation))
    if not _are_codes_of(format.stored, kind.is_integer):
        such = "int8, int4 or uint4" if kind.is_integer else "fp8_e4m3, int4 or uint4"
        raise FormatError(
            f"activation={activation!r} multiplies codes of {kind.dtype} by codes of the weight, and not all of those "
            f"of {format.name} are numbers of {kind.dtype}; take such as {such}, or leave the activation as it is"
        )
    if group_size is not None and group_size > MOST_COLUMNS:
        raise FormatError(f"activation={activation!r} takes groups of at most {MOST_COLUMNS} columns, not {group_size}")
    if kind.block and format.static:
        raise FormatError(f"activation={activation!r} has a scale for each block, and {format.name} one for all")
    if format.ordered and kind.block:
        raise FormatError(f"activation={activation!r} has blocks of columns, and {format.name} has columns in an order")
    if kind.block and columns is not None and columns % kind.block:
        of_rows = next(one.name for one in ACTIVATIONS.values() if one.dtype == kind.dtype and one.block is None)
        raise FormatError(
            f"activation={activation!r} has blocks of {kind.block} columns, and the weight has {columns}, no multiple "
            f"of it; take {of_rows!r}, which has a scale for each row"
        )
    return activation


@functools.cache
def _are_codes_of(format: Format, is_integer: bool) -> bool:
    """Returns whether every code of ``format`` less every zero-point is an int8, or a float8_e4m3fn."""
    if format.zeros == "float":
        return False
    if is_integer:
        if not isinstance(format.code, Integer):
            return False
        most = format.high - format.low if format.zero_point else max(-format.low, format.high)
        return most <= 127 or (not format.zero_point and format.low >= -128 and format.high <= 127)
    if isinstance(format.code, Float):
        values = format.finite_values
    elif isinstance(format.code, Integer):
        reach = int(format.high - format.low) if format.zero_point else 0
        values = torch.arange(-reach, reach + 1).double() if reach else format.finite_values
    else:
        return False
    return bool((values.to(torch.float8_e4m3fn).double() == values).all())


def smoothed(x: torch.Tensor, smoothing: torch.Tensor) -> torch.Tensor:
    """Returns ``x`` (..., K) with its columns multiplied by ``smoothing``, (1, K), of its dtype."""
    return (x * smoothing.squeeze(0)).to(x.dtype)


def scales_of(x: torch.Tensor, kind: Activation, by_row: bool = True) -> torch.Tensor:
    """Returns the scale of each row of ``x`` (..., K), float32 (..., 1), or of each of its blocks (..., K / block). Not
    ``by_row``, all rows (rows, K) share one, (1, 1)."""
    wide = x.float().abs()
    if kind.block:
        largest = wide.unflatten(-1, (-1, kind.block)).amax(-1)
    else:
        largest = wide.amax(-1, keepdim=True)
    if not by_row:
        largest = largest.amax(0, keepdim=True)
    if kind.most is not None:
        largest = largest.clamp(max=kind.most)
    # A product, since torch's quotients by a number are rounded otherwise on a GPU than on a CPU.
    scales = (largest * (1 / kind.largest)).clamp(min=SMALLEST_SCALE)
    return scales.log2().ceil().exp2() if kind.powers else scales


def codes_of(x: torch.Tensor, scales: torch.Tensor, kind: Activation, static: bool = False) -> torch.Tensor:
    """Returns the codes of ``x``: x times the reciprocal of the scale, which is computed once. With a static or a
    bounded scale they saturate; by any other of its own a row has none beyond the largest."""
    wide, inverse = x.float(), scales.reciprocal()
    if kind.block:
        steps = (wide.unflatten(-1, (-1, kind.block)) * inverse.unsqueeze(-1)).flatten(-2)
    else:
        steps = wide * inverse
    if kind.is_integer:
        steps = steps.round()
    saturates = static or kind.most is not None
    return (steps.clamp(-kind.largest, kind.largest) if saturates else steps).to(kind.dtype)


def values_of(codes: torch.Tensor, scales: torch.Tensor, kind: Activation) -> torch.Tensor:
    """Returns what codes stand for, in float32."""
    if kind.block:
        return (codes.float().unflatten(-1, (-1, kind.block)) * scales.unsqueeze(-1)).flatten(-2)
    return codes.float() * scales


def quantized(x: torch.Tensor, activation: str, input_scale: torch.Tensor | None = None) -> torch.Tensor:
    """Returns ``x`` as its codes and scales have it, of its dtype: what a product with such a weight multiplies.

    ``input_scale``: of a static weight.
    """
    if not x.shape[-1]:
        return x
    wide, kind = x.float(), kind_of(activation)
    scales = scales_of(wide, kind) if input_scale is None else input_scale.reshape(1)
    values = values_of(codes_of(wide, scales, kind, input_scale is not None), scales, kind)
    return values.to(torch.promote_types(x.dtype, torch.float32))


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    input_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the product with the dense ``weight`` (N, K) in torch: the reference of the kernels."""
    rounded = quantized(x, activation, input_scale)
    product = torch.nn.functional.linear(rounded, weight.to(rounded.dtype)).to(x.dtype)
    return product if bias is None else product + bias
