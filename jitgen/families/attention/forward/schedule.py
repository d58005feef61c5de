"""Chooses how an attention kernel walks its rows and keys: pure functions from layout, sizes and target to numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jitgen.device import Device
from jitgen.families.attention.forward import decode
from jitgen.families.attention.forward.claim import decide, fusion_of, has_exponentials
from jitgen.families.attention.forward.layout import KEYS, PACKED_ROWS
from jitgen.families.attention.forward.match import matched, row_sources, row_values
from jitgen.families.attention.rule.blocks import block_of, most_rows
from jitgen.families.attention.rule.layout import SOURCES
from jitgen.families.attention.rule.schedule import TritonTiles
from jitgen.families.family import Problem, SizeBuckets
from jitgen.ir import symbols
from jitgen.ir.graph import Builder, Graph, Node, topological
from jitgen.ir.index import Index
from jitgen.ir.nodes import VIEW
from jitgen.ir.program import plain
from jitgen.ir.views import Mover
from jitgen.schedule.declared import DeclaredSchedule
from jitgen.spec import digest

FEW_ROWS = 8
"""Rows that share keys up to which a CPU thread has the elements of a key in the lanes of its vectors, and not rows: a
vector of AVX2 has so many floats."""
SPLIT_ROWS = 16
"""Rows that share keys, up to which keys are split among programs: one block of rows has them all."""
SPLIT_TASKS = (31, 127)
"""Tasks up to which keys are split into 16 and 4 ranges."""
CLUSTER_TASKS = 8
"""Tasks beyond which a cluster for each of them occupies enough of a GPU."""
CUDA_SPLITS, TILE_SPLITS = 32, 4
"""Ranges of the keys in CUDA, of eight tasks on some 130 multiprocessors: of which each holds three blocks of up to
``SPLIT_ROWS`` rows, or one block of more, with seven others in a cluster."""
SPLIT_KEYS = (511, 4095)
"""Keys up to which they are not split, and split into 4 ranges."""


@dataclass(frozen=True)
class CpuSchedule(DeclaredSchedule):
    """Schedules a CPU.

    Attributes:
        path: ``"tiles"``: lanes are rows; ``"few"``: lanes are elements of a key.
    """

    sentence = ("{lanes} in the lanes of vectors",)
    path: str

    @property
    def lanes(self) -> str:
        return "rows" if self.path == "tiles" else "few rows: keys"


@dataclass(frozen=True)
class TritonSchedule(TritonTiles):
    """Schedules Triton.

    Attributes:
        block_d, block_e: powers of two that D and E fit into.
        even_d, even_e: whether D and E are these.
    """

    sentence = (
        "{block_m} rows a program, tiles of {block_n} keys, {warps} warps, {stages} stages",
        *TritonTiles.shared_words,
    )
    block_d: int
    block_e: int
    even_d: bool
    even_e: bool


def candidates(problem: Problem, device: Device) -> Sequence[Any]:
    """Returns the schedule that the rule of ``device``'s dialect has for ``problem``."""
    (body,), (layout,), (geometry,) = problem.kernel.bodies, problem.layouts, problem.geometries
    if not device.is_gpu:
        return (CpuSchedule("few" if device.rows(geometry.task_rows) <= FEW_ROWS else "tiles"),)
    if device.dialect == "cuda":
        from jitgen.families.attention.forward import wgmma

        return wgmma.candidates(body, layout, geometry, device.has_tensor_maps)
    value = body.contractions[1]
    deep, wide = map(block_of, (geometry.depth, geometry.width))
    # As wide as tiles and sums of a program fit shared memory and registers together.
    is_float32 = value.dtype == "float32"
    large = max(deep, wide) * (2 if is_float32 else 1)
    rows, keys = (128, 64) if large <= 128 else (64, 64) if large <= 256 else (32, 32) if large <= 512 else (16, 16)
    rows = min(rows, block_of(device.rows(geometry.task_rows)))
    streamed = zip(layout.operands, body.operands, strict=True)
    tiles = [
        ("computed" if operand.kind in SOURCES else kind, operand.dtype)
        for kind, operand in streamed
        if operand.kind in KEYS
    ]
    rows = most_rows(rows, tiles, layout.unit, device)
    # Products of float32 are multiplications unrolled over a thread's share of the tile: eight warps halve what ptxas
    # gets, and Triton's compile of heads of 80 went from 20 s of processor time to 9 (Triton 3.9).
    many_warps = rows >= (64 if is_float32 else 128) and large >= 128
    return (
        TritonSchedule(
            deep,
            wide,
            deep == geometry.depth,
            wide == geometry.width,
            block_m=rows,
            block_n=keys,
            splits=value.k_splits,
            warps=8 if many_warps else 4,
            stages=2 if large > 256 else 3,
            wide=layout.wide,
        ),
    )


