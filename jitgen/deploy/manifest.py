"""Writes manifests: which specialisations a program meets, as JSON that needs none of its code.

A manifest is self-contained: each entry holds a function's graph (``ir/graph.py``), the sizes, strides and alignments
of its tensors, and the backend the user asked for, mostly ``"auto"``. It names no device, no target and no layout of
quantised weights: what was recorded on a laptop's CPU is built for a GPU on a machine that has none, and the kernels
are the very ones, under the very keys, that the deployed program asks for. (A weight that one function gathers rows of
and multiplies too is the exception: its addresses are those of a layout, and so the entry is for its backend.)

``record`` writes manifests, and ``prewarm`` builds what they hold. A manifest that is read is checked first, all of it
(``manifest_schema``): it may come from anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jitgen import pipeline
from jitgen.deploy import manifest_schema, own_integers, shared_files
from jitgen.ir import graph as graphs
from jitgen.ir.graph import Graph
from jitgen.ir.views import Memory, Strided
from jitgen.lowering import Lowered, Route
from jitgen.quant import weights
from jitgen.quant.relayout import Relaid, relaid
from jitgen.spec import SCHEMA, digest

Entry = Mapping[str, Any]
"""An entry of a manifest, as JSON."""


def entry_of(
    graph: Graph,
    lowered: Lowered,
    environment: Mapping[str, Any],
    memory: Sequence[Memory],
    requested: tuple[str, str | None],
    tensors: Sequence[Any] = (),
) -> Entry:
    """Encodes one specialisation as an entry.

    Args:
        graph: as it was traced, without what lowering for this machine added.
        lowered: for this machine; its layouts and schedules tell variants of one graph apart.
        environment: a value for every symbol.
        memory: of every input.
        requested: backend, possibly ``"auto"``, and compiler, if one was asked for.
        tensors: of every input, where a call was made.
    """
    inputs = len(lowered.program.inputs)
    results = lowered.memories[inputs + len(lowered.program.temporaries) :] if lowered.caller_output else ()
    portable = relaid(graph, environment, memory, weights.PORTABLE)
    integers = own_integers.of_call(graph, tensors) if tensors else []
    entry = {
        "name": graph.name,
        "graph": graphs.to_json(portable.graph),
        "environment": dict(portable.environment),
        "inputs": [_memory_to_json(memory) for memory in portable.memory],
        "results": [_memory_to_json(memory) for memory in results],
        "backend": requested[0],
        "compiler": requested[1],
        "variant": digest([list(map(repr, lowered.layouts)), list(map(repr, lowered.schedules))]),
    }
    others = {"batch_invariant": lowered.route.batch_invariant, "integers": integers}
    return entry | {name: value for name, value in others.items() if value}


def identity_of(entry: Entry) -> str:
    """Returns a key that is equal for entries that mean the same."""
    invariant = ["batch invariant"] if entry.get("batch_invariant") else []
    return digest([*(entry[field] for field in ("graph", "variant", "backend", "compiler")), *invariant])


def _memory_to_json(memory: Memory) -> dict[str, Any]:
    view = memory.view
    return {"sizes": list(view.sizes), "strides": list(view.strides), "alignment": memory.alignment}


def _memory_from_json(data: Mapping[str, Any]) -> Memory:
    return Memory(Strided(tuple(data["sizes"]), tuple(data["strides"])), data["alignment"])


def encoded(entries: Mapping[str, Entry]) -> str:
    """Returns the text of the manifest with ``entries``, by identity."""
    return json.dumps({"schema": SCHEMA, "entries": [entries[identity] for identity in sorted(entries)]}, indent=1)


def write(path: Path, entries: Mapping[str, Entry], patience: float = shared_files.PATIENCE) -> None:
    """Writes ``entries``, by identity, to ``path``, with those that a manifest already there has.

    Several processes may write the same file at once.

    Args:
        patience: seconds to wait for another process that writes the file.

    Raises:
        CacheError: what is there is no manifest, or the file cannot be written.
    """
    with shared_files.locked(path, patience):
        merged = dict(entries)
        if path.exists():
            for entry in manifest_schema.read(path):
                merged.setdefault(identity_of(entry), entry)
        shared_files.replace(path, encoded(merged))


def relower(entry: Entry, route: Route) -> Lowered:
    """Lowers a recorded specialisation as a process on that target would."""
    results = [_memory_from_json(memory) for memory in entry["results"]]
    rewritten = laid_out_for(entry, route)
    return pipeline.lower(rewritten.graph, rewritten.environment, rewritten.memory, route, results)


def laid_out_for(entry: Entry, route: Route) -> Relaid:
    """Returns the graph of a recorded specialisation with its weights in the layout that kernels of ``route`` read."""
    memory = [_memory_from_json(memory) for memory in entry["inputs"]]
    return relaid(graphs.from_json(entry["graph"]), entry["environment"], memory, route.layouts)
