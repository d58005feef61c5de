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

``_packed`` behind a form decodes int4 codes with inline PTX (``int4_values_packed``); without it the text is plain
Triton, for AMD and the interpreter.

The scale of a group of weights is applied to the sums of that group in float32 where x has few rows, and else to each
weight, rounded once to x's dtype; with one scale for a row, to the row's sum behind the loop. Scales and zero-points
are narrower than an asynchronous copy, so those of the next step are loaded into registers during this one's products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jitgen.codegen import environment, triton
from jitgen.codegen.dialect import Dialect
from jitgen.errors import UnsupportedError
from jitgen.families.elementwise.context import Built
from jitgen.families.gemm.context import ContractionContext, GemmContext, GemmOperand, GemmRegion
from jitgen.families.gemm.layout import GemmLayout
from jitgen.families.gemm.schedule import GemmSchedule
from jitgen.families.layout import ACCESS_BYTES, item_size
from jitgen.ir.program import Kernel
from jitgen.quant import formats
from jitgen.spec import DTYPE_NAMES

DIVISOR = 16
"""What a parameter marked as divisible is a multiple of, as Triton has it."""
FEW_ROWS = 64
"""Up to so many rows of x in a tile, scaling a group's sums is less work than scaling its weights."""
MANY_WARPS = 8
"""From so many on, a wait for scales is hidden."""


@dataclass(frozen=True)
class Axes:
    """How an index vector is spread over the dimensions of a block: ``i``, ``j`` and ``k`` of x, of W, and of y."""

    x_i: str
    x_k: str
    w_j: str
    w_k: str
    y_i: str
    y_j: str


AXES = {
    "tokens": Axes("[:, None]", "[None, :]", "[None, :]", "[:, None]", "[:, None]", "[None, :]"),
    "weights": Axes("[None, :]", "[:, None]", "[:, None]", "[None, :]", "[None, :]", "[:, None]"),
    "slices": Axes(
        "[None, None, :]", "[None, :, None]", "[None, :, None]", "[None, None, :]", "[None, :]", "[:, None]"
    ),
}


@dataclass(frozen=True)
class Form:
    """What a schedule and the layouts mean for the loop.

    ``step`` is the extent of K in one turn, ``slices`` the dots side by side along it; ``mask`` is how what lies beyond
    K is kept out: not at all (K is a multiple of the step), by whole slices, or element by element.
    """

    name: str
    packed: bool
    slices: int
    step: int
    mask: str

    @property
    def axes(self) -> Axes:
        return AXES[self.name]

    @property
    def sliced(self) -> bool:
        return self.name == "slices"

    def beyond(self, index: str) -> list[str]:
        """The condition that ``index``, of a block along k, is within K; none where everything is."""
        if self.mask == "none":
            return []
        return [f"({'first_k' if self.mask == 'slices' else index} < k - start)"]


@dataclass
class Lines:
    """Lines of a contraction: before the loop, at its head, its body and its end, and behind it."""

    index: list[str] = field(default_factory=list)
    ahead: list[str] = field(default_factory=list)
    head: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    turn: list[str] = field(default_factory=list)
    final: list[str] = field(default_factory=list)


def build(
    kernel: Kernel, layouts: Sequence[GemmLayout], schedule: GemmSchedule, products: GemmContext, dialect: Dialect
) -> Built:
    """Template context and source options; see ``gemm/render.py``."""
    form = _form(schedule, layouts)
    regions = [_region(region, form, schedule, products) for region in products.regions]
    pointers, units = products.pointers, _units(products, layouts)
    integer = "i64" if schedule.wide else "i32"
    signature = [f"*{triton.SIGNATURE_TYPES[operand.dtype]}" for operand in pointers]
    signature += [integer] * len(products.integers)
    signature += [triton.SIGNATURE_TYPES[dtype] for _, dtype in kernel.scalars]
    divisible = [place for place, operand in enumerate(pointers) if _aligned(operand)]
    divisible += [
        len(pointers) + place for place, name in enumerate(products.integers) if units.get(name, 1) >= DIVISOR
    ]
    scalars = [name for name, _ in products.scalars]
    context = {
        "parameters": [*(operand.pointer for operand in pointers), *products.integers, *scalars],
        "index_cast": ".to(tl.int64)" if schedule.wide else "",
        "units": [(name, unit) for name, unit in units.items() if 1 < unit < DIVISOR],
        "regions": regions,
        "include": _used(regions),
    }
    options = {
        "signature": signature,
        "divisible": divisible,
        "num_warps": schedule.warps,
        "num_stages": schedule.stages,
        "enable_fp_fusion": False,
    }
    return context, options


