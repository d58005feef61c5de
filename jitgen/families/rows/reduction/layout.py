"""Lays out the operands of a row reduction."""

from __future__ import annotations

from dataclasses import replace

from jitgen.ir.program import Kernel
from jitgen.kernel.operands import Call
from jitgen.kernel.rows import RowGeometry, RowLayout, row_geometry, row_layout


def layout(kernel: Kernel, call: Call) -> tuple[tuple[RowLayout, ...], tuple[RowGeometry, ...]]:
    """Computes layout and geometry of the kernel's one body; raises NotViewable if an operand needs a copy first."""
    (body,) = kernel.bodies
    geometry = row_geometry(body, call, one_stride=True)
    layout_ = row_layout(body, geometry, call, columns=geometry.goes_across)
    along = layout_.along
    if geometry.length == 1:
        along = tuple("contiguous" if kind == "broadcast" else kind for kind in along)
    invariant = tuple(not any(strides[:-1]) for strides in geometry.strides)
    return (replace(layout_, along=along, row_invariant=invariant),), (geometry,)
