"""Rendering a scan kernel."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from jitgen.codegen.environment import Rendered
from jitgen.device import Device
from jitgen.families.scan.claim import NAME
from jitgen.families.scan.context import context
from jitgen.families.scan.layout import Layout
from jitgen.families.scan.schedule import Schedule
from jitgen.ir.program import Kernel
from jitgen.kernel.render import DIALECTS, source
from jitgen.spec import KernelSource


def render(
    kernel: Kernel, layouts: Sequence[Layout], schedule: Schedule, device: Device, compiler: str
) -> tuple[KernelSource, Rendered]:
    """The source of ``kernel``, and where each of its lines came from; see ``kernel/render.py``."""
    dialect, (layout,) = DIALECTS[device.dialect], layouts
    rows = context(kernel, layout, dialect)
    build = importlib.import_module(f"jitgen.families.scan.{device.dialect}").build
    specific, options = build(kernel, layout, schedule, rows, dialect)
    built = {"rows": rows, **specific}, options
    return source(NAME, kernel, schedule, device, compiler, [rows.title], built, device.overlaps_launches)
