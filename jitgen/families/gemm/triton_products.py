"""Writes loads and products of the weights in a Triton matmul: the lines of one contraction, in each form of
``triton.py``.

Where x has few rows, the scale of a group of weights is applied in float32 to the group's sums; else to each weight,
which is then rounded once to x's dtype. With one scale for each row, the row's sum is scaled after the loop.

Scales and zero-points are narrower than an asynchronous copy can be, so there are two ways to load them. They can be
*prefetched*: loaded into registers one iteration ahead, which costs a change of register layout in every iteration. Or
they can be loaded in the iteration that uses them, with the layout of their use, while other warps hide the latency.
(Scales widened to float32, which can be copied asynchronously, were 8 % slower on an H200 at 1024 rows.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from jitgen.errors import UnsupportedError
from jitgen.families.gemm.context import ContractionContext, GemmOperand, GemmRegion
from jitgen.families.gemm.layout import GemmLayout
from jitgen.families.gemm.mainloops import TritonSchedule
from jitgen.quant import formats
from jitgen.quant.codes import BLOCK, FLOAT8, SIGNED, longest_exact_sum
from jitgen.quant.layouts.interleaved import CHUNK
from jitgen.spec import DTYPE_NAMES

SCALED_SUM_ROWS = 64
"""Rows of x in a tile up to which scaling a group's sums is less work than scaling its weights."""
MANY_WARPS = 8
"""Warps of a block from which on they hide the latency of scales that are loaded where they are used."""
FLOAT8_TYPES = {
    "float8_e4m3fn": ("tl.float8e4nv", "e4m3_to_float32"),
    "float8_e5m2": ("tl.float8e5", "e5m2_to_float32"),
}
"""Triton's types of the 8-bit floats, and the functions that decode their bytes."""
COMPUTED = {
    "bfloat16": "tl.bfloat16",
    "float16": "tl.float16",
    "int8": "tl.int8",
    **dict.fromkeys(FLOAT8, "tl.float16"),
}
"""The type that codes of a weight are decoded to, by the dtype of x; float32 for others. Beside an 8-bit float they are
float16 before they are such too."""
E4M3_ROWS = ("fp8_e4m3", "mxfp8")
"""Formats whose codes are float8_e4m3fn."""
CHAIN = 128
"""Products of 8-bit floats that Hopper's tensor cores add up before the sum goes to a float32 accumulator: they keep
about 14 bits (DeepSeek-V3's report, section 3.3.2, promotes sums of 128 too)."""
WORD_BITS = 32
"""Bits of the words in which codes are loaded; their order is that of the quantisation layout "interleaved"."""


@dataclass(frozen=True)
class Axes:
    """Holds the subscripts that broadcast an index vector over a block: for ``i`` and ``k`` of x, for ``j`` and ``k``
    of W, and for ``i`` and ``j`` of the accumulator y."""

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
    """Says what a schedule and the layouts mean for the loop over K.

    Attributes:
        name: ``tokens``, ``weights`` or ``slices``.
        packed: whether codes are decoded with inline PTX.
        slices: how many dots one iteration computes side by side, each over its own slice of K.
        step: extent of K that one iteration reads.
        mask: how elements beyond K are masked: ``"none"`` (K is a multiple of the step), ``"slices"`` (a whole
            slice is within K or beyond it), or ``"elements"``.
        k_splits: ranges of K, each summed by a program of its own; a program's range begins at ``first``.
    """

    name: str
    packed: bool
    slices: int
    step: int
    mask: str
    k_splits: int = 1

    @property
    def axes(self) -> Axes:
        return AXES[self.name]

    @property
    def sliced(self) -> bool:
        return self.name == "slices"

    def beyond(self, index: str) -> list[str]:
        """Prints the condition that ``index``, of a block along k, is within K; no condition where every index is."""
        if self.mask == "none":
            return []
        return [f"({'first_k' if self.mask == 'slices' else index} < k - start)"]


