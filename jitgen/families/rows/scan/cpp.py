"""Builds the context of ``templates/scan/scan.cpp.j2``.

A row by itself is walked in blocks: what is scanned is computed into an array, scanned there, and results are computed
from it. Where neighbouring elements belong to neighbouring rows, a tile of rows is walked element by element, each row
with a state of its own, and everything is one loop over the rows. Short rows are walked so too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Built, Line, fields
from jitgen.families.rows.scan.context import Rows, Scan
from jitgen.families.rows.scan.schedule import Schedule
from jitgen.ir.ops import FLOATS
from jitgen.ir.program import Kernel
from jitgen.ir.scans import EXTREMA, PLACES
from jitgen.kernel.printed_rows import RowOperand
from jitgen.kernel.rows import RowLayout

SHARED_ROW = 2**15
"""Elements for each thread from which on threads share a row: less is done before the others have started."""
SHARED_COLUMN = 2**7
"""The same of a tile of neighbouring rows."""
AHEAD = 4
"""How many elements of its rows ahead a tile's operands are fetched: each is a run of memory of its own."""

_OPS = {"sum": "Sum", "prod": "Prod", "max": "Max", "min": "Min"}


def build(kernel: Kernel, layout: RowLayout, schedule: Schedule, rows: Rows, dialect: Dialect) -> Built:
    """Builds template context and source options; see ``kernel/render.py``."""
    columns = layout.columns or schedule.items == 1
    stores = [_store(operand, columns) for operand in rows.stores]
    scans = [fields(scan) | {"op": _op(scan)} for scan in rows.scans]
    scalars = [f"{kind} {name}" for name, kind in rows.scalars]
    outer = [f"at.index[{dim}]" for dim in range(rows.outer)]
    if columns:
        outer[-1] = "first"
    strides = _strides(rows, columns)
    context: dict[str, Any] = {
        "columns": columns,
        "block": schedule.items,
        "width": schedule.rows,
        "least": SHARED_COLUMN if columns else SHARED_ROW,
        "ahead": AHEAD,
        "bases": [(f"{o.address_type} const {_local(o)}", o.address(outer)) for o in rows.operands],
        "walk_parameters": [*(f"{o.address_type} {_local(o)}" for o in rows.operands)]
        + [f"int64_t {name}" for name in strides]
        + scalars,
        "walk_arguments": [*(_local(o) for o in rows.operands), *strides, *(name for name, _ in rows.scalars)],
        "checked": [f"scan{s.number}" for s in rows.scans if s.kind in ("sum", "prod") and s.dtype in FLOATS],
        "row_loads": [_load(operand, columns) for operand in rows.row_loads],
        "scans": scans,
        "streamed": [store for store in stores if store["group"]],
        "before": _group(rows.loads_before, rows.lines_before, columns)
        | {"scratch_stores": [{"scratch": f"values{s.number}", "index": "i", "value": s.value} for s in rows.scans]},
        "after": _group(rows.loads_after, rows.lines_after, columns) | {"stores": stores},
    }
    results = [result for scan in rows.scans for result in _results(scan, columns)]
    if columns:
        before = {line.value for line in rows.lines_before}
        context |= {
            "loads": [_load(operand, True) for operand in rows.loads],
            "fetched": [_load(o, True) for o in rows.loads if o.pointer and o.across == "contiguous"],
            "lines_before": rows.lines_before,
            "lines_after": [line for line in rows.lines_after if line.value not in before],
            "results": results,
        }
    else:
        context["after"]["loads"] += results
        context["after"]["streamed"] = context["streamed"]
    # Short rows need an address each; computed ahead, these would fill the registers.
    return context, {"interleaved": layout.columns or not columns}


def _op(scan: Scan) -> str:
    if scan.kind == "logsumexp":
        return "jitgen::LogSumExp"
    op = f"jitgen::{_OPS[EXTREMA.get(scan.kind, scan.kind)]}"
    return f"jitgen::Placed<{op}>" if scan.kind in PLACES else op


def _strides(rows: Rows, columns: bool) -> list[str]:
    """Lists the strides that a walk needs: along the row, and from row to row of a tile."""
    strides = [o.inner for o in rows.operands if o.inner not in ("0", "1")]
    if columns:
        strides += [o.outer_strides[-1] for o in rows.operands if o.across == "strided"]
    return strides


def _group(loads: Sequence[RowOperand], lines: Sequence[Line], columns: bool) -> dict[str, Any]:
    """Builds what ``common/group.j2`` reads."""
    return {
        "loads": [_load(operand, columns) for operand in loads],
        "lines": lines,
        "gathers": [],
        "scratch_stores": [],
        "reductions": [],
        "stores": [],
        "streamed": [],
    }


def _load(operand: RowOperand, columns: bool) -> dict[str, Any]:
    local = _local(operand)
    return {
        "type": operand.type,
        "value": operand.value,
        "local": local,
        "inner": operand.inner,
        "halves": "",
        "expression": operand.neighbour(local, _offset(operand, columns)),
    }


def _results(scan: Scan, columns: bool) -> list[dict[str, str]]:
    """Returns the results of a scan for an element, as if they were loaded."""
    results = []
    if scan.result:
        expression = f"states.scan{scan.number}.result(j)" if columns else f"values{scan.number}[i]"
        results.append({"type": scan.type, "value": scan.result, "halves": "", "expression": expression})
    if scan.index_name:
        expression = f"states.scan{scan.number}.place(j)" if columns else f"places{scan.number}[i]"
        results.append({"type": "int64_t", "value": scan.index_name, "halves": "", "expression": expression})
    return results


def _store(operand: RowOperand, columns: bool) -> dict[str, Any]:
    streamed = (operand.across if columns else operand.kind) == "contiguous" and operand.within is None
    inside = (
        "{1} >= {0[0]} && {1} < {0[1]}".format(operand.within, "e" if columns else "start + i")
        if operand.within
        else ""
    )
    return {
        "index": operand.index,
        "local": _local(operand),
        "inner": operand.inner,
        "storage": operand.storage,
        "value": operand.value,
        "offset": _offset_in_tile(operand) if columns else _offset(operand, False),
        "group": "Group" if streamed else "",
        "inside": inside,
        "bypasses_cache": f"output{operand.index}.past",
    }


def _offset(operand: RowOperand, columns: bool) -> str:
    """Prints the offset of an element from the beginning of its row (its tile of rows)."""
    element = "e" if columns else "(start + i)"
    terms = [] if operand.inner == "0" else [operand.along(element)]
    if columns and (in_tile := _offset_in_tile(operand)) != "0":
        terms.append(in_tile)
    return " + ".join(terms) or "0"


def _offset_in_tile(operand: RowOperand) -> str:
    """Prints the offset of row ``j`` from the first row of its tile."""
    return {"contiguous": "j", "broadcast": "0"}.get(operand.across, f"j * {operand.outer_strides[-1]}")


def _local(operand: RowOperand) -> str:
    """Returns the operand's pointer (an iota's first value) at the beginning of the row or the tile."""
    return f"x{operand.index}"
