"""Lowers the rule of a tile: what is computed from the products of its rows and keys."""

from __future__ import annotations

from jitgen.ir.body_builder import BodyBuilder
from jitgen.ir.graph import Node
from jitgen.ir.nodes import CAST


class TileBuilder(BodyBuilder):
    """Lowers the rule of a tile. The tensors that it reads become operands of the kind ``score`` of ``results``."""

    def __init__(self, results: BodyBuilder):
        super().__init__(results.buffers, results.scalars)
        self.operands, self._contractions = results.operands, results._contractions
        self._load = self._iota = "score"

    def _sees_rounded(self, node: Node, dtype: str) -> bool:
        """Returns whether ``node`` sees its operand rounded, as elsewhere but for casts: the scores of one attention
        are one function, whose softmax may be in float32."""
        return node.kind is not CAST and super()._sees_rounded(node, dtype)
