"""A row kernel in words."""

from __future__ import annotations

from collections.abc import Sequence

from jitgen.families.reduction.layout import RowLayout
from jitgen.families.reduction.online import online
from jitgen.families.reduction.residency import passes
from jitgen.families.reduction.schedule import RowSchedule
from jitgen.ir.ops import OPS
from jitgen.ir.program import Kernel


def explain(kernel: Kernel, layouts: Sequence[RowLayout], schedule: RowSchedule, tiled: bool) -> list[str]:
    """A title, and how a row is walked."""
    (layout,) = layouts
    if schedule.online:
        kernel = online(kernel)
    (body,) = kernel.bodies
    kinds = [instruction.attr for instruction in body.instructions if instruction.op == "reduce"]
    count = passes(kernel)
    operations = sum(instruction.op in OPS for instruction in body.instructions)
    lines = [f"row reduction by {', '.join(kinds)} in {count} pass{'es' * (count != 1)} over a row"]
    if tiled:
        kept = "kept in registers, read once" if schedule.kept else "read by every pass"
        beside = f"{schedule.beside} of them side by side in a thread" if layout.columns else f"{schedule.vector} wide"
        threads, blocks = _counted(schedule.threads, "thread"), _counted(schedule.cluster, "block")
        lines.append(f"a row is {kept}: {threads} in {blocks}, {_counted(schedule.rows, 'row')} in a block, {beside}")
        if schedule.persistent:
            lines.append("blocks stay and take row after row: the next is copied to shared memory meanwhile")
        if schedule.staged:
            lines.append("what all rows read is copied to shared memory while the row comes")
    elif schedule.rows > 1:
        lines.append(f"{schedule.rows} neighbouring rows are walked together")
    lines.append(f"{operations} operations; operands {', '.join(layout.operands)}")
    return lines


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