@dataclass
class Lines:
    """Holds the lines of one contraction.

    Attributes:
        indices: index vectors, computed before the loop.
        before: loads before the loop.
        head: at the beginning of an iteration.
        body: the products of an iteration.
        tail: at the end of an iteration.
        after: after the loop.
        in_flight: whether products may still read registers, with decoded weights, at the end of an iteration.
    """

    indices: list[str] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    head: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    tail: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    in_flight: bool = False


def form_of(schedule: TritonSchedule, layouts: Sequence[GemmLayout]) -> Form:
    """Derives the form of a kernel with this schedule and these layouts."""
    name, step = schedule.form, schedule.block_k
    unit = min(layout.length_unit for layout in layouts)
    mask = "none" if unit % step == 0 else "slices" if name == "slices" and unit % schedule.slice_k == 0 else "elements"
    return Form(name, schedule.packed, schedule.slices, step, mask, schedule.k_splits)


def offset(operand: GemmOperand, outer: str, k: str) -> str:
    """Prints the offsets of a block of the activation or of a dense weight that begins at ``start`` along k."""
    stride, of_rows = operand.own[1], f"{outer} * 0 + " if operand.own[0] == "0" else ""  # for the block's shape
    return f"{'start' if stride == '1' else f'start * {stride}'} + {of_rows}{operand.position(outer, k)}"


def load(pointer: str | None, at: str, conditions: Sequence[str]) -> str:
    """Prints a load at offset ``at``, of 0 where a condition does not hold."""
    mask = f", mask={' & '.join(conditions)}, other=0" if conditions else ""
    return f"tl.load({pointer} + {at}{mask})"


def operand_of(loaded: str, dtype: str, schedule: TritonSchedule) -> str:
    """Prints a loaded block as an operand of ``tl.dot``. Floats of 8 bits are loaded as bytes. Where
    codes are decoded they are multiplied as float16, which has all of them."""
    if dtype in FLOAT8:
        type, decode = FLOAT8_TYPES[dtype]
        return f"{decode}({loaded}).to(tl.float16)" if schedule.decoded else f"{loaded}.to({type}, bitcast=True)"
    return f"{loaded}.to(tl.float16)" if dtype == "int8" and schedule.decoded else loaded


def lines_of(product: ContractionContext, region: GemmRegion, form: Form, schedule: TritonSchedule) -> Lines:
    """Writes the lines of one contraction of ``region``."""
    if product.contraction.format is not None and product.contraction.blocks:
        lines = _scaled(product, region, form, schedule)
    elif product.contraction.format is not None:
        lines = _quantized(product, region, form, schedule)
    elif product.contraction.blocks:
        lines = _in_blocks(product, region, form, schedule)
    else:
        lines = _dense(product, region, form, schedule)
    if form.sliced:
        lines.after.insert(0, f"{product.accumulator} = tl.sum({product.accumulator}, 0)")
    return lines


def _dot(product: ContractionContext, form: Form, total: str, schedule: TritonSchedule, type: str | None = None) -> str:
    operands = f"x, w{product.index}" if form.name == "tokens" else f"w{product.index}, x"
    precision = product.contraction.precision if product.contraction.dtype == "float32" else "ieee"
    more = ""
    if product.contraction.dtype in FLOAT8 and not schedule.decoded:
        more = f", max_num_imprecise_acc={min(CHAIN, schedule.slice_k)}"
    return f'tl.dot({operands}, {total}input_precision="{precision}"{more}, out_dtype={type or product.type})'


def _dense(product: ContractionContext, region: GemmRegion, form: Form, schedule: TritonSchedule) -> Lines:
    lines = _with_weight(product, region, form, schedule)
    lines.body.append(f"{product.accumulator} = {_dot(product, form, f'{product.accumulator}, ', schedule)}")
    return lines


