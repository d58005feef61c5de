"""What a mask does to a whole tile of scores, as an expression of the tile's ranges of indices: interval arithmetic.

For a tile of rows and keys every integer of the rule has a lowest and a highest value, and every condition may hold
somewhere (``may``) and holds everywhere (``must``). From these follows whether all scores of the tile are -inf, so that
it is skipped, and whether no mask hides any, so that the code without masks computes it. The expressions are generated
with the kernel and computed for each tile; there is no table of blocks and no mask in memory.

A score counts as hidden where a selection gives -inf, or where -inf is added to it: a NaN or an infinity in a key that
is hidden from a row does not reach the result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jitgen.ir.body import Instruction, identity_of
from jitgen.ir.ops import INTS


@dataclass(frozen=True)
class Words:
    """How a dialect writes false, true, the smaller and the larger of two integers, and a quotient rounded down: a
    format string, or empty where that has no bounds."""

    false: str
    true: str
    min: str
    max: str
    quotient: str = ""


@dataclass(frozen=True)
class Ends:
    """Names or expressions of the ends of an integer's values, or of whether a condition ``may`` and ``must`` hold."""

    low: str
    high: str


@dataclass(frozen=True)
class Bounds:
    """The analysis of a rule.

    Attributes:
        lines: (name, expression, whether it is a condition) in order.
        hidden: an expression: whether all scores of the tile are -inf.
        open: an expression: whether no mask hides any.
    """

    lines: tuple[tuple[str, str, bool], ...]
    hidden: str
    open: str


_INTEGERS = {
    "add": ("{a} + {c}", "{b} + {d}"),
    "sub": ("{a} - {d}", "{b} - {c}"),
    "neg": ("-{b}", "-{a}"),
    "minimum": ("{min}({a}, {c})", "{min}({b}, {d})"),
    "maximum": ("{max}({a}, {c})", "{max}({b}, {d})"),
    "abs": ("{max}({max}({a}, -{b}), 0)", "{max}({b}, -{a})"),
    "mul": (
        "{min}({min}({a} * {c}, {a} * {d}), {min}({b} * {c}, {b} * {d}))",
        "{max}({max}({a} * {c}, {a} * {d}), {max}({b} * {c}, {b} * {d}))",
    ),
}
"""Low and high end of an integer whose operands are in [a, b] and [c, d]."""
_CONDITIONS = {
    "lt": ("{a} < {d}", "{b} < {c}"),
    "le": ("{a} <= {d}", "{b} <= {c}"),
    "gt": ("{b} > {c}", "{a} > {d}"),
    "ge": ("{b} >= {c}", "{a} >= {d}"),
    "eq": ("({a} <= {d}) & ({c} <= {b})", "({a} == {b}) & ({c} == {d}) & ({a} == {c})"),
    "ne": ("({a} != {b}) | ({c} != {d}) | ({a} != {c})", "({a} > {d}) | ({c} > {b})"),
}
_LOGIC = {
    "bitwise_and": ("{a} & {c}", "{b} & {d}"),
    "bitwise_or": ("{a} | {c}", "{b} | {d}"),
}
_SMALL = 2**31
"""A product of two integers below it fits an int64."""


def masks_of(instructions: Sequence[Instruction]) -> dict[int, int]:
    """The selections that hide a score: their positions, and which of their operands (1 or 2) is the hidden one."""
    found = {}
    for position, instruction in enumerate(instructions):
        if instruction.op == "where" and instruction.dtype.startswith("float"):
            hidden = [number for number in (1, 2) if _is_minus_infinity(instructions, instruction.args[number])]
            if len(hidden) == 1:
                found[position] = hidden[0]
    return found


def _is_minus_infinity(instructions: Sequence[Instruction], position: int) -> bool:
    instruction = instructions[position]
    if instruction.op in ("cast", "round_to"):
        return _is_minus_infinity(instructions, instruction.args[0])
    return instruction.op == "const" and instruction.attr == -math.inf


