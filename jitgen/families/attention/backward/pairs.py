"""Rewrites the rule of a tile in CUDA: P and dS become one list of instructions in two phases, few of which are done
for each pair of rows.

An instruction is done once for a row of the block, for a row of the tile, or for each pair of them, by what it depends
on. So ``exp(s * scale - row_max)`` is rewritten to ``exp2(s * (scale * log2 e) - row_max * log2 e)``, and a factor of
dS is multiplied into what a row has. The first phase computes what needs the first product alone, while the second
product is still running: P, and one number that dS is computed from, in whose registers the product was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jitgen.ir.body import Instruction, behind, identity_of

FLOAT = "float32"
BOTH = frozenset(("row", "key"))
Level = frozenset[str]
"""Which of the rows ``"row"``, of the block, and ``"key"``, of the tile, a value depends on."""


@dataclass(frozen=True)
class Rule:
    """Holds the values of a tile.

    Attributes:
        instructions: of all of them.
        levels: of each instruction.
        first: the position of the value that is a left operand before there is a second product; None for none.
        kept: the position of what the second phase is computed from in place of the first product.
        second: the positions of the values of the second phase.
        factor: the position of a number that the sum of the first of ``second`` is to be multiplied with; None for 1.
    """

    instructions: tuple[Instruction, ...]
    levels: tuple[Level, ...]
    first: int | None
    kept: int
    second: tuple[int, ...]
    factor: int | None

    @property
    def first_phase(self) -> tuple[int, ...]:
        """Returns the positions that are computed in the first phase, or before."""
        roots = (self.kept,) if self.first is None else (self.first, self.kept)
        return tuple(sorted(behind(self.instructions, roots)))

    @property
    def second_phase(self) -> tuple[int, ...]:
        """Returns the positions that are computed in the second phase, or before; ``kept`` is there."""
        return tuple(sorted(behind(self.instructions, self.second, (self.kept,)) - {self.kept}))

    def words(self, level: str) -> tuple[int, ...]:
        """Returns the positions of the values of one row that pairs of rows are computed from, other than its index."""
        pairs = {p for p in (*self.first_phase, *self.second_phase) if self.levels[p] == BOTH}
        read = {argument for position in pairs for argument in self.instructions[position].args}
        mine = frozenset((level,))
        return tuple(p for p in sorted(read) if self.levels[p] == mine and self.instructions[p].op != "iota")


def rule_of(
    instructions: Sequence[Instruction],
    first: int | None,
    second: Sequence[int],
    scores: int,
    kinds: Mapping[int, str],
    factored: bool,
) -> Rule:
    """Makes the rule whose values are at these positions of ``instructions``.

    Args:
        scores: the number of the first product.
        kinds: of the operands that are read, by their numbers: ``"task"``, ``"row"``, ``"key"`` or ``"both"``.
        factored: whether sums may be multiplied with a number that is a factor of all they add up. Where what is added
            up is rounded to float16 it may be too large without it.
    """
    factor = None
    if factored:
        root, factor = _without_factor(instructions, second[0])
        second = (root, *second[1:])
    split = None
    for by_weight in (True, False):
        writer = _Writer(kinds, by_weight)
        at = writer.rewritten(instructions, sorted(behind(instructions, () if first is None else (first,))))
        roots = tuple(at[position] for position in second)
        weight = None if first is None else at[first]
        kept = _kept(writer.written, roots, scores)
        split = Rule(
            tuple(writer.written), tuple(writer.levels), weight, kept, roots, None if factor is None else at[factor]
        )
        if weight == kept:
            break
    assert split is not None
    return split


def _without_factor(instructions: Sequence[Instruction], root: int) -> tuple[int, int | None]:
    """Splits a factor off ``root``: what it is multiplied with, and that number's position: a constant or a call's
    argument."""
    instruction = instructions[root]
    if instruction.op == "mul" and instruction.dtype == FLOAT:
        for value, factor in (instruction.args, instruction.args[::-1]):
            ops = {instructions[p].op for p in behind(instructions, (factor,))}
            if not ops & {"load", "iota", "contract"}:
                return value, factor
    return root, None


def products_behind(instructions: Sequence[Instruction], root: int) -> set[int]:
    """Returns the numbers of the products from which ``root`` is computed."""
    return {instructions[p].attr for p in behind(instructions, (root,)) if instructions[p].op == "contract"}


def _kept(instructions: Sequence[Instruction], roots: Sequence[int], scores: int) -> int:
    """Returns the last value, of this product alone, through which alone ``roots`` depend on it."""
    product = next(p for p, i in enumerate(instructions) if (i.op, i.attr) == ("contract", scores))
    for position in range(max(roots), product, -1):
        if instructions[position].dtype == FLOAT and products_behind(instructions, position) == {scores}:
            left = behind(instructions, roots, (position,))
            if position in left and product not in left:
                return position
    return product


class _Writer:
    """Writes rewritten instructions, none of them twice, with the level of each. ``by_weight``: see ``_by_weight``."""

    def __init__(self, kinds: Mapping[int, str], by_weight: bool):
        self.kinds, self.by_weight = kinds, by_weight
        self.written: list[Instruction] = []
        self.levels: list[Level] = []
        self._known: dict[tuple[object, ...], int] = {}

    def emit(self, instruction: Instruction) -> int:
        key = identity_of(instruction)
        if key not in self._known:
            self._known[key] = len(self.written)
            self.written.append(instruction)
            self.levels.append(self._level(instruction))
        return self._known[key]

    def _level(self, instruction: Instruction) -> Level:
        if instruction.op == "contract":
            return BOTH
        if instruction.op in ("load", "iota"):
            kind = self.kinds[instruction.attr]
            return BOTH if kind == "both" else frozenset(() if kind == "task" else (kind,))
        return frozenset().union(*(self.levels[argument] for argument in instruction.args))

    def rewritten(self, instructions: Sequence[Instruction], before: Sequence[int]) -> dict[int, int]:
        """Writes ``instructions``, those at the positions ``before`` first; returns where their values are."""
        at: dict[int, int] = {}
        for position in dict.fromkeys((*before, *range(len(instructions)))):
            instruction = instructions[position]
            moved = replace(instruction, args=tuple(at[argument] for argument in instruction.args))
            at[position] = self._rewritten(moved)
        return at

    def _rewritten(self, moved: Instruction) -> int:
        if moved.dtype != FLOAT or self._level(moved) != BOTH:
            return self.emit(moved)
        if moved.op == "exp":
            factor = self.emit(Instruction("const", (), FLOAT, math.log2(math.e)))
            return self.emit(replace(moved, op="exp2_normal", args=(self._times(moved.args[0], factor),)))
        if moved.op == "div" and self.levels[moved.args[1]] != BOTH:
            inverse = self.emit(Instruction("reciprocal", moved.args[1:], FLOAT, None, moved.location))
            moved = replace(moved, op="mul", args=(moved.args[0], inverse))
        if moved.op == "mul":
            for value, factor in (moved.args, moved.args[::-1]):
                if not self.levels[factor] and self._cost(value) == 0:
                    return self._times(value, factor)
            for value, power in (moved.args, moved.args[::-1]) if self.by_weight else ():
                weighted = self._by_weight(value, power)
                if weighted is not None:
                    return weighted
        return self.emit(moved)

    def _by_weight(self, position: int, power: int) -> int | None:
        """Rewrites ``(x f + g) e`` as ``(x + g / f) w`` if w = e f is known, so that fewer numbers of a row are read; e
        is ``power``, and f and g are numbers of a row. Where f is 0, so is w."""
        shifted = self.written[position]
        if self.levels[position] != BOTH or shifted.op not in ("add", "sub"):
            return None
        product, shift = shifted.args
        scaled = self.written[product]
        if scaled.op != "mul" or self.levels[product] != BOTH or self.levels[shift] == BOTH:
            return None
        for value, factor in (scaled.args, scaled.args[::-1]):
            if not self.levels[factor] or self.levels[factor] == BOTH:
                continue
            known = (
                self._known.get(identity_of(Instruction("mul", pair, FLOAT)))
                for pair in ((power, factor), (factor, power))
            )
            weight = next((candidate for candidate in known if candidate is not None), None)
            if weight is not None:
                zero = self.emit(Instruction("const", (), FLOAT, 0.0))
                none = self.emit(Instruction("eq", (factor, zero), "bool"))
                quotient = self.emit(Instruction("div", (shift, factor), FLOAT))
                share = self.emit(Instruction("where", (none, zero, quotient), FLOAT))
                return self.emit(
                    Instruction(
                        "mul", (self.emit(replace(shifted, args=(value, share))), weight), FLOAT, None, shifted.location
                    )
                )
        return None

    def _cost(self, position: int) -> int:
        """Counts the instructions for each pair of rows that a factor of the value costs, if it is multiplied into what
        the value is computed from."""
        instruction = self.written[position]
        if self.levels[position] != BOTH:
            return 0
        if instruction.op == "mul":
            return min(map(self._cost, instruction.args))
        if instruction.op in ("add", "sub"):  # a factor of one operand makes a multiply-add of it
            return max(sum(map(self._cost, instruction.args)) - 1, 0)
        if instruction.op == "where":
            return sum(map(self._cost, instruction.args[1:]))
        return 1

    def _adds(self, position: int) -> bool:
        """Returns whether a value is a sum, whose factor needs no other value of a row."""
        return self.levels[position] == BOTH and self.written[position].op in ("add", "sub")

    def _times(self, position: int, factor: int) -> int:
        instruction = self.written[position]
        other = self.written[factor]
        if instruction.op == other.op == "const":
            return self.emit(Instruction("const", (), FLOAT, instruction.attr * other.attr))
        if (
            self.levels[position] == BOTH
            and self._cost(position) <= 1
            and instruction.op in ("mul", "add", "sub", "where")
        ):
            arguments = list(instruction.args)
            if instruction.op == "mul":
                cheapest = min(
                    (0, 1), key=lambda number: (self._cost(arguments[number]), not self._adds(arguments[number]))
                )
                if self._cost(arguments[cheapest]) == 0:
                    arguments[cheapest] = self._times(arguments[cheapest], factor)
                    return self.emit(replace(instruction, args=tuple(arguments)))
            else:
                first = 1 if instruction.op == "where" else 0
                arguments[first:] = [self._times(argument, factor) for argument in arguments[first:]]
                return self.emit(replace(instruction, args=tuple(arguments)))
        return self.emit(Instruction("mul", (position, factor), FLOAT, None, instruction.location))
