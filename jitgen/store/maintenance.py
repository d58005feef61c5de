"""Looking after a store: verify, prune, clear, and why a key is or is not there.

Everything here walks the directories; nothing of it is on the path of a call.
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
    """What is to be said of one entry: ``state`` is ``present``, ``damaged``, ``incomplete`` or ``absent``.

    ``incomplete`` is a whole plan some of whose artifacts are gone: a miss for the caller, and no damage.
    """

    kind: str
    key: str
    path: Path
    state: str
    detail: str
    layer: bool = False


@dataclass(frozen=True)
class Verification:
    """What ``verify`` found; ``clean`` allows leftovers and incomplete plans, which cost nothing but space."""

    checked: int
    damaged: tuple[Finding, ...]
    incomplete: tuple[Finding, ...]
    leftovers: tuple[Path, ...]

    @property
    def clean(self) -> bool:
        return not self.damaged


@dataclass(frozen=True)
class Pruned:
    """What ``prune`` removed, and the bytes before and after it."""

    removed: tuple[Entry, ...]
    size_before: int
    size_after: int


Holds = Callable[[str], bool]
"""Whether an artifact key can be had from anywhere: the store or a layer."""


def examine(root: Path, kind: str, key: str, holds: Holds, *, layer: bool = False) -> Finding:
    """Read one entry as a look-up would and say what is the matter with it."""
    path = layout.entry_path(root, kind, key)
    try:
        if kind == "artifact":
            artifact = read_artifact(path, key)
            detail = f"{len(artifact.files)} files, {artifact.binary} is loaded"
            return Finding(kind, key, path, "present", detail, layer)
        missing = [needed for needed in plan_artifacts(read_plan(path, key)) if not holds(needed)]
    except FileNotFoundError:
        return Finding(kind, key, path, "absent", "there is no such entry", layer)
    except Damaged as damage:
        return Finding(kind, key, path, "damaged", str(damage), layer)
    if missing:
        names = ", ".join(needed[:12] for needed in missing)
        return Finding(kind, key, path, "incomplete", f"its artifacts {names} are not there", layer)
    return Finding(kind, key, path, "present", "whole, and so is every artifact it names", layer)


def verify(root: Path, holds: Holds) -> Verification:
    """Read every entry of the store."""
    findings = [examine(root, entry.kind, entry.key, holds) for entry in layout.walk(root)]
    return Verification(
        checked=len(findings),
        damaged=tuple(finding for finding in findings if finding.state == "damaged"),
        incomplete=tuple(finding for finding in findings if finding.state == "incomplete"),
        leftovers=tuple(atomic.leftovers(root, older_than=0.0)),
    )


def prune(root: Path, limit: int, holds: Holds) -> Pruned:
    """Remove the least recently used entries until the rest fits ``limit`` bytes, then plans left incomplete."""
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
    gone = {entry.path for entry in removed}
    for entry in entries:
        if entry.kind != "plan" or entry.path in gone:
            continue
        if examine(root, "plan", entry.key, holds).state != "present":
            atomic.remove(root, entry.path)
            removed.append(entry)
            size -= entry.size
    return Pruned(tuple(removed), before, size)


def clear(root: Path) -> int:
    """Remove every entry, and what other versions of the layout left; returns how many entries went.

    Writers at work keep their place in ``tmp``: it is only swept.
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
    """The artifact keys a plan names."""
    return [key for key in plan.get("artifacts", ()) if isinstance(key, str)]
