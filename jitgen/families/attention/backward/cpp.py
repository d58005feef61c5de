"""The context of ``templates/attention_backward/attention_backward.cpp.j2``: a struct that the mainloop walks.

What is computed over a tile reads its operands where they change: once for a task, for a row of a chunk, for a streamed
row, or for each element.
"""

from __future__ import annotations

from typing import Any

from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Built
from jitgen.families.attention.backward.context import Backward, Operand, Tile, bounds
from jitgen.families.attention.backward.layout import Layout
from jitgen.families.attention.backward.schedule import CpuSchedule
from jitgen.families.attention.rule.addresses import indices, sum_of
from jitgen.families.attention.rule.bounds import Words, ends_of
from jitgen.ir.program import Kernel

WORDS = Words("false", "true", "min", "max", "jitgen::floor_divide(int64_t({0}), int64_t({1}))")
FLAGS = ["-O2"]
"""Mainloops are written with vector types, and loops over lanes are marked ``omp simd``."""


def build(kernel: Kernel, layout: Layout, schedule: CpuSchedule, of: Backward, dialect: Dialect) -> Built:
    """Template context and source options; see ``families/render.py``."""
    scores = list(of.tile.operands)
    known = {o.index: ends_of(o) for o in scores if o.is_integer and o.kind != "both"}
    found = bounds(of.tile, known, WORDS)
    pointers = [f"{_pointer(operand)} {operand.pointer}" for operand in of.operands if operand.pointer]
    scalars = [f"{kind} {name}" for name, kind in of.scalars]
    integers = [f"int64_t {name}" for name in of.integers]
    fields = [*pointers, *scalars, *integers]
    return {
        "parameters": [*pointers, *scalars, "int32_t threads", *integers, "int32_t streaming"],
        "fields": fields,
        "arguments": [field.rpartition(" ")[2] for field in fields],
        "accumulator": of.accumulator,
        "tasks": " * ".join(of.batch) or "1",
        "groups": " * ".join(of.summed) or "1",
        "indices": indices(of.batch, "task", "z", "/"),
        "group_indices": indices(of.summed, "group", "h", "/"),
        "operands": of.operands,
        "bases": {
            o.index: sum_of([o.offset], o.batch, [f"z{dim}" for dim in range(layout.batch)]) for o in of.operands
        },
        "group_bases": {
            o.index: sum_of([f"batch{o.index}"], o.summed, [f"h{dim}" for dim in range(layout.summed)])
            for o in of.operands
        },
        "products": of.products,
        "results": [
            {
                "number": r.number,
                "value": r.value,
                "width": r.width,
                "shared": -1 if r.shared is None else r.shared,
                "accumulator": r.accumulator,
                "loads": [_load(o) for o in r.loads],
                "lines": r.lines,
                "stores": [_store(o) for o in r.stores],
            }
            for r in of.results
        ],
        "of_row": [o for o in scores if o.kind == "row"],
        "at_row": [o for o in scores if o.kind == "both"],
        "of_task": [o for o in scores if o.kind == "task"],
        "row_ends": [o for o in scores if o.kind == "row" and found.reads(ends_of(o))],
        "key_ends": [o for o in scores if o.kind == "key" and found.reads(ends_of(o))],
        "tiles": [_tile(of.unmasked, True), _tile(of.tile, False)] if of.masked else [_tile(of.unmasked, True)],
        "masked": of.masked,
        "bounds": found,
    }, {"flags": FLAGS}


def _pointer(operand: Operand) -> str:
    return f"{'' if operand.role == 'store' else 'const '}{operand.storage}*"


def _tile(tile: Tile, is_open: bool) -> dict[str, Any]:
    lines = list(zip(tile.lines, tile.levels, strict=True))
    return {
        "open": is_open,
        **{f"by_{kind}": [o for o in tile.operands if o.kind == kind] for kind in ("task", "row", "key", "both")},
        **{f"of_{level}": [line for line, own in lines if own == level] for level in ("task", "row", "key", "both")},
        "accumulators": [i.attr for i in tile.instructions if i.op == "contract"],
        "values": tile.values,
    }


def _step(operand: Operand) -> str:
    return "e" if operand.kind == "contiguous" else f"e * {operand.own[1]}"


def _load(operand: Operand) -> dict[str, str]:
    """A load at column ``e`` of a row, or an index there; ``start`` is computed once for the row."""
    name, position = f"from{operand.index}", f"batch{operand.index} + row * {operand.own[0]}"
    if operand.pointer is None:
        start, expression = f"const int64_t {name} = {position}", f"{name} + {_step(operand)}"
    else:
        start = f"{_pointer(operand)} const {name} = {operand.pointer} + {position}"
        expression = f"jitgen::load({name}[{_step(operand)}])"
    return {"start": start, "type": operand.type, "value": operand.value, "expression": expression}


def _store(operand: Operand) -> dict[str, str]:
    name = f"to{operand.index}"
    start = f"{_pointer(operand)} const {name} = {operand.pointer} + batch{operand.index} + row * {operand.own[0]}"
    return {"start": start, "stored": f"{name}[{_step(operand)}] = jitgen::store<{operand.storage}>({operand.value})"}