def without_masks(instructions: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """The rule where no mask hides anything: each mask is what it leaves visible, and what that needs remains."""
    masks = masks_of(instructions)
    found: list[Instruction] = []
    known: dict[tuple[object, ...], int] = {}
    at: dict[int, int] = {}
    for position, instruction in enumerate(instructions):
        if position in masks:
            at[position] = at[instruction.args[3 - masks[position]]]
            continue
        moved = replace(instruction, args=tuple(at[argument] for argument in instruction.args))
        key = identity_of(moved)
        if key not in known:
            known[key] = len(found)
            found.append(moved)
        at[position] = known[key]
    return reachable(found, at[len(instructions) - 1])


def reachable(instructions: Sequence[Instruction], root: int) -> tuple[Instruction, ...]:
    """``root`` and what it is computed from; ``root`` is the last."""
    needed = {root}
    for position in range(root, -1, -1):
        if position in needed:
            needed.update(instructions[position].args)
    now = {position: number for number, position in enumerate(sorted(needed))}
    return tuple(replace(instructions[p], args=tuple(now[a] for a in instructions[p].args)) for p in sorted(needed))


def bounds_of(
    instructions: Sequence[Instruction], known: Mapping[int, Ends], names: Mapping[int, str], words: Words
) -> Bounds:
    """The bounds of the rule ``instructions``, whose last one is the score.

    Args:
        known: the ends of the integers and conditions that are read, by the numbers of their operands.
        names: what run-time scalars are called, by position.
        words: the dialect's.
    """
    false, true = words.false, words.true
    lines: list[tuple[str, str, bool]] = []
    ends: dict[int, Ends] = {}

    def define(position: int, low: str, high: str, condition: bool) -> None:
        pair = Ends(f"low{position}", f"high{position}") if not condition else Ends(f"may{position}", f"must{position}")
        lines.extend(((pair.low, low, condition), (pair.high, high, condition)))
        ends[position] = pair

    for position, instruction in enumerate(instructions):
        condition = instruction.dtype == "bool"
        if not condition and instruction.dtype not in INTS:
            continue
        arguments = [ends.get(argument) for argument in instruction.args]
        found = _ends(position, instruction, instructions, arguments, known, names, words)
        if found is not None:
            define(position, found[0], found[1], condition)
        elif condition:
            ends[position] = Ends(true, false)
    masks = masks_of(instructions)
    hidden: dict[int, str] = {}
    for position, instruction in enumerate(instructions):
        hidden[position] = _hidden(position, instruction, instructions, masks, ends, hidden, false, true)
    opened = []
    for position, operand in masks.items():
        shown = ends[instructions[position].args[0]]
        opened.append(shown.high if operand == 2 else f"({shown.low} == {false})")
    return _used(lines, hidden[len(instructions) - 1], " & ".join(dict.fromkeys(opened)) or true)


def _ends(
    position: int,
    instruction: Instruction,
    instructions: Sequence[Instruction],
    arguments: Sequence[Ends | None],
    known: Mapping[int, Ends],
    names: Mapping[int, str],
    dialect: Words,
) -> tuple[str, str] | None:
    """(low, high) or (may, must) of an instruction; None where nothing is known."""
    op, false, true = instruction.op, dialect.false, dialect.true
    if op in ("load", "iota"):
        found = known.get(instruction.attr)
        return (found.low, found.high) if found else None
    if op == "const":
        if instruction.dtype == "bool":
            return (true, true) if instruction.attr else (false, false)
        number = str(int(instruction.attr))
        return (number, number) if abs(int(instruction.attr)) < _SMALL else None
    if op == "scalar":
        return (names[position], names[position]) if instruction.dtype in INTS else None
    if any(argument is None for argument in arguments):
        return None
    words = {
        name: end
        for argument, pair in zip(arguments, ("ab", "cd"), strict=False)
        if argument
        for name, end in zip(pair, (argument.low, argument.high), strict=True)
    }
    words |= {"min": dialect.min, "max": dialect.max}
    sources = [instructions[argument].dtype for argument in instruction.args]
    if op in _CONDITIONS and all(source in INTS for source in sources):
        return _formatted(_CONDITIONS[op], words)
    if op == "bitwise_not" and instruction.dtype == "bool":
        return f"{words['b']} == {false}", f"{words['a']} == {false}"
    if op in ("bitwise_and", "bitwise_or") and instruction.dtype == "bool":
        return _formatted(_LOGIC[op], words)
    if op in _INTEGERS and instruction.dtype in ("int32", "int64"):
        return _formatted(_INTEGERS[op], words)
    divisor = instructions[instruction.args[-1]] if op == "floor_divide" else None
    if divisor is not None and dialect.quotient and divisor.op == "const" and divisor.attr > 0:
        return dialect.quotient.format(words["a"], words["c"]), dialect.quotient.format(words["b"], words["c"])
    if op == "cast" and instruction.dtype == "int64" and sources[0] in INTS:
        return words["a"], words["b"]
    return None


def _formatted(rows: tuple[str, str], words: Mapping[str, str]) -> tuple[str, str]:
    low, high = rows
    return low.format(**words), high.format(**words)


def _hidden(
    position: int,
    instruction: Instruction,
    instructions: Sequence[Instruction],
    masks: Mapping[int, int],
    ends: Mapping[int, Ends],
    hidden: Mapping[int, str],
    false: str,
    true: str,
) -> str:
    """An expression: whether the value at ``position`` is -inf in all of a tile."""
    if not instruction.dtype.startswith("float"):
        return false
    if instruction.op == "const":
        return true if instruction.attr == -math.inf else false
    arguments = [hidden[argument] for argument in instruction.args]
    if instruction.op == "where":
        condition = ends[instruction.args[0]]
        branches = []
        if arguments[1] != false:
            branches.append(condition.high if arguments[1] == true else f"({condition.high} & ({arguments[1]}))")
        if arguments[2] != false:
            never = f"({condition.low} == {false})"
            branches.append(never if arguments[2] == true else f"({never} & ({arguments[2]}))")
        if arguments[1] != false and arguments[2] != false:
            branches.append(f"(({arguments[1]}) & ({arguments[2]}))")
        return " | ".join(branches) or false
    if instruction.op in ("cast", "round_to"):
        return arguments[0] if arguments else false
    if instruction.op == "add":
        return " | ".join(dict.fromkeys(f"({a})" for a in arguments if a != false)) or false
    if instruction.op == "sub":
        return arguments[0]
    return false


def _used(lines: Sequence[tuple[str, str, bool]], hidden: str, opened: str) -> Bounds:
    """Without the lines that neither expression depends on."""
    kept: list[tuple[str, str, bool]] = []
    text = f"{hidden} {opened}"
    for name, expression, condition in reversed(lines):
        if _mentions(text, name):
            kept.append((name, expression, condition))
            text += f" {expression}"
    return Bounds(tuple(reversed(kept)), hidden, opened)


def _mentions(text: str, name: str) -> bool:
    start = text.find(name)
    while start >= 0:
        end = start + len(name)
        if not (end < len(text) and (text[end].isalnum() or text[end] == "_")):
            return True
        start = text.find(name, end)
    return False
