"""Claims rows of which few ranks are selected, with reductions of the row before, or of the ranks behind, and any ranks
with pointwise work behind.

On a GPU a warp takes a row of up to ``MOST_SELECTED_FROM`` elements: each lane has some of them in registers, the least
or greatest of all lanes is found once for each rank, and lane r has rank r then. So what is reduced over the row, and
over the ranks, is reduced by shuffles. On a CPU a thread walks the row and the ranks in turn. Groups of the row that
are kept (``limits.py``) are found before, and elements of the row are taken at the ranks' places behind: computed again
there, from operands that are in a cache. Pointwise work alone is claimed behind any ranks on a GPU, where the block
that sorts a row, or merges its chunks, computes it as it stores a rank, and behind many ranks on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jitgen.device import Device
from jitgen.families.family import Partition, Question
from jitgen.families.rows.sort import NAME
from jitgen.families.rows.sort.layout import MOST_ELEMENTS
from jitgen.families.rows.sort.limits import alone
from jitgen.families.short_rows import REDUCED
from jitgen.ir import symbols
from jitgen.ir.analysis import in_shape, is_taken, rewritten, rewritten_graph
from jitgen.ir.body import Body, compute_dtype
from jitgen.ir.graph import Graph, Node, topological, walked
from jitgen.ir.nodes import COUNTED, GATHER, LIMITED, REDUCE, SORT, TAKEN, VIEW
from jitgen.ir.program import Decision
from jitgen.ir.regions import Region, Store, row_axes
from jitgen.ir.views import Mover

DIALECTS = ("cuda", "cpp")
"""Dialects whose kernels select ranks."""
MOST_SELECTED_FROM = 512
"""Elements of such a row: 16 for each lane."""
MOST_SELECTED = 32
"""Ranks up to the last of those that are selected: each lane has one."""
MANY_RANKS = 256
"""Ranks from which on a thread of a CPU computes pointwise operations of them behind its sort: of 256 to 50,000 ranks
that took 0.72 to 0.84 of the time of two kernels for three results, and 0.90 to 1.03 (0.98 on average) for one. Of
fewer ranks it took 0.80 to 0.98 and, which is why they are left, 0.99 to 1.04 (1.01 on average) for one (AVX-512, one
thread; ``docs/measured/cpu-sort-ranks.json``)."""


@dataclass(frozen=True)
class Selection(Question):
    """Asks whether what sorts a row, or selects ranks of it, computes what is behind as well.

    Attributes:
        length: elements of the row.
        ranks: from the first one up to the last that is asked for.
        reduced: whether the row, or ranks of it, are reduced as well.
        taken: whether elements of a row are taken at the ranks' places.
    """

    placements = ("in one kernel with what is computed before and behind", "in a kernel of their own")
    length: Any
    ranks: Any
    reduced: bool
    taken: bool

    def __str__(self) -> str:
        return f"{self.ranks} ranks of rows of {self.length} elements"

    def decide(self, device: Device) -> Decision:
        if not device.is_gpu and not self.reduced and self.ranks >= MANY_RANKS:
            return Decision(True, "a thread goes along them, and vectors of ranks are worth it")
        if are_selected(self.length, self.ranks, device):
            return Decision(True, "a warp selects them, a lane for each" if device.is_gpu else "a thread selects them")
        if device.is_gpu and not self.reduced and not (self.taken and self.length > MOST_ELEMENTS[device.dialect]):
            return Decision(True, "it is computed of each rank where that is stored")
        who = "a warp" if device.is_gpu else "a thread"
        return Decision(False, f"{who} selects up to {MOST_SELECTED} of up to {MOST_SELECTED_FROM}")


def are_selected(length: int, ranks: int, device: Device) -> bool:
    """Returns whether the first ``ranks`` of a row are selected one after another."""
    return device.dialect in DIALECTS and length <= MOST_SELECTED_FROM and ranks <= MOST_SELECTED


def with_taken(graph: Graph, mover: Mover, device: Device) -> Graph:
    """Returns ``graph`` with what is gathered at the places of ranks taken from rows that the kernel of the ranks has
    at hand: rows in memory, and those that are computed where it selects ranks; else these would be stored first."""

    def may_be_selected(node: Node) -> bool:
        length, ranks = (symbols.evaluate(operand.shape[-1], mover.environment) for operand in node.inputs[:2])
        if node.inputs[0].is_in_memory:
            return Selection(length, ranks, reduced=False, taken=True).decide(device).fused
        return are_selected(length, ranks, device)

    taken = {node for node in topological(graph.results) if is_taken(node, mover) and may_be_selected(node)}

    def change(node: Node, rebuilt: Node) -> Node:
        if node not in taken:
            return rebuilt
        row, places = rebuilt.inputs
        row = in_shape(row, (*places.shape[:-1], row.shape[-1]), mover)
        return mover.builder.make("taken", (row, places), node.dtype, node.shape, (), node.location)

    return rewritten_graph(graph, mover, change) if taken else graph


def without_taken(node: Node, partition: Partition) -> Node:
    """Returns ``node`` with what is taken at the places of ranks gathered from rows that are stored."""

    def change(_: Node, rebuilt: Node) -> Node:
        if rebuilt.kind is not TAKEN:
            return rebuilt
        row, places = rebuilt.inputs
        row = row if row.is_in_memory else partition.temporaries.materialize(row)
        attrs = (*range(len(row.shape) - 1), -1)
        return partition.mover.builder.make("gather", (row, places), rebuilt.dtype, rebuilt.shape, attrs)

    return rewritten(node, partition.mover, change) if TAKEN in node.kinds else node


def selected(value: Node, position: int, partition: Partition) -> Region | None:
    """Returns the region of ``value``, which is computed of a sort alone, where the sort's kernel computes it; None for
    a plain sort, and for other values."""
    sorts = _sorts_of(value)
    if not sorts:
        return None
    last = len(value.shape) - 1
    first, operand = sorts[0], sorts[0].inputs[0]
    if first.attrs.dim != last or first.shape != value.shape:
        return None
    if any(_order(node) != _order(first) for node in sorts) or not _is_of_ranks(value, first):
        return None
    row = rewritten(operand, partition.mover, lambda _, node: alone(node, partition.mover))
    sources = [node.inputs[0] for node in _above(value) if node.kind in (GATHER, TAKEN)]
    before = [node for node in topological([row, *sources]) if node.kind in (REDUCE, SORT, LIMITED)]
    if value.kind is SORT and not before:
        return None
    if not all(node.kind is LIMITED or _is_over(node, operand) for node in before):
        return None
    if any(LIMITED in node.kinds for node in before if node.kind is not LIMITED):
        return None
    reduced = bool(before) or REDUCE in value.kinds
    asked = Selection(operand.shape[-1], symbols.add(first.attrs.start, first.shape[-1]), reduced, bool(sources))
    if not partition.decide("", asked).fused:
        return None
    kept = {id(node) for node in before}
    memo = {id(operand): partition.temporaries.pointwise(row, kept)}
    for node in _above(value):
        if node.kind in (GATHER, TAKEN):
            source, places = node.inputs
            places = partition.mover.substituted(places, memo)
            source = partition.temporaries.pointwise(source, kept)
            memo[id(node)] = partition.mover.builder.make("taken", (source, places), node.dtype, node.shape)
    whole = partition.mover.substituted(value, memo)
    return Region(NAME, row_axes(operand.shape, 1), (Store(position, whole),))


def sorted_by(region: Region) -> tuple[object, ...]:
    """Returns what a region sorts, and which ranks it stores, or what it counts."""
    value = region.stores[0].value
    if value.kind is COUNTED:
        return value.kind, id(value.inputs[0]), value.attrs.bound
    return _order(_sorts_of(value)[0])


def is_selection(body: Body) -> bool:
    """Returns whether ``body`` does more than to sort elements, or to merge them, and to store ranks."""
    instructions = body.instructions
    stored = (instructions[i.args[0]].op for i in instructions if i.op == "store")
    return any(i.op in ("reduce", "limited") for i in instructions) or any(op not in ("sort", "merge") for op in stored)


def _order(sort: Node) -> tuple[object, ...]:
    return id(sort.inputs[0]), sort.attrs[1:], sort.shape


def _is_of_ranks(value: Node, sort: Node) -> bool:
    """Returns whether ``value`` is computed of ranks of ``sort`` alone, and of what is reduced over these."""
    return all(
        node.kind is SORT
        or node.kind.is_number
        or node.kind.is_pointwise
        or _is_over(node, sort)
        or ((is_taken(node) or node.kind is TAKEN) and node.inputs[1].kind is SORT)
        or (node.kind is VIEW and (node.inputs[0].kind is REDUCE or node.inputs[0].kind.is_number))
        for node in _above(value)
    )


def _above(value: Node) -> Iterator[Node]:
    return walked([value], lambda node: () if node.kind in (SORT, GATHER, TAKEN) else node.inputs)


def _sorts_of(value: Node) -> list[Node]:
    """Returns the sorts whose ranks ``value`` is computed of, or which say where a row is taken."""
    taken = [node.inputs[1] if node.kind is TAKEN or is_taken(node) else node for node in _above(value)]
    return [node for node in taken if node.kind is SORT]


def _is_over(node: Node, rows: Node) -> bool:
    """Returns whether ``node`` reduces the last dimension of values in the shape of ``rows``."""
    if node.kind is not REDUCE or node.inputs[0].shape != rows.shape or node.attrs.dims != (len(rows.shape) - 1,):
        return False
    return node.attrs.kind in REDUCED and compute_dtype(node.dtype) == "float32"
