"""Pointwise kernels: any expression of any number of tensors, in one pass over memory.

``render`` is imported only where a source is needed: a warm process renders nothing.

``schedule`` decides vector width, unrolling and block size from the layout and the target; ``context`` is what the
three templates in ``templates/elementwise`` read; ``launch`` turns a call's geometry into kernel arguments.

The kernel's parameters, in every dialect: a pointer for each operand in memory (regions in order, loads before
stores), the integers ``integer_names`` lists, and the run-time scalars.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jitgen.families.elementwise.claim import claim, joins
from jitgen.families.elementwise.explain import explain
from jitgen.families.elementwise.launch import arguments, launch, work
from jitgen.families.elementwise.layout import layout
from jitgen.families.elementwise.schedule import candidates
from jitgen.families.family import POINTWISE, Family, RowBuckets
from jitgen.ir import symbols
from jitgen.ir.graph import Graph

if TYPE_CHECKING:
    from jitgen.codegen.environment import Rendered
    from jitgen.spec import KernelSource


def _render(*of: Any) -> tuple[KernelSource, Rendered]:
    from jitgen.families.elementwise.render import render

    return render(*of)


def _buckets(graph: Graph, environment: Mapping[str, Any]) -> RowBuckets:
    """One kernel serves any number of rows: all dimensions of the first result but the last."""
    return RowBuckets(symbols.product(graph.results[0].shape[:-1]) if graph.results else 1)


FAMILY = Family(
    name=POINTWISE,
    claim=claim,
    joins=joins,
    layout=layout,
    candidates=candidates,
    render=_render,
    launch=launch,
    arguments=arguments,
    work=work,
    explain=explain,
    buckets=_buckets,
)
