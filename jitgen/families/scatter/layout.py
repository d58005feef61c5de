"""Lays out a scatter's operands: over its grid dimensions and over its sequential ones, each merged.

The iteration space becomes ``(outer..., walked..., inner)``: the sequential dimensions in their order, around them the
grid dimensions by descending strides of the result, and within them, as ``inner``, the grid dimension along which the
result's elements are neighbours, where there is one. Everything that indexes is 64 bits wide.

The integer parameters are ``n0`` ... the sizes; ``s<operand>_<dim>`` an operand's stride, where ``Layout.last`` does
not say it; ``o<operand>`` an iota's first value; ``b<dim>`` and ``g<dim>`` size and stride of a dimension of the result
that an index chooses along.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jitgen.device import Device
from jitgen.ir import symbols
from jitgen.ir.program import Kernel
from jitgen.kernel import launch
from jitgen.kernel.geometry import PointGeometry, gathered_of, touched_of
from jitgen.kernel.launch import Work
from jitgen.kernel.layout import views_of
from jitgen.kernel.operands import Call, merged_dimensions
from jitgen.kernel.parameters import Integer, KernelParameters, RegionParameters, declared


@dataclass(frozen=True)
class Layout:
    """Holds the facts on which the source depends.

    Attributes:
        outer, walked: how many dimensions of these kinds there are.
        inner: whether there is an innermost one, of stride 1 in the result.
        last: for each operand, its stride along the last dimension where that is 0 or 1; 2 for all others.
    """

    outer: int
    walked: int
    inner: bool
    last: tuple[int, ...]

    @property
    def rank(self) -> int:
        return self.outer + self.walked + self.inner


def layout(kernel: Kernel, call: Call) -> tuple[tuple[Layout, ...], tuple[PointGeometry, ...]]:
    """Computes layout and geometry of the kernel's only region, whose axes are (outer..., walked..., inner).

    Raises:
        NotViewable: no strides describe an operand, which has to be copied first.
    """
    (body,), environment = kernel.bodies, call.environment
    sizes = symbols.evaluated(body.shape, environment)
    views = views_of(body, call)
    rank, first = len(sizes), len(sizes) - body.row_rank
    strides = [view.strides[:rank] for view in views]
    (stored,) = body.stores
    grid = sorted(range(first), key=lambda dim: -abs(strides[stored][dim]))
    outer = merged_dimensions(sizes, strides, grid)
    walked = merged_dimensions(sizes, strides, range(first, rank))
    inner = [outer.pop()] if outer and outer[-1][1][stored] == 1 else []
    walked = walked or [(1, (0,) * len(views))]
    dims = [*outer, *walked, *inner]
    geometry = PointGeometry(
        sizes=tuple(size for size, _ in dims),
        strides=tuple(tuple(steps[index] for _, steps in dims) for index in range(len(views))),
        offsets=tuple(view.offset for view in views),
        gathered=gathered_of(views, rank),
        touched=touched_of(body, (zip(sizes, steps, strict=True) for steps in strides)),
    )
    last = tuple(stride[-1] if stride[-1] in (0, 1) else 2 for stride in geometry.strides)
    return (Layout(len(outer), len(walked), bool(inner), last),), (geometry,)


def parameters(kernel: Kernel, layouts: Sequence[Layout], device: Device) -> KernelParameters:
    """Declares the parameters of the kernel; indices are 64 bits wide."""
    (layout,), (body,) = layouts, kernel.bodies
    operands = []
    for index, (operand, last) in enumerate(zip(body.operands, layout.last, strict=True)):
        strides = [""] * (layout.rank - 1) + ["" if last > 1 else str(last)]
        gathered = tuple((f"b{dim}", f"g{dim}") for dim in range(operand.gathered))
        operands.append(declared(operand, index, strides, gathered=gathered))
    sizes = tuple(Integer(f"n{dim}", "sizes", dim=dim) for dim in range(layout.rank))
    return KernelParameters((RegionParameters(sizes, tuple(operands)),), wide=True)


def work(kernel: Kernel, geometries: Sequence[PointGeometry], schedule: Any) -> Work:
    """Counts what one launch amounts to: an element of the result is read and written for each value."""
    (geometry,) = geometries
    counted = launch.work(kernel, geometries, schedule, flops=geometry.elements)
    return replace(counted, moved=counted.moved + counted.written)
