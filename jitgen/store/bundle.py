"""Stores many entries in one file, a bundle, which can be read as a layer without unpacking it.

A bundle is a zip file whose members are stored and are each a zstd frame, named as in a store with ``.zst`` added:
``v1/artifact/ab/<key>/kernel.cubin.zst``, ``v1/plan/ab/<key>.json.zst``. Members are sorted and have no times, so that
the same entries make the same bytes (with the same version of zstd). The central directory finds one member among many;
common tools list and unpack a bundle.

Whoever made a bundle may have made it to do harm. Its directory is checked as a whole when it is opened: names, counts
and sizes. What a member says of its own size is believed only as an upper bound.
"""

from __future__ import annotations

import importlib
import io
import os
import re
import struct
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

from jitgen.errors import CacheError
from jitgen.store import layout
from jitgen.store.entries import META, Contents, Files, Reader, is_file_name
from jitgen.store.files import FILE_LIMIT, FILES_LIMIT, JSON_LIMIT, Damaged

MEMBER_LIMIT = 200_000
"""Members of a bundle: about 50,000 kernels and their plans."""
ENTRY_LIMIT = 2**28
"""Bytes of one entry unpacked."""
DIRECTORY_LIMIT = 2**26
"""Bytes of the central directory, which is read as a whole."""
TOTAL_LIMIT = 2**35
"""Bytes of all members unpacked: 32 GiB, more than a store keeps."""

_LEVEL = 9
_MEMBER = re.compile(
    layout.VERSION
    + r"/(?:artifact/([0-9a-f]{2})/(\1[0-9a-f]{62})/([^/]+)|plan/([0-9a-f]{2})/(\4[0-9a-f]{62})\.json)\.zst"
)
_HEADER = struct.Struct("<4s22xHH")
"""A member's own header: signature, then the lengths of its name and of its extra field."""
_FRAME_HEADER = 18
"""Bytes of a zstd frame's header, at most."""
_EPOCH = (1980, 1, 1, 0, 0, 0)


def _zstd() -> Any:
    module = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
    try:
        return importlib.import_module(module)
    except ImportError:
        raise CacheError(f"bundles need the module {module}; install it with: pip install backports.zstd") from None


# ---------------------------------------------------------------------------------------------------------- writing


def write(file: BinaryIO, entries: Iterable[tuple[str, str, Contents]]) -> None:
    """Writes a bundle of ``(kind, key, files)``, which are sorted by kind and key, one after the other."""
    zstd = _zstd()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for kind, key, contents in entries:
            top = f"{layout.VERSION}/{kind}/{key[:2]}"
            for name, content in sorted(contents.items()):
                path = f"{top}/{key}/{name}.zst" if kind == "artifact" else f"{top}/{key}.json.zst"
                member = zipfile.ZipInfo(path, _EPOCH)
                member.create_system = 3  # Unix, wherever it is written
                member.external_attr = 0o644 << 16
                archive.writestr(member, zstd.compress(content, _LEVEL))


def packed(kind: str, key: str, contents: Contents) -> bytes:
    """Packs one entry as a bundle."""
    file = io.BytesIO()
    write(file, [(kind, key, contents)])
    return file.getvalue()


# ---------------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Frame:
    """Locates a member's zstd frame in a bundle, with the unpacked size that the frame states."""

    offset: int
    length: int
    size: int


