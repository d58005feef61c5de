"""The context of ``templates/triton/gemm.py.j2``.

A program makes one tile of one region. ``schedule.path`` says in which form, and the template's indices follow it:
``i`` counts rows of the activation x (tokens), ``j`` columns of the result (rows of the weight W).

* ``tokens``: x is the dot's left operand; for dense weights and many rows.
* ``weights``: W is the left operand, x the right one, and the accumulator lies [j, i]. A quantised weight is decoded in
  the registers from which the tensor cores read a left operand, so it passes through no memory, and rows of x, which
  may be few, are on the side where the instruction's tile may be narrow.
* ``slices``: as ``weights``, with a leading dimension: each warp multiplies its own slice of every step along k, and
  the slices are summed in a fixed order behind the loop. Few rows of x give few tiles; warps that share a tile keep
  enough loads in flight.

A split schedule (``parts``) has a program for each part of a tile's K, which stores its sums behind those of the
parts before it. ``_packed`` behind a form decodes codes with inline PTX (``int4_values_packed``); without it the text
is plain Triton, for AMD and the interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jitgen.codegen import environment, triton
from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Built
from jitgen.errors import UnsupportedError
from jitgen.families.gemm.context import GemmContext, GemmOperand, GemmRegion
from jitgen.families.gemm.layout import GemmLayout
from jitgen.families.gemm.schedule import GemmSchedule
from jitgen.families.gemm.triton_products import Form, contraction, form_of, load, walk
from jitgen.families.layout import ACCESS_BYTES, item_size
from jitgen.ir.program import Kernel


def build(
    kernel: Kernel, layouts: Sequence[GemmLayout], schedule: GemmSchedule, products: GemmContext, dialect: Dialect
) -> Built:
    """Template context and source options; see ``gemm/render.py``."""
    form = form_of(schedule, layouts)
    regions = [_region(region, form, schedule) for region in products.regions]
    pointers, units = products.pointers, _units(products, layouts)
    integer = "i64" if schedule.wide else "i32"
    signature = [f"*{triton.SIGNATURE_TYPES[operand.dtype]}" for operand in pointers]
    signature += [integer] * len(products.integers)
    signature += [triton.SIGNATURE_TYPES[dtype] for _, dtype in kernel.scalars]
    multiples = [min(operand.unit * item_size(operand.dtype), ACCESS_BYTES) for operand in pointers]
    multiples += [min(units.get(name, 1), triton.MULTIPLE) for name in products.integers]
    multiples += [1] * len(kernel.scalars)
    scalars = [name for name, _ in products.scalars]
    context = {
        "parameters": [*(operand.pointer for operand in pointers), *products.integers, *scalars],
        "index_cast": ".to(tl.int64)" if schedule.wide else "",
        "regions": regions,
        "tiles": [f"tiles{index}" for index in range(len(regions))],
        "include": _used(regions),
    }
    options = {
        "signature": signature,
        "multiples": multiples,
        "num_warps": schedule.warps,
        "num_stages": schedule.stages,
        "enable_fp_fusion": False,
    }
    return context, options


def _units(products: GemmContext, layouts: Sequence[GemmLayout]) -> dict[str, int]:
    """What the integer parameters that decide the width of an access are multiples of, at least."""
    units = {"k": layouts[0].length_unit}
    for region, layout in zip(products.regions, layouts, strict=True):
        units[region.columns] = layout.columns_unit
        for operand in region.operands:
            # A row's one stride may be any, whatever its unit.
            if operand.kind in ("full", "k", "outer"):
                units |= dict.fromkeys((stride for stride in operand.strides if not stride.isdigit()), operand.unit)
    return units


# ----------------------------------------------------------------------------------------------------------- regions


def _region(region: GemmRegion, form: Form, schedule: GemmSchedule) -> dict[str, Any]:
    contractions = [contraction(part, region, form, schedule) for part in region.contractions]
    lines = [found for _, found in contractions]
    shape = (schedule.block_m, schedule.block_n) if form.name == "tokens" else (schedule.block_n, schedule.block_m)
    return {
        "index": region.index,
        "title": region.title,
        "columns": region.columns,
        "parameters": [*(["part"] if form.parts > 1 else []), *_parameters(region)],
        "before": [f"tiles{index}" for index in range(region.index)],
        "axes": form.axes,
        "shape": (form.slices, *shape) if form.sliced else shape,
        "tile_lines": [*_tile_lines(schedule), *_part_lines(form)],
        "turns": f"first, last, {form.step}" if form.parts > 1 else f"0, k, {form.step}",
        "index_lines": [*_index_lines(region, form, schedule), *(line for found in lines for line in found.index)],
        "ahead_lines": [line for found in lines for line in found.ahead],
        "next_lines": [line for found in lines for line in found.head],
        "x": _x(region, form),
        "contractions": [
            {"accumulator": part.accumulator, "type": part.type, "lines": found.body} for part, found in contractions
        ],
        "in_flight": any(found.in_flight for found in lines),
        "turn_lines": [line for found in lines for line in found.turn],
        "final_lines": [line for found in lines for line in found.final],
        "loads": [_operand(operand, region, form) for operand in region.loads],
        "lines": region.lines,
        "stores": [_operand(operand, region, form) for operand in region.stores],
    }


def _parameters(region: GemmRegion) -> list[str]:
    """What a region uses of its kernel's parameters."""
    names = [operand.pointer for operand in region.operands if operand.pointer]
    names += ["m", "k", region.columns]
    for operand in region.operands:
        names += [name for name in (operand.offset, *operand.strides) if name and not name.isdigit()]
    return [*names, *(name for name, _ in region.scalars)]


