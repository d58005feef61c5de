"""Defines the formats of quantised weights: what a code is, what a scale is, and how many weights share a scale.

A weight W[N, K] has a code per element and, for each row and each group of ``group_size`` consecutive columns, a scale
and in some formats a zero-point::

    W[n, k] = (value(code[n, k]) - zero[n, k // group_size]) * scale[n, k // group_size] * tensor_scale

``FORMATS`` is the one table of formats. How codes are packed, checked, quantised, decoded by each dialect's kernels and
documented (``docs/formats.md``) follows from a row. A code is an integer, a small float or an index into a table of
values (``Integer``, ``Float``, ``Table``); a new format of one of these kinds is a row, and a new kind is a class here
and a function in each of ``templates/*/include``, with the reference ``Format.values`` beside them.

A row may be varied by *qualifiers* after its name, each after a dot: the kind of the scales (``"int4.float16"``),
floating-point zero-points (``"uint4.floatzeros"``), and scales that several rows share (``"fp8_e4m3.rows128"`` with
groups of 128 for blocks of 128 x 128, ``"fp8_e4m3.tensor"`` for one scale). ``"uint4.ordered"`` has its columns in
another order, which is stored beside them: GPTQ's act-order puts the columns of a group next to one another.
``"int8.smoothed"`` has factors of an activation's columns stored beside it, and ``"int8.static"`` the scale of its
activations (``quant/activations.py``).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from jitgen.errors import FormatError

GROUP_MULTIPLE = 32
"""Every group size is a multiple of this many columns, so that all codes of a 32-bit word belong to one group."""
SMALL_GROUP_MULTIPLE = 16
"""The same for formats in bit planes of at least 2 bits, of which a word holds at most 16 codes."""
COMMON_GROUP_SIZES = (32, 64, 128)
"""The group sizes, in columns, that the message of an invalid one suggests."""
ROW_MULTIPLE = 64
"""With one scale per row, K is padded to a multiple of this many columns."""
WHOLE_TENSOR = 0
"""The value of ``Format.scale_rows`` for one scale that all rows share."""
TENSOR_NAMES = ("codes", "scales", "zeros", "tensor_scale", "order", "smoothing", "input_scale")
"""The names of all tensors that weights of some format consist of."""


@dataclass(frozen=True)
class Integer:
    """Describes codes that are integers ``low`` to ``high``, ``step`` apart.

    With a ``step`` of 1 a code is stored in two's complement where ``low`` is negative, and unsigned otherwise. With
    another step the code is the number of steps from ``low``.
    """

    low: int
    high: int
    step: int = 1


@dataclass(frozen=True)
class Float:
    """Describes codes that are floats: a sign, ``exponent`` bits and ``mantissa`` bits, with subnormals.

    Attributes:
        bias: of the exponent.
        specials: what the codes with the largest magnitudes mean: ``"none"`` (numbers, as in the OCP MX formats of 6
            and 4 bits), ``"nan"`` (the largest is NaN, as in e4m3fn) or ``"ieee"`` (infinity and NaN, as in e5m2).
    """

    exponent: int
    mantissa: int
    bias: int
    specials: str = "none"


@dataclass(frozen=True)
class Table:
    """Describes codes that are indices into ``values``, which ascend."""

    values: tuple[float, ...]


@dataclass(frozen=True)
class Scale:
    """Describes a kind of scales.

    Attributes:
        dtype: in which scales are stored; uint8 for those that are bytes: e8m0 (a power of two, the byte is its
            exponent plus 127) and e4m3 (an fp8 float).
        largest: the largest scale.
        signed: whether a scale may be negative or 0.
    """

    name: str
    dtype: torch.dtype
    largest: float
    signed: bool = True


SCALES: dict[str, Scale] = {
    row.name: row
    for row in (
        Scale("float32", torch.float32, torch.finfo(torch.float32).max),
        Scale("bfloat16", torch.bfloat16, torch.finfo(torch.bfloat16).max),
        Scale("float16", torch.float16, torch.finfo(torch.float16).max),
        Scale("e8m0", torch.uint8, 2.0**127, signed=False),
        Scale("e4m3", torch.uint8, 448.0),
    )
}
E8M0_BIAS = 127
E8M0_NAN = 255


@dataclass(frozen=True)
class Format:
    """Describes one format.

    Attributes:
        name: the name that ``jitgen.quantize`` takes, qualifiers included.
        bits: the width of a code.
        code: what a code means.
        scale: the kind of its scales.
        zeros: ``"none"``, ``"integer"`` (stored as uint8, in the range of the codes) or ``"float"`` (stored in the
            dtype of the scales). In formats without them the zero-point is 0 and is not stored.
        group_size: the only group size there is, in columns; None where any is allowed.
        tensor_scale: whether there is a float32 factor for the whole weight besides.
        scale_rows: rows that share a scale: 1, 128, or ``WHOLE_TENSOR``.
        scale_limit: the magnitude of every scale is below this. Kernels rely on it: some decode a code as a subnormal
            bfloat16 and multiply it by the scale and a power of two in one instruction, which must not overflow.
        tiled: whether each dialect has kernels and memory layouts made for this row alone; the codes of all other
            formats are stored in bit planes (``layouts/planes.py``).
        ordered: whether columns are stored in another order, which is a tensor of the weight. A product takes the
            columns of the activation in that order, and is otherwise one of ``stored``.
        smoothed: whether an activation's columns are multiplied by a tensor of the weight, ``smoothing``, before the
            activation is quantised or multiplied: those of the stored weight have been divided by it (SmoothQuant).
        static: whether the scale of activations is a tensor of the weight, ``input_scale``.
    """

    name: str
    bits: int
    code: Integer | Float | Table
    scale: str
    zeros: str = "none"
    group_size: int | None = None
    tensor_scale: bool = False
    scale_rows: int = 1
    scale_limit: float = math.inf
    tiled: bool = False
    ordered: bool = False
    smoothed: bool = False
    static: bool = False

    @property
    def stored(self) -> Format:
        """Returns the format of the columns as they are stored: this one without an order, or what belongs to
        activations."""
        if not self.extra_names:
            return self
        return find(".".join(word for word in self.name.split(".") if word not in EXTRAS))

    @property
    def extra_names(self) -> tuple[str, ...]:
        """Returns the names of the tensors that are the same in every layout: last among those of a weight."""
        return tuple(name for qualifier, name in EXTRAS.items() if getattr(self, qualifier))

    @property
    def row(self) -> str:
        """Returns the name of its row in ``FORMATS``: without qualifiers."""
        return self.name.partition(".")[0]

    @property
    def low(self) -> float:
        """Returns the smallest value of a code in use."""
        return self.code.low if isinstance(self.code, Integer) else float(self.finite_values.min())

    @property
    def high(self) -> float:
        """Returns the largest value of a code in use."""
        return self.code.high if isinstance(self.code, Integer) else float(self.finite_values.max())

    @property
    def signed(self) -> bool:
        """Returns whether codes are stored in two's complement; otherwise they are unsigned."""
        return isinstance(self.code, Integer) and self.code.low < 0 and self.code.step == 1

    @property
    def first(self) -> int:
        """Returns the value of integer code 0 as kernels store it: unsigned, with a bias if signed."""
        assert isinstance(self.code, Integer)
        return -(1 << (self.bits - 1)) if self.signed else min(self.code.low, 0)

    @property
    def zero_point(self) -> bool:
        """Returns whether each group has a zero-point."""
        return self.zeros != "none"

    @property
    def scale_dtype(self) -> torch.dtype:
        """Returns the dtype in which scales are stored."""
        return SCALES[self.scale].dtype

    @property
    def zero_dtype(self) -> torch.dtype:
        """Returns the dtype in which zero-points are stored."""
        return self.scale_dtype if self.zeros == "float" else torch.uint8

    @property
    def codes_per_byte(self) -> int:
        """Returns how many codes share a byte, for widths that divide 8."""
        return 8 // self.bits

    @property
    def code_dtype(self) -> torch.dtype:
        """Returns the dtype of codes that are stored one to an element, as ``portable.unpack_codes`` returns them."""
        return torch.int8 if self.signed else torch.uint8

    @property
    def storage_dtype(self) -> torch.dtype:
        """Returns the dtype of the codes tensor in the portable layout; several codes of fewer than 8 bits share a
        byte."""
        return self.code_dtype if self.bits == 8 else torch.uint8

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Returns the names of the tensors of a weight in this format, in their order in ``QTensor.tensors``."""
        names = ("codes", "scales", *(("zeros",) if self.zero_point else ()))
        names = (*names, "tensor_scale") if self.tensor_scale else names
        return (*names, *self.extra_names)

    @property
    def planes(self) -> tuple[tuple[int, int], ...]:
        """Returns (width, first bit) of each bit plane, widest first: the powers of two that add up to ``bits``.

        A plane has its bits of every code, and so wastes none: the planes of 6 bits have 4 and 2 bits of each code.
        """
        planes, first = [], 0
        for width in (8, 4, 2, 1):
            if self.bits & width:
                planes.append((width, first))
                first += width
        return tuple(planes)

    @property
    def group_multiple(self) -> int:
        """Returns the number of columns of which every group size is a multiple."""
        return GROUP_MULTIPLE if self.tiled or self.bits % 2 else SMALL_GROUP_MULTIPLE

    @property
    def values(self) -> torch.Tensor:
        """Returns the value of each bit pattern of a stored code, float64[2 ** bits]: the reference of every
        decoding."""
        return torch.tensor(_values(self.bits, self.code), dtype=torch.float64)

    @property
    def finite_values(self) -> torch.Tensor:
        """Returns the finite ones of ``values``, ascending, without the second zero of a float."""
        finite = {value for value in _values(self.bits, self.code) if math.isfinite(value)}
        return torch.tensor(sorted(finite), dtype=torch.float64)

    def is_exact_in(self, dtype: str) -> bool:
        """Returns whether a code's value minus its zero-point is a number of ``dtype``, for every code and
        zero-point."""
        if dtype in ("float32", "float64"):
            return True
        if self.zeros == "float" or self.bits > 8:
            return False
        if isinstance(self.code, Table):
            rounded = self.values.to(getattr(torch, dtype)).double()
            return bool((rounded == self.values).all())
        return True  # integers of at most 8 bits and a sign, and floats of at most 5 exponent and 3 mantissa bits


@functools.cache
def _values(bits: int, code: Integer | Float | Table) -> tuple[float, ...]:
    """Lists the value of each bit pattern; numbers and no tensor, which would belong to the mode that it is made in."""
    if isinstance(code, Table):
        return tuple(map(float, code.values))
    if isinstance(code, Float):
        return tuple(_float(pattern, bits, code) for pattern in range(1 << bits))
    if code.low < 0 and code.step == 1:
        return tuple(float(pattern - (pattern >> (bits - 1) << bits)) for pattern in range(1 << bits))
    return tuple(float(pattern * code.step + min(code.low, 0)) for pattern in range(1 << bits))


def _float(pattern: int, bits: int, code: Float) -> float:
    negative, magnitude = divmod(pattern, 1 << (bits - 1))
    exponent, mantissa = divmod(magnitude, 1 << code.mantissa)
    value = (min(exponent, 1) + mantissa / (1 << code.mantissa)) * 2.0 ** (max(exponent, 1) - code.bias)
    if code.specials == "nan" and magnitude == (1 << (bits - 1)) - 1:
        value = math.nan
    if code.specials == "ieee" and exponent == (1 << code.exponent) - 1:
        value = math.nan if mantissa else math.inf
    return math.copysign(value, -1.0 if negative else 1.0)


NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The sixteen values of nf4, as float32 has them: quantiles of a normal distribution, with an exact 0 (Dettmers et al.,
"QLoRA: Efficient Finetuning of Quantized LLMs", appendix E)."""
KERNEL_SCALE_LIMIT = 2.0**15
"""``Format.scale_limit`` of the formats that have kernels of their own, and of 8-bit floats."""


