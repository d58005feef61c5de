"""Claims results that are computed row by row, with reductions over the same dimensions.

A *row region* iterates over ``(outer..., row...)``. For every index of the outer dimensions it makes passes over one
row: one for each reduction of the longest chain in which one depends on another, and one for elements that are stored
behind the last. It combines elements of the row with values of the whole row. Softmax is such a region: the maximum,
then the sum of exponentials, then the quotients. So is any pointwise work before, between and after reductions over the
same dimensions; there may be several results, and some of them may have one element for each row.

``claim`` finds the results that such regions can hold. What does not fit is materialized: another kernel computes it
into a temporary, which always gives the right answer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from jitgen.families.blocks_of_rows import QuantisedResult, of_rows, pairs, region_of_rows
from jitgen.families.family import ANY_FAMILY, Claim, Partition
from jitgen.families.rows.reduction.even_rows import has_even_rows
from jitgen.families.rows.reduction.joined import stores_of_lengths
from jitgen.families.short_rows import is_short
from jitgen.ir import symbols
from jitgen.ir.analysis import nearest, one_of, rewritten, unrounded, varying
from jitgen.ir.graph import Node, Shape, topological
from jitgen.ir.index import Index
from jitgen.ir.nodes import CAT, INPUT, REDUCE, SCATTER, VIEW
from jitgen.ir.regions import Region, Store, grid_axes, row_axes
from jitgen.ir.scatters import scatter_store
from jitgen.ir.symbols import Size
from jitgen.ir.views import Mover

Materialize = Callable[[Node], Node]


@dataclass(frozen=True)
class _Rows:
    """Describes the rows of a reduction: its operand's shape and the dimensions it reduces."""

    shape: Shape
    dims: tuple[int, ...]

    @property
    def reduced_shape(self) -> Shape:
        """Returns the shape of a result with one element for each row."""
        return tuple(1 if dim in self.dims else size for dim, size in enumerate(self.shape))


def claim(values: Sequence[Node], partition: Partition) -> Claim:
    """Claims row regions for those of ``values`` they can hold; the others are left, with their reductions
    materialized."""
    results, mover, materialize = values, partition.mover, partition.materialize
    gathered: dict[_Rows, list[Store]] = {}
    others: list[Region] = []
    rest: list[Node | None] = list(results)
    for positions, result in _quantised_rows(results, partition).items():
        others.append(region_of_rows("reduction", result, positions, results[positions[0]].shape, mover))
        for position in positions:
            rest[position] = None
    for position, node in enumerate(results):
        if REDUCE not in node.kinds or rest[position] is None:
            continue
        if node.kind is SCATTER:
            rows_of_update = _short_update(position, node, partition)
            others += rows_of_update
            base, value, *indices = node.inputs
            rest[position] = None if rows_of_update else mover.builder.like(node, (base, materialize(value), *indices))
            continue
        pieces = _short_pieces(position, node, partition) if node.kind is CAT else []
        if pieces:
            others += pieces
            rest[position] = None
            continue
        for whole in stores_of_lengths(Store(position, node), mover):
            rows, store = _as_rows(whole, partition)
            if rows is None or store is None:
                rest[position] = without_reductions(node, mover, materialize)
            else:
                gathered.setdefault(rows, []).append(store)
                rest[position] = None
    for position, node in enumerate(results):
        if rest[position] is not None and REDUCE not in node.kinds and not node.kind.reads_elsewhere:
            rows = _rows_read_with(node, gathered)
            if rows is not None:
                gathered[rows].append(Store(position, node))
                rest[position] = None
    return Claim([*(_rows_last(rows, stores, mover) for rows, stores in gathered.items()), *others], rest)


def _quantised_rows(values: Sequence[Node], partition: Partition) -> Mapping[tuple[int, int], QuantisedResult]:
    """Returns the codes and scales among ``values`` that one region computes along whole rows, where it has lanes."""
    if partition.device.dialect != "cuda":
        return {}
    return pairs(values, functools.partial(of_rows, mover=partition.mover))


def merge(left: Region, right: Region) -> Region | None:
    """Merges two regions over the same rows that read some of the same elements; else returns None."""
    if (left.shape, left.row_rank) != (right.shape, right.row_rank):
        return None
    if left.elements_read.isdisjoint(right.elements_read):
        return None
    return replace(left, stores=(*left.stores, *right.stores))


def _short_update(position: int, node: Node, partition: Partition) -> list[Region]:
    """Returns the regions of ``node``, an update of elements that are computed of short rows, which pointwise kernels
    compute; empty where they do not."""
    mover, state = partition.mover, partition.state()
    whole = scatter_store(position, node, mover)
    last = len(whole.value.shape) - 1
    if last not in node.attrs.coordinates:
        return []
    dim = sorted(coordinate for coordinate in node.attrs.coordinates if coordinate >= 0).index(last)
    order = (*(d for d in range(last + 1) if d != dim), dim)
    # The row is the last dimension again, as where it is joined.
    regions = _short_regions(_permuted(whole, order, mover), partition)
    if not regions:
        partition.restore(state)
    return regions


