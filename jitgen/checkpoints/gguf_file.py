"""Reads the container of GGUF files, versions 2 and 3, little-endian: metadata, tensor infos, and data that is mapped.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Every length that the file states is compared with
what is left of the file before anything is made of it.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from jitgen.checkpoints.source import Storage
from jitgen.errors import FormatError

MAGIC = b"GGUF"
ALIGNMENT = 32
"""The alignment of tensor data, in bytes, if the metadata has no ``general.alignment``."""
LIMIT = 1 << 20
"""The most tensors and metadata keys of a file; llama.cpp's largest models have some thousands."""
MAX_DIMENSIONS = 4
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class Kind:
    """Describes a type of tensors: how many numbers a block has, and how many bytes."""

    name: str
    numbers: int
    bytes: int
    dtype: torch.dtype | None = None


KINDS: dict[int, Kind] = {
    0: Kind("F32", 1, 4, torch.float32),
    1: Kind("F16", 1, 2, torch.float16),
    2: Kind("Q4_0", 32, 18),
    3: Kind("Q4_1", 32, 20),
    6: Kind("Q5_0", 32, 22),
    7: Kind("Q5_1", 32, 24),
    8: Kind("Q8_0", 32, 34),
    9: Kind("Q8_1", 32, 40),
    10: Kind("Q2_K", 256, 84),
    11: Kind("Q3_K", 256, 110),
    12: Kind("Q4_K", 256, 144),
    13: Kind("Q5_K", 256, 176),
    14: Kind("Q6_K", 256, 210),
    15: Kind("Q8_K", 256, 292),
    16: Kind("IQ2_XXS", 256, 66),
    17: Kind("IQ2_XS", 256, 74),
    18: Kind("IQ3_XXS", 256, 98),
    19: Kind("IQ1_S", 256, 50),
    20: Kind("IQ4_NL", 32, 18),
    21: Kind("IQ3_S", 256, 110),
    22: Kind("IQ2_S", 256, 82),
    23: Kind("IQ4_XS", 256, 136),
    24: Kind("I8", 1, 1, torch.int8),
    25: Kind("I16", 1, 2, torch.int16),
    26: Kind("I32", 1, 4, torch.int32),
    27: Kind("I64", 1, 8, torch.int64),
    28: Kind("F64", 1, 8, torch.float64),
    29: Kind("IQ1_M", 256, 56),
    30: Kind("BF16", 1, 2, torch.bfloat16),
    34: Kind("TQ1_0", 256, 54),
    35: Kind("TQ2_0", 256, 66),
    39: Kind("MXFP4", 32, 17),
    40: Kind("NVFP4", 64, 36),
    41: Kind("Q1_0", 128, 18),
}


@dataclass(frozen=True)
class Info:
    """Describes a tensor of the file: its torch shape, its type, and where its bytes are."""

    shape: tuple[int, ...]
    kind: Kind
    start: int
    size: int