def _integers() -> list[Format]:
    """Returns int1 to int7 and uint1 to uint8, but for those that have kernels of their own."""
    rows = [Format("int1", 1, Integer(-1, 1, step=2), "bfloat16")]
    rows += [Format(f"int{n}", n, Integer(-(1 << (n - 1)), (1 << (n - 1)) - 1), "bfloat16") for n in range(2, 8)]
    rows += [Format(f"uint{n}", n, Integer(0, (1 << n) - 1), "bfloat16", zeros="integer") for n in range(1, 8)]
    rows.append(Format("uint8", 8, Integer(0, 255), "float32", zeros="integer"))
    return [row for row in rows if row.name not in ("int4", "uint4")]


FORMATS: dict[str, Format] = {
    row.name: row
    for row in (
        Format("int8", 8, Integer(-127, 127), "float32", scale_limit=KERNEL_SCALE_LIMIT, tiled=True),
        Format("int4", 4, Integer(-8, 7), "bfloat16", scale_limit=KERNEL_SCALE_LIMIT, tiled=True),
        Format("uint4", 4, Integer(0, 15), "bfloat16", zeros="integer", scale_limit=KERNEL_SCALE_LIMIT, tiled=True),
        *_integers(),
        Format("ternary", 2, Integer(-1, 1), "bfloat16"),
        Format("fp8_e4m3", 8, Float(4, 3, 7, "nan"), "float32", scale_limit=KERNEL_SCALE_LIMIT),
        Format("fp8_e5m2", 8, Float(5, 2, 15, "ieee"), "float32", scale_limit=KERNEL_SCALE_LIMIT),
        Format("fp6_e3m2", 6, Float(3, 2, 3), "bfloat16"),
        Format("fp6_e2m3", 6, Float(2, 3, 1), "bfloat16"),
        Format("fp4_e2m1", 4, Float(2, 1, 1), "bfloat16"),
        Format("nf4", 4, Table(NF4), "float32"),
        Format("mxfp8", 8, Float(4, 3, 7, "nan"), "e8m0", group_size=32),
        Format("mxfp8_e5m2", 8, Float(5, 2, 15, "ieee"), "e8m0", group_size=32),
        Format("mxfp6", 6, Float(2, 3, 1), "e8m0", group_size=32),
        Format("mxfp6_e3m2", 6, Float(3, 2, 3), "e8m0", group_size=32),
        Format("mxfp4", 4, Float(2, 1, 1), "e8m0", group_size=32),
        Format("nvfp4", 4, Float(2, 1, 1), "e4m3", group_size=16, tensor_scale=True),
    )
}
EXTRAS = {"ordered": "order", "smoothed": "smoothing", "static": "input_scale"}
"""Qualifiers, in their order in a name, of formats with a tensor besides those of the weight, and the tensor's name."""
QUALIFIERS = (*SCALES, "floatzeros", "rows128", "tensor", *EXTRAS)
"""What may follow the name of a row: a kind of scales, floating-point zero-points, scales that rows share, columns in
another order, and factors or a scale of activations."""


