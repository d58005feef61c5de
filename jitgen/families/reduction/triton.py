"""The context of ``templates/triton/reduction.py.j2``.

A program holds a block of ``schedule.rows`` rows by ``schedule.tile`` elements; the elements' values are such blocks,
a row's are ``[rows, 1]``, and Triton's broadcasting does the rest. A resident row is one tile, whose values are plain
variables from pass to pass. A longer one is walked tile by tile in every pass: each place of the tile accumulates its
own part of a reduction, and the parts are combined once, behind the loop, in an order that is always the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from jitgen.codegen import environment, triton
from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Built, Line, fields
from jitgen.families.layout import ACCESS_BYTES, item_size
from jitgen.families.reduction.context import Pass, Reduction, RowContext, RowOperand, identity
from jitgen.families.reduction.layout import RowLayout
from jitgen.families.reduction.online import DEVIATIONS, SUM_EXP
from jitgen.families.reduction.schedule import RowSchedule
from jitgen.ir.program import Kernel
from jitgen.spec import DTYPES

WARP = 32
AHEAD_BYTES = 64
"""Of operands that only a later pass needs, for each thread: up to here they are loaded with the row."""
STAGES = 4
"""Tiles under way at once, in shared memory, where passes loop over a row that lies in memory."""
STAGED_BYTES = 208 * 1024
"""Of shared memory for those: what a Hopper block can have, less what reductions take."""
HEADERS = ("jitgen_triton.py", "jitgen_triton_online.py")

_PAIRS = {
    "sum": "{0} + {1}",
    "prod": "{0} * {1}",
    "max": "larger({0}, {1})",
    "min": "smaller({0}, {1})",
    "any": "{0} | {1}",
    "all": "{0} & {1}",
    "argmax": "larger_at({0}, {0}_at, {1}, {2})",
    "argmin": "smaller_at({0}, {0}_at, {1}, {2})",
}
"""How one more value ``{1}`` (at ``{2}``) enters what is accumulated in ``{0}``."""

_ROWS = {
    "sum": "tl.sum({0}, 1, keep_dims=True)",
    "prod": "tl.reduce({0}, 1, multiply, keep_dims=True)",
    "max": "tl.reduce({0}, 1, larger, keep_dims=True)",
    "min": "tl.reduce({0}, 1, smaller, keep_dims=True)",
    "any": "tl.max({0}.to(tl.int32), 1, keep_dims=True) != 0",
    "all": "tl.min({0}.to(tl.int32), 1, keep_dims=True) != 0",
    "argmax": "tl.reduce(({0}, {1}), 1, larger_at, keep_dims=True)",
    "argmin": "tl.reduce(({0}, {1}), 1, smaller_at, keep_dims=True)",
}
"""How a block ``{0}`` (at columns ``{1}``) becomes one value for each row."""


@dataclass(frozen=True)
class Block:
    """What is known of a program's block: ``shape`` as text, and what masks it along the row and as a whole.

    ``inside`` masks columns, ``live`` an access to elements, ``row_live`` one to a row's value; each is empty where
    there is nothing to mask. ``full_values`` are the values that have an element for each of the block. ``columns``:
    as of ``RowLayout``.
    """

    shape: str
    inside: str
    live: str
    row_live: str
    full_values: frozenset[str]
    columns: bool


def build(kernel: Kernel, layout: RowLayout, schedule: RowSchedule, rows: RowContext, dialect: Dialect) -> Built:
    """Template context and source options; see ``reduction/render.py``."""
    memory = [operand for operand in rows.operands if operand.pointer]
    whole_rows = schedule.rows == 1
    block = Block(
        shape=f"({schedule.rows}, {schedule.tile})",
        inside="" if schedule.full else "inside",
        live=" & ".join(([] if whole_rows else ["row_live"]) + ([] if schedule.full else ["inside"])),
        row_live="" if whole_rows else "row_live",
        full_values=_full_values(kernel, layout),
        columns=layout.columns,
    )
    passes = [_pass(p, rows, layout, schedule, block, dialect) for p in rows.passes]
    if schedule.kept and _ahead_bytes(rows, schedule) <= AHEAD_BYTES:
        for p in passes[1:]:  # asked for with the row, not when it has been combined
            passes[0]["loads"] += p["loads"]
            p["loads"] = []
    row_loads = [_operand(o, layout, block) for o in rows.operands if o.role != "store" and _once(o)]
    row_stores = [_operand(o, layout, block) for o in rows.row_stores]
    units = _units(rows, layout)
    integer = "i64" if schedule.wide else "i32"
    signature = [f"*{triton.SIGNATURE_TYPES[operand.dtype]}" for operand in memory]
    signature += [integer] * len(rows.integers)
    signature += [triton.SIGNATURE_TYPES[dtype] for _, dtype in kernel.scalars]
    multiples = [_alignment(operand, layout) for operand in memory]
    multiples += [min(units.get(name, 1), triton.MULTIPLE) for name in rows.integers]
    multiples += [1] * len(kernel.scalars)
    context: dict[str, Any] = {
        "parameters": [*(o.pointer for o in memory), *rows.integers, *(name for name, _ in rows.scalars)],
        "index_cast": ".to(tl.int64)" if schedule.wide else "",
        "tile": schedule.tile,
        "block_rows": schedule.rows,
        "loops": not schedule.kept,
        "stages": _stages(rows, schedule) if schedule.online or (layout.columns and not schedule.kept) else 1,
        "margin": " " * (4 if schedule.kept else 8),
        "masked": not schedule.full,
        "row_lines": _row_lines(rows),
        "row_loads": row_loads,
        "row_stores": row_stores,
        "passes": passes,
    }
    context["include"] = _used(context, rows.after)
    options = {
        "signature": signature,
        "multiples": multiples,
        "num_warps": schedule.block_threads // WARP,
        "enable_fp_fusion": False,
    }
    return context, options


def _stages(rows: RowContext, schedule: RowSchedule) -> int:
    """Tiles under way, as many as shared memory holds of what the pass that reads most reads."""
    read = (sum(item_size(o.dtype) for o in (*p.loads, *p.again) if o.pointer) for p in rows.passes)
    tile = schedule.tile * schedule.rows * max(1, *read)
    return max(1, min(STAGES, STAGED_BYTES // tile))


def _ahead_bytes(rows: RowContext, schedule: RowSchedule) -> int:
    """What a thread holds of the operands that only later passes need, once it has them from the start."""
    sizes = [item_size(o.dtype) for p in rows.passes[1:] for o in p.loads if not _once(o)]
    return sum(sizes) * schedule.rows * schedule.tile // schedule.block_threads


def _full_values(kernel: Kernel, layout: RowLayout) -> frozenset[str]:
    """Names of the values that vary along the row: what is computed of constants and row values alone does not."""
    (body,) = kernel.bodies
    found: set[int] = set()
    for position, instruction in enumerate(body.instructions):
        if instruction.op in ("load", "iota"):
            if layout.operands[instruction.attr] in ("contiguous", "strided"):
                found.add(position)
        elif instruction.op != "reduce" and found.intersection(instruction.args):
            found.add(position)
    return frozenset(f"v{position}" for position in found)


def _row_lines(rows: RowContext) -> list[str]:
    """Lines that turn ``row`` into the outer indices ``i0`` ..."""
    lines, rest = [], "row"
    for dim in reversed(range(1, rows.outer)):
        lines.append(f"i{dim} = {rest} % {rows.sizes[dim]}")
        lines.append(f"q{dim} = {rest} // {rows.sizes[dim]}")
        rest = f"q{dim}"
    return [*lines, f"i0 = {rest}"]


def _once(operand: RowOperand) -> bool:
    """Whether an operand is read once for the whole row."""
    return operand.kind in ("row", "broadcast")


def _units(rows: RowContext, layout: RowLayout) -> dict[str, int]:
    """What the sizes and strides that decide the width of an access are multiples of, at least."""
    unit = layout.beside_unit if layout.columns else layout.unit
    units = {rows.sizes[-1] if layout.columns else "length": unit}
    for operand in rows.operands:
        if layout.beside[operand.index] == "contiguous":
            strides = [*operand.strides[:-1], *([operand.inner] if operand.kind == "strided" else [])]
        elif operand.kind == "contiguous" and not layout.columns:
            strides = list(operand.strides)
        else:
            continue
        # A unit of more than one access promises no more than that its accesses are aligned.
        units |= dict.fromkeys(strides, min(unit, ACCESS_BYTES // item_size(operand.dtype)))
    return units


def _alignment(operand: RowOperand, layout: RowLayout) -> int:
    """Bytes that an operand's address is a multiple of."""
    unit = layout.unit if operand.kind == "contiguous" and not layout.columns else 1
    if layout.columns and layout.beside[operand.index] == "contiguous":
        unit = layout.beside_unit
    return min(unit * item_size(operand.dtype), ACCESS_BYTES)


