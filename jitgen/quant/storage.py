"""Stores what a quantised weight consists of: its tensors with their token, and the copies that it shares with its
views."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from jitgen.quant import layouts
from jitgen.quant.formats import Format
from jitgen.quant.layouts import Tensors
from jitgen.quant.token import Token

if TYPE_CHECKING:
    from jitgen.quant.qtensor import QTensor


@dataclass(frozen=True, eq=False)
class Stored:
    """Pairs the tensors of a weight with the token that says what they are.

    A weight refers to one such pair and is converted by referring to another. So a thread that reads the pair once has
    tensors and token that belong to each other, without the lock. Among the arguments of a call the pair is a node: its
    tensors, or the specs or proxies that stand for them, are leaves, and its token is the node's context.
    """

    __slots__ = ("__weakref__", "tensors", "token")

    tensors: tuple[Any, ...]
    token: Token


pytree.register_pytree_node(
    Stored, lambda stored: (list(stored.tensors), stored.token), lambda tensors, token: Stored(tuple(tensors), token)
)


class Copies:
    """Holds what the ``QTensor``s of one weight share: views that are detached, transposed, of another nominal dtype or
    in another layout.

    Attributes:
        converted: tensors by layout, remembered for the next request.
        experts: the matrices of a weight of three dimensions that were asked for, by index and token.
        living: the ``Stored`` of each of these ``QTensor``s, as long as it lives. It is referred to weakly in place of
            the ``QTensor``: ``Module.to`` swaps tensors, and torch swaps none that have weak references.
        matrices: the ``Copies`` of such a matrix by its index, as long as it lives.
        is_matrix: whether these are the ``Copies`` of such a matrix.
        is_argument: whether the weight is an argument of a graph that torch traces, which lives longer than its calls.
        is_checked: whether the numbers are known to be finite; otherwise they are checked when they are converted.
    """

    __slots__ = ("__weakref__", "converted", "experts", "is_argument", "is_checked", "is_matrix", "living", "matrices")

    def __init__(self) -> None:
        self.converted: dict[str, Tensors] = {}
        self.experts: dict[tuple[int, Token], QTensor] = {}
        self.living: weakref.WeakSet[Stored] = weakref.WeakSet()
        self.matrices: dict[int, weakref.WeakSet[Copies]] = {}
        self.is_matrix = self.is_argument = False
        self.is_checked = True

    def every(self) -> list[tuple[str, Tensors]]:
        """Lists (layout, tensors) of every copy: converted, or in a living tensor of this weight."""
        living = [(stored.token.layout, stored.tensors) for stored in self.living]
        copies = [*self.converted.items(), *living]
        return list({tuple(map(id, tensors)): (layout, tensors) for layout, tensors in copies}.values())

    def write(self, format: Format, group_size: int | None, shape: tuple[int, int], plain: Tensors) -> None:
        """Writes ``plain``, in the portable layout, to every copy."""
        for layout, tensors in self.every():
            packed = layouts.find(layout).pack(format, group_size, shape, plain)
            for tensor, values in zip(tensors, packed, strict=True):
                tensor.copy_(values)
            settled(tensors)


def settled(tensors: Tensors) -> Tensors:
    """Returns ``tensors`` after every write to them has ended.

    A kernel may fetch weights before the previous kernel of its stream has ended (programmatic dependent launch). So a
    weight must be written completely before a tensor is made of it, and after it was changed in place.
    """
    if tensors[0].is_cuda and not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(tensors[0].device).synchronize()
    return tensors
