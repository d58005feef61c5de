"""Where the operands of attention's backward lie: the batch, summed dimensions, and two strides of each one's own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jitgen.families.attention.rule.layout import free_strides, score_kind
from jitgen.families.attention.rule.narrow import MOST_INDEX
from jitgen.ir import symbols
from jitgen.ir.body import Body, Operand
from jitgen.ir.program import Kernel
from jitgen.kernel.layout import reaches_wide, unit_of, views_of
from jitgen.kernel.operands import Call, collapse, item_size


@dataclass(frozen=True)
class Layout:
    """What of the strides decides the source. Device-neutral.

    Attributes:
        batch: dimensions that results have, collapsed.
        summed: dimensions that results are summed over, collapsed.
        operands: for each operand: of scores ``"task"``, ``"row"``, ``"key"`` or ``"both"``, by what of a tile an
            element depends on; of others ``"contiguous"`` along their last dimension, or ``"strided"``.
        shared: for each result, the number of the product whose right operand is its value in memory; -1 for none.
        unit: the largest power of two, at most 16, that widths and the strides and addresses of contiguous operands are
            multiples of (GPU; else 1).
        wide: whether an index can reach 2**31, or a size 2**30.
    """

    batch: int
    summed: int
    operands: tuple[str, ...]
    shared: tuple[int, ...]
    unit: int
    wide: bool


@dataclass(frozen=True)
class Geometry:
    """A call's sizes and strides.

    Attributes:
        batch, summed: sizes of these dimensions, outermost first.
        rows, keys: of a tile: those of a block, and those that are streamed.
        depths, widths: that the products of a tile sum over, and of results.
        strides: for each operand, in elements: along the batch, the summed dimensions, and its own two. A dimension of
            one element has stride 0.
        offsets: for each operand, in elements from its buffer's pointer.
    """

    batch: tuple[int, ...]
    summed: tuple[int, ...]
    rows: int
    keys: int
    depths: tuple[int, ...]
    widths: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]

    @property
    def tasks(self) -> int:
        return math.prod(self.batch)

    @property
    def groups(self) -> int:
        return math.prod(self.summed)


def results_of(body: Body) -> tuple[int, ...]:
    """The numbers of the contractions that are results, in the order of their stores."""
    return tuple(number for number, each in enumerate(body.contractions) if not is_tile(body, number))


def is_tile(body: Body, number: int) -> bool:
    """Whether contraction ``number`` is a product over a tile."""
    return body.operands[body.contractions[number].weight[0]].kind == "right"


def stores_of(body: Body) -> tuple[tuple[int, ...], ...]:
    """For each result the operands that are stored of it."""
    behind: list[set[int]] = []
    found: dict[int, list[int]] = {number: [] for number in results_of(body)}
    for instruction in body.instructions:
        own = {instruction.attr} if instruction.op == "contract" else set()
        behind.append(own.union(*(behind[argument] for argument in instruction.args)))
        if instruction.op == "store":
            (number,) = behind[-1]
            found[number].append(instruction.attr)
    return tuple(tuple(stores) for stores in found.values())


def layout(kernel: Kernel, call: Call) -> tuple[tuple[Layout, ...], tuple[Geometry, ...]]:
    """Layout and geometry of the kernel's one body; NotViewable where a movement needs a copy first."""
    (body,) = kernel.bodies

    def size_of(name: str) -> int:
        return symbols.evaluate(next(axis.size for axis in body.axes if axis.name == name), call.environment)

    rank = len(body.shape) - 2
    dims = [int(axis.name[1:]) for axis in body.axes if axis.name[0] == "g"]
    whole = tuple(size_of(f"g{dim}" if dim in dims else f"b{dim}") for dim in range(rank))
    rows, keys = size_of("m"), size_of("n")
    views = views_of(body, call)
    free = [free_strides(view) for view in views]
    outer = [[dim for dim in range(rank) if dim not in dims], dims]
    leaders = body.stores[0], body.contractions[0].weight[0]
    parts = []
    for kept, leader in zip(outer, leaders, strict=True):
        live = [dim for dim in kept if whole[dim] != 1]
        sizes = tuple(whole[dim] for dim in live)
        steps = [tuple(step[dim] for dim in live) for step in free]
        parts.append(collapse(sizes, steps, leader) if live else ((), ((),) * len(free)))
    (batch, along_batch), (summed, along_summed) = parts
    strides = tuple(
        (*first, *second, *own[-2:]) for first, second, own in zip(along_batch, along_summed, free, strict=True)
    )
    tiles = [number for number in range(len(body.contractions)) if is_tile(body, number)]
    results, stores = results_of(body), stores_of(body)
    geometry = Geometry(
        batch,
        summed,
        rows,
        keys,
        tuple(symbols.evaluate(body.contractions[number].length, call.environment) for number in tiles),
        tuple(views[targets[0]].sizes[-1] for targets in stores),
        strides,
        tuple(view.offset for view in views),
    )
    kinds = tuple(_kind(operand, step) for operand, step in zip(body.operands, strides, strict=True))

    def memory(index: int) -> object:
        return body.operands[index].buffer, geometry.offsets[index], strides[index], views[index].sizes[-1]

    rights = [memory(body.contractions[number].weight[0]) for number in tiles]
    shared = tuple(
        rights.index(own) if (own := memory(body.contractions[number].weight[0])) in rights else -1
        for number in results
    )
    walked = (zip(view.sizes, steps, strict=True) for view, steps in zip(views, free, strict=True))
    wide = reaches_wide(walked) or max(rows, keys) >= MOST_INDEX
    unit = _unit(body, geometry, kinds, call) if call.is_gpu else 1
    return (Layout(len(batch), len(summed), kinds, shared, unit, wide),), (geometry,)


def _kind(operand: Operand, strides: Sequence[int]) -> str:
    """The kind of an operand with ``strides``, the last of which are its own two."""
    first, second = strides[-2:]
    if operand.kind == "score":
        return score_kind(first != 0, second != 0)
    return "contiguous" if second == 1 else "strided"


def _unit(body: Body, geometry: Geometry, kinds: Sequence[str], call: Call) -> int:
    """See ``Layout.unit``."""
    accesses = []
    for operand, kind, strides, offset in zip(body.operands, kinds, geometry.strides, geometry.offsets, strict=True):
        if kind == "contiguous" and operand.buffer is not None:
            size = item_size(operand.dtype)
            steps = (step * size for step in (offset, *strides[:-1]))
            accesses.append((size, [call.buffers[operand.buffer].alignment, *steps]))
    return unit_of((*geometry.depths, *geometry.widths), accesses)