def _in_blocks(product: ContractionContext, region: GemmRegion, form: Form, schedule: TritonSchedule) -> Lines:
    """Writes a product of codes with scales of blocks: an iteration reads one block of K, and its sums, times the
    scales of both operands, are added to the accumulator in float32."""
    if form.sliced or form.step != BLOCK:
        raise UnsupportedError(f"{schedule} is no schedule for scales of blocks of {BLOCK} columns")
    lines = _with_weight(product, region, form, schedule)
    scales = []
    for name, operand in zip(product.contraction.blocks, product.weight[1:], strict=True):
        index, most, axis = ("i", "m", form.axes.y_i) if name == "x" else ("j", region.columns, form.axes.y_j)
        row = f"tl.minimum({index}, {most} - 1){axis}"
        row, (outer, inner) = row if name == "x" else f"({row} // {BLOCK})", operand.own
        scale = f"{name}{product.index}_scale"
        lines.indices.append(f"{scale}_row = {row} * {outer}")
        lines.body.append(f"{scale} = tl.load({operand.pointer} + {scale}_row + start // {BLOCK} * {inner})")
        scales.append(scale)
    sums = _dot(product, form, "", schedule, "tl.int32" if product.contraction.dtype == "int8" else "tl.float32")
    lines.body.append(f"sums = {sums}.to(tl.float32)")
    lines.body.append(f"{product.accumulator} = tl.fma(sums, {' * '.join(scales)}, {product.accumulator})")
    return lines


def _scaled(product: ContractionContext, region: GemmRegion, form: Form, schedule: TritonSchedule) -> Lines:
    """Writes a product of codes with a scale for each group of both operands, which are powers of two."""
    contraction, w, acc, lines = product.contraction, f"w{product.index}", product.accumulator, Lines()
    format, group = formats.find(contraction.format or ""), contraction.group_size or 1
    codes, scales, scales_of_x = product.weight
    x_scale, per_byte, count = f"x{product.index}_scale", format.codes_per_byte, schedule.slice_k // group
    outer, inner = scales_of_x.own
    most, rounded = f"({region.columns} - 1)", f"((k + {group - 1}) // {group})"
    row_of_weight = f"tl.minimum(j, {most})"
    lines.indices += [
        f"groups = tl.arange(0, {count})[None, :]",
        f"{w}_k = tl.arange(0, {schedule.slice_k // per_byte}){form.axes.w_k}",
        f"{w}_row = {row_of_weight}{form.axes.w_j} * ({rounded} * {group // per_byte})",
        f"{w}_groups = {row_of_weight}[:, None] * {rounded} + groups",
        f"{x_scale}_groups = tl.minimum(i, m - 1)[:, None] * {outer} + groups * {inner}",
    ]
    whole = form.mask == "none"
    of_codes = [] if whole else [f"({w}_k * {per_byte} < k - start)"]
    of_groups = [] if whole else [f"(groups * {group} < k - start)"]
    loaded = load(f"{codes.pointer}.to(tl.pointer_type(tl.uint8))", f"{w}_row + {w}_k + start // {per_byte}", of_codes)
    lines.body += [
        f"{w} = {operand_of(loaded, contraction.dtype, schedule) if per_byte == 1 else loaded}",
        f"{w}_scale = {load(scales.pointer, f'{w}_groups + start // {group}', of_groups)}",
        f"{x_scale} = {load(scales_of_x.pointer, f'{x_scale}_groups + start // {group} * {inner}', of_groups)}",
        f"{x_scale} = e8m0_of_power({x_scale}, {product.index})",
    ]
    left, right = f'x, {x_scale}, "e4m3"', f'{w}, {w}_scale, "{"e4m3" if per_byte == 1 else "e2m1"}"'
    operands = f"{left}, {right}" if form.name == "tokens" else f"{right}, {left}"
    lines.body.append(f"{acc} = tl.dot_scaled({operands}, {acc})")
    return lines


