"""Looking into jitgen from tests: graphs, kernels and compile events of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jitgen
from jitgen import lowering
from jitgen.ir.graph import Graph


def lowered(function: Callable[..., Any], *arguments: Any, **options: Any) -> lowering.Lowered:
    """What a call of ``function`` would run; nothing is rendered or compiled."""
    jitted = function if isinstance(function, jitgen.api.JitFunction) else jitgen.jit(function)
    return jitted.lower(*arguments, **options)._lowered


def lowered_graph(function: Callable[..., Any], *arguments: Any) -> Graph:
    return lowered(function, *arguments).graph


@contextmanager
def compiled() -> Iterator[list[Any]]:
    """The compile events that happen within the context."""
    events: list[Any] = []
    unsubscribe = jitgen.on_compile(events.append)
    try:
        yield events
    finally:
        unsubscribe()
