"""Rendering a pointwise kernel."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from jitgen.codegen.environment import Rendered
from jitgen.families.elementwise import context
from jitgen.families.elementwise.schedule import Schedule
from jitgen.families.layout import Layout
from jitgen.families.render import DIALECTS, source
from jitgen.ir.program import Kernel
from jitgen.spec import KernelSource, Target


def render(
    kernel: Kernel, layouts: Sequence[Layout], schedule: Schedule, language: str, compiler: str, target: Target
) -> tuple[KernelSource, Rendered]:
    """The source of ``kernel`` in ``language``, and where each of its lines came from; see ``families/render.py``."""
    dialect = DIALECTS[language]
    regions = context.regions(kernel, layouts, schedule, dialect)
    names = context.integers(kernel, layouts, tiled=language != "cpp")
    build = importlib.import_module(f"jitgen.families.elementwise.{language}").build
    built = build(kernel, schedule, regions, names, dialect)
    return source("elementwise", kernel, schedule, language, compiler, target, (), built)
