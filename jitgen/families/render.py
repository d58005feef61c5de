"""The frame of every family's render: which dialect and template, and what every template reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jitgen._version import __version__
from jitgen.codegen import environment
from jitgen.codegen.cpp import CPP
from jitgen.codegen.cuda import CUDA
from jitgen.codegen.dialect import Dialect
from jitgen.codegen.environment import Rendered, entry_name
from jitgen.codegen.printing import Built
from jitgen.codegen.triton import TRITON
from jitgen.ir.program import Kernel
from jitgen.spec import KernelSource, Target, e4m3fn_saturates

DIALECTS: dict[str, Dialect] = {"cpp": CPP, "cuda": CUDA, "triton": TRITON}


def source(
    family: str,
    kernel: Kernel,
    schedule: Any,
    language: str,
    compiler: str,
    target: Target,
    titles: Sequence[str],
    built: Built,
) -> tuple[KernelSource, Rendered]:
    """The source of ``kernel`` in ``language``, and where each of its lines came from.

    Args:
        titles: what the head of the source says beside target and schedule, in words.
        built: what the family has for its template, and the options of the source.
    """
    dialect, entry = DIALECTS[language], entry_name(kernel.name)
    template = f"{family}{dialect.suffix}.j2"
    shared = {
        "banner": f"jitgen {__version__}: {kernel.name}, template {language}/{template}",
        "notes": [f"target {target}, {schedule}", *titles],
        "headers": dialect.headers,
        "float8": _uses_float8(kernel),
        "saturates": "1" if e4m3fn_saturates() else "0",
        "entry": entry,
        "schedule": schedule,
        "overlapping": getattr(schedule, "pdl", False) and target.overlaps_launches,
    }
    specific, options = built
    return environment.kernel_source(entry, language, template, compiler, target, shared | specific, options)


def _uses_float8(kernel: Kernel) -> bool:
    """Whether ``kernel`` loads, stores or rounds to an 8-bit float."""
    dtypes = [operand.dtype for body in kernel.bodies for operand in body.operands]
    dtypes += [i.attr for body in kernel.bodies for i in body.instructions if i.op == "round_to"]
    return any(dtype.startswith("float8") for dtype in dtypes)
