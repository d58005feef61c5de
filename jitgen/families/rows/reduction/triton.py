"""Builds the context of ``templates/reduction/reduction.py.j2``.

A program holds a block of ``schedule.rows_per_block`` rows by ``schedule.tile`` elements. Values of elements are such
blocks, values of rows are ``[rows, 1]``, and Triton broadcasts the one to the other. A resident row is one tile, whose
values are plain variables from pass to pass. A longer row is loaded tile by tile in every pass: each position of the
tile accumulates a state of its own, and the states of a row are combined once, behind the loop, always in the same
order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Built, Line
from jitgen.families.rows.reduction.context import Pass, Reduction, ReductionContext, identity
from jitgen.families.rows.reduction.forms import TritonRows
from jitgen.families.rows.reduction.online import DEVIATIONS, SUM_EXP
from jitgen.ir.program import Kernel
from jitgen.kernel.operands import WARP, item_size
from jitgen.kernel.printed_rows import RowOperand
from jitgen.kernel.rows import RowLayout
from jitgen.spec import DTYPES

PRELOADED_BYTES = 64
"""Bytes of deferred operands for each thread up to which they are loaded with the row."""
STAGES = 4
"""Tiles in flight at once, in shared memory, where passes loop over a row that lies in memory."""
STAGED_BYTES = 208 * 1024
"""Bytes of shared memory for those tiles: what a Hopper block can have, less what reductions take."""

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
"""How one more value ``{1}``, with the index ``{2}``, enters the state ``{0}``."""

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
"""How a block of states ``{0}``, with indices ``{1}``, becomes one value for each row."""


@dataclass(frozen=True)
class Block:
    """Describes the block of a program.

    Attributes:
        shape: as text.
        inside: the mask along the row; empty, as the next two, where nothing is masked.
        live: the mask of an access to elements.
        row_live: the mask of an access to a row's value.
        full_values: the values that have an element for each of the block.
        columns: as ``RowLayout.columns``.
    """

    shape: str
    inside: str
    live: str
    row_live: str
    full_values: frozenset[str]
    columns: bool


def build(kernel: Kernel, layout: RowLayout, schedule: TritonRows, rows: ReductionContext, dialect: Dialect) -> Built:
    """Builds template context and source options; see ``kernel/render.py``."""
    whole_rows = schedule.rows_per_block == 1
    block = Block(
        shape=f"({schedule.rows_per_block}, {schedule.tile})",
        inside="" if schedule.is_unmasked else "inside",
        live=" & ".join(([] if whole_rows else ["row_live"]) + ([] if schedule.is_unmasked else ["inside"])),
        row_live="" if whole_rows else "row_live",
        full_values=_full_values(kernel, layout),
        columns=layout.columns,
    )
    passes = [_pass(p, rows, layout, schedule, block, dialect) for p in rows.passes]
    if schedule.resident and _deferred_bytes(rows, schedule) <= PRELOADED_BYTES:
        for p in passes[1:]:  # deferred operands are loaded with the row, not after it was reduced
            passes[0]["loads"] += p["loads"]
            p["loads"] = []
    row_loads = [_operand(o, block) for o in rows.operands if o.is_once]
    row_stores = [_operand(o, block) for o in rows.row_stores]
    context: dict[str, Any] = {
        "parameters": rows.triton_parameters,
        "index_cast": ".to(tl.int64)" if schedule.wide else "",
        "tile": schedule.tile,
        "block_rows": schedule.rows_per_block,
        "loops": not schedule.resident,
        "stages": _stages(rows, schedule) if schedule.online or (layout.columns and not schedule.resident) else 1,
        "margin": " " * (4 if schedule.resident else 8),
        "masked": not schedule.is_unmasked,
        "row_lines": rows.triton_indices,
        "row_loads": row_loads,
        "row_stores": row_stores,
        "passes": passes,
    }
    return context, rows.triton_row_options(schedule.wide, schedule.block_threads // WARP)


def _stages(rows: ReductionContext, schedule: TritonRows) -> int:
    """Returns how many tiles are in flight: as many as shared memory holds for the pass that reads most."""
    read = (sum(item_size(o.dtype) for o in (*p.loads, *p.reloads) if o.pointer) for p in rows.passes)
    tile = schedule.tile * schedule.rows_per_block * max(1, *read)
    return max(1, min(STAGES, STAGED_BYTES // tile))


def _deferred_bytes(rows: ReductionContext, schedule: TritonRows) -> int:
    """Counts the bytes of a thread's elements of all operands that only later passes need."""
    sizes = [item_size(o.dtype) for p in rows.passes[1:] for o in p.loads if not _is_row_value(o)]
    return sum(sizes) * schedule.rows_per_block * schedule.tile // schedule.block_threads


