"""The layout "cpu": 16 rows side by side, so that one vector register holds a weight of each of them.

codes
    4-bit: ``uint8[Np/16, Kp/8, 64]``. The word of row ``r`` of the 16 is bytes 4r to 4r + 3, lowest first; it has eight
    consecutive columns: bits 4j to 4j + 3 are column 2j for j < 4 and column 2(j - 4) + 1 for the others, so that the
    two halves of the word, shifted together, are a pair of neighbours (what a dot product of bfloat16 takes).
    8-bit: ``uint8[Np/16, Kp/4, 64]``, four consecutive columns to a word, in the order 0, 2, 1, 3. Signed codes are
    stored with 8 or 128 added.
scales
    ``[Np/16, groups, 16]`` of the format's scale dtype.
zeros
    ``uint8[Np/16, groups, 16]``, for formats with zero-points.

N is padded to whole sixteens with rows of scale 0. Read by ``templates/cpp/include/jitgen/gemm_weights.hpp``.
"""

from __future__ import annotations

import torch

from jitgen.quant.formats import Format, geometry
from jitgen.quant.layouts import Parts
from jitgen.quant.layouts.portable import grown

BLOCK_ROWS = 16


def pack(format: Format, group_size: int | None, shape: tuple[int, int], parts: Parts) -> Parts:
    """The parts of this layout, from those of the portable one."""
    sizes = geometry(group_size, shape)
    codes, *rest = (grown(part, sizes.padded_rows, part.shape[1]) for part in parts)
    blocks = sizes.padded_rows // BLOCK_ROWS
    if format.bits == 8:
        biased = codes.view(torch.uint8) ^ (0x80 if format.signed else 0)
        packed = biased.view(blocks, BLOCK_ROWS, sizes.padded_columns // 4, 2, 2).permute(0, 2, 1, 4, 3)
    else:
        # A byte of the portable layout is columns 2b (low) and 2b + 1, each byte of a word two places here.
        bytes_ = codes.view(blocks, BLOCK_ROWS, sizes.padded_columns // 8, 4).transpose(1, 2)
        if format.signed:
            bytes_ = bytes_ ^ 0x88
        low, high = bytes_ & 0x0F, bytes_ >> 4
        places = [half[..., place] for half in (low, high) for place in range(4)]
        packed = torch.stack([places[2 * i] | places[2 * i + 1] << 4 for i in range(4)], -1)
    packed = packed.reshape(blocks, packed.shape[1], 4 * BLOCK_ROWS)
    return (packed.contiguous(), *(_sixteens(part, blocks) for part in rest))


def unpack(format: Format, group_size: int | None, shape: tuple[int, int], parts: Parts) -> Parts:
    """The parts of the portable layout, from those of this one."""
    sizes = geometry(group_size, shape)
    codes, *rest = parts
    words = codes.unflatten(-1, (BLOCK_ROWS, 4)).transpose(1, 2)
    if format.bits == 8:
        plain = words.unflatten(-1, (2, 2)).transpose(-1, -2).reshape(sizes.padded_rows, sizes.padded_columns)
        plain = plain ^ (0x80 if format.signed else 0)
    else:
        nibbles = [nibble for byte in range(4) for nibble in (words[..., byte] & 0x0F, words[..., byte] >> 4)]
        plain = torch.stack([nibbles[place] | nibbles[place + 4] << 4 for place in range(4)], -1)
        plain = plain.reshape(sizes.padded_rows, sizes.padded_columns // 2)
        if format.signed:
            plain = plain ^ 0x88
    plain = plain[: sizes.rows].contiguous().view(format.storage_dtype)
    rows = [part.transpose(1, 2).reshape(sizes.padded_rows, sizes.groups) for part in rest]
    return (plain, *(part[: sizes.rows].contiguous() for part in rows))


def _sixteens(part: torch.Tensor, blocks: int) -> torch.Tensor:
    """``[Np, groups]`` as ``[Np/16, groups, 16]``."""
    return part.view(blocks, BLOCK_ROWS, part.shape[1]).transpose(1, 2).contiguous()
