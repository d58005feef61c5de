"""Which mainloop and tiles the cuda dialect takes.

``mma``: quantised weights from global memory straight to the tensor cores (``gemm_mma.cuh``); ``rows``: so 16-bit
weights that lie along k, of few rows of x (``gemm_rows.cuh``); ``dense``: 16-bit weights through shared memory
(``gemm_dense.cuh``); ``stream`` and ``stream_outer``: float32 and float64 weights, along k or along their rows, of few
rows of x (``gemm_stream.cuh``); ``simt``: those of many (``gemm_simt.cuh``); on sm_90a and for more than a few rows
``wgmma_quantized`` and ``wgmma_dense``. The tables are measured on an H200; elsewhere they are as good a guess as any.

``shape_of`` tells what a schedule's numbers mean for its mainloop; the template's context is made from it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from jitgen.families.gemm import wgmma, wgmma_tiles
from jitgen.families.gemm.schedule import GemmSchedule, Problem
from jitgen.families.layout import item_size
from jitgen.ir.contractions import Decision, Prologue
from jitgen.quant import formats
from jitgen.spec import Target

SHARED_LIMIT = {"sm_80": 163, "sm_87": 163, "sm_86": 99, "sm_89": 99, "sm_120": 99}
"""KiB of shared memory a block may ask for; 227 where nothing is said."""
WARP = 32
FEW_ROWS = 8
"""Up to so many rows weights are streamed by mma.sync; wgmma's tiles begin to pay beyond."""
CAMPING = 8192
"""A K that is a power of two from here on puts the tiles that wgmma's blocks copy at one time into few memory channels:
up to ``STREAMED_ROWS`` rows, while memory is the bound, mma.sync's order of reading is the faster one."""
STREAMED_ROWS = 16
SIMT_DEPTH, SIMT_DEEP = 16, 64
"""Of K in a step of the ``simt`` mainloop, and where a thread's loads are most of its work."""
STREAM_SUMS = 64
"""Registers of sums that a lane of the ``stream`` mainloop has."""
WINDOW_BYTES = 4096
"""Of x that a group of warps stages at a time in the ``mma`` mainloop, about."""


@dataclass(frozen=True)
class Shape:
    """A block's work, and who does it.

    Attributes:
        tokens, rows: the tile: rows of x, rows of a weight.
        warps_m, warps_n, warps_k: how warps are dealt over it.
        token_tiles, row_tiles: a warp's share, in 8 tokens and 16 rows.
        window: ``mma``, ``rows``, ``stream``: steps of K of which x is staged together.
        width: columns an epilogue call computes.
        run: ``simt``: a thread's (tokens, rows); ``stream``: what a lane takes of a tile, and elements of one load.
        resident: blocks a multiprocessor is to hold at once; 0 leaves the registers to the compiler.
        shared_bytes: what it takes.
    """

    tokens: int
    rows: int
    warps_m: int
    warps_n: int
    warps_k: int
    token_tiles: int
    row_tiles: int
    window: int
    width: int
    run: tuple[int, int]
    resident: int
    shared_bytes: int


def choose(problem: Problem) -> GemmSchedule:
    """The schedule of ``problem``."""
    if problem.dtype in ("float32", "float64"):
        candidate = _stream(problem) or _simt(problem)
    else:
        candidate = _wgmma(problem) or (_mma(problem) if problem.quantized else _rows(problem) or _dense(problem))
    if candidate.maps:
        return _fitted(replace(candidate, wide=problem.wide), problem)
    candidate = replace(candidate, wide=problem.wide)
    if not _has_clusters(problem.target):
        candidate = replace(candidate, split=1)
    contractions, dtype = len(problem.contractions), problem.dtype
    limit = SHARED_LIMIT.get(problem.target.arch.rstrip("af"), 227) * 1024
    while candidate.stages > 2 and shape_of(candidate, contractions, dtype).shared_bytes > limit:
        candidate = replace(candidate, stages=candidate.stages - 1)
    return replace(candidate, shared_bytes=shape_of(candidate, contractions, dtype).shared_bytes)


