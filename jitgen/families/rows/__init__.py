"""Holds the families whose kernels go along rows. What they have in common is in ``jitgen/kernel/rows.py``.

A row family has a claim, a schedule, and for each dialect a template with its context. It says more only where it
differs.
"""

from __future__ import annotations

from typing import Any

from jitgen.families.deferred import deferred
from jitgen.families.family import Family

KERNEL = "jitgen.kernel"


def row_family(name: str, package: str, **hooks: Any) -> Family:
    """Makes the family ``name``. Its package has ``schedule.candidates``, ``schedule.explain`` and ``context.render``,
    which are imported when they are asked for. ``hooks`` are attributes of ``Family``, in place of those of rows."""
    rows = {
        "layout": deferred(KERNEL, "rows.layout"),
        "parameters": deferred(KERNEL, "rows.row_parameters"),
        "candidates": deferred(package, "schedule.candidates"),
        "render": deferred(package, "context.render"),
        "launch": deferred(KERNEL, "rows.row_launch"),
        "work": deferred(KERNEL, "rows.row_work"),
        "explain": deferred(package, "schedule.explain"),
    }
    return Family(name=name, **{**rows, **hooks})
