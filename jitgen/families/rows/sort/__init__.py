"""Sorts rows: whole sorts, and the first ranks of one (top-k, medians), with pointwise work before.

A kernel's single body has one sequential axis, the last. Its elements are computed, and sorted together with their
indices; the ranks that are asked for are stored. Equal elements keep the order of their indices, so there is one right
result, whatever the algorithm. On a CPU a thread sorts a row by itself. On a GPU a block sorts a few short rows, or one
long one; a row that is longer than a block holds is cut into chunks, and a second kernel merges them (``chunks.py``).
A row of whole numbers below a bound is counted, which gives the rank of each too (``counting.py``).
"""

from __future__ import annotations

from jitgen.families.deferred import deferred
from jitgen.families.rows import row_family

NAME = "sort"

FAMILY = row_family(
    __name__,
    NAME,
    recognise=deferred(__name__, "claim.recognised"),
    merge=deferred(__name__, "claim.merge"),
    rewrite_kernel=deferred(__name__, "chunks.in_chunks"),
    layout=deferred(__name__, "layout.layout"),
    parameters=deferred(__name__, "layout.parameters"),
    launch=deferred(__name__, "schedule.launch"),
    work=deferred(__name__, "layout.work"),
)
"""What ``families/registry.py`` lists."""
