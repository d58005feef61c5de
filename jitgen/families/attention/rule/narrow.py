"""Narrows index arithmetic of a rule to 32 bits where all values provably fit.

torch's indices are int64. A vector has half as many of these, and AVX2 converts none to float. Where the values of an
instruction are known to be within 32 bits for every call, the same number is computed as int32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jitgen.ir import intervals
from jitgen.ir.body import Instruction
from jitgen.ir.intervals import Range

MOST_INDEX = 2**30
"""Indices of a kernel are below it: ``layout`` refuses larger sizes."""
_LOW, _HIGH = -(2**31), 2**31 - 1
"""The range of int32."""

_COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")


def narrowed(instructions: Sequence[Instruction]) -> tuple[Instruction, ...]:
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
        range_ = _range(instruction, [ranges[a] for a in arguments])
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


def _range(instruction: Instruction, arguments: Sequence[Range | None]) -> Range | None:
    """Returns the range of an int64 ``instruction``; None where it is not known, and for other dtypes."""
    if instruction.dtype != "int64":
        return None
    if instruction.op == "iota":
        return 0, MOST_INDEX
    if instruction.op == "const":
        return int(instruction.attr), int(instruction.attr)
    return intervals.of_result(instruction.op, instruction.dtype, arguments)
