"""Defines the row of ``ir.convolutions.convolve``, by which compositions and derivatives make convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jitgen.errors import UnsupportedError
from jitgen.ir.body import FACTORS, accumulator_dtype
from jitgen.ir.graph import Node
from jitgen.trace.guards import matmul_precision
from jitgen.trace.movement import sizes_of
from jitgen.trace.table import row

if TYPE_CHECKING:
    from jitgen.trace.tracer import Trace


@row("jitgen.convolve")
def convolve(
    trace: Trace,
    images: Node,
    filters: Node,
    stride: Sequence[int],
    dilation: Sequence[int],
    offset: Sequence[int],
    spread: Sequence[int],
    pixels: Sequence[Any],
) -> Node:
    if images.dtype not in FACTORS:
        raise UnsupportedError(
            f"a convolution of {images.dtype} is not supported; convert the operands to one of {', '.join(FACTORS)}"
        )
    precision = matmul_precision() if images.dtype == "float32" else "ieee"
    windows = (tuple(map(int, numbers)) for numbers in (stride, dilation, offset, spread))
    shape = (*images.shape[:2], filters.shape[1], *sizes_of(trace, pixels))
    attrs = (*windows, accumulator_dtype(images.dtype), precision)
    return trace.make("convolve", (images, filters), images.dtype, shape, attrs)
