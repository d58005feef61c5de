"""Defines the layout "mma": tiles of 16 rows by 16 columns in the order in which a warp's tensor-core instructions read
them.

A tile is operand A of ``mma.sync.m16n8k16`` (and of wgmma, whose warp w reads rows 16w to 16w + 15). Of a tile, lane 4g
+ t of a warp reads rows g and g + 8 at columns 2t, 2t + 1, 2t + 8 and 2t + 9. These fill four registers of two 16-bit
floats each: register ``h + 2q`` is row g + 8h at columns 8q + 2t (low half) and 8q + 2t + 1 (high half). The layout
stores the codes that a lane needs of several tiles along K contiguously, so that one 16-byte load fetches them. Codes
are ordered within a word as in Kim et al., "Who Says Elephants Can't Run", and in the marlin kernels: a shift and a
logic instruction produce a register of two codes.

Np is N rounded up to 16, with rows of scale 0. Kc is the number of columns of the portable layout rounded up to 64,
with groups of scale 0.

codes
    4-bit: ``uint8[Np/16, Kc/64, 32, 16]``, indexed by row tile, block of 64 columns, lane, and byte. Word s of a lane's
    four is columns 16s to 16s + 15: its bits 4i to 4i + 3 are the low half of register i, and its bits 16 + 4i to
    16 + 4i + 3 the high half. Signed codes are stored with a bias of 8.
    8-bit: ``uint8[Np/16, Kc/32, 32, 16]``, with two words for 16 columns. The bytes of word q, lowest first, are the
    low half of register 2q, the low half of register 2q + 1, the high half of register 2q and the high half of register
    2q + 1.
scales
    ``[Np/16, groups, 16]`` of the format's scale dtype, for all groups of Kc columns. Index 2g + h is row g + 8h, so
    that the two scales of a lane are neighbours.
zeros
    ``uint8[Np/16, groups, 16]``, indexed like the scales, in formats with zero-points.

``templates/gemm/include/jitgen/gemm_quant.cuh`` reads this layout.
"""

from __future__ import annotations

import torch

from jitgen.quant.formats import Format, Geometry, geometry, round_up
from jitgen.quant.layouts import Tensors
from jitgen.quant.layouts.portable import padded

BLOCK_ROWS = 16
CHUNK = 64
"""K is padded to a multiple of this many columns: with 4 bits, those that one 16-byte load of each lane covers."""


def pack(format: Format, group_size: int | None, shape: tuple[int, int], tensors: Tensors) -> Tensors:
    """Converts ``tensors`` from the portable layout to this one."""
    sizes = geometry(group_size, shape)
    codes, *rest = tensors
    columns, groups = _padded_sizes(sizes, group_size)
    blocks = sizes.padded_rows // BLOCK_ROWS
    if format.bits == 8:
        # From rows (h, g) and columns (block of 32, step of 16, q, t, pair) to (block, g, t, step, q, pair, h).
        plain = padded(codes.view(torch.uint8), sizes.padded_rows, columns)
        ordered = plain.view(blocks, 2, 8, columns // 32, 2, 2, 4, 2).permute(0, 3, 2, 6, 4, 5, 7, 1)
        packed = ordered.reshape(blocks, columns // 32, 32, 16)
    else:
        plain = padded(codes, sizes.padded_rows, columns // 2)
        if format.signed:
            plain = plain ^ 0x88
        # A byte is the pair of columns 2t and 2t + 1. From rows (h, g) and bytes (chunk, step, q, t) to registers,
        # (chunk, g, t, step, q, h).
        registers = plain.view(blocks, 2, 8, columns // CHUNK, 4, 2, 4).permute(0, 3, 2, 6, 4, 5, 1)
        first, second = registers[..., 0], registers[..., 1]
        low = first & 0x0F | second << 4
        high = first >> 4 | second & 0xF0
        packed = torch.stack([low, high], -2).reshape(blocks, columns // CHUNK, 32, 16)
    return (packed.contiguous(), *(_row_blocks(padded(tensor, sizes.padded_rows, groups), blocks) for tensor in rest))


def unpack(format: Format, group_size: int | None, shape: tuple[int, int], tensors: Tensors) -> Tensors:
    """Converts ``tensors`` from this layout to the portable one."""
    sizes = geometry(group_size, shape)
    codes, *rest = tensors
    columns, groups = _padded_sizes(sizes, group_size)
    blocks = sizes.padded_rows // BLOCK_ROWS
    if format.bits == 8:
        ordered = codes.view(blocks, columns // 32, 8, 4, 2, 2, 2, 2).permute(0, 7, 2, 1, 4, 5, 3, 6)
        plain = ordered.reshape(sizes.padded_rows, columns)[:, : sizes.padded_columns]
    else:
        halves = codes.view(blocks, columns // CHUNK, 8, 4, 4, 2, 2)  # .., step, half, q
        low, high = halves[..., 0, :], halves[..., 1, :]
        registers = torch.stack([low & 0x0F | high << 4, low >> 4 | high & 0xF0], -1)
        plain = registers.permute(0, 6, 2, 1, 4, 5, 3).reshape(sizes.padded_rows, columns // 2)
        plain = plain[:, : sizes.padded_columns // 2]
        if format.signed:
            plain = plain ^ 0x88
    plain = plain[: sizes.rows].contiguous().view(format.storage_dtype)
    rows = [tensor.view(blocks, groups, 8, 2).permute(0, 3, 2, 1).reshape(sizes.padded_rows, groups) for tensor in rest]
    return (plain, *(tensor[: sizes.rows, : sizes.groups].contiguous() for tensor in rows))


def _padded_sizes(sizes: Geometry, group_size: int | None) -> tuple[int, int]:
    """Returns the number of columns rounded up to whole chunks, and the number of groups that cover them."""
    columns = round_up(sizes.padded_columns, CHUNK)
    return columns, -(-columns // group_size) if group_size else 1


def _row_blocks(tensor: torch.Tensor, blocks: int) -> torch.Tensor:
    """Rearranges ``[Np, groups]`` as ``[Np/16, groups, 16]``, with rows g and g + 8 next to each other."""
    groups = tensor.shape[1]
    return tensor.view(blocks, 2, 8, groups).permute(0, 3, 2, 1).reshape(blocks, groups, 16).contiguous()
