"""Claims the launches of users' kernels: one region for all tensors that a launch writes.

Each is stored in a temporary, which the results that are one of them are then. What a launch reads is in memory before,
row-major unless the kernel is told other strides, or computed where the kernel loads it; what is computed of a result
may be stored in place of it (``fusion.py``). What a launch writes holds its base first, which is left to do into the
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
from jitgen.families.launch.body import launch_of
from jitgen.families.launch.fusion import is_computed_at_loads, is_fused, stored_values
from jitgen.families.launch.joined import joined
from jitgen.ir import symbols
from jitgen.ir.graph import Node, topological
from jitgen.ir.index import Index
from jitgen.ir.launches import results_of
from jitgen.ir.nodes import INPUT, LAUNCH
from jitgen.ir.program import Decision
from jitgen.ir.regions import Region, Stage, Store, grid_axes
from jitgen.ir.views import Strided, contiguous_strides


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
    """Stores what launches write in temporaries, those of one launch together; what is computed of a result in the
    kernel is stored in place of it."""
    order = topological(values)
    if not any(node.kind is LAUNCH for node in order):
        return values
    values = joined(values, partition)
    order = topological(values)
    memo: dict[int, Node] = {}
    index, mover = Index(values), partition.mover
    for node in order:
        if node.kind is not LAUNCH or id(node) in memo:
            continue
        before = results_of(node, node.inputs, mover.builder)
        operands = [_operand(node, number, index, memo, partition) for number in range(len(node.inputs))]
        results = results_of(node, operands, mover.builder)
        stored: dict[Node, Node] = {}
        for old, new in zip(before, results, strict=True):
            for value in stored_values(old, before, index, partition) if old in index.users else [old]:
                computed = mover.substituted(value, memo | {id(old): new})
                stored[value] = _with_tensors(computed, new, partition)
        temporaries = partition.temporaries.materialize_together(list(stored.values()))
        memo |= {id(old): new for old, new in zip(stored, temporaries, strict=True)}
    return [mover.substituted(value, dict(memo)) for value in values]


def _with_tensors(value: Node, result: Node, partition: Partition) -> Node:
    """Returns ``value``, computed of the launch's ``result``, with all else that is not pointwise in memory."""
    memo: dict[int, Node] = {id(result): result}
    for node in topological([value], known=memo):
        if id(node) in memo:
            continue
        rebuilt = partition.mover.substituted(node, dict(memo))
        reads_others = rebuilt.kind.reads_others and not rebuilt.is_in_memory
        memo[id(node)] = partition.materialize(rebuilt) if reads_others else rebuilt
    return memo[id(value)]


def _operand(node: Node, number: int, index: Index, memo: dict[int, Node], partition: Partition) -> Node:
    """Returns operand ``number`` of the launch ``node`` as the kernel gets it: in memory, or computed where it is
    loaded. What is written is left as it is."""
    operand = partition.mover.substituted(node.inputs[number], dict(memo))
    if number in node.attrs.written:
        return operand
    if is_computed_at_loads(node, number, index.users[node.inputs[number]], partition):
        return partition.temporaries.pointwise(operand)
    return _in_memory(node, number, operand, partition)


def claim(values: Sequence[Node], partition: Partition) -> Claim:
    """Claims a region for each launch among ``values``; in the others, launches are materialized."""
    rest: list[Node | None] = list(values)
    groups: dict[Any, list[int]] = {}
    for position, value in enumerate(values):
        if LAUNCH in value.kinds:
            node = launch_of(value)
            key = (node.inputs, node.attrs._replace(result=-1)) if value is node or is_fused(value) else None
            groups.setdefault(key, []).append(position)
    regions = []
    for key, positions in groups.items():
        launches = [launch_of(values[position]) for position in positions]
        if key is None or {node.attrs.result for node in launches} != set(launches[0].attrs.written):
            for position in positions:
                (rest[position],) = plan([values[position]], partition)
            continue
        region, bases = _region([(position, values[position]) for position in positions], partition)
        regions.append(region)
        for position, base in zip(positions, bases, strict=True):
            rest[position] = base
    return Claim(regions, rest)


