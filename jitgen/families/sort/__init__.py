"""Rows in order: whole sorts, and the first ranks of one (top-k, medians), with pointwise work before.

A kernel's single body has one sequential axis, the last. Its elements are computed, and sorted together with their
indices; the ranks that are asked for are stored. Equal elements keep the order of their indices, so there is one right
result, whatever the algorithm. On a CPU a thread sorts a row by itself. On a GPU a block sorts a few short rows, or one
long one; a row that is longer than a block holds is cut into chunks, and a second kernel merges them (``chunks.py``).

The kernel's parameters, in every dialect: a pointer for each operand in memory, in order, the integers
``launch.integer_names`` lists, and the run-time scalars.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jitgen.families.family import Family
from jitgen.families.sort.chunks import in_chunks
from jitgen.families.sort.claim import NAME, claim, merge
from jitgen.families.sort.launch import arguments, launch, work
from jitgen.families.sort.layout import layout
from jitgen.families.sort.schedule import candidates

if TYPE_CHECKING:
    from jitgen.codegen.environment import Rendered
    from jitgen.spec import KernelSource


def _render(*of: Any) -> tuple[KernelSource, Rendered]:
    from jitgen.families.sort.render import render

    return render(*of)


def _explain(*of: Any) -> list[str]:
    from jitgen.families.sort.explain import explain

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
)
"""What ``families/registry.py`` lists."""
