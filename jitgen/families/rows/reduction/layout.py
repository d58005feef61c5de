"""Lays out the operands of a row reduction."""

from __future__ import annotations

from dataclasses import replace

from jitgen.ir.program import Kernel
from jitgen.kernel.operands import MAX_UNIT, WARP, Call
from jitgen.kernel.rows import RowGeometry, RowLayout, row_geometry, row_layout
from jitgen.quant.codes import BLOCK

FEWEST_OF_BLOCK = BLOCK // WARP
"""Elements of a block that a thread has at least."""


def layout(kernel: Kernel, call: Call) -> tuple[tuple[RowLayout, ...], tuple[RowGeometry, ...]]:
    """Computes layout and geometry of the kernel's one body; raises NotViewable if an operand needs a copy first."""
    (body,) = kernel.bodies
    geometry = row_geometry(body, call, one_stride=True)
    in_blocks = body.has_blocks
    layout_ = row_layout(body, geometry, call, columns=geometry.goes_across and not in_blocks)
    along = layout_.along
    if in_blocks and layout_.unit < FEWEST_OF_BLOCK:
        # A warp has a block whole, so that a thread takes neighbours one by one where no access moves several.
        along = tuple("strided" if kind == "contiguous" else kind for kind in along)
        layout_ = replace(layout_, unit=MAX_UNIT)
    if geometry.length == 1:
        along = tuple("contiguous" if kind == "broadcast" else kind for kind in along)
    invariant = tuple(not any(strides[:-1]) for strides in geometry.strides)
    return (replace(layout_, along=along, row_invariant=invariant),), (geometry,)
