"""Matrix products: which results one matmul kernel can compute, prologue and epilogue included.

A *contraction region* iterates over ``(rows, columns)`` and reads ``matmul`` nodes of that shape as if they were
leaves: everything pointwise between a product and what is returned is its epilogue, computed from the accumulator
while it is still in registers. Several products of one shape may meet in one region (the two of SwiGLU), and regions
whose products share an activation become one kernel (the three projections of attention).

``group`` finds the results such regions can hold. A product that something else stands behind (a reduction, a
concatenation, another product) is materialized, together with as much pointwise work as every way to the results
passes through; what remains is computed from the temporary by the other families.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jitgen.errors import UnsupportedError
from jitgen.ir import symbols
from jitgen.ir.graph import Node, topological, under_views
from jitgen.ir.ops import OPS
from jitgen.ir.regions import Movement, Region, Store
from jitgen.ir.views import Mover

Materialize = Callable[[Node], Node]


@dataclass(frozen=True)
class Prologue:
    """A computed activation, (rows, length), of a product with a weight of ``columns`` rows: what decides whether its
    kernel computes it while reading it. Sizes are symbolic until ``at`` makes them numbers.

    ``format`` is the weight's, None where it is dense; ``operations`` are those of one element. ``kept``: its values
    are a result too, so that they are in memory anyway.
    """

    rows: Any
    columns: Any
    length: Any
    dtype: str
    format: str | None
    operations: tuple[str, ...]
    kept: bool

    def at(self, environment: Mapping[str, Any]) -> Prologue:
        rows, columns, length = (symbols.evaluate(s, environment) for s in (self.rows, self.columns, self.length))
        return replace(self, rows=rows, columns=columns, length=length)


@dataclass(frozen=True)
class Decision:
    """Whether a product computes its activation while reading it, else before, into a temporary; and why."""

    fused: bool
    why: str


Decide = Callable[[Prologue], Decision]


def has_matmul(node: Node) -> bool:
    return any(part.op == "matmul" for part in topological([node]))


def group(
    results: Sequence[Node], mover: Mover, materialize: Materialize, decide: Decide
) -> tuple[list[Region], list[Node | None]]:
    """Contraction regions for what they can hold of ``results``, and the other results without products.

    Args:
        decide: whether a kernel computes its activation while it reads it; otherwise that is done before, into a
            temporary.

    Returns:
        the regions, whose stores name results by position, and a list as long as ``results``: None where a region
        computes the result, else the node the other families shall compute.
    """
    # Before rows and columns are made of the results, so that a product behind a reduction and beside it stays one.
    whole = [Store(position, node) for position, node in enumerate(results)]
    whole = _without_hidden_products(whole, mover, materialize, flat=False)
    stores = [_flat(store.result, store.value, mover) for store in whole]
    stores = _without_hidden_products(stores, mover, materialize, flat=True)
    stores = [_of_like_products(store, mover, materialize) for store in stores]
    regions: list[Region] = []
    rest: list[Node | None] = list(results)
    for store in stores:
        if not _products(store.value):
            rest[store.result] = _restored(store, whole[store.result].value, mover)
            continue
        if not _keeps_columns(store, whole[store.result].value):
            # As in eager torch the result is a view of the product, whose rows lie in memory as they are computed.
            held = Store(store.result, materialize(store.value), store.movements)
            rest[store.result] = _restored(held, whole[store.result].value, mover)
            continue
        rest[store.result] = None
        place = next((i for i, region in enumerate(regions) if _shares_product(region, store)), None)
        if place is None:
            regions.append(Region(store.value.shape, (store,)))
        else:
            regions[place] = Region(regions[place].shape, (*regions[place].stores, store))
    kept = {id(node) for node in results}
    temporaries: dict[int, Node] = {}

    def keep(node: Node) -> Node:
        return temporaries.setdefault(id(node), materialize(node))

    regions = [_computable(region, mover, keep, decide, kept) for region in regions]
    return regions, [None if node is None else temporaries.get(id(node), node) for node in rest]


def _is_pointwise(node: Node) -> bool:
    return node.op in OPS or node.op == "cast"


def _products(root: Node) -> list[Node]:
    """The products whose values ``root`` is computed from by pointwise operations alone, at its own coordinates."""
    found, stack, seen = [], [root], set()
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if node.op == "matmul":
            found.append(node)
        elif _is_pointwise(node):
            stack.extend(reversed(node.inputs))
    return found


def _shares_product(region: Region, store: Store) -> bool:
    own = {id(node) for node in _products(store.value)}
    return region.shape == store.value.shape and any(
        id(node) in own for other in region.stores for node in _products(other.value)
    )


# ------------------------------------------------------------------------------------------- rows and columns


def _flat(position: int, node: Node, mover: Mover) -> Store:
    """The store of a result: views above its products undone, and moved to (rows, columns)."""
    value = node
    movements: tuple[Movement, ...] = ()
    while (view := _view_of_product(value)) is not None:
        inverse = _inverse(view)
        if inverse is None:
            return Store(position, node)
        attrs, shape = inverse
        value, movements = mover.move(value, attrs, shape), (*movements, inverse)
        if len(movements) > 16:
            return Store(position, node)
    products = _products(value)
    if not products or any(product.shape != value.shape for product in products):
        return Store(position, node)
    shape = value.shape
    if len(shape) == 2:
        return Store(position, value, movements)
    attrs = ("unsqueeze", 0) if len(shape) == 1 else ("reshape",)
    flat = (1, *shape) if len(shape) == 1 else (symbols.product(shape[:-1]), shape[-1])
    return Store(position, mover.move(value, attrs, flat), (*movements, (attrs, flat)))


def _keeps_columns(store: Store, result: Node) -> bool:
    """Whether the columns of the store's value are the innermost dimension of ``result`` too."""
    shapes = [result.shape, *(shape for _, shape in store.movements)]
    for (attrs, shape), before in zip(store.movements, shapes, strict=False):
        if attrs[0] == "permute" or (attrs[0] == "reshape" and (not before or before[-1] != shape[-1])):
            return False
    return True


