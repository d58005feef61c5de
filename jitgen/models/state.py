"""Reads what the forward of a module may depend on besides its arguments, and copies a module for a trace.

``State`` walks over a module: its submodules, and every attribute of each. Tensors become inputs, and are read again at
every call. Numbers in which modules of one list differ (``layer_idx``) become numeric arguments. All else is compared:
modules of equal ``key`` compute the same function of tensors and numbers, and ``is_current`` tells, in a few
microseconds, whether something was replaced since.

A trace never runs the module itself but a copy that ``Template`` makes, where it is noticed if the code sets anything.
"""

from __future__ import annotations

import argparse
import enum
import functools
import operator
import sys
from collections import OrderedDict, UserDict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, islice
from types import CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch

from jitgen.errors import UnsupportedError
from jitgen.trace import modes
from jitgen.trace.mentions import (
    code_names,
    global_names,
    is_installed,
    is_library,
    is_third_party,
    named_functions,
    plain_function,
    stored_globals,
    users_classes,
)

PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
"""Types whose values are compared by value."""
MAX_DEPTH = 6
"""Steps from a module's attribute to what is compared of a plain object, such as a configuration."""
MOST_OBJECTS = 4096
"""Modules and objects that are followed from one module; with more it stays as it is."""
_HOOKS = (
    "_backward_pre_hooks",
    "_backward_hooks",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_compiled_call_impl",
)
"""Attributes of a module that are empty where nothing runs around its forward."""
_FOLLOWED = (SimpleNamespace, argparse.Namespace, UserDict)
"""Classes of the standard library whose attributes are followed; of others, such as loggers, nothing is."""
_OF_TORCH = frozenset(
    {"_parameters", "_buffers", "_modules", "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks"}
    | {"_load_state_dict_post_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"}
    | {"_forward_pre_hooks_with_kwargs", "_is_full_backward_hook", "_non_persistent_buffers_set"}
    | set(_HOOKS)
)
_GLOBAL_HOOKS = (
    torch.nn.modules.module._global_forward_hooks,
    torch.nn.modules.module._global_forward_pre_hooks,
    torch.nn.modules.module._global_backward_hooks,
    torch.nn.modules.module._global_backward_pre_hooks,
)

Varying = frozenset[tuple[str, str]]
"""Numbers that are arguments: the path of a module, and the name of its attribute."""


def plain_numbers(module: torch.nn.Module) -> dict[tuple[str, str], Any]:
    """Returns the numbers among the attributes of ``module`` and its submodules, by path and name."""
    return {
        (path, name): value
        for path, inner in module.named_modules()
        for name, value in vars(inner).items()
        if type(value) in (int, float)
    }


def varying_numbers(modules: Sequence[torch.nn.Module]) -> Varying:
    """Returns the numbers in which ``modules`` differ."""
    values: dict[tuple[str, str], set[Any]] = {}
    for module in modules:
        for place, number in plain_numbers(module).items():
            values.setdefault(place, set()).add(number)
    return frozenset(place for place, numbers in values.items() if len(numbers) > 1)


