"""Defines ``Store``, the one object through which the rest of jitgen reads and writes the disk."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from jitgen import settings
from jitgen.errors import CacheError
from jitgen.spec import Artifact
from jitgen.store import layout, notice, signing, usage
from jitgen.store.entries import META, Contents, StoredArtifact, encode_artifact, encode_plan, read_artifact, read_plan
from jitgen.store.files import JSON_LIMIT, Damaged, Unreadable, Untrusted
from jitgen.store.layout import Entry
from jitgen.store.signing import Signer, Trust
from jitgen.store.sources import Folder, Memory, Source, layer_source

if TYPE_CHECKING:
    from jitgen.store.archive import Imported
    from jitgen.store.lock import Flight
    from jitgen.store.maintenance import Finding, Pruned, Verification
    from jitgen.store.remote import Remote

_TOUCH_SECONDS = 3600.0

Found = TypeVar("Found")


@dataclass(frozen=True)
class Store:
    """Represents a directory of plans and artifacts, with read-only layers behind it. See the package for the contract.

    Attributes:
        root: the store's directory; it need not exist before the first write.
        layers: directories and bundles searched after it, in order, and never written.
        remote: URL of the store that is asked last, and told of what is compiled (``remote``); None if there is none.
        memory: what ``keep_artifact`` and ``keep_plan`` could not write.
    """

    root: Path
    layers: tuple[Path, ...] = ()
    remote: str | None = None
    memory: Memory = field(default_factory=Memory, compare=False, repr=False)

    @staticmethod
    def open(
        directory: str | os.PathLike[str] | None = None,
        layers: Iterable[str | os.PathLike[str]] | None = None,
        remote: str | None = None,
    ) -> Store:
        """Opens the store in ``directory``, by default the one that the settings and the installation name.

        Args:
            layers: by default those of ``JITGEN_CACHE_PATH``.
            remote: by default that of ``JITGEN_CACHE_REMOTE``; ``""`` for none.

        Raises:
            CacheError: the directory is someone else's, open to others' writing, or no directory; or a trusted key
                cannot be read.
        """
        root = layout.absolute(layout.default_directory() if directory is None else directory)
        named = settings.get("JITGEN_CACHE_PATH") if layers is None else layers
        behind = tuple(layout.absolute(layer) for layer in named)
        layout.check_store(root)
        for layer in behind:
            layout.check_layer(layer)
        signing.trusted()
        url = (settings.get("JITGEN_CACHE_REMOTE") if remote is None else remote) or None
        return Store(root, tuple(layer for layer in behind if layer != root), url)

    @cached_property
    def sources(self) -> tuple[tuple[Source, Trust | None], ...]:
        """Returns what a look-up searches, in order, and whose signatures each of them must have."""
        trust = signing.trusted()
        own = trust if settings.get("JITGEN_SIGNED_ONLY") else None
        layers = ((layer_source(layer), trust) for layer in self.layers)
        return ((Folder(self.root), own), (self.memory, None), *layers)

    # ------------------------------------------------------------------------------------------------------ reading

    def get_artifact(self, key: str) -> StoredArtifact | None:
        """Returns the artifact, every file verified; None if it is absent or damaged in every source."""
        return self._find("artifact", key, lambda source, trust: read_artifact(source.artifact(key), key, trust))

    def get_plan(self, key: str) -> dict[str, Any] | None:
        """Returns the plan stored for a request; None if it is absent or damaged. Its artifacts may be gone: look them
        up."""
        return self._find("plan", key, lambda source, trust: read_plan(source.plan(key), key, trust))

    def _find(self, kind: str, key: str, read: Callable[[Source, Trust | None], Found]) -> Found | None:
        """Returns what ``read`` reads from the first source that has the entry undamaged."""
        _check_key(key)
        for source, trust in self.sources:
            try:
                entry = read(source, trust)
            except FileNotFoundError:
                continue
            except Damaged as damage:
                self._note_damage(source, kind, key, damage)
                continue
            if source.path is self.root:
                self._touch(layout.entry_path(self.root, kind, key))
            return entry
        return self._fetched(kind, key, read) if self.remote else None

    def _fetched(self, kind: str, key: str, read: Callable[[Source, Trust | None], Found]) -> Found | None:
        """Returns what ``read`` reads of an entry that the remote has, after copying it here, or into memory."""
        contents = self._remote.get(kind, key, signing.trusted())
        if contents is None:
            return None
        try:
            self.install(kind, key, contents)
            return read(*self.sources[0])
        except (CacheError, FileNotFoundError, Damaged) as problem:
            if isinstance(problem, CacheError):
                self._note_unwritable(problem)
            self.memory.keep(kind, key, contents)
            return read(self.memory, None)

    @cached_property
    def _remote(self) -> Remote:
        from jitgen.store import remote

        assert self.remote is not None
        return remote.opened(self.remote)

    def peek(self, entry: Entry) -> StoredArtifact | dict[str, Any] | None:
        """Reads an artifact or a plan that a walk met, without marking it used; None if it is damaged."""
        for source, _ in self.sources:
            with suppress(FileNotFoundError, Damaged):
                if layout.entry_path(source.path, entry.kind, entry.key) != entry.path:
                    continue
                if entry.kind == "artifact":
                    return read_artifact(source.artifact(entry.key), entry.key)
                return read_plan(source.plan(entry.key), entry.key)
        return None

    def hold(self, *keys: str) -> None:
        """Marks entries as used by this process, until it ends: no ``prune`` removes them."""
        usage.hold(self.root, keys)

    # ------------------------------------------------------------------------------------------------------ writing

    def put_artifact(self, artifact: Artifact, *, in_use: bool = False) -> StoredArtifact:
        """Stores an artifact and returns it as a reader meets it; an undamaged entry that is already there stays.

        Args:
            in_use: whether to ``hold`` it, so that a limit which it exceeds does not have it removed at once.

        Raises:
            CacheError: the store cannot be written. See the package for what the caller does then.
        """
        _check_key(artifact.key)
        if (theirs := self._own(artifact.key)) is not None:
            return theirs
        self.install("artifact", artifact.key, encode_artifact(artifact, self._signer()), in_use=in_use)
        stored = self._own(artifact.key)
        if stored is None:
            path = layout.artifact_path(self.root, artifact.key)
            raise CacheError(f"{path} was removed or altered as soon as it was written; look who else uses the store")
        return stored

    def put_plan(self, key: str, plan: Mapping[str, Any]) -> None:
        """Stores a plan, in place of one that is there: a plan names artifacts, and newer names are better.

        Raises:
            CacheError: as ``put_artifact``.
        """
        _check_key(key)
        self.install("plan", key, {f"{key}.json": encode_plan(key, plan, self._signer())})

    def install(self, kind: str, key: str, contents: Mapping[str, bytes], *, in_use: bool = False) -> None:
        """Stores the files of an entry as they are. An undamaged artifact that is there stays; a plan is replaced.

        Raises:
            CacheError: as ``put_artifact``.
        """
        from jitgen.store.atomic import install_directory, install_file

        target = layout.entry_path(self.root, kind, key)
        with self.writing():
            if in_use:
                self.hold(key)
            if kind == "artifact":
                install_directory(self.root, target, contents, lambda path: self._is_whole(path, kind, key))
            else:
                install_file(self.root, target, *contents.values())
        self._stay_within_limit(sum(map(len, contents.values())))

    def keep_artifact(self, artifact: Artifact, *, publish: bool = True) -> StoredArtifact:
        """Stores an artifact like ``put_artifact``, or keeps it in this process, with one warning, if that cannot be
        done.

        Args:
            publish: False to keep it in this process in any case.
        """
        if publish:
            try:
                self._share("artifact", artifact.key, encode_artifact(artifact, self._signer()))
                return self.put_artifact(artifact, in_use=True)
            except CacheError as problem:
                self._note_unwritable(problem)
        self.memory.keep("artifact", artifact.key, encode_artifact(artifact))
        return read_artifact(self.memory.artifact(artifact.key), artifact.key)

    def keep_plan(self, key: str, plan: Mapping[str, Any], *, publish: bool = True) -> None:
        """Stores a plan like ``put_plan``, or keeps it in this process, with one warning, if that cannot be done."""
        if publish:
            try:
                self._share("plan", key, {f"{key}.json": encode_plan(key, plan, self._signer())})
                self.put_plan(key, plan)
                return
            except CacheError as problem:
                self._note_unwritable(problem)
        self.memory.keep("plan", key, {f"{key}.json": encode_plan(key, plan)})

    def _share(self, kind: str, key: str, contents: Contents) -> None:
        if self.remote:
            self._remote.put(kind, key, contents)

    def share(self, plan_key: str) -> bool:
        """Puts a plan and its artifacts where the other hosts look for them; returns whether the remote has them
        all."""
        from jitgen.store import maintenance, sources

        plan = self.get_plan(plan_key)
        if plan is None or not self.remote:
            return False
        wanted = [*(("artifact", key) for key in maintenance.plan_artifacts(plan)), ("plan", plan_key)]
        for kind, key in wanted:
            if not self._remote.has(kind, key):
                for source, trust in self.sources:
                    with suppress(FileNotFoundError, Damaged):
                        self._remote.put(kind, key, sources.contents_of(source, kind, key, trust))
                        break
        return all(self._remote.has(kind, key) for kind, key in wanted)

    def single_flight(self, key: str, patience: float | None = None) -> AbstractContextManager[Flight]:
        """Holds the key's lock between processes; the caller looks the key up again inside.

        Yields what became of it (``lock.Flight``), true where the lock is held. After ``patience`` seconds
        (``JITGEN_PATIENCE``), and where locks cannot be had, the caller continues without one and at worst compiles
        what another process compiles too. Not reentrant.
        """
        from jitgen.store import lock

        _check_key(key)
        return lock.single_flight(self.root, key, settings.get("JITGEN_PATIENCE") if patience is None else patience)

    # -------------------------------------------------------------------------------------------------- maintenance

    @property
    def writable(self) -> bool:
        return layout.is_writable(self.root)

    def entries(self, prefix: str = "") -> Iterator[Entry]:
        """Yields every entry whose key starts with ``prefix``, the layers' after the store's."""
        yield from layout.walk(self.root, prefix=prefix)
        for source, _ in self.sources[1:]:
            yield from (entry for entry in source.names() if entry.key.startswith(prefix))

    def verify(self) -> Verification:
        """Reads every entry of the store (not of the layers) and reports what is damaged."""
        from jitgen.store import maintenance

        return maintenance.verify(self.root, self.has_artifact, self.sources[0][1])

    def why(self, key: str) -> list[Finding]:
        """Lists what the store and each layer have under ``key``, plan and artifact alike; empty if none has it."""
        from jitgen.store import maintenance

        _check_key(key)
        findings = [
            maintenance.examine(source, kind, key, self.has_artifact, trust)
            for source, trust in self.sources
            for kind in layout.KINDS
        ]
        there = [finding for finding in findings if finding.state != "absent"]
        aside = [] if any(not finding.layer for finding in there) else maintenance.set_aside(self.root, key)
        return [*aside, *there]

    def remove(self, kind: str, key: str) -> None:
        """Takes one entry out of the store; fine if it is not there."""
        from jitgen.store.atomic import remove

        _check_key(key)
        with self.writing():
            remove(self.root, layout.entry_path(self.root, kind, key))

    def empty_quarantine(self) -> None:
        """Deletes the damaged entries that were set aside."""
        from jitgen.store import atomic

        with self.writing():
            for path in atomic.quarantined(self.root):
                atomic.delete(path)

    def prune(self, limit: int | None = None) -> Pruned:
        """Trims the store to ``limit`` bytes (``JITGEN_CACHE_LIMIT``), least recently used entries first.

        Entries that running processes use, and those of protected bundles, stay.
        """
        from jitgen.store import maintenance

        configured = settings.get("JITGEN_CACHE_LIMIT")
        with self.writing():
            result = maintenance.prune(self.root, configured if limit is None else limit, self.has_artifact)
            usage.note_counted(self.root, result.size_after, configured)
            return result

    def clear(self) -> int:
        """Removes every entry of the store; returns how many there were."""
        from jitgen.store import maintenance

        with self.writing():
            return maintenance.clear(self.root)

    def export(
        self, path: str | os.PathLike[str], keys: Iterable[str] | None = None, signer: Signer | None = None
    ) -> list[Entry]:
        """Writes entries (all, or those of ``keys`` with the artifacts their plans name) to a bundle.

        Args:
            signer: signs every entry in the bundle; by default they have the signatures that they have here.
        """
        from jitgen.store import archive

        return archive.export(self, Path(path), None if keys is None else list(keys), signer)

    def import_(self, path: str | os.PathLike[str]) -> Imported:
        """Adds the undamaged entries of a bundle that ``export`` wrote; undamaged entries of the store stay."""
        from jitgen.store import archive

        return archive.import_(self, Path(path))

    def protect(self, name: str, keys: Iterable[str]) -> None:
        """Keeps ``prune`` from removing the entries of ``keys``, under a name by which ``unprotect`` knows them."""
        from jitgen.store import protection

        with self.writing():
            protection.protect(self.root, name, keys)

    def unprotect(self, name: str) -> bool:
        """Lets ``prune`` remove again what ``name`` protects; returns whether there was such a name."""
        from jitgen.store import protection

        with self.writing():
            return protection.unprotect(self.root, name)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Makes the store if need be, and turns an OSError inside into a CacheError that says what to do."""
        from jitgen.store.atomic import make_root, sweep_sometimes

        try:
            make_root(self.root)
            layout.check_store(self.root)
            with suppress(OSError):
                sweep_sometimes(self.root)
            yield
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            remedy = "Make room, for example with `jitgen cache prune`, or set" if full else "Set"
            raise CacheError(
                f"the store {self.root} cannot be written: {error.strerror or error}. "
                f"{remedy} JITGEN_CACHE_DIR to a directory that you can write"
            ) from error

    # ------------------------------------------------------------------------------------------------------ private

    def has_artifact(self, key: str) -> bool:
        """Returns whether the store or one of its layers has an artifact of this key, which may be damaged."""
        if self._has_own(key):
            return True
        for source, _ in self.sources[1:]:
            with suppress(FileNotFoundError, Damaged), source.artifact(key).opened() as reader:
                reader(META, JSON_LIMIT)
                return True
        return False

    def _has_own(self, key: str) -> bool:
        return os.path.lexists(layout.artifact_path(self.root, key) / META)

    def _is_whole(self, path: Path, kind: str, key: str) -> bool:
        """Returns whether ``path``, which may be in quarantine, is the undamaged entry of ``key``."""
        source, trust = Folder(self.root), self.sources[0][1]
        with suppress(FileNotFoundError, Damaged):
            if kind == "artifact":
                read_artifact(source.artifact_at(path), key, trust)
            else:
                read_plan(source.plan_at(path), key, trust)
            return True
        return False

    def _signer(self) -> Signer | None:
        """Returns the signer of entries that are put here; CacheError if the store would not take them afterwards."""
        signer, trust = signing.signer(), self.sources[0][1]
        if trust is not None and (signer is None or signer.name not in dict(trust.keys)):
            raise CacheError(
                f"the store {self.root} takes signed entries only (JITGEN_SIGNED_ONLY), and JITGEN_SIGNING_KEY names "
                "no private key of a trusted one"
            )
        return signer

    def _own(self, key: str) -> StoredArtifact | None:
        """Returns the artifact if this store itself has it undamaged, else None."""
        source, trust = self.sources[0]
        with suppress(FileNotFoundError, Damaged):
            return read_artifact(source.artifact(key), key, trust)
        return None

    def _touch(self, path: Path) -> None:
        # As relatime does: the stamp moves once an hour, so that a warm start does not write to the disk.
        with suppress(OSError):
            if path.stat().st_mtime < time.time() - _TOUCH_SECONDS:
                os.utime(path)

    def _note_damage(self, source: Source, kind: str, key: str, damage: Damaged) -> None:
        """Warns of a damaged entry, and moves it aside if it is this store's own."""
        path = layout.entry_path(source.path, kind, key)
        if isinstance(damage, Unreadable) and source.path is not self.root:
            notice.once(
                f"unreadable {source.path}",
                f"the layer {source.path} is not used, because this user may not read it: {damage}. Mend its "
                "permissions (chmod -R a+rX), or leave it out of JITGEN_CACHE_PATH",
            )
            return
        notice.once(f"damaged {path}", f"{path} is damaged: {damage}. It is not used; `jitgen cache verify` says more")
        if source.path is self.root and not isinstance(damage, Untrusted) and not settings.is_strict():
            from jitgen.store import atomic

            with suppress(OSError):
                atomic.set_aside(self.root, path, lambda moved: self._is_whole(moved, kind, key))

    def _note_unwritable(self, problem: CacheError) -> None:
        notice.once(f"unwritable {self.root}", f"{problem}. Until then this process keeps what it compiles in memory")

    def _stay_within_limit(self, written: int) -> None:
        """Trims the store if what was ``written`` makes it exceed its limit. Nothing is walked otherwise."""
        limit = settings.get("JITGEN_CACHE_LIMIT")
        with suppress(OSError, CacheError):
            if usage.note_written(self.root, written, limit):
                from jitgen.store import maintenance

                target = int(limit * maintenance.KEPT_OF_LIMIT)
                result = maintenance.prune(self.root, limit, self.has_artifact, target)
                usage.note_counted(self.root, result.size_after, limit)


def _check_key(key: str) -> None:
    if not layout.is_key(key):
        raise CacheError(f"{key!r} is no key: a key is 64 lowercase hex digits")
