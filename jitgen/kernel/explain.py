"""Explains in words what all families say of a kernel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jitgen.ir.body import Body, Instruction
from jitgen.ir.ops import OPS


def operations_of(body: Body, kinds: Sequence[str]) -> str:
    """Describes the pointwise operations of ``body``, and its operands, which are ``kinds``."""
    return f"{count_operations(body)} operations; operands {', '.join(kinds)}"


def count_operations(body: Body) -> int:
    """Counts the pointwise instructions without those of prologues."""
    return len(operations_in(body.instructions))


def operations_in(instructions: Iterable[Instruction]) -> list[str]:
    """Returns the names of the pointwise operations among ``instructions``."""
    return [i.op for i in instructions if i.op in OPS or i.op in ("own", "bits")]
