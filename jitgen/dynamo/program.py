"""Defines ``Program``: calls of a graph of torch.fx that run as a decorated function.

Dynamo makes graphs of whole models, of which many consist of the same layers. Runs of calls that are equal but for the
names of their nodes are one program: it is recognised before anything is made of it, then imported once, and its
kernels are compiled once.

Neighbours: ``region.py`` and ``backend.py`` make programs; ``jitgen.call`` runs them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from jitgen import settings
from jitgen.call.function import JitFunction
from jitgen.call.lower import specialize
from jitgen.call.resolver import ResolverOfPart
from jitgen.call.table import Table
from jitgen.errors import JitgenError, UnsupportedError
from jitgen.mistakes import SYSTEM_ERRORS
from jitgen.quant import weights
from jitgen.spec import TensorSpec
from jitgen.trace import autocast
from jitgen.trace.importing import further_input
from jitgen.trace.proxy import TensorProxy, untraceable


@dataclass(frozen=True)
class Claims:
    """Describes what Dynamo knows of the memory of a program's values, which are numbered in the order of its graph.

    Attributes:
        orders: for each result that is a tensor, its dimensions from the outermost to the innermost in memory.
        shared: (value, other value) of those that share memory which the program writes to.
        own: values in memory of their own, of which one or the other is written to.
    """

    orders: tuple[tuple[int, ...] | None, ...]
    shared: tuple[tuple[int, int], ...] = ()
    own: frozenset[int] = frozenset()

    def checked(self, number: int, value: Any, values: Sequence[Any]) -> Any:
        """Returns ``value``, which is traced as number ``number``, in memory of its own if that is claimed.

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
        """Returns the traced results, each in memory of its own, with their dimensions in the order of their memory."""
        taken = {id(leaf.memory) for leaf in _proxies(inputs)}
        tensors = []
        for result, order in zip(results, self.orders, strict=True):
            if isinstance(result, TensorProxy) and order is not None:
                memory, result = id(result.memory), result.clone() if id(result.memory) in taken else result
                taken.add(memory)
                result = (result if order == tuple(sorted(order)) else result.permute(order)).contiguous()
            tensors.append(result)
        return tuple(tensors)

    def restored(self, results: Sequence[Any]) -> tuple[Any, ...]:
        """Returns what a call returned, with dimensions in the order that Dynamo knows."""
        restored = list(results)
        for index, inverse in self.permuted:
            restored[index] = restored[index].permute(inverse)
        return tuple(restored)

    @functools.cached_property
    def permuted(self) -> list[tuple[int, list[int]]]:
        """Returns the results whose memory is in another order than their dimensions; each with the positions of
        these."""
        orders = [(index, order) for index, order in enumerate(self.orders) if order]
        return [
            (i, [order.index(dim) for dim in sorted(order)]) for i, order in orders if order != tuple(sorted(order))
        ]


def _proxies(value: Any) -> list[TensorProxy]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, TensorProxy)]


def _apart(tensor: Any) -> Any:
    """Returns ``tensor``, or a copy if others share its memory."""
    return tensor.clone() if len(tensor.memory.proxies) > 1 else tensor


class _ProgramFunction(JitFunction[..., Any]):
    """Decorates the function of a program, whose graph is imported instead of traced."""

    __slots__ = ()
    _resolver_class = ResolverOfPart

    def specialize(self, specs: Sequence[Any], device: torch.device, differentiable: bool) -> None:
        """Imports the graph for a call with these arguments; see ``call/lower.py``."""
        specialize(self._resolver, self._parameters, tuple(specs), device, differentiable)


@dataclass(frozen=True, eq=False)
class _Trial:
    """Tries an import, to learn which calls no kernel can compute.

    Attributes:
        program: what is imported.
        known: what Dynamo knows of the values of its graph.
        refused: such calls so far, by their numbers in the graph, each with the reason.
    """

    program: Program
    known: Sequence[Any]
    refused: dict[int, str] = field(default_factory=dict)


_trial: ContextVar[_Trial | None] = ContextVar("trial", default=None)
"""The trial in progress in this thread. Other threads may call the same program meanwhile."""


