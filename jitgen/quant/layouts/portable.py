"""The portable layout: rows of codes one after the other, as checkpoints hold them.

codes
    8-bit: ``int8[N, Kp]``. Narrower: ``uint8[N, Kp * bits / 8]``; of the codes of a byte the first column's has the
    lowest bits, in two's complement where the format is signed.
scales
    ``[N, groups]`` of the format's scale dtype.
zeros
    ``uint8[N, groups]``, for formats with zero-points.

Padded codes (columns K..Kp) equal their group's zero-point: they decode to 0.
"""

from __future__ import annotations

import torch

from jitgen.errors import FormatError
from jitgen.quant.formats import Format, geometry
from jitgen.quant.layouts import Parts


def pack(format: Format, group_size: int | None, shape: tuple[int, int], parts: Parts) -> Parts:
    return parts


def unpack(format: Format, group_size: int | None, shape: tuple[int, int], parts: Parts) -> Parts:
    return parts


def pack_codes(format: Format, codes: torch.Tensor) -> torch.Tensor:
    """Codes of the portable layout, from one code to an element: ``[..., Kp]`` integers of any dtype."""
    if format.bits == 8:
        return codes.to(format.storage_dtype)
    per_byte, mask = format.codes_per_byte, (1 << format.bits) - 1
    # Through the code's own dtype: a negative float has no conversion to an unsigned integer.
    unsigned = codes.to(format.code_dtype).view(torch.uint8) & mask
    fields = unsigned.unflatten(-1, (codes.shape[-1] // per_byte, per_byte))
    packed = fields[..., 0].clone()
    for place in range(1, per_byte):
        packed |= fields[..., place] << (place * format.bits)
    return packed


def unpack_codes(format: Format, packed: torch.Tensor) -> torch.Tensor:
    """One code to an element, int8 (signed formats) or uint8: the inverse of ``pack_codes``."""
    if format.bits == 8:
        return packed
    bits, mask = format.bits, (1 << format.bits) - 1
    fields = torch.stack([packed >> (place * bits) & mask for place in range(format.codes_per_byte)], -1)
    codes = fields.flatten(-2)
    if not format.signed:
        return codes
    sign = 1 << (bits - 1)
    return codes.view(torch.int8).bitwise_xor_(sign).sub_(sign)


def empty(format: Format, group_size: int | None, shape: tuple[int, int], device: torch.device | str) -> Parts:
    """Parts of the right shapes and dtypes with nothing meaningful in them."""
    return tuple(torch.empty(size, dtype=dtype, device=device) for size, dtype in _described(format, group_size, shape))


def check(format: Format, group_size: int | None, shape: tuple[int, int], parts: Parts) -> None:
    """FormatError where ``parts`` are not what a weight of this format and shape has."""
    expected = _described(format, group_size, shape)
    found = [(tuple(part.shape), part.dtype) for part in parts]
    if found != expected or any(not part.is_contiguous() for part in parts):
        grouping = f"groups of {group_size}" if group_size else "one scale per row"
        raise FormatError(
            f"a weight {tuple(shape)} of format {format.name} with {grouping} has contiguous {_named(format, expected)}"
            f"; these parts are {_named(format, found)}"
        )


def _described(
    format: Format, group_size: int | None, shape: tuple[int, int]
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    sizes = geometry(group_size, shape)
    scales = (sizes.rows, sizes.groups)
    codes = (sizes.rows, sizes.padded_columns // format.codes_per_byte)
    parts: list[tuple[tuple[int, ...], torch.dtype]] = [(codes, format.storage_dtype), (scales, format.scale_dtype)]
    return [*parts, (scales, torch.uint8)] if format.zero_point else parts


def _named(format: Format, described: list[tuple[tuple[int, ...], torch.dtype]]) -> str:
    names = [*format.part_names, *("?" * len(described))]
    return ", ".join(
        f"{name} {str(dtype).removeprefix('torch.')}{list(size)}"
        for name, (size, dtype) in zip(names, described, strict=False)
    )


def grown(part: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """``part`` with zeros added below and to the right, for layouts that keep rows and columns in blocks."""
    if part.shape == (rows, columns):
        return part
    larger = part.new_zeros(rows, columns)
    larger[: part.shape[0], : part.shape[1]] = part
    return larger
