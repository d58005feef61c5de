"""The formats of quantised weights: what a code is, what a scale is, and how many weights share a scale.

A weight W[N, K] has a code per element and, for each row and each group of ``group_size`` consecutive columns, a scale
and in some formats a zero-point: ``W[n, k] = (code[n, k] - zero[n, k // group_size]) * scale[n, k // group_size]``. A
new format is a row of ``FORMATS``; if its codes are not integers, each dialect needs a row that decodes them as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from jitgen.errors import FormatError

GROUP_MULTIPLE = 32
"""Every group size is a multiple of this many columns, so that all codes of a 32-bit word belong to one group."""
COMMON_GROUP_SIZES = (32, 64, 128)
"""The group sizes, in columns, that the message of an invalid one suggests."""
ROW_MULTIPLE = 64
"""With one scale per row, K is padded to a multiple of this many columns."""


@dataclass(frozen=True)
class Format:
    """One format.

    Attributes:
        name: the name that ``jitgen.quantize`` takes.
        bits: the width of a code; it divides 8.
        signed: whether codes are two's complement; otherwise they are unsigned.
        low, high: the smallest and the largest code in use.
        zero_point: whether each group has a zero-point, an integer in the range of the codes, stored as uint8. In the
            other formats the zero-point is 0 and is not stored.
        scale_dtype: the dtype in which scales are stored. Scales may be negative.
        scale_limit: the magnitude of every scale is below this. Kernels rely on it: some decode a code as a subnormal
            bfloat16 and multiply it by the scale and a power of two in one instruction, which must not overflow.
    """

    name: str
    bits: int
    signed: bool
    low: int
    high: int
    zero_point: bool
    scale_dtype: torch.dtype
    scale_limit: float = math.inf

    @property
    def codes_per_byte(self) -> int:
        return 8 // self.bits

    @property
    def code_dtype(self) -> torch.dtype:
        """The dtype of codes that are stored one to an element, as ``portable.unpack_codes`` returns them."""
        return torch.int8 if self.signed else torch.uint8

    @property
    def storage_dtype(self) -> torch.dtype:
        """The dtype of the codes tensor in the portable layout; several codes of fewer than 8 bits share a byte."""
        return self.code_dtype if self.bits == 8 else torch.uint8

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """The names of the tensors a weight of this format consists of, in their order in ``QTensor.tensors``."""
        return ("codes", "scales", "zeros") if self.zero_point else ("codes", "scales")


FORMATS: dict[str, Format] = {
    row.name: row
    for row in (
        Format("int8", 8, True, -127, 127, False, torch.float32, 2.0**15),
        Format("int4", 4, True, -8, 7, False, torch.bfloat16, 2.0**15),
        Format("uint4", 4, False, 0, 15, True, torch.bfloat16, 2.0**15),
    )
}


def find(name: str | Format) -> Format:
    """The format called ``name``; FormatError, with the list of known names, if there is none."""
    if isinstance(name, Format):
        return name
    found = FORMATS.get(name) if isinstance(name, str) else None
    if found is None:
        raise FormatError(f"unknown format {name!r}; expected one of {', '.join(FORMATS)}")
    return found


def check_group_size(group_size: int | None) -> int | None:
    """``group_size`` unchanged; FormatError if it is not a valid group size."""
    if group_size is None:
        return None
    if type(group_size) is not int or group_size <= 0 or group_size % GROUP_MULTIPLE:
        raise FormatError(
            f"group_size {group_size!r}; expected {', '.join(map(str, COMMON_GROUP_SIZES))} or another multiple of "
            f"{GROUP_MULTIPLE} columns, or None for one scale per row"
        )
    return group_size


@dataclass(frozen=True)
class Geometry:
    """The sizes from which the shapes of a weight's tensors follow.

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
    """The geometry of a weight of ``shape`` (N, K)."""
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
