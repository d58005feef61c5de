"""The context of ``templates/cuda/reduction.cu.j2``."""

from __future__ import annotations

from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Built
from jitgen.families.reduction import cuda_columns, cuda_persistent, cuda_rows
from jitgen.families.reduction.context import RowContext, RowOperand
from jitgen.families.reduction.cuda_walk import walks
from jitgen.families.reduction.layout import RowLayout
from jitgen.families.reduction.schedule import RowSchedule
from jitgen.ir.program import Kernel

_CONTEXTS = {"columns": cuda_columns.context, "persistent": cuda_persistent.context, "rows": cuda_rows.context}
"""What ``templates/cuda/reduction_<name>.j2`` reads."""


def build(kernel: Kernel, layout: RowLayout, schedule: RowSchedule, rows: RowContext, dialect: Dialect) -> Built:
    """Template context and source options; see ``reduction/render.py``."""
    memory = [operand for operand in rows.operands if operand.pointer]
    parameters = [f"{'' if o.role == 'store' else 'const '}{o.storage}* {o.pointer}" for o in memory]
    parameters += [f"Index {name}" for name in rows.integers]
    parameters += [f"{kind} {name}" for name, kind in rows.scalars]
    outer = [f"i{dim}" for dim in range(rows.outer)]
    bits = 64 if schedule.wide else 32
    width_divides = layout.unit >= schedule.vector
    end = "end" if schedule.persistent else "length"
    inside = f"column < {end}" if width_divides else f"column + (width - 1) < {end}"
    if schedule.whole:
        inside = "true" if schedule.full else f"u < whole || {inside}"
    found = walks(kernel, layout, schedule, rows)
    walk = "columns" if layout.columns else "persistent" if schedule.persistent else "rows"
    specific = _CONTEXTS[walk](kernel, layout, schedule, rows, found)
    return specific | {
        "walk": f"reduction_{walk}.j2",
        "parameters": parameters,
        "index": f"int{bits}_t",
        "unsigned": f"uint{bits}_t",
        "cluster_attribute": f"__cluster_dims__({schedule.cluster}, 1, 1) " if schedule.cluster > 1 else "",
        "index_lines": _index_lines(rows),
        "bases": [_base(operand, outer) for operand in rows.operands],
        "inside": inside,
        "blocks": schedule.blocks,
        "kept_values": found.kept_values,
        "reductions": found.reductions,
        "pairs": any(r.get("pair") for p in specific["passes"] for r in p["reductions"]),
    }, {}


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