def _short_pieces(position: int, node: Node, partition: Partition) -> list[Region]:
    """Returns the regions of the pieces that ``node`` concatenates, of which some are computed of short rows, such as a
    key that is joined with those before it; empty where pointwise kernels do not compute them."""
    state, dim = partition.state(), node.attrs.dim
    regions: list[Region] = []
    start: Size = 0
    for piece in node.inputs:
        store = Store(position, piece, ((("slice", dim, start, 1), piece.shape),))
        start = symbols.add(start, piece.shape[dim])  # type: ignore[assignment]
        if REDUCE in piece.kinds:
            of_piece = _short_regions(store, partition) if dim != len(node.shape) - 1 else []
        else:
            of_piece = [Region(ANY_FAMILY, grid_axes(piece.shape), (store,))] if piece.is_in_memory else []
        if not of_piece:
            partition.restore(state)
            return []
        regions += of_piece
    return regions


def _short_regions(whole: Store, partition: Partition) -> list[Region]:
    """Returns the regions of ``whole``, which pointwise kernels compute; empty where they do not."""
    regions = []
    for store in stores_of_lengths(whole, partition.mover):
        rows, fitted = _as_rows(store, partition)
        region = None if rows is None or fitted is None else _rows_last(rows, [fitted], partition.mover)
        if region is None or not is_short(region, partition):
            return []
        regions.append(replace(region, family=ANY_FAMILY))
    return regions


def _as_rows(store: Store, partition: Partition) -> tuple[_Rows | None, Store | None]:
    """Returns the rows over which the value of ``store`` can be computed, and its store in their iteration space."""
    mover = partition.mover
    # No other reduction stands between it and the value.
    outermost = next(nearest(store.value, [REDUCE], lambda between: not between.kind.reads_elsewhere), None)
    if outermost is None:
        return None, None
    rows = _Rows(outermost.inputs[0].shape, outermost.attrs.dims)
    reduced = rows.reduced_shape
    if len(store.value.shape) < len(reduced) and (blocks := _regrouped(store, rows, partition)) is not None:
        store = blocks
    elif _is_reshaped(store.value, reduced):
        store = store.moved(("reshape",), reduced, lambda node: mover.move(node, ("reshape",), reduced))
    for dim, size in enumerate(reduced):
        shape = store.value.shape
        if size == 1 and len(shape) < len(reduced) and (dim >= len(shape) or shape[dim] != 1 or dim in rows.dims):
            shape = (*shape[:dim], 1, *shape[dim:])
            store = store.moved(("unsqueeze", dim), shape, functools.partial(mover.unsqueeze, dim=dim))
    if store.value.shape not in (rows.shape, reduced):
        regrouped = _regrouped(store, rows, partition)
        if regrouped is None:
            return None, None
        store = regrouped
    if store.value.shape == rows.shape and not _is_run(rows.dims):
        return None, None  # a row of the result would have no single stride
    value = _fit(store.value, rows, mover, partition.materialize)
    return (None, None) if value is None else (rows, replace(store, value=value))


def _is_reshaped(value: Node, reduced: Shape) -> bool:
    """Returns whether ``value``, of which dimensions of 1 are left out, is computed from a reshape of ``reduced``."""
    if [size for size in value.shape if size != 1] != [size for size in reduced if size != 1]:
        return False
    views = nearest(value, {VIEW}, lambda between: between.kind.is_pointwise)
    return any(view.attrs.kind == "reshape" and view.inputs[0].shape == reduced for view in views)


def _permuted(store: Store, order: tuple[int, ...], mover: Mover) -> Store:
    if order == tuple(range(len(order))):
        return store
    shape = tuple(store.value.shape[dim] for dim in order)
    return store.moved(("permute", order), shape, functools.partial(mover.permute, order=order))


def _regrouped(store: Store, rows: _Rows, partition: Partition) -> Store | None:
    """Moves ``store`` to the shape of ``rows``, such as a group_norm's; None where no reshape leads from these rows to
    its shape, or where an operand, such as the weights of a group's channels, has no single stride along a row then."""
    mover, row_rank = partition.mover, len(rows.dims)
    if rows.dims != tuple(range(len(rows.shape)))[-row_rank:]:
        return None
    reshapes = nearest(store.value, {VIEW}, lambda between: between.kind.is_pointwise)
    if not any(view.attrs.kind == "reshape" and view.inputs[0].shape == rows.shape for view in reshapes):
        return None
    moved = store.moved(("reshape",), rows.shape, lambda node: mover.move(node, ("reshape",), rows.shape))
    return moved if has_even_rows(moved.value, row_rank, partition) else None


def _is_run(dims: Sequence[int]) -> bool:
    """Returns whether ``dims`` follow one another, so that they have one stride together in a dense tensor."""
    return tuple(dims) == tuple(range(dims[0], dims[0] + len(dims)))


