"""Encodes the contents of an entry to bytes, and reads them back with every digest checked.

An artifact is several files and a plan is one JSON file. Each contains its own key, its schema and a digest of all of
its JSON, so that a flipped bit in a launch parameter is noticed like one in a binary. The digest may be signed
(``signing``). Reading raises only ``Damaged`` and ``FileNotFoundError``; the store turns both into a miss, and
``verify`` reports them. Where the files are, in a directory, a bundle or memory, is the business of ``sources``.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from jitgen.errors import CacheError
from jitgen.spec import SCHEMA, Artifact, digest
from jitgen.store.files import FILE_LIMIT, FILES_LIMIT, JSON_LIMIT, Damaged, TooLarge
from jitgen.store.layout import is_key
from jitgen.store.signing import Signer, Trust

META = "meta.json"
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,254}")

Reader = Callable[[str, int], bytes]
"""``(name, limit)`` -> the bytes of that file, ``limit + 1`` at most; raises Damaged and FileNotFoundError."""

Contents = Mapping[str, bytes]
"""The files of one entry, by name: a plan's ``<key>.json``, or those of an artifact with ``meta.json``."""


class Files(Protocol):
    """Reads the files of one artifact.

    Attributes:
        path: where they are, for messages; a directory only if the artifact is in one.
    """

    @property
    def path(self) -> Path: ...

    def opened(self) -> AbstractContextManager[Reader]:
        """Opens a reader of the files; FileNotFoundError if there is no such artifact, Damaged if it cannot be read."""


@dataclass(frozen=True)
class StoredFile:
    """Records what ``meta.json`` says of a file: its sha256 and its size in bytes."""

    sha256: str
    size: int


@dataclass(frozen=True)
class StoredArtifact:
    """Represents a compiled kernel in a store. Every file was verified when it was looked up.

    Attributes:
        key: the artifact key.
        directory: the directory of its files. A prune may remove it, and of an artifact in a bundle or in memory there
            is none; what is loaded is ``content``, whatever becomes of the directory.
        binary: the name of the file that is loaded.
        meta: ``Artifact.meta``, after a round trip through JSON.
        files: name -> digest and size.
        content: the verified bytes of the binary.
        source: what reads the other files.
    """

    key: str
    directory: Path
    binary: str
    meta: Mapping[str, Any]
    files: Mapping[str, StoredFile]
    content: bytes = field(repr=False)
    source: Files = field(repr=False, compare=False)

    def path(self, name: str | None = None) -> Path:
        """Returns the path of the file ``name``, by default of the binary, for people: nothing loads a binary by its
        path."""
        return self.directory / self._known(name)

    def read(self, name: str | None = None) -> bytes:
        """Returns the bytes of the file ``name``, by default of the binary.

        Raises:
            CacheError: there is no such file, or it was removed or altered after the look-up.
        """
        name = self._known(name)
        if name == self.binary:
            return self.content
        try:
            with self.source.opened() as reader:
                return _read_verified(reader, name, self.files[name])
        except (Damaged, FileNotFoundError) as error:
            raise CacheError(f"{self.directory} was removed or altered while in use: {error}; call again") from error

    def text(self, name: str) -> str:
        return self.read(name).decode()

    def artifact(self) -> Artifact:
        """Returns the artifact with all of its files in memory, as the compiler returned it."""
        return Artifact(self.key, {name: self.read(name) for name in self.files}, self.binary, dict(self.meta))

    def _known(self, name: str | None) -> str:
        """Returns ``name``, by default the binary's; CacheError if the artifact has no such file."""
        if name is None:
            return self.binary
        if name not in self.files:
            raise CacheError(f"artifact {self.key[:12]} has no file {name!r}; it has {', '.join(self.files)}")
        return name


def encode_artifact(artifact: Artifact, signer: Signer | None = None) -> dict[str, bytes]:
    """Returns the files of the entry, including ``meta.json``, by name."""
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
    return {**artifact.files, META: _seal(artifact.key, body, signer)}


def encode_plan(key: str, plan: Mapping[str, Any], signer: Signer | None = None) -> bytes:
    """Returns the content of the plan's JSON file."""
    return _seal(key, {"kind": "plan", "plan": dict(plan)}, signer)


def resealed(sealed: bytes, signer: Signer) -> bytes:
    """Returns the JSON of an entry signed anew by ``signer``, whoever signed it before."""
    body = json.loads(sealed)
    body.pop("signature", None)
    return _written({**body, "signature": signer.sign(body["digest"])})