class State:
    """Holds what the forward of one module may depend on, as it is now.

    Attributes:
        key: what modules that compute the same function of ``tensors`` and ``numbers`` have in common.
        problem: why the module can only run as it is; None if it can be traced.
        other_problem: the same, but for forwards below it that are replaced, as those of units are.
    """

    def __init__(self, module: torch.nn.Module, varying: Varying = frozenset()):
        self.problem: str | None = None
        self.other_problem: str | None = None
        self._varying = varying
        self._seen: dict[int, int] = {}
        self._tensors: dict[int, int] = {}
        self._places: list[tuple[Mapping[Any, Any], Any]] = []
        self._number_places: list[tuple[dict[str, Any], str]] = []
        self._dicts: list[Mapping[Any, Any]] = []
        self._keyed: list[Mapping[Any, Any]] = []
        self._lists: list[Any] = []
        self._sets: list[tuple[set[Any], set[Any]]] = []
        self._empty: list[Any] = [*_GLOBAL_HOOKS]
        self._modules: list[tuple[torch.nn.Module, type]] = []
        self._same: list[tuple[tuple[Mapping[Any, Any], Any], tuple[Mapping[Any, Any], Any]]] = []
        self._forwards: dict[type, Any] = {}
        self._variables: list[tuple[dict[str, Any], str, Any]] = []
        self._settings: list[tuple[Callable[[], Any], Any]] = []
        self._cells: list[tuple[CellType, Any]] = []
        self._kept: list[Any] = []
        self.key: Any = self._of_module(module, "")
        self._names = [*chain.from_iterable(self._dicts)]
        self._values = [*chain.from_iterable(map(_values, self._dicts))]
        self._counts = [*map(len, self._dicts)]
        self._tensor_names = [*chain.from_iterable(self._keyed)]
        self._absent = self._absences()
        self._items = [*map(tuple, self._lists)]

    def tensors(self) -> list[torch.Tensor]:
        """Returns the tensors that are inputs, as they are now."""
        return [place[name] for place, name in self._places]

    def numbers(self) -> list[Any]:
        """Returns the numbers that are arguments, as they are now."""
        return [place[name] for place, name in self._number_places]

    def _absences(self) -> list[bool]:
        """Returns for each registered tensor whether it is None."""
        return [tensor is None for registered in self._keyed for tensor in registered.values()]

    def slot(self, value: Any) -> Any:
        """Returns what stands for a tensor in a template; None for anything else."""
        return _Slot(self._tensors[id(value)]) if id(value) in self._tensors else None

    def number(self, container: Any, name: Any) -> Any:
        """Returns what stands for a number that is an argument; None for any other entry of ``container``."""
        for index, (attributes, place) in enumerate(self._number_places):
            if attributes is container and place == name:
                return _Number(index)
        return None

    def is_current(self) -> bool:
        """Returns whether nothing that is compared was replaced since; tensors may have been."""
        if any(self._empty) or [*chain.from_iterable(self._dicts)] != self._names:
            return False
        if not all(map(operator.is_, chain.from_iterable(map(_values, self._dicts)), self._values)):
            return False
        return (
            [*chain.from_iterable(self._keyed)] == self._tensor_names
            and self._absences() == self._absent
            and all(type(module) is kind for module, kind in self._modules)
            and all(place[name] is other[its_name] for (place, name), (other, its_name) in self._same)
            and all(getattr(kind, "forward", None) is forward for kind, forward in self._forwards.items())
            and all(map(_same_items, self._lists, self._items))
            and all(now == then for now, then in self._sets)
            and all(variables.get(name, self) is value for variables, name, value in self._variables)
            and all(read() == value for read, value in self._settings)
            and all(cell.cell_contents is value for cell, value in self._cells)
        )

    def restore(self) -> None:
        """Gives lists and dicts that are compared the items again that they had."""
        for container, items in zip(self._lists, self._items, strict=True):
            if not _same_items(container, items):
                container[:] = items
        names, values = iter(self._names), iter(self._values)
        for mapping, count in zip(self._dicts, self._counts, strict=True):
            entries = dict(zip(islice(names, count), islice(values, count), strict=True))
            if isinstance(mapping, dict) and not (
                mapping.keys() == entries.keys() and _same_items([*mapping.values()], (*entries.values(),))
            ):
                mapping.clear()
                mapping.update(entries)

    def _refuse(self, why: str) -> None:
        self.problem = self.problem or why
        self.other_problem = self.other_problem or why

    def _of_module(self, module: torch.nn.Module, path: str) -> Any:
        """Reads one module and what is below it."""
        if id(module) in self._seen:
            return "module", self._seen[id(module)]
        self._seen[id(module)] = len(self._seen)
        kind, attributes = type(module), vars(module)
        shown = path or kind.__name__
        self._modules.append((module, kind))
        self._forwards[kind] = kind.forward
        self._kept.append(kind.forward)
        code = self._of_class(kind)
        if "_parameters" not in attributes or isinstance(module, torch.jit.ScriptModule):
            self._refuse(f"{shown} is a {kind.__name__}, which no trace can run")
            return kind
        for name in _HOOKS:
            if attributes.get(name) and (path or name == "_compiled_call_impl"):  # those of a unit run around it
                self._refuse(f"{shown} has {name.strip('_').replace('_', ' ')}")
            elif path and attributes.get(name) is not None:
                self._empty.append(attributes[name])
        if path and "forward" in attributes:
            self.problem = self.problem or f"the forward of {shown} is replaced"
        facts = [
            (name, self._attribute(attributes, name, value, path))
            for name, value in attributes.items()
            if name not in _OF_TORCH and name != "forward"
        ]
        self._dicts.append(attributes)
        tensors = []
        for registered in (attributes["_parameters"], attributes["_buffers"]):
            self._keyed.append(registered)
            tensors.append([(name, self._tensor(registered, name)) for name in registered])
        self._dicts.append(attributes["_modules"])
        children = [
            (name, child if child is None else self._of_module(child, f"{path}.{name}".lstrip(".")))
            for name, child in attributes["_modules"].items()
        ]
        return kind, id(kind.forward), code, tuple(facts), tuple(map(tuple, tensors)), tuple(children)

    def _of_class(self, kind: type) -> Any:
        """Reads what the user's own classes and functions read by name; those of libraries are taken as constant."""
        facts = []
        for owner in users_classes(kind):
            if id(owner) not in self._seen and not _is_installed(sys.modules.get(owner.__module__)):
                self._seen[id(owner)] = len(self._seen)
                self._dicts.append(vars(owner))
                facts += [(name, self._of_name(vars(owner), name, owner.__name__)) for name in vars(owner)]
        return tuple(facts)

    def _of_name(self, names: Mapping[str, Any], name: str, path: str) -> Any:
        """Reads what a name of the user's code leads to."""
        value = names[name]
        function = plain_function(value)
        if function is not None:
            return self._of_function(function)
        if isinstance(value, ModuleType) or (name.startswith("__") and name.endswith("__")):
            return None
        if isinstance(value, type):
            self._kept.append(value)
            return id(value), self._of_class(value)
        return self._fact(value, MAX_DEPTH, (names, name), f"{path}.{name}")

    def _of_function(self, function: FunctionType) -> Any:
        """Reads what a function of the user's own reads by name, and what its variables of enclosing functions are."""
        self._kept.append(function)
        if id(function) in self._seen or is_library(function.__module__) or is_third_party(function.__code__):
            return id(function)
        self._seen[id(function)] = len(self._seen)
        if stored := stored_globals(function.__code__):
            self._refuse(f"{function.__name__} sets the global variable {min(stored)}")
        for path, value in named_functions(function):
            if (refusal := modes.refusal(value)) is not None:
                self._refuse(f"{path} {refusal[0]}")
        variables, where, names = function.__globals__, function.__name__, code_names(function.__code__)
        settings = [(name, read, read()) for name, read in modes.read_by(names)]
        self._settings += [(read, value) for _, read, value in settings]
        facts: list[Any] = [(name, repr(value)) for name, _, value in settings]
        read = sorted(name for name in global_names(function.__code__) if name in variables)
        places = [(variables, name) for name in read]
        for module in (variables[name] for name in read if _is_of_user(variables[name])):
            places += [(vars(module), name) for name in sorted(names & vars(module).keys())]
        for variables_, name in places:
            self._variables.append((variables_, name, variables_[name]))
            facts.append((name, self._of_name(variables_, name, where)))
        for name, enclosed in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = enclosed.cell_contents
            except ValueError:
                continue
            if name != "__class__":
                self._cells.append((enclosed, value))
                facts.append((name, self._of_name({name: value}, name, where)))
        return id(function), tuple(facts)

    def _attribute(self, attributes: dict[str, Any], name: str, value: Any, path: str) -> Any:
        if type(value) in (int, float) and (path, name) in self._varying:
            self._number_places.append((attributes, name))
            return type(value), "argument"
        return self._fact(value, MAX_DEPTH, (attributes, name), f"{path}.{name}".lstrip("."))

    def _tensor(self, place: Mapping[Any, Any], name: Any) -> Any:
        """Notes the tensor at ``place`` as an input; one that is met twice is one input."""
        tensor = place[name]
        if tensor is None:
            return None
        if id(tensor) in self._tensors:
            self._same.append(((place, name), self._places[self._tensors[id(tensor)]]))
        else:
            self._tensors[id(tensor)] = len(self._places)
            self._places.append((place, name))
        return self._tensors[id(tensor)]

    def _fact(self, value: Any, depth: int, place: tuple[Any, Any], path: str) -> Any:
        """Returns what is compared of ``value``."""
        kind = type(value)
        if kind in PLAIN:
            return kind, repr(value) if kind in (float, complex) else value
        if isinstance(value, torch.Tensor):
            return "tensor", self._tensor(*place)
        if isinstance(value, torch.nn.Module):
            return self._of_module(value, path)
        self._kept.append(value)
        if kind in (list, tuple, torch.Size):
            if kind is list:
                self._lists.append(value)
            items = enumerate(value)
            return kind, *(self._fact(item, depth, (value, index), f"{path}.{index}") for index, item in items)
        if kind in (dict, OrderedDict):
            if id(value) not in self._seen:
                self._dicts.append(value)
            return kind, *(
                (key if isinstance(key, PLAIN) else id(key), self._fact(item, depth, (value, key), f"{path}.{key}"))
                for key, item in value.items()
            )
        if kind in (set, frozenset):
            if kind is set:
                self._sets.append((value, set(value)))
            return kind, frozenset(item if isinstance(item, PLAIN) else id(item) for item in value)
        if kind is MethodType:
            owner = value.__self__
            if isinstance(owner, torch.nn.Module) and id(owner) not in self._seen:
                self._refuse(f"{path} is a method of another module")
            return "method", self._seen.get(id(owner), id(owner)), id(value.__func__)
        if isinstance(value, FunctionType):
            return "function", self._of_function(value)
        if kind is functools.partial:
            parts = {"func": value.func, "args": value.args, "keywords": value.keywords}
            return "partial", *(self._fact(part, depth, (parts, name), path) for name, part in parts.items())
        attributes = getattr(value, "__dict__", None)
        if isinstance(value, (type, enum.Enum, ModuleType)) or not isinstance(attributes, dict):
            return "is", id(value)
        if id(value) in self._seen or (is_library(kind.__module__) and kind not in _FOLLOWED):
            return "is", id(value)
        if depth == 0 or len(self._seen) > MOST_OBJECTS:
            self._refuse(f"{path} leads to more objects than are compared")
            return "is", id(value)
        self._seen[id(value)] = len(self._seen)
        self._dicts.append(attributes)
        facts = (
            (name, self._fact(item, depth - 1, (attributes, name), f"{path}.{name}"))
            for name, item in attributes.items()
        )
        return "object", id(value), tuple(facts)


