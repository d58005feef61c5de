"""Defines bit planes: the codes of formats without layouts of their own, in each of "cpu", "mma" and "interleaved".

A plane has some bits of every code, 1, 2, 4 or 8 of them (``Format.planes``), so that 3-, 5-, 6- and 7-bit codes take
as many bits as they have. A 32-bit little-endian word of a plane of ``p`` bits has fields of ``32 / p`` codes of one
row. Codes in two's complement are stored with a bias of half their range (``portable.unsigned_codes``).

Np and Kp are N and K after padding, as in the layouts. Scales and zero-points have one number for each row and group,
also in formats whose rows share them.

cpu
    codes ``uint8[Np/16, Kp/U, 2 * U * bits]``, where U is the number of columns of a word of the narrowest plane. For U
    columns a block has first the words of the widest plane, and a word of 16 rows each after another. The fields of a
    word are consecutive columns, of which column c is in byte ``c % 4`` at bit ``p * (c // 4)``: one shift gives the
    bits of four neighbouring columns in the bytes of a word, for every plane alike.
    scales and zeros ``[Np/16, groups, 16]``; tensor_scale ``float32[Np/16, 16]``.
mma
    codes ``uint8[Np/16, Kc/64, 256 * bits / 2]`` in tiles of 16 rows by 64 columns, whose words of the widest plane
    come first: ``[32 lanes, p words]``, and ``[2, 32 lanes, 4 words]`` where p is 8. A lane needs sixteen registers of
    two codes for the four steps of 16 columns (``mma.py`` says of which rows and columns). A word has ``16 / p`` of
    them: of number i the low half is at bit ``p * i``, and the high half at bit ``16 + p * i``.
    scales and zeros ``[Np/16, groups, 16]``, with row ``g + 8h`` at index ``2g + h``; tensor_scale ``float32[Np/16,
    16]`` in the order of the rows.
interleaved
    codes ``int32[Np/16, 16, Kp * bits / 32]``: a row has the words of the widest plane first. The fields of a word are
    consecutive columns.
    scales and zeros ``[Np/16, 16, groups]``; tensor_scale ``float32[Np/16, 16]``.

``templates/gemm/include/jitgen/gemm_planes.hpp``, ``gemm_planes.cuh`` and ``families/gemm/triton_products.py`` read
them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from jitgen.errors import FormatError
from jitgen.quant.fakes import have_numbers
from jitgen.quant.formats import Format, Geometry, geometry, round_up
from jitgen.quant.layouts import Tensors
from jitgen.quant.layouts.portable import (
    from_unsigned_codes,
    of_rows,
    pack_bits,
    padded,
    unpack_bits,
    unsigned_codes,
)

BLOCK_ROWS = 16
CHUNK = 64
"""K of "mma" is padded to a multiple of this many columns."""


LARGEST_FOLDED = 127 + 17
"""The largest e8m0 scale, 2^17 as its byte, of codes of 4 bits that are floats: kernels in CUDA C++ multiply such codes
by it, as bfloat16 (``folded_scale`` in gemm_codes.cuh), and a larger one is infinite there."""


def pack(layout: str, format: Format, group_size: int | None, shape: tuple[int, int], tensors: Tensors) -> Tensors:
    """Converts ``tensors`` from the portable layout to ``layout``."""
    sizes = geometry(group_size, shape)
    pack_codes, _, pack_rows, _ = _CONVERSIONS[layout]
    codes, *rest = tensors
    if layout == "mma" and format.bits == 4 and format.scale == "e8m0":
        _check_folded(format, rest[0])
    factors = [rest.pop()] if format.tensor_scale else []
    fields = unsigned_codes(format, codes)
    every = slice(0, sizes.rows)
    groups = _groups(layout, sizes, group_size)
    numbers = [pack_rows(sizes, groups, of_rows(format, tensor, every)) for tensor in rest]
    blocks = sizes.padded_rows // BLOCK_ROWS
    numbers += [factor.expand(blocks, BLOCK_ROWS).contiguous() for factor in factors]
    return (pack_codes(format, sizes, fields), *numbers)


def unpack(layout: str, format: Format, group_size: int | None, shape: tuple[int, int], tensors: Tensors) -> Tensors:
    """Converts ``tensors`` from ``layout`` to the portable one."""
    sizes = geometry(group_size, shape)
    _, unpack_codes, _, unpack_rows = _CONVERSIONS[layout]
    codes, *rest = tensors
    factors = [rest.pop()[:1, :1].contiguous()] if format.tensor_scale else []
    if factors and not factors[0].numel():
        factors = [factors[0].new_ones(1, 1)]
    fields = unpack_codes(format, sizes, codes)[: sizes.rows, : sizes.padded_columns]
    groups = _groups(layout, sizes, group_size)
    rows = [unpack_rows(sizes, groups, tensor)[: sizes.rows, : sizes.groups] for tensor in rest]
    numbers = [shared_rows(format, tensor).contiguous() for tensor in rows]
    return (from_unsigned_codes(format, fields.contiguous()), *numbers, *factors)


def _check_folded(format: Format, scales: torch.Tensor) -> None:
    if have_numbers(scales) and bool((scales > LARGEST_FOLDED).any()):
        raise FormatError(
            f"a weight of {format.name} has a scale above 2^17, which kernels in CUDA C++ do not multiply by: divide "
            'the weight by a power of two and multiply the products by it, or use backend="triton"'
        )


def _groups(layout: str, sizes: Geometry, group_size: int | None) -> int:
    """Returns the groups of a row in ``layout``: "mma" pads K to whole chunks, which may add groups at the end."""
    if layout != "mma" or group_size is None:
        return sizes.groups
    return -(-_chunks(sizes) * CHUNK // group_size)


def columns_of_unit(format: Format) -> int:
    """Returns U of the layout "cpu": how many columns a word of the narrowest plane holds."""
    return 32 // format.planes[-1][0]


# ----------------------------------------------------------------------------------------------------------------- cpu


def _pack_cpu(format: Format, sizes: Geometry, fields: torch.Tensor) -> torch.Tensor:
    unit, blocks = columns_of_unit(format), sizes.padded_rows // BLOCK_ROWS
    units = sizes.padded_columns // unit
    fields = padded(fields, sizes.padded_rows, sizes.padded_columns)
    packed = []
    for width, first in format.planes:
        fours = (fields >> first).unflatten(-1, (sizes.padded_columns * width // 32, 8 // width, 4)).transpose(-1, -2)
        bytes_ = pack_bits(fours.reshape(fields.shape), width)  # [Np, Kp * width / 8]
        words = bytes_.view(blocks, BLOCK_ROWS, units, unit * width // 32, 4).permute(0, 2, 3, 1, 4)
        packed.append(words.reshape(blocks, units, 2 * unit * width))
    return torch.cat(packed, -1).contiguous()


def _unpack_cpu(format: Format, sizes: Geometry, codes: torch.Tensor) -> torch.Tensor:
    unit, blocks = columns_of_unit(format), sizes.padded_rows // BLOCK_ROWS
    units = sizes.padded_columns // unit
    planes = codes.split([2 * unit * width for width, _ in format.planes], -1)
    fields = torch.zeros(sizes.padded_rows, sizes.padded_columns, dtype=torch.uint8, device=codes.device)
    for (width, first), plane in zip(format.planes, planes, strict=True):
        words = plane.reshape(blocks, units, unit * width // 32, BLOCK_ROWS, 4).permute(0, 3, 1, 2, 4)
        bytes_ = words.reshape(sizes.padded_rows, sizes.padded_columns * width // 8)
        fours = (
            unpack_bits(bytes_, width)
            .unflatten(-1, (sizes.padded_columns * width // 32, 4, 8 // width))
            .transpose(-1, -2)
        )
        fields |= fours.reshape(fields.shape) << first
    return fields


def _pack_rows_cpu(sizes: Geometry, groups: int, tensor: torch.Tensor) -> torch.Tensor:
    blocks = sizes.padded_rows // BLOCK_ROWS
    return padded(tensor, sizes.padded_rows, groups).view(blocks, BLOCK_ROWS, groups).transpose(1, 2).contiguous()


def _unpack_rows_cpu(sizes: Geometry, groups: int, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(1, 2).reshape(sizes.padded_rows, groups)


# ----------------------------------------------------------------------------------------------------------------- mma


def _chunks(sizes: Geometry) -> int:
    return round_up(sizes.padded_columns, CHUNK) // CHUNK


def _pack_mma(format: Format, sizes: Geometry, fields: torch.Tensor) -> torch.Tensor:
    blocks, chunks = sizes.padded_rows // BLOCK_ROWS, _chunks(sizes)
    fields = padded(fields, sizes.padded_rows, chunks * CHUNK)
    # From rows (h, g) and columns (chunk, step, q, t, pair) to (chunk, g, t), halves (pair) and registers (step, q, h).
    ordered = fields.view(blocks, 2, 8, chunks, 4, 2, 4, 2).permute(0, 3, 2, 6, 7, 4, 5, 1)
    ordered = ordered.reshape(blocks, chunks, 32, 2, 16)
    packed = []
    for width, first in format.planes:
        words = (ordered >> first).view(blocks, chunks, 32, 2, width, 16 // width).transpose(3, 4)
        bytes_ = pack_bits(words.reshape(blocks, chunks, 32, width, 32 // width), width)  # .., lane, word, byte
        if width == 8:
            bytes_ = bytes_.view(blocks, chunks, 32, 2, 16).transpose(2, 3)
        packed.append(bytes_.reshape(blocks, chunks, 128 * width))
    return torch.cat(packed, -1).contiguous()


def _unpack_mma(format: Format, sizes: Geometry, codes: torch.Tensor) -> torch.Tensor:
    blocks, chunks = sizes.padded_rows // BLOCK_ROWS, _chunks(sizes)
    ordered = torch.zeros(blocks, chunks, 32, 2, 16, dtype=torch.uint8, device=codes.device)
    planes = codes.split([128 * width for width, _ in format.planes], -1)
    for (width, first), plane in zip(format.planes, planes, strict=True):
        bytes_ = plane
        if width == 8:
            bytes_ = plane.reshape(blocks, chunks, 2, 32, 16).transpose(2, 3)
        words = unpack_bits(bytes_.reshape(blocks, chunks, 32, width, 4), width)
        words = words.view(blocks, chunks, 32, width, 2, 16 // width).transpose(3, 4)
        ordered |= words.reshape(blocks, chunks, 32, 2, 16) << first
    fields = ordered.view(blocks, chunks, 8, 4, 2, 4, 2, 2).permute(0, 7, 2, 1, 5, 6, 3, 4)
    return fields.reshape(sizes.padded_rows, chunks * CHUNK)


def _pack_rows_mma(sizes: Geometry, groups: int, tensor: torch.Tensor) -> torch.Tensor:
    blocks = sizes.padded_rows // BLOCK_ROWS
    rows = padded(tensor, sizes.padded_rows, groups).view(blocks, 2, 8, groups)
    return rows.permute(0, 3, 2, 1).reshape(blocks, groups, BLOCK_ROWS).contiguous()


def _unpack_rows_mma(sizes: Geometry, groups: int, tensor: torch.Tensor) -> torch.Tensor:
    blocks = sizes.padded_rows // BLOCK_ROWS
    rows = tensor.view(blocks, groups, 8, 2).permute(0, 3, 2, 1)
    return rows.reshape(sizes.padded_rows, groups)


# --------------------------------------------------------------------------------------------------------- interleaved


def _pack_interleaved(format: Format, sizes: Geometry, fields: torch.Tensor) -> torch.Tensor:
    fields = padded(fields, sizes.padded_rows, sizes.padded_columns)
    bytes_ = torch.cat([pack_bits(fields >> first, width) for width, first in format.planes], -1).contiguous()
    words = sizes.padded_columns * format.bits // 32
    return bytes_.flatten().view(torch.int32).view(sizes.padded_rows // BLOCK_ROWS, BLOCK_ROWS, words)


def _unpack_interleaved(format: Format, sizes: Geometry, codes: torch.Tensor) -> torch.Tensor:
    bytes_ = codes.contiguous().view(torch.uint8).view(sizes.padded_rows, sizes.padded_columns * format.bits // 8)
    planes = bytes_.split([sizes.padded_columns * width // 8 for width, _ in format.planes], -1)
    fields = torch.zeros(sizes.padded_rows, sizes.padded_columns, dtype=torch.uint8, device=codes.device)
    for (width, first), plane in zip(format.planes, planes, strict=True):
        fields |= unpack_bits(plane, width) << first
    return fields


def _pack_rows_interleaved(sizes: Geometry, groups: int, tensor: torch.Tensor) -> torch.Tensor:
    rows = padded(tensor, sizes.padded_rows, groups)
    return rows.contiguous().view(sizes.padded_rows // BLOCK_ROWS, BLOCK_ROWS, groups)


def _unpack_rows_interleaved(sizes: Geometry, groups: int, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(sizes.padded_rows, groups)


_Codes = Callable[[Format, Geometry, torch.Tensor], torch.Tensor]
_Rows = Callable[[Geometry, int, torch.Tensor], torch.Tensor]
_CONVERSIONS: dict[str, tuple[_Codes, _Codes, _Rows, _Rows]] = {
    "cpu": (_pack_cpu, _unpack_cpu, _pack_rows_cpu, _unpack_rows_cpu),
    "mma": (_pack_mma, _unpack_mma, _pack_rows_mma, _unpack_rows_mma),
    "interleaved": (_pack_interleaved, _unpack_interleaved, _pack_rows_interleaved, _unpack_rows_interleaved),
}
"""By layout: how codes are packed and unpacked, and how scales and zero-points are."""


def one_for_each_row(format: Format, shape: tuple[int, int], tensors: Tensors) -> Tensors:
    """Expands portable ``tensors`` whose rows share scales to a scale and a zero-point for each row."""
    return (tensors[0], *(of_rows(format, tensor, slice(0, shape[0])).contiguous() for tensor in tensors[1:]))


def shared_rows(format: Format, tensor: torch.Tensor) -> torch.Tensor:
    """Undoes ``one_for_each_row`` for scales or zero-points: takes those of the first row of each set."""
    if format.scale_rows == 1:
        return tensor
    return tensor[:: format.scale_rows or max(tensor.shape[0], 1)].contiguous()
