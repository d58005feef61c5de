"""What a trace assumed: hints to decide with, and the decisions as guards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import Any

import torch

from jitgen.ir import symbols
from jitgen.ir.graph import Guard
from jitgen.ir.symbols import Expr, Scalar


class Guards:
    """Decides symbolic questions from the values of one call, and remembers the answers.

    Attributes:
        hints: a value for every symbol, from the call being traced.
        default_dtype: torch's default dtype, where the trace asked for it; None where it plays no part.
        matmul_precision: torch's float32 matmul precision, likewise.
    """

    def __init__(self, hints: Mapping[str, Any], known: Iterable[Guard] = ()):
        """``known``: guards that hold of ``hints``, to go on from."""
        self.hints = dict(hints)
        self.default_dtype: torch.dtype | None = None
        self.matmul_precision: str | None = None
        self._guards: dict[Guard, None] = dict.fromkeys(known)

    def value(self, expr: Any) -> Any:
        """The number ``expr`` is in this call; from now on the graph holds only where it is that number."""
        if not isinstance(expr, Expr):
            return expr
        number = symbols.evaluate(expr, self.hints)
        self._guards[Guard(expr, number)] = None
        return number

    def decide(self, condition: Scalar) -> bool:
        """Whether ``condition`` holds in this call, remembered."""
        return bool(self.value(condition))

    def hint(self, expr: Any) -> Any:
        """The number ``expr`` is in this call, without assuming anything."""
        return symbols.evaluate(expr, self.hints)

    def __iter__(self):
        return iter(self._guards)


tracing: ContextVar[Guards | None] = ContextVar("tracing", default=None)
"""The guards of the trace in progress in this thread."""


def default_dtype() -> torch.dtype:
    """torch's default dtype; the trace in progress holds only while it is that."""
    dtype, guards = torch.get_default_dtype(), tracing.get()
    if guards is not None:
        guards.default_dtype = dtype
    return dtype


def matmul_precision() -> str:
    """``"ieee"`` or ``"tf32"``, by torch's setting; the trace in progress holds only while that is what it is."""
    setting, guards = torch.get_float32_matmul_precision(), tracing.get()
    if guards is not None:
        guards.matmul_precision = setting
    return "ieee" if setting == "highest" else "tf32"