def prologue(computed: Prologue, target: Target) -> Decision:
    """Where a launch and a temporary cost more than what every block computes again."""
    if computed.kept:
        return Decision(False, "it is a result too")
    if computed.rows > STREAMED_ROWS:
        return Decision(False, f"of more than {STREAMED_ROWS} rows, tiles are many and read it by the copy engine")
    return Decision(True, f"up to {STREAMED_ROWS} rows, a launch costs more than computing it in every block")


def _has_clusters(target: Target) -> bool:
    return int(target.arch.removeprefix("sm_").rstrip("af")) >= 90


# ---------------------------------------------------------------------------------------------------------- the rules


def _wgmma(problem: Problem) -> GemmSchedule | None:
    """For many rows on sm_90a, where the operands lie as tensor maps want them."""
    if (
        problem.target.arch != "sm_90a"
        or problem.rows <= FEW_ROWS
        or problem.length < wgmma.CHUNK
        or not _mappable(problem)
    ):
        return None
    camping = problem.length >= CAMPING and problem.length & (problem.length - 1) == 0
    if problem.rows <= STREAMED_ROWS and (camping or not problem.quantized):
        return None
    count = len(problem.contractions)
    group = problem.contractions[0].group_size
    if count > 2 or 0 in problem.columns or (group is not None and group % wgmma.CHUNK and group != 32):
        return None
    if problem.quantized:
        return _quantised(problem)
    first = problem.bodies[0].contractions[0].weight[0]
    tiles = wgmma_tiles.choose_dense(
        problem.rows, problem.columns, count, problem.layouts[0].operands[first] == "outer"
    )
    return GemmSchedule(
        path=wgmma.DENSE,
        block_m=64 * tiles.down,
        block_n=tiles.columns,
        block_k=wgmma.CHUNK,
        warps=wgmma.WARPGROUP * (tiles.down * tiles.across + 1),
        stages=tiles.stages,
        multicast=tiles.multicast,
        resident=tiles.resident,
        raster=8,
    )


def _quantised(problem: Problem) -> GemmSchedule:
    count, first = len(problem.contractions), problem.contractions[0]
    format = formats.find(first.format or "")
    few_registers = format.scale_dtype == torch.bfloat16 or first.group_size is None
    light = problem.dtype == "bfloat16" and format.bits == 4 and few_registers and not format.zero_point
    tiles = wgmma_tiles.choose(problem.rows, problem.columns, problem.length, count, format.bits, light)
    return GemmSchedule(
        path=wgmma.QUANTIZED,
        block_m=tiles.tokens,
        block_n=tiles.columns(count),
        block_k=wgmma.CHUNK * tiles.span,
        warps=wgmma.WARPGROUP * (tiles.warpgroups + 1),
        stages=tiles.stages,
        split=tiles.split,
        steps=tiles.steps,
        resident=1,
        raster=16,
    )


def _fitted(candidate: GemmSchedule, problem: Problem) -> GemmSchedule:
    """``candidate`` with as many of its stages as shared memory holds."""
    while (taken := wgmma.shared_bytes(candidate, problem.contractions)) > 227 * 1024:
        candidate = replace(candidate, stages=candidate.stages - 1)
    return replace(candidate, shared_bytes=taken)


def _mappable(problem: Problem) -> bool:
    """Whether x, and dense weights, are matrices that tensor maps describe, all weights alike."""
    bodies = problem.bodies
    for body, layout in zip(bodies, problem.layouts, strict=True):
        for contraction in body.contractions:
            index = contraction.activation
            if index is None or layout.operands[index] != "k" or layout.units[index] < 8:
                return False
    weights = [
        (layout.operands[index], layout.units[index])
        for body, layout in zip(bodies, problem.layouts, strict=True)
        for contraction in body.contractions
        for index in contraction.weight[:1]
    ]
    if problem.quantized:
        return True
    return len({kind for kind, _ in weights}) == 1 and all(k != "strided" and unit >= 8 for k, unit in weights)


