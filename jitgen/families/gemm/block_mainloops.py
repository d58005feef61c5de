"""The schedules of the cuda mainloops without tensor maps: a class for each, as ``mainloops.py`` explains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from jitgen.kernel.operands import WARP

CHUNK = 64
"""Extent of K in a chunk of the mainloops on tensor cores: 128 bytes of 16-bit elements."""


def counted(words: Sequence[tuple[int, str]], least: int = 2) -> list[str]:
    """The words whose number is at least ``least``, with the number in place of ``{}``."""
    return [text.format(number) for number, text in words if number >= least]


@dataclass(frozen=True, kw_only=True)
class BlockMainloop:
    """What the cuda mainloops without tensor maps have in common: one tile for each block, or cluster of blocks.

    Attributes:
        cluster_k_splits: blocks of a cluster that share one tile's K.
        shared_bytes: dynamic shared memory of a block, in bytes.
        wide: whether indices are 64-bit.
    """

    path: ClassVar[str]
    dependent_launch: ClassVar[bool] = True
    """Whether the mainloop is made for programmatic dependent launch. It then waits for the preceding kernel of the
    stream only before it reads what that kernel may have written; until then it fetches weights or initialises."""
    cluster_k_splits: int = 1
    shared_bytes: int = 0
    wide: bool = False

    def described(self, tile: tuple[int, int, int], warps: int, stages: int, loads: int = 1) -> str:
        """The schedule in words, for people; ``repr`` tells any two schedules apart."""
        m, n, k = tile
        words = [f"{self.path} mainloop", f"tiles of {m} x {n}, {k} of K a step"]
        words += counted(
            [
                (warps, "{} warps a block"),
                (stages, "{} stages"),
                (self.cluster_k_splits, "{} blocks of a cluster share K"),
                (loads, "{} products or loads at once"),
            ]
        )
        words += counted([(self.shared_bytes, "{} bytes of shared memory")], 1)
        return ", ".join([*words, *["64-bit indices"] * self.wide])


@dataclass(frozen=True)
class MmaMainloop(BlockMainloop):
    """``gemm_mma.cuh``: weights go from global memory into mma.sync's fragments.

    Attributes:
        tokens: rows of x in a tile.
        row_tiles: pieces of 16 rows of each weight that a warp computes.
        warps_n, warps_k: warps along N and along K.
        stages: chunks along K that a group of warps has in flight.
    """

    tokens: int
    row_tiles: int
    warps_n: int
    warps_k: int
    stages: int

    @property
    def block_m(self) -> int:
        return self.tokens

    @property
    def block_n(self) -> int:
        return 16 * self.row_tiles * self.warps_n

    @property
    def block_k(self) -> int:
        return CHUNK * self.warps_k

    @property
    def warps(self) -> int:
        return self.warps_n * self.warps_k

    def __str__(self) -> str:
        return self.described((self.block_m, self.block_n, self.block_k), self.warps, self.stages)


@dataclass(frozen=True)
class MmaQuantized(MmaMainloop):
    """Of quantised weights."""

    path: ClassVar[str] = "mma"


@dataclass(frozen=True)
class MmaRows(MmaMainloop):
    """Of 16-bit weights that are contiguous along K."""

    path: ClassVar[str] = "rows"


@dataclass(frozen=True)
class MmaColumns(MmaMainloop):
    """Of 16-bit weights that are contiguous along N."""

    path: ClassVar[str] = "columns"


@dataclass(frozen=True)
class Dense(BlockMainloop):
    """``gemm_dense.cuh``: 16-bit operands through shared memory into mma.sync.

    Attributes:
        block_m, block_n: the tile.
        warps: of a block.
        warps_k: groups of warps that share a block's K.
        stages: tiles in shared memory.
    """

    path: ClassVar[str] = "dense"
    dependent_launch: ClassVar[bool] = False
    block_m: int
    block_n: int
    warps: int
    warps_k: int
    stages: int

    @property
    def block_k(self) -> int:
        return CHUNK * self.warps_k

    def __str__(self) -> str:
        return self.described((self.block_m, self.block_n, self.block_k), self.warps, self.stages)


@dataclass(frozen=True)
class Stream(BlockMainloop):
    """``gemm_stream.cuh`` of float32 and float64 weights that are contiguous along K, read into registers.

    Attributes:
        tokens: rows of x in a tile.
        lane_rows: rows of the weight of a lane.
        vector: elements of a lane's load.
        warps_n, warps_k: warps along N and along K.
        stages: tiles that a group of warps has in flight.
    """

    path: ClassVar[str] = "stream"
    tokens: int
    lane_rows: int
    vector: int
    warps_n: int
    warps_k: int
    stages: int

    @property
    def block_m(self) -> int:
        return self.tokens

    @property
    def block_n(self) -> int:
        return self.lane_rows * self.warps_n

    @property
    def block_k(self) -> int:
        return WARP * self.vector * self.warps_k

    @property
    def warps(self) -> int:
        return self.warps_n * self.warps_k

    def __str__(self) -> str:
        return self.described((self.block_m, self.block_n, self.block_k), self.warps, self.stages, self.vector)


@dataclass(frozen=True)
class StreamOuter(BlockMainloop):
    """``gemm_stream.cuh`` of float32 and float64 weights that are contiguous along N.

    Attributes:
        tokens: rows of x in a tile.
        lane_k: steps along K of a lane.
        vector: elements of a lane's load.
        warps: of a block, all along K.
        stages: 1: the mainloop loads one tile ahead by itself.
    """

    path: ClassVar[str] = "stream_outer"
    warps_n: ClassVar[int] = 1
    stages: ClassVar[int] = 1
    tokens: int
    lane_k: int
    vector: int
    warps: int

    @property
    def block_m(self) -> int:
        return self.tokens

    @property
    def block_n(self) -> int:
        return WARP * self.vector

    @property
    def block_k(self) -> int:
        return self.lane_k * self.warps

    @property
    def warps_k(self) -> int:
        return self.warps

    def __str__(self) -> str:
        return self.described((self.block_m, self.block_n, self.block_k), self.warps, self.stages, self.vector)


@dataclass(frozen=True)
class Simt(BlockMainloop):
    """``gemm_simt.cuh``: any operands through shared memory, by ordinary multiply-adds.

    Attributes:
        block_m, block_n, block_k: the tile, ``block_k`` of it in shared memory.
        warps: of a block.
    """

    path: ClassVar[str] = "simt"
    dependent_launch: ClassVar[bool] = False
    stages: ClassVar[int] = 2
    block_m: int
    block_n: int
    block_k: int
    warps: int

    def __str__(self) -> str:
        return self.described((self.block_m, self.block_n, self.block_k), self.warps, self.stages)
