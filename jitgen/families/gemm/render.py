"""Rendering a matmul kernel."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from jitgen.codegen.environment import Rendered
from jitgen.device import Device
from jitgen.errors import UnsupportedError
from jitgen.families.gemm.context import context
from jitgen.families.gemm.layout import GemmLayout
from jitgen.families.gemm.mainloops import GemmSchedule
from jitgen.ir.program import Kernel
from jitgen.kernel.render import DIALECTS, source
from jitgen.spec import KernelSource


def render(
    kernel: Kernel, layouts: Sequence[GemmLayout], schedule: GemmSchedule, device: Device, compiler: str
) -> tuple[KernelSource, Rendered]:
    """The source of ``kernel``, and where each of its lines came from; see ``kernel/render.py``."""
    language = device.dialect
    splits = kernel.bodies[0].contractions[0].k_splits
    if splits > 1 and getattr(schedule, "k_splits", 1) != splits:
        raise UnsupportedError(
            f"{schedule} is no schedule of the {language} dialect: it splits no product over a temporary"
        )
    dialect = DIALECTS[language]
    products = context(kernel, layouts, dialect)
    build = importlib.import_module(f"jitgen.families.gemm.{language}").build
    specific, options = build(kernel, layouts, schedule, products, dialect)
    built = {"products": products, "warpgroups": device.target.has_warpgroup_products, **specific}, options
    titles = [region.title for region in products.regions]
    return source(
        "gemm",
        kernel,
        schedule,
        device,
        compiler,
        titles,
        built,
        device.overlaps_launches and schedule.dependent_launch,
    )
