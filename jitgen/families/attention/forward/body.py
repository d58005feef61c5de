"""Builds the body of an attention region: two contractions, of which the second one's left operand is computed of the
first.

* ``contractions[0]``: its ``x`` gives an element of the query, its ``weight`` is the keys, or what their ``w`` reads.
* ``contractions[1]``: its ``x`` gives a score of an accumulator of the first (``contract``, attr 0), its last
  instruction; its ``weight`` is the values. What is summed is exp(score - the row's maximum) times the values.

The body's own instructions compute results, element by element over (rows, E), from accumulators of the second
(``contract``, attr 1) and two values of a row: ``reduce`` with attr ``"max"``, the greatest score, and ``"sum"``, the
sum of exp(score - maximum).
"""

from __future__ import annotations

from collections.abc import Sequence

from jitgen.families.attention.rule.body import TileBuilder
from jitgen.ir.body import Body, Contraction, Instruction, compute_dtype
from jitgen.ir.body_builder import BodyBuilder
from jitgen.ir.graph import Node, Shape
from jitgen.ir.nodes import REDUCE
from jitgen.ir.regions import Region
from jitgen.ir.symbols import Expr


def body_of(region: Region, numbers: Sequence[int], shapes: Sequence[Shape], scalars: list[tuple[Expr, str]]) -> Body:
    """Builds the body of ``region``; see ``Family.body``."""
    return _ResultBuilder(shapes, scalars).lower(region, numbers)


class _ResultBuilder(BodyBuilder):
    """Lowers results; row values are reductions without arguments."""

    def _awaited(self, node: Node) -> Sequence[Node]:
        return () if node.kind is REDUCE else super()._awaited(node)

    def _lower(self, node: Node) -> int:
        if node.kind is REDUCE:
            return self._emit(Instruction("reduce", (), compute_dtype(node.dtype), node.attrs.kind, node.location))
        return super()._lower(node)

    def _contraction(self, node: Node) -> Contraction:
        power, value = node.inputs
        difference, dtype = power.inputs[0], value.dtype
        scores = _ScoreBuilder(self)
        position = scores.value(difference.inputs[0])
        assert position == len(scores.instructions) - 1
        instructions = _computed("value", value, self)
        operands = _read(instructions) or (self._operand("value", value),)
        return Contraction(
            tuple(scores.instructions), operands, value.shape[-1], dtype, node.attrs.precision, w=instructions
        )


class _ScoreBuilder(TileBuilder):
    """Lowers the rule of scores."""

    def _contraction(self, node: Node) -> Contraction:
        query, key = node.inputs
        elements = _ElementBuilder(self, "query")
        elements.value(query)
        instructions = _computed("key", key, self)
        operands = _read(instructions) or (self._operand("key", key),)
        return Contraction(
            tuple(elements.instructions), operands, query.shape[-1], query.dtype, node.attrs.precision, w=instructions
        )


class _ElementBuilder(BodyBuilder):
    """Lowers an element of a query, a key or a value; what it reads are operands of ``parent``, of one kind."""

    def __init__(self, parent: BodyBuilder, kind: str):
        super().__init__(parent.buffers, parent.scalars)
        self.operands = parent.operands
        self._load = self._iota = self._chosen = kind


def _computed(role: str, node: Node, parent: BodyBuilder) -> tuple[Instruction, ...]:
    """Lowers an element of keys or values to instructions; none if these are a tensor. What they read becomes operands
    of the kind ``key_source`` or ``value_source``."""
    if node.is_in_memory:
        return ()
    elements = _ElementBuilder(parent, f"{role}_source")
    value = elements.value(node)
    assert value == len(elements.instructions) - 1
    return tuple(elements.instructions)


def _read(instructions: Sequence[Instruction]) -> tuple[int, ...]:
    """Returns the operands that ``instructions`` read."""
    return tuple(dict.fromkeys(i.attr for i in instructions if i.op in ("load", "iota", "gather")))
