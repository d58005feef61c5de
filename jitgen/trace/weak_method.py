"""Binds a method to an instance that neither it nor its traces keep alive.

What a decorated method has resolved is remembered for each instance (``call/methods.py``). If the traced function or
its guards referred to the instance, no instance would ever be freed.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jitgen.trace.captured import Captured


class WeakMethod:
    """Acts like ``types.MethodType``, with a weak reference to the instance.

    Attributes:
        instance: the weak reference.
    """

    def __init__(self, function: Callable[..., Any], instance: Any):
        """Raises TypeError if the instance has no weak references."""
        functools.update_wrapper(self, function)
        self.__func__ = function
        if hasattr(function, "__code__"):
            self.__code__ = function.__code__
        self.instance = weakref.ref(instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._method()(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._method())

    def _method(self) -> types.MethodType:
        instance = self.instance()
        if instance is None:
            raise ReferenceError(f"the instance that {self.__func__} was bound to is gone")
        return types.MethodType(self.__func__, instance)


class WeakGuard:
    """Guards the identity of an object, like ``Captured``, without keeping the object alive."""

    def __init__(self, guard: Captured):
        """Raises TypeError if the object has no weak references."""
        self.path, self.read = guard.path, guard.read
        self.reference = weakref.ref(guard.value)

    def holds(self) -> bool:
        now = self.read()
        return now is not None and now is self.reference()


def weakly(guard: Captured) -> Any:
    """Returns ``guard``, or one like it that does not keep alive an object that may refer to the instance."""
    owner = type(guard.value)
    root = owner.__module__.partition(".")[0]
    # Numbers, strings, dtypes, functions and the like refer to no object of the user's.
    if issubclass(owner, type) or root in ("torch", "jitgen") or root in sys.stdlib_module_names:
        return guard
    try:
        return WeakGuard(guard)
    except TypeError:
        return guard
