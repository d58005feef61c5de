"""Assembles a ``QTensor`` from the codes, scales and zero-points that a reader has unpacked.

The format is the one whose numbers are the checkpoint's: the kind of scales follows from their dtype, and float32 takes
the place of a kind that has a limit which the scales exceed, or groups that it does not allow.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch

from jitgen.checkpoints.source import Source
from jitgen.errors import FormatError
from jitgen.quant import slices
from jitgen.quant.formats import Format, find, geometry
from jitgen.quant.layouts import portable
from jitgen.quant.qtensor import QTensor

GO_BY_TENSORS = "correct it, or pass config={} to go by the tensors alone"
"""What to do where a config and the tensors beside it differ."""
_SCALES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float8_e4m3fn: "e4m3"}
"""The kinds of scales that a reader may find beside codes of any format. Bytes are powers of two in formats of fixed
blocks alone; beside integers they may be anything."""
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of zero-points that are no integers, and of a factor of a whole weight."""
_WORDS = (torch.int32, torch.uint8, torch.int8)
"""The dtypes in which files pack codes."""


def assembled(
    name: str,
    base: str,
    codes: torch.Tensor,
    scales: torch.Tensor,
    group_size: int | None,
    dtype: torch.dtype,
    *,
    zeros: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
    tensor_scale: torch.Tensor | None = None,
    qualifier: str = "",
) -> QTensor:
    """Assembles the weight called ``name``.

    Args:
        base: the row of ``FORMATS``, such as ``"int4"``.
        codes: ``[N, K]``, one to an element: integers as they are, the bit patterns of other codes.
        scales: ``[R, groups]``; R is N, or fewer where rows share scales. float32, bfloat16, float16, e4m3 as
            ``float8_e4m3fn``, or e8m0 as uint8.
        group_size: columns that share a scale; None if all of a row do.
        dtype: what ``dequantize`` returns by default.
        zeros: of the shape of ``scales``; integers, or floats, which become floating-point zero-points.
        order: int[K], the column of the weight that is stored at each position; None where they are in order.
        tensor_scale: the factor of the whole weight, in formats that have one.
        qualifier: of rows that share scales: ``"rows128"`` or ``"tensor"``.

    Raises:
        FormatError: the numbers do not fit one another, or are not finite. The message has ``name``.
    """
    try:
        shape = (codes.shape[0], codes.shape[1])
        row, scales = _format(base, scales, group_size, zeros, qualifier)
        if order is not None:
            row = find(f"{row.name}.ordered")
        sizes = geometry(group_size, shape)
        if row.group_size is not None and sizes.padded_columns != shape[1]:
            raise FormatError(f"{shape[1]} columns are not whole blocks of {row.group_size}, which {row.name} has")
        if scales.dim() != 2 or scales.shape[1] != sizes.groups:
            raise FormatError(
                f"scales {list(scales.shape)} are not those of a weight {list(shape)} in groups of {sizes.group}"
            )
        named = {"scales": scales.view(torch.uint8) if scales.dtype == torch.float8_e4m3fn else scales}
        if zeros is not None:
            if zeros.shape != scales.shape:
                raise FormatError(f"zero-points {list(zeros.shape)} beside scales {list(scales.shape)}")
            if zeros.dtype == torch.bool or (zeros.is_floating_point() and zeros.dtype not in _FLOATS):
                raise FormatError(f"zero-points are of {zeros.dtype}")
            named["zeros"] = zeros.to(row.zero_dtype)
        if tensor_scale is not None:
            if tensor_scale.dtype not in _FLOATS:
                raise FormatError(f"the factor of the whole weight is of {tensor_scale.dtype}")
            named["tensor_scale"] = tensor_scale.float().reshape(1, 1)
        if order is not None:
            named["order"] = order.to(torch.int32).reshape(1, -1)
        named["codes"] = _packed(row, codes, named, sizes.padded_columns)
        tensors = tuple(named[tensor].contiguous() for tensor in row.tensor_names)
        return QTensor(tensors, row.name, group_size, shape, dtype)
    except FormatError as error:
        raise FormatError(f"{name}: {error}") from None


def _format(
    base: str, scales: torch.Tensor, group_size: int | None, zeros: torch.Tensor | None, qualifier: str
) -> tuple[Format, torch.Tensor]:
    """Returns the format, and the scales in the dtype in which it stores them."""
    if find(base).group_size is not None and scales.dtype in (*_SCALES, torch.uint8):
        return find(base), scales
    if scales.dtype not in _SCALES:
        raise FormatError(f"scales are of {scales.dtype}, which {base} has not; floats of 8, 16 or 32 bits are read")
    floating = zeros is not None and zeros.is_floating_point()
    ends = [*(["floatzeros"] if floating else []), *([qualifier] if qualifier else [])]
    row = find(".".join([base, _SCALES[scales.dtype], *ends]))
    exceeds = row.scale_limit < math.inf and bool((scales.abs() >= row.scale_limit).any())
    if exceeds or (group_size is not None and group_size % row.group_multiple):
        row, scales = find(".".join([base, "float32", *ends])), scales.float()
        if exceeds and row.scale_limit < math.inf:
            raise FormatError(
                f"scales of {float(scales.abs().max()):g}; those of {row.name} are below {row.scale_limit:g}"
            )
    return row, scales


def _packed(row: Format, codes: torch.Tensor, named: dict[str, torch.Tensor], padded_columns: int) -> torch.Tensor:
    rows, columns = codes.shape
    if padded_columns != columns:
        values = tuple(named.get(name, codes) for name in row.tensor_names)
        filler = slices.zero_codes(row, (codes, *values[1:]), rows)
        codes = torch.cat([codes, filler.to(codes.dtype).expand(rows, padded_columns - columns)], 1)
    return portable.pack_codes(row, codes)


def require_groups(name: str, told: Collection[int], columns: int, groups: int) -> None:
    """Raises FormatError if every group size in ``told``, from a config, gives ``columns`` another number of groups
    than ``groups``."""
    if told and all(-(-columns // size) != groups for size in told):
        sizes = ", ".join(map(str, sorted(told)))
        raise FormatError(
            f"{name}: the config says groups of {sizes}, and {columns} columns have {groups} groups; {GO_BY_TENSORS}"
        )


def nominal(source: Source, scales: torch.Tensor) -> torch.dtype:
    """Returns the dtype of a weight: the config's, else that of floating-point scales of 16 or 32 bits, else
    float32."""
    if source.dtype is not None:
        return source.dtype
    return scales.dtype if scales.dtype in (torch.float16, torch.bfloat16, torch.float32) else torch.float32


def fields(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Splits integers ``[..., n]`` into ``bits``-bit fields, uint8 ``[..., fields]``: each row is one sequence of bits.

    Raises:
        FormatError: ``words`` are no integers.
    """
    if words.dtype not in _WORDS:
        raise FormatError(f"codes are packed in integers, and not in {words.dtype}")
    return portable.unpack_bits(words.contiguous().view(torch.uint8), bits)


def nibbles(bytes_: torch.Tensor) -> torch.Tensor:
    """Splits ``uint8[..., n]`` into codes of 4 bits, ``uint8[..., 2 n]``, the low half of each byte first."""
    return portable.unpack_bits(bytes_.contiguous().view(torch.uint8), 4)
