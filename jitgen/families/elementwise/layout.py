"""Lays out a pointwise kernel's operands over as few dimensions as their strides allow.

``layout`` turns each operand's movements into strides, orders the region's dimensions by the strides of what it writes,
and merges neighbouring dimensions that every operand walks without a gap (PyTorch's TensorIterator does the same). It
runs in every call with new sizes. Its outcome has two halves:

* the *layout*, on which the generated source depends: collapsed rank, and for each operand whether its innermost
  stride is 1, 0 or something else; how many elements may be moved in one access; whether indices need 64 bits;
* the *geometry*: the sizes and strides a launch passes as plain integers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from jitgen.device import Device
from jitgen.families.short_rows import LANE_ELEMENTS
from jitgen.ir import symbols
from jitgen.ir.body import Body, Operand
from jitgen.ir.program import Kernel
from jitgen.ir.regions import MAX_REGIONS
from jitgen.ir.views import Memory
from jitgen.kernel.geometry import PointGeometry, gathered_of, touched_of
from jitgen.kernel.layout import constant_in_row, reaches_wide, stride_kind, unit_of, views_of
from jitgen.kernel.operands import INDEX_LIMIT, Call, collapse, item_size
from jitgen.kernel.parameters import LAUNCH, Integer, KernelParameters, RegionParameters, declared


@dataclass(frozen=True)
class Layout:
    """Holds the facts of a region's strides on which the source depends. It is the same for every device.

    Attributes:
        rank: collapsed dimensions, at least 1; the last is the innermost.
        operands: for each operand ``"contiguous"`` (innermost stride 1), ``"broadcast"`` (innermost stride 0),
            ``"scalar"`` (every stride 0) or ``"strided"``.
        unit: the largest power of two of elements, at most 16, that every contiguous operand can move at once:
            addresses, outer strides and (above rank 1) the innermost size are multiples of it, up to 16 bytes.
        wide: whether an index can reach 2**31.
        neighbours: for each operand and each dimension that an index chooses along, whether its stride is 1.
        lanes: lanes of a warp that share the innermost dimension, a row that is reduced; 0 where none is.
        rows: for each operand, the largest power of two of elements, at most 16, that may be moved at once of a row
            that indices choose, up to 16 bytes; empty where indices choose none, and on the CPU.
    """

    rank: int
    operands: tuple[str, ...]
    unit: int
    wide: bool
    neighbours: tuple[tuple[bool, ...], ...] = ()
    lanes: int = 0
    rows: tuple[int, ...] = ()


def layout(kernel: Kernel, call: Call) -> tuple[tuple[Layout, ...], tuple[PointGeometry, ...]]:
    """Computes layout and geometry of each region of ``kernel``.

    Raises:
        NotViewable: no strides describe an operand, which has to be copied first.
    """
    resolved = [_resolve_body(body, call) for body in kernel.bodies]
    return tuple(layout for layout, _ in resolved), tuple(geometry for _, geometry in resolved)


def _resolve_body(body: Body, call: Call) -> tuple[Layout, PointGeometry]:
    environment = call.environment
    sizes = symbols.evaluated(body.shape, environment)
    views = views_of(body, call)
    rank = len(sizes)
    gathered = gathered_of(views, rank)
    walked, store = [view.strides[:rank] for view in views], body.stores[0]
    chosen, outer = body.operands[store].gathered > 0, rank - body.row_rank
    if chosen or body.row_rank:
        leader = _order(walked[store], gathered[store]) if chosen else walked[store]
        collapsed, strides = collapse(sizes[:outer], [steps[:outer] for steps in (*walked, leader)], len(views))
        strides = strides[: len(views)]
    else:
        collapsed, strides = collapse(sizes, walked, store)
    if body.row_rank:  # a row stays a dimension
        collapsed = (*collapsed, sizes[-1])
        strides = tuple((*steps, own[-1]) for steps, own in zip(strides, walked, strict=True))
    offsets = tuple(view.offset for view in views)
    touched = touched_of(body, (zip(collapsed, steps, strict=True) for steps in strides))
    geometry = PointGeometry(sizes=collapsed, strides=strides, offsets=offsets, gathered=gathered, touched=touched)
    kinds = tuple(_kind(operand, stride, chosen) for operand, stride in zip(body.operands, strides, strict=True))
    if chosen and not (kinds[store] == "contiguous" and _is_chosen_by_row(body, strides)):
        kinds = (*kinds[:store], "strided")  # its only store
    walked_sizes = (
        (*zip(collapsed, stride, strict=True), *chosen) for stride, chosen in zip(strides, gathered, strict=True)
    )
    wide = geometry.elements >= INDEX_LIMIT or reaches_wide(walked_sizes)
    unit = _unit(body, geometry, kinds, call.buffers) if call.is_gpu else 1
    if body.row_rank and unit < LANE_ELEMENTS:  # a lane's elements are no whole accesses
        kinds = tuple("strided" if kind == "contiguous" else kind for kind in kinds)
    neighbours = tuple(tuple(stride == 1 for _, stride in chosen) for chosen in gathered)
    lanes = collapsed[-1] // LANE_ELEMENTS if body.row_rank else 0
    rows = _row_units(body, geometry, kinds, call.buffers) if call.is_gpu else ()
    return Layout(len(collapsed), kinds, unit, wide, neighbours, lanes, rows), geometry


def _order(strides: tuple[int, ...], gathered: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    """Orders dimensions by strides: those of a result at computed places. Along a dimension where only an index
    decides, its steps are as long as the longest of those that indices choose along."""
    step = max(abs(stride) for _, stride in gathered)
    return tuple(stride or step for stride in strides)


def _is_chosen_by_row(body: Body, strides: Sequence[tuple[int, ...]]) -> bool:
    """Returns whether the indices of the body's scatter are the same for all of the innermost dimension."""
    (scatter,) = (instruction for instruction in body.instructions if instruction.op == "scatter")
    return constant_in_row(body, [stride[-1] for stride in strides]).issuperset(scatter.args[1:])


