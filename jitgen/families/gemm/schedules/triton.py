"""Chooses the forms and tiles of the triton dialect; ``gemm/triton.py`` explains the forms.

One product of 16-bit x, with a dense weight or one of plain four-bit codes, has the candidates of ``triton_tiles.py``
and their cost. Every other has one candidate, by the rules below: several products of one x, batches, other formats,
float32 and integers. The tiles of these are the fastest of about a hundred on an H200 with Triton 3.6, on the
projections of Llama 3 8B and 70B, at some of 1, 4, 8, 16, 64, 256, 1024 and 4096 rows.

Where such tiles are too few to occupy every multiprocessor, K is split into as many ranges as make one wave of the
blocks that are resident at once (``_with_k_splits``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from jitgen.device import Device
from jitgen.families.gemm import tile_times, triton_tiles
from jitgen.families.gemm.claim import Prologue
from jitgen.families.gemm.mainloops import TritonSchedule, TritonSlices, TritonTokens, TritonWeights, multiplies_codes
from jitgen.families.gemm.schedule import Problem
from jitgen.families.gemm.triton_mainloops import LEAST_CODES
from jitgen.ir.program import Decision
from jitgen.kernel.operands import item_size
from jitgen.quant import formats
from jitgen.quant.codes import BLOCK, FLOAT8, SIGNED

DECODE_ROWS = 16
"""Rows of x up to which weights are read once and there is little else to do (fitted on an H200)."""
LEAST_GROUP_ROWS = 8
"""Rows of the least tile of groups of rows: an average group has fewer, another one more."""
WIDE = 8192
"""Columns from which on even larger tiles are enough to occupy the device (fitted on an H200)."""
MOST_K_SPLITS = 8
"""Ranges that K is split into at most."""
LEAST_ITERATIONS = 4
"""Iterations of the mainloop that each range of K has at least."""
MOST_SUMS = 32
"""Partial sums that the kernel after a split product reads at most for one of its elements."""


def candidates(problem: Problem) -> list[TritonSchedule]:
    """Lists the schedules of ``triton_tiles``, or one by the rules below."""
    if problem.grouping == "offsets":  # the tiles of groups with fewer rows have room for some more
        problem = replace(problem, rows=max(problem.rows, LEAST_GROUP_ROWS))
    if _has_model(problem):
        return list(_modelled(problem))
    tile: TritonSchedule
    if problem.contractions[0].blocks and problem.quantized:
        return [replace(_scaled(problem), wide=problem.wide)]
    if problem.dtype in SIGNED and not problem.quantized:
        tile = _codes(problem)
    elif problem.dtype in SIGNED:
        tile = _quantized(problem)
    elif problem.dtype not in ("float16", "bfloat16"):
        tile = _float32(problem)
    elif problem.quantized:
        tile = _quantized(problem)
    else:
        tile = _dense(problem)
    return [replace(_fitted_to_target(tile, problem), wide=problem.wide)]


def cost(problem: Problem, candidate: TritonSchedule) -> float:
    """Estimates the time in microseconds, by the geometric mean over rows of the bucket; 0 if there is only one
    candidate."""
    if not _has_model(problem):
        return 0.0
    tiles, splits = _modelled(problem)[candidate]
    contraction = problem.contractions[0]
    group = contraction.group_size
    bits = formats.find(contraction.format).bits + (16 / group if group else 0) if contraction.format else 16
    sizes, chip = (problem.columns, problem.length), problem.device.model
    rows = tile_times.sampled_rows(problem.fewest_rows, problem.rows)
    times = (triton_tiles.microseconds(tiles, count, *sizes, splits, bits, chip) for count in rows)
    return math.exp(sum(map(math.log, times)) / len(rows))


def _has_model(problem: Problem) -> bool:
    """Returns whether ``triton_tiles`` has candidates for ``problem``."""
    if problem.dtype not in ("float16", "bfloat16") or len(problem.contractions) > 1:
        return False
    if problem.matrices > 1 or problem.grouping:
        return False
    return not problem.quantized or not _is_heavy(problem)


def _is_heavy(problem: Problem) -> bool:
    """Returns whether codes of 8 bits, or zero-points of groups, leave fewer registers and less shared memory for a
    tile."""
    contraction = problem.contractions[0]
    format = formats.find(contraction.format or "")
    return format.bits == 8 or (format.zero_point and contraction.group_size is not None)


def _modelled(problem: Problem) -> dict[TritonSchedule, tuple[TritonSchedule, int]]:
    """Maps each schedule to the tiles that it was made of, and its ranges of K. Of equal schedules the first is
    kept."""
    modelled: dict[TritonSchedule, tuple[TritonSchedule, int]] = {}
    for tiles in triton_tiles.candidates(problem.rows, problem.quantized):
        fitted = replace(_fitted_to_target(tiles, problem), wide=problem.wide)
        for splits in triton_tiles.splits(tiles, problem.rows, problem.length, len(problem.columns)):
            modelled.setdefault(replace(fitted, k_splits=splits), (tiles, splits))
    return modelled


def prologue(computed: Prologue, device: Device) -> Decision:
    """Decides never to fuse: every tile would compute the activation again, in each iteration."""
    return Decision(False, "its products read an activation from memory")


def _quantized(problem: Problem) -> TritonSchedule:
    rows, columns, products = problem.rows, max(problem.columns), len(problem.contractions)
    format = formats.find(problem.contractions[0].format or "")
    if rows <= 8:
        narrow = columns <= 4 * problem.device.model.multiprocessors * 16
        return _slices(rows, 16, 128, 8 if narrow and rows <= 4 else 4)
    if rows <= DECODE_ROWS:
        if products > 1:
            return _slices(rows, 16, 128, 4)
        stages = 5 if format.bits == 8 else 3
        return _with_k_splits(problem, TritonWeights(rows, 64, 128, 4, stages, raster=8), 4.5)
    if rows <= 64:
        if products > 1 or format.zero_point:
            return _with_k_splits(problem, TritonWeights(rows, 64, 128, 4, 3, raster=8), 3)
        if columns >= WIDE:
            return _with_k_splits(problem, TritonWeights(rows, 128, 128, 4, 3, raster=8), 2)
        # Shared memory holds two blocks of four stages or three of three: take those that fill more of their wave.
        deep = _with_k_splits(problem, TritonWeights(rows, 64, 128, 4, 4, raster=8), 2)
        shallow = _with_k_splits(problem, TritonWeights(rows, 64, 128, 4, 3, raster=8), 3)
        return shallow if 2 * shallow.k_splits > 3 * deep.k_splits else deep
    if products > 1:
        return TritonWeights(128 if products == 2 else 64, 128, 64, 8, 3, raster=8)
    if problem.dtype in SIGNED:
        return TritonWeights(128, 128, 128, 8, 3, raster=8)
    if rows <= 256:
        return _with_k_splits(problem, TritonWeights(128, 128, 64, 8, 3, raster=8), 2)
    return TritonWeights(128, 128, 64, 8, 3 if format.bits == 8 else 4, raster=8)


def _dense(problem: Problem) -> TritonSchedule:
    rows, columns, products = problem.rows, max(problem.columns), len(problem.contractions)
    narrow = columns <= 4 * problem.device.model.multiprocessors * 16
    if problem.matrices > 1 and rows <= DECODE_ROWS:
        # A batch has tiles enough, so tiles may be as wide as reads of whole lines need: the 16 columns below took ten
        # times as long where weights lie along N (H200, 64 matrices of 128 x 4096, one row).
        return TritonWeights(16, 128, 64, 4, 4 if products == 1 else 3, raster=8)
    if rows <= 8 or (rows <= DECODE_ROWS and narrow and products > 1):
        return _slices(rows, 16, 64, 8 if rows <= 8 else 4, 4 if rows <= 8 else 5)
    if rows <= 64:
        if columns <= problem.device.model.multiprocessors * 128 or products > 1:
            tile: TritonSchedule = TritonWeights(rows, 64, 128 if products == 1 else 64, 4, 5, raster=8)
            return _with_k_splits(problem, tile, 1) if products == 1 else tile
        return TritonWeights(rows, 128, 64, 4, 5, raster=8)
    if rows <= 256 and columns < problem.device.model.multiprocessors * 128 and products == 1:
        return _with_k_splits(problem, TritonTokens(128, 128, 64, 8, 5, raster=8), 1)
    return TritonTokens(256 if products < 3 else 128, 128 if products == 1 else 64, 64, 8, 4, raster=8)


def _codes(problem: Problem) -> TritonSchedule:
    """Schedules products of codes by codes, dense tensors of 8 bits: the fastest of some twenty tiles on an H100 with
    Triton 3.6, at 16, 64, 512, 2048 and 8192 rows of 4096 x 4096."""
    rows, several = problem.rows, len(problem.contractions) > 1
    if problem.contractions[0].blocks:  # a step is a block of K
        if rows <= DECODE_ROWS:
            return TritonWeights(rows, 32, BLOCK, 4, 3, raster=8)
        if rows <= 64:
            return TritonWeights(rows, 64, BLOCK, 4, 3, raster=8)
        return TritonTokens(128, 64, BLOCK, 4, 3, raster=8)
    if rows <= DECODE_ROWS:
        return TritonWeights(rows, 64 if problem.dtype == "int8" else 32, 256, 4, 3, raster=8)
    if rows <= 64:
        return TritonWeights(rows, 64, 256 if problem.dtype == "int8" else 128, 4, 3, raster=8)
    if rows <= 1536 or several or problem.dtype == "int8":
        return TritonTokens(128, 64 if several else 128, 128, 8, 3, raster=8)
    return TritonTokens(256, 128, 128, 8, 3, raster=8)


def _scaled(problem: Problem) -> TritonSchedule:
    """Schedules products of codes with scales of 32 columns by ``tl.dot_scaled``: ``tcgen05.mma`` takes 128 rows of the
    left operand for it. Nothing was measured on a chip that has it."""
    if problem.rows <= 64:
        return TritonWeights(max(problem.rows, 32), BLOCK, BLOCK, 8, 3, raster=8)
    return TritonTokens(128, BLOCK, BLOCK, 8, 3, raster=8)


def _float32(problem: Problem) -> TritonSchedule:
    """Schedules float32 products, which run on the ordinary cores, or three times on the tensor cores: tiles are small,
    so that their operands fit the registers."""
    if problem.rows <= DECODE_ROWS:
        return _slices(problem.rows, 16, 32, 4)
    form = TritonWeights if problem.quantized else TritonTokens
    return form(64, 64, 32, 4, 3, raster=8)


def _slices(rows: int, columns: int, block_k: int, warps: int, stages: int = 3) -> TritonSchedule:
    return TritonSlices(rows, columns, block_k, warps, stages)


def may_split_k(rows: int, columns: Sequence[int], length: int, device: Device) -> bool:
    return True


def k_splits(problem: Problem) -> int:
    """Returns how many ranges K should be split into over a temporary: 1 for none. Each range has at least one
    iteration."""
    tilings = candidates(problem)
    chosen = min(tilings, key=lambda tiling: cost(problem, tiling)) if len(tilings) > 1 else tilings[0]
    return max(1, min(chosen.k_splits, problem.length // chosen.block_k))


def _with_k_splits(problem: Problem, tile: TritonSchedule, resident: float) -> TritonSchedule:
    """Splits K of ``tile`` into as many ranges as make one wave, with ``resident`` blocks on each multiprocessor."""
    tiles = sum(-(-problem.rows // tile.block_m) * -(-columns // tile.block_n) for columns in problem.columns)
    sums = len(problem.contractions) * len(problem.columns)
    room = int(resident * problem.device.model.multiprocessors) // max(tiles, 1)
    splits = min(MOST_K_SPLITS, room, problem.length // (LEAST_ITERATIONS * tile.block_k), MOST_SUMS // sums)
    return replace(tile, k_splits=max(1, splits))


def _fitted_to_target(tile: TritonSchedule, problem: Problem) -> TritonSchedule:
    """Fits ``tile`` to the target: a ``slice_k`` within one group of the weight, and the stages that fit the shared
    memory."""
    contraction, target = problem.contractions[0], problem.target
    slice_k = math.gcd(tile.slice_k, contraction.group_size or tile.slice_k)
    packed = problem.quantized and problem.dtype not in ("float32", "int8") and target.kind == "cuda"
    native = target.kind == "interpreter" or multiplies_codes(problem.dtype, target)
    decoded = problem.dtype in SIGNED if slice_k < LEAST_CODES else problem.dtype in FLOAT8 and not native
    size = item_size(problem.dtype)
    weight = formats.find(contraction.format).bits / 8 if contraction.format else size
    stage = tile.slices * slice_k * (tile.block_m * size + tile.block_n * weight * len(problem.contractions))
    stages = min(tile.stages, max(2, int(target.shared_bytes // stage)))
    stages = 2 if target.kind == "hip" else stages
    return replace(tile, packed=packed, decoded=decoded, slice_k=slice_k, stages=stages)