class _Slot:
    """Stands in a template for tensor ``index``."""

    def __init__(self, index: int):
        self.index = index


class _Number:
    """Stands in a template for numeric argument ``index``."""

    def __init__(self, index: int):
        self.index = index


class Template:
    """Holds a copy of a module without tensors, of which each trace makes one with its own.

    Attributes:
        numbers: how many numbers are arguments.
        inputs: how many numbers and tensors are.
    """

    def __init__(self, module: torch.nn.Module, state: State):
        self.numbers = len(state.numbers())
        self.inputs = self.numbers + len(state.tensors())
        self._blank = _Copier(state.slot, state.number).copy(module)

    def with_inputs(self, tensors: Sequence[Any], numbers: Sequence[Any]) -> Copied:
        """Makes a module that has ``tensors`` and ``numbers`` in the order of ``State``'s."""

        def leaf(value: Any) -> Any:
            return tensors[value.index] if type(value) is _Slot else None

        def number(container: Any, name: Any) -> Any:
            value = container[name]
            return numbers[value.index] if type(value) is _Number else None

        copier = _Copier(leaf, number)
        module = copier.copy(self._blank)
        return Copied(module, [(container, contents(container)) for container in copier.containers])


class Copied:
    """Holds the module that a trace runs.

    Attributes:
        module: the copy.
    """

    def __init__(self, module: Any, contents: Sequence[tuple[Any, list[Any]]]):
        self.module = module
        self._contents = contents

    def check(self) -> None:
        """Raises UnsupportedError if the forward has set an attribute, or has changed a list or dict."""
        for container, before in self._contents:
            now = contents(container)
            if not same_contents(now, before):
                names = [name for name, *_ in now if name not in [name for name, *_ in before]]
                names += [new[0] for new, old in zip(now, before, strict=False) if not _is_same_entry(new, old)]
                raise UnsupportedError(f"its forward changes {names[0] if names else 'a list'} of the module")


