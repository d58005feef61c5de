"""Decides which values a resident row keeps in registers from pass to pass: pure functions of a body.

A value that a later pass needs is either *resident* in registers, or *recomputed* from values that are. What is
resident says how many bytes of registers one element takes, by which schedules decide how many threads share a row.
"""

from __future__ import annotations

from dataclasses import dataclass

from jitgen.ir.body import Body, elements_under
from jitgen.ir.ops import OPS
from jitgen.ir.program import Kernel
from jitgen.kernel.operands import item_size

EXPENSIVE_FLOPS = 8
"""Operations (by the weights of ``ir/ops.py``) from which on a value is resident and not recomputed, where registers
allow."""
FEW_ELEMENTS = 32
"""Elements of a thread up to which registers allow that. A float32 value takes twice the registers of a 16-bit element:
of more elements, recomputing it costs less."""
REGISTER_BYTES = 4
"""Bytes of a register."""


def passes(kernel: Kernel) -> int:
    """Returns how many passes over the row there are: one for each stage in which elements are reduced or stored."""
    (body,) = kernel.bodies
    return _last_pass(body) + 1


def _last_pass(body: Body) -> int:
    return max(
        instruction.stage - (instruction.op == "reduce")
        for instruction in body.instructions
        if instruction.op == "reduce" or (instruction.op == "store" and not instruction.row)
    )


def deferred_operands(body: Body) -> tuple[int, ...]:
    """Returns the operands, by index, whose elements only a later pass than the first needs."""
    first = first_needed(body)
    deferred = (body.instructions[position] for position, number in first.items() if number > 0)
    return tuple(sorted(instruction.attr for instruction in deferred if instruction.op == "load"))


def first_needed(body: Body) -> dict[int, int]:
    """Returns the pass in which each element instruction is first needed: the earliest pass of its users.

    Elements are stored in the last pass: a result may lie where an operand does, which earlier passes still read.
    """
    first: dict[int, int] = {}
    last = _last_pass(body)
    for position in reversed(range(len(body.instructions))):
        instruction = body.instructions[position]
        if instruction.row and instruction.op != "reduce":
            continue
        here = instruction.stage - 1 if instruction.op == "reduce" else first.get(position, instruction.stage)
        if instruction.op == "store":
            here = last
        first[position] = here
        for argument in instruction.args:
            if not body.instructions[argument].row:
                first[argument] = min(first.get(argument, here), here)
    return first


@dataclass(frozen=True)
class Residency:
    """Says what a resident row keeps.

    Attributes:
        resident: for each pass, the positions of values of earlier passes that stay in registers for it.
        recomputed: for each pass, the positions of values of earlier passes that it recomputes from those, in order.
        bytes_per_element: registers that one element takes between two passes, in bytes, where it takes most.
        values_per_element: how many values those are, at most.
    """

    resident: tuple[frozenset[int], ...]
    recomputed: tuple[tuple[int, ...], ...]
    bytes_per_element: int
    values_per_element: int


def residency_of_thread(body: Body, elements: int) -> Residency:
    """Returns the residency of a row of which each thread has ``elements``."""
    return residency(body, EXPENSIVE_FLOPS if elements <= FEW_ELEMENTS else None)


def residency(body: Body, expensive: int | None) -> Residency:
    """Returns the residency that takes the fewest registers, but for values of ``expensive`` operations or more, which
    are kept.

    Loaded elements stay resident as they are stored (half a register for 16 bits), and what is computed from them is
    recomputed, unless keeping the result instead of its operands takes fewer registers (a sum of two float32 operands),
    or as many and it is costly (the exponential of one), or it takes ``expensive`` operations (None: no number does).
    """
    first = first_needed(body)
    passes = range(max(first.values()) + 1)
    resident: list[set[int]] = [set() for _ in passes]
    recomputed: list[set[int]] = [set() for _ in passes]
    for number in passes:
        here = [position for position, needed in first.items() if needed == number]
        used = {argument for p in here for argument in body.instructions[p].args}
        waiting = [a for a in used if not body.instructions[a].row and first[a] < number]
        while waiting:
            position = waiting.pop()
            if _is_resident(body, position, expensive):
                resident[number].add(position)
            elif position not in recomputed[number]:
                recomputed[number].add(position)
                waiting += [a for a in body.instructions[position].args if not body.instructions[a].row]
    alive = [{p for later in resident[number:] for p in later if first[p] < number} for number in passes]
    return Residency(
        tuple(map(frozenset, resident)),
        tuple(tuple(sorted(positions)) for positions in recomputed),
        max(1, *(sum(_size(body, position) for position in positions) for positions in alive)),
        max(map(len, alive)),
    )


def _is_resident(body: Body, position: int, expensive: int | None) -> bool:
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
    """Returns the bytes of registers that keep the value at ``position``."""
    instruction = body.instructions[position]
    if instruction.op == "iota":
        return 0  # computed from the column wherever it is needed
    if instruction.op == "load":
        return item_size(body.operands[instruction.attr].dtype)
    return max(REGISTER_BYTES, item_size(instruction.dtype))
