"""What a function closes over: tensors to read at every call, values to guard at every call.

A traced function may use names that are not its arguments: closure cells, globals, defaults, attributes of ``self`` or
of a module it calls. ``Captures`` walks exactly the names its code mentions (and the code of the functions and modules
those names lead to) and finds

* tensors: each becomes a kernel input, read again through the same names at every call, so rebinding a global or
  updating a parameter is seen;
* numbers, strings, dtypes, functions and the like: their values are part of what was traced, so they are *guarded*:
  checked at every call (an identity test each), and traced anew when changed.

Python modules themselves (``torch``, ``F``) are taken to be stable.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

MAX_DEPTH = 8
_GUARDED = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, type, types.BuiltinFunctionType)
_FUNCTIONS = (types.FunctionType, types.MethodType)
_MISSING = object()


@dataclass(frozen=True, eq=False)
class Captured:
    """One value reached from the function: how to read it again, and what it was.

    Attributes:
        path: as a user would write it, such as ``scale`` or ``self.weight``.
        read: gives the value now; ``_MISSING`` when it is gone.
        value: what it was at the trace.
    """

    path: str
    read: Callable[[], Any]
    value: Any

    def holds(self) -> bool:
        """Whether the value is still the same: the same object, or an equal one of the same type."""
        now = self.read()
        return now is self.value or same_value(now, self.value)


def same_value(left: Any, right: Any) -> bool:
    """Equality that tells 1 from 1.0 and 0.0 from -0.0, and knows that NaN is NaN."""
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
    """Everything the code of ``function`` reaches by name."""

    def __init__(self, function: Callable[..., Any]):
        self.tensors: list[Captured] = []
        self.guards: list[Captured] = []
        self._seen: set[int] = set()
        root = Captured(getattr(function, "__name__", "function"), lambda: function, function)
        for child, names in self._children(root, frozenset()):
            self._visit(child, names, 1)
        # The function itself is what was traced; only what it reaches can change.
        self.guards = [guard for guard in self.guards if guard.value is not getattr(function, "__code__", self)]

    def tensor(self, tensor: torch.Tensor) -> Captured | None:
        """The capture that leads to exactly this tensor object."""
        return next((captured for captured in self.tensors if captured.value is tensor), None)

    def _visit(self, captured: Captured, names: frozenset[str], depth: int) -> None:
        value = captured.value
        if isinstance(value, torch.Tensor):
            self.tensors.append(captured)
            return
        if isinstance(value, _GUARDED):
            self.guards.append(captured)
            return
        if depth > MAX_DEPTH or (id(value) in self._seen and not isinstance(value, (tuple, list, dict))):
            return
        self._seen.add(id(value))
        for child, child_names in self._children(captured, names):
            if child.value is not _MISSING:
                self._visit(child, child_names, depth + 1)

    def _children(self, captured: Captured, names: frozenset[str]) -> Iterator[tuple[Captured, frozenset[str]]]:
        value, path = captured.value, captured.path
        inner = getattr(value, "__jitgen_function__", None)
        if inner is not None:
            yield _derived(path, captured, lambda jitted: jitted.__jitgen_function__), names
        elif isinstance(value, types.MethodType):
            self.guards.append(_derived(path, captured, lambda method: method.__func__))
            mentioned = code_names(value.__func__.__code__)
            yield _derived(f"{path}.__self__", captured, lambda method: method.__self__), mentioned
            yield _derived(path, captured, lambda method: method.__func__), mentioned
        elif isinstance(value, types.FunctionType):
            self.guards.append(_derived(path, captured, lambda function: function.__code__))
            yield from self._function_children(captured, value)
        elif isinstance(value, torch.nn.Module):
            code = getattr(type(value).forward, "__code__", None)
            mentioned = names | (code_names(code) if code else frozenset())
            if code is not None:
                yield _derived(f"{path}.forward", captured, lambda module: type(module).forward), mentioned
            for name in sorted(mentioned):
                yield _attribute(captured, name), mentioned
        elif isinstance(value, types.ModuleType):
            if not _is_library(value):
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
            for name in sorted(names):
                if name in getattr(value, "__dict__", ()) or name in getattr(type(value), "__slots__", ()):
                    yield _attribute(captured, name), names

    def _function_children(
        self, captured: Captured, function: types.FunctionType
    ) -> Iterator[tuple[Captured, frozenset[str]]]:
        names = code_names(function.__code__)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            yield _cell(name, cell), names
        for name in sorted(names):
            if name in function.__globals__:
                yield _global(name, function.__globals__), names
        defaults = function.__defaults__ or ()
        for index in range(len(defaults)):
            path = f"default {index} of {captured.path}"
            yield _derived(path, captured, lambda f, i=index: (f.__defaults__ or ())[i]), names
        for name in function.__kwdefaults__ or {}:
            path = f"default {name} of {captured.path}"
            yield _derived(path, captured, lambda f, n=name: (f.__kwdefaults__ or {})[n]), names
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None:
            yield _derived(captured.path, captured, lambda f: f.__wrapped__), names


@lru_cache(maxsize=4096)
def code_names(code: types.CodeType) -> frozenset[str]:
    """Every global and attribute name the code mentions, nested functions and comprehensions included."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= code_names(constant)
    return frozenset(names)


def _is_library(module: types.ModuleType) -> bool:
    """Modules whose contents are taken as stable: torch, the standard library, builtins, jitgen itself."""
    import sys

    root = module.__name__.partition(".")[0]
    return root in ("torch", "jitgen") or root in sys.stdlib_module_names


def _reader(source: Captured, step: Callable[[Any], Any]) -> Callable[[], Any]:
    read = source.read

    def get() -> Any:
        try:
            return step(read())
        except (AttributeError, KeyError, IndexError, TypeError, ValueError):
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