@functools.cache
def _qualified(name: str) -> Format | None:
    """Returns the format called ``name``, with its qualifiers in their canonical order; None if there is none."""
    base, *qualifiers = name.split(".")
    row = FORMATS.get(base)
    if row is None or len(set(qualifiers)) != len(qualifiers) or not set(qualifiers) <= set(QUALIFIERS):
        return None
    scales = [qualifier for qualifier in qualifiers if qualifier in SCALES]
    shared = [qualifier for qualifier in qualifiers if qualifier in ("rows128", "tensor")]
    scale = scales[0] if scales else row.scale
    zeros = "float" if "floatzeros" in qualifiers else row.zeros
    rows = {"rows128": 128, "tensor": WHOLE_TENSOR}[shared[0]] if shared else 1
    if len(scales) > 1 or len(shared) > 1 or (zeros == "float" and row.zeros == "none"):
        return None
    if zeros == "float" and scale in ("e8m0", "e4m3"):
        return None
    if row.group_size is not None and (scales or shared):
        return None
    spelled = [base, *([scale] if scale != row.scale else [])]
    spelled += ["floatzeros"] if zeros != row.zeros else []
    spelled += [*shared, *(qualifier for qualifier in EXTRAS if qualifier in qualifiers)]
    tiled = row.tiled and scale == row.scale and zeros == row.zeros
    limit = row.scale_limit if tiled or not row.tiled else math.inf
    format = replace(row, name=".".join(spelled), scale=scale, zeros=zeros, scale_rows=rows, scale_limit=limit)
    extras: dict[str, Any] = {qualifier: qualifier in qualifiers for qualifier in EXTRAS}
    return replace(format, tiled=tiled, **extras)


