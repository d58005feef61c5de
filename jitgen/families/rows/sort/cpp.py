"""Builds the context of ``templates/sort/sort.cpp.j2``: a thread reads a row into an array, sorts it, and stores
ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Built, Line, fields
from jitgen.families.row_passes import RowPass
from jitgen.families.rows.sort.context import Limit, Rows, SelectedRows
from jitgen.families.rows.sort.schedule import Schedule
from jitgen.families.rows.sort.selection import MOST_SELECTED_FROM
from jitgen.ir.program import Kernel
from jitgen.kernel.printed_rows import RowOperand
from jitgen.kernel.rows import RowLayout


def build(kernel: Kernel, layout: RowLayout, schedule: Schedule, rows: Rows, dialect: Dialect) -> Built:
    """Builds template context and source options; see ``kernel/render.py``."""
    outer = [f"at.index[{dim}]" for dim in range(rows.outer)]
    loads = [_load(operand) for operand in rows.loads]
    store = _counted if rows.counts else _selected if isinstance(rows, SelectedRows) else _store
    context: dict[str, Any] = {
        "place": "int64_t" if schedule.wide else "uint32_t",
        "bases": [(f"{o.address_type} const x{o.index}", o.address(outer)) for o in rows.operands],
        "row_loads": [_load(operand) for operand in rows.row_loads],
        "group": _group(loads, rows.lines, "elements", f"jitgen::store<{rows.storage}>({rows.key})"),
        "stores": [store(operand, what) for operand, what in rows.stores],
        "descending": "true" if rows.order.descending else "false",
    }
    if isinstance(rows, SelectedRows):
        context |= {
            "most": MOST_SELECTED_FROM,
            "passes": [{"before": p.before, "group": _reduced(loads, p)} for p in rows.passes],
            "limits": [_limit(loads, limit) for limit in rows.limits],
        }
    return context, {"interleaved": True}


def _group(loads: list[dict[str, Any]], lines: Sequence[Line], scratch: str, value: str) -> dict[str, Any]:
    """Describes a group of elements whose ``value`` goes to the array ``scratch``."""
    stores = [{"scratch": scratch, "index": "i", "value": value}] if scratch else []
    nothing: dict[str, Any] = {"gathers": [], "reductions": [], "stores": [], "streamed": []}
    return {"loads": loads, "lines": lines, "scratch_stores": stores} | nothing


def _reduced(loads: list[dict[str, Any]], row_pass: RowPass) -> dict[str, Any]:
    reductions = [fields(r) | {"kind": f"{r.op}<{r.type}>", "taken": r.value} for r in row_pass.reductions]
    return _group(loads, row_pass.lines, "", "") | {"reductions": reductions}


def _limit(loads: list[dict[str, Any]], limit: Limit) -> dict[str, Any]:
    return fields(limit) | {"group": _group(loads, limit.lines, f"counted_{limit.name}", limit.value)}


def _selected(operand: RowOperand, _: str) -> dict[str, str]:
    at = operand.along("(rank - start)")
    return {"local": f"x{operand.index}", "at": at, "storage": operand.storage, "value": operand.value}


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
