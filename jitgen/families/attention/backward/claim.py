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
    if not may_have_streamed(values):
        return values
    from jitgen.families.attention.backward.match import has_streamed, oriented

    if not has_streamed(values, partition.mover):
        return values
    images = oriented(values, partition.mover)
    return [images[id(value)] for value in values]


def may_have_streamed(values: Sequence[Node]) -> bool:
    """Returns whether ``values`` have an exponential and a product, a test that imports nothing."""
    return kinds_of(values) >= {CONTRACT, EXP}


def claim(values: Sequence[Node], partition: Partition) -> Claim:
    """Claims regions for those of ``values`` that end in such a product; in the others it is materialized."""
    if not may_have_streamed(values):
        return Claim([], values)
    from jitgen.families.attention.backward.match import has_streamed

    if not has_streamed(values, partition.mover):
        return Claim([], values)
    from jitgen.families.attention.backward.region import end_of, region_of, store_of

    index = Index(values)
    while fused := _fused(index, partition):
        hidden = [gradient for gradient in fused if not _ends(gradient, fused, index, partition)]
        if not hidden:
            break
        ends = [end_of(gradient, index) for gradient in _over_same_tiles(hidden, index)]
        memo = dict(zip(map(id, ends), partition.temporaries.materialize_together(ends), strict=True))
        index = Index([partition.mover.substituted(node, memo) for node in index.roots])
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


def _over_same_tiles(hidden: Sequence[Streamed], index: Index) -> list[Streamed]:
    """Returns the first of ``hidden``, and others that one region may compute with it."""
    first, *others = hidden
    together = [first]
    for other in others:
        shared = set(map(id, first.products)) & set(map(id, other.products))
        if not shared or other.function.shape != first.function.shape or len(together) == MOST_RESULTS:
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


def _ends(gradient: Streamed, streamed: Sequence[Streamed], index: Index, partition: Partition) -> bool:
    """Returns whether every root of ``index`` that is computed from ``gradient`` is a store of it, and of no other
    one."""
    from jitgen.families.attention.backward.region import store_of

    others = [other.result for other in streamed if other is not gradient]
    for value in index.roots:
        if not index.depends(value, gradient.result):
            continue
        if any(index.depends(value, other) for other in others):
            return False
        if store_of(0, value, gradient, index, partition.mover) is None:
            return False
    return True


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
