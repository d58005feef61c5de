"""What ``templates/cuda/reduction_columns.j2`` reads beside ``cuda.py``'s context: a thread walks several rows at once.

Values of elements are scalars, as where rows' own elements are neighbours; a value that every row has of its own is an
array with an element for each row of the thread, ``row_<value>``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from jitgen.codegen.printing import fields
from jitgen.families.reduction.context import RowContext, RowOperand, RowValues
from jitgen.families.reduction.cuda_walk import Walk, Walks
from jitgen.families.reduction.layout import RowLayout
from jitgen.families.reduction.schedule import RowSchedule
from jitgen.ir.body import Instruction
from jitgen.ir.program import Kernel


def context(kernel: Kernel, layout: RowLayout, schedule: RowSchedule, rows: RowContext, walks: Walks) -> dict[str, Any]:
    columns = _Columns(kernel, layout, schedule, rows)
    kept = {operand.value for operand in walks.kept_loads}
    return {
        "uniform": columns.uniform,
        "row_values": columns.row_values,
        "row_loads": [columns.load(operand, "", "") for operand in rows.row_loads],
        "kept_operands": [columns.load(operand, "unroll", "u") for operand in walks.kept_loads],
        "passes": [columns.walk(walk, kept) for walk in walks.passes],
        "after": columns.of_rows.block(rows.after),
        "row_stores": [columns.store(operand) for operand in rows.row_stores],
    }


class _Columns:
    """Builds the parts of the context in which rows of one thread differ."""

    def __init__(self, kernel: Kernel, layout: RowLayout, schedule: RowSchedule, rows: RowContext):
        (body,) = kernel.bodies
        self.instructions: Sequence[Instruction] = body.instructions
        self.layout, self.kept = layout, schedule.kept
        every = [*(line for p in rows.passes for line in p.before), *rows.after]
        own = self._own()
        self.uniform = [line for line in every if line.position not in own]
        """Lines of values that all rows share."""
        self.row_values = [(o.type, o.value) for o in rows.row_loads]
        self.row_values += [(line.type, line.value) for line in every if line.position in own]
        self.row_values += [(r.type, r.result) for p in rows.passes for r in p.reductions]
        """(type, name) of the values of which each row has its own."""
        self.of_rows = RowValues(self.instructions, self.row_values)

    def _own(self) -> set[int]:
        """Positions of the row values that depend on the row."""
        found: set[int] = set()
        for position, instruction in enumerate(self.instructions):
            if instruction.row and (
                instruction.op in ("load", "iota", "reduce") or found.intersection(instruction.args)
            ):
                found.add(position)
        return found

    def walk(self, walk: Walk, kept: Collection[str]) -> dict[str, Any]:
        fetched = [*walk.fetched, *walk.late]
        positions = [line.position for line in walk.lines]
        results = {r["value"] for r in walk.reductions} | {o.value for o in walk.source.stores}
        return {
            "number": walk.source.number,
            "before": self.of_rows.block(walk.source.before),
            "arrays": [self.load(o, "unroll", "u") for o in fetched if o.value not in kept],
            "fetched": [self.load(o, "unroll", "u") for o in fetched],
            "inputs": self.of_rows.read(positions, results),
            "loads": [self.load(o, "unroll", "u") for o in walk.needed],
            "restored": walk.restored,
            "saved": walk.saved,
            "lines": walk.lines,
            "reductions": [r | {"step": self._step(r, walk)} for r in walk.reductions],
            # Whether all that a thread holds of a row may join a state at once.
            "grouped": any(r["streamed"] for r in walk.reductions) and not walk.source.stores,
            "stores": [self.store(o) for o in walk.source.stores],
        }

    def _step(self, r: dict[str, Any], walk: Walk) -> str:
        """A state with the element at ``j`` in it. Every second pass goes back, where rows are not kept."""
        back = r["indexed"] and walk.source.number % 2 == 1 and not self.kept
        step: str = r["unordered" if back else "step"]
        return step.format(part=f"part_{r['result']}[j]")

    def load(self, operand: RowOperand, count: str, at: str) -> dict[str, Any]:
        """An operand's elements in registers, ``count`` times those of a thread's rows.

        ``array`` declares them, ``fetch`` fills those at ``at``, of which ``element`` is the one at ``j``.
        """
        name, beside = f"x{operand.index}", self.layout.beside[operand.index]
        place = _place(operand)
        step = {"contiguous": " + j", "broadcast": ""}.get(beside, f" + j * {operand.strides[-1]}")
        found = fields(operand)
        if operand.pointer is None:
            return found | {"array": "", "fetch": "", "element": f"from{operand.index}{place}{step}"}
        count = f"[{count}]" if count else ""
        at = f"[{at}]" if at else ""
        start = f"from{operand.index}"
        if beside == "contiguous":
            array = f"jitgen::Vector<{operand.storage}, beside> {name}{count};"
            fetch = f"{name}{at} = jitgen::load_vector<beside>({start}{place});"
        elif beside == "broadcast":
            return found | {
                "array": f"{operand.storage} {name}{count};",
                "fetch": f"{name}{at} = {start}[{place.removeprefix(' + ') or '0'}];",
                "element": f"jitgen::load({name}{at})",
            }
        else:
            array = f"{operand.storage} {name}{count}[beside];"
            fetch = f"for (int j = 0; j < beside; ++j) {name}{at}[j] = {start}[{(place + step).removeprefix(' + ')}];"
        return found | {"array": array, "fetch": fetch, "element": f"jitgen::load({name}{at}[j])"}

    def store(self, operand: RowOperand) -> dict[str, Any]:
        """A result: ``array`` of a thread's rows' elements, and how it is ``put`` into memory."""
        name, start, place = f"y{operand.index}", f"to{operand.index}", _place(operand)
        value = f"row_{operand.value}[j]" if operand.value in self.of_rows.names else operand.value
        found = fields(operand) | {"row_value": value}
        if self.layout.beside[operand.index] == "contiguous":
            array = f"jitgen::Vector<{operand.storage}, beside> {name};"
            return found | {"array": array, "put": f"jitgen::store_vector({start}{place}, {name});"}
        step = f" + j * {operand.strides[-1]}"
        put = f"for (int j = 0; j < beside; ++j) {start}[{(place + step).removeprefix(' + ')}] = {name}[j];"
        return found | {"array": f"{operand.storage} {name}[beside];", "put": put}


def _place(operand: RowOperand) -> str:
    """Behind where its row begins, of the element at ``column``."""
    return {"0": "", "1": " + column"}.get(operand.inner, f" + column * {operand.inner}")
