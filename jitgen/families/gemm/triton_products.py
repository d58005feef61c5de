"""What a Triton matmul does with its weights: one contraction's lines, in each form of ``gemm/triton.py``.

The scale of a group of weights is applied to the sums of that group in float32 where x has few rows, and else to each
weight, rounded once to x's dtype; with one scale for a row, to the row's sum behind the loop. Scales and zero-points
are narrower than an asynchronous copy. Either those of the next step are loaded into registers while this one is
multiplied, which costs a change of layout in every step, or they are loaded where they are used, for other warps to
hide the wait; what is loaded where it is used is laid out by its use, and weights scaled so stay in their registers.
(Scales widened to float32, which can be copied asynchronously, were 8 % slower on an H200 at 1024 rows.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from jitgen.errors import UnsupportedError
from jitgen.families.gemm.context import ContractionContext, GemmOperand, GemmRegion
from jitgen.families.gemm.layout import GemmLayout
from jitgen.families.gemm.schedule import GemmSchedule
from jitgen.quant import formats
from jitgen.quant.layouts.interleaved import CHUNK
from jitgen.spec import DTYPE_NAMES

FEW_ROWS = 64
"""Up to so many rows of x in a tile, scaling a group's sums is less work than scaling its weights."""
MANY_WARPS = 8
"""From so many on, a wait for scales is hidden."""


WORD_BITS = 32
"""Codes are loaded as words, of the layout "interleaved"."""


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
    K is kept out: not at all (K is a multiple of the step), by whole slices, or element by element. ``parts`` of K are
    summed apart; the loop of one begins at ``first``.
    """

    name: str
    packed: bool
    slices: int
    step: int
    mask: str
    parts: int = 1

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
    """Lines of a contraction: before the loop, at its head, its body and its end, and behind it.

    ``in_flight``: whether its products may still read registers, with decoded weights, at the end of a turn.
    """

    index: list[str] = field(default_factory=list)
    ahead: list[str] = field(default_factory=list)
    head: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    turn: list[str] = field(default_factory=list)
    final: list[str] = field(default_factory=list)
    in_flight: bool = False


def form_of(schedule: GemmSchedule, layouts: Sequence[GemmLayout]) -> Form:
    name, _, packed = schedule.path.partition("_")
    slices = schedule.warps if name == "slices" else 1
    step = schedule.step
    unit = min(layout.length_unit for layout in layouts)
    mask = "none" if unit % step == 0 else "slices" if name == "slices" and unit % schedule.block_k == 0 else "elements"
    return Form(name, bool(packed), slices, step, mask, schedule.parts)


def walk(operand: GemmOperand, outer: str, k: str) -> str:
    """The offset of a block of the activation or a dense weight at ``start`` along k."""
    stride = operand.strides[1]
    return f"{'start' if stride == '1' else f'start * {stride}'} + {operand.position(outer, k)}"


def load(pointer: str | None, at: str, conditions: Sequence[str]) -> str:
    mask = f", mask={' & '.join(conditions)}, other=0" if conditions else ""
    return f"tl.load({pointer} + {at}{mask})"


def contraction(
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
    lines.body.append(f"{w} = {load(weight.pointer, walk(weight, f'{w}_j', f'{w}_k'), conditions)}")
    lines.body.append(f"{part.accumulator} = {_dot(part, form, f'{part.accumulator}, ')}")
    return lines


def _quantized(part: ContractionContext, region: GemmRegion, form: Form, schedule: GemmSchedule) -> Lines:
    described, acc, w, lines = part.described, part.accumulator, f"w{part.index}", Lines()
    format, group = formats.find(described.format or ""), described.group_size
    if form.name == "tokens" or (group and group % schedule.block_k):
        raise UnsupportedError(f"{schedule} is no schedule for {format.name} weights with groups of {group}")
    codes, scales = part.weight[:2]
    per_word = WORD_BITS // format.bits
    padded = group or formats.ROW_MULTIPLE
    lines.index.append(f"{w}_j = tl.minimum(j, {region.columns} - 1){form.axes.w_j}")
    lines.index.append(f"{w}_k = first_k // {per_word} + tl.arange(0, {schedule.block_k // per_word}){form.axes.w_k}")
    lines.index.append(f"{w}_row = {w}_j * ((k + {padded - 1}) // {padded} * {padded // per_word})")
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
        lines.ahead.append(f"{name} = {of_step(pointer, 'first' if form.parts > 1 else '')}")
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
    at = f"start // {per_word} + {w}_row + {w}_k"
    # Every chunk of columns lies within K as padded; its words are not in the order of its columns.
    place = f"{w}_k // {CHUNK // per_word} * {CHUNK}"
    lines.body.append(f"{w}_codes = {load(codes.pointer, at, form.beyond(place))}")
    compute = {"bfloat16": "tl.bfloat16", "float16": "tl.float16"}.get(described.dtype, part.type)
    packed = "_packed" if form.packed and described.dtype in ("bfloat16", "float16") else ""
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
        lines.in_flight = form.name == "weights"
    if not group:
        last = f"tl.minimum(j, {region.columns} - 1){form.axes.y_j}"
        lines.final.append(f"{acc} = {acc} * tl.load({scales.pointer} + {last}).to({part.type})")
    return lines
