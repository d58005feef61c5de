"""Plans what a backward reads of its forward: inputs, values that the forward saves, and values that it computes again.

The rule: the results of reductions, products, scans, sorts, gathers and random numbers are *saved*, since computing one
again takes a kernel of its own or is not the same. Everything pointwise is *computed again* from them and from the
inputs, which costs arithmetic alone, in the registers of the kernel that needs it, where to save it would cost a write
and a read (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, recompute likewise). The product of
queries and keys behind the weights of an attention is computed again too, since it is larger than all that it is
computed from (``weights.py``). A sum of several of them, such as a residual stream, is saved in place of one that only
it is computed of (``_sums``). A value that the function returns is not saved twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jitgen.errors import UnsupportedError
from jitgen.gradients.rules import RULES, reads
from jitgen.gradients.structured import DERIVATIVES
from jitgen.gradients.weights import Weighted, recognised
from jitgen.ir import symbols
from jitgen.ir.custom_gradients import SAVED_VIEW, TRANSPARENT, differentiated, is_detached
from jitgen.ir.graph import Builder, Graph, Node, equal_sizes, postorder, topological, walked
from jitgen.ir.nodes import CONTRACT, CUSTOM_GRADIENT, DEQUANTIZE, INPUT, PHILOX, REDUCE, VIEW
from jitgen.spec import DTYPES

_OPERANDS = ("a", "b", "c")


def is_saved(node: Node) -> bool:
    """Returns whether the forward saves the value of ``node`` where the backward reads it."""
    return node.kind.is_saved or (node.kind is VIEW and node.attrs == SAVED_VIEW)


def differentiable(node: Node) -> bool:
    """Returns whether values of this dtype have gradients."""
    return DTYPES[node.dtype].is_floating_point


@dataclass(frozen=True)
class Plan:
    """Describes what the backward of a graph reads, for gradients of some of its inputs.

    Attributes:
        graph: the forward.
        wanted: the inputs whose gradients are computed.
        active: the ids of nodes that a gradient flows through.
        inputs: the inputs whose values the backward reads.
        weights: the quantised weights (``dequantize`` nodes) whose values it reads.
        saved: the nodes whose values it reads and cannot compute again from the inputs.
        weighted: products of probabilities and values, of which the scores are computed again.
    """

    graph: Graph
    wanted: tuple[int, ...]
    active: frozenset[int]
    inputs: tuple[int, ...]
    weights: tuple[Node, ...]
    saved: tuple[Node, ...]
    weighted: tuple[Weighted, ...] = ()


def plan(graph: Graph, wanted: Collection[int]) -> Plan:
    """Plans the gradients of the inputs with the indices ``wanted``.

    Raises:
        UnsupportedError: an operation on the way has no derivative here; the message names it and the user's line.
    """
    active = _active(graph, wanted)
    weighted = recognised(graph, active, graph.outputs)
    reached = _reached(graph, active, ())
    compared = _compared(graph, _reached(graph, active, {id(product.base) for product in weighted if product.cancels}))
    again = {id(product.product) for product in weighted} - compared
    read = [value for node in reached for value in _values_read(node, active)]
    read += [value for product in weighted for value in product.read()]
    random = _random(graph)

    def stops(node: Node) -> bool:
        return (is_saved(node) and id(node) not in again) or id(node) in random or node.kind in (INPUT, DEQUANTIZE)

    sums = _sums(graph, read, stops)
    inputs: dict[int, None] = {}
    weights: dict[int, Node] = {}
    saved: dict[int, Node] = {}
    for node in walked(list(reversed(read)), lambda node: () if stops(node) or node in sums else reversed(node.inputs)):
        if node.kind is INPUT:
            inputs[node.attrs.number] = None
        elif node.kind is DEQUANTIZE:
            weights[id(node)] = node
        elif stops(node) or node in sums:
            saved[id(node)] = node
    return Plan(
        graph,
        tuple(sorted(wanted)),
        active,
        tuple(sorted(inputs)),
        tuple(weights.values()),
        tuple(saved.values()),
        tuple(weighted),
    )


def _sums(graph: Graph, read: Sequence[Node], stops: Callable[[Node], bool]) -> set[Node]:
    """Returns the sums to save, such as a residual stream in place of what each layer adds to it: a sum among the
    values ``read`` takes the place of one of its operands that nothing else reads. Without that, a backward computes
    the sum again from everything that the layers before have added."""
    order = list(walked(read, lambda node: () if stops(node) else node.inputs))
    users: dict[Node, list[Node]] = {node: [] for node in order}
    for node in order:
        if not stops(node):
            for child in node.inputs:
                users[child].append(node)
    names = frozenset(name for node in order for size in node.shape for name in symbols.symbols_of(size))
    equal = equal_sizes(graph.guards, names)

    def shape(node: Node) -> tuple[Any, ...]:
        return tuple(symbols.substitute(size, equal) for size in node.shape)

    direct, sums = set(read), set[Node]()
    for node in topological(direct):
        if node not in direct or stops(node) or not node.kind.is_pointwise:
            continue
        ends = walked(node.inputs, lambda end: () if stops(end) or end in sums else end.inputs)
        alike = [
            end for end in ends if (stops(end) or end in sums) and end.dtype == node.dtype and shape(end) == shape(node)
        ]
        own = [end for end in alike if end.kind is not INPUT and end not in sums]
        if len(alike) > 1 and any(_is_read_by(end, node, users, direct, sums) for end in own):
            sums.add(node)
    return sums


def _is_read_by(
    end: Node, node: Node, users: Mapping[Node, Sequence[Node]], direct: Collection[Node], sums: Collection[Node]
) -> bool:
    """Returns whether all that the backward computes of ``end`` is computed of ``node``."""
    above = walked([end], lambda other: () if other is node or other in sums else users[other])
    return all(other is node or other in sums or other not in direct for other in above)


def _active(graph: Graph, wanted: Collection[int]) -> frozenset[int]:
    """Returns the ids of nodes that depend differentiably on the inputs ``wanted``."""
    active: set[int] = set()
    for node in topological(graph.outputs):
        if node.kind is INPUT:
            flows = node.attrs.number in wanted
        else:
            flows = not is_detached(node) and bool(active_operands(node, active))
        if flows and differentiable(node):
            active.add(id(node))
    return frozenset(active)


def _reached(graph: Graph, active: Collection[int], zero: Collection[int]) -> list[Node]:
    """Returns the nodes, each after its operands, whose gradients are asked for; those of ``zero`` are known to be
    zero."""

    def has_gradient(node: Node) -> bool:
        return id(node) in active and id(node) not in zero

    def below(node: Node) -> Iterable[Node]:
        return filter(has_gradient, (node.inputs[position] for position in differentiated(node)))

    reached = set(walked(filter(has_gradient, graph.outputs), below))
    return [node for node in topological(graph.outputs) if node in reached and node.kind is not INPUT]


def _compared(graph: Graph, reached: Iterable[Node]) -> set[int]:
    """Returns the ids of products whose elements a backward compares with an extremum of them, to find it again.

    A product that another kernel computes again adds up in another order, and then no element is the extremum.
    """
    extrema = (node.inputs[0] for node in reached if node.kind is REDUCE and node.attrs.kind in ("max", "min"))
    ends = frozenset(id(node) for node in topological(graph.outputs) if node.kind.is_saved)
    return {id(node) for node in topological(extrema, known=ends) if node.kind is CONTRACT}


def _random(graph: Graph) -> frozenset[int]:
    """Returns the ids of nodes that are computed pointwise from random numbers: to draw them again gives others."""
    ids: set[int] = set()
    for node in topological(graph.outputs):
        if node.kind is PHILOX or (not node.kind.is_saved and any(id(child) in ids for child in node.inputs)):
            ids.add(id(node))
    return frozenset(ids)


def active_operands(node: Node, active: Collection[int]) -> list[int]:
    """Returns the positions of the operands of ``node`` that a gradient flows to."""
    return [position for position in differentiated(node) if id(node.inputs[position]) in active]


def _values_read(node: Node, active: Collection[int]) -> Iterable[Node]:
    """Returns the nodes whose values the backward of ``node`` reads."""
    positions = active_operands(node, active)
    if node.kind in DERIVATIVES:
        return DERIVATIVES[node.kind].reads(node, positions)
    rules = RULES.get(node.op)
    if rules is None:
        where = f"\n  {node.location}" if node.location else ""
        raise UnsupportedError(
            f"gradients of {node.op} are not supported{where}\n  call the function under torch.no_grad(), or compute "
            "this step outside of it"
        )
    wanted = [rules[position] for position in positions]
    names = dict.fromkeys(name for rule in wanted if rule is not None for name in reads(rule))
    return [node if name == "out" else node.inputs[_OPERANDS.index(name)] for name in names]


def without_gradient(graph: Graph, wanted: Collection[int]) -> tuple[int, ...]:
    """Returns the positions of results that do not depend differentiably on the inputs ``wanted``."""
    active = _active(graph, wanted)
    return tuple(index for index, node in enumerate(graph.outputs) if id(node) not in active)


def inputs_reached(plan: Plan, results: Iterable[Node]) -> frozenset[int]:
    """Returns the inputs to which a gradient flows from ``results``; eager torch gives the others none."""

    def below(node: Node) -> Iterable[Node]:
        return (node.inputs[position] for position in active_operands(node, plan.active))

    nodes = walked((node for node in results if id(node) in plan.active), below)
    return frozenset(node.attrs.number for node in nodes if node.kind is INPUT)


def launched(graph: Graph, results: Sequence[Node], returned: int) -> tuple[Graph, tuple[int, ...]]:
    """Returns the graph that a call launches to get the values of ``results``, and for each of these its position among
    the graph's results.

    Nodes that differ in where no gradient flows have one value. The first ``returned`` have memory of their own, since
    the function returns them as tensors of their own; of the others only one has.
    """
    plain = without_marks(graph, results)
    builder, outputs, indices = Builder(), list[Node](), list[int]()
    for index, node in enumerate(plain.outputs):
        if node in outputs and index < returned:
            node = builder.make("cast", (node,), node.dtype, node.shape, ("copy", returned + index))
        if node not in outputs:
            outputs.append(node)
        indices.append(outputs.index(node))
    return replace(plain, outputs=tuple(outputs)), tuple(indices)


def without_marks(graph: Graph, results: Sequence[Node]) -> Graph:
    """Returns ``graph`` with ``results`` as its results, and without the marks for its gradients."""
    builder = Builder()
    replaced: dict[int, Node] = {}

    def is_mark(node: Node) -> bool:
        is_transparent = node.kind is VIEW and node.attrs in TRANSPARENT
        return is_transparent or is_detached(node) or node.kind is CUSTOM_GRADIENT

    def read(node: Node) -> Sequence[Node]:
        return node.inputs[:1] if is_mark(node) else node.inputs

    for node in postorder(results, read):
        children = [replaced[id(child)] for child in read(node)]
        replaced[id(node)] = children[0] if is_mark(node) else builder.like(node, children)
    return replace(graph, outputs=tuple(replaced[id(node)] for node in results), mutated=())
