"""Chooses how many blocks of a cluster share the keys of a block of rows: a model of reading, for both kernels of
CUDA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from jitgen.families.attention.rule.layout import TileGeometry
from jitgen.schedule.chips import Chip

MOST_BLOCKS = 8
"""Blocks of a cluster at most, on every chip with clusters."""


@dataclass(frozen=True)
class ReadFit:
    """Holds constants of one kernel, fitted to its timings on an H200.

    Attributes:
        rate: bytes/s of keys and values that a multiprocessor reads at most, where others are idle.
        piece: seconds of the first reads and the results of a block of rows.
        exchange: seconds in which the blocks of a cluster exchange sums.
    """

    rate: float
    piece: float
    exchange: float


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


def fastest_cluster(schedule: SharedKeys, geometry: TileGeometry, chip: Chip, fit: ReadFit, resident: int = 1) -> int:
    """Returns how many blocks of a cluster share keys in one launch on ``chip``: the number that takes least, if only
    reading keys and values takes time. ``resident``: blocks of a multiprocessor."""
    pieces = geometry.tasks * -(-geometry.task_rows // schedule.block_m) * schedule.splits
    tiles = -(-geometry.keys // (schedule.block_n * schedule.splits))
    tile_bytes = schedule.block_n * (sum(geometry.depths) + sum(geometry.widths)) * 2
    rate = chip.reads

    def seconds(blocks: int, clusters: int) -> float:
        rounds = -(-pieces // clusters)
        reading = min(fit.rate, rate / (blocks * min(pieces, clusters)))
        walk = -(-tiles // blocks) * tile_bytes / reading + fit.piece
        return rounds * (walk + (fit.exchange if blocks > 1 else 0.0))

    if not pieces:
        return 1
    allowed = [(blocks, clusters * resident) for blocks, clusters in chip.clusters if blocks <= schedule.cluster_splits]
    return min(allowed, key=lambda pair: seconds(*pair), default=(1, 0))[0]
