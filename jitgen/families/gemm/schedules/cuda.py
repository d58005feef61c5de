"""Which mainloop and tiles the cuda dialect takes.

``mma``: quantised weights from global memory straight to the tensor cores (``gemm_mma.cuh``); ``rows`` and ``columns``:
so 16-bit weights, along k or along their rows, of few rows of x (``gemm_rows.cuh``); ``dense``: 16-bit weights through
shared memory (``gemm_dense.cuh``); ``stream`` and ``stream_outer``: float32 and float64 weights, along k or along their
rows, of few rows of x (``gemm_stream.cuh``); ``simt``: those of many (``gemm_simt.cuh``); on sm_90a and for more than a
few rows ``wgmma_quantized`` and ``wgmma_dense``. The tables are measured on an H200; elsewhere they are as good a guess
as any.

``cuda_streams`` has the rules for few rows; ``cuda_shape`` tells what a schedule's numbers mean for its mainloop.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from jitgen.families.gemm import wgmma, wgmma_tiles
from jitgen.families.gemm.schedule import GemmSchedule, Problem
from jitgen.families.gemm.schedules.cuda_shape import shape_of
from jitgen.families.gemm.schedules.cuda_streams import STREAMED_ROWS, has_clusters, mma, prologue, rows, stream
from jitgen.quant import formats

__all__ = ["choose", "prologue"]

FEW_ROWS = 8
"""Up to so many rows weights are streamed by mma.sync; wgmma's tiles begin to pay beyond."""
CAMPING = 8192
"""A K that is a power of two from here on puts the tiles that wgmma's blocks copy at one time into few memory channels:
up to ``STREAMED_ROWS`` rows, while memory is the bound, mma.sync's order of reading is the faster one; up to
``STAGGERED_ROWS`` neighbouring tiles begin a step apart."""
STAGGERED_ROWS = 64
MULTIPROCESSORS = 132
"""Of an H200."""
SIMT_TALL_BYTES = 256 * 132 * 4
"""Of shared memory, for the sums of the tallest tile."""
SIMT_DEPTH, SIMT_DEEP = 16, 64
"""Of K in a step of the ``simt`` mainloop, and where a thread's loads are most of its work."""


def choose(problem: Problem) -> GemmSchedule:
    """The schedule of ``problem``."""
    if problem.dtype in ("float32", "float64"):
        candidate = stream(problem) or _simt(problem)
    else:
        candidate = _wgmma(problem) or (mma(problem) if problem.quantized else rows(problem) or _dense(problem))
    if candidate.maps:
        return _fitted(replace(candidate, wide=problem.wide), problem)
    candidate = replace(candidate, wide=problem.wide)
    if not has_clusters(problem.target):
        candidate = replace(candidate, split=1)
    contractions, dtype = len(problem.contractions), problem.dtype
    limit = problem.target.shared_bytes
    while candidate.stages > 2 and shape_of(candidate, contractions, dtype).shared_bytes > limit:
        candidate = replace(candidate, stages=candidate.stages - 1)
    return replace(candidate, shared_bytes=shape_of(candidate, contractions, dtype).shared_bytes)


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
    if problem.rows <= STREAMED_ROWS and (_camping(problem) or not problem.quantized):
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


def _camping(problem: Problem) -> bool:
    return problem.length >= CAMPING and problem.length & (problem.length - 1) == 0


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
        stagger=int(problem.rows <= STAGGERED_ROWS and _camping(problem)),
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
    # A thread's products for a number it reads from shared memory, which is the bound, grow with its tile: as large a
    # one as leaves every multiprocessor a block.
    if problem.rows > 1024 and problem.target.shared_bytes > SIMT_TALL_BYTES:
        return GemmSchedule("simt", 256, 128, SIMT_DEPTH, 8, 2)
    if problem.rows > 256:
        return GemmSchedule("simt", 128, 128, SIMT_DEPTH if problem.quantized else SIMT_DEPTH // 2, 8, 2)
    narrow = problem.rows <= 64 and sum(problem.columns) <= 64 * MULTIPROCESSORS
    width, most = (64, MULTIPROCESSORS) if narrow else (128, 2 * MULTIPROCESSORS)
    tiles = -(-problem.rows // 64) * sum(-(-columns // width) for columns in problem.columns)
    split = 1
    while split < 8 and 2 * split * tiles <= most and problem.length >= 1024 * split:
        split *= 2
    return GemmSchedule("simt", 64, width, 2 * SIMT_DEPTH, 4, 2, split)
