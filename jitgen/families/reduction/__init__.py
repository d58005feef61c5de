"""Row reductions with pointwise work before, between and after: one kernel that walks each row.

A kernel's single body has ``row_rank`` trailing dimensions that together are a row of ``length`` elements; the others
count rows. Instructions are of a *stage*: elements of stage s are computed in pass s over the row, and a reduction of
them is known before pass s + 1. On a GPU a row is kept on chip between passes where it fits (registers of a warp, a
block or a cluster), so that it is read once; where it does not, each pass reads it again, and ``online.py`` has what
it can computed a pass earlier.

The kernel's parameters, in every dialect: a pointer for each operand in memory, in order, then the integers
``integer_names`` lists, then the run-time scalars.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jitgen.families.reduction.explain import explain
from jitgen.families.reduction.launch import launch_arguments
from jitgen.families.reduction.layout import resolve
from jitgen.families.reduction.schedule import schedule

if TYPE_CHECKING:
    from jitgen.codegen.environment import Rendered
    from jitgen.spec import KernelSource


def source(*arguments: Any) -> tuple[KernelSource, Rendered]:
    """See ``reduction/render.py``, which is imported only where a source is needed."""
    from jitgen.families.reduction.render import render as function

    return function(*arguments)


__all__ = ["explain", "launch_arguments", "resolve", "schedule", "source"]
