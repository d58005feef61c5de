"""Loads any checkpoint of quantised weights with ``load_quantized``, as a state dict or into a model.

Everything is read and checked before anything of a model changes.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from jitgen import progress
from jitgen.checkpoints import files, native
from jitgen.checkpoints.activations import CHECKPOINT, Loaded, applied
from jitgen.checkpoints.experts import stacked
from jitgen.checkpoints.source import Claim, Reader, Source
from jitgen.checkpoints.table import LABELS, READERS
from jitgen.checkpoints.weight import GO_BY_TENSORS
from jitgen.errors import FallbackWarning, FormatError, UnsupportedError
from jitgen.quant.activations import ACTIVATIONS
from jitgen.quant.layers import QuantizedLinear
from jitgen.quant.qtensor import QTensor

Named = TypeVar("Named")
CODES = (torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2)
"""The dtypes of a matrix called ``weight`` that holds codes."""


def load_quantized(
    checkpoint: str | os.PathLike[str] | Mapping[str, Any],
    *,
    model: nn.Module | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    config: Mapping[str, Any] | None = None,
    rename: Callable[[str], str] | Mapping[str, str] | None = None,
    strict: bool = True,
    pickle: bool = False,
    activation: str | None = CHECKPOINT,
) -> Loaded:
    """Reads a checkpoint whose weights are quantised, by jitgen or another program.

    Which one is seen by its tensors: GPTQ, AWQ, HQQ, bitsandbytes, compressed-tensors, ModelOpt, Quark, torchao, GGUF,
    8-bit weights beside their scales (docs/checkpoints.md has the table). Weights become ``QTensor``s of the format
    whose numbers are those of the checkpoint; other tensors stay as they are. Files are mapped and converted one weight
    at a time. Activations are quantised as the checkpoint says, where there is such a kind (``quant/activations.py``);
    ``report`` of the result says which.

    Args:
        checkpoint: a file (safetensors, GGUF), an ``index.json``, a directory with any of them, or a state dict.
        model: a model that the weights are put into, by name: those of Linears become Parameters that take no
            gradients, as ``quantize_`` leaves them. Experts that the checkpoint has one by one become the parameters of
            three dimensions that a model of transformers has (``experts.py``). It may be on the meta device. Without
            one nothing but the result is made.
        device: where tensors are put.
        dtype: the nominal dtype of weights; by default the config's, else that of the scales.
        config: what a config file would say (``quantization_config``), instead of the one beside the file; ``{}`` for
            nothing.
        rename: from names in the checkpoint to names in the model.
        strict: whether a tensor that ``model`` has no place for, or a parameter that the checkpoint does not have, is
            an error, and whether a weight is that jitgen does not read: without ``strict`` it is left out, or left as
            it is, and a ``FallbackWarning`` names the parameters and the weights that are.
        pickle: whether pickle files may be read, with ``torch.load(weights_only=True)``.
        activation: how products quantise what they multiply with the weights: ``"checkpoint"`` as it says, a kind for
            all of them, such as ``"int8"``, or None to leave activations as they are.

    Returns:
        the tensors by name, ``QTensor``s and plain tensors: a dict with a ``report``.

    Raises:
        FormatError: the checkpoint is damaged, truncated or labelled as something else, or does not fit ``model``. The
            message names the tensor. The model is then unchanged.
        UnsupportedError: it has what jitgen does not read, or a package is missing.
    """
    source = files.in_memory(checkpoint) if isinstance(checkpoint, Mapping) else files.opened(checkpoint, pickle)
    if config is not None:
        source = replace(source, config=_quantization(config))
    if dtype is not None:
        source = replace(source, dtype=dtype)
    state, notes = _read(source, torch.device(device), strict, activation)
    if rename is not None:
        state, notes = _renamed(state, rename), _renamed(notes, rename)
    left_out: tuple[str, ...] = ()
    if model is not None:
        state, notes = stacked(model, state, notes)
        left_out = fill(model, state, strict)
    return Loaded(state, notes, left_out)


def _quantization(config: Any) -> Mapping[str, Any]:
    """Returns what the caller's ``config``, a model's whole config or a part, says of the quantisation."""
    if not isinstance(config, Mapping):
        raise FormatError(f"config is {config!a:.80}, not a mapping")
    return files.quantization_of("config=", config) if "quantization_config" in config else config


def claims(source: Source) -> list[tuple[Reader, Claim]]:
    """Lists the weights of a checkpoint, each with the reader that claims it.

    Raises:
        FormatError: a tensor that only one kind of checkpoint has is not claimed, or a label says another kind.
    """
    taken: set[str] = set()
    claimed: list[tuple[Reader, Claim]] = []
    label = source.config.get("quant_method")
    for reader in READERS:
        for claim in reader.find(source):
            if taken & set(claim.uses):
                continue
            if label in LABELS and reader.labels and label not in reader.labels and reader is not native.READER:
                raise FormatError(
                    f"{source.origin}: the config says {label}, and {claim.uses[0]} is laid out as {reader.name}; "
                    + GO_BY_TENSORS
                )
            taken |= set(claim.uses)
            claimed.append((reader, claim))
    for name in source:
        if name not in taken:
            _check_unclaimed(source, name)
    return claimed


def _check_unclaimed(source: Source, name: str) -> None:
    for reader in READERS:
        if name.endswith(reader.marks):
            raise FormatError(f"{source.origin}: {source.described(name)} is not laid out as {reader.name} has it")
    if name.endswith(".weight") and source.is_of(name, *CODES) and len(source.shape(name)) == 2:
        raise FormatError(f"{source.origin}: {source.described(name)} is codes, and no scales belong to it")


def _read(
    source: Source, device: torch.device, strict: bool, activation: str | None
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Reads every tensor; returns also a note on its activations for weights that have such."""
    if activation not in (None, CHECKPOINT, *ACTIVATIONS):
        kinds = ", ".join(map(repr, (CHECKPOINT, *ACTIVATIONS)))
        raise FormatError(f"unknown activation {activation!r}; expected None, or {kinds}")
    with _refusing(f"{source.origin}: its tensors, config or metadata do not fit one another"):
        claimed, aliases = claims(source), native.aliases(source)
    taken = {name for _, claim in claimed for name in claim.uses}
    plain = [name for name in source if name not in taken]
    state: dict[str, torch.Tensor] = {}
    left_out: list[str] = []
    notes: dict[str, str] = {}
    total = len(claimed) + len(plain)
    with progress.line(f"reading {source.origin}") as say:
        for _, claim in claimed:
            if claim.name in state or claim.name in plain:
                raise FormatError(f"{source.origin}: {claim.name} is in it twice")
            try:
                value = _converted(source, claim)
                if isinstance(value, QTensor):
                    value, note = applied(source, claim.name, value, activation)
                    notes |= {claim.name: note} if note is not None else {}
                state[claim.name] = value.to(device)
            except UnsupportedError as error:
                if strict:
                    raise
                left_out.append(str(error))
            say(f"{len(state)} of {total} tensors: {claim.name}")
        for name in plain:
            with _refusing(f"{source.origin}: {name} is not readable"):
                value = source.value(name)
            if not isinstance(value, torch.Tensor):
                raise FormatError(f"{source.origin}: {name} is a {type(value).__name__}, not a tensor")
            state[name] = value.to(device)
            say(f"{len(state)} of {total} tensors: {name}")
    if left_out:
        more = f", and {len(left_out) - 1} more" if len(left_out) > 1 else ""
        warnings.warn(f"{source.origin}: left out (strict=False): {left_out[0]}{more}", FallbackWarning, stacklevel=3)
    for name, same in aliases.items():
        if same not in state:
            raise FormatError(f"{source.origin}: {name} is said to be {same}, which is not there")
        state[name] = state[same]
    return state, notes


