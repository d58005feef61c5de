"""Builds the contexts of ``templates/sort/sort.cu.j2``."""

from __future__ import annotations

from typing import Any

from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Built, fields
from jitgen.families.rows.sort.context import Rows
from jitgen.families.rows.sort.schedule import CountSchedule, Schedule
from jitgen.ir.program import Kernel
from jitgen.kernel.printed_rows import RowOperand
from jitgen.kernel.rows import RowLayout


def build(kernel: Kernel, layout: RowLayout, schedule: Schedule, rows: Rows, dialect: Dialect) -> Built:
    """Builds template context and source options; see ``kernel/render.py``."""
    bits = 64 if schedule.wide else 32
    cluster = schedule.cluster if isinstance(schedule, CountSchedule) else 1
    context: dict[str, Any] = {
        "index": f"int{bits}_t",
        "unsigned": f"uint{bits}_t",
        "chunk": rows.order.chunk,
        "cluster_attribute": f"__cluster_dims__({cluster}, 1, 1) " if cluster > 1 else "",
        "descending": "true" if rows.order.descending else "false",
        "index_lines": rows.cuda_indices,
        "row_loads": [_load(operand) for operand in rows.row_loads],
        "loads": [_load(operand) for operand in rows.loads],
        "steps": [(kind, _load(what) if kind == "load" else what) for kind, what in rows.behind],
        "stores": [_store(operand, what) for operand, what in rows.stores],
    }
    return context, {}


def _base(operand: RowOperand) -> str:
    return operand.base([f"i{dim}" for dim in range(len(operand.outer_strides))])


def _load(operand: RowOperand) -> dict[str, Any]:
    """Describes an operand with ``element``, its value at ``column`` of the row with outer indices ``i0`` ..."""
    at = f"{_base(operand)} + {operand.along('column')}"
    return fields(operand) | {"element": operand.element(at), "from_row": f"{operand.pointer} + {_base(operand)}"}


def _store(operand: RowOperand, what: str) -> dict[str, Any]:
    """Describes an operand with the address of rank ``to``; ``computed`` is what is stored there where that is computed
    of the rank."""
    at = f"{operand.pointer}[{_base(operand)} + {operand.along('to')}]"
    computed = f"jitgen::store<{operand.storage}>({operand.value})" if what == "ranks" else ""
    return fields(operand) | {"what": what, "at": at, "computed": computed}
