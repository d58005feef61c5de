"""Builds the context of ``templates/gemm/gemm.py.j2``.

A program computes one tile of one region, in one of three forms, each with a class of schedules. In the template and
the generated source ``i`` counts rows of the activation x (tokens), and ``j`` columns of the result, which are rows of
the weight W.

* ``tokens``: x is the left operand of ``tl.dot``. This form is for dense weights and many rows.
* ``weights``: W is the left operand and x the right one, so that the accumulator is indexed [j, i]. A quantised weight
  is decoded in the registers from which the tensor cores read a left operand, and never stored. Rows of x, which may be
  few, are the dimension in which the instruction's tile may be narrow.
* ``slices``: as ``weights``, with a leading dimension. Each warp multiplies its own slice of an iteration's K, and the
  slices are added in a fixed order after the loop. Few rows of x give few tiles; several warps that share a tile keep
  enough loads in flight.

With split-K (``schedule.k_splits``) a program computes one range of a tile's K and stores its sums after those of the
ranges before it; the generated source calls the range ``part``. A packed schedule decodes codes with inline PTX
(``int4_values_packed``). Otherwise the source is plain Triton, for AMD and the interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jitgen.codegen import triton
from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Built
from jitgen.errors import UnsupportedError
from jitgen.families.gemm.context import GemmContext, GemmOperand, GemmRegion
from jitgen.families.gemm.layout import BY_ROWS, GemmLayout
from jitgen.families.gemm.mainloops import TritonSchedule
from jitgen.families.gemm.triton_products import Form, form_of, lines_of, load, offset, operand_of, sums_type
from jitgen.ir.program import Kernel
from jitgen.kernel.operands import ACCESS_BYTES, item_size
from jitgen.quant import formats


def build(
    kernel: Kernel, layouts: Sequence[GemmLayout], schedule: TritonSchedule, products: GemmContext, dialect: Dialect
) -> Built:
    """Builds template context and source options; see ``kernel/render.py``."""
    form = form_of(schedule, layouts)
    regions = [_region(region, form, schedule, products) for region in products.regions]
    context = {
        "parameters": products.triton_parameters,
        "index_cast": ".to(tl.int64)" if schedule.wide else "",
        "regions": regions,
        "tiles": [f"tiles{index}" for index in range(len(regions))],
        "tiles_i": _tiles_of_rows(products, schedule),
        "matrices": " * ".join(products.batch),
        "matrix_lines": _matrix_lines(products),
    }
    alignments = [min(operand.unit * item_size(operand.dtype), ACCESS_BYTES) for operand in products.memory]
    units, stages = _units(products, layouts), schedule.stages
    return context, products.triton_options(schedule.wide, schedule.warps, alignments, units, num_stages=stages)


def _matrix_lines(products: GemmContext) -> list[str]:
    """Writes the statements that move a program's pointers to its matrices of the batch."""
    lines = [f"{name} = {expression.replace(' / ', ' // ')}" for name, expression in products.indices("matrix")]
    for name, strides in products.batch_steps:
        lines.append(f"{name} += {' + '.join(f'z{dim} * {stride}' for dim, stride in enumerate(strides))}")
    if products.grouping == "lengths":
        assert products.groups is not None
        lines += [
            "group = matrix",
            f"begin, end = range_of_group({products.groups.pointer}, {products.groups.own[1]}, group, k)",
            "k = end - begin",
            *_group_steps(products.group_steps),
        ]
    return lines


def _tiles_of_rows(products: GemmContext, schedule: TritonSchedule) -> str:
    """Prints the number of a launch's tiles along the rows; of groups of rows, as many as there may be."""
    if products.grouping == "ids":
        return "m"
    if products.grouping == "offsets":
        return f"m // {schedule.block_m} + tl.minimum(group_count + 1, m)"
    return f"(m + {schedule.block_m - 1}) // {schedule.block_m}"


def _group_steps(steps: Sequence[tuple[GemmOperand, str]]) -> list[str]:
    """Writes the statements that move pointers, and first values of iotas, to a group."""
    return [f"{operand.pointer or operand.offset} += {step}" for operand, step in steps]


