"""Claims products of a graph, with the pointwise work before and after them.

A *contraction region* iterates over the (rows, columns) of a product, or over (batch axes..., rows, columns). It reads
the product as if it were a tensor; in the kernel that value is an accumulator, still in a register. The pointwise
operations between the product and a result are the region's *epilogue*. A region may have several products of one shape
(the two of SwiGLU), and regions whose products share an activation become one kernel (the three projections of
attention). ``claim`` finds regions in these steps:

1. Products with anything but an epilogue after them are materialized (``hidden_products.py``). This happens once before
   step 2, so that a product which is used both by an epilogue and behind a reduction remains one product, and once
   after it, with the exact shapes.
2. Each result is flattened to the rows and columns of its products (``matrices.py``).
3. Of a result's products those remain that one kernel computes together, and the others become temporaries.
4. Results that share a product share a region; what remains of each result is left to the other families.
5. The operands of each region become tensors, or a *prologue*: an activation that is computed while it is read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jitgen.device import Device
from jitgen.errors import UnsupportedError
from jitgen.families.blocks_of_rows import pairs
from jitgen.families.family import Claim, Partition, Question
from jitgen.families.gemm import largest
from jitgen.families.gemm.hidden_products import without_hidden_products
from jitgen.families.gemm.layout import not_as_stored
from jitgen.families.gemm.matrices import flattened, keeps_columns, products_of, restored
from jitgen.families.gemm.orders import (
    activation_in_its_order,
    copied_weight,
    in_its_order,
    is_copied,
    is_weight_copied,
    repeated_row,
)
from jitgen.families.gemm.quantised_results import quantised_result, quantises_results, region_of
from jitgen.ir.body import Body, Contraction
from jitgen.ir.graph import Node, kinds_of, topological
from jitgen.ir.nodes import BLOCKED, BLOCKS, CAST, DEQUANTIZE, PRODUCTS, VIEW
from jitgen.ir.regions import Axis, Region, Store
from jitgen.ir.symbols import Size
from jitgen.ir.views import Mover, at_tile
from jitgen.kernel.operands import item_size

Materialize = Callable[[Node], Node]

MOST_PRODUCTS = 5
"""Products of a region at most, on a GPU: the sums of six take more registers than a thread has, of float32 and
float64 from 64 rows on and of bfloat16 from eight (NVRTC 13.0). ``schedules/cuda.py`` has tiles of five for every
target's shared memory."""
MOST_QUANTISED_PRODUCTS = 4
"""The same of quantised weights that tensor cores multiply: a thread decodes them besides (five spill 440 bytes for 64
rows and 360 for 2048, and have no tile that does not spill for eight)."""


@dataclass(frozen=True)
class Prologue(Question):
    """Asks whether a product's kernel computes its activation while reading it (``Partition.decide``).

    Attributes:
        rows: M. Sizes are symbolic until ``at`` makes them numbers.
        columns: N, the rows of the weight.
        length: K.
        dtype: of the activation.
        format: of the weight; None where it is dense.
        operations: the pointwise operations that compute one element of the activation.
        is_result: whether the activation is also a result, and so will be in memory anyway.
    """

    placements = ("in its product", "before its product")
    rows: Any
    columns: Any
    length: Any
    dtype: str
    format: str | None
    operations: tuple[str, ...]
    is_result: bool

    def __str__(self) -> str:
        return f"activation [{self.rows}, {self.length}] by {', '.join(self.operations)}"


def claim(values: Sequence[Node], partition: Partition) -> Claim:
    """Claims contraction regions for those of ``values`` that end in an epilogue; the others are left without
    products."""
    if PRODUCTS.isdisjoint(kinds_of(values)):
        return Claim((), values)
    mover, materialize = partition.mover, partition.materialize
    quantised = pairs(values, quantised_result) if quantises_results(partition.device) else {}
    regions = [region_of(result, positions, mover) for positions, result in quantised.items()]
    taken = {position for positions in quantised for position in positions}
    unflattened = [largest.store_of(position, node) for position, node in enumerate(values) if position not in taken]
    unflattened = without_hidden_products(unflattened, mover, materialize, flat=False)
    stores = [replace(flattened(store.result, store.value, mover), run=store.run) for store in unflattened]
    stores = without_hidden_products(stores, mover, materialize, flat=True)
    stores = [_with_products_of_one_kernel(store, partition) for store in stores]
    rest: list[Node | None] = [None if position in taken else node for position, node in enumerate(values)]
    wholes = {store.result: store.value for store in unflattened}
    for store in stores:
        if _has_more_products(store, regions, partition.device):
            store = _with_products_in_memory(store, products_of(store.value), mover, materialize)
        whole = wholes[store.result]
        if not products_of(store.value):
            rest[store.result] = largest.in_memory(restored(store, whole, mover), store, mover)
        elif not keeps_columns(store, whole):
            # The product is computed row by row into a temporary, and the result is a view of it, as in eager torch.
            in_memory = replace(store, value=materialize(store.value))
            rest[store.result] = largest.in_memory(restored(in_memory, whole, mover), store, mover)
        else:
            rest[store.result] = None
            _add(regions, largest.of_runs(store))
    temporaries: dict[int, Node] = {}

    def materialize_once(node: Node) -> Node:
        return temporaries.setdefault(id(node), materialize(node))

    results = {id(node) for node in values}
    regions = [_with_operands_in_memory(region, partition, materialize_once, results) for region in regions]
    return Claim(regions, [None if node is None else temporaries.get(id(node), node) for node in rest])


