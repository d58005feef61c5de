"""Defines ``Captured``, one value that a function reaches by name, and how every call reads it again.

Neighbours: ``captures.py`` follows the names; ``call/bound.py`` compares what they lead to with what they led to.
"""

from __future__ import annotations

import functools
import keyword
import operator
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from jitgen import settings
from jitgen.codegen.python import PythonFunction, block
from jitgen.quant import weights
from jitgen.trace.guards import float32_matmul_precision

GUARDED: tuple[type, ...] = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, type)
GUARDED += (range, types.BuiltinFunctionType, types.MethodWrapperType)
"""Types whose values are compared as a whole."""

call_leaves: ContextVar[Sequence[Any]] = ContextVar("call_leaves")
"""The arguments of the call whose captured values are read, as leaves."""


def arguments_are(leaves: Sequence[Any]) -> AbstractContextManager[None]:
    """Makes captured values be read for the call with these arguments within this context."""
    return settings.within(call_leaves, leaves)


MISSING = object()
"""What reading a path gives that leads nowhere."""


@dataclass(frozen=True, eq=False)
class Captured:
    """Describes one value that the function reaches by name.

    Attributes:
        path: the names that lead to it, as a user would write them: ``scale``, ``self.weight``.
        read: returns the current value; ``MISSING`` where the names lead nowhere any more.
        value: the value during the trace.
    """

    path: str
    read: Callable[[], Any]
    value: Any

    def holds(self) -> bool:
        """Returns whether the current value is the traced one: the same object, or an equal one of the same type."""
        return same_value(self.read(), self.value)


class OfLayout(Captured):
    """Describes a fact that follows from how a tensor of the call lies. A launch is made for one layout of each tensor,
    which every call compares, so that it need not ask; a trace, which serves many layouts, does."""


