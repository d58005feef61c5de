"""Decides which inputs of a program may share memory with a result: those that no kernel reads after the result is
written.

A kernel reads the operands of an element (or of a row) before it stores that element, and different elements are
computed in any order. So an input may be the memory of a result if, in the kernel that writes the result, it is read
only at the element that is written, and no later kernel reads it. ``x + 1`` reads ``x`` so; ``x + x.T``, ``x - x[:1]``
and a product do not. The question is about addresses, so it is asked of the strides of one call.

Neighbours: ``lowering.py`` asks for calls with ``out=``; ``partition.py`` decides by the same rule, before strides are
known, whether an argument that is updated can be written by the kernel that computes its new value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jitgen.ir import symbols
from jitgen.ir.body import WHOLE, Body, Operand, behind
from jitgen.ir.program import Program
from jitgen.ir.views import Memory, NotViewable, Strided
from jitgen.kernel.operands import locate


def read_elsewhere(
    program: Program, environment: Mapping[str, Any], memories: Sequence[Memory], result: int
) -> frozenset[int]:
    """Returns the inputs that must not share memory with result ``result``.

    Any other input may be the same memory: of the result's dtype, sizes and strides, and at its address.

    Args:
        environment: a value for every symbol.
        memories: of every buffer.
    """
    buffer = len(program.inputs) + len(program.temporaries) + result
    memory = memories[buffer].view
    inputs: set[int] = set()
    written = False
    for kernel in program.kernels:
        writes = any(o.kind == "store" and o.buffer == buffer for body in kernel.bodies for o in body.operands)
        for body in kernel.bodies:
            stored = _stored(body, buffer, memory, environment) if writes and not written else set()
            taken = _taken(body)
            for number, operand in enumerate(body.operands) if writes or written else ():
                if operand.buffer is None or operand.buffer >= len(program.inputs):
                    continue
                if operand.kind in WHOLE or number in taken or _elements(operand, memory, environment) not in stored:
                    inputs.add(operand.buffer)
        written = written or writes
    return frozenset(inputs)


def _stored(body: Body, buffer: int, memory: Strided, environment: Mapping[str, Any]) -> set[Strided | None]:
    """Returns the elements of ``memory`` that ``body`` stores, each after it has read that element of other tensors; of
    a kernel that a user wrote, nobody knows when it reads what."""
    from jitgen.families.copies import launches

    if launches(body):
        return set()
    stores = [operand for operand in body.operands if operand.kind == "store" and operand.buffer == buffer]
    return {_elements(operand, memory, environment) for operand in stores} - {None}


def _taken(body: Body) -> set[int]:
    """Returns the operands of which ``body`` reads elements at the places of ranks, behind ranks that it has stored."""
    rows = [i.args[0] for i in body.instructions if i.op == "taken"]
    return {body.instructions[p].attr for p in behind(body.instructions, rows) if body.instructions[p].op == "load"}


def _elements(operand: Operand, memory: Strided, environment: Mapping[str, Any]) -> Strided | None:
    """Returns the elements of ``memory`` that a body reads or writes through ``operand``, in the order of its iteration
    space; None if the operand has other sizes, or no strides describe what it sees."""
    if symbols.evaluated(operand.shape, environment) != memory.sizes:
        return None
    try:
        view = locate(operand.movements, memory, environment)
    except NotViewable:
        return None
    # A dimension of one element has no stride.
    strides = (0 if size == 1 else stride for size, stride in zip(view.sizes, view.strides, strict=True))
    return Strided(view.sizes, tuple(strides), view.offset)
