"""Generates pointwise kernels: any expression of any number of tensors, in one pass over memory.

``schedule`` decides vector width, unrolling and block size from the layout and the target; ``context`` is what the
three templates in ``templates/elementwise`` read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jitgen.device import Device
from jitgen.families.deferred import deferred, family_in
from jitgen.families.family import SizeBuckets
from jitgen.ir import symbols
from jitgen.ir.graph import Graph

NAME = "elementwise"


def _buckets(graph: Graph, environment: Mapping[str, Any], device: Device) -> list[SizeBuckets]:
    """Returns the number of rows of the first result, in all its dimensions but the last. One kernel computes any
    number."""
    return [SizeBuckets(symbols.product(result.shape[:-1])) for result in graph.results[:1]]


FAMILY = family_in(
    __name__,
    NAME,
    recognise=deferred(__name__, "short_sums.recognised"),
    joins=deferred(__name__, "claim.joins"),
    rewrite_kernel=deferred(__name__, "texts.by_text"),
    settle=deferred(__name__, "schedule.settle"),
    work=deferred("jitgen.kernel", "launch.work"),
    buckets=_buckets,
)
