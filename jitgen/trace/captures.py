"""The values that a function closes over: tensors are read at every call, all other values are guarded.

A traced function may use names that are not its arguments: closure cells, globals, defaults, and attributes of ``self``
or of a module that it calls. ``Captures`` follows the names that the function's code mentions, and those that the
functions and modules it reaches mention. It collects

* tensors: each becomes a kernel input. Every call reads it through the same names, so it sees a rebound global and an
  updated parameter;
* numbers, strings, dtypes, functions and the like: the trace depends on their values, so they are *guarded*. Every call
  compares them, mostly by identity, and a changed value makes it trace again.

Library modules (``torch``, ``F``, the standard library) are assumed not to change.

Neighbours: ``trace/tracer.py`` asks here for the name of a tensor that it meets; ``call/`` evaluates the guards.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from jitgen.quant import weights
from jitgen.trace.weak_method import WeakMethod

MAX_DEPTH = 8
"""Attribute, item and call steps from the traced function to the values that are looked at."""
_GUARDED: tuple[type, ...] = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, type)
_GUARDED += (types.BuiltinFunctionType,)
_FUNCTIONS = (types.FunctionType, types.MethodType)
_MISSING = object()


@dataclass(frozen=True, eq=False)
class Captured:
    """One value that the function reaches by name.

    Attributes:
        path: the names that lead to it, as a user would write them: ``scale``, ``self.weight``.
        read: returns the current value; ``_MISSING`` where the names lead nowhere any more.
        value: the value during the trace.
    """

    path: str
    read: Callable[[], Any]
    value: Any

    def holds(self) -> bool:
        """Whether the current value is the traced one: the same object, or an equal one of the same type."""
        now = self.read()
        return now is self.value or same_value(now, self.value)


def same_value(left: Any, right: Any) -> bool:
    """Equality that tells 1 from 1.0 and 0.0 from -0.0, and under which NaN equals NaN."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return left.hex() == right.hex()
    if isinstance(left, (tuple, list)):
        return len(left) == len(right) and all(map(same_value, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same_value(left[key], right[key]) for key in left)
    return isinstance(left, _GUARDED) and bool(left == right)


class Captures:
    """The tensors and the guarded values that the code of ``function`` reaches by name."""

    def __init__(self, function: Callable[..., Any]):
        self.tensors: list[Captured] = []
        self.guards: list[Captured] = []
        self._seen: dict[int, tuple[Any, frozenset[str]]] = {}
        root = Captured(getattr(function, "__name__", "function"), lambda: function, function)
        for child, names in self._children(root, frozenset()):
            self._visit(child, names, 1)
        # The traced function itself cannot change, only what it reaches.
        own = [getattr(function, name, self) for name in ("__code__", "__func__")]
        self.guards = [guard for guard in self.guards if not any(guard.value is value for value in own)]

    def tensor(self, tensor: torch.Tensor) -> Captured | None:
        """The capture of exactly this tensor object, or None."""
        return next((captured for captured in self.tensors if captured.value is tensor), None)

    def _visit(self, captured: Captured, names: frozenset[str], depth: int) -> None:
        value = captured.value
        if isinstance(value, torch.Tensor):
            self.tensors.append(captured)
            return
        if isinstance(value, _GUARDED):
            self.guards.append(captured)
            if not isinstance(value, type) or _is_library(value.__module__):
                return
        if depth > MAX_DEPTH or not self._first_visit(value, names):
            return
        for child, child_names in self._children(captured, names):
            if child.value is not _MISSING:
                self._visit(child, child_names, depth + 1)

    def _first_visit(self, value: Any, names: frozenset[str]) -> bool:
        """Whether ``value`` has not yet been visited with all of ``names``. True for containers at every visit."""
        if isinstance(value, (tuple, list, dict)):
            return True
        _, known = self._seen.get(id(value), (None, frozenset()))
        first = id(value) not in self._seen or not names <= known
        self._seen[id(value)] = (value, known | names)
        return first

    def _children(self, captured: Captured, names: frozenset[str]) -> Iterator[tuple[Captured, frozenset[str]]]:
        value, path = captured.value, captured.path
        # Classes are asked, since an object may have any attribute, or refuse one with any exception.
        if hasattr(type(value), "__jitgen_function__"):
            yield _derived(path, captured, lambda jitted: jitted.__jitgen_function__), names
        elif isinstance(value, (types.MethodType, WeakMethod)):
            self.guards.append(_derived(path, captured, lambda method: method.__func__))
            mentioned = _mentioned(value.__func__)
            is_weak = isinstance(value, WeakMethod)
            instance = (lambda method: method.instance()) if is_weak else (lambda method: method.__self__)
            yield _derived(f"{path}.__self__", captured, instance), mentioned
            yield _derived(path, captured, lambda method: method.__func__), mentioned
        elif isinstance(value, types.FunctionType):
            self.guards.append(_derived(path, captured, lambda function: function.__code__))
            if not _is_library(value.__module__):
                yield from self._function_children(captured, value)
        elif isinstance(value, functools.partial):
            for name in ("func", "args", "keywords"):
                yield _attribute(captured, name), names
        elif isinstance(value, types.ModuleType):
            if not _is_library(value.__name__):
                for name in sorted(names):
                    if name in vars(value):
                        yield _attribute(captured, name), names
        elif isinstance(value, (tuple, list)):
            self.guards.append(_derived(f"len({path})", captured, len))
            for index in range(len(value)):
                yield _item(captured, index), names
        elif isinstance(value, dict):
            self.guards.append(_derived(f"tuple({path})", captured, tuple))
            for key in value:
                yield _item(captured, key), names
        else:
            if not isinstance(value, (torch.nn.Module, type)):
                self.guards.append(captured)
            yield from self._object_children(captured, names)

    def _object_children(self, captured: Captured, names: frozenset[str]) -> Iterator[tuple[Captured, frozenset[str]]]:
        """The attributes of an object, class or module that are in ``names``, or that methods in ``names`` mention."""
        value = captured.value
        owner = value if isinstance(value, type) else type(value)
        called = {"forward"} if isinstance(value, torch.nn.Module) else {"__call__"}
        names = _with_methods(owner, names | called)
        wanted = set(names)
        if isinstance(value, torch.nn.Module) and _is_library(owner.__module__):
            # The forward of a container such as Sequential reaches its children without their names.
            wanted.update(value._parameters, value._buffers, value._modules)
        for name in sorted(wanted):
            found = inspect.getattr_static(value, name, _MISSING)
            method = _plain_function(found)
            if method is not None:
                if not _is_library(method.__module__):
                    path = f"{captured.path}.{name}"
                    yield _derived(path, captured, functools.partial(_static_function, name=name)), names
            elif (
                found is _MISSING
                or not hasattr(type(found), "__get__")
                or isinstance(found, types.MemberDescriptorType)
            ):
                yield _attribute(captured, name), names

    def _function_children(
        self, captured: Captured, function: types.FunctionType
    ) -> Iterator[tuple[Captured, frozenset[str]]]:
        names = code_names(function.__code__)
        if "get_default_dtype" in names:
            self.guards.append(default_dtype_guard(torch.get_default_dtype()))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            yield _cell(name, cell), names
        for name in sorted(names):
            if name in function.__globals__:
                yield _global(name, function.__globals__), names
        defaults = function.__defaults__ or ()
        for index in range(len(defaults)):
            path = f"default {index} of {captured.path}"
            yield _derived(path, captured, functools.partial(_default, index=index)), names
        for name in function.__kwdefaults__ or {}:
            path = f"default {name} of {captured.path}"
            yield _derived(path, captured, functools.partial(_keyword_default, name=name)), names
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None:
            yield _derived(captured.path, captured, lambda f: f.__wrapped__), names


def default_dtype_guard(dtype: torch.dtype) -> Captured:
    """The guard that torch's default dtype, to which numbers and integer tensors are promoted, is ``dtype``."""
    return Captured("torch.get_default_dtype()", torch.get_default_dtype, dtype)


def captured_part(weight: Captured, layout: str, index: int) -> Captured:
    """Tensor ``index`` (codes, scales or zero-points) of a captured quantised weight, in ``layout``."""

    def part(value: Any) -> Any:
        if not weights.is_quantized(value):
            return _MISSING
        return (value if value.token.layout == layout else value.with_layout(layout)).parts[index]

    return _derived(f"{weight.path}.parts[{index}]", weight, part)


def captured_token(weight: Captured) -> Captured:
    """The token of a captured quantised weight: its format, shape and layout (``quant/token.py``)."""
    return _derived(f"{weight.path}.token", weight, lambda value: value.token)


def matmul_precision_guard(setting: str) -> Captured:
    """The guard that torch's float32 matmul precision is ``setting``."""
    return Captured("torch.get_float32_matmul_precision()", torch.get_float32_matmul_precision, setting)


@functools.lru_cache(maxsize=4096)
def code_names(code: types.CodeType) -> frozenset[str]:
    """The global and attribute names in the code, including those in nested functions and comprehensions."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= code_names(constant)
    return frozenset(names)


def _mentioned(function: Any) -> frozenset[str]:
    code = getattr(function, "__code__", None)
    return code_names(code) if code is not None else frozenset()


def _plain_function(attribute: Any) -> types.FunctionType | None:
    """The Python function of a class attribute that is a method, a property, or a static or class method."""
    if isinstance(attribute, property):
        attribute = attribute.fget
    elif isinstance(attribute, (staticmethod, classmethod)):
        attribute = attribute.__func__
    return attribute if isinstance(attribute, types.FunctionType) else None


def _static_function(value: Any, name: str) -> types.FunctionType | None:
    return _plain_function(inspect.getattr_static(value, name, None))


def _with_methods(owner: type, names: frozenset[str]) -> frozenset[str]:
    """``names``, and, transitively, the names that methods of ``owner`` mention if they are in the set."""
    known, added = names, names
    while added:
        methods = [_plain_function(inspect.getattr_static(owner, name, None)) for name in added]
        added = frozenset().union(*(_mentioned(method) for method in methods if method is not None)) - known
        known |= added
    return known


def _is_library(module: str | None) -> bool:
    """Whether a module's contents are assumed not to change: those of torch, the standard library and jitgen."""
    root = (module or "").partition(".")[0]
    if root == "__main__":
        return False
    return root in ("torch", "jitgen") or root in sys.stdlib_module_names


def _default(function: types.FunctionType, index: int) -> Any:
    return (function.__defaults__ or ())[index]


def _keyword_default(function: types.FunctionType, name: str) -> Any:
    return (function.__kwdefaults__ or {})[name]


def _reader(source: Captured, step: Callable[[Any], Any]) -> Callable[[], Any]:
    read = source.read

    def get() -> Any:
        try:
            return step(read())
        except Exception:  # an attribute is the user's code, which may raise anything
            return _MISSING

    return get


def _derived(path: str, source: Captured, step: Callable[[Any], Any]) -> Captured:
    read = _reader(source, step)
    return Captured(path, read, read())


def _attribute(source: Captured, name: str) -> Captured:
    return _derived(f"{source.path}.{name}", source, lambda value: getattr(value, name))


def _item(source: Captured, key: Any) -> Captured:
    return _derived(f"{source.path}[{key!r}]", source, lambda value: value[key])


def _cell(name: str, cell: types.CellType) -> Captured:
    def read() -> Any:
        try:
            return cell.cell_contents
        except ValueError:
            return _MISSING

    return Captured(name, read, read())


def _global(name: str, variables: dict[str, Any]) -> Captured:
    def read() -> Any:
        return variables.get(name, _MISSING)

    return Captured(name, read, read())
