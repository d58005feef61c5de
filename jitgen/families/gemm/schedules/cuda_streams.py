"""Schedules the cuda dialect for few rows of x, where each weight is streamed from memory once and used for little
arithmetic: the paths ``mma``, ``rows``, ``columns``, ``stream`` and ``stream_outer``. Also the decision whether such a
kernel computes its activation (``prologue``).

``stream_tiles`` has the candidates and costs of ``mma`` and ``rows``. The tables of the others were measured on an
H200, on the layers of Llama 3 8B and 70B, and other devices use the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from statistics import geometric_mean

from jitgen.device import Device
from jitgen.families.gemm import stream_tiles
from jitgen.families.gemm.claim import Prologue
from jitgen.families.gemm.mainloops import (
    BlockSchedule,
    MmaBytes,
    MmaCodes,
    MmaColumns,
    MmaQuantized,
    MmaRows,
    Stream,
    StreamOuter,
)
from jitgen.families.gemm.schedule import Problem
from jitgen.families.gemm.stream_tiles import StreamWeights, shortened
from jitgen.ir.body import accumulator_dtype
from jitgen.ir.ops import FLOATS
from jitgen.ir.program import Decision
from jitgen.kernel.operands import item_size
from jitgen.quant import formats
from jitgen.quant.codes import longest_exact_sum

STREAMED_ROWS = 16
"""Rows of x up to which weights are streamed once and there is little else to do (H200, Llama 3 8B and 70B layers)."""
LOW_TILES = 640 * 64
"""Row tiles of 16 times rows of x up to which blocks of the ``mma`` mainloop for many rows have few rows of the weight
and share K."""
STREAM_SUMS = 64
"""Registers that a lane of the stream mainloops has for sums."""
CHEAP = {"add", "sub", "mul", "fma", "neg", "abs", "sign", "minimum", "maximum", "fmin", "fmax", "copysign"}
CHEAP |= {"floor", "ceil", "round", "trunc", "cast", "where", "eq", "ne", "lt", "le", "gt", "ge"}
CHEAP |= {"isnan", "isinf", "signbit", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"}
"""Operations that take one or two instructions."""
ELEMENT_MICROSECONDS = 3e-7
"""Time to compute one element of x into shared memory, in microseconds of the whole device (H200; fitted over relu(x),
silu(g) * u and scaled rows, 1 to 16 rows, on Llama 3 8B and 70B layers)."""
EXPENSIVE_OPERATION_MICROSECONDS = 8e-7
"""What each operation that is not ``CHEAP`` adds to it (same fit)."""
LAUNCH_MICROSECONDS = 2.4
"""Time of the separate kernel that computes a small activation, in microseconds (same device and layers)."""

FEWEST_TOKENS = (1, 8, 16)
"""Tokens of a tile of the ``mma``, ``rows`` and ``columns`` mainloops: the least of these that has all rows of x."""
MANY_TOKENS = 64
"""Tokens of a tile of the ``mma`` mainloop for more rows than that."""


def mma(problem: Problem) -> Sequence[BlockSchedule]:
    """Lists the schedules of ``stream_tiles``; for many rows one, with few and large blocks, so that x is read less
    often."""
    count = len(problem.contractions)
    if problem.rows > FEWEST_TOKENS[-1]:
        # Groups shorter than 64 have more scales, and they take registers.
        group = problem.contractions[0].group_size
        taller = 2 if group is None or group % 64 == 0 else 1
        tiles = problem.groups * count * sum(-(-columns // 16) for columns in problem.columns)
        low = tiles * problem.rows <= LOW_TILES
        shapes = [(1, 4, 2, 2), (1, 4, 2, 1)] if low else [(taller, 8, 1, 1)]  # the second takes less shared memory
        if count > 2:
            shapes.append((1, 4, 1, 1))
        if not problem.device.has_clusters:
            shapes = [(max(1, rows // splits), n, k, 1) for rows, n, k, splits in shapes]
        schedules = []
        for row_tiles, warps_n, warps_k, splits in shapes:
            warps_k, splits = shortened(warps_k, splits, problem.length // 64)
            own = max(1, row_tiles // count)
            schedules.append(MmaQuantized(MANY_TOKENS, own, warps_n, warps_k, 2, cluster_k_splits=splits))
        return schedules
    return stream_tiles.candidates(_tokens(problem.rows), weights_of(problem), problem.device.has_clusters)


def _tokens(rows: int) -> int:
    return next(tokens for tokens in FEWEST_TOKENS if rows <= tokens)


def weights_of(problem: Problem) -> StreamWeights:
    """Returns the facts on which the choice of tiles depends."""
    first, count = problem.contractions[0], len(problem.contractions)
    matrices = 1 if problem.uneven or problem.grouping == "ids" else problem.groups
    if not problem.grouping:  # in the middle of a batch's bucket
        matrices = round(math.sqrt(problem.fewest_matrices * problem.matrices))
    tiles = matrices * count * sum(-(-columns // 16) for columns in problem.columns)
    quantized = problem.quantized
    bits = _bits(first.format, first.group_size) if quantized else 8 * item_size(problem.dtype)
    light = quantized and _plain(problem)
    return StreamWeights(tiles, count, problem.length, bits, quantized, light, problem.device.model)


def _bits(name: str | None, group_size: int | None) -> float:
    """Counts the bits of a weight of this format, with those of a scale of 16 bits for each group."""
    return formats.find(name or "").bits + (16 / group_size if group_size else 0)


def cost(problem: Problem, candidate: MmaQuantized | MmaRows) -> float:
    """Estimates the time in microseconds, by the geometric mean over the rows of the bucket: of every number of them,
    at most 16."""
    weights, shared_bytes = weights_of(problem), candidate.shared_bytes
    if isinstance(candidate, MmaBytes):
        weights = _in_pairs(weights)
    elif isinstance(candidate, MmaCodes):
        weights = replace(_in_pairs(weights), loads=2)
    if problem.grouping == "ids":
        # Each row has tiles of its own, as one row has of a matrix with more columns: what is estimated the fastest
        # took 1.03 times as long as the fastest of 14 to 40 tiles of each of 18 products (1.17 at worst; H200,
        # docs/measured/h200-ids.json), and 1.06 times (1.19) by the model of groups.
        of_rows = replace(weights, tiles=weights.tiles * problem.matrices)
        return stream_tiles.microseconds(candidate, 1, of_rows, shared_bytes)
    if problem.uneven:
        return geometric_mean(
            stream_tiles.microseconds(candidate, groups.rows, weights, shared_bytes, groups)
            for groups in problem.divisions
        )
    return geometric_mean(
        stream_tiles.microseconds(candidate, rows, weights, shared_bytes)
        for rows in range(problem.fewest_rows, problem.rows + 1)
    )


def _plain(problem: Problem) -> bool:
    """Returns whether the weights need no more registers than 4-bit codes without zero-points, for bfloat16."""
    first = problem.contractions[0]
    coarse = first.group_size is None or first.group_size % 64 == 0
    format = formats.find(first.format or "")
    light = format.name == "int4" or (
        not format.tiled and isinstance(format.code, formats.Integer) and format.bits <= 4 and not format.zero_point
    )
    return light and coarse and problem.dtype == "bfloat16"


_COLUMNS: list[tuple[float, tuple[int, int, int, int]]] = [
    (0.5, (1, 8, 2, 1)),
    (1, (1, 8, 1, 1)),
    (math.inf, (2, 4, 2, 1)),
]
"""For dense weights that are contiguous along N: by the most row tiles, of 64 rows here, for each multiprocessor,
(warps along N, warps along K, blocks of a cluster along K, stages)."""
MOST_COLUMN_TILES = 256
"""Row tiles of 64 rows up to which ``columns`` is used. With more of them ``dense``, through shared memory, has enough
blocks and is faster (H200)."""
_STREAM: dict[int, tuple[int, int, int, int, int]] = {
    1: (4, 1, 8, 1, 2),
    4: (4, 4, 4, 1, 2),
    8: (4, 4, 2, 1, 2),
    16: (4, 8, 1, 2, 2),
}
"""The ``stream`` mainloop, by the most tokens: (weight rows of a lane, warps along N, warps along K, blocks of a
cluster along K, stages)."""
OUTER_TILE_K = 8
"""Extent of K in a tile of the ``stream_outer`` mainloop."""
OUTER_WARPS = 8
"""Warps along K of the ``stream_outer`` mainloop."""
OUTER_CLUSTER = 8
"""Blocks of a cluster along K of the ``stream_outer`` mainloop, for few tokens or few tiles."""


def _dense_kinds(problem: Problem) -> tuple[set[str], int]:
    """Returns (kinds, unit): the layouts of all dense weights, and how many elements one access may read of each of
    them."""
    weights = [
        (layout.operands[index], layout.units[index])
        for body, layout in zip(problem.bodies, problem.layouts, strict=True)
        for contraction in body.contractions
        for index in contraction.weight
    ]
    return {kind for kind, _ in weights}, min(unit for _, unit in weights)


def rows(problem: Problem) -> Sequence[BlockSchedule]:
    """Lists ``rows`` or ``columns`` schedules: for few rows of x and 16-bit weights that are contiguous along one
    dimension (the same one for all) and can be read in accesses of 16 bytes; else none."""
    kinds, unit = _dense_kinds(problem)
    along_k = kinds == {"k"}
    units = [problem.layouts[0].length_unit] if along_k else [layout.columns_unit for layout in problem.layouts]
    if problem.rows > STREAMED_ROWS or kinds not in ({"k"}, {"outer"}) or min(unit, *units) < 8:
        return []
    tokens, count = _tokens(problem.rows), len(problem.contractions)
    if not along_k:
        tiles = count * sum(-(-columns // 64) for columns in problem.columns)
        if tiles > MOST_COLUMN_TILES and not problem.prologue:
            return []
        warps_n, warps_k, splits, stages = next(
            shape for most, shape in _COLUMNS if tiles <= most * problem.device.model.multiprocessors
        )
        warps_k, splits = shortened(warps_k, splits, problem.length // 64)
        block = MmaColumns(tokens, 4, warps_n, warps_k, stages, cluster_k_splits=splits)
        smaller = [replace(block, warps_k=max(1, warps_k // 2), cluster_k_splits=1)] if count > 2 else []
        return [block, *smaller]
    return stream_tiles.candidates(tokens, weights_of(problem), problem.device.has_clusters)


def byte_rows(problem: Problem) -> Sequence[BlockSchedule]:
    """Lists ``bytes`` schedules: for few rows of x, and operands of one byte that are contiguous along K and can be
    read in accesses of 16 bytes; else none. The mainloop takes pairs for elements of two bytes."""
    layout = problem.layouts[0]
    x, (kinds, unit) = problem.contractions[0].activation, _dense_kinds(problem)
    if problem.rows > STREAMED_ROWS or x is None or kinds != {"k"} or min(unit, layout.length_unit) < 16:
        return []
    if layout.operands[x] != "k" or layout.units[x] < 2:
        return []
    pairs = _in_pairs(weights_of(problem))
    tilings = stream_tiles.candidates(_tokens(problem.rows), pairs, problem.device.has_clusters)
    return [MmaBytes(**{field.name: getattr(tiles, field.name) for field in fields(tiles)}) for tiles in tilings]


def code_rows(problem: Problem) -> Sequence[BlockSchedule]:
    """Lists ``codes`` schedules: for few rows of x of int8 codes, and 4-bit weights, whose sums int32 holds; else
    none."""
    is_exact = problem.contractions[0].group_size or problem.length <= longest_exact_sum("int8", "int8")
    if problem.rows > STREAMED_ROWS or problem.grouping or not is_exact:
        return []
    pairs = _in_pairs(weights_of(problem))
    tilings = stream_tiles.candidates(_tokens(problem.rows), pairs, problem.device.has_clusters)
    return [MmaCodes(**{field.name: getattr(tiles, field.name) for field in fields(tiles)}) for tiles in tilings]


def _in_pairs(weights: StreamWeights) -> StreamWeights:
    """Returns the facts of weights whose mainloop takes two of them for an element."""
    return replace(weights, length=weights.length // 2, bits=2 * weights.bits)


def stream(problem: Problem) -> Stream | StreamOuter | None:
    """Schedules ``stream`` or ``stream_outer``: for few rows of x and float32 or float64 weights that are contiguous
    along one dimension (the same one for all); else None."""
    if problem.quantized or problem.rows > STREAMED_ROWS:
        return None
    kinds, unit = _dense_kinds(problem)
    if kinds not in ({"k"}, {"outer"}):
        return None
    tokens = next(most for most in _STREAM if problem.rows <= most)
    lane_rows, warps_n, warps_k, splits, stages = _STREAM[tokens]
    sums = STREAM_SUMS // (len(problem.contractions) * tokens * (item_size(problem.dtype) // 4))
    if kinds == {"k"}:
        lane_rows = max(1, min(lane_rows, sums))
        vector = min(unit, problem.layouts[0].length_unit)
        warps_k, splits = shortened(warps_k, splits, problem.length // (32 * vector))
        return Stream(tokens, lane_rows, vector, warps_n, warps_k, stages, cluster_k_splits=splits)
    vector = max(1, min(unit, sums, *(layout.columns_unit for layout in problem.layouts)))
    tiles = sum(-(-columns // (32 * vector)) for columns in problem.columns)
    splits = OUTER_CLUSTER if tokens <= 4 or tiles < problem.device.model.multiprocessors else 1
    warps_k, splits = shortened(OUTER_WARPS, splits, problem.length // OUTER_TILE_K)
    return StreamOuter(tokens, OUTER_TILE_K, vector, warps_k, cluster_k_splits=splits)


def prologue(computed: Prologue, device: Device) -> Decision:
    """Decides to fuse if a separate kernel and a temporary would cost more than computing x again in every block along
    N."""
    if computed.is_result:
        return Decision(False, "it is a result too")
    if accumulator_dtype(computed.dtype) not in FLOATS or item_size(computed.dtype) == 1:
        return Decision(False, "tiles of integers and of 8-bit floats are read from memory")
    if computed.operations == ("cast",):
        return Decision(False, "a cast alone leaves tiles that are read as they are")
    if computed.rows > STREAMED_ROWS:
        return Decision(False, f"above {STREAMED_ROWS} rows tiles read it by the copy engine, and are many")
    blocks = -(-computed.columns // estimated_block_rows(computed, device))
    expensive = sum(operation not in CHEAP for operation in computed.operations)
    element = ELEMENT_MICROSECONDS + EXPENSIVE_OPERATION_MICROSECONDS * expensive
    microseconds = computed.rows * computed.length * blocks * element
    if microseconds > LAUNCH_MICROSECONDS:
        return Decision(False, f"{blocks} blocks would compute it again, for longer than a launch of its own takes")
    return Decision(True, f"that {blocks} blocks compute it costs less than a launch of its own")


def estimated_block_rows(computed: Prologue, device: Device) -> int:
    """Estimates the rows of a weight in a block's tile, in the mainloop for few rows of x.

    Whether the activation is computed there is decided before operands have layouts, and so before the schedule is
    chosen. The estimate takes one contraction without scales, plain codes, the bucket's last row, no shared memory and
    no measured row. ``tests/unit/test_prologue_estimate.py`` compares it with what is chosen.
    """
    if computed.dtype in ("float32", "float64"):
        lane_rows, warps_n, *_ = _STREAM[next(most for most in _STREAM if computed.rows <= most)]
        return lane_rows * warps_n if computed.format is None else 64
    quantized = computed.format is not None
    bits = _bits(computed.format, None) if quantized else 16
    weights = StreamWeights(-(-computed.columns // 16), 1, computed.length, bits, quantized, True, device.model)
    tokens = _tokens(computed.rows)
    tilings = stream_tiles.candidates(tokens, weights, device.has_clusters)
    best = min(tilings, key=lambda tiling: stream_tiles.microseconds(tiling, computed.rows, weights, 0))
    return 16 * best.row_tiles * best.warps_n
