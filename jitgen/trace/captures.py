"""Follows the values that a function closes over: tensors are read at every call, all other values are guarded.

A traced function may use names that are not its arguments: closure cells, globals, defaults, imports, and attributes of
``self`` or of a module that it calls. ``Captures`` follows the names that the function's code mentions, and those that
the functions and modules it reaches mention. It collects

* tensors: each becomes a kernel input. Every call reads it through the same names, so it sees a rebound global and an
  updated parameter;
* numbers, strings, dtypes, functions, containers and the like: the trace depends on their values, so they are
  *guarded*. Every call compares them, mostly by identity, and a changed value makes it trace again.

What can be neither followed nor compared is refused (``contents.py``). Library modules (``torch``, ``F``, ``numpy``,
the standard library) are assumed not to change. ``docs/captures.md`` has the rule for users.

Neighbours: ``mentions.py`` reads names from code, ``captured.py`` reads values through them, ``look_ups.py`` reports
the attributes that ``getattr`` and its like look up while the function is traced. ``tracer.py`` asks here for the name
of a tensor that it meets; ``call/`` evaluates the guards.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from jitgen.errors import TraceError
from jitgen.trace import contents, modes
from jitgen.trace.captured import GUARDED, MISSING, Captured, attribute, cell, derived, item, variable
from jitgen.trace.journal import Journal
from jitgen.trace.kernels.triton_module import constants_read, is_launcher
from jitgen.trace.location import quote
from jitgen.trace.mentions import (
    asks_identity,
    code_names,
    compares_tensor_type,
    current_method,
    descriptors,
    global_names,
    imports,
    is_library,
    is_third_party,
    lacks,
    line_of,
    mentioned,
    named_functions,
    overridden,
    plain_function,
    special_methods,
    static_attribute,
    stored_globals,
    with_methods,
)
from jitgen.trace.weak_method import WeakMethod

MAX_DEPTH = 64
"""Attribute, item and call steps from the traced function to the values that are looked at; beyond it is refused."""
MAX_DEPTH_OF_PACKAGES = 8
"""The same for functions of installed packages, which mention far more than a call of them reads."""

_VALUES = (types.MemberDescriptorType, types.GetSetDescriptorType, functools.cached_property)
"""Descriptors behind which there is one value."""
_WRAPPERS: dict[type, tuple[str, ...]] = {
    functools.partial: ("func", "args", "keywords"),
    type(functools.cache(len)): ("__wrapped__",),
    types.BuiltinFunctionType: ("__self__",),
    types.MethodWrapperType: ("__self__",),
}
"""Objects of Python's that lead to others, with the attributes by which they do."""
_NOT_COMPARED = "so that later calls could not tell whether it has changed"
_NOT_AGAIN = "which later calls, that launch kernels without running the function, would not do"
_CALLS_OF_MODULES = (torch.nn.Module._wrapped_call_impl, torch.nn.Module._call_impl)

Children = Iterator[tuple[Captured, frozenset[str]]]
"""What a value leads to, each with the names by which its own children are looked up."""