def _view_of_product(root: Node) -> Node | None:
    """A view whose source leads to a product by views alone, met from ``root`` through pointwise nodes."""
    stack, seen = [root], set()
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if node.op == "view":
            if under_views(node).op == "matmul":
                return node
        elif _is_pointwise(node):
            stack.extend(reversed(node.inputs))
    return None


def _inverse(view: Node) -> Movement | None:
    """The movement from ``view`` back to its source; None where elements were left out or repeated."""
    attrs = _undone(view.attrs)
    return None if attrs is None else (attrs, view.inputs[0].shape)


def _undone(attrs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The attrs of the movement that undoes one with ``attrs``."""
    kind = attrs[0]
    if kind == "permute":
        return "permute", tuple(attrs[1].index(dim) for dim in range(len(attrs[1])))
    if kind in ("squeeze", "unsqueeze"):
        return "unsqueeze" if kind == "squeeze" else "squeeze", attrs[1]
    return ("reshape",) if kind == "reshape" else None


def _restored(store: Store, node: Node, mover: Mover) -> Node:
    """``node`` again, of a store whose products have been materialized: its movements undone."""
    value = store.value
    shapes = [node.shape, *(shape for _, shape in store.movements)]
    for (attrs, _), shape in zip(reversed(store.movements), reversed(shapes[:-1]), strict=True):
        back = _undone(attrs)
        assert back is not None  # only such movements are made
        value = mover.move(value, back, shape)
    return value


# --------------------------------------------------------------------------------------- products behind others


def _without_hidden_products(
    stores: Sequence[Store], mover: Mover, materialize: Materialize, flat: bool
) -> list[Store]:
    """``stores`` with every product that is not an epilogue away from all results read from a temporary.

    ``flat``: whether they are of rows and columns already; until then views may lie between.
    """
    while True:
        hidden = _first_hidden([store.value for store in stores], flat)
        if hidden is None:
            return list(stores)
        memo: dict[int, Node] = {id(hidden): materialize(hidden)}
        stores = [Store(s.result, mover.substituted(s.value, memo), s.movements) for s in stores]


def _of_like_products(store: Store, mover: Mover, materialize: Materialize) -> Store:
    """``store`` with only those products in it that one kernel computes together: the first and those of its activation
    with weights of its format; the others come from temporaries."""
    products = _products(store.value)
    others = [product for product in products if _kind(product) != _kind(products[0])]
    if not others:
        return store
    return Store(
        store.result,
        mover.substituted(store.value, {id(other): materialize(other) for other in others}),
        store.movements,
    )


def _kind(product: Node) -> tuple[Any, ...]:
    x, weight = product.inputs
    base = under_views(weight)
    return x, base.attrs if base.op == "dequantize" else (), product.attrs


def _first_hidden(roots: Sequence[Node], flat: bool) -> Node | None:
    """What to materialize for the first product that some result does not read through pointwise operations alone."""
    order = topological(roots, leaves="matmul")
    users: dict[int, list[Node]] = {id(node): [] for node in order}
    for node in order:
        if node.op != "matmul":
            for child in node.inputs:
                users[id(child)].append(node)
    results = {id(root) for root in roots}
    for product in order:
        if product.op == "matmul" and not _leads_only_to_results(product, users, flat):
            return _widest(product, order, users, results)
    return None


def _leads_only_to_results(product: Node, users: dict[int, list[Node]], flat: bool) -> bool:
    stack, seen = [product], set()
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if flat and (node.shape != product.shape or len(node.shape) != 2):
            return False
        if not (node is product or _is_pointwise(node) or (node.op == "view" and not flat)):
            return False
        stack.extend(users[id(node)])
    return True


def _widest(product: Node, order: Sequence[Node], users: dict[int, list[Node]], results: set[int]) -> Node:
    """The last node, by way of pointwise ones alone, that every path from ``product`` to a result passes.

    The post-dominators of a graph in topological order, as compilers compute them (Cooper, Harvey and Kennedy).
    """
    position = {id(node): number for number, node in enumerate(order)}
    after: dict[int, Node | None] = {}
    for node in reversed(order):
        meeting: Node | None = None
        ends = id(node) in results
        for number, user in enumerate(users[id(node)]):
            meeting = user if number == 0 else _meet(meeting, user, after, position)
        after[id(node)] = None if ends else meeting
    chosen = product
    while (candidate := after[id(chosen)]) is not None and _only_pointwise(chosen, candidate, users):
        chosen = candidate
    return chosen


def _meet(
    left: Node | None, right: Node | None, after: dict[int, Node | None], position: dict[int, int]
) -> Node | None:
    while left is not right:
        if left is None or right is None:
            return None
        if position[id(left)] < position[id(right)]:
            left = after[id(left)]
        else:
            right = after[id(right)]
    return left


def _only_pointwise(start: Node, end: Node, users: dict[int, list[Node]]) -> bool:
    stack, seen = [start], set()
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if node.shape != start.shape or not (node is start or _is_pointwise(node)):
            return False
        if node is not end:
            stack.extend(users[id(node)])
    return True


# ---------------------------------------------------------------------------------------- operands of a region


def _computable(region: Region, mover: Mover, materialize: Materialize, decide: Decide, kept: set[int]) -> Region:
    """``region`` reading nothing but tensors: reductions and the like in its epilogue or its operands come first."""
    memo: dict[int, Node] = {}
    for node in topological((store.value for store in region.stores), leaves="matmul"):
        if node.op in ("reduce", "cat"):
            memo[id(node)] = materialize(node)
        elif node.op == "matmul":
            x, weight = node.inputs
            computed = _prologue(node, kept)
            fused = computed is not None and decide(computed).fused
            x = x if fused or under_views(x).op == "input" else materialize(x)
            operands = (x, _weight(weight, materialize))
            memo[id(node)] = mover.builder.like(node, operands)
        else:
            children = [memo[id(child)] for child in node.inputs]
            same = all(a is b for a, b in zip(children, node.inputs, strict=True))
            memo[id(node)] = node if same else mover.builder.like(node, children)
    return Region(region.shape, tuple(Store(s.result, memo[id(s.value)], s.movements) for s in region.stores))


def _prologue(product: Node, kept: set[int]) -> Prologue | None:
    """The activation of ``product`` where pointwise operations compute it."""
    x, (rows, columns) = product.inputs[0], product.shape
    parts = topological([x])
    if under_views(x).op == "input" or any(part.op in ("reduce", "cat", "matmul") for part in parts):
        return None
    weight = under_views(product.inputs[1])
    format = weight.attrs[0] if weight.op == "dequantize" else None
    operations = tuple(part.op for part in parts if _is_pointwise(part))
    return Prologue(rows, columns, x.shape[-1], x.dtype, format, operations, id(x) in kept)


def _weight(node: Node, materialize: Materialize) -> Node:
    base = node
    while base.op == "view" and base.attrs[:2] == ("slice", 0):
        base = base.inputs[0]
    if base.op == "dequantize" or under_views(node).op == "input":
        return node
    if any(part.op == "dequantize" for part in topological([node])):
        raise UnsupportedError(
            "a quantised weight stands for (N, K): use it as F.linear(x, w) or x @ w.T, and not cut, reshaped or "
            "transposed otherwise; dequantise it outside the decorated function for anything else"
        )
    return materialize(node)
