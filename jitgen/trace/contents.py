"""Decides what can be compared of objects whose contents no name leads to, and which objects cannot be compared.

``snapshot`` and ``kind`` give values that later calls compare: the elements of a set, the bytes of a small buffer, the
hooks of a module. ``refusal`` says of an object that has no such value why not, and what to do instead.
``docs/captures.md`` states the rule for users.
"""

from __future__ import annotations

import array
import enum
import io
import operator
import random
import types
import weakref
from abc import ABC
from collections import ChainMap, OrderedDict, UserDict, UserList, UserString, defaultdict, deque
from collections.abc import Iterator
from typing import Any, Generic

import torch
from torch.nn.modules import module as torch_modules

from jitgen.trace.captured import GUARDED
from jitgen.trace.mentions import is_library

MAX_BYTES = 4096
"""The largest buffer that is compared at every call: beyond it comparing would take longer than most kernels."""

_LOOK_UPS = (operator.attrgetter, operator.methodcaller)
_WEAK = weakref.WeakValueDictionary, weakref.WeakKeyDictionary, weakref.WeakSet
_DRAWS = frozenset(vars(random)) - {"Random", "SystemRandom", "seed"}
CHANGING_BUILTINS = frozenset({"globals", "eval", "exec", "__import__"})
"""Builtins that reach values by names which the code does not mention."""


LOOK_UP = "looks attributes up by names that the code does not show", "write object.name, or getattr(object, name)"


def makes_look_ups(module: types.ModuleType, names: frozenset[str]) -> list[str]:
    """Returns the names in ``names`` that ``operator`` builds lookup functions from (``attrgetter``, ``itemgetter``,
    ``methodcaller``); empty for any other module."""
    return sorted(names & {maker.__name__ for maker in _LOOK_UPS}) if module is operator else []


def draws(module: types.ModuleType, names: frozenset[str]) -> list[str]:
    """Returns the names in ``names`` by which ``random`` draws a number; empty for any other module."""
    return sorted(_DRAWS & names) if module is random else []


def refusal(value: Any) -> tuple[str, str] | None:
    """Explains why no call can compare an object with what it was at the trace: (what is wrong, what to do), or
    None."""
    if isinstance(value, _LOOK_UPS) or any(value is maker for maker in _LOOK_UPS):
        return LOOK_UP
    if isinstance(value, Iterator) and not isinstance(value, io.IOBase):
        return "is an iterator, which every look changes", "capture the list or tuple that it goes over"
    if isinstance(value, _WEAK):
        return "is a weak container, whose entries vanish with what they refer to", "capture a list or a dict of them"
    if isinstance(value, (set, frozenset)) and not all(map(_is_plain, value)):
        return "is a set of objects", "capture a list or tuple of them"
    if is_buffer(value) and snapshot(value) is None:
        return f"is no buffer of {MAX_BYTES} bytes or fewer", "convert it, with torch.from_numpy say, or pass it"
    return None


def _is_plain(value: Any) -> bool:
    return isinstance(value, (*GUARDED, enum.Enum)) or (isinstance(value, tuple) and all(map(_is_plain, value)))


def is_numpy(value: Any) -> bool:
    """Returns whether ``value`` is numpy's array or number; numpy itself need not be imported."""
    return type(value).__module__ == "numpy" and hasattr(value, "tobytes") and hasattr(value, "dtype")


def is_numpy_number(value: Any) -> bool:
    return is_numpy(value) and type(value).__name__ != "ndarray"


def is_buffer(value: Any) -> bool:
    return is_numpy(value) or isinstance(value, (array.array, bytearray, memoryview))


def snapshot(value: Any) -> Any:
    """Returns the contents of a set or of a buffer; None for a buffer that is too large, or that holds objects."""
    if isinstance(value, (set, frozenset)):
        return frozenset((type(member), member) for member in value)
    if is_numpy(value):
        small = value.nbytes <= MAX_BYTES and not value.dtype.hasobject
        return (value.dtype.str, value.shape, value.tobytes()) if small else None
    view = memoryview(value)
    return (type(value).__name__, view.format, view.shape, view.tobytes()) if view.nbytes <= MAX_BYTES else None


# ------------------------------------------------------------------------------------------------------ torch's modules


def hooks(module: torch.nn.Module) -> tuple[Any, ...]:
    """Returns what a call of ``module`` runs besides its class's ``forward``: an instance's own, and hooks before and
    after."""
    own = vars(module).get("forward")
    if own is None and not module._forward_hooks and not module._forward_pre_hooks:
        return ()
    return (own, *module._forward_pre_hooks.values(), None, *module._forward_hooks.values())


_BASES_OF_DATA = (object, dict, list, tuple, deque, OrderedDict, defaultdict, types.SimpleNamespace, Generic, ABC)


def is_data(owner: type) -> bool:
    """Returns whether names lead to all that an instance holds: no C code hides memory, and the instance is more than a
    mark (``object()``)."""
    users = [base for base in owner.__mro__ if not is_library(base.__module__)]
    return owner is not object and all(base in _BASES_OF_DATA or base in users for base in owner.__mro__)


def kind(module: torch.nn.Module) -> Any:
    """Returns the class of ``module``, with its hooks if it has any: what a call of it runs."""
    hooks_ = hooks(module)
    return (type(module), *hooks_, *module._forward_hooks_with_kwargs) if hooks_ else type(module)


def hooks_of_all_modules() -> tuple[Any, ...]:
    """Returns the hooks that torch calls for every module."""
    before, after = torch_modules._global_forward_pre_hooks, torch_modules._global_forward_hooks
    return (*before.values(), None, *after.values()) if before or after else ()


def member_names(module: torch.nn.Module) -> tuple[str, ...]:
    """Returns the names of parameters, buffers and modules of ``module`` itself."""
    return (*module._parameters, *module._buffers, *module._modules)


ITERATES = frozenset({"children", "modules", "parameters", "buffers", "_modules", "_parameters", "_buffers"})
ITERATES |= {f"named_{name}" for name in ("children", "modules", "parameters", "buffers")}
"""Names by which code reaches the members of a module without naming them."""


def reaches_all_members(module: torch.nn.Module, names: frozenset[str]) -> bool:
    """Returns whether code that mentions ``names`` may reach members that it does not name, by iterating over a
    container such as ``Sequential``."""
    return not names.isdisjoint(ITERATES) or hasattr(type(module), "__iter__")


_BACKED: tuple[tuple[type, str], ...] = (
    (ChainMap, "maps"),
    (UserDict, "data"),
    (UserList, "data"),
    (UserString, "data"),
)
"""Containers of Python's that are written in Python, and the attribute that has their contents."""


def backing(value: Any) -> frozenset[str]:
    """Returns the attribute that has the contents of a container of Python's, as a set; empty for other values."""
    return frozenset(name for kind, name in _BACKED if isinstance(value, kind))


def items(value: Any) -> Iterator[Any] | None:
    """Returns the keys or indices of a container, whose items are followed; None for anything else."""
    if isinstance(value, (tuple, list, deque)):
        return iter(range(len(value)))
    return iter(value) if isinstance(value, (dict, types.MappingProxyType)) else None
