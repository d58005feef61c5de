"""The contents of an entry: encoding to bytes, and reading back with every digest checked.

An artifact is a directory and a plan is one JSON file. Each contains its own key, its schema and a digest of all of its
JSON, so that a flipped bit in a launch parameter is noticed like one in a binary. Reading raises only ``Damaged`` and
``FileNotFoundError``; the store turns both into a miss, and ``verify`` reports them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jitgen.errors import CacheError
from jitgen.spec import SCHEMA, Artifact, digest

META = "meta.json"


class Damaged(Exception):
    """An entry exists and is damaged; the message says how. This exception never leaves the package."""


@dataclass(frozen=True)
class StoredFile:
    """What ``meta.json`` records of a file: its sha256 and its size in bytes."""

    sha256: str
    size: int


@dataclass(frozen=True)
class StoredArtifact:
    """A compiled kernel in a store. Every file was verified when it was looked up.

    Attributes:
        key: the artifact key.
        directory: the directory of its files. A prune may remove it; a binary already mapped or read remains valid.
        binary: the name of the file that is loaded.
        meta: ``Artifact.meta``, after a round trip through JSON.
        files: name -> digest and size.
        content: the verified bytes of the binary.
    """

    key: str
    directory: Path
    binary: str
    meta: Mapping[str, Any]
    files: Mapping[str, StoredFile]
    content: bytes = field(repr=False)

    def path(self, name: str | None = None) -> Path:
        """The path of the file ``name``, by default of the binary."""
        return self.directory / self._known(name)

    def read(self, name: str | None = None) -> bytes:
        """The bytes of the file ``name``, by default of the binary.

        Raises:
            CacheError: there is no such file, or it was removed or altered after the look-up.
        """
        name = self._known(name)
        if name == self.binary:
            return self.content
        try:
            return _read_verified(self.directory, name, self.files[name])
        except (Damaged, FileNotFoundError) as error:
            raise CacheError(f"{self.directory} was removed or altered while in use: {error}; call again") from error

    def text(self, name: str) -> str:
        return self.read(name).decode()

    def artifact(self) -> Artifact:
        """The artifact with all of its files in memory, as the compiler returned it."""
        return Artifact(self.key, {name: self.read(name) for name in self.files}, self.binary, dict(self.meta))

    def _known(self, name: str | None) -> str:
        """``name``, by default the binary's; CacheError if the artifact has no such file."""
        if name is None:
            return self.binary
        if name not in self.files:
            raise CacheError(f"artifact {self.key[:12]} has no file {name!r}; it has {', '.join(self.files)}")
        return name


def encode_artifact(artifact: Artifact) -> dict[str, bytes]:
    """The files of the entry's directory, including ``meta.json``, by name."""
    for name in artifact.files:
        if not is_file_name(name):
            raise CacheError(f"artifact {artifact.key[:12]}: {name!r} cannot be the name of a file in an entry")
    if artifact.binary not in artifact.files:
        raise CacheError(f"artifact {artifact.key[:12]}: its binary {artifact.binary!r} is not among its files")
    body = {
        "kind": "artifact",
        "binary": artifact.binary,
        "files": {
            name: {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
            for name, content in sorted(artifact.files.items())
        },
        "meta": dict(artifact.meta),
    }
    return {**artifact.files, META: _seal(artifact.key, body)}


def encode_plan(key: str, plan: Mapping[str, Any]) -> bytes:
    """The content of the plan's JSON file."""
    return _seal(key, {"kind": "plan", "plan": dict(plan)})


def read_artifact(directory: Path, key: str) -> StoredArtifact:
    """The artifact in ``directory``, with all of its files verified.

    Raises:
        FileNotFoundError: there is no such entry.
        Damaged: the entry exists and is damaged.
    """
    try:
        sealed = (directory / META).read_bytes()
    except FileNotFoundError:
        if os.path.isdir(directory):
            raise Damaged(f"{META} is missing") from None
        raise
    except OSError as error:
        raise Damaged(f"{META} cannot be read: {error.strerror}") from error
    body = _unseal(sealed, key, "artifact")
    try:
        files = {name: StoredFile(**record) for name, record in body["files"].items()}
        binary, meta = str(body["binary"]), dict(body["meta"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Damaged(f"{META} lacks what it must say: {error!r}") from error
    if binary not in files:
        raise Damaged(f"{META} names the binary {binary!r}, which is not among its files")
    content = b""
    for name, record in files.items():
        found = _read_verified(directory, name, record)
        if name == binary:
            content = found
    return StoredArtifact(key, directory, binary, meta, files, content)


def read_plan(path: Path, key: str) -> dict[str, Any]:
    """The plan in the file ``path``; raises what ``read_artifact`` raises."""
    try:
        sealed = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Damaged(f"it cannot be read: {error.strerror}") from error
    plan = _unseal(sealed, key, "plan").get("plan")
    if not isinstance(plan, dict):
        raise Damaged("it holds no plan")
    return plan


def _seal(key: str, body: dict[str, Any]) -> bytes:
    """``body`` as JSON, together with its schema, its key and the digest of all of these."""
    # The round trip through JSON turns int keys and tuples into what a reader will see; otherwise digests would differ.
    body = json.loads(json.dumps({"schema": SCHEMA, "key": key, **body}, allow_nan=False))
    return (json.dumps({**body, "digest": digest(body)}, indent=1) + "\n").encode()


def _unseal(sealed: bytes, key: str, kind: str) -> dict[str, Any]:
    """The body that ``_seal`` encoded; Damaged if its digest, schema, kind or key is another."""
    try:
        body = json.loads(sealed)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"its JSON does not parse: {error}") from error
    if not isinstance(body, dict):
        raise Damaged("its JSON is not an object")
    try:
        whole = body.pop("digest", None) == digest(body)
    except ValueError:
        whole = False
    if not whole:
        raise Damaged("its JSON does not match its own digest")
    for name, expected in (("schema", SCHEMA), ("kind", kind), ("key", key)):
        if body.get(name) != expected:
            raise Damaged(f"its {name} is {body.get(name)!r}, expected {expected!r}")
    return body


def _read_verified(directory: Path, name: str, record: StoredFile) -> bytes:
    """The bytes of a file of an artifact; Damaged if they are not those of ``record``."""
    if not is_file_name(name):
        raise Damaged(f"{name!r} is no name of a file in an entry")
    try:
        with open(directory / name, "rb") as file:
            content = file.read()
    except FileNotFoundError:
        raise Damaged(f"{name} is missing") from None
    except OSError as error:
        raise Damaged(f"{name} cannot be read: {error.strerror}") from error
    if len(content) != record.size:
        raise Damaged(f"{name} has {len(content)} bytes, expected {record.size}")
    if hashlib.sha256(content).hexdigest() != record.sha256:
        raise Damaged(f"{name} does not match its digest")
    return content


def is_file_name(name: str) -> bool:
    """Whether ``name`` may be the name of a file in an entry: not a path, not hidden and not ``meta.json``."""
    plain = bool(name) and not name.startswith(".") and name != META
    return plain and not any(mark in name for mark in ("/", "\\", "\0"))