def joins(bodies: Sequence[Body], body: Body) -> bool:
    """Returns whether a kernel of ``bodies`` may compute ``body`` too: all must have one activation and one format of
    weights. One that stores runs of columns is alone: all lanes of a warp call its epilogue."""
    if any(one.has_runs for one in (*bodies, body)):
        return False
    signatures = {tuple(_shared_by_kernel(other, c) for c in other.contractions) for other in (*bodies, body)}
    return len(signatures) == 1


def _shared_by_kernel(body: Body, contraction: Contraction) -> tuple[Any, ...]:
    """Returns what two contractions must have in common to be computed in one kernel."""
    if contraction.blocks:
        return (object(),)  # a kernel has the scales of one product
    x = tuple((i.op, i.args, i.dtype, body.operands[i.attr] if i.op == "load" else i.attr) for i in contraction.x)
    kinds = tuple((body.operands[index].kind, body.operands[index].dtype) for index in contraction.weight)
    groups = None if contraction.groups is None else body.operands[contraction.groups]
    return x, kinds, groups, replace(contraction, x=(), weight=(), groups=None)


# ------------------------------------------------------------------------------------------------ stores and regions


def _add(regions: list[Region], store: Store) -> None:
    """Adds ``store`` to the region that computes one of its products, or to a new region. Several regions of which it
    has products become one."""
    sharing = [region for region in regions if _shares_product(region, store)]
    if not sharing:
        regions.append(_region(store, products_of(store.value)[0].inputs[0].shape[-1]))
        return
    first, *others = sharing
    stores = (*first.stores, *(other for region in others for other in region.stores), store)
    regions[regions.index(first)] = replace(first, stores=stores)
    for region in others:
        regions.remove(region)


def _shares_product(region: Region, store: Store) -> bool:
    products = {id(node) for node in products_of(store.value)}
    return region.shape == store.value.shape and any(
        id(node) in products for other in region.stores for node in products_of(other.value)
    )


def _region(store: Store, length: Size) -> Region:
    """Makes the region of ``store``, over (batch axes..., rows, columns), with products over a K of ``length``."""
    *batch, rows, columns = store.value.shape
    batch_axes = [Axis(f"b{dim}", size) for dim, size in enumerate(batch)]
    axes = (*batch_axes, Axis("m", rows), Axis("n", columns), Axis("k", length, "sequential", inner=True))
    return Region("gemm", axes, (store,))


def _most_products(product: Node, device: Device) -> int:
    """Returns how many products like ``product`` a region has at most, which one thread sums."""
    if not device.is_gpu:
        return sys.maxsize
    if device.uses_cutlass:
        return 1
    x, weight, *_ = product.inputs
    decoded = weight.under_views.kind is DEQUANTIZE and item_size(x.dtype) <= 2
    return MOST_QUANTISED_PRODUCTS if decoded else MOST_PRODUCTS


def _has_more_products(store: Store, regions: Sequence[Region], device: Device) -> bool:
    """Returns whether the region that ``store`` and those of ``regions`` become which share its products would have
    more than one kernel sums."""
    sharing = [other for region in regions if _shares_product(region, store) for other in region.stores]
    products = {id(product): product for one in (store, *sharing) for product in products_of(one.value)}
    return any(len(products) > _most_products(product, device) for product in products.values())


def _with_products_of_one_kernel(store: Store, partition: Partition) -> Store:
    """Keeps in ``store`` the products that one kernel computes together: the first one and, as far as it sums them,
    those with the same activation and a weight of the same format. The others are materialized."""
    products = products_of(store.value)
    if len(products) < 2:
        return store
    most = _most_products(products[0], partition.device)
    kept = [product for product in products if _kind(product) == _kind(products[0])][:most]
    others = [product for product in products if product not in kept]
    return _with_products_in_memory(store, others, partition.mover, partition.materialize)


def _with_products_in_memory(store: Store, others: Sequence[Node], mover: Mover, materialize: Materialize) -> Store:
    """Makes ``store`` read temporaries instead of the products ``others``."""
    if not others:
        return store
    readers = [(child, node) for node in topological([store.value], leaves=PRODUCTS) for child in node.inputs]
    memo: dict[int, Node] = {}
    for other in others:
        users = [node for child, node in readers if child is other]
        rounded = users[0].kind is CAST and item_size(users[0].dtype) < item_size(other.dtype) and len(users) == 1
        stored = users[0] if rounded else other
        memo[id(stored)] = materialize(stored)
    return replace(store, value=mover.substituted(store.value, memo))


