"""Traces ``torch.utils.checkpoint`` within a function as a call of what is checkpointed.

It makes saved tensors and autograd functions of its arguments, and a proxy is none. A trace needs nothing of that: what
the backward of a decorated function computes again is decided for the whole of it (``gradients/plan.py``), and random
numbers are drawn once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils import checkpoint

from jitgen.trace.guards import tracing
from jitgen.trace.replaced import Replaced

_without_reentrant = checkpoint._checkpoint_without_reentrant_generator
_Reentrant = checkpoint.CheckpointFunction


def _around(*arguments: Any, **options: Any) -> Iterator[None]:
    """Does nothing, in place of what ``checkpoint`` does around the function that it calls."""
    if tracing.get() is None:
        yield from _without_reentrant(*arguments, **options)
    else:
        yield


class _Called:
    """Replaces the autograd function of ``use_reentrant=True``."""

    @staticmethod
    def apply(function: Callable[..., Any], preserves: bool, *arguments: Any) -> Any:
        if tracing.get() is None:
            return _Reentrant.apply(function, preserves, *arguments)
        return function(*arguments)


_REPLACED = Replaced(checkpoint, {"_checkpoint_without_reentrant_generator": _around, "CheckpointFunction": _Called})


@contextmanager
def checkpoints_are_calls() -> Iterator[None]:
    """Makes a trace meet a checkpoint as a call of its function."""
    with _REPLACED.active():
        yield
