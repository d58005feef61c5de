"""Makes products of codes of an activation, of one byte, and a quantised weight what the CUDA dialect has a mainloop
for.

wgmma multiplies int8 codes by 4-bit codes of the layout "mma8", which lanes decode to int8 (``gemm_wgmma_codes.cuh``).
Where there is no such mainloop, on other targets and for weights of other layouts, the activation's codes become
bfloat16, which has them all, and meet weights that are decoded to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jitgen.device import Device
from jitgen.errors import UnsupportedError
from jitgen.families.family import Partition
from jitgen.families.gemm.mainloops import BYTES
from jitgen.ir import symbols
from jitgen.ir.body import BLOCK, BLOCKS
from jitgen.ir.graph import Node, kinds_of, topological
from jitgen.ir.nodes import DEQUANTIZE
from jitgen.ir.patterns import Rewrite, Rewriter, Rewrites, contract, wildcards
from jitgen.ir.views import Mover

COLUMNS = 16
"""Columns of a tile of the layouts."""


def products_of_low_bits(values: Sequence[Node], partition: Partition) -> Sequence[Node]:
    """Rewrites the products of ``values`` of codes and quantised weights for which the target has no mainloop."""
    device = partition.device
    if device.dialect != "cuda" or DEQUANTIZE not in kinds_of(values):
        return values
    if not any(product.match(node) or in_blocks.match(node) for node in topological(values)):
        return values
    images = _Rewriter(_REWRITES, partition.mover, device).images(values)
    return [images[id(value)] for value in values]


class _Rewriter(Rewriter):
    """Rewrites products for ``device``."""

    def __init__(self, rewrites: Rewrites, mover: Mover, device: Device) -> None:
        super().__init__(rewrites, mover)
        self.has_mainloop = device.target.arch == "sm_90a" and device.has_tensor_maps


def _has_no_mainloop(rewriter: _Rewriter, x: Node, weight: Node) -> bool:
    return not rewriter.has_mainloop or x.dtype != "int8" or weight.under_views.attrs.layout != "mma8"


def _as_bfloat16(rewriter: _Rewriter, node: Node, x: Node, weight: Node) -> Node | None:
    codes = rewriter.make("cast", (x,), "bfloat16", x.shape, (), node.location)
    base = weight.under_views
    if base.attrs.layout == "mma8":  # the layout of the mainloops of 16 bits, but for the order of columns
        if base is not weight:
            return None
        codes = _in_the_order_of(rewriter.mover, codes)
        weight = rewriter.like(base, base.inputs, attrs=(*base.attrs[:2], "mma"))
    return rewriter.like(node, (codes, weight))


def _in_the_order_of(mover: Mover, x: Node) -> Node:
    """Orders the columns of ``x`` as "mma8" does: 4t + 2j + q of 16 come to 8q + 2t + j."""
    *lead, length = x.shape
    tiles: tuple[Any, ...] = (*lead, symbols.floordiv(length, COLUMNS))
    rank = len(tiles)
    split = mover.move(x, ("reshape",), (*tiles, 4, 2, 2))
    ordered = mover.move(split, ("permute", (*range(rank), rank + 2, rank, rank + 1)), (*tiles, 2, 4, 2))
    return mover.move(ordered, ("reshape",), x.shape)


def _with_decoded_blocks(rewriter: _Rewriter, node: Node, x: Node, weight: Node) -> Node:
    """Computes the product with a weight that has scales of blocks as one with a dense weight."""
    move, make, (codes, scales) = rewriter.mover.move, rewriter.make, weight.inputs
    rows, length = weight.shape
    if not all(rewriter.mover.decide(symbols.compare("eq", symbols.mod(size, BLOCK), 0)) for size in (rows, length)):
        raise UnsupportedError(
            f"a weight with scales of blocks of {BLOCK} x {BLOCK} and {rows} rows has a kernel on sm_90a alone; take a "
            "multiple of the block, or weight.with_activation(None)"
        )
    down, along = scales.shape
    split = move(move(scales, ("unsqueeze", 1), (down, 1, along)), ("unsqueeze", 3), (down, 1, along, 1))
    whole = move(split, ("expand",), (down, BLOCK, along, BLOCK))
    values = make("cast", (codes,), "float32", codes.shape, (), node.location)
    dense = make("mul", (values, move(whole, ("reshape",), weight.shape)), "float32", weight.shape, (), node.location)
    return rewriter.like(node, (x, dense))


x, weight = wildcards("x weight")
in_blocks = contract(x, weight.where(lambda node: node.kind is DEQUANTIZE and node.attrs.layout == BLOCKS))
product = contract(x.where(lambda node: node.dtype in BYTES), weight.where(lambda node: node.is_weight))

_REWRITES = Rewrites(
    Rewrite(
        "a weight with scales of blocks is decoded before its product, which has no mainloop of codes",
        in_blocks,
        _with_decoded_blocks,
        lambda rewriter: not rewriter.has_mainloop,
    ),
    Rewrite(
        "codes of an activation become bfloat16: there is no mainloop of them and these weights",
        product,
        _as_bfloat16,
        _has_no_mainloop,
    ),
)
