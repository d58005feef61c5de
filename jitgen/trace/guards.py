"""What a trace assumed: hints to decide with, and the decisions as guards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jitgen.ir import symbols
from jitgen.ir.graph import Guard
from jitgen.ir.symbols import Expr, Scalar


class Guards:
    """Decides symbolic questions from the values of one call, and remembers the answers.

    Attributes:
        hints: a value for every symbol, from the call being traced.
    """

    def __init__(self, hints: Mapping[str, Any]):
        self.hints = dict(hints)
        self._guards: dict[Guard, None] = {}

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