def _kind(product: Node) -> tuple[Any, ...]:
    """Returns what the products of one region have in common."""
    x, weight, *groups = product.inputs
    base = weight.under_views
    return x, *groups, base.attrs if base.kind is DEQUANTIZE else weight.dtype, product.attrs


# ---------------------------------------------------------------------------------------------- operands of a region


def _with_operands_in_memory(
    region: Region, partition: Partition, materialize: Materialize, results: set[int]
) -> Region:
    """Makes ``region`` read only tensors: reductions, scans and concatenations in its epilogue become temporaries, and
    so do computed weights and activations, unless the activation becomes a prologue."""
    mover, memo = partition.mover, dict[int, Node]()
    for node in topological((store.value for store in region.stores), leaves=PRODUCTS):
        if node.kind in PRODUCTS:
            if any(in_blocks(operand) for operand in node.inputs):
                weight = node.inputs[1]
                decoded = weight.under_views.kind is DEQUANTIZE and not in_blocks(weight)
                read = [
                    _codes_in_memory(one, mover, materialize) for one in node.inputs if one is not weight or not decoded
                ]
                if decoded:
                    read.insert(1, _weight_in_memory(node, partition, materialize))
                memo[id(node)] = mover.builder.like(node, read)
                continue
            x, _, *groups = node.inputs
            if (row := repeated_row(node, partition, materialize)) is not None:
                x = row
            else:
                computed = _prologue(node, results)
                fused = computed is not None and partition.decide("gemm", computed).fused
                if is_copied(node, partition) if x.is_in_memory else not fused:
                    x = activation_in_its_order(node, partition, materialize)
            divided = [operand if operand.is_in_memory else materialize(operand) for operand in groups]
            if is_weight_copied(node, x, partition):
                weight = copied_weight(node, partition, materialize)
            else:
                weight = _weight_in_memory(node, partition, materialize)
            operands = (x, weight, *divided)
            memo[id(node)] = mover.builder.like(node, operands)
        elif node.kind.reads_others and node.kind is not BLOCKED:
            memo[id(node)] = materialize(node)
        else:
            memo[id(node)] = mover.builder.rebuilt(node, [memo[id(child)] for child in node.inputs])
    stores = tuple(replace(store, value=memo[id(store.value)]) for store in region.stores)
    return replace(region, stores=stores)


def in_blocks(operand: Node) -> bool:
    """Returns whether ``operand`` of a product are codes with scales of blocks."""
    return operand.kind is DEQUANTIZE and operand.attrs.layout == BLOCKS


def _codes_in_memory(operand: Node, mover: Mover, materialize: Materialize) -> Node:
    """Makes codes, and their scales, tensors."""
    if not in_blocks(operand):
        return operand if operand.is_in_memory else materialize(operand)
    return mover.builder.like(operand, [one if one.is_in_memory else materialize(one) for one in operand.inputs])


def _prologue(product: Node, results: set[int]) -> Prologue | None:
    """Asks the question for the activation of ``product``; None if it is a tensor, or not computed pointwise."""
    x, (*_, rows, columns) = product.inputs[0], product.shape
    if x.is_in_memory or any(kind.reads_others for kind in x.kinds):
        return None
    weight = product.inputs[1].under_views
    format = weight.attrs.format if weight.kind is DEQUANTIZE else None
    operations = tuple(node.op for node in topological([x]) if node.kind.is_pointwise)
    return Prologue(rows, columns, x.shape[-1], x.dtype, format, operations, id(x) in results)


def _is_of_tiles(view: Node) -> bool:
    """Returns whether ``view`` of a weight (..., N, K) divides its rows among matrices, or has rows that begin at a
    tile: where sizes decide that, ``Mover.slices_whole_tiles`` has asked."""
    if view.attrs[:2] == ("slice", len(view.shape) - 2):
        return at_tile(*view.attrs[2:]) is not False
    return view.attrs.kind == "reshape"


def _weight_in_memory(product: Node, partition: Partition, materialize: Materialize) -> Node:
    """Returns the weight of ``product`` if it is a tensor or a slice of a quantised weight's rows, else a temporary.

    Raises:
        UnsupportedError: it is another view of a quantised weight, or computed of its elements. What another product
            has computed of such a weight is a tensor like any other.
    """
    node = base = product.inputs[1]
    while base.kind is VIEW and _is_of_tiles(base):
        base = base.inputs[0]
    if base.kind is DEQUANTIZE and base.attrs.layout == BLOCKS:
        where = f"\n  {product.location}" if product.location else ""
        raise UnsupportedError(
            "a weight with scales of blocks multiplies activations that are quantised in blocks, in no other product: "
            f"take weight.with_activation(None) there{where}"
        )
    if base.kind is DEQUANTIZE or node.is_in_memory:
        return node
    if any(child.kind is DEQUANTIZE for child in topological([node], leaves=PRODUCTS)):
        raise not_as_stored(product.location)
    return in_its_order(node, partition, materialize)
