"""A quantised weight as a node of an argument tree: its tensors are the leaves, its token is the node's context."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.utils import _pytree as pytree

from jitgen.quant.qtensor import QTensor
from jitgen.quant.token import Token


class QuantizedLeaves:
    """An unpacked quantised weight. ``tensors`` are its tensors, or the specs or proxies that represent them."""

    __slots__ = ("tensors", "token")

    def __init__(self, tensors: Iterable[Any], token: Token):
        self.tensors: tuple[Any, ...] = tuple(tensors)
        self.token = token

    @staticmethod
    def of(tensor: QTensor, layout: str) -> QuantizedLeaves:
        """``tensor`` unpacked, converted to ``layout`` if it is in another."""
        stored = tensor.stored_in(layout)
        return QuantizedLeaves(stored.tensors, stored.token)

    def __repr__(self) -> str:
        return f"QuantizedLeaves({self.token})"


def _flatten(node: QuantizedLeaves) -> tuple[list[Any], Token]:
    return list(node.tensors), node.token


def _unflatten(tensors: Iterable[Any], token: Token) -> QuantizedLeaves:
    return QuantizedLeaves(tensors, token)


pytree.register_pytree_node(QuantizedLeaves, _flatten, _unflatten)
