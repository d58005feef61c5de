"""Chooses a product's mainloop and tiles: candidates and their costs, by the rules of each dialect.

``Problem`` is all that a rule (``schedules/<dialect>.py``) may look at, and it returns schedules of ``mainloops.py``. A
rule sees the bucket of a call's rows and not the rows themselves, so that one set of weights has at most eight
schedules, and a few kernels compute every number of rows.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from jitgen.device import Device
from jitgen.families.family import Question, SizeBuckets
from jitgen.families.gemm.claim import Prologue
from jitgen.families.gemm.groups import Groups
from jitgen.families.gemm.layout import BY_ROWS, GemmGeometry, GemmLayout
from jitgen.families.gemm.mainloops import GemmSchedule, TritonMainloop
from jitgen.families.gemm.matrices import batch_rank
from jitgen.families.gemm.tile_times import sampled_rows
from jitgen.ir import symbols
from jitgen.ir.body import Body, Contraction
from jitgen.ir.graph import Graph, topological
from jitgen.ir.nodes import GROUPED, PRODUCTS
from jitgen.ir.program import Decision, Kernel
from jitgen.spec import Target

ROW_BUCKETS = (1, 8, 16, 64, 192, 512, 1536)
"""Upper ends of the buckets of M, in rows. Rows beyond the last end are one bucket more.

Of the ends that were compared by the models of ``wgmma_tiles`` on random M, N and K, tiles chosen for these buckets
lose the least against tiles chosen for each M."""

MOST_ROWS = 4096
"""The rows up to which the tiles of the last bucket are chosen."""

MATRIX_BUCKETS = (1, 8, 32, 128, 512)
"""Upper ends of the buckets of a batch, in matrices. Batches beyond the last end are one bucket more."""

ID_BUCKETS = (1, 2, 4, 6, 8, 12, 32)
"""The same of rows multiplied by ids, a matrix for each. Most are the experts of one token, an even number, which tiles
are chosen for: the upper end."""

DIALECTS_WITH_SPLIT_K = ("triton", "cuda")
"""Dialects whose rule may split K over a temporary (``k_splits``). The cuda dialect splits K within a cluster of blocks
where that is enough (``cluster_k_splits``)."""


@dataclass(frozen=True)
class Problem:
    """Holds what a dialect's rule may decide by.

    Attributes:
        rows: the upper end of the call's bucket of M, so that a rule cannot distinguish two calls of one bucket; for
            the last bucket ``MOST_ROWS``.
        fewest_rows, fewest_matrices: the lower ends of the buckets.
        columns: N of each region.
        length: K.
        bodies: the regions. Their contractions agree in everything but the weight and its N.
        layouts: of the regions.
        wide: whether indices are 64-bit.
        device: what the kernel is for.
        matrices: the upper end of the bucket of the batch's number of matrices; 1 without a batch. Of groups of rows,
            of those that may have some.
        group_count: the number of groups of rows; 1 where these are not grouped.
    """

    rows: int
    columns: tuple[int, ...]
    length: int
    bodies: tuple[Body, ...]
    layouts: tuple[GemmLayout, ...]
    wide: bool
    device: Device
    matrices: int = 1
    fewest_rows: int = 1
    fewest_matrices: int = 1
    group_count: int = 1

    @property
    def grouping(self) -> str:
        """Returns how rows, or K, are divided among groups (``Contraction.grouping``); ``rows`` and ``fewest_rows`` are
        then those of an average group."""
        return self.contractions[0].grouping

    @property
    def groups(self) -> int:
        """Returns the number of groups of rows that may have some; 1 where rows are not grouped."""
        return self.matrices if self.grouping in BY_ROWS else 1

    @property
    def uneven(self) -> bool:
        """Returns whether tiles are chosen for groups of uneven sizes: those of quantised weights. Tiles of others are
        chosen as if all groups had as many rows, since no other choice was timed."""
        return self.grouping in BY_ROWS and self.quantized

    @property
    def divisions(self) -> Sequence[Groups]:
        """Returns divisions of rows among groups, of numbers of rows of the bucket; none where rows are not grouped."""
        if self.grouping not in BY_ROWS:
            return ()
        if not self.uneven:
            averages = sampled_rows(-(-self.rows // 4), self.rows)
            return [Groups(rows * self.matrices, self.matrices, even=True) for rows in averages]
        fewest, most = self.group_count * (fewest_rows(self.rows) - 1) + 1, self.group_count * self.rows
        if self.rows == 1:  # on average
            fewest, most = self.fewest_matrices, self.matrices
        return [Groups(rows, self.group_count) for rows in sampled_rows(fewest, most)]

    @property
    def contractions(self) -> tuple[Contraction, ...]:
        """Returns the contractions of one region."""
        return self.bodies[0].contractions

    @property
    def target(self) -> Target:
        return self.device.target

    @property
    def dtype(self) -> str:
        """Returns the activation's dtype."""
        return self.contractions[0].dtype

    @property
    def prologue(self) -> bool:
        """Returns whether the kernel computes the activation while it reads it."""
        return self.contractions[0].activation is None

    @property
    def quantized(self) -> bool:
        """Returns whether the weights are quantised."""
        return self.contractions[0].format is not None


