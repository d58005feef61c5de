"""Turns arguments into proxies as they enter a trace, and a return value into outputs of the graph.

Neighbours: ``run.py`` runs a user's function between the two, ``importing.py`` a function of jitgen's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from jitgen.ir.graph import Graph, Node
from jitgen.quant import weights
from jitgen.trace import keeping, own_facts
from jitgen.trace.captured import Captured, default_dtype_guard, matmul_precision_guard
from jitgen.trace.guards import Guards
from jitgen.trace.host_scalars import SymbolicScalar
from jitgen.trace.numbers import unwrap, wrap
from jitgen.trace.proxy import TensorProxy
from jitgen.trace.traced import Output
from jitgen.trace.tracer import Trace


def entered(
    trace: Trace, leaves: Sequence[Any], tree: pytree.TreeSpec, known: dict[int, Any] | None = None
) -> tuple[Any, Any]:
    """Returns the positional and keyword arguments that the function gets.

    Args:
        leaves, tree: the flattened ``(args, kwargs)``.
        known: where the function compares by ``is``, what it gets for tensors so far, by their ids: for one tensor
            always the same object, and for one that it also reaches by name that one.
    """
    arguments = pytree.tree_unflatten(
        [
            _tensor(trace, leaf, position, known)
            if isinstance(leaf, torch.Tensor)
            else trace.host_scalar(leaf)
            if isinstance(leaf, SymbolicScalar)
            else wrap(unwrap(leaf), trace.guards)  # of its own, which must not outlive the trace
            for position, leaf in enumerate(leaves)
        ],
        tree,
    )
    proxied: tuple[Any, Any] = pytree.tree_map(
        lambda leaf: trace.quantized.argument(leaf) if weights.is_unpacked(leaf) else leaf,
        arguments,
        is_leaf=weights.is_unpacked,
    )
    return proxied


def _tensor(trace: Trace, tensor: torch.Tensor, position: int, known: dict[int, Any] | None) -> Any:
    proxy = trace.input(tensor, position)
    return proxy if known is None else known.setdefault(id(tensor), proxy)


@dataclass
class Returned:
    """Holds a return value.

    Attributes:
        outputs: the nodes of its tensors.
        leaves, tree: the value, flattened, and its structure.
        positions: of each proxy among ``outputs``, by its id.
    """

    outputs: list[Node]
    leaves: list[Output]
    tree: pytree.TreeSpec
    positions: dict[int, int]


def returned(trace: Trace, result: Any) -> Returned:
    """Flattens what the function has returned."""
    # pytree takes a torch.Size for a tuple.
    flat, tree = pytree.tree_flatten(result, is_leaf=lambda value: isinstance(value, torch.Size))
    result_ = Returned([], [], tree, {})
    for leaf in flat:
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, TensorProxy):
            leaf = trace.captured_proxy(leaf)
        if isinstance(leaf, TensorProxy):
            result_.positions.setdefault(id(leaf), len(result_.outputs))
            result_.leaves.append(own_facts.output(trace, leaf, len(result_.outputs)))
            result_.outputs.append(trace.returned(leaf))
        else:
            result_.leaves.append(Output(None, keeping.number(leaf)))
    return result_


def graph_of(trace: Trace, outputs: Sequence[Node]) -> Graph:
    """Builds the graph of all that was traced."""
    mutated = tuple(sorted(trace.new_values.by_input.items()))
    return Graph(trace.name, tuple(trace.inputs), tuple(outputs), tuple(trace.guards), mutated)


def settings_guards(guards: Guards) -> list[Captured]:
    """Lists the settings of torch that the trace depends on."""
    settings = []
    if guards.default_dtype is not None:
        settings.append(default_dtype_guard(guards.default_dtype))
    if guards.matmul_precision is not None:
        settings.append(matmul_precision_guard(guards.matmul_precision))
    return settings
