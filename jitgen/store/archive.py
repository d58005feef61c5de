"""Exports entries to a bundle (``bundle``), and imports the entries of one into a store."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jitgen.errors import CacheError
from jitgen.store import bundle, layout, notice, signing
from jitgen.store.entries import META, Contents, read_artifact, read_plan, resealed
from jitgen.store.files import Damaged
from jitgen.store.layout import Entry
from jitgen.store.maintenance import Finding, plan_artifacts
from jitgen.store.signing import Signer, Trust
from jitgen.store.sources import Source, contents_of, verify

if TYPE_CHECKING:
    from jitgen.store.store import Store


@dataclass(frozen=True)
class Imported:
    """Reports what ``import_`` did: the entries it added, those that were present already, and the damaged ones it left
    out."""

    added: tuple[Entry, ...]
    present: tuple[Entry, ...]
    damaged: tuple[Finding, ...]


def export(store: Store, path: Path, keys: list[str] | None, signer: Signer | None = None) -> list[Entry]:
    """Writes the bundle; see ``Store.export``.

    What a look-up would not take, because it is damaged or lacks a signature, is not exported: a key that signs the
    bundle vouches for what its owner can load.

    Raises:
        CacheError: a key that was asked for is absent or cannot be exported, or ``path`` cannot be written.
    """
    chosen = _chosen(store, keys)
    left_out: list[str] = []
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}")
    written: list[Entry] = []

    def entries() -> Iterator[tuple[str, str, Contents]]:
        for (kind, key), copies in sorted(chosen.items()):
            entry, contents, problem = _first_whole(copies)
            if contents is not None:
                yield kind, key, contents if signer is None else _signed(kind, key, contents, signer)
                written.append(entry)
            elif keys is not None:
                raise CacheError(f"cannot export {kind} {key}: {problem}")
            else:
                left_out.append(f"{kind} {key[:12]}: {problem}")

    try:
        with open(temporary, "xb") as file:  # which follows no link that somebody put there
            bundle.write(file, entries())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise CacheError(f"cannot write the archive {path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    if left_out:
        notice.once(f"export {path}", f"{len(left_out)} entries are not in {path}; the first is {left_out[0]}")
    return written


def import_(store: Store, path: Path) -> Imported:
    """Adds the entries of a bundle, one after the other; see ``Store.import_``.

    Raises:
        CacheError: it is no bundle, or has a member that is no file of an entry (then nothing is added), or the store
            cannot be written.
    """
    archive, trust = bundle.opened(path), signing.trusted()
    own, own_trust = store.sources[0]
    added, present, damaged = [], [], []
    # Artifacts sort before plans, so that no plan is here before what it names.
    for member in archive.names():
        entry = Entry(
            member.kind, member.key, layout.entry_path(store.root, member.kind, member.key), member.size, member.used
        )
        try:
            contents = archive.contents(entry.kind, entry.key)
            verify(entry.kind, entry.key, contents, trust)
        except (FileNotFoundError, Damaged) as damage:
            damaged.append(Finding(entry.kind, entry.key, member.path, "damaged", str(damage), True))
            continue
        if _is_whole(own, entry, own_trust):
            present.append(entry)
        else:
            store.install(entry.kind, entry.key, contents)
            added.append(entry)
    return Imported(tuple(added), tuple(present), tuple(damaged))


Found = list[tuple[Source, Trust | None, Entry]]
"""The places where an entry is, in the order of a look-up, each with the signatures it must have there."""


def _chosen(store: Store, keys: list[str] | None) -> dict[tuple[str, str], Found]:
    """Returns the entries to write, by kind and key."""
    chosen: dict[tuple[str, str], Found] = {}
    for source, trust in store.sources:
        for entry in source.names():
            chosen.setdefault((entry.kind, entry.key), []).append((source, trust, entry))
    if keys is None:
        return chosen
    wanted = set(keys)
    for key in keys:
        wanted.update(plan_artifacts(store.get_plan(key) or {}))
    missing = wanted - {key for _, key in chosen}
    if missing:
        raise CacheError(f"cannot export {', '.join(sorted(missing))}: not in the store")
    return {name: sources for name, sources in chosen.items() if name[1] in wanted}


def _first_whole(copies: Found) -> tuple[Entry, Contents | None, str]:
    """Returns the first entry that a look-up would take, with its files; if there is none, why the first is not
    taken."""
    problems = []
    for source, trust, entry in copies:
        try:
            return entry, contents_of(source, entry.kind, entry.key, trust), ""
        except (FileNotFoundError, Damaged) as problem:
            problems.append(str(problem))
    return copies[0][2], None, problems[0]


def _signed(kind: str, key: str, contents: Contents, signer: Signer) -> Contents:
    sealed = META if kind == "artifact" else f"{key}.json"
    return {**contents, sealed: resealed(contents[sealed], signer)}


def _is_whole(source: Source, entry: Entry, trust: Trust | None) -> bool:
    try:
        if entry.kind == "plan":
            read_plan(source.plan(entry.key), entry.key, trust)
        else:
            read_artifact(source.artifact(entry.key), entry.key, trust)
    except (FileNotFoundError, Damaged):
        return False
    return True
