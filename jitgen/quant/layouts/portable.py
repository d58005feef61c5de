"""The portable layout: codes in row-major order, as checkpoints store them.

Kp is K after padding to whole groups (``Geometry.padded_columns``).

codes
    8-bit: ``int8[N, Kp]``. Fewer bits: ``uint8[N, Kp * bits / 8]``; a byte stores consecutive columns, the first in its
    lowest bits, in two's complement if the format is signed.
scales
    ``[N, groups]`` of the format's scale dtype.
zeros
    ``uint8[N, groups]``, in formats with zero-points.

The codes of padding (columns K to Kp) equal the zero-point of their group, so that they decode to 0.
"""

from __future__ import annotations

import torch

from jitgen.errors import FormatError
from jitgen.quant.formats import Format, geometry
from jitgen.quant.layouts import Tensors


def pack(format: Format, group_size: int | None, shape: tuple[int, int], tensors: Tensors) -> Tensors:
    return tensors


def unpack(format: Format, group_size: int | None, shape: tuple[int, int], tensors: Tensors) -> Tensors:
    return tensors


def pack_codes(format: Format, codes: torch.Tensor) -> torch.Tensor:
    """Codes as the portable layout stores them, from ``[..., Kp]`` integers of any dtype, one code to an element."""
    if format.bits == 8:
        return codes.to(format.storage_dtype)
    per_byte, mask = format.codes_per_byte, (1 << format.bits) - 1
    # Converted to the code's own dtype first, since a negative float has no conversion to an unsigned integer.
    unsigned = codes.to(format.code_dtype).view(torch.uint8) & mask
    fields = unsigned.unflatten(-1, (codes.shape[-1] // per_byte, per_byte))
    packed = fields[..., 0].clone()
    for index in range(1, per_byte):
        packed |= fields[..., index] << (index * format.bits)
    return packed


def unpack_codes(format: Format, packed: torch.Tensor) -> torch.Tensor:
    """The inverse of ``pack_codes``: one code to an element, int8 in signed formats and uint8 in the others."""
    if format.bits == 8:
        return packed
    bits, mask = format.bits, (1 << format.bits) - 1
    fields = torch.stack([packed >> (index * bits) & mask for index in range(format.codes_per_byte)], -1)
    codes = fields.flatten(-2)
    if not format.signed:
        return codes
    sign = 1 << (bits - 1)
    return codes.view(torch.int8).bitwise_xor_(sign).sub_(sign)


def empty(format: Format, group_size: int | None, shape: tuple[int, int], device: torch.device | str) -> Tensors:
    """Uninitialised tensors of the shapes and dtypes that a weight of ``shape`` has in this layout."""
    return tuple(torch.empty(size, dtype=dtype, device=device) for size, dtype in _expected(format, group_size, shape))


def check(format: Format, group_size: int | None, shape: tuple[int, int], tensors: Tensors) -> None:
    """FormatError unless ``tensors`` are what a weight of this format and shape consists of."""
    expected = _expected(format, group_size, shape)
    found = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    if found != expected or any(not tensor.is_contiguous() for tensor in tensors):
        grouping = f"groups of {group_size}" if group_size else "one scale per row"
        raise FormatError(
            f"a weight {tuple(shape)} of format {format.name} with {grouping} has contiguous {_named(format, expected)}"
            f"; these parts are {_named(format, found)}"
        )


def _expected(
    format: Format, group_size: int | None, shape: tuple[int, int]
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """The shape and dtype of each tensor of a weight of ``shape``."""
    sizes = geometry(group_size, shape)
    scales = (sizes.rows, sizes.groups)
    codes = (sizes.rows, sizes.padded_columns // format.codes_per_byte)
    expected: list[tuple[tuple[int, ...], torch.dtype]] = [(codes, format.storage_dtype), (scales, format.scale_dtype)]
    return [*expected, (scales, torch.uint8)] if format.zero_point else expected


def _named(format: Format, tensors: list[tuple[tuple[int, ...], torch.dtype]]) -> str:
    names = [*format.tensor_names, *("?" * len(tensors))]
    return ", ".join(
        f"{name} {str(dtype).removeprefix('torch.')}{list(size)}"
        for name, (size, dtype) in zip(names, tensors, strict=False)
    )


def padded(tensor: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """``tensor`` with zeros added below and to the right, for layouts that store rows and columns in blocks."""
    if tensor.shape == (rows, columns):
        return tensor
    larger = tensor.new_zeros(rows, columns)
    larger[: tensor.shape[0], : tensor.shape[1]] = tensor
    return larger
