"""Lists tiles of the mma.sync mainloop for few rows of x, which streams weights from memory into fragments
(``gemm_mma.cuh``), and models their times.

The constants were fitted to 1,934 timings of 68 random shapes on an H200 (``bench/gemm_timings.py --seed 23001 --shapes
34``; 1 to 15 rows, N and K from 128 to 58624), quantised weights being W4A16 with groups of 128, and then corrected by
timings of layers of Llama 3 8B and 70B (``--llama``), which were not kept. Of the tiles that were timed for a shape,
candidates or not, those that the model chooses take 4 % (quantised) and 7 % (dense) longer than the best by the
geometric mean, and 20 % and 26 % at the 95th percentile.

What the model says:

* A group of warps waits for a chunk of the weight as long as memory takes; with more stages in flight it waits less, by
  a power that is less than one. Instructions and reads of x are shared by the blocks of a multiprocessor.
* No kernel is faster than memory delivers the weights, and where multiprocessors get unequal numbers of blocks, those
  with most finish last.
* Clusters lie within a GPC, so that fewer run at once than multiprocessors suggest (``Chip.clusters``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from jitgen.families.gemm.groups import Groups
from jitgen.families.gemm.mainloops import CHUNK, MmaQuantized, MmaRows
from jitgen.ir.body import Contraction
from jitgen.schedule.chips import Chip

RESERVED_BYTES = 1024
"""Shared memory that CUDA takes for itself in every block, in bytes (CUDA C++ Programming Guide, compute capability 8.0
and later)."""
MULTIPROCESSOR_THREADS, REGISTERS = 2048, 2**16
"""Threads that a multiprocessor holds at most, and its registers (the same guide: 8.0 and 9.0)."""
SMOOTH = 4
"""The power of the mean by which the time of a kernel and that of reading the weights are combined."""
PAIR, EIGHT = 2, 8
"""Rows of the tiles that a launch of at most two rows takes in place of those of eight (``MmaQuantized.pair``)."""
ENTRY_OF_A_PAIR = "_pair"
"""What follows the kernel's name in the name of the entry of these tiles."""


def _shape(
    row_tiles: int, warps_n: int, warps_k: int, stages: int = 2, splits: int = 1
) -> tuple[int, int, int, int, int]:
    """Describes tiles of any number of tokens: what ``MmaMainloop`` has in this order, but that ``row_tiles`` are those
    of all contractions; and blocks of a cluster that share K."""
    return row_tiles, warps_n, warps_k, stages, splits


QUANTIZED = (
    *(_shape(1, 1, 16, splits=splits) for splits in (1, 2, 4, 8)),
    *(_shape(2, 1, 16, splits=splits) for splits in (1, 2, 4)),
    *(_shape(1, 1, 8), _shape(1, 2, 4), _shape(1, 4, 2), _shape(1, 2, 8, splits=8)),
    *(_shape(2, 1, 8, splits=splits) for splits in (1, 2, 4)),
    *(_shape(2, 2, 4), _shape(2, 2, 8), _shape(2, 2, 8, splits=4)),
    *(_shape(1, 1, 16, 4), _shape(2, 1, 8, 4), _shape(2, 2, 4, 4), _shape(4, 1, 8, 4)),
    *(_shape(4, 1, 8, splits=2), _shape(4, 2, 4), _shape(4, 2, 4, 4, splits=2)),
    *(_shape(4, 1, 4), _shape(4, 1, 8), _shape(4, 4, 2), _shape(2, 7, 2), _shape(2, 8, 1)),
    *(_shape(7, 2, 4), _shape(7, 4, 2)),
)
"""Of quantised weights. Of 84 that were timed, these include nearly always the fastest."""
DENSE = (
    *(_shape(1, 1, 16), _shape(1, 1, 16, splits=4)),
    *(_shape(1, 1, 8, splits=splits) for splits in (1, 4, 8)),
    *(_shape(1, 2, 8, splits=splits) for splits in (1, 2, 8)),
    *(_shape(1, 2, 4), _shape(1, 4, 2), _shape(2, 1, 8), _shape(2, 1, 8, splits=4)),
    *(_shape(2, 2, 4), _shape(4, 1, 4)),
    *(_shape(1, 1, 8, 4), _shape(1, 2, 4, 4), _shape(2, 1, 8, 4)),
)
"""Of 16-bit weights that are contiguous along K."""


@dataclass(frozen=True)
class StreamWeights:
    """Holds the facts on which a choice of tiles depends, besides the rows of x.

    Attributes:
        tiles: pieces of 16 rows, of all contractions of all regions; where offsets divide rows, of one group.
        contractions: of each region.
        length: K.
        bits: of a weight, those of scales included.
        quantized: whether weights are quantised.
        light: whether they take no more registers than 4-bit codes without zero-points for bfloat16.
        chip: whose multiprocessors, clusters and rates the model takes.
        loads: accesses of 16 bytes by which a lane reads the codes of a row tile of a chunk, as the registers of a
            thread go.
    """

    tiles: int
    contractions: int
    length: int
    bits: float
    quantized: bool
    light: bool
    chip: Chip
    loads: int = 1


