"""Lays out a matmul kernel's operands: their strides, and what accesses these allow.

Every operand of a region is a matrix, or a batch of them: the activation is (M, K), a dense weight is (N, K), and what
the epilogue reads and writes is (M, N). The tensors of a quantised weight (codes, scales and zero-points) have no
strides of that kind: mainloops read all of them, in the order of their quantisation layout (``jitgen/quant/layouts``).

As for pointwise kernels, the strides of a call are described by a *layout*, on which the source depends, and a
*geometry*, whose numbers a launch passes as arguments.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from jitgen.device import Device
from jitgen.ir import symbols
from jitgen.ir.body import Body, Operand
from jitgen.ir.program import Kernel
from jitgen.ir.views import Memory, Strided
from jitgen.kernel.geometry import Geometry, touched_of
from jitgen.kernel.layout import reaches_wide, unit_of, views_of
from jitgen.kernel.operands import ACCESS_BYTES, INDEX_LIMIT, MAX_UNIT, Call, collapse, item_size
from jitgen.kernel.parameters import Integer, KernelParameters, RegionParameters, declared

QUANTIZED_COMPONENTS = ("codes", "scales", "zeros", "tensor_scale")
"""Kinds of the operands that make up a quantised weight."""


@dataclass(frozen=True)
class GemmLayout:
    """Holds the facts of a region's strides on which the source depends. It is the same for every device.

    Attributes:
        operands: the kind of each operand's strides:

            * ``load``, ``store`` and ``iota``: ``"full"`` (column stride 1), ``"column"`` (row stride 0 and column
              stride 1, such as a bias), ``"row"`` (column stride 0: one value for each row), ``"scalar"`` (both strides
              0), or ``"strided"``. The same kinds describe what a prologue reads, with K for the columns.
            * ``x`` and ``weight``: ``"k"`` (stride 1 along K), ``"outer"`` (stride 1 along rows or columns), or
              ``"strided"``. On a GPU they are strided as well where the other stride is 0, as of an expanded tensor:
              tensor maps describe no such matrix.
            * The components of a quantised weight: ``"whole"``.
        units: for each operand, how many elements one access may move: the largest power of two by which its address
            and its other strides are divisible, up to 16 bytes. 1 where no stride is 1.
        columns_unit: the largest power of two, at most 16, that divides N.
        length_unit: the largest power of two, at most 128, that divides K.
        wide: whether an index can reach 2**31.
        batch: how many dimensions the batch has, after those that all operands of the kernel walk without a gap have
            been merged.
    """

    operands: tuple[str, ...]
    units: tuple[int, ...]
    columns_unit: int
    length_unit: int
    wide: bool
    batch: int = 0


@dataclass(frozen=True, kw_only=True)
class GemmGeometry(Geometry):
    """Holds a region's sizes and strides in one call. Strides are (row, column) of what the epilogue accesses, (row, k)
    of the activation, (column, k) of a dense weight and (0, 0) of a quantised weight's components, and then those along
    the dimensions of the batch.

    Attributes:
        rows: M.
        columns: N.
        length: K.
        batch: the sizes of the batch's dimensions, outermost first.
    """

    rows: int
    columns: int
    length: int
    batch: tuple[int, ...]

    @property
    def matrices(self) -> int:
        """Returns how many products the batch has; 1 without a batch."""
        return math.prod(self.batch)

    @property
    def elements(self) -> int:
        """Counts the elements of the result, over the whole batch."""
        return self.matrices * self.rows * self.columns


def layout(kernel: Kernel, call: Call) -> tuple[tuple[GemmLayout, ...], tuple[GemmGeometry, ...]]:
    """Computes layout and geometry of each region of ``kernel``.

    Raises:
        NotViewable: no strides describe an operand, which has to be copied first.
    """
    views = [views_of(body, call) for body in kernel.bodies]
    batches = _batches(kernel, views, call)
    resolved = [_resolve_body(body, views[region], batches[region], call) for region, body in enumerate(kernel.bodies)]
    return tuple(layout_ for layout_, _ in resolved), tuple(geometry for _, geometry in resolved)


_STRIDES = {
    "full": ("", "1"),
    "column": ("0", "1"),
    "row": ("", "0"),
    "scalar": ("0", "0"),
    "strided": ("", ""),
    "k": ("", "1"),
    "outer": ("1", ""),
    "whole": (),
}
"""An operand's two strides, by its kind: numbers, where the kind fixes them, or parameters."""


def parameters(kernel: Kernel, layouts: Sequence[GemmLayout], device: Device) -> KernelParameters:
    """Declares the parameters of the kernel.

    The whole kernel has the integers ``m``, ``k`` and the sizes ``b<dim>`` of its batch. A region has ``n<region>``,
    and for its operands:

    * ``o<region>_<operand>``: the first value of an iota.
    * ``s<region>_<operand>_<dim>``: a stride that the operand's kind does not fix. Dim 0 is the row, or the column of a
      dense weight; dim 1 is the column, or K.
    * ``b<region>_<operand>_<dim>``: the stride along dimension ``dim`` of the batch.
    """
    batch = layouts[0].batch
    whole = [Integer("m", "rows"), Integer("k", "length"), *(Integer(f"b{d}", "batch", dim=d) for d in range(batch))]
    regions = []
    for region, (body, layout) in enumerate(zip(kernel.bodies, layouts, strict=True)):
        operands = []
        for index, (operand, kind) in enumerate(zip(body.operands, layout.operands, strict=True)):
            number = f"{region}_{index}"
            steps = [f"b{number}_{dim}" for dim in range(batch if kind != "whole" else 0)]
            operands.append(declared(operand, index, [*_STRIDES[kind], *steps], number))
        axes = (*whole, Integer(f"n{region}", "columns", region=region))
        regions.append(RegionParameters(axes, tuple(operands)))
        whole = []
    return KernelParameters(tuple(regions), any(layout.wide for layout in layouts))


