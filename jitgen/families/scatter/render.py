"""Rendering a scatter kernel."""

from __future__ import annotations

from collections.abc import Sequence

from jitgen.codegen.environment import Rendered
from jitgen.device import Device
from jitgen.families.scatter.claim import NAME
from jitgen.families.scatter.context import build
from jitgen.families.scatter.layout import Layout
from jitgen.families.scatter.schedule import Schedule
from jitgen.ir.program import Kernel
from jitgen.kernel.render import DIALECTS, source
from jitgen.spec import KernelSource


def render(
    kernel: Kernel, layouts: Sequence[Layout], schedule: Schedule, device: Device, compiler: str
) -> tuple[KernelSource, Rendered]:
    """The source of ``kernel``, and where each of its lines came from; see ``kernel/render.py``."""
    dialect, (layout,) = DIALECTS[device.dialect], layouts
    title, built = build(kernel, layout, schedule, dialect)
    return source(NAME, kernel, schedule, device, compiler, [title], built, device.overlaps_launches)
