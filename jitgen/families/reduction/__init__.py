"""Row reductions with pointwise work before, between and after them: one kernel that makes passes over each row.

A kernel's single body has ``row_rank`` trailing dimensions that together are a row of ``length`` elements; the other
dimensions count rows. Each instruction has a *stage*: elements of stage s are computed in pass s over the row, and a
reduction of them is known before pass s + 1. On a GPU a row is *resident* where it fits, that is, it stays in the
registers of a warp, a block or a cluster of blocks between passes and is read from memory once. Where it does not fit,
each pass reads it again, and ``online.py`` saves passes.

The kernel's parameters are the same in every dialect: a pointer for each operand in memory, in order, then the integers
that ``integer_names`` lists, then the run-time scalars.

The files, in the order in which a kernel meets them:

================================  ======================================================================================
``claim``, ``row_chunks``         which results are row regions; a few very long rows are divided into chunks first
``even_rows``                     copies of operands whose rows have no single stride
``layout``                        strides along rows and over rows
``residency``                     which values a resident row keeps in registers
``schedule``                      the schedule; ``cuda_schedule`` (with ``cuda_problem``, ``cuda_resident``,
                                  ``cuda_loads``, ``cuda_column_schedule``) and ``triton_schedule`` choose it
``online``, ``powers``            rewrites of the body, by ``rewriting``
``context``                       passes and printed lines, for the templates of all dialects
``cuda``, ``triton``, ``cpp``     what the templates of one dialect read; ``cuda`` has ``cuda_passes``, and
``cuda_rows``,
                                  ``cuda_persistent`` or ``cuda_columns``; ``cpp`` asks ``numbers``
``render``, ``launch``            the source; the launch and its arguments
``explain``, ``buckets``          the kernel in words; the numbers of rows at which schedules change
================================  ======================================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jitgen.families.family import Family
from jitgen.families.reduction.buckets import buckets
from jitgen.families.reduction.claim import claim, merge
from jitgen.families.reduction.even_rows import legalize
from jitgen.families.reduction.launch import arguments, launch, work
from jitgen.families.reduction.layout import layout
from jitgen.families.reduction.row_chunks import chunk_long_rows
from jitgen.families.reduction.schedule import candidates

if TYPE_CHECKING:
    from jitgen.codegen.environment import Rendered
    from jitgen.spec import KernelSource


def _render(*of: Any) -> tuple[KernelSource, Rendered]:
    from jitgen.families.reduction.render import render

    return render(*of)


def _explain(*of: Any) -> list[str]:
    from jitgen.families.reduction.explain import explain

    return explain(*of)


FAMILY = Family(
    name="reduction",
    rewrite_values=chunk_long_rows,
    claim=claim,
    merge=merge,
    legalize=legalize,
    layout=layout,
    candidates=candidates,
    render=_render,
    launch=launch,
    arguments=arguments,
    work=work,
    explain=_explain,
    buckets=buckets,
)
