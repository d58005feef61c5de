"""Partitions a traced graph into a program of kernels, whose bodies a dialect can print. The passes are:

1. ``_move``: every view is moved to the inputs (``ir/views.py``).
2. ``_planned``: what several kernels read and would compute again becomes a temporary (``Family.plan``).
3. ``_regions``: each family in turn may rewrite results, and claims some of them for its regions. A value that a region
   needs in memory is *materialized*: it becomes a temporary, which is partitioned in the same manner.
4. ``Steps``: temporaries, and changes of arguments, are put in order (``families/steps.py``).
5. ``kernels_of``: regions become kernels of instructions in compute dtypes (``families/kernels.py``).

No family is named here. They are called in the order of ``families/registry.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jitgen.device import Device
from jitgen.families import registry
from jitgen.families.kernels import kernels_of, with_coarse
from jitgen.families.several_views import are_disjoint, stored_values
from jitgen.families.steps import Steps
from jitgen.families.updates import are_safe, in_place, reads_of
from jitgen.ir import symbols
from jitgen.ir.analysis import at_own_coordinates, rewritten
from jitgen.ir.attributes import CHANNELS_LAST, CONTIGUOUS
from jitgen.ir.graph import Builder, Graph, Node, Shape, equal_sizes, kinds_of, topological
from jitgen.ir.index import Index
from jitgen.ir.nodes import CAT, CONTRACT, DEQUANTIZE, GATHER, INPUT, IOTA, SCALAR, SCATTER, VIEW, Kind
from jitgen.ir.program import Alias, Buffer, Decision, Kernel, Program
from jitgen.ir.regions import MAX_READS, Region, Store, renumbered, stores_of, without_results
from jitgen.ir.symbols import Scalar
from jitgen.ir.views import Decide, Mover, NotViewable, Strided, apply, contiguous_strides
from jitgen.kernel.operands import channels_last_memory, locate, ordered_like, output_strides


def program_of(
    graph: Graph,
    decide: Decide,
    environment: Mapping[str, Any],
    memory: Sequence[Strided],
    device: Device,
    out: Sequence[Strided | None] = (),
) -> Program:
    """Makes the program of ``graph``.

    Args:
        decide: decides (and records) symbolic comparisons on which the partition depends.
        environment: a value for every symbol, from the call at hand.
        memory: the strides of every input of that call. They only decide what needs a copy, before or after.
        device: the device that the kernels are for.
        out: for each result, the memory of the caller's ``out=`` tensor, if there is one; then no temporary can be
            returned in place of a result.
    """
    return Partitioner(graph, decide, environment, memory, device, out).program()


class Partitioner:
    """Holds the state of one graph's partition. Families use it as a ``Partition`` (``families/family.py``)."""

    def __init__(
        self,
        graph: Graph,
        decide: Decide,
        environment: Mapping[str, Any],
        memory: Sequence[Strided],
        device: Device,
        out: Sequence[Strided | None],
    ):
        self.environment = environment
        self.memory = memory
        self.independent_of_strides = True
        self.views = self._views_of_updated(graph)
        outputs = (node for position, node in enumerate(graph.outputs) if position not in self.views)
        self.graph = graph = replace(graph, outputs=tuple(outputs)) if self.views else graph
        self.builder = Builder()
        self.mover = Mover(self.builder, decide, environment)
        self.device, self.out = device, out
        self.decisions: dict[tuple[str, Any], Decision] = {}
        self.guarded_equal = {g.expr.args for g in graph.guards if g.expr.op == "eq" and g.value is True}
        # A product has an epilogue where their shapes are the same, be one of their sizes a number by a guard only; and
        # what is computed from products is one value in all places that have the same shape so.
        self.index = Index(graph.results)
        unified = CONTRACT in kinds_of(graph.results) or len(graph.mutated) > 1
        shapes = [node.shape for node in self.index.order] if unified else []
        sizes = frozenset(name for shape in shapes for size in shape for name in symbols.symbols_of(size))
        self.equal: Mapping[str, Scalar] = equal_sizes(graph.guards, sizes)
        self.temporaries: list[Node] = []
        self.flat: dict[Node, Node] = {}
        self.stored: dict[Node, Node] = {}
        self.values: list[Node] = []
        self.joined: list[tuple[int, ...]] = []
        self.reads: dict[Node, frozenset[Node]] = {}
        self.updated: set[int] = set()
        self.early: list[tuple[int, list[Node]]] = []
        self.returned: frozenset[int] = frozenset()

    def program(self) -> Program:
        moved = self._planned(self._moved())
        updates = list(zip((i for i, _ in self.graph.mutated), moved[len(self.graph.outputs) :], strict=True))
        outputs: list[int | Alias] = []
        results: list[Node] = []
        owners: dict[int, Node] = {}
        returned = {id(node): index for index, node in self.graph.mutated}
        for output, node in zip(self.graph.outputs, moved, strict=False):
            alias = _alias(self._without_needless_copy(node), dict(updates))
            if output.under_views.kind is CAT and alias is not None and alias.input < len(self.graph.inputs):
                alias = None  # a slice of a concatenation is none of what was joined
            if id(output) in returned:
                alias = Alias(returned[id(output)], ())
            if alias is not None and alias.movements:
                memory = self.strides(node)
                if memory is None or min(memory.strides, default=0) < 0:
                    alias = None  # torch has no negative strides: its flip is a copy
            if alias is not None and alias.input >= len(self.graph.inputs):  # a temporary, of which one result is made
                owner = owners.setdefault(alias.input, node)
                alias = alias if owner is node and not any(self.out) else None
            if alias is None and not any(node is result for result in results):
                results.append(node)
            index = next((i for i, result in enumerate(results) if result is node), -1)
            outputs.append(index if alias is None else alias)
        for position, view in self.views.items():
            outputs.insert(position, view)
        # An update is computed into its argument directly where nothing else reads what the argument was. Others are
        # computed in place at the end, those that read one another together, or else into temporaries that are copied.
        late = [update for update in updates if update[0] in self.updated and _is_scatter_of(update[1], update[0])]
        readers = [*results, *(node for _, node in late)]
        late += self._alone([update for update in updates if update[0] not in self.updated], readers)
        mutated = [(index, len(results) + number) for number, (index, _) in enumerate(late)]
        returned_results = dict(enumerate(results))
        results += [node for _, node in late]
        direct = len(results)
        for index, chain in self.early:
            mutated.append((index, len(results)))
            results.append(chain[-1])
        rest = {index: node for index, node in updates if index not in dict(mutated)}
        in_place = self._in_place(rest, returned_results, results, mutated)
        through_temporaries = len(results)
        for index, node in rest.items():
            if index not in dict(mutated):
                mutated.append((index, len(results)))
                results.append(self.materialize(node))
        updated = {position: index for index, position in mutated}
        memories = [self._result_memory(position, node, updated) for position, node in enumerate(results)]
        joined = {store.result for region in itertools.chain(*in_place) for store in region.stores}
        positions = [position for position in range(direct) if position not in joined]
        regions = self._regions_at(positions, results, memories)
        aliases = {} if any(self.out) else self._stored_in_temporaries(regions, updated, results, outputs)
        if aliases:
            remaining = [position for position in range(len(results)) if position not in aliases]
            new_positions = [remaining.index(p) if p in remaining else -1 for p in range(len(results))]
            regions = renumbered(without_results(regions, aliases), new_positions)
            in_place = [renumbered(level, new_positions) for level in in_place]
            outputs = [_renumbered_output(output, remaining, aliases) for output in outputs]
            mutated = [(index, remaining.index(position)) for index, position in mutated]
            results = [results[position] for position in remaining]
            memories = [memories[position] for position in remaining]
            direct -= len(aliases)
            through_temporaries -= len(aliases)
        copies = self._regions_at(range(through_temporaries, len(results)), results, memories)
        early = [
            [(direct + number, self._regions([node], [memories[direct + number]])) for node in chain]
            for number, (_, chain) in enumerate(self.early)
        ]
        stages = Steps(self).stages(early)
        inputs = tuple(Buffer(spec.dtype, spec.shape) for spec in self.graph.inputs)
        temporaries = tuple(Buffer(node.dtype, node.shape) for node in self.values)
        buffers = (*inputs, *temporaries, *(Buffer(node.dtype, node.shape) for node in results))
        shapes = [buffer.shape for buffer in buffers]
        kernels: list[Kernel] = []
        first = len(inputs) + len(temporaries)
        for steps, stage in stages:
            numbers = [step.number + (len(inputs) if step.change is None else first) for step in steps]
            kernels += kernels_of(stage, numbers, shapes, self.graph.name, len(kernels))
        own = range(first, first + len(results))
        for stage in (regions, *in_place, copies):
            kernels += kernels_of(stage, own, shapes, self.graph.name, len(kernels))
        return Program(
            self.graph.name,
            inputs,
            temporaries,
            tuple(
                Buffer(node.dtype, node.shape, node.attrs == CONTIGUOUS, node.attrs == CHANNELS_LAST)
                for node in results
            ),
            tuple(outputs),
            tuple(sorted(mutated)),
            with_coarse(kernels, buffers, range(len(inputs), first), outputs),
            tuple((family, question, decision) for (family, question), decision in self.decisions.items()),
            general=self.independent_of_strides and self.mover.general,
            rewrites=tuple(self.mover.fired),
        )

    def _stored_in_temporaries(
        self,
        regions: Sequence[Region],
        updated: Container[int],
        results: Sequence[Node],
        outputs: Sequence[int | Alias],
    ) -> dict[int, Alias]:
        """Maps results that would be copies of a temporary, or of a view of one, to the alias to return instead.

        An element of a temporary is returned once, because two results share no memory, and only in an order that the
        result asks for.
        """
        changed = {store.result for region in regions if region.is_update for store in region.stores}
        stores = [store for region in regions for store in region.stores if not store.movements]
        stores = [store for store in stores if store.result not in changed and store.result not in updated]
        aliases_: dict[int, Alias] = {}
        for store in stores:
            alias = _alias(store.value, ())
            memory = self.strides(store.value) if alias is not None else None
            if alias is None or memory is None or alias.input < len(self.graph.inputs):
                continue
            returned = [other for other in (*aliases_.values(), *outputs) if isinstance(other, Alias)]
            taken = [other.movements for other in returned if other.input == alias.input]
            if alias.movements in taken or not are_disjoint([*taken, alias.movements]):
                continue
            if not _has_order(memory, results[store.result]):
                continue
            # torch has no negative strides, and a result of stride 0 would repeat elements, as no new tensor does.
            if min(memory.strides, default=1) > 0:
                aliases_[store.result] = alias
        return aliases_

    def _alone(self, updates: Sequence[tuple[int, Node]], readers: Sequence[Node]) -> list[tuple[int, Node]]:
        """Returns the ``updates`` that any kernel may compute with others: nothing else reads what the argument was,
        and they read no other argument at their own coordinates that is updated, with which they would be together.

        Args:
            readers: what else is computed: results, and new values of arguments of which elements are replaced.
        """
        updated = {index for index, _ in updates}
        readers = [*readers, *(value for _, chain in self.early for value in chain)]
        values = Index([*readers, *(node for _, node in updates)])
        inputs = {node.attrs.number: node for node in values.order if node.kind is INPUT}
        alone = []
        for index, node in updates:
            others = [*readers, *(value for other, value in updates if other != index)]  # which may be one node
            is_read = index in inputs and any(values.depends(value, inputs[index]) for value in others)
            if not is_read and self._reads_in_place(index, node) and reads_of(node).own & updated <= {index}:
                alone.append((index, node))
        return alone

    def _in_place(
        self,
        updates: Mapping[int, Node],
        returned: Mapping[int, Node],
        results: list[Node],
        mutated: list[tuple[int, int]],
    ) -> list[list[Region]]:
        """Makes the regions that compute ``updates`` in place, in lists of which each may run only after the one
        before.

        Args:
            returned: of ``results``, those that are returned, by position.
            results, mutated: to which the updates are added that are computed so.
        """
        candidates = {index: node for index, node in updates.items() if self._has_shape_of(index, node)}
        stages: list[list[Region]] = []
        for level in in_place(candidates, returned):
            regions: list[Region] = []
            for together in level:
                count = len(self.values)
                values = [self.from_operands(updates[index]) for index in together.updates]
                written = {len(results) + number: index for number, index in enumerate(together.updates)}
                nodes = [*results, *values]
                positions = [*written, *together.results]
                memories = {p: self._result_memory(p, nodes[p], written) for p in positions}
                made = self._regions_at(positions, nodes, memories)
                if are_safe(made, written):
                    results += values
                    mutated += [(index, position) for position, index in written.items()]
                    regions += made
                else:
                    self.forget_from(count)
            stages.append(regions)
        return stages

    def _regions_at(
        self, positions: Sequence[int], results: Sequence[Node], memories: Sequence[Strided] | Mapping[int, Strided]
    ) -> list[Region]:
        """Makes the regions that compute those of ``results`` at ``positions``, by which their stores name them."""
        regions = self._regions([results[p] for p in positions], [memories[p] for p in positions])
        return renumbered(regions, positions)

    def _reads_in_place(self, index: int, node: Node) -> bool:
        """Returns whether every element of ``node`` reads input ``index`` only at its own coordinates, so that ``node``
        can be computed into that input."""
        order = topological([node])
        if any(other.kind.reads_elsewhere for other in order) or not self._has_shape_of(index, node):
            return False
        return not any(other.kind is VIEW and (alias := _alias(other, ())) and alias.input == index for other in order)

    def _has_shape_of(self, index: int, node: Node) -> bool:
        """Returns whether ``node``, which was moved, has the shape of input ``index``."""
        return node.shape == tuple(symbols.substitute(size, self.equal) for size in self.graph.inputs[index].shape)

    def _views_of_updated(self, graph: Graph) -> dict[int, Alias]:
        """Maps the positions of outputs that are views of an updated input to aliases; none that needs a copy at these
        strides."""
        updated, aliases = dict(graph.mutated), {}
        for position, index in graph.viewed_updates().items():
            alias = Alias(index, _movements(updated[index], graph.outputs[position]))
            sizes = self._sizes(updated[index])
            source = self.memory[index] if index < len(self.memory) else Strided(sizes, contiguous_strides(sizes))
            try:
                locate(alias.movements, source, self.environment)
            except NotViewable:
                self.depends_on_strides()
            else:
                aliases[position] = alias
        return aliases

    def _moved(self) -> list[Node]:
        """Moves the graph's results. An argument that is updated in place before others read it is itself then."""
        order = self.index.order
        chains = {
            index: results for index, node in self.graph.mutated if (results := self._updates_of(index, node, order))
        }
        self.updated = set(chains)
        read = {id(child) for node in order for child in node.inputs}
        early = {i: chain for i, chain in chains.items() if len(chain) > 1 or id(chain[0]) in read}
        self.returned = returned_products(self.graph, self.index) | stored_values(
            self.index, self.mover.decide, self._same
        )
        inputs = {node.attrs.number: node for node in order if node.kind is INPUT}
        moved: dict[int, Node] = {}
        results = self._move(self.graph.results, {id(n): inputs[i] for i, chain in early.items() for n in chain}, moved)
        self.early = [(index, [moved[id(node)] for node in chain]) for index, chain in early.items()]
        return results

    def _planned(self, moved: Sequence[Node]) -> list[Node]:
        """Returns ``moved``, the graph's results, and all else that is computed, with what families want in memory
        there."""
        values = [*moved, *(node for _, chain in self.early for node in chain), *self.values]
        count = len(self.values)
        planned = list(values)
        for family in registry.FAMILIES:
            planned = list(family.plan(planned, self))
        rest = iter(planned[len(moved) :])
        self.early = [(index, [next(rest) for _ in chain]) for index, chain in self.early]
        self.values[:count] = rest
        self.stored |= zip(self.values[:count], self.temporaries, strict=False)
        return planned[: len(moved)]

    def _updates_of(self, index: int, node: Node, order: Sequence[Node]) -> list[Node]:
        """Returns the scatters, in their order, that make ``node`` of input ``index``; none where anything else of the
        nodes ``order`` reads a value that the input had before."""
        chain = [node]
        while chain[0].kind is SCATTER and chain[0].inputs[0].kind is SCATTER:
            chain.insert(0, chain[0].inputs[0])
        if not _is_scatter_of(chain[0], index):
            return []
        before = {id(update.inputs[0]) for update in chain} | {
            id(update) for update in order if _is_input(update, index)
        }
        updates = {id(update) for update in chain}
        others = (other for other in order if other.kind is SCATTER and id(other) not in updates)
        bases = {id(other.inputs[0].under_views) for other in others}
        if bases & updates:  # another tensor that begins as this one would be taken for a change of it
            return []
        read = (child for update in order for child in update.inputs[id(update) in updates :])
        return [] if any(id(child) in before for child in (*read, *self.graph.outputs)) else chain

    def _move(self, roots: Sequence[Node], replaced: Mapping[int, Node], moved: dict[int, Node]) -> list[Node]:
        """Returns ``roots`` rebuilt with every view moved to the inputs.

        Args:
            replaced: by the ids of nodes, what takes their place wherever they are read.
            moved: to which these nodes are added, as they are rebuilt.
        """
        memo: dict[int, Node] = {}
        for node in topological(roots):
            children = [memo[id(child)] for child in node.inputs]
            shape: Any = tuple(symbols.substitute(size, self.equal) for size in node.shape)
            if node.kind is SCALAR:
                memo[id(node)] = self.builder.scalar(symbols.substitute(node.attrs.value, self.equal), node.dtype)
            elif node.kind is VIEW and node.attrs == ("expand",) and self._same(children[0].shape, shape):
                memo[id(node)] = children[0]
            elif node.kind is VIEW:
                attrs = tuple(symbols.substitute(attr, self.equal) for attr in node.attrs)
                memo[id(node)] = self.mover.move(children[0], attrs, shape)
            elif node.kind is GATHER:
                source, *indices = children
                if not source.is_in_memory:
                    source = self.materialize(source)
                memo[id(node)] = self.builder.like(node, (source, *indices), shape)
            else:
                memo[id(node)] = self._narrow(self.builder.like(node, children, shape))
            if id(node) in self.returned:
                memo[id(node)] = self.materialize(memo[id(node)])
            if id(node) in replaced:
                moved[id(node)], memo[id(node)] = memo[id(node)], replaced[id(node)]
        return [memo[id(root)] for root in roots]

    def _same(self, left: Shape, right: Shape) -> bool:
        """Returns whether two shapes are equal: each pair of sizes is one expression, or a guard says that they are
        equal."""
        if len(left) != len(right):
            return False
        sizes = [tuple(symbols.substitute(size, self.equal) for size in pair) for pair in zip(left, right, strict=True)]
        return all(a == b or (a, b) in self.guarded_equal or (b, a) in self.guarded_equal for a, b in sizes)

    def _narrow(self, node: Node) -> Node:
        """Replaces operands of ``node`` by temporaries until it reads at most ``MAX_READS`` tensors. The operand that
        reads the most tensors is replaced first."""
        while node.kind.commutes and len(self._reads(node)) > MAX_READS:
            widest = max(node.inputs, key=lambda child: len(self._reads(child)))
            temporary = self.materialize(widest)
            node = self.builder.like(node, [temporary if child is widest else child for child in node.inputs])
        return node

    def _reads(self, root: Node) -> frozenset[Node]:
        """Returns the tensors, or views of them, that one element of ``root`` is computed from."""
        stack = [] if root in self.reads else [root]
        while stack:
            node = stack[-1]
            waiting = [] if node.kind.read_whole else [child for child in node.inputs if child not in self.reads]
            if waiting and node not in self.reads:
                stack.extend(waiting)
                continue
            stack.pop()
            if node in self.reads:
                continue
            if node.kind.read_whole:
                self.reads[node] = frozenset([node])
            elif node.kind is CAT:
                self.reads[node] = max(map(self._reads, node.inputs), key=len)
            else:
                self.reads[node] = frozenset().union(*map(self._reads, node.inputs))
        return self.reads[root]

    def materialize(self, node: Node) -> Node:
        """Stores ``node`` in a temporary and returns its ``input`` node; there is one temporary for each node."""
        if node in self.stored or (node.kind is INPUT and node.attrs.number >= len(self.graph.inputs)):
            return self.stored.get(node, node)
        flat = self.as_matrix(node)
        if flat in self.flat:
            return self.mover.move(self.flat[flat], ("reshape",), node.shape)
        self.values.append(node)
        index = len(self.graph.inputs) + len(self.values) - 1
        temporary = self.builder.make("input", (), node.dtype, node.shape, (index,), node.location)
        self.temporaries.append(temporary)
        self.flat[flat] = self.stored[node] = temporary
        return temporary

    def is_stored(self, node: Node) -> bool:
        """Returns whether a temporary holds ``node`` already."""
        return node in self.stored

    def as_matrix(self, node: Node) -> Node:
        """Returns ``node`` as a matrix if it is computed from products: one value for all its shapes, and their
        memory."""
        if len(node.shape) <= 2 or not any(at_own_coordinates(node, CONTRACT)):
            return node
        return self.mover.move(node, ("reshape",), (symbols.product(node.shape[:-1]), node.shape[-1]))

    def with_held_products(self, position: int) -> Node | None:
        """Reads products in the value of temporary ``position`` from other temporaries that hold them; None if none
        does, or one is of a quantised weight."""
        value, own = self.values[position], self.temporaries[position]
        products = [node for node in at_own_coordinates(value, CONTRACT) if self.as_matrix(node) in self.flat]
        held = {id(node): self.flat[self.as_matrix(node)] for node in products}
        others = [node for node in products if held[id(node)] is not own]
        if not others or any(node.is_weight for product in products for node in product.inputs):
            return None
        memo = {id(node): self.mover.move(held[id(node)], ("reshape",), node.shape) for node in others}
        return self.mover.substituted(value, memo)

    def forget_from(self, count: int) -> None:
        """Forgets the temporaries from number ``count`` on."""
        self.stored = dict(zip(self.values[:count], self.temporaries, strict=False))
        del self.values[count:], self.temporaries[count:]
        first = len(self.graph.inputs) + count
        self.flat = {flat: temporary for flat, temporary in self.flat.items() if temporary.attrs.number < first}

    def without(self, kind: Kind, root: Node) -> Node:
        """Returns ``root`` with every node of ``kind`` materialized."""
        memo: dict[int, Node] = {}
        for node in topological([root] if kind in root.kinds else []):
            if node.kind is kind and id(node) not in memo:
                memo[id(node)] = self.materialize(self.mover.substituted(node, dict(memo)))
        return self.mover.substituted(root, memo)

    def pointwise(self, root: Node, kept: Collection[int] = ()) -> Node:
        """Returns ``root`` with all that reads other elements of its operands materialized, but for the nodes whose ids
        are ``kept``."""

        def change(node: Node, rebuilt: Node) -> Node:
            return self.materialize(rebuilt) if node.kind.reads_others and id(node) not in kept else rebuilt

        return rewritten(root, self.mover, change)

    def materialize_together(self, nodes: Sequence[Node]) -> list[Node]:
        """Stores ``nodes`` in temporaries, which one step computes, so that a region may hold all."""
        inputs = [self.materialize(node) for node in nodes]
        self.compute_together(inputs)
        return inputs

    def compute_together(self, temporaries: Sequence[Node]) -> None:
        """Partitions the values of ``temporaries``, ``input`` nodes or views of them, as one."""
        first = len(self.graph.inputs)
        numbers = sorted({temporary.under_views.attrs.number - first for temporary in temporaries})
        self.joined.append(tuple(numbers))

    def decide(self, family: str, question: Any) -> Decision:
        """Answers ``question`` by ``family.decide`` at this call's sizes; the answer is recorded for the program."""
        asked = question.at(self.environment)
        self.decisions[family, question] = registry.named(family).decide(asked, self.device)
        return self.decisions[family, question]

    def _result_memory(self, position: int, node: Node, updated: Mapping[int, int]) -> Strided:
        """Returns the memory of result ``position`` in this call.

        Args:
            updated: the input in whose memory a result is, by the result's position.
        """
        if position in updated:
            return self.memory[updated[position]]
        owned = self.out[position] if position < len(self.out) else None
        if owned is not None:
            return owned
        sizes = self._sizes(node)
        like = ordered_like(sizes, node.attrs == CONTIGUOUS, node.attrs == CHANNELS_LAST, self.memory)
        return Strided(sizes, output_strides(sizes, like))

    def is_updated(self, node: Node) -> bool:
        """Returns whether ``node``, a result, is the new value of its first input, an argument, in the memory of
        that."""
        return any(_is_scatter_of(node, index) for index in self.updated)

    def _regions(self, results: Sequence[Node], memories: Sequence[Strided]) -> list[Region]:
        """Makes the regions that compute ``results`` into ``memories``. Each family claims some of those results that
        the families before it left. A result that its region cannot write in place is copied from a temporary."""
        regions: list[Region] = []
        values, positions = list(results), list(range(len(results)))
        for family in registry.FAMILIES:
            if values:
                values = list(family.rewrite_values(values, self))
                claim = family.claim(values, self)
                regions += renumbered(claim.regions, positions)
                positions = [position for position, node in zip(positions, claim.rest, strict=True) if node is not None]
                values = [node for node in claim.rest if node is not None]
        if values:
            raise AssertionError(f"no family computes {', '.join(sorted({node.op for node in values}))}")
        legal = [self._legal(region, memories) for region in regions]
        left = sorted(stores_of(regions) - stores_of(legal))
        if left:
            self.depends_on_strides()
            self.updated -= {index for index in self.updated if any(_is_scatter_of(results[p], index) for p in left)}
            apart = self._unwritable(regions, memories)
            values = [self.from_operands(results[p]) if p in apart else self.materialize(results[p]) for p in left]
            copies = self._regions(values, [memories[p] for p in left])
            legal = without_results(legal, left) + renumbered(copies, left)
        return sorted(legal, key=lambda region: region.is_update)  # behind what it changes

    def _unwritable(self, regions: Sequence[Region], memories: Sequence[Strided]) -> set[int]:
        """Returns the results that ``regions`` could not write to contiguous memory either, because of the views behind
        them: a temporary of the result would not be written in place, and one of what the views are of is."""
        plain = [Strided(memory.sizes, contiguous_strides(memory.sizes)) for memory in memories]
        stores = [store for region in regions for store in region.stores]
        return {store.result for store in stores if self.written(store, plain[store.result]) is None}

    def from_operands(self, value: Node) -> Node:
        """Computes ``value`` from temporaries: by its own operation, or by its pointwise operations and the views they
        read. Each temporary holds strictly less than ``value``, so such values always have an order."""
        memo: dict[int, Node] = {}
        stack, seen = list(value.inputs), set()
        while stack:
            node = stack.pop().under_views
            if id(node) in seen or not node.inputs or node.kind is DEQUANTIZE:
                continue
            seen.add(id(node))
            if value.kind.is_pointwise and node.kind.is_pointwise:
                stack.extend(node.inputs)
            else:
                memo[id(node)] = self.materialize(node)
        return self.mover.substituted(value, memo)

    def regions_in_memory(self, values: Sequence[Node]) -> list[Region]:
        """Makes the regions that compute ``values`` into contiguous memory."""
        return self._regions(values, [Strided(sizes, contiguous_strides(sizes)) for sizes in map(self._sizes, values)])

    def _legal(self, region: Region, memories: Sequence[Strided]) -> Region:
        """Makes each view in ``region`` that no strides describe read a contiguous temporary, and drops the stores that
        cannot write to the memory of their results."""
        stores = tuple(
            store.with_sources(self._with_viewable_reshapes)
            for store in region.stores
            if self.written(store, memories[store.result]) is not None
        )
        return registry.named(region.family).legalize(replace(region, stores=stores), self, memories)

    def written(self, store: Store, memory: Strided) -> Strided | None:
        """Returns ``memory``, that of the result, in the iteration space of ``store``; None if no strides describe
        it."""
        try:
            return locate(store.movements, memory, self.environment)
        except NotViewable:
            self.depends_on_strides()
            return None

    def _with_viewable_reshapes(self, root: Node) -> Node:
        """Makes reshapes under ``root`` that need a copy read a temporary."""
        memo: dict[int, Node] = {}
        for node in topological([root]):
            children = [memo[id(child)] for child in node.inputs]
            rebuilt = node
            if any(a is not b for a, b in zip(children, node.inputs, strict=True)):
                rebuilt = self.builder.like(node, children)
            if node.kind is VIEW and node.attrs.kind == "reshape" and self.strides(rebuilt) is None:
                rebuilt = self.builder.like(node, [self.materialize(children[0])])
            memo[id(node)] = rebuilt
        return memo[id(root)]

    def depends_on_strides(self) -> None:
        """Records that this partition is valid only for calls with the same strides."""
        self.independent_of_strides = False

    def _without_needless_copy(self, node: Node) -> Node:
        """Returns what ``node`` copies, if torch returns that itself: it is to be in an order and is so in this
        call."""
        if node.attrs not in (CONTIGUOUS, CHANNELS_LAST) or not node.inputs[0].is_in_memory:
            return node
        self.depends_on_strides()
        source = self.strides(node.inputs[0])
        return node.inputs[0] if source is not None and _has_order(source, node) else node

    def strides(self, node: Node) -> Strided | None:
        """Returns the strides in this call of ``node``, an input or views of one; None if no strides describe it."""
        if node.kind is VIEW:
            source = self.strides(node.inputs[0])
            if source is None:
                return None
            attrs = tuple(symbols.evaluate(attr, self.environment) for attr in node.attrs)
            try:
                return apply(source, attrs, self._sizes(node))
            except NotViewable:
                self.depends_on_strides()
                return None
        sizes = self._sizes(node)
        if node.kind is INPUT and node.attrs.number < len(self.memory):
            return self.memory[node.attrs.number]
        if node.kind is IOTA:
            return Strided(sizes, tuple(int(dim == node.attrs.dim) for dim in range(len(sizes))))
        return Strided(sizes, contiguous_strides(sizes))

    def _sizes(self, node: Node) -> tuple[int, ...]:
        """Returns the sizes of ``node`` in this call."""
        return tuple(symbols.evaluate(size, self.environment) for size in node.shape)


