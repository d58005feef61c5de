"""Derives facts about a row kernel's numbers from its instructions: their signs, and which results a NaN reaches.

``cpp.py`` asks, to leave out operations that could not change a result.
"""

from __future__ import annotations

from collections.abc import Sequence

from jitgen.ir.body import Body, Instruction

_ARITHMETIC = {"add", "sub", "mul", "div", "fma", "neg", "sqrt", "rsqrt", "reciprocal", "exp", "log", "round_to"}
"""Operations whose result is NaN where an operand is NaN: either that operand or the canonical NaN."""
_COPIES = {"load", "const", "scalar", "store"}


def is_exp_below(instructions: Sequence[Instruction], position: int) -> bool:
    """Returns whether a value is exp(v - max v) for the elements v of a row, so that the exponent is not above 0."""
    return _maximum_under(instructions, position) is not None


def _maximum_under(instructions: Sequence[Instruction], position: int) -> int | None:
    """Returns the position of the maximum of v if exp(v - max v) is at ``position``; else None."""
    if instructions[position].op != "exp":
        return None
    argument = instructions[instructions[position].args[0]]
    if argument.op != "sub":
        return None
    element, top = argument.args
    maximum = instructions[top]
    return top if (maximum.op, maximum.attr, maximum.args) == ("reduce", "max", (element,)) else None


def maxima_of_numbers(instructions: Sequence[Instruction]) -> set[int]:
    """Returns the maxima that may drop NaN, as softmax's may.

    Where an element v is NaN, so is the sum of exp(v - max v) whatever the maximum is, and with it every result.
    """
    sums: dict[int, set[int]] = {}
    for position, instruction in enumerate(instructions):
        if (instruction.op, instruction.attr) == ("reduce", "sum"):
            maximum = _maximum_under(instructions, instruction.args[0])
            if maximum is not None:
                sums.setdefault(maximum, set()).add(position)
    return {maximum for maximum, positions in sums.items() if _reach_every_store(instructions, positions)}


def _reach_every_store(instructions: Sequence[Instruction], positions: set[int]) -> bool:
    """Returns whether NaN at all of ``positions`` makes every result NaN."""
    reached = set(positions)
    for position, instruction in enumerate(instructions):
        if instruction.op in _ARITHMETIC and not reached.isdisjoint(instruction.args):
            reached.add(position)
    return all(reached.issuperset(i.args) for i in instructions if i.op == "store")


def has_narrow_nan(body: Body) -> bool:
    """Returns whether the lower half of every NaN in ``body`` is 0, as a bfloat16's is, so that rounding leaves it as
    it is.

    NaN is then loaded as bfloat16, made canonical, or handed on by arithmetic. Run-time scalars do not count; the
    kernel makes them so.
    """
    operands = all(operand.dtype == "bfloat16" for operand in body.operands)
    return operands and all(map(_hands_on, body.instructions))


def _hands_on(instruction: Instruction) -> bool:
    """Returns whether a NaN result is the canonical one or that of an operand."""
    reduction = instruction.op == "reduce" and instruction.attr in ("sum", "max", "min")
    return instruction.dtype == "float32" and (reduction or instruction.op in _ARITHMETIC | _COPIES)
