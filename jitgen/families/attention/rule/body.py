"""Lowers what is computed over a tile of products: its operands are those of the region's body."""

from __future__ import annotations

from jitgen.ir.body_builder import BodyBuilder
from jitgen.ir.graph import Node
from jitgen.ir.nodes import CAST


class TileBuilder(BodyBuilder):
    """Lowers what is computed over a tile; what it reads becomes operands of ``results``, of the kind ``score``."""

    def __init__(self, results: BodyBuilder):
        super().__init__(results.buffers, results.scalars)
        self.operands, self._contractions = results.operands, results._contractions
        self._load = self._iota = "score"

    def _sees_rounded(self, node: Node, dtype: str) -> bool:
        """Returns whether ``node`` sees its operand rounded, as elsewhere but for casts: the scores of one attention
        are one function, whose softmax may be in float32."""
        return node.kind is not CAST and super()._sees_rounded(node, dtype)
