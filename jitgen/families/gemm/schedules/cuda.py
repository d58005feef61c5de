"""Chooses the mainloops and tiles of the cuda dialect.

======================  ========================================  ============================================
path                    for                                       weights are read
======================  ========================================  ============================================
``wgmma_quantized``     quantised weights, many rows, sm_90a      by tensor copies, decoded in registers
``wgmma_dense``         16-bit weights, many rows, sm_90a         by tensor copies, into shared memory
``mma``                 quantised weights otherwise               from global memory into mma.sync's fragments
``codes``               4-bit weights, few rows of int8 codes     the same
``rows``, ``columns``   16-bit weights, few rows of x             the same; contiguous along K, or along N
``dense``               16-bit weights otherwise                  through shared memory (``gemm_dense.cuh``)
``stream``,             float32 and float64, few rows of x        from global memory into registers; contiguous
``stream_outer``                                                  along K, or along N
``simt``                float32 and float64 otherwise, integers   through shared memory (``gemm_simt.cuh``)
======================  ========================================  ============================================

The rules for few rows of x are in ``cuda_streams``. The numbers of this module were measured on an H200, and other
devices use the same ones.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import fields, replace
from statistics import geometric_mean

from jitgen.device import Device
from jitgen.errors import UnsupportedError
from jitgen.families.gemm import simt_tiles, stream_tiles, tile_times, wgmma, wgmma_tiles, wgmma_times
from jitgen.families.gemm.largest import RUN
from jitgen.families.gemm.mainloops import (
    CHUNK,
    BlockSchedule,
    Dense,
    DenseBytes,
    GemmSchedule,
    MmaQuantized,
    MmaRows,
    Simt,
    StreamOuter,
    WgmmaMainloop,
    WgmmaQuantized,
    WgmmaSchedule,
    WgmmaTiling,
    WgmmaTilings,
    multiplies_codes,
)
from jitgen.families.gemm.schedule import MOST_ROWS, Problem
from jitgen.families.gemm.schedules import cuda_streams
from jitgen.families.gemm.schedules.cuda_streams import STREAMED_ROWS, byte_rows, code_rows, mma, prologue, rows, stream
from jitgen.families.gemm.stream_tiles import RESERVED_BYTES
from jitgen.ir.body import accumulator_dtype
from jitgen.ir.ops import FLOATS
from jitgen.kernel.operands import ACCESS_BYTES, item_size
from jitgen.quant import formats
from jitgen.quant.codes import CODES
from jitgen.schedule.tuned import SCHEDULE_LIMIT

__all__ = ["candidates", "cost", "prologue"]

HALVES = ("float16", "bfloat16")
MMA_ROWS = 8
"""Rows of x up to which the ``mma`` mainloop is faster than wgmma (fitted on an H200)."""
CAMPING_LENGTH = 8192
"""K from which on, if it is a power of two, tiles that are copied at the same time are in few memory channels
("partition camping"). Up to ``STREAMED_ROWS`` rows, where memory bandwidth is the limit, the mma.sync mainloop reads in
an order that avoids this; up to ``STAGGERED_ROWS`` rows, wgmma's neighbouring tiles begin at different iterations."""
STAGGERED_ROWS = 64
"""Rows of x up to which neighbouring wgmma tiles are staggered along K (see ``CAMPING_LENGTH``)."""
SPLIT_LENGTH = 2048
"""K from which on it may be split over a temporary; a range has a quarter of it at least."""
LARGEST_TILE = 128 * 256
"""Sums of the largest tile."""
NEAR_IDEAL = 1.1
"""How many times the time that the chip needs at its best rates a product of one kernel takes, up to which K is not
split."""
WORTH_A_KERNEL = 1.04
"""How many times as long as with ranges of K, whose sums a kernel more adds, a product of one kernel must take at least
for K to be split."""
SPLITS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 48, 64)
"""Numbers of ranges of K that are compared, so that tiles of any number occupy most of the device. On an H200
35 x 104 x 45056 takes 8.9 us with 32, by a cluster of 8 20, and 194 x 1128 x 58880 of int4 46 with 7, by one of 5
56."""
WORTH_AN_ENTRY = 1.01
"""Each further entry with other tiles makes the first compile longer, so that it must save 1 % of the time on
average."""
LAST_ROWS = 8192
"""The rows up to which wgmma's tiles are compared for the last bucket: of few columns, those chosen for up to 4096 rows
took 1.16 to 1.30 times as long as the fastest for 5208 to 8119 rows (docs/measured/h200-candidates-held-out.json)."""
SIMT_TALL_BYTES = 256 * (128 + 4) * 4
"""Shared memory in bytes that the sums of the tallest ``simt`` tile take: 256 rows of 128 floats, each padded by 4."""
SIMT_WIDE_BYTES = 64 * (64 + 4) * 8
"""Shared memory in bytes that the sums of one product take in the ``simt`` tile of 64 rows of float64 or int64."""
SIMT_BLOCK_K = 16
"""Extent of K in a tile of the ``simt`` mainloop."""
SIMT_DECODE_BLOCK_K = 64
"""The same up to 8 rows of x, where a thread's work is mostly loads."""