def find(name: str | Format) -> Format:
    """Returns the format called ``name``."""
    if isinstance(name, Format):
        return name
    format = _qualified(name) if isinstance(name, str) else None
    if format is None:
        raise FormatError(
            f"unknown format {name!r}; expected one of {', '.join(FORMATS)}, and after a dot perhaps one of "
            f"{', '.join(QUALIFIERS)} where the format has such"
        )
    return format


def check_group_size(group_size: int | None, format: str | Format | None = None) -> int | None:
    """Returns the group size that ``group_size`` means for ``format``: the format's own where it has only one.

    Raises:
        FormatError: it is not a valid group size, or not that of the format.
    """
    row = find(format) if format is not None else None
    if row is not None and row.group_size is not None and group_size in (None, row.group_size):
        return row.group_size
    if row is not None and row.group_size is not None:
        raise FormatError(f"group_size {group_size!r}; {row.name} has groups of {row.group_size} columns and no others")
    multiple = row.group_multiple if row is not None else GROUP_MULTIPLE
    if group_size is not None and (type(group_size) is not int or group_size <= 0 or group_size % multiple):
        raise FormatError(
            f"group_size {group_size!r}; expected {', '.join(map(str, COMMON_GROUP_SIZES))} or another multiple of "
            f"{multiple} columns, or None for one scale per row"
        )
    return group_size


