"""Lowers a launch to the body of a kernel: its operands in memory, and one instruction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jitgen.ir import symbols
from jitgen.ir.body import Body, Instruction, Operand, seen_through_views
from jitgen.ir.graph import Node, Shape
from jitgen.ir.launches import FLOAT, INT, UNSPECIALIZED
from jitgen.ir.regions import Region
from jitgen.ir.symbols import Expr


def body(region: Region, numbers: Sequence[int], shapes: Sequence[Shape], scalars: list[tuple[Expr, str]]) -> Body:
    """Returns the body of ``region``; ``scalars`` get the numbers that are known when the kernel is launched."""
    node = region.stores[0].value
    buffers = {store.value.attrs.result: numbers[store.result] for store in region.stores}
    results = {store.value.attrs.result: store.value for store in region.stores}
    operands = []
    for number, operand in enumerate(node.inputs):
        if number in buffers:
            buffer = buffers[number]
            operands.append(Operand("store", buffer, results[number].dtype, shapes[buffer]))
        else:
            operands.append(_argument(operand))
    for _, how, value in node.attrs.parameters:
        passed = at_the_call(how, value)
        if passed is not None and passed not in scalars:
            scalars.append(passed)
    instruction = Instruction("launch", (), node.dtype, node.attrs, node.location)
    return Body(region.axes, region.stages, tuple(operands), (instruction,))


def _argument(node: Node) -> Operand:
    base, movements = seen_through_views(node)
    return Operand("argument", base.attrs.number, node.dtype, base.shape, movements)


def at_the_call(how: str, value: Any) -> tuple[Expr, str] | None:
    """Returns the run-time scalar that a parameter is, with its dtype; None where sources or sizes have its value."""
    if not isinstance(value, Expr) or how not in (INT, UNSPECIALIZED, FLOAT):
        return None
    if how == FLOAT:
        return value, "float32"
    known_late = any(map(symbols.is_known_at_the_call, symbols.symbols_of(value)))
    return (value, "int64") if known_late else None
