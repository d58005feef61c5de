"""Defines what Dynamo traces in place of a call of a decorated function, and of the look-up of a decorated method.

``jitgen.api`` marks both (``jitgen/frames.py``); nothing here is imported or run by calls outside of torch.compile.
"""

from __future__ import annotations

from typing import Any


def call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls the decorated ``function``: its original, as the inner graph of one operator."""
    from jitgen.dynamo.region import region

    original = function.__wrapped__
    return region(lambda: original(*args, **kwargs))


def look_up(function: Any, instance: Any, owner: Any = None) -> Any:
    """Returns ``instance.function``."""
    if instance is None:
        return function
    return lambda *args, **kwargs: call(function, instance, *args, **kwargs)