@dataclass(frozen=True)
class Bundle:
    """Reads a bundle as a source of entries (``sources.Source``).

    Attributes:
        path: where it is.
        members: by kind and key the frames of an entry, by file name.
    """

    path: Path
    members: Mapping[tuple[str, str], Mapping[str, Frame]] = field(repr=False)
    _data: _Data = field(repr=False)
    _time: float = 0.0

    def plan(self, key: str) -> bytes:
        return self._read(("plan", key), f"{key}.json", JSON_LIMIT)

    def artifact(self, key: str) -> Files:
        return _BundledFiles(self, key)

    def names(self) -> Iterator[layout.Entry]:
        for (kind, key), files in sorted(self.members.items()):
            path = layout.entry_path(self.path, kind, key)
            yield layout.Entry(kind, key, path, sum(frame.size for frame in files.values()), self._time, True)

    def contents(self, kind: str, key: str) -> Contents:
        """Returns the files of an entry, unverified; Damaged if one cannot be unpacked."""
        return {name: self._read((kind, key), name, frame.size) for name, frame in self.members[kind, key].items()}

    def _read(self, entry: tuple[str, str], name: str, limit: int) -> bytes:
        files = self.members.get(entry)
        if files is None or name not in files:
            raise FileNotFoundError(name)
        frame, zstd = files[name], _zstd()
        packed = self._data.at(frame.offset, frame.length)
        unpacker = zstd.ZstdDecompressor()
        try:
            content: bytes = unpacker.decompress(packed, max_length=min(limit, frame.size) + 1)
        except (zstd.ZstdError, EOFError, ValueError, MemoryError) as error:
            raise Damaged(f"{name} cannot be unpacked: {error}") from error
        if unpacker.eof and unpacker.unused_data:
            raise Damaged(f"{name} has something after its end")
        return content


@dataclass(frozen=True)
class _BundledFiles:
    bundle: Bundle
    key: str

    @property
    def path(self) -> Path:
        return layout.artifact_path(self.bundle.path, self.key)

    @contextmanager
    def opened(self) -> Iterator[Reader]:
        if ("artifact", self.key) not in self.bundle.members:
            raise FileNotFoundError(self.key)
        yield lambda name, limit: self.bundle._read(("artifact", self.key), name, limit)


class _Data(io.RawIOBase):
    """Reads the bytes of a bundle. Processes that share the descriptor after a fork do not share a position in it, and
    ``zipfile`` cannot make it read more at once than a central directory may have."""

    def __init__(self, content: bytes | int, size: int):
        self._content = content
        self._size = size
        self._position = 0

    def at(self, offset: int, length: int) -> bytes:
        """Returns ``length`` bytes from ``offset``; Damaged if there are not so many, or if they cannot be read."""
        try:
            content = self._slice(offset, length)
        except OSError as error:
            raise Damaged(f"the bundle cannot be read: {error.strerror}") from error
        if len(content) != length:
            raise Damaged("the bundle is cut short")
        return content

    def _slice(self, offset: int, length: int) -> bytes:
        if isinstance(self._content, bytes):
            return self._content[offset : offset + length]
        return os.pread(self._content, length, offset)

    # What zipfile asks of a file.

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = max(0, (0, self._position, self._size)[whence] + offset)
        return self._position

    def read(self, length: int = -1) -> bytes:
        wanted = max(0, self._size - self._position)
        wanted = wanted if length < 0 else min(wanted, length)
        if wanted > DIRECTORY_LIMIT:
            raise CacheError(f"its directory has {wanted} bytes, and more than {DIRECTORY_LIMIT} are not read")
        content = self._slice(self._position, wanted)
        self._position += len(content)
        return content


def opened(path: Path) -> Bundle:
    """Opens the bundle at ``path`` and checks its directory.

    Raises:
        CacheError: it cannot be opened, is no bundle, or has a member that is no file of an entry.
    """
    try:
        status = path.stat()
        return _opened(path, status.st_mtime_ns, status.st_size)
    except FileNotFoundError as error:
        raise CacheError(f"there is no archive {path}") from error
    except OSError as error:
        raise CacheError(f"the archive {path} cannot be read: {error.strerror}") from error


@lru_cache(maxsize=64)
def _opened(path: Path, modified: int, size: int) -> Bundle:
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0))
    try:
        return parsed(path, _Data(descriptor, size), modified / 1e9)
    except BaseException:
        os.close(descriptor)
        raise


def of_bytes(path: Path, content: bytes) -> Bundle:
    """Reads a bundle from its bytes, ``content``; raises what ``opened`` raises."""
    return parsed(path, _Data(content, len(content)), 0.0)


