"""Maintains a store: verify, prune, clear, and why a key is a hit or a miss.

These functions walk directories; a call of a jitgen function uses none of them, except ``prune`` where it has just
compiled a kernel and the store has grown over its limit.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jitgen.store import atomic, layout, protection, usage
from jitgen.store.entries import read_artifact, read_plan
from jitgen.store.files import Damaged, Unreadable
from jitgen.store.layout import Entry
from jitgen.store.signing import Trust
from jitgen.store.sources import Folder, Source

KEPT_OF_LIMIT = 0.9
"""The share of the limit that is left when a store trims itself, so that it does not walk at every write."""


@dataclass(frozen=True)
class Finding:
    """Describes the state of one entry: ``present``, ``damaged``, ``incomplete`` or ``absent``, with a sentence of
    ``detail``.

    In a layer that this user may not read it is ``unreadable``.

    An ``incomplete`` entry is an intact plan some of whose artifacts are missing. It is a miss for the caller, but not
    damage. An entry that was set aside is ``damaged`` as long as nothing has taken its place.
    """

    kind: str
    key: str
    path: Path
    state: str
    detail: str
    layer: bool = False


@dataclass(frozen=True)
class Verification:
    """Reports the state of a store's entries.

    A ``clean`` store may have leftovers, incomplete plans, and damaged entries that were set aside and made again,
    which only cost space.
    """

    checked: int
    damaged: tuple[Finding, ...]
    incomplete: tuple[Finding, ...]
    leftovers: tuple[Path, ...]
    quarantined: tuple[Path, ...]

    @property
    def clean(self) -> bool:
        return not self.damaged


@dataclass(frozen=True)
class Pruned:
    """Reports the entries that ``prune`` removed, and the size of the store in bytes before and after it.

    Attributes:
        spared: how many entries it would have removed, had no process used them and no bundle protected them.
    """

    removed: tuple[Entry, ...]
    size_before: int
    size_after: int
    spared: int = 0


IsAvailable = Callable[[str], bool]
"""Returns whether the store or one of its layers has the artifact of a key."""


def examine(source: Source, kind: str, key: str, is_available: IsAvailable, trust: Trust | None = None) -> Finding:
    """Reads an entry as a look-up would, and reports its state."""
    path = layout.entry_path(source.path, kind, key)
    layer = bool(getattr(source, "layer", True))
    try:
        if kind == "artifact":
            artifact = read_artifact(source.artifact(key), key, trust)
            detail = f"{len(artifact.files)} files, {artifact.binary} is loaded"
            return Finding(kind, key, path, "present", detail, layer)
        missing = [
            needed for needed in plan_artifacts(read_plan(source.plan(key), key, trust)) if not is_available(needed)
        ]
    except FileNotFoundError:
        return Finding(kind, key, path, "absent", "there is no such entry", layer)
    except Damaged as damage:
        state = "unreadable" if layer and isinstance(damage, Unreadable) else "damaged"
        return Finding(kind, key, path, state, str(damage), layer)
    if missing:
        names = ", ".join(needed[:12] for needed in missing)
        return Finding(kind, key, path, "incomplete", f"its artifacts {names} are not there", layer)
    return Finding(kind, key, path, "present", "whole, and so is every artifact it names", layer)


def verify(root: Path, is_available: IsAvailable, trust: Trust | None = None) -> Verification:
    """Reads every entry of the store."""
    source = Folder(root)
    findings = [examine(source, entry.kind, entry.key, is_available, trust) for entry in layout.walk(root)]
    there = {(finding.kind, finding.key) for finding in findings}
    aside = atomic.quarantined(root)
    lost = [
        quarantined
        for quarantined in map(_set_aside, aside)
        if quarantined is not None and (quarantined.kind, quarantined.key) not in there
    ]
    return Verification(
        checked=len(findings),
        damaged=(*(finding for finding in findings if finding.state == "damaged"), *lost),
        incomplete=tuple(finding for finding in findings if finding.state == "incomplete"),
        leftovers=tuple(atomic.leftovers(root, older_than=0.0)),
        quarantined=tuple(aside),
    )


def set_aside(root: Path, key: str) -> list[Finding]:
    """Lists what is in quarantine under ``key``."""
    findings = (_set_aside(path) for path in atomic.quarantined(root))
    return [finding for finding in findings if finding is not None and finding.key == key]


def _set_aside(path: Path) -> Finding | None:
    kind, _, rest = path.name.partition("-")
    key = rest.partition("-")[0]
    if kind not in layout.KINDS or not layout.is_key(key):
        return None
    return Finding(kind, key, path, "damaged", "it was set aside, and nothing has taken its place")


def prune(root: Path, limit: int, is_available: IsAvailable, target: int | None = None) -> Pruned:
    """Removes the least recently used entries until ``target`` bytes are left, if they exceed ``limit`` bytes.

    Entries that a process uses, and those of protected bundles, stay. Then plans whose artifacts are gone are removed.

    Args:
        target: bytes, for a store that trims itself, which removes nothing at all while it is within its limit; by
            default the limit.
    """
    atomic.sweep(root)
    entries = sorted(layout.walk(root), key=lambda entry: entry.used)
    before = size = sum(entry.size for entry in entries)
    wanted = limit if target is None or size <= limit else target
    protected = protection.protected(root)
    removed: list[Entry] = []
    removal = atomic.Removal(root)
    spared = 0
    with usage.unused(root) as unused:
        for entry in entries:
            if size <= wanted:
                break
            if entry.key in protected or not unused(entry.key):
                spared += 1
                continue
            removal.take(entry.path)
            removed.append(entry)
            size -= entry.size
        if target is not None and not removed:
            return Pruned((), before, size, spared)
        gone = {entry.path for entry in removed}
        plans = [entry for entry in entries if entry.kind == "plan" and entry.path not in gone]
        for entry in _without_artifacts(Folder(root), plans, is_available):
            if unused(entry.key):
                removal.take(entry.path)
                removed.append(entry)
                size -= entry.size
    removal.delete()
    return Pruned(tuple(removed), before, size, spared)


def _without_artifacts(source: Source, plans: Iterable[Entry], is_available: IsAvailable) -> Iterable[Entry]:
    """Lists the plans that name an absent artifact, or that cannot be read. Their digests are not computed."""
    for entry in plans:
        try:
            plan = json.loads(source.plan(entry.key))["plan"]
            if all(map(is_available, plan_artifacts(plan))):
                continue
        except FileNotFoundError:
            continue
        except (Damaged, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass
        yield entry


def clear(root: Path) -> int:
    """Removes every entry, and the directories of other schema versions; returns how many entries were removed.

    ``tmp`` is only swept of old leftovers, so that writers at work are not disturbed.
    """
    entries = [entry.path for entry in layout.walk(root)]
    atomic.remove(root, *entries)
    for path in atomic.quarantined(root):
        atomic.delete(path)
    protection.clear(root)
    atomic.delete(layout.missed_path(root))
    atomic.sweep(root)
    if root.is_dir():
        for path in root.iterdir():
            if path.name != layout.VERSION and path.name.removeprefix("v").isdigit():
                shutil.rmtree(path, ignore_errors=True)
    return len(entries)


def plan_artifacts(plan: dict[str, Any]) -> list[str]:
    """Returns the keys of the artifacts that ``plan`` names."""
    return [key for key in plan.get("artifacts", ()) if layout.is_key(key)]
