"""Declares the schedules of a product: a class for each mainloop, with what decides its source and its launch.

In all of them ``block_m`` is a tile's rows of x (tokens), ``block_n`` its columns of the result (rows of the weight),
and ``block_k`` the extent of K that a block reads in one iteration; where the mainloop has units of its own, these are
properties. ``path`` names the mainloop's header, or its form in the template.

K can be split in two ways. With ``cluster_k_splits`` the blocks of one cluster share a tile's K, exchange their sums
through distributed shared memory, add them in rank order, and run the epilogue in the same kernel. (The wgmma mainloops
do so with tiles that would leave blocks idle, and the launch chooses how many blocks share them.) With ``k_splits``
independent blocks store the sums of their ranges of K to a temporary, and a second kernel adds them in order and runs
the epilogue (``split_k.py``).

A schedule is a part of the request key. Neighbours: ``block_mainloops.py`` has those of the cuda mainloops without
tensor maps, ``triton_mainloops.py`` those of Triton, ``cutlass_mainloops.py`` that of CUTLASS; this module has the
others, and the unions of all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from jitgen.families.gemm.block_mainloops import (
    CHUNK,
    BlockMainloop,
    Dense,
    DenseBytes,
    MmaBytes,
    MmaCodes,
    MmaColumns,
    MmaMainloop,
    MmaQuantized,
    MmaRows,
    Simt,
    Stream,
    StreamOuter,
    multiplies_codes,
)
from jitgen.families.gemm.cutlass_mainloops import CutlassTile
from jitgen.families.gemm.triton_mainloops import TritonMainloop, TritonSlices, TritonTokens, TritonWeights
from jitgen.schedule.declared import DeclaredSchedule, Member, about, derived

__all__ = ["CHUNK", "BlockMainloop", "Dense", "DenseBytes", "MmaBytes", "MmaColumns", "MmaMainloop", "MmaQuantized"]
__all__ += ["CutlassTile", "MmaCodes", "MmaRows", "Simt", "multiplies_codes"]
__all__ += ["Stream", "StreamOuter", "TritonMainloop", "TritonSlices", "TritonTokens", "TritonWeights"]

WARPGROUP = 4
"""Warps of a warpgroup, which issue one wgmma together."""


# --------------------------------------------------------------------------------------------------------------- cpp


@dataclass(frozen=True)
class CppTiles(DeclaredSchedule):
    """Schedules ``gemm.hpp``: quantised weights are decoded for each tile that reads them.

    Attributes:
        block_m: rows of the tallest tile. The header has columns and K of its own.
        fewest_rows: rows of x that a call has at least, so that no tiles are compiled for fewer.
        wide: whether indices are 64-bit.
        invariant: whether a row's sums must have the same bits in tiles of every height.
    """

    path: ClassVar[str] = "tiles"
    sentence = (
        *("{path} mainloop", "tiles of {block_m} x {block_n}, {block_k} of K a step"),
        *("wide", "invariant"),
    )
    dependent_launch: ClassVar[bool] = False
    block_n: ClassVar[int] = 64
    block_k: ClassVar[int] = 256
    block_m: int
    fewest_rows: int
    wide: bool = field(default=False, metadata=about("64-bit indices"))
    invariant: bool = field(default=False, metadata=about("sums that no batch changes"))


@dataclass(frozen=True)
class CppDecoded(CppTiles):
    """Schedules ``gemm_panels.hpp``: like ``CppTiles``, but quantised weights are decoded once for all tiles."""

    path: ClassVar[str] = "decoded"


# ---------------------------------------------------------------------------------------------- cuda, by tensor maps


@dataclass(frozen=True, kw_only=True)
class WgmmaMainloop(DeclaredSchedule):
    """Holds what the mainloops of sm_90a have in common: persistent blocks, whose tensor copies a warpgroup of their
    own starts.

    Attributes:
        stages: stages in shared memory, at most: as many as gain anything, until ``shared_bytes`` says how many fit.
        cluster_k_splits: the most blocks of a cluster that share one tile's K; a launch chooses.
        shared_bytes: dynamic shared memory of a block, in bytes; 0 until it is known.
        wide: whether indices are 64-bit.
        k_splits: ranges of K whose sums are stored separately, to a temporary.
        resident: blocks that a multiprocessor holds at once.
    """

    path: ClassVar[str]
    default_struct: ClassVar[str]
    defaults: ClassVar[Mapping[str, str]]
    sentence = (
        *("{path} mainloop", "tiles of {block_m} x {block_n}, {block_k} of K a step", "warps", "stages"),
        *("cluster_k_splits", "k_splits", "multicast", "shares_x", "other_multicast", "steps"),
        "persistent blocks, {resident} a multiprocessor",
        *("raster", "stagger", "swapped", "pingpong", "narrow", "shared_bytes", "wide"),
    )
    dependent_launch: ClassVar[bool] = True
    stages: int = field(metadata=about("{} stages"))
    cluster_k_splits: int = field(
        default=1, metadata=about("at most {} blocks of a cluster share K", member="most_splits")
    )
    shared_bytes: int = field(default=0, metadata=about("{} bytes of shared memory", least=1))
    wide: bool = field(default=False, metadata=about("64-bit indices"))
    k_splits: int = field(default=1, metadata=about("split-K by {}", member="ranges"))
    resident: int = 1

    def members(self, **facts: bool | int | str) -> list[Member]:
        """Returns the members of ``struct Config``, without those that have the values of its base, ``default_struct``
        of the header."""
        return [member for member in super().members(**facts) if self.defaults.get(member.name) != member.value]


@dataclass(frozen=True)
class WgmmaQuantized(WgmmaMainloop):
    """Schedules ``gemm_wgmma_quantized.cuh``: quantised weights are decoded into the registers that wgmma reads.

    Attributes:
        tokens: rows of x in a tile.
        warpgroups: warpgroups that compute.
        blocks_of_rows: blocks of 64 rows of the weights that a warpgroup computes, of all contractions.
        span: chunks of K in a stage.
        contractions: contractions of a region.
        steps: wgmma steps of 16 along K that are started together.
        stagger: iterations by which a tile begins later along K than its neighbour; each tile wraps round all of K.
        raster: tiles that are walked along M before the next tile along N, so that blocks that run at the same time
            share operands in the L2 cache.
        multicast: blocks of a cluster that share the tile of x, of which each copies a piece for all; then no blocks
            share K.
        narrow: rows of x that a tile multiplies where its group has no more; 0 where all tiles multiply ``tokens``.
    """

    path: ClassVar[str] = "wgmma_quantized"
    config = (
        *("trimmed", "ranges", "contractions", "regions", "tokens", "warpgroups", "blocks", "span", "steps", "stagger"),
        *("stages", "multicast", "raster", "most_splits", "resident", "in_pairs", "narrow"),
    )
    default_struct: ClassVar[str] = "jitgen::QuantizedDefaults"
    defaults: ClassVar[Mapping[str, str]] = {"in_pairs": "false", "narrow": "0"}
    pingpong: ClassVar[bool] = False
    tokens: int
    warpgroups: int
    blocks_of_rows: int = field(metadata=about(member="blocks"))
    span: int
    contractions: int = 1
    steps: int = field(default=2, metadata=about("{} products or loads at once"))
    stagger: int = field(default=0, metadata=about("neighbouring tiles begin {} steps of K apart", least=1))
    raster: int = field(default=16, metadata=about("raster of {} tiles"))
    multicast: int = field(default=1, metadata=about("multicast to {} blocks"))
    narrow: int = field(default=0, metadata=about("last tiles of a group of {} rows", least=1))

    @property
    def cluster(self) -> int:
        """Returns the blocks that share the tile of x."""
        return self.multicast

    @property
    def tilings(self) -> tuple[WgmmaQuantized]:
        """Returns the tilings that a launch chooses from: this one alone."""
        return (self,)

    @property
    def block_m(self) -> int:
        return self.tokens

    @property
    def block_n(self) -> int:
        return self.warpgroups * self.blocks_of_rows * 64 // self.contractions

    @property
    def block_k(self) -> int:
        return CHUNK * self.span

    @derived("{} warps a block")
    def warps(self) -> int:
        return WARPGROUP * (self.warpgroups + 1)


@dataclass(frozen=True)
class WgmmaDense(WgmmaMainloop):
    """Schedules ``gemm_wgmma_dense.cuh``: 16-bit weights, from shared memory.

    Attributes:
        down, across: consumer warpgroups along M and along N.
        blocks: blocks of 64 rows of each warpgroup along M.
        columns: columns of a tile, of each contraction.
        multicast: blocks of a cluster that share the weight's tile, of which each copies a piece for all. With it
            ``cluster_k_splits`` is 1 or the same.
        shares_x: whether they share x's tile instead, and compute tiles that are neighbours along N.
        staged: columns of all contractions that an epilogue takes through shared memory at once, 64 or 32: 64 numbers
            of 16 bits are a whole line of memory, and 32 leave room for a stage more.
        pingpong: whether two warpgroups compute tiles in turn, each of ``down`` blocks of 64 rows, so that one
            multiplies while the other one stores.
        raster: as of ``WgmmaQuantized``.
        swapped: whether x and the weights change places, so that a tile has ``columns`` rows of x, and ``height`` rows
            of the weights.
        other_multicast: blocks of a cluster that share the tile of the operand that ``multicast`` is not about: a
            cluster is a rectangle of blocks then, and none share K.
    """

    path: ClassVar[str] = "wgmma_dense"
    config = (
        *("transposed", "trimmed", "pingpong", "ranges", "contractions", "regions", "down", "across", "columns"),
        *("stages", "multicast", "shares_x", "raster", "most_splits", "resident", "staged", "run"),
        *("swapped", "blocks", "other_multicast", "x_transposed", "scaled", "in_pairs", "at_once"),
    )
    default_struct: ClassVar[str] = "jitgen::DenseDefaults"
    defaults: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("swapped", "x_transposed", "scaled", "in_pairs", "at_once"), "false"),
        **dict.fromkeys(("blocks", "other_multicast"), "1"),
    }
    block_k: ClassVar[int] = CHUNK
    down: int
    across: int
    columns: int
    multicast: int = field(default=1, metadata=about("multicast to {} blocks"))
    shares_x: bool = field(default=False, metadata=about("of x"))
    staged: int = 64
    pingpong: bool = field(default=False, metadata=about("two warpgroups compute tiles in turn"))
    raster: int = field(default=8, metadata=about("raster of {} tiles"))
    swapped: bool = field(default=False, metadata=about("x and the weights swapped"))
    blocks: int = 1
    other_multicast: int = field(default=1, metadata=about("and of the other operand to {}"))

    @property
    def tilings(self) -> tuple[WgmmaDense]:
        """Returns the tilings that a launch chooses from: this one alone."""
        return (self,)

    @property
    def block_m(self) -> int:
        return self.columns if self.swapped else self.height

    @property
    def block_n(self) -> int:
        return self.height if self.swapped else self.columns

    @property
    def height(self) -> int:
        """Returns the rows of a tile as wgmma has it."""
        return 64 * self.down * self.blocks

    @property
    def cluster(self) -> int:
        """Returns the blocks that share tiles of operands."""
        return self.multicast * self.other_multicast

    @property
    def shares(self) -> tuple[int, int]:
        """Returns how many blocks share a tile of x, and a tile of the weights."""
        both = (self.multicast, self.other_multicast)
        return both if self.shares_x else both[::-1]

    @property
    def warpgroups(self) -> int:
        """Returns the warpgroups that compute."""
        return 2 if self.pingpong else self.down * self.across

    @derived("{} warps a block")
    def warps(self) -> int:
        return WARPGROUP * (self.warpgroups + 1)


@dataclass(frozen=True)
class WgmmaBytes(WgmmaDense):
    """Schedules ``gemm_wgmma_dense.cuh`` for 8-bit integers and floats. A stage has as many bytes along K as one of
    16-bit weights, and so twice as many elements."""

    block_k: ClassVar[int] = 2 * CHUNK


@dataclass(frozen=True)
class WgmmaTilings(DeclaredSchedule):
    """Holds several tilings of one mainloop. The generated source has an entry for each, and a launch takes the one
    that is estimated to be the fastest for its rows of x: which tiles leave few multiprocessors idle changes from one
    number of rows to the next."""

    dependent_launch: ClassVar[bool] = True
    tilings: tuple[WgmmaQuantized | WgmmaDense, ...]

    def __str__(self) -> str:
        return ", or, for some numbers of rows: ".join(map(str, self.tilings))

    @property
    def path(self) -> str:
        return self.tilings[0].path

    @property
    def wide(self) -> bool:
        return self.tilings[0].wide

    @property
    def k_splits(self) -> int:
        return self.tilings[0].k_splits


@dataclass(frozen=True)
class WgmmaLaunch:
    """Holds what one launch takes of a schedule with tensor maps.

    Attributes:
        tiling: one of the schedule's.
        entry: its position among them, and so the entry of the kernel.
        splits: blocks of a cluster that share the K of a tile.
    """

    tiling: WgmmaQuantized | WgmmaDense
    entry: int
    splits: int


CppSchedule = CppTiles | CppDecoded
BlockSchedule = MmaQuantized | MmaRows | MmaColumns | Dense | Stream | StreamOuter | Simt
WgmmaTiling = WgmmaQuantized | WgmmaDense
WgmmaSchedule = WgmmaTiling | WgmmaTilings
TritonSchedule = TritonTokens | TritonWeights | TritonSlices
GemmSchedule = CppSchedule | BlockSchedule | WgmmaSchedule | TritonSchedule | CutlassTile
"""The schedule of a product."""
SCHEDULES: tuple[type, ...] = (
    *(CppTiles, CppDecoded, MmaQuantized, MmaCodes, MmaRows, MmaBytes, MmaColumns, Dense, DenseBytes),
    *(Stream, StreamOuter, Simt),
    *(WgmmaQuantized, WgmmaDense, WgmmaBytes, WgmmaTilings, TritonTokens, TritonWeights, TritonSlices),
    CutlassTile,
)
"""Every class of ``GemmSchedule``."""


def blocks(
    schedule: CppSchedule | BlockSchedule | WgmmaTiling | TritonSchedule | CutlassTile, sizes: Sequence[tuple[int, int]]
) -> int:
    """Counts the blocks that share no K within a cluster, for regions of these (rows, columns)."""
    tiles = [(-(-rows // schedule.block_m), -(-columns // schedule.block_n)) for rows, columns in sizes]
    ranges = schedule.k_splits if isinstance(schedule, TritonMainloop | WgmmaMainloop) else 1
    if isinstance(schedule, WgmmaDense) and schedule.cluster > 1:
        of_x, of_weights = schedule.shares  # a cluster idles in part where it is not complete
        return ranges * sum(schedule.cluster * -(-down // of_weights) * -(-across // of_x) for down, across in tiles)
    if isinstance(schedule, WgmmaQuantized) and schedule.multicast > 1:
        share = schedule.multicast
        return sum(share * down * -(-across // share) for down, across in tiles)
    if isinstance(schedule, CutlassTile):
        share = schedule.cluster
        return sum(share * -(-down // share) * across for down, across in tiles)
    return ranges * sum(down * across for down, across in tiles)
