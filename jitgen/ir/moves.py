"""Moves a view of a node to views of its operands: a rule for each kind that has one.

A rule takes the ``Mover`` (``ir/views.py``), the node, the attributes of the view and the view's shape. It returns the
node that takes the view's place, or None where the view has to stay. Kinds whose every view is the same view of their
operands need no rule; a rule may change the node's own attributes, as a slice of the sorted dimension does.

Neighbours: the rows of ``ir/nodes.py`` name these rules, ``ir/gathers.py`` has the one of gathers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jitgen.ir import symbols
from jitgen.ir.equations import axes, equation
from jitgen.ir.scans import PLACES
from jitgen.ir.symbols import Size

if TYPE_CHECKING:
    from jitgen.ir.graph import Node, Shape
    from jitgen.ir.views import Mover


def move_reduce(mover: Mover, node: Node, attrs: tuple[Any, ...], shape: Shape) -> Node | None:
    """Applies the movement to the operand of a reduction; None if it affects a reduced dimension."""
    kind, dims, operand = attrs[0], node.attrs.dims, node.inputs[0]
    if kind == "permute":
        moved = tuple(sorted(attrs[1].index(dim) for dim in dims))
        whole = tuple(operand.shape[dim] for dim in attrs[1])
    elif kind == "unsqueeze":
        moved = tuple(dim + (attrs[1] <= dim) for dim in dims)
        whole = (*operand.shape[: attrs[1]], 1, *operand.shape[attrs[1] :])
    elif kind == "squeeze" and attrs[1] not in dims:
        moved = tuple(dim - (attrs[1] < dim) for dim in dims)
        whole = (*operand.shape[: attrs[1]], *operand.shape[attrs[1] + 1 :])
    elif kind == "slice" and attrs[1] not in dims:
        moved = dims
        whole = (*operand.shape[: attrs[1]], shape[attrs[1]], *operand.shape[attrs[1] + 1 :])
    else:
        return None
    return mover.builder.like(node, [mover.move(operand, attrs, whole)], shape, node.attrs._replace(dims=moved))


def move_contract(mover: Mover, node: Node, attrs: tuple[Any, ...], shape: Shape) -> Node | None:
    """Applies the movement to the operands of a product; None if it mixes batch, row and column axes."""
    x, weight = node.inputs
    batch, last, length = len(axes(node.attrs.equation).batch), len(node.shape) - 1, x.shape[-1]
    kind, dim = attrs[0], attrs[1] if len(attrs) > 1 else None
    if kind == "slice" and dim == last:
        if weight.is_in_memory or mover.slices_whole_tiles(weight, attrs):
            moved = mover.move(weight, ("slice", batch, *attrs[2:]), (*shape[:batch], shape[last], length))
            return _contract(mover, node, x, moved, batch, shape)
        return None
    if batch and (kind != "permute" and isinstance(dim, int) and dim < batch):
        if kind == "slice" and weight.is_weight:
            return None
        batch += {"unsqueeze": 1, "squeeze": -1}.get(kind, 0)
        weight = mover.move(weight, attrs, (*shape[:batch], *weight.shape[-2:]))
        return _contract(mover, node, mover.move(x, attrs, (*shape[:-1], length)), weight, batch, shape)
    if kind == "permute" and batch and attrs[1][:batch] != tuple(range(batch)):
        if attrs[1][-1] != last or max(attrs[1][:batch]) >= batch:
            return None
        order = (*attrs[1][:batch], batch, batch + 1)
        moved = mover.permute(weight, order)
        return _contract(mover, node, mover.move(x, attrs, (*shape[:-1], length)), moved, batch, shape)
    rows_only = (
        (kind == "slice")
        or (kind == "unsqueeze" and dim is not None and dim <= last)
        or (kind == "squeeze" and dim is not None and dim < last)
        or (kind == "permute" and attrs[1][-1] == last)
        or (
            kind == "reshape"
            and len(shape) > batch
            and (*shape[:batch], shape[-1]) == (*node.shape[:batch], node.shape[-1])
        )
    )
    if not rows_only:
        return None
    return _contract(mover, node, mover.move(x, attrs, (*shape[:-1], length)), weight, batch, shape)


def _contract(mover: Mover, node: Node, x: Node, weight: Node, batch: int, shape: Shape) -> Node:
    """Rebuilds the product ``node`` over moved operands, with the equation for the axes that they have now."""
    attrs = node.attrs._replace(equation=equation(batch, len(shape) - 1 - batch))
    return mover.builder.like(node, (x, weight), shape, attrs)


def move_grouped(mover: Mover, node: Node, attrs: tuple[Any, ...], shape: Shape) -> Node | None:
    """Applies a slice of columns to the weight of a grouped product; None for other movements."""
    x, weight, groups = node.inputs
    if attrs[:2] != ("slice", len(node.shape) - 1):
        return None
    if not (weight.is_in_memory or mover.slices_whole_tiles(weight, attrs)):
        return None
    columns = len(weight.shape) - 2
    sizes = (*weight.shape[:columns], shape[-1], weight.shape[-1])
    moved = mover.move(weight, ("slice", columns, *attrs[2:]), sizes)
    return mover.builder.like(node, (x, moved, groups), shape)


def _moved_dim(dim: int, attrs: tuple[Any, ...]) -> int | None:
    """Returns the dimension that ``dim`` is after a movement; None if that removes it, merges it or spreads it."""
    kind = attrs[0]
    if kind == "permute":
        return attrs[1].index(dim)
    if kind == "unsqueeze":
        return dim + (attrs[1] <= dim)
    if kind == "squeeze" and attrs[1] != dim:
        return dim - (attrs[1] < dim)
    return dim if kind == "slice" else None


def move_scan(mover: Mover, node: Node, attrs: tuple[Any, ...], shape: Shape) -> Node | None:
    """Applies the movement to what ``node`` scans; None if it cuts or merges the scanned dimension.

    A scan seen from its other end is the scan of what it combines seen so, in the other direction.
    """
    kind, dim, reverse = node.attrs
    moved = _moved_dim(dim, attrs)
    is_reversal = attrs == ("slice", dim, symbols.sub(node.shape[dim], 1), -1) and shape == node.shape
    if is_reversal and kind not in PLACES:
        reverse = not reverse
    elif moved is None or attrs[:2] == ("slice", dim):
        return None
    return mover.builder.like(node, [mover.move(node.inputs[0], attrs, shape)], shape, (kind, moved, reverse))


def move_sort(mover: Mover, node: Node, attrs: tuple[Any, ...], shape: Shape) -> Node | None:
    """Applies the movement to what ``node`` sorts. Of the sorted dimension, a slice gives fewer ranks of it."""
    (what, dim, descending, start), operand = node.attrs, node.inputs[0]
    moved, is_sliced = _moved_dim(dim, attrs), attrs[:2] == ("slice", dim)
    if moved is None or (is_sliced and attrs[3] != 1):
        return None
    if is_sliced:
        start = symbols.add(start, attrs[2])
    else:
        whole: Any = (*shape[:moved], operand.shape[dim], *shape[moved + 1 :])
        operand = mover.move(operand, attrs, whole)
    return mover.builder.like(node, [operand], shape, (what, moved, descending, start))


def move_limited(mover: Mover, node: Node, attrs: tuple[Any, ...], shape: Shape) -> Node:
    """Applies the movement to what computes the same from the elements of a row one by one."""
    return mover.move(node.inputs[1], attrs, shape)


def move_cat(mover: Mover, node: Node, attrs: tuple[Any, ...], shape: Shape) -> Node | None:
    """Applies the movement to each tensor that ``node`` joins; None if the result would not be joined of them."""
    dim, kind = node.attrs.dim, attrs[0]
    if kind == "slice" and attrs[1] == dim:
        return _slice_cat(mover, node, attrs, shape)
    if kind == "reshape":
        leading = _leading_dim(node.shape, dim, shape)
        if leading is None:
            return None
        target, rest = leading
        pieces = [
            mover.move(piece, attrs, (*shape[:target], symbols.mul(piece.shape[dim], rest), *shape[target + 1 :]))  # type: ignore[arg-type]
            for piece in node.inputs
        ]
        return mover.builder.like(node, pieces, shape, (target,))
    moved = _moved_dim(dim, attrs) if kind in ("permute", "unsqueeze", "squeeze") else dim
    if moved is None or (kind == "expand" and node.shape[dim] == 1 and shape[dim] != 1):
        return None
    pieces = [
        mover.move(piece, attrs, (*shape[:moved], piece.shape[dim], *shape[moved + 1 :])) for piece in node.inputs
    ]
    return mover.builder.like(node, pieces, shape, (moved,))


def _slice_cat(mover: Mover, node: Node, attrs: tuple[Any, ...], shape: Shape) -> Node | None:
    """Slices along the concatenated dimension: the joined tensors that the slice overlaps, each sliced."""
    _, dim, start, step = attrs
    if step != 1:
        return None
    stop = symbols.add(start, shape[dim])
    pieces: list[Node] = []
    begin: Size = 0
    for piece in node.inputs:
        end = symbols.add(begin, piece.shape[dim])
        if mover.decide(symbols.compare("le", end, start)) or mover.decide(symbols.compare("ge", begin, stop)):
            begin = end  # type: ignore[assignment]
            continue
        low = start if mover.decide(symbols.compare("ge", start, begin)) else begin
        high = stop if mover.decide(symbols.compare("le", stop, end)) else end
        length = symbols.sub(high, low)
        overlap = (*shape[:dim], length, *shape[dim + 1 :])
        pieces.append(mover.move(piece, ("slice", dim, symbols.sub(low, begin), 1), overlap))  # type: ignore[arg-type]
        begin = end  # type: ignore[assignment]
    if len(pieces) == 1:
        return pieces[0]
    return mover.builder.like(node, pieces, shape) if pieces else None


def _leading_dim(before: Shape, dim: int, after: Shape) -> tuple[int, Size] | None:
    """Returns the dimension of ``after`` whose outermost factor is ``dim`` of ``before``, for a reshape of a
    concatenation.

    Tensors joined along ``dim`` are joined along that dimension of the reshaped result if the dimensions in front of
    ``dim`` match a prefix of ``after``, and ``dim`` is merged only with dimensions that follow it.

    Returns:
        (dimension of ``after``, product of the sizes that ``dim`` is merged with); None where there is none.
    """
    outer = symbols.product(before[:dim])
    prefix: Size = 1
    for target in range(len(after) + 1):
        if prefix == outer and (target == len(after) or after[target] != 1 or before[dim] == 1):
            break
        if target == len(after):
            return None
        prefix = symbols.mul(prefix, after[target])  # type: ignore[assignment]
    if target == len(after):
        return None
    rest: Size = 1
    for size in (*before[dim + 1 :], None):
        if symbols.mul(before[dim], rest) == after[target]:
            return target, rest
        if size is not None:
            rest = symbols.mul(rest, size)  # type: ignore[assignment]
    return None
