"""Records the conditions that a trace relies on: questions are decided by the values of one call, and the answers are
guards.

Neighbours: ``ir/graph.py`` defines a ``Guard``; ``trace/numbers.py`` decides here for user code, ``lowering.py`` for
partitioning.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch

from jitgen import settings
from jitgen.ir import symbols
from jitgen.ir.graph import Guard
from jitgen.ir.symbols import Expr, Scalar


class Guards:
    """Decides symbolic questions by the values of one call, and records each answer as a guard.

    Attributes:
        hints: the value of every symbol in the call that is traced.
        default_dtype: torch's default dtype where the trace depends on it, else None.
        matmul_precision: torch's float32 matmul precision where the trace depends on it, else None.
        asks_identity: whether user code compared tensors by identity, as keys of a dict are.
        handed_out: every tensor and number of the trace that user code was given (``trace/escapes.py``).
    """

    def __init__(self, hints: Mapping[str, Any], known: Iterable[Guard] = ()):
        """Begins with the guards ``known``, which ``hints`` satisfy."""
        self.hints = dict(hints)
        self.default_dtype: torch.dtype | None = None
        self.matmul_precision: str | None = None
        self.asks_identity = False
        self.handed_out: list[weakref.ref[Any]] = []
        self._guards: dict[Guard, None] = dict.fromkeys(known)

    def value(self, expr: Any) -> Any:
        """Returns the value of ``expr`` in this call, and makes it a guard."""
        if not isinstance(expr, Expr):
            return expr
        number = symbols.evaluate(expr, self.hints)
        self._guards[Guard(expr, number)] = None
        return number

    def decide(self, condition: Scalar) -> bool:
        """Returns whether ``condition`` holds in this call, and makes the answer a guard."""
        return bool(self.value(condition))

    def equal(self, left: Any, right: Any) -> bool:
        """Returns whether two sizes or numbers are equal in this call, and makes the answer a guard."""
        return self.decide(symbols.compare("eq", left, right))

    def at_least(self, left: Any, right: Any) -> bool:
        """Returns whether ``left`` is ``right`` or more in this call, and makes the answer a guard."""
        return self.decide(symbols.compare("ge", left, right))

    def hint(self, expr: Any) -> Any:
        """Returns the value of ``expr`` in this call, without a guard."""
        return symbols.evaluate(expr, self.hints)

    def __iter__(self):
        return iter(self._guards)


tracing: ContextVar[Guards | None] = ContextVar("tracing", default=None)
"""The guards of the trace in progress in this thread."""


def default_dtype() -> torch.dtype:
    """Returns torch's default dtype, and makes it a guard of the trace in progress."""
    dtype, guards = torch.get_default_dtype(), tracing.get()
    if guards is not None:
        guards.default_dtype = dtype
    return dtype


def float32_matmul_precision() -> str:
    """Returns torch's setting. Its getter raises where ``torch.backends`` has other precisions (``fp32_precision``)
    than the setting has names for; of these, the one of CUDA's products counts, as no other has kernels of its own."""
    try:
        return torch._C._get_float32_matmul_precision()  # without the Python function around it, in every warm call
    except RuntimeError:
        return "high" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "highest"


_fast: ContextVar[bool] = ContextVar("fast", default=False)


def fast_sums(wanted: bool) -> AbstractContextManager[None]:
    """Lets products of 8-bit floats that are traced within be summed with the bits that tensor cores keep, if that is
    ``wanted``."""
    return settings.within(_fast, wanted)


def matmul_precision() -> str:
    """Returns ``"ieee"`` or ``"tf32"``, by torch's setting, and makes it a guard of the trace in progress; ``"fast"``
    within ``fast_sums``."""
    if _fast.get():
        return "fast"
    setting, guards = float32_matmul_precision(), tracing.get()
    if guards is not None:
        guards.matmul_precision = setting
    return "ieee" if setting == "highest" else "tf32"