class Program:
    """Runs calls of torch functions by generated kernels.

    Attributes:
        function: the decorated function of its inputs, in their order.
        claims: what it keeps to where it is a piece of a graph of Dynamo's.
    """

    def __init__(self, graph: fx.Graph, name: str, claims: Claims | None = None):
        """Takes ``graph``, which consists of placeholders, calls, and the output."""
        self.graph = graph
        self.claims = claims
        self.function = _ProgramFunction(self.run, name=name)
        self._refused: Table[Any, Mapping[int, str]] = Table()
        """The results of trials, by all that a trial depends on."""

    def __call__(self, *leaves: Any) -> Any:
        results = self.function(*leaves)
        return results if self.claims is None else self.claims.restored(results)

    def refused(self, known: Sequence[Any]) -> Mapping[int, str]:
        """Returns the calls that no kernel can compute, by their numbers in the graph, each with the reason. One pass
        tells all: what reads the result of such a call gets a tensor that stands for it.

        Args:
            known: what Dynamo knows of the values of the graph.
        """
        specs = [spec_of(value) for value in known[: len(self.graph.find_nodes(op="placeholder"))]]
        if any(spec is None for spec in specs):
            return {}
        device, differentiable = _device_of(known), _needs_grad(known)
        key = tuple(map(_hashable, specs)), device, differentiable, autocast.settings()
        refused = self._refused.get(key)
        if refused is None:
            refused = self._tried(known, specs, device, differentiable)
            self._refused.put(key, refused)
        return refused

    def _tried(
        self, known: Sequence[Any], specs: Sequence[Any], device: torch.device, differentiable: bool
    ) -> Mapping[int, str]:
        """Returns the calls that no kernel can compute, as one import shows."""
        trial = _Trial(self, known)
        with settings.within(_trial, trial), suppress(JitgenError):
            self.function.specialize(specs, device, differentiable)
        return trial.refused

    def run(self, *leaves: Any) -> Any:
        """Makes the calls, one by one."""
        trial = _trial.get()
        if trial is not None and trial.program is not self:
            trial = None
        rest = iter(leaves)
        values: dict[fx.Node, Any] = {}
        for number, node in enumerate(self.graph.nodes):
            if node.op == "placeholder":
                values[node] = next(rest)
                continue
            if node.op == "output":
                break
            try:
                value = called(node, values)
                if self.claims is not None and not (trial is not None and trial.refused):
                    value = self.claims.checked(number, value, [*values.values()])
            except Exception as error:
                if trial is None or isinstance(error, SYSTEM_ERRORS):
                    raise
                said = untraceable(error) or str(error).strip() or type(error).__name__
                trial.refused[number] = said.splitlines()[0]
                value = _stand_ins(trial.known[number]) if node.users else None
            values[node] = value
        if trial is not None and trial.refused:
            raise UnsupportedError(next(iter(trial.refused.values())))
        results: Any = with_values(node.args[0], values)
        return results if self.claims is None else self.claims.returned(results, leaves)


def _hashable(spec: Any) -> Any:
    """Returns ``spec`` as a part of a key: equal numbers of two types are two, and what has no hash is its text."""
    try:
        hash(spec)
    except TypeError:
        return type(spec), repr(spec)
    return type(spec), spec


def _stand_ins(known: Any) -> Any:
    """Makes placeholders for a value that torch computes and Dynamo knows as ``known``, for a graph that is imported.

    Raises:
        UnsupportedError: nothing can stand for it, and so what reads it is not looked at.
    """
    if known is None:
        raise UnsupportedError("nothing is known of what torch computes")
    with torch._C.DisableTorchFunction():
        return pytree.tree_map(_stand_in, known)


