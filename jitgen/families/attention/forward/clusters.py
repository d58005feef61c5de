"""Chooses how many blocks of a cluster share the keys of a block of rows: a model of reading, for both kernels of
CUDA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from jitgen.families.attention.rule.layout import TileGeometry
from jitgen.schedule.chips import Chip

MOST_BLOCKS = 8
"""Blocks of a cluster at most, on every chip with clusters."""
LATE = 1.1
"""How much longer the blocks of a cluster take where they have several pieces of work: one waits for another (H200)."""
CACHED = 2
"""How much faster the second-level cache is read than memory, at most: blocks of rows of a task read the same keys."""


@dataclass(frozen=True)
class ReadFit:
    """Holds constants of one kernel, fitted to its timings on an H200.

    Attributes:
        rate: bytes/s of keys and values that a multiprocessor reads at most, where others are idle.
        piece: seconds of the first reads and the results of a block of rows.
        exchange: seconds in which the blocks of a cluster exchange sums.
        refill: seconds until a cluster computes again after an exchange.
    """

    rate: float
    piece: float
    exchange: float
    refill: float = 0.0


class SharedKeys(Protocol):
    """Describes what the model reads of a schedule."""

    @property
    def block_m(self) -> int: ...
    @property
    def block_n(self) -> int: ...
    @property
    def splits(self) -> int: ...
    @property
    def cluster_splits(self) -> int: ...


def fastest_cluster(
    schedule: SharedKeys,
    geometry: TileGeometry,
    chip: Chip,
    fit: ReadFit,
    resident: int = 1,
    tile_seconds: float = 0.0,
    masked: bool = False,
) -> int:
    """Returns how many blocks of a cluster share keys in one launch on ``chip``: the number that takes least.

    Args:
        resident: blocks of a multiprocessor.
        tile_seconds: what a block computes with a tile of keys; reading it takes its time meanwhile.
        masked: whether masks may hide tiles: of all pieces a quarter, but of some none.
    """
    row_blocks = -(-geometry.task_rows // schedule.block_m)
    pieces = geometry.tasks * row_blocks * schedule.splits
    tiles = -(-geometry.keys // (schedule.block_n * schedule.splits))
    tile_bytes = schedule.block_n * (sum(geometry.depths) + sum(geometry.widths)) * 2
    rate = chip.reads * min(max(row_blocks, 1), CACHED)

    def seconds(blocks: int, clusters: int) -> float:
        rounds = -(-pieces // clusters)
        reading = min(fit.rate, rate / (blocks * min(pieces, clusters)))
        walk = -(-tiles // blocks) * max(tile_bytes / reading, tile_seconds)
        around = rounds * (fit.piece + (fit.exchange if blocks > 1 else 0.0))
        around += (rounds - 1) * fit.refill if blocks > 1 else 0.0
        walks = max(walk, 0.75 * walk * pieces / clusters) if masked else rounds * walk
        return around + walks * (LATE if blocks > 1 and rounds > 1 else 1.0)

    if not pieces:
        return 1
    allowed = [(blocks, clusters * resident) for blocks, clusters in chip.clusters if blocks <= schedule.cluster_splits]
    return min(allowed, key=lambda pair: seconds(*pair), default=(1, 0))[0]
