"""Turns the tensors and sizes that a traced function stores outside of it into outputs of its graph.

Neighbours: ``run.py`` asks here after the function has run; ``kept.py`` exchanges what stands for tensors;
``escapes.py`` refuses what is stored where no exchange reaches it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from jitgen.errors import TraceError
from jitgen.ir.graph import Node
from jitgen.trace import own_facts
from jitgen.trace.journal import Change
from jitgen.trace.kept import Exchange, contained
from jitgen.trace.location import quote
from jitgen.trace.mentions import line_of_change
from jitgen.trace.numbers import unwrap
from jitgen.trace.proxy import TensorProxy
from jitgen.trace.traced import Output, Sizes

if TYPE_CHECKING:
    from jitgen.trace.tracer import Trace


def number(leaf: Any) -> Any:
    """Returns a size or number of a trace as expressions; any other value itself."""
    return Sizes(map(unwrap, leaf)) if isinstance(leaf, torch.Size) else unwrap(leaf)


def _is_number(leaf: Any) -> bool:
    """Returns whether ``leaf`` is a number of a trace, or sizes with one."""
    return any(map(_is_number, leaf)) if isinstance(leaf, torch.Size) else hasattr(type(leaf), "expr")


def described(
    trace: Trace, changes: Sequence[Change], arguments: Any, nodes: list[Node], positions: dict[int, int]
) -> tuple[list[Change], list[Output]]:
    """Replaces each tensor and number of the trace in ``changes`` by an ``Output``; returns the changes and the
    outputs.

    Args:
        arguments: the containers that the trace has made of the call's.
        nodes: the outputs of the graph, to which tensors are added that the function keeps and does not return.
        positions: of tensors among ``nodes``, by their ids.

    Raises:
        TraceError: the function keeps a container among its arguments, or a weak reference to a tensor.
    """
    kept: list[Output] = []
    own = {id(value) for value in contained(arguments) if isinstance(value, (list, dict, deque))}

    def leaf_of(leaf: Any) -> Any:
        if isinstance(leaf, TensorProxy):
            if id(leaf) not in positions:
                positions[id(leaf)] = len(nodes)
                nodes.append(trace.returned(leaf))
            kept.append(own_facts.output(trace, leaf, positions[id(leaf)]))
        elif _is_number(leaf):
            kept.append(Output(None, number(leaf)))
        else:
            return leaf
        return kept[-1]

    exchange, exchanged = Exchange(leaf_of), []
    for change in changes:
        for key in change.keys:
            for value in contained(change.new.get(key)):
                if id(value) in own or (isinstance(value, weakref.ref) and isinstance(value(), TensorProxy | None)):
                    raise TraceError(_refused(trace, change, key, value))
        exchanged.append(change.exchanged(exchange))
    return exchanged, kept


def _refused(trace: Trace, change: Change, key: Any, value: Any) -> str:
    line = quote(line_of_change(trace.captures.codes, change.name))
    if isinstance(value, weakref.ref):
        return (
            f"{trace.name} keeps a weak reference to a tensor, which the trace alone has{line}\n"
            "  return the tensor, and refer to the result of the call"
        )
    kind = type(value).__name__
    return (
        f"{trace.name} keeps its argument, {'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}, in {change.where(key)}: "
        f"the trace has a copy of it{line}\n  store it after the call, or keep a copy: list(...), dict(...)"
    )
