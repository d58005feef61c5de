"""The rule of a tile in CUDA: P and dS as one list of instructions, with few of them for each pair of rows, in two phases.

An instruction is done once for a row of the block, for a row of the tile, or for each pair of them, by what it depends
on. So ``exp(s * scale - top)`` is rewritten to ``exp2(s * (scale * log2 e) - top * log2 e)``, and a factor of dS is
multiplied into what a row has. The first phase computes what needs the first product alone, while the second product is
still running: P, and one number that dS is computed from, in whose registers the product was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jitgen.ir.body import Instruction, identity_of

FLOAT = "float32"
BOTH = frozenset(("row", "key"))
Level = frozenset[str]
"""Which of the rows ``"row"``, of the block, and ``"key"``, of the tile, a value depends on."""


@dataclass(frozen=True)
class Rule:
    """Values of a tile.

    Attributes:
        instructions: of all of them.
        levels: of each instruction.
        weight: the position of P; None where there is no result of it.
        kept: the position of what the second phase is computed from in place of the first product.
        dscore: the position of dS.
    """

    instructions: tuple[Instruction, ...]
    levels: tuple[Level, ...]
    weight: int | None
    kept: int
    dscore: int

    def needed(self, root: int | None, without: int | None = None) -> tuple[int, ...]:
        """The positions that ``root`` is computed from, itself included, but not what is behind ``without``."""
        return tuple(sorted(_behind(self.instructions, root, without))) if root is not None else ()

    @property
    def first(self) -> tuple[int, ...]:
        """The positions of the first phase."""
        return tuple(sorted({*self.needed(self.weight), *self.needed(self.kept)}))

    @property
    def second(self) -> tuple[int, ...]:
        """The positions of the second phase, with that of ``kept``."""
        return self.needed(self.dscore, self.kept)

    def words(self, level: str) -> tuple[int, ...]:
        """The positions of the values of one row that pairs of rows are computed from, other than its index."""
        found: set[int] = set()
        for position in {*self.first, *self.second} - {self.kept if self._is_product(self.kept) else -1}:
            if self.levels[position] == BOTH:
                found.update(self.instructions[position].args)
        found |= {root for root in (self.weight, self.kept, self.dscore) if root is not None}
        mine = frozenset((level,))
        return tuple(p for p in sorted(found) if self.levels[p] == mine and self.instructions[p].op != "iota")

    def _is_product(self, position: int) -> bool:
        return self.instructions[position].op == "contract"


def rule_of(instructions: Sequence[Instruction], weight: int | None, dscore: int, kinds: Mapping[int, str]) -> Rule:
    """The rule whose values are at these positions of ``instructions``.

    Args:
        kinds: of the operands that it reads, by their numbers: ``"task"``, ``"row"``, ``"key"`` or ``"both"``.
    """
    writer = _Writer(kinds)
    at = writer.rewritten(instructions)
    new_weight = None if weight is None else at[weight]
    found, levels = tuple(writer.found), tuple(writer.levels)
    return Rule(found, levels, new_weight, _kept(found, at[dscore]), at[dscore])


def merged(parts: Sequence[Sequence[Instruction]]) -> tuple[tuple[Instruction, ...], tuple[int, ...]]:
    """Several lists of instructions as one, in which none is repeated, and the positions of their last ones."""
    found: list[Instruction] = []
    known: dict[tuple[object, ...], int] = {}
    roots = []
    for part in parts:
        at: list[int] = []
        for instruction in part:
            moved = replace(instruction, args=tuple(at[argument] for argument in instruction.args))
            key = identity_of(moved)
            if key not in known:
                known[key] = len(found)
                found.append(moved)
            at.append(known[key])
        roots.append(at[-1])
    return tuple(found), tuple(roots)


def products_behind(instructions: Sequence[Instruction], root: int) -> set[int]:
    """The numbers of the products that ``root`` is computed from."""
    behind = _behind(instructions, root, None)
    return {instructions[p].attr for p in behind if instructions[p].op == "contract"}


def _behind(instructions: Sequence[Instruction], root: int, without: int | None) -> set[int]:
    found, stack = set(), [root]
    while stack:
        position = stack.pop()
        if position not in found:
            found.add(position)
            stack.extend(() if position == without else instructions[position].args)
    return found


def _kept(instructions: Sequence[Instruction], root: int) -> int:
    """The last value through which alone ``root`` depends on the first product, and which no other product reaches."""
    for position in range(root, -1, -1):
        instruction = instructions[position]
        if instruction.dtype == FLOAT and products_behind(instructions, position) == {0}:
            left = _behind(instructions, root, position)
            if position in left and not any(
                instructions[p].op == "contract" and instructions[p].attr == 0 for p in left - {position}
            ):
                return position
    raise AssertionError("the gradient of scores depends on the scores")


class _Writer:
    """Rewritten instructions, none of them twice, with the level of each."""

    def __init__(self, kinds: Mapping[int, str]):
        self.kinds = kinds
        self.found: list[Instruction] = []
        self.levels: list[Level] = []
        self._known: dict[tuple[object, ...], int] = {}

    def emit(self, instruction: Instruction) -> int:
        key = identity_of(instruction)
        if key not in self._known:
            self._known[key] = len(self.found)
            self.found.append(instruction)
            self.levels.append(self._level(instruction))
        return self._known[key]

    def _level(self, instruction: Instruction) -> Level:
        if instruction.op == "contract":
            return BOTH
        if instruction.op in ("load", "iota"):
            kind = self.kinds[instruction.attr]
            return BOTH if kind == "both" else frozenset(() if kind == "task" else (kind,))
        return frozenset().union(*(self.levels[argument] for argument in instruction.args))

    def rewritten(self, instructions: Sequence[Instruction]) -> list[int]:
        """Where the values of ``instructions`` are."""
        at: list[int] = []
        for instruction in instructions:
            moved = replace(instruction, args=tuple(at[argument] for argument in instruction.args))
            at.append(self._rewritten(moved))
        return at

    def _rewritten(self, moved: Instruction) -> int:
        if moved.dtype != FLOAT or self._level(moved) != BOTH:
            return self.emit(moved)
        if moved.op == "exp":
            factor = self.emit(Instruction("const", (), FLOAT, math.log2(math.e)))
            return self.emit(replace(moved, op="exp2_normal", args=(self._times(moved.args[0], factor),)))
        if moved.op == "mul":
            for value, factor in (moved.args, moved.args[::-1]):
                if not self.levels[factor] and self._cost(value) == 0:
                    return self._times(value, factor)
        return self.emit(moved)

    def _cost(self, position: int) -> int:
        """Instructions for each pair of rows that a factor of the value costs, where it is multiplied into what the
        value is computed from."""
        instruction = self.found[position]
        if self.levels[position] != BOTH:
            return 0
        if instruction.op == "mul":
            return min(map(self._cost, instruction.args))
        if instruction.op in ("add", "sub"):
            return sum(map(self._cost, instruction.args))
        if instruction.op == "where":
            return sum(map(self._cost, instruction.args[1:]))
        return 1

    def _times(self, position: int, factor: int) -> int:
        instruction = self.found[position]
        other = self.found[factor]
        if instruction.op == other.op == "const":
            return self.emit(Instruction("const", (), FLOAT, instruction.attr * other.attr))
        if (
            self.levels[position] == BOTH
            and self._cost(position) <= 1
            and instruction.op in ("mul", "add", "sub", "where")
        ):
            arguments = list(instruction.args)
            if instruction.op == "mul":
                cheapest = min((0, 1), key=lambda number: self._cost(arguments[number]))
                if self._cost(arguments[cheapest]) == 0:
                    arguments[cheapest] = self._times(arguments[cheapest], factor)
                    return self.emit(replace(instruction, args=tuple(arguments)))
            else:
                first = 1 if instruction.op == "where" else 0
                arguments[first:] = [self._times(argument, factor) for argument in arguments[first:]]
                return self.emit(replace(instruction, args=tuple(arguments)))
        return self.emit(Instruction("mul", (position, factor), FLOAT, None, instruction.location))
