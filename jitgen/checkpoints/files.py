"""Opens checkpoints: one file, shards with an index, or a directory; safetensors, GGUF, and pickles by name alone.

A safetensors file is mapped by its library, so that a tensor is read when it is asked for. A config that lies beside
the weights (``config.json``, ``quantize_config.json``, ``hf_quant_config.json``) is read for what it says of
quantisation.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from jitgen.checkpoints.gguf_file import MAGIC, GgufFile
from jitgen.checkpoints.source import Source, Storage, Tensors
from jitgen.errors import FormatError, UnsupportedError
from jitgen.spec import DTYPES

_CONFIGS = ("config.json", "quantize_config.json", "quant_config.json", "hf_quant_config.json")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


def opened(path: str | os.PathLike[str], pickled: bool) -> Source:
    """Opens the checkpoint at ``path``.

    Args:
        pickled: whether pickle files may be read, with ``torch.load(weights_only=True)``.

    Raises:
        FormatError: it is damaged, or there is none. UnsupportedError: a package is missing, or it is a pickle file.
    """
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise FormatError(f"{path!a:.80} is no checkpoint: pass a path or a state dict")
    location = Path(path)
    if not location.exists():
        raise FormatError(f"{location}: there is no such file or directory")
    files, weight_map = _files(location)
    storages: dict[str, Storage] = {}
    metadata: dict[str, Any] = {}
    for file in files:
        storage = _storage(file, pickled)
        metadata |= getattr(storage, "metadata", {})
        for name in storage.names():
            if name in storages:
                raise FormatError(f"{file}: {name} is in another file of the checkpoint too")
            storages[name] = storage
    for name, shard in weight_map.items():
        if name not in storages:
            raise FormatError(f"{location}: its index says that {name} is in {shard}, which does not have it")
    config = _configuration(location if location.is_dir() else location.parent)
    dtype = config.get("torch_dtype") or config.get("dtype")
    return Source(
        str(location),
        storages,
        quantization_of(str(location), config),
        DTYPES.get(str(dtype).removeprefix("torch.")),
        metadata,
    )


def quantization_of(origin: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns what a config says of the quantisation; empty if it says nothing.

    Raises:
        FormatError: it is no object. The message names ``origin``.
    """
    for key in ("quantization_config", "quantization"):
        value = config.get(key)
        if not (value is None or isinstance(value, Mapping)):
            raise FormatError(f"{origin}: {key} in its config is {value!a:.80}, not an object")
        if value:
            return value
    return {}


def in_memory(tensors: Mapping[str, Any]) -> Source:
    """Wraps a state dict as a source."""
    other = next((name for name in tensors if not isinstance(name, str)), None)
    if other is not None:
        raise FormatError(f"the state dict has the key {other!a:.80}, not a name")
    storage = Tensors(tensors)
    return Source("the state dict", dict.fromkeys(tensors, storage))


def _files(location: Path) -> tuple[list[Path], Mapping[str, str]]:
    """Lists the files of a checkpoint, and the tensors that each should have if an index says so."""
    if location.is_dir():
        indices = sorted(location.glob("*.safetensors.index.json"))
        if indices:
            return _of_index(indices[0])
        for ending in (".safetensors", ".gguf", *_PICKLES):
            files = sorted(location.glob(f"*{ending}"))
            if files:
                return files, {}
        raise FormatError(f"{location} has no checkpoint: neither .safetensors nor .gguf files")
    if location.name.endswith(".json"):
        return _of_index(location)
    return _shards(location), {}


def _of_index(path: Path) -> tuple[list[Path], Mapping[str, str]]:
    content = _json(path)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise FormatError(f"{path} has no weight_map from names of tensors to names of files")
    files = []
    for shard in sorted(set(weight_map.values())):
        file = path.parent / shard
        if Path(shard).name != shard:
            raise FormatError(f"{path}: the shard {shard!r} is not a file beside it")
        if not file.exists():
            names = sorted(name for name, shard_ in weight_map.items() if shard_ == shard)
            raise FormatError(f"{path}: the shard {shard} is missing, which has {names[0]} and {len(names) - 1} more")
        files.append(file)
    return files, weight_map