def _with_weight(product: ContractionContext, region: GemmRegion, form: Form, schedule: TritonSchedule) -> Lines:
    """Writes the lines that load a block of a dense weight."""
    weight = product.weight[0]
    w, lines = f"w{product.index}", Lines()
    conditions = form.beyond(f"{w}_k")
    if weight.own[0] == "1":
        lines.indices.append(f"{w}_j = j{form.axes.w_j}")
        conditions.append(f"({w}_j < {region.columns})")
    else:
        lines.indices.append(f"{w}_j = tl.minimum(j, {region.columns} - 1){form.axes.w_j}")
    lines.indices.append(f"{w}_k = first_k + tl.arange(0, {schedule.slice_k}){form.axes.w_k}")
    loaded = load(weight.pointer, offset(weight, f"{w}_j", f"{w}_k"), conditions)
    lines.body.append(f"{w} = {operand_of(loaded, weight.dtype, schedule)}")
    return lines


def _quantized(product: ContractionContext, region: GemmRegion, form: Form, schedule: TritonSchedule) -> Lines:
    """Writes the lines that load scales, zero-points and codes of a quantised weight, decode and multiply them."""
    contraction, w, lines = product.contraction, f"w{product.index}", Lines()
    format, group = formats.find(contraction.format or ""), contraction.group_size
    if form.name == "tokens" or (group and group % schedule.slice_k):
        raise UnsupportedError(f"{schedule} is no schedule for {format.name} weights with groups of {group}")
    tensors = dict(zip(format.tensor_names, product.weight, strict=True))
    per_word = WORD_BITS // format.bits
    padded = group or formats.ROW_MULTIPLE
    lines.indices.append(f"{w}_j = tl.minimum(j, {region.columns} - 1){form.axes.w_j}")
    if format.tiled:
        words = schedule.slice_k // per_word
        lines.indices.append(f"{w}_k = first_k // {per_word} + tl.arange(0, {words}){form.axes.w_k}")
        lines.indices.append(f"{w}_row = {w}_j * ((k + {padded - 1}) // {padded} * {padded // per_word})")
    if group:
        lines.indices.append(f"{w}_groups = {w}_j * ((k + {group - 1}) // {group})")

    def in_iteration(pointer: str | None, at: str) -> str:
        """Loads scales or zero-points of the iteration at ``at``, one for each row and slice; 0 beyond the last."""
        if not group:
            return f"tl.load({pointer} + {w}_j)"
        k = f"{at} + first_k" if at else "first_k"
        return f"tl.load({pointer} + {w}_groups + ({k}) // {group}, mask={k} < k, other=0)"

    def parameter(name: str, pointer: str | None, prefetched: bool) -> None:
        """Adds the lines that load scales or zero-points."""
        if group and not prefetched:
            lines.body.append(f"{name} = {in_iteration(pointer, 'start')}")
            return
        lines.before.append(f"{name} = {in_iteration(pointer, 'first' if form.k_splits > 1 else '')}")
        if group:
            lines.head.append(f"{name}_next = {in_iteration(pointer, f'start + {form.step}')}")
            lines.tail.append(f"{name} = {name}_next")

    many_warps = schedule.warps >= MANY_WARPS
    if group:
        parameter(f"{w}_scale", tensors["scales"].pointer, schedule.block_m <= SCALED_SUM_ROWS or not many_warps)
    if format.zero_point:
        parameter(f"{w}_zero", tensors["zeros"].pointer, schedule.block_m > SCALED_SUM_ROWS and not many_warps)
    return (_words if format.tiled else _planes)(product, region, form, schedule, lines)


