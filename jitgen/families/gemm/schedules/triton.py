"""Which form and tiles the triton dialect takes; the forms are those of ``gemm/triton.py``.

Chosen on an H200 with Triton 3.6 among some hundred tiles: int4 weights in groups of 128, for 1, 4, 8, 16, 64, 256,
1024 and 4096 rows, and others and dense bfloat16 ones for some, on the projections of Llama 3 8B and 70B.

Where a tile of that size would leave multiprocessors idle, K is split: into as many parts as make one wave of the
blocks that are resident at once (``_shared_out``).
"""

from __future__ import annotations

import math
from dataclasses import replace

from jitgen.families.gemm.schedule import GemmSchedule, Problem
from jitgen.ir.contractions import Decision, Prologue
from jitgen.quant import formats
from jitgen.spec import Target

FEW_ROWS = 16
"""Up to so many rows, weights are read once and there is little else to do."""
WAVE = 132
"""Multiprocessors of a large GPU."""
WIDE = 8192
"""From so many columns on, larger tiles are enough of them."""
MOST_PARTS, LEAST_STEPS = 8, 4
"""Into how many parts K is split at most, and how many steps each of them has at least."""
MOST_SUMS = 32
"""Partial sums for each element that the kernel behind a split product reads at most."""


def choose(problem: Problem) -> GemmSchedule:
    """The schedule of ``problem``."""
    if problem.dtype not in ("float16", "bfloat16"):
        tile = _float32(problem)
    elif problem.quantized:
        tile = _quantized(problem)
    else:
        tile = _dense(problem)
    return replace(_fitted(tile, problem), wide=problem.wide)


def prologue(computed: Prologue, target: Target) -> Decision:
    """Every tile would compute it again, in each step of its loop."""
    return Decision(False, "its products read an activation from memory")


def _quantized(problem: Problem) -> GemmSchedule:
    rows, columns, products = problem.rows, max(problem.columns), len(problem.contractions)
    contraction = problem.contractions[0]
    format = formats.find(contraction.format or "")
    heavy = format.bits == 8 or (format.zero_point and contraction.group_size is not None)
    if rows <= 8:
        return _few_rows(problem, heavy)
    if rows <= FEW_ROWS:
        if products > 1:
            return _slices(rows, 16, 128, 4)
        if heavy or columns < WIDE:
            stages = 5 if format.bits == 8 else 3
            return _shared_out(problem, GemmSchedule("weights", rows, 64, 128, 4, stages, raster=8), 4.5)
        return _shared_out(problem, _slices(rows, 32, 128, 4), 4)
    if rows <= 64:
        if products > 1 or format.zero_point:
            return _shared_out(problem, GemmSchedule("weights", rows, 64, 128, 4, 3, raster=8), 3)
        if columns >= WIDE:
            return _shared_out(problem, GemmSchedule("weights", rows, 128, 128, 4, 3, raster=8), 2)
        # Shared memory holds two blocks of four stages or three of three: whichever come closer to filling it.
        deep, shallow = (GemmSchedule("weights", rows, 64, 128, 4, stages, raster=8) for stages in (4, 3))
        deep, shallow = _shared_out(problem, deep, 2), _shared_out(problem, shallow, 3)
        return shallow if 2 * shallow.parts > 3 * deep.parts else deep
    if products > 1:
        return GemmSchedule("weights", 128 if products == 2 else 64, 128, 64, 8, 3, raster=8)
    if rows <= 256:
        return _shared_out(problem, GemmSchedule("weights", 128, 128, 64, 8, 3, raster=8), 2)
    return GemmSchedule("weights", 128, 128, 64, 8, 3 if format.bits == 8 else 4, raster=8)


def _few_rows(problem: Problem, heavy: bool) -> GemmSchedule:
    """Up to eight: weights are all there is to read, and a part of K is worth its sums if it is a few steps long."""
    rows, columns = problem.rows, max(problem.columns)
    narrow = columns <= 4 * WAVE * 16
    if heavy or len(problem.contractions) > 1:
        return _slices(rows, 16, 128, 8 if narrow and rows <= 4 else 4)
    if not narrow:
        return _slices(rows, 32, 128, 4)
    if rows == 1:
        return _shared_out(problem, _slices(1, 16, 128, 8), 4, most=2)
    if rows > 4 and problem.length < 8192:
        return _shared_out(problem, _slices(rows, 16, 128, 4), 6, most=2)
    return _shared_out(problem, _slices(rows, 32, 128, 4), 6, most=3)


def _dense(problem: Problem) -> GemmSchedule:
    rows, columns, products = problem.rows, max(problem.columns), len(problem.contractions)
    narrow = columns <= 4 * WAVE * 16
    if rows <= 8 or (rows <= FEW_ROWS and narrow and products > 1):
        return _slices(rows, 16, 64, 8 if rows <= 8 else 4, 4 if rows <= 8 else 5)
    if rows <= 64:
        if columns <= WAVE * 128 or products > 1:
            tile = GemmSchedule("weights", rows, 64, 128 if products == 1 else 64, 4, 5, raster=8)
            return _shared_out(problem, tile, 1) if products == 1 else tile
        return GemmSchedule("weights", rows, 128, 64, 4, 5, raster=8)
    if rows <= 256 and columns < WAVE * 128 and products == 1:
        return _shared_out(problem, GemmSchedule("tokens", 128, 128, 64, 8, 5, raster=8), 1)
    return GemmSchedule("tokens", 256 if products < 3 else 128, 128 if products == 1 else 64, 64, 8, 4, raster=8)


def _float32(problem: Problem) -> GemmSchedule:
    """float32 products are the cores' (or three-way tensor-core) work: small tiles, with operands in registers."""
    if problem.rows <= FEW_ROWS:
        return _slices(problem.rows, 16, 32, 4)
    return GemmSchedule("weights" if problem.quantized else "tokens", 64, 64, 32, 4, 3, raster=8)


def _slices(rows: int, columns: int, block_k: int, warps: int, stages: int = 3) -> GemmSchedule:
    return GemmSchedule("slices", rows, columns, block_k, warps, stages)


def _shared_out(problem: Problem, tile: GemmSchedule, resident: float, most: int = MOST_PARTS) -> GemmSchedule:
    """``tile`` with K in as many parts as make a wave: of ``resident`` blocks for each multiprocessor."""
    tiles = sum(-(-problem.rows // tile.block_m) * -(-columns // tile.block_n) for columns in problem.columns)
    sums = len(problem.contractions) * len(problem.columns)
    room = int(resident * WAVE) // max(tiles, 1)
    parts = min(most, room, problem.length // (LEAST_STEPS * tile.step), MOST_SUMS // sums)
    return replace(tile, parts=max(1, parts))


def _fitted(tile: GemmSchedule, problem: Problem) -> GemmSchedule:
    """``tile`` with a block along K that lies in one group, and no more stages than the target has memory for."""
    contraction, target = problem.contractions[0], problem.target
    block_k = math.gcd(tile.block_k, contraction.group_size or tile.block_k)
    packed = problem.quantized and problem.dtype != "float32" and target.kind == "cuda"
    slices = tile.warps if tile.path == "slices" else 1
    size = 4 if problem.dtype == "float32" else 2
    weight = formats.find(contraction.format).bits / 8 if contraction.format else size
    stage = slices * block_k * (tile.block_m * size + tile.block_n * weight * len(problem.contractions))
    stages = min(tile.stages, max(2, int(target.shared_bytes // stage)))
    stages = 2 if target.kind == "hip" else stages
    path = f"{tile.path}_packed" if packed else tile.path
    return replace(tile, path=path, block_k=block_k, stages=stages)
