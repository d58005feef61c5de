"""Splits keys over temporaries: few rows that see many keys become two kernels, so that more programs share the keys.

A decoder's step has one row for each head, and a GPU more places for programs than there are heads. Each program walks
one range of the keys and stores what it has: the products with exp(score - row_max), the greatest score and the sum. A
pointwise kernel behind it joins the ranges in their order and computes the results, so that equal calls give equal bits
("Flash-Decoding", Dao et al., 2023). On a CPU the threads of a call do the same within one kernel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jitgen.device import Device
from jitgen.families.attention.forward.layout import KEYS
from jitgen.families.attention.forward.schedule import splits
from jitgen.families.family import ANY_FAMILY, KernelRewrite
from jitgen.ir import symbols
from jitgen.ir.body import Body, Instruction, Operand, behind
from jitgen.ir.graph import Shape
from jitgen.ir.program import Buffer, Kernel
from jitgen.ir.regions import Stage, grid_axes
from jitgen.ir.views import NotViewable, Strided, contiguous_strides
from jitgen.kernel.operands import Call, locate

READ = ("query", "score", *KEYS)
"""Kinds of operand that the walk over the keys reads; others are the results' own."""
DIALECTS = ("triton", "cuda")
"""Dialects whose kernels walk one range of the keys each."""
DTYPE = "float32"
"""In which sums and values of a row are kept."""


def split_keys(kernel: Kernel, call: Call, device: Device) -> KernelRewrite | None:
    """Returns ``kernel`` as two kernels if its rows are few and its keys many at the sizes of this call; else None."""
    (body,) = kernel.bodies
    if device.batch_invariant:
        return None
    if device.dialect not in DIALECTS or any(
        i.dtype != DTYPE for i in body.instructions if i.op in ("contract", "reduce")
    ):
        return None
    rows = symbols.evaluate(body.shape[-2], call.environment)
    keys = symbols.evaluate(body.contractions[1].length, call.environment)
    count = splits(_tasks(body, call.environment), rows, keys, device.dialect)
    if count == 1:
        return None
    column = (*body.shape[:-1], 1)
    shapes = [(count, *body.shape), (count, *column), (count, *column)]

    def kernels(kernel: Kernel, first: int) -> tuple[Kernel, ...]:
        (body,) = kernel.bodies
        numbered = [Operand("load", first + number, DTYPE, shape) for number, shape in enumerate(shapes)]
        walk = replace(kernel, bodies=(_walk(body, numbered, count),))
        stores = [[i for i in body.stores if body.operands[i].row is row] for row in (False, True)]
        joined = [_joined(body, numbered, count, group) for group in stores if group]
        names = [f"{kernel.name}_join{number or ''}" for number in range(len(joined))]
        joins = (
            replace(kernel, name=name, family=ANY_FAMILY, bodies=(body_,))
            for name, body_ in zip(names, joined, strict=True)
        )
        return walk, *joins

    return KernelRewrite(tuple(Buffer(DTYPE, shape, contiguous=True) for shape in shapes), kernels)


def _tasks(body: Body, environment: Mapping[str, Any]) -> int:
    """Counts the batch and heads of ``body`` that have keys and values of their own: others' rows are packed into
    tiles."""
    lead = [symbols.evaluate(size, environment) for size in body.shape[:-2]]
    own = [False] * len(lead)
    for operand in body.operands:
        if operand.kind not in KEYS:
            continue
        sizes = symbols.evaluated(operand.shape, environment)
        base = Strided(sizes, contiguous_strides(sizes))
        try:
            strides = locate(operand.movements, base, environment).strides
        except NotViewable:
            return math.prod(lead)
        own = [differs or strides[dim] != 0 for dim, differs in enumerate(own)]
    return math.prod(size for size, differs in zip(lead, own, strict=True) if differs)


def _range(temporary: Operand, kind: str, number: int, shape: Shape | None = None) -> Operand:
    """Spreads the values of range ``number`` of a temporary to ``shape``."""
    one = temporary.shape[1:]
    movements: list[Any] = [(("slice", 0, number, 1), (1, *one)), (("squeeze", 0), one)]
    if shape is not None and shape != one:
        movements.append((("expand",), shape))
    return replace(temporary, kind=kind, movements=tuple(movements), row=False)


