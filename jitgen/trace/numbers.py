"""Presents sizes and numeric arguments to a traced function: numbers that are symbolic as long as possible.

Arithmetic on a ``SymbolicNumber`` gives another one. Where Python needs the number itself (``if n > 4``, ``range(n)``,
``math.sqrt(n)``, a list index), it gets the number of the traced call, and the trace records a guard. So no number
becomes a constant silently: a call with another number is traced again, and ``specializations`` shows the guard.

torch's argument parser rejects unknown number types before a trace sees the call (``torch.zeros(n)``), but accepts its
own symbolic numbers. So each class here derives from ``torch.SymInt``, ``SymFloat`` or ``SymBool``, without using their
machinery. For ``isinstance`` each is the Python number it represents, so that user code takes the branch for that type.
"""

from __future__ import annotations

import functools
import math
import operator
import weakref
from collections.abc import Callable
from typing import Any

import torch

from jitgen.ir import symbols
from jitgen.ir.symbols import Expr, Scalar
from jitgen.trace.guards import Guards


class SymbolicNumber:
    """Represents an int, float or bool that is known when the function is called; see the module."""

    __slots__ = ("expr", "guards")

    def __init__(self, expr: Expr, guards: Guards):
        self.expr = expr
        self.guards = guards
        guards.handed_out.append(weakref.ref(self))

    def _value(self) -> Any:
        return self.guards.value(self.expr)

    @property
    def node(self) -> _SymNode:
        """Returns what torch's Python functions ask a symbolic number for (``torch.broadcast_shapes``)."""
        return _SymNode(self)

    def __bool__(self) -> bool:
        condition = self.expr if self.expr.kind == "bool" else symbols.compare("ne", self.expr, 0)
        return self.guards.decide(condition)

    def __index__(self) -> int:
        if self.expr.kind == "float":
            raise TypeError("'float' object cannot be interpreted as an integer")
        return int(self._value())

    def __int__(self) -> int:
        return int(self._value())

    def __float__(self) -> float:
        return float(self._value())

    def __hash__(self) -> int:
        return hash(self._value())

    def __format__(self, spec: str) -> str:
        return format(self._value(), spec)

    def __repr__(self) -> str:
        return repr(self._value())

    def __neg__(self) -> Any:
        return wrap(symbols.neg(self.expr), self.guards)

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return wrap(symbols.maximum(self.expr, symbols.neg(self.expr)), self.guards)

    def __invert__(self) -> int:
        return ~self._value()

    def __trunc__(self) -> int:
        return math.trunc(self._value())

    def __floor__(self) -> int:
        return math.floor(self._value())

    def __ceil__(self) -> int:
        return math.ceil(self._value())

    def __round__(self, digits: int | None = None) -> Any:
        return round(self._value(), digits)

    def is_integer(self) -> bool:
        return self._value().is_integer() if self.expr.kind == "float" else True


class _SymNode:
    """Answers the questions of torch's ``SymNode`` that its Python functions ask; an answer is a guard, as everywhere
    here."""

    shape_env = None

    def __init__(self, number: SymbolicNumber):
        self._number = number

    def is_nested_int(self) -> bool:
        return False

    def guard_bool(self, file: str, line: int) -> bool:
        return bool(self._number)

    def expect_true(self, file: str, line: int) -> bool:
        return bool(self._number)

    def guard_int(self, file: str, line: int) -> int:
        return int(self._number)


class SymbolicInt(SymbolicNumber, torch.SymInt):
    __slots__ = ()
    __class__ = property(lambda self: int)


class SymbolicFloat(SymbolicNumber, torch.SymFloat):
    __slots__ = ()
    __class__ = property(lambda self: float)


class SymbolicBool(SymbolicNumber, torch.SymBool):
    __slots__ = ()
    __class__ = property(lambda self: bool)


_KINDS: dict[str, type[SymbolicNumber]] = {"int": SymbolicInt, "float": SymbolicFloat, "bool": SymbolicBool}


def wrap(value: Scalar, guards: Guards) -> Any:
    """Returns ``value`` as user code sees it: a ``SymbolicNumber`` for an ``Expr``; a plain number unchanged.

    An expression that has become too long is the number of the traced call, which becomes a guard.
    """
    if symbols.is_too_long(value):
        return guards.value(value)
    return _KINDS[value.kind](value, guards) if isinstance(value, Expr) else value


def unwrap(value: Any) -> Any:
    """Returns the ``Expr`` of a symbolic number; any other value unchanged."""
    return value.expr if isinstance(value, SymbolicNumber) else value


def _binary(function: Callable[[Scalar, Scalar], Scalar]) -> Any:
    def forward(self: SymbolicNumber, other: Any) -> Any:
        if isinstance(other, (int, float, SymbolicNumber)):
            return wrap(function(self.expr, unwrap(other)), self.guards)
        return NotImplemented

    def reflected(self: SymbolicNumber, other: Any) -> Any:
        if isinstance(other, (int, float, SymbolicNumber)):
            return wrap(function(unwrap(other), self.expr), self.guards)
        return NotImplemented

    return forward, reflected


def _concrete(name: str, reflected: bool = False) -> Any:
    """Makes an operation without a symbolic form: it is done on the numbers of the traced call, which become guards."""
    function = divmod if name == "divmod" else getattr(operator, f"__{name}__")

    def operate(self: SymbolicNumber, other: Any) -> Any:
        if not isinstance(other, (int, float, SymbolicNumber)):
            return NotImplemented
        value = other._value() if isinstance(other, SymbolicNumber) else other
        return function(value, self._value()) if reflected else function(self._value(), value)

    return operate


def _install() -> None:
    arithmetic = {
        "add": symbols.add,
        "sub": symbols.sub,
        "mul": symbols.mul,
        "truediv": symbols.truediv,
        "floordiv": symbols.floordiv,
        "mod": symbols.mod,
        "pow": symbols.power,
    }
    for name, function in arithmetic.items():
        forward, reflected = _binary(function)
        setattr(SymbolicNumber, f"__{name}__", forward)
        setattr(SymbolicNumber, f"__r{name}__", reflected)
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        forward, _ = _binary(functools.partial(symbols.compare, name))
        setattr(SymbolicNumber, f"__{name}__", forward)
    for name in ("as_integer_ratio", "bit_length", "conjugate", "hex"):
        setattr(SymbolicNumber, name, lambda self, name=name: getattr(self._value(), name)())
    for name in ("and", "or", "xor", "lshift", "rshift", "divmod"):
        setattr(SymbolicNumber, f"__{name}__", _concrete(name))
        setattr(SymbolicNumber, f"__r{name}__", _concrete(name, reflected=True))


_install()