def _stand_in(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        sizes, strides = hints(value.shape), hints(value.stride())
        if sizes is not None and strides is not None:
            return further_input(torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta"))
        raise UnsupportedError("elements decide a size of what torch computes")
    if isinstance(value, torch.SymInt):
        value = hint(value)
        if value is None:
            raise UnsupportedError("elements decide a number that torch computes")
    if isinstance(value, (torch.SymFloat, torch.SymBool)):
        raise UnsupportedError("a number that torch computes is not known")
    return value


def spec_of(value: Any) -> Any:
    """Returns what an import is tried with, in place of what Dynamo knows of a value; None if that cannot be."""
    if weights.is_quantized(value):
        token = value.token
        return TensorSpec(
            token.shape, token.dtype, format=token.format, group_size=token.group_size, activation=token.activation
        )
    if isinstance(value, torch.Tensor):
        if type(value).__name__ != "FakeTensor" and type(value) not in (torch.Tensor, torch.nn.Parameter):
            return None
        sizes, strides = hints(value.shape), hints(value.stride())
        return None if sizes is None or strides is None else TensorSpec(sizes, value.dtype, strides=strides)
    if isinstance(value, (torch.SymInt, int)) and not isinstance(value, bool):
        return hint(value)
    return None if isinstance(value, (torch.SymFloat, torch.SymBool)) else value


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(list(values)) if isinstance(leaf, torch.Tensor)]


def _device_of(values: Sequence[Any]) -> torch.device:
    """Returns the device of a program's call, which a tensor without dimensions on the CPU does not decide."""
    devices = [tensor.device for tensor in _tensors(values)]
    on_gpu = (device for device in devices if device.type == "cuda" and torch.cuda.is_available())
    return next(on_gpu, torch.device("cpu"))


def _needs_grad(values: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in _tensors(values))


def with_values(argument: Any, values: Mapping[fx.Node, Any]) -> Any:
    """Returns an argument of a node, with the values of nodes in their place, in plain containers."""
    if isinstance(argument, fx.Node):
        return values[argument]
    if isinstance(argument, (list, tuple)) and not isinstance(argument, torch.Size):
        items = [with_values(item, values) for item in argument]
        return items if isinstance(argument, list) else tuple(items)
    if isinstance(argument, dict):
        return {key: with_values(item, values) for key, item in argument.items()}
    if isinstance(argument, slice):
        return slice(*(with_values(item, values) for item in (argument.start, argument.stop, argument.step)))
    return argument


def called(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """Returns what ``node`` computes of these values of other nodes."""
    args, kwargs = with_values(node.args, values), with_values(node.kwargs, values)
    target: Any = node.target
    if node.op == "call_method":
        return getattr(args[0], target)(*args[1:], **kwargs)
    if node.op == "call_function":
        return target(*args, **kwargs)
    raise AssertionError(f"a program has no {node.op}")


def identity(inputs: Sequence[fx.Node], nodes: Sequence[fx.Node], result: Any) -> tuple[Any, ...] | None:
    """Returns a key that equal runs of calls have in common, whatever their nodes are called; None if an argument has
    no identity.

    Args:
        inputs: what ``nodes`` read from elsewhere.
        result: a structure of nodes, which is returned.
    """
    number = {node: index for index, node in enumerate((*inputs, *nodes))}

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
        kinds = tuple(_kind(value_of(node)) for node in inputs)
        calls = tuple((node.op, node.target, entered(node.args), entered(node.kwargs)) for node in nodes)
        return kinds, calls, entered(result)
    except TypeError:
        return None


def _kind(value: Any) -> Any:
    """Returns what traces of a placeholder's values have in common."""
    if weights.is_quantized(value):
        return value.token
    if isinstance(value, torch.Tensor):
        sizes = tuple(size if isinstance(size, int) and size <= 1 else None for size in value.shape)
        return value.dtype, value.device.type, sizes
    return type(value)


class _Programs(Table[tuple[tuple[Any, ...], Claims | None], Program]):
    """Remembers programs for graphs to come: fewer than there are calls in a table, as each has kernels."""

    __slots__ = ()
    limit = 512


_programs = _Programs()


def program_of(
    inputs: Sequence[fx.Node], nodes: Sequence[fx.Node], result: Any, name: str, claims: Claims | None = None
) -> Program:
    """Makes the program of ``nodes``, calls of torch functions and methods; see ``identity``."""
    identity_ = identity(inputs, nodes, result)
    if identity_ is None:
        return Program(_graph(inputs, nodes, result), name, claims)
    key = identity_, claims
    program = _programs.get(key)
    if program is None:
        program = Program(_graph(inputs, nodes, result), name, claims)
        _programs.put(key, program)
    return program


def _graph(inputs: Sequence[fx.Node], nodes: Sequence[fx.Node], result: Any) -> fx.Graph:
    """Copies nodes into a graph, without what Dynamo knows of them, tensors among that."""
    graph = fx.Graph()
    copies = {node: graph.placeholder(f"input{index}") for index, node in enumerate(inputs)}
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(fx.map_arg(result, copies.__getitem__))
    for node in graph.nodes:
        node.meta = {}
    return graph


def is_call(node: fx.Node) -> bool:
    """Returns whether ``node`` calls a function or a method."""
    return node.op in ("call_function", "call_method")


def picks_an_item(node: fx.Node) -> bool:
    """Returns whether ``node`` is an item of what another one returned as a tuple."""
    return (
        node.op == "call_function"
        and node.target is operator.getitem
        and isinstance(node.args[1], int)
        and not isinstance(value_of(node.args[0]), torch.Tensor)
    )


def value_of(node: Any) -> Any:
    """Returns what Dynamo knows of the value of ``node``: a fake tensor, a symbolic number, or a structure of these."""
    return node.meta.get("example_value") if isinstance(node, fx.Node) else node


def hint(size: Any) -> int | None:
    """Returns the size for which Dynamo traces; None where elements decide it, as of ``x[x > 0]``."""
    number = size.node.hint if isinstance(size, torch.SymInt) else size
    return None if number is None else int(number)


def hints(sizes: Sequence[Any]) -> tuple[int, ...] | None:
    """Returns the sizes for which Dynamo traces; None where elements decide one."""
    numbers = [size for size in map(hint, sizes) if size is not None]
    return tuple(numbers) if len(numbers) == len(sizes) else None
