"""Collects the results of a program, and decides which outputs are no results: inputs, temporaries, and views of them.

Results are numbered by position: what the function returns, then the new values of arguments.

Neighbours: ``families/partition.py`` computes them; ``ir/program.py`` defines ``Alias``.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from jitgen.families.call_memory import CallMemory, has_order
from jitgen.families.moved import Moved
from jitgen.families.several_views import are_disjoint
from jitgen.families.temporaries import Temporaries
from jitgen.ir.graph import Graph, Movement, Node
from jitgen.ir.nodes import CAT, INPUT, LAUNCH, VIEW
from jitgen.ir.program import Alias
from jitgen.ir.regions import Region
from jitgen.ir.views import Strided


@dataclass
class Results:
    """Holds what the kernels of a program write besides its temporaries.

    Attributes:
        nodes: the values, by position.
        outputs: for each output of the function, the position of its result, or the alias that it is.
        mutated: the input whose new value a result is, by the result's position.
    """

    nodes: list[Node] = field(default_factory=list)
    outputs: list[int | Alias] = field(default_factory=list)
    mutated: dict[int, int] = field(default_factory=dict)

    def return_(self, node: Node) -> None:
        """Adds an output, computed by one result however often it is returned."""
        position = next((position for position, known in enumerate(self.nodes) if known is node), len(self.nodes))
        if position == len(self.nodes):
            self.nodes.append(node)
        self.outputs.append(position)

    def update(self, updates: Mapping[int, Node]) -> None:
        """Adds new values of inputs, by the inputs' numbers."""
        for number, node in updates.items():
            self.mutated[len(self.nodes)] = number
            self.nodes.append(node)

    def memory(self, position: int, call: CallMemory) -> Strided:
        """Returns the memory of result ``position`` in this call."""
        if position in self.mutated:
            return call.inputs[self.mutated[position]]
        return call.result(position, self.nodes[position])

    def without(self, aliases: Mapping[int, Alias], positions: Sequence[int]) -> Results:
        """Returns these results without those that ``aliases`` replace.

        Args:
            positions: for each result, its new position.
        """
        nodes = [node for position, node in enumerate(self.nodes) if position not in aliases]
        outputs = [
            output if isinstance(output, Alias) else aliases.get(output, positions[output]) for output in self.outputs
        ]
        return Results(nodes, outputs, {positions[position]: number for position, number in self.mutated.items()})


def returned(graph: Graph, moved: Moved, memory: CallMemory, temporaries: Temporaries) -> Results:
    """Returns the results that the outputs of ``graph`` need. The others are aliases; a temporary is that of one of
    them, because no two outputs share the memory of a new tensor."""
    results = Results()
    updated = {id(node): number for number, node in graph.mutated}
    owners: dict[int, Node] = {}
    for position, (output, node) in enumerate(zip(graph.outputs, moved.outputs, strict=True)):
        alias = _returned_alias(graph, output, node, moved.updates, memory)
        if id(output) in updated:
            alias = Alias(updated[id(output)], ())
        if alias is not None and alias.input >= len(graph.inputs):
            owner = owners.setdefault(alias.input, node)
            is_owner = owner is node and (not any(memory.out) or _may_be_out(alias, position, memory, temporaries))
            alias = alias if is_owner else None
        if alias is None:
            results.return_(node)
        else:
            results.outputs.append(alias)
    return results


def _may_be_out(alias: Alias, position: int, memory: CallMemory, temporaries: Temporaries) -> bool:
    """Returns whether the caller's tensor for output ``position`` may be the temporary that ``alias`` is: a launch
    writes that (``copies.py``), and takes row-major tensors."""
    is_written = LAUNCH in temporaries.values[alias.input - temporaries.first].kinds
    out = memory.out[position] if position < len(memory.out) else None
    return is_written and not alias.movements and (out is None or out.is_row_major)


def _returned_alias(
    graph: Graph, output: Node, node: Node, updated: Container[int], memory: CallMemory
) -> Alias | None:
    """Returns what ``output`` is an alias of, if ``node`` is what its views were moved to."""
    alias = alias_of(memory.without_needless_copy(node), updated)
    if alias is None:
        return None
    if output.under_views.kind is CAT and alias.input < len(graph.inputs):
        return None  # a slice of a concatenation is none of what was joined
    if not alias.movements and output.kind is VIEW and alias.input < len(graph.inputs):
        # Of all of the argument, but another tensor than it: x[:].
        return Alias(alias.input, ((("permute", tuple(range(len(output.shape)))), output.shape),))
    return alias if not alias.movements or _is_view(memory.strides(node)) else None


def _is_view(memory: Strided | None) -> bool:
    """Returns whether torch has a view of ``memory``, which is None where no strides describe it: torch has no negative
    strides, its flip is a copy."""
    return memory is not None and min(memory.strides, default=0) >= 0


def views_of_updated(graph: Graph, memory: CallMemory) -> dict[int, Alias]:
    """Maps the positions of outputs that are views of an updated input to aliases; none that needs a copy at these
    strides."""
    updated, aliases = dict(graph.mutated), {}
    for position, number in graph.viewed_updates().items():
        value = updated[number]
        alias = Alias(number, _movements(value, graph.outputs[position]))
        if _is_view(memory.located(alias.movements, memory.input(number, value.shape))):
            aliases[position] = alias
    return aliases


def stored_in_temporaries(
    regions: Sequence[Region], results: Results, memory: CallMemory, temporaries: Temporaries
) -> dict[int, Alias]:
    """Maps results that a temporary holds, or that would be copies of a view of one, to the alias to return instead.

    An element of a temporary is returned once, because two results share no memory, and only in an order that the
    result asks for.

    Args:
        regions: those that compute ``results``.
    """
    if any(memory.out):
        return {}
    changed = {store.result for region in regions if region.is_update for store in region.stores}
    stores = [store for region in regions for store in region.stores]
    stores = [store for store in stores if not store.movements or temporaries.get(results.nodes[store.result])]
    aliases: dict[int, Alias] = {}
    for store in stores:
        if store.result in changed or store.result in results.mutated:
            continue
        value = temporaries.get(results.nodes[store.result]) or store.value
        alias = alias_of(value)
        strides = memory.strides(value) if alias is not None else None
        if alias is None or strides is None or alias.input < temporaries.first:
            continue
        others = _aliases_in([*aliases.values(), *results.outputs], alias.input)
        if alias.movements in others or not are_disjoint([*others, alias.movements]):
            continue
        # torch has no negative strides, and a result of stride 0 would repeat elements, as no new tensor does.
        if has_order(strides, results.nodes[store.result]) and min(strides.strides, default=1) > 0:
            aliases[store.result] = alias
    return aliases


def _aliases_in(outputs: Iterable[int | Alias], buffer: int) -> list[tuple[Movement, ...]]:
    """Returns the views of ``buffer`` that are returned."""
    return [output.movements for output in outputs if isinstance(output, Alias) and output.input == buffer]


def alias_of(node: Node, updated: Container[int] = ()) -> Alias | None:
    """Returns ``node`` as an alias, of an input or a view of one; None for others, and for an input that is
    ``updated``."""
    source = node.under_views
    if source.kind is not INPUT or source.attrs.number in updated:
        return None
    return Alias(source.attrs.number, _movements(source, node))


def _movements(source: Node, view: Node) -> tuple[Movement, ...]:
    """Returns the movements that lead from ``source`` to ``view``, a view of it."""
    movements: list[Movement] = []
    while view is not source:
        movements.insert(0, (view.attrs, view.shape))
        view = view.inputs[0]
    return tuple(movements)