def candidates(problem: Problem) -> Sequence[GemmSchedule]:
    """Lists the schedules for ``problem``, of every mainloop that computes it and is not certainly slower than
    another."""
    blocks: Sequence[BlockSchedule]
    few: Sequence[BlockSchedule] = ()
    several = False  # rows of an average group, of which wgmma's tiles were the fastest of all that were timed
    if problem.grouping == "offsets":  # the tiles of an average group have room for some rows more
        few = mma(replace(problem, rows=MMA_ROWS)) if problem.quantized and 1 < problem.rows <= STREAMED_ROWS else ()
        several = problem.rows > MMA_ROWS
        problem = replace(problem, rows=MMA_ROWS if problem.rows == 1 else max(problem.rows, STREAMED_ROWS))
    tensor_maps: Sequence[GemmSchedule] = _wgmma(problem) if _takes_wgmma(problem) else ()
    if problem.quantized and problem.dtype in CODES:
        if not tensor_maps:
            raise UnsupportedError(
                "a product of codes with 4-bit codes has a mainloop of tensor copies alone, which reads an activation "
                "along K in rows that begin at multiples of 16 bytes"
            )
        blocks = code_rows(problem)
        if blocks and problem.rows <= MMA_ROWS:
            tensor_maps = ()
    elif problem.contractions[0].blocks:
        if not tensor_maps:
            raise UnsupportedError(
                "a product of codes with scales of blocks reads both along K, in rows that begin at multiples of 16 "
                "bytes; call .contiguous() or .clone() on codes that lie otherwise"
            )
        blocks = []
    elif problem.dtype in CODES and multiplies_codes(problem.dtype, problem.target):
        few = byte_rows(problem)
        blocks = few or [] if tensor_maps else few or _dense_bytes(problem)
    elif problem.dtype in CODES or accumulator_dtype(problem.dtype) not in FLOATS:
        blocks = [replace(_simt(problem), cluster_k_splits=1)]  # blocks of a cluster exchange floats alone
    elif problem.dtype in ("float32", "float64"):
        streamed = stream(problem)
        blocks = [streamed] if streamed is not None else _simt_tiles(problem) or [_simt(problem)]
        if streamed is not None and len(problem.contractions) > 2:
            blocks.append(_simt(problem))  # which takes less shared memory
    elif problem.quantized:
        is_streamed = problem.rows <= STREAMED_ROWS and not several
        blocks = [*few, *mma(problem)] if is_streamed or not tensor_maps else []
    else:
        blocks = [] if tensor_maps else rows(problem) or _dense(problem)
    if any(body.has_runs for body in problem.bodies):  # lanes of a warp combine columns of one tile
        blocks = [schedule for schedule in blocks if schedule.block_n % RUN == 0] or [_simt(problem)]
    if not problem.device.has_clusters or any(body.has_runs for body in problem.bodies):
        blocks = [replace(schedule, cluster_k_splits=1) for schedule in blocks]
    fitted = [_with_stages_that_fit(schedule, problem) for schedule in blocks]
    fitting = _within_shared_memory(fitted, problem.target.shared_bytes)
    return [*tensor_maps, *(_with_a_pair(schedule, problem) for schedule in fitting)]


def _within_shared_memory(schedules: Sequence[BlockSchedule], limit: int) -> list[BlockSchedule]:
    """Returns those of ``schedules`` that have at most ``limit`` bytes."""
    kept = [schedule for schedule in schedules if schedule.shared_bytes <= limit]
    assert kept or not schedules, f"no schedule of {schedules} fits {limit} bytes of shared memory"
    return kept


