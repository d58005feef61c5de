"""Row reductions: which results one kernel can compute, row by row.

A *row region* iterates over ``(outer..., row...)``: for every index of the outer dimensions it walks one row, as often
as its reductions depend on one another, and combines elements of the row with values of the whole row. Softmax is one:
the maximum, then the sum of exponentials, then the quotients. So is any pointwise work before, between and after
reductions over the same dimensions, with several results, of which some may have one element per row.

``group`` finds the results that such a region can hold. What does not fit is materialized: computed by a kernel of its
own into a temporary, which always gives the right answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from jitgen.ir.graph import Node, Shape, topological
from jitgen.ir.regions import Region, Store
from jitgen.ir.views import BARRIERS, Mover

KINDS = ("sum", "prod", "max", "min", "argmax", "argmin", "any", "all")
"""What a ``reduce`` node computes; ``argmax`` and ``argmin`` give the first index, and NaN wins, as in torch."""

Materialize = Callable[[Node], Node]


@dataclass(frozen=True)
class _Rows:
    """The rows of a reduction: its operand's shape and the dimensions it reduces."""

    shape: Shape
    dims: tuple[int, ...]


def has_reduce(node: Node) -> bool:
    return any(part.op == "reduce" for part in topological([node]))


def group(results: Sequence[Node], mover: Mover, materialize: Materialize) -> tuple[list[Region], list[Node | None]]:
    """Row regions for what they can hold of ``results``, and the other results with their reductions materialized.

    Returns:
        the regions, whose stores name results by position, and a list as long as ``results``: None where a region
        computes the result, else the node a pointwise kernel shall compute.
    """
    gathered: dict[_Rows, list[Store]] = {}
    rest: list[Node | None] = list(results)
    for position, node in enumerate(results):
        if not has_reduce(node):
            continue
        rows, store = _as_rows(position, node, mover, materialize)
        if rows is None or store is None:
            rest[position] = without_reductions(node, mover, materialize)
        else:
            gathered.setdefault(rows, []).append(store)
            rest[position] = None
    for position, node in enumerate(results):
        if rest[position] is not None and not has_reduce(node) and node.op != "cat":
            joined = _joins(node, gathered)
            if joined is not None:
                gathered[joined].append(Store(position, node))
                rest[position] = None
    return [_rows_last(rows, stores, mover) for rows, stores in gathered.items()], rest


def _as_rows(position: int, node: Node, mover: Mover, materialize: Materialize) -> tuple[_Rows | None, Store | None]:
    """The rows over which ``node`` can be computed, and its store in their iteration space."""
    outermost = next(_outermost(node))
    rows = _Rows(outermost.inputs[0].shape, outermost.attrs[1])
    store = Store(position, node)
    full, kept = rows.shape, tuple(1 if d in rows.dims else size for d, size in enumerate(rows.shape))
    for dim, size in enumerate(kept):
        shape = store.value.shape
        if size == 1 and len(shape) < len(kept) and (dim >= len(shape) or shape[dim] != 1 or dim in rows.dims):
            shape = (*shape[:dim], 1, *shape[dim:])
            moved = mover.move(store.value, ("unsqueeze", dim), shape)
            store = Store(position, moved, (*store.movements, (("unsqueeze", dim), shape)))
    if store.value.shape not in (full, kept):
        return None, None
    if store.value.shape == full and not _is_run(rows.dims):
        return None, None  # a row of the result would be no run of even strides
    value = _fit(store.value, rows, mover, materialize)
    return (None, None) if value is None else (rows, Store(position, value, store.movements))


def _is_run(dims: Sequence[int]) -> bool:
    """Whether ``dims`` follow one another, so that they are one in a dense tensor."""
    return tuple(dims) == tuple(range(dims[0], dims[0] + len(dims)))


def _outermost(node: Node) -> Iterator[Node]:
    """Reductions reached from ``node`` without passing another, first the first met."""
    stack, seen = [node], set()
    while stack:
        part = stack.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if part.op == "reduce":
            yield part
        else:
            stack.extend(reversed(part.inputs))


