"""Decides which values of one of Dynamo's graphs are the same memory.

Dynamo runs every call on fake tensors, which share storages exactly as the tensors of eager torch do. So a value is
*new* where its storage is, a *view* where its storage is that of an argument, and the result of an update in place is
that argument. A graph that a program is made of keeps these facts:

- A program takes tensors as they are, and returns new ones alone, in the memory order that Dynamo knows. torch makes
  the views of them that are read elsewhere (``crossing``).
- A call stays with torch that writes memory which two inputs of its program share (``conflict``), or that makes a
  tensor which is neither new and dense, nor a view (``Aliasing.refusal``).
- Within a program that writes to memory, the tracer must agree on what shares that memory (``claims``).

Neighbours: ``updates.py`` says what a call writes; ``cut.py`` and ``backend.py`` make programs by these rules.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from jitgen.dynamo.program import Claims, hint, is_call, picks_an_item, value_of
from jitgen.dynamo.updates import changes_layout, name_of, updates, written
from jitgen.quant import weights
from jitgen.runtime import overlap

Storages = frozenset[int]
_DROPOUTS = frozenset({"dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"})
_DROPOUTS |= {"dropout1d", "dropout2d", "dropout3d"}
"""Functions that return their argument itself unless they train; of a fake tensor they return a copy."""


def tensors_of(node: Any) -> list[torch.Tensor]:
    """Returns the tensors that Dynamo knows as the value of ``node``; none for a quantised weight, which nothing
    updates."""
    value = value_of(node)
    leaves = [value] if isinstance(value, torch.Tensor) else pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not weights.is_quantized(leaf)]


def order_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Returns the dimensions of ``tensor`` from the outermost to the innermost in memory; None where it is not
    dense."""
    sizes, strides = list(map(hint, tensor.shape)), list(map(hint, tensor.stride()))
    dims = tuple(range(len(sizes)))
    if None in sizes or None in strides or 0 in sizes:
        return dims
    order = tuple(sorted(dims, key=lambda dim: -strides[dim] if sizes[dim] != 1 else 0))  # type: ignore[operator]
    order = _with_ones_in_place(order, sizes)
    step = 1
    for dim in reversed(order):
        if sizes[dim] != 1 and strides[dim] != step:
            return None
        step *= sizes[dim]  # type: ignore[operator]
    return order


def _with_ones_in_place(order: Sequence[int], sizes: Sequence[Any]) -> tuple[int, ...]:
    """Returns ``order`` with the dimensions of size 1, whose strides say nothing, at their own positions."""
    rest = iter(dim for dim in order if sizes[dim] != 1)
    return tuple(dim if size == 1 else next(rest) for dim, size in enumerate(sizes))


