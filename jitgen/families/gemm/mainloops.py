"""The schedules of a product: a class for each mainloop, with what decides its source and its launch.

In all of them ``block_m`` is a tile's rows of x (tokens), ``block_n`` its columns of the result (rows of the weight),
and ``block_k`` the extent of K that a block reads in one iteration; where the mainloop has units of its own, these are
properties. ``path`` names the mainloop's header, or its form in the template.

K can be split in two ways. With ``cluster_k_splits`` the blocks of one cluster share a tile's K, exchange their sums
through distributed shared memory, add them in rank order, and run the epilogue in the same kernel. (The wgmma mainloops
do so with tiles that would leave blocks idle, and the launch chooses how many blocks share them.) With ``k_splits``
independent blocks store the sums of their ranges of K to a temporary, and a second kernel adds them in order and runs
the epilogue (``split_k.py``).

A schedule is a part of the request key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

WARP = 32
WARPGROUP = 4
"""Warps of a warpgroup, which issue one wgmma together."""
CHUNK = 64
"""Extent of K in a chunk of the mainloops on tensor cores: 128 bytes of 16-bit elements."""


def _counted(words: Sequence[tuple[int, str]], least: int = 2) -> list[str]:
    """The words whose number is at least ``least``, with the number in place of ``{}``."""
    return [text.format(number) for number, text in words if number >= least]


# --------------------------------------------------------------------------------------------------------------- cpp


@dataclass(frozen=True)
class CppTiles:
    """``gemm.hpp``: quantised weights are decoded for each tile that reads them.

    Attributes:
        block_m: rows of the tallest tile. The header has columns and K of its own.
        fewest_rows: rows of x that a call has at least, so that no tiles are compiled for fewer.
        wide: whether indices are 64-bit.
        invariant: whether a row's sums must have the same bits in tiles of every height.
    """

    path: ClassVar[str] = "tiles"
    dependent_launch: ClassVar[bool] = False
    block_n: ClassVar[int] = 64
    block_k: ClassVar[int] = 256
    block_m: int
    fewest_rows: int
    wide: bool = False
    invariant: bool = False

    def __str__(self) -> str:
        words = [f"{self.path} mainloop", f"tiles of {self.block_m} x {self.block_n}, {self.block_k} of K a step"]
        return ", ".join([*words, *["64-bit indices"] * self.wide, *["sums that no batch changes"] * self.invariant])


@dataclass(frozen=True)
class CppDecoded(CppTiles):
    """``gemm_panels.hpp``: as ``CppTiles``; quantised weights are decoded once for all tiles."""

    path: ClassVar[str] = "decoded"


# ------------------------------------------------------------------------------------------- cuda, without tensor maps


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
        words += _counted(
            [
                (warps, "{} warps a block"),
                (stages, "{} stages"),
                (self.cluster_k_splits, "{} blocks of a cluster share K"),
                (loads, "{} products or loads at once"),
            ]
        )
        words += _counted([(self.shared_bytes, "{} bytes of shared memory")], 1)
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


# ---------------------------------------------------------------------------------------------- cuda, by tensor maps


@dataclass(frozen=True, kw_only=True)
class WgmmaMainloop:
    """What the mainloops of sm_90a have in common: persistent blocks, whose tensor copies a warpgroup of their own
    starts.

    Attributes:
        stages: stages in shared memory.
        cluster_k_splits: the most blocks of a cluster that share one tile's K; a launch chooses.
        raster: tiles that are walked along M before the next tile along N, so that blocks that run at the same time
            share operands in the L2 cache.
        shared_bytes: dynamic shared memory of a block, in bytes.
        wide: whether indices are 64-bit.
        k_splits: ranges of K whose sums go to a temporary.
    """

    path: ClassVar[str]
    dependent_launch: ClassVar[bool] = True
    stages: int
    cluster_k_splits: int
    raster: int
    shared_bytes: int = 0
    wide: bool = False
    k_splits: int = 1

    @property
    def tilings(self) -> tuple[Any, ...]:
        """The tilings that a launch chooses from: this one alone."""
        return (self,)

    def described(self, tile: tuple[int, int, int], warps: int, multicast: int, resident: int, steps: int = 1) -> str:
        """As ``BlockMainloop.described``."""
        m, n, k = tile
        words = [f"{self.path} mainloop", f"tiles of {m} x {n}, {k} of K a step"]
        words += _counted(
            [
                (warps, "{} warps a block"),
                (self.stages, "{} stages"),
                (self.cluster_k_splits, "at most {} blocks of a cluster share K"),
                (self.k_splits, "split-K by {}"),
                (multicast, "multicast to {} blocks"),
                (steps, "{} products or loads at once"),
            ]
        )
        words.append(f"persistent blocks, {resident} a multiprocessor")
        words += _counted([(self.raster, "raster of {} tiles")])
        return ", ".join(words)

    def described_end(self) -> str:
        """Shared memory and indices."""
        words = _counted([(self.shared_bytes, "{} bytes of shared memory")], 1)
        return ", ".join([*words, *["64-bit indices"] * self.wide])


PINGPONG = "two warpgroups compute tiles in turn"


@dataclass(frozen=True)
class WgmmaQuantized(WgmmaMainloop):
    """``gemm_wgmma_quantized.cuh``: quantised weights are decoded into the registers that wgmma reads.

    Attributes:
        tokens: rows of x in a tile.
        warpgroups: warpgroups that compute.
        blocks_of_rows: blocks of 64 rows of the weights that a warpgroup computes, of all contractions.
        contractions: contractions of a region.
        span: chunks of K in a stage.
        steps: wgmma steps of 16 along K that are started together.
        stagger: iterations by which a tile begins later along K than its neighbour; each tile wraps round all of K.
        resident: blocks that a multiprocessor holds at once.
        multicast: blocks of a cluster that share x's tile, of which each copies a piece for all.
        pingpong: whether two warpgroups compute tiles in turn, so that one multiplies while the other one stores.
    """

    path: ClassVar[str] = "wgmma_quantized"
    tokens: int
    warpgroups: int
    blocks_of_rows: int
    contractions: int
    span: int
    steps: int
    stagger: int = 0
    resident: int = 1
    multicast: int = 1
    pingpong: bool = False

    @property
    def block_m(self) -> int:
        return self.tokens

    @property
    def block_n(self) -> int:
        return self.tile_warpgroups * self.blocks_of_rows * 64 // self.contractions

    @property
    def tile_warpgroups(self) -> int:
        """Warpgroups that compute a tile."""
        return 1 if self.pingpong else self.warpgroups

    @property
    def block_k(self) -> int:
        return CHUNK * self.span

    @property
    def warps(self) -> int:
        return WARPGROUP * (self.warpgroups + 1)

    def __str__(self) -> str:
        tile = (self.block_m, self.block_n, self.block_k)
        words = [self.described(tile, self.warps, self.multicast, self.resident, self.steps)]
        words += [PINGPONG] * self.pingpong
        words += _counted([(self.stagger, "neighbouring tiles begin {} steps of K apart")], 1)
        return ", ".join(filter(None, [*words, self.described_end()]))


@dataclass(frozen=True)
class WgmmaDense(WgmmaMainloop):
    """``gemm_wgmma_dense.cuh``: 16-bit weights, from shared memory.

    Attributes:
        down, across: consumer warpgroups along M, of 64 rows each, and along N.
        columns: columns of a tile, of each contraction.
        multicast: blocks of a cluster that share the weight's tile, of which each copies a piece for all.
        resident: blocks that a multiprocessor holds at once.
        staged: columns that an epilogue takes through shared memory at once.
        pingpong: as of ``WgmmaQuantized``; a warpgroup then has ``down`` blocks of 64 rows.
        swapped: whether a tile's rows are those of the weight and its columns those of x, which may be any multiple of
            16, instead of the other way round. Of one contraction and one region alone.
    """

    path: ClassVar[str] = "wgmma_dense"
    block_k: ClassVar[int] = CHUNK
    down: int
    across: int
    columns: int
    multicast: int = 1
    resident: int = 1
    staged: int = 64
    pingpong: bool = False
    swapped: bool = False

    @property
    def block_m(self) -> int:
        return self.columns if self.swapped else 64 * self.down

    @property
    def block_n(self) -> int:
        return 64 * self.down if self.swapped else self.columns

    @property
    def warpgroups(self) -> int:
        """Warpgroups that compute."""
        return 2 if self.pingpong else self.down * self.across

    @property
    def warps(self) -> int:
        return WARPGROUP * (self.warpgroups + 1)

    def __str__(self) -> str:
        tile = (self.block_m, self.block_n, self.block_k)
        words = [self.described(tile, self.warps, self.multicast, self.resident), *[PINGPONG] * self.pingpong]
        words += ["the weight as wgmma's left operand"] * self.swapped
        return ", ".join(filter(None, [*words, self.described_end()]))


@dataclass(frozen=True)
class WgmmaPair:
    """Two tilings of one mainloop. The generated source has an entry for each, and a launch takes the one that is
    estimated to be faster for its rows of x: which tiles leave few multiprocessors idle changes from one number of rows
    to the next."""

    dependent_launch: ClassVar[bool] = True
    first: WgmmaQuantized | WgmmaDense
    second: WgmmaQuantized | WgmmaDense

    @property
    def tilings(self) -> tuple[WgmmaQuantized | WgmmaDense, ...]:
        """The tilings that a launch chooses from, in the order of their entries."""
        return (self.first, self.second)

    @property
    def path(self) -> str:
        return self.first.path

    @property
    def wide(self) -> bool:
        return self.first.wide

    def __str__(self) -> str:
        return f"{self.first}, or, for some numbers of rows: {self.second}"


@dataclass(frozen=True)
class WgmmaLaunch:
    """What one launch takes of a schedule with tensor maps.

    Attributes:
        tiling: one of the schedule's.
        entry: its position among them, and so the entry of the kernel.
        splits: blocks of a cluster that share the K of a tile.
    """

    tiling: WgmmaQuantized | WgmmaDense
    entry: int
    splits: int


# ------------------------------------------------------------------------------------------------------------ triton


@dataclass(frozen=True)
class TritonMainloop:
    """What the forms of the triton dialect have in common; ``gemm/triton.py`` explains them.

    Attributes:
        block_m, block_n: the tile.
        slice_k: extent of K that one ``tl.dot`` reads.
        warps, stages: Triton's ``num_warps`` and ``num_stages``.
        raster: tiles that are walked along M before the next tile along N.
        k_splits: ranges of K whose sums go to a temporary.
        packed: whether codes are decoded with inline PTX.
        wide: whether indices are 64-bit.
    """

    form: ClassVar[str]
    dependent_launch: ClassVar[bool] = True
    block_m: int
    block_n: int
    slice_k: int
    warps: int
    stages: int
    raster: int = 1
    k_splits: int = 1
    packed: bool = False
    wide: bool = False

    @property
    def path(self) -> str:
        return f"{self.form}_packed" if self.packed else self.form

    @property
    def slices(self) -> int:
        """Dots that one iteration computes side by side, each over its own slice of K."""
        return 1

    @property
    def block_k(self) -> int:
        return self.slice_k * self.slices

    def __str__(self) -> str:
        words = [f"{self.path} mainloop", f"tiles of {self.block_m} x {self.block_n}, {self.slice_k} of K a step"]
        words += _counted(
            [
                (self.warps, "{} warps a block"),
                (self.stages, "{} stages"),
                (self.k_splits, "split-K by {}"),
                (self.raster, "raster of {} tiles"),
            ]
        )
        return ", ".join([*words, *["64-bit indices"] * self.wide])


@dataclass(frozen=True)
class TritonTokens(TritonMainloop):
    """x is the left operand of ``tl.dot``."""

    form: ClassVar[str] = "tokens"


@dataclass(frozen=True)
class TritonWeights(TritonMainloop):
    """The weight is the left operand of ``tl.dot``."""

    form: ClassVar[str] = "weights"


@dataclass(frozen=True)
class TritonSlices(TritonMainloop):
    """As ``TritonWeights``, and each warp multiplies its own slice of an iteration's K."""

    form: ClassVar[str] = "slices"

    @property
    def slices(self) -> int:
        return self.warps


