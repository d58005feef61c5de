"""Frames every family's render: which dialect and template, and what every template reads."""

from __future__ import annotations

import importlib
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jitgen._version import __version__
from jitgen.codegen import environment
from jitgen.codegen.cpp import CPP
from jitgen.codegen.cuda import CUDA
from jitgen.codegen.dialect import Dialect
from jitgen.codegen.environment import ENTRY_MARK, Rendered
from jitgen.codegen.printing import Built
from jitgen.codegen.triton import TRITON
from jitgen.device import Device
from jitgen.ir.program import Kernel
from jitgen.kernel.parameters import KernelParameters
from jitgen.kernel.printed import KernelContext
from jitgen.kernel.printed_entry import IN_CUDA, ON_CPU, params_of
from jitgen.spec import KernelSource, e4m3fn_saturates

DIALECTS: dict[str, Dialect] = {"cpp": CPP, "cuda": CUDA, "triton": TRITON}
BANNER_WIDTH = 196
"""Characters of a line in the head of a source, without the comment sign."""


def _as_it_is(kernel: Kernel, layout: Any, schedule: Any, device: Device) -> Kernel:
    return kernel


def renderer(
    family: str,
    package: str,
    parameters: Callable[[Kernel, Sequence[Any], Device], KernelParameters],
    context: Callable[[Kernel, Any, KernelParameters, Any, Dialect], KernelContext],
    name: str = "",
    several: bool = False,
    rewritten: Callable[[Kernel, Any, Any, Device], Kernel] = _as_it_is,
    build: Callable[[Kernel, Any, Any, Any, Dialect], Built] | None = None,
) -> Callable[[Kernel, Sequence[Any], Any, Device, str], tuple[KernelSource, Rendered]]:
    """Makes the ``render`` of a family. ``context(kernel, layout, parameters, schedule, dialect)`` is what all dialects
    read; what one of them adds, ``build(kernel, layout, schedule, context, dialect)`` of ``<package>.<dialect>`` makes
    of it.

    Args:
        parameters: that of the family.
        name: by which templates read the context itself; empty where they read only what ``build`` makes of it.
        several: whether kernels may have several bodies, so that ``layout`` is a sequence of layouts.
        rewritten: ``(kernel, layout, schedule, device)``: the kernel whose instructions are printed.
        build: one for all dialects, in place of those in ``package``.
    """

    def render(
        kernel: Kernel, layouts: Sequence[Any], schedule: Any, device: Device, compiler: str
    ) -> tuple[KernelSource, Rendered]:
        dialect, layout = DIALECTS[device.dialect], layouts if several else layouts[0]
        kernel = rewritten(kernel, layout, schedule, device)
        declared, params = parameters(kernel, layouts, device), None
        if dialect is not TRITON:
            params = params_of(kernel, declared, dialect, IN_CUDA if dialect is CUDA else ON_CPU)
            declared = declared.renamed(params.spelled)
        shared = context(kernel, layout, declared, schedule, dialect)
        of_dialect = build or importlib.import_module(f"{package}.{device.dialect}").build
        specific, options = of_dialect(kernel, layout, schedule, shared, dialect)
        if params is not None and dialect is CPP:
            specific = {**specific, "params": params.packed}
        elif params is not None:
            specific = {**specific, "params": params.printed(declared.wide, specific.get("map_names", ()))}
        built = {name: shared, **specific} if name else specific, options
        overlapping = device.overlaps_launches and getattr(schedule, "dependent_launch", True)
        return source(family, kernel, schedule, device, compiler, shared.titles, built, overlapping)

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
    own: tuple[tuple[tuple[str, str], ...], tuple[str, ...]] = ((), ()),
) -> tuple[KernelSource, Rendered]:
    """Renders the source of ``kernel`` in the device's dialect; returns also where each of its lines came from.

    Args:
        titles: what the head of the source says in words after target, schedule and stages.
        built: what the family has for its template, and the options of the source.
        folder: of the family's templates; by default ``templates/<family>`` of jitgen's own.
        overlapping: whether the kernel may begin before the one ahead of it has ended, and waits for it itself.
        own: see ``environment.kernel_source``.
    """
    language, target = device.dialect, device.target
    dialect = DIALECTS[language]
    folder = folder or environment.family_folder(family)
    template = f"{getattr(schedule, 'template', family)}{dialect.suffix}.j2"
    shared = {
        "banner": f"jitgen {__version__}: template {folder.name}/{template}",
        "notes": _wrapped([f"target {target}: {schedule}", *kernel.described_stages, *titles]),
        "headers": dialect.headers,
        "float8": _uses_float8(kernel),
        "saturates": "1" if e4m3fn_saturates() else "0",
        "entry": ENTRY_MARK,
        "schedule": schedule,
        "target": target,
        "overlapping": overlapping,
    }
    specific, options = built
    if device.bounded_waits:
        options = options | {"flags": [*options.get("flags", ()), f'-DJITGEN_BOUNDED_WAITS="{ENTRY_MARK}"']}
    values = shared | specific
    return environment.kernel_source(
        family, kernel.name, language, folder, template, compiler, target, values, options, own
    )


def _wrapped(notes: Sequence[str]) -> list[str]:
    """Wraps ``notes`` into lines of at most ``BANNER_WIDTH`` characters."""
    wrap = textwrap.TextWrapper(BANNER_WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return [line for note in notes for line in wrap.wrap(note)]


def _uses_float8(kernel: Kernel) -> bool:
    """Returns whether ``kernel`` loads, stores or rounds to an 8-bit float."""
    dtypes = [operand.dtype for body in kernel.bodies for operand in body.operands]
    dtypes += [i.attr for body in kernel.bodies for i in body.instructions if i.op == "round_to"]
    return any(dtype.startswith("float8") for dtype in dtypes)
