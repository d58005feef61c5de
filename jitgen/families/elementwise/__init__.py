"""Pointwise kernels: any expression of any number of tensors, in one pass over memory.

``render`` is imported only where a source is needed: a warm process renders nothing.

``schedule`` decides vector width, unrolling and block size from the layout and the target; ``context`` is what the
three templates ``templates/*/elementwise.*.j2`` read; ``launch`` turns a call's geometry into kernel arguments.

The kernel's parameters, in every dialect: a pointer for each operand in memory (regions in order, loads before
stores), the integers ``integer_names`` lists, and the run-time scalars.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jitgen.families.elementwise.explain import explain
from jitgen.families.elementwise.launch import launch_arguments
from jitgen.families.elementwise.schedule import Schedule, schedule
from jitgen.families.layout import resolve

if TYPE_CHECKING:
    from jitgen.codegen.environment import Rendered
    from jitgen.spec import KernelSource


def source(*arguments: Any) -> tuple[KernelSource, Rendered]:
    """See ``elementwise/render.py``, which is imported only where a source is needed."""
    from jitgen.families.elementwise.render import render as function

    return function(*arguments)


__all__ = ["Schedule", "explain", "launch_arguments", "resolve", "schedule", "source"]
