"""A row kernel in words."""

from __future__ import annotations

from collections.abc import Sequence

from jitgen.device import Device
from jitgen.families.reduction.layout import RowLayout
from jitgen.families.reduction.online import online
from jitgen.families.reduction.residency import passes
from jitgen.families.reduction.schedule import RowSchedule
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
    if device.is_gpu:
        lines.append(str(schedule))
        if schedule.persistent:
            lines.append("the next row is copied to shared memory while one is reduced and stored")
        if schedule.staged:
            lines.append("row-invariant operands are copied to shared memory while the row is loaded")
    elif schedule.rows_per_block > 1:
        lines.append(f"{schedule.rows_per_block} neighbouring rows are walked together")
    lines.append(f"{operations} operations; operands {', '.join(layout.operands)}")
    return lines
