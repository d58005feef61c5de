"""Finds results of products that are quantised in blocks of a row, which the product's own kernel can do.

The next product takes codes and a scale for each ``BLOCK`` columns of a row (``block_products.py``). The scale follows
from the largest magnitude of the block. A tile of a product with whole blocks has all that this takes in registers, so
that codes and scales are what leaves the kernel; of a whole row no tile has everything, so that codes with one scale
for a row are a kernel of their own.

A region that does so stores two values over (rows, columns): the codes, and the scales, of which each block has one
element in memory (``Store.block``). Both are computed from a ``blocked`` node.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from jitgen.device import Device
from jitgen.families.blocks_of_rows import QuantisedResult, extremum_of, of_rows, over_matrix, passes, stored_values
from jitgen.families.family import Partition
from jitgen.families.gemm.block_products import multiplies_blocks
from jitgen.families.gemm.hidden_products import without_hidden_products
from jitgen.ir.analysis import nearest
from jitgen.ir.graph import Node, topological, walked
from jitgen.ir.index import Index
from jitgen.ir.nodes import BLOCKS, CAST, CONTRACT, DEQUANTIZE, INPUT, PRODUCTS, REDUCE, VIEW
from jitgen.ir.regions import Axis, Region, Stage, Store
from jitgen.ir.views import Mover
from jitgen.kernel.operands import item_size

MOST_PRODUCTS = 2
"""Products of a region whose result is quantised: those of SwiGLU."""
NAME = "a result that the next product takes in codes with scales of blocks is quantised in the product's kernel"


def quantises_results(device: Device) -> bool:
    """Returns whether a mainloop of ``device`` has an epilogue that quantises."""
    return device.dialect == "cuda" and not device.uses_cutlass and multiplies_blocks(device)


def with_quantised_results(values: Sequence[Node], partition: Partition, others: int) -> Sequence[Node]:
    """Makes ``values`` read codes and scales of products' results from temporaries that one region computes. The codes
    take the place of the result, which was to be stored for the kernel that quantises it.

    Args:
        others: how many of ``values`` come before those of temporaries.
    """
    if not quantises_results(partition.device):
        return values
    products = [node for node in topological(values) if node.kind is CONTRACT and _is_in_blocks(node.inputs[0])]
    if not products:
        return values
    index, mover, temporaries = Index(values), partition.mover, partition.temporaries
    values, memo = list(values), dict[int, Node]()
    known = set(values)
    quantised = {
        number: x for x in (product.inputs[0] for product in products) if (number := _stored_for(x)) is not None
    }
    for number, x in sorted(quantised.items()):  # what a result is computed of has been stored before it
        place = others + number - temporaries.first
        if number < temporaries.first or not _is_read_alone(x, index, known):
            continue
        temporary = temporaries.nodes[number - temporaries.first]
        value, state = mover.substituted(values[place], dict(memo)), partition.state()
        if any(node.kind is REDUCE for node in topological([value], leaves=PRODUCTS)):
            value = _of_stored_products(value, partition)
        codes, scales = over_matrix(x, temporary, value, mover)
        if quantised_result(codes, scales) is None and of_rows(codes, scales, mover) is None:
            partition.restore(state)
            continue
        mover.fired[NAME] = None
        values[place] = codes
        written = [temporaries.exchange(temporary, codes), temporaries.materialize(scales)]
        temporaries.compute_together(written)
        memo |= zip(map(id, x.inputs), written, strict=True)
    return [mover.substituted(value, memo) for value in values] if memo else values


def _of_stored_products(value: Node, partition: Partition) -> Node:
    """Returns ``value``, that of rows, with what it is computed of products in memory: a residual stream, say."""

    def materialize(node: Node) -> Node:
        if node.kind is CAST and item_size(node.inputs[0].dtype) < item_size(node.dtype):
            return partition.mover.builder.like(node, [partition.materialize(node.inputs[0])])
        return partition.materialize(node)

    (store,) = without_hidden_products([Store(0, value)], partition.mover, materialize, flat=False)
    return store.value


def _stored_for(x: Node) -> int | None:
    """Returns the number of the tensor that codes and scales ``x`` are computed of; None of several, or of none."""
    if not all(one.inputs for one in x.inputs):
        return None
    read = {node.under_views for node in topological(x.inputs, leaves=[VIEW]) if node.under_views.kind is INPUT}
    return next(iter(read)).attrs.number if len(read) == 1 else None


def quantised_result(codes: Node, scales: Node) -> QuantisedResult | None:
    """Returns what ``codes`` and ``scales`` are of, if that is computed from products; else None."""
    result = extremum_of(codes, scales)
    if result is None:
        return None
    products = list(nearest(result.extremum.inputs[0], PRODUCTS, passes))
    if not 0 < len(products) <= MOST_PRODUCTS or len({_kind(product) for product in products}) > 1:
        return None
    if any(product.kind is not CONTRACT or not _is_in_blocks(product.inputs[0]) for product in products):
        return None
    return result if _is_pointwise_of(codes, result.inside) and _keeps_few(result) else None


def region_of(result: QuantisedResult, stores: tuple[int, int], mover: Mover) -> Region:
    """Makes the region that stores ``result`` as the results ``stores``."""
    product, *others = nearest(result.extremum.inputs[0], PRODUCTS, passes)
    codes, scales = stored_values(result, stores, product.shape, mover)
    axes = (
        Axis("m", product.shape[0]),
        Axis("n", product.shape[1]),
        Axis("k", product.inputs[0].shape[-1], "sequential", inner=True),
    )
    stages = (Stage("contract", ("k",), 1 + len(others)), Stage("map"), Stage("reduce", ("n",)), Stage("map"))
    return Region("gemm", axes, (codes, scales), stages)


def _is_in_blocks(operand: Node) -> bool:
    return operand.kind is DEQUANTIZE and operand.attrs.layout == BLOCKS


def _kind(product: Node) -> tuple[object, ...]:
    x, weight = product.inputs
    return x, weight.under_views.attrs if weight.under_views.kind is DEQUANTIZE else weight.dtype, product.attrs


def _is_pointwise_of(root: Node, inside: Collection[Node]) -> bool:
    """Returns whether ``root`` is computed pointwise, in its shape, of products, tensors, numbers and ``inside``."""
    for node in walked([root], lambda node: () if node in inside or node.kind in PRODUCTS else node.inputs):
        if node in inside or node.under_views.kind.is_number or node.is_in_memory or node.under_views.kind in PRODUCTS:
            continue
        if not node.kind.is_pointwise or node.shape not in (root.shape, ()):
            return False
    return True


def _keeps_few(result: QuantisedResult) -> bool:
    """Returns whether the codes are computed of the extremum and of one value, computed from the products, that is
    known before it."""
    after, kept = set(result.inside), set[Node]()
    for node in topological([result.codes], leaves=PRODUCTS):
        if node not in after and node.kind.is_pointwise and not after.isdisjoint(node.inputs):
            after.add(node)
            kept |= {child for child in node.inputs if not child.under_views.kind.is_number}
    kept -= after
    return len(kept) == 1 and not any(node.is_in_memory for node in kept)


def _is_read_alone(x: Node, index: Index, values: Collection[Node]) -> bool:
    """Returns whether nothing but codes and scales ``x`` reads what they are computed from."""
    own = {node for node in walked(x.inputs, lambda node: node.inputs) if INPUT in node.kinds}
    return all(set(index.users[node]) <= {*own, x} for node in own) and own.isdisjoint(values)
