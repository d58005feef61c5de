"""Claims the launches of users' kernels: one region for all tensors that a launch writes.

Each is stored in a temporary, which the results that are one of them are then. What a launch reads is in memory before,
row-major unless the kernel is told other strides. What it writes holds its base first, which is left to do into the
same memory; where nobody has set its elements, nothing is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jitgen.device import Device
from jitgen.errors import UnsupportedError
from jitgen.families.family import Claim, Partition, Question
from jitgen.families.launch import NAME
from jitgen.ir import symbols
from jitgen.ir.graph import Node, topological
from jitgen.ir.launches import results_of
from jitgen.ir.nodes import INPUT, LAUNCH
from jitgen.ir.program import Decision
from jitgen.ir.regions import Region, Stage, Store, grid_axes
from jitgen.ir.views import contiguous_strides


@dataclass(frozen=True)
class InDialect(Question):
    """Asks whether the kernels of a plan are in the language of a user's kernel."""

    placements = ("launched by the plan", "no kernel of this dialect")
    entry: str
    language: str

    def __str__(self) -> str:
        return f"kernel {self.entry} in {self.language}"

    def decide(self, device: Device) -> Decision:
        """Returns whether they are; another dialect may have it."""
        if device.dialect == self.language:
            return Decision(True, "the plan's kernels are in its language")
        return Decision(False, f"it is written in {self.language}", lacks=True)


def plan(values: Sequence[Node], partition: Partition) -> Sequence[Node]:
    """Stores what launches write in temporaries, those of one launch together."""
    memo: dict[int, Node] = {}
    mover = partition.mover
    for node in topological(values):
        if node.kind is not LAUNCH or id(node) in memo:
            continue
        inputs = [mover.substituted(child, dict(memo)) for child in node.inputs]
        before = results_of(node, node.inputs, mover.builder)
        results = results_of(node, inputs, mover.builder)
        stored = partition.temporaries.materialize_together(results)
        memo |= {id(old): new for old, new in zip(before, stored, strict=True)}
    return [mover.substituted(value, dict(memo)) for value in values] if memo else values


def claim(values: Sequence[Node], partition: Partition) -> Claim:
    """Claims a region for each launch among ``values``; in the others, launches are materialized."""
    rest: list[Node | None] = list(values)
    groups: dict[Any, list[int]] = {}
    for position, node in enumerate(values):
        if node.kind is LAUNCH:
            groups.setdefault((node.inputs, node.attrs._replace(result=-1)), []).append(position)
        elif LAUNCH in node.kinds:
            (rest[position],) = plan([node], partition)
    regions = []
    for positions in groups.values():
        region, bases = _region([(position, values[position]) for position in positions], partition)
        regions.append(region)
        for position, base in zip(positions, bases, strict=True):
            rest[position] = base
    return Claim(regions, rest)


def _region(results: Sequence[tuple[int, Node]], partition: Partition) -> tuple[Region, list[Node | None]]:
    """Makes the region of the results (position, node) of one launch; returns also what each holds before, or None."""
    first = results[0][1]
    attrs = first.attrs
    if [node.attrs.result for _, node in results] != list(attrs.written):
        raise AssertionError("the results of a launch are stored together")
    partition.decide(NAME, InDialect(attrs.kernel[1], attrs.kernel[0]))
    nothing = partition.mover.builder.const(0, "int64")
    inputs = [
        nothing if number in attrs.written else _in_memory(first, number, partition)
        for number in range(len(first.inputs))
    ]
    make = partition.mover.builder.like
    stores = tuple(Store(position, make(node, inputs)) for position, node in results)
    bases = [None if node.attrs.result in attrs.unset else _base(node, partition) for _, node in results]
    return Region(NAME, grid_axes(first.shape), stores, (Stage(NAME),)), bases


def _base(node: Node, partition: Partition) -> Node:
    (base,) = plan([node.inputs[node.attrs.result]], partition)
    return base


def _in_memory(node: Node, number: int, partition: Partition) -> Node:
    """Returns operand ``number`` of the launch ``node`` in memory as the kernel expects it: a tensor or a view of one,
    or a copy.

    Raises:
        UnsupportedError: an argument is not row-major, and the kernel is told none of its strides.
    """
    (operand,) = plan([node.inputs[number]], partition)
    told, memory = node.attrs.strides[number], partition.memory
    if not operand.is_in_memory:
        return partition.materialize(operand)
    lies = memory.strides(operand)
    is_argument = operand.under_views.attrs.number < len(memory.inputs)
    if is_argument:
        memory.depends_on_strides()
    if lies is None:
        return partition.materialize(operand)
    row_major = contiguous_strides(lies.sizes)
    if told is not None:
        expected = tuple(symbols.evaluate(stride, memory.environment) for stride in told)
        if _same(lies.sizes, lies.strides, expected):
            return operand
        assert _same(lies.sizes, row_major, expected), "a launch is told strides that no memory has"
    elif not _same(lies.sizes, lies.strides, row_major) and operand.kind is INPUT and is_argument:
        where = f" at {node.location}" if node.location else ""
        raise UnsupportedError(
            f"the kernel {node.attrs.kernel[1]}{where} gets a tensor of strides {lies.strides}, and is told none of "
            "them; pass it contiguous, or pass its strides"
        )
    return operand if _same(lies.sizes, lies.strides, row_major) else partition.materialize(operand)


def _same(sizes: Sequence[int], strides: Sequence[int], others: Sequence[int]) -> bool:
    """Returns whether elements lie alike by both strides; along a dimension of one element all are alike."""
    pairs = zip(sizes, strides, others, strict=True)
    return 0 in sizes or all(one == other for size, one, other in pairs if size != 1)