def may_split_k(rows: int, columns: Sequence[int], length: int, device: Device) -> bool:
    """Returns whether the largest tiles leave half of the device idle, and K is long."""
    few = 2 * rows * sum(columns) <= LARGEST_TILE * device.model.multiprocessors
    return few and rows > STREAMED_ROWS and length >= SPLIT_LENGTH and device.target.arch == "sm_90a"


def k_splits(problem: Problem) -> int:
    """Returns how many ranges K should be split into over a temporary: 1 for none, and where wgmma is not used."""
    if problem.matrices > 1 or problem.grouping or problem.device.batch_invariant or not _takes_wgmma(problem):
        return 1
    weights, tilings = _weights(problem), _wgmma_tilings(problem)
    fewest, most = _row_range(problem)
    sampled = tile_times.sampled_rows(fewest, most)

    def mean(splits: int) -> float:
        """Returns the microseconds of the best tiling for each of few numbers of rows, by the geometric mean."""
        able = tilings
        if splits > 1:
            able = wgmma_tiles.occupying(wgmma_tiles.in_ranges(tilings, splits), fewest, most, weights)
        if not able:
            return math.inf
        products = [min(wgmma_times.estimate(tiling, rows, weights)[1] for tiling in able) for rows in sampled]
        sums = [wgmma_times.sums_microseconds(splits, rows, weights) for rows in sampled]
        return geometric_mean(map(operator.add, products, sums))

    whole = mean(1)
    if whole <= NEAR_IDEAL * geometric_mean(wgmma_times.ideal_microseconds(rows, weights) for rows in sampled):
        return 1
    means = {splits: mean(splits) for splits in SPLITS if splits * SPLIT_LENGTH <= 4 * problem.length}
    splits, least = min(means.items(), key=operator.itemgetter(1))
    return splits if least * WORTH_A_KERNEL <= whole else 1


def _row_range(problem: Problem) -> tuple[int, int]:
    """Returns the fewest and the most rows for which wgmma's tiles are compared."""
    return problem.fewest_rows, problem.rows if problem.rows < MOST_ROWS else LAST_ROWS


def _wgmma_tilings(problem: Problem) -> Sequence[WgmmaTiling]:
    """Lists the tilings of ``wgmma_tiles``, with stages that shared memory may not hold."""
    weights = _weights(problem)
    if problem.grouping:
        return wgmma_tiles.grouped_candidates(problem.rows, weights)
    tilings = wgmma_tiles.candidates(*_row_range(problem), weights)
    if problem.rows > STAGGERED_ROWS or not _camping(problem):
        return tilings
    return [replace(tiling, stagger=1) if isinstance(tiling, WgmmaQuantized) else tiling for tiling in tilings]


def _wgmma(problem: Problem) -> Sequence[WgmmaSchedule]:
    """Lists every tiling, and the best set of each number of those that complement one another."""
    tilings = _wgmma_tilings(problem)
    if (splits := problem.contractions[0].k_splits) > 1:
        tilings = wgmma_tiles.in_ranges(tilings, splits)
    if problem.device.batch_invariant:  # a launch chooses, by its rows, how many blocks share K
        tilings = [replace(tiling, cluster_k_splits=1) for tiling in tilings if tiling.multicast == 1]
    fitted = [_with_wgmma_stages_that_fit(tiling, problem) for tiling in tilings]
    if problem.grouping or problem.device.batch_invariant:
        return fitted
    sizes = (*_row_range(problem), _weights(problem))
    best = wgmma_tiles.complementary(fitted, *sizes)
    counts = range(2, min(SCHEDULE_LIMIT, len(best)) + 1)
    sets = (min(itertools.combinations(best, n), key=lambda several: wgmma_tiles.cost(several, *sizes)) for n in counts)
    return [*fitted, *map(WgmmaTilings, sets)]