class GgufFile(Storage):
    """Maps a file. Tensors are copied out of it one at a time.

    Attributes:
        metadata: its keys and values; arrays of more than some thousands of entries (vocabularies) are left out.

    Raises:
        FormatError: it is not a GGUF file, or is truncated or damaged.
    """

    def __init__(self, path: str):
        self._path = path
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 24:
                raise FormatError(f"{path}: {size} bytes are no GGUF file")
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        head = _Head(path, self._bytes)
        self.metadata, tensors = head.read()
        self._infos = tensors

    def names(self) -> Sequence[str]:
        return list(self._infos)

    def kind(self, name: str) -> Kind:
        return self._infos[name].kind

    def is_plain(self, name: str) -> bool:
        """Returns whether torch has a dtype for its numbers."""
        return self._infos[name].kind.dtype is not None

    def facts(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        info = self._infos[name]
        return info.shape, info.kind.dtype or torch.uint8

    def read(self, name: str) -> torch.Tensor:
        info = self._infos[name]
        if info.kind.dtype is None:
            raise FormatError(f"{self._path}: {name} is of type {info.kind.name}, which is no dtype of torch")
        return self._copied(info).view(info.kind.dtype).view(info.shape)

    def blocks(self, name: str) -> torch.Tensor:
        """Returns the bytes of a tensor, ``uint8[blocks, bytes of a block]``."""
        info = self._infos[name]
        return self._copied(info).view(-1, info.kind.bytes)

    def _copied(self, info: Info) -> torch.Tensor:
        if not info.size:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(bytearray(self._bytes[info.start : info.start + info.size]), dtype=torch.uint8)


class _Head:
    """Reads the file up to its data."""

    def __init__(self, path: str, bytes_: mmap.mmap):
        self._path, self._bytes, self._at = path, bytes_, 0

    def read(self) -> tuple[dict[str, Any], dict[str, Info]]:
        if self._take(4) != MAGIC:
            raise FormatError(f"{self._path} is no GGUF file: it does not begin with {MAGIC!r}")
        version = self._number("<I")
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3)
            problem = "it is big-endian" if swapped else f"version {version} of GGUF"
            raise FormatError(f"{self._path}: {problem}; versions 2 and 3, little-endian, are read")
        tensors, keys = self._count("tensors"), self._count("metadata keys")
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self._string()
            metadata[key] = self._value(self._number("<I"))
        tensor_infos = [self._info() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise FormatError(f"{self._path}: general.alignment is {alignment!r}, which is no power of two")
        base = -(-self._at // alignment) * alignment
        infos: dict[str, Info] = {}
        for name, shape, kind, offset, size in tensor_infos:
            if name in infos:
                raise FormatError(f"{self._path}: {name} is in it twice")
            if base + offset + size > len(self._bytes):
                raise FormatError(
                    f"{self._path}: {name} ends at byte {base + offset + size}, and the file has {len(self._bytes)}: "
                    "it is truncated"
                )
            infos[name] = Info(shape, kind, base + offset, size)
        return metadata, infos

    def _info(self) -> tuple[str, tuple[int, ...], Kind, int, int]:
        name, rank = self._string(), self._number("<I")
        if rank > MAX_DIMENSIONS:
            raise FormatError(f"{self._path}: {name} has {rank} dimensions; {MAX_DIMENSIONS} are the most")
        shape = tuple(self._number("<Q") for _ in range(rank))[::-1]
        if math.prod(max(size, 1) for size in shape) >= 1 << 63:
            raise FormatError(f"{self._path}: {name} is {list(shape)}, more than any tensor has")
        number, offset = self._number("<I"), self._number("<Q")
        # The size of a type that nobody knows here is unknown too; only who asks for the tensor meets an error.
        kind, count = KINDS.get(number, Kind(f"number {number}", 1, 0)), 1
        for size in shape:
            count *= size
        if shape and shape[-1] % kind.numbers:
            raise FormatError(
                f"{self._path}: rows of {name} have {shape[-1]} numbers, no whole blocks of {kind.numbers}"
            )
        return name, shape, kind, offset, count // kind.numbers * kind.bytes

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise FormatError(f"{self._path}: a metadata value is of type {kind}, which is none of GGUF's")
        item, count = self._number("<I"), self._number("<Q")
        if item in _SCALARS:
            code = _SCALARS[item]
            taken = self._take(count * struct.calcsize(code))
            return [value for (value,) in struct.iter_unpack(code, taken)] if count <= 4096 else None
        if item != _STRING or count > len(self._bytes):
            raise FormatError(f"{self._path}: a metadata array of {count} values of type {item} is not readable")
        values = [self._string() for _ in range(count)]
        return values if count <= 4096 else None

    def _count(self, what: str) -> int:
        count = self._number("<Q")
        if count > LIMIT:
            raise FormatError(f"{self._path}: it says it has {count} {what}; {LIMIT} are the most")
        return count

    def _string(self) -> str:
        try:
            return self._take(self._number("<Q")).decode()
        except UnicodeDecodeError as error:
            raise FormatError(f"{self._path}: a name is no UTF-8: {error}") from None

    def _number(self, code: str) -> Any:
        return struct.unpack(code, self._take(struct.calcsize(code)))[0]

    def _take(self, count: int) -> bytes:
        taken = self._bytes[self._at : self._at + count]
        if len(taken) != count:
            raise FormatError(f"{self._path}: it ends at byte {len(self._bytes)}, within its head: it is truncated")
        self._at += count
        return taken
