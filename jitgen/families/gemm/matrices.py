"""Flattens results to matrices: views that follow a product are undone, so that the product and its epilogue have one
shape.

A contraction region iterates over (batch axes..., rows, columns) of its products. What a user returns often has another
shape, such as ``F.linear(x, w).view(sequences, tokens, columns)``. ``flattened`` applies the inverse of each such view
to the whole result. The store then remembers the inverse movements, by which the kernel finds where in the memory of
the result an element of the matrix belongs. ``restored`` goes the other way.
"""

from __future__ import annotations

from jitgen.ir import symbols
from jitgen.ir.analysis import at_coordinates_of, at_own_coordinates
from jitgen.ir.equations import axes as equation_axes
from jitgen.ir.graph import Node
from jitgen.ir.nodes import PRODUCTS
from jitgen.ir.regions import Store
from jitgen.ir.views import Mover, inverse


def batch_rank(product: Node) -> int:
    """Returns how many axes the result of a product has before its rows: those of a batch, or that of groups of K."""
    named = equation_axes(product.attrs.equation)
    return len(product.shape) - len(named.rows) - len(named.columns)


def products_of(root: Node) -> list[Node]:
    """Returns the products from which ``root`` is computed by pointwise operations alone."""
    return list(at_own_coordinates(root, *PRODUCTS))


def flattened(result: int, node: Node, mover: Mover) -> Store:
    """Stores ``node``, result number ``result``, as a matrix of the shape of its products; unflattened if a view cannot
    be undone, or if there are no products or products of several shapes."""
    undone = at_coordinates_of(node, mover, lambda source: source.kind in PRODUCTS)
    if undone is None:
        return Store(result, node)
    value, movements = undone
    products = products_of(value)
    if not products or any(product.shape != value.shape for product in products):
        return Store(result, node)
    shape, batch = value.shape, batch_rank(products[0])
    if len(shape) == batch + 2:
        return Store(result, value, movements)
    is_vector = len(shape) == batch + 1
    attrs = ("unsqueeze", batch) if is_vector else ("reshape",)
    matrix = (*shape[:batch], 1 if is_vector else symbols.product(shape[batch:-1]), shape[-1])
    return Store(result, mover.move(value, attrs, matrix), (*movements, (attrs, matrix)))


def keeps_columns(store: Store, result: Node) -> bool:
    """Returns whether the columns of the store's matrix are also the innermost dimension of ``result``."""
    shapes = [result.shape, *(shape for _, shape in store.movements)]
    for (attrs, shape), before in zip(store.movements, shapes, strict=False):
        if attrs[0] == "permute" or (attrs[0] == "reshape" and (not before or before[-1] != shape[-1])):
            return False
    return True


def keeps_last_dimension(store: Store) -> bool:
    """Returns whether the last dimension of what ``store`` was flattened from is of neighbouring columns of its
    matrix."""
    return all(attrs[0] != "permute" or attrs[1][-1] == len(attrs[1]) - 1 for attrs, _ in store.movements)


def restored(store: Store, node: Node, mover: Mover) -> Node:
    """Returns the value of ``store`` in the shape of ``node``, the result it was flattened from."""
    value = store.value
    shapes = [node.shape, *(shape for _, shape in store.movements)]
    for (attrs, _), shape in zip(reversed(store.movements), reversed(shapes[:-1]), strict=True):
        back = inverse(attrs)
        assert back is not None  # ``flattened`` makes only movements that have an inverse
        value = mover.move(value, back, shape)
    return value
