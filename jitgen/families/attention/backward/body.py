"""Builds the body of a region of attention's backward.

* Its first contractions are the products over a tile: ``x`` loads the left operand (kind ``left``, walked by (row,
  depth)), ``weight`` is the right one (``right``, by (streamed, depth)).
* Then one for each result: ``x`` gives an element of its function, of accumulators of these (``contract``, attr their
  number) and of operands of the kind ``score``; ``weight`` is the operand ``value``, by (streamed, width).

The body's own instructions compute results, element by element over (rows, width), from accumulators of the latter.
"""

from __future__ import annotations

from collections.abc import Sequence

from jitgen.families.attention.backward.match import tile_products
from jitgen.families.attention.rule.body import TileBuilder
from jitgen.families.attention.rule.bounds import reachable
from jitgen.families.attention.rule.views import last_two
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
    """Lowers results. Their sum over dimensions of the lead is the kernel's, whose accumulators have it."""

    def lower(self, region: Region, result_buffer: Sequence[int]) -> Body:
        self.tile = _TileBuilder(self)
        for product in tile_products(region.stores):
            self.tile.value(product)
        return super().lower(region, result_buffer)

    def _lower(self, node: Node) -> int:
        if node.kind is REDUCE:
            return self._positions[id(node.inputs[0])]
        return super()._lower(node)

    def _contraction(self, node: Node) -> Contraction:
        function, value = node.inputs
        position = self.tile.value(function)
        instructions = reachable(self.tile.instructions, position)
        if instructions[-1].op == "round_to" and instructions[-1].attr == value.dtype:
            instructions = reachable(instructions, instructions[-1].args[0])  # rounded as an operand anyway
        attrs, shape = last_two(len(value.shape)), (*value.shape[:-2], value.shape[-1], value.shape[-2])
        operand = self._operand("value", value, ((attrs, shape),))
        return Contraction(instructions, (operand,), function.shape[-1], value.dtype, node.attrs.precision)


class _TileBuilder(TileBuilder):
    def _contraction(self, node: Node) -> Contraction:
        left, right = node.inputs
        first, second = self._operand("left", left), self._operand("right", right)
        load = Instruction("load", (), compute_dtype(left.dtype), first)
        return Contraction((load,), (second,), left.shape[-1], left.dtype, node.attrs.precision)