class Aliasing:
    """Holds the storages of the values of ``graph``.

    Args:
        same: pairs of values that are one tensor although their storages differ.
    """

    def __init__(self, graph: fx.Graph, same: Iterable[tuple[Any, Any]] = ()):
        self._updating = frozenset(node for node in graph.nodes if is_call(node) and updates(node))
        self._joined: dict[int, int] = {}
        self._storages: dict[fx.Node, Storages] = {}
        for left, right in same:
            self._join(left, right)
        for node in graph.nodes:
            if is_call(node) and _is_idle_dropout(node):
                self._join(value_of(node.args[0]), value_of(node))
        self.moved: Storages = frozenset(
            storage
            for node in graph.nodes
            if is_call(node) and changes_layout(node)
            for value in (node, *node.all_input_nodes)
            for storage in self.storages(value)
        )
        """Storages of tensors whose sizes or strides an update changes, so that what Dynamo knows is the last."""

    def updates(self, node: fx.Node) -> bool:
        """Returns whether ``node`` writes to a tensor that is there already, or calls a graph that may."""
        return node in self._updating

    def _join(self, left: Any, right: Any) -> None:
        if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
            one, other = self.storage(left), self.storage(right)
            if one is not None and other is not None and one != other:
                self._joined[other] = one

    def storage(self, tensor: torch.Tensor) -> int | None:
        """Returns the number of the storage of ``tensor``; None where it has none."""
        try:
            address: int = tensor.untyped_storage()._cdata
        except (NotImplementedError, RuntimeError):  # sparse tensors, and those of torch.func
            return None
        while address in self._joined:
            address = self._joined[address]
        return address

    def storages(self, node: fx.Node) -> Storages:
        """Returns the storages of the value of ``node``."""
        if node not in self._storages:
            numbers = map(self.storage, tensors_of(node))
            self._storages[node] = frozenset(number for number in numbers if number is not None)
        return self._storages[node]

    def storages_of_all(self, nodes: Iterable[fx.Node]) -> Storages:
        """Returns the storages of the values of ``nodes``."""
        return frozenset().union(*map(self.storages, nodes))

    def source(self, node: fx.Node) -> fx.Node | None:
        """Returns the argument of which the value of the call ``node`` is a view, or which it is; None if the value is
        new."""
        own = self.storages(node)
        if not own or not is_call(node):
            return None
        return next((argument for argument in node.all_input_nodes if own & self.storages(argument)), None)

    def updated(self, node: fx.Node) -> fx.Node | None:
        """Returns the argument that ``node``, which updates it, returns; None where it returns none."""
        if not self.updates(node) or not (own := self.storages(node)):
            return None
        facts = _facts(value_of(node))
        sharing = [argument for argument in node.all_input_nodes if own & self.storages(argument)]
        return next((argument for argument in sharing if _facts(value_of(argument)) == facts), None)

    def is_new(self, node: fx.Node) -> bool:
        """Returns whether ``node`` makes its tensors, or is an item of what another one made."""
        while picks_an_item(node) and isinstance(node.args[0], fx.Node):
            node = node.args[0]
        return self.source(node) is None

    def refusal(self, node: fx.Node) -> str | None:
        """Explains why ``node`` cannot be within a program; None if it can."""
        if self.moved and self.moved & (self.storages(node) | self.storages_of_all(node.all_input_nodes)):
            return "sizes or strides of this tensor are changed in place"
        if self.updates(node) and any(map(self._reaches_beyond_its_view, written(node))):
            return "it updates what as_strided made, whose gradient torch alone has"
        own = [storage for storage in map(self.storage, tensors_of(node)) if storage is not None]
        if not own or picks_an_item(node):
            return None
        read = self.storages_of_all(node.all_input_nodes)
        if read.issuperset(own):
            return (
                "its result is a view of what it updates" if self.updates(node) and self.updated(node) is None else None
            )
        if read.intersection(own) or len(set(own)) < len(own):
            return "its results share memory with one another"
        return None

    def _reaches_beyond_its_view(self, node: fx.Node) -> bool:
        """Returns whether ``node`` is a view that ``as_strided`` made, which may have elements that its source has not.

        A program hands back the new values of what it updates, and their gradient goes through the old ones. To an
        element beyond the source, none gets that way: torch itself sends it through the memory that both are views of.
        """
        viewed: fx.Node | None = node
        while viewed is not None:
            if is_call(viewed) and name_of(viewed) == "as_strided":
                return True
            viewed = self.source(viewed)
        return False


def _facts(value: Any) -> Any:
    """Returns the sizes, strides and offset of a fake tensor."""
    return (*value.shape, *value.stride(), value.storage_offset()) if isinstance(value, torch.Tensor) else None


