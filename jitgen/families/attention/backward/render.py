"""Rendering a kernel of attention's backward."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from jitgen.codegen.environment import Rendered
from jitgen.device import Device
from jitgen.families.attention.backward.claim import NAME
from jitgen.families.attention.backward.context import context
from jitgen.families.attention.backward.layout import Layout
from jitgen.ir.program import Kernel
from jitgen.kernel.render import DIALECTS, source
from jitgen.spec import KernelSource


def render(
    kernel: Kernel, layouts: Sequence[Layout], schedule: Any, device: Device, compiler: str
) -> tuple[KernelSource, Rendered]:
    """The source of ``kernel``, and where each of its lines came from; see ``kernel/render.py``."""
    dialect, (layout,) = DIALECTS[device.dialect], layouts
    found = context(kernel, layout, dialect)
    build = importlib.import_module(f"jitgen.families.attention.backward.{device.dialect}").build
    built = build(kernel, layout, schedule, found, dialect)
    return source(NAME, kernel, schedule, device, compiler, [found.title], built, device.overlaps_launches)
