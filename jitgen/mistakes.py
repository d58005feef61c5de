"""Turns what lowering should not have raised into an error that names the user's line.

A call of a decorated function fails with it; a compiled model (``jitgen/dynamo``) runs those operations in torch.

Neighbours: ``pipeline.py`` lowers and renders within ``reported``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from jitgen.errors import InternalError, JitgenError
from jitgen.ir.graph import Graph, Node
from jitgen.ir.index import Index
from jitgen.trace.location import quote

SYSTEM_ERRORS = (OSError, MemoryError, Warning)
"""What is no mistake of jitgen's: errors of the system and of the caller's own alarms, and warnings made errors."""
MOST_LINES = 4
"""The most lines that an error names where no single operation fails by itself."""


@contextmanager
def reported(graph: Graph, deed: str, fails: Callable[[Graph], bool] | None = None) -> Iterator[None]:
    """Raises InternalError in place of any error inside that is not a JitgenError, or one of ``SYSTEM_ERRORS``.

    Args:
        deed: what is done inside, such as ``"plan kernels for"``.
        fails: whether the same fails for another graph of the same inputs; finds the operation to name.
    """
    try:
        yield
    except (JitgenError, *SYSTEM_ERRORS):
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {error}".rstrip(": ")
        lines = "".join(map(quote, dict.fromkeys(_locations(graph, fails))))
        raise InternalError(f"{graph.name}: jitgen failed to {deed} this: {said}{lines}") from error


def _locations(graph: Graph, fails: Callable[[Graph], bool] | None) -> list[str]:
    """Returns the line of the first operation for which ``fails`` holds, else the last lines of ``graph``."""
    order = [node for node in Index(graph.results).order if node.location is not None and not node.is_in_memory]
    first = _first_failing(order, lambda node: fails(replace(graph, outputs=(node,), mutated=()))) if fails else None
    nodes = order[-MOST_LINES:] if first is None else [first]
    return [node.location for node in nodes if node.location is not None]


def _first_failing(order: Sequence[Node], fails: Callable[[Node], bool]) -> Node | None:
    """Returns a node that fails right behind one that does not; None if the last one does not fail by itself."""
    if not order or not fails(order[-1]):
        return None
    low, high = 0, len(order) - 1  # every node behind the first that fails is taken to fail
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fails(order[middle]) else (middle + 1, high)
    return order[high]
