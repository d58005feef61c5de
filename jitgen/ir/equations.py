"""Writes and reads equations that name the axes of a contraction, in the notation of ``torch.einsum``.

A ``contract`` node multiplies ``x`` of shape (batch..., m..., k) by a weight of shape (batch..., n, k) and sums over k;
its result has shape (batch..., m..., n). For example, ``"mk,nk->mn"`` is a matrix product, ``"abmk,abnk->abmn"`` has
two batch axes, and ``"mpk,nk->mpn"`` has an activation with two axes of rows.

The operands that have an axis decide its role:

* a batch axis is in x, the weight and the result;
* a row axis (m) is in x and the result;
* a column axis (n) is in the weight and the result;
* the contracted axis (k) is in x and the weight.

A ``grouped`` product has one axis more, g, which one operand alone has, or the result alone: see ``ROWS_OF_GROUPS`` and
``LENGTHS_OF_GROUPS``.

``trace/contractions.py`` brings the operands of every other einsum of two operands into this order by views.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

_BATCH, _ROWS = "abcdefghij", "mopqrstuvwxyz"
ROWS_OF_GROUPS = "mk,gnk->mn"
"""The equation of a ``grouped`` product whose rows are divided among the weights of the groups."""
LENGTHS_OF_GROUPS = "mk,nk->gmn"
"""The equation of a ``grouped`` product whose K is divided into the ranges of the groups, with a matrix for each."""


@dataclass(frozen=True)
class Axes:
    """Groups the axes of an equation by role; each is a letter."""

    batch: tuple[str, ...]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    contracted: tuple[str, ...]

    @property
    def result(self) -> tuple[str, ...]:
        """Returns the axes of the result, but for one of groups."""
        return (*self.batch, *self.rows, *self.columns)


def equation(batch: int, rows: int) -> str:
    """Writes the equation of a product with ``batch`` batch axes and ``rows`` row axes."""
    shared, m = _BATCH[:batch], _ROWS[:rows]
    if len(shared) < batch or len(m) < rows:
        raise ValueError(f"a product of {batch} batch axes and {rows} axes of rows has more axes than there are names")
    return f"{shared}{m}k,{shared}nk->{shared}{m}n"


@cache
def axes(text: str) -> Axes:
    """Parses the axes that ``text`` names."""
    operands, _, result = text.partition("->")
    x, _, weight = operands.partition(",")
    return Axes(
        batch=tuple(name for name in result if name in x and name in weight),
        rows=tuple(name for name in result if name in x and name not in weight),
        columns=tuple(name for name in result if name in weight and name not in x),
        contracted=tuple(name for name in x if name in weight and name not in result),
    )
