"""The layout "interleaved": rows of codes one after the other, each thread's share of a tensor-core operand together.

Thread t of the four that hold a row of a tensor-core instruction's left operand has of sixteen columns 2t, 2t + 1,
2t + 8 and 2t + 9. Of every 32 columns its eight codes lie side by side here, so that a tile loaded as words is that
operand already but for the decoding, and neither bytes nor 16-bit halves have to be gathered from shared memory.

codes
    ``int32[Np/16, 16, Kp * bits / 32]``; by 16 rows, row, and 32 columns, in which column 16s + 8h + 2t + n is in
    (4-bit) word t, its bits 4(2s + h) + 16n and up, or (8-bit) word 2t + s, its byte h + 2n. Signed codes of 4 bits
    have 8 added.
scales
    ``[Np/16, 16, groups]`` of the format's scale dtype: a row's lie together, so that a thread which loads those of its
    rows step by step finds most in the first-level cache.
zeros
    ``int16[Np/16, 16, groups]``, for formats with zero-points. (How Triton spreads an operand over threads depends on
    the narrowest number that it is computed from: it must not be bytes.)

N is padded to whole sixteens with rows of scale 0. Read by ``families/gemm/triton_products.py``.
"""

from __future__ import annotations

import torch

from jitgen.quant.formats import Format, geometry
from jitgen.quant.layouts import Parts
from jitgen.quant.layouts.portable import grown

BLOCK_ROWS = 16
CHUNK = 32
"""Columns of which each thread's codes lie together; every group is whole chunks."""


def pack(format: Format, group_size: int | None, shape: tuple[int, int], parts: Parts) -> Parts:
    """The parts of this layout, from those of the portable one."""
    sizes = geometry(group_size, shape)
    codes, *rest = (grown(part, sizes.padded_rows, part.shape[1]) for part in parts)
    rows, chunks, blocks = sizes.padded_rows, sizes.padded_columns // CHUNK, sizes.padded_rows // BLOCK_ROWS
    if format.bits == 8:
        packed = codes.view(torch.uint8).view(rows, chunks, 2, 2, 4, 2).permute(0, 1, 4, 2, 5, 3)
    else:
        biased = codes ^ 0x88 if format.signed else codes
        first, second = biased.view(rows, chunks, 2, 2, 4).permute(0, 1, 4, 2, 3).unbind(-1)  # .., t, s
        packed = torch.stack([first & 0x0F | second << 4, first >> 4 | second & 0xF0], -2)
    words = packed.flatten().view(torch.int32).view(blocks, BLOCK_ROWS, codes.shape[1] // 4)
    scales = (part if part.is_floating_point() else part.to(torch.int16) for part in rest)
    return (words, *(part.view(blocks, BLOCK_ROWS, sizes.groups) for part in scales))


def unpack(format: Format, group_size: int | None, shape: tuple[int, int], parts: Parts) -> Parts:
    """The parts of the portable layout, from those of this one."""
    sizes = geometry(group_size, shape)
    codes, *rest = parts
    rows, chunks = sizes.padded_rows, sizes.padded_columns // CHUNK
    if format.bits == 8:
        plain = codes.view(torch.uint8).view(rows, chunks, 4, 2, 2, 2).permute(0, 1, 3, 5, 2, 4)
    else:
        low, high = codes.view(torch.uint8).view(rows, chunks, 4, 2, 2).unbind(-2)  # .., t, s
        halves = torch.stack([low & 0x0F | high << 4, low >> 4 | high & 0xF0], -1)
        plain = halves.permute(0, 1, 3, 4, 2)
        plain = plain ^ 0x88 if format.signed else plain
    plain = plain.reshape(rows, sizes.padded_columns // format.codes_per_byte)[: sizes.rows]
    scales = (part.view(rows, sizes.groups)[: sizes.rows] for part in rest)
    portable = (part if part.is_floating_point() else part.to(torch.uint8) for part in scales)
    return (plain.contiguous().view(format.storage_dtype), *(part.contiguous() for part in portable))
