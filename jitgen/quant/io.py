"""Stores quantised weights in safetensors files: codes and scales as plain tensors, everything else as JSON in the
metadata.

A weight ``name`` is stored as ``name.codes``, ``name.scales`` and, in formats with zero-points, ``name.zeros``, always
in the portable layout, so that any program can read the file. The metadata entry ``jitgen.quant`` records each weight's
format, group size, shape and dtype, and which names share one tensor (tied weights); that tensor is stored once.
"""

from __future__ import annotations

import importlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from jitgen.errors import FormatError, UnsupportedError
from jitgen.paths import check_writable
from jitgen.quant.activations import check_activation
from jitgen.quant.formats import check_group_size, find
from jitgen.quant.qtensor import QTensor

METADATA_KEY = "jitgen.quant"
SCHEMA = 1
_DTYPES = {str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}


def state_tensors(tensor: QTensor, name: str) -> dict[str, torch.Tensor]:
    """Returns the plain tensors that a file stores for ``tensor``, in the portable layout, by their names in the
    file."""
    tensors = tensor._tensors_in("portable", keep=False)
    return {
        f"{name}.{suffix}": values for suffix, values in zip(find(tensor.format).tensor_names, tensors, strict=True)
    }


def description(tensor: QTensor) -> str:
    """Returns everything else that a file records of ``tensor``, as a JSON string."""
    token = tensor.token
    facts = {
        "format": token.format,
        "group_size": token.group_size,
        "shape": list(token.weight_shape),
        "dtype": str(token.dtype),
        "transposed": token.transposed,
        **({"experts": token.experts} if token.experts is not None else {}),
        **({"activation": token.activation} if token.activation is not None else {}),
    }
    return json.dumps(facts, sort_keys=True)


def from_tensors(tensors: Mapping[str, torch.Tensor], name: str, text: str) -> QTensor:
    """Returns the weight that ``state_tensors`` and ``description`` describe.

    Raises:
        FormatError: a tensor is missing or does not fit the description, or ``text`` is not a description.
    """
    described = facts(name, text)
    row = find(described["format"])
    group_size = check_group_size(described["group_size"], row)
    rows, columns = described["shape"]
    dtype, transposed = _DTYPES[described["dtype"]], bool(described["transposed"])
    more: dict[str, Any] = {"experts": described.get("experts"), "activation": described.get("activation")}
    names = [f"{name}.{suffix}" for suffix in row.tensor_names]
    missing = [stored for stored in names if stored not in tensors]
    if missing:
        raise FormatError(f"{name}: there is no tensor {', '.join(missing)}")
    values = tuple(tensors[stored].contiguous() for stored in names)
    try:
        return QTensor(values, row.name, group_size, (rows, columns), dtype, transposed=transposed, **more)
    except FormatError as error:
        raise FormatError(f"{name}: {error}") from None


def facts(name: str, text: str) -> dict[str, Any]:
    """Reads what ``description`` wrote of the weight ``name``.

    Raises:
        FormatError: ``text`` is not a description.
    """
    try:
        described: dict[str, Any] = json.loads(text)
        check_group_size(described["group_size"], find(described["format"]))
        rows, columns = described["shape"]
        if not (type(rows) is type(columns) is int and described["dtype"] in _DTYPES and "transposed" in described):
            raise ValueError("shape, dtype or transposed")
        if not (described.get("experts") is None or type(described["experts"]) is int):
            raise ValueError("experts")
        check_activation(described.get("activation"), find(described["format"]), described["group_size"])
    except (KeyError, TypeError, ValueError, FormatError) as error:
        raise FormatError(f"{name}: {text!r} does not describe a quantised weight: {error!r}") from None
    return described


