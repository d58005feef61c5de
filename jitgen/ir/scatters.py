"""Scatters: a tensor of which elements that integers choose are replaced by values, or combined with them.

A ``scatter`` has the inputs ``(base, value, index, ...)`` and the attrs ``(kind, coordinates, movements)``. It is what
is left of ``base`` when every element of ``value``, in row-major order, has been combined by ``kind`` with an element
of the result. ``coordinates`` says with which: as those of a gather (``ir/gathers.py``), they are coordinates of
``value`` or indices, which have the value's shape (or are 0-d numbers). There is one for each dimension of the view of
the base that ``movements`` lead to (pairs of a view's attrs and shape), so that ``a[1:, i] = v`` is one scatter, and
``a[1:] = v`` one without indices. Along a coordinate there may be more elements than ``value`` has; the first ones are
meant. What an index out of range chooses is left out; a kernel on a CPU reports it.

Several values may choose one element. They are combined in their order, by one thread, so a call gives the same bits
whenever it is repeated; of values that replace an element, the last one stays.
"""

from __future__ import annotations

KINDS: dict[str, str | None] = {"set": None, "sum": "add", "prod": "mul", "max": "maximum", "min": "minimum"}
"""What a ``scatter`` does with an element and a value: the operation of ``ir/ops.py``; None where the value stays."""

_OF_BOOL = {"add": "bitwise_or", "mul": "bitwise_and"}


def combination(kind: str, dtype: str) -> str | None:
    """The operation by which ``kind`` combines elements of compute dtype ``dtype``."""
    operation = KINDS[kind]
    return _OF_BOOL.get(operation, operation) if operation and dtype == "bool" else operation
