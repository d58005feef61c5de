"""Defines what GPU schedules of attention and of its gradients have in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from jitgen.families.attention.rule.layout import TileGeometry
from jitgen.kernel.launch import Persistence
from jitgen.kernel.operands import WARP
from jitgen.schedule.chips import Chip
from jitgen.schedule.declared import DeclaredSchedule, about


@dataclass(frozen=True, kw_only=True)
class TileSchedule(DeclaredSchedule):
    """Schedules blocks of rows, which walk tiles of streamed rows.

    Attributes:
        shared_words: what the sentences of all of them end in.
        splits: ranges of the keys, of blocks of their own; another kernel joins them.
        cluster_splits: blocks of a cluster, at most, that share the keys of a block of rows.
        wide: 64-bit indices.
    """

    shared_words: ClassVar[tuple[str, ...]] = ("splits", "cluster_splits", "wide")
    splits: int = field(default=1, metadata=about("keys in {} ranges"))
    cluster_splits: int = field(
        default=1, metadata=about("shared by clusters of up to {} blocks", member="most_splits")
    )
    wide: bool = field(default=False, metadata=about("64-bit indices"))

    def cluster(self, geometry: TileGeometry, chip: Chip) -> int:
        """Returns how many blocks of a cluster share keys in one launch on ``chip``."""
        return 1

    def persistence(self, sharing: int) -> Persistence | None:
        """Returns how many blocks take one block of rows after another, ``sharing`` of a cluster each."""
        return Persistence("clusters" if sharing > 1 else "multiprocessors")


@dataclass(frozen=True, kw_only=True)
class TritonTiles(TileSchedule):
    """Schedules a program of Triton for a block of rows.

    Attributes:
        block_m, block_n: rows of a program, and streamed rows of a tile.
        warps, stages: of a program; tiles in flight.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int

    @property
    def threads(self) -> int:
        return self.warps * WARP
