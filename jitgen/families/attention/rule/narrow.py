"""Narrows index arithmetic of a rule to 32 bits where all values provably fit.

torch's indices are int64. A vector has half as many of these, and AVX2 converts none to float. Where the values of an
instruction are known to be within 32 bits for every call, the same number is computed as int32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from jitgen.ir.body import Instruction, Operand

MOST_INDEX = 2**30
"""Indices of a kernel are below it: ``layout`` refuses larger sizes."""
_LOW, _HIGH = -(2**31), 2**31 - 1
"""The range of int32."""

Range = tuple[int, int]


def _products(a: Range, b: Range) -> Range:
    corners = [x * y for x in a for y in b]
    return min(corners), max(corners)


def _quotients(a: Range, b: Range) -> Range | None:
    return (a[0] // b[0], a[1] // b[0]) if b[0] == b[1] > 0 else None


_RULES: dict[str, Callable[..., Range | None]] = {
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "mul": _products,
    "neg": lambda a: (-a[1], -a[0]),
    "abs": lambda a: (0, max(abs(a[0]), abs(a[1]))),
    "minimum": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "maximum": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "floor_divide": _quotients,
    "remainder": lambda a, b: (0, b[0] - 1) if b[0] == b[1] > 0 else None,
}
_COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")


def narrowed(instructions: Sequence[Instruction], operands: Sequence[Operand]) -> tuple[Instruction, ...]:
    """Computes int64 values of ``instructions`` as int32 where they fit, cast back where they are combined with
    others."""
    rewritten: list[Instruction] = []
    ranges: dict[int, Range | None] = {}
    at: dict[int, int] = {}
    wide: dict[int, int] = {}

    def emit(instruction: Instruction, range_: Range | None) -> int:
        rewritten.append(instruction)
        ranges[len(rewritten) - 1] = range_
        return len(rewritten) - 1

    def widened(position: int) -> int:
        if rewritten[position].dtype != "int32" or ranges[position] is None:
            return position
        if position not in wide:
            wide[position] = emit(Instruction("cast", (position,), "int64"), None)
        return wide[position]

    for number, instruction in enumerate(instructions):
        arguments = tuple(at[argument] for argument in instruction.args)
        range_ = _range(instruction, [ranges[a] for a in arguments], operands)
        # A value is narrow if it and all that it is computed from fit 32 bits.
        if instruction.dtype == "int64" and range_ is not None and range_[0] >= _LOW and range_[1] <= _HIGH:
            at[number] = emit(replace(instruction, args=arguments, dtype="int32"), range_)
            continue
        wanted = [i for i in arguments if rewritten[i].dtype == "int32" and ranges[i] is not None]
        kept = instruction.op == "cast" or (instruction.op in _COMPARED and len(wanted) == len(arguments))
        if not kept and instruction.op != "cast":
            arguments = tuple(map(widened, arguments))
        at[number] = emit(replace(instruction, args=arguments), range_ if instruction.dtype != "int64" else None)
    return tuple(rewritten)


def _range(instruction: Instruction, arguments: Sequence[Range | None], operands: Sequence[Operand]) -> Range | None:
    """Returns the values of an int64 ``instruction``; of a narrower integer the values that its dtype has; None:
    unknown."""
    if instruction.dtype != "int64":
        return None
    if instruction.op == "iota":
        return 0, MOST_INDEX
    if instruction.op == "const":
        return int(instruction.attr), int(instruction.attr)
    if instruction.op in _RULES and all(argument is not None for argument in arguments):
        return _RULES[instruction.op](*arguments)
    return None
