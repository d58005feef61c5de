"""Rows in order: whole sorts, and the first ranks of one (top-k, medians), with pointwise work before.

A kernel's single body has one sequential axis, the last. Its elements are computed, and sorted together with their
indices; the ranks that are asked for are stored. Equal elements keep the order of their indices, so there is one right
result, whatever the algorithm. On a CPU a thread sorts a row by itself. On a GPU a block sorts a few short rows, or one
long one; a row that is longer than a block holds is cut into chunks, and a second kernel merges them (``chunks.py``).

The kernel's parameters, in every dialect: a pointer for each operand in memory, in order, the integers
``launch.integer_names`` lists, and the run-time scalars.
"""

from __future__ import annotations

from jitgen.families.deferred import deferred
from jitgen.families.family import Family
from jitgen.families.sort.claim import NAME, claim, merge

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
)
"""What ``families/registry.py`` lists."""
