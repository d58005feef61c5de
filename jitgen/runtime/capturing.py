"""Captures CUDA graphs, and keeps from the capture what would end it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """Captures what this thread launches into ``graph``.

    The driver refuses some calls during a capture, and each that it refuses invalidates the graph. One is the
    destruction of another graph, so no garbage is collected meanwhile. Other threads may make such calls: allocations
    of theirs, or the end of a model that they have dropped, are none of this graph's.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            yield
    finally:
        if collects:
            gc.enable()
