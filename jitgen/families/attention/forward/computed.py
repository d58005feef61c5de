"""Lets a kernel compute keys and values as it reads them: from the pages of a cache, from codes and scales.

``k_pages[table]`` is a gather, and the view of it that has all keys of a sequence in one dimension is a reshape, which
merges blocks (an index chooses their page) with the positions in a page. No strides describe it, but indices do: key n
is position ``n % P`` of the page that the table has for block ``n // P``. So the reshape becomes a gather whose indices
are computed.

What is computed pointwise of one tensor of keys and of values that are the same for all elements of a key, such as
``codes * scale``, is left in place: reading codes is cheaper than reading a copy of the keys, and it needs none.
"""

from __future__ import annotations

from jitgen.ir import symbols
from jitgen.ir.analysis import rewritten, varying, varying_dims
from jitgen.ir.gathers import gathered_dims
from jitgen.ir.graph import Node, Shape, topological, walked
from jitgen.ir.nodes import GATHER, INPUT, IOTA, VIEW
from jitgen.ir.symbols import Size
from jitgen.ir.views import Mover
from jitgen.kernel.operands import item_size

MOST_OPERATIONS = 16
"""Operations for an element of a key that each block of rows does again; more of them are done once, before."""
MOST_SHORT = 2**31 - 1
"""Keys up to which their positions have 32 bits."""


def in_kernel(node: Node, inner: int, mover: Mover) -> Node | None:
    """Returns ``node``, keys or values with the elements of a key along ``inner``, as a kernel may compute them; None
    if they have to be in memory before."""
    node = with_computed_pages(node, mover)
    order = topological([node])
    varied = varying(order)
    reached = set(walked([node], _computed_from))  # down to what is loaded
    leaves = [node_ for node_ in reached if not _computed_from(node_) and not node_.kind.is_number]
    gathers = [node_ for node_ in reached if node_.kind is GATHER]
    if any(node_.under_views.kind not in (INPUT, IOTA) for node_ in leaves):
        return None
    if any(inner in varied[id(index)] for gather in gathers for index in gather.inputs[1:]):
        return None
    loaded = [node_ for node_ in (*leaves, *gathers) if inner in varied[id(node_)]]
    narrow = all(
        node_.under_views.kind is not IOTA and item_size(node_.dtype) <= item_size(node.dtype) for node_ in loaded
    )
    few = sum(node_.kind.is_pointwise for node_ in reached) <= MOST_OPERATIONS
    return node if len(loaded) == 1 and narrow and few else None


def _computed_from(node: Node) -> tuple[Node, ...]:
    """Returns the nodes from which a kernel computes an element of ``node``; none if it is loaded."""
    if node.kind is GATHER:
        return node.inputs[1:]
    return node.inputs if node.kind.is_pointwise else ()


def with_computed_pages(root: Node, mover: Mover) -> Node:
    """Rewrites reshapes under ``root`` that merge what an index chooses with positions to gathers with computed
    indices."""

    def change(node: Node, rebuilt: Node) -> Node:
        if rebuilt.kind is not VIEW:
            return rebuilt
        (source,) = rebuilt.inputs
        if source.kind is GATHER and rebuilt.attrs.kind == "reshape":
            return _merged(source, rebuilt.shape, mover) or rebuilt
        return mover.move(source, rebuilt.attrs, rebuilt.shape)

    if GATHER not in root.kinds:
        return root
    return rewritten(root, mover, change)


def _merged(gather: Node, shape: Shape, mover: Mover) -> Node | None:
    """Merges the dimension along which an index chooses with the next one in a reshape of ``gather`` to ``shape``; None
    if it changes others too. That sizes say so may become a guard."""
    sizes = gather.shape
    if len(shape) != len(sizes) - 1:
        return None
    varied = frozenset().union(*map(varying_dims, gather.inputs[1:]))
    for block in range(len(shape)):
        if block in gather.attrs or block + 1 not in gather.attrs or (block not in varied and sizes[block] != 1):
            continue
        merged = (*sizes[:block], symbols.product(sizes[block : block + 2]), *sizes[block + 2 :])
        same = [symbols.compare("eq", left, right) for left, right in zip(merged, shape, strict=True)]
        if all(symbols.evaluate(condition, mover.environment) for condition in same):
            break
    else:
        return None
    if not all(map(mover.decide, same)):
        return None
    at, along, length = block, block + 1, sizes[block + 1]
    make, builder = mover.builder.make, mover.builder
    # A division of 64 bits is a function of some hundred instructions on a GPU, and each lane has several for each key.
    is_short = mover.decide(symbols.compare("le", shape[at], MOST_SHORT))
    dtype = "int32" if is_short else "int64"
    position = make("iota", (), dtype, shape, (at,))
    size = builder.scalar(length, dtype) if not isinstance(length, int) else builder.const(length, dtype)
    number = make("floor_divide", (position, size), dtype, shape)
    chosen = {block: number, along: make("sub", (position, make("mul", (number, size), dtype, shape)), dtype, shape)}
    indices = [_reindexed(index, block, along, chosen, shape, mover) for index in gather.inputs[1:]]
    if any(index is None for index in indices):
        return None
    coordinates = []
    dims = gathered_dims(gather.attrs)
    for dim, coordinate in enumerate(gather.attrs):
        if coordinate in chosen:
            indices.append(chosen[coordinate])
            coordinates.append(-len(indices))
        elif coordinate < 0:
            coordinates.append(-1 - dims.index(dim))
        else:
            coordinates.append(coordinate - (coordinate > along))
    chosen_indices = [index for index in indices if index is not None]
    return make("gather", (gather.inputs[0], *chosen_indices), gather.dtype, shape, tuple(coordinates), gather.location)


def _reindexed(root: Node, block: int, along: int, chosen: dict[int, Node], shape: Shape, mover: Mover) -> Node | None:
    """Indexes ``root``, which is the same along ``along``, at the block of each position of ``shape``; None if it
    varies along ``along`` or is no pointwise function of tensors."""
    order = topological([root])
    varied = varying(order)
    if along in varied[id(root)]:
        return None
    memo: dict[int, Node] = {}
    for node in order:
        if node.kind.is_number:
            memo[id(node)] = node
        elif node.kind.is_pointwise:
            children = [memo.get(id(child)) for child in node.inputs]
            if any(child is None for child in children):
                return None
            memo[id(node)] = mover.builder.like(node, [c for c in children if c is not None], shape)
        elif node.is_in_memory and len(node.shape) == len(root.shape):
            memo[id(node)] = _looked_up(node, block, along, chosen[block], shape, varied[id(node)], mover)
    return memo.get(id(root))


def _looked_up(
    table: Node, block: int, along: int, chosen: Node, shape: Shape, varied: frozenset[int], mover: Mover
) -> Node:
    """Looks up the element of ``table`` for the block of each position of ``shape``."""
    one: tuple[Size, ...] = (*table.shape[:along], *table.shape[along + 1 :])
    single = mover.move(mover.slice(table, along, 0, 1), ("squeeze", along), one)
    if block not in varied:  # the same for all blocks
        first = mover.slice(single, block, 0, 1)
        return mover.move(first, ("expand",), shape)
    coordinates = tuple(-1 if dim == block else dim for dim in range(len(one)))
    return mover.builder.make("gather", (single, chosen), table.dtype, shape, coordinates, table.location)
