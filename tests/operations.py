"""Sample calls of every row of the trace's table, by the first of the row's names.

A call is a tuple of arguments; ``"x"``, ``"y"`` and ``"z"`` stand for tensors of the dtype under test, ``"c"`` for a
bool tensor of their shape, a dict at the end for keyword arguments. ``spellings`` turns it into every way of writing
it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch

from jitgen.trace import casts, pointwise, table

Call = tuple[Any, ...]

CALLS: dict[str, list[Call]] = {
    "add": [("x", "y"), ("x", 3), ("x", 2.5), ("x", "y", {"alpha": 2}), ("x", True)],
    "sub": [("x", "y"), ("x", 3), ("x", -2.5), ("x", "y", {"alpha": -3})],
    "rsub": [("x", "y"), ("x", 3)],
    "mul": [("x", "y"), ("x", -3), ("x", 0.5)],
    "div": [("x", "y"), ("x", 3), ("x", "y", {"rounding_mode": "floor"}), ("x", "y", {"rounding_mode": "trunc"})],
    "minimum": [("x", "y")],
    "maximum": [("x", "y")],
    "fmin": [("x", "y")],
    "fmax": [("x", "y")],
    "max": [("x", "y")],
    "min": [("x", "y")],
    "fmod": [("x", "y"), ("x", 3), ("x", -2.5)],
    "remainder": [("x", "y"), ("x", 3), ("x", -2.5)],
    "floor_divide": [("x", "y"), ("x", 3), ("x", -2.5)],
    "pow": [("x", "y"), ("x", 2), ("x", 3), ("x", 0.5), ("x", -0.5), ("x", -1.0), ("x", -2.0), ("x", 1.5), (2, "x")],
    "float_power": [("x", 2), ("x", "y"), (2.0, "x")],
    "atan2": [("x", "y")],
    "copysign": [("x", "y"), ("x", -1.0)],
    "hypot": [("x", "y")],
    "logaddexp": [("x", "y")],
    "xlogy": [("x", "y"), ("x", 2.0), (0.5, "x")],
    "lerp": [("x", "y", 0.25), ("x", "y", 0.75), ("x", "y", "z")],
    "addcmul": [("x", "y", "z"), ("x", "y", "z", {"value": 2})],
    "addcdiv": [("x", "y", "z"), ("x", "y", "z", {"value": 2})],
    "heaviside": [("x", "y")],
    "logit": [("x",), ("x", 0.125)],
    "round": [("x",), ("x", {"decimals": 1}), ("x", {"decimals": -1})],
    "nan_to_num": [("x",), ("x", {"nan": 1.0, "posinf": 2.0, "neginf": -2.0})],
    "clamp": [("x", -1, 2), ("x", {"min": 1}), ("x", {"max": 1.5}), ("x", "y", "z"), ("x", {"max": "y"})],
    "clamp_min": [("x", 1), ("x", "y")],
    "clamp_max": [("x", 1), ("x", "y")],
    "logical_and": [("x", "y")],
    "logical_or": [("x", "y")],
    "logical_xor": [("x", "y")],
    "bitwise_and": [("x", "y"), ("x", 3)],
    "bitwise_or": [("x", "y"), ("x", 5)],
    "bitwise_xor": [("x", "y"), ("x", 7)],
    "bitwise_left_shift": [("x", "y"), ("x", 3)],
    "bitwise_right_shift": [("x", "y"), ("x", 3)],
    "where": [("c", "x", "y"), ("c", "x", 2), ("c", 1.5, "x"), ("c", 1.0, 0.0), ("c", 1, 0)],
    "Tensor.where": [],  # x.where(c, y) is among the methods below
    "masked_fill": [("x", "c", 2), ("x", "c", True)],
    "tril": [("x",), ("x", 3), ("x", {"diagonal": -2})],
    "triu": [("x",), ("x", -7), ("x", {"diagonal": 1})],
    "fill": [("x", 3)],
    "copy": [],  # x.copy_(y) is among the methods below
    "to": [("x", torch.float16), ("x", torch.float64), ("x", torch.int32), ("x", "y"), ("x", {"dtype": torch.bool})],
    "type_as": [("x", "y")],
    "leaky_relu": [("x",), ("x", 0.25)],
    "elu": [("x",), ("x", 0.5)],
    "celu": [("x",), ("x", 0.5)],
    "softplus": [("x",), ("x", 2.0, 3.0)],
    "gelu": [("x",), ("x", {"approximate": "tanh"})],
    "hardtanh": [("x",), ("x", -2.0, 0.5)],
    "hardshrink": [("x",), ("x", 1.0)],
    "softshrink": [("x",), ("x", 1.0)],
    "threshold": [("x", 0.5, 2.0)],
    "glu": [("x",)],
    "prelu": [("x", "w")],
    "dropout": [("x", 0.5, False)],
    "_nn.hardtanh": [],
    "type": [("x", torch.float32)],
    "requires_grad_": [("x", False)],
    "full": [],
    **{name: [("x",)] for name in ("relu", "relu6", "selu", "softsign", "logsigmoid", "silu", "mish", "hardsigmoid")},
    **{name: [("x",)] for name in ("hardswish", "tanhshrink", "positive", "clone", "contiguous", "square", "frac")},
    **{name: [("x",)] for name in ("deg2rad", "rad2deg", "isnan", "isinf", "isfinite", "isposinf", "isneginf")},
    **{name: [("x",)] for name in ("signbit", "logical_not", "bitwise_not", *casts.CASTS)},
    **{names[0]: [("x",)] for names in pointwise.FLOAT_UNARY.values()},
    **{names[0]: [("x",)] for names in (*pointwise.ROUNDING.values(), *pointwise.SAME_UNARY.values())},
    **{names[0]: [("x", "y"), ("x", 2), ("x", 0.1)] for names in pointwise.COMPARISONS.values()},
}

OPERATORS: dict[str, tuple[Callable[..., Any], list[Call]]] = {
    **{
        name: (getattr(operator, name), [("x", "y"), ("x", 3), (3, "x")])
        for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "eq", "ne", "lt", "le", "gt", "ge")
    },
    **{name: (getattr(operator, name), [("x", "y"), ("x", 5), (5, "x")]) for name in ("and_", "or_", "xor")},
    **{name: (getattr(operator, name), [("x", "y"), ("x", 2)]) for name in ("lshift", "rshift")},
    **{name: (getattr(operator, name), [("x",)]) for name in ("neg", "pos", "invert", "abs")},
    "pow": (operator.pow, [("x", "y"), ("x", 2), (2, "x")]),
    "where": (lambda x, c, y: x.where(c, y), [("x", "c", "y"), ("x", "c", 1)]),
    "copy_": (lambda x, y: x.clone().copy_(y), [("x", "y")]),
    "zero_": (lambda x: x.clone().zero_(), [("x",)]),
}
"""Operators, and methods that no function spells alike."""

COMPOSED = {"lerp", "addcmul", "addcdiv", "tanhshrink", "logit", "frac", "mish", "hardswish", "round", "rsub"}
COMPOSED |= {"add", "sub", "logaddexp", "gelu", "softshrink", "hardsigmoid", "fmod", "remainder"}
"""Rows that add or subtract: an error is relative to the operands, not to what is left of them."""


def canonical(name: str) -> str:
    """The first name of the row that ``name`` is one of."""
    if name not in table.rows():  # a Python function of torch, whose body is traced
        return name
    function = table.rows()[name].function
    return next(first for first, row in table.rows().items() if row.function is function)


def aliases(name: str) -> list[str]:
    if name not in table.rows():
        return [name]
    return [other for other, row in table.rows().items() if row.function is table.rows()[name].function]


def spellings(name: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """(label, function) for each way torch has of calling the row ``name`` is the first name of."""
    for alias in (alias.removeprefix("torch.") for alias in aliases(name)):
        for space, prefix in ((torch, "torch"), (torch.nn.functional, "F"), (torch.special, "special")):
            if callable(getattr(space, alias, None)) and not alias.startswith("_"):
                yield f"{prefix}.{alias}", getattr(space, alias)
        if callable(getattr(torch.Tensor, alias, None)) and alias != "where":
            yield f"Tensor.{alias}", _method(alias)
        if callable(getattr(torch.Tensor, f"{alias}_", None)):
            yield f"Tensor.{alias}_", _in_place(alias)


def _method(name: str) -> Callable[..., Any]:
    return lambda first, *arguments, **keywords: getattr(first, name)(*arguments, **keywords)


def _in_place(name: str) -> Callable[..., Any]:
    return lambda first, *arguments, **keywords: getattr(first.clone(), f"{name}_")(*arguments, **keywords)


def applied(function: Callable[..., Any], call: Call) -> Callable[..., Any]:
    """``function`` of the tensors ``(x, y, z, c, w)``, called as ``call`` says."""
    *arguments, keywords = call if isinstance(call[-1], dict) else (*call, {})

    def apply(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, c: torch.Tensor, w: torch.Tensor) -> Any:
        tensors = {"x": x, "y": y, "z": z, "c": c, "w": w}

        def argument(value: Any) -> Any:
            return tensors[value] if isinstance(value, str) and value in tensors else value

        return function(*map(argument, arguments), **{name: argument(value) for name, value in keywords.items()})

    return apply


def cases() -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """(row, label, function of the tensors): every sample call in its first spelling, and the operators."""
    for name, calls in CALLS.items():
        label, function = next(spellings(name), (name, None))
        for call in calls:
            assert function is not None, f"torch has no function {name}"
            yield name, f"{label}{call}", applied(function, call)
    for name, (function, calls) in OPERATORS.items():
        for call in calls:
            yield name, f"operator {name}{call}", applied(function, call)
