"""Builds what ``templates/reduction/cuda_columns.j2`` reads in addition to ``cuda.py``'s context: a thread has several
neighbouring rows.

Values of elements are scalars, as where a row's own elements are neighbours; a value of which every row has its own is
an array with an element for each row of the thread, ``row_<value>``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from jitgen.codegen.printing import fields
from jitgen.families.rows.reduction.context import ReductionContext, RowValues
from jitgen.families.rows.reduction.cuda_passes import CudaPass, CudaPasses
from jitgen.families.rows.reduction.forms import ColumnBlocks
from jitgen.ir.body import Instruction
from jitgen.ir.program import Kernel
from jitgen.kernel.printed_rows import RowOperand
from jitgen.kernel.rows import RowLayout


def context(
    kernel: Kernel, layout: RowLayout, schedule: ColumnBlocks, rows: ReductionContext, passes: CudaPasses
) -> dict[str, Any]:
    columns = _Columns(kernel, layout, schedule, rows)
    resident = {operand.value for operand in passes.resident_loads}
    return {
        "uniform": columns.uniform,
        "row_values": columns.row_values,
        "row_loads": [columns.load(operand, "", "") for operand in rows.row_loads],
        "resident_loads": [columns.load(operand, "unroll", "u") for operand in passes.resident_loads],
        "passes": [columns.described(p, resident) for p in passes.passes],
        "after": columns.of_rows.block(rows.after),
        "row_stores": [columns.store(operand) for operand in rows.row_stores],
    }


class _Columns:
    """Builds the context of what differs between the rows of one thread.

    Attributes:
        uniform: lines of row values that all rows share.
        row_values: (type, name) of the values of which each row has its own.
    """

    def __init__(self, kernel: Kernel, layout: RowLayout, schedule: ColumnBlocks, rows: ReductionContext):
        (body,) = kernel.bodies
        self.instructions: Sequence[Instruction] = body.instructions
        self.layout, self.is_resident = layout, schedule.resident
        every = [*(line for p in rows.passes for line in p.before), *rows.after]
        own = self._own()
        self.uniform = [line for line in every if line.position not in own]
        self.row_values = [(o.type, o.value) for o in rows.row_loads]
        self.row_values += [(line.type, line.value) for line in every if line.position in own]
        self.row_values += [(r.type, r.result) for p in rows.passes for r in p.reductions]
        self.of_rows = RowValues(self.instructions, self.row_values)

    def _own(self) -> set[int]:
        """Returns the positions of the row values that depend on the row."""
        own: set[int] = set()
        for position, instruction in enumerate(self.instructions):
            depends = instruction.op in ("load", "iota", "reduce") or own.intersection(instruction.args)
            if instruction.row and depends:
                own.add(position)
        return own

    def described(self, p: CudaPass, resident: Collection[str]) -> dict[str, Any]:
        """Describes a pass for the template; ``resident`` are the operands' values that stay in registers."""
        loaded = [*p.loaded, *p.deferred]
        positions = [line.position for line in p.lines]
        results = {r["value"] for r in p.reductions} | {o.value for o in p.source.stores}
        return {
            "number": p.source.number,
            "before": self.of_rows.block(p.source.before),
            "arrays": [self.load(o, "unroll", "u") for o in loaded if o.value not in resident],
            "loads": [self.load(o, "unroll", "u") for o in loaded],
            "inputs": self.of_rows.read(positions, results),
            "elements": [self.load(o, "unroll", "u") for o in p.needed],
            "resident_inputs": p.resident_inputs,
            "resident_outputs": p.resident_outputs,
            "lines": p.lines,
            "reductions": [r | {"step": self._step(r, p)} for r in p.reductions],
            # Whether all elements that a thread holds of a row join the row's state at once.
            "grouped": any(r["online"] for r in p.reductions) and not p.source.stores,
            "stores": [self.store(o) for o in p.source.stores],
        }

    def _step(self, r: dict[str, Any], p: CudaPass) -> str:
        """Prints the state with the element at ``j`` in it. Every second pass over rows in memory goes backwards."""
        backwards = r["indexed"] and p.source.number % 2 == 1 and not self.is_resident
        step: str = r["unordered" if backwards else "step"]
        return step.format(part=f"part_{r['result']}[j]")

    def load(self, operand: RowOperand, count: str, at: str) -> dict[str, Any]:
        """Describes how an operand's elements of the thread's rows come into registers.

        ``declaration`` is of registers for ``count`` such groups, ``load`` the statement that fills the group at
        ``at``, and ``element`` the one of row ``j`` in it.
        """
        name, kind = f"x{operand.index}", self.layout.across[operand.index]
        offset = _offset(operand)
        step = {"contiguous": " + j", "broadcast": ""}.get(kind, f" + j * {operand.outer_strides[-1]}")
        described = fields(operand)
        if operand.pointer is None:
            return described | {"declaration": "", "load": "", "element": f"from{operand.index}{offset}{step}"}
        count = f"[{count}]" if count else ""
        at = f"[{at}]" if at else ""
        start = f"from{operand.index}"
        if kind == "contiguous":
            declaration = f"jitgen::Vector<{operand.storage}, beside> {name}{count};"
            load = f"{name}{at} = jitgen::load_vector<beside>({start}{offset});"
        elif kind == "broadcast":
            return described | {
                "declaration": f"{operand.storage} {name}{count};",
                "load": f"{name}{at} = {start}[{offset.removeprefix(' + ') or '0'}];",
                "element": f"jitgen::load({name}{at})",
            }
        else:
            declaration = f"{operand.storage} {name}{count}[beside];"
            load = f"for (int j = 0; j < beside; ++j) {name}{at}[j] = {start}[{(offset + step).removeprefix(' + ')}];"
        return described | {"declaration": declaration, "load": load, "element": f"jitgen::load({name}{at}[j])"}

    def store(self, operand: RowOperand) -> dict[str, Any]:
        """Describes a result: the ``declaration`` of registers for the thread's rows, and the statement that stores
        them."""
        name, start, offset = f"y{operand.index}", f"to{operand.index}", _offset(operand)
        value = f"row_{operand.value}[j]" if operand.value in self.of_rows.names else operand.value
        described = fields(operand) | {"row_value": value}
        if self.layout.across[operand.index] == "contiguous":
            declaration = f"jitgen::Vector<{operand.storage}, beside> {name};"
            return described | {"declaration": declaration, "store": f"jitgen::store_vector({start}{offset}, {name});"}
        step = f" + j * {operand.outer_strides[-1]}"
        store = f"for (int j = 0; j < beside; ++j) {start}[{(offset + step).removeprefix(' + ')}] = {name}[j];"
        return described | {"declaration": f"{operand.storage} {name}[beside];", "store": store}


def _offset(operand: RowOperand) -> str:
    """Prints what leads from the start of its row to the element at ``column``."""
    return {"0": "", "1": " + column"}.get(operand.inner, f" + column * {operand.inner}")
