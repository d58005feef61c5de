"""Rendering a matmul kernel: one context per dialect, one template each."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from jitgen._version import __version__
from jitgen.codegen import environment
from jitgen.codegen.cpp import CPP
from jitgen.codegen.cuda import CUDA
from jitgen.codegen.dialect import Dialect
from jitgen.codegen.environment import Rendered, entry_name
from jitgen.codegen.triton import TRITON
from jitgen.errors import UnsupportedError
from jitgen.families.gemm.context import context
from jitgen.families.gemm.layout import GemmLayout
from jitgen.families.gemm.schedule import GemmSchedule
from jitgen.ir.program import Kernel
from jitgen.spec import KernelSource, Target, e4m3fn_saturates

_DIALECTS: dict[str, tuple[Dialect, str]] = {
    "cpp": (CPP, "gemm.cpp.j2"),
    "cuda": (CUDA, "gemm.cu.j2"),
    "triton": (TRITON, "gemm.py.j2"),
}


def render(
    kernel: Kernel, layouts: Sequence[GemmLayout], schedule: GemmSchedule, language: str, compiler: str, target: Target
) -> tuple[KernelSource, Rendered]:
    """The source of ``kernel`` in ``language``, and where each of its lines came from.

    A dialect's ``build(kernel, layouts, schedule, products, dialect)`` gives its template's context and the options of
    the ``KernelSource``.
    """
    dialect, template = _DIALECTS[language]
    if schedule.parts > 1 and language != "triton":
        raise UnsupportedError(
            f"{schedule} is no schedule of the {language} dialect: it splits no product over a temporary"
        )
    products = context(kernel, layouts, dialect)
    entry = entry_name(kernel.name)
    dtypes = [operand.dtype for body in kernel.bodies for operand in body.operands]
    shared: dict[str, Any] = {
        "banner": f"jitgen {__version__}: {kernel.name}, template {language}/{template}",
        "notes": [f"target {target}, {schedule}", *(region.title for region in products.regions)],
        "headers": dialect.headers,
        "float8": any(dtype.startswith("float8") for dtype in dtypes),
        "saturates": "1" if e4m3fn_saturates() else "0",
        "entry": entry,
        "products": products,
        "schedule": schedule,
        "overlapping": schedule.pdl and target.overlaps_launches,
        "warpgroups": target.has_warpgroup_products,
    }
    build = importlib.import_module(f"jitgen.families.gemm.{language}").build
    specific, options = build(kernel, layouts, schedule, products, dialect)
    return environment.kernel_source(entry, language, template, compiler, target, shared | specific, options)
