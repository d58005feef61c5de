"""Turns a product that was recognised into its region: its operands in memory, its result as a store."""

from __future__ import annotations

from collections.abc import Sequence

from jitgen.families.attention.backward import NAME
from jitgen.families.attention.backward.match import Streamed, tile_products
from jitgen.families.attention.rule.heads import shared_heads, split_shape, with_split
from jitgen.families.attention.rule.region import RegionBuilder, stops
from jitgen.families.attention.rule.views import undone
from jitgen.families.family import Partition
from jitgen.ir.graph import Node, Shape, one_along
from jitgen.ir.index import Index
from jitgen.ir.nodes import CAST, REDUCE
from jitgen.ir.regions import Axis, Region, Stage, Store
from jitgen.ir.views import Mover


def stages_of(products: int, results: int) -> tuple[Stage, ...]:
    """Lists the stages of a region over so many products of a tile, with so many results."""
    depths = tuple(Stage("contract", (f"d{number}",)) for number in range(products))
    return (*depths, Stage("map"), Stage("contract", ("n",), results), Stage("map"))


def depth_axes(stores: Sequence[Store]) -> tuple[Axis, ...]:
    """Returns the axes over which the products of a tile sum, in their order."""
    return tuple(
        Axis(f"d{number}", product.inputs[0].shape[-1], "sequential", inner=True)
        for number, product in enumerate(tile_products(stores))
    )


# ------------------------------------------------------------------------------------------- what follows a product


def end_of(gradient: Streamed, index: Index) -> Node:
    """Returns the result of ``gradient``, or the sum over dimensions of its lead if that is its only user in
    ``index``."""
    node = gradient.result
    while len(index.users[node]) == 1 and node not in index.roots:
        (user,) = index.users[node]
        if user.kind is REDUCE:
            kind, dims = user.attrs
            return user if kind == "sum" and max(dims) < len(user.shape) - 2 else gradient.result
        if user.kind is not CAST:
            break
        node = user
    return gradient.result


def store_of(position: int, value: Node, gradient: Streamed, index: Index, mover: Mover) -> Store | None:
    """Makes the store of ``value`` in the shape of what ``gradient`` ends in; see ``views.undone``."""
    return undone(position, value, end_of(gradient, index), index, mover)


# -------------------------------------------------------------------------------------------------------- the region


def region_of(gradient: Streamed, stores: Sequence[Store], partition: Partition) -> Region:
    """Makes the region of ``gradient``, whose results are ``stores``."""
    return _Builder(gradient, partition).region(stores)


class _Builder(RegionBuilder):
    def __init__(self, gradient: Streamed, partition: Partition):
        lead = gradient.function.shape[:-2]
        operands = [child for product in gradient.products for child in product.inputs]
        heads = shared_heads([*operands, gradient.result.inputs[1], gradient.function], lead, partition.mover)
        super().__init__(partition, lead, heads)
        self.gradient = gradient

    def region(self, stores: Sequence[Store]) -> Region:
        gradient = self.gradient
        lead = split_shape(self.lead, self.split)
        rows, streamed = gradient.function.shape[-2:]
        tiles = {id(product): self._tile(product, lead) for product in gradient.products}
        function = self._in_place(gradient.function, tiles)
        value = self.in_memory(self.over_split(gradient.result.inputs[1]), transposed=True)
        width = gradient.result.shape[-1]
        result = self.product(gradient.result, function, value, (*lead, rows, width))
        in_place: list[Store] = []
        summed: set[int] = set()
        for store in stores:
            end = self._end(store.value)
            memo: dict[int, Node] = {}
            if end.kind is REDUCE:
                dims = self._split_dims(end.attrs.dims)
                summed.update(dims)
                shape = one_along(result.shape, dims)
                memo[id(end)] = self.make("reduce", (result,), end.dtype, shape, ("sum", dims), end.location)
            else:
                memo[id(end)] = result
            in_place.append(self._store(store, end, memo))
        shape = tuple(1 if dim in summed else size for dim, size in enumerate(lead))
        axes = (
            *(Axis(f"b{dim}", size) for dim, size in enumerate(shape)),
            Axis("m", rows),
            Axis("e", width, "sequential"),
            *(Axis(f"g{dim}", lead[dim], "sequential", inner=True) for dim in sorted(summed)),
            Axis("n", streamed, "sequential", inner=True),
            *depth_axes(in_place),
        )
        return Region(NAME, axes, tuple(in_place), stages_of(len(gradient.products), len(in_place)))

    def _end(self, value: Node) -> Node:
        """Returns what ``store_of`` computes ``value`` from: the result, or its sum over the lead."""
        index, result = Index([value]), self.gradient.result
        return next((node for node in index.order if node.kind is REDUCE and index.depends(node, result)), result)

    def _split_dims(self, dims: Sequence[int]) -> tuple[int, ...]:
        """Renumbers ``dims`` of the lead as dimensions of the split one."""
        if self.split is None:
            return tuple(dims)
        at = self.split[0]
        return tuple(
            sorted({moved for dim in dims for moved in ((dim, dim + 1) if dim == at else (dim + (dim > at),))})
        )

    def _store(self, store: Store, end: Node, memo: dict[int, Node]) -> Store:
        hole = self.make("input", (), end.dtype, end.shape, (-1,))
        value = self.mover.substituted(store.value, {id(end): hole})
        read = {id(node): self.partition.materialize(node) for node in stops([value], [id(hole)])}
        value = self.mover.substituted(value, read)
        split = self.split
        if split is None:
            return Store(store.result, self.mover.substituted(value, {id(hole): memo[id(end)]}), store.movements)
        at = split[0]
        own = (at, (1, 1)) if end.shape[at] == 1 else split
        inner = self.mover.substituted(
            with_split(value, own, self.mover), {id(with_split(hole, own, self.mover)): memo[id(end)]}
        )
        return Store(store.result, inner, (*store.movements, (("reshape",), inner.shape)))

    # -------------------------------------------------------------------------------------------------------- operands

    def _tile(self, product: Node, lead: Shape) -> Node:
        left, right = (self.in_memory(self.over_split(child)) for child in product.inputs)
        return self.product(product, left, right, (*lead, left.shape[-2], right.shape[-2]))

    def _in_place(self, function: Node, tiles: dict[int, Node]) -> Node:
        """Rebuilds ``function`` over the split lead, with ``tiles`` in place of its products; what no tile computes is
        read."""
        gradient = self.gradient
        holes = {
            id(product): self.make("input", (), product.dtype, product.shape, (-2 - number,))
            for number, product in enumerate(gradient.products)
        }
        memo = dict(holes)
        memo |= {
            id(node): self.partition.materialize(node) for node in stops([function], [*map(id, gradient.products)])
        }
        bare = self.mover.substituted(function, memo)
        split = {id(self.over_split(holes[id(product)])): tiles[id(product)] for product in gradient.products}
        return self.mover.substituted(self.over_split(bare), split)
