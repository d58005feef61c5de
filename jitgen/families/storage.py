"""Asks whether a value that several kernels need is stored once, or computed again by each of them.

The answer is what costs less at the sizes of the call, by ``schedule/cost.py``, and ``explain()`` says it with both
costs. What is asked about is in ``gemm/stored.py`` (values behind products) and ``several_views.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from jitgen.device import Device
from jitgen.families.family import Question
from jitgen.ir import symbols
from jitgen.ir.graph import Node, Shape
from jitgen.ir.program import Decision
from jitgen.ir.symbols import Size
from jitgen.schedule.cost import Effort


@dataclass(frozen=True)
class Storage(Question):
    """Asks whether a value is stored. Of equal costs it is.

    Attributes:
        shape: of the value.
        value: its dtype and operation, and where that is.
        stored: what it costs to store the value, and to read it wherever it is needed.
        again: what it costs to compute it wherever it is needed.
    """

    placements = ("stored", "computed again")
    shape: Shape
    value: str
    stored: Effort
    again: Effort

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.shape))}] {self.value}"

    def decide(self, device: Device) -> Decision:
        stored, again = self.stored.microseconds(device), self.again.microseconds(device)
        return Decision(stored <= again, f"{stored:.3g} us to store it once, {again:.3g} us to compute it again")


def storage_of(node: Node, stored: Effort, again: Effort) -> Storage:
    """Asks about ``node``."""
    where = f" at {node.location}" if node.location else ""
    return Storage(node.shape, f"{node.dtype} of {node.op}{where}", stored, again)


def for_elements(effort: Effort, count: Size) -> Effort:
    """Returns the effort for ``count`` elements, where ``effort`` is that of one, in as many launches."""
    moved, operations, products = (symbols.mul(number, count) for number in effort[:3])
    return Effort(moved, operations, products, effort.dtype, effort.launches)