def contents(container: Any) -> list[Any]:
    """Lists the items of a list or dict, each with its name."""
    return list(container.items()) if isinstance(container, dict) else list(enumerate(container))


def same_contents(now: Sequence[Any], before: Sequence[Any]) -> bool:
    """Returns whether two results of ``contents`` are the same objects by the same names."""
    return len(now) == len(before) and all(map(_is_same_entry, now, before))


def _is_same_entry(now: Any, before: Any) -> bool:
    return now[0] == before[0] and now[1] is before[1]


class _Copier:
    """Copies modules and the plain containers among their attributes; all else is shared.

    Args:
        leaf: what replaces a value; None for what is copied as it is.
        number: the same of a number at a place, given as container and name.
    """

    def __init__(self, leaf: Callable[[Any], Any], number: Callable[[Any, Any], Any]):
        self._leaf = leaf
        self._number = number
        self._copies: dict[int, Any] = {}
        self.containers: list[Any] = []

    def copy(self, value: Any) -> Any:
        replaced = self._leaf(value)
        if replaced is not None:
            return replaced
        if id(value) in self._copies:
            return self._copies[id(value)]
        kind = type(value)
        if isinstance(value, torch.nn.Module):
            copy = self._copies[id(value)] = object.__new__(kind)
            vars(copy).update(self._entries(vars(value)))
            vars(copy).pop("forward", None)
            self.containers.append(vars(copy))
            return copy
        if kind in (dict, OrderedDict):
            made = self._copies[id(value)] = kind()
            made.update(self._entries(value))
            self.containers.append(made)
            return made
        if kind is list:
            items = self._copies[id(value)] = [*map(self.copy, value)]
            self.containers.append(items)
            return items
        if kind is tuple:
            return tuple(map(self.copy, value))
        if kind is MethodType and id(value.__self__) in self._copies:
            return MethodType(value.__func__, self._copies[id(value.__self__)])
        return value

    def _entries(self, container: dict[Any, Any]) -> dict[Any, Any]:
        entries = {}
        for name, value in container.items():
            number = self._number(container, name)
            entries[name] = self.copy(value) if number is None else number
        return entries


def _is_installed(module: Any) -> bool:
    return is_installed(getattr(module, "__file__", None) or "")


def _is_of_user(value: Any) -> bool:
    """Returns whether ``value`` is a module of the user's own."""
    return isinstance(value, ModuleType) and not is_library(value.__name__) and not _is_installed(value)


def _values(mapping: Mapping[Any, Any]) -> Any:
    return mapping.values()


def _same_items(now: Sequence[Any], then: tuple[Any, ...]) -> bool:
    return len(now) == len(then) and all(map(operator.is_, now, then))
