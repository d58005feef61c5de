"""Rewrites products of integers in the triton dialect, whose ``tl.dot`` takes int8 and no other, to reductions of
elementwise products.

Both wrap around in the dtype of the result, so they have the same bits. The other dialects have mainloops for every
integer dtype (``schedules/cpp.py``, ``schedules/cuda.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

from jitgen.families.family import Partition
from jitgen.ir import symbols
from jitgen.ir.equations import axes
from jitgen.ir.graph import Node, kinds_of, topological
from jitgen.ir.nodes import CONTRACT
from jitgen.ir.ops import FLOATS
from jitgen.ir.patterns import Rewrite, Rewriter, Rewrites, contract, wildcards
from jitgen.ir.views import Mover
from jitgen.quant.codes import longest_exact_sum

LONGEST = longest_exact_sum("int8", "int8")
"""K up to which a sum of int8 products is an int32. Beyond it Triton's ``tl.dot`` would saturate (``mma.sync`` with
``.satfinite``) where torch wraps around."""


def reduce_integer_products(values: Sequence[Node], partition: Partition) -> Sequence[Node]:
    """Replaces products of integers in ``values`` for which the dialect has no mainloop."""
    if partition.device.dialect != "triton" or CONTRACT not in kinds_of(values):
        return values
    if not any(product.match(node) for node in topological(values)):
        return values
    images = Rewriter(PRODUCTS, partition.mover).images(values)
    return [images[id(value)] for value in values]


def _sum_of_products(rewriter: Rewriter, node: Node, x: Node, weight: Node) -> Node:
    """Computes ``node``, the product of ``x`` and ``weight``, as a sum over (batch..., rows..., columns, K)."""
    mover, make, batch = rewriter.mover, rewriter.make, len(axes(node.attrs.equation).batch)
    lead, rows, (columns, length) = x.shape[:batch], x.shape[batch:-1], weight.shape[batch:]
    shape = (*lead, *rows, columns, length)
    x, weight = (_cast(operand, node.dtype, mover) for operand in (x, weight))
    x = mover.move(x, ("unsqueeze", len(shape) - 2), (*lead, *rows, 1, length))
    for dim in range(batch, batch + len(rows)):
        weight = mover.unsqueeze(weight, dim)
    x, weight = (mover.move(operand, ("expand",), shape) for operand in (x, weight))
    products = make("mul", (x, weight), node.dtype, shape, (), node.location)
    last = len(shape) - 1
    sums = make("reduce", (products,), node.dtype, (*shape[:-1], 1), ("sum", (last,)), node.location)
    return mover.move(sums, ("squeeze", last), node.shape)


def _cast(node: Node, dtype: str, mover: Mover) -> Node:
    return node if node.dtype == dtype else mover.builder.make("cast", (node,), dtype, node.shape, (), node.location)


def _is_long(rewriter: Rewriter, x: Node) -> bool:
    return rewriter.mover.decide(symbols.compare("gt", x.shape[-1], LONGEST))


# ------------------------------------------------------------------------------------------------------------- the list

x, weight = wildcards("x weight")
product = contract(x, weight).where(lambda node: node.attrs.accumulator not in FLOATS)

PRODUCTS = Rewrites(
    Rewrite(
        "a product of integers other than int8 is a sum of products",
        product,
        _sum_of_products,
        lambda rewriter, x: x.dtype != "int8",
    ),
    Rewrite(
        f"a product of int8 over more than {LONGEST} elements is a sum of products", product, _sum_of_products, _is_long
    ),
)
