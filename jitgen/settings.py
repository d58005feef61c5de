"""Defines every ``JITGEN_*`` environment variable, in one table.

No other module reads the environment. A variable is read each time ``get`` is called, so that a test or a program can
set it after ``import jitgen``. A value that does not parse raises a ``SettingError`` that says which would.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from jitgen.errors import SettingError

Value = TypeVar("Value")

BACKENDS = ("auto", "triton", "cuda", "cpp", "cutlass")
CPU_LEVELS = ("x86-64-v2", "x86-64-v3", "x86-64-v4", "generic")
"""CPU targets: psABI levels (v3 is AVX2, v4 is AVX-512), and ``generic`` for any other processor."""

BOUNDED_WAITS = 5
"""Level of ``JITGEN_DEBUG`` at which a CUDA kernel that waits too long ends with an error that names the barrier."""


def _boolean(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("", "0", "false", "no", "off"):
        return False
    raise ValueError("expected one of 1, 0, true, false, yes, no, on, off")


def _choice(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(f"expected one of {', '.join(names)}")
        return text

    return parse


def _level(text: str) -> int:
    if text.strip() not in ("0", "1", "2", "3", "4", "5"):
        raise ValueError("expected a level from 0 to 5")
    return int(text)


def _directory(text: str) -> str:
    if not os.path.isdir(text):
        raise ValueError("there is no such directory")
    return text


def _paths(text: str) -> tuple[str, ...]:
    return tuple(path for path in text.split(os.pathsep) if path)


def _words(text: str) -> tuple[str, ...]:
    return tuple(shlex.split(text))


def _bytes(text: str) -> int:
    units = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    body = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = body[-1:] if body[-1:] in units and body[-1:] else ""
    try:
        number = int(float(body.removesuffix(unit)) * units[unit])
    except (ValueError, OverflowError):
        number = -1
    if number < 0:
        raise ValueError("expected a size such as 500M, 20G or 1073741824")
    return number


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise ValueError("expected a number of seconds above 0")
    return seconds


def _count(text: str) -> int:
    if not text.strip().isdigit() or int(text) < 1:
        raise ValueError("expected a number from 1 on")
    return int(text)


@dataclass(frozen=True)
class Setting:
    """Describes one variable: its name, the parser of its text, its default, and its effect."""

    name: str
    parse: Callable[[str], Any]
    default: Any
    doc: str


SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("JITGEN_CACHE_DIR", str, None, "the store's directory (default: the checkout's or the user's cache)"),
        Setting("JITGEN_CACHE_PATH", _paths, (), "read-only stores searched after the store, separated as in PATH"),
        Setting("JITGEN_CACHE_REMOTE", str, None, "fsspec URL of a store shared by hosts, such as s3://bucket/jitgen"),
        Setting("JITGEN_REMOTE_TIMEOUT", _seconds, 5.0, "seconds that one access to JITGEN_CACHE_REMOTE may take"),
        Setting("JITGEN_CACHE_LIMIT", _bytes, 20 * 2**30, "bytes the store may grow to; then the oldest entries go"),
        Setting("JITGEN_PATIENCE", _seconds, 60.0, "seconds to wait for a kernel that another process is compiling"),
        Setting(
            "JITGEN_COMPILE_JOBS", _count, None, "kernels of a call compiled at a time, at most (default: what fits)"
        ),
        Setting("JITGEN_TRUSTED_KEYS", _paths, (), "ed25519 public keys (base64, or files): layers must be signed"),
        Setting(
            "JITGEN_SIGNED_ONLY", _boolean, False, "1: the store's own entries must be signed by a trusted key too"
        ),
        Setting("JITGEN_SIGNING_KEY", str, None, "file of the ed25519 private key that signs what is written"),
        Setting("JITGEN_BACKEND", _choice(*BACKENDS), "auto", "backend for functions that name none"),
        Setting("JITGEN_BATCH_INVARIANT", _boolean, False, "1: a row's bits do not depend on how many rows a call has"),
        Setting(
            "JITGEN_EAGER_ROUNDING",
            _boolean,
            False,
            "1: round each torch function's result of 16 bits, as eager torch does",
        ),
        Setting(
            "JITGEN_STRICT", _boolean, False, "1: never compile (CacheMissError), nor run a quantised layer in torch"
        ),
        Setting("JITGEN_RECORD", str, None, "write every specialisation met to this manifest at exit"),
        Setting(
            "JITGEN_DEBUG",
            _level,
            0,
            "1: compiles, 2: plans, 3: sources, 4: graphs, on stderr; 5: bounded waits, zones around tensors",
        ),
        Setting("JITGEN_CXX", str, None, "the host C++ compiler (default: $CXX, g++, c++, clang++)"),
        Setting("JITGEN_CXXFLAGS", _words, (), "flags for the host C++ compiler after jitgen's own, such as -Og -g"),
        Setting("JITGEN_NVRTCFLAGS", _words, (), "flags for NVRTC after jitgen's own, such as -lineinfo for profilers"),
        Setting(
            "JITGEN_CPU_TARGET",
            _choice(*CPU_LEVELS),
            None,
            "instruction-set level to use for this host, such as x86-64-v3",
        ),
        Setting("JITGEN_TUNED", _directory, None, "directory of measured choices, read before those that jitgen ships"),
        Setting("JITGEN_TEMPLATES", _directory, None, "directory of templates to use in place of the built-in ones"),
    )
}


def get(name: str) -> Any:
    """Returns the parsed value of the variable ``name``, or its default when it is unset or empty."""
    setting = SETTINGS[name]
    text = os.environ.get(name)
    if not text:
        return setting.default
    try:
        return setting.parse(text)
    except ValueError as error:
        raise SettingError(f"{name}={text!r}: {error}. It is: {setting.doc}") from None


def host_compiler_name() -> str | None:
    """Returns the compiler the user asked for: ``JITGEN_CXX``, else ``CXX``."""
    return get("JITGEN_CXX") or os.environ.get("CXX") or None


def cuda_home() -> str | None:
    """Returns the CUDA toolkit that the user names: ``CUDA_HOME``, else ``CUDA_PATH``."""
    return os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or None


def interpreting_triton() -> bool:
    """Returns whether Triton kernels are to run under Triton's interpreter (``TRITON_INTERPRET=1``)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


_strict: ContextVar[bool] = ContextVar("jitgen_strict", default=False)


@contextmanager
def within(variable: ContextVar[Value], value: Value) -> Iterator[None]:
    """Gives ``variable`` this value within this context."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def strict() -> AbstractContextManager[None]:
    """Forbids compiling within this context: a kernel that is not in the store raises ``CacheMissError``. Nor does a
    quantised layer run in torch where no kernel takes its operands: ``UnsupportedError``."""
    return within(_strict, True)


_frozen: str | None = None


def freeze(action: str | None = "error") -> None:
    """Says that everything this process needs is compiled: from now on, in every thread, a compile is a mistake.

    Args:
        action: ``"error"``: a kernel that is not in the store raises ``CacheMissError``, as under ``strict``;
            ``"warn"``: it is compiled, with a ``CompileWarning``; None: compiling is allowed again.
    """
    global _frozen
    if action not in ("error", "warn", None):
        raise ValueError(f"freeze({action!r}): expected 'error', 'warn' or None")
    _frozen = action


def frozen() -> str | None:
    """Returns what ``freeze`` was last called with; None before."""
    return _frozen


def is_strict() -> bool:
    """Returns whether nothing may be compiled."""
    return _strict.get() or _frozen == "error" or get("JITGEN_STRICT")
