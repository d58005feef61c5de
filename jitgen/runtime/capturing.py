"""Captures CUDA graphs, and keeps from the capture what would end it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
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


def captured(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """Returns a CUDA graph of ``calls``, each of which runs once before, on a side stream, as a capture requires:
    whatever it compiles, loads or tunes, it does then."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in dict.fromkeys(calls):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        for call in calls:
            call()
    return graph