def cost(problem: Problem, candidate: GemmSchedule) -> float:
    """Estimates the time in microseconds: by the geometric mean over the rows of the bucket. It is 0 for mainloops
    without a model, of which the first candidate is taken: where ``mma`` has two, for many rows of x, the second is for
    less shared memory."""
    if isinstance(candidate, MmaQuantized | MmaRows):
        return cuda_streams.cost(problem, candidate) if candidate.tokens <= STREAMED_ROWS else 0.0
    if isinstance(candidate, Simt) and _simt_has_model(problem):
        sizes = (problem.columns, problem.length, problem.device.model)
        rows = tile_times.sampled_rows(problem.fewest_rows, problem.rows)
        return geometric_mean(simt_tiles.microseconds(candidate, count, *sizes) for count in rows)
    if not isinstance(candidate, WgmmaMainloop | WgmmaTilings):
        return 0.0
    if problem.grouping:
        assert isinstance(candidate, WgmmaMainloop)
        return wgmma_times.grouped_microseconds(candidate, problem.divisions, _weights(problem))
    estimated = wgmma_tiles.cost(candidate.tilings, *_row_range(problem), _weights(problem))
    return estimated * WORTH_AN_ENTRY ** (len(candidate.tilings) - 1)


def _weights(problem: Problem) -> wgmma_times.Weights:
    first, kinds = problem.contractions[0], problem.layouts[0].operands
    transposed = kinds[first.weight[0]] == "outer"
    x_transposed = first.activation is not None and kinds[first.activation] == "outer"
    sizes = (problem.columns, problem.length, problem.device.model)
    weights = wgmma.weights_of(problem.contractions, *sizes, transposed, x_transposed)
    batch = (1, 1) if problem.grouping else (problem.fewest_matrices, problem.matrices)
    return replace(weights, quantises=problem.bodies[0].has_blocks, batch=batch)


def _with_stages_that_fit(candidate: BlockSchedule, problem: Problem) -> BlockSchedule:
    """Returns ``candidate`` for the sums of ``problem``, with as many of its stages as the target's shared memory
    holds, but at least two."""
    count, size = len(problem.contractions), item_size(accumulator_dtype(problem.dtype))
    fitted = replace(candidate, contractions=count, scalar_bytes=size, wide=problem.wide)
    while (
        not isinstance(fitted, Simt | StreamOuter)
        and fitted.stages > 2
        and fitted.shared_bytes > problem.target.shared_bytes
    ):
        fitted = replace(fitted, stages=fitted.stages - 1)
    return fitted


def _with_a_pair(schedule: BlockSchedule, problem: Problem) -> BlockSchedule:
    """Returns ``schedule``, of up to eight rows of plain weights, with the tiles of a launch of at most two rows."""
    if not isinstance(schedule, MmaQuantized) or schedule.tokens != stream_tiles.EIGHT:
        return schedule
    if problem.grouping or not stream_tiles.is_plain(problem.contractions[0]):
        return schedule
    if any(body.has_runs for body in problem.bodies):
        return replace(schedule, pair=replace(schedule, tokens=stream_tiles.PAIR))
    weights, most_bytes = cuda_streams.weights_of(problem), problem.target.shared_bytes
    tiles = stream_tiles.for_a_pair(weights, problem.device.has_clusters, most_bytes)
    return replace(schedule, pair=tiles and replace(tiles, wide=problem.wide))


def _with_wgmma_stages_that_fit(candidate: WgmmaTiling, problem: Problem) -> WgmmaTiling:
    """Returns ``candidate``, a wgmma schedule, with as many of its stages as shared memory holds."""
    limit = (problem.target.shared_bytes + RESERVED_BYTES) // candidate.resident - RESERVED_BYTES
    while (shared_bytes := wgmma.shared_bytes(candidate, problem.contractions)) > limit:
        candidate = replace(candidate, stages=candidate.stages - 1)
    if candidate.stages < 2:  # with one a block would wait for itself
        raise UnsupportedError(f"{candidate}: shared memory holds fewer than two stages of each resident block")
    return replace(candidate, shared_bytes=shared_bytes, wide=problem.wide)


# -------------------------------------------------------------------------------------------------------------- wgmma


def _takes_wgmma(problem: Problem) -> bool:
    """Returns whether ``problem`` is for a wgmma mainloop: many rows on sm_90a, and operands that tensor maps can
    describe."""
    if not problem.device.has_tensor_maps:
        return False
    in_blocks = bool(problem.contractions[0].blocks)
    alone = in_blocks or (problem.quantized and problem.dtype in CODES)  # no other mainloop computes it
    across = _streams_across(problem)
    few = problem.rows <= MMA_ROWS and not alone and not across
    if (
        (problem.grouping and not _is_mapped_grouping(problem))
        or problem.target.arch != "sm_90a"
        or few
        or problem.length < CHUNK
        or not _mappable(problem)
    ):
        return False
    if in_blocks:
        return 0 not in problem.columns
    if problem.dtype not in (*HALVES, *CODES):
        return False
    if problem.quantized and problem.dtype in CODES:
        return _multiplies_low_codes(problem)
    streams = problem.quantized or problem.dtype in CODES or across  # whether few rows may go to wgmma as well
    if problem.rows <= STREAMED_ROWS and (_camping(problem) or not streams):
        return False
    group = problem.contractions[0].group_size
    tiled = not problem.quantized or formats.find(problem.contractions[0].format or "").tiled
    group_fits = group is None or group % CHUNK == 0 or group == 32 or (group == 16 and not tiled)
    return len(problem.contractions) <= 2 and 0 not in problem.columns and group_fits


