"""A scatter kernel in words."""

from __future__ import annotations

from collections.abc import Sequence

from jitgen.device import Device
from jitgen.families.scatter.layout import Layout
from jitgen.families.scatter.schedule import Schedule
from jitgen.ir.ops import OPS
from jitgen.ir.program import Kernel


def explain(kernel: Kernel, layouts: Sequence[Layout], schedule: Schedule, device: Device) -> list[str]:
    """A title, and who goes through the values."""
    (layout,), (body,) = layouts, kernel.bodies
    kinds = [instruction.attr[1] for instruction in body.instructions if instruction.op == "scatter"]
    operations = sum(instruction.op in OPS for instruction in body.instructions)
    return [
        f"scatter by {', '.join(kinds)}, into memory that holds the base",
        f"values that may choose one element are taken in their order by one thread; {layout.walked} dimension"
        f"{'s' * (layout.walked > 1)} of them, within {layout.outer + layout.inner} that threads share",
        f"{operations} operations",
    ]
