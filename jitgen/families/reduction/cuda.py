"""The context of ``templates/reduction/reduction.cu.j2``: what all kernels in CUDA C++ have.

The rest is one of three: rows with threads of their own (``cuda_rows.py``), rows that persistent clusters take one
after another (``cuda_persistent.py``), and columns (``cuda_columns.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Built
from jitgen.families.reduction import cuda_columns, cuda_persistent, cuda_rows
from jitgen.families.reduction.context import RowContext, RowOperand
from jitgen.families.reduction.cuda_passes import cuda_passes
from jitgen.families.reduction.forms import CudaSchedule, PersistentRows
from jitgen.families.reduction.layout import RowLayout
from jitgen.ir.program import Kernel
from jitgen.kernel.row_operands import cuda_parameters

_CONTEXTS: dict[str, Callable[..., dict[str, Any]]] = {
    "columns": cuda_columns.context,
    "persistent": cuda_persistent.context,
    "rows": cuda_rows.context,
}
"""What makes the rest of the context, which ``templates/reduction/cuda_<name>.j2`` reads."""


def build(kernel: Kernel, layout: RowLayout, schedule: CudaSchedule, rows: RowContext, dialect: Dialect) -> Built:
    """Template context and source options; see ``reduction/render.py``."""
    outer = [f"i{dim}" for dim in range(rows.outer)]
    bits = 64 if schedule.wide else 32
    passes = cuda_passes(kernel, layout, schedule, rows)
    name = "columns" if layout.columns else "persistent" if isinstance(schedule, PersistentRows) else "rows"
    specific = _CONTEXTS[name](kernel, layout, schedule, rows, passes)
    return specific | {
        "row_template": f"cuda_{name}.j2",
        "parameters": cuda_parameters(rows.operands, rows.integers, rows.scalars),
        "index": f"int{bits}_t",
        "unsigned": f"uint{bits}_t",
        "cluster_attribute": f"__cluster_dims__({schedule.cluster}, 1, 1) " if schedule.cluster > 1 else "",
        "index_lines": _index_lines(rows),
        "bases": [_base(operand, outer) for operand in rows.operands],
        "if_inside": _if_inside(layout, schedule),
        "blocks": schedule.blocks_per_multiprocessor,
        "resident_values": passes.resident_values,
        "reductions": passes.reductions,
        "pairs": any(r.get("pair") for p in specific["passes"] for r in p["reductions"]),
    }, {}


def _if_inside(layout: RowLayout, schedule: CudaSchedule) -> str:
    """The condition, in front of a block, that vector ``u`` lies in the row; empty where every vector does."""
    if schedule.is_unmasked:
        return ""
    end = "end" if isinstance(schedule, PersistentRows) else "length"
    inside = f"column < {end}" if layout.unit >= schedule.vector else f"column + (width - 1) < {end}"
    return f"if (u < whole || {inside}) " if schedule.unmasked_vectors else f"if ({inside}) "


def _index_lines(rows: RowContext) -> list[str]:
    """Lines that compute the outer indices from the number of a row. Nothing is negative, and unsigned division is
    cheaper than signed."""
    lines, rest = [], "Unsigned(row)"
    for dim in reversed(range(1, rows.outer)):
        lines.append(f"const Index i{dim} = Index({rest} % Unsigned({rows.sizes[dim]}));")
        lines.append(f"const Unsigned q{dim} = {rest} / Unsigned({rows.sizes[dim]});")
        rest = f"q{dim}"
    lines.append(f"const Index i0 = Index({rest});")
    return lines


def _base(operand: RowOperand, outer: list[str]) -> dict[str, str]:
    """The declaration of where an operand's row begins: a pointer, or the first value of an iota."""
    start = operand.base(outer)
    if operand.pointer is None:
        return {"declaration": f"const Index from{operand.index}", "start": start}
    if operand.role == "store":
        return {"declaration": f"{operand.storage}* const to{operand.index}", "start": f"{operand.pointer} + {start}"}
    declaration = f"const {operand.storage}* const from{operand.index}"
    return {"declaration": declaration, "start": f"{operand.pointer} + {start}"}