def _converted(source: Source, claim: Claim) -> QTensor | torch.Tensor:
    used = "; ".join(source.described(name) for name in claim.uses[:4])
    with _refusing(f"{claim.name}: its tensors do not fit one another ({used})"):
        return claim.read()


@contextmanager
def _refusing(problem: str) -> Iterator[None]:
    """Turns what reading a damaged checkpoint raises into FormatError, with ``problem``."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise FormatError(f"{problem}: {error}") from error


def _renamed(state: dict[str, Named], rename: Callable[[str], str] | Mapping[str, str]) -> dict[str, Named]:
    renamed: dict[str, Named] = {}
    for name, tensor in state.items():
        new = rename.get(name, name) if isinstance(rename, Mapping) else rename(name)
        if new in renamed:
            raise FormatError(f"rename gives the name {new} to {name} and to another tensor")
        renamed[new] = tensor
    return renamed


CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".k_zero_point", ".v_zero_point")
"""Ends of the names of tensors by which other programs quantise a cache of keys and values."""


def fill(model: nn.Module, state: Mapping[str, torch.Tensor], strict: bool = True) -> tuple[str, ...]:
    """Puts tensors into a model, by name; returns the names of scales of a cache that it has no place for.

    A parameter that the state lacks and that is another one of the model (a tied weight) becomes that. Without
    ``strict`` a parameter that the state lacks stays as it is, and a ``FallbackWarning`` names it.

    Raises:
        FormatError: a name or a shape does not fit. The model is then unchanged.
    """
    owners = {name: (module, leaf) for name, module, leaf in _owners(model)}
    tensors: dict[str, torch.Tensor] = {}
    homeless = [name for name in state if name not in owners]
    of_cache = tuple(name for name in homeless if name.endswith(CACHE_SCALES))
    unexpected = [name for name in homeless if name not in of_cache]
    for name, tensor in state.items():
        if name in owners:
            tensors[name] = _fitting(name, *owners[name], tensor)
    tied: dict[int, list[str]] = {}
    for name, (module, leaf) in owners.items():
        tied.setdefault(id(_current(module, leaf)), []).append(name)
    for names in tied.values():
        loaded = next((tensors[name] for name in names if name in tensors), None)
        if loaded is not None:
            tensors |= {name: loaded for name in names if name not in tensors}
    missing = [name for name in owners if name not in tensors and name in model.state_dict(keep_vars=True)]
    problems = "; ".join(
        f"{what} {', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''}"
        for what, names in (("it lacks", missing), ("the model has no place for", unexpected))
        if names
    )
    if strict and problems:
        remedy = "rename= maps names" if missing else "strict=False leaves these out"
        raise FormatError(f"the checkpoint does not fit the model: {problems}; {remedy}")
    if missing:
        warnings.warn(
            f"the checkpoint does not fit the model (strict=False): {problems}; parameters that it lacks stay as they "
            "are",
            FallbackWarning,
            stacklevel=3,
        )
    parameters: dict[int, nn.Parameter] = {}
    for name, tensor in tensors.items():
        module, leaf = owners[name]
        if leaf not in module._parameters:
            module._buffers[leaf] = tensor
            continue
        old = module._parameters[leaf]
        needs_grad = old is not None and old.requires_grad and tensor.is_floating_point()
        needs_grad &= not isinstance(tensor, QTensor) and not _has_quantized(tensors, name)
        module._parameters[leaf] = parameters.setdefault(id(tensor), nn.Parameter(tensor, requires_grad=needs_grad))
        if isinstance(tensor, QTensor):
            QuantizedLinear.convert(module)
    return of_cache


def _has_quantized(tensors: Mapping[str, torch.Tensor], name: str) -> bool:
    """Returns whether ``name`` is the bias of a quantised weight, which takes no gradients either."""
    module, _, leaf = name.rpartition(".")
    return leaf == "bias" and isinstance(tensors.get(f"{module}.weight" if module else "weight"), QTensor)


def _owners(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yields (name, module, name in the module) of every parameter and buffer, tied ones under each name."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for leaf in (*module._parameters, *module._buffers):
            if _current(module, leaf) is not None:
                yield f"{prefix}.{leaf}" if prefix else leaf, module, leaf


def _current(module: nn.Module, leaf: str) -> torch.Tensor | None:
    return module._parameters[leaf] if leaf in module._parameters else module._buffers[leaf]


def _fitting(name: str, module: nn.Module, leaf: str, tensor: torch.Tensor) -> torch.Tensor:
    current = _current(module, leaf)
    assert current is not None
    of_conv1d = type(module).__name__ == "Conv1D" and leaf == "weight"
    if isinstance(tensor, QTensor) and of_conv1d and not tensor.transposed:
        tensor = tensor.t()  # transformers' Conv1D has its weight as (K, N), and files of other programs as (N, K)
    if tuple(tensor.shape) != tuple(current.shape):
        raise FormatError(f"{name} is {list(tensor.shape)}, and the model has {list(current.shape)}")
    if isinstance(tensor, QTensor) and not (
        isinstance(module, nn.Linear | nn.Embedding) or of_conv1d or tensor.token.experts is not None
    ):
        raise FormatError(f"{name} is a quantised weight, and {type(module).__name__} multiplies its weight itself")
    return tensor
