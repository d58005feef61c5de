"""Pointwise kernels: any expression of any number of tensors, in one pass over memory.

``render`` is imported only where a source is needed: a warm process renders nothing.

``schedule`` decides vector width, unrolling and block size from the layout and the target; ``context`` is what the
three templates in ``templates/elementwise`` read; ``launch`` turns a call's geometry into kernel arguments.

The kernel's parameters, in every dialect: a pointer for each operand in memory (regions in order, loads before
stores), the integers ``integer_names`` lists, and the run-time scalars.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jitgen.device import Device
from jitgen.families.deferred import deferred
from jitgen.families.elementwise.claim import NAME, claim, joins
from jitgen.families.family import Family, SizeBuckets
from jitgen.ir import symbols
from jitgen.ir.graph import Graph


def _buckets(graph: Graph, environment: Mapping[str, Any], device: Device) -> list[SizeBuckets]:
    """The number of rows of the first result, in all its dimensions but the last. One kernel computes any number."""
    return [SizeBuckets(symbols.product(result.shape[:-1])) for result in graph.results[:1]]


FAMILY = Family(
    name=NAME,
    claim=claim,
    joins=joins,
    layout=deferred(__name__, "layout.layout"),
    candidates=deferred(__name__, "schedule.candidates"),
    render=deferred(__name__, "render.render"),
    launch=deferred(__name__, "launch.launch"),
    arguments=deferred(__name__, "launch.arguments"),
    work=deferred(__name__, "launch.work"),
    explain=deferred(__name__, "explain.explain"),
    buckets=_buckets,
)
