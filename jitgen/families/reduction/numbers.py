"""What can be known of the numbers in a row kernel: signs, and where a NaN goes. Functions of its instructions only.

``cpp.py`` asks, to leave out operations that could not change a result.
"""

from __future__ import annotations

from collections.abc import Sequence

from jitgen.ir.body import Body, Instruction

_ARITHMETIC = {"add", "sub", "mul", "div", "fma", "neg", "sqrt", "rsqrt", "reciprocal", "exp", "log", "round_to"}
"""Operations whose result is NaN where an operand is: that operand's NaN, or the canonical one."""
_LEAVES = {"load", "const", "scalar", "store"}


def is_exp_below(instructions: Sequence[Instruction], position: int) -> bool:
    """Whether it is the exponential of an element less the row's maximum, which is not above 0."""
    return _maximum_under(instructions, position) is not None


def _maximum_under(instructions: Sequence[Instruction], position: int) -> int | None:
    """The position of the maximum m, where at ``position`` is exp(v - m) for its own elements v."""
    if instructions[position].op != "exp":
        return None
    argument = instructions[instructions[position].args[0]]
    if argument.op != "sub":
        return None
    element, top = argument.args
    maximum = instructions[top]
    return top if (maximum.op, maximum.attr, maximum.args) == ("reduce", "max", (element,)) else None


def maxima_of_numbers(instructions: Sequence[Instruction]) -> set[int]:
    """Maxima that may drop NaN, as softmax's may: where a v is NaN, so is the sum of exp(v - max v) anyway, and with it
    every result of the kernel."""
    sums: dict[int, set[int]] = {}
    for position, instruction in enumerate(instructions):
        if (instruction.op, instruction.attr) == ("reduce", "sum"):
            maximum = _maximum_under(instructions, instruction.args[0])
            if maximum is not None:
                sums.setdefault(maximum, set()).add(position)
    return {maximum for maximum, of in sums.items() if _reach_every_store(instructions, of)}


def _reach_every_store(instructions: Sequence[Instruction], positions: set[int]) -> bool:
    """Whether a NaN at every one of ``positions`` makes every result NaN."""
    reached = set(positions)
    for position, instruction in enumerate(instructions):
        if instruction.op in _ARITHMETIC and not reached.isdisjoint(instruction.args):
            reached.add(position)
    return all(reached.issuperset(i.args) for i in instructions if i.op == "store")


def has_narrow_nan(body: Body) -> bool:
    """Whether every NaN among the values of ``body`` is a bfloat16, its lower half 0, so that rounding to bfloat16 adds
    nothing to it: NaN is read as that, made as that, and arithmetic hands on what it reads. Run-time scalars aside."""
    operands = all(operand.dtype == "bfloat16" for operand in body.operands)
    return operands and all(map(_hands_on, body.instructions))


def _hands_on(instruction: Instruction) -> bool:
    reduction = instruction.op == "reduce" and instruction.attr in ("sum", "max", "min")
    return instruction.dtype == "float32" and (reduction or instruction.op in _ARITHMETIC | _LEAVES)
