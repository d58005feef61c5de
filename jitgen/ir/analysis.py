"""Answers questions that passes ask of expressions, and rebuilds expressions.

Neighbours: nodes are ``ir/graph.py``'s, movements ``ir/views.py``'s; the families' claims use what is here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from jitgen.ir import symbols
from jitgen.ir.graph import Graph, Movement, Node, Shape, one_along, postorder, topological, walked
from jitgen.ir.nodes import CAT, GATHER, IOTA, REDUCE, SORT, STRUCTURED, VIEW, Kind
from jitgen.ir.symbols import Size
from jitgen.ir.views import MOST_MOVEMENTS, Mover, inverse


def at_own_coordinates(root: Node, *kinds: Kind) -> Iterator[Node]:
    """Yields the nodes of ``kinds`` that ``root`` is computed from by pointwise operations alone, nearest first."""
    return nearest(root, kinds, lambda node: node.kind.is_pointwise)


def at_coordinates_of(
    value: Node, mover: Mover, is_source: Callable[[Node], bool]
) -> tuple[Node, tuple[Movement, ...]] | None:
    """Undoes the views of sources between ``value`` and these, so that it is stored in their shape.

    Args:
        is_source: tells the nodes whose views are undone where ``value`` is pointwise in one.

    Returns:
        The value without the views, and the movements from it to the memory of ``value``; None if a view leaves out or
        repeats elements.
    """
    movements: tuple[Movement, ...] = ()
    while True:
        views = at_own_coordinates(value, VIEW)
        view = next((view for view in views if is_source(view.under_views)), None)
        if view is None:
            return value, movements
        attrs, shape = inverse(view.attrs), view.inputs[0].shape
        if attrs is None or len(movements) == MOST_MOVEMENTS:
            return None
        value, movements = mover.move(value, attrs, shape), (*movements, (attrs, shape))


def nearest(root: Node, kinds: Collection[Kind], passes: Callable[[Node], bool]) -> Iterator[Node]:
    """Yields the nodes of ``kinds`` that ``root`` is computed from, on paths of nodes for which ``passes`` holds,
    nearest first."""

    def below(node: Node) -> Iterable[Node]:
        return () if node.kind in kinds or not passes(node) else reversed(node.inputs)

    return (node for node in walked([root], below) if node.kind in kinds)


def rewritten_graph(
    graph: Graph, mover: Mover, change: Callable[[Node, Node], Node], memo: dict[int, Node] | None = None
) -> Graph:
    """Rebuilds ``graph`` as ``rewritten`` does its results."""
    memo = {} if memo is None else memo
    for root in graph.results:
        rewritten(root, mover, change, memo)
    outputs = tuple(memo[id(node)] for node in graph.outputs)
    return replace(graph, outputs=outputs, mutated=tuple((number, memo[id(node)]) for number, node in graph.mutated))


def rewritten(
    root: Node, mover: Mover, change: Callable[[Node, Node], Node], memo: dict[int, Node] | None = None
) -> Node:
    """Rebuilds ``root`` with every node replaced, inputs first.

    Args:
        change: takes a node as it was, and the same node over its replaced inputs; returns the replacement.
        memo: replacements by the ids of what they replace, to which those under ``root`` are added.
    """
    memo = {} if memo is None else memo
    for node in topological([root], known=memo):
        if id(node) in memo:
            continue
        memo[id(node)] = change(node, mover.builder.rebuilt(node, [memo[id(child)] for child in node.inputs]))
    return memo[id(root)]


def is_taken(node: Node, mover: Mover | None = None) -> bool:
    """Returns whether ``node`` takes the elements of rows at the places of ranks of rows of the same shape; with a
    ``mover``, of one that its guards say is equal."""
    if node.kind is not GATHER or len(node.inputs) != 2:
        return False
    source, places = node.inputs
    while places.kind is VIEW and places.attrs.kind == "slice":
        places = places.inputs[0]
    last = len(source.shape) - 1
    is_of_ranks = places.kind is SORT and places.attrs.what == "indices" and places.attrs.dim == last
    if not is_of_ranks or node.attrs != (*range(last), -1):
        return False
    return is_same_shape(source.shape, places.inputs[0].shape, mover)


def is_same_shape(left: Shape, right: Shape, mover: Mover | None) -> bool:
    """Returns whether two shapes are equal, or with a ``mover`` may be said to be by guards."""
    if left == right or mover is None or len(left) != len(right):
        return left == right
    here = [symbols.evaluated(shape, mover.environment) for shape in (left, right)]
    pairs = zip(left, right, strict=True)
    return here[0] == here[1] and all(mover.decide(symbols.compare("eq", *pair)) for pair in pairs)


def in_shape(node: Node, shape: Shape, mover: Mover) -> Node:
    """Returns ``node`` in a ``shape`` that guards say is its own."""
    return node if node.shape == shape else mover.builder.make("view", (node,), node.dtype, shape, ("expand",))


def unrounded(node: Node, dtype: str, mover: Mover) -> Node:
    """Returns ``node``, a float32 value, as a node of ``dtype`` that is not rounded to it.

    A cast would round. A multiplication by 1 does not, because values between operations keep their compute dtype
    (``ir/body.py``).
    """
    one = mover.builder.const(1.0, "float32")
    return mover.builder.make("mul", (node, one), dtype, node.shape, (), node.location)


def sliced(node: Node, dim: int, start: Size, length: Size, mover: Mover, memo: dict[int, Node]) -> Node:
    """Slices ``node`` to [start, start + length) of ``dim``, with the nodes in ``memo`` replaced; the slices of its
    pointwise operands are added to ``memo``."""
    for one in postorder([node], lambda one: one.inputs if one.kind.is_pointwise and id(one) not in memo else ()):
        if id(one) in memo:
            continue
        if one.kind.is_number:
            memo[id(one)] = one
        elif not one.kind.is_pointwise:
            memo[id(one)] = mover.slice(one, dim, start, length)
        else:
            shape = (*one.shape[:dim], length, *one.shape[dim + 1 :])
            memo[id(one)] = mover.builder.like(one, [memo[id(child)] for child in one.inputs], shape)
    return memo[id(node)]


def one_of(root: Node, dims: Sequence[int], mover: Mover) -> Node:
    """Cuts ``root``, a pointwise result that does not vary along ``dims``, to one element along those of them that it
    has, and that have elements."""
    dims = [dim for dim in dims if dim < len(root.shape) and root.shape[dim] != 0]
    order = topological([root], leaves=_SHAPES_TELL | {VIEW})
    needed = {id(root)}
    for node in reversed(order):
        if id(node) in needed and (node.kind.commutes or _joins_others(node, dims) or _only_chosen(node, dims)):
            needed.update(map(id, node.inputs[node.kind is GATHER :]))
    cut: dict[int, Node] = {}
    for node in order:
        if id(node) not in needed:
            continue
        source = node.under_expand
        if source.kind.is_number:
            cut[id(node)] = source
            continue
        shape = one_along(node.shape, dims)
        if node.kind.commutes:
            cut[id(node)] = mover.builder.like(node, [cut[id(child)] for child in node.inputs], shape)
        elif _joins_others(node, dims):  # a number among them is as long as what was cut to it
            pieces = [mover.move(cut[id(child)], ("expand",), one_along(child.shape, dims)) for child in node.inputs]
            cut[id(node)] = mover.builder.like(node, pieces, shape)
        elif _only_chosen(node, dims):
            indices = [cut[id(child)] for child in node.inputs[1:]]
            cut[id(node)] = mover.builder.like(node, (node.inputs[0], *indices), shape)
        else:
            cut[id(node)] = _cut_view(node, dims, mover)
    return cut[id(root)]


def _cut_view(node: Node, dims: Sequence[int], mover: Mover) -> Node:
    """Cuts ``node`` to one element along ``dims``; views that repeat or reorder elements are of what is cut so."""
    shape = one_along(node.shape, dims)
    if shape == node.shape:
        return node
    if node.kind is VIEW and node.attrs.kind == "permute":
        cut = _cut_view(node.inputs[0], [node.attrs.order[dim] for dim in dims], mover)
        return mover.move(cut, node.attrs, shape)
    if node.kind is VIEW and node.attrs.kind == "expand" and len(node.inputs[0].shape) == len(shape):
        return mover.move(_cut_view(node.inputs[0], dims, mover), node.attrs, shape)
    for dim in dims:
        node = mover.slice(node, dim, 0, 1)
    return node


def _joins_others(node: Node, dims: Sequence[int]) -> bool:
    """Returns whether ``node`` joins tensors along another dimension than ``dims``."""
    return node.kind is CAT and node.attrs.dim not in dims


def _only_chosen(node: Node, dims: Sequence[int]) -> bool:
    """Returns whether ``node`` is a gather whose indices alone have the dimensions ``dims``."""
    return node.kind is GATHER and not set(dims) & set(node.attrs)


def varies(node: Node, dims: Sequence[int]) -> bool:
    """Returns whether the elements of ``node`` may differ along any of ``dims``; False only if they provably do not."""
    return not varying_dims(node).isdisjoint(dims)


def varying_dims(node: Node) -> frozenset[int]:
    """Returns the dimensions along which the elements of ``node`` may differ."""
    return varying(topological([node], leaves=_SHAPES_TELL))[id(node)]


def runs_along(node: Node, dim: int) -> bool:
    """Returns whether the elements of ``node`` may differ along ``dim`` wherever it has several: a row of one score is
    a row, and its maximum is one value for that."""
    return dim in varying(topological([node], leaves=_SHAPES_TELL), single=True)[id(node)]


_SHAPES_TELL = frozenset(kind for kind in STRUCTURED if not kind.commutes) - {VIEW, GATHER, CAT, REDUCE}
"""Kinds whose own shape tells along which dimensions elements may differ."""


def varying(order: Sequence[Node], single: bool = False) -> dict[int, frozenset[int]]:
    """Returns the dimensions along which the elements of each node may differ, by the node's id.

    Args:
        order: nodes, each after its inputs.
        single: whether a dimension of one element counts, where what is computed along it does.
    """
    dims_by_id: dict[int, frozenset[int]] = {}
    for node in order:
        dims: Iterable[int] = range(len(node.shape))
        if node.kind.is_number:
            dims = ()
        elif node.kind is VIEW and node.attrs.kind != "reshape":
            sources, varied = ((dim, _source_dim(node, dim)) for dim in dims), dims_by_id[id(node.inputs[0])]
            dims = [dim for dim, source in sources if source is not None and source in varied]
        elif node.kind is IOTA:
            dims = (node.attrs.dim,)
        elif node.kind is GATHER:
            along = dims_by_id[id(node.inputs[0])]
            dims = frozenset(at for dim, at in enumerate(node.attrs) if at >= 0 and dim in along)
            dims = dims.union(*(dims_by_id[id(index)] for index in node.inputs[1:]))
        elif node.kind is REDUCE:
            dims = dims_by_id[id(node.inputs[0])].difference(node.attrs.dims)
        elif node.kind is CAT:
            dims = frozenset([node.attrs.dim]).union(*(dims_by_id[id(child)] for child in node.inputs))
        elif node.kind.commutes:
            dims = frozenset().union(*(dims_by_id[id(child)] for child in node.inputs))
        dims_by_id[id(node)] = frozenset(dim for dim in dims if single or node.shape[dim] != 1)
    return dims_by_id


def _source_dim(view: Node, dim: int) -> int | None:
    """Returns the dimension of the view's source that ``dim`` of the view runs along; None if it repeats one
    element."""
    kind = view.attrs.kind
    source = view.inputs[0]
    if kind == "permute":
        return view.attrs.order[dim]
    if kind == "unsqueeze":
        return None if dim == view.attrs.dim else dim - (dim > view.attrs.dim)
    if kind == "squeeze":
        return dim + (dim >= view.attrs.dim)
    if kind == "expand" and (source.kind.is_number or (source.shape[dim] == 1 and view.shape[dim] != 1)):
        return None
    return dim
