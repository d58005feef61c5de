"""The context of ``templates/attention/attention.cpp.j2``: a struct that the mainloop of ``attention.hpp`` walks.

What the rule of scores reads is loaded where it changes: once for a task, once for a row of a chunk, once for a key, or
for each score.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Built, Source, printed
from jitgen.families.attention.forward.addresses import base_of_task, row_indices, row_offset
from jitgen.families.attention.forward.context import Attention, Computed, Operand, Rule, bounds
from jitgen.families.attention.forward.layout import Layout
from jitgen.families.attention.forward.schedule import CpuSchedule
from jitgen.families.attention.rule.addresses import indices, sum_of
from jitgen.families.attention.rule.bounds import Words, ends_of
from jitgen.ir.program import Kernel

WORDS = Words("false", "true", "min", "max", "jitgen::floor_divide(int64_t({0}), int64_t({1}))")
COMPUTED = "jitgen::attention::Computed"
"""As the type of keys or values in memory, where they are computed."""
FLAGS = ["-O2"]
"""Mainloops are written with vector types, and loops over lanes are marked ``omp simd``."""


def build(kernel: Kernel, layout: Layout, schedule: CpuSchedule, of: Attention, dialect: Dialect) -> Built:
    """Template context and source options; see ``families/render.py``."""
    (body,) = kernel.bodies
    scores = list(of.rule.operands)
    known = {o.index: ends_of(o) for o in scores if o.is_integer and o.kind != "both"}
    found = bounds(body, layout, known, WORDS)
    pointers = [f"{_pointer(operand)} {operand.pointer}" for operand in of.operands if operand.pointer]
    scalars = [f"{kind} {name}" for name, kind in of.scalars]
    integers = [f"int64_t {name}" for name in of.integers]
    fields = [*pointers, *scalars, *integers]
    key_row = _row_computed(of.computed_key, dialect, inner=1) if of.computed_key else None
    value_row = _row_computed(of.computed_value, dialect, inner=0) if of.computed_value else None
    return {
        "parameters": [*pointers, *scalars, "int32_t threads", *integers, "int32_t streaming"],
        "fields": fields,
        "arguments": [field.rpartition(" ")[2] for field in fields],
        "accumulator": of.accumulator,
        "way": "Tiles" if schedule.path == "tiles" else "Few",
        "lanes_are_rows": schedule.path == "tiles",
        "tasks": " * ".join(of.batch) or "1",
        "packed_rows": " * ".join([*of.packed, "rows"]),
        "indices": indices(of.batch, "task", "z", "/"),
        "row_indices": row_indices(of.packed, "/"),
        "based": [
            {
                "name": f"at{o.index}",
                "expression": base_of_task(o, layout),
            }
            for o in of.operands
        ],
        "of_row": [o for o in scores if o.kind == "row"],
        "at_row": [o for o in scores if o.kind == "both"],
        "of_task": [o for o in scores if o.kind == "task"],
        "positions": {o.index: row_offset(o, layout) for o in of.operands},
        "row_ends": [o for o in scores if o.kind == "row" and found.reads(ends_of(o))],
        "key_ends": [o for o in scores if o.kind == "key" and found.reads(ends_of(o))],
        "rules": [_rule(of.unmasked, True), _rule(of.rule, False)] if of.masked else [_rule(of.unmasked, True)],
        "masked": of.masked,
        "bounds": found,
        "key": of.key if key_row is None else replace(of.key, kind="strided", storage=COMPUTED),
        "value": of.value if value_row is None else replace(of.value, kind="strided", storage=COMPUTED),
        "key_row": key_row,
        "value_row": value_row,
        "checked": bool(kernel.checked),
        "query": [_load(o, row_offset(o, layout), "d", o.own[1] if o.kind != "contiguous" else "1") for o in of.query],
        "query_lines": of.query_lines,
        "query_value": of.query_value,
        "row_loads": [_load(o, row_offset(o, layout), "0", "1") for o in of.row_loads],
        "row_lines": of.row_lines,
        "loads": [_load(o, row_offset(o, layout), "e", o.own[1] if o.kind != "contiguous" else "1") for o in of.loads],
        "lines": of.lines,
        "row_stores": [_store(o, row_offset(o, layout), "0", "1") for o in of.row_stores],
        "stores": [
            _store(o, row_offset(o, layout), "e", o.own[1] if o.kind != "contiguous" else "1") for o in of.stores
        ],
        "tops": of.tops,
        "totals": of.totals,
    }, {"flags": FLAGS}


def _row_computed(of: Computed, dialect: Dialect, inner: int) -> dict[str, Any]:
    """A row of keys or values that is computed: what is done once for key ``n``, and for each of its elements ``d``.

    Args:
        inner: which of an operand's own strides is along the elements of a key.
    """
    starts = {i: sum_of([f"at{i}"], [o.own[1 - inner]], ["n"]) for i, o in of.operands.items()}
    sources = {
        i: Source(o.pointer, starts[i], o.gathered, o.dtype) for i, o in of.operands.items() if o.gathered and o.pointer
    }
    found = printed(of.instructions, dialect, "u", sources=sources)
    before: list[str] = []
    lines: list[str] = []
    for position, instruction in enumerate(of.instructions):
        line, name = found.lines.get(position), found.names[position]
        if instruction.op not in ("load", "iota", "gather"):
            if line is not None:
                (before if position in of.shared else lines).append(f"{line.text}{line.mark}")
            continue
        operand, kind = of.operands[instruction.attr], dialect.types[instruction.dtype]
        if instruction.op == "iota":
            before.append(dialect.assign(kind, name, starts[operand.index]))
        elif position in of.shared:
            load = f"jitgen::load({operand.pointer}[{starts[operand.index]}])"
            before.append(line.text if line is not None else dialect.assign(kind, name, load))
        else:
            indices = [found.names[argument] for argument in instruction.args]
            chosen = [
                f"{dialect.within.format(index, size)} * {stride}"
                for index, (size, stride) in zip(indices, operand.gathered, strict=True)
            ]
            address = " + ".join([str(operand.pointer), starts[operand.index], *chosen])
            before.append(f"{_pointer(operand)} const from_{name} = {address};")
            step = _step("d", "1" if operand.kind == "contiguous" else operand.own[inner])
            lines.append(dialect.assign(kind, name, f"jitgen::load(from_{name}[{step}])"))
    return {
        "before": before,
        "lines": lines,
        "value": found.names[len(of.instructions) - 1],
        "checked": any(instruction.op == "gather" for instruction in of.instructions),
    }


def _pointer(operand: Operand) -> str:
    return f"{'' if operand.role == 'store' else 'const '}{operand.storage}*"


def _rule(rule: Rule, is_open: bool) -> dict[str, Any]:
    return {
        "open": is_open,
        "by_key": [o for o in rule.operands if o.kind == "key"],
        "by_task": [o for o in rule.operands if o.kind == "task"],
        "by_row": [o for o in rule.operands if o.kind == "row"],
        "by_both": [o for o in rule.operands if o.kind == "both"],
        "lines": [line for line, level in zip(rule.lines, rule.levels, strict=True) if level == "both"],
        **{
            f"of_{level}": [line for line, own in zip(rule.lines, rule.levels, strict=True) if own == level]
            for level in ("task", "row", "key")
        },
        "value": rule.value,
    }


def _step(index: str, stride: str) -> str:
    return index if stride == "1" else "0" if index == "0" else f"{index} * {stride}"


def _load(operand: Operand, position: str, index: str, stride: str) -> dict[str, str]:
    """A load at ``index`` of a row, or an index there; ``start`` is computed once for the row."""
    name = f"from{operand.index}"
    step = _step(index, stride)
    if operand.pointer is None:
        start, expression = f"const int64_t {name} = {position}", f"{name} + {step}"
    else:
        start = f"{_pointer(operand)} const {name} = {operand.pointer} + {position}"
        expression = f"jitgen::load({name}[{step}])"
    return {"start": start, "type": operand.type, "value": operand.value, "expression": expression}


def _store(operand: Operand, position: str, index: str, stride: str) -> dict[str, str]:
    name = f"to{operand.index}"
    start = f"{_pointer(operand)} const {name} = {operand.pointer} + {position}"
    stored = f"{name}[{_step(index, stride)}] = jitgen::store<{operand.storage}>({operand.value})"
    return {"start": start, "stored": stored}
