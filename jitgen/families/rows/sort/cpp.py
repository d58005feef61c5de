"""Builds the context of ``templates/sort/sort.cpp.j2``: a thread reads a row into an array, sorts it, and stores
ranks."""

from __future__ import annotations

from typing import Any

from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Built
from jitgen.families.rows.sort.context import Rows
from jitgen.families.rows.sort.schedule import Schedule
from jitgen.ir.program import Kernel
from jitgen.kernel.printed_rows import RowOperand
from jitgen.kernel.rows import RowLayout


def build(kernel: Kernel, layout: RowLayout, schedule: Schedule, rows: Rows, dialect: Dialect) -> Built:
    """Builds template context and source options; see ``kernel/render.py``."""
    outer = [f"at.index[{dim}]" for dim in range(rows.outer)]
    context: dict[str, Any] = {
        "place": "int64_t" if schedule.wide else "uint32_t",
        "bases": [(f"{o.address_type} const x{o.index}", o.address(outer)) for o in rows.operands],
        "row_loads": [_load(operand) for operand in rows.row_loads],
        "group": {
            "loads": [_load(operand) for operand in rows.loads],
            "lines": rows.lines,
            "scratch_stores": [
                {"scratch": "elements", "index": "i", "value": f"jitgen::store<{rows.storage}>({rows.key})"},
            ],
            "gathers": [],
            "reductions": [],
            "stores": [],
            "streamed": [],
        },
        "stores": [(_counted if rows.counts else _store)(operand, what) for operand, what in rows.stores],
        "descending": "true" if rows.order.descending else "false",
    }
    return context, {"interleaved": True}


def _load(operand: RowOperand) -> dict[str, Any]:
    expression = operand.neighbour(f"x{operand.index}", operand.along("i"))
    return {"type": operand.type, "value": operand.value, "halves": "", "expression": expression}


def _store(operand: RowOperand, what: str) -> dict[str, str]:
    values_by_kind = {"values": "elements[sorted[rank]]", "indices": "int64_t(sorted[rank])"}
    return {"local": f"x{operand.index}", "at": operand.along("(rank - start)"), "value": values_by_kind[what]}


def _counted(operand: RowOperand, what: str) -> dict[str, str]:
    values_by_kind = {"values": "elements[column]", "indices": "column", "ranks": "rank", "ends": ""}
    at = {"ranks": "column", "ends": "number"}.get(what, "rank")
    return {"local": f"x{operand.index}", "at": operand.along(at), "value": values_by_kind[what], "what": what}
