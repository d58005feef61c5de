"""Where the rows of an operand of attention are: packed dimensions, whose indices count rows, and rows of the query."""

from __future__ import annotations

from collections.abc import Sequence

from jitgen.families.attention.rule.addresses import indices, sum_of
from jitgen.families.attention.rule.context import Operand


def row_indices(packed: Sequence[str], divide: str) -> list[tuple[str, str]]:
    """(name, expression) of the indices of a row: packed dimensions ``y0`` ... before the row of the query, ``m``."""
    return [
        *indices(packed, f"(row {divide} rows)", "y", divide),
        ("m", "row % rows" if packed else "row"),
    ]


def row_offset(operand: Operand, base: str = "at{}") -> str:
    """The offset of row ``m`` of packed indices ``y0`` ...; ``base`` is the name of where the task begins."""
    names = [*(f"y{dim}" for dim in range(len(operand.groups))), "m"]
    return sum_of([base.format(operand.index)], [*operand.groups, operand.own[0]], names)
