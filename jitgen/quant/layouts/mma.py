"""The layout "mma": the order in which a warp's tensor-core instructions take a weight, tile by tile of 16 by 16.

Lane 4g + t of a warp holds of such a tile rows g and g + 8 at columns 2t, 2t + 1, 2t + 8 and 2t + 9, as operand A of
``mma.sync.m16n8k16`` (and of wgmma, whose warp w has rows 16w): four registers of two 16-bit floats each, register
``h + 2q`` being row g + 8h at columns 8q + 2t (low half) and 8q + 2t + 1. The layout gives each lane the codes of
several tiles along K in one 16-byte load. The order of codes within a word is the one of Kim et al., "Who Says
Elephants Can't Run", and of the marlin kernels, by which a shift and a logic instruction give a register of two codes.

codes
    4-bit: ``uint8[Np/16, Kc/64, 32, 16]``, Kc being the portable layout's columns rounded up to 64; by row tile, 64
    columns, lane: word s of the lane's four is columns 16s to 16s + 15, its bits 4i to 4i + 3 the low half of register
    i and its bits 16 + 4i to 16 + 4i + 3 the high half. Signed codes have 8 added.
    8-bit: ``uint8[Np/16, Kc/32, 32, 16]``: two words for 16 columns. The bytes of word q, lowest first, are register
    2q's low half, register 2q + 1's low half, register 2q's high half and register 2q + 1's high half.
scales
    ``[Np/16, groups, 16]`` of the format's scale dtype, for all groups of Kc columns; at 2g + h is row g + 8h, so that
    a lane's two scales are neighbours.
zeros
    ``uint8[Np/16, groups, 16]`` alike, for formats with zero-points.

N is padded to whole sixteens with rows of scale 0, K with groups of scale 0. Read by
``templates/cuda/include/jitgen/gemm_quant.cuh``.
"""

from __future__ import annotations

import torch

from jitgen.quant.formats import Format, Geometry, geometry, round_up
from jitgen.quant.layouts import Parts
from jitgen.quant.layouts.portable import grown

BLOCK_ROWS = 16
CHUNK = 64
"""Columns that a lane's loads cover at a time."""


def pack(format: Format, group_size: int | None, shape: tuple[int, int], parts: Parts) -> Parts:
    """The parts of this layout, from those of the portable one."""
    sizes = geometry(group_size, shape)
    codes, *rest = parts
    columns, groups = _padded(sizes, group_size)
    blocks = sizes.padded_rows // BLOCK_ROWS
    if format.bits == 8:
        # Rows (h, g), columns (32 columns, k16 step, q, t, pair) to (.., g, t, step, q, pair, h).
        plain = grown(codes.view(torch.uint8), sizes.padded_rows, columns)
        places = plain.view(blocks, 2, 8, columns // 32, 2, 2, 4, 2).permute(0, 3, 2, 6, 4, 5, 7, 1)
        packed = places.reshape(blocks, columns // 32, 32, 16)
    else:
        plain = grown(codes, sizes.padded_rows, columns // 2)
        if format.signed:
            plain = plain ^ 0x88
        # A byte is a pair (2t, 2t + 1). Rows (h, g), bytes (chunk, step, q, t) to (chunk, g, t, step, q, h): registers.
        registers = plain.view(blocks, 2, 8, columns // CHUNK, 4, 2, 4).permute(0, 3, 2, 6, 4, 5, 1)
        first, second = registers[..., 0], registers[..., 1]
        low = first & 0x0F | second << 4
        high = first >> 4 | second & 0xF0
        packed = torch.stack([low, high], -2).reshape(blocks, columns // CHUNK, 32, 16)
    return (packed.contiguous(), *(_sixteens(grown(part, sizes.padded_rows, groups), blocks) for part in rest))


def unpack(format: Format, group_size: int | None, shape: tuple[int, int], parts: Parts) -> Parts:
    """The parts of the portable layout, from those of this one."""
    sizes = geometry(group_size, shape)
    codes, *rest = parts
    columns, groups = _padded(sizes, group_size)
    blocks = sizes.padded_rows // BLOCK_ROWS
    if format.bits == 8:
        places = codes.view(blocks, columns // 32, 8, 4, 2, 2, 2, 2).permute(0, 7, 2, 1, 4, 5, 3, 6)
        plain = places.reshape(sizes.padded_rows, columns)[:, : sizes.padded_columns]
    else:
        halves = codes.view(blocks, columns // CHUNK, 8, 4, 4, 2, 2)  # .., step, half, q
        low, high = halves[..., 0, :], halves[..., 1, :]
        registers = torch.stack([low & 0x0F | high << 4, low >> 4 | high & 0xF0], -1)
        plain = registers.permute(0, 6, 2, 1, 4, 5, 3).reshape(sizes.padded_rows, columns // 2)
        plain = plain[:, : sizes.padded_columns // 2]
        if format.signed:
            plain = plain ^ 0x88
    plain = plain[: sizes.rows].contiguous().view(format.storage_dtype)
    rows = [part.view(blocks, groups, 8, 2).permute(0, 3, 2, 1).reshape(sizes.padded_rows, groups) for part in rest]
    return (plain, *(part[: sizes.rows, : sizes.groups].contiguous() for part in rows))


def _padded(sizes: Geometry, group_size: int | None) -> tuple[int, int]:
    """Columns rounded up to whole chunks, and groups that cover them."""
    columns = round_up(sizes.padded_columns, CHUNK)
    return columns, -(-columns // group_size) if group_size else 1


def _sixteens(part: torch.Tensor, blocks: int) -> torch.Tensor:
    """``[Np, groups]`` as ``[Np/16, groups, 16]``, rows g and g + 8 side by side."""
    return part.view(blocks, 2, 8, part.shape[1]).permute(0, 3, 2, 1).reshape(blocks, part.shape[1], 16).contiguous()
