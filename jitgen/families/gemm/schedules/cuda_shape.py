"""The shape of a block's work that a schedule stands for, in the cuda mainloops without tensor maps.

The template's context is made from it. The wgmma mainloops have their counterpart in ``gemm/wgmma.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from jitgen.families.gemm.mainloops import BlockSchedule, Dense, MmaQuantized, Simt, Stream, StreamOuter
from jitgen.ir.body import accumulator_dtype
from jitgen.kernel.operands import WARP, item_size

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


def shape_of(schedule: BlockSchedule, contractions: int, dtype: str) -> Shape:
    """The shape that ``schedule`` stands for.

    Args:
        contractions: weights of each region, which share x.
        dtype: of x.
    """
    tokens, rows, block_k = schedule.block_m, schedule.block_n, schedule.block_k
    warps_m, warps_k, window, thread_tile = 1, 1, 1, (1, 1)
    padded = -(-tokens // 8) * 8
    token_tiles = padded // 8
    row_tiles = 0
    scalar = item_size(accumulator_dtype(dtype))
    if isinstance(schedule, Simt):
        across = 4 if tokens == 8 or scalar == 8 else 8
        warps_n = schedule.warps
        thread_tile = (tokens * rows // (warps_n * WARP * across), across)
        stage_bytes = 2 * block_k * (tokens + 4 + contractions * (rows + 4)) * scalar
    elif isinstance(schedule, Stream | StreamOuter):
        warps_n, warps_k = schedule.warps_n, schedule.warps_k
        along = schedule.lane_rows if isinstance(schedule, Stream) else schedule.lane_k
        thread_tile = (along, schedule.vector)
        step_bytes = tokens * block_k // warps_k * item_size(dtype)
        stage_bytes, window = _windows(schedule.stages, step_bytes, warps_k)
    elif isinstance(schedule, Dense):
        warps_k, token_tiles = schedule.warps_k, min(4, token_tiles)
        warps_m = padded // (8 * token_tiles)
        warps_n = schedule.warps // (warps_m * warps_k)
        row_tiles = rows // (16 * warps_n)
        stage_bytes = schedule.stages * warps_k * (tokens + contractions * rows) * 128
    else:
        warps_n, warps_k, row_tiles = schedule.warps_n, schedule.warps_k, schedule.row_tiles
        stage_bytes, window = _windows(schedule.stages, tokens * 128, warps_k)
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
        resident=_resident(schedule, contractions) if isinstance(schedule, MmaQuantized) else 0,
        shared_bytes=max(stage_bytes, partial * scalar) + received * scalar,
    )


def _windows(stages: int, step_bytes: int, warps_k: int) -> tuple[int, int]:
    """(bytes, steps): the bytes of two windows of x for each group of warps, and the steps along K in one window."""
    window = max(1, min(WINDOW_BYTES // step_bytes, max(8, 1024 // step_bytes)) // stages) * stages
    return 2 * window * step_bytes * warps_k, window


def _resident(schedule: MmaQuantized, contractions: int) -> int:
    """Blocks of the ``mma`` mainloop that a multiprocessor should hold: as many as leave a thread 64 registers for few
    tokens and row tiles, and 72 or 128 registers for more."""
    threads, tiles = schedule.warps * WARP, schedule.row_tiles * contractions
    if schedule.tokens > 8:
        return 0
    if schedule.tokens == 1 or tiles == 1:
        return max(1, 1024 // threads) if tiles <= 2 else 0
    return 2 if tiles == 2 and threads == 448 else max(1, 512 // threads)


def _epilogue_width(outputs: int, threads: int) -> int:
    """Columns that one call of the epilogue computes: up to eight, as long as every thread has a call to make."""
    width = 1
    while width < 8 and outputs >= 2 * width * threads:
        width *= 2
    return width
