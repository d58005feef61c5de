"""Scans along rows, with pointwise work before and after: cumulative sums, products, extrema and logsumexp.

A kernel's single body has one sequential axis, the last. Instructions before a ``scan`` are computed for the elements
of a tile of the row, the tile is scanned, and instructions behind it are computed for the same elements; the state of
all elements so far is carried to the next tile. A row is read once.

On a GPU a few long rows are cut into chunks (``chunks.py``). On a CPU the threads share such a row by themselves.

The kernel's parameters, in every dialect: a pointer for each operand in memory, in order, the integers
``launch.integer_names`` lists, and the run-time scalars.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jitgen.families.family import Family
from jitgen.families.scan.chunks import buckets, in_chunks
from jitgen.families.scan.claim import NAME, claim, merge
from jitgen.families.scan.launch import arguments, launch, work
from jitgen.families.scan.layout import layout
from jitgen.families.scan.schedule import candidates

if TYPE_CHECKING:
    from jitgen.codegen.environment import Rendered
    from jitgen.spec import KernelSource


def _render(*of: Any) -> tuple[KernelSource, Rendered]:
    from jitgen.families.scan.render import render

    return render(*of)


def _explain(*of: Any) -> list[str]:
    from jitgen.families.scan.explain import explain

    return explain(*of)


FAMILY = Family(
    name=NAME,
    claim=claim,
    merge=merge,
    rewrite_kernel=in_chunks,
    layout=layout,
    candidates=candidates,
    render=_render,
    launch=launch,
    arguments=arguments,
    work=work,
    explain=_explain,
    buckets=buckets,
)