def _form(schedule: GemmSchedule, layouts: Sequence[GemmLayout]) -> Form:
    name, _, packed = schedule.path.partition("_")
    slices = schedule.warps if name == "slices" else 1
    step = slices * schedule.block_k
    unit = min(layout.length_unit for layout in layouts)
    mask = "none" if unit % step == 0 else "slices" if name == "slices" and unit % schedule.block_k == 0 else "elements"
    return Form(name, bool(packed), slices, step, mask)


def _units(products: GemmContext, layouts: Sequence[GemmLayout]) -> dict[str, int]:
    """What the integer parameters that decide the width of an access are multiples of, at least."""
    units = {"k": layouts[0].length_unit}
    for region, layout in zip(products.regions, layouts, strict=True):
        units[region.columns] = layout.columns_unit
        for operand in region.operands:
            # A row's one stride may be any, whatever its unit.
            if operand.kind in ("full", "k", "outer"):
                units |= dict.fromkeys((stride for stride in operand.strides if not stride.isdigit()), operand.unit)
    return {name: min(unit, DIVISOR) for name, unit in units.items()}


def _aligned(operand: GemmOperand) -> bool:
    """Whether an operand's address is a multiple of 16 bytes."""
    return operand.unit * item_size(operand.dtype) >= ACCESS_BYTES


# ----------------------------------------------------------------------------------------------------------- regions


