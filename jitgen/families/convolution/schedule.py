"""Says how a convolution's threads share its work; the mainloop decides all else by the sizes of the call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jitgen.device import Device
from jitgen.families.convolution.layout import ConvolutionGeometry, Layout, convolution_of
from jitgen.ir.program import Kernel
from jitgen.kernel.explain import count_operations
from jitgen.kernel.launch import LaunchShape, blocks_of
from jitgen.schedule.declared import DeclaredSchedule


@dataclass(frozen=True)
class Schedule(DeclaredSchedule):
    """Says how CPU threads share a convolution.

    Attributes:
        tile_rows: outputs of the tallest tile; the header has a lower limit where vectors are narrower.
    """

    sentence = ("tiles of up to {tile_rows} outputs and 16 pixels",)
    tile_rows: int = 24


def candidates(problem: Any, device: Device) -> tuple[Schedule, ...]:
    return (Schedule(),)


def launch(
    kernel: Kernel,
    layouts: Sequence[Layout],
    geometries: Sequence[ConvolutionGeometry],
    schedule: Schedule,
    device: Device,
) -> LaunchShape:
    """Launches as many pieces of work as there are blocks of pixels of an output."""
    (geometry,) = geometries
    pixels = geometry.rows * math.prod(geometry.pixels)
    return blocks_of(max(1, geometry.groups * -(-pixels // 16)), 1, device)


def explain(kernel: Kernel, layouts: Sequence[Layout], schedule: Schedule, device: Device) -> list[str]:
    """Explains the kernel: a title, and what its epilogue does."""
    (layout,), (body,), window = layouts, kernel.bodies, convolution_of(kernel).window
    assert window is not None
    names = ("stride", "dilation", "offset", "spread")
    numbers = ", ".join(f"{name} {_listed(getattr(window, name))}" for name in names)
    return [
        "convolution as one contraction over channels and the elements of a filter, the epilogue in the same kernel",
        f"filters of {_listed(window.kernel)}, {numbers}; the windows are read at computed addresses",
        f"epilogue of {count_operations(body)} operations, {len(body.stores)} result{'s' * (len(body.stores) != 1)}; "
        f"operands {', '.join(layout.operands)}",
    ]


def _listed(numbers: Sequence[Any]) -> str:
    return " x ".join(map(str, numbers))
