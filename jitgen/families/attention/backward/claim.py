"""Claims products with a pointwise function of other products, and the pointwise work after them.

A region iterates over ``(lead..., m, e)``: batch and heads, rows of the result, its columns. The *rows* are those of a
block: queries where dQ is computed, keys where dK and dV are. ``n`` is streamed, inner and sequential; so are ``d``,
what the products inside sum over, and dimensions ``g`` of the lead that the result is summed over: heads that share
keys. Results over the same products are stores of one region: dK and dV. ``claim`` finds it in these steps:

1. ``match.py`` recognises products; ``Partition.decide`` is asked about each, with its sizes.
2. One that is no result by pointwise operations and views is materialized, and its sum over the lead if that is read.
3. ``region.py`` makes operands of what is in memory, and materializes the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jitgen.device import Device
from jitgen.families.attention.backward import NAME
from jitgen.families.family import Claim, Partition, Question
from jitgen.ir.graph import Node, kinds_of
from jitgen.ir.index import Index
from jitgen.ir.nodes import CONTRACT, EXP
from jitgen.ir.program import Decision
from jitgen.ir.regions import Region
from jitgen.ir.views import Mover

if TYPE_CHECKING:
    from jitgen.families.attention.backward.match import Streamed

MOST_WIDTH = 256
"""The most elements of a head: D and E."""
MOST_RESULTS = 2
"""The most results of one region: dK and dV."""
MOST_PRODUCTS = 2
"""The most products of a tile that results share: scores and the gradients of probabilities."""


@dataclass(frozen=True)
class Fusion(Question):
    """Asks whether products are computed again in the kernel that reads them (``Partition.decide``).

    Attributes:
        rows, streamed: of the tile of products.
        widths: of the result, and the depths of the products inside. Sizes are symbolic until ``at`` gives numbers.
        dtypes: of all operands of products.
    """

    placements = ("computed again, a tile at a time", "in memory")
    rows: Any
    streamed: Any
    widths: tuple[Any, ...]
    dtypes: tuple[str, ...]

    def __str__(self) -> str:
        widths = ", ".join(map(str, self.widths))
        return f"a product with a function of products, {self.rows} rows by {self.streamed}, widths {widths}"


def decide(question: Fusion, device: Device) -> Decision:
    """Decides whether the device's dialect computes ``question`` in one kernel."""
    if min(question.widths, default=0) == 0:
        return Decision(False, "products over no elements are zeros")
    if max(question.widths) > MOST_WIDTH:
        return Decision(False, f"the backward of attention has kernels for heads of at most {MOST_WIDTH} elements")
    if device.dialect == "triton" and "float64" in question.dtypes:
        return Decision(False, "float64 has no tensor cores")
    if device.dialect == "cuda":
        from jitgen.families.attention.backward.wgmma import obstacle

        against = obstacle(question.widths, question.dtypes, device.target)
        return Decision(not against, against or "the products inside are larger than all that is read", bool(against))
    return Decision(True, "the products inside are larger than all that is read")


def rewrite_values(values: Sequence[Node], partition: Partition) -> Sequence[Node]:
    """Rewrites ``values`` so that their products have the form that ``match.py`` knows."""
    if not has_gradients(values, partition.mover):
        return values
    from jitgen.families.attention.backward.match import oriented

    images = oriented(values, partition.mover)
    return [images[id(value)] for value in values]


def may_have_streamed(values: Sequence[Node]) -> bool:
    """Returns whether ``values`` have an exponential and a product, a test that imports nothing."""
    return kinds_of(values) >= {CONTRACT, EXP}


def has_gradients(values: Sequence[Node], mover: Mover) -> bool:
    """Returns whether ``values`` have products with functions as a backward has them, and not a forward: a quick
    test."""
    if not may_have_streamed(values):
        return False
    from jitgen.families.attention.backward.match import is_backward

    return mover.any_behind(values, is_backward)


def claim(values: Sequence[Node], partition: Partition) -> Claim:
    """Claims regions for those of ``values`` that end in such a product; in the others it is materialized."""
    if not has_gradients(values, partition.mover):
        return Claim([], values)
    from jitgen.families.attention.backward.region import region_of, store_of

    index = Index(values)
    fused = _fused(index, partition)
    while memo := _hidden_in_memory(index, fused, partition):
        index = Index([partition.mover.substituted(node, memo) for node in index.roots])
        fused = _fused(index, partition)
    regions: list[Region] = []
    rest: list[Node | None] = list(index.roots)
    for gradient in fused:
        stores = []
        for position, value in enumerate(index.roots):
            if index.depends(value, gradient.result):
                store = store_of(position, value, gradient, index, partition.mover)
                assert store is not None
                stores.append(store)
                rest[position] = None
        region = region_of(gradient, stores, partition)
        for number, other in enumerate(regions):
            if (joined := merge(other, region)) is not None:
                regions[number] = joined
                break
        else:
            regions.append(region)
    return Claim(regions, rest)


