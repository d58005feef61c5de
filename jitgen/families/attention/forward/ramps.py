"""Finds what in a rule of scores in CUDA is linear in a score's column, so that a score needs few instructions for it.

A thread has scores at constant distances from a first column. An integer such as ``j - i`` is then a start, which is
the same for a row of a tile, and a constant. A comparison such as ``j > i`` compares that constant with a bound of the
row. A float such as ``slope * (j - i)`` is one multiply-add of the constant; conversions of integers, which a
multiprocessor does as slowly as exponentials, are done once for a row. Starts are rounded once more than values that
are computed for themselves: by 2^-24 of a tile's greatest one, which below 2^24 and times a power of two is not at all.

Whether a column exists, which the last tile has to ask, becomes a part of a mask's bound where there is one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from jitgen.codegen.printing import Line
from jitgen.families.attention.rule.bounds import masks_of
from jitgen.families.attention.rule.context import Rule
from jitgen.ir.body import Instruction, behind, unvarying
from jitgen.ir.ops import INTS

_FLIPPED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}
_SIGNS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
FLOAT = "float32"


@dataclass(frozen=True)
class Ramp:
    """Describes ``start + step * distance``: expressions of what is the same for a row, whose positions are
    ``needs``."""

    start: str
    step: str
    needs: frozenset[int]


@dataclass(frozen=True)
class Test:
    """Describes a comparison of the distance with a bound: ``op``, and an expression of what is the same for a row."""

    op: str
    bound: str
    needs: frozenset[int]


@dataclass(frozen=True)
class Split:
    """Holds a rule whose lines are divided.

    Attributes:
        row_lines: computed once for a row of a tile, before the others.
        kept: (type, name, expression) of each value of a row that scores read as ``name[r]``.
        lines: of each score.
        operands: those that ``lines`` read, by their numbers, and those of ``row_lines``.
        needs_column: whether the lines read the column's number or what is in memory there.
        knows_existence: whether a mask hides columns that do not exist.
    """

    row_lines: tuple[Line, ...]
    kept: tuple[tuple[str, str, str], ...]
    lines: tuple[Line, ...]
    operands: frozenset[int]
    row_operands: frozenset[int]
    needs_column: bool
    knows_existence: bool


def split(rule: Rule, distance: str, counts: bool) -> Split:
    """Divides ``rule`` for scores at ``distance``, an expression of constants, from the first column. ``counts``:
    whether all indices of keys step by 1."""
    instructions, names = rule.instructions, rule.names
    invariant = _invariant(rule)
    ramps = _ramps(rule, invariant) if counts else {}
    tests = dict(_tests(instructions, names, invariant, ramps))
    floats = {position for position in ramps if instructions[position].dtype == FLOAT}
    root = len(instructions) - 1
    floats.discard(root)
    hiding = _hiding(instructions, tests)
    needed = behind(instructions, [root], tests.keys() | floats)
    row_needs: set[int] = set()
    kept: list[tuple[str, str, str]] = []
    lines: list[Line] = []
    for position in sorted(needed):
        name = names[position]
        if position in tests:
            test = tests[position]
            bound = f"jitgen::bound_of({test.bound})"
            if position == hiding:
                bound = f"jitgen::smaller({bound}, live{' - 1' if test.op in ('gt', 'le') else ''})"
            kept.append(("int", f"bound{position}", bound))
            text = f"const bool {name} = {distance} {_SIGNS[test.op]} bound{position}[r];"
            lines.append(replace(rule.by_position[position], text=text))
            row_needs |= test.needs
        elif position in floats:
            ramp = ramps[position]
            kept += [("float", f"start{position}", ramp.start), ("float", f"step{position}", ramp.step)]
            text = f"const float {name} = __fmaf_rn(float({distance}), step{position}[r], start{position}[r]);"
            lines.append(replace(rule.by_position[position], text=text))
            row_needs |= ramp.needs
        elif position in rule.by_position:
            lines.append(_plain(rule.by_position[position], instructions[position], names))
    row_needs = behind(instructions, row_needs)
    row_lines = tuple(rule.by_position[p] for p in sorted(row_needs) if p in rule.by_position)
    read = {p: instructions[p].attr for p in range(len(instructions)) if instructions[p].op in ("load", "iota")}
    of_scores = frozenset(read[p] for p in needed if p in read)
    kinds = {operand.index: operand.kind for operand in rule.operands}
    starts = frozenset(i for i in kinds if kinds[i] in ("row", "task") and any(read.get(p) == i for p in row_needs))
    return Split(
        row_lines,
        tuple(kept),
        tuple(lines),
        of_scores,
        starts,
        any(kinds[index] in ("key", "both") for index in of_scores),
        hiding is not None,
    )


def _plain(line: Line, instruction: Instruction, names: dict[int, str]) -> Line:
    """Prints conditions joined as such, so that a comparison and its join are one instruction."""
    if instruction.dtype == "bool" and instruction.op in ("bitwise_and", "bitwise_or"):
        left, right = (names[argument] for argument in instruction.args)
        sign = "&&" if instruction.op == "bitwise_and" else "||"
        return replace(line, text=f"const bool {line.value} = {left} {sign} {right};")
    return line


def _invariant(rule: Rule) -> list[bool]:
    """Returns, for each instruction, whether its value is the same for all columns."""
    of_rows = {operand.index for operand in rule.operands if operand.kind in ("row", "task")}
    return unvarying(rule.instructions, lambda load: load.op in ("load", "iota") and load.attr in of_rows)


def _ramps(rule: Rule, invariant: Sequence[bool]) -> dict[int, Ramp]:
    """Returns the integers and float32 numbers that are linear in the column, by position."""
    ramps: dict[int, Ramp] = {}
    indices = {operand.index: operand for operand in rule.operands if operand.kind == "key" and not operand.pointer}
    for position, instruction in enumerate(rule.instructions):
        if invariant[position]:
            continue
        op, dtype, arguments = instruction.op, instruction.dtype, instruction.args
        if op == "iota" and instruction.attr in indices and dtype in INTS:
            operand = indices[instruction.attr]
            ramps[position] = Ramp(f"{operand.type}(task.{operand.at} + first)", "1", frozenset())
            continue
        if dtype not in ("int32", "int64", FLOAT) or not any(argument in ramps for argument in arguments):
            continue
        if not all(argument in ramps or invariant[argument] for argument in arguments):
            continue
        names = [rule.names[argument] for argument in arguments]
        sides = [
            ramps.get(argument, Ramp(name, "", frozenset((argument,))))
            for argument, name in zip(arguments, names, strict=True)
        ]
        types = {rule.instructions[argument].dtype for argument in arguments}
        ramp = _ramp(op, dtype, sides) if types == {dtype} or op == "cast" else None
        if ramp is not None and (op != "cast" or types <= {"int32", "int64"}):
            ramps[position] = ramp
    return ramps


def _ramp(op: str, dtype: str, sides: Sequence[Ramp]) -> Ramp | None:
    """Combines ramps, and invariants, which have no step, by ``op``; None if the result is no ramp."""
    needs = frozenset().union(*(side.needs for side in sides))
    if op == "neg":
        return Ramp(f"-({sides[0].start})", f"-({sides[0].step})", needs)
    if op == "cast":
        kind = "float" if dtype == FLOAT else "int64_t" if dtype == "int64" else "int32_t"
        return Ramp(f"{kind}({sides[0].start})", f"{kind}({sides[0].step})" if dtype == FLOAT else sides[0].step, needs)
    if op in ("add", "sub"):
        sign = "+" if op == "add" else "-"
        start = f"({sides[0].start} {sign} {sides[1].start})"
        if not sides[1].step:
            return Ramp(start, sides[0].step, needs)
        if not sides[0].step:
            return Ramp(start, sides[1].step if op == "add" else f"-({sides[1].step})", needs)
        return None
    if op == "mul" and dtype == FLOAT and not (sides[0].step and sides[1].step):
        ramp, factor = sorted(sides, key=lambda side: not side.step)
        return Ramp(f"({ramp.start} * {factor.start})", f"({ramp.step} * {factor.start})", needs)
    return None


def _tests(
    instructions: Sequence[Instruction], names: dict[int, str], invariant: Sequence[bool], ramps: dict[int, Ramp]
) -> Iterator[tuple[int, Test]]:
    """Yields the comparisons of an integer that is linear in the column with one that is the same for the row."""
    for position, instruction in enumerate(instructions):
        if instruction.op not in _SIGNS or not all(instructions[a].dtype in INTS for a in instruction.args):
            continue
        left, right = instruction.args
        if left in ramps and invariant[right]:
            ramp, other, op = ramps[left], right, instruction.op
        elif right in ramps and invariant[left]:
            ramp, other, op = ramps[right], left, _FLIPPED[instruction.op]
        else:
            continue
        steps = ramp.step.count("-")
        if ramp.step.strip("-()") != "1":
            continue
        start, limit = f"int64_t({ramp.start})", f"int64_t({names[other]})"
        if steps % 2 == 0:
            yield position, Test(op, f"{limit} - {start}", ramp.needs | {other})
        else:
            yield position, Test(_FLIPPED[op], f"{start} - {limit}", ramp.needs | {other})


def _hiding(instructions: Sequence[Instruction], tests: dict[int, Test]) -> int | None:
    """Returns a test of a mask that hides all columns from some one on, whatever else the mask says."""
    masks, position = masks_of(instructions), len(instructions) - 1
    while position in masks:
        hidden = masks[position]
        join, signs = ("bitwise_or", ("gt", "ge")) if hidden == 1 else ("bitwise_and", ("lt", "le"))
        stack = [instructions[position].args[0]]
        while stack:
            condition = stack.pop()
            if condition in tests and tests[condition].op in signs:
                return condition
            if instructions[condition].op == join:
                stack.extend(instructions[condition].args)
        position = instructions[position].args[3 - hidden]
    return None
