"""Prints the passes over a row whose elements the lanes of a warp have in registers: short rows of pointwise kernels
(``short_rows.py``) and of selections (``rows/sort``)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Line, Printed
from jitgen.families.short_rows import REDUCED
from jitgen.ir.body import Body, elements_under


@dataclass(frozen=True)
class RowReduction:
    """Combines ``value`` of every element of a row into ``result``, of ``type``, by ``op`` of ``lanes.cuh``, from
    ``initial`` on."""

    result: str
    type: str
    value: str
    op: str
    initial: str


@dataclass(frozen=True)
class RowPass:
    """Describes one pass over a row: values of the row that are known ``before`` it, ``lines`` for each element, and
    what is reduced from these."""

    before: tuple[Line, ...]
    lines: tuple[Line, ...]
    reductions: tuple[RowReduction, ...]


def passes_of(body: Body, without: Collection[int] = ()) -> int:
    """Returns how many passes over a row reduce it, but for instructions ``without``."""
    reduced = (i.stage for position, i in enumerate(body.instructions) if i.op == "reduce" and position not in without)
    return max(reduced, default=0)


def row_passes(body: Body, text: Printed, dialect: Dialect, without: Collection[int] = ()) -> tuple[RowPass, ...]:
    """Returns the passes over a row that reduce it, but for instructions ``without``."""
    passes = []
    for number in range(passes_of(body, without)):
        reduced = [p for p, i in enumerate(body.instructions) if i.op == "reduce" and i.stage == number + 1]
        reduced = [position for position in reduced if position not in without]
        before = row_lines(body, text, number, without)
        lines = lines_under(body, text, reduced)
        passes.append(RowPass(before, lines, tuple(row_reduction(body, text, p, dialect) for p in reduced)))
    return tuple(passes)


def row_reduction(body: Body, text: Printed, position: int, dialect: Dialect) -> RowReduction:
    """Returns the reduction that the instruction at ``position`` is."""
    instruction = body.instructions[position]
    op, initial = REDUCED[instruction.attr]
    neutral = dialect.constant(initial, instruction.dtype)
    value = text.names[instruction.args[0]]
    return RowReduction(text.names[position], dialect.types[instruction.dtype], value, op, neutral)


def row_lines(body: Body, text: Printed, stage: int, without: Collection[int] = ()) -> tuple[Line, ...]:
    """Returns the lines of values that a row has one of, and that are known behind ``stage`` passes."""
    known = (p for p in text.lines if body.instructions[p].row and p not in without)
    return tuple(text.lines[position] for position in known if body.instructions[position].stage == stage)


def lines_under(body: Body, text: Printed, positions: Sequence[int]) -> tuple[Line, ...]:
    """Returns the lines of elements that the instructions at ``positions`` need."""
    return tuple(text.lines[position] for position in sorted(elements_under(body, positions)) if position in text.lines)
