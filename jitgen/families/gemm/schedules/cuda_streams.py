"""Which tiles the cuda dialect takes for few rows of x, where weights are streamed from memory once and the products
are little work: ``mma``, ``rows``, ``columns``, ``stream`` and ``stream_outer``; and whether such a kernel computes x.

The tables are measured on an H200, on layers of Llama 3 8B and 70B; elsewhere they are as good a guess as any.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from jitgen.families.gemm.schedule import GemmSchedule, Problem
from jitgen.families.layout import item_size
from jitgen.ir.contractions import Decision, Prologue
from jitgen.spec import Target

STREAMED_ROWS = 16
"""Up to so many rows there is little else to do than to stream weights."""
STREAM_SUMS = 64
"""Registers of sums that a lane of the ``stream`` mainloop has."""
CHEAP = {"add", "sub", "mul", "fma", "neg", "abs", "sign", "minimum", "maximum", "fmin", "fmax", "copysign"}
CHEAP |= {"floor", "ceil", "round", "trunc", "cast", "where", "eq", "ne", "lt", "le", "gt", "ge"}
CHEAP |= {"isnan", "isinf", "signbit", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"}
"""Operations of an instruction or two."""
CHEAP_COST, DEAR_COST = 3e-7, 8e-7
"""Microseconds of an H200 for computing an element of x in shared memory, and more for an operation that is not cheap:
measured over relu(x), silu(g) * u and rows scaled, 1 to 16 rows, on layers of 8 and 70 billion parameters."""
LAUNCH_MICROSECONDS = 2.4
"""What the kernel of a small activation takes, on the same."""

# For up to so many tokens: up to so many row tiles of a GPU's all weights, (row tiles of a warp, warps along N, warps
# along K, blocks along K, steps in flight). Measured on the projections of Llama 3 8B and 70B.
_MMA: dict[int, list[tuple[int, tuple[int, int, int, int, int]]]] = {
    1: [(264, (1, 1, 16, 1, 2)), (400, (1, 1, 8, 1, 2)), (640, (2, 1, 16, 1, 2)), (3000, (2, 1, 8, 1, 2))],
    4: [(264, (2, 2, 8, 2, 2)), (400, (1, 1, 8, 1, 2)), (640, (4, 1, 8, 2, 2)), (3000, (2, 7, 2, 2, 2))],
    8: [(264, (2, 2, 8, 2, 2)), (400, (2, 2, 8, 1, 2)), (640, (4, 1, 8, 2, 2)), (3000, (4, 2, 4, 1, 2))],
    16: [(300, (4, 1, 8, 2, 4)), (400, (2, 3, 4, 2, 2)), (640, (4, 2, 4, 2, 4)), (3000, (7, 2, 4, 1, 2))],
}
_MMA_MORE: dict[int, tuple[int, int, int, int, int]] = {
    1: (2, 2, 4, 1, 2),
    4: (2, 7, 2, 1, 2),
    8: (2, 7, 2, 1, 2),
    16: (7, 4, 2, 1, 2),
}
MANY_TOKENS = 64


def mma(problem: Problem) -> GemmSchedule:
    """By the number of row tiles, of all regions: few of them are shared out along K, many stream.

    The aim is one wave of blocks, as many as there are multiprocessors or a small multiple, with enough 16-byte loads
    in flight: of many tokens few large blocks, so that x is read less often.
    """
    first = problem.contractions[0]
    count = len(problem.contractions)
    tiles = count * sum(-(-columns // 16) for columns in problem.columns)
    tokens = next((most for most in _MMA if problem.rows <= most), MANY_TOKENS)
    if tokens == MANY_TOKENS:
        # More scales take more registers.
        taller = 2 if first.group_size is None or first.group_size % 64 == 0 else 1
        shape = (1, 4, 2, 2, 2) if tiles * problem.rows <= 640 * MANY_TOKENS else (taller, 8, 1, 1, 2)
    else:
        shape = next((shape for most, shape in _MMA[tokens] if tiles <= most), _MMA_MORE[tokens])
    row_tiles, warps_n, warps_k, split, stages = shape
    if row_tiles == 7 and (count > 1 or not _plain(problem)):
        row_tiles = 4  # what they need beside the sums would not fit the registers
    if not has_clusters(problem.target):
        row_tiles, split = max(1, row_tiles // split), 1
    row_tiles = max(1, row_tiles // count)
    if not _plain(problem) and stages > 2 and row_tiles * stages > 8:
        stages = 2
    warps_k, split = _shared_out(warps_k, split, problem.length // 64)
    return GemmSchedule("mma", tokens, 16 * row_tiles * warps_n, 64 * warps_k, warps_n * warps_k, stages, split)


def _plain(problem: Problem) -> bool:
    """Whether the weights need no more registers than 4-bit codes without zero-points, for bfloat16."""
    first = problem.contractions[0]
    coarse = first.group_size is None or first.group_size % 64 == 0
    return first.format == "int4" and coarse and problem.dtype == "bfloat16"


# As ``_MMA``, of dense weights that lie along k.
_ROWS: dict[int, list[tuple[float, tuple[int, int, int, int, int]]]] = {
    1: [(math.inf, (1, 1, 16, 1, 2))],
    4: [(264, (1, 2, 8, 1, 2)), (400, (1, 1, 8, 1, 2)), (math.inf, (2, 1, 8, 1, 2))],
    8: [(264, (1, 2, 8, 1, 2)), (math.inf, (1, 2, 4, 1, 2))],
    16: [(264, (1, 2, 8, 1, 2)), (math.inf, (2, 2, 4, 1, 2))],
}
# Of dense weights that lie along their rows, of which a warp has 64: for up to so many row tiles of 64, (warps along N,
# warps along K, blocks along K, steps in flight).
_COLUMNS: list[tuple[float, tuple[int, int, int, int]]] = [
    (66, (1, 8, 2, 1)),
    (132, (1, 8, 1, 1)),
    (math.inf, (2, 4, 2, 1)),
]
MANY_COLUMNS = 256
"""Row tiles of 64 from which on ``dense``, through shared memory, has blocks enough and is the faster one."""
# For up to so many tokens: (what a lane takes of a tile, warps along N, along K, blocks along K, tiles in flight).
_STREAM: dict[int, tuple[int, int, int, int, int]] = {
    1: (4, 1, 8, 1, 2),
    4: (4, 4, 4, 1, 2),
    8: (4, 4, 2, 1, 2),
    16: (4, 8, 1, 2, 2),
}
OUTER_RUN, OUTER_WARPS, OUTER_SPLIT = 8, 8, 8
"""Of the ``stream_outer`` mainloop: k's of a tile, warps and blocks along K, these for few tokens or few tiles."""


