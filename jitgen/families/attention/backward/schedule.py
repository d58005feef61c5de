"""Chooses how a kernel of attention's backward walks its tiles: pure functions from layout, sizes and target to
numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jitgen.device import Device
from jitgen.families.attention.backward.claim import decide, fusion_of, may_have_streamed
from jitgen.families.attention.rule.blocks import MMA_SYNC_ROWS, block_of, most_rows
from jitgen.families.attention.rule.layout import results_of
from jitgen.families.attention.rule.schedule import TritonTiles
from jitgen.families.family import Problem, SizeBuckets
from jitgen.ir import symbols
from jitgen.ir.graph import Builder, Graph, topological
from jitgen.ir.index import Index
from jitgen.ir.views import Mover
from jitgen.schedule.declared import DeclaredSchedule

TRITON_ROWS = (16, 32, 64)
"""Upper ends of the buckets of rows in Triton: a block is a power of two, 128 rows at most."""


@dataclass(frozen=True)
class CpuSchedule(DeclaredSchedule):
    """Schedules a CPU: tiles of ``rows`` by ``streamed`` products, which a thread has in its cache."""

    sentence = ("tiles of {rows} rows by {streamed}",)
    rows: int = 64
    streamed: int = 64


@dataclass(frozen=True)
class TritonSchedule(TritonTiles):
    """Schedules Triton.

    Attributes:
        depths, widths: powers of two that the depths of products and the widths of results fit into.
        even: whether all of them are these.
    """

    sentence = (
        "{block_m} rows a program, {block_n} streamed at once, {warps} warps, {stages} stages",
        *TritonTiles.shared_words,
    )
    depths: tuple[int, ...]
    widths: tuple[int, ...]
    even: bool


def candidates(problem: Problem, device: Device) -> Sequence[Any]:
    """Returns the schedule that the rule of ``device``'s dialect has for ``problem``."""
    (body,), (layout,), (geometry,) = problem.kernel.bodies, problem.layouts, problem.geometries
    if not device.is_gpu:
        return (CpuSchedule(),)
    if device.dialect == "cuda":
        from jitgen.families.attention.backward import wgmma_schedule

        return wgmma_schedule.candidates(body, layout, geometry, device)
    depths, widths = (tuple(map(block_of, sizes)) for sizes in (geometry.depths, geometry.widths))
    results = len(results_of(body))
    wide = any(contraction.dtype == "float32" for contraction in body.contractions)
    large = max(*depths, *widths) * (2 if wide else 1)
    rows, streamed, warps, stages = tiles_of(large, results, wide)
    streamed_operands = [contraction.weight[0] for contraction in body.contractions]
    tiles = [(layout.operands[index], body.operands[index].dtype) for index in streamed_operands]
    rows = most_rows(min(rows, block_of(device.rows(geometry.rows))), tiles, layout.unit, device)
    warps = warps if rows > MMA_SYNC_ROWS else min(warps, 4)
    even = depths == geometry.depths and widths == geometry.widths
    return (
        TritonSchedule(
            depths, widths, even, block_m=rows, block_n=streamed, warps=warps, stages=stages, wide=layout.wide
        ),
    )


def tiles_of(large: int, results: int, is_float32: bool = False) -> tuple[int, int, int, int]:
    """Returns (rows, streamed rows, warps, stages) for operands that are at most ``large`` 16-bit elements wide. A
    block's sums and its operands are in registers and shared memory together, two of each where there are two results.
    Products of float32 are unrolled multiplications: tiles of 64 x 64 took 54 s to compile, of 32 x 32 a third of that
    (Triton 3.6, heads of 64)."""
    if is_float32 and large <= 256:
        return 32, 32, 4, 2
    if large <= 64:
        return (128, 64, 8, 3) if results > 1 else (128, 64, 4, 3)
    if large <= 128:
        return 64, 64, 4, 2
    if large <= 256:
        return (64, 32, 8, 2) if results == 1 else (32, 32, 4, 2)
    return 16, 16, 4, 1


def buckets(graph: Graph, environment: Mapping[str, Any], device: Device) -> list[SizeBuckets]:
    """Returns the rows of each result, of which few have smaller blocks in Triton, the streamed rows and the
    matrices."""
    if not may_have_streamed(graph.results):
        return []
    from jitgen.families.attention.backward.match import oriented, streamed_in

    images = oriented(graph.results, Mover(Builder()))
    buckets_ = []
    for gradient in streamed_in(Index(images[id(node)] for node in graph.results)):
        if not decide(fusion_of(gradient).at(environment), device).fused:
            continue
        computed = {id(gradient.result), *map(id, gradient.products)}
        inside = [inner for inner in topological(graph.results) if id(images[id(inner)].under_views) in computed]
        *lead, rows, streamed = gradient.function.shape
        buckets_.append(SizeBuckets(rows, TRITON_ROWS if device.dialect == "triton" else (), inside=tuple(inside)))
        buckets_ += [SizeBuckets(streamed), SizeBuckets(symbols.product(lead))]
    return buckets_
