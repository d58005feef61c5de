"""Where an operand's elements are, as expressions in a dialect's text: sums of indices times strides."""

from __future__ import annotations

from collections.abc import Sequence

from jitgen.families.attention.context import Operand
from jitgen.families.attention.layout import Layout


def sum_of(first: Sequence[str], strides: Sequence[str], indices: Sequence[str]) -> str:
    """The sum of the terms ``first`` and of the products of indices and strides."""
    terms = [*first, *(f"{index} * {stride}" for index, stride in zip(indices, strides, strict=True))]
    return " + ".join(term for term in terms if term) or "0"


def indices(sizes: Sequence[str], number: str, name: str, divide: str) -> list[tuple[str, str]]:
    """(name, expression) of the index of ``number`` in each dimension; ``divide`` is the dialect's operator."""
    found = []
    for dim in range(len(sizes)):
        inner = " * ".join(sizes[dim + 1 :])
        index = f"{number} {divide} ({inner})" if inner else number
        found.append((f"{name}{dim}", f"{index} % {sizes[dim]}" if dim else index))
    return found


def row_indices(packed: Sequence[str], divide: str) -> list[tuple[str, str]]:
    """The same of a row: packed dimensions ``y0`` ... before the row of the query, ``m``."""
    return [
        *indices(packed, f"(row {divide} rows)", "y", divide),
        ("m", "row % rows" if packed else "row"),
    ]


def base_of_task(operand: Operand, layout: Layout) -> str:
    """The offset of the first element of a task with indices ``z0`` ..."""
    return sum_of([operand.offset], operand.batch, [f"z{dim}" for dim in range(layout.batch)])


def row_offset(operand: Operand, layout: Layout, base: str = "at{}") -> str:
    """The offset of row ``m`` of packed indices ``y0`` ...; ``base`` is the name of where the task begins."""
    names = [*(f"y{dim}" for dim in range(layout.packed)), "m"]
    return sum_of([base.format(operand.index)], [*operand.packed, operand.own[0]], names)
