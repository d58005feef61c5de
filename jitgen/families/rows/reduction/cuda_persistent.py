"""Builds what ``templates/reduction/cuda_persistent.j2`` reads in addition to ``cuda.py``'s context: clusters take row
after row.

The elements of a row are copied to shared memory, those of row-invariant operands are loaded once, into shared memory
or registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jitgen.codegen.printing import fields
from jitgen.families.rows.reduction.context import ReductionContext
from jitgen.families.rows.reduction.cuda_passes import CudaPass, CudaPasses
from jitgen.families.rows.reduction.cuda_rows import pass_fields, row_value
from jitgen.families.rows.reduction.forms import PersistentRows
from jitgen.ir.program import Kernel
from jitgen.kernel.printed_rows import RowOperand
from jitgen.kernel.rows import RowLayout


def context(
    kernel: Kernel, layout: RowLayout, schedule: PersistentRows, rows: ReductionContext, passes: CudaPasses
) -> dict[str, Any]:
    """Builds the context: ``copied`` are the operands with elements of their own for each row; of the row-invariant
    ones, ``shared_invariant`` lie in shared memory and ``register_invariant`` in registers."""
    loads = [operand for p in rows.passes for operand in p.loads if operand.pointer]
    invariant = [operand for operand in loads if layout.row_invariant[operand.index]]
    copied = [operand for operand in loads if operand not in invariant]
    count = schedule.shared_operands
    in_shared, in_registers = invariant[:count], invariant[count:]
    resident = [operand for operand in passes.resident_loads if operand in copied]
    return {
        "copied": [fields(o) | {"start": o.base([f"i{dim}" for dim in range(rows.outer)])} for o in copied],
        "shared_invariant": in_shared,
        "register_invariant": in_registers,
        "resident_loads": resident,
        "row_value": {o.index: row_value(o) for o in rows.row_loads},
        "scratch": "jitgen::Inbox<{state}, warps * cluster>",
        "store_vector": "store_vector_streaming",
        "vector_stores": [o for p in rows.passes for o in p.stores if o.kind == "contiguous"],
        "passes": [
            _pass(p, copied, in_shared, resident) | {"waits_for_invariant": _is_first(p, passes.passes, in_shared)}
            for p in passes.passes
        ],
    }


def _is_first(p: CudaPass, passes: Sequence[CudaPass], in_shared: Sequence[RowOperand]) -> bool:
    """Returns whether ``p`` is the first pass that needs any of ``in_shared``."""
    return p is next((other for other in passes if any(o in in_shared for o in other.needed)), None)


def _pass(
    p: CudaPass, copied: Sequence[RowOperand], in_shared: Sequence[RowOperand], resident: Sequence[RowOperand]
) -> dict[str, Any]:
    """Describes a pass for the template. The first one moves resident operands from shared memory to registers."""
    first = p.source.number == 0
    reads, elements = [], []
    for operand in p.needed:
        name = f"x{operand.index}[u]"
        if operand in copied and first:
            reads.append(_read(operand, f"staged{operand.index}"))
            name = f"now{operand.index}"
            if operand in resident:
                reads.append(f"x{operand.index}[u] = {name};")
        elif operand in in_shared:
            reads.append(_read(operand, f"shared{operand.index}"))
            name = f"now{operand.index}"
        element = f"jitgen::load({name}[j])"
        if operand.pointer is None:
            element = f"from{operand.index} + (column + j) * {operand.inner}"
        elements.append(fields(operand) | {"element": element})
    described = pass_fields(p, {})
    # Counted from where the warp's chunk of the row begins, so that each address is a constant beyond one that the row
    # moves.
    stores = [y | {"target": f"first{y['index']} + u * (32 * width)"} for y in described["vector_stores"]]
    return described | {"reads": reads, "elements": elements, "vector_stores": stores}


def _read(operand: RowOperand, vectors: str) -> str:
    return f"const auto now{operand.index} = jitgen::load_place<{operand.storage}>({vectors} + u * 32 + lane);"