def read_artifact(source: Files, key: str, trust: Trust | None = None) -> StoredArtifact:
    """Returns the artifact of ``source``, with all of its files verified, and its signature where ``trust`` asks for
    one.

    Raises:
        FileNotFoundError: there is no such entry.
        Damaged: the entry exists and is damaged.
    """
    with source.opened() as reader:
        try:
            sealed = reader(META, JSON_LIMIT)
        except FileNotFoundError:
            raise Damaged(f"{META} is missing") from None
        body = _unseal(sealed, key, "artifact", trust)
        try:
            files = {name: StoredFile(**record) for name, record in body["files"].items()}
            binary, meta = str(body["binary"]), dict(body["meta"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Damaged(f"{META} lacks what it must say: {error!r}") from error
        if binary not in files:
            raise Damaged(f"{META} names the binary {binary!r}, which is not among its files")
        if len(files) > FILES_LIMIT:
            raise Damaged(f"{META} names {len(files)} files, expected no more than {FILES_LIMIT}")
        content = b""
        for name, record in files.items():
            data = _read_verified(reader, name, record)
            if name == binary:
                content = data
    return StoredArtifact(key, source.path, binary, meta, files, content, source)


def read_plan(sealed: bytes, key: str, trust: Trust | None = None) -> dict[str, Any]:
    """Returns the plan whose file has the bytes ``sealed``; Damaged if they are not those of that plan."""
    plan = _unseal(sealed, key, "plan", trust).get("plan")
    if not isinstance(plan, dict):
        raise Damaged("it holds no plan")
    artifacts = plan.get("artifacts")
    if not isinstance(artifacts, list) or not all(map(is_key, artifacts)):
        raise Damaged("its plan has no list of the keys of its artifacts")
    return plan


def _seal(key: str, body: dict[str, Any], signer: Signer | None) -> bytes:
    """Encodes ``body`` as JSON together with its schema, its key, the digest of all of these and its signature."""
    # The round trip through JSON turns int keys and tuples into what a reader will see; otherwise digests would differ.
    body = json.loads(json.dumps({"schema": SCHEMA, "key": key, **body}, allow_nan=False))
    sealed = {**body, "digest": digest(body)}
    return _written(sealed if signer is None else {**sealed, "signature": signer.sign(sealed["digest"])})


def _written(body: dict[str, Any]) -> bytes:
    return (json.dumps(body, indent=1) + "\n").encode()


def _unseal(sealed: bytes, key: str, kind: str, trust: Trust | None) -> dict[str, Any]:
    """Decodes what ``_seal`` encoded; Damaged if its digest, schema, kind, key or signature is another."""
    try:
        body = json.loads(sealed)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"its JSON does not parse: {error}") from error
    if not isinstance(body, dict):
        raise Damaged("its JSON is not an object")
    signature, own = body.pop("signature", None), body.pop("digest", None)
    try:
        whole = own == digest(body)
    except (ValueError, RecursionError):
        whole = False
    if not whole:
        raise Damaged("its JSON does not match its own digest")
    for name, expected in (("schema", SCHEMA), ("kind", kind), ("key", key)):
        if body.get(name) != expected:
            raise Damaged(f"its {name} is {body.get(name)!r}, expected {expected!r}")
    if trust is not None:
        trust.check(str(own), signature)
    return body


def _read_verified(reader: Reader, name: str, record: StoredFile) -> bytes:
    """Returns the verified bytes of a file of an artifact; Damaged if they are not those of ``record``."""
    if not is_file_name(name):
        raise Damaged(f"{name!r} is no name of a file in an entry")
    if not isinstance(record.size, int) or not 0 <= record.size <= FILE_LIMIT:
        raise Damaged(f"{name} is to have {record.size!r} bytes, expected no more than {FILE_LIMIT}")
    try:
        content = reader(name, record.size)
    except FileNotFoundError:
        raise Damaged(f"{name} is missing") from None
    except TooLarge as problem:
        raise Damaged(f"{name} has {problem.size} bytes, expected {record.size}") from None
    if len(content) != record.size:
        raise Damaged(f"{name} has {len(content)} bytes, expected {record.size}")
    if hashlib.sha256(content).hexdigest() != record.sha256:
        raise Damaged(f"{name} does not match its digest")
    return content


def is_file_name(name: str) -> bool:
    """Returns whether ``name`` may be the name of a file in an entry: not a path, not hidden, plain and not
    ``meta.json``."""
    return _FILE_NAME.fullmatch(name) is not None and name != META
