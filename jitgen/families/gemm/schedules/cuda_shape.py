"""What a schedule's numbers mean for its mainloop, on an NVIDIA GPU; the template's context is made from it."""

from __future__ import annotations

from dataclasses import dataclass

from jitgen.families.gemm.schedule import GemmSchedule
from jitgen.families.layout import item_size

WARP = 32
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