def _words(
    product: ContractionContext, region: GemmRegion, form: Form, schedule: TritonSchedule, lines: Lines
) -> Lines:
    """Adds the rest of a weight's lines if words have whole codes, of 4 or 8 bits."""
    contraction, acc, w = product.contraction, product.accumulator, f"w{product.index}"
    format, group = formats.find(contraction.format or ""), contraction.group_size
    codes, scales, *_ = product.weight
    per_word = WORD_BITS // format.bits
    at = f"start // {per_word} + {w}_row + {w}_k"
    # A chunk's words are not in the order of its columns, so a whole chunk is masked; codes are padded to whole chunks.
    chunk_begin = f"{w}_k // {CHUNK // per_word} * {CHUNK}"
    lines.body.append(f"{w}_codes = {load(codes.pointer, at, form.beyond(chunk_begin))}")
    compute = "tl.float16" if schedule.decoded else COMPUTED.get(contraction.dtype, product.type)
    packed = "_packed" if form.packed and compute in ("tl.bfloat16", "tl.float16") else ""
    scales_weights = bool(group) and schedule.block_m > SCALED_SUM_ROWS and contraction.dtype not in SIGNED
    exact = compute if DTYPE_NAMES[format.scale_dtype] == contraction.dtype else product.type
    # Codes are small integers, exact in every type. 8-bit ones can be decoded to float32 at no cost.
    decoded = exact if scales_weights and format.bits == 8 else compute
    zero = f", {w}_zero" if format.zero_point else ""
    values = f"{format.row}_values{packed}({w}_codes{zero}, {decoded})"
    if contraction.dtype == format.row == "int8":
        values = operand_of(f"int8_bytes({w}_codes)", "int8", schedule)
    if scales_weights:
        values = f"{values if decoded == exact else f'{values}.to({exact})'} * {w}_scale.to({exact})"
        values = values if exact == compute else f"({values}).to({compute})"
    lines.body.append(f"{w} = {_as_codes(values, contraction.dtype, schedule)}")
    _add_product(product, form, schedule, lines, f"{w}_scale" if group and not scales_weights else None)
    if not group:
        row = f"tl.minimum(j, {region.columns} - 1){form.axes.y_j}"
        lines.after.append(f"{acc} = {acc} * tl.load({scales.pointer} + {row}).to({product.type})")
    return lines


def _as_codes(values: str, dtype: str, schedule: TritonSchedule) -> str:
    """Prints decoded weights of float16 as an operand beside an x of ``dtype``."""
    return f"{values}.to({FLOAT8_TYPES[dtype][0]})" if dtype in FLOAT8 and not schedule.decoded else values


def sums_type(product: ContractionContext, group: int | None) -> str:
    """Returns the type in which a product is summed over all of K. Sums of products of int8 codes are integers where
    one scale multiplies them all; those of groups are too, until they are scaled."""
    contraction = product.contraction
    of_codes = contraction.dtype == "int8" and contraction.format is not None
    longest = longest_exact_sum("int8", "int8")
    whole = of_codes and group is None and isinstance(contraction.length, int) and contraction.length <= longest
    return "tl.int32" if whole else product.type


def _add_product(
    product: ContractionContext, form: Form, schedule: TritonSchedule, lines: Lines, scale: str | None
) -> None:
    """Adds the line that multiplies and adds to the accumulator; ``scale``: of the iteration's group, None where the
    weights are scaled or the row's sum is later."""
    contraction, acc = product.contraction, product.accumulator
    of_codes = contraction.dtype == "int8" and not schedule.decoded
    total = sums_type(product, contraction.group_size)
    if scale is not None:
        sums = _dot(product, form, "", schedule, "tl.int32" if of_codes else None)
        sums = f"{sums}.to({product.type})" if of_codes else sums
        lines.body.append(f"{acc} = tl.fma({sums}, {scale}.to({product.type}), {acc})")
    elif of_codes and total != "tl.int32":
        lines.body.append(f"{acc} += {_dot(product, form, '', schedule, 'tl.int32')}.to({product.type})")
    else:
        lines.body.append(f"{acc} = {_dot(product, form, f'{acc}, ', schedule, total)}")
        lines.in_flight = form.name == "weights"
    if total != product.type:
        lines.after.append(f"{acc} = {acc}.to({product.type})")


