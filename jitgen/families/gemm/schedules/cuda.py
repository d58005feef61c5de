"""Which mainloop and tiles the cuda dialect takes.

``mma``: quantised weights from global memory straight to the tensor cores (``gemm_mma.cuh``); ``dense``: 16-bit weights
through shared memory (``gemm_dense.cuh``); ``simt``: float32 and float64 (``gemm_simt.cuh``). The tables are measured on
an H200; elsewhere they are as good a guess as any.

``shape_of`` tells what a schedule's numbers mean for its mainloop; the template's context is made from it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from jitgen.families.gemm.schedule import GemmSchedule, Problem
from jitgen.families.layout import item_size
from jitgen.spec import Target

SHARED_LIMIT = {"sm_80": 163, "sm_87": 163, "sm_86": 99, "sm_89": 99, "sm_120": 99}
"""KiB of shared memory a block may ask for; 227 where nothing is said."""
WARP = 32
SIMT_DEPTH = 16
WINDOW_BYTES = 8192
"""Of x that a group of warps stages at a time in the ``mma`` mainloop, about."""


@dataclass(frozen=True)
class Shape:
    """A block's work, and who does it.

    Attributes:
        tokens, rows: the tile: rows of x, rows of a weight.
        warps_m, warps_n, warps_k: how warps are dealt over it.
        token_tiles, row_tiles: a warp's share, in 8 tokens and 16 rows.
        window: ``mma``: steps of K of which x is staged together.
        width: columns an epilogue call computes.
        run: ``simt``: a thread's (tokens, rows).
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
    shared_bytes: int


def choose(problem: Problem) -> GemmSchedule:
    """The schedule of ``problem``."""
    if problem.dtype in ("float32", "float64"):
        candidate = _simt(problem)
    else:
        candidate = _mma(problem) if problem.quantized else _dense(problem)
    candidate = replace(candidate, wide=problem.wide)
    if not _has_clusters(problem.target):
        candidate = replace(candidate, split=1)
    contractions, dtype = len(problem.contractions), problem.dtype
    limit = SHARED_LIMIT.get(problem.target.arch.rstrip("af"), 227) * 1024
    while candidate.stages > 2 and shape_of(candidate, contractions, dtype).shared_bytes > limit:
        candidate = replace(candidate, stages=candidate.stages - 1)
    return replace(candidate, shared_bytes=shape_of(candidate, contractions, dtype).shared_bytes)


def _has_clusters(target: Target) -> bool:
    return int(target.arch.removeprefix("sm_").rstrip("af")) >= 90


# ---------------------------------------------------------------------------------------------------------- the rules


def _mma(problem: Problem) -> GemmSchedule:
    """By the number of row tiles, of all regions: few of them are shared out along K, many stream.

    The aim is that all blocks are resident at once, four or eight warps to a scheduler, with 16 bytes or more in flight
    for each lane.
    """
    tiles = sum(-(-columns // 16) for columns in problem.columns)
    count = len(problem.contractions)
    tokens = min(64, next(most for most in (1, 4, 8, 16, 64, problem.rows) if problem.rows <= most))
    # (row tiles of a warp, warps along N, warps along K, blocks along K, steps in flight)
    if tokens == 1:
        if tiles * count <= 400:
            shape = (1, 1, 16 if tiles * count <= 264 else 8, 1, 2)
        elif tiles * count <= 640:
            shape = (2, 1, 16, 1, 2)
        else:
            shape = (2, 1, 8, 1, 2) if tiles * count <= 3000 else (2, 2, 4, 1, 2)
    elif tokens <= 8:
        if tiles * count <= 264:
            shape = (1, 2, 8 if tokens == 4 else 4, 2, 2)
        elif tiles * count <= 400:
            shape = (1, 1, 8, 1, 2) if tokens == 4 else (1, 2, 4, 2, 2)
        elif tiles * count <= 640:
            shape = (4, 1, 8, 2, 2) if tokens == 4 else (2, 2, 4, 2, 2)
        else:
            shape = (2, 7, 2, 1, 2) if tiles % 14 == 0 and tiles * count > 3000 else (4, 2, 4, 1, 2)
    elif tokens <= 16:
        if tiles * count <= 300:
            shape = (2, 2, 4, 2, 4)
        elif tiles * count <= 400:
            shape = (2, 3, 4, 2, 2)
        elif tiles * count <= 640:
            shape = (4, 2, 4, 2, 4)
        else:
            shape = (4, 4, 2, 1, 4 if tiles * count <= 2000 else 2)
    else:
        group = problem.contractions[0].group_size
        taller = 2 if group is None or group % 64 == 0 else 1  # more scales take more registers
        shape = (1, 4, 2, 2, 2) if tiles * count * problem.rows <= 640 * 64 else (taller, 8, 1, 1, 2)
    row_tiles, warps_n, warps_k, split, stages = shape
    row_tiles = max(1, row_tiles // count)
    while warps_k * split > max(1, problem.length // 64) and warps_k * split > 1:
        warps_k, split = (warps_k, split // 2) if split > 1 else (warps_k // 2, split)
    return GemmSchedule("mma", tokens, 16 * row_tiles * warps_n, 64 * warps_k, warps_n * warps_k, stages, split)


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
        split = 4 if problem.length >= 512 else 1
        return GemmSchedule("simt", 8, 64, SIMT_DEPTH, 4, 2, split)
    if problem.dtype == "float64" or len(problem.contractions) > 1:
        return GemmSchedule("simt", 64, 64, SIMT_DEPTH, 8 if problem.dtype == "float64" else 4, 2)
    return GemmSchedule("simt", 64, 128, SIMT_DEPTH, 4, 2)


# --------------------------------------------------------------------------------------------------------- the shapes


def shape_of(schedule: GemmSchedule, contractions: int, dtype: str) -> Shape:
    """What ``schedule`` means for its mainloop, with so many contractions of x's ``dtype``."""
    tokens, rows = schedule.block_m, schedule.block_n
    warps_m, warps_k, window, run = 1, 1, 1, (1, 1)
    if schedule.path == "simt":
        across = 4 if tokens == 8 or dtype == "float64" else 8
        run = (tokens * rows // (schedule.warps * WARP * across), across)
    else:
        warps_k = schedule.block_k // 64
    padded = -(-tokens // 8) * 8
    token_tiles = padded // 8
    if schedule.path == "dense":
        token_tiles = min(4, token_tiles)
        warps_m = padded // (8 * token_tiles)
    warps_n = schedule.warps // (warps_m * warps_k)
    if schedule.path == "mma":
        window = max(1, min(8, WINDOW_BYTES // (tokens * 128)) // schedule.stages) * schedule.stages
        stage_bytes = 2 * window * tokens * 128 * warps_k
    elif schedule.path == "dense":
        stage_bytes = schedule.stages * warps_k * (tokens + contractions * rows) * 128
    else:
        stage_bytes = 2 * SIMT_DEPTH * (tokens + 4 + contractions * (rows + 4)) * item_size(dtype)
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
        row_tiles=rows // (16 * warps_n) if schedule.path != "simt" else 0,
        window=window,
        width=width,
        run=run,
        shared_bytes=max(stage_bytes, partial * scalar) + inbox * scalar,
    )


def _width(outputs: int, threads: int) -> int:
    """Columns of an epilogue call: up to eight, as long as every thread has one."""
    width = 1
    while width < 8 and outputs >= 2 * width * threads:
        width *= 2
    return width