def same_value(left: Any, right: Any) -> bool:
    """Compares values, telling 1 from 1.0 and 0.0 from -0.0; a NaN equals itself, and objects are compared by
    identity."""
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return left.hex() == right.hex()
    if isinstance(left, (tuple, list)):
        return len(left) == len(right) and all(map(same_value, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same_value(left[key], right[key]) for key in left)
    return isinstance(left, (*GUARDED, frozenset)) and bool(left == right)


class Variable:
    """Reads a variable of ``variables``, such as a module's; ``MISSING`` if there is none of that name."""

    __slots__ = ("name", "variables")

    def __init__(self, variables: dict[str, Any], name: str):
        self.variables = variables
        self.name = name

    def __call__(self) -> Any:
        return self.variables.get(self.name, MISSING)


class Read:
    """Reads what ``step`` makes of what ``source`` reads; ``MISSING`` if that leads nowhere."""

    __slots__ = ("source", "step")

    def __init__(self, source: Callable[[], Any], step: Callable[[Any], Any]):
        self.source = source
        self.step = step

    def __call__(self) -> Any:
        try:
            return self.step(self.source())
        except Exception:  # an attribute is the user's code, which may raise anything
            return MISSING

    @property
    def text(self) -> str:
        """Returns the step as an expression of ``value``, the source's, where it is an attribute or a member of a
        module; else it is empty. Python evaluates that in a third of the time of a call."""
        if isinstance(self.step, operator.attrgetter):
            step: Any = self.step
            (name,) = step.__reduce__()[1]
            return f"value.{name}" if name.isidentifier() and not keyword.iskeyword(name) else ""
        if isinstance(self.step, functools.partial) and self.step.func is _member:
            return "value.__dict__[{table!r}][{name!r}]".format(**self.step.keywords)
        return ""


def together(values: Sequence[Captured], others: Sequence[Captured]) -> Callable[[], list[Any] | None]:
    """Returns a function that reads all of ``values`` and ``others``, taking a step that several share once. It returns
    those of ``others``; or None where one of ``values`` is another one than in the trace, or where a step raises, as a
    name leads nowhere any more, or an attribute of the user's raises something."""
    if not values and not others:
        return list
    # Every warm call of a function with captures runs this, so it is written out, which takes less time than a loop.
    lines: list[str] = []
    namespace: dict[str, Any] = {"same_value": same_value}
    entered: dict[int, str] = {}

    def enter(read: Callable[[], Any]) -> str:
        """Returns the variable that has what ``read`` reads, and writes the line that sets it."""
        known = entered.get(id(read))
        if known is not None:
            return known
        source = enter(read.source) if isinstance(read, Read) else ""
        number = len(entered)
        name = entered[id(read)] = f"value{number}"
        if isinstance(read, Variable):
            namespace[f"variables{number}"] = read.variables
            text = f"variables{number}[{read.name!r}]"
        elif isinstance(read, Read) and read.text:
            text = read.text.replace("value", source, 1)
        else:
            namespace[f"read{number}"] = read.step if isinstance(read, Read) else read
            text = f"read{number}({source})"
        lines.append(f"{name} = {text}")
        return name

    wanted = [enter(captured.read) for captured in (*values, *others)]
    for number, (captured, now) in enumerate(zip(values, wanted, strict=False)):
        namespace[f"traced{number}"] = captured.value
        lines.append(f"if {now} is not traced{number} and not same_value({now}, traced{number}): return None")
    lines.append(f"return [{', '.join(wanted[len(values) :])}]")
    lines = [*block("try:", lines), *block("except Exception:", ["return None"])]
    read_all: Callable[[], list[Any] | None] = PythonFunction("read_all", (), lines).define("captures", namespace)
    return read_all


def derived(path: str, source: Captured, step: Callable[[Any], Any]) -> Captured:
    """Captures what ``step`` makes of ``source``."""
    read = Read(source.read, step)
    return Captured(path, read, read())


def attribute(source: Captured, name: str) -> Captured:
    path = f"{source.path}.{name}"
    for table in ("_modules", "_parameters", "_buffers") if isinstance(source.value, torch.nn.Module) else ():
        member = derived(path, source, functools.partial(_member, table=table, name=name))
        if member.value is not MISSING and member.value is getattr(source.value, name, MISSING):
            return member
    dotted = not isinstance(name, str) or "." in name  # which attrgetter would take for a path
    return derived(path, source, (lambda value: getattr(value, name)) if dotted else operator.attrgetter(name))


def _member(module: torch.nn.Module, table: str, name: str) -> Any:
    """Returns a member of a module, in a third of the time that the module's ``__getattr__`` takes."""
    return module.__dict__[table][name]


def item(source: Captured, key: Any) -> Captured:
    return derived(f"{source.path}[{key!r}]", source, operator.itemgetter(key))


def argument(index: int, path: str, value: Any) -> Captured:
    """Captures leaf ``index`` of the arguments, an object that is neither a tensor nor a number."""
    return Captured(path, lambda: call_leaves.get()[index], value)


def cell(name: str, cell: types.CellType) -> Captured:
    def read() -> Any:
        try:
            return cell.cell_contents
        except ValueError:
            return MISSING

    return Captured(name, read, read())


def variable(name: str, variables: dict[str, Any]) -> Captured:
    """Captures the value of ``name`` among global variables, or among imported modules."""

    read = Variable(variables, name)
    return Captured(name, read, read())


def default_dtype_guard(dtype: torch.dtype) -> Captured:
    """Guards that torch's default dtype, to which numbers and integer tensors are promoted, is ``dtype``."""
    return Captured("torch.get_default_dtype()", torch.get_default_dtype, dtype)


def matmul_precision_guard(setting: str) -> Captured:
    """Guards that torch's float32 matmul precision is ``setting``."""
    return Captured("torch.get_float32_matmul_precision()", float32_matmul_precision, setting)


def captured_tensor(weight: Captured, layout: str, index: int) -> Captured:
    """Captures tensor ``index`` (codes, scales or zero-points) of a captured quantised weight, in ``layout``."""

    def tensor_of(value: Any) -> Any:
        if not weights.is_quantized(value):
            return MISSING
        stored = value.stored
        return (stored if stored.token.layout == layout else value.stored_in(layout)).tensors[index]

    return derived(f"{weight.path}.tensors[{index}]", weight, tensor_of)


def captured_token(weight: Captured) -> Captured:
    """Captures the token of a captured quantised weight: its format, shape and layout (``quant/token.py``)."""
    return derived(f"{weight.path}.token", weight, lambda value: value.token)
