"""Maps torch functions to rows.

A row is a Python function that takes the trace and torch's arguments (tensors as nodes) and returns nodes; or it is a
*composition*, the function written in other torch functions, which are traced in its place. It is registered under
torch's name for the operation. ``find`` maps every spelling to it: ``torch.exp``, ``x.exp()``, ``torch.special.exp2``,
``F.silu``, ``x + y``, and in-place ``x.exp_()``, which is the row followed by an update.

A qualified name is for the function of one namespace, ``Tensor.where`` for the method; ``_nn`` and ``_VF`` are the C++
functions behind those of ``torch.nn.functional`` and ``torch.functional``, and ``aten`` those of ``torch.ops.aten``. A
function of torch that is written in Python needs no row: its body is traced. It begins with ``if
has_torch_function(...): return handle_torch_function(...)``, which is how the trace comes to see it; what is traced is
the same code with a ``has_torch_function`` that says no. The torch functions that it calls are intercepted like those
of the user, so its checks of arguments are torch's own.

Rows are in the modules of ``ROW_MODULES``, which are imported at the first look-up.
"""

from __future__ import annotations

import importlib
import operator
import pkgutil
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from jitgen.trace import compositions


@dataclass(frozen=True)
class Row:
    """Describes how one torch function is traced.

    Attributes:
        function: ``(trace, *arguments, **keywords) -> node, or a list or tuple of nodes, or a plain value``.
        is_view: whether torch's result may share memory with the first argument.
        itself: whether torch returns an argument itself where there is nothing to do.
        copied: whether torch's result shares memory with the first argument although the row computes a copy of it.
        inplace: whether the first argument is updated with the result.
        reshapes: whether the first argument becomes the view of it that the result is, as by ``t_``.
        weights: whether the row accepts quantised weights (nodes whose value is a ``dequantize``).
        proxies: whether it gets tensors as proxies, which know their memory, in place of nodes.
        composed: whether it is a composition: a function of tensors, without the trace.
        python: whether it is the body of one of torch's Python functions, which rounds the result of each call.
        of_lists: whether it is torch functions of every tensor of lists, which it may update: a function of the
            positional arguments and the keywords as they are.
    """

    function: Callable[..., Any]
    is_view: bool = False
    itself: bool = False
    copied: bool = False
    inplace: bool = False
    reshapes: bool = False
    weights: bool = False
    proxies: bool = False
    composed: bool = False
    python: bool = False
    of_lists: bool = False


ROWS: dict[str, Row] = {}
PROPERTIES: dict[str, Callable[..., Any]] = {}
VIEW_PROPERTIES = {"T", "mT", "H", "mH", "data", "real"}

_OPERATORS = {"truediv": "true_divide", "floordiv": "floor_divide", "mod": "remainder", "and": "__and__"}
_OPERATORS |= {"or": "__or__", "xor": "__xor__", "lshift": "__lshift__", "rshift": "__rshift__"}
_OPERATORS |= {"matmul": "matmul", "invert": "bitwise_not", "not": "logical_not", "getitem": "getitem"}
_RESHAPES = ("t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_")
"""Functions that change the sizes and strides of a tensor, and no element."""
_REFLECTED = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")