def _at(operand: RowOperand, layout: RowLayout) -> str:
    """The offset of an operand's block, in elements."""
    strides = list(operand.strides)
    if layout.beside[operand.index] == "contiguous":
        strides[-1] = "1"
    terms = [operand.offset, *(f"i{dim}" if s == "1" else f"i{dim} * {s}" for dim, s in enumerate(strides))]
    if not _once(operand):
        terms.append("column" if operand.inner == "1" else f"column * {operand.inner}")
    return " + ".join(term for term in terms if term)


def _operand(operand: RowOperand, layout: RowLayout, block: Block, policy: str = "") -> dict[str, Any]:
    """An operand with its access: ``expression`` of a load or an iota, ``stored`` and ``mask`` of a store.

    ``policy``: what the cache is told of a load.
    """
    at = _at(operand, layout)
    live = block.row_live if _once(operand) else block.live
    mask = f", mask={live}" if live else ""
    found = fields(operand) | {"at": at, "mask": mask}
    if operand.role == "store":
        return found | {"stored": triton.store_cast(operand.value, operand.dtype)}
    if operand.role == "iota":
        return found | {"expression": f"({at}).to({triton.TYPES[operand.dtype]})"}
    mask += f', eviction_policy="{policy}"' if policy else ""
    return found | {"expression": triton.load_cast(f"tl.load({operand.pointer} + {at}{mask})", operand.dtype)}


