"""Defines the layout "interleaved": row-major, with the codes that one thread feeds to a tensor core next to each
other.

Four threads share a row of the left operand of a tensor-core instruction: of 16 columns thread t reads 2t, 2t + 1, 2t +
8 and 2t + 9. This layout stores the eight codes that a thread reads of 32 columns contiguously. A tile loaded as words
then is the operand up to decoding, and neither bytes nor 16-bit halves are gathered through shared memory.

Np and Kp are N and K after padding: N is padded to a multiple of 16 with rows of scale 0, K as in the portable layout.

codes
    ``int32[Np/16, 16, Kp * bits / 32]``, indexed by block of 16 rows, row, and word. Of every 32 columns, column
    16s + 8h + 2t + n (s, h and n are 0 or 1, t is 0 to 3) is, with 4 bits, in word t at bit 4(2s + h) + 16n; with 8
    bits, in word 2t + s at byte h + 2n. Signed 4-bit codes are stored with a bias of 8.
scales
    ``[Np/16, 16, groups]`` of the format's scale dtype. The scales of a row are contiguous, so that a thread which
    advances along its rows finds most of them in the first-level cache.
zeros
    ``int16[Np/16, 16, groups]``, in formats with zero-points. They are not bytes, because Triton chooses how to
    distribute an operand over threads by the narrowest type that it is computed from.

``families/gemm/triton_products.py`` reads this layout.
"""

from __future__ import annotations

import torch

from jitgen.quant.formats import Format, geometry
from jitgen.quant.layouts import Tensors
from jitgen.quant.layouts.portable import padded

BLOCK_ROWS = 16
CHUNK = 32
"""The columns of which a thread's codes are contiguous. Every group size is a multiple of it."""


def pack(format: Format, group_size: int | None, shape: tuple[int, int], tensors: Tensors) -> Tensors:
    """Converts ``tensors`` from the portable layout to this one."""
    sizes = geometry(group_size, shape)
    codes, *rest = (padded(tensor, sizes.padded_rows, tensor.shape[1]) for tensor in tensors)
    rows, chunks, blocks = sizes.padded_rows, sizes.padded_columns // CHUNK, sizes.padded_rows // BLOCK_ROWS
    if format.bits == 8:
        packed = codes.view(torch.uint8).view(rows, chunks, 2, 2, 4, 2).permute(0, 1, 4, 2, 5, 3)
    else:
        biased = codes ^ 0x88 if format.signed else codes
        first, second = biased.view(rows, chunks, 2, 2, 4).permute(0, 1, 4, 2, 3).unbind(-1)  # .., t, s
        packed = torch.stack([first & 0x0F | second << 4, first >> 4 | second & 0xF0], -2)
    words = packed.flatten().view(torch.int32).view(blocks, BLOCK_ROWS, codes.shape[1] // 4)
    per_group = (tensor if tensor.is_floating_point() else tensor.to(torch.int16) for tensor in rest)
    return (words, *(tensor.view(blocks, BLOCK_ROWS, sizes.groups) for tensor in per_group))


def unpack(format: Format, group_size: int | None, shape: tuple[int, int], tensors: Tensors) -> Tensors:
    """Converts ``tensors`` from this layout to the portable one."""
    sizes = geometry(group_size, shape)
    codes, *rest = tensors
    rows, chunks = sizes.padded_rows, sizes.padded_columns // CHUNK
    if format.bits == 8:
        plain = codes.view(torch.uint8).view(rows, chunks, 4, 2, 2, 2).permute(0, 1, 3, 5, 2, 4)
    else:
        low, high = codes.view(torch.uint8).view(rows, chunks, 4, 2, 2).unbind(-2)  # .., t, s
        halves = torch.stack([low & 0x0F | high << 4, low >> 4 | high & 0xF0], -1)
        plain = halves.permute(0, 1, 3, 4, 2)
        plain = plain ^ 0x88 if format.signed else plain
    plain = plain.reshape(rows, sizes.padded_columns // format.codes_per_byte)[: sizes.rows]
    per_group = (tensor.view(rows, sizes.groups)[: sizes.rows] for tensor in rest)
    portable = (tensor if tensor.is_floating_point() else tensor.to(torch.uint8) for tensor in per_group)
    return (plain.contiguous().view(format.storage_dtype), *(tensor.contiguous() for tensor in portable))
