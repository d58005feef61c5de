"""Rendering a row kernel."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from jitgen.codegen.environment import Rendered
from jitgen.families.reduction.context import context
from jitgen.families.reduction.layout import RowLayout
from jitgen.families.reduction.online import online, with_means
from jitgen.families.reduction.powers import in_powers_of_two
from jitgen.families.reduction.schedule import RowSchedule
from jitgen.families.render import DIALECTS, source
from jitgen.ir.program import Kernel
from jitgen.spec import KernelSource, Target


def render(
    kernel: Kernel, layouts: Sequence[RowLayout], schedule: RowSchedule, language: str, compiler: str, target: Target
) -> tuple[KernelSource, Rendered]:
    """The source of ``kernel`` in ``language``, and where each of its lines came from; see ``families/render.py``."""
    dialect, (layout,) = DIALECTS[language], layouts
    if schedule.online:
        kernel = online(kernel)
        if language == "cuda" and schedule.kept and not layout.columns:
            kernel = with_means(kernel)
    if target.kind != "cpu":
        # On an H200 softmax of CUDA rows of 100, 16384 and 32768 is 1 to 2 % slower for the registers that this takes.
        direct = language != "cuda" or (schedule.cluster > 1 and schedule.beside == 1)
        kernel = in_powers_of_two(kernel, direct)
    rows = context(kernel, layout, dialect)
    build = importlib.import_module(f"jitgen.families.reduction.{language}").build
    specific, options = build(kernel, layout, schedule, rows, dialect)
    built = {"rows": rows, **specific}, options
    return source("reduction", kernel, schedule, language, compiler, target, [rows.title], built)