CppSchedule = CppTiles | CppDecoded
BlockSchedule = MmaQuantized | MmaRows | MmaColumns | Dense | Stream | StreamOuter | Simt
WgmmaTiling = WgmmaQuantized | WgmmaDense
WgmmaSchedule = WgmmaTiling | WgmmaPair
TritonSchedule = TritonTokens | TritonWeights | TritonSlices
GemmSchedule = CppSchedule | BlockSchedule | WgmmaSchedule | TritonSchedule
"""The schedule of a product."""
SCHEDULES: tuple[type, ...] = (
    *(CppTiles, CppDecoded, MmaQuantized, MmaRows, MmaColumns, Dense, Stream, StreamOuter, Simt),
    *(WgmmaQuantized, WgmmaDense, WgmmaPair, TritonTokens, TritonWeights, TritonSlices),
)
"""Every class of ``GemmSchedule``."""


def blocks(
    schedule: CppSchedule | BlockSchedule | WgmmaTiling | TritonSchedule, sizes: Sequence[tuple[int, int]]
) -> int:
    """Blocks that share no K within a cluster, for regions of these (rows, columns)."""
    tiles = [(-(-rows // schedule.block_m), -(-columns // schedule.block_n)) for rows, columns in sizes]
    if isinstance(schedule, WgmmaDense | WgmmaQuantized) and schedule.multicast > 1:
        # A cluster's tiles are neighbours along M or N, and an incomplete cluster idles.
        share = schedule.multicast
        return sum(share * max(down * -(-across // share), -(-down // share) * across) for down, across in tiles)
    ranges = schedule.k_splits if isinstance(schedule, TritonMainloop | WgmmaMainloop) else 1
    return ranges * sum(down * across for down, across in tiles)
