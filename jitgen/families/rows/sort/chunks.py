"""Cuts a row that is longer than a GPU's block holds into chunks: one kernel becomes two.

The first kernel sorts every chunk and stores as many of its first ranks as the result may need, with their indices in
the row: ``[rows..., chunks x ranks]``. The second one finds the rank in the row of each of these: its rank in its own
chunk, and the number of elements of every other chunk that come before it, by bisection (as in Satish, Harris and
Garland, "Designing Efficient Sorting Algorithms for Manycore GPUs", 2009). What comes out of it does not depend on the
chunks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jitgen.device import Device
from jitgen.errors import UnsupportedError
from jitgen.families.family import KernelRewrite
from jitgen.families.rows.sort.layout import MOST_ELEMENTS, is_counted, order_of
from jitgen.ir import symbols
from jitgen.ir.body import Body, Instruction, Operand, behind, compute_dtype, with_all_behind
from jitgen.ir.program import Buffer, Kernel
from jitgen.ir.regions import Stage, row_axes
from jitgen.ir.sorts import SORTS, Order
from jitgen.kernel.operands import INDEX_LIMIT, Call


def in_chunks(kernel: Kernel, call: Call, device: Device) -> KernelRewrite | None:
    """Returns ``kernel`` as two if its rows are longer than a block of ``device`` holds."""
    (body,) = kernel.bodies
    if not device.is_gpu or is_counted(body):
        return None
    chunk, length = MOST_ELEMENTS[device.dialect], body.shape[-1]
    elements = symbols.evaluate(length, call.environment)
    if elements <= chunk:
        return None
    if elements >= INDEX_LIMIT:
        raise UnsupportedError(
            f"{kernel.name}: a row of {elements} elements is too long to be sorted on a GPU; sort slices, or sort "
            "on the CPU"
        )
    order = order_of(body)
    needed = symbols.add(order.start, order.count)
    ranks: Any = needed if symbols.evaluate(needed, call.environment) < chunk else chunk
    chunks = symbols.floordiv(symbols.add(length, chunk - 1), chunk)
    cut = replace(order, start=0, count=ranks, chunk=chunk, length=length)
    whole = replace(order, chunk=chunk, length=length)
    shape: Any = (*body.shape[:-1], symbols.mul(chunks, ranks))
    temporaries = (Buffer(order.dtype, shape, contiguous=True), Buffer("int32", shape, contiguous=True))

    def kernels(kernel: Kernel, first: int) -> tuple[Kernel, Kernel]:
        (body,) = kernel.bodies
        sorted_chunks = replace(kernel, name=f"{kernel.name}_chunks", bodies=(_sorted(body, cut, shape, first),))
        merged = _merged(body, whole, ranks, shape, first)
        scalars = kernel.scalars if any(i.op == "scalar" for i in merged.instructions) else ()
        return sorted_chunks, replace(kernel, bodies=(merged,), scalars=scalars)

    return KernelRewrite(temporaries, kernels)


def _temporaries(kind: str, order: Order, shape: Any, first: int) -> tuple[Operand, Operand]:
    """Makes the temporaries for values and indices of the chunks."""
    return Operand(kind, first, order.dtype, shape), Operand(kind, first + 1, "int32", shape)


def _sorted(body: Body, order: Order, shape: Any, first: int) -> Body:
    """Sorts the elements of ``body`` in chunks."""
    loads = tuple(operand for operand in body.operands if operand.kind != "store")
    elements = with_all_behind(body.instructions, next(i.args for i in body.instructions if i.op == "sort"))
    key = len(elements) - 1
    stored: list[Instruction] = []
    stores = _temporaries("store", order, shape, first)
    for number, (what, operand) in enumerate(zip(SORTS, stores, strict=True)):
        dtype, position = compute_dtype(operand.dtype), len(elements) + len(stored)
        stored.append(Instruction("sort", (key,), dtype, (what, order), None, False, 1))
        stored.append(Instruction("store", (position,), dtype, len(loads) + number, None, False, 1))
    operands = (*loads, *stores)
    return replace(body, operands=operands, instructions=(*elements, *stored), coarse=False)


def _merged(body: Body, order: Order, ranks: Any, shape: Any, first: int) -> Body:
    """Computes the results of ``body`` from the sorted chunks."""
    loads = _temporaries("load", order, shape, first)
    instructions = [Instruction("load", (), compute_dtype(o.dtype), index) for index, o in enumerate(loads)]
    stores: list[Operand] = []
    now: dict[int, int] = {}
    sorts, ends = ({p for p, i in enumerate(body.instructions) if i.op == op} for op in ("sort", "store"))
    for position in sorted(behind(body.instructions, ends, sorts)):
        instruction = body.instructions[position]
        now[position] = len(instructions)
        if position in sorts:
            instruction = replace(instruction, op="merge", args=(0, 1), attr=(instruction.attr[0], order))
        else:
            instruction = replace(instruction, args=tuple(now[argument] for argument in instruction.args))
        if position in ends:
            stores.append(body.operands[instruction.attr])
            instruction = replace(instruction, attr=len(loads) + len(stores) - 1)
        instructions.append(instruction)
    axes = row_axes(shape, 1)
    stages = (Stage("sort", (axes[-1].name,)),)
    operands = (*loads, *stores)
    return replace(body, axes=axes, stages=stages, operands=operands, instructions=tuple(instructions))
