"""Builds the context of ``templates/reduction/reduction.cu.j2``: what all kernels in CUDA C++ have.

The rest is one of three: rows with threads of their own (``cuda_rows.py``), rows that persistent clusters take one
after another (``cuda_persistent.py``), and columns (``cuda_columns.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Built
from jitgen.families.rows.reduction import cuda_columns, cuda_persistent, cuda_rows
from jitgen.families.rows.reduction.context import ReductionContext
from jitgen.families.rows.reduction.cuda_passes import cuda_passes
from jitgen.families.rows.reduction.forms import CudaSchedule, PersistentRows
from jitgen.ir.program import Kernel
from jitgen.kernel.rows import RowLayout

_CONTEXTS: dict[str, Callable[..., dict[str, Any]]] = {
    "columns": cuda_columns.context,
    "persistent": cuda_persistent.context,
    "rows": cuda_rows.context,
}
"""The module that makes the rest of the context, which ``templates/reduction/cuda_<name>.j2`` reads."""


def build(kernel: Kernel, layout: RowLayout, schedule: CudaSchedule, rows: ReductionContext, dialect: Dialect) -> Built:
    """Builds template context and source options; see ``kernel/render.py``."""
    outer = [f"i{dim}" for dim in range(rows.outer)]
    bits = 64 if schedule.wide else 32
    passes = cuda_passes(kernel, layout, schedule, rows)
    name = "columns" if layout.columns else "persistent" if isinstance(schedule, PersistentRows) else "rows"
    specific = _CONTEXTS[name](kernel, layout, schedule, rows, passes)
    return specific | {
        "row_template": f"cuda_{name}.j2",
        "index": f"int{bits}_t",
        "unsigned": f"uint{bits}_t",
        "cluster_attribute": f"__cluster_dims__({schedule.cluster}, 1, 1) " if schedule.cluster > 1 else "",
        "index_lines": rows.cuda_indices,
        "bases": [operand.cuda_base(outer) for operand in rows.operands],
        "if_inside": _if_inside(layout, schedule),
        "blocks": schedule.blocks_per_multiprocessor,
        "resident_values": passes.resident_values,
        "reductions": passes.reductions,
        "blocked": any(p.source.blocked for p in passes.passes),
        "pairs": any(r.get("pair") for p in specific["passes"] for r in p["reductions"]),
    }, {}


def _if_inside(layout: RowLayout, schedule: CudaSchedule) -> str:
    """Returns the condition, in front of a block, that vector ``u`` lies in the row; empty where every vector does."""
    if schedule.is_unmasked:
        return ""
    end = "end" if isinstance(schedule, PersistentRows) else "length"
    inside = f"column < {end}" if layout.unit >= schedule.vector else f"column + (width - 1) < {end}"
    return f"if (u < whole || {inside}) " if schedule.unmasked_vectors else f"if ({inside}) "