def _walk(body: Body, temporaries: Sequence[Operand], count: int) -> Body:
    """Makes the contractions of ``body`` over ranges of keys, whose products and row values are stored as they are."""
    used = [index for index, operand in enumerate(body.operands) if operand.kind in READ]
    number = {index: position for position, index in enumerate(used)}

    def renumbered(read: Sequence[Instruction]) -> tuple[Instruction, ...]:
        return tuple(replace(i, attr=number[i.attr]) if i.op in ("load", "iota", "gather") else i for i in read)

    query, value = (
        replace(c, x=renumbered(c.x), w=renumbered(c.w), weight=tuple(number[index] for index in c.weight))
        for c in body.contractions
    )
    operands = [body.operands[index] for index in used]
    instructions: list[Instruction] = []
    sources = (("contract", 1, False), ("reduce", "max", True), ("reduce", "sum", True))
    for (op, attr, row), temporary in zip(sources, temporaries, strict=True):
        instructions.append(Instruction(op, (), DTYPE, attr, row=row))
        instructions.append(Instruction("store", (len(instructions) - 1,), DTYPE, len(operands), row=row))
        operands.append(replace(_range(temporary, "store", 0), row=row))
    contractions = (query, replace(value, k_splits=count))
    return Body(body.axes, body.stages, tuple(operands), tuple(instructions), contractions)


def _joined(body: Body, temporaries: Sequence[Operand], count: int, stores: Sequence[int]) -> Body:
    """Computes what ``body`` stores to its operands ``stores`` from all ranges."""
    rows = body.operands[stores[0]].row
    shape = (*body.shape[:-1], 1) if rows else body.shape
    instructions: list[Instruction] = []
    operands: list[Operand] = []

    def emit(op: str, *args: int, dtype: str = DTYPE, attr: Any = None) -> int:
        instructions.append(Instruction(op, args, dtype, attr))
        return len(instructions) - 1

    def load(operand: Operand) -> int:
        operands.append(operand)
        return emit("load", attr=len(operands) - 1)

    sums, row_maxima, row_sums = (
        []
        if temporary is temporaries[0] and rows
        else [load(_range(temporary, "load", s, shape)) for s in range(count)]
        for temporary in temporaries
    )
    row_max = row_maxima[0]
    for other in row_maxima[1:]:
        row_max = emit("maximum", row_max, other)
    # Without any score in a row, sums are zero, and not NaN.
    none = emit("eq", row_max, emit("const", attr=float("-inf")), dtype="bool")
    base = emit("where", none, emit("const", attr=0.0), row_max)
    factors = [emit("exp", emit("sub", maximum, base)) for maximum in row_maxima]

    def joined(values: Sequence[int]) -> int:
        result = emit("mul", values[0], factors[0])
        for value, factor in zip(values[1:], factors[1:], strict=True):
            result = emit("add", result, emit("mul", value, factor))
        return result

    row_values = {"max": row_max, "sum": joined(row_sums)}
    product = joined(sums) if sums else -1
    at: dict[int, int] = {}
    numbers: dict[int, int] = {}
    stored = [p for p, i in enumerate(body.instructions) if i.op == "store" and i.attr in stores]
    needed = behind(body.instructions, stored)
    for position, instruction in enumerate(body.instructions):
        if position not in needed:
            continue
        if instruction.op in ("contract", "reduce"):
            at[position] = product if instruction.op == "contract" else row_values[instruction.attr]
            continue
        attr = instruction.attr
        if instruction.op in ("load", "iota", "store"):
            if attr not in numbers:
                numbers[attr] = len(operands)
                operands.append(replace(body.operands[attr], row=False))
            attr = numbers[attr]
        arguments = tuple(at[argument] for argument in instruction.args)
        at[position] = len(instructions)
        instructions.append(replace(instruction, args=arguments, attr=attr, row=False, stage=0))
    return Body(grid_axes(shape), (Stage("map"),), *_loads_first(operands, instructions))


def _loads_first(
    operands: Sequence[Operand], instructions: Sequence[Instruction]
) -> tuple[tuple[Operand, ...], tuple[Instruction, ...]]:
    """Orders what is read before what is written, as the operands of a body are."""
    ordered = sorted(range(len(operands)), key=lambda index: operands[index].kind == "store")
    place = {index: number for number, index in enumerate(ordered)}
    moved = (replace(i, attr=place[i.attr]) if i.op in ("load", "iota", "store") else i for i in instructions)
    return tuple(operands[index] for index in ordered), tuple(moved)