def _fit(root: Node, rows: _Rows, mover: Mover, materialize: Materialize) -> Node | None:
    """``root`` with what a row region cannot compute materialized; None where nothing is reduced over ``rows``."""
    kept = tuple(1 if d in rows.dims else size for d, size in enumerate(rows.shape))

    def whole(node: Node, rebuilt: Node) -> Node:
        # What is reduced may itself come from reductions over other rows: it is computed first, as one.
        if _is_over(node, rows) and any(_is_foreign(part, rows) for part in topological(node.inputs)):
            return mover.builder.like(node, [materialize(node.inputs[0])])
        return rebuilt

    def part(node: Node, rebuilt: Node) -> Node:
        if node.op == "cat" or _is_foreign(node, rows):
            return materialize(rebuilt)
        if node.op == "view" and has_reduce(rebuilt):
            source = rebuilt.inputs[0]
            if not (node.attrs[0] == "expand" and source.shape == kept and node.shape == rows.shape):
                return mover.builder.like(rebuilt, [materialize(source)])
        return rebuilt

    result = rewritten(rewritten(root, mover, whole), mover, part)
    return result if has_reduce(result) else None


def _is_over(node: Node, rows: _Rows) -> bool:
    return node.op == "reduce" and (node.inputs[0].shape, node.attrs[1]) == (rows.shape, rows.dims)


def _is_foreign(node: Node, rows: _Rows) -> bool:
    return node.op == "reduce" and not _is_over(node, rows)


def rewritten(root: Node, mover: Mover, change: Callable[[Node, Node], Node]) -> Node:
    """``root`` with every node replaced by ``change(node, node over the replaced inputs)``."""
    memo: dict[int, Node] = {}
    for node in topological([root]):
        children = [memo[id(child)] for child in node.inputs]
        same = all(a is b for a, b in zip(children, node.inputs, strict=True))
        memo[id(node)] = change(node, node if same else mover.builder.like(node, children))
    return memo[id(root)]


def without_reductions(root: Node, mover: Mover, materialize: Materialize) -> Node:
    """``root`` with every reduction read from a temporary, or what is computed for whole rows before it meets elements:
    softmax's quotient is taken once for each row, not once for each element."""
    order = topological([root])
    reduced: set[int] = set()
    for node in order:
        if node.op == "reduce" or any(id(child) in reduced for child in node.inputs):
            reduced.add(id(node))
    varying = _varying(order)
    held: dict[int, Node] = {}
    needed = {id(root)}
    for node in reversed(order):
        if id(node) not in needed or id(node) not in reduced:
            continue
        alike = [dim for dim, size in enumerate(node.shape) if size != 1 and dim not in varying[id(node)]]
        if node.op == "reduce":
            held[id(node)] = node
        elif node.op not in BARRIERS and alike:
            held[id(node)] = _one_of(node, alike, mover)
        elif node.op == "view" and node.attrs[0] == "expand" and node.inputs[0].op not in BARRIERS:
            held[id(node)] = node.inputs[0]
        else:
            needed.update(map(id, node.inputs))
    read: dict[int, Node] = {}
    for node in order:
        if id(node) not in needed or id(node) not in reduced:
            read[id(node)] = node
        elif id(node) in held:
            one = _from_memory(held[id(node)], mover, materialize)
            read[id(node)] = one if one.shape == node.shape else mover.move(one, ("expand",), node.shape)
        elif node.op == "view":
            read[id(node)] = mover.move(read[id(node.inputs[0])], node.attrs, node.shape)
        else:
            read[id(node)] = mover.builder.like(node, [read[id(child)] for child in node.inputs])
    return read[id(root)]


def _from_memory(node: Node, mover: Mover, materialize: Materialize) -> Node:
    """``node`` from a temporary; one that is no reduction, as it is computed, not as it would be stored."""
    if node.op == "reduce" or node.dtype not in ("float16", "bfloat16"):
        return materialize(node)
    return unrounded(materialize(unrounded(node, "float32", mover)), node.dtype, mover)


def unrounded(node: Node, dtype: str, mover: Mover) -> Node:
    """``node``, computed in float32, as ``dtype``. A cast would round it; between operations no value is rounded."""
    one = mover.builder.const(1.0, "float32")
    return mover.builder.make("mul", (node, one), dtype, node.shape, (), node.location)