def _fit(root: Node, rows: _Rows, mover: Mover, materialize: Materialize) -> Node | None:
    """Materialises what a row region cannot compute of ``root``; None if nothing is reduced over ``rows``."""
    index = Index([root])
    of_foreign = index.reached(node for node in index.order if _is_foreign(node, rows))

    def materialize_operands(node: Node, rebuilt: Node) -> Node:
        # The operand of a reduction may itself come from reductions over other rows: then it is materialized as a
        # whole.
        if _is_over(node, rows) and not of_foreign.isdisjoint(node.inputs):
            return mover.builder.like(node, [materialize(node.inputs[0])])
        return rebuilt

    def materialize_foreign(node: Node, rebuilt: Node) -> Node:
        if node.kind.reads_elsewhere or _is_foreign(node, rows):
            return materialize(rebuilt)
        if node.kind is VIEW and REDUCE in rebuilt.kinds:
            source = rebuilt.inputs[0]
            if not (node.attrs.kind == "expand" and source.shape == rows.reduced_shape and node.shape == rows.shape):
                return mover.builder.like(rebuilt, [materialize(source)])
        return rebuilt

    result = rewritten(rewritten(root, mover, materialize_operands), mover, materialize_foreign)
    return result if REDUCE in result.kinds else None


def _is_over(node: Node, rows: _Rows) -> bool:
    """Returns whether ``node`` is a reduction of ``rows``."""
    return node.kind is REDUCE and (node.inputs[0].shape, node.attrs.dims) == (rows.shape, rows.dims)


def _is_foreign(node: Node, rows: _Rows) -> bool:
    """Returns whether ``node`` is a reduction of other rows."""
    return node.kind is REDUCE and not _is_over(node, rows)


def without_reductions(root: Node, mover: Mover, materialize: Materialize) -> Node:
    """Reads every reduction under ``root`` from a temporary.

    What is computed of reductions alone, before it meets elements, is read in place of them: the reciprocal of
    softmax's sum is computed once for each row, not once for each element.
    """
    order = topological([root])
    reduced: set[int] = set()
    for node in order:
        if node.kind is REDUCE or any(id(child) in reduced for child in node.inputs):
            reduced.add(id(node))
    varying_dims = varying(order)
    materialized: dict[int, Node] = {}
    needed = {id(root)}
    for node in reversed(order):
        if id(node) not in needed or id(node) not in reduced:
            continue
        uniform = [dim for dim, size in enumerate(node.shape) if size != 1 and dim not in varying_dims[id(node)]]
        if node.kind is REDUCE:
            materialized[id(node)] = node
        elif node.kind.commutes and uniform:
            materialized[id(node)] = one_of(node, uniform, mover)
        elif node.kind is VIEW and node.attrs.kind == "expand" and node.inputs[0].kind.commutes:
            materialized[id(node)] = node.inputs[0]
        else:
            needed.update(map(id, node.inputs))
    read: dict[int, Node] = {}
    for node in order:
        if id(node) not in needed or id(node) not in reduced:
            read[id(node)] = node
        elif id(node) in materialized:
            one = _from_memory(materialized[id(node)], mover, materialize)
            read[id(node)] = one if one.shape == node.shape else mover.move(one, ("expand",), node.shape)
        elif node.kind is VIEW:
            read[id(node)] = mover.move(read[id(node.inputs[0])], node.attrs, node.shape)
        else:
            read[id(node)] = mover.builder.like(node, [read[id(child)] for child in node.inputs])
    return read[id(root)]


def _from_memory(node: Node, mover: Mover, materialize: Materialize) -> Node:
    """Reads ``node`` from a temporary; what is no reduction is stored unrounded, in the dtype in which it is
    computed."""
    if node.kind is REDUCE or node.dtype not in ("float16", "bfloat16"):
        return materialize(node)
    return unrounded(materialize(unrounded(node, "float32", mover)), node.dtype, mover)


def are_columns(node: Node) -> bool:
    """Returns whether neighbouring elements of the operand of the reduction ``node`` belong to different rows in a
    dense tensor."""
    shape = node.inputs[0].shape
    return len(shape) - 1 not in node.attrs.dims and shape[-1] != 1


def _rows_read_with(node: Node, gathered: dict[_Rows, list[Store]]) -> _Rows | None:
    """Returns the rows whose region can compute the pointwise result ``node`` at no extra read: the shape is the same,
    and a tensor is read by both."""
    leaves = {id(leaf) for leaf in topological([node]) if leaf.kind in (INPUT, VIEW)}
    if any(kind.reads_elsewhere for kind in node.kinds):
        return None
    for rows, stores in gathered.items():
        read = topological(store.value for store in stores)
        if node.shape == rows.shape and _is_run(rows.dims) and any(id(leaf) in leaves for leaf in read):
            return rows
    return None


def _rows_last(rows: _Rows, stores: Sequence[Store], mover: Mover) -> Region:
    """Makes the region of ``stores``, with its dimensions permuted so that those of the row come last."""
    outer = [dim for dim in range(len(rows.shape)) if dim not in rows.dims]
    order = (*outer, *rows.dims)
    shape = tuple(rows.shape[dim] for dim in order)
    stores = [_permuted(store, order, mover) for store in stores]
    return Region("reduction", row_axes(shape, len(rows.dims)), tuple(stores))