def content(origin: str, metadata: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Reads the descriptions of weights, and the aliases, in a file's metadata; both empty if jitgen did not write it.

    Raises:
        FormatError: they are not readable, or of another schema. The message names ``origin``.
    """
    if METADATA_KEY not in metadata:
        return {}, {}
    try:
        recorded = json.loads(metadata[METADATA_KEY])
        schema, weights, aliases = recorded["schema"], dict(recorded["weights"]), dict(recorded["aliases"])
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{origin}: its metadata {METADATA_KEY!r} is not readable: {error!r}") from None
    if schema != SCHEMA:
        raise FormatError(f"{origin} is of schema {schema}; this jitgen reads {SCHEMA}: quantise it again")
    return weights, aliases


def save_quantized(model: torch.nn.Module | Mapping[str, torch.Tensor], path: str | os.PathLike[str]) -> None:
    """Writes a model's state dict, or any dict of tensors, quantised weights included, to a safetensors file.

    Raises:
        UnsupportedError: safetensors is not installed, or ``model`` is neither a model nor a dict of tensors.
        FormatError: no file can be written to ``path``.
    """
    if not isinstance(model, (torch.nn.Module, Mapping)):
        raise UnsupportedError(
            f"save_quantized writes a model or a dict of tensors, and not a {type(model).__name__}: call "
            "save_quantized(model, path)"
        )
    check_writable(path, "model.safetensors", FormatError)
    state = model.state_dict() if isinstance(model, torch.nn.Module) else model
    tensors, metadata = flattened(state)
    # safetensors refuses tensors that share a storage, such as slices of one tensor: each is copied.
    separate = {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    safetensors = _safetensors()
    with _shared_as_new_files_are(path):
        safetensors.save_file(separate, os.fspath(path), metadata=metadata | {"format": "pt"})


@contextmanager
def _shared_as_new_files_are(path: str | os.PathLike[str]) -> Iterator[None]:
    """Gives the file that is written to ``path`` the permissions of the one that is there, or of a new file.

    safetensors writes a temporary file, which its owner alone may read, and renames it. A checkpoint is often read by
    another user, such as that of a server, so it gets what the process's umask allows, as ``torch.save`` has it.
    """
    existed = os.path.exists(path)
    if not existed:
        open(path, "ab").close()  # the umask decides its permissions, and cannot be read without being set
    mode = stat.S_IMODE(os.stat(path).st_mode)
    try:
        yield
    except BaseException:
        if not existed:
            os.unlink(path)
        raise
    os.chmod(path, mode)


def flattened(state: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Flattens a state dict for a file: plain tensors, tied ones once, and the metadata that says the rest.

    Raises:
        UnsupportedError: something in it is no tensor.
    """
    tensors: dict[str, torch.Tensor] = {}
    descriptions: dict[str, str] = {}
    aliases: dict[str, str] = {}
    first_names: dict[Any, str] = {}
    for name, tensor in state.items():
        if not isinstance(name, str):
            raise UnsupportedError(f"{name!r:.80} is no name; a safetensors file names its tensors with strings")
        if not isinstance(tensor, torch.Tensor):
            raise UnsupportedError(f"{name} is a {type(tensor).__name__}; a safetensors file holds tensors only")
        first_name = first_names.setdefault(_identity(tensor), name)
        if first_name != name:
            aliases[name] = first_name
        elif isinstance(tensor, QTensor):
            descriptions[name] = description(tensor)
            tensors |= state_tensors(tensor, name)
        else:
            tensors[name] = tensor
    recorded = json.dumps({"schema": SCHEMA, "weights": descriptions, "aliases": aliases}, sort_keys=True)
    return tensors, {METADATA_KEY: recorded}


def load_quantized(path: str | os.PathLike[str], device: str | torch.device = "cpu") -> dict[str, torch.Tensor]:
    """Reads a file that ``save_quantized`` wrote: plain tensors and ``QTensor``s on ``device``, by name.

    Names that were tied get the same tensor. To load the result into a model of the same structure, call
    ``model.requires_grad_(False).load_state_dict(state, assign=True)``. Any other safetensors file is read as plain
    tensors.

    Raises:
        FormatError: a weight does not fit its description. UnsupportedError: safetensors is not installed.
    """
    with _safetensors().safe_open(os.fspath(path), framework="pt", device=str(device)) as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
    weights, aliases = content(os.fspath(path), metadata)
    state: dict[str, torch.Tensor] = {}
    for name, text in weights.items():
        state[name] = from_tensors(tensors, name, text)
        for suffix in find(state[name].format).tensor_names:  # type: ignore[attr-defined]
            del tensors[f"{name}.{suffix}"]
    state |= tensors
    for name, same in aliases.items():
        if same not in state:
            raise FormatError(f"{os.fspath(path)}: {name} is said to be {same}, which is not there")
        state[name] = state[same]
    return state


def _identity(tensor: torch.Tensor) -> Any:
    """Returns a key that is equal for tensors that are the same view of the same memory."""
    if isinstance(tensor, QTensor):
        stored = tensor.stored
        return id(stored.tensors[0]), stored.token
    if not tensor.numel():
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), tensor.device


def _safetensors() -> Any:
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise UnsupportedError(f"files of weights need safetensors ({error}): pip install safetensors") from error
