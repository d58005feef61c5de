"""Recognises the backward of attention in a graph: products with a function of other products, which is never stored.

With T products over a tile of rows a and streamed rows b, and F a pointwise function of them::

    R[a, w] = sum over b of F(T_0[a, b], T_1[a, b], ...) Y[b, w],    T_t[a, b] = sum over d of X_t[a, d] Z_t[b, d]

Of attention, with S = q k^T, dP = dO v^T and dS computed of both: dQ is such a product over the keys b of a query a,
with Y the keys; dK one over the queries b of a key a, with Y the queries; dV likewise, with F the probabilities and Y
dO. In F an exponential of a T is what makes it worth computing again (Dao, "FlashAttention-2", 2023).

``oriented`` brings a graph into this form: transposed and reshaped products become products of such operands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jitgen.families.attention.rule.heads import with_split
from jitgen.families.attention.rule.region import stops
from jitgen.families.attention.rule.views import last_two
from jitgen.ir.analysis import at_own_coordinates
from jitgen.ir.equations import axes, equation
from jitgen.ir.exponentials import linear_in
from jitgen.ir.graph import Node, Shape, topological, walked
from jitgen.ir.index import Index
from jitgen.ir.nodes import CONTRACT, DEQUANTIZE, REDUCE, VIEW
from jitgen.ir.patterns import Rewrite, Rewriter, Rewrites, cast, contract, view, wildcards
from jitgen.ir.regions import Store
from jitgen.ir.views import Mover


@dataclass(frozen=True, eq=False)
class Streamed:
    """Describes a product that was recognised.

    Attributes:
        result: R.
        function: F, its left operand.
        products: the T, in the order in which F is computed from them.
    """

    result: Node
    function: Node
    products: tuple[Node, ...]


def is_plain(product: Node) -> bool:
    """Returns whether ``product`` is one of matrices: with one axis of rows, one of columns, and one that it sums
    over."""
    named = axes(product.attrs.equation)
    return len(named.rows) == len(named.columns) == len(named.contracted) == 1


def matched(result: Node, index: Index) -> Streamed | None:
    """Matches ``result``, a node of ``index``, as a product with a function of other products; None if it is none."""
    if result.kind is not CONTRACT or not is_plain(result):
        return None
    function = result.inputs[0]
    inner = [node for node in at_own_coordinates(function, CONTRACT) if node.shape == function.shape]
    if not inner or not all(map(is_plain, inner)):
        return None
    powers = [node for node in topological([function], leaves={CONTRACT}) if node.op == "exp"]
    behind = {id(node) for power in powers for node in at_own_coordinates(power, CONTRACT)}
    if not any(id(node) in behind for node in inner):
        return None
    read = stops([function], [*map(id, inner)])
    if any(_has_own_rows(stop) or any(index.depends(stop, product) for product in inner) for stop in read):
        return None  # as a forward is
    return Streamed(result, function, tuple(inner))


def streamed_in(index: Index) -> list[Streamed]:
    """Lists all such products in ``index``. One with probabilities proportional to an exponential alone is a forward's,
    unless another function reads the same scores."""
    gradients = [gradient for node in index.order if (gradient := matched(node, index)) is not None]
    several = {id(node) for gradient in gradients if not is_forward(gradient) for node in gradient.products}
    return [gradient for gradient in gradients if not is_forward(gradient) or several & set(map(id, gradient.products))]


def is_forward(gradient: Streamed) -> bool:
    """Returns whether a forward may have ``gradient``: its function is proportional to an exponential alone."""
    return len(gradient.products) == 1 and linear_in(gradient.function) is not None


def _has_own_rows(stop: Node) -> bool:
    """Returns whether ``stop`` is a sum or a maximum over rows as such products have them."""
    if stop.kind is not REDUCE:
        return False
    (operand,) = stop.inputs
    return _is_function(operand) or (stop.attrs.kind == "max" and bool(_products_behind(operand)))


def results_of(stores: Sequence[Store]) -> list[Node]:
    """Returns the product R of each of ``stores``: the outermost one from which it is computed."""
    return [next(n for n in reversed(topological([store.value])) if n.kind is CONTRACT) for store in stores]


def tile_products(stores: Sequence[Store]) -> list[Node]:
    """Returns the products T from which the results ``stores`` are computed, each once."""
    results = set(map(id, results_of(stores)))
    nodes = topological([store.value for store in stores])
    return [node for node in nodes if node.kind is CONTRACT and id(node) not in results]


def is_backward(node: Node) -> bool:
    """Returns whether ``node`` is a product with a function that reads no values of its own rows."""
    if node.kind is not CONTRACT:
        return False
    functions = [child for child in node.inputs if _is_function(child)]
    if len(functions) != 1 or not is_plain(node):
        return False
    behind, inner = inside(functions[0]), _products_behind(functions[0])
    if any(_has_own_rows(stop) for stop in behind if stop.kind is REDUCE):
        return False
    return len(inner) > 1 or linear_in(functions[0]) is None


def _is_function(node: Node) -> bool:
    """Returns whether ``node`` is computed, by pointwise operations and views, from an exponential of a product."""

    def below(item: tuple[Node, bool]) -> list[tuple[Node, bool]]:
        node, inside = item
        if not (node.kind.is_pointwise or node.kind is VIEW):
            return []
        return [(child, inside or node.op == "exp") for child in node.inputs]

    return any(inside and node.kind is CONTRACT for node, inside in walked([(node, False)], below))


def oriented(values: Sequence[Node], mover: Mover) -> Mapping[int, Node]:
    """Orients products: maps the ids of ``values``, and of all that they are computed from, to products with the
    function at the left, and no view between the function and the products from which it is computed."""
    return _Orient(values, mover).images(values)


class _Orient(Rewriter):
    """Applies the rewrites ``ORIENTATIONS``. Products that are none of the tiles stay as they are.

    Attributes:
        tiles: the products that functions are computed from, and those with functions, by their ids.
    """

    def __init__(self, values: Sequence[Node], mover: Mover):
        super().__init__(ORIENTATIONS, mover)
        self.tiles: set[int] = set()
        for node in topological(values):
            if is_backward(node):
                self.tiles.add(id(node))
                functions = (child for child in node.inputs if _is_function(child))
                self.tiles.update(id(product) for child in functions for product in _products_behind(child))

    def change(self, node: Node, rebuilt: Node) -> Node:
        if id(node) in self.tiles:
            self.tiles.add(id(rebuilt))
        return super().change(node, rebuilt)

    def moved(self, view: Node) -> Node:
        moved = super().moved(view)
        # What the movement went through may now be a view of a product.
        return moved if moved.kind is VIEW or moved is view.inputs[0] else self.again(moved)

    def of_product(self, node: Node, product: Node) -> Node | None:
        """Returns ``node``, a view of ``product``, as a product; None where it is none."""
        rank, shape, (kind, *parameters) = len(product.shape), node.shape, node.attrs
        if kind == "permute":
            (order,) = parameters
            if order[-2:] == (rank - 2, rank - 1):
                return self._moved(product, node.attrs, shape)
            if order[-2:] != (rank - 1, rank - 2):
                return None
            lead = order[:-2]
            if lead == tuple(range(rank - 2)):
                return self.swapped(product)
            moved = self._moved(product, ("permute", (*lead, rank - 2, rank - 1)), (*shape[:-2], shape[-1], shape[-2]))
            return self.swapped(moved)
        whole = kind == "reshape" and len(shape) >= 2 and shape[-2:] == product.shape[-2:]
        return self._moved(product, node.attrs, shape) if whole else None

    def _operand(self, node: Node, product: Node, attrs: tuple[Any, ...], shape: Shape) -> Node:
        """Returns ``node``, an operand of ``product``, under a movement of the batch to ``shape``."""
        if attrs == ("reshape",) and len(shape) == len(product.shape) + 1:
            for dim in range(len(product.shape) - 2):
                if product.shape[:dim] == shape[:dim] and product.shape[dim + 1 :] == shape[dim + 2 :]:
                    return self.again(with_split(node, (dim, (shape[dim], shape[dim + 1])), self.mover))
        return self.again(self.mover.move(node, attrs, (*shape[:-2], *node.shape[-2:])))

    def _moved(self, product: Node, attrs: tuple[Any, ...], shape: Shape) -> Node:
        """Returns ``product`` under a movement of its batch."""
        x, w = (self._operand(node, product, attrs, shape) for node in product.inputs)
        attributes = product.attrs._replace(equation=equation(len(shape) - 2, 1))
        return self._kept(self.make("contract", (x, w), product.dtype, shape, attributes, product.location))

    def swapped(self, product: Node) -> Node:
        """Transposes ``product`` by exchanging its operands."""
        left, right = product.inputs
        shape = (*product.shape[:-2], product.shape[-1], product.shape[-2])
        return self._kept(self.like(product, (right, left), shape))

    def _kept(self, product: Node) -> Node:
        self.tiles.add(id(product))
        return product


x, y = wildcards("x y")
ORIENTATIONS = Rewrites(
    Rewrite(
        "a view of a product inside a function is a product of views",
        view(contract(x, y).named("product")),
        _Orient.of_product,
        lambda orient, product: id(product) in orient.tiles,
    ),
    Rewrite(
        "a product with a function at the right is a transposed one with it at the left",
        contract(x, y),
        lambda orient, node: orient.mover.move(orient.swapped(node), last_two(len(node.shape)), node.shape),
        lambda orient, node, x, y: id(node) in orient.tiles and _is_function(y) and not _is_function(x),
    ),
    Rewrite(
        "a cast to a wider dtype and back is none",
        cast(cast(x).named("wide")),
        x,
        lambda orient, node, wide, x: (
            x.dtype == node.dtype and x.dtype in ("bfloat16", "float16") and wide.dtype in ("float32", "float64")
        ),
    ),
)


def inside(function: Node) -> list[Node]:
    """Returns the nodes from which ``function`` is computed by pointwise operations and views, and what these read."""
    return list(walked([function], lambda node: node.inputs if node.kind.is_pointwise or node.kind is VIEW else ()))


def _products_behind(function: Node) -> list[Node]:
    """Returns the products among these, except those that read quantised weights."""
    products = [node for node in inside(function) if node.kind is CONTRACT and is_plain(node)]
    return [node for node in products if DEQUANTIZE not in node.kinds]