def _one_of(root: Node, dims: Sequence[int], mover: Mover) -> Node:
    """``root``, a pointwise result that is the same all along ``dims``, with one element there."""
    order = topological([root])
    needed = {id(root)}
    for node in reversed(order):
        if id(node) in needed and node.op not in BARRIERS:
            needed.update(map(id, node.inputs))
    found: dict[int, Node] = {}
    for node in order:
        if id(node) not in needed:
            continue
        source = node.inputs[0] if node.op == "view" and node.attrs[0] == "expand" else node
        if source.op in ("const", "scalar"):
            found[id(node)] = source
            continue
        shape = tuple(1 if dim in dims else size for dim, size in enumerate(node.shape))
        if node.op not in BARRIERS:
            found[id(node)] = mover.builder.like(node, [found[id(child)] for child in node.inputs], shape)
        elif source is not node and all(source.shape[dim] == 1 for dim in dims):
            found[id(node)] = mover.move(source, ("expand",), shape)
        else:
            found[id(node)] = node
            for dim in dims:
                found[id(node)] = mover.slice(found[id(node)], dim, 0, 1)
    return found[id(root)]


def are_columns(node: Node) -> bool:
    """Whether neighbouring elements of what ``node`` reduces belong to different rows: in a dense tensor they do."""
    shape = node.inputs[0].shape
    return len(shape) - 1 not in node.attrs[1] and shape[-1] != 1


def _joins(node: Node, gathered: dict[_Rows, list[Store]]) -> _Rows | None:
    """The rows among which a pointwise result costs nothing extra to read: same space, and a tensor in common."""
    leaves = {id(part) for part in topological([node]) if part.op in ("input", "view")}
    if any(part.op == "cat" for part in topological([node])):
        return None
    for rows, stores in gathered.items():
        read = topological(store.value for store in stores)
        if node.shape == rows.shape and _is_run(rows.dims) and any(id(part) in leaves for part in read):
            return rows
    return None


def _rows_last(rows: _Rows, stores: Sequence[Store], mover: Mover) -> Region:
    """The region, with its dimensions permuted so that the row's come last."""
    outer = [dim for dim in range(len(rows.shape)) if dim not in rows.dims]
    order = (*outer, *rows.dims)
    shape = tuple(rows.shape[dim] for dim in order)
    if order != tuple(range(len(order))):
        stores = [
            Store(
                store.result,
                mover.move(store.value, ("permute", order), tuple(store.value.shape[dim] for dim in order)),
                (*store.movements, (("permute", order), tuple(store.value.shape[dim] for dim in order))),
            )
            for store in stores
        ]
    return Region(shape, tuple(stores), len(rows.dims))


def varies(node: Node, dims: Sequence[int]) -> bool:
    """Whether ``node`` may differ along any of ``dims``: False only where it evidently does not."""
    return not _varying(topological([node]))[id(node)].isdisjoint(dims)


def _varying(order: Sequence[Node]) -> dict[int, frozenset[int]]:
    """For each node, by id, the dimensions along which it may differ; ``order``: each after its inputs."""
    found: dict[int, frozenset[int]] = {}
    for node in order:
        dims: Iterable[int] = range(len(node.shape))
        if node.op in ("const", "scalar"):
            dims = ()
        elif node.op == "view" and node.attrs[0] != "reshape":
            sources, under = ((dim, _source_dim(node, dim)) for dim in dims), found[id(node.inputs[0])]
            dims = [dim for dim, source in sources if source is not None and source in under]
        elif node.op == "iota":
            dims = (node.attrs[0],)
        elif node.op == "reduce":
            dims = [dim for dim in dims if dim not in node.attrs[1]]
        elif node.op not in BARRIERS:
            dims = frozenset().union(*(found[id(child)] for child in node.inputs))
        found[id(node)] = frozenset(dim for dim in dims if node.shape[dim] != 1)
    return found


def _source_dim(view: Node, dim: int) -> int | None:
    """The dimension of the view's source that ``dim`` walks; None where it walks none."""
    kind = view.attrs[0]
    source = view.inputs[0]
    if kind == "permute":
        return view.attrs[1][dim]
    if kind == "unsqueeze":
        return None if dim == view.attrs[1] else dim - (dim > view.attrs[1])
    if kind == "squeeze":
        return dim + (dim >= view.attrs[1])
    if kind == "expand" and (source.op in ("const", "scalar") or (source.shape[dim] == 1 and view.shape[dim] != 1)):
        return None
    return dim
