"""Reports what user code looks up by a name that it computes: ``getattr``, ``hasattr``, ``vars``, ``dir``,
``os.environ``.

No reading of the code tells such names. The trace runs the code once, though, and every look-up of it is reported to
``Captures``, which follows or guards what was looked up.
"""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any

from jitgen import settings
from jitgen.trace.captures import Captures
from jitgen.trace.mentions import code_names, is_library
from jitgen.trace.proxy import TensorProxy
from jitgen.trace.replaced import Replaced

_getattr, _hasattr, _vars, _dir = builtins.getattr, builtins.hasattr, builtins.vars, builtins.dir
_environ_item, _environ_names = os._Environ.__getitem__, os._Environ.__iter__
_captures: ContextVar[Captures | None] = ContextVar("captures", default=None)


@contextmanager
def reported_to(captures: Captures) -> Iterator[None]:
    """Reports the look-ups of this thread's user code to ``captures`` within this context."""
    with settings.within(_captures, captures), _BUILTINS.active(), _ENVIRONMENT.active():
        yield


def _report(owner: Any, name: Any) -> None:
    """Reports a look-up by the caller's caller."""
    captures, frame = _captures.get(), sys._getframe(2)
    if captures is None or type(owner) is TensorProxy or is_library(frame.f_globals.get("__name__")):
        return
    if _is_importing(frame):
        return
    captures.look_up(owner, name, code_names(frame.f_code))


def _is_importing(frame: FrameType | None) -> bool:
    """Returns whether ``frame`` belongs to the first import of a module, which no later call repeats. torch imports
    sympy at its first ``broadcast_shapes``, and following what that looks up would not end."""
    while frame is not None:
        if frame.f_globals.get("__name__") == "importlib._bootstrap":
            return True
        frame = frame.f_back
    return False


def _reported_getattr(*arguments: Any) -> Any:
    if len(arguments) > 1:
        _report(*arguments[:2])
    return _getattr(*arguments)


def _reported_hasattr(owner: Any, name: str) -> bool:
    _report(owner, name)
    return _hasattr(owner, name)


def _reported_vars(*arguments: Any) -> Any:
    if not arguments:
        return sys._getframe(1).f_locals
    _report(arguments[0], "__dict__")
    return _vars(*arguments)


def _reported_dir(*arguments: Any) -> Any:
    if not arguments:
        return sorted(sys._getframe(1).f_locals)
    _report(arguments[0], "__dict__")
    return _dir(*arguments)


def _reported_environ_item(environ: Any, name: Any) -> Any:
    captures = _captures.get()
    if captures is not None and _is_users():
        captures.look_up_variable(environ, name)
    return _environ_item(environ, name)


def _reported_environ_names(environ: Any) -> Any:
    captures = _captures.get()
    if captures is not None and _is_users():
        captures.look_up_variable(environ, None)
    return _environ_names(environ)


def _is_users() -> bool:
    """Returns whether user code asked for the environment, directly or through ``os.getenv`` and the like."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") in ("os", "_collections_abc", "collections.abc"):
        frame = frame.f_back
    return frame is not None and not is_library(frame.f_globals.get("__name__"))


_BUILTINS = Replaced(
    builtins, {"getattr": _reported_getattr, "hasattr": _reported_hasattr, "vars": _reported_vars, "dir": _reported_dir}
)
_ENVIRONMENT = Replaced(os._Environ, {"__getitem__": _reported_environ_item, "__iter__": _reported_environ_names})
