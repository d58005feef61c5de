"""Export of entries to a bundle (``bundle``), and import of the entries of one into a store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jitgen.errors import CacheError
from jitgen.store import bundle, layout, signing
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
    """What ``import_`` did: entries it added, entries that were present already, and damaged ones it left out."""

    added: tuple[Entry, ...]
    present: tuple[Entry, ...]
    damaged: tuple[Finding, ...]


def export(store: Store, path: Path, keys: list[str] | None, signer: Signer | None = None) -> list[Entry]:
    """Write the bundle; see ``Store.export``.

    Raises:
        CacheError: a key that was asked for is absent or damaged, or ``path`` cannot be written.
    """
    chosen = _chosen(store, keys)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    written: list[Entry] = []

    def entries() -> Iterator[tuple[str, str, Contents]]:
        for _, (source, entry) in sorted(chosen.items(), key=lambda item: item[0]):
            try:
                contents = _contents(source, entry, signer)
            except (FileNotFoundError, Damaged) as problem:
                if keys is None:
                    continue
                raise CacheError(f"cannot export {entry.kind} {entry.key}: {problem}") from problem
            yield entry.kind, entry.key, contents
            written.append(entry)

    try:
        with open(temporary, "wb") as file:
            bundle.write(file, entries())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise CacheError(f"cannot write the archive {path}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return written


def import_(store: Store, path: Path) -> Imported:
    """Add the entries of a bundle, one after the other; see ``Store.import_``.

    Raises:
        CacheError: it is no bundle, or has a member that is no file of an entry (then nothing is added), or the store
            cannot be written.
    """
    archive, trust = bundle.opened(path), signing.trusted()
    own, own_trust = store.sources[0]
    added, present, damaged = [], [], []
    # Artifacts sort before plans, so that no plan is here before what it names.
    for found in archive.names():
        entry = Entry(
            found.kind, found.key, layout.entry_path(store.root, found.kind, found.key), found.size, found.used
        )
        try:
            contents = archive.contents(entry.kind, entry.key)
            verify(entry.kind, entry.key, contents, trust)
        except (FileNotFoundError, Damaged) as damage:
            damaged.append(Finding(entry.kind, entry.key, found.path, "damaged", str(damage), True))
            continue
        if _is_whole(own, entry, own_trust):
            present.append(entry)
        else:
            store.install(entry.kind, entry.key, contents)
            added.append(entry)
    return Imported(tuple(added), tuple(present), tuple(damaged))


def _chosen(store: Store, keys: list[str] | None) -> dict[tuple[str, str], tuple[Source, Entry]]:
    """The entries to write, by kind and key; of one that several sources have, the first."""
    found: dict[tuple[str, str], tuple[Source, Entry]] = {}
    for source, _ in store.sources:
        for entry in source.names():
            found.setdefault((entry.kind, entry.key), (source, entry))
    if keys is None:
        return found
    wanted = set(keys)
    for key in keys:
        wanted.update(plan_artifacts(store.get_plan(key) or {}))
    missing = wanted - {key for _, key in found}
    if missing:
        raise CacheError(f"cannot export {', '.join(sorted(missing))}: not in the store")
    return {name: pair for name, pair in found.items() if name[1] in wanted}


def _contents(source: Source, entry: Entry, signer: Signer | None) -> Contents:
    contents = contents_of(source, entry.kind, entry.key)
    if signer is None:
        return contents
    sealed = META if entry.kind == "artifact" else f"{entry.key}.json"
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