def _is_idle_dropout(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", "")
    if name not in _DROPOUTS or not node.args:
        return False
    p, training = (*node.args[1:3], None, None)[:2]
    return node.kwargs.get("training", training) is False or bool(node.kwargs.get("p", p) == 0)


@dataclass(frozen=True)
class Crossing:
    """Describes what of a run of nodes is read elsewhere.

    Attributes:
        outputs: the values that a program returns: new tensors, and what is no tensor.
        views: the nodes by which torch makes the other tensors of these, in their order; for each the node whose value
            it is, or None where torch calls it.
        live: the nodes that the program has to run, in their order.
    """

    outputs: list[fx.Node]
    views: dict[fx.Node, fx.Node | None]
    live: list[fx.Node]


def crossing(nodes: Sequence[fx.Node], aliasing: Aliasing) -> Crossing:
    """Finds what of ``nodes``, which are to be a program, is read elsewhere."""
    inside = set(nodes)
    needed = {node for node in nodes if any(user not in inside for user in node.users)}
    items = {(node.args[0], node.args[1]): node for node in reversed(nodes) if picks_an_item(node)}
    outputs: list[fx.Node] = []
    views: list[tuple[fx.Node, fx.Node | None]] = []
    for node in reversed(nodes):
        if node not in needed:
            continue
        twin = items[node.args[0], node.args[1]] if picks_an_item(node) else node
        same = aliasing.updated(node) if twin is node else twin
        if same is None and (not aliasing.storages(node) or aliasing.is_new(node)):
            outputs.append(node)
            continue
        views.append((node, same))
        needed.update(inside.intersection(node.all_input_nodes if same is None else [same]))
    live = set(outputs)
    for node in reversed(nodes):
        if node in live or aliasing.updates(node):
            live.update((node, *inside.intersection(node.all_input_nodes)))
    return Crossing(outputs[::-1], dict(reversed(views)), [node for node in nodes if node in live])


def conflict(crossing_: Crossing, aliasing: Aliasing) -> tuple[fx.Node, str] | None:
    """Returns a node that torch has to run, and why; None if all of ``crossing.live`` may be a program."""
    for node in crossing_.outputs:
        tensors = tensors_of(node)
        if tensors and not isinstance(value_of(node), torch.Tensor):
            return node, "its results are read as a tuple"
        if any(order_of(tensor) is None for tensor in tensors):
            node = node.args[0] if picks_an_item(node) else node  # type: ignore[assignment]
            return node, "its result is a part of other memory"
    inside = set(crossing_.live)
    read = dict.fromkeys(
        argument for node in crossing_.live for argument in node.all_input_nodes if argument not in inside
    )
    for node in crossing_.live:
        if not aliasing.updates(node):
            continue
        storages = aliasing.storages_of_all(written(node))
        if any(
            overlap.is_repeated(_elements(t).shape, _elements(t).strides) for e in written(node) for t in tensors_of(e)
        ):
            return node, "it writes to a tensor of which several elements share memory"
        sharing = [
            tensor for argument in read for tensor in tensors_of(argument) if aliasing.storage(tensor) in storages
        ]
        pairs = itertools.combinations(sharing, 2)
        if any(aliasing.storage(a) == aliasing.storage(b) and _overlap(a, b) for a, b in pairs):
            return node, "it writes to memory that another argument of the program shares"
    return None


def _overlap(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Returns whether two fake tensors of one storage may share an element, at the sizes for which Dynamo traces."""
    return overlap.intersect(_elements(left), _elements(right))


def _elements(tensor: torch.Tensor) -> overlap.Elements:
    size = tensor.element_size()
    offset, *rest = map(_known, (tensor.storage_offset(), *tensor.shape, *tensor.stride()))
    return overlap.Elements(offset * size, rest[: tensor.dim()], rest[tensor.dim() :], size)


def _known(size: Any) -> int:
    value = hint(size)
    assert value is not None, "what elements decide is in no program"
    return value


def claims(inputs: Sequence[fx.Node], crossing_: Crossing, aliasing: Aliasing) -> Claims:
    """Collects what the tracer has to agree to for a program of ``crossing.live``."""
    storages = aliasing.storages_of_all(
        argument for node in crossing_.live if aliasing.updates(node) for argument in written(node)
    )
    numbers = {node: number for number, node in enumerate((*inputs, *crossing_.live))}
    orders = tuple(next(map(order_of, tensors_of(node)), None) for node in crossing_.outputs)
    shared, own = [], []
    for node in crossing_.live:
        if not aliasing.storages(node) or (picks_an_item(node) and aliasing.is_new(node)):
            continue
        source = aliasing.updated(node) or aliasing.source(node)
        if source is None:
            if storages & (aliasing.storages(node) | aliasing.storages_of_all(node.all_input_nodes)):
                own.append(numbers[node])
        elif storages & aliasing.storages(node):
            shared.append((numbers[node], numbers[source]))
    return Claims(orders, tuple(shared), frozenset(own))