def _dense_kinds(problem: Problem) -> tuple[set[str], int]:
    """How all dense weights lie, and by how many elements all of them may be read at once."""
    weights = [
        (layout.operands[index], layout.units[index])
        for body, layout in zip(problem.bodies, problem.layouts, strict=True)
        for contraction in body.contractions
        for index in contraction.weight
    ]
    return {kind for kind, _ in weights}, min(unit for _, unit in weights)


def rows(problem: Problem) -> GemmSchedule | None:
    """For few rows of x and weights that are contiguous along one dimension, all the same one, 16 bytes by 16 bytes."""
    kinds, unit = _dense_kinds(problem)
    along_k = kinds == {"k"}
    units = [problem.layouts[0].length_unit] if along_k else [layout.columns_unit for layout in problem.layouts]
    if problem.rows > STREAMED_ROWS or kinds not in ({"k"}, {"outer"}) or min(unit, *units) < 8:
        return None
    tokens = next(most for most in _ROWS if problem.rows <= most)
    count = len(problem.contractions)
    if not along_k:
        tiles = count * sum(-(-columns // 64) for columns in problem.columns)
        if tiles > MANY_COLUMNS and not problem.prologue:
            return None
        warps_n, warps_k, split, stages = next(shape for most, shape in _COLUMNS if tiles <= most)
        warps_k, split = _shared_out(warps_k, split, problem.length // 64)
        return GemmSchedule("columns", tokens, 64 * warps_n, 64 * warps_k, warps_n * warps_k, stages, split)
    tiles = count * sum(-(-columns // 16) for columns in problem.columns)
    row_tiles, warps_n, warps_k, split, stages = next(shape for most, shape in _ROWS[tokens] if tiles <= most)
    row_tiles = max(1, row_tiles // count)
    warps_k, split = _shared_out(warps_k, split, problem.length // 64)
    return GemmSchedule("rows", tokens, 16 * row_tiles * warps_n, 64 * warps_k, warps_n * warps_k, stages, split)


def _shared_out(warps_k: int, split: int, steps: int) -> tuple[int, int]:
    """As many warps and blocks along K as there are steps, at most."""
    while warps_k * split > max(1, steps):
        warps_k, split = (warps_k, split // 2) if split > 1 else (warps_k // 2, split)
    return warps_k, split


def stream(problem: Problem) -> GemmSchedule | None:
    """For few rows of x and weights that are contiguous along one dimension, all the same one."""
    if problem.quantized or problem.rows > STREAMED_ROWS:
        return None
    kinds, unit = _dense_kinds(problem)
    if kinds not in ({"k"}, {"outer"}):
        return None
    tokens = next(most for most in _STREAM if problem.rows <= most)
    run, warps_n, warps_k, split, stages = _STREAM[tokens]
    sums = STREAM_SUMS // (len(problem.contractions) * tokens * (item_size(problem.dtype) // 4))
    if kinds == {"k"}:
        run = max(1, min(run, sums))
        vector = min(unit, problem.layouts[0].length_unit)
        warps_k, split = _shared_out(warps_k, split, problem.length // (32 * vector))
        return GemmSchedule(
            "stream", tokens, run * warps_n, 32 * vector * warps_k, warps_n * warps_k, stages, split, steps=vector
        )
    vector = max(1, min(unit, sums, *(layout.columns_unit for layout in problem.layouts)))
    tiles = sum(-(-columns // (32 * vector)) for columns in problem.columns)
    split = OUTER_SPLIT if tokens <= 4 or tiles < 132 else 1
    warps_k, split = _shared_out(OUTER_WARPS, split, problem.length // OUTER_RUN)
    return GemmSchedule("stream_outer", tokens, 32 * vector, OUTER_RUN * warps_k, warps_k, 1, split, steps=vector)


def prologue(computed: Prologue, target: Target) -> Decision:
    """Where a launch of its own and a temporary cost more than computing it again in every block along N."""
    if computed.kept:
        return Decision(False, "it is a result too")
    if computed.rows > STREAMED_ROWS:
        return Decision(False, f"above {STREAMED_ROWS} rows tiles read it by the copy engine, and are many")
    blocks = -(-computed.columns // _block_rows(computed))
    dear = sum(operation not in CHEAP for operation in computed.operations)
    microseconds = computed.rows * computed.length * blocks * (CHEAP_COST + DEAR_COST * dear)
    if microseconds > LAUNCH_MICROSECONDS:
        return Decision(False, f"{blocks} blocks would compute it again, for longer than a launch of its own takes")
    return Decision(True, f"that {blocks} blocks compute it costs less than a launch of its own")


def _block_rows(computed: Prologue) -> int:
    """Rows of a weight that a block has for few rows of x."""
    tokens = next(most for most in _MMA if computed.rows <= most)
    tiles = -(-computed.columns // 16)
    if computed.dtype in ("float32", "float64"):
        return _STREAM[tokens][0] * _STREAM[tokens][1] if computed.format is None else 64
    table: Mapping[int, Sequence[tuple[float, tuple[int, ...]]]] = _ROWS if computed.format is None else _MMA
    row_tiles, warps_n, *_ = next((shape for most, shape in table[tokens] if tiles <= most), _MMA_MORE[tokens])
    return 16 * row_tiles * warps_n


def has_clusters(target: Target) -> bool:
    return int(target.arch.removeprefix("sm_").rstrip("af")) >= 90
