"""Matrix products with prologue and epilogue: low-bit and dense weights, fused with what follows them.

A kernel has one region or several. A region is (rows M, columns N) of outputs with one *contraction* or several: the
product of the activation (M, K), which all regions share, and a weight (N, K) of its own. Its instructions are the
epilogue, computed from the float32 accumulators (float64 of float64) before anything is rounded.

``layout`` says how operands lie, ``schedule`` which mainloop and tiles compute them, ``context`` what the templates
read; each dialect has a module of its name with its template's context and one in ``schedules`` with its choices.

The kernel's parameters, in every dialect: a pointer for each operand in memory (regions in order), the integers
``integer_names`` lists, and the run-time scalars.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jitgen.families.gemm.explain import explain
from jitgen.families.gemm.launch import launch_arguments
from jitgen.families.gemm.layout import resolve
from jitgen.families.gemm.schedule import GemmSchedule, schedule

if TYPE_CHECKING:
    from jitgen.codegen.environment import Rendered
    from jitgen.spec import KernelSource


def source(*arguments: Any) -> tuple[KernelSource, Rendered]:
    """See ``gemm/render.py``, which is imported only where a source is needed."""
    from jitgen.families.gemm.render import render as function

    return function(*arguments)


__all__ = ["GemmSchedule", "explain", "launch_arguments", "resolve", "schedule", "source"]