def _group_lines(products: GemmContext, region: GemmRegion, schedule: TritonSchedule) -> list[str]:
    """Writes the statements that find a program's group when rows are grouped: its tile begins at ``row``, and ``m``
    becomes the end of the group's rows. K is 0 for a tile without rows, or with rows of no group."""
    if products.grouping not in BY_ROWS or products.groups is None:
        return []
    own = next(operand for operand in region.operands if operand.role == "groups")
    read = f"{own.pointer}, {own.own[1]}, group_count, m, tile_i"
    if products.grouping == "ids":
        located = f"group_of_id({read})"
    else:
        located = f"group_of_tile({read}, {products.group_slots}, {schedule.block_m})"
    weights = [(operand, f"group * {step}") for operand in region.operands for step in operand.batch_strides]
    lines = [f"group, row, m = {located}", "k = tl.where(group < 0, 0, k)", "group = tl.maximum(group, 0).to(tl.int64)"]
    return [*lines, *_group_steps(weights)]


def _units(products: GemmContext, layouts: Sequence[GemmLayout]) -> dict[str, int]:
    """Returns the known divisors of those integer parameters on which the width of an access depends."""
    units = {"k": layouts[0].length_unit}
    for region, layout in zip(products.regions, layouts, strict=True):
        units[region.columns] = layout.columns_unit
        for operand in region.operands:
            # An operand of kind "row" is read element by element, so its unit says nothing about its stride.
            if operand.kind in ("full", "k", "outer"):
                strides = (stride for stride in operand.strides if not stride.isdigit())
                units |= dict.fromkeys(strides, operand.unit)
    return units


# ----------------------------------------------------------------------------------------------------------- regions


def _region(region: GemmRegion, form: Form, schedule: TritonSchedule, products: GemmContext) -> dict[str, Any]:
    contractions = [(product, lines_of(product, region, form, schedule)) for product in region.contractions]
    all_lines = [lines for _, lines in contractions]
    shape = (schedule.block_m, schedule.block_n) if form.name == "tokens" else (schedule.block_n, schedule.block_m)
    return {
        "index": region.index,
        "title": region.title,
        "columns": region.columns,
        "parameters": [*(["part"] if form.k_splits > 1 else []), *_parameters(region, products.grouping)],
        "before": [f"tiles{index}" for index in range(region.index)],
        "axes": form.axes,
        "shape": (form.slices, *shape) if form.sliced else shape,
        "tile_lines": [*_tile_lines(schedule), *_range_lines(form), *_group_lines(products, region, schedule)],
        "row": "row" if products.grouping in BY_ROWS else f"tile_i * {schedule.block_m}",
        "k_range": f"first, last, {form.step}" if form.k_splits > 1 else f"0, k, {form.step}",
        "index_lines": [
            *_index_lines(region, form, schedule),
            *(line for lines in all_lines for line in lines.indices),
        ],
        "before_lines": [line for lines in all_lines for line in lines.before],
        "head_lines": [line for lines in all_lines for line in lines.head],
        "x": _x(region, form, schedule),
        "contractions": [
            {
                "accumulator": product.accumulator,
                "type": sums_type(product, product.contraction.group_size),
                "lines": lines.body,
            }
            for product, lines in contractions
        ],
        "in_flight": any(lines.in_flight for lines in all_lines),
        "tail_lines": [line for lines in all_lines for line in lines.tail],
        "after_lines": [line for lines in all_lines for line in lines.after],
        "loads": [_operand(operand, region, form) for operand in region.loads],
        "lines": region.lines,
        "stores": [_store(operand, region, form, schedule) for operand in region.stores],
    }


def _parameters(region: GemmRegion, grouping: str) -> list[str]:
    """Returns the kernel's parameters that a region uses."""
    of_rows = grouping in BY_ROWS
    names = [operand.pointer for operand in region.operands if operand.pointer]
    names += ["m", "k", *(["group_count"] if of_rows else []), region.columns]
    for operand in region.operands:
        steps = operand.strides if of_rows else operand.own
        names += [name for name in (operand.offset, *steps) if name and not name.isdigit()]
    return [*names, *(name for name, _ in region.scalars)]


def _tile_lines(schedule: TritonSchedule) -> list[str]:
    """Writes the lines that compute the tile of a program. ``raster`` tiles along i come before the next tile along j,
    so that programs which run at the same time read the same weights from the L2 cache."""
    if schedule.raster == 1:
        return ["tile_i = tile // tiles_j", "tile_j = tile % tiles_j"]
    return [
        f"first_i = tile // (tiles_j * {schedule.raster}) * {schedule.raster}",
        f"high = tl.minimum(tiles_i - first_i, {schedule.raster})",
        "tile_i = first_i + (tile - first_i * tiles_j) % high",
        "tile_j = (tile - first_i * tiles_j) // high",
    ]


