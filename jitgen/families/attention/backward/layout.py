"""Lays out the operands of attention's backward: the batch, summed dimensions, and two strides of each one's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jitgen.device import Device
from jitgen.families.attention.rule.layout import (
    TileGeometry,
    TileLayout,
    addresses_of,
    free_strides,
    is_tile,
    layout_attributes,
    results_of,
    tile_parameters,
)
from jitgen.ir import symbols
from jitgen.ir.body import Body
from jitgen.ir.program import Kernel
from jitgen.kernel.layout import views_of
from jitgen.kernel.operands import Call, collapse
from jitgen.kernel.parameters import Integer, KernelParameters


@dataclass(frozen=True)
class Layout(TileLayout):
    """Holds the facts of strides that decide the source: the batch has the dimensions of results, groups those that
    results are summed over.

    Operands that are not of scores are ``"contiguous"`` along their last dimension, or ``"strided"``.

    Attributes:
        shared: for each result, the number of the product whose right operand is its value in memory; -1 for none.
    """

    shared: tuple[int, ...]


def stores_of(body: Body) -> tuple[tuple[int, ...], ...]:
    """Returns, for each result, the operands that store it."""
    behind: list[set[int]] = []
    by_result: dict[int, list[int]] = {number: [] for number in results_of(body)}
    for instruction in body.instructions:
        own = {instruction.attr} if instruction.op == "contract" else set()
        behind.append(own.union(*(behind[argument] for argument in instruction.args)))
        if instruction.op == "store":
            (number,) = behind[-1]
            by_result[number].append(instruction.attr)
    return tuple(tuple(stores) for stores in by_result.values())


def layout(kernel: Kernel, call: Call) -> tuple[tuple[Layout, ...], tuple[TileGeometry, ...]]:
    """Computes layout and geometry of the kernel's one body; NotViewable if a movement needs a copy first."""
    (body,) = kernel.bodies

    def size_of(name: str) -> int:
        return symbols.evaluate(next(axis.size for axis in body.axes if axis.name == name), call.environment)

    rank = len(body.shape) - 2
    dims = [int(axis.name[1:]) for axis in body.axes if axis.name[0] == "g"]
    whole = tuple(size_of(f"g{dim}" if dim in dims else f"b{dim}") for dim in range(rank))
    rows, keys = size_of("m"), size_of("n")
    views = views_of(body, call)
    free = [free_strides(view, rank + 2) for view in views]
    outer = [[dim for dim in range(rank) if dim not in dims], dims]
    leaders = body.stores[0], body.contractions[0].weight[0]
    collapsed = []
    for kept, leader in zip(outer, leaders, strict=True):
        live = [dim for dim in kept if whole[dim] != 1]
        sizes = tuple(whole[dim] for dim in live)
        steps = [tuple(step[dim] for dim in live) for step in free]
        collapsed.append(collapse(sizes, steps, leader) if live else ((), ((),) * len(free)))
    (batch, along_batch), (summed, along_summed) = collapsed
    strides = tuple(
        (*first, *second, *own[-2:]) for first, second, own in zip(along_batch, along_summed, free, strict=True)
    )
    tiles = [number for number in range(len(body.contractions)) if is_tile(body, number)]
    results, stores = results_of(body), stores_of(body)
    geometry = TileGeometry(
        **addresses_of(body, views, strides),
        batch=batch,
        groups=summed,
        rows=rows,
        keys=keys,
        depths=tuple(symbols.evaluate(body.contractions[number].length, call.environment) for number in tiles),
        widths=tuple(views[targets[0]].sizes[-1] for targets in stores),
    )

    def memory(index: int) -> object:
        return body.operands[index].buffer, geometry.offsets[index], strides[index], views[index].sizes[-1]

    rights = [memory(body.contractions[number].weight[0]) for number in tiles]
    shared = tuple(
        rights.index(own) if (own := memory(body.contractions[number].weight[0])) in rights else -1
        for number in results
    )
    shared_layout = layout_attributes(body, geometry, views, call, packs=False, inner={})
    return (Layout(**shared_layout, shared=shared),), (geometry,)


def parameters(kernel: Kernel, layouts: Sequence[Layout], device: Device) -> KernelParameters:
    """Declares the parameters of the kernel: ``depth<t>`` is what product ``t`` of a tile sums over, ``width<r>`` the
    columns of result ``r``."""
    (layout,), (body,) = layouts, kernel.bodies
    results = len(results_of(body))
    sizes = [Integer(f"depth{number}", "depths", dim=number) for number in range(len(body.contractions) - results)]
    sizes += [Integer(f"width{number}", "widths", dim=number) for number in range(results)]
    return tile_parameters(kernel, layout, sizes)