class Captures:
    """Collects the tensors and the guarded values that the code of ``function`` reaches by name.

    Raises TraceError for a value that can be neither followed nor compared.

    Attributes:
        tensors, guards: what was found.
        codes: of the user's functions that were followed.
        journal: what the function may change.
        asks_identity: whether the user's code compares variables by ``is``.
        follows_arguments: whether something is read from tensors among the arguments.
        mentioned: the global and attribute names in all of the user's code.
    """

    def __init__(self, function: Callable[..., Any], name: str, arguments: Sequence[Captured] = ()):
        """Follows the names in ``function``.

        Args:
            name: the function's, for messages.
            arguments: those that are objects.
        """
        self.name = name
        self._function = function
        self._arguments = arguments
        self.journal = Journal()
        self._unknown: list[tuple[weakref.ref[Any], str, frozenset[str]]] = []
        self._names: dict[tuple[type, frozenset[str]], frozenset[str]] = {}
        self.mentioned: frozenset[str] = frozenset()
        self.asks_identity = False
        self.follows_arguments = False
        self._follow()
        self.asks_identity = any(map(asks_identity, self.codes))
        # A function may pass an object to any other: so attributes are followed that any of them mentions.
        while not (mentioned := frozenset().union(*map(code_names, self.codes))) <= self.mentioned:
            self.mentioned |= mentioned
            self.asks_identity = any(map(asks_identity, self.codes))
            self._follow()
        self._refuse_comparisons_of_types()

    def _follow(self) -> None:
        function = self._function
        self.tensors: list[Captured] = []
        self.guards: list[Captured] = []
        self.codes: list[types.CodeType] = []
        self._seen: dict[int, tuple[Captured, frozenset[str]]] = {}
        self._refusals: list[tuple[str, str, str, str]] = []
        root = Captured(getattr(function, "__name__", "function"), lambda: function, function)
        for child, names in self._children(root, frozenset()):
            self._visit(child, names, 1)
        for argument in self._arguments:
            self._visit(argument, mentioned(function), 1)
        # The traced function itself cannot change, only what it reaches.
        own = [getattr(function, name, self) for name in ("__code__", "__func__")]
        self.guards = [guard for guard in self.guards if not any(guard.value is value for value in own)]
        for refusal in self._refusals:  # now that all code is known that may mention it
            self._refuse_mentioned(*refusal)

    def tensor(self, tensor: torch.Tensor) -> Captured | None:
        """Returns the capture of exactly this tensor object; None without one."""
        capture = next((captured for captured in self.tensors if captured.value is tensor), None)
        if capture is None and self._unknown:
            self.settle()
            return self.tensor(tensor)
        return capture

    def look_up(self, owner: Any, name: str, names: frozenset[str]) -> None:
        """Follows attribute ``name`` of ``owner``, which the function being traced has looked up by ``getattr``.

        An attribute that is missing is guarded to stay so.

        Args:
            names: those that the code which looked it up mentions.
        """
        known = self._seen.get(id(owner))
        if known is not None:
            self._look_up(known[0], name, names)
        elif type(owner).__weakrefoffset__:
            self._unknown.append((weakref.ref(owner), name, names))

    def settle(self) -> None:
        """Follows what was looked up of objects that no name led to. Those that the function itself made are gone when
        it has returned."""
        unknown, self._unknown = self._unknown, []
        for reference, name, names in unknown:
            owner = reference()
            if owner is not None:
                self._look_up(Captured(type(owner).__name__, reference, owner), name, names)

    def of_argument(self, source: Captured, name: str) -> Any:
        """Returns what is stored as ``name`` on a tensor that is an argument; ``MISSING`` without such."""
        self.follows_arguments = True
        self._look_up(source, name, self.mentioned)
        return attribute(source, name).value

    def _look_up(self, source: Captured, name: str, names: frozenset[str]) -> None:
        captured = attribute(source, name)
        if captured.value is MISSING:
            self.guards.append(captured)
        else:
            self._visit(captured, names, 1)

    def look_up_variable(self, environ: Any, name: Any) -> None:
        """Guards variable ``name`` of the environment; None means the names of all variables."""

        def read() -> Any:
            return tuple(environ._data) if name is None else environ._data.get(environ.encodekey(name))

        self.guards.append(Captured(f"os.environ[{name!r}]", read, read()))

    def _visit(self, captured: Captured, names: frozenset[str], depth: int) -> None:
        value = captured.value
        self.journal.note(captured.path, value)
        if isinstance(value, torch.Tensor):
            self.tensors.append(captured)
            stored = vars(value).keys() if type(value) in (torch.Tensor, torch.nn.Parameter) else ()
            for name in sorted((names | self.mentioned).intersection(stored)):
                self._visit(attribute(captured, name), names, depth + 1)
            return
        if not isinstance(value, types.ModuleType):
            names |= self.mentioned
        if (refusal := modes.refusal(value)) is not None:
            self._refuse(captured.path, *refusal, _NOT_AGAIN)
        elif (refusal := contents.refusal(value)) is not None:
            self._refuse(captured.path, *refusal)
        if isinstance(value, types.BuiltinFunctionType | types.FunctionType) and (read := modes.reader(value)):
            self.guards.append(Captured(f"{captured.path}()", read, read()))
        if is_launcher(value):  # the trace takes its text, which reads nothing but these
            self.guards.append(captured)
            for space, name in constants_read(value):
                self.guards.append(Captured(name, functools.partial(space.get, name, MISSING), space[name]))
            return
        if hasattr(type(value), "__jitgen_follows__"):  # an object of jitgen's that never changes
            self.guards.append(captured)
            for name in value.__jitgen_follows__:
                self._visit(attribute(captured, name), names, depth + 1)
            return
        if isinstance(value, GUARDED):
            self.guards.append(captured)
            if not (_is_bound(value) or (isinstance(value, type) and not is_library(value.__module__))):
                return
        if isinstance(value, types.ModuleType) and not is_library(value.__name__):
            self.guards.append(captured)
        if modes.is_backend(value):
            self.guards.append(Captured(captured.path, modes.flags, modes.flags()))
        if depth > MAX_DEPTH_OF_PACKAGES and isinstance(value, types.FunctionType) and is_third_party(value.__code__):
            return
        if not self._first_visit(captured, names):  # its contents are followed by other names
            if not isinstance(value, types.ModuleType):
                self.guards.append(captured)
            return
        if depth > MAX_DEPTH:
            self._refuse(captured.path, f"is more than {MAX_DEPTH} steps away", "close over it under a name of its own")
            return
        for child, child_names in self._children(captured, names):
            if child.value is not MISSING:
                self._visit(child, child_names, depth + 1)

    def _first_visit(self, captured: Captured, names: frozenset[str]) -> bool:
        """Returns whether the value has not yet been visited with all of ``names``. True for containers at every
        visit."""
        value = captured.value
        if isinstance(value, (tuple, list, dict)):
            return True
        first, known = self._seen.get(id(value), (captured, frozenset()))
        is_new = id(value) not in self._seen or not names <= known
        self._seen[id(value)] = (first, known | names)  # with its value, whose id no other object then has
        return is_new

    def _refuse(self, path: str, what: str, instead: str, why: str = _NOT_COMPARED) -> None:
        """Raises TraceError, now or when all code is known, if the user's own code mentions ``path``.

        Installed packages mention far more than a call reads; of that, what cannot be compared is taken as constant.
        """
        self._refuse_mentioned(path, what, instead, why)
        self._refusals.append((path, what, instead, why))

    def _refuse_mentioned(self, path: str, what: str, instead: str, why: str) -> None:
        mention = re.split(r"[\[(]", path.rpartition(".")[2])[0]
        line = line_of(self.codes, mention)
        if line is None and any(path == argument.path for argument in self._arguments):
            line = self._function.__code__.co_filename + f":{self._function.__code__.co_firstlineno}"
        if line is not None:
            raise TraceError(f"{self.name}: {path} {what}, {why}{quote(line)}\n  {instead}")

    # ------------------------------------------------------------------------------------------------------- children

    def _children(self, captured: Captured, names: frozenset[str]) -> Children:
        value, path = captured.value, captured.path
        # Classes are asked, since an object may have any attribute, or refuse one with any exception.
        if hasattr(type(value), "__jitgen_function__"):
            yield derived(path, captured, lambda jitted: jitted.__jitgen_function__), names
        elif isinstance(value, (types.MethodType, WeakMethod)):
            self.guards.append(derived(path, captured, lambda method: method.__func__))
            is_weak = isinstance(value, WeakMethod)
            instance = (lambda method: method.instance()) if is_weak else (lambda method: method.__self__)
            # What a call of a module runs is guarded with the module.
            mentions = frozenset() if value.__func__ in _CALLS_OF_MODULES else mentioned(value.__func__)
            yield derived(f"{path}.__self__", captured, instance), mentions
            yield derived(path, captured, lambda method: method.__func__), mentions
        elif isinstance(value, types.FunctionType):
            self.guards.append(derived(path, captured, lambda function: function.__code__))
            if not is_library(value.__module__):
                yield from self._function_children(captured, value)
        elif wrappers := [kind for kind in _WRAPPERS if isinstance(value, kind)]:
            for name in _WRAPPERS[wrappers[0]]:
                yield attribute(captured, name), names
        elif isinstance(value, types.ModuleType):
            yield from self._library_children(captured, names)
        elif (keys := contents.items(value)) is not None:
            in_order = isinstance(value, (dict, types.MappingProxyType))
            self.guards.append(
                derived(f"{'tuple' if in_order else 'len'}({path})", captured, tuple if in_order else len)
            )
            for key in keys:
                yield item(captured, key), names
            if not is_library(type(value).__module__):
                yield from self._object_children(captured, names)
        elif isinstance(value, (set, frozenset)) or contents.is_buffer(value):
            self.guards.append(derived(path, captured, contents.snapshot))
        elif isinstance(value, contextvars.ContextVar):
            yield derived(f"{path}.get()", captured, lambda variable: variable.get()), names
        elif isinstance(value, weakref.ref):
            yield derived(f"{path}()", captured, lambda reference: reference()), names
        elif isinstance(value, torch.nn.Module):
            yield from self._module_children(captured, names)
        else:
            if not self.asks_identity and self._is_argument(captured) and contents.is_data(type(value)):
                self.guards.append(derived(f"type({path})", captured, type))
            elif not isinstance(value, type):
                self.guards.append(captured)
            yield from self._object_children(captured, names | contents.backing(value))

    def _is_argument(self, captured: Captured) -> bool:
        return any(captured is argument for argument in self._arguments)

    def _library_children(self, captured: Captured, names: frozenset[str]) -> Children:
        """Returns the attributes of a Python module that are in ``names``."""
        module = captured.value
        if is_library(module.__name__):
            for name in contents.draws(module, names):
                self._refuse(f"{captured.path}.{name}", *modes.RANDOM, _NOT_AGAIN)
            for name in contents.makes_look_ups(module, names):
                self._refuse(f"{captured.path}.{name}", *contents.LOOK_UP)
            return
        for name in sorted(names & vars(module).keys()):
            yield attribute(captured, name), names

    def _module_children(self, captured: Captured, names: frozenset[str]) -> Children:
        """Returns what a call of torch's module runs, and what that reaches."""
        module, path = captured.value, captured.path
        self.guards.append(derived(f"type({path})", captured, contents.kind))
        for index in range(len(contents.hooks(module))):
            yield derived(f"{path} hook {index}", captured, functools.partial(_hook, index=index)), names
        of_all = contents.hooks_of_all_modules
        if not any(guard.read is of_all for guard in self.guards):
            hooks = Captured("hooks of all modules", of_all, of_all())
            self.guards.append(hooks)
            for index in range(len(hooks.value)):
                yield item(hooks, index), names
        names = self._reached(type(module), names | {"forward"})
        if contents.reaches_all_members(module, names):
            self.guards.append(derived(f"names in {path}", captured, contents.member_names))
            yield from self._object_children(captured, names, contents.member_names(module))
        else:  # code of torch may name members of its modules by names that it computes
            is_of_torch = is_library(type(module).forward.__module__)
            yield from self._object_children(captured, names, contents.member_names(module) if is_of_torch else ())

    def _object_children(self, captured: Captured, names: frozenset[str], members: tuple[str, ...] = ()) -> Children:
        """Returns the attributes of an object or class that are in ``names``, or that methods in ``names`` mention.

        ``members``: names of further attributes.
        """
        value = captured.value
        owner = value if isinstance(value, type) else type(value)
        names = self._reached(owner, names)
        # The class is guarded with the object, and its attributes are read through the object.
        for name in sorted({*names, *members} - {"__class__"}):
            attribute_ = static_attribute(value, name, MISSING)
            if attribute_ is MISSING and lacks(value, name):
                continue
            path = f"{captured.path}.{name}"
            if plain_function(attribute_) is not None:
                if not is_library(plain_function(attribute_).__module__):
                    yield derived(path, captured, functools.partial(current_method, name=name)), names
                for base in overridden(owner, name) if "super" in names else ():
                    step = functools.partial(_method_of, base, name)
                    yield Captured(f"{base.__name__}.{name}", step, step()), names
            elif name == "__dict__" or not hasattr(type(attribute_), "__get__") or isinstance(attribute_, _VALUES):
                yield attribute(captured, name), names
            elif not is_library(type(attribute_).__module__):
                yield derived(path, captured, functools.partial(inspect.getattr_static, attr=name)), names

    def _reached(self, owner: type, names: frozenset[str]) -> frozenset[str]:
        """Returns ``names``, and those that methods and descriptors of ``owner`` mention if the names or operators call
        them."""
        key = owner, names
        if key not in self._names:
            reached = with_methods(owner, names | special_methods(owner))
            self._names[key] = reached.union(*(mentioned(method) for method in descriptors(owner, reached)))
        return self._names[key]

    def _function_children(self, captured: Captured, function: types.FunctionType) -> Children:
        code, variables = function.__code__, function.__globals__
        names = code_names(code)
        if not is_third_party(code):
            self.codes.append(code)
        self.journal.note_variables(function, stored_globals(code))
        for name, read in modes.read_by(names):
            self.guards.append(Captured(f"torch.{name}()", read, read()))
        self._refuse_changing_builtins(function)
        for path, value in named_functions(function):
            if (refusal := modes.refusal(value)) is not None:
                self._refuse(path, *refusal, _NOT_AGAIN)
        for name, closed in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if function is self._function:
                yield cell(name, closed), names
            else:  # another function of the same code has other cells
                yield derived(name, captured, functools.partial(_closed, name=name)), names
        for name in sorted(global_names(code) & variables.keys()):
            yield variable(name, variables), names
        for module in imports(code, variables.get("__package__")):
            if module in sys.modules:
                yield variable(module, sys.modules), names
            else:  # the trace imports it, and the next call traces again
                self.guards.append(variable(module, sys.modules))
        defaults = function.__defaults__ or ()
        for index in range(len(defaults)):
            path = f"default {index} of {captured.path}"
            yield derived(path, captured, functools.partial(_default, index=index)), names
        for name in function.__kwdefaults__ or {}:
            path = f"default {name} of {captured.path}"
            yield derived(path, captured, functools.partial(_keyword_default, name=name)), names
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None:
            yield derived(captured.path, captured, lambda f: f.__wrapped__), names

    def _refuse_comparisons_of_types(self) -> None:
        line = next(filter(None, map(compares_tensor_type, self.codes)), None)
        if line is not None:
            raise TraceError(
                f"{self.name}: a type is compared with that of tensors, which a tensor does not have while it is traced"
                f"{quote(line)}\n  write isinstance(x, torch.Tensor)"
            )

    def _refuse_changing_builtins(self, function: types.FunctionType) -> None:
        used = global_names(function.__code__) & contents.CHANGING_BUILTINS - function.__globals__.keys()
        for name in sorted(used):
            self._refuse(f"{name}()", "reaches values by names that the code does not show", "use the names themselves")


def _is_bound(value: Any) -> bool:
    """Returns whether ``value`` is a method of an object that is written in C, such as a list's ``append``."""
    if not isinstance(value, (types.BuiltinFunctionType, types.MethodWrapperType)):
        return False
    return not isinstance(value.__self__, (types.ModuleType, type, type(None)))


def _hook(module: torch.nn.Module, index: int) -> Any:
    return contents.hooks(module)[index]


def _method_of(owner: type, name: str) -> types.FunctionType | None:
    return plain_function(vars(owner).get(name))


def _closed(function: types.FunctionType, name: str) -> Any:
    return (function.__closure__ or ())[function.__code__.co_freevars.index(name)].cell_contents


def _default(function: types.FunctionType, index: int) -> Any:
    return (function.__defaults__ or ())[index]


def _keyword_default(function: types.FunctionType, name: str) -> Any:
    return (function.__kwdefaults__ or {})[name]
