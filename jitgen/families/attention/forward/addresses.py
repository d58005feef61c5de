"""Where the rows of an operand of attention are: packed dimensions, whose indices count rows, and rows of the query."""

from __future__ import annotations

from collections.abc import Sequence

from jitgen.families.attention.forward.context import Operand
from jitgen.families.attention.forward.layout import Layout
from jitgen.families.attention.rule.addresses import indices, sum_of


def row_indices(packed: Sequence[str], divide: str) -> list[tuple[str, str]]:
    """(name, expression) of the indices of a row: packed dimensions ``y0`` ... before the row of the query, ``m``."""
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
