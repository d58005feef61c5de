"""Declares the schedules of the cuda mainloops without tensor maps: a class for each, as ``mainloops.py`` explains."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from jitgen.kernel.operands import WARP
from jitgen.quant.codes import FLOAT8
from jitgen.schedule.declared import DeclaredSchedule, about, derived
from jitgen.spec import Target

CHUNK = 64
"""Extent of K in a chunk of the mainloops on tensor cores: 128 bytes of 16-bit elements."""
CHUNK_BYTES = 128
"""The same of one row, in bytes."""
WINDOW_BYTES = 4096
"""Bytes of x that a group of warps stages in shared memory at a time, in the ``mma`` and ``stream`` mainloops: the
nearest whole number of steps below it."""
EIGHT = 8
"""Tokens that a product on tensor cores takes at once."""


def multiplies_codes(dtype: str, target: Target) -> bool:
    """Returns whether the tensor cores of ``target`` multiply ``dtype``, one of ``CODES``."""
    return target.kind == "cuda" and target.capability >= (89 if dtype in FLOAT8 else 80)


class _Tile(Protocol):
    """Holds what every mainloop of this module says of the work of a block, in a field or a property."""

    @property
    def contractions(self) -> int: ...
    @property
    def scalar_bytes(self) -> int: ...
    @property
    def cluster_k_splits(self) -> int: ...
    @property
    def block_m(self) -> int: ...
    @property
    def block_n(self) -> int: ...
    @property
    def block_k(self) -> int: ...
    @property
    def stages(self) -> int: ...
    @property
    def warps(self) -> int: ...
    @property
    def warps_k(self) -> int: ...
    @property
    def stage_bytes(self) -> int: ...
    @property
    def width(self) -> int: ...


class _StreamTile(_Tile, Protocol):
    @property
    def window(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class BlockMainloop(DeclaredSchedule):
    """Holds what the cuda mainloops without tensor maps have in common: one tile for each block, or cluster of blocks.

    Attributes:
        contractions: weights of each region, which share x.
        scalar_bytes: bytes of a sum.
        cluster_k_splits: blocks of a cluster that share one tile's K.
        wide: whether indices are 64-bit.
    """

    path: ClassVar[str]
    sentence = (
        *("{path} mainloop", "tiles of {block_m} x {block_n}, {block_k} of K a step", "warps", "stages"),
        *("cluster_k_splits", "vector", "shared_bytes", "wide"),
    )
    dependent_launch: ClassVar[bool] = True
    """Whether the mainloop is made for programmatic dependent launch. It then waits for the preceding kernel of the
    stream only before it reads what that kernel may have written; until then it fetches weights or initialises."""
    contractions: int = 1
    scalar_bytes: int = 4
    cluster_k_splits: int = field(default=1, metadata=about("{} blocks of a cluster share K", member="cluster"))
    wide: bool = field(default=False, metadata=about("64-bit indices"))

    @property
    def width(self: _Tile) -> int:
        """Returns the columns that one call of the epilogue computes: up to eight, as long as every thread has a call
        to make."""
        width = 1
        while width < 8 and self.block_m * self.block_n >= 2 * width * self.warps * WARP:
            width *= 2
        return width

    @derived("{} bytes of shared memory", least=1)
    def shared_bytes(self: _Tile) -> int:
        """Returns the dynamic shared memory of a block, in bytes, as the headers have it: stages, or the sums of the
        groups of warps; and sums that the blocks of a cluster send to this one."""
        cluster, calls = self.cluster_k_splits, self.block_m * (self.block_n // self.width)
        received = -(-calls // cluster) * cluster * self.contractions * self.width if cluster > 1 else 0
        sums = self.warps_k * self.contractions * EIGHT * _eights(self.block_m) * (self.block_n + 4)
        return max(self.stage_bytes, sums * self.scalar_bytes) + received * self.scalar_bytes


def _eights(tokens: int) -> int:
    """Counts the products that so many tokens take."""
    return -(-tokens // EIGHT)


def _window(stages: int, step_bytes: int) -> int:
    """Counts the steps along K, of ``step_bytes`` of x each, that are staged in shared memory together."""
    return max(1, min(WINDOW_BYTES // step_bytes, max(8, 1024 // step_bytes)) // stages) * stages


@dataclass(frozen=True)
class MmaMainloop(BlockMainloop):
    """Schedules ``gemm_mma.cuh``: weights go from global memory into mma.sync's fragments.

    Attributes:
        tokens: rows of x in a tile.
        row_tiles: pieces of 16 rows of each weight that a warp computes.
        warps_n, warps_k: warps along N and along K.
        stages: chunks along K that a group of warps has in flight.
    """

    config = (
        *("contractions", "tokens", "row_tiles", "warps_n", "warps_k", "cluster", "depth", "window", "width"),
        "sums",
    )
    packed: ClassVar[int] = 1
    """How many of K are one element for the header, which takes pairs of bytes for elements."""
    tokens: int
    row_tiles: int
    warps_n: int
    warps_k: int
    stages: int = field(metadata=about("{} stages", member="depth"))

    @property
    def block_m(self) -> int:
        return self.tokens

    @property
    def block_n(self) -> int:
        return 16 * self.row_tiles * self.warps_n

    @property
    def block_k(self) -> int:
        return self.packed * CHUNK * self.warps_k

    @derived("{} warps a block")
    def warps(self) -> int:
        return self.warps_n * self.warps_k

    @property
    def window(self) -> int:
        """Returns how many chunks of x are staged together."""
        return _window(self.stages, self.tokens * CHUNK_BYTES)

    @property
    def stage_bytes(self) -> int:
        """Returns the bytes of two windows for each group of warps."""
        return 2 * self.window * self.tokens * CHUNK_BYTES * self.warps_k


@dataclass(frozen=True)
class MmaQuantized(MmaMainloop):
    """Schedules quantised weights by ``gemm_mma.cuh``.

    Attributes:
        pair: the tiles that a launch of at most two rows takes instead, in an entry of their own; None where every
            launch takes these.
    """

    path: ClassVar[str] = "mma"
    pair: MmaQuantized | None = None

    @property
    def blocks_by_registers(self) -> int:
        """Returns how many blocks the registers of a multiprocessor should hold, an argument of ``__launch_bounds__``:
        as many as leave a thread 64 registers for few tokens and row tiles, and 72 or 128 for more; 0 leaves it to the
        compiler."""
        threads, tiles = self.warps * WARP, self.row_tiles * self.contractions
        if self.tokens > EIGHT:
            return 0
        if self.tokens == 1 or tiles == 1:
            return max(1, 1024 // threads) if tiles <= 2 else 0
        return 2 if tiles == 2 and threads == 448 else max(1, 512 // threads)


@dataclass(frozen=True)
class MmaCodes(MmaQuantized):
    """Schedules 4-bit weights that meet an activation of int8 codes by ``gemm_mma.cuh``, which takes pairs of codes for
    elements."""

    path: ClassVar[str] = "codes"
    packed: ClassVar[int] = 2


@dataclass(frozen=True)
class MmaRows(MmaMainloop):
    """Schedules 16-bit weights that are contiguous along K by ``gemm_mma.cuh``."""

    path: ClassVar[str] = "rows"


@dataclass(frozen=True)
class MmaBytes(MmaRows):
    """Schedules weights of one byte that are contiguous along K by ``gemm_mma.cuh``, which takes pairs of them for
    elements."""

    path: ClassVar[str] = "bytes"
    packed: ClassVar[int] = 2


@dataclass(frozen=True)
class MmaColumns(MmaMainloop):
    """Schedules 16-bit weights that are contiguous along N by ``gemm_mma.cuh``."""

    path: ClassVar[str] = "columns"


@dataclass(frozen=True)
class Dense(BlockMainloop):
    """Schedules ``gemm_dense.cuh``: 16-bit operands through shared memory into mma.sync.

    Attributes:
        block_m, block_n: the tile.
        warps: of a block.
        warps_k: groups of warps that share a block's K.
        stages: tiles in shared memory.
    """

    path: ClassVar[str] = "dense"
    dependent_launch: ClassVar[bool] = False
    config = (
        *("contractions", "warp_tokens", "row_tiles", "warps_m", "warps_n", "warps_k", "cluster", "stages", "width"),
        *("x_along", "w_along", "w_vector"),
    )
    block_m: int
    block_n: int
    warps: int = field(metadata=about("{} warps a block"))
    warps_k: int
    stages: int = field(metadata=about("{} stages"))

    @property
    def block_k(self) -> int:
        return CHUNK * self.warps_k

    @property
    def warp_tokens(self) -> int:
        """Returns a warp's tokens, in eights."""
        return min(4, _eights(self.block_m))

    @property
    def row_tiles(self) -> int:
        """Returns a warp's rows of a weight, in units of 16."""
        return self.block_n // (16 * self.warps_n)

    @property
    def warps_m(self) -> int:
        return _eights(self.block_m) // self.warp_tokens

    @property
    def warps_n(self) -> int:
        return self.warps // (self.warps_m * self.warps_k)

    @property
    def stage_bytes(self) -> int:
        return self.stages * self.warps_k * (self.block_m + self.contractions * self.block_n) * CHUNK_BYTES


