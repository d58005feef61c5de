"""From a row kernel, its layout and its schedule to the source."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from jitgen.codegen.environment import Rendered
from jitgen.device import Device
from jitgen.families.reduction.context import context
from jitgen.families.reduction.forms import CudaRows, RowSchedule
from jitgen.families.reduction.layout import RowLayout
from jitgen.families.reduction.online import online, with_means
from jitgen.families.reduction.powers import in_powers_of_two
from jitgen.ir.program import Kernel
from jitgen.kernel.render import DIALECTS, source
from jitgen.spec import KernelSource


def render(
    kernel: Kernel, layouts: Sequence[RowLayout], schedule: RowSchedule, device: Device, compiler: str
) -> tuple[KernelSource, Rendered]:
    """The source of ``kernel``, and where each of its lines came from; see ``kernel/render.py``."""
    language, dialect, (layout,) = device.dialect, DIALECTS[device.dialect], layouts
    if schedule.online:
        kernel = online(kernel)
        if isinstance(schedule, CudaRows) and schedule.resident and not layout.columns:
            kernel = with_means(kernel)
    if device.is_gpu:
        # In CUDA C++ only where clusters hold rows: elsewhere softmax is 1 to 2 % slower (H200, rows of 100, 16384 and
        # 32768) for the registers that direct exponents take.
        direct = not isinstance(schedule, CudaRows) or (schedule.cluster > 1 and schedule.rows_per_thread == 1)
        kernel = in_powers_of_two(kernel, direct)
    rows = context(kernel, layout, dialect)
    build = importlib.import_module(f"jitgen.families.reduction.{language}").build
    specific, options = build(kernel, layout, schedule, rows, dialect)
    built = {"rows": rows, **specific}, options
    return source("reduction", kernel, schedule, device, compiler, [rows.title], built, device.overlaps_launches)
