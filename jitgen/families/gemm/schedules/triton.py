"""Which form and tiles the triton dialect takes; the forms are those of ``gemm/triton.py``.

Chosen on an H200 with Triton 3.6 among some hundred tiles: int4 weights in groups of 128 and dense bfloat16 ones, of
4096 x 4096, 28672 x 4096 and 4096 x 14336, for 1, 8, 16, 64, 256, 1024 and 4096 rows.
"""

from __future__ import annotations

import math
from dataclasses import replace

from jitgen.families.gemm.schedule import GemmSchedule, Problem
from jitgen.ir.contractions import Decision, Prologue
from jitgen.quant import formats
from jitgen.spec import Target

FEW_ROWS = 16
"""Up to so many rows, warps share a tile's K: weights are read once and there is little else to do."""
WAVE = 132
"""Tiles that keep a large GPU's multiprocessors busy."""
SHARED_BYTES = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
"""KiB of shared memory a block may have, by compute capability (CUDA C++ programming guide, table of limits)."""
AMD_SHARED_BYTES = 64


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
    zeros = formats.find(contraction.format or "").zero_point and contraction.group_size is not None
    narrow = columns <= 4 * WAVE * 16
    if rows <= FEW_ROWS and zeros and (rows <= 8 or narrow):
        return _slices(rows, 16, 128, 8)
    if rows <= FEW_ROWS and not zeros:
        return _slices(rows, 16 if narrow or products > 1 else 32, 128, 8 if narrow and rows <= 4 else 4)
    if rows <= 64:
        if columns <= 2 * WAVE * 64 and products == 1 and not zeros:
            return _slices(32, 32, 128, 4)
        return GemmSchedule("weights", rows, 64, 128, 4, 4, raster=8)
    if products > 1:
        return GemmSchedule("weights", 128 if products == 2 else 64, 128, 64, 8, 4, raster=8)
    if rows <= 256 and columns < WAVE * 128:
        return GemmSchedule("weights", 128, 64, 128, 4, 4, raster=8)
    return GemmSchedule("weights", 256 if _has_warpgroups(problem.target) else 128, 128, 64, 8, 3, raster=8)


def _dense(problem: Problem) -> GemmSchedule:
    rows, columns, products = problem.rows, max(problem.columns), len(problem.contractions)
    if rows <= 8 or (rows <= FEW_ROWS and columns <= 4 * WAVE * 16):
        return _slices(rows, 16, 64, 8 if rows <= 8 else 4, 4 if rows <= 8 else 5)
    if rows <= 64:
        if columns <= WAVE * 128 or products > 1:
            return GemmSchedule("weights", rows, 64, 128 if products == 1 else 64, 4, 5, raster=8)
        return GemmSchedule("weights", rows, 128, 64, 4, 5, raster=8)
    if rows <= 256 and columns < WAVE * 128:
        return GemmSchedule("tokens", 128, 64, 64, 4, 5, raster=8)
    return GemmSchedule("tokens", 256 if products < 3 else 128, 128 if products == 1 else 64, 64, 8, 4, raster=8)


def _float32(problem: Problem) -> GemmSchedule:
    """float32 products are the cores' (or three-way tensor-core) work: small tiles, with operands in registers."""
    if problem.rows <= FEW_ROWS:
        return _slices(problem.rows, 16, 32, 4)
    return GemmSchedule("weights" if problem.quantized else "tokens", 64, 64, 32, 4, 3, raster=8)


def _slices(rows: int, columns: int, block_k: int, warps: int, stages: int = 3) -> GemmSchedule:
    return GemmSchedule("slices", rows, columns, block_k, warps, stages)


def _fitted(tile: GemmSchedule, problem: Problem) -> GemmSchedule:
    """``tile`` with a block along K that lies in one group, and no more stages than the target has memory for."""
    contraction, target = problem.contractions[0], problem.target
    block_k = math.gcd(tile.block_k, contraction.group_size or tile.block_k)
    packed = problem.quantized and problem.dtype != "float32" and target.kind == "cuda"
    slices = tile.warps if tile.path == "slices" else 1
    size = 4 if problem.dtype == "float32" else 2
    weight = formats.find(contraction.format).bits / 8 if contraction.format else size
    stage = slices * block_k * (tile.block_m * size + tile.block_n * weight * len(problem.contractions))
    stages = min(tile.stages, max(2, int(_shared_bytes(target) // stage)))
    stages = 2 if target.kind == "hip" else stages
    path = f"{tile.path}_packed" if packed else tile.path
    return replace(tile, path=path, block_k=block_k, stages=stages)


def _has_warpgroups(target: Target) -> bool:
    """Whether a warpgroup multiplies together, with less of a tile in each thread's registers."""
    return target.kind != "cuda" or 90 <= target.capability < 120


def _shared_bytes(target: Target) -> int:
    if target.kind == "hip":
        return AMD_SHARED_BYTES << 10
    if target.kind != "cuda":
        return max(SHARED_BYTES.values()) << 10
    known = [capability for capability in SHARED_BYTES if capability <= target.capability]
    return SHARED_BYTES[max(known)] << 10 if known else 48 << 10
