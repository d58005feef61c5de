"""Defines gathers: elements of a tensor that integers choose, and how views move through them.

A ``gather`` has the inputs ``(source, index, ...)``, of which the indices are int64 and have its shape (or are 0-d
numbers), and the attrs ``coordinates``, an int for every dimension of the source:

* ``k`` from 0 on: the source is read at the gather's own coordinate ``k``, and the two sizes are equal;
* ``-1 - j``: it is read at the value of index ``j``, which counts from 0; each index belongs to one dimension.

So ``F.embedding(ids, weight)`` has the coordinates ``(-1, rank of ids)``; along the dimensions of ``ids``, which are
not among them, only the index varies. An index in range is in [0, size); the trace adds the size to one that may be
negative. A kernel checks indices: one out of range reads element 0 instead, and a kernel on a CPU reports it, so that
the launcher (``runtime/launcher.py``) raises IndexError.

An address is then affine in the coordinates plus, for each index, its value times a stride. Views of the result are the
same views of the indices, with the source's dimensions moved along where they are read at a coordinate; views of the
source are strides, as those of every input are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jitgen.ir import symbols
from jitgen.ir.symbols import Size

if TYPE_CHECKING:
    from jitgen.ir.graph import Node, Shape
    from jitgen.ir.views import Mover

Coordinates = tuple[int, ...]


def gathered_dims(coordinates: Coordinates) -> tuple[int, ...]:
    """Returns the dimension of the source that each index belongs to, in the order of the indices."""
    return tuple(coordinates.index(-1 - number) for number in range(sum(coordinate < 0 for coordinate in coordinates)))


def to_iteration_space(source: Shape, shape: Shape, coordinates: Coordinates) -> list[tuple[tuple[Any, ...], Shape]]:
    """Returns the movements that bring a tensor of sizes ``source`` to the shape of the indices, ``shape``, followed by
    the sizes along which they choose.

    Along dimensions of ``shape`` that are not among the coordinates, the view repeats its elements; along others it has
    as many of the tensor's first elements as ``shape`` says.
    """
    at = {coordinate: dim for dim, coordinate in enumerate(coordinates) if coordinate >= 0}
    order = (*(at[coordinate] for coordinate in sorted(at)), *gathered_dims(coordinates))
    sizes: list[Size] = [source[dim] for dim in order]
    movements: list[tuple[tuple[Any, ...], Shape]] = [(("permute", order), tuple(sizes))]
    for dim, coordinate in enumerate(sorted(at)):
        if sizes[dim] != shape[coordinate]:
            sizes[dim] = shape[coordinate]
            movements.append((("slice", dim, 0, 1), tuple(sizes)))
    for dim in range(len(shape)):
        if dim not in at:
            sizes.insert(dim, 1)
            movements.append((("unsqueeze", dim), tuple(sizes)))
    movements.append((("expand",), (*shape, *sizes[len(shape) :])))
    return movements


def move_gather(mover: Mover, node: Node, attrs: tuple[Any, ...], shape: Shape) -> Node | None:
    """Applies the movement ``attrs`` to the operands of a gather; None for a reshape that mixes its coordinates."""
    moved = _moved_source(mover, node, attrs, shape)
    if moved is None:
        return None
    source, coordinates = moved
    indices = [index if index.kind.is_number else mover.move(index, attrs, shape) for index in node.inputs[1:]]
    return mover.builder.like(node, (source, *indices), shape, coordinates)


def _moved_source(mover: Mover, node: Node, attrs: tuple[Any, ...], shape: Shape) -> tuple[Node, Coordinates] | None:
    """Returns the source and the coordinates of the gather ``node`` under the movement ``attrs``."""
    source, coordinates, kind = node.inputs[0], node.attrs, attrs[0]
    if kind == "permute":
        return source, tuple(
            attrs[1].index(coordinate) if coordinate >= 0 else coordinate for coordinate in coordinates
        )
    if kind == "unsqueeze":
        return source, tuple(coordinate + (attrs[1] <= coordinate) for coordinate in coordinates)
    if kind == "squeeze":
        source, coordinates = _without_coordinate(mover, source, coordinates, attrs[1])
        return source, tuple(coordinate - (attrs[1] < coordinate) for coordinate in coordinates)
    if kind == "slice":
        _, dim, start, step = attrs
        if dim in coordinates:
            at = coordinates.index(dim)
            sizes = (*source.shape[:at], shape[dim], *source.shape[at + 1 :])
            source = mover.move(source, ("slice", at, start, step), sizes)
        return source, coordinates
    if kind == "expand":
        for dim, (old, new) in enumerate(zip(node.shape, shape, strict=True)):
            if old == 1 and new != 1:
                source, coordinates = _without_coordinate(mover, source, coordinates, dim)
        return source, coordinates
    return _reshaped_source(mover, node, shape)


def _without_coordinate(mover: Mover, source: Node, coordinates: Coordinates, dim: int) -> tuple[Node, Coordinates]:
    """Removes the dimension of the source, of size 1, that is read at coordinate ``dim``."""
    if dim not in coordinates:
        return source, coordinates
    at = coordinates.index(dim)
    source = mover.move(source, ("squeeze", at), (*source.shape[:at], *source.shape[at + 1 :]))
    return source, (*coordinates[:at], *coordinates[at + 1 :])


def _reshaped_source(mover: Mover, node: Node, shape: Shape) -> tuple[Node, Coordinates] | None:
    """Reshapes the source of a gather. A reshape divides the dimensions into groups that it merges and splits; within a
    group, either no dimension is a coordinate, or all of them (but those of size 1) are, and are neighbours in the
    source."""
    source, coordinates = node.inputs[0], list(node.attrs)
    sizes: list[Any] = list(source.shape)
    groups = _groups(node.shape, shape)
    if groups is None:
        return None
    for before, after in reversed(groups):
        inside = [at for at, coordinate in enumerate(coordinates) if coordinate in before]
        if not inside:
            continue
        are_run = [coordinates[at] for at in inside] == sorted(coordinates[at] for at in inside)
        are_run = are_run and inside == list(range(inside[0], inside[0] + len(inside)))
        if not are_run or symbols.product(sizes[at] for at in inside) != symbols.product(shape[dim] for dim in after):
            return None
        end = inside[-1] + 1
        sizes[inside[0] : end] = [shape[dim] for dim in after]
        # Not yet negative, so that the groups before this one do not take them for theirs.
        coordinates[inside[0] : end] = [len(node.shape) + dim for dim in after]
    coordinates = [
        coordinate - len(node.shape) if coordinate >= len(node.shape) else coordinate for coordinate in coordinates
    ]
    return mover.move(source, ("reshape",), tuple(sizes)), tuple(coordinates)


def _groups(before: Sequence[Size], after: Sequence[Size]) -> list[tuple[range, range]] | None:
    """Returns the least groups of neighbouring dimensions whose products are equal; None if no expressions prove
    any."""
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
