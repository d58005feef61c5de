"""``Program``: a graph of torch.fx that runs as a decorated function.

Dynamo makes graphs of whole models, of which many consist of the same layers. Graphs that are equal but for the names
of their nodes are one program: it is traced once, and its kernels are compiled once.

Neighbours: ``region.py`` and ``backend.py`` make programs of graphs; ``jitgen.call`` runs them.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from jitgen.call.function import JitFunction
from jitgen.errors import JitgenError
from jitgen.quant import weights


class Program:
    """A graph of torch calls, run by generated kernels.

    Attributes:
        function: the decorated function: of the graph's placeholders, in their order.
        tried: whether a trace was tried, before any call.
        failed: the number of the node at which the last trace failed, and why.
    """

    def __init__(self, graph: fx.Graph, name: str):
        self.graph = _bare(graph)
        self.tried = False
        self.failed: tuple[int, str] | None = None
        self.function = JitFunction(self.run, name=name)

    def __call__(self, *leaves: Any) -> Any:
        return self.function(*leaves)

    def run(self, *leaves: Any) -> Any:
        """The graph, node by node: what is traced."""
        rest = iter(leaves)
        values: dict[fx.Node, Any] = {}
        for number, node in enumerate(self.graph.nodes):
            if node.op == "placeholder":
                values[node] = next(rest)
                continue
            if node.op == "output":
                return with_values(node.args[0], values)
            try:
                values[node] = called(node, values)
            except JitgenError as error:
                self.failed = number, str(error).strip().splitlines()[0]
                raise
        raise AssertionError("a graph without an output")


def _bare(graph: fx.Graph) -> fx.Graph:
    """A copy of ``graph`` without what Dynamo knows of its nodes, tensors among that."""
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph, {}))
    for node in copied.nodes:
        node.meta = {}
    return copied


def with_values(argument: Any, values: Mapping[fx.Node, Any]) -> Any:
    """An argument of a node, with the values of nodes in their place, in plain containers."""
    if isinstance(argument, fx.Node):
        return values[argument]
    if isinstance(argument, (list, tuple)) and not isinstance(argument, torch.Size):
        found = [with_values(item, values) for item in argument]
        return found if isinstance(argument, list) else tuple(found)
    if isinstance(argument, dict):
        return {key: with_values(item, values) for key, item in argument.items()}
    if isinstance(argument, slice):
        return slice(*(with_values(item, values) for item in (argument.start, argument.stop, argument.step)))
    return argument


def called(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """What ``node`` computes of these values of other nodes."""
    args, kwargs = with_values(node.args, values), with_values(node.kwargs, values)
    target: Any = node.target
    if node.op == "call_method":
        return getattr(args[0], target)(*args[1:], **kwargs)
    if node.op == "call_function":
        return target(*args, **kwargs)
    raise AssertionError(f"a program has no {node.op}")


def identity(graph: fx.Graph) -> tuple[Any, ...] | None:
    """What equal graphs have in common, whatever their nodes are called; None where an argument has no identity."""
    number = {node: index for index, node in enumerate(graph.nodes)}

    def entered(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return ("node", number[value])
        if isinstance(value, (tuple, list)):
            return (type(value).__name__, *map(entered, value))
        if isinstance(value, dict):
            return ("dict", *((key, entered(item)) for key, item in value.items()))
        if isinstance(value, slice):
            return ("slice", *map(entered, (value.start, value.stop, value.step)))
        hash(value)
        return type(value), repr(value) if isinstance(value, float) else value

    try:
        return tuple(
            ("placeholder", _kind(value_of(node)))
            if node.op == "placeholder"
            else (node.op, node.target, entered(node.args), entered(node.kwargs))
            for node in graph.nodes
        )
    except TypeError:
        return None


def _kind(value: Any) -> Any:
    """What traces of a placeholder's values have in common."""
    if weights.is_quantized(value):
        return value.token
    if isinstance(value, torch.Tensor):
        sizes = tuple(size if isinstance(size, int) and size <= 1 else None for size in value.shape)
        return value.dtype, value.device.type, sizes
    return type(value)


_programs: dict[tuple[Any, ...], Program] = {}
MAX_PROGRAMS = 512
"""Programs remembered for graphs to come; a table that is full is emptied."""


def program_of(graph: fx.Graph, name: str) -> Program:
    """The program of ``graph``, whose nodes are placeholders, calls of torch functions and methods, and the output."""
    key = identity(graph)
    if key is None:
        return Program(graph, name)
    if key not in _programs:
        if len(_programs) >= MAX_PROGRAMS:
            _programs.clear()
        _programs[key] = Program(graph, name)
    return _programs[key]


def is_call(node: fx.Node) -> bool:
    """Whether ``node`` calls a function or a method."""
    return node.op in ("call_function", "call_method")


def picks_an_item(node: fx.Node) -> bool:
    """Whether ``node`` is an item of what another one returned as a tuple."""
    return (
        node.op == "call_function"
        and node.target is operator.getitem
        and isinstance(node.args[1], int)
        and not isinstance(value_of(node.args[0]), torch.Tensor)
    )


def value_of(node: Any) -> Any:
    """What Dynamo knows of the value of ``node``: a fake tensor, a symbolic number, or a structure of these."""
    return node.meta.get("example_value") if isinstance(node, fx.Node) else node
