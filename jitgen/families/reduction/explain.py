"""A row kernel in words."""

from __future__ import annotations

from collections.abc import Sequence

from jitgen.device import Device
from jitgen.families.reduction.forms import HostRows, PersistentRows, ResidentRows, RowSchedule
from jitgen.families.reduction.layout import RowLayout
from jitgen.families.reduction.online import online
from jitgen.families.reduction.residency import passes
from jitgen.ir.ops import OPS
from jitgen.ir.program import Kernel


def explain(kernel: Kernel, layouts: Sequence[RowLayout], schedule: RowSchedule, device: Device) -> list[str]:
    """A title, and lines that say how the kernel deals its rows out."""
    (layout,) = layouts
    if schedule.online:
        kernel = online(kernel)
    (body,) = kernel.bodies
    kinds = [instruction.attr for instruction in body.instructions if instruction.op == "reduce"]
    count = passes(kernel)
    operations = sum(instruction.op in OPS for instruction in body.instructions)
    lines = [f"row reduction by {', '.join(kinds)} in {count} pass{'es' * (count != 1)} over a row"]
    if not isinstance(schedule, HostRows):
        lines.append(str(schedule))
        if isinstance(schedule, PersistentRows):
            lines.append("the next row is copied to shared memory while one is reduced and stored")
        if isinstance(schedule, ResidentRows) and schedule.staged:
            lines.append("row-invariant operands are copied to shared memory while the row is loaded")
    elif schedule.tile_rows > 1:
        lines.append(f"{schedule.tile_rows} neighbouring rows are walked together")
    lines.append(f"{operations} operations; operands {', '.join(layout.operands)}")
    return lines
