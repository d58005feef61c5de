"""Schedules of the cuda dialect for few rows of x, where each weight is streamed from memory once and used for little
arithmetic: the paths ``mma``, ``rows``, ``columns``, ``stream`` and ``stream_outer``. Also the decision whether such a
kernel computes its activation (``prologue``).

The tables were measured on an H200, on the layers of Llama 3 8B and 70B, and other devices use the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from jitgen.device import Device
from jitgen.families.gemm.claim import Prologue
from jitgen.families.gemm.mainloops import MmaColumns, MmaQuantized, MmaRows, Stream, StreamOuter
from jitgen.families.gemm.schedule import Problem
from jitgen.families.operands import item_size
from jitgen.ir.body import accumulator_dtype
from jitgen.ir.ops import FLOATS
from jitgen.ir.program import Decision
from jitgen.quant import formats

STREAMED_ROWS = 16
"""Rows of x up to which weights are streamed once and there is little else to do (H200, Llama 3 8B and 70B layers)."""
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

Shape = tuple[int, int, int, int, int]
"""(a warp's row tiles, warps along N, warps along K, blocks of a cluster along K, stages)."""

_FEW_TILES: list[tuple[float, Shape]] = [
    (8, (1, 1, 16, 8, 2)),
    (24, (1, 1, 16, 4, 2)),
    (48, (1, 1, 16, 2, 2)),
    (160, (2, 1, 8, 4, 2)),
]
"""Few row tiles occupy a GPU only if many warps and blocks share K (H200; 72 to 2176 columns, K from 1024 to 56960)."""
_MMA: dict[int, list[tuple[float, Shape]]] = {
    1: [*_FEW_TILES, (264, (1, 1, 16, 1, 2)), (400, (1, 1, 8, 1, 2)), (640, (2, 1, 16, 1, 2)), (3000, (2, 1, 8, 1, 2))],
    4: [*_FEW_TILES, (264, (2, 1, 8, 2, 2)), (400, (1, 1, 8, 1, 2)), (1200, (4, 1, 8, 2, 2)), (3000, (2, 7, 2, 2, 2))],
    8: [*_FEW_TILES, (264, (2, 1, 8, 2, 2)), (400, (2, 2, 8, 1, 2)), (640, (4, 1, 8, 2, 2)), (3000, (4, 2, 4, 1, 2))],
    16: [(300, (4, 1, 8, 2, 4)), (400, (2, 3, 4, 2, 2)), (640, (4, 2, 4, 2, 4)), (3000, (7, 2, 4, 1, 2))],
}
"""The ``mma`` mainloop, by the most tokens, and then by the most row tiles: pieces of 16 rows, of all weights."""
_MMA_MORE: dict[int, Shape] = {
    1: (2, 2, 4, 1, 2),
    4: (2, 7, 2, 1, 2),
    8: (2, 7, 2, 1, 2),
    16: (7, 4, 2, 1, 2),
}
"""The same for more row tiles than ``_MMA`` has."""
MANY_TOKENS = 64
"""Tokens of a tile of the ``mma`` mainloop for more rows than ``_MMA`` has."""


def mma(problem: Problem) -> MmaQuantized:
    """A schedule by the number of row tiles of all regions: where they are few, more warps and blocks share K.

    The aim is one wave of blocks (as many as there are multiprocessors, or a small multiple of that) with enough
    16-byte loads in flight. For many tokens blocks are few and large, so that x is read less often.
    """
    first = problem.contractions[0]
    count = len(problem.contractions)
    tiles = count * sum(-(-columns // 16) for columns in problem.columns)
    tokens = next((most for most in _MMA if problem.rows <= most), MANY_TOKENS)
    if tokens == MANY_TOKENS:
        # Groups shorter than 64 have more scales, and they take registers.
        taller = 2 if first.group_size is None or first.group_size % 64 == 0 else 1
        shape = (1, 4, 2, 2, 2) if tiles * problem.rows <= 640 * MANY_TOKENS else (taller, 8, 1, 1, 2)
    else:
        shape = next((shape for most, shape in _MMA[tokens] if tiles <= most), _MMA_MORE[tokens])
    row_tiles, warps_n, warps_k, splits, stages = shape
    if row_tiles == 7 and (count > 1 or not _plain(problem)):
        row_tiles = 4  # the registers would not hold the decoding of such weights next to the sums
    if not problem.device.has_clusters:
        row_tiles, splits = max(1, row_tiles // splits), 1
    row_tiles = max(1, row_tiles // count)
    if not _plain(problem) and stages > 2 and row_tiles * stages > 8:
        stages = 2
    warps_k, splits = _shortened(warps_k, splits, problem.length // 64)
    return MmaQuantized(tokens, row_tiles, warps_n, warps_k, stages, cluster_k_splits=splits)


def _plain(problem: Problem) -> bool:
    """Whether the weights need no more registers than 4-bit codes without zero-points, for bfloat16."""
    first = problem.contractions[0]
    coarse = first.group_size is None or first.group_size % 64 == 0
    format = formats.find(first.format or "")
    light = format.name == "int4" or (
        not format.tiled and isinstance(format.code, formats.Integer) and format.bits <= 4 and not format.zero_point
    )
    return light and coarse and problem.dtype == "bfloat16"


_FEW_DENSE_TILES: list[tuple[float, Shape]] = [*_FEW_TILES[:2], (80, (1, 1, 16, 2, 2))]
_ROWS: dict[int, list[tuple[float, Shape]]] = {
    1: [*_FEW_DENSE_TILES, (math.inf, (1, 1, 16, 1, 2))],
    4: [
        *_FEW_DENSE_TILES,
        (160, (2, 1, 8, 2, 2)),
        (264, (1, 2, 8, 1, 2)),
        (400, (1, 1, 8, 1, 2)),
        (math.inf, (2, 1, 8, 1, 2)),
    ],
    8: [*_FEW_DENSE_TILES, (160, (2, 1, 8, 2, 2)), (264, (1, 2, 8, 1, 2)), (math.inf, (1, 2, 4, 1, 2))],
    16: [*_FEW_DENSE_TILES, (160, (2, 1, 8, 2, 2)), (264, (1, 2, 8, 1, 2)), (math.inf, (2, 2, 4, 1, 2))],
}
"""As ``_MMA``, for dense weights that are contiguous along K."""
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
_STREAM: dict[int, Shape] = {
    1: (4, 1, 8, 1, 2),
    4: (4, 4, 4, 1, 2),
    8: (4, 4, 2, 1, 2),
    16: (4, 8, 1, 2, 2),
}
"""The ``stream`` mainloop, by the most tokens: as ``Shape``, but with the weight rows of a lane for the row tiles."""
OUTER_TILE_K = 8
"""Extent of K in a tile of the ``stream_outer`` mainloop."""
OUTER_WARPS = 8
"""Warps along K of the ``stream_outer`` mainloop."""
OUTER_CLUSTER = 8
"""Blocks of a cluster along K of the ``stream_outer`` mainloop, for few tokens or few tiles."""


def _dense_kinds(problem: Problem) -> tuple[set[str], int]:
    """(kinds, unit): the layouts of all dense weights, and how many elements one access may read of each of them."""
    weights = [
        (layout.operands[index], layout.units[index])
        for body, layout in zip(problem.bodies, problem.layouts, strict=True)
        for contraction in body.contractions
        for index in contraction.weight
    ]
    return {kind for kind, _ in weights}, min(unit for _, unit in weights)


def rows(problem: Problem) -> MmaRows | MmaColumns | None:
    """``rows`` or ``columns``: for few rows of x and 16-bit weights that are contiguous along one dimension (the same
    one for all) and can be read in accesses of 16 bytes; else None."""
    kinds, unit = _dense_kinds(problem)
    along_k = kinds == {"k"}
    units = [problem.layouts[0].length_unit] if along_k else [layout.columns_unit for layout in problem.layouts]
    if problem.rows > STREAMED_ROWS or kinds not in ({"k"}, {"outer"}) or min(unit, *units) < 8:
        return None
    tokens = next(most for most in _ROWS if problem.rows <= most)
    count = len(problem.contractions)
    if not along_k:
        tiles = count * sum(-(-columns // 64) for columns in problem.columns)
        if tiles > MOST_COLUMN_TILES and not problem.prologue:
            return None
        warps_n, warps_k, splits, stages = next(
            shape for most, shape in _COLUMNS if tiles <= most * problem.device.model.multiprocessors
        )
        warps_k, splits = _shortened(warps_k, splits, problem.length // 64)
        return MmaColumns(tokens, 4, warps_n, warps_k, stages, cluster_k_splits=splits)
    tiles = count * sum(-(-columns // 16) for columns in problem.columns)
    row_tiles, warps_n, warps_k, splits, stages = next(shape for most, shape in _ROWS[tokens] if tiles <= most)
    row_tiles = max(1, row_tiles // count)
    warps_k, splits = _shortened(warps_k, splits, problem.length // 64)
    return MmaRows(tokens, row_tiles, warps_n, warps_k, stages, cluster_k_splits=splits)


def _shortened(warps_k: int, splits: int, steps: int) -> tuple[int, int]:
    """``warps_k`` and ``splits``, halved until there are no more warps along K than ``steps`` of it."""
    while warps_k * splits > max(1, steps):
        warps_k, splits = (warps_k, splits // 2) if splits > 1 else (warps_k // 2, splits)
    return warps_k, splits


def stream(problem: Problem) -> Stream | StreamOuter | None:
    """``stream`` or ``stream_outer``: for few rows of x and float32 or float64 weights that are contiguous along one
    dimension (the same one for all); else None."""
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
        warps_k, splits = _shortened(warps_k, splits, problem.length // (32 * vector))
        return Stream(tokens, lane_rows, vector, warps_n, warps_k, stages, cluster_k_splits=splits)
    vector = max(1, min(unit, sums, *(layout.columns_unit for layout in problem.layouts)))
    tiles = sum(-(-columns // (32 * vector)) for columns in problem.columns)
    splits = OUTER_CLUSTER if tokens <= 4 or tiles < problem.device.model.multiprocessors else 1
    warps_k, splits = _shortened(OUTER_WARPS, splits, problem.length // OUTER_TILE_K)
    return StreamOuter(tokens, OUTER_TILE_K, vector, warps_k, cluster_k_splits=splits)


def prologue(computed: Prologue, device: Device) -> Decision:
    """Fused where a separate kernel and a temporary would cost more than computing x again in every block along N."""
    if computed.is_result:
        return Decision(False, "it is a result too")
    if accumulator_dtype(computed.dtype) not in FLOATS:
        return Decision(False, "tiles of integers are read from memory")
    if computed.rows > STREAMED_ROWS:
        return Decision(False, f"above {STREAMED_ROWS} rows tiles read it by the copy engine, and are many")
    blocks = -(-computed.columns // _block_rows(computed))
    expensive = sum(operation not in CHEAP for operation in computed.operations)
    element = ELEMENT_MICROSECONDS + EXPENSIVE_OPERATION_MICROSECONDS * expensive
    microseconds = computed.rows * computed.length * blocks * element
    if microseconds > LAUNCH_MICROSECONDS:
        return Decision(False, f"{blocks} blocks would compute it again, for longer than a launch of its own takes")
    return Decision(True, f"that {blocks} blocks compute it costs less than a launch of its own")


def _block_rows(computed: Prologue) -> int:
    """Rows of a weight in a block's tile, in the mainloop for few rows of x."""
    tokens = next(most for most in _MMA if computed.rows <= most)
    tiles = -(-computed.columns // 16)
    if computed.dtype in ("float32", "float64"):
        return _STREAM[tokens][0] * _STREAM[tokens][1] if computed.format is None else 64
    table: Mapping[int, Sequence[tuple[float, tuple[int, ...]]]] = _ROWS if computed.format is None else _MMA
    row_tiles, warps_n, *_ = next((shape for most, shape in table[tokens] if tiles <= most), _MMA_MORE[tokens])
    return 16 * row_tiles * warps_n