_Batch = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]
"""The sizes of a batch's dimensions, and the strides of each operand of a region along them."""


def _batches(kernel: Kernel, views: Sequence[Sequence[Strided]], call: Call) -> list[_Batch]:
    """Returns the batch of each region. All regions of a kernel share their activation, so dimensions are merged in the
    same manner for all of them."""
    first = kernel.bodies[0]
    sizes = tuple(symbols.evaluate(size, call.environment) for size in first.shape[:-2])
    counts = [len(body.operands) for body in kernel.bodies]
    if math.prod(sizes) == 1:
        return [((), ((),) * count) for count in counts]
    strides = [
        (0,) * len(sizes) if operand.kind in QUANTIZED_COMPONENTS else view.strides[: len(sizes)]
        for body, region in zip(kernel.bodies, views, strict=True)
        for operand, view in zip(body.operands, region, strict=True)
    ]
    merged, merged_strides = collapse(sizes, strides, first.stores[0])
    ends = list(itertools.accumulate(counts, initial=0))
    return [(merged, merged_strides[begin:end]) for begin, end in itertools.pairwise(ends)]


def _resolve_body(body: Body, views: Sequence[Strided], batch: _Batch, call: Call) -> tuple[GemmLayout, GemmGeometry]:
    rows, columns = (symbols.evaluate(size, call.environment) for size in body.shape[-2:])
    sizes, along_batch = batch
    geometry = GemmGeometry(
        rows=rows,
        columns=columns,
        length=symbols.evaluate(body.contractions[0].length, call.environment),
        batch=sizes,
        strides=tuple(
            ((0, 0) if operand.kind in QUANTIZED_COMPONENTS else (view.strides[-2], view.strides[-1])) + steps
            for operand, view, steps in zip(body.operands, views, along_batch, strict=True)
        ),
        offsets=tuple(view.offset for view in views),
        touched=touched_of(body, (zip(view.sizes, view.strides, strict=True) for view in views)),
    )
    activations = {contraction.activation for contraction in body.contractions}
    kinds, units = [], []
    for index, (operand, view, strides) in enumerate(zip(body.operands, views, geometry.strides, strict=True)):
        repeated = call.is_gpu and _repeats_rows(operand, view)
        role = "load" if operand.kind == "x" and index not in activations else operand.kind
        kinds.append("strided" if repeated else _kind(role, *strides[:2]))
        units.append(_unit(operand, view.offset, strides, call.buffers) if call.is_gpu and not repeated else 1)
    walked = (zip(view.sizes, view.strides, strict=True) for view in views)
    layout = GemmLayout(
        operands=tuple(kinds),
        units=tuple(units),
        columns_unit=_divisor(columns, 16) if call.is_gpu else 1,
        length_unit=_divisor(geometry.length, 128) if call.is_gpu else 1,
        wide=reaches_wide(walked) or rows * columns >= INDEX_LIMIT,
        batch=len(sizes),
    )
    return layout, geometry


def _divisor(size: int, most: int) -> int:
    """Returns the largest power of two up to ``most`` that divides ``size``; ``most`` for 0."""
    unit = most
    while size % unit:
        unit //= 2
    return unit


def _repeats_rows(operand: Operand, view: Strided) -> bool:
    """Returns whether ``operand`` is an activation or a dense weight whose rows, or elements along K, are all the same
    one."""
    matrix = zip(view.sizes[-2:], view.strides[-2:], strict=True)
    return operand.kind in ("x", "weight") and any(size > 1 and not stride for size, stride in matrix)


def _kind(role: str, outer: int, inner: int) -> str:
    """Returns the kind of an operand with these strides; see ``GemmLayout.operands``."""
    if role in QUANTIZED_COMPONENTS:
        return "whole"
    if role in ("x", "weight"):
        return "k" if inner == 1 else "outer" if outer == 1 else "strided"
    if role == "iota":
        return "strided"
    if role == "load":
        if inner == 0:
            return "row" if outer else "scalar"
        if inner == 1 and outer == 0:
            return "column"
    return "full" if inner == 1 else "strided"


def _unit(operand: Operand, offset: int, strides: Sequence[int], buffers: Sequence[Memory]) -> int:
    """Returns how many elements one access may move; see ``GemmLayout.units``."""
    if operand.kind in QUANTIZED_COMPONENTS:
        return MAX_UNIT
    outer, inner, *batch = strides
    if operand.buffer is None or 1 not in (outer, inner):
        return 1
    size = item_size(operand.dtype)
    steps = [step * size for step in (offset, outer if inner == 1 else inner, *batch)]
    return min(unit_of((), [(size, [buffers[operand.buffer].alignment, *steps])]), ACCESS_BYTES // size)
