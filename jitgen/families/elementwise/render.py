"""Rendering a pointwise kernel: one context per dialect, one template each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jitgen._version import __version__
from jitgen.codegen import environment
from jitgen.codegen.cpp import CPP
from jitgen.codegen.cuda import CUDA
from jitgen.codegen.dialect import Dialect
from jitgen.codegen.environment import Rendered, entry_name
from jitgen.codegen.triton import TRITON
from jitgen.families.elementwise import context, cpp, cuda, triton
from jitgen.families.elementwise.context import Built
from jitgen.families.elementwise.schedule import Schedule
from jitgen.families.layout import Layout
from jitgen.ir.program import Kernel
from jitgen.spec import KernelSource, Target, e4m3fn_saturates

TEMPLATES = {"cpp": "elementwise.cpp.j2", "cuda": "elementwise.cu.j2", "triton": "elementwise.py.j2"}


def render(
    kernel: Kernel,
    layouts: Sequence[Layout],
    schedule: Schedule,
    language: str,
    compiler: str,
    target: Target,
) -> tuple[KernelSource, Rendered]:
    """The source of ``kernel`` in ``language``, and where each of its lines came from."""
    dialect, build = _DIALECTS[language]
    regions = context.regions(kernel, layouts, schedule, dialect)
    names = context.integers(kernel, layouts, tiled=language != "cpp")
    entry = entry_name(kernel.name)
    shared = {
        "banner": f"jitgen {__version__}: {kernel.name}, template {language}/{TEMPLATES[language]}",
        "notes": [f"target {target}, {schedule}"],
        "headers": dialect.headers,
        "float8": _uses_float8(kernel),
        "saturates": "1" if e4m3fn_saturates() else "0",
        "entry": entry,
        "regions": regions,
        "schedule": schedule,
        "overlapping": schedule.pdl and target.overlaps_launches,
    }
    specific, options = build(kernel, schedule, regions, names, dialect)
    return environment.kernel_source(entry, language, TEMPLATES[language], compiler, target, shared | specific, options)


def _uses_float8(kernel: Kernel) -> bool:
    """Whether ``kernel`` loads, stores or rounds to an 8-bit float."""
    dtypes = [operand.dtype for body in kernel.bodies for operand in body.operands]
    dtypes += [i.attr for body in kernel.bodies for i in body.instructions if i.op == "round_to"]
    return any(dtype.startswith("float8") for dtype in dtypes)


_DIALECTS: dict[str, tuple[Dialect, Callable[..., Built]]] = {
    "cpp": (CPP, cpp.build),
    "cuda": (CUDA, cuda.build),
    "triton": (TRITON, triton.build),
}