def _region(results: Sequence[tuple[int, Node]], partition: Partition) -> tuple[Region, list[Node | None]]:
    """Makes the region of the results (position, value) of one launch; returns also what each holds before, or None."""
    first = launch_of(results[0][1])
    attrs, builder = first.attrs, partition.mover.builder
    partition.decide(NAME, InDialect(attrs.kernel.entry, attrs.kernel.language))
    nothing = builder.const(0, "int64")
    inputs = [
        nothing
        if number in attrs.written
        else operand
        if not operand.is_in_memory and LAUNCH not in operand.kinds and operand.kind.is_pointwise
        else _in_memory(first, number, operand, partition)
        for number, operand in enumerate(first.inputs)
    ]
    stores, bases = [], []
    for position, value in results:
        node = launch_of(value)
        stores.append(Store(position, partition.mover.substituted(value, {id(node): builder.like(node, inputs)})))
        is_unset = node.attrs.result in attrs.unset
        bases.append(None if is_unset else _base(node, partition))
    return Region(NAME, grid_axes(first.shape), tuple(stores), (Stage(NAME),)), bases


def _base(node: Node, partition: Partition) -> Node:
    (base,) = plan([node.inputs[node.attrs.result]], partition)
    lies = partition.memory.strides(base) if base.is_in_memory else None
    if lies is not None and not _same(lies.sizes, lies.strides, contiguous_strides(lies.sizes)):
        _refuse_strides(node, base, lies, partition)
    return base


def _in_memory(node: Node, number: int, operand: Node, partition: Partition) -> Node:
    """Returns ``operand``, number ``number`` of the launch ``node``, in memory as the kernel expects it: a tensor or a
    view of one, or a copy.

    Raises:
        UnsupportedError: an argument is not row-major, and the kernel is told none of its strides.
    """
    told, memory = node.attrs.strides[number], partition.memory
    if not operand.is_in_memory:
        return partition.materialize(operand)
    lies = memory.strides(operand)
    if _is_argument(operand, partition):
        memory.depends_on_strides()
    if lies is None:
        return partition.materialize(operand)
    row_major = contiguous_strides(lies.sizes)
    if told is not None:
        expected = symbols.evaluated(told, memory.environment)
        if _same(lies.sizes, lies.strides, expected):
            return operand
        assert _same(lies.sizes, row_major, expected), "a launch is told strides that no memory has"
    elif not _same(lies.sizes, lies.strides, row_major):
        _refuse_strides(node, operand, lies, partition)
    return operand if _same(lies.sizes, lies.strides, row_major) else partition.materialize(operand)


def _is_argument(operand: Node, partition: Partition) -> bool:
    base = operand.under_views
    return base.kind is INPUT and base.attrs.number < len(partition.memory.inputs)


def _refuse_strides(node: Node, operand: Node, lies: Strided, partition: Partition) -> None:
    """Raises UnsupportedError if ``operand``, which is not row-major, is an argument or a view of one: the launch
    ``node`` would find other elements than those of the operand."""
    partition.memory.depends_on_strides()
    if _is_argument(operand, partition):
        where = f" at {node.location}" if node.location else ""
        raise UnsupportedError(
            f"the kernel {node.attrs.kernel.entry}{where} gets a tensor of strides {lies.strides}, and is told none of "
            "them; pass it contiguous, or pass its strides"
        )


def _same(sizes: Sequence[int], strides: Sequence[int], others: Sequence[int]) -> bool:
    """Returns whether elements lie alike by both strides; along a dimension of one element all are alike."""
    pairs = zip(sizes, strides, others, strict=True)
    return 0 in sizes or all(one == other for size, one, other in pairs if size != 1)
