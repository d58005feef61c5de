"""The frame of every family's render: which dialect and template, and what every template reads."""

from __future__ import annotations

import importlib
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from jitgen._version import __version__
from jitgen.codegen import environment
from jitgen.codegen.cpp import CPP
from jitgen.codegen.cuda import CUDA
from jitgen.codegen.dialect import Dialect
from jitgen.codegen.environment import Rendered
from jitgen.codegen.printing import Built
from jitgen.codegen.text import entry_name
from jitgen.codegen.triton import TRITON
from jitgen.device import Device
from jitgen.ir.program import Kernel
from jitgen.spec import KernelSource, e4m3fn_saturates

DIALECTS: dict[str, Dialect] = {"cpp": CPP, "cuda": CUDA, "triton": TRITON}
BANNER_WIDTH = 196
"""Characters of a line in the head of a source, without the comment sign."""


class Titled(Protocol):
    """A context of templates says in ``title`` what the head of a source has about its kernel."""

    @property
    def title(self) -> str: ...


def renderer(
    family: str, package: str, context: Callable[[Kernel, Any, Dialect], Titled], name: str = ""
) -> Callable[[Kernel, Sequence[Any], Any, Device, str], tuple[KernelSource, Rendered]]:
    """The ``render`` of a family whose kernels have one body: ``context`` is made of it for all dialects, and what a
    dialect adds by ``build(kernel, layout, schedule, context, dialect)`` of ``<package>.<dialect>``.

    Args:
        name: by which templates read the context itself; empty where they read only what ``build`` makes of it.
    """

    def render(
        kernel: Kernel, layouts: Sequence[Any], schedule: Any, device: Device, compiler: str
    ) -> tuple[KernelSource, Rendered]:
        dialect, (layout,) = DIALECTS[device.dialect], layouts
        shared = context(kernel, layout, dialect)
        build = importlib.import_module(f"{package}.{device.dialect}").build
        specific, options = build(kernel, layout, schedule, shared, dialect)
        built = {name: shared, **specific} if name else specific, options
        return source(family, kernel, schedule, device, compiler, [shared.title], built, device.overlaps_launches)

    return render


def source(
    family: str,
    kernel: Kernel,
    schedule: Any,
    device: Device,
    compiler: str,
    titles: Sequence[str],
    built: Built,
    overlapping: bool,
    folder: Path | None = None,
) -> tuple[KernelSource, Rendered]:
    """The source of ``kernel`` in the device's dialect, and where each of its lines came from.

    Args:
        titles: what the head of the source says in words after target, schedule and stages.
        built: what the family has for its template, and the options of the source.
        folder: of the family's templates; by default ``templates/<family>`` of jitgen's own.
        overlapping: whether the kernel may begin before the one ahead of it has ended, and waits for it itself.
    """
    language, target = device.dialect, device.target
    dialect, entry = DIALECTS[language], entry_name(kernel.name)
    folder = folder or environment.family_folder(family)
    template = f"{family}{dialect.suffix}.j2"
    shared = {
        "banner": f"jitgen {__version__}: {kernel.name}, template {folder.name}/{template}",
        "notes": _wrapped([f"target {target}: {schedule}", *kernel.described_stages, *titles]),
        "headers": dialect.headers,
        "float8": _uses_float8(kernel),
        "saturates": "1" if e4m3fn_saturates() else "0",
        "entry": entry,
        "schedule": schedule,
        "overlapping": overlapping,
    }
    specific, options = built
    if device.bounded_waits:
        options = options | {"flags": [*options.get("flags", ()), f'-DJITGEN_BOUNDED_WAITS="{entry}"']}
    return environment.kernel_source(entry, language, folder, template, compiler, target, shared | specific, options)


def _wrapped(notes: Sequence[str]) -> list[str]:
    """``notes`` as lines of at most ``BANNER_WIDTH`` characters."""
    wrap = textwrap.TextWrapper(BANNER_WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return [line for note in notes for line in wrap.wrap(note)]


def _uses_float8(kernel: Kernel) -> bool:
    """Whether ``kernel`` loads, stores or rounds to an 8-bit float."""
    dtypes = [operand.dtype for body in kernel.bodies for operand in body.operands]
    dtypes += [i.attr for body in kernel.bodies for i in body.instructions if i.op == "round_to"]
    return any(dtype.startswith("float8") for dtype in dtypes)
