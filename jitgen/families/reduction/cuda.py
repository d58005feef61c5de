"""The context of ``templates/cuda/reduction.cu.j2``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from jitgen.codegen.cuda import constant
from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Built, Line, fields
from jitgen.families.layout import ACCESS_BYTES, item_size
from jitgen.families.reduction.context import Pass, Reduction, RowContext, RowOperand, identity
from jitgen.families.reduction.layout import RowLayout
from jitgen.families.reduction.online import DEVIATIONS, SUM_EXP
from jitgen.families.reduction.residency import REGISTER_BYTES, held
from jitgen.families.reduction.schedule import NARROW_BYTES, RESIDENT_THREADS, RowSchedule
from jitgen.ir.program import Kernel
from jitgen.spec import DTYPES

REGISTERS, MOST_REGISTERS = 65536, 255
"""Of a multiprocessor; of a thread."""
REGISTERS_BESIDE = 16
"""What a kernel takes beside the vectors it holds."""
MOST_AHEAD = 4
"""Vectors of an operand to ask for ahead in a cluster, half as many in a block: more were slower on an H200."""
PREFETCHED_BYTES = 2048
"""Of a row, from which on it is asked for as a whole before its elements are."""
_OPS = {"sum": "Sum", "prod": "Prod", "max": "Max", "min": "Min", "any": "Any", "all": "All"}
_OPS |= {"argmax": "ArgMax", "argmin": "ArgMin"}

_STREAMED = {
    SUM_EXP: ("SumExp<{coarse}>", "Exponentials", "{{{lowest}, 0}}", ".sum"),
    DEVIATIONS: ("Deviations", "Spread", "{{0, 0, 0}}", ".squares"),
}
"""Reductions whose state is no element: operation, state, its first value, and the member that is the result."""


def build(kernel: Kernel, layout: RowLayout, schedule: RowSchedule, rows: RowContext, dialect: Dialect) -> Built:
    """Template context and source options; see ``reduction/render.py``."""
    memory = [operand for operand in rows.operands if operand.pointer]
    parameters = [f"{'' if o.role == 'store' else 'const '}{o.storage}* {o.pointer}" for o in memory]
    parameters += [f"Index {name}" for name in rows.integers]
    parameters += [f"{kind} {name}" for name, kind in rows.scalars]
    outer = [f"i{dim}" for dim in range(rows.outer)]
    bits = 64 if schedule.wide else 32
    width_divides = layout.unit >= schedule.vector
    inside = "column < length" if width_divides else "column + (width - 1) < length"
    if schedule.whole:
        inside = "true" if schedule.full else f"u < whole || {inside}"
    plans = _plans(rows, kernel, schedule) if schedule.kept else [_Plan(frozenset(), ())] * len(rows.passes)
    kept = {name for plan in plans for name in plan.kept}
    every = [line for p in rows.passes for line in p.lines]
    kept_values = [line for line in every if line.value in kept] if schedule.kept else []
    kept_loads = [o for o in rows.operands if o.role == "load" and o.value in kept] if schedule.kept else []
    combine, scratch = _combination(layout, schedule)
    passes = [_pass(p, plan, kept, rows, schedule) for p, plan in zip(rows.passes, plans, strict=True)]
    for p in passes:
        p["batch"] = _batch(kernel, schedule, len(p["late"]))
    return {
        "parameters": parameters,
        "index": f"int{bits}_t",
        "unsigned": f"uint{bits}_t",
        "cluster_attribute": f"__cluster_dims__({schedule.cluster}, 1, 1) " if schedule.cluster > 1 else "",
        "index_lines": _index_lines(rows),
        "bases": [_base(operand, outer) for operand in rows.operands],
        "row_load": {o.index: _row_value(o) for o in rows.row_loads},
        "inside": inside,
        "blocks": schedule.blocks,
        "columns": layout.columns,
        "combine": combine,
        "scratch": scratch,
        # What a cluster stores is not to push the operands that every row shares out of the cache, nor later rows.
        "store_vector": "store_vector_streaming" if schedule.cluster > 1 else "store_vector",
        "reductions": [r for p in passes for r in p["reductions"]],
        "prefetched": _prefetched(layout, schedule, rows),
        "kept_operands": [_array(operand) for operand in kept_loads],
        "kept_values": kept_values,
        "passes": passes,
    }, {}


def _prefetched(layout: RowLayout, schedule: RowSchedule, rows: RowContext) -> list[RowOperand]:
    """The operands of a kept row that are asked for while the kernel ahead still runs: those of which each has its own.

    In a cluster that pays for 16-bit rows only, on an H200, and where a multiprocessor has room for several blocks: one
    alone starts when the kernel ahead has ended there.
    """
    loads = [operand for operand in rows.passes[0].loads if operand.pointer and not layout.shared[operand.index]]
    sizes = [item_size(operand.dtype) for operand in loads] or [0]
    pieces = layout.unit * min(sizes) >= ACCESS_BYTES and all(operand.kind == "contiguous" for operand in loads)
    long = schedule.tile * schedule.cluster * max(sizes) >= PREFETCHED_BYTES
    early = schedule.cluster == 1 or (schedule.blocks > 1 and max(sizes) <= NARROW_BYTES)
    return loads if schedule.kept and pieces and long and early else []


def _batch(kernel: Kernel, schedule: RowSchedule, late: int) -> int:
    """Vectors of each of ``late`` operands that are asked for ahead of their use: what the row leaves of the registers.

    The first are on their way while the row is combined. Loads do not pass a store to memory that may be the same, so
    that without this each vector would wait for the second-level cache by itself.
    """
    threads = schedule.block_threads * schedule.blocks
    registers = min(MOST_REGISTERS, REGISTERS // (threads if schedule.cluster > 1 else max(threads, RESIDENT_THREADS)))
    elements = schedule.vector * schedule.unroll
    taken = held(kernel.bodies[0], elements).bytes * elements // REGISTER_BYTES + REGISTERS_BESIDE
    vectors = (registers - taken) * REGISTER_BYTES // (ACCESS_BYTES * max(1, late))
    return max(1, min(schedule.unroll, vectors, MOST_AHEAD if schedule.cluster > 1 else MOST_AHEAD // 2))


def _combination(layout: RowLayout, schedule: RowSchedule) -> tuple[str, str]:
    """The function of ``reduce.cuh`` that combines over a row, over ``{op}``, and what it shares, over ``{state}``."""
    if layout.columns:
        return "combine_beside<jitgen::{op}, threads>", "jitgen::BesideScratch<{state}, threads>"
    if schedule.cluster > 1:
        return "receive_cluster<jitgen::{op}, warps, cluster>", "jitgen::Inbox<{state}, warps * cluster>"
    return "combine_row<jitgen::{op}, threads>", "jitgen::Scratch<{state}, warps>"


def _index_lines(rows: RowContext) -> list[str]:
    """The outer indices of a row's number; unsigned division is the cheaper one, and nothing is negative."""
    lines, rest = [], "Unsigned(row)"
    for dim in reversed(range(1, rows.outer)):
        lines.append(f"const Index i{dim} = Index({rest} % Unsigned({rows.sizes[dim]}));")
        lines.append(f"const Unsigned q{dim} = {rest} / Unsigned({rows.sizes[dim]});")
        rest = f"q{dim}"
    lines.append(f"const Index i0 = Index({rest});")
    return lines