def _planes(
    product: ContractionContext, region: GemmRegion, form: Form, schedule: TritonSchedule, lines: Lines
) -> Lines:
    """Adds the rest of a weight's lines if its codes are in bit planes: codes become float32, and then x's dtype.

    The scales of groups multiply the sums, or weights of bfloat16 and float32. They do not multiply weights of float16,
    because the product of a code and a scale may be beyond its range.
    """
    contraction, acc, w = product.contraction, product.accumulator, f"w{product.index}"
    format, group = formats.find(contraction.format or ""), contraction.group_size
    tensors = dict(zip(format.tensor_names, product.weight, strict=True))
    padded = group or formats.ROW_MULTIPLE
    lines.indices.append(f"{w}_columns = (k + {padded - 1}) // {padded} * {padded}")
    lines.indices.append(f"{w}_row = {w}_j * ({w}_columns * {format.bits} // {WORD_BITS})")
    code = []
    for width, first in format.planes:
        per_word = WORD_BITS // width
        index = f"{w}_k{width}"
        words = schedule.slice_k // per_word
        lines.indices.append(f"{index} = first_k // {per_word} + tl.arange(0, {words}){form.axes.w_k}")
        base = f"{w}_columns * {first} // {WORD_BITS} + " if first else ""
        at = f"start // {per_word} + {base}{w}_row + {index}"
        loaded = load(tensors["codes"].pointer, at, form.beyond(f"{index} * {per_word}"))
        lines.body.append(f"{w}_bits{width} = plane_bits({loaded}, {width})")
        code.append(f"({w}_bits{width} << {first})" if first else f"{w}_bits{width}")
    lines.body.append(f"{w}_code = {' | '.join(code)}")
    values = _values(format, f"{w}_code")
    if format.zero_point:
        values = f"{values} - {w}_zero.to(tl.float32)"
    compute = "tl.float16" if schedule.decoded else COMPUTED.get(contraction.dtype, product.type)
    scales_weights = bool(group) and schedule.block_m > SCALED_SUM_ROWS
    scales_weights = scales_weights and contraction.dtype not in ("float16", *SIGNED)
    if scales_weights:
        values = f"({values}) * {_scale(format, f'{w}_scale')}"
    if contraction.dtype in FLOAT8 and format.row in E4M3_ROWS and not schedule.decoded:
        lines.body.append(f"{w} = {w}_code.to(tl.uint8).to({FLOAT8_TYPES[contraction.dtype][0]}, bitcast=True)")
    else:
        lines.body.append(f"{w} = {_as_codes(f'({values}).to({compute})', contraction.dtype, schedule)}")
    _add_product(product, form, schedule, lines, _scale(format, f"{w}_scale") if group and not scales_weights else None)
    row = f"tl.minimum(j, {region.columns} - 1){form.axes.y_j}"
    if not group:
        scale = _scale(format, f"tl.load({tensors['scales'].pointer} + {row})")
        lines.after.append(f"{acc} = {acc} * {scale}.to({product.type})")
    if format.tensor_scale:
        lines.after.append(f"{acc} = {acc} * tl.load({tensors['tensor_scale'].pointer} + {row}).to({product.type})")
    return lines


def _values(format: formats.Format, code: str) -> str:
    """Prints codes as numbers of float32."""
    kind = format.code
    if isinstance(kind, formats.Integer):
        return f"integer_values({code}, {kind.step}, {format.first})"
    if isinstance(kind, formats.Float):
        return f"small_floats({code}, {kind.exponent}, {kind.mantissa}, {kind.bias})"
    return f"table_values({code}, {', '.join(map(repr, format.values.tolist()))})"


def _scale(format: formats.Format, stored: str) -> str:
    """Prints scales as numbers of float32."""
    decoders = {"e8m0": "e8m0_to_float32", "e4m3": "e4m3_to_float32"}
    return f"{decoders[format.scale]}({stored})" if format.scale in decoders else f"{stored}.to(tl.float32)"
