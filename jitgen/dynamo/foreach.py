"""Divides the calls of ``torch._foreach_*`` in Dynamo's graphs into calls for each tensor, which are in programs."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from jitgen.dynamo.program import picks_an_item, value_of
from jitgen.trace import foreach


def divide(graph: fx.Graph) -> None:
    """Replaces the calls of functions of lists in ``graph``, as an optimiser's step has, by those of one tensor."""
    tracer = fx.proxy.GraphAppendingTracer(graph)

    def proxy(item: fx.Node) -> Any:
        return fx.Proxy(item, tracer)

    for node in list(graph.nodes):
        single = _function_of_each(node)
        if single is None:
            continue
        arguments, keywords = fx.node.map_arg(node.args, proxy), fx.node.map_arg(node.kwargs, proxy)
        try:
            rows = foreach.rows_of(node.target.__name__, arguments, keywords, _known)
        except ValueError:  # torch says what is wrong
            continue
        with graph.inserting_before(node):
            calls = [single(*positional, **named).node for positional, named in rows]
        values = [row[0].node.meta["example_value"] for row, _ in rows] if _updates(node) else value_of(node)
        for call, value in zip(calls, values, strict=True):
            call.meta = {**node.meta, "example_value": value}
        for user in list(node.users):
            user.replace_all_uses_with(calls[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)


def _known(value: Any) -> Any:
    return value_of(value.node) if isinstance(value, fx.Proxy) else value


def _updates(node: fx.Node) -> bool:
    return str(getattr(node.target, "__name__", "")).endswith("_")


def _function_of_each(node: fx.Node) -> foreach.Each | None:
    """Returns the function of one tensor, where ``node`` calls one of lists that the graph has item by item; else
    None."""
    name = getattr(node.target, "__name__", "")
    if node.op != "call_function" or getattr(torch, name, None) is not node.target:
        return None
    are_tensors = all(not isinstance(value_of(item), (list, tuple)) for item in node.all_input_nodes)
    return foreach.EACH.get(name) if are_tensors and all(map(picks_an_item, node.users)) else None