def _region(region: GemmRegion, form: Form, schedule: GemmSchedule, products: GemmContext) -> dict[str, Any]:
    contractions = [_contraction(part, region, form, schedule) for part in region.contractions]
    lines = [found for _, found in contractions]
    shape = (schedule.block_m, schedule.block_n) if form.name == "tokens" else (schedule.block_n, schedule.block_m)
    return {
        "index": region.index,
        "title": region.title,
        "columns": region.columns,
        "parameters": _parameters(region),
        "before": [f"tiles{index}" for index in range(region.index)],
        "axes": form.axes,
        "shape": (form.slices, *shape) if form.sliced else shape,
        "step": form.step,
        "tile_lines": _tile_lines(schedule),
        "index_lines": [*_index_lines(region, form, schedule), *(line for found in lines for line in found.index)],
        "ahead_lines": [line for found in lines for line in found.ahead],
        "next_lines": [line for found in lines for line in found.head],
        "x": _x(region, form),
        "contractions": [
            {"accumulator": part.accumulator, "type": part.type, "lines": found.body} for part, found in contractions
        ],
        "turn_lines": [line for found in lines for line in found.turn],
        "final_lines": [line for found in lines for line in found.final],
        "loads": [_operand(operand, region) for operand in region.loads],
        "lines": region.lines,
        "stores": [_operand(operand, region) for operand in region.stores],
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
    return _load(x.pointer, _walk(x, "x_i", "x_k"), [*conditions, *form.beyond("x_k")])


def _walk(operand: GemmOperand, outer: str, k: str) -> str:
    """The offset of a block of the activation or a dense weight at ``start`` along k."""
    stride = operand.strides[1]
    return f"{'start' if stride == '1' else f'start * {stride}'} + {operand.position(outer, k)}"


def _load(pointer: str | None, at: str, conditions: Sequence[str]) -> str:
    mask = f", mask={' & '.join(conditions)}, other=0" if conditions else ""
    return f"tl.load({pointer} + {at}{mask})"


# ------------------------------------------------------------------------------------------------------ contractions


def _contraction(
    part: ContractionContext, region: GemmRegion, form: Form, schedule: GemmSchedule
) -> tuple[ContractionContext, Lines]:
    quantized = part.described.format is not None
    lines = _quantized(part, region, form, schedule) if quantized else _dense(part, region, form, schedule)
    if form.sliced:
        lines.final.insert(0, f"{part.accumulator} = tl.sum({part.accumulator}, 0)")
    return part, lines


def _dot(part: ContractionContext, form: Form, total: str) -> str:
    operands = f"x, w{part.index}" if form.name == "tokens" else f"w{part.index}, x"
    precision = part.described.precision if part.described.dtype == "float32" else "ieee"
    return f'tl.dot({operands}, {total}input_precision="{precision}", out_dtype={part.type})'


def _dense(part: ContractionContext, region: GemmRegion, form: Form, schedule: GemmSchedule) -> Lines:
    (weight,) = part.weight
    w, lines = f"w{part.index}", Lines()
    conditions = form.beyond(f"{w}_k")
    if weight.strides[0] == "1":
        lines.index.append(f"{w}_j = j{form.axes.w_j}")
        conditions.append(f"({w}_j < {region.columns})")
    else:
        lines.index.append(f"{w}_j = tl.minimum(j, {region.columns} - 1){form.axes.w_j}")
    lines.index.append(f"{w}_k = first_k + tl.arange(0, {schedule.block_k}){form.axes.w_k}")
    lines.body.append(f"{w} = {_load(weight.pointer, _walk(weight, f'{w}_j', f'{w}_k'), conditions)}")
    lines.body.append(f"{part.accumulator} = {_dot(part, form, f'{part.accumulator}, ')}")
    return lines


def _quantized(part: ContractionContext, region: GemmRegion, form: Form, schedule: GemmSchedule) -> Lines:
    described, acc, w, lines = part.described, part.accumulator, f"w{part.index}", Lines()
    format, group = formats.find(described.format or ""), described.group_size
    if form.name == "tokens" or (group and group % schedule.block_k):
        raise UnsupportedError(f"{schedule} is no schedule for {format.name} weights with groups of {group}")
    codes, scales = part.weight[:2]
    per_byte = format.codes_per_byte
    padded = group or formats.ROW_MULTIPLE
    lines.index.append(f"{w}_j = tl.minimum(j, {region.columns} - 1){form.axes.w_j}")
    offset = "first_k" if per_byte == 1 else f"first_k // {per_byte}"
    lines.index.append(f"{w}_k = {offset} + tl.arange(0, {schedule.block_k // per_byte}){form.axes.w_k}")
    lines.index.append(f"{w}_row = {w}_j * ((k + {padded - 1}) // {padded} * {padded // per_byte})")
    if group:
        lines.index.append(f"{w}_groups = {w}_j * ((k + {group - 1}) // {group})")

    def of_step(pointer: str | None, at: str) -> str:
        """Scales or zero-points of the step at ``at``, one for each row and slice; 0 beyond the last."""
        if not group:
            return f"tl.load({pointer} + {w}_j)"
        k = f"{at} + first_k" if at else "first_k"
        return f"tl.load({pointer} + {w}_groups + ({k}) // {group}, mask={k} < k, other=0)"

    def parameter(name: str, pointer: str | None, late: bool) -> None:
        if group and late:
            lines.body.append(f"{name} = {of_step(pointer, 'start')}")
            return
        lines.ahead.append(f"{name} = {of_step(pointer, '')}")
        if group:
            lines.head.append(f"{name}_next = {of_step(pointer, f'start + {form.step}')}")
            lines.turn.append(f"{name} = {name}_next")

    many = schedule.warps >= MANY_WARPS
    if group:
        parameter(f"{w}_scale", scales.pointer, schedule.block_m > FEW_ROWS and many)
    zero = ""
    if format.zero_point:
        parameter(f"{w}_zero", part.weight[2].pointer, schedule.block_m <= FEW_ROWS or many)
        zero = f", {w}_zero"
    start, place = ("start", f"{w}_k") if per_byte == 1 else (f"start // {per_byte}", f"{w}_k * {per_byte}")
    at = f"{start} + {w}_row + {w}_k"
    lines.body.append(f"{w}_codes = {_load(codes.pointer, at, form.beyond(place))}")
    compute = {"bfloat16": "tl.bfloat16", "float16": "tl.float16"}.get(described.dtype, part.type)
    packed = "_packed" if form.packed and format.name == "int4" and described.dtype in ("bfloat16", "float16") else ""
    of_weights = bool(group) and schedule.block_m > FEW_ROWS
    exact = compute if DTYPE_NAMES[format.scale_dtype] == described.dtype else part.type
    # Small integers are exact in every type; 8-bit ones come as float32 at no cost.
    number = exact if of_weights and format.bits == 8 else compute
    values = f"{format.name}_values{packed}({w}_codes{zero}, {number})"
    if of_weights:
        values = f"{values if number == exact else f'{values}.to({exact})'} * {w}_scale.to({exact})"
        values = values if exact == compute else f"({values}).to({compute})"
    lines.body.append(f"{w} = {values}")
    if group and not of_weights:
        lines.body.append(f"{acc} = tl.fma({_dot(part, form, '')}, {w}_scale.to({part.type}), {acc})")
    else:
        lines.body.append(f"{acc} = {_dot(part, form, f'{acc}, ')}")
    if not group:
        last = f"tl.minimum(j, {region.columns} - 1){form.axes.y_j}"
        lines.final.append(f"{acc} = {acc} * tl.load({scales.pointer} + {last}).to({part.type})")
    return lines


# ---------------------------------------------------------------------------------------------------------- epilogue


def _operand(operand: GemmOperand, region: GemmRegion) -> dict[str, Any]:
    """An operand with its access: ``expression`` of a load or an iota, ``at``, ``stored`` and ``mask`` of a store."""
    at = operand.position("i", "j")
    conditions = {"row": "i < m", "column": f"j < {region.columns}"}
    mask = conditions.get(operand.kind, f"(i < m) & (j < {region.columns})")
    found: dict[str, Any] = {"value": operand.value, "pointer": operand.pointer, "at": at, "mask": mask}
    if operand.role == "store":
        return found | {"stored": triton.store_cast(operand.value, operand.dtype)}
    if operand.role == "iota":
        return found | {"expression": f"({at}).to(tl.int64)"}
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
    return environment.select_functions(environment.header("triton", "jitgen_triton.py"), "\n".join(lines))
