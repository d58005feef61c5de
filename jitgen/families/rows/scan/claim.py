"""Claims results computed from scans along one dimension, with pointwise work before and after.

A *scan region* iterates over ``(outer..., row)``: for every index of the outer dimensions it walks one row from its
first element to its last. Its stages are ``map``, ``scan``, ``map``: what is scanned may be computed from the elements
of the row, several scans of one row run side by side, and results are computed from them and from further elements.

A result of a slice of the row is stored at the indices of that slice alone, so that several slices of one scan, and a
concatenation of them, are one region; what else they are computed of is the same along the row, or the same slice.

A scan of a scan, a reduction of one, another view that mixes scanned elements, and whatever else does not fit is
*materialized*: computed by a kernel of its own into a temporary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jitgen.families.family import Claim, Partition
from jitgen.families.rows.scan import NAME
from jitgen.ir import symbols
from jitgen.ir.analysis import at_own_coordinates, in_shape, is_same_shape, one_of, varying_dims
from jitgen.ir.graph import Node, Shape, topological
from jitgen.ir.nodes import CAT, SCAN, VIEW
from jitgen.ir.regions import Region, Store, row_axes
from jitgen.ir.scans import EXTREMA
from jitgen.ir.symbols import Size
from jitgen.ir.views import Mover

MAX_STORES, MAX_STATES = 16, 5
"""The most results of one region, and the most states that are carried along its rows; more become further regions,
which read the row again. Where rows lie side by side a CUDA block has up to 8 KiB of shared memory for each state, of
48."""


@dataclass(frozen=True)
class _Rows:
    """Describes the rows that a scan walks: its shape, its dimension, and whether it starts from the last element."""

    shape: Shape
    dim: int
    reverse: bool


def claim(values: Sequence[Node], partition: Partition) -> Claim:
    """Claims scan regions for what they can hold of ``values``; the others are left with their scans materialized."""
    gathered: dict[_Rows, list[Store]] = {}
    rest: list[Node | None] = list(values)
    of_slices = _of_slices(values, partition)
    for position, node in enumerate(values):
        if SCAN not in node.kinds:
            continue
        if position in of_slices:
            fitted = [(rows, store, _fitted(store.value, rows, partition)) for rows, store in of_slices[position]]
            pieces = [(rows, replace(store, value=value)) for rows, store, value in fitted if value is not None]
            if len(pieces) < len(fitted):
                rest[position] = partition.temporaries.without(SCAN, node)
                continue
            for rows, store in pieces:
                gathered.setdefault(rows, []).append(store)
            rest[position] = None
            continue
        scan = next(at_own_coordinates(node, SCAN), None)
        value = None
        if scan is not None:
            rows = _rows_of(scan)
            value = _fitted(node, rows, partition)
        if scan is None or value is None:
            rest[position] = partition.temporaries.without(SCAN, node)
        else:
            gathered.setdefault(rows, []).append(Store(position, value))
            rest[position] = None
    for position, node in enumerate(values):
        rows_beside = _rows_with_a_tensor_of(node, gathered) if rest[position] is not None else None
        if rows_beside is not None:
            gathered[rows_beside].append(Store(position, node))
            rest[position] = None
    regions = [
        _region(rows, some, partition.mover) for rows, stores in gathered.items() for some in _within_limits(stores)
    ]
    return Claim(regions, rest)


def _of_slices(values: Sequence[Node], partition: Partition) -> dict[int, list[tuple[_Rows, Store]]]:
    """Returns the stores of those of ``values`` that are computed of slices of scans along the rows, by position; none
    where another of the values needs the scan in memory."""
    sliced: dict[int, list[tuple[_Rows, Store]]] = {}
    scans: dict[int, set[Node]] = {}
    for position, node in enumerate(values):
        if SCAN not in node.kinds or (node.kind is not CAT and not any(_slices_of_scans(node))):
            continue
        scans[position] = {one for one in topological([node]) if one.kind is SCAN}
        stores = _stores_of_pieces(position, node, partition)
        if stores is not None:
            sliced[position] = stores
    is_stored = partition.temporaries.get
    left = {scan for position in scans.keys() - sliced.keys() for scan in scans[position]}
    while True:
        apart = [p for p in sliced if any(scan in left or is_stored(scan) is not None for scan in scans[p])]
        if not apart:
            return sliced
        for position in apart:
            del sliced[position]
            left |= scans[position]


def _slices_of_scans(root: Node) -> Iterator[Node]:
    """Yields the slices of scans along the scanned dimension that ``root`` is computed of pointwise."""
    for view in at_own_coordinates(root, VIEW):
        scan = view.inputs[0]
        if scan.kind is SCAN and view.attrs.kind == "slice" and view.attrs[1] == scan.attrs.dim and view.attrs[3] == 1:
            yield view


def _stores_of_pieces(position: int, node: Node, partition: Partition) -> list[tuple[_Rows, Store]] | None:
    """Returns the stores of result ``position``; of a concatenation, a store for each piece."""
    if node.kind is not CAT:
        store = _lifted(Store(position, node), partition.mover)
        return None if store is None else [store]
    stores: list[tuple[_Rows, Store]] = []
    start: Size = 0
    for piece in node.inputs:
        movement = ("slice", node.attrs.dim, start, 1), piece.shape
        start = symbols.add(start, piece.shape[node.attrs.dim])  # type: ignore[assignment]
        store = _lifted(Store(position, piece, (movement,)), partition.mover)
        if store is None:
            return None
        stores.append(store)
    return stores


def _lifted(store: Store, mover: Mover) -> tuple[_Rows, Store] | None:
    """Returns ``store``, of a value that is computed of slices of scans, as one of whole rows that stores the slice;
    None where its other operands have no other elements of the rows."""
    views = list(_slices_of_scans(store.value))
    if not views or len({view.attrs for view in views}) > 1:
        return None
    dim, first = views[0].attrs[1:3]
    rows, shape = _rows_of(views[0].inputs[0]), store.value.shape
    memo = {id(view): view.inputs[0] for view in views if _rows_of(view.inputs[0]) == rows}
    for node in topological([store.value], leaves=[VIEW]):
        if id(node) in memo:
            continue
        if node.kind.is_number:
            memo[id(node)] = node
        elif node.kind.is_pointwise and node.shape == shape:
            memo[id(node)] = mover.builder.like(node, [memo[id(child)] for child in node.inputs], rows.shape)
        elif not node.is_in_memory or len(node.shape) != len(shape):
            return None
        elif dim not in varying_dims(node):
            memo[id(node)] = mover.move(one_of(node, [dim], mover), ("expand",), rows.shape)
        elif (
            node.kind is VIEW
            and node.attrs == views[0].attrs
            and is_same_shape(node.inputs[0].shape, rows.shape, mover)
        ):
            memo[id(node)] = in_shape(node.inputs[0], rows.shape, mover)
        else:
            return None
    back = ("slice", dim, symbols.neg(first), 1), rows.shape
    within: Any = first, symbols.add(first, shape[dim])
    return rows, Store(store.result, memo[id(store.value)], (*store.movements, back), within=within)


def _within_limits(stores: Sequence[Store]) -> Iterator[list[Store]]:
    """Yields ``stores`` in order, in groups that one region may hold."""
    group: list[Store] = []
    for store in stores:
        if group and not _is_one_region([*group, store]):
            yield group
            group = []
        group.append(store)
    yield group


def _is_one_region(stores: Sequence[Store]) -> bool:
    return len(stores) <= MAX_STORES and len(_states(store.value for store in stores)) <= MAX_STATES


def _states(roots: Iterable[Node]) -> list[tuple[str, int]]:
    """Lists what the scans under ``roots`` carry along the row: an extremum and its index are one state."""
    scans = [node for node in topological(roots) if node.kind is SCAN]
    return list(dict.fromkeys((EXTREMA.get(scan.attrs.kind, scan.attrs.kind), id(scan.inputs[0])) for scan in scans))


def merge(left: Region, right: Region) -> Region | None:
    """Merges scans of the same rows that read some of the same elements into one region."""
    if left.shape != right.shape or left.elements_read.isdisjoint(right.elements_read):
        return None
    if not _is_one_region((*left.stores, *right.stores)):
        return None
    return replace(left, stores=(*left.stores, *right.stores))


def _rows_of(scan: Node) -> _Rows:
    return _Rows(scan.shape, scan.attrs.dim, scan.attrs.reverse)


def _fitted(root: Node, rows: _Rows, partition: Partition) -> Node | None:
    """Materialises what a region over ``rows`` cannot compute of ``root``; None if no scan is left in it."""
    own = {id(scan) for scan in at_own_coordinates(root, SCAN) if _rows_of(scan) == rows}
    # A scan that is also scanned, reduced or looked at through a view is in memory anyway.
    apart = [child for node in topological([root]) if not node.kind.is_pointwise for child in node.inputs]
    own -= {id(read) for read in topological(apart) if read.kind is SCAN}
    selected = _states(scan for scan in at_own_coordinates(root, SCAN) if id(scan) in own)[:MAX_STATES]
    own = {id(scan) for scan in at_own_coordinates(root, SCAN) if id(scan) in own and _states([scan])[0] in selected}
    if not own:
        return None
    return partition.temporaries.pointwise(root, own)


def _rows_with_a_tensor_of(node: Node, gathered: dict[_Rows, list[Store]]) -> _Rows | None:
    """Returns the rows whose kernel can compute a pointwise result without reading more: of its shape, and with a
    tensor in common."""
    if any(kind.reads_others for kind in node.kinds):
        return None
    leaves = {id(leaf) for leaf in topological([node]) if leaf.is_in_memory}
    for rows, stores in gathered.items():
        read = topological(store.value for store in stores)
        if node.shape == rows.shape and any(id(leaf) in leaves for leaf in read):
            return rows
    return None


def _region(rows: _Rows, stores: Sequence[Store], mover: Mover) -> Region:
    """Makes the region, with the scanned dimension last, and walked from its first element on."""
    rank = len(rows.shape)
    order = (*(dim for dim in range(rank) if dim != rows.dim), rows.dim)
    shape = tuple(rows.shape[dim] for dim in order)
    if order != tuple(range(rank)):
        stores = [_moved(store, ("permute", order), shape, mover) for store in stores]
    if rows.reverse:
        last = symbols.sub(shape[-1], 1)
        stores = [_moved(store, ("slice", rank - 1, last, -1), shape, mover) for store in stores]
        stores = [replace(store, within=_backward(store.within, shape[-1])) for store in stores]
    return Region(NAME, row_axes(shape, 1), tuple(stores))


def _moved(store: Store, attrs: tuple[object, ...], shape: Shape, mover: Mover) -> Store:
    return store.moved(attrs, shape, lambda node: mover.move(node, attrs, shape))


def _backward(within: tuple[Size, Size] | None, length: Size) -> tuple[Size, Size] | None:
    """Returns the range ``within`` of rows of ``length`` elements that are walked from the last one."""
    if within is None:
        return None
    first, end = within
    backward: Any = symbols.sub(length, end), symbols.sub(length, first)
    return backward
