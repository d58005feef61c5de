"""The formats of quantised weights: what a code is, what a scale is, how many weights share one.

A weight W[N, K] is a code per element and, per row and group of ``group_size`` consecutive columns, a scale and perhaps
a zero-point: ``W[n, k] = (code[n, k] - zero[n, k // group_size]) * scale[n, k // group_size]``. A new format is a row
here and, where its codes mean something else than integers, a decode row per dialect.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from jitgen.errors import FormatError

GROUP_MULTIPLE = 32
"""Group sizes are multiples of this many columns: no 32-bit word of codes is of two groups."""
COMMON_GROUP_SIZES = (32, 64, 128)
ROW_MULTIPLE = 64
"""With one scale per row, columns are padded to a multiple of this."""


@dataclass(frozen=True)
class Format:
    """One format.

    Attributes:
        name: as ``jitgen.quantize`` takes it.
        bits: of a code; divides 8.
        signed: codes are two's complement; else unsigned.
        low, high: the codes in use, both included.
        zero_point: whether a group has an integer zero-point among the codes (uint8 in memory); else it is 0.
        scale_dtype: of the scales in storage. Scales may be negative.
        scale_limit: what their magnitudes stay below, as kernels rely on: some decode a code as a subnormal bfloat16
            and multiply it by the scale and a power of two in one.
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
        """Of codes one to an element, unpacked."""
        return torch.int8 if self.signed else torch.uint8

    @property
    def storage_dtype(self) -> torch.dtype:
        """Of the portable layout's codes."""
        return self.code_dtype if self.bits == 8 else torch.uint8

    @property
    def part_names(self) -> tuple[str, ...]:
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
    """The row of ``name``; FormatError listing the names there are."""
    if isinstance(name, Format):
        return name
    found = FORMATS.get(name) if isinstance(name, str) else None
    if found is None:
        raise FormatError(f"unknown format {name!r}; expected one of {', '.join(FORMATS)}")
    return found


def check_group_size(group_size: int | None) -> int | None:
    """``group_size`` itself; FormatError where it cannot be one."""
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
    """The sizes that a weight's parts have.

    Attributes:
        rows, columns: N and K of the weight.
        padded_rows: N rounded up to 16, for layouts that keep rows in sixteens.
        padded_columns: K rounded up to the group size, or to 64 where a row is one group. The portable layout's.
        group: columns of a group.
        groups: per row.
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
