"""Reads what the forward of a module may depend on besides its arguments.

``State`` walks over a module: its submodules, and every attribute of each. Tensors become inputs, and are read again at
every call. Numbers in which modules of one list differ (``layer_idx``) become numeric arguments. All else is compared
(``comparison.py``): modules of equal ``key`` compute the same function of tensors and numbers, and ``is_current`` tells
whether something was replaced since.
"""

from __future__ import annotations

import argparse
import enum
import functools
import sys
from collections import OrderedDict, UserDict
from collections.abc import Mapping, Sequence
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch

from jitgen.models.comparison import Comparison
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
_HOOKS = ("_backward_pre_hooks", "_backward_hooks", "_forward_hooks", "_forward_pre_hooks", "_compiled_call_impl")
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
        for attribute, number in plain_numbers(module).items():
            values.setdefault(attribute, set()).add(number)
    return frozenset(attribute for attribute, numbers in values.items() if len(numbers) > 1)


class State:
    """Holds what the forward of one module may depend on, as it is now.

    Attributes:
        key: what modules that compute the same function of ``tensors`` and ``numbers`` have in common.
        problem: why no trace can run the module; None if one can.
        replaced_forward: says of which module below it the forward is replaced, as those of units are: no trace can run
            it, and a capture can. None without one.
    """

    def __init__(self, module: torch.nn.Module, varying: Varying = frozenset()):
        self.problem: str | None = None
        self.replaced_forward: str | None = None
        self._varying = varying
        self._seen: dict[int, int] = {}
        self._tensors: dict[int, int] = {}
        self._places: list[tuple[Mapping[Any, Any], Any]] = []
        self._number_places: list[tuple[dict[str, Any], str]] = []
        self._kept: list[Any] = []
        self._compared = Comparison()
        self._compared.empty += _GLOBAL_HOOKS
        self.key: Any = self._of_module(module, "")
        self._compared.begin()

    def tensors(self) -> list[torch.Tensor]:
        """Returns the tensors that are inputs, as they are now."""
        return [place[name] for place, name in self._places]

    def numbers(self) -> list[Any]:
        """Returns the numbers that are arguments, as they are now."""
        return [place[name] for place, name in self._number_places]

    def tensor_index(self, value: Any) -> int | None:
        """Returns the index of ``value`` in ``tensors``; None for anything else."""
        return self._tensors.get(id(value))

    def number_index(self, container: Any, name: Any) -> int | None:
        """Returns the index in ``numbers`` of entry ``name`` of ``container``; None for any other entry."""
        places = enumerate(self._number_places)
        return next((i for i, (attributes, place) in places if attributes is container and place == name), None)

    def is_current(self) -> bool:
        """Returns whether nothing that is compared was replaced since; tensors may have been."""
        return self._compared.is_same()

    def restore(self) -> None:
        """Gives lists and dicts that are compared the items again that they had."""
        self._compared.restore()

    def _refuse(self, why: str) -> None:
        self.problem = self.problem or why

    def _of_module(self, module: torch.nn.Module, path: str) -> Any:
        """Reads one module and what is below it."""
        if id(module) in self._seen:
            return "module", self._seen[id(module)]
        self._seen[id(module)] = len(self._seen)
        kind, attributes = type(module), vars(module)
        shown = path or kind.__name__
        self._compared.modules.append((module, kind))
        self._compared.forwards[kind] = kind.forward
        self._kept.append(kind.forward)
        code = self._of_class(kind)
        if "_parameters" not in attributes or isinstance(module, torch.jit.ScriptModule):
            self._refuse(f"{shown} is a {kind.__name__}, which no trace can run")
            return kind
        for name in _HOOKS:
            if attributes.get(name) and (path or name == "_compiled_call_impl"):  # those of a unit run around it
                self._refuse(f"{shown} has {name.strip('_').replace('_', ' ')}")
            elif path and attributes.get(name) is not None:
                self._compared.empty.append(attributes[name])
        if path and "forward" in attributes:
            self.replaced_forward = self.replaced_forward or f"the forward of {shown} is replaced"
        facts = [
            (name, self._attribute(attributes, name, value, path))
            for name, value in attributes.items()
            if name not in _OF_TORCH and name != "forward"
        ]
        self._compared.dicts.append(attributes)
        tensors = []
        for registered in (attributes["_parameters"], attributes["_buffers"]):
            self._compared.keyed.append(registered)
            tensors.append([(name, self._tensor(registered, name)) for name in registered])
        self._compared.dicts.append(attributes["_modules"])
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
                self._compared.dicts.append(vars(owner))
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
        self._compared.settings += [(read, value) for _, read, value in settings]
        facts: list[Any] = [(name, repr(value)) for name, _, value in settings]
        read = sorted(name for name in global_names(function.__code__) if name in variables)
        places = [(variables, name) for name in read]
        for module in (variables[name] for name in read if _is_of_user(variables[name])):
            places += [(vars(module), name) for name in sorted(names & vars(module).keys())]
        for variables_, name in places:
            self._compared.variables.append((variables_, name, variables_[name]))
            facts.append((name, self._of_name(variables_, name, where)))
        for name, enclosed in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = enclosed.cell_contents
            except ValueError:
                continue
            if name != "__class__":
                self._compared.cells.append((enclosed, value))
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
            self._compared.same.append(((place, name), self._places[self._tensors[id(tensor)]]))
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
                self._compared.lists.append(value)
            items = enumerate(value)
            return kind, *(self._fact(item, depth, (value, index), f"{path}.{index}") for index, item in items)
        if kind in (dict, OrderedDict):
            if id(value) not in self._seen:
                self._compared.dicts.append(value)
            return kind, *(
                (key if isinstance(key, PLAIN) else id(key), self._fact(item, depth, (value, key), f"{path}.{key}"))
                for key, item in value.items()
            )
        if kind in (set, frozenset):
            if kind is set:
                self._compared.sets.append((value, set(value)))
            return kind, frozenset(item if isinstance(item, PLAIN) else id(item) for item in value)
        if kind is MethodType:
            owner = value.__self__
            if isinstance(owner, torch.nn.Module) and id(owner) not in self._seen:
                self._refuse(f"{path} is a method of another module")
            return "method", self._seen.get(id(owner), id(owner)), id(value.__func__)
        if isinstance(value, FunctionType):
            return "function", self._of_function(value)
        if kind is functools.partial:
            fields = {"func": value.func, "args": value.args, "keywords": value.keywords}
            return "partial", *(self._fact(field, depth, (fields, name), path) for name, field in fields.items())
        attributes = getattr(value, "__dict__", None)
        if isinstance(value, (type, enum.Enum, ModuleType)) or not isinstance(attributes, dict):
            return "is", id(value)
        if id(value) in self._seen or (is_library(kind.__module__) and kind not in _FOLLOWED):
            return "is", id(value)
        if depth == 0 or len(self._seen) > MOST_OBJECTS:
            self._refuse(f"{path} leads to more objects than are compared")
            return "is", id(value)
        self._seen[id(value)] = len(self._seen)
        self._compared.dicts.append(attributes)
        facts = (
            (name, self._fact(item, depth - 1, (attributes, name), f"{path}.{name}"))
            for name, item in attributes.items()
        )
        return "object", id(value), tuple(facts)


def _is_installed(module: Any) -> bool:
    return is_installed(getattr(module, "__file__", None) or "")


def _is_of_user(value: Any) -> bool:
    """Returns whether ``value`` is a module of the user's own."""
    return isinstance(value, ModuleType) and not is_library(value.__name__) and not _is_installed(value)
