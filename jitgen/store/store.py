"""``Store``: the one object through which the rest of jitgen reads and writes the disk."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jitgen import settings
from jitgen.errors import CacheError
from jitgen.spec import Artifact
from jitgen.store import layout
from jitgen.store.entries import Damaged, StoredArtifact, encode_artifact, encode_plan, read_artifact, read_plan
from jitgen.store.layout import Entry

if TYPE_CHECKING:
    from jitgen.store.archive import Imported
    from jitgen.store.maintenance import Finding, Pruned, Verification

_TOUCH_SECONDS = 3600.0


@dataclass(frozen=True)
class Store:
    """A directory of plans and artifacts, with read-only layers behind it. See the package for the contract.

    Attributes:
        root: the store's directory; it need not exist before the first write.
        layers: directories searched after it, in order, and never written.
    """

    root: Path
    layers: tuple[Path, ...] = ()

    @staticmethod
    def open(
        directory: str | os.PathLike[str] | None = None, layers: Iterable[str | os.PathLike[str]] | None = None
    ) -> Store:
        """The store in ``directory``; by default the one that the settings and the installation name.

        Raises:
            CacheError: the directory is someone else's, open to others' writing, or no directory.
        """
        root = layout.absolute(layout.default_directory() if directory is None else directory)
        named = settings.get("JITGEN_CACHE_PATH") if layers is None else layers
        behind = tuple(layout.absolute(layer) for layer in named)
        layout.check_store(root)
        for layer in behind:
            layout.check_layer(layer)
        return Store(root, tuple(layer for layer in behind if layer != root))

    # ------------------------------------------------------------------------------------------------------ reading

    def get_artifact(self, key: str) -> StoredArtifact | None:
        """The artifact, every file verified; None if it is absent or damaged wherever it lies."""
        _check_key(key)
        for root in (self.root, *self.layers):
            directory = layout.artifact_path(root, key)
            with suppress(FileNotFoundError, Damaged):
                artifact = read_artifact(directory, key)
                self._touch(root, directory)
                return artifact
        return None

    def get_plan(self, key: str) -> dict[str, Any] | None:
        """The plan stored for a request; None if it is absent or damaged. Its artifacts may be gone: look them up."""
        _check_key(key)
        for root in (self.root, *self.layers):
            path = layout.plan_path(root, key)
            with suppress(FileNotFoundError, Damaged):
                plan = read_plan(path, key)
                self._touch(root, path)
                return plan
        return None

    def peek(self, entry: Entry) -> StoredArtifact | dict[str, Any] | None:
        """An artifact or a plan the walk found, read without marking it used; None if it is damaged."""
        with suppress(FileNotFoundError, Damaged):
            return (read_artifact if entry.kind == "artifact" else read_plan)(entry.path, entry.key)
        return None

    # ------------------------------------------------------------------------------------------------------ writing

    def put_artifact(self, artifact: Artifact) -> StoredArtifact:
        """Store it and return it as a reader finds it; an undamaged entry that is already there stays.

        Raises:
            CacheError: the store cannot be written. See the package for what the caller does then.
        """
        from jitgen.store.atomic import install_directory

        _check_key(artifact.key)
        files = encode_artifact(artifact)
        target = layout.artifact_path(self.root, artifact.key)

        def present() -> StoredArtifact | None:
            with suppress(FileNotFoundError, Damaged):
                return read_artifact(target, artifact.key)
            return None

        if (theirs := present()) is not None:
            return theirs
        with self.writing():
            install_directory(self.root, target, files, lambda: present() is not None)
        stored = present()
        if stored is None:
            raise CacheError(f"{target} was removed or altered as soon as it was written; look who else uses the store")
        return stored

    def put_plan(self, key: str, plan: Mapping[str, Any]) -> None:
        """Store a plan, in place of one that is there: a plan names artifacts, and newer names are better.

        Raises:
            CacheError: as ``put_artifact``.
        """
        from jitgen.store.atomic import install_file

        _check_key(key)
        content = encode_plan(key, plan)
        with self.writing():
            install_file(self.root, layout.plan_path(self.root, key), content)

    def single_flight(self, key: str, patience: float | None = None) -> AbstractContextManager[bool]:
        """Hold the key's lock between processes; look the key up again once inside.

        Yields whether the lock is held: after ``patience`` seconds (600), and where locks cannot be had, the caller
        continues without one and at worst compiles what another process compiles too. Not reentrant.
        """
        from jitgen.store import lock

        _check_key(key)
        return lock.single_flight(self.root, key, lock.PATIENCE_SECONDS if patience is None else patience)

    # -------------------------------------------------------------------------------------------------- maintenance

    @property
    def writable(self) -> bool:
        return layout.is_writable(self.root)

    def entries(self, prefix: str = "") -> Iterator[Entry]:
        """Every entry whose key starts with ``prefix``, the layers' after the store's."""
        yield from layout.walk(self.root, prefix=prefix)
        for layer in self.layers:
            yield from layout.walk(layer, prefix=prefix, layer=True)

    def verify(self) -> Verification:
        """Read every entry of the store (not of the layers) and report what is damaged."""
        from jitgen.store import maintenance

        return maintenance.verify(self.root, self._holds)

    def why(self, key: str) -> list[Finding]:
        """What the store and each layer have under ``key``, plan and artifact alike; empty when none has it."""
        from jitgen.store import maintenance

        _check_key(key)
        roots = [(self.root, False), *((layer, True) for layer in self.layers)]
        findings = [
            maintenance.examine(root, kind, key, self._holds, layer=layer)
            for root, layer in roots
            for kind in layout.KINDS
        ]
        return [finding for finding in findings if finding.state != "absent"]

    def remove(self, kind: str, key: str) -> None:
        """Take one entry out of the store; fine if it is not there."""
        from jitgen.store.atomic import remove

        _check_key(key)
        with self.writing():
            remove(self.root, layout.entry_path(self.root, kind, key))

    def prune(self, limit: int | None = None) -> Pruned:
        """Trim the store to ``limit`` bytes (``JITGEN_CACHE_LIMIT``), least recently used entries first."""
        from jitgen.store import maintenance

        bytes_left = settings.get("JITGEN_CACHE_LIMIT") if limit is None else limit
        with self.writing():
            return maintenance.prune(self.root, bytes_left, self._holds)

    def clear(self) -> int:
        """Remove every entry of the store; returns how many there were."""
        from jitgen.store import maintenance

        with self.writing():
            return maintenance.clear(self.root)

    def export(self, path: str | os.PathLike[str], keys: Iterable[str] | None = None) -> list[Entry]:
        """Write entries (all, or those of ``keys`` with the artifacts their plans name) to a tar archive."""
        from jitgen.store import archive

        return archive.export(self, Path(path), None if keys is None else list(keys))

    def import_(self, path: str | os.PathLike[str]) -> Imported:
        """Add the undamaged entries of an archive that ``export`` wrote; undamaged entries of the store stay."""
        from jitgen.store import archive

        return archive.import_(self, Path(path))

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Make the store if need be, and raise an OSError inside as a CacheError that says what to do."""
        from jitgen.store.atomic import make_root, sweep_sometimes

        try:
            make_root(self.root)
            layout.check_store(self.root)
            with suppress(OSError):
                sweep_sometimes(self.root)
            yield
        except OSError as error:
            raise CacheError(
                f"the store {self.root} cannot be written: {error.strerror or error}. "
                "Set JITGEN_CACHE_DIR to a directory you can write, or make room with `jitgen cache prune`"
            ) from error

    # ------------------------------------------------------------------------------------------------------ private

    def _holds(self, key: str) -> bool:
        return any((layout.artifact_path(root, key) / "meta.json").is_file() for root in (self.root, *self.layers))

    def _touch(self, root: Path, path: Path) -> None:
        # As relatime does: the stamp moves once an hour, so that a warm start does not write to the disk.
        if root is self.root:
            with suppress(OSError):
                if path.stat().st_mtime < time.time() - _TOUCH_SECONDS:
                    os.utime(path)


def _check_key(key: str) -> None:
    if not layout.is_key(key):
        raise CacheError(f"{key!r} is no key: a key is 64 lowercase hex digits")
