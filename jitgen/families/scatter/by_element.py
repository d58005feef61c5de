"""Computes scatters by the element of the result: a reduction over all values, of which each element takes its own.

On a GPU a thread that walks values in order waits for memory at each of them. Where the result has few elements, it is
faster to compare every index with every element, in parallel, than to walk; where it has many and the walk is long, a
scatter is refused. Both are in a fixed order, as a scatter with atomic operations would not be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from jitgen.device import Device
from jitgen.errors import UnsupportedError
from jitgen.families.family import Question
from jitgen.ir import symbols
from jitgen.ir.body import compute_dtype
from jitgen.ir.graph import Node
from jitgen.ir.program import Decision
from jitgen.ir.scatters import SCATTERS, combination
from jitgen.ir.views import Mover
from jitgen.spec import DTYPES

SHORT_WALK = 64
"""Values that a thread walks in less time than a further kernel takes to start."""
FEW_ELEMENTS = 2**19
"""Elements of a result up to which comparing each with an index takes less time than a step of a walk: a step waits for
memory for about 1 us, in which a GPU compares some 5e5 pairs (an estimate, from an H200's rates)."""
LONG_WALK = 2**17
"""Values of a walk that takes about a tenth of a second; a longer one is refused."""


@dataclass(frozen=True)
class Walk(Question):
    """Asks whether a scatter's values are walked in order (``Partition.decide``).

    Attributes:
        length: values that may choose one element.
        elements: of the result.
        has_other_way: whether it can be computed by the element.
        location: the user's line.
    """

    placements = ("threads walk its values in order", "each element is compared with every index")
    length: Any
    elements: Any
    has_other_way: bool
    location: str | None = None

    def __str__(self) -> str:
        return f"scatter of {self.length} values for each of {self.elements} elements"


def decide(walk: Walk, device: Device) -> Decision:
    """Returns whether the values are walked.

    Raises:
        UnsupportedError: neither way is fast enough.
    """
    if not device.is_gpu or walk.length <= SHORT_WALK:
        return Decision(True, "a thread walks few values, or runs on a CPU")
    if walk.has_other_way and walk.elements <= FEW_ELEMENTS:
        return Decision(False, f"{walk.elements} elements are few, and a walk would wait for memory at each value")
    if walk.length > LONG_WALK:
        where = f" at {walk.location}" if walk.location else ""
        raise UnsupportedError(
            f"a scatter{where} of {walk.length} values that may choose one of {walk.elements} elements is slow in a "
            "fixed order on a GPU; call torch's own function outside the decorated function"
        )
    return Decision(True, "there are too many elements to compare each with every index")


def question(node: Node) -> Walk:
    """Asks the question for the scatter ``node``."""
    base, value = node.inputs[:2]
    _, coordinates, movements = node.attrs
    read = [(dim, coordinate) for dim, coordinate in enumerate(coordinates) if coordinate >= 0]
    whole = all(base.shape[dim] == value.shape[coordinate] for dim, coordinate in read) if not movements else False
    walked = [size for dim, size in enumerate(value.shape) if dim not in coordinates]
    has_other_way = whole and not node.dtype.startswith("float8")
    return Walk(symbols.product(walked), symbols.product(base.shape), has_other_way, node.location)


def by_element(node: Node, mover: Mover) -> Node:
    """Makes the scatter ``node`` a reduction over the dimensions along which values may choose one element."""
    base, value, *indices = node.inputs
    kind, coordinates, _ = node.attrs
    walked = [dim for dim in range(len(value.shape)) if dim not in coordinates]
    rank, make = len(base.shape), mover.builder.make
    shape = (*base.shape, *(value.shape[dim] for dim in walked))

    def pointwise(op: str, *operands: Node, dtype: str = "bool", like: Any = shape) -> Node:
        return make(op, operands, dtype, like, (), node.location)

    def spread(source: Node) -> Node:
        """Returns ``source``, along coordinates and walked dimensions, for every element and every value."""
        if source.kind.is_number:
            return source
        order = (*(coordinate for coordinate in coordinates if coordinate >= 0), *walked)
        source = mover.permute(source, order)
        for dim, coordinate in enumerate(coordinates):
            if coordinate < 0:
                source = mover.unsqueeze(source, dim)
        return mover.move(source, ("expand",), shape)

    def reduced(kind: str, operand: Node) -> Node:
        dims = tuple(range(rank, len(shape)))
        extremum = make(
            "reduce", (operand,), operand.dtype, (*base.shape, *[1] * len(dims)), (kind, dims), node.location
        )
        for dim in reversed(dims):
            extremum = mover.move(extremum, ("squeeze", dim), extremum.shape[:-1])
        return extremum

    chosen: Node | None = None
    for number, index in enumerate(indices):
        at = make("iota", (), "int64", shape, (coordinates.index(-1 - number),))
        same = pointwise("eq", spread(index), at)
        chosen = same if chosen is None else pointwise("bitwise_and", chosen, same)
    assert chosen is not None
    values = spread(value)
    if SCATTERS[kind] is not None:
        return _combined(kind, base, chosen, values, pointwise, reduced, mover)
    position: Node = mover.builder.const(0, "int64")
    step: Any = 1
    for dim in reversed(range(rank, len(shape))):
        count = pointwise(
            "mul", make("iota", (), "int64", shape, (dim,)), mover.builder.scalar(step, "int64"), dtype="int64"
        )
        position = pointwise("add", position, count, dtype="int64")
        step = symbols.mul(step, shape[dim])
    none = mover.builder.const(-1, "int64")
    last = reduced("max", pointwise("where", chosen, position, none, dtype="int64"))
    again = last
    for dim in range(rank, len(shape)):
        again = mover.unsqueeze(again, dim)
    is_last = pointwise("eq", position, mover.move(again, ("expand",), shape))
    picked = pointwise("where", is_last, values, _identity("max", node.dtype, mover), dtype=node.dtype)
    extremum = reduced("any" if node.dtype == "bool" else "max", picked)
    replaced = pointwise("ge", last, mover.builder.const(0, "int64"), like=base.shape)
    return pointwise("where", replaced, extremum, base, dtype=node.dtype, like=base.shape)


def _combined(kind: str, base: Node, chosen: Node, values: Node, pointwise: Any, reduced: Any, mover: Mover) -> Node:
    """Combines ``base`` with its own of ``values``."""
    dtype = base.dtype
    own = pointwise("where", chosen, values, _identity(kind, dtype, mover), dtype=dtype)
    if dtype == "bool":
        kind = "any" if kind in ("sum", "max") else "all"
        operation = "bitwise_or" if kind == "any" else "bitwise_and"
    else:
        combine = combination(kind, dtype)
        assert combine is not None
        operation = combine
    return pointwise(operation, base, reduced(kind, own), dtype=dtype, like=base.shape)


def _identity(kind: str, dtype: str, mover: Mover) -> Node:
    """Makes the number that leaves every other as it is."""
    if dtype == "bool":
        return mover.builder.const(kind in ("prod", "min"), "bool")
    if kind in ("sum", "prod"):
        number: Any = int(kind == "prod")
        return mover.builder.const(float(number) if DTYPES[dtype].is_floating_point else number, dtype)
    if DTYPES[compute_dtype(dtype)].is_floating_point:
        return mover.builder.const(-math.inf if kind == "max" else math.inf, dtype)
    limits = torch.iinfo(DTYPES[dtype])
    return mover.builder.const(limits.min if kind == "max" else limits.max, dtype)
