"""A scan kernel in words."""

from __future__ import annotations

from collections.abc import Sequence

from jitgen.device import Device
from jitgen.families.scan.layout import Layout
from jitgen.families.scan.schedule import Schedule
from jitgen.ir.ops import OPS
from jitgen.ir.program import Kernel


def explain(kernel: Kernel, layouts: Sequence[Layout], schedule: Schedule, device: Device) -> list[str]:
    """A title, and how a row is walked."""
    (layout,), (body,) = layouts, kernel.bodies
    kinds = [instruction.attr for instruction in body.instructions if instruction.op == "scan"]
    operations = sum(instruction.op in OPS for instruction in body.instructions)
    lines = [f"scan by {', '.join(kinds)} along a row, which is read once"]
    if body.chunks > 1:
        again = "" if body.stores and not all(body.operands[index].row for index in body.stores) else "; totals only"
        lines.append(f"a row is cut into {body.chunks} chunks, each walked by a block of its own{again}")
    if device.dialect == "cuda":
        rows = f" of each of {schedule.rows_per_thread} rows" if schedule.rows_per_thread > 1 else ""
        lines.append(f"a block of {schedule.threads} threads takes {schedule.rows} rows at once")
        lines.append(f"a thread takes {schedule.items} consecutive elements{rows}, {schedule.along} threads a row")
    elif device.is_gpu:
        lines.append(f"a program takes {schedule.rows} rows at once, {schedule.items} elements of each")
    elif schedule.rows > 1:
        lines.append(f"{schedule.rows} neighbouring rows are walked together")
    else:
        lines.append("a thread walks a row by itself; where rows are fewer than threads, they share each row")
    lines.append(f"{operations} operations; operands {', '.join(layout.along)}")
    return lines
