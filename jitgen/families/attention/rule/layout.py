"""Defines the layouts, geometries and parameters that attention and its gradients have in common.

The kernels of both walk tiles of rows and keys, for each index of a batch; the dimensions of the batch are collapsed.
Dimensions of *groups* are walked within a kernel: attention packs their rows into one tile, its backward sums over
them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jitgen.families.attention.rule.narrow import MOST_INDEX
from jitgen.ir.body import Body, Operand
from jitgen.ir.program import Kernel
from jitgen.ir.views import Strided
from jitgen.kernel.geometry import Geometry, gathered_of, touched_of
from jitgen.kernel.layout import reaches_wide, unit_of
from jitgen.kernel.operands import Call, base_of, item_size
from jitgen.kernel.parameters import Integer, KernelParameters, RegionParameters, declared

SOURCES = ("key_source", "value_source")
"""Kinds of operand that keys or values are computed from."""
RIGHT = ("right", "key", "key_source")
"""Kinds of the right operands of products over a tile."""


@dataclass(frozen=True)
class TileLayout:
    """Holds what the source depends on: kinds of strides and alignments, the same for every device.

    Attributes:
        batch, groups: how many dimensions of these kinds there are, collapsed.
        operands: for each operand its kind; of those of scores ``"task"``, ``"row"``, ``"key"`` or ``"both"``, by what
            of a tile an element depends on.
        unit: the largest power of two, at most 16, that widths and the strides and addresses of contiguous operands are
            multiples of (GPU; else 1).
        wide: whether an index can reach 2**31, or a size 2**30.
    """

    batch: int
    groups: int
    operands: tuple[str, ...]
    unit: int
    wide: bool


@dataclass(frozen=True, kw_only=True)
class TileGeometry(Geometry):
    """Holds the sizes and strides of a call. An operand has strides along the batch, along groups, and along its own
    two dimensions; a dimension of one element has stride 0.

    Attributes:
        batch, groups: sizes of these dimensions, outermost first.
        rows, keys: of a tile: those of a block, and those that are streamed.
        depths, widths: what the products of a tile sum over, and the columns of results.
    """

    batch: tuple[int, ...]
    groups: tuple[int, ...]
    rows: int
    keys: int
    depths: tuple[int, ...]
    widths: tuple[int, ...]

    @property
    def tasks(self) -> int:
        return math.prod(self.batch)

    @property
    def task_rows(self) -> int:
        """Returns the rows of the results of one task."""
        return self.rows

    @property
    def elements(self) -> int:
        """Counts the elements of the results."""
        return self.tasks * self.task_rows * sum(self.widths)

    @property
    def matrices(self) -> tuple[int, ...]:
        """Returns the sizes of the dimensions that number the matrices of an operand."""
        return (*self.batch, *self.groups)


def tile_parameters(kernel: Kernel, layout: TileLayout, sizes: Sequence[Integer]) -> KernelParameters:
    """Declares the parameters of a kernel.

    The integers are ``rows``, ``keys`` and ``sizes``; ``b0`` ... the sizes of the batch and ``g0`` ... of groups; for
    each operand ``o<operand>``, the first value of an index, ``s<operand>_<dim>``, its strides, and
    ``n<operand>_<dim>`` and ``c<operand>_<dim>``, size and stride of a dimension that an index chooses along.
    """
    (body,) = kernel.bodies
    axes = [Integer("rows", "rows"), Integer("keys", "keys"), *sizes]
    axes += [Integer(f"b{dim}", "batch", dim=dim) for dim in range(layout.batch)]
    axes += [Integer(f"g{dim}", "groups", dim=dim) for dim in range(layout.groups)]
    strides = [""] * (layout.batch + layout.groups + 2)
    operands = [
        declared(
            operand,
            index,
            strides,
            gathered=tuple((f"n{index}_{dim}", f"c{index}_{dim}") for dim in range(operand.gathered)),
            name=_read_by_scores(kind, operand.buffer is not None) if operand.kind == "score" else "",
        )
        for index, (operand, kind) in enumerate(zip(body.operands, layout.operands, strict=True))
    ]
    return KernelParameters((RegionParameters(tuple(axes), tuple(operands)),), layout.wide)


def _read_by_scores(kind: str, in_memory: bool) -> str:
    """Returns what an operand is called of which a rule reads, by ``kind``, a value for a row, a key, or a score."""
    return f"{kind if kind in ('row', 'key') else 'score'}_{'input' if in_memory else 'index'}"


def addresses_of(
    body: Body, views: Sequence[Strided], strides: tuple[tuple[int, ...], ...]
) -> dict[str, tuple[Any, ...]]:
    """Returns the attributes of a ``Geometry`` of operands that are ``views`` and walked with ``strides``."""
    rank = len(body.shape)
    return {
        "strides": strides,
        "offsets": tuple(view.offset for view in views),
        "gathered": gathered_of(views, rank),
        "touched": touched_of(body, (zip(v.sizes[:rank], v.strides[:rank], strict=True) for v in views)),
    }


def layout_attributes(
    body: Body, geometry: TileGeometry, views: Sequence[Strided], call: Call, packs: bool, inner: Mapping[str, int]
) -> dict[str, Any]:
    """Returns the attributes of a ``TileLayout``.

    Args:
        packs: whether the indices of groups count rows.
        inner: which of an operand's own two dimensions its elements are along, by its kind in the body; by default the
            second.
    """
    batch = len(geometry.batch)
    own = batch if packs else batch + len(geometry.groups)
    kinds = tuple(
        _kind(operand, steps[own:], inner.get(operand.kind, 1))
        for operand, steps in zip(body.operands, geometry.strides, strict=True)
    )
    # An index counts along a dimension of its own tensor, which may be larger than what is walked of it.
    tensors = (base_of(o, call.environment, call.buffers).sizes for o in body.operands if o.buffer is None)
    largest = max((geometry.rows, geometry.keys, *(size for sizes in tensors for size in sizes)))
    return {
        "batch": batch,
        "groups": len(geometry.groups),
        "operands": kinds,
        "unit": _unit(body, geometry, kinds, call, inner) if call.is_gpu else 1,
        "wide": largest >= MOST_INDEX or reaches_wide(zip(v.sizes, v.strides, strict=True) for v in views),
    }


def _kind(operand: Operand, strides: Sequence[int], inner: int) -> str:
    """Returns the kind of an operand with ``strides`` along dimensions that count rows and its own two."""
    *rows, second = strides
    if operand.kind == "score":
        return {(True, True): "both", (True, False): "row", (False, True): "key"}.get((any(rows), second != 0), "task")
    if operand.row:
        return "row"
    step = strides[-2:][inner]
    if operand.kind in SOURCES and step == 0:
        return "key"
    return "contiguous" if step == 1 else "strided"


def _unit(body: Body, geometry: TileGeometry, kinds: Sequence[str], call: Call, inner: Mapping[str, int]) -> int:
    """Computes ``TileLayout.unit``."""
    accesses = []
    operands = zip(body.operands, kinds, geometry.strides, geometry.offsets, geometry.gathered, strict=True)
    for operand, kind, strides, offset, gathered in operands:
        if kind == "contiguous" and operand.buffer is not None:
            size = item_size(operand.dtype)
            along = len(strides) - 2 + inner.get(operand.kind, 1)
            steps = [offset, *strides[:along], *strides[along + 1 :], *(step for _, step in gathered)]
            accesses.append((size, [call.buffers[operand.buffer].alignment, *(step * size for step in steps)]))
    return unit_of((*geometry.depths, *geometry.widths), accesses)


def free_strides(view: Strided, rank: int) -> tuple[int, ...]:
    """Returns the strides of the first ``rank`` dimensions of ``view``; a dimension of one element has stride 0."""
    return tuple(
        0 if size == 1 else stride for size, stride in zip(view.sizes[:rank], view.strides[:rank], strict=True)
    )


def is_tile(body: Body, number: int) -> bool:
    """Returns whether contraction ``number`` is a product over a tile, and no result."""
    return body.operands[body.contractions[number].weight[0]].kind in RIGHT


def results_of(body: Body) -> tuple[int, ...]:
    """Returns the numbers of the contractions that are results, in the order of their stores."""
    return tuple(number for number in range(len(body.contractions)) if not is_tile(body, number))
