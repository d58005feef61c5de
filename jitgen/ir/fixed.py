"""Fixes sizes of graphs to numbers: what a trace at these sizes leaves of a graph with symbols for them.

A size of 1 is static in a graph. ``deploy/row_variants.py`` makes the graphs of calls with one row of a recorded call
with several; ``call/resolver.py`` does so where a program that torch exported is called with one row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jitgen.ir import symbols
from jitgen.ir.graph import Builder, Graph, Guard, InputSpec, Node, reduced_dims, topological
from jitgen.ir.nodes import REDUCE, SCALAR, VIEW
from jitgen.ir.symbols import Expr, Size
from jitgen.spec import DTYPES


def with_sizes(graph: Graph, sizes: Mapping[str, Size]) -> Graph | None:
    """Returns ``graph`` with ``sizes`` in place of their symbols; None if a guard rules them out. They are numbers, or
    other symbols that guards say are equal."""
    guards = []
    for guard in graph.guards:
        expr = symbols.substitute(guard.expr, sizes)
        if isinstance(expr, Expr):
            guards.append(Guard(expr, guard.value))
        elif expr != guard.value:
            return None
    builder, memo = Builder(), dict[int, Node]()
    for node in topological(graph.results):
        shape = tuple(symbols.substitute(size, sizes) for size in node.shape)
        children = [memo[id(child)] for child in node.inputs]
        if node.kind is VIEW and node.attrs.kind in ("expand", "reshape") and shape == children[0].shape:
            memo[id(node)] = children[0]  # a trace at these sizes has no such view
        elif node.kind is REDUCE:
            memo[id(node)] = _reduced(builder, node, children[0], shape)
        elif node.kind is SCALAR:
            value = symbols.substitute(node.attrs.value, sizes)
            known = DTYPES[node.dtype].is_floating_point and not isinstance(value, Expr)
            memo[id(node)] = builder.scalar(float(value) if known else value, node.dtype)  # type: ignore[arg-type]
        else:
            memo[id(node)] = builder.make(node.op, children, node.dtype, shape, _substituted(node.attrs, sizes))  # type: ignore[arg-type]
    inputs = tuple(
        InputSpec(spec.dtype, tuple(symbols.substitute(size, sizes) for size in spec.shape))  # type: ignore[misc]
        for spec in graph.inputs
    )
    return Graph(
        graph.name,
        inputs,
        tuple(memo[id(node)] for node in graph.outputs),
        tuple(dict.fromkeys(guards)),
        tuple((index, memo[id(node)]) for index, node in graph.mutated),
    )


def _reduced(builder: Builder, node: Node, source: Node, shape: Any) -> Node:
    """Rebuilds the reduction ``node`` over ``source``, as a trace has it if some of its dimensions are of size 1."""
    kind, dims = node.attrs.kind, reduced_dims(node.attrs.kind, node.attrs.dims, source.shape)
    if dims:
        return builder.make("reduce", (source,), node.dtype, shape, (kind, dims))
    return source if source.dtype == node.dtype else builder.make("cast", (source,), node.dtype, shape)


def _substituted(value: Any, sizes: Mapping[str, Size]) -> Any:
    """Substitutes ``sizes`` for their symbols in ``value``, an attribute of a node."""
    if isinstance(value, tuple):
        return tuple(_substituted(item, sizes) for item in value)
    return symbols.substitute(value, sizes)