def _range_lines(form: Form) -> list[str]:
    """Writes the lines that compute where a program's range of K begins and ends. Ranges have whole iterations, but for
    the last one's end."""
    if form.k_splits == 1:
        return []
    return [
        f"steps = (k + {form.step - 1}) // {form.step}",
        f"first = steps * part // {form.k_splits} * {form.step}",
        f"last = tl.minimum(steps * (part + 1) // {form.k_splits} * {form.step}, k)",
    ]


def _index_lines(region: GemmRegion, form: Form, schedule: TritonSchedule) -> list[str]:
    """Writes the lines that compute ``first_k``, at which each slice begins within an iteration, and the indices of
    x."""
    if form.sliced:
        lines = [f"first_k = tl.arange(0, {form.slices})[:, None, None] * {schedule.slice_k}"]
    else:
        lines = ["first_k = tl.full((1, 1), 0, tl.int32)"]
    lines.append(f"x_k = first_k + tl.arange(0, {schedule.slice_k}){form.axes.x_k}")
    if _masks_rows(region, form):
        return [*lines, f"x_i = i{form.axes.x_i}"]
    return [*lines, f"x_i = tl.minimum(i, m - 1){form.axes.x_i}  # rows beyond the last are read again, and not stored"]


def _masks_rows(region: GemmRegion, form: Form) -> bool:
    """Returns whether loads of x are masked beyond its last row: where that may be most rows of the tile, or where x is
    contiguous along its rows, where clamped indices would make accesses narrow. Else the last row is read again."""
    return form.sliced or _activation(region).own[0] == "1"


def _activation(region: GemmRegion) -> GemmOperand:
    """Returns the activation that all products of a region share."""
    x = region.contractions[0].x
    if x is None or any(product.x is None or product.x.pointer != x.pointer for product in region.contractions):
        raise UnsupportedError("the triton dialect computes a kernel's products from one activation, a tensor")
    return x


def _x(region: GemmRegion, form: Form, schedule: TritonSchedule) -> str:
    """Prints a block of x."""
    x = _activation(region)
    conditions = ["(x_i < m)"] if _masks_rows(region, form) else []
    loaded = load(x.pointer, offset(x, "x_i", "x_k"), [*conditions, *form.beyond("x_k")])
    loaded = operand_of(loaded, x.dtype, schedule)
    format = region.contractions[0].contraction.format
    return f"beside_words({loaded})" if form.sliced and format and formats.find(format).tiled else loaded


# ---------------------------------------------------------------------------------------------------------- epilogue


def _store(operand: GemmOperand, region: GemmRegion, form: Form, schedule: TritonSchedule) -> dict[str, Any]:
    """Describes what the epilogue stores; of runs of columns the largest."""
    if operand.run == 1:
        return _operand(operand, region, form)
    runs, rows = schedule.block_n // operand.run, schedule.block_m
    axis, shape = (2, (rows, runs, operand.run)) if form.name == "tokens" else (1, (runs, operand.run, rows))
    column = f"(tile_j * {runs} + tl.arange(0, {runs})){form.axes.y_j}"
    return {
        "pointer": operand.pointer,
        "at": operand.position("i", column),
        "stored": f"tl.max(tl.reshape({operand.value}, {shape}), {axis})",
        "mask": f"(i < m) & ({column} < {region.columns} // {operand.run})",
    }


def _operand(operand: GemmOperand, region: GemmRegion, form: Form) -> dict[str, Any]:
    """Describes an operand of the epilogue: ``expression`` of a load or an iota; ``at``, ``stored`` and ``mask`` of a
    store."""
    at = operand.position("(i + part * m)" if form.k_splits > 1 else "i", "j")
    conditions = {"row": "i < m", "column": f"j < {region.columns}"}
    mask = conditions.get(operand.kind, f"(i < m) & (j < {region.columns})")
    described: dict[str, Any] = {"value": operand.value, "pointer": operand.pointer, "at": at, "mask": mask}
    if operand.role == "store":
        return described | {"stored": triton.store_cast(operand.value, operand.dtype)}
    if operand.role == "iota":
        return described | {"expression": f"({at}).to({triton.TYPES[operand.dtype]})"}
    loaded = f"tl.load({operand.pointer})"
    if operand.kind != "scalar":
        loaded = f"tl.load({operand.pointer} + {at}, mask={mask})"
    return described | {"expression": triton.load_cast(loaded, operand.dtype)}
