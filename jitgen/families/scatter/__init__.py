"""Scatters into memory that holds the base already: copied there by another kernel, or updated in place.

A kernel's single body has grid axes, the coordinates that values and elements have in common, and sequential axes,
along which only indices differ: values along these may choose one element. A thread takes some indices of the grid axes
and goes through all of the sequential ones in order, so that no two threads meet in an element, and no order depends on
threads. Where a GPU would have few threads at work so, the scatter is computed by the element instead
(``by_element.py``).

The kernel's parameters, in every dialect: a pointer for each operand in memory, in order, the integers
``launch.integer_names`` lists, and the run-time scalars.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jitgen.device import Device
from jitgen.families.family import Family
from jitgen.families.scatter.by_element import Walk, decide
from jitgen.families.scatter.claim import NAME, claim
from jitgen.families.scatter.launch import arguments, launch, work
from jitgen.families.scatter.layout import layout
from jitgen.families.scatter.schedule import candidates
from jitgen.ir.program import Decision

if TYPE_CHECKING:
    from jitgen.codegen.environment import Rendered
    from jitgen.spec import KernelSource


def _render(*of: Any) -> tuple[KernelSource, Rendered]:
    from jitgen.families.scatter.render import render

    return render(*of)


def _explain(*of: Any) -> list[str]:
    from jitgen.families.scatter.explain import explain

    return explain(*of)


def _decide(question: Any, device: Device) -> Decision:
    return decide(question, device) if isinstance(question, Walk) else question.decide(device)


FAMILY = Family(
    name=NAME,
    claim=claim,
    decide=_decide,
    layout=layout,
    candidates=candidates,
    render=_render,
    launch=launch,
    arguments=arguments,
    work=work,
    explain=_explain,
)
