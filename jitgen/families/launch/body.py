"""Lowers a launch to the body of a kernel: its operands in memory, and one instruction that has everything else.

A pointwise rule before a tensor that the kernel loads, or behind one that it stores, is a ``Rule``: instructions of its
own, whose operands follow those of the launch. In a rule behind a result, ``launch`` is the value that the kernel would
store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jitgen.ir import symbols
from jitgen.ir.attributes import LaunchAttrs
from jitgen.ir.body import Body, Instruction, Operand, compute_dtype
from jitgen.ir.body_builder import BodyBuilder, stored_of
from jitgen.ir.graph import Node, Shape, walked
from jitgen.ir.launches import DOUBLE, FLOAT, INT, UNSPECIALIZED
from jitgen.ir.nodes import LAUNCH
from jitgen.ir.regions import Region, Store
from jitgen.ir.symbols import Expr, Size


@dataclass(frozen=True)
class Rule:
    """Describes what is computed where a kernel loads or stores a tensor.

    Attributes:
        number: of the launch's operand.
        dtype, shape: of that; the shape may be another one of as many elements.
        instructions: the last one is the value of what is loaded, or stores.
        columns: the size of the operand's last dimension, along which a hook's column counts.
    """

    number: int
    dtype: str
    shape: Shape
    instructions: tuple[Instruction, ...]
    columns: Size = 1

    @property
    def operands(self) -> tuple[int, ...]:
        """Returns the operands of the body that it reads and writes, in order."""
        used = (i.attr for i in self.instructions if i.op in ("load", "iota", "store"))
        return tuple(dict.fromkeys(used))


@dataclass(frozen=True)
class Launched:
    """Describes a launch in a kernel.

    Attributes:
        attrs: of the node.
        places: for each operand of the launch, the operand of the body that is its pointer. Where a rule replaces all
            that is read or written there, it is some pointer, which only tells the dtype.
        dtypes: of the launch's operands.
        loads, stores: the rules before operands, and behind results.
    """

    attrs: LaunchAttrs
    places: tuple[int, ...]
    dtypes: tuple[str, ...]
    loads: tuple[Rule, ...] = ()
    stores: tuple[Rule, ...] = ()


class _RuleBuilder(BodyBuilder):
    """Lowers the rules of one launch, whose operands they share."""

    def _awaited(self, node: Node) -> Sequence[Node]:
        return () if node.under_views.kind is LAUNCH else super()._awaited(node)

    def _lower(self, node: Node) -> int:
        if node.under_views.kind is LAUNCH:  # in another shape, its elements have the same offsets
            return self._emit(Instruction("launch", (), compute_dtype(node.dtype), location=node.location))
        return super()._lower(node)

    def store(self, store: Store, buffer: int) -> None:
        """Adds the store of a value of the rule."""
        node = stored_of(store.value)
        value = self._before_rounding(self.value(node), node.dtype)
        operand = Operand("store", buffer, node.dtype, self.buffers[buffer])
        self.operands.append(operand)
        dtype = compute_dtype(node.dtype)
        self._emit(Instruction("store", (value,), dtype, len(self.operands) - 1, store.value.location))


def launch_of(value: Node) -> Node:
    """Returns the launch that ``value`` is, or is computed of pointwise."""
    behind = walked([value], lambda node: [child for child in node.inputs if LAUNCH in child.kinds])
    launch = next((node for node in behind if node.kind is LAUNCH), None)
    assert launch is not None, "a region of this family launches a kernel"
    return launch


def body(region: Region, numbers: Sequence[int], shapes: Sequence[Shape], scalars: list[tuple[Expr, str]]) -> Body:
    """Returns the body of ``region``; ``scalars`` get the numbers that are known when the kernel is launched."""
    by_result: dict[int, list[Store]] = {}
    for store in region.stores:
        by_result.setdefault(launch_of(store.value).attrs.result, []).append(store)
    node = launch_of(region.stores[0].value)
    results = {number: launch_of(stores[0].value) for number, stores in by_result.items()}
    operands: list[Operand] = []
    places: list[int | None] = []
    dtypes = [results[k].dtype if k in results else operand.dtype for k, operand in enumerate(node.inputs)]
    for number, operand in enumerate(node.inputs):
        stores = by_result.get(number, [])
        plain = next((store for store in stores if store.value.kind is LAUNCH), None)
        if plain is not None and len(stores) == 1:
            buffer = numbers[plain.result]
            operands.append(Operand("store", buffer, plain.value.dtype, shapes[buffer]))
        elif not stores and operand.is_in_memory:
            operands.append(_argument(operand))
        else:
            places.append(None)
            continue
        places.append(len(operands) - 1)
    loads, rules = [], []
    for number, operand in enumerate(node.inputs):
        stores = by_result.get(number, [])
        if places[number] is not None:
            continue
        builder = _RuleBuilder(shapes, scalars)
        builder.operands = operands
        before = len(operands)
        if not stores:
            builder.value(operand)
            instructions = tuple(builder.instructions)
            loads.append(Rule(number, operand.dtype, operand.shape, instructions, _columns(operand)))
            places[number] = next(o for o in loads[-1].operands if operands[o].buffer is not None)
            continue
        for store in stores:
            builder.store(store, numbers[store.result])
        shape = next(store.value.shape for store in stores if store.value.kind is not LAUNCH)
        instructions = tuple(builder.instructions)
        rules.append(Rule(number, results[number].dtype, shape, instructions, _columns(results[number])))
        places[number] = next(o for o in range(before, len(operands)) if operands[o].kind == "store")
    for _, how, value in node.attrs.parameters:
        passed = at_the_call(how, value)
        if passed is not None and passed not in scalars:
            scalars.append(passed)
    at = tuple(place for place in places if place is not None)
    launched = Launched(node.attrs, at, tuple(dtypes), tuple(loads), tuple(rules))
    instruction = Instruction("launch", (), node.dtype, launched, node.location)
    return Body(region.axes, region.stages, tuple(operands), (instruction,))


def _columns(node: Node) -> Size:
    return node.shape[-1] if node.shape else 1


def _argument(node: Node) -> Operand:
    base, movements = node.under_views, node.movements
    return Operand("argument", base.attrs.number, node.dtype, base.shape, movements)


def at_the_call(how: str, value: Any) -> tuple[Expr, str] | None:
    """Returns the run-time scalar that a parameter is, with its dtype; None where sources or sizes have its value."""
    if not isinstance(value, Expr) or how not in (INT, UNSPECIALIZED, FLOAT, DOUBLE):
        return None
    if how in (FLOAT, DOUBLE):
        return value, "float32" if how == FLOAT else "float64"
    known_late = any(map(symbols.is_known_at_the_call, symbols.symbols_of(value)))
    return (value, "int64") if known_late else None
