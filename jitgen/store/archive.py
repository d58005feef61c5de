"""Export and import of entries as a plain tar archive, every member of which is checked.

Members are named as in the store, ``v1/artifact/ab/<key>/kernel.cubin`` and ``v1/plan/ab/<key>.json``, sorted, with
no times or owners: the same entries give the same archive. Compression is left to whoever ships it.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import tarfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from jitgen.errors import CacheError
from jitgen.store import atomic, layout
from jitgen.store.entries import META, Damaged, is_file_name, read_artifact, read_plan
from jitgen.store.layout import Entry
from jitgen.store.maintenance import Finding, examine, plan_artifacts

if TYPE_CHECKING:
    from jitgen.store.store import Store

_MEMBER = re.compile(
    layout.VERSION + r"/(?:artifact/([0-9a-f]{2})/\1[0-9a-f]{62}/([^/]+)|plan/([0-9a-f]{2})/\3[0-9a-f]{62}\.json)"
)


@dataclass(frozen=True)
class Imported:
    """What ``import_`` did: entries it added, entries that were present already, and damaged ones it left out."""

    added: tuple[Entry, ...]
    present: tuple[Entry, ...]
    damaged: tuple[Finding, ...]


def export(store: Store, path: Path, keys: list[str] | None) -> list[Entry]:
    """Write the archive; see ``Store.export``.

    Raises:
        CacheError: a key that was asked for is absent or damaged, or ``path`` cannot be written.
    """
    chosen = _chosen(store, keys)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    written = []
    try:
        with tarfile.open(temporary, "w", format=tarfile.PAX_FORMAT) as archive:
            for _, entry in sorted(chosen.items()):
                try:
                    contents = _contents(entry)
                except (FileNotFoundError, Damaged) as problem:
                    if keys is None:
                        continue
                    raise CacheError(f"cannot export {entry.kind} {entry.key}: {problem}") from problem
                for name, content in contents.items():
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
                written.append(entry)
        os.replace(temporary, path)
    except OSError as error:
        raise CacheError(f"cannot write the archive {path}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return written


def import_(store: Store, path: Path) -> Imported:
    """Add the entries of an archive; see ``Store.import_``.

    It is unpacked into a temporary directory of the store and read there as a store, so that every check of a look-up
    applies.

    Raises:
        CacheError: it is no archive of a store, has a member that is no file of an entry (then nothing is added), or
            the store cannot be written.
    """
    added, present, damaged = [], [], []
    with store.writing():
        stage = atomic.stage_name(store.root, "import")
        try:
            _unpack(path, stage)
            staged = replace(store, root=stage, layers=())
            # Artifacts sort before plans, so that no plan is here before what it names.
            for found in staged.entries():
                entry = replace(found, path=layout.entry_path(store.root, found.kind, found.key))
                finding = examine(stage, entry.kind, entry.key, lambda _: True)
                if finding.state != "present":
                    damaged.append(finding)
                elif examine(store.root, entry.kind, entry.key, lambda _: True).state == "present":
                    present.append(entry)
                else:
                    _copy(staged, entry, store)
                    added.append(entry)
        finally:
            shutil.rmtree(stage, ignore_errors=True)
    return Imported(tuple(added), tuple(present), tuple(damaged))


def _chosen(store: Store, keys: list[str] | None) -> dict[tuple[str, str], Entry]:
    """The entries to write, by kind and key; of one that several directories have, the first."""
    found: dict[tuple[str, str], Entry] = {}
    for entry in store.entries():
        found.setdefault((entry.kind, entry.key), entry)
    if keys is None:
        return found
    wanted = set(keys)
    for key in keys:
        wanted.update(plan_artifacts(store.get_plan(key) or {}))
    missing = wanted - {key for _, key in found}
    if missing:
        raise CacheError(f"cannot export {', '.join(sorted(missing))}: not in the store")
    return {name: entry for name, entry in found.items() if name[1] in wanted}


def _contents(entry: Entry) -> dict[str, bytes]:
    """The files of the entry by their names in the archive, after its digests were checked."""
    top = f"{layout.VERSION}/{entry.kind}/{entry.key[:2]}"
    if entry.kind == "plan":
        read_plan(entry.path, entry.key)
        return {f"{top}/{entry.path.name}": entry.path.read_bytes()}
    artifact = read_artifact(entry.path, entry.key)
    files = {name: artifact.read(name) for name in sorted(artifact.files)}
    return {
        f"{top}/{entry.key}/{name}": data for name, data in {META: (entry.path / META).read_bytes(), **files}.items()
    }


def _unpack(path: Path, directory: Path) -> None:
    """Write the archive's members under ``directory``, after the names of all were checked to be those of entries."""
    try:
        with tarfile.open(path, "r:") as archive:
            members = archive.getmembers()
            # tarfile reads a truncated archive as a short one; a complete one ends in two empty blocks.
            if path.stat().st_size < archive.offset + tarfile.BLOCKSIZE:
                raise tarfile.ReadError("it is cut short")
            for member in members:
                _check_member(path, member)
            for member in members:
                target = directory / member.name
                target.parent.mkdir(parents=True, exist_ok=True)
                content = archive.extractfile(member)
                assert content is not None  # _check_member lets only regular files pass
                with content, open(target, "xb") as file:
                    shutil.copyfileobj(content, file)
    except (tarfile.TarError, EOFError, FileExistsError) as error:
        raise CacheError(f"{path} is no archive of a jitgen store: {error}") from error
    except FileNotFoundError as error:
        raise CacheError(f"there is no archive {path}") from error


def _check_member(path: Path, member: tarfile.TarInfo) -> None:
    match = _MEMBER.fullmatch(member.name)
    plain = member.isreg() and not member.issparse()
    if match is None or not plain or (match[2] not in (None, META) and not is_file_name(match[2])):
        raise CacheError(
            f"{path} is refused: its member {member.name!r} is no file of an entry; nothing was imported. "
            "Take archives that `jitgen cache export` of the same version wrote"
        )


def _copy(source: Store, entry: Entry, target: Store) -> None:
    if entry.kind == "plan":
        plan = source.get_plan(entry.key)
        if plan is not None:
            target.put_plan(entry.key, plan)
    else:
        artifact = source.get_artifact(entry.key)
        if artifact is not None:
            target.put_artifact(artifact.artifact())
