"""What a call that was resolved writes into the manifests being recorded (``deploy/record.py``)."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from jitgen import console, pipeline, settings
from jitgen.call.routing import Routing
from jitgen.call.signature import NUMBERS, number_symbols, size_symbols
from jitgen.call.specialization import memory_of
from jitgen.deploy import record
from jitgen.errors import CacheError, CacheWarning, UnsupportedError
from jitgen.ir.graph import Graph
from jitgen.ir.views import Memory
from jitgen.lowering import Lowered, Route
from jitgen.store import layout
from jitgen.store.default import default_store
from jitgen.trace.traced import Traced

_MISSED_SECONDS = 86400.0
"""The age, in seconds, from which a manifest of misses is not added to."""


def active() -> bool:
    """Whether a manifest is being recorded."""
    return record.recording()


def note(
    graph: Graph, lowered: Lowered, environment: Mapping[str, Any], memory: Sequence[Memory], routing: Routing
) -> None:
    """Record the call."""
    from jitgen.deploy import manifest  # only a program that records needs it

    try:
        entry = manifest.entry_of(graph, lowered, environment, memory, routing.requested)
    except UnsupportedError as error:
        console.warn(f"a call is not recorded: {error}", CacheWarning, stacklevel=2)
        return
    record.note(entry)


def remedy(
    graph: Graph, lowered: Lowered, environment: Mapping[str, Any], memory: Sequence[Memory], routing: Routing
) -> str:
    """The command that builds what a call misses. Its manifest has everything that was missed of late."""
    from jitgen.deploy import manifest

    path, first = settings.get("JITGEN_RECORD"), ""
    if not path:
        try:
            entry = manifest.entry_of(graph, lowered, environment, memory, routing.requested)
        except UnsupportedError as error:
            return f"it, which cannot be prewarmed: {error}"
        path = _missed(entry)
        if path is None:
            path, first = "specs.json", "run this program with JITGEN_RECORD=specs.json, and then "
    return f"{first}jitgen prewarm {shlex.quote(path)} --target {lowered.route.target}"


def _missed(entry: Mapping[str, Any]) -> str | None:
    """Adds ``entry`` to the store's manifest of misses, and returns its path; None where the store cannot be written.

    A manifest that was last written a day ago is begun anew: what is missed no more need not be built.
    """
    from jitgen.deploy import manifest

    store = default_store()
    path = layout.missed_path(store.root)
    if not store.writable:
        return None
    try:
        with store.writing():
            if path.exists() and path.stat().st_mtime < time.time() - _MISSED_SECONDS:
                path.unlink(missing_ok=True)
            manifest.write(path, {manifest.identity_of(entry): entry}, patience=1.0)
    except CacheError:
        return None
    return str(path)


def note_more_rows(
    leaves: Sequence[Any], tree: Any, route: Route, routing: Routing, trace: Callable[[Sequence[Any]], Traced]
) -> None:
    """Record what the call would be with two rows where it has one: a trace of a size of 1 is for that size alone.

    Args:
        trace: traces the function for other leaves.
    """
    from jitgen.deploy import row_variants

    for enlarged in row_variants.enlarged(leaves, tree):
        try:
            traced = trace(enlarged)
        except Exception:  # the function's own included: the user wrote it for one row
            continue
        captured = [found.value for found in traced.captured]
        tensors = [*(leaf for leaf in enlarged if isinstance(leaf, torch.Tensor)), *captured]
        numbers = [leaf for leaf in enlarged if type(leaf) in NUMBERS]
        environment = number_symbols(numbers) | size_symbols(tensors)
        if any(not guard.holds(environment) for guard in traced.graph.guards):
            continue
        memory = [memory_of(tensor, True) for tensor in tensors]
        lowered = pipeline.lower(traced.graph, environment, memory, route)
        note(traced.graph, lowered, environment, memory, routing)
