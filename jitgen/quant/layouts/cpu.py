"""Defines the layout "cpu": blocks of 16 rows, interleaved so that a vector register has one weight of each row.

Np and Kp are N and K after padding: N is padded to a multiple of 16 with rows of scale 0, K as in the portable layout.

codes
    4-bit: ``uint8[Np/16, Kp/8, 64]``. Each row of the block has one 32-bit word, little-endian: row ``r`` has bytes 4r
    to 4r + 3. A word stores eight consecutive columns: its bits 4j to 4j + 3 are column 2j for j < 4 and column
    2(j - 4) + 1 otherwise. The same shift of both 16-bit halves therefore yields two neighbouring columns, the
    pair that a bfloat16 dot product takes.
    8-bit: ``uint8[Np/16, Kp/4, 64]``. A word stores four consecutive columns in the order 0, 2, 1, 3. Signed codes are
    stored with a bias of 8 (4-bit) or 128 (8-bit).
scales
    ``[Np/16, groups, 16]`` of the format's scale dtype.
zeros
    ``uint8[Np/16, groups, 16]``, in formats with zero-points.

``templates/common/include/jitgen/gemm_weights.hpp`` reads this layout.
"""

from __future__ import annotations

import torch

from jitgen.quant.formats import Format, geometry
from jitgen.quant.layouts import Tensors
from jitgen.quant.layouts.portable import padded

BLOCK_ROWS = 16


def pack(format: Format, group_size: int | None, shape: tuple[int, int], tensors: Tensors) -> Tensors:
    """Converts ``tensors`` from the portable layout to this one."""
    sizes = geometry(group_size, shape)
    codes, *rest = (padded(tensor, sizes.padded_rows, tensor.shape[1]) for tensor in tensors)
    blocks = sizes.padded_rows // BLOCK_ROWS
    if format.bits == 8:
        biased = codes.view(torch.uint8) ^ (0x80 if format.signed else 0)
        packed = biased.view(blocks, BLOCK_ROWS, sizes.padded_columns // 4, 2, 2).permute(0, 2, 1, 4, 3)
    else:
        # Byte b of the portable layout is columns 2b (low nibble) and 2b + 1; here they go to different nibbles.
        bytes_ = codes.view(blocks, BLOCK_ROWS, sizes.padded_columns // 8, 4).transpose(1, 2)
        if format.signed:
            bytes_ = bytes_ ^ 0x88
        low, high = bytes_ & 0x0F, bytes_ >> 4
        nibbles = [half[..., byte] for half in (low, high) for byte in range(4)]
        packed = torch.stack([nibbles[2 * i] | nibbles[2 * i + 1] << 4 for i in range(4)], -1)
    packed = packed.reshape(blocks, packed.shape[1], 4 * BLOCK_ROWS)
    return (packed.contiguous(), *(_row_blocks(tensor, blocks) for tensor in rest))


def unpack(format: Format, group_size: int | None, shape: tuple[int, int], tensors: Tensors) -> Tensors:
    """Converts ``tensors`` from this layout to the portable one."""
    sizes = geometry(group_size, shape)
    codes, *rest = tensors
    words = codes.unflatten(-1, (BLOCK_ROWS, 4)).transpose(1, 2)
    if format.bits == 8:
        plain = words.unflatten(-1, (2, 2)).transpose(-1, -2).reshape(sizes.padded_rows, sizes.padded_columns)
        plain = plain ^ (0x80 if format.signed else 0)
    else:
        nibbles = [nibble for byte in range(4) for nibble in (words[..., byte] & 0x0F, words[..., byte] >> 4)]
        plain = torch.stack([nibbles[byte] | nibbles[byte + 4] << 4 for byte in range(4)], -1)
        plain = plain.reshape(sizes.padded_rows, sizes.padded_columns // 2)
        if format.signed:
            plain = plain ^ 0x88
    plain = plain[: sizes.rows].contiguous().view(format.storage_dtype)
    rows = [tensor.transpose(1, 2).reshape(sizes.padded_rows, sizes.groups) for tensor in rest]
    return (plain, *(tensor[: sizes.rows].contiguous() for tensor in rows))


def _row_blocks(tensor: torch.Tensor, blocks: int) -> torch.Tensor:
    """Rearranges ``[Np, groups]`` as ``[Np/16, groups, 16]``."""
    return tensor.view(blocks, BLOCK_ROWS, tensor.shape[1]).transpose(1, 2).contiguous()
