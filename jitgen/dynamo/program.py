"""``Program``: a graph of torch.fx that runs as a decorated function.

Dynamo makes graphs of whole models, of which many consist of the same layers. Graphs that are equal but for the names
of their nodes are one program: it is traced once, and its kernels are compiled once.

Neighbours: ``region.py`` and ``backend.py`` make programs of graphs; ``jitgen.call`` runs them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from jitgen.call.function import JitFunction
from jitgen.errors import JitgenError, UnsupportedError
from jitgen.quant import weights
from jitgen.trace.proxy import TensorProxy


@dataclass(frozen=True)
class Claims:
    """What Dynamo knows of the memory of a program's values, which are numbered in the order of its graph.

    Attributes:
        orders: for each result that is a tensor, its dimensions from the outermost to the innermost in memory.
        shared: (value, other value) of those that share memory which the program writes to.
        own: values in memory of their own, of which one or the other is written to.
    """

    orders: tuple[tuple[int, ...] | None, ...]
    shared: tuple[tuple[int, int], ...] = ()
    own: frozenset[int] = frozenset()

    def checked(self, number: int, value: Any, values: Sequence[Any]) -> Any:
        """``value``, which is traced as number ``number``, in memory of its own where that is claimed.

        Raises:
            UnsupportedError: the trace has it apart from memory that it shares.
        """
        if number in self.own:
            return pytree.tree_map_only(TensorProxy, _apart, value)
        for other in (other for left, other in self.shared if left == number):
            memories = {id(leaf.memory) for leaf in _proxies(values[other])}
            if any(id(leaf.memory) not in memories for leaf in _proxies(value)):
                raise UnsupportedError("kernels would update a copy of this view")
        return value

    def returned(self, results: Sequence[Any], inputs: Sequence[Any]) -> tuple[Any, ...]:
        """The traced results, each in memory of its own, with their dimensions in the order of their memory."""
        taken = {id(leaf.memory) for leaf in _proxies(inputs)}
        found = []
        for result, order in zip(results, self.orders, strict=True):
            if isinstance(result, TensorProxy) and order is not None:
                memory, result = id(result.memory), result.clone() if id(result.memory) in taken else result
                taken.add(memory)
                result = (result if order == tuple(sorted(order)) else result.permute(order)).contiguous()
            found.append(result)
        return tuple(found)

    def restored(self, results: Sequence[Any]) -> tuple[Any, ...]:
        """What a call returned, with dimensions in the order that Dynamo knows."""
        found = list(results)
        for index, inverse in self.permuted:
            found[index] = found[index].permute(inverse)
        return tuple(found)

    @functools.cached_property
    def permuted(self) -> list[tuple[int, list[int]]]:
        """The results whose memory is in another order than their dimensions; each with the positions of these."""
        orders = [(index, order) for index, order in enumerate(self.orders) if order]
        return [
            (i, [order.index(dim) for dim in sorted(order)]) for i, order in orders if order != tuple(sorted(order))
        ]


def _proxies(value: Any) -> list[TensorProxy]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, TensorProxy)]


def _apart(tensor: Any) -> Any:
    """``tensor``, or a copy where others share its memory."""
    return tensor.clone() if len(tensor.memory.proxies) > 1 else tensor


class Program:
    """A graph of torch calls, run by generated kernels.

    Attributes:
        function: the decorated function: of the graph's placeholders, in their order.
        claims: what it keeps to where it is a piece of a graph of Dynamo's.
        tried: whether a trace was tried, before any call.
        failed: the number of the node at which the last trace failed, and why.
    """

    def __init__(self, graph: fx.Graph, name: str, claims: Claims | None = None):
        self.graph = _bare(graph)
        self.claims = claims
        self.tried = False
        self.failed: tuple[int, str] | None = None
        self.function = JitFunction(self.run, name=name)

    def __call__(self, *leaves: Any) -> Any:
        results = self.function(*leaves)
        return results if self.claims is None else self.claims.restored(results)

    def run(self, *leaves: Any) -> Any:
        """The graph, node by node: what is traced."""
        rest = iter(leaves)
        values: dict[fx.Node, Any] = {}
        for number, node in enumerate(self.graph.nodes):
            if node.op == "placeholder":
                values[node] = next(rest)
                continue
            if node.op == "output":
                results: Any = with_values(node.args[0], values)
                return results if self.claims is None else self.claims.returned(results, leaves)
            try:
                value = called(node, values)
                values[node] = value if self.claims is None else self.claims.checked(number, value, [*values.values()])
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


_programs: dict[tuple[tuple[Any, ...], Claims | None], Program] = {}
MAX_PROGRAMS = 512
"""Programs remembered for graphs to come; a table that is full is emptied."""


def program_of(graph: fx.Graph, name: str, claims: Claims | None = None) -> Program:
    """The program of ``graph``, whose nodes are placeholders, calls of torch functions and methods, and the output."""
    found = identity(graph)
    if found is None:
        return Program(graph, name, claims)
    key = found, claims
    if key not in _programs:
        if len(_programs) >= MAX_PROGRAMS:
            _programs.clear()
        _programs[key] = Program(graph, name, claims)
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


def hint(size: Any) -> int | None:
    """The size for which Dynamo traces; None where elements decide it, as of ``x[x > 0]``."""
    found = size.node.hint if isinstance(size, torch.SymInt) else size
    return None if found is None else int(found)
