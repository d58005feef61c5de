"""Decides whether keys and values that come from pages or codes are computed by the kernel of attention or before
it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jitgen.device import Device
from jitgen.families.family import Question
from jitgen.ir.graph import Node
from jitgen.ir.nodes import CAST
from jitgen.ir.program import Decision
from jitgen.kernel.operands import item_size


@dataclass(frozen=True)
class Reading(Question):
    """Asks whether a kernel computes keys or values as it reads them (``Partition.decide``).

    Attributes:
        what: ``"keys"`` or ``"values"``.
        rows, sharing: M, and the heads that share keys. Sizes are symbolic until ``at`` makes them numbers.
        elements: of a key or value.
        is_compact: whether they come from pages or codes, of which a copy in memory is larger or another one.
    """

    placements = ("as they are read", "before")
    what: str
    rows: Any
    sharing: Any
    elements: Any
    is_compact: bool

    def __str__(self) -> str:
        return f"computed {self.what} of {self.elements} elements, read by {self.rows} rows of {self.sharing} heads"


def is_widening(node: Node) -> bool:
    """Returns whether ``node`` has the numbers of its operand, codes, in more bytes."""
    return node.kind is CAST and item_size(node.inputs[0].dtype) < item_size(node.dtype)


def reads_computed(question: Reading, device: Device) -> Decision:
    """Decides whether the device's dialect computes them in its kernel."""
    if device.dialect != "cuda":
        return Decision(True, "an element is computed in registers")
    from jitgen.families.attention.forward.decode import LANE_ELEMENTS, MOST_DEPTH, MOST_ROWS
    from jitgen.families.attention.forward.wgmma import bucket_end

    fits = question.elements <= MOST_DEPTH and question.elements % LANE_ELEMENTS == 0
    if fits and bucket_end(question.rows) * question.sharing <= MOST_ROWS:
        return Decision(True, "the kernel of few rows computes them in registers")
    why = f"only a kernel of up to {MOST_ROWS} rows that share keys computes them in registers"
    return Decision(False, why, question.is_compact)
