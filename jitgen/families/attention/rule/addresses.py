"""Where an operand's elements are, as expressions in a dialect's text: sums of indices times strides."""

from __future__ import annotations

from collections.abc import Sequence

from jitgen.families.attention.rule.context import Operand


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


def base_of_task(operand: Operand) -> str:
    """The offset of the first element of a task with indices ``z0`` ..."""
    return sum_of([operand.offset], operand.batch, [f"z{dim}" for dim in range(len(operand.batch))])


def base_of_group(operand: Operand) -> str:
    """The offset where the dimensions of indices ``h0`` ... that results are summed over begin, after ``batch``."""
    return sum_of([f"batch{operand.index}"], operand.groups, [f"h{dim}" for dim in range(len(operand.groups))])