def returned_products(graph: Graph, index: Index) -> frozenset[int]:
    """Returns the ids of products that ``graph`` returns and also reads with more than an epilogue between: they are in
    memory anyway, and a kernel that reads such a product behind a reduction, a slice or another product would compute
    it again. A backward's saved products are such results."""
    return frozenset(id(node) for node in graph.outputs if node.kind is CONTRACT and _is_read_elsewhere(node, index))


def _is_read_elsewhere(product: Node, index: Index) -> bool:
    """Returns whether anything but pointwise operations and views of all elements is computed of ``product``."""
    epilogue = index.reached([product], lambda node: node is not product and not _keeps_all_elements(node))
    return any(user not in epilogue for node in epilogue for user in index.users[node])


def _keeps_all_elements(node: Node) -> bool:
    """Returns whether ``node`` is a pointwise operation, or a view that neither repeats nor leaves out elements."""
    whole = ("permute", "reshape", "unsqueeze", "squeeze", "detach", "untracked_view")
    return node.kind.is_pointwise or (node.kind is VIEW and node.attrs.kind in whole)


def _is_scatter_of(node: Node, index: int) -> bool:
    """Returns whether ``node`` is a new value of input ``index``, of which elements are replaced or changed."""
    return node.kind is SCATTER and _is_input(node.inputs[0], index)


