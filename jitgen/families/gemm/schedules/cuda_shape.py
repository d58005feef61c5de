"""The shape of a block's work that a schedule stands for, in the cuda mainloops without tensor maps.

The template's context is made from it. The wgmma mainloops have their counterpart in ``gemm/wgmma.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from jitgen.families.gemm.schedule import GemmSchedule
from jitgen.families.operands import item_size
from jitgen.ir.body import accumulator_dtype

WARP = 32
WINDOW_BYTES = 4096
"""Bytes of x that a group of warps stages in shared memory at a time, in the ``mma`` and ``stream`` mainloops: the
nearest whole number of steps below it."""


@dataclass(frozen=True)
class Shape:
    """A block's work, and how threads share it.

    Attributes:
        tokens: rows of x in the tile.
        rows: rows of a weight in the tile.
        warps_m, warps_n, warps_k: warps along each dimension of the tile. The ``warps_k`` groups of warps share K.
        token_tiles: a warp's share of the tokens, in units of 8.
        row_tiles: a warp's share of the weight's rows, in units of 16.
        window: steps along K whose x is staged in shared memory together (``mma``, ``rows``, ``columns`` and stream).
        width: columns of the result that one call of the epilogue computes.
        thread_tile: ``simt``: a thread's (tokens, rows of the weight). ``stream``: (rows of the weight, elements of one
            load) of a lane; ``stream_outer``: (steps along K, elements of one load) of a lane.
        resident: blocks that a multiprocessor should hold at once, an argument of ``__launch_bounds__``; 0 leaves the
            number of registers to the compiler.
        shared_bytes: dynamic shared memory of a block, in bytes.
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
    thread_tile: tuple[int, int]
    resident: int
    shared_bytes: int


def shape_of(schedule: GemmSchedule, contractions: int, dtype: str) -> Shape:
    """The shape that ``schedule`` stands for.

    Args:
        contractions: weights of each region, which share x.
        dtype: of x.
    """
    tokens, rows = schedule.block_m, schedule.block_n
    warps_m, warps_k, window, thread_tile = 1, 1, 1, (1, 1)
    padded = -(-tokens // 8) * 8
    token_tiles = padded // 8
    row_tiles = 0
    scalar = item_size(accumulator_dtype(dtype))
    if schedule.path == "simt":
        across = 4 if tokens == 8 or scalar == 8 else 8
        thread_tile = (tokens * rows // (schedule.warps * WARP * across), across)
        stage_bytes = 2 * schedule.block_k * (tokens + 4 + contractions * (rows + 4)) * scalar
        warps_n = schedule.warps
    elif schedule.path in ("stream", "stream_outer"):
        lanes = WARP * schedule.steps
        warps_k = schedule.block_k // lanes if schedule.path == "stream" else schedule.warps * lanes // rows
        warps_n = schedule.warps // warps_k
        along = rows // warps_n if schedule.path == "stream" else schedule.block_k // warps_k
        thread_tile = (along, schedule.steps)
        stage_bytes, window = _windows(schedule, tokens * schedule.block_k // warps_k * item_size(dtype), warps_k)
    else:
        warps_k = schedule.block_k // 64
        if schedule.path == "dense":
            token_tiles = min(4, token_tiles)
            warps_m = padded // (8 * token_tiles)
            stage_bytes = schedule.stages * warps_k * (tokens + contractions * rows) * 128
        else:
            stage_bytes, window = _windows(schedule, tokens * 128, warps_k)
        warps_n = schedule.warps // (warps_m * warps_k)
        row_tiles = rows // (16 * warps_n)
    width = _epilogue_width(tokens * rows, schedule.warps * WARP)
    cluster, calls = schedule.cluster_k_splits, tokens * (rows // width)
    # Sums that the blocks of a cluster send to this block, and sums of the block's own groups of warps.
    received = -(-calls // cluster) * cluster * contractions * width if cluster > 1 else 0
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
        thread_tile=thread_tile,
        resident=_resident(schedule, contractions, row_tiles) if schedule.path == "mma" else 0,
        shared_bytes=max(stage_bytes, partial * scalar) + received * scalar,
    )


def _windows(schedule: GemmSchedule, step_bytes: int, warps_k: int) -> tuple[int, int]:
    """(bytes, steps): the bytes of two windows of x for each group of warps, and the steps along K in one window."""
    window = max(1, min(WINDOW_BYTES // step_bytes, max(8, 1024 // step_bytes)) // schedule.stages) * schedule.stages
    return 2 * window * step_bytes * warps_k, window


def _resident(schedule: GemmSchedule, contractions: int, row_tiles: int) -> int:
    """Blocks of the ``mma`` mainloop that a multiprocessor should hold: as many as leave a thread 64 registers for few
    tokens and row tiles, and 72 or 128 registers for more."""
    threads, tiles = schedule.block_threads, row_tiles * contractions
    if schedule.block_m > 8:
        return 0
    if schedule.block_m == 1 or tiles == 1:
        return max(1, 1024 // threads) if tiles <= 2 else 0
    return 2 if tiles == 2 and threads == 448 else max(1, 512 // threads)


def _epilogue_width(outputs: int, threads: int) -> int:
    """Columns that one call of the epilogue computes: up to eight, as long as every thread has a call to make."""
    width = 1
    while width < 8 and outputs >= 2 * width * threads:
        width *= 2
    return width