def row(
    *names: str,
    view: bool = False,
    itself: bool = False,
    copied: bool = False,
    weights: bool = False,
    inplace: bool = False,
    proxies: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function as the row of torch's ``names``; what may return an argument itself is a view too."""
    return _registers(
        names, is_view=view or itself, itself=itself, copied=copied, inplace=inplace, weights=weights, proxies=proxies
    )


def composition(
    *names: str, view: bool = False, itself: bool = False, copied: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function of tensors, written in torch functions that have rows, as torch's ``names``."""
    return _registers(names, is_view=view or itself, itself=itself, copied=copied, composed=True)


def of_lists(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function of lists of tensors, written in torch functions of one, as torch's ``names``."""
    return _registers(names, of_lists=True)


def _registers(names: Sequence[str], **attributes: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a decorator that enters a function under ``names``, with these attributes of ``Row``."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        ROWS.update(dict.fromkeys(names, Row(function, **attributes)))
        return function

    return register


def prop(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function of (trace, node) as the value of the tensor properties ``names``."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        PROPERTIES.update(dict.fromkeys(names, function))
        return function

    return register


def rows() -> dict[str, Row]:
    """Returns every row, by torch's names for it."""
    _load()
    return ROWS


def properties() -> dict[str, Callable[..., Any]]:
    """Returns the tensor properties, by name."""
    _load()
    return PROPERTIES


def find(target: Any) -> tuple[Row | None, str]:
    """Finds the row of a torch function, operator, tensor method or method name, and its name for messages."""
    if isinstance(target, str):
        return _method(target), f"Tensor.{target}"
    try:
        return _find(target)
    except TypeError:  # unhashable: nothing of torch's is
        return None, repr(target)


@cache
def _find(target: Any) -> tuple[Row | None, str]:
    _load()
    name = getattr(target, "__name__", repr(target))
    owner: Any = getattr(target, "__self__", None)
    if name == "__get__" and hasattr(owner, "__name__"):
        function = PROPERTIES.get(owner.__name__)
        return (Row(function, owner.__name__ in VIEW_PROPERTIES) if function else None), f"Tensor.{owner.__name__}"
    if getattr(operator, name.strip("_") + "_", None) is target or getattr(operator, name, None) is target:
        return by_name(f"__{name.strip('_')}__"), f"operator {name}"
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        packet: Any = getattr(target, "overloadpacket", target)
        name = packet._qualified_op_name.replace("::", ".")
        return ROWS.get(name), f"torch.ops.{name}"
    if (getattr(target, "__module__", None) or "").startswith("jitgen."):
        return ROWS.get(f"jitgen.{name}"), name
    name = name.removeprefix("special_")  # torch.special.xlogy calls itself special_xlogy
    for space, prefix in _spaces():
        if getattr(space, name, None) is target:
            return _qualified(prefix, name) or _body(target), f"{_SHOWN.get(prefix, prefix)}.{name}"
    module = getattr(target, "__module__", None) or "torch"
    return _body(target), f"{module}.{name}"


_SHOWN = {"_nn": "F", "_VF": "torch"}
"""Namespaces of C++ functions, and those that users know the functions from."""


def _spaces() -> tuple[tuple[Any, str], ...]:
    return (
        (torch, "torch"),
        (torch.Tensor, "Tensor"),
        (torch.nn.functional, "F"),
        (torch.special, "torch.special"),
        (torch._C._nn, "_nn"),
        (getattr(torch._C, "_linalg", None), "torch.linalg"),
        (getattr(torch._C, "_fft", None), "torch.fft"),
        (torch._C._TensorBase, "Tensor"),
        (torch._C._VariableFunctions, "_VF"),
    )


def _qualified(space: str, name: str) -> Row | None:
    """Returns the row of a function in a namespace: its own, or else that of the functions of this name."""
    return by_name(f"{space}.{name}") or by_name(name)


def _method(name: str) -> Row | None:
    return _qualified("Tensor", name) or _body(getattr(torch.Tensor, name, None))


_WRITTEN_IN_PYTHON = ("torch.nn.functional", "torch.functional", "torch._tensor")
_INTERCEPTED = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


@cache
def _body(function: Any) -> Row | None:
    """Returns the row of a Python function of torch: its own code, which runs on proxies; None for another function."""
    if not isinstance(function, types.FunctionType) or function.__module__ not in _WRITTEN_IN_PYTHON:
        return None
    if not any(name in function.__code__.co_names for name in _INTERCEPTED):
        return None
    variables = {**function.__globals__, **dict.fromkeys(_INTERCEPTED, lambda *_: False)}
    body = types.FunctionType(
        function.__code__, variables, function.__name__, function.__defaults__, function.__closure__
    )
    body.__kwdefaults__ = function.__kwdefaults__
    return Row(body, weights=function is torch.nn.functional.embedding, composed=True, python=True)


@cache
def by_name(name: str) -> Row | None:
    """Returns the row of a method or function name, dunder, reflected and in-place spellings included."""
    _load()
    if name in ROWS:
        return ROWS[name]
    if name.startswith("__") and name.endswith("__"):
        bare = name[2:-2]
        if bare.startswith("i") and bare[1:] in _REFLECTED:
            row_ = by_name(f"__{bare[1:]}__")
            return replace(row_, is_view=False, inplace=True) if row_ else None
        if bare.startswith("r") and bare[1:] in _REFLECTED and bare != "rshift":
            row_ = by_name(f"__{bare[1:]}__")
            return Row(_swapped(row_.function)) if row_ else None
        return ROWS.get(_OPERATORS.get(bare, bare))
    if name.endswith("_copy"):  # what the function of that name views, in memory of its own
        row_ = by_name(name.removesuffix("_copy"))
        return replace(row_, is_view=False, itself=False) if row_ and row_.is_view and not row_.composed else None
    if name.endswith("_") and not name.rpartition(".")[2].startswith("_"):
        row_ = by_name(name[:-1])
        if row_ and name.rpartition(".")[2] in _RESHAPES:
            return replace(row_, reshapes=True)
        return replace(row_, is_view=False, inplace=True) if row_ and not row_.is_view else None
    return None


def _swapped(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda trace, input, other: function(trace, other, input)


ROW_MODULES: tuple[str, ...] = (
    "activations",
    "scaled_dot_product",
    "casts",
    "contractions",
    "convolutions",
    "kernels.c_kernel",
    "derivatives",
    "factories",
    "foreach",
    "fused",
    "gathers",
    "grouped",
    "indexing",
    "losses",
    "movement",
    "normalizations",
    "own_functions",
)
ROW_MODULES += (
    "pointwise",
    "quantiles",
    "random",
    "reductions",
    "scans",
    "scatters",
    "selection",
    "sorting",
    "strides",
)
ROW_MODULES += tuple(f"compositions.{module.name}" for module in pkgutil.iter_modules(compositions.__path__))
"""The modules of this package that register rows; all of ``compositions/`` may."""


@cache
def _load() -> None:
    for name in ROW_MODULES:
        importlib.import_module(f"jitgen.trace.{name}")
