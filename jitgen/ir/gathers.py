"""Gathers: elements of a tensor that integers choose, and how views move through them.

A ``gather`` has the inputs ``(source, index, ...)``, of which the indices are int64 and have its shape (or are 0-d
numbers), and the attrs ``places``, an int for every dimension of the source:

* ``k`` from 0 on: the source is read at the gather's own coordinate ``k``, and the two sizes are equal;
* ``-1 - j``: it is read at the value of index ``j``, which counts from 0; each index is the place of one dimension.

So ``F.embedding(ids, weight)`` has the places ``(-1, rank of ids)``; along the dimensions of ``ids``, which are no
places, only the index varies. An index in range is in [0, size); the trace adds the size to one that may be negative.
A kernel checks indices: one out of range reads element 0 instead, and a kernel on a CPU reports it, so that the
launcher (``runtime/launcher.py``) raises IndexError.

An address is then affine in the coordinates plus, for each index, its value times a stride. Views of the result are
the same views of the indices, with the source's dimensions moved along where they are places; views of the source are
strides, as those of every input are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jitgen.ir import symbols
from jitgen.ir.symbols import Size

if TYPE_CHECKING:
    from jitgen.ir.graph import Node, Shape
    from jitgen.ir.views import Mover

Places = tuple[int, ...]


def gathered_dims(places: Places) -> tuple[int, ...]:
    """The dimension of the source that each index is the place of, in the order of the indices."""
    return tuple(places.index(-1 - number) for number in range(sum(place < 0 for place in places)))


def to_iteration_space(source: Shape, shape: Shape, places: Places) -> list[tuple[tuple[Any, ...], Shape]]:
    """The movements from a tensor of the sizes ``source`` to a view of it that has the shape of the indices, ``shape``,
    followed by the sizes that they choose along.

    Along dimensions of ``shape`` that are no places, the view repeats its elements; along others it has as many of the
    tensor's first elements as ``shape`` says.
    """
    at = {place: dim for dim, place in enumerate(places) if place >= 0}
    order = (*(at[place] for place in sorted(at)), *gathered_dims(places))
    sizes: list[Size] = [source[dim] for dim in order]
    movements: list[tuple[tuple[Any, ...], Shape]] = [(("permute", order), tuple(sizes))]
    for dim, place in enumerate(sorted(at)):
        if sizes[dim] != shape[place]:
            sizes[dim] = shape[place]
            movements.append((("slice", dim, 0, 1), tuple(sizes)))
    for dim in range(len(shape)):
        if dim not in at:
            sizes.insert(dim, 1)
            movements.append((("unsqueeze", dim), tuple(sizes)))
    movements.append((("expand",), (*shape, *sizes[len(shape) :])))
    return movements


def moved_gather(mover: Mover, node: Node, attrs: tuple[Any, ...], shape: Shape) -> Node | None:
    """The movement ``attrs`` applied to the operands of a gather; None for a reshape that mixes its places."""
    found = _moved_source(mover, node, attrs, shape)
    if found is None:
        return None
    source, places = found
    indices = [i if i.op in ("const", "scalar") else mover.move(i, attrs, shape) for i in node.inputs[1:]]
    return mover.builder.make("gather", (source, *indices), node.dtype, shape, places, node.location)


def _moved_source(mover: Mover, node: Node, attrs: tuple[Any, ...], shape: Shape) -> tuple[Node, Places] | None:
    """The source and the places of the gather ``node`` under the movement ``attrs``."""
    source, places, kind = node.inputs[0], node.attrs, attrs[0]
    if kind == "permute":
        return source, tuple(attrs[1].index(place) if place >= 0 else place for place in places)
    if kind == "unsqueeze":
        return source, tuple(place + (attrs[1] <= place) for place in places)
    if kind == "squeeze":
        source, places = _without_place(mover, source, places, attrs[1])
        return source, tuple(place - (attrs[1] < place) for place in places)
    if kind == "slice":
        _, dim, start, step = attrs
        if dim in places:
            at = places.index(dim)
            sizes = (*source.shape[:at], shape[dim], *source.shape[at + 1 :])
            source = mover.move(source, ("slice", at, start, step), sizes)
        return source, places
    if kind == "expand":
        for dim, (old, new) in enumerate(zip(node.shape, shape, strict=True)):
            if old == 1 and new != 1:
                source, places = _without_place(mover, source, places, dim)
        return source, places
    return _reshaped_source(mover, node, shape)


def _without_place(mover: Mover, source: Node, places: Places, dim: int) -> tuple[Node, Places]:
    """Source and places without the dimension of the source, of size 1, that is read at coordinate ``dim``."""
    if dim not in places:
        return source, places
    at = places.index(dim)
    source = mover.move(source, ("squeeze", at), (*source.shape[:at], *source.shape[at + 1 :]))
    return source, (*places[:at], *places[at + 1 :])


def _reshaped_source(mover: Mover, node: Node, shape: Shape) -> tuple[Node, Places] | None:
    """A reshape divides the dimensions into groups that it merges and splits; within a group, either no dimension is a
    place, or all of them (but those of size 1) are, and are neighbours in the source."""
    source, places = node.inputs[0], list(node.attrs)
    sizes: list[Any] = list(source.shape)
    groups = _groups(node.shape, shape)
    if groups is None:
        return None
    for before, after in reversed(groups):
        inside = [at for at, place in enumerate(places) if place in before]
        if not inside:
            continue
        are_run = [places[at] for at in inside] == sorted(places[at] for at in inside)
        are_run = are_run and inside == list(range(inside[0], inside[0] + len(inside)))
        if not are_run or symbols.product(sizes[at] for at in inside) != symbols.product(shape[dim] for dim in after):
            return None
        end = inside[-1] + 1
        sizes[inside[0] : end] = [shape[dim] for dim in after]
        # Not yet negative, so that the groups before this one do not take them for theirs.
        places[inside[0] : end] = [len(node.shape) + dim for dim in after]
    places = [place - len(node.shape) if place >= len(node.shape) else place for place in places]
    return mover.move(source, ("reshape",), tuple(sizes)), tuple(places)


def _groups(before: Sequence[Size], after: Sequence[Size]) -> list[tuple[range, range]] | None:
    """The least groups of neighbouring dimensions whose products are equal; None where no expressions prove any."""
    groups: list[tuple[range, range]] = []
    start = (0, 0)
    products = [symbols.product(after[:end]) for end in range(len(after) + 1)]
    for end in range(1, len(before) + 1):
        whole = symbols.product(before[:end])
        to = (
            len(after)
            if end == len(before)
            else next((t for t in range(start[1], len(after)) if products[t] == whole), None)
        )
        if to is None or (end == len(before) and whole != products[to]):
            continue
        groups.append((range(start[0], end), range(start[1], to)))
        start = (end, to)
    return groups if start == (len(before), len(after)) else None
