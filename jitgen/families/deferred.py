"""Imports functions of a family when they are called: most calls meet one family, and decorating none."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def deferred(package: str, path: str) -> Callable[..., Any]:
    """Returns the function at ``path`` in ``package``, such as ``"layout.layout"``; each call looks it up, in about 1
    us."""
    below, _, name = path.rpartition(".")
    module = f"{package}.{below}"

    def function(*arguments: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*arguments)

    function.__module__, function.__name__ = module, name
    return function
