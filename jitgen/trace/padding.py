"""Pads with elements of the tensor itself, by one gather: each padded dimension is read at a computed index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jitgen.ir import symbols
from jitgen.ir.graph import Node
from jitgen.trace.gathers import along, gathered
from jitgen.trace.typing import compare, pointwise

if TYPE_CHECKING:
    from jitgen.trace.tracer import Trace

MODES = ("reflect", "replicate", "circular")


def padded(trace: Trace, input: Node, pad: Sequence[Any], mode: str) -> Node:
    """Pads ``input`` along its last ``len(pad) / 2`` dimensions, in one of ``MODES``; a negative amount is cut off.

    Raises:
        ValueError: torch does not pad this rank by so many numbers, or by more elements than there are.
    """
    rank, dims = len(input.shape), len(pad) // 2
    amounts = [int(amount) for amount in pad]
    if len(pad) % 2 or dims not in (1, 2, 3) or rank not in (dims + 1, dims + 2):
        raise ValueError(f"{mode} padding by {len(pad)} numbers is not defined for {rank} dimensions")
    shape, coordinates = list(input.shape), list(range(rank))
    indices: list[Node] = []
    for number in range(dims):
        dim, before, after = rank - 1 - number, amounts[2 * number], amounts[2 * number + 1]
        size = input.shape[dim]
        most: Any = {"reflect": symbols.sub(size, 1), "circular": size}.get(mode)
        fits = most is None or trace.guards.at_least(most, max(before, after))
        kept = symbols.compare("ge", symbols.add(size, before + after), 0 if mode == "circular" else 1)
        if not (fits and trace.guards.at_least(size, 1) and trace.guards.decide(kept)):
            raise ValueError(f"{mode} padding by ({before}, {after}) of {trace.guards.hint(size)} elements")
        shape[dim] = symbols.add(size, before + after)  # type: ignore[assignment]
        index = _index(trace, shape[dim], before, size, mode)
        coordinates[dim] = -1 - len(indices)
        indices.append(along(trace, index, dim, rank))
    return gathered(trace, input, indices, coordinates, tuple(shape))


def _index(trace: Trace, length: Any, before: int, size: Any, mode: str) -> Node:
    """Returns which of ``size`` elements each of ``length`` is, if ``before`` elements are in front of the first."""
    at = pointwise(trace, "sub", trace.make("iota", (), "int64", (length,), (0,)), before)
    last = trace.builder.scalar(symbols.sub(size, 1), "int64")
    if mode == "reflect":
        behind = pointwise(trace, "sub", last, pointwise(trace, "abs", at))
        return pointwise(trace, "sub", last, pointwise(trace, "abs", behind))
    if mode == "replicate":
        return pointwise(trace, "minimum", pointwise(trace, "maximum", at, 0), last)
    whole = trace.builder.scalar(size, "int64")
    number = trace.make(
        "where",
        (compare(trace, "lt", at, 0), pointwise(trace, "add", at, whole), at),
        "int64",
        at.shape,
    )
    beyond = compare(trace, "ge", number, whole)
    return trace.make("where", (beyond, pointwise(trace, "sub", number, whole), number), "int64", at.shape)
