"""Defines the layout "mma8": the layout "mma" of 4-bit weights, with columns in the order in which instructions for
operands of one byte read them.

A nibble of a word of "mma" is of column 8q + 2t + j of 16, for lane t of a warp. Instructions for operands of one byte
have lane t read columns 4t to 4t + 3, of which a word's nibbles become the bytes in the order of 2j + q
(``templates/gemm/include/jitgen/gemm_wgmma_codes.cuh``). So column 4t + 2j + q is stored where "mma" has 8q + 2t + j.
Scales and zero-points are those of "mma", and so are weights of other formats, which no kernel reads so.
"""

from __future__ import annotations

import torch

from jitgen.quant.formats import Format
from jitgen.quant.layouts import Tensors, mma
from jitgen.quant.layouts.portable import pack_codes, unpack_codes

COLUMNS = 16
"""Columns of a tile, within which they are in another order. K is a multiple of it."""
ORDER = tuple(4 * t + 2 * j + q for q in range(2) for t in range(4) for j in range(2))
"""The column that is stored at each position of a tile of "mma"."""


def pack(format: Format, group_size: int | None, shape: tuple[int, int], tensors: Tensors) -> Tensors:
    """Converts ``tensors`` from the portable layout to this one."""
    codes, *rest = tensors
    return mma.pack(format, group_size, shape, (_ordered(format, codes, ORDER), *rest))


def unpack(format: Format, group_size: int | None, shape: tuple[int, int], tensors: Tensors) -> Tensors:
    """Converts ``tensors`` from this layout to the portable one."""
    codes, *rest = mma.unpack(format, group_size, shape, tensors)
    back = tuple(ORDER.index(column) for column in range(COLUMNS))
    return (_ordered(format, codes, back), *rest)


def _ordered(format: Format, codes: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    if format.bits != 4:
        return codes
    columns = unpack_codes(format, codes)
    tiles = columns.unflatten(-1, (-1, COLUMNS))[..., list(order)]
    return pack_codes(format, tiles.flatten(-2))
