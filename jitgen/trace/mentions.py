"""Lists what Python code mentions: the names, imports and methods through which it can reach a value."""

from __future__ import annotations

import dis
import functools
import importlib.util
import inspect
import os
import sys
import sysconfig
import types
from collections import OrderedDict, deque
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

import torch

_NOT_SYNTAX = frozenset(
    f"__{name}__"
    for name in (
        *("init", "new", "del", "repr", "str", "format", "hash", "reduce", "reduce_ex", "getstate", "setstate"),
        *("init_subclass", "class_getitem", "replace"),
    )
)
"""Special methods that make, show or copy an object rather than use it."""


@functools.lru_cache(maxsize=4096)
def code_names(code: types.CodeType) -> frozenset[str]:
    """Returns the global and attribute names in the code, including those in nested functions and comprehensions."""
    return frozenset().union(*(inner.co_names for inner in codes_in(code)))


def mentioned(function: Any) -> frozenset[str]:
    """Returns the names in the code of ``function``; none if it has no code."""
    code = getattr(function, "__code__", None)
    return code_names(code) if code is not None else frozenset()


def codes_in(code: types.CodeType) -> list[types.CodeType]:
    """Lists ``code`` and that of every function within it."""
    codes = [code]
    for code_ in codes:
        codes += [constant for constant in code_.co_consts if isinstance(constant, types.CodeType)]
    return codes


@functools.lru_cache(maxsize=4096)
def global_names(code: types.CodeType) -> frozenset[str]:
    """Returns the names that the code looks up as variables, and not as attributes."""
    steps = (step for inner in codes_in(code) for step in dis.get_instructions(inner))
    return frozenset(step.argval for step in steps if "GLOBAL" in step.opname or step.opname == "LOAD_NAME")


@functools.lru_cache(maxsize=4096)
def asks_identity(code: types.CodeType) -> bool:
    """Returns whether the code compares a variable by ``is`` with something else than a constant, or calls ``id`` or
    ``operator.is_``."""
    if "id" in global_names(code) or not code_names(code).isdisjoint(("is_", "is_not")):
        return True
    for inner in codes_in(code):
        steps = [step for step in dis.get_instructions(inner) if step.opname not in ("CACHE", "PRECALL", "PUSH_NULL")]
        for number, step in enumerate(steps):
            if step.opname != "IS_OP":
                continue
            right = number - 1
            while steps[right].opname == "LOAD_ATTR" and right:
                right -= 1
            if steps[right].opname != "LOAD_CONST" and (
                right == number - 1 or steps[right - 1].opname.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_NAME"))
            ):
                return True
    return False


@functools.lru_cache(maxsize=4096)
def compares_tensor_type(code: types.CodeType) -> str | None:
    """Returns ``"model.py:12"``: the first line that compares a type with ``torch.Tensor``, by ``is``, ``==`` or
    ``in``."""
    for inner in codes_in(code):
        if "__class__" not in inner.co_names and "type" not in inner.co_names:
            continue
        line, starts = inner.co_firstlineno, dict(dis.findlinestarts(inner))
        loaded: list[Any] = []  # what was loaded since the last call or comparison
        for step in dis.get_instructions(inner):
            line = starts.get(step.offset) or line
            if step.opname in ("IS_OP", "COMPARE_OP", "CONTAINS_OP"):
                if {"Tensor", "Parameter"} & set(loaded):
                    return f"{inner.co_filename}:{line}"
                loaded = []
            elif step.opname.startswith("LOAD_"):
                loaded.append(step.argval)
            elif step.opname.startswith("CALL"):
                loaded = []
    return None


@functools.lru_cache(maxsize=4096)
def imports(code: types.CodeType, package: str | None) -> tuple[str, ...]:
    """Lists the modules that the code imports while it runs, packages first.

    Args:
        package: of the code's module, for relative imports.
    """
    modules: dict[str, None] = {}
    for inner in codes_in(code):
        steps = list(dis.get_instructions(inner))
        for number, step in enumerate(steps):
            if step.opname == "IMPORT_NAME":  # after the level and the names that it takes from the module
                name = "." * steps[number - 2].argval + step.argval
                packages = importlib.util.resolve_name(name, package).split(".")
                modules |= {".".join(packages[: end + 1]): None for end in range(len(packages))}
    return tuple(modules)