def _policy(operand: RowOperand, number: int, rows: RowContext) -> str:
    """A row that is read again is to stay in the cache until it is read for the last time."""
    if any(operand in later.again for later in rows.passes[number + 1 :]):
        return "evict_last"
    return "evict_first" if operand in rows.passes[number].again else ""


def _pass(
    p: Pass, rows: RowContext, layout: RowLayout, schedule: RowSchedule, block: Block, dialect: Dialect
) -> dict[str, Any]:
    lines: Sequence[Line] = p.lines
    loads = [_operand(o, layout, block) for o in p.loads if not _once(o)]
    if not schedule.kept:
        every = (*p.loads, *p.again)
        loads = [_operand(o, layout, block, _policy(o, p.number, rows)) for o in every if not _once(o)]
        lines = sorted((*p.lines, *p.repeated), key=lambda line: line.position)
    return {
        "number": p.number,
        "before": p.before,
        "loads": loads,
        "lines": lines,
        "stores": [_operand(o, layout, block) for o in p.stores],
        "reductions": [_reduction(r, schedule, block, dialect) for r in p.reductions],
        "walks": bool(p.stores or p.reductions),
    }


def _reduction(r: Reduction, schedule: RowSchedule, block: Block, dialect: Dialect) -> dict[str, Any]:
    """A reduction's lines: ``start`` in front of the loop, ``step`` in it, ``end`` behind it; or ``end`` alone."""
    kind, value, indexed = r.kind, r.value, r.kind.startswith("arg")
    dtype = r.value_dtype
    if kind == DEVIATIONS:
        return _deviations(r, block, dialect)
    if dtype == "bool":
        kind = {"max": "any", "min": "all"}.get(kind, kind)
    neutral = dialect.constant(identity(kind, dtype), dtype)
    if value not in block.full_values:
        value = f"tl.broadcast_to({value}, {block.shape})"
    if block.inside:
        value = f"tl.where({block.inside}, {value}, {neutral})"
    column = f"tl.broadcast_to(column, {block.shape})"
    names = f"{r.result}_value, {r.result}" if indexed else r.result
    if schedule.kept:
        return {"start": [], "step": "", "end": [f"{names} = {_ROWS[kind].format(value, column)}", *_index(r)]}
    total = f"total_{r.result}"
    start = [f"{total} = tl.broadcast_to({neutral}, {block.shape})"]
    totals = total
    if kind == SUM_EXP:
        return _sum_exp(r, value, schedule, block, dialect)
    if indexed:
        # Beyond every column, so that of equal values the row's own is taken.
        beyond = "9223372036854775807, tl.int64" if schedule.wide else "2147483647, tl.int32"
        start.append(f"{total}_at = tl.full({block.shape}, {beyond})")
        totals = f"{total}, {total}_at"
    return {
        "start": start,
        "step": f"{totals} = {_PAIRS[kind].format(total, value, 'column')}",
        "end": [f"{names} = {_ROWS[kind].format(total, f'{total}_at')}", *_index(r)],
    }