# For up to so many tokens: up to so many row tiles of a GPU's all weights, (row tiles of a warp, warps along N, warps
# along K, blocks along K, steps in flight). Measured on the projections of Llama 3 8B and 70B.
_MMA: dict[int, list[tuple[int, tuple[int, int, int, int, int]]]] = {
    1: [(264, (1, 1, 16, 1, 2)), (400, (1, 1, 8, 1, 2)), (640, (2, 1, 16, 1, 2)), (3000, (2, 1, 8, 1, 2))],
    4: [(264, (2, 2, 8, 2, 2)), (400, (1, 1, 8, 1, 2)), (640, (4, 1, 8, 2, 2)), (3000, (2, 7, 2, 2, 2))],
    8: [(264, (2, 2, 8, 2, 2)), (400, (2, 2, 8, 1, 2)), (640, (4, 1, 8, 2, 2)), (3000, (4, 2, 4, 1, 2))],
    16: [(300, (4, 1, 8, 2, 4)), (400, (2, 3, 4, 2, 2)), (640, (4, 2, 4, 2, 4)), (3000, (7, 2, 4, 1, 2))],
}
_MMA_MORE: dict[int, tuple[int, int, int, int, int]] = {
    1: (2, 2, 4, 1, 2),
    4: (2, 7, 2, 1, 2),
    8: (2, 7, 2, 1, 2),
    16: (7, 4, 2, 1, 2),
}
MANY_TOKENS = 64


