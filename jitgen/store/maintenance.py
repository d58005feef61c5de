"""Maintenance of a store: verify, prune, clear, and why a key is a hit or a miss.

These functions walk directories; a call of a jitgen function uses none of them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jitgen.store import atomic, layout
from jitgen.store.entries import Damaged, read_artifact, read_plan
from jitgen.store.layout import Entry


@dataclass(frozen=True)
class Finding:
    """The state of one entry: ``present``, ``damaged``, ``incomplete`` or ``absent``, with a sentence of ``detail``.

    An ``incomplete`` entry is an intact plan some of whose artifacts are missing. It is a miss for the caller, but not
    damage.
    """

    kind: str
    key: str
    path: Path
    state: str
    detail: str
    layer: bool = False


@dataclass(frozen=True)
class Verification:
    """What ``verify`` found. A ``clean`` store may have leftovers and incomplete plans, which only cost space."""

    checked: int
    damaged: tuple[Finding, ...]
    incomplete: tuple[Finding, ...]
    leftovers: tuple[Path, ...]

    @property
    def clean(self) -> bool:
        return not self.damaged


@dataclass(frozen=True)
class Pruned:
    """The entries that ``prune`` removed, and the size of the store in bytes before and after it."""

    removed: tuple[Entry, ...]
    size_before: int
    size_after: int


IsAvailable = Callable[[str], bool]
"""Whether the store or one of its layers has the artifact of a key."""


def examine(root: Path, kind: str, key: str, is_available: IsAvailable, *, layer: bool = False) -> Finding:
    """Read an entry as a look-up would, and report its state."""
    path = layout.entry_path(root, kind, key)
    try:
        if kind == "artifact":
            artifact = read_artifact(path, key)
            detail = f"{len(artifact.files)} files, {artifact.binary} is loaded"
            return Finding(kind, key, path, "present", detail, layer)
        missing = [needed for needed in plan_artifacts(read_plan(path, key)) if not is_available(needed)]
    except FileNotFoundError:
        return Finding(kind, key, path, "absent", "there is no such entry", layer)
    except Damaged as damage:
        return Finding(kind, key, path, "damaged", str(damage), layer)
    if missing:
        names = ", ".join(needed[:12] for needed in missing)
        return Finding(kind, key, path, "incomplete", f"its artifacts {names} are not there", layer)
    return Finding(kind, key, path, "present", "whole, and so is every artifact it names", layer)


def verify(root: Path, is_available: IsAvailable) -> Verification:
    """Read every entry of the store."""
    findings = [examine(root, entry.kind, entry.key, is_available) for entry in layout.walk(root)]
    return Verification(
        checked=len(findings),
        damaged=tuple(finding for finding in findings if finding.state == "damaged"),
        incomplete=tuple(finding for finding in findings if finding.state == "incomplete"),
        leftovers=tuple(atomic.leftovers(root, older_than=0.0)),
    )


def prune(root: Path, limit: int, is_available: IsAvailable) -> Pruned:
    """Remove the least recently used entries until the rest fits ``limit`` bytes, then incomplete plans."""
    atomic.sweep(root)
    entries = sorted(layout.walk(root), key=lambda entry: entry.used)
    before = size = sum(entry.size for entry in entries)
    removed: list[Entry] = []
    for entry in entries:
        if size <= limit:
            break
        atomic.remove(root, entry.path)
        removed.append(entry)
        size -= entry.size
    removed_paths = {entry.path for entry in removed}
    for entry in entries:
        if entry.kind != "plan" or entry.path in removed_paths:
            continue
        if examine(root, "plan", entry.key, is_available).state != "present":
            atomic.remove(root, entry.path)
            removed.append(entry)
            size -= entry.size
    return Pruned(tuple(removed), before, size)


def clear(root: Path) -> int:
    """Remove every entry, and the directories of other schema versions; returns how many entries were removed.

    ``tmp`` is only swept of old leftovers, so that writers at work are not disturbed.
    """
    count = 0
    for entry in layout.walk(root):
        atomic.remove(root, entry.path)
        count += 1
    atomic.sweep(root)
    if root.is_dir():
        for path in root.iterdir():
            if path.name != layout.VERSION and path.name.removeprefix("v").isdigit():
                shutil.rmtree(path, ignore_errors=True)
    return count


def plan_artifacts(plan: dict[str, Any]) -> list[str]:
    """The keys of the artifacts that ``plan`` names."""
    return [key for key in plan.get("artifacts", ()) if isinstance(key, str)]