def _sum_exp(r: Reduction, value: str, schedule: RowSchedule, block: Block, dialect: Dialect) -> dict[str, Any]:
    """A thread's neighbours along the row, or its elements of a column, of each tile share what they are scaled by."""
    dtype, top, total = r.value_dtype, f"top_{r.result}", f"total_{r.result}"
    lowest = dialect.constant(torch.finfo(DTYPES[dtype]).min, dtype)
    together, dim = (schedule.unroll, 1) if block.columns else (schedule.vector, 2)
    places = schedule.tile // together
    step = f"exp_sum_with({top}, {total}, {value}, {r.coarse})"
    if together > 1:
        shape = (schedule.rows, *((together, places) if dim == 1 else (places, together)))
        step = f"exp_sum_with_several({top}, {total}, tl.reshape({value}, {shape}), {dim}, {r.coarse})"
    return {
        "start": [
            f"{top} = tl.broadcast_to({lowest}, ({schedule.rows}, {places}))",
            f"{total} = tl.broadcast_to({dialect.constant(0.0, dtype)}, ({schedule.rows}, {places}))",
        ],
        "step": f"{top}, {total} = {step}",
        "end": [f"{r.result} = exp_sum_of_row({top}, {total})"],
    }


def _deviations(r: Reduction, block: Block, dialect: Dialect) -> dict[str, Any]:
    mean, total, count = f"mean_{r.result}", f"total_{r.result}", f"count_{r.result}"
    zero = dialect.constant(0.0, r.value_dtype)
    value = f"tl.where({block.inside}, {r.value}, {mean})" if block.inside else r.value
    return {
        "start": [
            f"{mean} = tl.broadcast_to({zero}, {block.shape})",
            f"{total} = tl.broadcast_to({zero}, {block.shape})",
            f"{count} = {zero}",
        ],
        "step": f"{mean}, {total}, {count} = deviations_with({mean}, {total}, {count}, {value})",
        "end": [f"{r.result} = deviations_of_row({mean}, {total}, length)"],
    }


def _index(r: Reduction) -> list[str]:
    return [f"{r.result} = {r.result}.to(tl.int64)"] if r.kind.startswith("arg") else []


def _used(context: dict[str, Any], after: Sequence[Line]) -> str:
    """The static headers' functions that the kernel calls: one file is one kernel, and holds no more than it needs."""
    lines = [operand["expression"] for operand in context["row_loads"]]
    lines += [operand["stored"] for operand in context["row_stores"]]
    lines += [line.text for line in after]
    for p in context["passes"]:
        lines += [line.text for line in (*p["before"], *p["lines"])]
        lines += [operand["expression"] for operand in p["loads"]]
        lines += [operand["stored"] for operand in p["stores"]]
        lines += [text for r in p["reductions"] for text in (*r["start"], r["step"], *r["end"])]
    headers = "\n".join(environment.header("triton", name) for name in HEADERS)
    return environment.select_functions(headers, "\n".join(lines))