def _mma(problem: Problem) -> GemmSchedule:
    """By the number of row tiles, of all regions: few of them are shared out along K, many stream.

    The aim is one wave of blocks, as many as there are multiprocessors or a small multiple, with enough 16-byte loads
    in flight: of many tokens few large blocks, so that x is read less often.
    """
    first = problem.contractions[0]
    count = len(problem.contractions)
    tiles = count * sum(-(-columns // 16) for columns in problem.columns)
    tokens = next((most for most in _MMA if problem.rows <= most), MANY_TOKENS)
    if tokens == MANY_TOKENS:
        # More scales take more registers.
        taller = 2 if first.group_size is None or first.group_size % 64 == 0 else 1
        shape = (1, 4, 2, 2, 2) if tiles * problem.rows <= 640 * MANY_TOKENS else (taller, 8, 1, 1, 2)
    else:
        shape = next((shape for most, shape in _MMA[tokens] if tiles <= most), _MMA_MORE[tokens])
    row_tiles, warps_n, warps_k, split, stages = shape
    if row_tiles == 7 and (count > 1 or not _plain(problem)):
        row_tiles = 4  # what they need beside the sums would not fit the registers
    if not _has_clusters(problem.target):
        row_tiles, split = max(1, row_tiles // split), 1
    row_tiles = max(1, row_tiles // count)
    if not _plain(problem) and stages > 2 and row_tiles * stages > 8:
        stages = 2
    warps_k, split = _shared_out(warps_k, split, problem.length // 64)
    return GemmSchedule("mma", tokens, 16 * row_tiles * warps_n, 64 * warps_k, warps_n * warps_k, stages, split)


def _plain(problem: Problem) -> bool:
    """Whether the weights need no more registers than 4-bit codes without zero-points, for bfloat16."""
    first = problem.contractions[0]
    coarse = first.group_size is None or first.group_size % 64 == 0
    return first.format == "int4" and coarse and problem.dtype == "bfloat16"


# As ``_MMA``, of dense weights in row tiles of 16.
_ROWS: dict[int, list[tuple[int, tuple[int, int, int, int, int]]]] = {
    1: [(100000, (1, 1, 8, 1, 2))],
    4: [(100000, (1, 1, 8, 1, 2))],
    8: [(100000, (1, 2, 8, 1, 2))],
    16: [(100000, (1, 4, 4, 1, 2))],
}
# For up to so many tokens: (what a lane takes of a tile, warps along N, along K, blocks along K, tiles in flight).
_STREAM: dict[int, tuple[int, int, int, int, int]] = {
    1: (4, 1, 8, 1, 2),
    4: (4, 2, 8, 1, 2),
    8: (4, 4, 4, 1, 2),
    16: (4, 8, 2, 1, 2),
}


def _dense_kinds(problem: Problem) -> tuple[set[str], int]:
    """How all dense weights lie, and by how many elements all of them may be read at once."""
    weights = [
        (layout.operands[index], layout.units[index])
        for body, layout in zip(problem.bodies, problem.layouts, strict=True)
        for contraction in body.contractions
        for index in contraction.weight
    ]
    return {kind for kind, _ in weights}, min(unit for _, unit in weights)


def _rows(problem: Problem) -> GemmSchedule | None:
    """For few rows of x and weights that lie along k, 16 bytes by 16 bytes."""
    kinds, unit = _dense_kinds(problem)
    if problem.rows > STREAMED_ROWS or kinds != {"k"} or unit < 8 or problem.layouts[0].length_unit < 8:
        return None
    tokens = next(most for most in _ROWS if problem.rows <= most)
    count = len(problem.contractions)
    tiles = count * sum(-(-columns // 16) for columns in problem.columns)
    row_tiles, warps_n, warps_k, split, stages = next(shape for most, shape in _ROWS[tokens] if tiles <= most)
    row_tiles = max(1, row_tiles // count)
    warps_k, split = _shared_out(warps_k, split, problem.length // 64)
    return GemmSchedule("rows", tokens, 16 * row_tiles * warps_n, 64 * warps_k, warps_n * warps_k, stages, split)


def _shared_out(warps_k: int, split: int, steps: int) -> tuple[int, int]:
    """As many warps and blocks along K as there are steps, at most."""
    while warps_k * split > max(1, steps):
        warps_k, split = (warps_k, split // 2) if split > 1 else (warps_k // 2, split)
    return warps_k, split


def _stream(problem: Problem) -> GemmSchedule | None:
    """For few rows of x and weights that are contiguous along one dimension, all the same one."""
    if problem.quantized or problem.rows > STREAMED_ROWS:
        return None
    kinds, unit = _dense_kinds(problem)
    if kinds not in ({"k"}, {"outer"}):
        return None
    tokens = next(most for most in _STREAM if problem.rows <= most)
    run, warps_n, warps_k, split, stages = _STREAM[tokens]
    sums = STREAM_SUMS // (len(problem.contractions) * tokens * (item_size(problem.dtype) // 4))
    if kinds == {"k"}:
        run = max(1, min(run, sums))
        vector = min(unit, problem.layouts[0].length_unit)
        warps_k, split = _shared_out(warps_k, split, problem.length // (32 * vector))
        return GemmSchedule(
            "stream", tokens, run * warps_n, 32 * vector * warps_k, warps_n * warps_k, stages, split, steps=vector
        )
    vector = max(1, min(unit, sums, *(layout.columns_unit for layout in problem.layouts)))
    warps_k, split = _shared_out(warps_k * warps_n, split, problem.length // run)
    return GemmSchedule("stream_outer", tokens, 32 * vector, run * warps_k, warps_k, stages, split, steps=vector)


def _dense(problem: Problem) -> GemmSchedule:
    tiles = sum(-(-columns // 128) for columns in problem.columns)
    count = len(problem.contractions)
    if problem.rows <= 16:
        tokens = 8 if problem.rows <= 8 else 16
        if tiles * count <= 100 and problem.length >= 1024:
            return GemmSchedule("dense", tokens, 32, 256, 8, 4 if count == 1 else 3, 2)
        return GemmSchedule("dense", tokens, 128, 64, 8, 5 if count == 1 else 4)
    if problem.rows <= 64:
        return GemmSchedule("dense", 64, 128 // count, 64, 8, 4, 2 if tiles <= 66 and problem.length >= 1024 else 1)
    return GemmSchedule("dense", 128, 128 // count, 64, 8, 3)


def _simt(problem: Problem) -> GemmSchedule:
    if problem.rows <= 8:
        # Few products for each weight: what counts is how many loads are in flight.
        depth = SIMT_DEPTH if problem.quantized or len(problem.contractions) > 1 else SIMT_DEEP
        split = 4 if problem.length >= 512 else 1
        return GemmSchedule("simt", 8, 64, depth, 4, 2, split)
    if problem.dtype == "float64" or len(problem.contractions) > 1:
        return GemmSchedule("simt", 64, 64, SIMT_DEPTH, 8 if problem.dtype == "float64" else 4, 2)
    return GemmSchedule("simt", 64, 128, SIMT_DEPTH, 4, 2)


# --------------------------------------------------------------------------------------------------------- the shapes


def shape_of(schedule: GemmSchedule, contractions: int, dtype: str) -> Shape:
    """What ``schedule`` means for its mainloop, with so many contractions of x's ``dtype``."""
    tokens, rows = schedule.block_m, schedule.block_n
    warps_m, warps_k, window, run = 1, 1, 1, (1, 1)
    padded = -(-tokens // 8) * 8
    token_tiles = padded // 8
    row_tiles = 0
    if schedule.path == "simt":
        across = 4 if tokens == 8 or dtype == "float64" else 8
        run = (tokens * rows // (schedule.warps * WARP * across), across)
        stage_bytes = 2 * schedule.block_k * (tokens + 4 + contractions * (rows + 4)) * item_size(dtype)
        warps_n = schedule.warps
    elif schedule.path in ("stream", "stream_outer"):
        lanes = WARP * schedule.steps
        warps_k = schedule.block_k // lanes if schedule.path == "stream" else schedule.warps * lanes // rows
        warps_n = schedule.warps // warps_k
        run = (rows // warps_n if schedule.path == "stream" else schedule.block_k // warps_k, schedule.steps)
        stage_bytes, window = _ring(schedule, tokens * schedule.block_k // warps_k * item_size(dtype), warps_k)
    else:
        warps_k = schedule.block_k // 64
        if schedule.path == "dense":
            token_tiles = min(4, token_tiles)
            warps_m = padded // (8 * token_tiles)
            stage_bytes = schedule.stages * warps_k * (tokens + contractions * rows) * 128
        else:
            stage_bytes, window = _ring(schedule, tokens * 128, warps_k)
        warps_n = schedule.warps // (warps_m * warps_k)
        row_tiles = rows // (16 * warps_n)
    scalar = 8 if dtype == "float64" else 4
    width = _width(tokens * rows, schedule.warps * WARP)
    runs = tokens * (rows // width)
    inbox = -(-runs // schedule.split) * schedule.split * contractions * width if schedule.split > 1 else 0
    partial = warps_k * contractions * padded * (rows + 4)
    return Shape(
        tokens=tokens,
        rows=rows,
        warps_m=warps_m,
        warps_n=warps_n,
        warps_k=warps_k,
        token_tiles=token_tiles,
        row_tiles=row_tiles,
        window=window,
        width=width,
        run=run,
        resident=_resident(schedule, contractions, row_tiles) if schedule.path == "mma" else 0,
        shared_bytes=max(stage_bytes, partial * scalar) + inbox * scalar,
    )


def _ring(schedule: GemmSchedule, slot: int, warps_k: int) -> tuple[int, int]:
    """Bytes of two windows for each group of warps, and how many steps of ``slot`` bytes a window has."""
    window = max(1, min(WINDOW_BYTES // slot, max(8, 1024 // slot)) // schedule.stages) * schedule.stages
    return 2 * window * slot * warps_k, window


def _resident(schedule: GemmSchedule, contractions: int, row_tiles: int) -> int:
    """So many that a thread has 64 registers of few tokens and row tiles, 72 or 128 of more."""
    threads, tiles = schedule.block_threads, row_tiles * contractions
    if schedule.block_m > 8:
        return 0
    if schedule.block_m == 1 or tiles == 1:
        return max(1, 1024 // threads) if tiles <= 2 else 0
    return 2 if tiles == 2 and threads == 448 else max(1, 512 // threads)


def _width(outputs: int, threads: int) -> int:
    """Columns of an epilogue call: up to eight, as long as every thread has one."""
    width = 1
    while width < 8 and outputs >= 2 * width * threads:
        width *= 2
    return width
