"""Defines ``Value``, a value of a backward, which is a node of its graph.

Rules are written in torch's functions and methods. Of values, each of these makes nodes at once, by the row that makes
nodes of that function in a trace (``trace/table.py``): nothing is called or intercepted, and no tensor is there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from jitgen.ir.body import compute_dtype
from jitgen.ir.graph import Node
from jitgen.ir.nodes import CAST
from jitgen.ir.symbols import Expr
from jitgen.spec import DTYPES
from jitgen.trace import table
from jitgen.trace.guards import Guards
from jitgen.trace.host_scalars import SymbolicScalar
from jitgen.trace.numbers import wrap
from jitgen.trace.request import TraceRequest
from jitgen.trace.sequences import flattened, rebuilt
from jitgen.trace.tracer import Trace

_FACTORIES = ("arange", "full", "zeros")
_OPERATORS = ("add", "sub", "mul", "truediv", "pow", "neg", "and", "or", "eq", "ne", "lt", "le", "gt", "ge", "getitem")
_REFLECTED = ("add", "sub", "mul", "truediv", "pow")


class Value:
    """Represents a value. Its other attributes are the methods of torch's tensors.

    Attributes:
        node: the node that it is.
        functions: torch's functions in its graph.
    """

    __slots__ = ("functions", "node")

    def __init__(self, node: Node, functions: Functions):
        self.node = node
        self.functions = functions

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.node.dtype]

    @property
    def shape(self) -> tuple[Any, ...]:
        return tuple(self.functions.left(size) for size in self.node.shape)

    def dim(self) -> int:
        return len(self.node.shape)

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def to(self, dtype: torch.dtype) -> Value:
        """Returns this value in ``dtype``: the one that it was widened from, where that has the dtype."""
        if self.node.kind is CAST and not self.node.attrs:
            (source,) = self.node.inputs
            if DTYPES[source.dtype] == dtype and compute_dtype(source.dtype) == self.node.dtype:
                return Value(source, self.functions)
        converted: Value = self.functions.called("to", self, dtype)
        return converted

    def detached(self, attrs: tuple[str, ...]) -> Value:
        """Returns this value marked with ``attrs``, as one through which no gradient flows."""
        return Value(self.functions.trace.detached(self.node, attrs), self.functions)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self.functions.called, name, self)


def _operator(name: str) -> Callable[..., Any]:
    return lambda *operands: operands[0].functions.called(f"__{name}__", *operands)


for _name in (*_OPERATORS, *(f"r{name}" for name in _REFLECTED)):
    setattr(Value, f"__{_name}__", _operator(_name))


class Functions:
    """Has torch's functions as attributes; they make nodes of one graph.

    Attributes:
        trace: what rows make the nodes with.
    """

    def __init__(self, trace: BackwardTrace):
        self.trace = trace

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self.called, getattr(torch, name, None) or getattr(torch.nn.functional, name))

    def entered(self, leaf: Any) -> Any:
        """Returns what stands for an argument of a call: a value for a tensor, a number as it is."""
        if isinstance(leaf, torch.Tensor):
            return Value(self.trace.input_node(leaf), self)
        if isinstance(leaf, SymbolicScalar):
            return Value(self.trace.builder.scalar(leaf.expr, leaf.dtype), self)
        return leaf

    def called(self, target: Any, *args: Any, **options: Any) -> Any:
        """Computes ``target``, a function or the name of a method, of values and numbers."""
        row, name = table.find(target)
        assert row is not None, f"{name} has no row"
        assert not row.composed, f"{name} is made of other functions"
        if getattr(target, "__name__", "") in _FACTORIES:
            options["device"] = self.trace.device
        made = self.trace.made(row, name, tuple(map(_entered, args)), {k: _entered(v) for k, v in options.items()})
        itself = args[0] if row.itself else None
        return itself if itself is not None and made is itself.node else self.left(made)

    def left(self, made: Any) -> Any:
        """Returns what a row has made as rules see it."""
        if isinstance(made, Node):
            return Value(made, self)
        if isinstance(made, Expr):
            return wrap(made, self.trace.guards)
        return rebuilt(made, list(map(self.left, made))) if isinstance(made, (list, tuple)) else made


def _entered(argument: Any) -> Any:
    """Returns an argument as rows see it."""
    if isinstance(argument, Value):
        return argument.node
    if isinstance(argument, (list, tuple)):
        return rebuilt(argument, list(map(_entered, argument)))
    return argument


class _OfArguments:
    """Has torch's functions as attributes; they make nodes of the graph of their arguments."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def called(*args: Any, **options: Any) -> Any:
            value = next(argument for argument in flattened(args) if isinstance(argument, Value))
            return getattr(value.functions, name)(*args, **options)

        return called


fn = _OfArguments()


class BackwardTrace(Trace):
    """Makes the nodes of a backward, for rows.

    Attributes:
        line: the user's line that the gradient which is computed belongs to.
    """

    def __init__(self, name: str, guards: Guards, request: TraceRequest):
        facts = request.device, request.layouts
        super().__init__(_reads_nothing, name, guards, *facts, differentiable=request.differentiable)
        self.line: str | None = None

    def location(self) -> str | None:
        return self.line


def _reads_nothing() -> None:
    """Stands for a function, and has no names to follow."""
