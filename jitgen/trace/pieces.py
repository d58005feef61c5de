"""Turns tensors that a function makes and fills by slices into concatenations, such as
``k = x.new_empty(...); k[..., :16] = a; k[..., 16:] = b``.

What is written into a made tensor is joined with what is left of it, so that the result is a concatenation: no slice is
stored before another, and a kernel that reads a slice reads what was written there. Writes are taken in their order, so
a later one replaces what it overlaps. What nobody wrote of ``torch.empty`` is 0.

Neighbours: ``scatters.py`` asks before it makes a scatter without indices, which is what any other tensor becomes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jitgen.ir import symbols
from jitgen.ir.graph import Node, Shape
from jitgen.ir.nodes import CAST, CAT, VIEW
from jitgen.trace.movement import narrowed, permuted, squeezed, unsqueeze, view
from jitgen.trace.typing import filled

if TYPE_CHECKING:
    from jitgen.trace.tracer import Trace

Movements = Sequence[tuple[Any, Shape]]
Box = tuple[tuple[Any, Any] | None, ...]
"""A part of a tensor: start and length for each dimension; None where it is the whole dimension."""
Write = Callable[[Node, Node, Movements], Node]
"""Writes a value into the view of a tensor that movements lead to."""


def placed(trace: Trace, base: Node, value: Node, movements: Movements, write: Write) -> Node | None:
    """Returns ``base`` with ``value`` in the view that ``movements`` lead to, as a concatenation; None where ``base``
    is none and no constant, or where the view is no box of it.

    Args:
        value: of the view's shape and the base's dtype.
        write: does the same to any tensor.
    """
    strided = _in_phases(trace, base, movements)
    if strided is not None:
        split, movements = strided
        whole = placed(trace, split, value, movements, write)
        return None if whole is None else view(trace, whole, ("reshape",), base.shape)
    if base.kind is not CAT and _number(base) is None:
        return None
    box = _box_of(trace, base, value, movements)
    if box is None:
        return None
    result = _put(trace, base, *box, write)
    return result if result.kind is CAT else None


def _number(node: Node) -> Node | None:
    """Returns the number that every element of ``node`` is; None where it is no constant."""
    scalar = node.under_views
    number = scalar.inputs[0] if scalar.kind is CAST else scalar
    return scalar if number.kind.is_number and not scalar.shape else None


def _in_phases(trace: Trace, base: Node, movements: Movements) -> tuple[Node, Movements] | None:
    """Returns ``base`` with its dimension of n elements as (n / step, step), and the movements that lead from there,
    where the first one takes every ``step``-th element of the dimension."""
    if not movements:
        return None
    (kind, *parameters), shape = movements[0]
    if kind != "slice" or parameters[2] in (0, 1):
        return None
    dim, start, step = parameters
    count = symbols.mul(shape[dim], step)
    if not isinstance(start, int) or not 0 <= start < step:
        return None
    split = (*base.shape[:dim], shape[dim], step, *base.shape[dim + 1 :])
    number = _number(base)
    if number is not None and trace.guards.equal(count, base.shape[dim]):
        phases = filled(trace, number, split)
    elif base.kind is VIEW and base.attrs.kind == "reshape" and _same(trace, base.inputs[0].shape, split):
        phases = base.inputs[0]
        split = phases.shape
    else:
        return None
    one = (*split[: dim + 1], 1, *split[dim + 2 :])
    shape = (*shape[:dim], split[dim], *shape[dim + 1 :])
    return phases, ((("slice", dim + 1, start, 1), one), (("squeeze", dim + 1), shape), *movements[1:])


def _same(trace: Trace, shape: Shape, other: Shape) -> bool:
    return len(shape) == len(other) and all(
        trace.guards.equal(size, wanted) for size, wanted in zip(shape, other, strict=True)
    )


def _box_of(trace: Trace, base: Node, value: Node, movements: Movements) -> tuple[Box, Node] | None:
    """Returns the box of ``base`` that ``movements`` lead to, and ``value`` in its shape; None where they lead to no
    box."""
    box: list[tuple[Any, Any] | None] = [None] * len(base.shape)
    dims: list[int | None] = list(range(len(base.shape)))
    for (kind, *parameters), shape in movements:
        if kind == "slice":
            dim, start, step = parameters
            source = dims[dim]
            if step != 1 or source is None:
                return None
            before, whole = box[source] or (0, base.shape[source])
            if shape[dim] != whole:
                box[source] = (symbols.add(before, start), shape[dim])
        elif kind == "squeeze":
            del dims[parameters[0]]
        elif kind == "unsqueeze":
            dims.insert(parameters[0], None)
        elif kind == "permute":
            dims = [dims[source] for source in parameters[0]]
        else:
            return None
    for position in reversed([position for position, dim in enumerate(dims) if dim is None]):
        del dims[position]
        value = squeezed(trace, value, position)
    kept = [dim for dim in dims if dim is not None]
    value = permuted(trace, value, sorted(range(len(kept)), key=kept.__getitem__))
    for dim in (dim for dim in range(len(base.shape)) if dim not in kept):
        value = unsqueeze(trace, value, dim)
    return tuple(box), value


def _put(trace: Trace, node: Node, box: Box, value: Node, write: Write) -> Node:
    """Returns ``node`` with ``value`` in ``box``."""
    slices = [(dim, *bounds) for dim, bounds in enumerate(box) if bounds is not None]
    if not slices:
        return value
    if node.kind is CAT:
        return _put_into_joined(trace, node, box, value, write)
    number = _number(node)
    if number is None and any(kind.reads_others for kind in node.kinds):
        movements, shape = [], node.shape
        for dim, start, length in slices:
            shape = (*shape[:dim], length, *shape[dim + 1 :])
            movements.append((("slice", dim, start, 1), shape))
        return write(node, value, movements)
    dim, start, length = slices[0]
    sizes: tuple[Any, ...] = (start, length, symbols.sub(node.shape[dim], symbols.add(start, length)))
    begins = (0, start, symbols.add(start, length))
    before, inside, behind = (
        _sliced(trace, node, number, dim, begin, size) for begin, size in zip(begins, sizes, strict=True)
    )
    inside = _put(trace, inside, (*box[:dim], None, *box[dim + 1 :]), value, write)
    return _joined(trace, [before, inside, behind], dim, node.shape)


def _sliced(trace: Trace, node: Node, number: Node | None, dim: int, start: Any, size: Any) -> Node:
    """Returns ``size`` elements of ``node`` along ``dim``: of a constant, or of what is computed for each element."""
    if number is not None:
        return filled(trace, number, (*node.shape[:dim], size, *node.shape[dim + 1 :]))
    return narrowed(trace, node, dim, start, size)


def _put_into_joined(trace: Trace, node: Node, box: Box, value: Node, write: Write) -> Node:
    """Returns the concatenation ``node`` with ``value`` in ``box``: each piece is kept, replaced or written into."""
    dim = node.attrs.dim
    first, length = box[dim] or (0, node.shape[dim])
    last = symbols.add(first, length)
    others = (*box[:dim], None, *box[dim + 1 :])
    replaces = not any(others)

    def compare(op: str, left: Any, right: Any) -> bool:
        return trace.guards.decide(symbols.compare(op, left, right))

    def between(low: Any, high: Any) -> Node:
        size = symbols.sub(high, low)
        return value if size == value.shape[dim] else narrowed(trace, value, dim, symbols.sub(low, first), size)

    pieces: list[Node] = []
    begin: Any = 0
    whole: list[Any] = []  # where the pieces begin and end that are replaced as wholes, and follow one another
    for piece in node.inputs:
        end = symbols.add(begin, piece.shape[dim])
        apart = compare("le", end, first) or compare("ge", begin, last)
        low = begin if apart or compare("ge", begin, first) else first
        high = end if apart or compare("le", end, last) else last
        if replaces and not apart and (low, high) == (begin, end):
            whole = [whole[0] if whole else low, high]
        else:
            if whole:
                pieces.append(between(*whole))
                whole = []
            if not apart:
                inside = None if (low, high) == (begin, end) else (symbols.sub(low, begin), symbols.sub(high, low))
                piece = _put(trace, piece, (*box[:dim], inside, *box[dim + 1 :]), between(low, high), write)
            pieces.append(piece)
        begin = end
    if whole:
        pieces.append(between(*whole))
    return _joined(trace, pieces, dim, node.shape)


def _joined(trace: Trace, pieces: Sequence[Node], dim: int, shape: Shape) -> Node:
    """Joins ``pieces`` along ``dim``, those of a piece that is joined so itself, and none that are empty."""
    flat: list[Node] = []
    for piece in pieces:
        if piece.shape[dim] != 0:
            flat += piece.inputs if piece.kind is CAT and piece.attrs.dim == dim else (piece,)
    return flat[0] if len(flat) == 1 else trace.make("cat", flat, flat[0].dtype, shape, (dim,))