@functools.lru_cache(maxsize=4096)
def _chains(code: types.CodeType) -> tuple[tuple[tuple[str, ...], ...], dict[str, tuple[str, ...]]]:
    """Returns the dotted names in the code, each as its parts, and what it imports by the names that it gives them."""
    chains: set[tuple[str, ...]] = set()
    imported: dict[str, tuple[str, ...]] = {}
    for inner in codes_in(code):
        chain: tuple[str, ...] = ()
        source: tuple[str, ...] = ()
        for step in dis.get_instructions(inner):
            name = step.argval[-1] if isinstance(step.argval, tuple) and step.argval else step.argval
            if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                chain = (*chain, name) if chain else ()
            elif step.opname.startswith(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST", "LOAD_DEREF", "LOAD_CLASSDEREF")):
                chain = (name,)
            elif step.opname == "IMPORT_NAME":
                source = (name,)
            elif step.opname == "IMPORT_FROM":
                source = (source[0], name)
            elif step.opname in ("STORE_FAST", "STORE_DEREF", "STORE_GLOBAL", "STORE_NAME") and source:
                imported[name] = source
                source = source[:1] if len(source) > 1 else ()
            elif step.opname not in ("CACHE", "PUSH_NULL", "PRECALL", "SWAP", "POP_TOP"):
                chain = ()
            if chain:
                chains.add(chain)
    return tuple(chains), imported


def named_functions(function: types.FunctionType) -> list[tuple[str, Any]]:
    """Lists what the dotted names in the code of ``function`` lead to in modules, such as ``np.random.seed``, with the
    name."""
    code = function.__code__
    chains, imported = _chains(code)
    closed = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    functions: list[tuple[str, Any]] = []
    for chain in chains:
        root, *rest = chain
        if root in imported:
            module, *names = imported[root]
            value, rest = (
                sys.modules.get(module if names or "." not in module else module.partition(".")[0]),
                names + rest,
            )
        elif root in closed:
            try:
                value = closed[root].cell_contents
            except ValueError:
                continue
        elif rest or root in global_names(code):
            value = function.__globals__.get(root)
        else:
            continue
        for name in rest:
            value = getattr(value, name, None) if isinstance(value, types.ModuleType) else None
        if value is not None and not isinstance(value, types.ModuleType):
            functions.append((".".join(chain), value))
    return functions


def line_of(codes: Iterable[types.CodeType], name: str) -> str | None:
    """Returns ``"model.py:12"``: the first line of any of ``codes`` that mentions ``name``."""
    for code in codes:
        for inner in codes_in(code):
            line, starts = inner.co_firstlineno, dict(dis.findlinestarts(inner))
            for step in dis.get_instructions(inner):
                line = starts.get(step.offset) or line
                if step.argval == name:
                    return f"{inner.co_filename}:{line}"
    return None


_WRITES = ("STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF")
_WRITES_ITEMS = ("STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE")
_CHANGES = frozenset(
    name
    for owner in (list, dict, set, bytearray, deque, OrderedDict, ContextVar, object)
    for name in dir(owner)
    if name.startswith(("append", "extend", "insert", "pop", "remove", "clear", "update", "add", "discard", "sort"))
    or name in ("reverse", "rotate", "move_to_end", "set", "setdefault", "__setitem__", "__delitem__", "__setattr__")
) | {"fill", "setattr", "delattr"}
"""Names of methods and functions that change an object."""


def line_of_change(codes: Iterable[types.CodeType], name: str) -> str | None:
    """Returns ``"model.py:12"``: the line that changes ``name``, an attribute, a variable or what it refers to; else
    the first one that mentions it."""
    for code in codes:
        for inner in codes_in(code):
            by_line: dict[int, list[dis.Instruction]] = {}
            line, starts = inner.co_firstlineno, dict(dis.findlinestarts(inner))
            for step in dis.get_instructions(inner):
                line = starts.get(step.offset) or line
                by_line.setdefault(line, []).append(step)
            for line, steps in by_line.items():
                named = [
                    step for step in steps if name in (step.argval if type(step.argval) is tuple else (step.argval,))
                ]
                if named and any(
                    step.opname in _WRITES_ITEMS or step.argval in _CHANGES
                    for step in steps
                    if type(step.argval) is str or step.opname in _WRITES_ITEMS
                ):
                    return f"{inner.co_filename}:{line}"
                if any(step.opname in _WRITES for step in named):
                    return f"{inner.co_filename}:{line}"
    return line_of(codes, name)


def stored_globals(code: types.CodeType) -> frozenset[str]:
    """Returns the global variables that the code sets or deletes."""
    steps = (step for inner in codes_in(code) for step in dis.get_instructions(inner))
    return frozenset(step.argval for step in steps if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"))


def plain_function(attribute: Any) -> types.FunctionType | None:
    """Returns the Python function of a class attribute that is a method, a property, or a static or class method,
    decorated or not."""
    while not isinstance(attribute, types.FunctionType):
        if isinstance(attribute, property):
            attribute = attribute.fget
        elif isinstance(attribute, (staticmethod, classmethod, types.MethodType)):
            attribute = attribute.__func__
        elif hasattr(type(attribute), "__jitgen_function__"):
            attribute = attribute.__jitgen_function__
        else:
            return None
    return attribute


def static_function(value: Any, name: str) -> types.FunctionType | None:
    return plain_function(inspect.getattr_static(value, name, None))


def static_attribute(value: Any, name: str, default: Any) -> Any:
    """Returns ``inspect.getattr_static`` of an object, in a tenth of the time."""
    if isinstance(value, type):
        return inspect.getattr_static(value, name, default)
    attribute = next((vars(base)[name] for base in type(value).__mro__ if name in vars(base)), default)
    own = getattr(value, "__dict__", None)
    if isinstance(own, dict) and name in own and not hasattr(type(attribute), "__set__"):
        return own[name]
    return attribute


def lacks(value: Any, name: str) -> bool:
    """Returns whether an object that has no static attribute ``name`` has none that its class computes either."""
    owner = type(value)
    if isinstance(value, type) or owner.__getattribute__ is not object.__getattribute__:
        return False
    if isinstance(value, torch.nn.Module) and owner.__getattr__ is torch.nn.Module.__getattr__:
        return not any(name in vars(value).get(table, ()) for table in ("_parameters", "_buffers", "_modules"))
    return not hasattr(owner, "__getattr__")


def current_method(value: Any, name: str) -> types.FunctionType | None:
    """Returns ``static_function`` of a name that is known to be a method's, in a twentieth of the time."""
    own: dict[str, Any] = {} if isinstance(value, type) else getattr(value, "__dict__", {})
    if name in own:
        return plain_function(own[name])
    return plain_function(getattr(value if isinstance(value, type) else type(value), name, None))


def users_classes(owner: type) -> list[type]:
    """Returns ``owner`` and its bases, without those of libraries."""
    return [base for base in owner.__mro__ if not is_library(base.__module__)]


def overridden(owner: type, name: str) -> list[type]:
    """Returns the user's classes behind the first that have a method ``name``, which ``super()`` may reach."""
    return [base for base in users_classes(owner) if plain_function(vars(base).get(name)) is not None][1:]


def special_methods(owner: type) -> frozenset[str]:
    """Returns the special methods of the user's that Python calls for operators and statements: ``x[i]``,
    ``len(x)``."""
    return frozenset(
        name
        for base in users_classes(owner)
        for name, method in vars(base).items()
        if name[:2] == name[-2:] == "__" and name not in _NOT_SYNTAX and isinstance(method, types.FunctionType)
    )


def descriptors(owner: type, names: frozenset[str]) -> list[types.FunctionType]:
    """Returns the methods that the user's own descriptors run when one of ``names`` is read."""
    kinds = {type(inspect.getattr_static(owner, name, None)) for name in names}
    methods = [static_function(kind, "__get__") for kind in kinds if not is_library(kind.__module__)]
    return [method for method in methods if method is not None]


def with_methods(owner: type, names: frozenset[str]) -> frozenset[str]:
    """Returns ``names``, and, transitively, the names that methods of ``owner`` mention if they are in the set."""
    known, added = names, names
    while added:
        methods = [static_function(owner, name) for name in added]
        if "super" in known:
            methods += [plain_function(vars(base)[name]) for name in known for base in overridden(owner, name)]
        added = frozenset().union(*(mentioned(method) for method in methods if method is not None)) - known
        known |= added
    return known


def is_third_party(code: types.CodeType) -> bool:
    """Returns whether the code belongs to an installed package, and is not the user's own."""
    return is_installed(code.co_filename)


def is_installed(filename: str) -> bool:
    """Returns whether a file belongs to an installed package."""
    return filename.startswith(_INSTALLED) or _has_metadata_in_its_directory(os.path.dirname(filename))


@functools.lru_cache(4096)
def _has_metadata_in_its_directory(directory: str) -> bool:
    """Returns whether the package in ``directory`` has metadata beside it, as ``pip install --target`` leaves it."""
    if not os.path.exists(os.path.join(directory, "__init__.py")):
        return False
    parent, name = os.path.split(directory)
    if os.path.exists(os.path.join(parent, "__init__.py")):
        return _has_metadata_in_its_directory(parent)
    return any(entry.startswith(f"{name}-") and entry.endswith(".dist-info") for entry in os.listdir(parent))


_INSTALLED = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})


def is_library(module: str | None) -> bool:
    """Returns whether a module's contents are assumed not to change: torch's, numpy's, jitgen's and the standard
    library's."""
    root = (module or "").partition(".")[0]
    if root == "__main__":
        return False
    return root in ("torch", "numpy", "jitgen") or root in sys.stdlib_module_names