def _base(operand: RowOperand, outer: list[str]) -> dict[str, str]:
    start = operand.base(outer)
    if operand.pointer is None:
        return {"declaration": f"const Index from{operand.index}", "start": start}
    if operand.role == "store":
        return {"declaration": f"{operand.storage}* const to{operand.index}", "start": f"{operand.pointer} + {start}"}
    declaration = f"const {operand.storage}* const from{operand.index}"
    return {"declaration": declaration, "start": f"{operand.pointer} + {start}"}


def _row_value(operand: RowOperand) -> str:
    return f"from{operand.index}" if operand.pointer is None else f"jitgen::load(*from{operand.index})"


def _array(operand: RowOperand, count: str = "unroll", at: str = "u") -> dict[str, Any]:
    """Registers for ``count`` vectors of an operand's elements, and how the one at ``at`` is filled."""
    name, place = f"x{operand.index}", f"from{operand.index}"
    if operand.kind == "contiguous":
        kind, length = f"jitgen::Vector<{operand.storage}, width>", ""
        fetch = f"{{to}} = jitgen::load_vector<width>({place} + column);"
    else:
        kind, length = operand.storage, "[width]"
        step = "0" if operand.kind == "broadcast" else f"(column + j) * {operand.inner}"
        fetch = f"for (int j = 0; j < width; ++j) {{to}}[j] = {place}[{step}];"
    return {
        "array": f"{kind} {name}[{count}]{length}",
        "fetch": fetch.format(to=f"{name}[{at}]"),
        "index": operand.index,
    }


