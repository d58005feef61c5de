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
from jitgen.errors import UnsupportedError
from jitgen.ir import symbols
from jitgen.ir.body import Body, Operand
from jitgen.ir.program import Kernel
from jitgen.ir.views import ROW_TILE, Memory, NotViewable, Strided
from jitgen.kernel.geometry import Geometry, touched_of
from jitgen.kernel.layout import reaches_wide, unit_of
from jitgen.kernel.operands import ACCESS_BYTES, INDEX_LIMIT, MAX_UNIT, Call, collapse, item_size, power_of_two, view_of
from jitgen.kernel.parameters import Integer, KernelParameters, RegionParameters, declared

BY_ROWS = ("offsets", "ids")
"""How rows are divided among groups (``Contraction.grouping``)."""
QUANTIZED_COMPONENTS = ("codes", "scales", "zeros", "tensor_scale")
"""Kinds of the operands that make up a quantised weight."""
WALKED = ("x", "weight", "load", "store", "iota")
"""Kinds of the operands that are matrices, or batches of them."""


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
              tensor maps describe no such matrix. An ``x`` whose rows are divided among groups is ``"repeated"`` then,
              if its stride along K is 1.
            * The components of a quantised weight: ``"whole"``.
            * ``groups``: ``"column"``, or ``"strided"``.
        units: for each operand, how many elements one access may move: the largest power of two by which its address
            and its other strides are divisible, up to 16 bytes. 1 where no stride is 1.
        columns_unit: the largest power of two, at most 16, that divides N.
        length_unit: the largest power of two, at most 128, that divides K.
        wide: whether an index can reach 2**31.
        batch: how many dimensions the batch has, after those that all operands of the kernel walk without a gap have
            been merged.
        grouping: how rows, or K, are divided among groups, as ``Contraction.grouping`` says; empty where they are not.
        group_slots: the number of groups and one for the rows of none, rounded up to a power of two, where a program
            on a GPU looks for its own among them.
    """

    operands: tuple[str, ...]
    units: tuple[int, ...]
    columns_unit: int
    length_unit: int
    wide: bool
    batch: int = 0
    grouping: str = ""
    group_slots: int = 0


@dataclass(frozen=True, kw_only=True)
class GemmGeometry(Geometry):
    """Holds a region's sizes and strides in one call. Strides are (row, column) of what the epilogue accesses, (row, k)
    of the activation, (column, k) of a dense weight and (0, 0) of a quantised weight's components, and then those along
    the dimensions of the batch; of the weights of groups of rows, from one group to the next.

    Attributes:
        rows: M.
        columns: N.
        length: K.
        batch: the sizes of the batch's dimensions, outermost first.
        group_count: the number of groups of rows; 0 where these are not grouped.
        grouping: as of the layout.
    """

    rows: int
    columns: int
    length: int
    batch: tuple[int, ...]
    group_count: int = 0
    grouping: str = ""

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
        UnsupportedError: none describe a quantised weight, which cannot be copied in another order.
    """
    views = [[_view_of(operand, call) for operand in body.operands] for body in kernel.bodies]
    batches = _batches(kernel, views, call)
    resolved = [_resolve_body(body, views[region], batches[region], call) for region, body in enumerate(kernel.bodies)]
    return tuple(layout_ for layout_, _ in resolved), tuple(geometry for _, geometry in resolved)


def _view_of(operand: Operand, call: Call) -> Strided:
    try:
        return view_of(operand, call)
    except NotViewable:
        if operand.kind not in QUANTIZED_COMPONENTS:
            raise
        raise not_as_stored() from None


def not_as_stored(location: str | None = None) -> UnsupportedError:
    """Makes the error of a product, at ``location`` in the user's code, with a view of a quantised weight of which no
    kernel can read the elements in their order."""
    where = f"\n  {location}" if location else ""
    return UnsupportedError(
        "a quantised weight stands for (N, K): use it, or rows of it (those of several matrices begin at multiples "
        f"of {ROW_TILE}), as F.linear(x, w) or x @ w.T, and not reshaped or transposed otherwise; cut the product "
        f"instead, or dequantise it outside the decorated function{where}"
    )


_STRIDES = {
    "full": ("", "1"),
    "column": ("0", "1"),
    "row": ("", "0"),
    "scalar": ("0", "0"),
    "strided": ("", ""),
    "k": ("", "1"),
    "repeated": ("0", "1"),
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
    * ``g<region>_<operand>``: of the weights of groups of rows, the stride from one group to the next.

    With groups of rows the kernel also has their number, ``group_count``.
    """
    batch = layouts[0].batch
    whole = [Integer("m", "rows"), Integer("k", "length"), *(Integer(f"b{d}", "batch", dim=d) for d in range(batch))]
    if layouts[0].grouping in BY_ROWS:
        whole.append(Integer("group_count", "group_count"))
    regions = []
    for region, (body, layout) in enumerate(zip(kernel.bodies, layouts, strict=True)):
        operands = []
        for index, (operand, kind) in enumerate(zip(body.operands, layout.operands, strict=True)):
            number = f"{region}_{index}"
            if _has_groups(operand, layout.grouping):
                strides = [*(_STRIDES[kind] or ("0", "0")), f"g{number}"]
            else:
                steps = [f"b{number}_{dim}" for dim in range(batch if _is_batched(operand, layout.grouping) else 0)]
                strides = [*_STRIDES[kind], *steps]
            operands.append(declared(operand, index, strides, number))
        axes = (*whole, Integer(f"n{region}", "columns", region=region))
        regions.append(RegionParameters(axes, tuple(operands)))
        whole = []
    return KernelParameters(tuple(regions), any(layout.wide for layout in layouts))


def _has_groups(operand: Operand, grouping: str) -> bool:
    """Returns whether ``operand`` is a weight, or a tensor of one, with a matrix for each group of rows."""
    return grouping in BY_ROWS and _is_of_groups(operand)


def _is_of_groups(operand: Operand) -> bool:
    """Returns whether ``operand`` of a product by groups of rows is a weight's: not of the scales of blocks of x."""
    shape = operand.movements[-1][1] if operand.movements else operand.shape
    kinds = (*QUANTIZED_COMPONENTS, "group_scales")
    return operand.kind in kinds or (operand.kind == "weight" and len(shape) > 2)


def _is_batched(operand: Operand, grouping: str) -> bool:
    """Returns whether ``operand`` has a matrix for each of a batch."""
    return operand.kind in WALKED and not (grouping == "lengths" and operand.kind in ("x", "weight"))


_Batch = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]
"""The sizes of a batch's dimensions, and the strides of each operand of a region along them."""