@dataclass(frozen=True)
class DenseBytes(Dense):
    """Schedules ``gemm_dense.cuh`` for operands of one byte: as many bytes along K, and so twice as many elements."""

    @property
    def block_k(self) -> int:
        return 2 * CHUNK * self.warps_k


@dataclass(frozen=True)
class StreamMainloop(BlockMainloop):
    """Schedules ``gemm_stream.cuh``: float32 and float64 weights that a lane reads into registers.

    Attributes:
        tokens: rows of x in a tile.
    """

    config = (
        *("contractions", "tokens", "run", "warps_n", "warps_k", "cluster", "depth", "window", "width"),
        *("along_k", "vector"),
    )
    tokens: int

    @property
    def block_m(self) -> int:
        return self.tokens

    @property
    def window(self: _Tile) -> int:
        """Returns how many tiles have their x staged together."""
        return _window(self.stages, self.block_m * (self.block_k // self.warps_k) * self.scalar_bytes)

    @property
    def stage_bytes(self: _StreamTile) -> int:
        """Returns the bytes of two windows for each group of warps."""
        return 2 * self.window * self.block_m * self.block_k * self.scalar_bytes


@dataclass(frozen=True)
class Stream(StreamMainloop):
    """Schedules ``gemm_stream.cuh`` for float32 and float64 weights that are contiguous along K, read into registers.

    Attributes:
        lane_rows: rows of the weight of a lane.
        vector: elements of a lane's load.
        warps_n, warps_k: warps along N and along K.
        stages: tiles that a group of warps has in flight.
    """

    path: ClassVar[str] = "stream"
    along_k: ClassVar[bool] = True
    lane_rows: int = field(metadata=about(member="run"))
    vector: int = field(metadata=about("{} products or loads at once"))
    warps_n: int
    warps_k: int
    stages: int = field(metadata=about("{} stages", member="depth"))

    @property
    def block_n(self) -> int:
        return self.lane_rows * self.warps_n

    @property
    def block_k(self) -> int:
        return WARP * self.vector * self.warps_k

    @derived("{} warps a block")
    def warps(self) -> int:
        return self.warps_n * self.warps_k


@dataclass(frozen=True)
class StreamOuter(StreamMainloop):
    """Schedules ``gemm_stream.cuh`` for float32 and float64 weights that are contiguous along N.

    Attributes:
        lane_k: steps along K of a lane.
        vector: elements of a lane's load.
        warps: of a block, all along K.
    """

    path: ClassVar[str] = "stream_outer"
    along_k: ClassVar[bool] = False
    lane_k: int = field(metadata=about(member="run"))
    vector: int = field(metadata=about("{} products or loads at once"))
    warps: int = field(metadata=about("{} warps a block", member="warps_k"))

    @property
    def block_n(self) -> int:
        return WARP * self.vector

    @property
    def block_k(self) -> int:
        return self.lane_k * self.warps

    @property
    def warps_n(self) -> int:
        return 1

    @property
    def warps_k(self) -> int:
        return self.warps

    @derived(member="depth")
    def stages(self) -> int:
        """Returns 1: the mainloop loads one tile ahead by itself."""
        return 1


@dataclass(frozen=True)
class Simt(BlockMainloop):
    """Schedules ``gemm_simt.cuh``: any operands through shared memory, by ordinary multiply-adds.

    Attributes:
        block_m, block_n, block_k: the tile, ``block_k`` of it in shared memory.
        warps: of a block.
    """

    path: ClassVar[str] = "simt"
    config = ("contractions", "tokens", "rows", "depth", "token_run", "row_run", "cluster", "width")
    dependent_launch: ClassVar[bool] = False
    warps_k: ClassVar[int] = 1
    block_m: int = field(metadata=about(member="tokens"))
    block_n: int = field(metadata=about(member="rows"))
    block_k: int = field(metadata=about(member="depth"))
    warps: int = field(metadata=about("{} warps a block"))

    @derived("{} stages")
    def stages(self) -> int:
        return 2

    @property
    def token_run(self) -> int:
        """Returns a thread's tokens."""
        return self.block_m * self.block_n // (self.warps * WARP * self.row_run)

    @property
    def row_run(self) -> int:
        """Returns a thread's rows of the weight."""
        return 4 if self.block_m == EIGHT or self.scalar_bytes == 8 else 8

    @property
    def stage_bytes(self) -> int:
        tile = self.block_m + 4 + self.contractions * (self.block_n + 4)
        return self.stages * self.block_k * tile * self.scalar_bytes
