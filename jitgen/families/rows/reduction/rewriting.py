"""Rewrites the body of a row kernel, instruction by instruction: the base of ``online.py`` and ``powers.py``."""

from __future__ import annotations

import abc
import math
from dataclasses import replace

from jitgen.ir import symbols
from jitgen.ir.body import Instruction, identity_of, placed, with_all_behind
from jitgen.ir.program import Kernel


class Rewriting(abc.ABC):
    """Emits the instructions of a body again, in order, with others in place of those that ``rewrite`` replaces.

    Attributes:
        source: the body that is rewritten; ``instructions`` are its instructions.
        emitted: the instructions of the new body.
        positions: where an instruction was emitted, by what identifies it: each is emitted once.
        at: where each instruction of the source, or what replaces it, was emitted.
    """

    def __init__(self, kernel: Kernel):
        (self.source,) = kernel.bodies
        self.kernel = kernel
        self.instructions = self.source.instructions
        self.emitted: list[Instruction] = []
        self.positions: dict[tuple[object, ...], int] = {}
        self.at: dict[int, int] = {}

    @abc.abstractmethod
    def rewrite(self, position: int) -> int | None:
        """Returns the position of what replaces the source's instruction at ``position``; None where that stays."""

    def kernel_rewritten(self) -> Kernel:
        """Returns the rewritten kernel, with the same operands, results and parameters, without what no result depends
        on."""
        for position, instruction in enumerate(self.instructions):
            replacement = self.rewrite(position)
            if replacement is None:
                replacement = self.emit_instruction(
                    replace(instruction, args=tuple(self.at[a] for a in instruction.args))
                )
            self.at[position] = replacement
        stores = [position for position, instruction in enumerate(self.emitted) if instruction.op == "store"]
        alive = with_all_behind(self.emitted, stores)
        return replace(self.kernel, bodies=(replace(self.source, instructions=alive),))

    def emit_instruction(self, instruction: Instruction) -> int:
        """Returns the position of ``instruction``, whose arguments are positions among ``emitted``; emitted unless it
        was."""
        key = identity_of(instruction)
        if key not in self.positions:
            self.positions[key] = len(self.emitted)
            self.emitted.append(placed(instruction, self.emitted, self.source.operands))
        return self.positions[key]

    def emit(self, like: Instruction, op: str, *args: int, dtype: str | None = None, attr: object = None) -> int:
        """Emits ``op``, with the dtype (unless another is asked for) and the user's line of ``like``, and returns its
        position."""
        return self.emit_instruction(Instruction(op, args, dtype or like.dtype, attr, like.location))

    def emit_finite(self, like: Instruction, value: int) -> int:
        """Emits the test whether the value at position ``value`` is finite, and returns its position."""
        infinity = self.emit(like, "const", attr=math.inf)
        return self.emit(like, "lt", self.emit(like, "abs", value), infinity, dtype="bool")

    def is_(self, position: int, op: str, dtype: str, attr: object = None) -> bool:
        """Returns whether the source's instruction at ``position`` is ``op`` with this dtype and ``attr``."""
        instruction = self.instructions[position]
        return (instruction.op, instruction.dtype, instruction.attr) == (op, dtype, attr)

    def mean_of(self, position: int) -> int:
        """Returns the position of the element value whose sum, divided by the length, is at ``position``; else -1."""
        mean = self.instructions[position]
        if not self.is_(position, "div", mean.dtype):
            return -1
        total, count = mean.args
        if not self.is_(total, "reduce", mean.dtype, "sum") or not self._is_length(count):
            return -1
        (value,) = self.instructions[total].args
        return -1 if self.instructions[value].row else value

    def _is_length(self, position: int) -> bool:
        """Returns whether a value is the number of a row's elements."""
        instruction = self.instructions[position]
        length = symbols.mul(symbols.product(self.source.shape[-self.source.row_rank :]), 1.0)
        if instruction.op == "scalar":
            return self.kernel.scalars[instruction.attr] == (length, instruction.dtype)
        return instruction.op == "const" and instruction.attr == length
