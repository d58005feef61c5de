"""Rendering a pointwise kernel."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from jitgen.codegen.environment import Rendered
from jitgen.device import Device
from jitgen.families.elementwise import context
from jitgen.families.elementwise.layout import Layout
from jitgen.families.elementwise.schedule import Schedule
from jitgen.ir.program import Kernel
from jitgen.kernel.render import DIALECTS, source
from jitgen.spec import KernelSource


def render(
    kernel: Kernel, layouts: Sequence[Layout], schedule: Schedule, device: Device, compiler: str
) -> tuple[KernelSource, Rendered]:
    """The source of ``kernel``, and where each of its lines came from; see ``kernel/render.py``."""
    dialect = DIALECTS[device.dialect]
    regions = context.regions(kernel, layouts, schedule, dialect)
    names = context.integers(kernel, layouts, tiled=device.is_gpu)
    build = importlib.import_module(f"jitgen.families.elementwise.{device.dialect}").build
    built = build(kernel, schedule, regions, names, dialect)
    return source("elementwise", kernel, schedule, device, compiler, (), built, device.overlaps_launches)
