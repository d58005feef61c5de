"""Answers questions that passes ask of expressions, and rebuilds expressions.

Neighbours: nodes are ``ir/graph.py``'s, movements ``ir/views.py``'s; the families' claims use what is here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from jitgen.ir.graph import Node, topological
from jitgen.ir.nodes import GATHER, IOTA, REDUCE, STRUCTURED, VIEW, Kind
from jitgen.ir.views import Mover


def at_own_coordinates(root: Node, kind: Kind) -> Iterator[Node]:
    """Yields the nodes of kind ``kind`` that ``root`` is computed from by pointwise operations alone, nearest first."""
    return nearest(root, kind, lambda node: node.kind.is_pointwise)


def nearest(root: Node, kind: Kind, passes: Callable[[Node], bool]) -> Iterator[Node]:
    """Yields the nodes of kind ``kind`` that ``root`` is computed from, on paths of nodes for which ``passes`` holds,
    nearest first."""
    stack, seen = [root], set()
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if node.kind is kind:
            yield node
        elif passes(node):
            stack.extend(reversed(node.inputs))


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
        children = [memo[id(child)] for child in node.inputs]
        same = all(a is b for a, b in zip(children, node.inputs, strict=True))
        memo[id(node)] = change(node, node if same else mover.builder.like(node, children))
    return memo[id(root)]


def unrounded(node: Node, dtype: str, mover: Mover) -> Node:
    """Returns ``node``, a float32 value, as a node of ``dtype`` that is not rounded to it.

    A cast would round. A multiplication by 1 does not, because values between operations keep their compute dtype
    (``ir/body.py``).
    """
    one = mover.builder.const(1.0, "float32")
    return mover.builder.make("mul", (node, one), dtype, node.shape, (), node.location)


def one_of(root: Node, dims: Sequence[int], mover: Mover) -> Node:
    """Cuts ``root``, a pointwise result that does not vary along ``dims``, to one element along them."""
    order = topological([root], leaves=_SHAPES_TELL | {VIEW})
    needed = {id(root)}
    for node in reversed(order):
        if id(node) in needed and (node.kind.commutes or _only_chosen(node, dims)):
            needed.update(map(id, node.inputs[node.kind is GATHER :]))
    cut: dict[int, Node] = {}
    for node in order:
        if id(node) not in needed:
            continue
        source = node.under_expand
        if source.kind.is_number:
            cut[id(node)] = source
            continue
        shape = tuple(1 if dim in dims else size for dim, size in enumerate(node.shape))
        if node.kind.commutes:
            cut[id(node)] = mover.builder.like(node, [cut[id(child)] for child in node.inputs], shape)
        elif _only_chosen(node, dims):
            indices = [cut[id(child)] for child in node.inputs[1:]]
            cut[id(node)] = mover.builder.like(node, (node.inputs[0], *indices), shape)
        elif source is not node and all(source.shape[dim] == 1 for dim in dims):
            cut[id(node)] = mover.move(source, ("expand",), shape)
        else:
            cut[id(node)] = node
            for dim in dims:
                cut[id(node)] = mover.slice(cut[id(node)], dim, 0, 1)
    return cut[id(root)]


def _only_chosen(node: Node, dims: Sequence[int]) -> bool:
    """Returns whether ``node`` is a gather whose indices alone have the dimensions ``dims``."""
    return node.kind is GATHER and not set(dims) & set(node.attrs)


def varies(node: Node, dims: Sequence[int]) -> bool:
    """Returns whether the elements of ``node`` may differ along any of ``dims``; False only if they provably do not."""
    return not varying_dims(node).isdisjoint(dims)


def varying_dims(node: Node) -> frozenset[int]:
    """Returns the dimensions along which the elements of ``node`` may differ."""
    return varying(topological([node], leaves=_SHAPES_TELL))[id(node)]


_SHAPES_TELL = frozenset(kind for kind in STRUCTURED if not kind.commutes) - {VIEW, GATHER}
"""Kinds whose own shape tells along which dimensions elements may differ."""


def varying(order: Sequence[Node]) -> dict[int, frozenset[int]]:
    """Returns the dimensions along which the elements of each node may differ, by the node's id.

    Args:
        order: nodes, each after its inputs.
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
            dims = [dim for dim in dims if dim not in node.attrs.dims]
        elif node.kind.commutes:
            dims = frozenset().union(*(dims_by_id[id(child)] for child in node.inputs))
        dims_by_id[id(node)] = frozenset(dim for dim in dims if node.shape[dim] != 1)
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