def splits(tasks: int, rows: int, keys: int, dialect: str) -> int:
    """Returns into how many ranges the keys are cut if few programs would walk many keys: a GPU has some hundred
    programs at once. ``tasks`` have keys of their own, which their ``rows`` share. The bounds are those of ``buckets``.
    In CUDA the blocks of a cluster share keys too, so that this is for the fewest tasks."""
    if dialect == "cuda":
        if tasks > CLUSTER_TASKS or keys <= SPLIT_KEYS[1] or rows > PACKED_ROWS:
            return 1
        return CUDA_SPLITS if rows <= SPLIT_ROWS else TILE_SPLITS
    if rows > SPLIT_ROWS or tasks > SPLIT_TASKS[-1] or keys <= SPLIT_KEYS[0]:
        return 1
    return 4 if tasks > SPLIT_TASKS[0] or keys <= SPLIT_KEYS[1] else 16


def facts(problem: Problem, device: Device) -> dict[str, Any] | None:
    """Returns the facts by which measured choices tell attention apart: what is computed, where its operands lie, the
    sizes of heads, and the upper ends of the buckets of rows and of keys (0 beyond the last). None where a row has the
    same bits for every number of rows."""
    if device.batch_invariant:
        return None
    (layout,), (geometry,) = problem.layouts, problem.geometries
    of_rows, of_keys, _ = _ends(device)
    return {
        "kernel": problem.kernel.identity,
        "layout": digest(plain(layout)),
        "depth": geometry.depth,
        "width": geometry.width,
        "rows": next((end for end in of_rows if geometry.rows <= end), 0),
        "keys": next((end for end in of_keys if geometry.keys <= end), 0),
    }


def buckets(graph: Graph, environment: Mapping[str, Any], device: Device) -> list[SizeBuckets]:
    """Returns the rows of each attention that is one kernel: few of them have another one. On a GPU also its keys and
    tasks."""
    mover = Mover(Builder())
    if not has_exponentials(graph.results, mover):
        return []
    from jitgen.families.attention.forward.spellings import respelt

    buckets_ = []
    images = respelt(graph.results, mover)
    index = Index(images[id(node)] for node in graph.results)
    for node in index.order:
        attention = matched(node)
        if attention is None or not decide(fusion_of(attention, index, mover).at(environment), device).fused:
            continue
        *lead, rows, keys = attention.scores.shape
        ends, of_keys, of_tasks = _ends(device)
        computed = {id(inner) for inner in (attention.result, attention.product, *row_sources(row_values(attention)))}
        inside = [inner for inner in topological(graph.results) if id(images[id(inner)].under_views) in computed]
        shared = _heads_that_share(attention.product.inputs[1], lead, keys, environment)
        of_rows = ends if device.dialect == "cuda" else _of_packed(ends, shared)  # CUDA's are of one head's rows
        if of_keys:  # which few rows of a head split
            of_rows = tuple(sorted({*of_rows, SPLIT_ROWS}))
        buckets_.append(SizeBuckets(rows, of_rows, inside=tuple(inside)))
        buckets_.append(SizeBuckets(keys, of_keys))
        buckets_.append(SizeBuckets(symbols.product(lead), tuple(end * shared + shared - 1 for end in of_tasks)))
    return buckets_


def _of_packed(ends: Sequence[int], shared: int) -> tuple[int, ...]:
    """Returns the upper ends of the buckets of rows of one head where those of rows that share keys are ``ends``: the
    rows of ``shared`` heads are packed up to ``PACKED_ROWS``."""
    packed = {min(end // shared, PACKED_ROWS) for end in ends} | {PACKED_ROWS} if shared > 1 else set()
    return tuple(sorted(packed - {0} | {end for end in ends if shared == 1 or end > PACKED_ROWS}))


def _heads_that_share(key: Node, lead: Sequence[Any], keys: Any, environment: Mapping[str, Any]) -> int:
    """Returns how many of the batch and heads ``lead`` share each of the matrices of keys that ``key`` repeats."""
    sizes, node = [], key
    while True:
        sizes.append(symbols.evaluate(symbols.product(node.shape), environment))
        if node.kind is not VIEW and not node.kind.is_pointwise:
            break
        node = max(node.inputs, key=lambda input_: symbols.evaluate(symbols.product(input_.shape), environment))
    repeated = math.prod(symbols.evaluate(size, environment) for size in (*lead, keys, key.shape[-1]))
    return max(repeated // max(min(sizes), 1), 1) if len(sizes) > 1 else 1


def _ends(device: Device) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Returns the upper ends of the buckets of rows, of keys and of tasks."""
    if not device.is_gpu:
        return (FEW_ROWS, PACKED_ROWS), (), ()
    if device.dialect == "cuda":
        from jitgen.families.attention.forward import resident, wgmma

        of_keys = (
            *sorted({*resident.TILES, *wgmma.SHORT_TILES, decode.SHORT_KEYS}),
            wgmma.MEDIUM_KEYS,
            *SPLIT_KEYS[1:],
        )
        return (*wgmma.FEW_ROWS[1:], 128, 256, wgmma.MEDIUM_ROWS), of_keys, (CLUSTER_TASKS,)
    return (16, 32, 64), SPLIT_KEYS, SPLIT_TASKS