def _kind(operand: Operand, strides: tuple[int, ...], chosen: bool) -> str:
    """Returns the kind of an operand; of an index that may choose the place of a row, also whether it is constant
    there."""
    if operand.kind == "iota":
        return "broadcast" if chosen and strides[-1] == 0 else "strided"
    if operand.kind == "load" and not any(strides):
        return "scalar"
    return stride_kind(strides[-1])


def _unit(body: Body, geometry: PointGeometry, kinds: tuple[str, ...], buffers: Sequence[Memory]) -> int:
    """Computes ``Layout.unit``."""
    accesses = _accesses(body, geometry, kinds, buffers, gathers=False)
    return unit_of(geometry.sizes[-1:] if len(geometry.sizes) > 1 else (), accesses.values())


def _row_units(
    body: Body, geometry: PointGeometry, kinds: tuple[str, ...], buffers: Sequence[Memory]
) -> tuple[int, ...]:
    """Computes ``Layout.rows``."""
    inner = geometry.sizes[-1:] if len(geometry.sizes) > 1 else ()
    accesses = _accesses(body, geometry, kinds, buffers, gathers=True)
    units = {index: unit_of(inner, [access]) for index, access in accesses.items()}
    return tuple(units.get(index, 1) for index in range(len(kinds))) if units else ()


def _accesses(
    body: Body, geometry: PointGeometry, kinds: tuple[str, ...], buffers: Sequence[Memory], gathers: bool
) -> dict[int, tuple[int, list[int]]]:
    """Returns, for each contiguous operand that is gathered or for each other one, the size of an element and the bytes
    whose multiples its addresses are."""
    accesses = {}
    operands = zip(body.operands, kinds, geometry.strides, geometry.offsets, geometry.gathered, strict=True)
    for index, (operand, kind, strides, offset, gathered) in enumerate(operands):
        if kind == "contiguous" and operand.buffer is not None and (operand.kind == "gather") == gathers:
            size = item_size(operand.dtype)
            steps = [offset, *strides[:-1], *(stride for _, stride in gathered)]
            accesses[index] = (size, [*(step * size for step in steps), buffers[operand.buffer].alignment])
    return accesses


def parameters(kernel: Kernel, layouts: Sequence[Layout], device: Device) -> KernelParameters:
    """Declares the parameters of the kernel. The integers of region ``r`` are ``n<r>_<dim>``, its sizes; for each
    operand ``o<r>_<operand>``, an iota's first value, ``s<r>_<operand>_<dim>``, strides that its kind does not fix, and
    ``b<r>_<operand>_<dim>`` and ``g<r>_<operand>_<dim>``, size and stride of a dimension that an index chooses along;
    where regions share a grid, ``end<r>``, the number of the block after the region's last one."""
    regions = []
    runs = _runs(kernel, layouts) if device.is_gpu and len(layouts) > MAX_REGIONS else ()
    for region, (body, layout) in enumerate(zip(kernel.bodies, layouts, strict=True)):
        sizes = tuple(Integer(f"n{region}_{dim}", "sizes", dim=dim, region=region) for dim in range(layout.rank))
        operands = []
        for index, (operand, kind) in enumerate(zip(body.operands, layout.operands, strict=True)):
            number = f"{region}_{index}"
            inner = {"contiguous": "1", "broadcast": "0", "scalar": "0"}.get(kind, "")
            outer = "0" if kind == "scalar" else ""
            gathered = tuple(
                (f"b{number}_{dim}", "1" if layout.neighbours[index][dim] else f"g{number}_{dim}")
                for dim in range(operand.gathered)
            )
            strides = [outer] * (layout.rank - 1) + [inner]
            operands.append(declared(operand, index, strides, number, gathered=gathered))
        shares = device.is_gpu and (region + 1 < len(layouts) or bool(runs))
        ends = (Integer(f"end{region}", "ends", dim=region, region=LAUNCH),) if shares else ()
        regions.append(RegionParameters(sizes, tuple(operands), ends))
    return KernelParameters(tuple(regions), any(layout.wide for layout in layouts), runs=runs)


def _runs(kernel: Kernel, layouts: Sequence[Layout]) -> tuple[int, ...]:
    """Returns how many regions, one after the other (``texts.py``), are of one text: all compute the same, and these
    are laid out in the same way."""
    alike = itertools.groupby(zip(kernel.bodies, layouts, strict=True), lambda region: (region[0].computed, region[1]))
    return tuple(sum(1 for _ in run) for _, run in alike)
