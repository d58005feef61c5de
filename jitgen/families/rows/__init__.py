"""Holds the families whose kernels go along rows. What they have in common is in ``jitgen/kernel/rows.py``.

A row family has a claim, a schedule, and for each dialect a template with its context. It says more only where it
differs.
"""

from __future__ import annotations

from typing import Any

from jitgen.families.deferred import deferred, family_in
from jitgen.families.family import Family

KERNEL = "jitgen.kernel"


def row_family(package: str, name: str, **hooks: Any) -> Family:
    """Makes the family ``name``. Its package has ``schedule.candidates``, ``schedule.explain`` and ``context.render``,
    which are imported when they are asked for. ``hooks`` are attributes of ``Family``, in place of those of rows."""
    rows = {
        "layout": deferred(KERNEL, "rows.layout"),
        "parameters": deferred(KERNEL, "rows.row_parameters"),
        "launch": deferred(KERNEL, "rows.row_launch"),
        "work": deferred(KERNEL, "rows.row_work"),
    }
    return family_in(package, name, **{**rows, **hooks})
