"""Runs the backward of a graph: rules in torch calls, each of which is a row that makes nodes (``trace/importing.py``).

It walks the forward from its results to its inputs, and adds up for every node what the nodes that read it contribute
to its gradient. Gradients of 16-bit values are summed in float32; what leaves the backward has its input's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from jitgen.gradients.plan import Plan, active_operands
from jitgen.gradients.replay import Replay
from jitgen.gradients.rules import RULES, apply, reads
from jitgen.gradients.structured import DERIVATIVES
from jitgen.gradients.weights import RowGradients, recognised
from jitgen.ir.body import compute_dtype
from jitgen.ir.graph import Node, topological
from jitgen.ir.nodes import INPUT
from jitgen.spec import DTYPES


def gradients(plan: Plan, given: Sequence[tuple[Node, Any]], forward: Replay) -> list[Any]:
    """Computes the gradients of the inputs ``plan.wanted``; None for one that does not depend on what is given.

    Args:
        given: values of the forward, each with its gradient.
    """
    total: dict[int, Any] = {}
    for node, gradient in given:
        _add(total, node, gradient)
    roots = [node for node, _ in given]
    weighted = plan.weighted
    if any(node not in plan.graph.outputs for node in roots):  # what the forward saves has gradients of a second order
        weighted = tuple(recognised(plan.graph, plan.active, roots))
    rows = RowGradients(weighted, forward.value, forward.shape)
    for node in reversed(topological(roots)):
        if id(node) not in total or node.kind is INPUT or id(node) not in plan.active:
            continue
        g = total.pop(id(node))
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
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
