"""Computes what masks do to a whole tile of scores, by interval arithmetic on the tile's ranges of indices.

For a tile of rows and keys every integer of the rule has a lowest and a highest value, and every condition may hold
``somewhere`` and ``everywhere``. From these follows whether all scores of the tile are -inf, so that it is skipped, and
whether no mask hides any, so that the code without masks computes it. The expressions are generated
with the kernel and computed for each tile; there is no table of blocks and no mask in memory.

A score counts as hidden where a selection gives -inf, or where -inf is added to it: a NaN or an infinity in a key that
is hidden from a row does not reach the result.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from jitgen.ir.body import Instruction, identity_of, with_all_behind
from jitgen.ir.ops import INTS


@dataclass(frozen=True)
class Words:
    """Writes the analysis in a dialect: false, true, the smaller and the larger of two integers, a quotient rounded
    down (a format string; empty if its bounds cannot be printed), and the run-time scalar of a number."""

    false: str
    true: str
    min: str
    max: str
    quotient: str = ""
    scalar: str = "a{0}"


@dataclass(frozen=True)
class Ends:
    """Holds the lowest and the highest value of an integer, or whether a condition holds ``somewhere`` and
    ``everywhere``, as names or expressions."""

    low: str
    high: str


class _Operand(Protocol):
    """Identifies an operand of a tile by its number, and by where its values change (``"task"``, ``"row"``, ...)."""

    @property
    def index(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def pointer(self) -> object: ...
    @property
    def is_integer(self) -> bool: ...


def ends_of(operand: _Operand) -> Ends:
    """Lists the variables that hold the ends of an operand's values within a tile."""
    if operand.kind == "task":
        return Ends(f"x{operand.index}", f"x{operand.index}")
    return Ends(f"low_of{operand.index}", f"high_of{operand.index}")


def known_ends(operands: Iterable[_Operand]) -> dict[int, Ends]:
    """Returns the ends of the integer ``operands`` that change along rows alone or along keys alone, by their
    numbers."""
    return {o.index: ends_of(o) for o in operands if o.is_integer and o.kind != "both"}


def mask_ends(operands: Iterable[_Operand], kinds: Sequence[str]) -> dict[int, Ends]:
    """Returns the ends of masks in memory of these ``kinds``, whose values are 0 and 1, by the numbers of their
    operands: a mask holds somewhere in a tile where its highest value is 1, and everywhere where its lowest is."""
    masks = (o for o in operands if o.dtype == "bool" and o.pointer and o.kind in kinds)
    return {mask.index: Ends(low=ends_of(mask).high, high=ends_of(mask).low) for mask in masks}


MASKS_LOOKED_AT = {"cpp": ("key", "both"), "triton": ("key",), "cuda": ()}
"""Kinds of masks in memory that a forward of each dialect looks at before it computes a tile."""


def tile_ends(operands: Iterable[_Operand], dialect: str, *, forward: bool = True) -> dict[int, Ends]:
    """Returns the ends of what a kernel of ``dialect`` looks at before it computes a tile, by the numbers of their
    operands. A mask takes a byte a score on the host, and spares the products of those that it hides; what differs from
    key to key in memory may be anything in CUDA's forward."""
    operands = list(operands)
    masks = MASKS_LOOKED_AT[dialect] if forward or dialect == "cpp" else ()
    known = [o for o in operands if o.kind != "key" or not o.pointer] if forward and dialect == "cuda" else operands
    return known_ends(known) | mask_ends(operands, masks)


@dataclass(frozen=True)
class Bounds:
    """Holds the analysis of a rule.

    Attributes:
        lines: (name, expression, whether it is a condition) in order.
        hidden: an expression: whether all scores of the tile are -inf.
        open: an expression: whether no mask hides any.
    """

    lines: tuple[tuple[str, str, bool], ...]
    hidden: str
    open: str

    def of_hidden(self) -> Bounds:
        """Returns what ``hidden`` needs."""
        return _used(self.lines, self.hidden, "")

    @cached_property
    def names(self) -> frozenset[str]:
        """Returns the names that the expressions read."""
        text = " ".join([self.hidden, self.open, *(expression for _, expression, _ in self.lines)])
        return frozenset(re.findall(r"[A-Za-z_]\w*", text))

    def reads(self, ends: Ends) -> bool:
        """Returns whether an expression reads one of ``ends``."""
        return not self.names.isdisjoint((ends.low, ends.high))


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
_LOGIC = {"bitwise_and": ("{a} & {c}", "{b} & {d}"), "bitwise_or": ("{a} | {c}", "{b} | {d}")}
_SMALL = 2**31
"""A product of two integers below it fits an int64."""


def masks_of(instructions: Sequence[Instruction]) -> dict[int, int]:
    """Returns the selections that hide a score: their positions, and which of their operands (1 or 2) is the hidden
    one."""
    masks = {}
    for position, instruction in enumerate(instructions):
        if instruction.op == "where" and instruction.dtype.startswith("float"):
            hidden = [number for number in (1, 2) if _is_minus_infinity(instructions, instruction.args[number])]
            if len(hidden) == 1:
                masks[position] = hidden[0]
    return masks


