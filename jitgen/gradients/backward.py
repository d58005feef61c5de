"""Makes the backward of a graph, which is another graph: rules make it of the nodes, and no function is traced.

It walks the forward from its results to its inputs, and adds up for every node what the nodes that read it contribute
to its gradient. Gradients of 16-bit values are summed in float32; what leaves the backward has its input's dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from jitgen.gradients.plan import Plan, active_operands
from jitgen.gradients.replay import Replay
from jitgen.gradients.rules import RULES, apply, reads
from jitgen.gradients.structured import DERIVATIVES
from jitgen.gradients.values import BackwardTrace, Functions, Value
from jitgen.gradients.weights import RowGradients, recognised
from jitgen.ir.body import compute_dtype
from jitgen.ir.graph import Node, topological
from jitgen.ir.nodes import INPUT
from jitgen.spec import DTYPES
from jitgen.trace.boundary import graph_of, settings_guards
from jitgen.trace.guards import tracing
from jitgen.trace.request import TraceRequest
from jitgen.trace.traced import Traced


@dataclass(frozen=True, eq=False)
class Backward:
    """Describes a backward: from gradients of some values of a graph (``seeds``) it computes those of some inputs.

    Attributes:
        plan: the inputs, and what of the forward is read.
        seeds: the values whose gradients are given.
        sizes_of: inputs of which the sizes alone are read.
    """

    plan: Plan
    seeds: tuple[Node, ...]
    sizes_of: tuple[int, ...]

    def traced(self, name: str, request: TraceRequest) -> Traced:
        """Makes the graph.

        Args:
            name: for kernels and messages.
            request: its leaves, of which facts are read alone, are the gradients, tensors of the forward as ``plan``
                has them (inputs, saved values, weights), those of ``sizes_of``, and symbolic numbers.
        """
        guards = request.guards
        trace = BackwardTrace(name, guards, request)
        functions = Functions(trace)
        token = tracing.set(guards)  # of the settings too that rows ask for
        try:
            results = self._computed(functions, iter([functions.entered(leaf) for leaf in request.leaves]))
        finally:
            tracing.reset(token)
        traced = Traced.from_graph(graph_of(trace, _outputs(results, trace)))
        return replace(traced, guards=tuple(settings_guards(guards)))

    def _computed(self, functions: Functions, leaves: Iterator[Any]) -> list[Value]:
        """Computes the gradients of the inputs ``plan.wanted``."""
        plan, graph = self.plan, self.plan.graph
        seeds = [(node, next(leaves)) for node in self.seeds]
        inputs = {index: next(leaves) for index in plan.inputs}
        known = {id(node): next(leaves) for node in (*plan.saved, *plan.weights)}
        known |= {
            id(node): inputs[node.attrs.number]
            for node in topological(graph.outputs)
            if node.kind is INPUT and node.attrs.number in inputs
        }
        sizes = inputs | {index: next(leaves) for index in self.sizes_of}
        environment = environment_of(sizes, leaves)
        forward = Replay(known, environment, functions)
        return [
            gradient
            if gradient is not None
            else functions.zeros(
                tuple(map(forward.size, graph.inputs[index].shape)), dtype=DTYPES[graph.inputs[index].dtype]
            )
            for index, gradient in zip(plan.wanted, gradients(plan, seeds, forward), strict=True)
        ]


def environment_of(tensors: Mapping[int, Value], numbers: Iterable[Any]) -> dict[str, Any]:
    """Returns a value for every symbol of the forward; ``tensors`` are its inputs by their indices."""
    sizes = {f"s{i}_{dim}": size for i, tensor in tensors.items() for dim, size in enumerate(tensor.shape)}
    return sizes | {f"a{index}": number for index, number in enumerate(numbers)}


def _outputs(results: Sequence[Value], trace: BackwardTrace) -> list[Node]:
    """Returns the nodes of ``results``. Two values of one node are two tensors."""
    outputs: dict[int, Node] = {}
    for result in results:
        node = result.node
        if not node.is_in_memory and id(result) not in outputs and node in outputs.values():
            node = trace.marked(node, ("copy", len(outputs)))
        if id(result) not in outputs:
            outputs[id(result)] = node
    return [outputs[id(result)] for result in results]


def gradients(plan: Plan, seeds: Sequence[tuple[Node, Any]], forward: Replay) -> list[Any]:
    """Computes the gradients of the inputs ``plan.wanted``; None for one that does not depend on what is given.

    Args:
        seeds: values of the forward, each with its gradient.
    """
    total: dict[int, Any] = {}
    for node, gradient in seeds:
        _add(total, node, gradient)
    roots = [node for node, _ in seeds]
    weighted = plan.weighted
    if any(node not in plan.graph.outputs for node in roots):  # what the forward saves has gradients of a second order
        weighted = tuple(recognised(plan.graph, plan.active, roots))
    rows = RowGradients(weighted, forward.value, forward.shape)
    for node in reversed(topological(roots)):
        if id(node) not in total or node.kind is INPUT or id(node) not in plan.active:
            continue
        g = total.pop(id(node))
        forward.at(node)
        if rows.is_zero(node):
            continue
        rows.meet(node, g)
        positions = active_operands(node, plan.active)
        for position, (row, gradient) in rows.of_operands(node).items():
            positions = [other for other in positions if other != position]
            if gradient is not None:
                _add(total, row, gradient)
        if node.kind in DERIVATIVES:
            contributions = DERIVATIVES[node.kind].gradients(node, g, positions, forward)
        else:
            contributions = _pointwise(node, g, positions, forward)
        for position, contribution in contributions.items():
            _add(total, node.inputs[position], contribution)
    inputs = {node.attrs.number: node for node in topological(roots) if node.kind is INPUT}
    results = [total.get(id(inputs[index])) if index in inputs else None for index in plan.wanted]
    return [
        None if g is None else g.to(DTYPES[plan.graph.inputs[index].dtype])
        for index, g in zip(plan.wanted, results, strict=True)
    ]


def _add(total: dict[int, Any], node: Node, gradient: Any) -> None:
    gradient = gradient.to(DTYPES[compute_dtype(node.dtype)])
    total[id(node)] = total[id(node)] + gradient if id(node) in total else gradient


def _pointwise(node: Node, g: Any, positions: Sequence[int], forward: Replay) -> dict[int, Any]:
    rows = RULES[node.op]
    names = {name for position in positions if rows[position] for name in reads(rows[position])}
    nodes = dict(zip("abc", node.inputs, strict=False)) | {"out": node}
    values = {name: _in_dtype(forward.value(nodes[name]), g.dtype) for name in sorted(names)}
    gradients_ = {}
    for position in positions:
        rule = rows[position]
        if rule is not None:
            gradients_[position] = apply(rule, g, values)
    return gradients_


def _in_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Converts a floating tensor to ``dtype``, in which its gradient is computed; any other value stays as it is."""
    return value.to(dtype) if isinstance(value, Value) and value.is_floating_point() else value
