"""Makes products of an activation that is quantised and a quantised weight what the dialect has a mainloop for.

A trace has the activation's codes cast to floats, which is the product that every dialect has. The layout of the
weight's tensors says which other it becomes:

``rows``
    A product of dense codes, whose sums are multiplied by the weight's scales.
``interleaved``, ``cpu``
    Codes meet the weight, which kernels decode as they read it. Those of a CPU do so with int8 activations; 8-bit
    floats become float32 there.
``mma8``
    wgmma multiplies int8 codes by 4-bit codes, which lanes decode to int8 (``gemm_wgmma_codes.cuh``). On other targets
    the activation's codes become bfloat16, and meet weights that are decoded to it.
``blocks``
    Codes with scales of blocks (``block_products.py``): the activation's values are float32.

Codes with scales of 32 columns (MX) and weights with such are multiplied as they are in Triton, on targets that have an
instruction for it (``scaled_formats``); elsewhere the activation's values are of its own dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jitgen.device import Device
from jitgen.errors import UnsupportedError
from jitgen.families.family import Partition
from jitgen.families.gemm.block_products import multiplies_blocks, product_of_scaled, scaled_formats
from jitgen.ir import symbols
from jitgen.ir.graph import Node, kinds_of
from jitgen.ir.nodes import BLOCKS, CAST, DEQUANTIZE
from jitgen.ir.patterns import Rewrite, Rewriter, Rewrites, contract, operation, wildcards
from jitgen.ir.views import Mover
from jitgen.quant.activations import ACTIVATIONS, MX_BLOCK, kind_of
from jitgen.quant.codes import BLOCK
from jitgen.spec import dtype_name

CODES_OF_ACTIVATIONS = {dtype_name(kind.dtype) for kind in ACTIVATIONS.values()}
COLUMNS = 16
"""Columns of a tile of the layouts."""
SCALED_WEIGHTS = ("mxfp8", "mxfp4")
DECODED = "codes with scales of 32 columns and {} weights are decoded: {}"


def products_of_low_bits(values: Sequence[Node], partition: Partition) -> Sequence[Node]:
    """Rewrites the products of ``values`` of activations that are quantised and quantised weights."""
    if DEQUANTIZE not in kinds_of(values):
        return values
    if not partition.mover.any_behind(values, _quantizes):
        return values
    images = _Rewriter(_REWRITES, partition.mover, partition.device).images(values)
    return [images[id(value)] for value in values]


class _Rewriter(Rewriter):
    """Rewrites products for ``device``."""

    def __init__(self, rewrites: Rewrites, mover: Mover, device: Device) -> None:
        super().__init__(rewrites, mover)
        self.has_mainloop = multiplies_blocks(device)
        self.scaled_formats = scaled_formats(device)


def _quantizes(weight: Node) -> bool:
    """Returns whether products of ``weight``, a quantised one or a view of it, quantise what they multiply with it."""
    base = weight.under_views
    return base.kind is DEQUANTIZE and base.attrs.activation is not None


def _values(x: Node) -> Node:
    """Returns the values of an activation with scales of blocks, float32, of which ``x`` may be the rounded ones."""
    return x.inputs[0] if x.kind is CAST and x.inputs[0].dtype == "float32" else x


def _unrounded(rewriter: _Rewriter, node: Node, x: Node, weight: Node) -> Node | None:
    values = _values(x)
    return None if values is x else rewriter.like(node, (values, *node.inputs[1:]))


def _whole(rewriter: _Rewriter, node: Node, x: Node, weight: Node) -> Node:
    """Computes the product with a weight of which ``weight`` has rows that do not begin with a block, and takes their
    columns."""
    base, start, last = weight.under_views, 0, len(node.shape) - 1
    for (_, _, first, _), _ in weight.movements:
        start = symbols.add(start, first)  # type: ignore[assignment]
    product = rewriter.make(
        node.op, (_values(x), base), node.dtype, (*node.shape[:-1], base.shape[0]), node.attrs, node.location
    )
    return rewriter.make("view", (product,), node.dtype, node.shape, ("slice", last, start, 1), node.location)


def _cuts_blocks(rewriter: _Rewriter, weight: Node) -> bool:
    slices = [attrs for attrs, _ in weight.movements if attrs[0] == "slice"]
    begin_with_blocks = (symbols.compare("eq", symbols.mod(start, BLOCK), 0) for _, _, start, _ in slices)
    return not all(map(rewriter.mover.decide, begin_with_blocks))


def _of_dense_codes(rewriter: _Rewriter, node: Node, x: Node, weight: Node) -> Node:
    """Computes ``node``, whose weight is in the layout ``rows``, of codes; ``code_products.py`` goes on with it."""
    codes, scales = _codes_of_rows(weight, rewriter.mover)
    wide = [rewriter.make("cast", (one,), "float32", one.shape, (), node.location) for one in (x.inputs[0], codes)]
    total = rewriter.like(node, wide)
    for _ in node.shape[1:]:
        scales = rewriter.mover.unsqueeze(scales, 0)
    spread = rewriter.mover.move(scales, ("expand",), node.shape)
    return rewriter.make("mul", (total, spread), node.dtype, node.shape, (), node.location)


def _codes_of_rows(weight: Node, mover: Mover) -> tuple[Node, Node]:
    """Returns the codes (N, K) of ``weight``, in the layout ``rows``, or of the view that it is, and their scales
    (N)."""
    base = weight.under_views
    codes, scales = base.inputs
    if codes.shape != base.shape:
        codes = mover.move(codes, ("slice", 1, 0, 1), base.shape)
    scales = mover.move(scales, ("expand",), base.shape)
    for movement in weight.movements:
        codes, scales = (mover.move(one, *movement) for one in (codes, scales))
    rows = weight.shape[:1]
    return codes, mover.move(mover.move(scales, ("slice", 1, 0, 1), (*rows, 1)), ("squeeze", 1), rows)


def _by_codes(rewriter: _Rewriter, node: Node, x: Node, weight: Node) -> Node | None:
    """Computes ``node`` of the codes of ``x``, with a weight that kernels decode."""
    (codes,), attrs = x.inputs, weight.under_views.attrs
    if attrs.layout == "mma":
        return None
    if attrs.layout == "cpu" and codes.dtype != "int8":
        if x.dtype == "float32":
            return None
        codes = rewriter.make("cast", (codes,), "float32", codes.shape, (), node.location)
    return rewriter.like(node, (codes, weight, *node.inputs[2:]))


def _scaled(rewriter: _Rewriter, node: Node, x: Node, weight: Node) -> Node | None:
    """Computes ``node`` of codes with a scale for each 32 columns of both operands, or says why that is not done."""
    format, why = weight.under_views.attrs.format, "the target has no products of them"
    if format in rewriter.scaled_formats:
        product = product_of_scaled(node, _values(x), weight, rewriter.mover)
        if product is not None:
            return product
        why = "kernels of several matrices have no products of them"
    if format in SCALED_WEIGHTS:
        rewriter.mover.fired[DECODED.format(format, why)] = None
    return None


def _as_bfloat16(rewriter: _Rewriter, node: Node, x: Node, weight: Node) -> Node:
    """Computes ``node`` of codes in bfloat16 and a weight in the layout of the mainloops of 16 bits, which differs from
    "mma8" in the order of columns."""
    base = weight.under_views
    codes = rewriter.make("cast", x.inputs, "bfloat16", x.shape, (), node.location)
    decoded = rewriter.like(base, base.inputs, attrs=base.attrs._replace(layout="mma"))
    for movement in weight.movements:
        decoded = rewriter.mover.move(decoded, *movement)
    return rewriter.like(node, (_in_the_order_of(rewriter.mover, codes), decoded))


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
    base = weight.under_views
    move, make, (codes, scales) = rewriter.mover.move, rewriter.make, base.inputs
    rows, length = base.shape
    if not all(rewriter.mover.decide(symbols.compare("eq", symbols.mod(size, BLOCK), 0)) for size in (rows, length)):
        raise UnsupportedError(
            f"a weight with scales of blocks of {BLOCK} x {BLOCK} and {rows} rows has a kernel on sm_90a alone; take a "
            "multiple of the block, or weight.with_activation(None)"
        )
    down, along = scales.shape
    split = move(move(scales, ("unsqueeze", 1), (down, 1, along)), ("unsqueeze", 3), (down, 1, along, 1))
    whole = move(split, ("expand",), (down, BLOCK, along, BLOCK))
    values = make("cast", (codes,), "float32", codes.shape, (), node.location)
    dense = make("mul", (values, move(whole, ("reshape",), base.shape)), "float32", base.shape, (), node.location)
    for movement in weight.movements:
        dense = move(dense, *movement)
    return rewriter.like(node, (_values(x), dense))


def _is_of_codes(x: Node) -> bool:
    return x.kind is CAST and x.inputs[0].dtype in CODES_OF_ACTIVATIONS


def _is_microscaled(weight: Node) -> bool:
    if not _quantizes(weight):
        return False
    kind = kind_of(weight.under_views.attrs.activation)
    return kind.powers and kind.block == MX_BLOCK


def _lies_in(layout: str) -> Callable[[Node], bool]:
    return lambda weight: _quantizes(weight) and weight.under_views.attrs.layout == layout


x, weight, groups = wildcards("x weight groups")
codes = x.where(_is_of_codes)
low_bits = weight.where(_quantizes)
microscaled = weight.where(_is_microscaled)
of_blocks = weight.where(_lies_in(BLOCKS))
in_blocks = contract(x, of_blocks)

_REWRITES = Rewrites(
    Rewrite(
        "a weight with scales of blocks is decoded before its product, which has no mainloop of codes",
        in_blocks,
        _with_decoded_blocks,
        lambda rewriter: not rewriter.has_mainloop,
    ),
    Rewrite(
        "rows of a weight that do not begin with a block are computed with those before them",
        in_blocks,
        _whole,
        _cuts_blocks,
    ),
    Rewrite(
        "an activation with scales of blocks is not rounded to 16 bits",
        in_blocks | operation("grouped", x, of_blocks, groups),
        _unrounded,
    ),
    Rewrite(
        "codes with scales of 32 columns are multiplied as they are, with the scales of both, by tl.dot_scaled",
        contract(x, microscaled) | operation("grouped", x, microscaled, groups),
        _scaled,
    ),
    Rewrite(
        "codes of an activation meet codes of a weight, and the scales of its rows the sums",
        contract(codes, weight.where(_lies_in("rows"))),
        _of_dense_codes,
    ),
    Rewrite(
        "codes of an activation become bfloat16: there is no mainloop of them and these weights",
        contract(codes, weight.where(_lies_in("mma8"))),
        _as_bfloat16,
        lambda rewriter: not rewriter.has_mainloop,
    ),
    Rewrite(
        "codes of an activation meet codes of a weight, which kernels decode as they read it",
        contract(codes, low_bits) | operation("grouped", codes, low_bits, groups),
        _by_codes,
    ),
)