def _streams_across(problem: Problem) -> bool:
    """Returns whether wgmma multiplies few rows by 16-bit weights that lie along N: of a batch, or of one product of
    more than ``MMA_ROWS`` rows. Other mainloops took 1.05 to 1.8 times as long for 20 batches on an H200, and 0.99 to
    4.6 times, 1.57 by the geometric mean, for 60 products of 9 to 16 rows on an H100 (N from 120 to 57432, K from 256
    to 46592)."""
    layout, weight = problem.layouts[0], problem.contractions[0].weight[0]
    if problem.grouping or layout.operands[weight] != "outer":
        return False
    return problem.matrices > 1 or problem.rows > MMA_ROWS


def _multiplies_low_codes(problem: Problem) -> bool:
    """Returns whether wgmma multiplies an activation of codes by 4-bit codes of this format and group size."""
    first = problem.contractions[0]
    group_fits = first.group_size is None or first.group_size % (CHUNK // 2) == 0
    whole = len(problem.contractions) <= 2 and 0 not in problem.columns and group_fits
    return problem.target.arch == "sm_90a" and whole and _mappable(problem)


def _camping(problem: Problem) -> bool:
    """Returns whether tiles that are copied at the same time are in few memory channels (see ``CAMPING_LENGTH``)."""
    return problem.length >= CAMPING_LENGTH and problem.length & (problem.length - 1) == 0


def _is_mapped_grouping(problem: Problem) -> bool:
    """Returns whether the wgmma mainloops divide rows among groups so: by offsets, for one region, with more rows than
    are streamed, or with more than one a group where weights are quantised: 14 products of 2 to 16 rows a group took
    0.59 to 1.06 of their time with mma.sync's tiles alone (H200, docs/measured/h200-grouped.json). Codes with scales of
    blocks have no other mainloop, whatever divides their rows."""
    few = MMA_ROWS if problem.quantized and problem.dtype in HALVES else STREAMED_ROWS
    many = problem.grouping == "offsets" and problem.rows > few
    return len(problem.bodies) == 1 and (many or bool(problem.contractions[0].blocks))


def _mappable(problem: Problem) -> bool:
    """Returns whether tensor maps can describe x and, where weights are dense, all weights, in one and the same
    orientation. That of x is its own, but of quantised weights and of bytes it is along K, as wgmma reads registers and
    bytes."""
    bodies, unit = problem.bodies, ACCESS_BYTES // item_size(problem.dtype)
    if problem.layouts[0].batch and (
        problem.quantized or len(bodies) > 1 or problem.layouts[0].batch > wgmma.BATCH_RANK
    ):
        return False
    of_x = {"k", "outer"} if problem.dtype in HALVES and not problem.quantized and not problem.grouping else {"k"}
    for body, layout in zip(bodies, problem.layouts, strict=True):
        for contraction in body.contractions:
            index = contraction.activation
            if index is None or layout.operands[index] not in of_x or layout.units[index] < unit:
                return False
            # Of another number of rows, one along rows may be mapped nowhere: a copy along K has lines of such bytes.
            if problem.device.batch_invariant and layout.operands[index] == "outer" and problem.length % unit:
                return False
    weights = [
        (layout.operands[index], layout.units[index])
        for body, layout in zip(bodies, problem.layouts, strict=True)
        for contraction in body.contractions
        for index in contraction.weight[:1]
    ]
    if problem.quantized:
        return True
    kinds = {"k"} if problem.dtype in CODES else {"k", "outer"}  # wgmma takes bytes along K alone
    return len({kind for kind, _ in weights}) == 1 and all(kind in kinds and own >= unit for kind, own in weights)


# --------------------------------------------------------------------------------------- tiles through shared memory


def _dense(problem: Problem) -> list[Dense]:
    """Lists schedules of 16-bit weights by mma.sync: one, and for several products a second that takes less shared
    memory. Where there are few tiles, the blocks of a cluster share a tile's K."""
    tiles = problem.matrices * sum(-(-columns // 128) for columns in problem.columns)
    count = len(problem.contractions)
    if problem.rows <= 16:
        tokens = 8 if problem.rows <= 8 else 16
        smaller = [Dense(tokens, 64, 4, 1, 4)] if count > 2 else []
        if tiles * count <= 100 and problem.length >= 1024:
            return [Dense(tokens, 32, 8, 4, 4 if count == 1 else 3, cluster_k_splits=2), *smaller]
        return [Dense(tokens, 128, 8, 1, 5 if count == 1 else 4), *smaller]
    if problem.rows <= 64:
        splits = 2 if 2 * tiles <= problem.device.model.multiprocessors and problem.length >= 1024 else 1
        tall = Dense(64, max(64, 128 // count), 8, 1, 4, cluster_k_splits=splits)
        return [tall, *([replace(tall, cluster_k_splits=1)] if count > 2 else [])]
    return [Dense(128, max(32, 128 // count // 32 * 32), 8, 1, 3)]


def _dense_bytes(problem: Problem) -> list[DenseBytes]:
    """Lists schedules of operands of one byte, of any strides and alignment, as ``_dense`` does those of 16 bits."""
    return [
        DenseBytes(**{field.name: getattr(tiles, field.name) for field in fields(tiles)}) for tiles in _dense(problem)
    ]


def _simt_has_model(problem: Problem) -> bool:
    """Returns whether ``simt_tiles`` has candidates for ``problem``: one product of float32, with more than a few
    rows."""
    plain = problem.dtype == "float32" and not problem.quantized and len(problem.contractions) == 1
    return plain and problem.matrices == 1 and problem.rows > STREAMED_ROWS


def _simt_tiles(problem: Problem) -> list[Simt]:
    """Returns the schedules of ``simt_tiles``; none where it has no model."""
    if not _simt_has_model(problem):
        return []
    return simt_tiles.candidates(problem.rows, problem.length, problem.device.has_clusters)


def _simt(problem: Problem) -> Simt:
    """Schedules what ``simt_tiles`` has no model of, by ordinary multiply-adds: few rows of float32, float64, integers,
    quantised weights, batches, several products. Tiles get larger as long as every multiprocessor has a block, because
    reads of shared memory are the limit, and a thread makes more products of each number as its tile grows."""
    if problem.rows <= 8:
        # Each weight is used for few products: the number of loads in flight decides.
        block_k = SIMT_BLOCK_K if problem.quantized or len(problem.contractions) > 1 else SIMT_DECODE_BLOCK_K
        shares_k = problem.length >= 512 and problem.matrices == 1 and len(problem.contractions) <= 4
        splits = 4 if shares_k else 1  # the sums that blocks send of five products of float64 may not fit
        return Simt(8, 64, block_k, 4, cluster_k_splits=splits)
    wide = problem.dtype in ("float64", "int64")
    if wide:
        tall = len(problem.contractions) * SIMT_WIDE_BYTES <= problem.target.shared_bytes
        return Simt(64 if tall else 32, 64, SIMT_BLOCK_K, 8)
    if len(problem.contractions) > 1:
        return Simt(64, 64, SIMT_BLOCK_K, 4)
    if problem.rows > 1024 and problem.target.shared_bytes > SIMT_TALL_BYTES:
        return Simt(256, 128, SIMT_BLOCK_K, 8)
    if problem.rows > 256:
        return Simt(128, 128, SIMT_BLOCK_K if problem.quantized else SIMT_BLOCK_K // 2, 8)
    wave = problem.device.model.multiprocessors
    narrow = problem.rows <= 64 and problem.matrices * sum(problem.columns) <= 64 * wave
    width, most_blocks = (64, wave) if narrow else (128, 2 * wave)
    tiles = problem.matrices * -(-problem.rows // 64) * sum(-(-columns // width) for columns in problem.columns)
    splits = 1
    while splits < 8 and 2 * splits * tiles <= most_blocks and problem.length >= 1024 * splits:
        splits *= 2
    return Simt(64, width, 2 * SIMT_BLOCK_K, 4, cluster_k_splits=splits)