def _is_input(node: Node, index: int) -> bool:
    return node.kind is INPUT and node.attrs.number == index


def _renumbered_output(output: int | Alias, remaining: Sequence[int], aliases: Mapping[int, Alias]) -> int | Alias:
    """Renumbers ``output`` after only the results at the positions ``remaining`` are left, and ``aliases`` replace the
    others."""
    if isinstance(output, Alias):
        return output
    return aliases[output] if output in aliases else remaining.index(output)


def _has_order(memory: Strided, node: Node) -> bool:
    """Returns whether ``memory`` is in the order that ``node`` asks for, if it asks for one."""
    if node.attrs == CHANNELS_LAST:
        return memory.strides == channels_last_memory(memory.sizes).strides
    return node.attrs != CONTIGUOUS or memory.is_row_major


def _alias(node: Node, updated: Container[int]) -> Alias | None:
    """Returns ``node`` as an alias, of an input or a view of one; None for others, and for an input that is
    ``updated``."""
    source = node.under_views
    if source.kind is not INPUT or source.attrs.number in updated:
        return None
    return Alias(source.attrs.number, _movements(source, node))


def _movements(source: Node, view: Node) -> tuple[Any, ...]:
    """Returns the movements that lead from ``source`` to ``view``, a view of it."""
    movements: list[Any] = []
    while view is not source:
        movements.insert(0, (view.attrs, view.shape))
        view = view.inputs[0]
    return tuple(movements)
