"""Reads entries from directories, bundles (``bundle``) and this process's memory, all by one interface."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from jitgen.store import layout
from jitgen.store.entries import META, Contents, Files, Reader, read_artifact, read_plan
from jitgen.store.files import JSON_LIMIT, Access, Damaged, folder, read, read_in
from jitgen.store.signing import Trust


class Source(Protocol):
    """Provides entries.

    Attributes:
        path: where it is.
    """

    @property
    def path(self) -> Path: ...

    def plan(self, key: str) -> bytes:
        """Reads a plan's file; FileNotFoundError if there is none, Damaged if it cannot be read."""

    def artifact(self, key: str) -> Files:
        """Returns the files of an artifact, whether or not there is one."""

    def names(self) -> Iterator[layout.Entry]:
        """Lists every entry as a walk meets it."""


@dataclass(frozen=True)
class Folder:
    """Reads the directory of a store or of a layer."""

    path: Path
    layer: bool = False

    def plan(self, key: str) -> bytes:
        return self.plan_at(layout.plan_path(self.path, key))

    def plan_at(self, path: Path) -> bytes:
        """Reads a plan somewhere in this directory."""
        return read(path, JSON_LIMIT, Access.below(self.path, layer=self.layer))

    def artifact(self, key: str) -> Files:
        return self.artifact_at(layout.artifact_path(self.path, key))

    def artifact_at(self, path: Path) -> Files:
        """Returns the files of an artifact somewhere in this directory."""
        return _FolderFiles(self.path, self.layer, path)

    def names(self) -> Iterator[layout.Entry]:
        return layout.walk(self.path, layer=self.layer)


@dataclass(frozen=True)
class _FolderFiles:
    root: Path
    layer: bool
    path: Path

    @contextmanager
    def opened(self) -> Iterator[Reader]:
        access = Access.below(self.root, layer=self.layer)
        with folder(self.path, access) as descriptor:
            yield lambda name, limit: read_in(descriptor, name, limit, access)


@dataclass(frozen=True)
class InMemory:
    """Holds the files of one artifact in memory."""

    path: Path
    contents: Mapping[str, bytes]

    @contextmanager
    def opened(self) -> Iterator[Reader]:
        yield self._read

    def _read(self, name: str, limit: int) -> bytes:
        if name not in self.contents:
            raise FileNotFoundError(name)
        return self.contents[name][: limit + 1]


@dataclass(frozen=True)
class Memory:
    """Holds what this process could not write to its store."""

    path: Path = Path("(memory)")
    plans: dict[str, bytes] = field(default_factory=dict, repr=False)
    artifacts: dict[str, Mapping[str, bytes]] = field(default_factory=dict, repr=False)

    def plan(self, key: str) -> bytes:
        if key not in self.plans:
            raise FileNotFoundError(key)
        return self.plans[key]

    def artifact(self, key: str) -> Files:
        return _MemoryFiles(self, key)

    def keep(self, kind: str, key: str, contents: Contents) -> None:
        """Keeps the files of an entry."""
        if kind == "artifact":
            self.artifacts[key] = contents
        else:
            self.plans[key] = contents[f"{key}.json"]

    def names(self) -> Iterator[layout.Entry]:
        for key, contents in self.artifacts.items():
            yield layout.Entry("artifact", key, self.path / key, sum(map(len, contents.values())), 0.0)
        for key, content in self.plans.items():
            yield layout.Entry("plan", key, self.path / key, len(content), 0.0)


@dataclass(frozen=True)
class _MemoryFiles:
    memory: Memory
    key: str

    @property
    def path(self) -> Path:
        return self.memory.path / self.key

    @contextmanager
    def opened(self) -> Iterator[Reader]:
        if self.key not in self.memory.artifacts:
            raise FileNotFoundError(self.key)
        with InMemory(self.path, self.memory.artifacts[self.key]).opened() as reader:
            yield reader


def layer_source(path: Path) -> Source:
    """Returns the read-only layer ``path``: a directory, or a bundle that ``cache export`` wrote."""
    if path.is_file():
        from jitgen.store import bundle

        return bundle.opened(path)
    return Folder(path, layer=True)


def contents_of(source: Source, kind: str, key: str, trust: Trust | None = None) -> Contents:
    """Returns the files of an entry, byte for byte, after they were verified, with the signature that ``trust`` asks
    for."""
    if kind == "plan":
        sealed = source.plan(key)
        read_plan(sealed, key, trust)
        return {f"{key}.json": sealed}
    artifact = read_artifact(source.artifact(key), key, trust)
    with source.artifact(key).opened() as reader:
        return {META: reader(META, JSON_LIMIT)} | {name: artifact.read(name) for name in artifact.files}


def verify(kind: str, key: str, contents: Contents, trust: Trust | None) -> None:
    """Raises Damaged unless ``contents`` are the files of that entry, and no others."""
    if kind == "plan":
        read_plan(contents[f"{key}.json"], key, trust)
        return
    artifact = read_artifact(InMemory(Path(key), contents), key, trust)
    strangers = set(contents) - {META, *artifact.files}
    if strangers:
        raise Damaged(f"it has files that {META} does not name: {', '.join(sorted(strangers))}")
