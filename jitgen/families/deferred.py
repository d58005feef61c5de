"""Makes families whose functions are imported when they are called: most calls meet one family, and decorating none."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from jitgen.families.family import Family

USUAL = {
    "claim": "claim.claim",
    "layout": "layout.layout",
    "parameters": "layout.parameters",
    "candidates": "schedule.candidates",
    "launch": "schedule.launch",
    "explain": "schedule.explain",
    "render": "context.render",
}
"""Where a family has a function unless it says otherwise: attributes of ``Family``, and paths in its package."""


def deferred(package: str, path: str) -> Callable[..., Any]:
    """Returns the function at ``path`` in ``package``, such as ``"layout.layout"``; each call looks it up, in about 1
    us."""
    below, _, name = path.rpartition(".")
    module = f"{package}.{below}"

    def function(*arguments: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*arguments)

    function.__module__, function.__name__ = module, name
    return function


def family_in(package: str, name: str, **hooks: Any) -> Family:
    """Makes the family ``name``, whose functions are where ``USUAL`` has them in ``package``.

    Args:
        hooks: attributes of ``Family`` that are elsewhere, or that not every family has.
    """
    usual = {hook: deferred(package, path) for hook, path in USUAL.items()}
    return Family(name=name, **{**usual, **hooks})
