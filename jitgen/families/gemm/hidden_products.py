"""Materialises products that cannot be the beginning of an epilogue, or what has to be in memory because of them.

A product's kernel can compute what follows from its accumulators only where that is pointwise. A product is *hidden* if
on the way from it to some result there is anything else: a reduction, a concatenation, another product (views are
allowed until results have been flattened into rows and columns). In ``softmax(x @ w)`` the product is hidden behind the
reductions; in ``relu(x @ w)`` it is not.

A view that repeats or leaves out elements hides a product as well: the result has other elements than the accumulators.
In ``(x @ w) * (c @ v)[:, None]`` the second product is hidden, and the first one's epilogue reads it.

A hidden product is materialized: a kernel computes it into a temporary, and the rest of the graph reads that. The
temporary may as well hold a later value, if the product is needed for nothing but that value. In ``softmax(x @ w + b)``
it holds ``x @ w + b``, so that the addition is part of the product's epilogue, where it reads sums of 16-bit values
before they are rounded.

The value to store is found with *post-dominators*. Node p post-dominates node n if every path from n to a result passes
p. The nearest one is n's immediate post-dominator, and the post-dominators of n form the chain of immediate ones. The
temporary holds the last node of the product's chain that is reached through pointwise nodes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from jitgen.families.gemm.matrices import batch_rank
from jitgen.ir.graph import Node, topological, walked
from jitgen.ir.nodes import PRODUCTS, VIEW
from jitgen.ir.regions import Store
from jitgen.ir.views import Mover, inverse

Users = Mapping[int, Sequence[Node]]
"""The nodes that read a node, by its id."""


def without_hidden_products(
    stores: Sequence[Store], mover: Mover, materialize: Callable[[Node], Node], flat: bool
) -> list[Store]:
    """Makes ``stores`` read temporaries instead of hidden products.

    Args:
        flat: whether the stores' values are rows and columns already. Until then views may follow a product; afterwards
            every node of an epilogue has the product's shape.
    """
    while True:
        hidden = _first_hidden([store.value for store in stores], flat)
        if hidden is None:
            return list(stores)
        memo: dict[int, Node] = {id(hidden): materialize(hidden)}
        stores = [replace(store, value=mover.substituted(store.value, memo)) for store in stores]


def _first_hidden(roots: Sequence[Node], flat: bool) -> Node | None:
    """Returns the node to materialize because of the first hidden product; None if no product is hidden."""
    order = topological(roots, leaves=PRODUCTS)
    users: dict[int, list[Node]] = {id(node): [] for node in order}
    for node in order:
        if node.kind not in PRODUCTS:
            for child in node.inputs:
                users[id(child)].append(node)
    for product in order:
        if product.kind in PRODUCTS and not _is_followed_by_epilogue(product, users, flat):
            return _last_value_of_all_paths(product, order, users, {id(root) for root in roots}, flat)
    return None


def _is_followed_by_epilogue(product: Node, users: Users, flat: bool) -> bool:
    """Returns whether all that is computed from ``product`` could be its epilogue."""
    rank = batch_rank(product) + 2
    return not (flat and len(product.shape) != rank) and _are_epilogue(product, None, users, flat)


def _are_epilogue(start: Node, end: Node | None, users: Users, flat: bool) -> bool:
    """Returns whether all that is computed from ``start``, up to ``end``, is pointwise and of ``start``'s shape, or a
    view that flattening undoes."""
    nodes = walked([start], lambda node: () if node is end else users[id(node)])
    return all(
        not (flat and node.shape != start.shape) and (node is start or node.kind.is_pointwise or _is_undone(node, flat))
        for node in nodes
    )


def _is_undone(node: Node, flat: bool) -> bool:
    """Returns whether ``node`` is a view that flattening undoes, so that an epilogue may have it between its
    operations."""
    return node.kind is VIEW and not flat and inverse(node.attrs) is not None


def _last_value_of_all_paths(product: Node, order: Sequence[Node], users: Users, results: set[int], flat: bool) -> Node:
    """Returns the last post-dominator of ``product`` that pointwise nodes alone lead to; ``product`` itself if there is
    none.

    The only result does not count: put into a temporary, it would be claimed again in just this manner.

    Immediate post-dominators are computed in reverse topological order (Cooper, Harvey and Kennedy, "A Simple, Fast
    Dominance Algorithm", turned round): a node's is the first one that the chains of all its users have in common. A
    result has none, because a path ends there.
    """
    position = {id(node): number for number, node in enumerate(order)}
    post_dominator: dict[int, Node | None] = {}
    for node in reversed(order):
        common: Node | None = None
        for number, user in enumerate(users[id(node)]):
            common = user if number == 0 else _first_in_common(common, user, post_dominator, position)
        post_dominator[id(node)] = None if id(node) in results else common
    chosen = reached = product
    while (following := post_dominator[id(reached)]) is not None:
        if not _are_epilogue(reached, following, users, flat) or {id(following)} == results:
            break
        reached = following
        if reached.kind.is_pointwise:
            chosen = reached
    return chosen


def _first_in_common(
    left: Node | None, right: Node | None, post_dominator: Mapping[int, Node | None], position: Mapping[int, int]
) -> Node | None:
    """Returns the first node that the chains of post-dominators of ``left`` and ``right``, each beginning with the node
    itself, have in common; None without one."""
    while left is not right:
        if left is None or right is None:
            return None
        if position[id(left)] < position[id(right)]:
            left = post_dominator[id(left)]
        else:
            right = post_dominator[id(right)]
    return left
