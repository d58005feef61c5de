"""Rendering a row kernel: one context per dialect, one template each."""

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
from jitgen.families.reduction.context import context
from jitgen.families.reduction.layout import RowLayout
from jitgen.families.reduction.schedule import RowSchedule
from jitgen.ir.program import Kernel
from jitgen.spec import KernelSource, Target, e4m3fn_saturates

_DIALECTS: dict[str, tuple[Dialect, str]] = {
    "cpp": (CPP, "reduction.cpp.j2"),
    "cuda": (CUDA, "reduction.cu.j2"),
    "triton": (TRITON, "reduction.py.j2"),
}


def render(
    kernel: Kernel, layouts: Sequence[RowLayout], schedule: RowSchedule, language: str, compiler: str, target: Target
) -> tuple[KernelSource, Rendered]:
    """The source of ``kernel`` in ``language``, and where each of its lines came from."""
    dialect, template = _DIALECTS[language]
    (layout,) = layouts
    rows = context(kernel, layout, dialect)
    entry = entry_name(kernel.name)
    shared: dict[str, Any] = {
        "banner": f"jitgen {__version__}: {kernel.name}, template {language}/{template}",
        "notes": [f"target {target}, {schedule}", rows.title],
        "headers": dialect.headers,
        "float8": any(operand.dtype.startswith("float8") for operand in rows.operands),
        "saturates": "1" if e4m3fn_saturates() else "0",
        "entry": entry,
        "rows": rows,
        "schedule": schedule,
    }
    build = importlib.import_module(f"jitgen.families.reduction.{language}").build
    specific, options = build(kernel, layout, schedule, rows, dialect)
    return environment.kernel_source(entry, language, template, compiler, target, shared | specific, options)