def _element(operand: RowOperand, place: str) -> str:
    if operand.pointer is None:
        return f"from{operand.index} + (column + j) * {operand.inner}"
    return f"jitgen::load(x{operand.index}[{place}][j])"


@dataclass(frozen=True)
class _Plan:
    """What a pass over a resident row takes from earlier passes: values kept for it, and cheap ones computed anew."""

    kept: frozenset[str]
    rebuilt: tuple[Line, ...]


def _plans(rows: RowContext, kernel: Kernel, schedule: RowSchedule) -> list[_Plan]:
    resident = held(kernel.bodies[0], schedule.unroll * schedule.vector)
    lines = {line.position: line for p in rows.passes for line in p.lines}
    return [
        _Plan(frozenset(f"v{position}" for position in kept), tuple(lines[position] for position in rebuilt))
        for kept, rebuilt in zip(resident.kept, resident.rebuilt, strict=True)
    ]


def _pass(p: Pass, plan: _Plan, kept: set[str], rows: RowContext, schedule: RowSchedule) -> dict[str, Any]:
    if schedule.kept:
        again = [o for o in rows.operands if o.role != "store" and o.value in plan.kept]
        again += [o for o in p.again if o.pointer is None]
        fetched, needed = [o for o in p.loads if o.pointer], [*p.loads, *again]
        types = {line.value: line.type for other in rows.passes for line in other.lines}
        restored = [(name, types[name]) for name in sorted(plan.kept) if name in types]
        lines = (*plan.rebuilt, *p.lines)
        saved = [line.value for line in p.lines if line.value in kept]
    else:
        needed = [*p.loads, *p.again]
        fetched, restored, saved = [o for o in needed if o.pointer], [], []
        lines = tuple(sorted((*p.repeated, *p.lines), key=lambda line: line.position))
    # What is not kept (weights of the last pass, the terms of a sum that is) is asked for a few vectors ahead of use:
    # holding it for the whole row would take the registers that the row itself needs.
    late = [o for o in fetched if schedule.kept and o.value not in kept]
    fetched = [o for o in fetched if o not in late]
    at = f"u % batch{p.number}"
    arrays = [_array(o) for o in fetched if not (schedule.kept and o.value in kept)]
    return fields(p) | {
        "arrays": arrays,
        "fetched": [_array(o) for o in fetched],
        "late": [_array(o, f"batch{p.number}", at) for o in late],
        "element_loads": [fields(o) | {"element": _element(o, at if o in late else "u")} for o in needed],
        "restored": restored,
        "saved": saved,
        "lines": lines,
        "reductions": [_reduction(r) for r in p.reductions],
        "vector_stores": [o for o in p.stores if o.kind == "contiguous"],
        "element_stores": [o for o in p.stores if o.kind != "contiguous"],
    }


def _reduction(r: Reduction) -> dict[str, Any]:
    if r.kind in _STREAMED:
        op, state, first, member = _STREAMED[r.kind]
        lowest = constant(torch.finfo(DTYPES[r.value_dtype]).min, r.value_dtype)
        return fields(r) | {
            "op": op.format(coarse=str(r.coarse).lower()),
            "streamed": True,
            "state": f"jitgen::{state}<{r.value_type}>",
            "identity": first.format(lowest=lowest),
            "element": r.value,
            "member": member,
        }
    indexed = r.kind in ("argmax", "argmin")
    return fields(r) | {
        "op": _OPS[r.kind],
        "streamed": False,
        "state": f"jitgen::Indexed<{r.value_type}>" if indexed else r.type,
        "identity": _identity(r),
        "element": f"jitgen::Indexed<{r.value_type}>{{{r.value}, column + j}}" if indexed else r.value,
        "member": ".index" if indexed else "",
    }


def _identity(r: Reduction) -> str:
    value = constant(identity(r.kind, r.value_dtype), r.value_dtype)
    # Any index beyond the row's: of equal values the one in the row wins.
    return f"{{{value}, 0x7fffffffffffffffLL}}" if r.kind.startswith("arg") else value