def _hidden_in_memory(index: Index, fused: Sequence[Streamed], partition: Partition) -> dict[int, Node]:
    """Materialises those of ``fused`` that are no result by pointwise operations and views; returns the temporaries,
    and what nodes on the way have become, by the ids of what they replace.

    With a temporary in it a graph is another one, in which products are looked for anew. If what is materialized has
    none of the remaining ones behind it, nor is inside their functions, these are the same then, and the whole chain
    that the backward of a decoder is takes one walk.
    """
    if not fused:
        return {}
    from jitgen.families.attention.backward.match import inside, is_forward
    from jitgen.families.attention.backward.region import end_of

    left = _Left(fused, index, partition)
    functions = {id(node) for gradient in fused for node in inside(gradient.function)}
    memo: dict[int, Node] = {}
    for gradient in fused:
        if gradient not in left.numbers or left.ends(gradient):
            continue
        together = _over_same_tiles(
            gradient, [other for other in left.sharing(gradient) if not left.ends(other)], index
        )
        ends = [end_of(streamed, index) for streamed in together]
        values = [partition.mover.substituted(end, memo) for end in ends]
        memo |= zip(map(id, ends), partition.temporaries.materialize_together(values), strict=True)
        sharing = left.sharing(gradient)
        left.remove(together)
        is_same = not any(id(end) in functions or left.is_behind(end) for end in ends)
        if not is_same or any(is_forward(other) and other in left.numbers for other in sharing):
            break
    return memo


class _Left:
    """Holds the products of ``index`` that no temporary has yet.

    Attributes:
        numbers: of these products, in their order.
    """

    def __init__(self, fused: Sequence[Streamed], index: Index, partition: Partition):
        self.numbers = {gradient: number for number, gradient in enumerate(fused)}
        self._index, self._partition = index, partition
        self._results = index.set_of(gradient.result for gradient in fused)
        self._of_tile: dict[Node, list[Streamed]] = {}
        for gradient in fused:
            for product in gradient.products:
                self._of_tile.setdefault(product, []).append(gradient)

    def remove(self, gradients: Sequence[Streamed]) -> None:
        for gradient in gradients:
            del self.numbers[gradient]
        self._results &= ~self._index.set_of(gradient.result for gradient in gradients)

    def sharing(self, gradient: Streamed) -> list[Streamed]:
        """Lists the others that are computed from a product of ``gradient``, in their order."""
        others = {other for product in gradient.products for other in self._of_tile[product]} - {gradient}
        return sorted(others & self.numbers.keys(), key=self.numbers.__getitem__)

    def is_behind(self, node: Node) -> bool:
        """Returns whether ``node`` is computed from any of them."""
        return bool(self._index.behind(node) & self._results)

    def ends(self, gradient: Streamed) -> bool:
        """Returns whether every root that is computed from ``gradient`` is a store of it, and of no other one."""
        from jitgen.families.attention.backward.region import store_of

        index = self._index
        others = self._results & ~index.set_of([gradient.result])
        for value in index.roots:
            if not index.depends(value, gradient.result):
                continue
            if index.behind(value) & others or store_of(0, value, gradient, index, self._partition.mover) is None:
                return False
        return True


def _over_same_tiles(first: Streamed, others: Sequence[Streamed], index: Index) -> list[Streamed]:
    """Returns ``first``, and those of ``others`` that one region may compute with it."""
    together = [first]
    for other in others:
        if other.function.shape != first.function.shape or len(together) == MOST_RESULTS:
            continue
        if not index.depends(other.result, first.result) and not index.depends(first.result, other.result):
            together.append(other)
    return together


def _fused(index: Index, partition: Partition) -> list[Streamed]:
    from jitgen.families.attention.backward.match import streamed_in

    return [gradient for gradient in streamed_in(index) if partition.decide(NAME, fusion_of(gradient)).fused]


def fusion_of(gradient: Streamed) -> Fusion:
    """Asks whether ``gradient`` is one kernel."""
    rows, streamed = gradient.function.shape[-2:]
    widths = (gradient.result.shape[-1], *(product.inputs[0].shape[-1] for product in gradient.products))
    operands = (gradient.result.inputs[1], *(child for product in gradient.products for child in product.inputs))
    return Fusion(rows, streamed, widths, tuple(dict.fromkeys(node.dtype for node in operands)))


def merge(left: Region, right: Region) -> Region | None:
    """Joins two regions whose results are functions of the same products; None if they are not."""
    if len(left.stores) + len(right.stores) > MOST_RESULTS:
        return None
    if _frame(left) != _frame(right) or not _tiles(left) & _tiles(right):
        return None
    from jitgen.families.attention.backward.region import depth_axes, stages_of

    stores = (*left.stores, *right.stores)
    depths = depth_axes(stores)
    if len(depths) > MOST_PRODUCTS:
        return None
    kept = (axis for axis in left.axes if axis.name[0] != "d")
    return Region(NAME, (*kept, *depths), stores, stages_of(len(depths), len(stores)))


def _frame(region: Region) -> tuple[Any, ...]:
    """Returns the axes along which the stores of joint regions are the same: all but depths and the columns of a
    result."""
    return tuple(axis for axis in region.axes if axis.name[0] not in "de")


def _tiles(region: Region) -> frozenset[int]:
    """Returns the ids of the products over a tile that a region computes."""
    from jitgen.families.attention.backward.match import tile_products

    return frozenset(map(id, tile_products(region.stores)))
