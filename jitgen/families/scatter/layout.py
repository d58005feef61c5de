"""The strides of a scatter's operands: over its grid dimensions and over its sequential ones, each merged.

The iteration space becomes ``(outer..., walked..., inner)``: the sequential dimensions in their order, around them the
grid dimensions by descending strides of the result, and within them, as ``inner``, the grid dimension along which the
result's elements are neighbours, where there is one. Everything that indexes is 64 bits wide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jitgen.ir import symbols
from jitgen.ir.program import Kernel
from jitgen.kernel.layout import views_of
from jitgen.kernel.operands import Call


@dataclass(frozen=True)
class Layout:
    """What the source depends on.

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


@dataclass(frozen=True)
class Geometry:
    """Sizes and strides of a call.

    Attributes:
        sizes: (outer..., walked..., inner).
        strides: per operand, in elements, one per dimension.
        offsets: per operand, in elements from the buffer's pointer.
        gathered_sizes, gathered_strides: of each dimension of the result that an index chooses along.
    """

    sizes: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    gathered_sizes: tuple[int, ...]
    gathered_strides: tuple[int, ...]

    def elements(self, dims: Sequence[int] | None = None) -> int:
        count = 1
        for dim in range(len(self.sizes)) if dims is None else dims:
            count *= self.sizes[dim]
        return count


def layout(kernel: Kernel, call: Call) -> tuple[tuple[Layout, ...], tuple[Geometry, ...]]:
    """Layout and geometry of the kernel's only region.

    Raises:
        NotViewable: no strides describe an operand, which has to be copied first.
    """
    (body,), environment = kernel.bodies, call.environment
    sizes = tuple(symbols.evaluate(size, environment) for size in body.shape)
    views = views_of(body, call)
    rank, first = len(sizes), len(sizes) - body.row_rank
    strides = [view.strides[:rank] for view in views]
    (stored,) = body.stores
    grid = sorted((dim for dim in range(first) if sizes[dim] != 1), key=lambda dim: -abs(strides[stored][dim]))
    outer = _merged(sizes, strides, grid)
    walked = _merged(sizes, strides, [dim for dim in range(first, rank) if sizes[dim] != 1])
    inner = [outer.pop()] if outer and outer[-1][1][stored] == 1 else []
    walked = walked or [(1, (0,) * len(views))]
    dims = [*outer, *walked, *inner]
    geometry = Geometry(
        tuple(size for size, _ in dims),
        tuple(tuple(steps[index] for _, steps in dims) for index in range(len(views))),
        tuple(view.offset for view in views),
        views[stored].sizes[rank:],
        views[stored].strides[rank:],
    )
    last = tuple(stride[-1] if stride[-1] in (0, 1) else 2 for stride in geometry.strides)
    return (Layout(len(outer), len(walked), bool(inner), last),), (geometry,)


def _merged(
    sizes: tuple[int, ...], strides: Sequence[tuple[int, ...]], dims: Sequence[int]
) -> list[tuple[int, tuple[int, ...]]]:
    """(size, stride of every operand) of ``dims``, where those are one that every operand walks without a gap."""
    merged: list[tuple[int, tuple[int, ...]]] = []
    for dim in dims:
        step = tuple(stride[dim] for stride in strides)
        if merged and all(before == inner * sizes[dim] for before, inner in zip(merged[-1][1], step, strict=True)):
            merged[-1] = (merged[-1][0] * sizes[dim], step)
        else:
            merged.append((sizes[dim], step))
    return merged
