"""Scans along rows, with pointwise work before and after: cumulative sums, products, extrema and logsumexp.

A kernel's single body has one sequential axis, the last. Instructions before a ``scan`` are computed for the elements
of a tile of the row, the tile is scanned, and instructions behind it are computed for the same elements; the state of
all elements so far is carried to the next tile. A row is read once.

On a GPU a few long rows are cut into chunks (``chunks.py``). On a CPU the threads share such a row by themselves.

The kernel's parameters, in every dialect: a pointer for each operand in memory, in order, the integers
``kernel.rows.row_integers`` lists, and the run-time scalars.
"""

from __future__ import annotations

from jitgen.families.deferred import deferred
from jitgen.families.family import Family
from jitgen.families.scan.claim import NAME, claim, merge

FAMILY = Family(
    name=NAME,
    claim=claim,
    merge=merge,
    rewrite_kernel=deferred(__name__, "chunks.in_chunks"),
    layout=deferred(__name__, "layout.layout"),
    candidates=deferred(__name__, "schedule.candidates"),
    render=deferred(__name__, "render.render"),
    launch=deferred(__name__, "launch.launch"),
    arguments=deferred(__name__, "launch.arguments"),
    work=deferred(__name__, "launch.work"),
    explain=deferred(__name__, "explain.explain"),
    buckets=deferred(__name__, "chunks.buckets"),
)
