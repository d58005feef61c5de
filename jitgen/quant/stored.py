"""What a quantised weight holds, which is also its node in the tree of a call's arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils import _pytree as pytree

from jitgen.quant.token import Token


@dataclass(frozen=True, eq=False)
class Stored:
    """The tensors of a weight, and the token that says what they are.

    A weight refers to one such pair and is converted by referring to another. So a thread that reads the pair once has
    tensors and token that belong to each other, without the lock. Among the arguments of a call the pair is a node: its
    tensors, or the specs or proxies that stand for them, are leaves, and its token is the node's context.
    """

    __slots__ = ("__weakref__", "tensors", "token")

    tensors: tuple[Any, ...]
    token: Token


pytree.register_pytree_node(
    Stored,
    lambda stored: (list(stored.tensors), stored.token),
    lambda tensors, token: Stored(tuple(tensors), token),
)
