"""Explains why a request is not in the store: what tells it from the nearest entry that is, and what builds it.

A request key is a digest, which says nothing about what differs. So a plan is stored with the *ingredients* of its key
(``lowering.Lowered.ingredients``), each as a digest or, where people can read it, as text. ``nearest`` finds the plan
that shares the most of them with a request, and says which it does not share. Neighbours: ``pipeline.fetch`` asks on a
miss, ``jitgen cache why`` on the command line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jitgen import console
from jitgen.errors import CacheError
from jitgen.ir import graph as graphs
from jitgen.lowering import Lowered
from jitgen.spec import digest
from jitgen.store import Store

LOOKED_AT = 2000
"""How many of the most recently used plans are searched for the nearest."""

_WORDS = {
    "target": "it was built for {theirs}, and this is for {ours}",
    "backend": "it was built by {theirs}, and this asks for {ours}",
    "compiler": "it was compiled by {theirs}, and this asks for {ours}",
    "inputs": "it takes ({theirs}), and this call has ({ours})",
    "guards": "it assumes {theirs}, and this call {ours}",
    "layouts": "strides or alignment are others than these",
    "tuned": "another measured choice, or none, decides its schedule",
    "schedules": "the sizes fall into another bucket: its schedule is {theirs}, and this one's {ours}",
    "chip": "schedules are chosen for another chip",
    "graph": "the function computes something else: its body, a value that it closes over, or a dtype has changed",
    "kernels": "its kernels are divided otherwise",
    "code": "another version of jitgen's code or templates built it",
    "families": "a kernel family has changed, or another one is registered",
    "facts": "the installed torch computes otherwise: {theirs} there, {ours} here",
    "schema": "its format is {theirs}, and this jitgen's {ours}",
}
"""For each ingredient, what it means that two plans differ in it. The first rows are the most telling."""

_IMPLIED = {
    "target": (
        "chip",
        "tuned",
        "backend",
        "compiler",
        "inputs",
        "guards",
        "graph",
        "kernels",
        "layouts",
        "schedules",
        "families",
    ),
    "backend": ("compiler", "inputs", "graph", "kernels", "layouts", "schedules"),
    "inputs": ("graph", "kernels", "layouts", "schedules", "families"),
    "guards": ("graph", "kernels"),
    "graph": ("kernels", "families", "layouts", "schedules", "tuned"),
    "kernels": ("layouts", "schedules", "tuned"),
    "tuned": ("schedules",),
}
"""Differences that follow from another one and are not told with it."""


@dataclass(frozen=True)
class Nearest:
    """Describes the stored plan that is most like a request.

    Attributes:
        key: its request key.
        differences: sentences, at least one.
    """

    key: str
    differences: tuple[str, ...]

    def __str__(self) -> str:
        return f"the nearest entry is {self.key[:12]}: {'; '.join(self.differences)}"


def ingredients(lowered: Lowered) -> dict[str, str]:
    """Returns what the key of ``lowered`` is made of, each as text that people can read or as a digest, for its
    plan."""
    ingredients_of = dict(lowered.ingredients)
    ingredients_of.pop("route")
    digests = {
        name: str(value) if name in ("schema", "facts") else digest(value)[:16]
        for name, value in ingredients_of.items()
    }
    route = lowered.route
    return digests | {
        "target": str(route.target),
        "backend": route.backend,
        "compiler": route.compiler,
        "inputs": ", ".join(graphs.described_inputs(lowered.graph, {})),
        "guards": "; ".join(map(str, lowered.graph.guards)),
        "schedules": _shortened("; ".join(map(str, lowered.schedules))),
    }


def nearest(lowered: Lowered, store: Store) -> Nearest | None:
    """Returns the plan, of a function of that name, that shares the most ingredients with ``lowered``; None without
    one.

    Raises:
        CacheError: the store or a layer cannot be listed.
    """
    ours = ingredients(lowered)
    best: tuple[Any, str, Mapping[str, Any]] | None = None
    plans = sorted((e for e in store.entries() if e.kind == "plan"), key=lambda entry: -entry.used)
    for entry in plans[:LOOKED_AT]:
        plan = store.peek(entry)
        if not isinstance(plan, dict) or plan.get("name") != lowered.graph.name or entry.key == lowered.key:
            continue
        theirs = plan.get("ingredients")
        if isinstance(theirs, dict):
            same = [name for name in _WORDS if theirs.get(name) == ours[name]]
            likeness = ("target" in same, "inputs" in same, len(same))
            if best is None or likeness > best[0]:
                best = likeness, entry.key, theirs
    if best is None:
        return None
    return Nearest(best[1], tuple(_differences(ours, best[2])) or ("it has the same ingredients",))


def _differences(ours: Mapping[str, str], theirs: Mapping[str, Any]) -> list[str]:
    differing = [name for name in _WORDS if ours[name] != theirs.get(name)]
    implied = {other for name in differing for other in _IMPLIED.get(name, ())}
    return [
        _WORDS[name].format(theirs=_shortened(str(theirs.get(name)) or "nothing"), ours=ours[name] or "nothing")
        for name in differing
        if name not in implied
    ]


def _shortened(text: str, limit: int = 300) -> str:
    return console.printable(text if len(text) <= limit else f"{text[:limit]}...")


_described: dict[tuple[str, str], str] = {}
"""What was said of a miss, by store and key: a program that goes on after a miss may meet it at every call."""


def described(lowered: Lowered, store: Store, remedy: Callable[[], str | None] | None = None) -> str:
    """Describes a miss in words, over several lines: what is missing, how the nearest entry differs, and what builds
    it.

    Args:
        remedy: returns the command that builds it; without one the way to it is described.
    """
    where = str(store.root), lowered.key
    if where not in _described:
        if len(_described) >= LOOKED_AT:
            _described.clear()
        try:
            nearest_plan: object = nearest(lowered, store)
        except CacheError as problem:
            nearest_plan = f"how it differs from what is stored is not known: {problem}"
        _described[where] = "\n".join(
            (
                f"{lowered.graph.name}: no kernel in {store.root} for {lowered}{_legend(str(lowered))}",
                f"  {nearest_plan or f'the store has no usable entry of a function called {lowered.graph.name}'}",
                f"  to build it: {(remedy and remedy()) or _way(lowered)}",
                f"  its request key is {lowered.key}",
            )
        )
    return _described[where]


def _legend(text: str) -> str:
    """Explains what a symbolic size in ``text`` stands for."""
    match = re.search(r"\bs(\d+)_(\d+)\b", text)
    return f" ({match[0]} is the size of dimension {match[2]} of tensor {match[1]})" if match else ""


def _way(lowered: Lowered) -> str:
    return f"jitgen prewarm MANIFEST --target {lowered.route.target}, with a MANIFEST that jitgen.record wrote"
