"""Lets kernels of pointwise regions go along short rows too, so that rows of several tensors are one kernel.

A row of up to ``MOST_LANES * LANE_ELEMENTS`` elements is shared by neighbouring lanes of a warp, which combine what
they reduce by shuffles. Its region is then one of any that share a grid, whatever the shapes of the others: the norms
of a decoder's queries and keys, their rotations, and what is appended to a cache are one kernel. Rows that share a
kernel with nothing stay with the family of reductions, and so do rows that read the same elements, which that family
merges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jitgen.device import Device
from jitgen.families.family import Partition, Question
from jitgen.ir.body import compute_dtype
from jitgen.ir.graph import topological
from jitgen.ir.nodes import REDUCE
from jitgen.ir.program import Decision
from jitgen.ir.regions import Region
from jitgen.ir.views import is_transposed

LANE_ELEMENTS = 8
"""Elements of a row that a lane has: 16 bytes of 16-bit numbers."""
MOST_ROWS = 16
"""Regions of rows that are looked through for such; a long loop that is unrolled has more."""
MOST_LANES = 32
"""Lanes of a row: a warp."""
REDUCED = {"sum": ("jitgen::Sum", 0.0), "max": ("jitgen::Max", float("-inf")), "min": ("jitgen::Min", float("inf"))}
"""The reductions of such rows: the operation in ``lanes.cuh``, and its neutral element."""


@dataclass(frozen=True)
class ShortRow(Question):
    """Asks whether the lanes of a warp share a row.

    Attributes:
        length: elements of the row.
    """

    placements = ("beside others in a kernel", "in kernels of their own")
    length: Any

    def __str__(self) -> str:
        return f"rows of {self.length} elements"

    def decide(self, device: Device) -> Decision:
        lanes = self.length // LANE_ELEMENTS
        if 0 < lanes <= MOST_LANES and lanes * LANE_ELEMENTS == self.length and lanes & (lanes - 1) == 0:
            return Decision(True, f"{lanes} lane{'s' * (lanes > 1)} of a warp share a row")
        return Decision(False, "lanes of a warp cannot share them")


def may_be_short(region: Region, partition: Partition) -> bool:
    """Returns whether ``region`` reduces rows of one dimension in a way that lanes do, however long they are."""
    if partition.device.dialect != "cuda" or region.row_rank != 1:
        return False
    nodes = topological(store.value for store in region.stores)
    reduced = [node for node in nodes if node.kind is REDUCE]
    kinds = {stage.kind for stage in region.stages}
    return (
        bool(reduced)
        and kinds <= {"map", "reduce"}
        and all(store.value.shape == region.shape for store in region.stores)
        and all(node.attrs.kind in REDUCED and compute_dtype(node.dtype) == "float32" for node in reduced)
        # Of transposed tensors the family of reductions reads neighbouring rows at once.
        and all(node.dtype != "float64" and not is_transposed(node) for node in nodes if node.shape == region.shape)
    )


def is_short(region: Region, partition: Partition) -> bool:
    """Returns whether lanes share the rows of ``region`` in this call."""
    return may_be_short(region, partition) and partition.decide("", ShortRow(region.shape[-1])).fused


def beside_others(
    regions: Sequence[Region], partition: Partition, pointwise: str, may_merge: Callable[[Region, Region], bool]
) -> list[Region]:
    """Returns ``regions``, which may run at the same time, with those that are short rows for the family ``pointwise``,
    where there are several."""
    rows = [region for region in regions if may_be_short(region, partition)]
    if not 2 <= len(rows) <= MOST_ROWS:
        return list(regions)
    alone = [row for row in rows if not any(may_merge(row, other) for other in regions if other is not row)]
    if len(alone) < 2:
        return list(regions)
    short = [row for row in alone if row.family == pointwise or partition.decide("", ShortRow(row.shape[-1])).fused]
    if len(short) < 2:
        return list(regions)
    return [replace(region, family=pointwise) if region in short else region for region in regions]