@dataclass(frozen=True)
class StreamFit:
    """Holds fitted constants.

    Attributes:
        latency: microseconds of a chunk with two stages in flight, times two.
        depth: the power of the stages by which that decreases.
        issue, token_issue: cycles of a scheduler for a row tile of a chunk, and for each eight tokens of it.
        start: microseconds of a block before its first chunk.
        reduce: microseconds for 10,000 sums that the groups of warps of a block exchange.
        exchange, block_exchange: microseconds of the exchange of two blocks of a cluster, and of each further block.
        token_bytes: bytes of x that a multiprocessor reads in a cycle.
        fixed: microseconds of a kernel that reads at the rate of memory.
        few, many: the power with which the share of idle slots for blocks slows reading: where each multiprocessor has
            one block or none, and where it has several.
        alone: the cycles between two instructions of one warp, which a multiprocessor with few warps waits for; in
            tiles of up to eight rows, without groups, since others were fitted without it.
        search: microseconds of a grouped product whose blocks do not all run at once: each finds its group and then
            waits for its first weights, which others ask for while the kernel ahead still runs.
        power: of the mean by which latency, instructions and reads of x are combined: their sum where it is 1.
        registers: by the most tokens, the row tiles in two stages up to which a thread has 64 registers, and up to
            which 128.
    """

    latency: float
    depth: float
    issue: float
    token_issue: float
    start: float
    reduce: float
    exchange: float
    block_exchange: float
    token_bytes: float
    fixed: float
    few: float
    many: float
    alone: float
    power: float
    registers: tuple[tuple[int, float, float], ...]
    search: float = 0


QUANTIZED_FIT = StreamFit(
    *(0.854, 0.35, 43.8, 25, 0.365, 1.07, 0.241, 0.084, 35.94, 1.32, 0.3, 0.21),
    alone=3,
    power=1.28,
    registers=((1, 2, 4), (8, 1, 4), (16, 1, 2)),
    search=1.2,
)
"""Of W4A16 with groups of 128; the module's docstring says to which timings it was fitted. ``alone`` is of 297 timings
of an H200 (``docs/measured/h200-persistent-step.json``): tiles that leave each multiprocessor 8 warps were estimated
1.25 to 1.4 times too fast. ``search`` is of blocks of experts for 1, 2 and 4 tokens on an H200: of the 9 whose tiles
it changes 8 take 1 to 15 % less time, and one 3 % more."""
DENSE_FIT = StreamFit(
    *(0.506, 0.283, 145, 0, 0.19, 2.95, 0.653, 0.113, 30.51, 1.69, 0, 0.51),
    alone=0,
    power=1,
    registers=((16, 1, 2),),
)
"""Of 16-bit weights, fitted to the same timings."""


