"""What ``templates/cuda/reduction_persistent.j2`` reads beside ``cuda.py``'s context: clusters take row after row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jitgen.codegen.printing import fields
from jitgen.families.reduction.context import RowContext, RowOperand
from jitgen.families.reduction.cuda_rows import pass_fields, row_value
from jitgen.families.reduction.cuda_walk import Walk, Walks
from jitgen.families.reduction.layout import RowLayout
from jitgen.families.reduction.schedule import RowSchedule
from jitgen.ir.program import Kernel


def context(kernel: Kernel, layout: RowLayout, schedule: RowSchedule, rows: RowContext, walks: Walks) -> dict[str, Any]:
    """``staged``: operands with elements of their own for each row.

    Of those that all rows read ``parked`` lie in shared memory and ``held`` in registers.
    """
    loads = [operand for p in rows.passes for operand in p.loads if operand.pointer]
    common = [operand for operand in loads if layout.shared[operand.index]]
    staged = [operand for operand in loads if operand not in common]
    count = schedule.persistent.parked if schedule.persistent else 0
    parked, held = common[:count], common[count:]
    kept = [operand for operand in walks.kept_loads if operand in staged]
    return {
        "staged": [fields(o) | {"start": o.base([f"i{dim}" for dim in range(rows.outer)])} for o in staged],
        "parked": parked,
        "held": held,
        "kept_loads": kept,
        "row_load": {o.index: row_value(o) for o in rows.row_loads},
        "scratch": "jitgen::Inbox<{state}, warps * cluster>",
        "store_vector": "store_vector_streaming",
        "vector_stores": [o for p in rows.passes for o in p.stores if o.kind == "contiguous"],
        "passes": [
            _pass(walk, staged, parked, kept) | {"first_of_parked": _is_first(walk, walks.passes, parked)}
            for walk in walks.passes
        ],
    }


def _is_first(walk: Walk, passes: Sequence[Walk], parked: Sequence[RowOperand]) -> bool:
    """Whether no pass before this one has needed what is ``parked``."""
    return walk is next((other for other in passes if any(o in parked for o in other.needed)), None)


def _pass(
    walk: Walk, staged: Sequence[RowOperand], parked: Sequence[RowOperand], kept: Sequence[RowOperand]
) -> dict[str, Any]:
    first = walk.source.number == 0
    reads, elements = [], []
    for operand in walk.needed:
        name = f"x{operand.index}[u]"
        if operand in staged and first:
            reads.append(_read(operand, f"staged{operand.index}"))
            name = f"now{operand.index}"
            if operand in kept:
                reads.append(f"x{operand.index}[u] = {name};")
        elif operand in parked:
            reads.append(_read(operand, f"shared{operand.index}"))
            name = f"now{operand.index}"
        element = f"jitgen::load({name}[j])"
        if operand.pointer is None:
            element = f"from{operand.index} + (column + j) * {operand.inner}"
        elements.append(fields(operand) | {"element": element})
    described = pass_fields(walk, {})
    # From where the thread's part begins, so that each address is a constant away from one that the row moves.
    stores = [y | {"place": f"first{y['index']} + u * (32 * width)"} for y in described["vector_stores"]]
    return described | {"reads": reads, "element_loads": elements, "vector_stores": stores}


def _read(operand: RowOperand, places: str) -> str:
    return f"const auto now{operand.index} = jitgen::load_place<{operand.storage}>({places} + u * 32 + lane);"