def _tile_lines(schedule: GemmSchedule) -> list[str]:
    """Which tile a program makes: neighbours share weights (``raster`` tiles along i), so that they meet in a cache."""
    if schedule.raster == 1:
        return ["tile_i = tile // tiles_j", "tile_j = tile % tiles_j"]
    return [
        f"first_i = tile // (tiles_j * {schedule.raster}) * {schedule.raster}",
        f"high = tl.minimum(tiles_i - first_i, {schedule.raster})",
        "tile_i = first_i + (tile - first_i * tiles_j) % high",
        "tile_j = (tile - first_i * tiles_j) // high",
    ]


def _part_lines(form: Form) -> list[str]:
    """Where a part of K begins and ends: whole steps, so that only the last one's end is ragged."""
    if form.parts == 1:
        return []
    return [
        f"steps = (k + {form.step - 1}) // {form.step}",
        f"first = steps * part // {form.parts} * {form.step}",
        f"last = tl.minimum(steps * (part + 1) // {form.parts} * {form.step}, k)",
    ]


def _index_lines(region: GemmRegion, form: Form, schedule: GemmSchedule) -> list[str]:
    """``first_k`` of each slice, and the indices of x."""
    if form.sliced:
        lines = [f"first_k = tl.arange(0, {form.slices})[:, None, None] * {schedule.block_k}"]
    else:
        lines = ["first_k = tl.full((1, 1), 0, tl.int32)"]
    lines.append(f"x_k = first_k + tl.arange(0, {schedule.block_k}){form.axes.x_k}")
    if _masks_rows(region, form):
        return [*lines, f"x_i = i{form.axes.x_i}"]
    return [*lines, f"x_i = tl.minimum(i, m - 1){form.axes.x_i}  # rows beyond the last are read again, and not stored"]


def _masks_rows(region: GemmRegion, form: Form) -> bool:
    """Whether rows of x beyond the last are left out: where most may be, or where rows lie side by side."""
    return form.sliced or _activation(region).strides[0] == "1"


def _activation(region: GemmRegion) -> GemmOperand:
    x = region.contractions[0].x
    if x is None or any(part.x is None or part.x.pointer != x.pointer for part in region.contractions):
        raise UnsupportedError("the triton dialect computes a kernel's products from one activation, a tensor")
    return x


def _x(region: GemmRegion, form: Form) -> str:
    x = _activation(region)
    conditions = ["(x_i < m)"] if _masks_rows(region, form) else []
    loaded = load(x.pointer, walk(x, "x_i", "x_k"), [*conditions, *form.beyond("x_k")])
    return f"beside_words({loaded})" if form.sliced and region.contractions[0].described.format else loaded


# ---------------------------------------------------------------------------------------------------------- epilogue


def _operand(operand: GemmOperand, region: GemmRegion, form: Form) -> dict[str, Any]:
    """An operand with its access: ``expression`` of a load or an iota, ``at``, ``stored`` and ``mask`` of a store."""
    at = operand.position("(i + part * m)" if form.parts > 1 else "i", "j")
    conditions = {"row": "i < m", "column": f"j < {region.columns}"}
    mask = conditions.get(operand.kind, f"(i < m) & (j < {region.columns})")
    found: dict[str, Any] = {"value": operand.value, "pointer": operand.pointer, "at": at, "mask": mask}
    if operand.role == "store":
        return found | {"stored": triton.store_cast(operand.value, operand.dtype)}
    if operand.role == "iota":
        return found | {"expression": f"({at}).to({triton.TYPES[operand.dtype]})"}
    loaded = f"tl.load({operand.pointer})"
    if operand.kind != "scalar":
        loaded = f"tl.load({operand.pointer} + {at}, mask={mask})"
    return found | {"expression": triton.load_cast(loaded, operand.dtype)}


def _used(regions: Sequence[dict[str, Any]]) -> str:
    """The static header's functions that the regions call: one file is one kernel, and holds no more than it needs."""
    lines: list[str] = []
    for region in regions:
        lines += [line.text for line in region["lines"]]
        lines += [operand["expression"] for operand in region["loads"]]
        lines += [operand["stored"] for operand in region["stores"]]
        lines += [line for part in region["contractions"] for line in part["lines"]]
        lines.append(region["x"])
    return environment.select_functions(environment.header("triton", "jitgen_triton.py"), "\n".join(lines))