def candidates(tokens: int, weights: StreamWeights, has_clusters: bool) -> list[MmaQuantized | MmaRows]:
    """Lists the tiles that a kernel for at most ``tokens`` rows of x can have. Where K is short, tiles are shortened.
    Each of several contractions has as many row tiles, and at least one."""
    chunks, count = max(1, weights.length // CHUNK), weights.contractions
    kind, table = (MmaQuantized, QUANTIZED) if weights.quantized else (MmaRows, DENSE)
    tiles: dict[MmaQuantized | MmaRows, None] = {}
    for row_tiles, warps_n, warps_k, stages, splits in table:
        rows = max(row_tiles, count)
        is_shared = rows % count == 0 and (splits == 1 or has_clusters)
        if is_shared and not _spills(tokens, rows, stages, weights):
            warps_k, splits = shortened(warps_k, splits, chunks)
            shape = (tokens, rows // count, warps_n, warps_k, stages)
            tiles[kind(*shape, contractions=count, cluster_k_splits=splits)] = None
    return list(tiles)


def _spills(tokens: int, rows: int, stages: int, weights: StreamWeights) -> bool:
    """Returns whether a thread would not hold its sums of ``rows`` row tiles and the stages in flight, as NVRTC 13.0
    compiles it."""
    if not weights.quantized:
        return False
    if not weights.light:
        return rows > 4 or stages > 2
    return (tokens == 1 and stages > 2 and rows > 1) or (1 < tokens <= EIGHT and rows * stages > 8)


def folds_scales(contraction: Contraction) -> bool:
    """Returns whether fragments have the scales of 4-bit floats in them, which are powers of two (``folded`` of
    ``gemm_planes.cuh``), so that one sum is over all of K."""
    return contraction.format == "mxfp4" and contraction.dtype == "bfloat16"


def is_plain(contraction: Contraction) -> bool:
    """Returns whether the weights are 4-bit codes without zero-points, which bfloat16 multiplies, with scales of groups
    of 64 or more: the decoding of others takes more registers."""
    short_groups = contraction.group_size is not None and contraction.group_size % 64 != 0
    return contraction.format == "int4" and not short_groups and contraction.dtype == "bfloat16"


def for_a_pair(weights: StreamWeights, has_clusters: bool, most_bytes: int) -> MmaQuantized | None:
    """Returns the tiles that a launch of at most two rows takes, in an entry beside that of the bucket's eight; None if
    none has at most ``most_bytes`` of shared memory.

    Windows of two rows of x take half of the shared memory, so that more blocks are resident, those of the next kernel
    of a stream too: on an H200 a layer of Llama-3-8B at batch 2 took 49.9 us with these, and 54.7 us with the tiles
    that were chosen for eight rows then (``docs/measured/h200-persistent-step.json``); without such an entry it had
    taken 57.8 us (``h200-step-variants.json``). Tiles of four rows would save nothing: their windows have as many
    bytes.
    """
    tiles = (tile for tile in candidates(PAIR, weights, has_clusters) if isinstance(tile, MmaQuantized))
    fitting = (tile for tile in tiles if tile.shared_bytes <= most_bytes)
    return min(fitting, key=lambda tile: microseconds(tile, PAIR, weights, tile.shared_bytes), default=None)


def shortened(warps_k: int, splits: int, steps: int) -> tuple[int, int]:
    """Halves ``warps_k`` and ``splits`` until there are no more warps along K than ``steps`` of it, or one."""
    while warps_k * splits > max(1, steps):
        warps_k, splits = (warps_k, splits // 2) if splits > 1 else (warps_k // 2, splits)
    return warps_k, splits


def microseconds(
    tiles: MmaQuantized | MmaRows, rows: int, weights: StreamWeights, shared_bytes: int, groups: Groups | None = None
) -> float:
    """Estimates the time of a kernel that has the device for itself; without columns, which launches nothing, that of
    one tile.

    Args:
        rows: of x, in all groups together.
        shared_bytes: of a block.
        groups: how offsets divide the rows, if they do.
    """
    fit, chip = (QUANTIZED_FIT if weights.quantized else DENSE_FIT), weights.chip
    tokens, row_tiles, splits = tiles.tokens, tiles.row_tiles * tiles.contractions, tiles.cluster_k_splits
    row_blocks = -(-rows // tokens) if groups is None else groups.tiles(tokens)
    reads = row_blocks if groups is None else groups.used  # of all weights, or of those of a group
    clusters = math.ceil(row_blocks * max(1, -(-weights.tiles // (row_tiles * tiles.warps_n))))
    slots = dict(chip.clusters)[splits]  # clusters of one block on each multiprocessor
    most_blocks = -(-clusters // slots)  # blocks that a multiprocessor computes, at most
    chunks = -(-weights.length // CHUNK)
    own = -(-chunks // splits)  # chunks of a block
    steps = -(-own // tiles.warps_k)
    eights = max(1, tokens // 8)
    of_warp = row_tiles * (fit.issue + fit.token_issue * eights)
    issue, alone = of_warp * tiles.warps / 4, of_warp * fit.alone if groups is None and tokens <= EIGHT else 0.0
    latency = fit.latency / 2 * (2 / tiles.stages) ** fit.depth
    read = tiles.warps_k * min(rows / row_blocks, tokens) * CHUNK * 2
    sums = tiles.warps * row_tiles * 16 * 8 * eights
    waves = list(_waves(most_blocks, _resident(tiles, fit, weights, shared_bytes)))
    time = fit.search if groups is not None and len(waves) > 1 else 0.0
    for together in waves:
        cycles = max(together * issue, alone), together * read / fit.token_bytes
        shared = (count / chip.microsecond_cycles for count in cycles)
        time += fit.start + steps * _combined(fit.power, latency, *shared) + fit.reduce * together * sums / 1e4
        if splits > 1:
            time += fit.exchange + fit.block_exchange * (splits - 2)
    reading = weights.tiles * 16 * weights.length * weights.bits / 8 / chip.reads * 1e6
    reading *= (most_blocks * slots / clusters) ** (fit.few if most_blocks == 1 else fit.many)
    return _combined(SMOOTH, time, reads * reading + fit.fixed)


def _waves(blocks: int, resident: int) -> Iterator[int]:
    """Yields how many blocks a multiprocessor computes together, wave by wave."""
    while blocks > 0:
        yield min(blocks, resident)
        blocks -= resident


def _resident(tiles: MmaQuantized | MmaRows, fit: StreamFit, weights: StreamWeights, shared_bytes: int) -> int:
    """Returns how many blocks a multiprocessor holds at once."""
    load = tiles.row_tiles * tiles.contractions * tiles.stages / 2 * weights.loads
    few, many = next((few, many) for most, few, many in fit.registers if tiles.tokens <= most)
    registers, threads = 64 if load <= few else 128 if load <= many else 255, 32 * tiles.warps
    by_memory = weights.chip.multiprocessor_shared_bytes // (shared_bytes + RESERVED_BYTES)
    return max(1, min(MULTIPROCESSOR_THREADS // threads, REGISTERS // (registers * threads), by_memory))


def _combined(power: float, *limits: float) -> float:
    """Combines limits that apply at the same time by a power mean; they apply one after another as the power falls to
    1."""
    return float(sum(limit**power for limit in limits) ** (1 / power))
