"""A pointwise kernel in words."""

from __future__ import annotations

from collections.abc import Sequence

from jitgen.device import Device
from jitgen.families.elementwise.layout import Layout
from jitgen.families.elementwise.schedule import Schedule
from jitgen.ir.ops import OPS
from jitgen.ir.program import Kernel


def explain(kernel: Kernel, layouts: Sequence[Layout], schedule: Schedule, device: Device) -> list[str]:
    """A title, and a line for each region."""
    count = len(kernel.bodies)
    lines = [f"pointwise, {count} region{'s' * (count != 1)} in one pass"]
    for region, (body, layout) in enumerate(zip(kernel.bodies, layouts, strict=True)):
        operations = sum(instruction.op in OPS for instruction in body.instructions)
        width = f"{schedule.vectors[region]} wide" if device.is_gpu else "vectorised by the compiler"
        chosen = any(body.operands[index].gathered for index in body.stores)
        lines.append(
            f"region {region}: {operations} operations over {layout.rank} collapsed dimension"
            f"{'s' * (layout.rank > 1)}, {width}; operands {', '.join(layout.operands)}"
            f"{'; stored in place, where indices choose' if chosen else ''}"
        )
    return lines