def check_matrices(format: Format, rows: int) -> None:
    """Raises a FormatError where matrices of ``rows`` rows, several of which are one weight, would share scales."""
    if rows % (format.scale_rows or rows + 1):  # one scale for the whole weight is for no matrix of several
        raise FormatError(
            f"rows of a weight of {format.name} share scales, and matrices of {rows} rows would too: use a format with "
            "scales of each row"
        )


@dataclass(frozen=True)
class Geometry:
    """Holds the sizes from which the shapes of a weight's tensors follow.

    Attributes:
        rows, columns: N and K of the weight.
        padded_rows: N rounded up to a multiple of 16, for layouts that store blocks of 16 rows.
        padded_columns: K rounded up to a multiple of the group size, or of 64 if a row is one group; the number of
            columns of the portable layout.
        group: the number of columns in a group.
        groups: the number of groups in a row.
    """

    rows: int
    columns: int
    padded_rows: int
    padded_columns: int
    group: int
    groups: int


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def geometry(group_size: int | None, shape: tuple[int, int]) -> Geometry:
    """Returns the geometry of a weight of ``shape`` (N, K)."""
    rows, columns = shape
    padded = round_up(columns, group_size or ROW_MULTIPLE)
    return Geometry(
        rows=rows,
        columns=columns,
        padded_rows=round_up(rows, 16),
        padded_columns=padded,
        group=group_size or padded,
        groups=padded // group_size if group_size else 1,
    )


def scale_rows(format: Format, rows: int) -> int:
    """Returns how many rows of scales a weight of ``rows`` rows has: one for each set of rows that share."""
    if format.scale_rows == 1:
        return rows
    return min(rows, 1) if format.scale_rows == WHOLE_TENSOR else -(-rows // format.scale_rows)
