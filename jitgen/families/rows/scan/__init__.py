"""Scans along rows, with pointwise work before and after: cumulative sums, products, extrema and logsumexp.

A kernel's single body has one sequential axis, the last. Instructions before a ``scan`` are computed for the elements
of a tile of the row, the tile is scanned, and instructions behind it are computed for the same elements; the state of
all elements so far is carried to the next tile. A row is read once.

On a GPU a few long rows are cut into chunks (``chunks.py``). On a CPU the threads share such a row by themselves.
"""

from __future__ import annotations

from jitgen.families.deferred import deferred
from jitgen.families.rows import row_family

NAME = "scan"

FAMILY = row_family(
    __name__,
    NAME,
    merge=deferred(__name__, "claim.merge"),
    rewrite_kernel=deferred(__name__, "chunks.in_chunks"),
    buckets=deferred(__name__, "chunks.buckets"),
)
