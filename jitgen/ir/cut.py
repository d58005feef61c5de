"""A graph cut into kernels: the passes from a traced graph to bodies a dialect can print, in order.

1. ``move``: every view is pushed to the inputs (``ir/views.py``).
2. ``group``: results become regions: of products (``ir/contractions.py``), of row reductions (``ir/rows.py``), and
   pointwise ones, split at concatenations (``ir/regions.py``).
3. ``lower``: regions become kernels of instructions in compute dtypes (``ir/kernels.py``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jitgen.ir import contractions, symbols
from jitgen.ir.contractions import Decision, Prologue
from jitgen.ir.graph import CONTIGUOUS, Builder, Graph, Node, Shape, equal_sizes, topological, under_views
from jitgen.ir.kernels import lower, with_coarse
from jitgen.ir.parts import split_long_rows
from jitgen.ir.program import Alias, Buffer, Kernel, Program
from jitgen.ir.regions import MAX_READS, Region, split
from jitgen.ir.rows import group
from jitgen.ir.symbols import Scalar
from jitgen.ir.views import BARRIERS, Decide, Mover, NotViewable, Strided, apply, contiguous_strides


def _before(prologue: Prologue) -> Decision:
    return Decision(False, "")


def program_of(
    graph: Graph,
    decide: Decide,
    environment: Mapping[str, Any],
    memory: Sequence[Strided],
    prologue: Callable[[Prologue], Decision] = _before,
    given: bool = False,
    row_blocks: int = 1,
) -> Program:
    """The program of ``graph``.

    Args:
        decide: decides (and records) symbolic comparisons where a slice meets a concatenation.
        environment: a value for every symbol, and
        memory: the strides of every input at hand; they only decide which reshapes need a copy first.
        prologue: whether a matmul kernel computes its activation, given at this call's sizes, while it reads it.
        given: whether the caller gives the results' memory, so that a temporary cannot be returned in its place.
        row_blocks: how many blocks of a kernel can share a row; 0 for a CPU's threads, as many as there are. Long rows
            that are too few to keep the device busy are reduced in parts, by kernels of their own.
    """
    return _Cutter(graph, decide, environment, memory, prologue, given, row_blocks).program()


class _Cutter:
    def __init__(
        self,
        graph: Graph,
        decide: Decide,
        environment: Mapping[str, Any],
        memory: Sequence[Strided],
        prologue: Callable[[Prologue], Decision],
        given: bool,
        row_blocks: int,
    ):
        self.graph = graph
        self.builder = Builder()
        self.mover = Mover(self.builder, decide, environment)
        self.environment = environment
        self.memory = memory
        self.prologue, self.given, self.row_blocks = prologue, given, row_blocks
        self.prologues: dict[Prologue, Decision] = {}
        self.held_equal = {g.expr.args for g in graph.guards if g.expr.op == "eq" and g.value is True}
        self.equal: Mapping[str, Scalar] = equal_sizes(graph.guards)
        self.temporaries: list[Node] = []
        self.values: list[Node] = []
        self.reads: dict[Node, frozenset[Node]] = {}
        self.viewable = True

    def program(self) -> Program:
        moved = self._move(self.graph.results)
        updates = list(zip((i for i, _ in self.graph.mutated), moved[len(self.graph.outputs) :], strict=True))
        outputs: list[int | Alias] = []
        results: list[Node] = []
        for node in moved[: len(self.graph.outputs)]:
            alias = _alias(node, updates)
            if alias is not None and alias.movements and self._concrete(node) is None:
                alias = None
            if alias is None and not any(node is result for result in results):
                results.append(node)
            place = next((i for i, result in enumerate(results) if result is node), -1)
            outputs.append(place if alias is None else alias)
        mutated: list[tuple[int, int]] = []
        late: list[Node] = []
        in_place = len(updates) == 1 and not results and self._reads_in_place(*updates[0])
        for index, node in updates:
            mutated.append((index, len(results)))
            results.append(node if in_place else self._materialize(node))
            late += [] if in_place else [node]
        early = len(results) - len(late)
        regions = self._regions(results[:early])
        held = {} if self.given else self._held_by_temporaries(regions)
        if held:
            kept = [position for position in range(len(results)) if position not in held]
            regions = _renumbered(_without(regions, held), [kept.index(p) if p in kept else -1 for p in range(early)])
            outputs = [_placed(output, kept, held) for output in outputs]
            mutated = [(index, kept.index(position)) for index, position in mutated]
            results = [results[position] for position in kept]
            early -= len(held)
        copies = self._viewable(split(results[early:], self.mover, self._materialize))
        stages = self._stages()
        inputs = tuple(Buffer(spec.dtype, spec.shape) for spec in self.graph.inputs)
        temporaries = tuple(Buffer(node.dtype, node.shape) for node in self.values)
        buffers = (*inputs, *temporaries, *(Buffer(node.dtype, node.shape) for node in results))
        shapes = [buffer.shape for buffer in buffers]
        kernels: list[Kernel] = []
        for positions, stage in stages:
            kernels += lower(stage, [len(inputs) + p for p in positions], shapes, self.graph.name, len(kernels))
        first = len(inputs) + len(temporaries)
        kernels += lower(regions, range(first, first + early), shapes, self.graph.name, len(kernels))
        kernels += lower(copies, range(first + early, first + len(results)), shapes, self.graph.name, len(kernels))
        return Program(
            self.graph.name,
            inputs,
            temporaries,
            tuple(Buffer(node.dtype, node.shape, node.attrs == CONTIGUOUS) for node in results),
            tuple(outputs),
            tuple(mutated),
            with_coarse(kernels, buffers, range(len(inputs), first), outputs),
            tuple(self.prologues.items()),
            general=self.viewable and self.mover.general,
        )

    def _held_by_temporaries(self, regions: Sequence[Region]) -> dict[int, Alias]:
        """Results that would be copies of a temporary or a view of one, with what can be returned in their place."""
        stores = [store for region in regions for store in region.stores if not store.movements]
        found: dict[int, Alias] = {}
        for store in stores:
            alias = _alias(store.value, [])
            memory = self._concrete(store.value) if alias is not None else None
            taken = {other.input for other in found.values()}
            if alias is None or memory is None or alias.input < len(self.graph.inputs) or alias.input in taken:
                continue
            if min(memory.strides, default=1) > 0:  # torch has no others, and a tensor of its own repeats no element
                found[store.result] = alias
        return found

    def _reads_in_place(self, index: int, node: Node) -> bool:
        """Whether every element of ``node`` reads input ``index`` only where it will be written: no copy is needed."""
        order = topological([node])
        if any(part.op in ("cat", "matmul") for part in order) or node.shape != self.graph.inputs[index].shape:
            return False
        return not any(part.op == "view" and (alias := _alias(part, [])) and alias.input == index for part in order)

    def _move(self, roots: Sequence[Node]) -> list[Node]:
        """``roots`` rebuilt with every view pushed toward the inputs."""
        memo: dict[int, Node] = {}
        for node in topological(roots):
            children = [memo[id(child)] for child in node.inputs]
            shape: Any = tuple(symbols.substitute(size, self.equal) for size in node.shape)
            if node.op == "view" and node.attrs == ("expand",) and self._same(children[0].shape, shape):
                memo[id(node)] = children[0]
            elif node.op == "view":
                attrs = tuple(symbols.substitute(part, self.equal) for part in node.attrs)
                memo[id(node)] = self.mover.move(children[0], attrs, shape)
            else:
                memo[id(node)] = self._narrow(self.builder.like(node, children, shape))
        return [memo[id(root)] for root in roots]

    def _same(self, left: Shape, right: Shape) -> bool:
        """Whether two shapes are one: size by size equal, in form or by a guard."""
        return len(left) == len(right) and all(
            a == b or (a, b) in self.held_equal or (b, a) in self.held_equal for a, b in zip(left, right, strict=True)
        )

    def _narrow(self, node: Node) -> Node:
        """``node``, or the same from fewer tensors: with its widest operands in temporaries."""
        while node.op not in BARRIERS and len(self._reads(node)) > MAX_READS:
            widest = max(node.inputs, key=lambda child: len(self._reads(child)))
            temporary = self._materialize(widest)
            node = self.builder.like(node, [temporary if child is widest else child for child in node.inputs])
        return node

    def _reads(self, root: Node) -> frozenset[Node]:
        """The tensors, seen through their views, that one element of ``root`` is computed from."""
        for node in topological([root]) if root not in self.reads else ():
            if node not in self.reads:
                if node.op in ("input", "view", "matmul"):
                    self.reads[node] = frozenset([node])
                elif node.op == "cat":
                    self.reads[node] = max(map(self._reads, node.inputs), key=len)
                else:
                    self.reads[node] = frozenset().union(*map(self._reads, node.inputs))
        return self.reads[root]

    def _materialize(self, node: Node) -> Node:
        """The ``input`` node of a temporary that holds ``node``."""
        for position, value in enumerate(self.values):
            if value is node:
                return self.temporaries[position]
        self.values.append(node)
        index = len(self.graph.inputs) + len(self.values) - 1
        temporary = self.builder.make("input", (), node.dtype, node.shape, (index,), node.location)
        self.temporaries.append(temporary)
        return temporary

    def _decide(self, prologue: Prologue) -> Decision:
        self.prologues[prologue] = self.prologue(prologue.at(self.environment))
        return self.prologues[prologue]

    def _regions(self, results: Sequence[Node]) -> list[Region]:
        """The regions that compute ``results``: of products, of row reductions, and pointwise ones for the rest."""
        products: list[Region] = []
        places = list(range(len(results)))
        if any(map(contractions.has_matmul, results)):
            products, others = contractions.group(results, self.mover, self._materialize, self._decide)
            places = [position for position, node in enumerate(others) if node is not None]
            results = [node for node in others if node is not None]
        results = split_long_rows(results, self.mover, self._materialize, self.row_blocks)
        rows, rest = group(results, self.mover, self._materialize)
        left = [position for position, node in enumerate(rest) if node is not None]
        pointwise = split([node for node in rest if node is not None], self.mover, self._materialize)
        regions = [*_renumbered(rows, places), *_renumbered(pointwise, [places[position] for position in left])]
        return self._viewable([*products, *regions])

    def _stages(self) -> list[tuple[list[int], list[Region]]]:
        """(positions, regions) of the temporaries, each after those it reads; reductions of the same rows as one."""
        waiting: dict[int, list[Region]] = {}
        while len(waiting) < len(self.values):
            position = len(waiting)
            waiting[position] = self._regions([self.values[position]])
        ordered: list[tuple[list[int], list[Region]]] = []
        while waiting:
            ready = [p for p, regions in waiting.items() if not self._temporaries_read(regions) & waiting.keys()]
            first, *others = ready
            regions, positions = waiting.pop(first), [first]
            for other in others:
                joined = _of_the_same_rows(regions, waiting[other], len(positions))
                if joined is not None:
                    regions = [joined]
                    positions.append(other)
                    waiting.pop(other)
            ordered.append((positions, regions))
        return ordered

    def _temporaries_read(self, regions: Sequence[Region]) -> set[int]:
        nodes = topological(store.value for region in regions for store in region.stores)
        numbers = {node.attrs[0] - len(self.graph.inputs) for node in nodes if node.op == "input"}
        return {number for number in numbers if number >= 0}

    def _viewable(self, regions: list[Region]) -> list[Region]:
        """``regions`` with every view that strides cannot express reading a contiguous temporary instead."""
        return [
            replace(r, stores=tuple(replace(s, value=self._readable(s.value, r)) for s in r.stores)) for r in regions
        ]

    def _readable(self, root: Node, region: Region) -> Node:
        memo: dict[int, Node] = {}
        for node in topological([root]):
            children = [memo[id(child)] for child in node.inputs]
            rebuilt = node
            if any(a is not b for a, b in zip(children, node.inputs, strict=True)):
                rebuilt = self.builder.like(node, children)
            if node.op == "view" and node.attrs[0] == "reshape" and self._concrete(rebuilt) is None:
                rebuilt = self.builder.like(node, [self._materialize(children[0])])
            memo[id(node)] = rebuilt
        result = memo[id(root)]
        return self._with_even_rows(result, region) if region.row_rank else result

    def _with_even_rows(self, root: Node, region: Region) -> Node:
        """``root`` reading a copy wherever a row, which may be several dimensions, is not one run of even strides."""
        memo: dict[int, Node] = {}
        for node in topological([root]):
            leaf = under_views(node).op == "input"
            if leaf and node.shape == region.shape and not self._is_even(node, region.row_rank):
                memo[id(node)] = self._materialize(node)
            elif node.op == "view" and leaf:
                memo[id(node)] = node
            else:
                children = [memo[id(child)] for child in node.inputs]
                memo[id(node)] = self.builder.like(node, children) if children else node
        return memo[id(root)]

    def _is_even(self, node: Node, row_rank: int) -> bool:
        memory = self._concrete(node)
        if memory is None:
            return False
        row = [pair for pair in zip(memory.sizes[-row_rank:], memory.strides[-row_rank:], strict=True) if pair[0] != 1]
        even = all(outer[1] == inner[0] * inner[1] for outer, inner in itertools.pairwise(row))
        self.viewable = self.viewable and even
        return even

    def _concrete(self, node: Node) -> Strided | None:
        """The memory ``node`` (an input, or views of one) is, or None where strides cannot say."""
        if node.op == "view":
            source = self._concrete(node.inputs[0])
            if source is None:
                return None
            attrs = tuple(symbols.evaluate(part, self.environment) for part in node.attrs)
            try:
                return apply(source, attrs, tuple(symbols.evaluate(size, self.environment) for size in node.shape))
            except NotViewable:
                self.viewable = False
                return None
        sizes = tuple(symbols.evaluate(size, self.environment) for size in node.shape)
        if node.op == "input" and node.attrs[0] < len(self.memory):
            return self.memory[node.attrs[0]]
        if node.op == "iota":
            return Strided(sizes, tuple(int(dim == node.attrs[0]) for dim in range(len(sizes))))
        return Strided(sizes, contiguous_strides(sizes))


def _of_the_same_rows(left: Sequence[Region], right: Sequence[Region], number: int) -> Region | None:
    """One region of row reductions that computes what two do, the second's result as ``number``; or None."""
    if len(left) != 1 or len(right) != 1:
        return None
    (one,), (other,) = left, right
    if not one.row_rank or (one.shape, one.row_rank) != (other.shape, other.row_rank):
        return None
    if not _elements_read(one) & _elements_read(other):
        return None
    return replace(one, stores=(*one.stores, *(replace(store, result=number) for store in other.stores)))


