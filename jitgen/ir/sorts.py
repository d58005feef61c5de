"""Defines sorted rows: what a ``sort`` node gives, and the order that all of jitgen's kernels sort by.

The order is torch's: NaN is beyond every number, and -0.0 equals 0.0. Equal elements keep the order of their indices
(the sort is stable), descending too, so that a result has the same indices in every dialect and at every call.
"""

from __future__ import annotations

from dataclasses import dataclass

from jitgen.ir.symbols import Scalar

SORTS = ("values", "indices")
"""What a ``sort`` node gives: the elements, or where each stood in its row, int64."""
COUNTS = (*SORTS, "ranks", "ends")
"""What a ``counted`` node gives of a row of whole numbers below a bound: the same, ascending; the rank of each element,
int64; and for each number how many elements are at most that, int32."""


MOST_GROUPS = 32
"""Groups of a row at most, of which a ``limited`` node keeps some: those whose greatest element, or the sum of whose
two greatest, is greatest. Of equal groups the first comes first, as of elements."""


@dataclass(frozen=True)
class Order:
    """Says which ranks of a row a kernel gives, and in which order.

    Attributes:
        descending: whether the greatest element comes first.
        start, count: the ranks [start, start + count) are results.
        dtype: in which elements are compared: they are rounded to it first.
        chunk: 0, or a row is cut into chunks of so many elements, each of which is sorted by itself.
        length: where chunks are merged: elements of the row that they were cut from.
        bound: 0, or elements are whole numbers from 0 to below this, and are counted.
    """

    descending: bool
    start: Scalar
    count: Scalar
    dtype: str
    chunk: int = 0
    length: Scalar = 0
    bound: Scalar = 0
