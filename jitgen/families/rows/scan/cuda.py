"""Builds the context of ``templates/scan/scan.cu.j2``."""

from __future__ import annotations

from typing import Any

from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Built, fields
from jitgen.families.rows.scan.context import Rows, Scan
from jitgen.families.rows.scan.schedule import CHUNK_UNIT, Schedule
from jitgen.ir.program import Kernel
from jitgen.ir.scans import PLACES
from jitgen.kernel.operands import WARP
from jitgen.kernel.printed_rows import RowOperand
from jitgen.kernel.rows import RowLayout

_OPS = {
    "sum": "Sum",
    "prod": "Prod",
    "max": "Max",
    "min": "Min",
    "argmax": "ArgMax",
    "argmin": "ArgMin",
    "logsumexp": "LogSumExp",
}


def build(kernel: Kernel, layout: RowLayout, schedule: Schedule, rows: Rows, dialect: Dialect) -> Built:
    """Builds template context and source options; see ``kernel/render.py``."""
    bits = 64 if schedule.wide else 32
    operand = _column_operand if layout.columns else _row_operand

    def described(operands: tuple[RowOperand, ...]) -> list[dict[str, Any]]:
        return [operand(item) for item in operands]

    if layout.columns:
        scratch = schedule.along * schedule.rows
    else:
        scratch = schedule.along // WARP if schedule.along > WARP else 0
    return {
        "columns": layout.columns,
        "index": f"int{bits}_t",
        "unsigned": f"uint{bits}_t",
        "chunks": schedule.chunks,
        "chunk_unit": CHUNK_UNIT,
        "loops": schedule.loops,
        "scratch": scratch,
        "index_lines": rows.cuda_indices,
        "bases": [o.cuda_base([f"i{dim}" for dim in range(rows.outer)]) for o in rows.operands],
        "scans": [_scan(scan, layout.columns) for scan in rows.scans],
        "row_loads": described(rows.row_loads),
        "loads": described(rows.loads),
        "loads_before": described(rows.loads_before),
        "loads_after": described(rows.loads_after),
        "stores": described(rows.stores),
    }, {}


def _row_operand(operand: RowOperand) -> dict[str, Any]:
    """Describes an operand whose row a thread takes by consecutive elements.

    ``vector``: whether these are moved by whole accesses; ``at`` is where one of them lies otherwise; ``element`` is
    its value and ``put`` where a result goes.
    """
    vector = operand.kind == "contiguous" and operand.pointer is not None
    at = operand.along("(first + j)")
    register = f"x{operand.index}[j / width][j % width]" if vector else f"x{operand.index}[j]"
    element = f"jitgen::load({register})" if operand.pointer else f"from{operand.index} + {operand.along('column')}"
    row_value = f"jitgen::load(*from{operand.index})" if operand.pointer else f"from{operand.index}"
    put = f"y{operand.index}[j / width][j % width]" if vector else f"to{operand.index}[{operand.along('column')}]"
    if operand.within and not vector:
        put = f"if ({_inside(operand)}) {put}"
    return fields(operand) | {"vector": vector, "at": at, "element": element, "row_value": row_value, "put": put}


def _column_operand(operand: RowOperand) -> dict[str, Any]:
    """Describes an operand of which a thread takes elements of ``rows_per_thread`` neighbouring rows (``beside`` in the
    source).

    ``array`` declares them, ``fetch`` fills those at ``column``, of which ``element`` is that of row ``j``; a result's
    are declared by ``array`` and stored by ``put``.
    """
    index, offset = operand.index, operand.along("column")
    step = {"contiguous": "j", "broadcast": "0"}.get(operand.across, f"j * {operand.outer_strides[-1]}")
    described = fields(operand) | {"row_at": step, "array": "", "fetch": "", "put": ""}
    if operand.pointer is None:
        return described | {"element": f"from{index} + {offset} + {step}", "row_value": f"from{index} + {step}"}
    described["row_value"] = f"jitgen::load(x{index}[j])"
    if operand.role == "store":
        inside = f"if ({_inside(operand)}) " if operand.within else ""
        if operand.across == "contiguous":
            array = f"jitgen::Vector<{operand.storage}, beside> y{index};"
            return described | {"array": array, "put": f"{inside}jitgen::store_vector(to{index} + {offset}, y{index});"}
        put = inside + f"for (int j = 0; j < beside; ++j) to{index}[{offset} + {step}] = y{index}[j];"
        return described | {"array": f"{operand.storage} y{index}[beside];", "put": put}
    described["element"] = f"jitgen::load(x{index}[u][j])"
    if operand.across == "contiguous":
        array = f"jitgen::Vector<{operand.storage}, beside> x{index}[items];"
        return described | {
            "array": array,
            "fetch": f"x{index}[u] = jitgen::load_vector<beside>(from{index} + {offset});",
        }
    if operand.across == "broadcast":
        described["element"] = f"jitgen::load(x{index}[u])"
        return described | {
            "array": f"{operand.storage} x{index}[items];",
            "fetch": f"x{index}[u] = from{index}[{offset}];",
        }
    fetch = f"for (int j = 0; j < beside; ++j) x{index}[u][j] = from{index}[{offset} + {step}];"
    return described | {"array": f"{operand.storage} x{index}[items][beside];", "fetch": fetch}


def _inside(operand: RowOperand, at: str = "column") -> str:
    """Prints whether a result is stored at the index ``at`` of the row."""
    return f"{at} >= {operand.within[0]} && {at} < {operand.within[1]}" if operand.within else "true"


def _scan(scan: Scan, columns: bool) -> dict[str, Any]:
    """Describes a scan; ``states_before`` are the components of a chunk's state, ``totals`` the lines that store
    them."""
    members = [""]
    if scan.kind in PLACES:
        members = [".extremum", ".place"]
    elif scan.kind == "logsumexp":
        members = [".top", ".sum"]
    own, which = ("[j]", "part") if columns else ("", "thread")
    before = [f"from{o.index}[{_row_offset(o, columns)}first + {which}]" for o in scan.before]
    totals = [
        f"to{o.index}[{_row_offset(o, columns)}chunk] = carry{scan.number}{own}{member}"
        for o, member in zip(scan.totals, members, strict=False)
    ]
    return fields(scan) | {"op": _OPS[scan.kind], "states_before": ", ".join(before), "totals": totals}


def _row_offset(operand: RowOperand, columns: bool) -> str:
    """Prints the offset of row ``j`` of a thread from its first row."""
    return f"j * {operand.outer_strides[-1]} + " if columns else ""
