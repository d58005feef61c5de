"""An attention kernel in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jitgen.device import Device
from jitgen.families.attention.bounds import masks_of
from jitgen.families.attention.layout import Layout
from jitgen.ir.ops import OPS
from jitgen.ir.program import Kernel


def explain(kernel: Kernel, layouts: Sequence[Layout], schedule: Any, device: Device) -> list[str]:
    """A title, the rule of scores, and how tiles are walked."""
    (layout,), (body,) = layouts, kernel.bodies
    rule = body.contractions[1].x
    operations = [instruction.op for instruction in rule if instruction.op in OPS]
    masks = len(masks_of(rule))
    lines = ["attention, the keys of a row walked once; scores and weights stay in the kernel", str(schedule)]
    lines.append(f"scores by {', '.join(dict.fromkeys(operations)) or 'the product alone'}")
    if masks:
        lines.append(
            f"{masks} mask{'s' * (masks > 1)}: a tile hidden as a whole is skipped, an open one has no mask code"
        )
    if layout.packed:
        lines.append("heads that share keys are rows of one tile")
    return lines
