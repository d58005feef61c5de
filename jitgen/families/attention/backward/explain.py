"""Explains a kernel of attention's backward in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jitgen.device import Device
from jitgen.families.attention.backward.layout import Layout
from jitgen.families.attention.rule.bounds import masks_of
from jitgen.families.attention.rule.explain import told, words_of
from jitgen.families.attention.rule.layout import results_of
from jitgen.ir.program import Kernel
from jitgen.kernel.explain import operations_in


def explain(kernel: Kernel, layouts: Sequence[Layout], schedule: Any, device: Device) -> list[str]:
    """Explains the kernel: a title, what is computed over a tile, and how tiles are walked."""
    (layout,), (body,) = layouts, kernel.bodies
    results = results_of(body)
    tiles = len(body.contractions) - len(results)
    operations = [op for number in results for op in operations_in(body.contractions[number].x)]
    count = f"{len(results)} products" if len(results) > 1 else "a product"
    lines = [f"{count} with a function of {tiles} products, which are computed again a tile at a time", str(schedule)]
    lines.append(f"a tile by {', '.join(dict.fromkeys(operations))}")
    for rule in (body.contractions[number].x for number in results):
        if masks_of(rule):
            lines.append(words_of(rule, told(rule, body, layout.operands, device.dialect, forward=False)))
            break
    if layout.groups:
        lines.append("heads that share keys are added up in their order")
    return lines
