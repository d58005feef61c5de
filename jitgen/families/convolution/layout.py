"""Lays out the operands of a convolution over six axes: rows, groups, outputs (for images: channels) and three
dimensions of pixels. An image of fewer dimensions has sizes of 1.

Where all that the epilogue reads and writes allows it, it takes the pixels of an image as one dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jitgen.device import Device
from jitgen.ir import symbols
from jitgen.ir.body import Contraction
from jitgen.ir.program import Kernel
from jitgen.kernel import launch
from jitgen.kernel.geometry import Geometry, touched_of
from jitgen.kernel.launch import Work
from jitgen.kernel.layout import stride_kind, views_of
from jitgen.kernel.operands import Call, merged_dimensions
from jitgen.kernel.parameters import Integer, KernelParameters, RegionParameters, declared

DIMENSIONS = 3
"""Dimensions of an image, in kernels."""
READ_WHOLE = ("x", "weight")
"""Kinds of the operands that are images and filters."""


@dataclass(frozen=True)
class Layout:
    """Holds the facts on which the source depends.

    Attributes:
        operands: for each operand ``"contiguous"``, ``"broadcast"`` or ``"strided"``, along the pixels; of images and
            filters ``"whole"``.
    """

    operands: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ConvolutionGeometry(Geometry):
    """Holds the sizes of a call, and strides along the axes.

    Attributes:
        flat: 1 where the epilogue takes the pixels of an image as one dimension.
    """

    rows: int
    groups: int
    outputs: int
    channels: int
    pixels: tuple[int, ...]
    image: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    offset: tuple[int, ...]
    spread: tuple[int, ...]
    flat: int

    @property
    def elements(self) -> int:
        return self.rows * self.groups * self.outputs * math.prod(self.pixels)

    @property
    def length(self) -> int:
        """Returns how many products a sum has."""
        return self.channels * math.prod(self.kernel)


COUNTS = ("rows", "groups", "outputs", "channels")
SIZES = ("pixels", "image", "kernel", "stride", "dilation", "offset", "spread")
"""The fields of a geometry that a kernel takes as parameters: numbers, and numbers of each dimension."""


def convolution_of(kernel: Kernel) -> Contraction:
    """Returns the convolution of the kernel's only body."""
    ((contraction,),) = (body.contractions for body in kernel.bodies)
    return contraction


def layout(kernel: Kernel, call: Call) -> tuple[tuple[Layout, ...], tuple[ConvolutionGeometry, ...]]:
    """Computes layout and geometry of the kernel's only region.

    Raises:
        NotViewable: no strides describe an operand, which has to be copied first.
    """
    (body,), environment = kernel.bodies, call.environment
    views, window = views_of(body, call), convolution_of(kernel).window
    assert window is not None
    sizes = symbols.evaluated(body.shape, environment)
    epilogue = [index for index, operand in enumerate(body.operands) if operand.kind not in READ_WHOLE]
    walked = [views[index].strides for index in epilogue]
    merged = merged_dimensions(sizes, walked, range(3, len(sizes)))
    flat = len(merged) <= 1 and set(window.spread) == {1}
    images = next(view for view, operand in zip(views, body.operands, strict=True) if operand.kind == "x")
    strides = []
    for index, view in enumerate(views):
        pixels = _padded(view.strides[3:], 0)
        if flat and index in epilogue:
            pixels = (0, 0, merged[0][1][epilogue.index(index)] if merged else 1)
        strides.append((*view.strides[:3], *pixels))
    kernel_sizes = symbols.evaluated(window.kernel, environment)
    geometry = ConvolutionGeometry(
        rows=sizes[0],
        groups=sizes[1],
        outputs=sizes[2],
        channels=images.sizes[2],
        pixels=_padded(sizes[3:], 1),
        image=_padded(images.sizes[3:], 1),
        kernel=_padded(kernel_sizes, 1),
        stride=_padded(window.stride, 1),
        dilation=_padded(window.dilation, 1),
        offset=_padded(window.offset, 0),
        spread=_padded(window.spread, 1),
        flat=int(flat),
        strides=tuple(strides),
        offsets=tuple(view.offset for view in views),
        touched=touched_of(body, (zip(view.sizes, view.strides, strict=True) for view in views)),
    )
    kinds = tuple(
        "whole" if operand.kind in READ_WHOLE else stride_kind(steps[-1])
        for operand, steps in zip(body.operands, geometry.strides, strict=True)
    )
    return (Layout(kinds),), (geometry,)


def _padded(numbers: Sequence[int], number: int) -> tuple[int, ...]:
    return (*[number] * (DIMENSIONS - len(numbers)), *numbers)


_INNER = {"contiguous": "1", "broadcast": "0", "strided": "", "whole": ""}
"""An operand's last stride, by its kind: the number, where the kind fixes it, or a parameter."""


def parameters(kernel: Kernel, layouts: Sequence[Layout], device: Device) -> KernelParameters:
    """Declares the parameters of the kernel: the numbers of ``COUNTS`` and ``SIZES``, ``flat``, and for each operand
    ``s<operand>_<axis>``, strides that its kind does not fix, or ``o<operand>``, an iota's first value."""
    (layout,), (body,) = layouts, kernel.bodies
    operands = tuple(
        declared(operand, index, [""] * (DIMENSIONS + 2) + [_INNER[kind]])
        for index, (operand, kind) in enumerate(zip(body.operands, layout.operands, strict=True))
    )
    counts = [Integer(name, name) for name in COUNTS]
    sizes = [Integer(f"{name}{dim}", name, dim=dim) for name in SIZES for dim in range(DIMENSIONS)]
    return KernelParameters((RegionParameters((*counts, *sizes, Integer("flat", "flat")), operands),), wide=True)


def work(kernel: Kernel, geometries: Sequence[ConvolutionGeometry], schedule: Any) -> Work:
    """Counts what one launch amounts to: each element is a sum of products. Some of these are of padding."""
    (geometry,) = geometries
    return launch.work(kernel, geometries, schedule, flops=2 * geometry.elements * geometry.length)