def matrix_buckets(grouping: str) -> tuple[int, ...]:
    """Returns the upper ends of the buckets of the number of matrices of a batch, or of groups of rows."""
    return ID_BUCKETS if grouping == "ids" else MATRIX_BUCKETS


def bucket(rows: int) -> int:
    """Returns the upper end of the bucket of M that ``rows`` is in; for the last bucket ``MOST_ROWS``.

    A call without rows launches nothing. It is put into the bucket of two rows, the fewest that a trace has a symbol
    for, so that no kernel is compiled for it alone.
    """
    return next((end for end in ROW_BUCKETS if (rows or 2) <= end), MOST_ROWS)


def fewest_rows(rows: int) -> int:
    """Returns the lower end of the bucket of M that ``rows`` is in."""
    return 1 + max((end for end in ROW_BUCKETS if end < (rows or 2)), default=0)


def problem(
    kernel: Kernel, layouts: Sequence[GemmLayout], geometries: Sequence[GemmGeometry], device: Device
) -> Problem:
    """Describes the problem that the schedule of ``kernel`` is chosen for."""
    first = geometries[0]
    matrices, ends = device.rows(first.matrices) if first.matrices > 1 else 1, matrix_buckets(first.grouping)
    rows = first.rows
    if first.grouping in BY_ROWS:
        rows = 1 if first.grouping == "ids" else -(-first.rows // max(first.group_count, 1))
        matrices = min(first.group_count, first.rows)
    return Problem(
        rows=bucket(device.rows(rows)),
        columns=tuple(geometry.columns for geometry in geometries),
        length=first.length,
        bodies=kernel.bodies,
        layouts=tuple(layouts),
        wide=any(layout.wide for layout in layouts),
        device=device,
        matrices=next((end for end in ends if matrices <= end), 2 * ends[-1]),
        fewest_rows=1 if device.batch_invariant or first.grouping else fewest_rows(rows),
        fewest_matrices=1 + max((end for end in ends if end < matrices), default=0),
        group_count=max(1, first.group_count),
    )


def candidates(problem: Problem, device: Device) -> list[GemmSchedule]:
    """Lists the schedules that the rules of ``device``'s dialect have for ``problem`` (``schedules/<dialect>.py``).

    Of those that split K over a temporary these are the ones with the ``k_splits`` of the kernel's contractions, which
    was decided before (``split_k.py``); where it was not left to the rules, every one has it.
    """
    schedules: list[GemmSchedule] = _rules(device).candidates(problem)
    splits = problem.contractions[0].k_splits
    split = [
        schedule for schedule in schedules if not isinstance(schedule, TritonMainloop) or schedule.k_splits == splits
    ]
    return split or [
        replace(schedule, k_splits=splits) for schedule in schedules if isinstance(schedule, TritonMainloop)
    ]


def facts(problem: Problem, device: Device) -> dict[str, Any]:
    """Returns the facts by which measured choices tell products apart. Epilogues are left out, which hardly change
    which tiles are best, but for those that quantise blocks of columns, which tiles must have whole.

    ``rows`` and ``matrices`` are upper ends of buckets. ``weight`` is a format, or for a dense weight its layout: ``k``
    (contiguous along K) or ``outer`` (along N). ``k_splits`` is a fact only of a product whose K is split over a
    temporary, which was decided before. ``cutlass`` is one of ``backend="cutlass"``, whose candidates are others.
    """
    first, layout = problem.contractions[0], problem.layouts[0]
    split = {"k_splits": first.k_splits} if first.k_splits > 1 else {}
    return (
        split
        | {
            "rows": problem.rows,
            "columns": list(problem.columns),
            "length": problem.length,
            "matrices": problem.matrices,
            "dtype": problem.dtype,
            "weight": first.format or layout.operands[first.weight[0]],
            "group_size": first.group_size,
            "contractions": len(problem.contractions),
            "wide": problem.wide,
        }
        | ({"grouping": problem.grouping} if problem.grouping else {})
        | ({"quantises": True} if problem.bodies[0].has_blocks else {})
        | ({"cutlass": True} if device.uses_cutlass else {})
    )


def cost(problem: Problem, candidate: GemmSchedule, device: Device) -> float:
    """Estimates what candidates are compared by, in a unit of the dialect: microseconds on a GPU, how often weights are
    decoded on a CPU. It is 0 for mainloops without a model, of which the first candidate is taken."""
    estimated: float = _rules(device).cost(problem, candidate)
    return estimated


def may_split_k(rows: int, columns: Sequence[int], length: int, device: Device) -> bool:
    """Returns whether ``k_splits`` is worth asking, which takes longer: False for most products that have tiles
    enough."""
    may: bool = _rules(device).may_split_k(bucket(device.rows(rows)), columns, length, device)
    return may


def k_splits(problem: Problem, device: Device) -> int:
    """Returns how many ranges K should be split into over a temporary: 1 for none. Each range has at least one
    iteration."""
    splits: int = _rules(device).k_splits(problem)
    return splits


def decide(question: Question, device: Device) -> Decision:
    """Decides by the rule of ``device``'s dialect whether a product computes its activation while it reads it. As for a
    schedule, the answer is the same for all rows of one bucket. Other questions answer themselves."""
    if not isinstance(question, Prologue):
        return question.decide(device)
    decision: Decision = _rules(device).prologue(replace(question, rows=bucket(device.rows(question.rows))), device)
    return decision


def buckets(graph: Graph, environment: Mapping[str, Any], device: Device) -> list[SizeBuckets]:
    """Returns M of each product of ``graph``; of groups of rows that of an average group. Of a batch of products also
    their number, by which GPU schedules differ, and N and K: the second operand is then no weight of a fixed size."""
    buckets_ = []
    for product in topological(graph.results):
        if product.kind in PRODUCTS:
            batch = batch_rank(product)
            rows = symbols.product(product.shape[batch:-1])
            if product.kind is GROUPED and len(product.inputs[1].shape) == 3:
                groups = product.inputs[1].shape[0]
                if device.is_gpu and isinstance(groups, int):  # fewer rows than groups are in buckets of their own
                    ends = tuple(end for end in matrix_buckets(product.attrs.by) if end < groups)
                    buckets_.append(SizeBuckets(rows, ends, node=product))
                rows = symbols.floordiv(symbols.add(rows, symbols.sub(groups, 1)), groups or 1)  # type: ignore[assignment]
            buckets_.append(SizeBuckets(rows, ROW_BUCKETS, node=product))
            if batch:
                matrices = symbols.product(product.shape[:batch])
                buckets_.append(SizeBuckets(matrices, MATRIX_BUCKETS if device.is_gpu else (), node=product))
                lengths = product.shape[-1], product.inputs[0].shape[-1]
                buckets_ += [SizeBuckets(length, node=product) for length in lengths]
    return buckets_


def _rules(device: Device) -> ModuleType:
    rules = "cutlass" if device.uses_cutlass else device.dialect
    return importlib.import_module(f"jitgen.families.gemm.schedules.{rules}")