def _is_minus_infinity(instructions: Sequence[Instruction], position: int) -> bool:
    instruction = instructions[position]
    if instruction.is_conversion:
        return _is_minus_infinity(instructions, instruction.args[0])
    return instruction.op == "const" and instruction.attr == -math.inf


def without_masks(instructions: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """Rewrites the rule for tiles where no mask hides anything: each mask is what it leaves visible, and what that
    needs remains."""
    return _chosen(instructions, {position: 3 - hidden for position, hidden in masks_of(instructions).items()})


def without_conditions(instructions: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """Rewrites ``instructions`` for tiles in which no mask hides a score: a selection by a mask's condition becomes the
    value that the mask leaves visible. The last instruction stays the last."""
    visible = {instructions[position].args[0]: 3 - hidden for position, hidden in masks_of(instructions).items()}
    selections = (p for p, i in enumerate(instructions) if i.op == "where" and i.args[0] in visible)
    return _chosen(instructions, {p: visible[instructions[p].args[0]] for p in selections})


def _chosen(instructions: Sequence[Instruction], choices: Mapping[int, int]) -> tuple[Instruction, ...]:
    """Replaces each selection in ``choices`` by the operand with that number, without computing anything twice; returns
    the last instruction and what it is computed from."""
    kept: list[Instruction] = []
    known: dict[tuple[object, ...], int] = {}
    at: dict[int, int] = {}
    for position, instruction in enumerate(instructions):
        if position in choices:
            at[position] = at[instruction.args[choices[position]]]
            continue
        moved = replace(instruction, args=tuple(at[argument] for argument in instruction.args))
        key = identity_of(moved)
        if key not in known:
            known[key] = len(kept)
            kept.append(moved)
        at[position] = known[key]
    return reachable(kept, at[len(instructions) - 1])


def reachable(instructions: Sequence[Instruction], root: int) -> tuple[Instruction, ...]:
    """Returns the instruction ``root`` and all that it is computed from, with ``root`` as the last."""
    return with_all_behind(instructions, (root,))


def bounds_of(instructions: Sequence[Instruction], known: Mapping[int, Ends], words: Words) -> Bounds:
    """Computes the bounds of the rule ``instructions``, whose last one is the score.

    Args:
        known: the ends of the integers and conditions that are read, by the numbers of their operands; those of
            run-time scalars are parameters.
        words: the dialect's.
    """
    lines, ends, hidden = _analysed(instructions, known, words)
    return _used(lines, hidden[len(instructions) - 1], _opened(instructions, ends, words))


def told_masks(instructions: Sequence[Instruction], known: Mapping[int, Ends]) -> frozenset[int]:
    """Returns the positions of the masks of which ``known`` tells for some tiles that they hide all of it; the other
    arguments are those of ``bounds_of``."""
    lines, ends, _ = _analysed(instructions, known, Words("False", "True", "min", "max"))
    values: dict[str, bool | None] = {}
    for name, expression, is_condition in lines:
        values[name] = _folded(ast.parse(expression, mode="eval").body, values) if is_condition else None

    def may_hide(position: int, hidden: int) -> bool:
        condition = ends[instructions[position].args[0]]
        text = condition.high if hidden == 1 else f"{condition.low} == False"
        return _folded(ast.parse(text, mode="eval").body, values) is not False

    return frozenset(position for position, hidden in masks_of(instructions).items() if may_hide(position, hidden))


def _folded(expression: ast.expr, values: Mapping[str, bool | None]) -> bool | None:
    """Returns the value of a condition; None where it depends on the tile."""
    match expression:
        case ast.Constant(value=bool() as value):
            return value
        case ast.Name(id=name):
            return values.get(name)
        case ast.Compare(left=left, ops=[ast.Eq()], comparators=[ast.Constant(value=False)]):
            inner = _folded(left, values)
            return None if inner is None else not inner
        case ast.BinOp(left=left, op=(ast.BitAnd() | ast.BitOr()) as op, right=right):
            decisive, sides = isinstance(op, ast.BitOr), (_folded(left, values), _folded(right, values))
            return decisive if decisive in sides else None if None in sides else not decisive
    return None


def vanishing_of(
    instructions: Sequence[Instruction], roots: Sequence[int], known: Mapping[int, Ends], words: Words
) -> Bounds:
    """Computes the bounds of values that are computed from exponentials of scores, at the positions ``roots``:
    ``hidden`` says whether they are 0 everywhere in a tile. The other arguments are those of ``bounds_of``."""
    lines, ends, hidden = _analysed(instructions, known, words)
    zero: dict[int, str] = {}
    for position, instruction in enumerate(instructions):
        zero[position] = _zero(instruction, ends, hidden, zero, words)
    return _used(lines, _joined("&", (zero[root] for root in roots)), _opened(instructions, ends, words))


def _analysed(
    instructions: Sequence[Instruction], known: Mapping[int, Ends], words: Words
) -> tuple[list[tuple[str, str, bool]], dict[int, Ends], dict[int, str]]:
    """Returns the lines that compute the ends of integers and conditions, these ends by position, and for every
    position whether the value there is -inf in all of a tile."""
    false, true = words.false, words.true
    lines: list[tuple[str, str, bool]] = []
    ends: dict[int, Ends] = {}

    def define(position: int, low: str, high: str, condition: bool) -> None:
        names = ("somewhere", "everywhere") if condition else ("low", "high")
        pair = Ends(*(f"{name}{position}" for name in names))
        lines.extend(((pair.low, low, condition), (pair.high, high, condition)))
        ends[position] = pair

    for position, instruction in enumerate(instructions):
        condition = instruction.dtype == "bool"
        if not condition and instruction.dtype not in INTS:
            continue
        arguments = [ends.get(argument) for argument in instruction.args]
        ends_here = _ends(position, instruction, instructions, arguments, known, words)
        if ends_here is not None:
            define(position, ends_here[0], ends_here[1], condition)
        elif condition:
            ends[position] = Ends(true, false)
    masks = masks_of(instructions)
    hidden: dict[int, str] = {}
    for position, instruction in enumerate(instructions):
        hidden[position] = _hidden(position, instruction, instructions, masks, ends, hidden, false, true)
    return lines, ends, hidden


def _opened(instructions: Sequence[Instruction], ends: Mapping[int, Ends], words: Words) -> str:
    """Prints whether no mask hides a score of a tile."""
    opened = []
    for position, operand in masks_of(instructions).items():
        shown = ends[instructions[position].args[0]]
        opened.append(shown.high if operand == 2 else f"{shown.low} == {words.false}")
    return _joined("&", opened) or words.true


def _ends(
    position: int,
    instruction: Instruction,
    instructions: Sequence[Instruction],
    arguments: Sequence[Ends | None],
    known: Mapping[int, Ends],
    dialect: Words,
) -> tuple[str, str] | None:
    """Returns (low, high) or (somewhere, everywhere) of an instruction; None if nothing is known."""
    op, false, true = instruction.op, dialect.false, dialect.true
    if op in ("load", "iota"):
        known_ends_ = known.get(instruction.attr)
        return (known_ends_.low, known_ends_.high) if known_ends_ else None
    if op == "const":
        if instruction.dtype == "bool":
            return (true, true) if instruction.attr else (false, false)
        number = str(int(instruction.attr))
        return (number, number) if abs(int(instruction.attr)) < _SMALL else None
    if op == "scalar":
        scalar = dialect.scalar.format(instruction.attr)
        return (scalar, scalar) if instruction.dtype in INTS else None
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
    """Prints whether the value at ``position`` is -inf everywhere in a tile."""
    if not instruction.dtype.startswith("float"):
        return false
    if instruction.op == "const":
        return true if instruction.attr == -math.inf else false
    arguments = [hidden[argument] for argument in instruction.args]
    if instruction.op == "where":
        return _selected(ends[instruction.args[0]], arguments[1], arguments[2], false, true)
    if instruction.is_conversion:
        return arguments[0] if arguments else false
    if instruction.op == "add":
        return _joined("|", (a for a in arguments if a != false)) or false
    if instruction.op == "sub":
        return arguments[0]
    return false


def _selected(condition: Ends, chosen: str, otherwise: str, false: str, true: str) -> str:
    """Prints whether a selection has, everywhere in a tile, the property that ``chosen`` and ``otherwise`` state for
    its two values."""
    branches = []
    if chosen != false:
        branches.append(condition.high if chosen == true else _joined("&", (condition.high, chosen)))
    if otherwise != false:
        never = f"{condition.low} == {false}"
        branches.append(never if otherwise == true else _joined("&", (never, otherwise)))
    if chosen != false and otherwise != false:
        branches.append(_joined("&", (chosen, otherwise)))
    return _joined("|", branches) or false


def _joined(operator: str, expressions: Iterable[str]) -> str:
    """Joins expressions without those that are the same, in brackets unless it is one or a name."""
    distinct = dict.fromkeys(expressions)
    bracketed = (text if text.isidentifier() or len(distinct) == 1 else f"({text})" for text in distinct)
    return f" {operator} ".join(bracketed)


def _zero(
    instruction: Instruction, ends: Mapping[int, Ends], hidden: Mapping[int, str], zero: Mapping[int, str], words: Words
) -> str:
    """Prints whether the value of ``instruction`` is 0 everywhere in a tile."""
    op, false, true = instruction.op, words.false, words.true
    if not instruction.dtype.startswith("float"):
        return false
    if op == "const":
        return true if instruction.attr == 0 else false
    if op in ("exp", "exp2"):
        return hidden[instruction.args[0]]
    arguments = [zero[argument] for argument in instruction.args]
    if op == "where":
        return _selected(ends[instruction.args[0]], arguments[1], arguments[2], false, true)
    if op == "mul":
        return _joined("|", (zero_operand for zero_operand in arguments if zero_operand != false)) or false
    if op in ("add", "sub"):
        return _joined("&", arguments) if false not in arguments else false
    return arguments[0] if op in ("cast", "round_to", "neg", "div") and arguments else false


def _used(lines: Sequence[tuple[str, str, bool]], hidden: str, opened: str) -> Bounds:
    """Drops the lines on which neither expression depends."""
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
