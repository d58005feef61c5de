"""Chooses the collectives and tiles of products by CUTLASS, for ``backend="cutlass"``.

Every product of a program is then a kernel of CUTLASS, or refused with the reason; all else is in CUDA C++ as usual.
Tiles are compared by how many waves of blocks they take, and by how long a wave takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

from jitgen.device import Device
from jitgen.errors import UnsupportedError
from jitgen.families.gemm import cutlass, cutlass_epilogue
from jitgen.families.gemm.claim import Prologue
from jitgen.families.gemm.cutlass_mainloops import CutlassTile
from jitgen.families.gemm.schedule import Problem
from jitgen.families.gemm.tile_times import sampled_rows
from jitgen.ir.program import Decision
from jitgen.kernel.operands import ACCESS_BYTES, SWIZZLE_BYTES, item_size

ELEMENTS = ("float16", "bfloat16", "int8")
"""Dtypes of operands that collectives multiply. Those of a byte are contiguous along K, as wgmma reads them."""
SLOWDOWN = {(128, 256, 2): 1.01, (256, 128, 2): 1.03, (128, 256, 1): 1.0, (128, 128, 2): 1.13, (128, 128, 1): 1.08}
"""Rows and columns of a tile, and blocks of a cluster; and how many times as long as the fastest such tiles take for
the same products (4096 x 4096 x 4096 of bfloat16 on an H100). All are tiles of CUTLASS's cooperative kernel: its
pingpong kernel was right for numbers of tiles that are powers of two, and was not measured for others."""
TILES = tuple(SLOWDOWN)
"""The tiles to choose from."""
SWIZZLE = 4
"""Tiles that are walked together along one dimension, at most."""
LEAST_STAGES = 2
"""Stages that CUTLASS's collectives have at least."""
PROLOGUE_STEPS = 4
"""Steps of K that starting and ending a tile take about as long as."""


def candidates(problem: Problem) -> Sequence[CutlassTile]:
    """Lists every tile for ``problem`` whose stages fit shared memory.

    Raises:
        UnsupportedError: CUTLASS has no kernel for it; the message says why.
    """
    reason = _lack(problem)
    if reason:
        _refuse(problem, reason)
    return [fitted for tile in TILES if (fitted := _fitted(tile, problem)).stages >= LEAST_STAGES]


def _refuse(problem: Problem, reason: str) -> NoReturn:
    location = next((i.location for body in problem.bodies for i in body.instructions if i.location), None)
    where = f"\n  {location}" if location else ""
    raise UnsupportedError(f"backend 'cutlass' has no kernel for this product: {reason}; use backend='cuda'{where}")


def _lack(problem: Problem) -> str:
    """Returns why CUTLASS has no kernel for ``problem``; empty if it has one."""
    (body, *others), layout, contraction = problem.bodies, problem.layouts[0], problem.contractions[0]
    if 0 in problem.columns or problem.length == 0:
        return "it has no columns, or sums nothing"
    if problem.quantized:
        return f"weights of {contraction.format} are not supported"
    if problem.dtype not in ELEMENTS:
        return f"operands are {problem.dtype}, and collectives multiply {', '.join(ELEMENTS[:-1])} and {ELEMENTS[-1]}"
    if layout.batch or body.is_grouped:
        return "batches and groups of products are not supported"
    if others or len(body.contractions) > 1:
        return "a kernel of CUTLASS has one accumulator"
    if contraction.activation is None:
        return "its activation is computed in the kernel"
    if not problem.device.has_tensor_maps:
        return "its kernels take tensor maps, which a torch operator has none of"
    if problem.device.batch_invariant:
        return "which tiles are best depends on the number of rows, and batch_invariant asks for one choice"
    for what, index in (("activation", contraction.activation), ("weight", contraction.weight[0])):
        kind, unit = layout.operands[index], layout.units[index]
        if item_size(problem.dtype) == 1 and kind != "k":
            return f"the {what} is not contiguous along K, as operands of one byte have to be"
        if kind == "strided" or unit * item_size(problem.dtype) < ACCESS_BYTES:
            return f"the {what} is not contiguous with rows that begin at multiples of {ACCESS_BYTES} bytes"
    return cutlass_epilogue.lack(body, layout) or ""


def _fitted(tile: tuple[int, int, int], problem: Problem) -> CutlassTile:
    """Makes the schedule of ``tile`` with as many stages as shared memory holds."""
    block_m, block_n, cluster = tile
    block_k = SWIZZLE_BYTES // item_size(problem.dtype)
    schedule = CutlassTile(block_m, block_n, block_k, cluster, SWIZZLE, wide=problem.wide)
    fixed = cutlass.fixed_bytes(schedule, problem.bodies[0], problem.layouts[0])
    stage = cutlass.stage_bytes(schedule, problem.dtype)
    stages = (problem.target.shared_bytes - fixed) // stage
    return replace(schedule, stages=stages, shared_bytes=fixed + stages * stage)


def cost(problem: Problem, candidate: CutlassTile) -> float:
    """Estimates the time in microseconds: waves of blocks times the time of a wave, which is its steps of K at the rate
    of the matrix units; averaged over the rows of the bucket."""
    chip, (columns,) = problem.device.model, problem.columns
    steps = -(-problem.length // candidate.block_k) + PROLOGUE_STEPS
    tile = (candidate.block_m, candidate.block_n, candidate.cluster)
    flops = 2.0 * candidate.block_m * candidate.block_n * candidate.block_k * SLOWDOWN.get(tile, 1.0)
    wave = steps * flops * chip.multiprocessors / chip.rates.matrix(problem.dtype) * 1e6
    share = candidate.cluster * candidate.block_m
    across = -(-columns // candidate.block_n)
    waves = [
        -(-(-(-rows // share) * candidate.cluster * across) // chip.multiprocessors)
        for rows in sampled_rows(problem.fewest_rows, problem.rows)
    ]
    return wave * sum(waves) / len(waves)


def may_split_k(rows: int, columns: Sequence[int], length: int, device: Device) -> bool:
    """Returns False: K is not split over a temporary."""
    return False


def k_splits(problem: Problem) -> int:
    return 1


def prologue(computed: Prologue, device: Device) -> Decision:
    """Decides against: collectives read operands from memory."""
    return Decision(False, "CUTLASS's collectives read operands from memory")
