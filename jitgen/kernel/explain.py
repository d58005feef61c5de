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


def quantised_blocks(body: Body) -> list[str]:
    """Returns a line about what is quantised in blocks of a row; none where nothing is."""
    dtypes = [body.operands[index].dtype for index in body.stores if not body.operands[index].block]
    blocks = {operand.block for operand in body.operands if operand.block}
    return [f"quantised to {dtypes[0]} with a scale for each {size} columns of a row" for size in sorted(blocks)]
