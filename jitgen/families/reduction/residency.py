"""What a resident row keeps from pass to pass: pure functions of a body."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jitgen.families.layout import item_size
from jitgen.ir.body import Body
from jitgen.ir.ops import OPS
from jitgen.ir.program import Kernel

EXPENSIVE_FLOPS = 8
"""From here on a value is kept rather than computed again, where there is room for it."""
FEW_ELEMENTS = 32
"""Elements of a thread up to which there is room. A kept float takes twice the room of a 16-bit element: of more
elements, computing it again is the better half."""
REGISTER_BYTES = 4


def passes(kernel: Kernel) -> int:
    """Passes over the row: one for each stage in which elements are reduced or stored."""
    (body,) = kernel.bodies
    return _last_pass(body) + 1


def _last_pass(body: Body) -> int:
    return max(
        instruction.stage - (instruction.op == "reduce")
        for instruction in body.instructions
        if instruction.op == "reduce" or (instruction.op == "store" and not instruction.row)
    )


def late_operands(body: Body) -> tuple[int, ...]:
    """The operands whose elements only a later pass than the first needs, by index."""
    when = first_needed(body)
    late = (body.instructions[position] for position, number in when.items() if number > 0)
    return tuple(sorted(instruction.attr for instruction in late if instruction.op == "load"))


def first_needed(body: Body) -> dict[int, int]:
    """The pass each element instruction is first needed in: as late as its earliest user allows.

    Elements are stored in the last pass: a result may lie where an operand does, which earlier passes still read.
    """
    when: dict[int, int] = {}
    last = _last_pass(body)
    for position in reversed(range(len(body.instructions))):
        instruction = body.instructions[position]
        if instruction.row and instruction.op != "reduce":
            continue
        here = instruction.stage - 1 if instruction.op == "reduce" else when.get(position, instruction.stage)
        if instruction.op == "store":
            here = last
        when[position] = here
        for argument in instruction.args:
            if not body.instructions[argument].row:
                when[argument] = min(when.get(argument, here), here)
    return when


def elements_under(body: Body, roots: Sequence[int]) -> set[int]:
    """Element instructions that ``roots`` are computed from."""
    found: set[int] = set()
    stack = list(roots)
    while stack:
        for argument in body.instructions[stack.pop()].args:
            if not body.instructions[argument].row and argument not in found:
                found.add(argument)
                stack.append(argument)
    return found


@dataclass(frozen=True)
class Residency:
    """For each pass, by position: values ``kept`` for it from earlier passes, and cheap ones ``rebuilt`` from those.

    ``bytes`` is what one element of the row takes in registers between passes, where it takes most, and ``values`` how
    many values those are at most.
    """

    kept: tuple[frozenset[int], ...]
    rebuilt: tuple[tuple[int, ...], ...]
    bytes: int
    values: int


def held(body: Body, elements: int) -> Residency:
    """The residency of a row of which each thread holds ``elements``."""
    return residency(body, EXPENSIVE_FLOPS if elements <= FEW_ELEMENTS else None)


def residency(body: Body, expensive: int | None) -> Residency:
    """Keep loads as they are stored (half a register for 16 bits) and what is cheaper kept; the rest follows from them.

    A value is kept instead of what it is computed from when that takes more room (a sum of two float32 operands), or
    as much and it is expensive to compute (the exponential of one), or when it costs ``expensive`` operations or more
    (None: whatever it costs).
    """
    when = first_needed(body)
    passes = range(max(when.values()) + 1)
    kept: list[set[int]] = [set() for _ in passes]
    rebuilt: list[set[int]] = [set() for _ in passes]
    for number in passes:
        here = [position for position, first in when.items() if first == number]
        used = {argument for p in here for argument in body.instructions[p].args}
        waiting = [a for a in used if not body.instructions[a].row and when[a] < number]
        while waiting:
            position = waiting.pop()
            if _is_kept(body, position, expensive):
                kept[number].add(position)
            elif position not in rebuilt[number]:
                rebuilt[number].add(position)
                waiting += [a for a in body.instructions[position].args if not body.instructions[a].row]
    between = [{p for part in kept[number:] for p in part if when[p] < number} for number in passes]
    return Residency(
        tuple(map(frozenset, kept)),
        tuple(tuple(sorted(part)) for part in rebuilt),
        max(1, *(sum(_size(body, position) for position in part) for part in between)),
        max(map(len, between)),
    )


def _is_kept(body: Body, position: int, expensive: int | None) -> bool:
    instruction = body.instructions[position]
    if instruction.op in ("load", "iota"):
        return True
    flops = OPS[instruction.op].flops if instruction.op in OPS else 0
    if expensive is not None and flops >= expensive:
        return True
    sources = [p for p in elements_under(body, [position]) if body.instructions[p].op == "load"]
    saved = sum(_size(body, source) for source in sources) - _size(body, position)
    return saved > 0 or (saved == 0 and flops >= EXPENSIVE_FLOPS)


def _size(body: Body, position: int) -> int:
    instruction = body.instructions[position]
    if instruction.op == "iota":
        return 0  # computed from the column wherever it is needed
    if instruction.op == "load":
        return item_size(body.operands[instruction.attr].dtype)
    return max(REGISTER_BYTES, item_size(instruction.dtype))
