"""Scatters into memory that holds the base already: copied there by another kernel, or updated in place.

A kernel's single body has grid axes, the coordinates that values and elements have in common, and sequential axes,
along which only indices differ: values along these may choose one element. A thread takes some indices of the grid axes
and goes through all of the sequential ones in order, so that no two threads meet in an element, and no order depends on
threads. Where a GPU would have few threads at work so, the scatter is computed by the element instead
(``by_element.py``).
"""

from __future__ import annotations

from jitgen.families.deferred import deferred, family_in

NAME = "scatter"

FAMILY = family_in(
    __name__,
    NAME,
    decide=deferred(__name__, "by_pairs.decide"),
    work=deferred(__name__, "layout.work"),
    buckets=deferred(__name__, "by_pairs.buckets"),
)
