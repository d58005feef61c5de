"""What all families say of a kernel in words."""

from __future__ import annotations

from collections.abc import Sequence

from jitgen.ir.body import Body
from jitgen.ir.ops import OPS


def operations_of(body: Body, kinds: Sequence[str]) -> str:
    """The pointwise operations of ``body``, and its operands, which are ``kinds``."""
    return f"{count_operations(body)} operations; operands {', '.join(kinds)}"


def count_operations(body: Body) -> int:
    """Pointwise instructions, not counting those of prologues."""
    return sum(instruction.op in OPS for instruction in body.instructions)