def parsed(path: Path, data: _Data, modified: float) -> Bundle:
    """Reads the directory of a bundle."""
    try:
        with zipfile.ZipFile(data) as archive:
            listed = archive.infolist()
    except (zipfile.BadZipFile, CacheError, OSError, ValueError, NotImplementedError, struct.error) as error:
        raise CacheError(f"{path} is no archive of a jitgen store: {error}") from error
    members: dict[tuple[str, str], dict[str, Frame]] = {}
    ranges: list[tuple[int, int]] = []
    try:
        _check(len(listed) <= MEMBER_LIMIT, f"has {len(listed)} members, and may have {MEMBER_LIMIT}")
        for member in listed:
            kind, key, name = _named(member)
            files = members.setdefault((kind, key), {})
            _check(name not in files, f"has two members {member.filename!r}")
            files[name] = frame = _frame(member, data)
            ranges.append((frame.offset, frame.offset + frame.length))
        ranges.sort()
        disjoint = all(end <= start for (_, end), (start, _) in pairwise(ranges))
        _check(disjoint, "has two members in the same bytes")
        sizes = []
        for (_, key), files in members.items():
            _check(len(files) <= FILES_LIMIT, f"has more than {FILES_LIMIT} files of one entry, {key[:12]}")
            sizes.append(sum(frame.size for frame in files.values()))
            _check(sizes[-1] <= ENTRY_LIMIT, f"has an entry, {key[:12]}, that unpacks to more than {ENTRY_LIMIT} bytes")
        _check(sum(sizes) <= TOTAL_LIMIT, f"unpacks to more than {TOTAL_LIMIT} bytes")
    except Damaged as damage:
        raise CacheError(f"{path} is no archive of a jitgen store: {damage}") from damage
    except _Refused as problem:
        raise CacheError(
            f"{path} is refused: it {problem}; nothing was imported. "
            "Take archives that `jitgen cache export` of the same version wrote"
        ) from None
    return Bundle(path, members, data, modified)


class _Refused(Exception):
    """Says what is the matter with an archive; the subject of the message is the archive."""


def _check(condition: bool, otherwise: str) -> None:
    if not condition:
        raise _Refused(otherwise)


def _named(member: zipfile.ZipInfo) -> tuple[str, str, str]:
    """Returns the kind, key and file name of a member."""
    name = member.filename
    match = _MEMBER.fullmatch(name)
    file = match[3] if match is not None else None
    plain = match is not None and (file is None or file == META or is_file_name(file))
    _check(plain and "\0" not in member.orig_filename, f"has a member {name[:200]!r}, which is no file of an entry")
    assert match is not None
    return ("artifact", match[2], match[3]) if file is not None else ("plan", match[5], f"{match[5]}.json")


def _frame(member: zipfile.ZipInfo, data: _Data) -> Frame:
    """Locates a member's content."""
    name = member.filename
    _check(
        member.compress_type == zipfile.ZIP_STORED and not member.flag_bits & 1,
        f"has a member {name!r} that is packed by zip or encrypted",
    )
    mode = member.external_attr >> 16
    _check(mode & 0o170000 in (0, 0o100000), f"has a member {name!r} that is no regular file")
    _check(
        0 < member.compress_size == member.file_size <= FILE_LIMIT, f"has a member {name!r} of {member.file_size} bytes"
    )
    signature, name_length, extra_length = _HEADER.unpack(data.at(member.header_offset, _HEADER.size))
    _check(signature == b"PK\3\4", f"has no member where it lists {name!r}")
    offset = member.header_offset + _HEADER.size + name_length + extra_length
    size = _unpacked_size(member, data.at(offset, min(member.compress_size, _FRAME_HEADER)))
    return Frame(offset, member.compress_size, size)


def _unpacked_size(member: zipfile.ZipInfo, head: bytes) -> int:
    """Returns the size that the frame's first bytes state."""
    zstd = _zstd()
    try:
        size = zstd.get_frame_info(head).decompressed_size
    except (zstd.ZstdError, ValueError):
        size = None
    _check(
        size is not None and size <= FILE_LIMIT,
        f"has a member {member.filename!r} that is no zstd frame of at most {FILE_LIMIT} bytes",
    )
    assert size is not None
    return int(size)