def _batches(kernel: Kernel, views: Sequence[Sequence[Strided]], call: Call) -> list[_Batch]:
    """Returns the batch of each region. All regions of a kernel share their activation, so dimensions are merged in the
    same manner for all of them."""
    first = kernel.bodies[0]
    sizes = symbols.evaluated(first.shape[:-2], call.environment)
    counts = [len(body.operands) for body in kernel.bodies]
    grouping = first.contractions[0].grouping
    if grouping in BY_ROWS:
        pairs = [zip(body.operands, of_body, strict=True) for body, of_body in zip(kernel.bodies, views, strict=True)]
        return [((), tuple(itertools.starmap(_group_steps, pair))) for pair in pairs]
    if math.prod(sizes) == 1 and not grouping:
        return [((), ((),) * count) for count in counts]
    strides = [
        view.strides[: len(sizes)] if _is_batched(operand, grouping) else (0,) * len(sizes)
        for body, region in zip(kernel.bodies, views, strict=True)
        for operand, view in zip(body.operands, region, strict=True)
    ]
    if grouping:
        merged, merged_strides = sizes, tuple(strides)
    else:
        merged, merged_strides = collapse(sizes, strides, first.stores[0])
    ends = list(itertools.accumulate(counts, initial=0))
    return [(merged, merged_strides[begin:end]) for begin, end in itertools.pairwise(ends)]


def _group_steps(operand: Operand, view: Strided) -> tuple[int, ...]:
    """Returns the stride of ``operand`` from one group of rows to the next; none where it has no matrix for each."""
    return view.strides[:1] if _is_of_groups(operand) else ()


def _resolve_body(body: Body, views: Sequence[Strided], batch: _Batch, call: Call) -> tuple[GemmLayout, GemmGeometry]:
    rows, columns = symbols.evaluated(body.shape[-2:], call.environment)
    sizes, along_batch = batch
    product = body.contractions[0]
    groups = views[product.weight[0]].sizes[0] if product.grouping in BY_ROWS else 0
    geometry = GemmGeometry(
        rows=rows,
        columns=columns,
        length=symbols.evaluate(body.contractions[0].length, call.environment),
        batch=sizes,
        group_count=groups,
        grouping=product.grouping,
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
        is_row = repeated and index in activations and product.grouping in BY_ROWS and strides[:2] == (0, 1)
        is_read = operand.kind == "group_scales" or (operand.kind == "x" and index not in activations)
        role = "load" if is_read else operand.kind
        kinds.append("repeated" if is_row else "strided" if repeated else _kind(role, *strides[:2]))
        begins_anywhere = _begins_anywhere(operand, strides, product.grouping)
        is_aligned = is_row or (call.is_gpu and not repeated and not begins_anywhere)
        units.append(_unit(operand, view.offset, strides, call.buffers) if is_aligned else 1)
    # Kernels count the elements of one group's matrix, and add those of the groups before to a pointer.
    skipped = [_has_groups(operand, product.grouping) for operand in body.operands]
    walked = (
        zip(view.sizes[skip:], view.strides[skip:], strict=True) for view, skip in zip(views, skipped, strict=True)
    )
    layout = GemmLayout(
        operands=tuple(kinds),
        units=tuple(units),
        columns_unit=_divisor(columns, 16) if call.is_gpu else 1,
        length_unit=_divisor(geometry.length, 128) if call.is_gpu and product.grouping != "lengths" else 1,
        wide=reaches_wide(walked) or rows * columns >= INDEX_LIMIT,
        batch=len(sizes),
        grouping=product.grouping,
        group_slots=power_of_two(groups + 1) if call.is_gpu and product.grouping == "offsets" else 0,
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


def _begins_anywhere(operand: Operand, strides: Sequence[int], grouping: str) -> bool:
    """Returns whether the groups of ``operand`` begin at any of its elements that are next to each other in memory."""
    outer, inner, *_ = strides
    if grouping in BY_ROWS:
        return operand.kind in WALKED and operand.kind != "weight" and outer == 1 and inner != 1
    return grouping == "lengths" and operand.kind in ("x", "weight") and inner == 1


def _kind(role: str, outer: int, inner: int) -> str:
    """Returns the kind of an operand with these strides; see ``GemmLayout.operands``."""
    if role in QUANTIZED_COMPONENTS:
        return "whole"
    if role == "groups":
        return "column" if inner == 1 else "strided"
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