def _elements_read(region: Region) -> set[int]:
    """The tensors, seen through their views, that are read element by element."""
    nodes = topological(store.value for store in region.stores)
    return {id(node) for node in nodes if under_views(node).op == "input" and node.shape == region.shape}


def _without(regions: Sequence[Region], results: Container[int]) -> list[Region]:
    """``regions`` without the stores of ``results``."""
    left = [replace(r, stores=tuple(store for store in r.stores if store.result not in results)) for r in regions]
    return [region for region in left if region.stores]


def _placed(output: int | Alias, kept: Sequence[int], held: Mapping[int, Alias]) -> int | Alias:
    if isinstance(output, Alias):
        return output
    return held[output] if output in held else kept.index(output)


def _renumbered(regions: Sequence[Region], places: Sequence[int]) -> list[Region]:
    """``regions`` with each store's result, a position, replaced by the number at it."""
    return [replace(r, stores=tuple(replace(s, result=places[s.result]) for s in r.stores)) for r in regions]


def _alias(node: Node, updates: Sequence[tuple[int, Node]]) -> Alias | None:
    """``node`` as an input or a view of one, or as an input that has just been updated with it."""
    for index, value in updates:
        if node is value:
            return Alias(index, ())
    movements = []
    while node.op == "view":
        movements.append((node.attrs, node.shape))
        node = node.inputs[0]
    if node.op != "input" or any(node.attrs[0] == index for index, _ in updates):
        return None
    return Alias(node.attrs[0], tuple(reversed(movements)))