def _full_values(kernel: Kernel, layout: RowLayout) -> frozenset[str]:
    """Returns the names of the values that vary along the row: what is computed of constants and row values alone does
    not."""
    (body,) = kernel.bodies
    positions: set[int] = set()
    for position, instruction in enumerate(body.instructions):
        if instruction.op in ("load", "iota"):
            if layout.along[instruction.attr] in ("contiguous", "strided"):
                positions.add(position)
        elif instruction.op != "reduce" and positions.intersection(instruction.args):
            positions.add(position)
    return frozenset(f"v{position}" for position in positions)


def _is_row_value(operand: RowOperand) -> bool:
    """Returns whether an operand has one value for the whole row."""
    return operand.kind in ("row", "broadcast")


def _operand(operand: RowOperand, block: Block, policy: str = "") -> dict[str, Any]:
    """Returns an operand with its access; ``policy`` is the eviction policy of a load."""
    live = block.row_live if _is_row_value(operand) else block.live
    return operand.triton_access(live, block.columns, policy)


def _policy(operand: RowOperand, number: int, rows: ReductionContext) -> str:
    """Returns the eviction policy of a load by pass ``number``: a row stays in the cache until it is read for the last
    time."""
    if any(operand in later.reloads for later in rows.passes[number + 1 :]):
        return "evict_last"
    return "evict_first" if operand in rows.passes[number].reloads else ""


def _pass(
    p: Pass, rows: ReductionContext, layout: RowLayout, schedule: TritonRows, block: Block, dialect: Dialect
) -> dict[str, Any]:
    lines: Sequence[Line] = p.lines
    loads = [_operand(o, block) for o in p.loads if not _is_row_value(o)]
    if not schedule.resident:
        every = (*p.loads, *p.reloads)
        loads = [_operand(o, block, _policy(o, p.number, rows)) for o in every if not _is_row_value(o)]
        lines = sorted((*p.lines, *p.recomputed), key=lambda line: line.position)
    return {
        "number": p.number,
        "before": p.before,
        "loads": loads,
        "lines": lines,
        "stores": [_operand(o, block) for o in p.stores],
        "reductions": [_reduction(r, schedule, block, dialect) for r in p.reductions],
        "reads_elements": bool(p.stores or p.reductions),
    }


def _reduction(r: Reduction, schedule: TritonRows, block: Block, dialect: Dialect) -> dict[str, Any]:
    """Writes the lines of a reduction: ``start`` in front of the loop, ``step`` in it, ``end`` behind it; of a resident
    row ``end`` alone."""
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
    if schedule.resident:
        return {"start": [], "step": "", "end": [f"{names} = {_ROWS[kind].format(value, column)}", *_index(r)]}
    total = f"total_{r.result}"
    start = [f"{total} = tl.broadcast_to({neutral}, {block.shape})"]
    totals = total
    if kind == SUM_EXP:
        return _sum_exp(r, value, schedule, block, dialect)
    if indexed:
        # Beyond every index, so that an element that equals the neutral value is taken instead of it.
        beyond = "9223372036854775807, tl.int64" if schedule.wide else "2147483647, tl.int32"
        start.append(f"{total}_at = tl.full({block.shape}, {beyond})")
        totals = f"{total}, {total}_at"
    return {
        "start": start,
        "step": f"{totals} = {_PAIRS[kind].format(total, value, 'column')}",
        "end": [f"{names} = {_ROWS[kind].format(total, f'{total}_at')}", *_index(r)],
    }


def _sum_exp(r: Reduction, value: str, schedule: TritonRows, block: Block, dialect: Dialect) -> dict[str, Any]:
    """Writes the lines of a sum of exponentials. The neighbours of a thread along the row, or its elements of a column,
    rescale the sum together, once a tile."""
    dtype, top, total = r.value_dtype, f"top_{r.result}", f"total_{r.result}"
    lowest = dialect.constant(torch.finfo(DTYPES[dtype]).min, dtype)
    count, dim = (schedule.unroll, 1) if block.columns else (schedule.vector, 2)
    states = schedule.tile // count
    step = f"exp_sum_with({top}, {total}, {value}, {r.coarse})"
    if count > 1:
        shape = (schedule.rows_per_block, *((count, states) if dim == 1 else (states, count)))
        step = f"exp_sum_with_several({top}, {total}, tl.reshape({value}, {shape}), {dim}, {r.coarse})"
    return {
        "start": [
            f"{top} = tl.broadcast_to({lowest}, ({schedule.rows_per_block}, {states}))",
            f"{total} = tl.broadcast_to({dialect.constant(0.0, dtype)}, ({schedule.rows_per_block}, {states}))",
        ],
        "step": f"{top}, {total} = {step}",
        "end": [f"{r.result} = exp_sum_of_row({top}, {total})"],
    }


def _deviations(r: Reduction, block: Block, dialect: Dialect) -> dict[str, Any]:
    """Writes the lines of a sum of squared deviations."""
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
    """Writes the line that makes an index 64-bit, as torch's are."""
    return [f"{r.result} = {r.result}.to(tl.int64)"] if r.kind.startswith("arg") else []
