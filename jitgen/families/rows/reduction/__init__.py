"""Reduces rows, with pointwise work before, between and after: one kernel that makes passes over each row.

A kernel's single body has ``row_rank`` trailing dimensions that together are a row of ``length`` elements; the other
dimensions count rows. Each instruction has a *stage*: elements of stage s are computed in pass s over the row, and a
reduction of them is known before pass s + 1. On a GPU a row is *resident* where it fits, that is, it stays in the
registers of a warp, a block or a cluster of blocks between passes and is read from memory once. Where it does not fit,
each pass reads it again, and ``online.py`` saves passes.

The files, in the order in which a kernel meets them:

================================  ======================================================================================
``claim``                         which results are row regions
``joined``                        rows that are joined of lengths of themselves, such as rotary embeddings
``inner_rows``, ``row_chunks``    rows made of other rows are reduced along these first; a few very long ones are cut
                                  into chunks first
``even_rows``                     copies of operands whose rows have no single stride
``layout``                        strides along rows and over rows
``residency``                     which values a resident row keeps in registers
``schedule``                      the schedule, its launch and its words; ``cuda_schedule`` (with ``cuda_problem``,
                                  ``cuda_resident``, ``cuda_loads``, ``cuda_column_schedule``) and ``triton_schedule``
                                  choose it
``online``, ``powers``            rewrites of the body, by ``rewriting``
``context``                       passes and printed lines, for the templates of all dialects; ``render``
``cuda``, ``triton``, ``cpp``     what the templates of one dialect read; ``cuda`` has ``cuda_passes``, and
                                  ``cuda_rows``, ``cuda_persistent`` or ``cuda_columns``; ``cpp`` asks ``numbers``
``buckets``                       the numbers of rows at which schedules change
================================  ======================================================================================
"""

from __future__ import annotations

from jitgen.families.deferred import deferred
from jitgen.families.rows import row_family

FAMILY = row_family(
    __name__,
    "reduction",
    rewrite_values=deferred(__name__, "row_chunks.in_shorter_rows"),
    merge=deferred(__name__, "claim.merge"),
    legalize=deferred(__name__, "even_rows.legalize"),
    layout=deferred(__name__, "layout.layout"),
    launch=deferred(__name__, "schedule.launch"),
    buckets=deferred(__name__, "buckets.buckets"),
    facts=deferred(__name__, "buckets.facts"),
)