def _shards(path: Path) -> list[Path]:
    """Lists all files of a GGUF checkpoint that is divided into ``name-00001-of-00003.gguf``."""
    stem, separator, total = path.stem.rpartition("-of-")
    if path.suffix != ".gguf" or not separator or not total.isdigit() or not stem[-5:].isdigit():
        return [path]
    files = [path.with_name(f"{stem[:-5]}{number:05}-of-{total}.gguf") for number in range(1, int(total) + 1)]
    for file in files:
        if not file.exists():
            raise FormatError(f"{path}: the shard {file.name} is missing")
    return files


def _storage(path: Path, pickled: bool) -> Storage:
    if not path.is_file():
        raise FormatError(f"{path} is no regular file")
    with path.open("rb") as file:
        start = file.read(9)
    if start[:4] == MAGIC:
        return GgufFile(str(path))
    if path.suffix == ".gguf":
        raise FormatError(f"{path} is no GGUF file: it begins with {start[:4]!a}, not with {MAGIC!a}")
    # A safetensors file begins with the length of its head, 8 bytes, and then the head, a JSON object.
    if start[8:] != b"{" and (path.suffix in _PICKLES or start[:2] == b"PK" or start[:1] == b"\x80"):
        if not pickled:
            raise UnsupportedError(
                f"{path} is a pickle file, which can run code; pass pickle=True to read it with "
                "torch.load(weights_only=True), or convert it to safetensors"
            )
        return _unpickled(path)
    return SafetensorsFile(path)


def _unpickled(path: Path) -> Tensors:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, OSError) as error:
        raise FormatError(f"{path} is not readable by torch.load(weights_only=True): {error}") from None
    if not isinstance(content, dict):
        raise FormatError(f"{path} has a {type(content).__name__}, not a state dict")
    other = next((name for name in content if not isinstance(name, str)), None)
    if other is not None:
        raise FormatError(f"{path} has the key {other!a:.80}, not a name")
    return Tensors(content)


class SafetensorsFile(Storage):
    """Reads a safetensors file, mapped.

    Raises:
        FormatError: it is damaged or truncated. UnsupportedError: safetensors is not installed.
    """

    def __init__(self, path: Path):
        try:
            library = importlib.import_module("safetensors")
        except ImportError as error:
            raise UnsupportedError(f"{path} needs safetensors ({error}): pip install safetensors") from error
        self._path = path
        try:
            self._file = library.safe_open(os.fspath(path), framework="pt", device="cpu").__enter__()
        except (library.SafetensorError, OSError, ValueError) as error:
            raise FormatError(f"{path} is no readable safetensors file: {error}") from None
        self._error = library.SafetensorError
        self.metadata: Mapping[str, Any] = self._file.metadata() or {}
        self._names = list(self._file.keys())

    def names(self) -> Sequence[str]:
        return self._names

    def facts(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        tensor = self._file.get_slice(name)
        dtype = _SAFETENSORS_DTYPES.get(tensor.get_dtype())
        if dtype is None:
            raise UnsupportedError(f"{self._path}: {name} is of {tensor.get_dtype()}, which jitgen does not read")
        return tuple(tensor.get_shape()), dtype

    def read(self, name: str) -> torch.Tensor:
        try:
            tensor: torch.Tensor = self._file.get_tensor(name)
        except (self._error, OSError, ValueError, RuntimeError) as error:
            raise FormatError(f"{self._path}: {name} is not readable: {error}") from None
        return tensor


def _configuration(directory: Path) -> dict[str, Any]:
    """Joins the config files of a directory in one dict; a file about the quantisation alone is under its key."""
    config: dict[str, Any] = {}
    for name in _CONFIGS:
        if (directory / name).is_file():
            content = _json(directory / name)
            whole = name == "config.json" or "quantization" in content
            config |= content if whole else {"quantization_config": _labelled(name, content)}
    return config


def _labelled(name: str, content: dict[str, Any]) -> dict[str, Any]:
    """Adds the method to AutoGPTQ's own file, which does not state it: the file's name does."""
    method = "awq" if name == "quant_config.json" else "gptq"
    return content if "quant_method" in content else {**content, "quant_method": method}


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(f"{path} is not readable: {error}") from None
    if not isinstance(content, dict):
        raise FormatError(f"{path} is no JSON object")
    return content
