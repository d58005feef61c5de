"""Reads torchao's tensors: in a state dict as they are, in safetensors files as its ``flatten_tensor_state_dict``
stores them.

Source: torchao's ``quantization/quantize_/workflows`` (``Int4Tensor``, ``Int8Tensor``, ``IntxUnpackedToInt8Tensor``,
``Float8Tensor``), ``prototype/mx_formats/nvfp4_tensor.py`` and ``prototype/safetensors``. A file has
``module._weight_qdata``, ``module._weight_scale`` and so on, and in its metadata a JSON object for each weight. torchao
is not needed to read one.

Numbers: ``Int4Tensor`` stands for ``code * scale + zero`` with codes -8 to 7 (mslk's ``int4_row_quantize_zp``), which
jitgen has as ``(code + 8 - (8 - zero / scale)) * scale`` with float32 scales and zero-points: equal to some roundings
of float32. The others are ``code * scale`` and equal to the bit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from jitgen.checkpoints.scaled import FLOATS, shared, smoothed
from jitgen.checkpoints.source import Claim, Reader, Source, Tensors
from jitgen.checkpoints.weight import assembled, nibbles
from jitgen.errors import FormatError, UnsupportedError
from jitgen.quant.formats import find as format_of
from jitgen.quant.qtensor import QTensor
from jitgen.spec import DTYPES

Facts = Mapping[str, Any]
"""The tensors and attributes of one of torchao's tensors, by their names in its class."""


def find(source: Source) -> Iterator[Claim]:
    yield from _in_metadata(source)
    for name in list(source):
        value = source.value(name) if isinstance(source.storages[name], Tensors) else None
        kind = type(value).__name__
        if isinstance(value, torch.Tensor) and type(value).__module__.startswith("torchao."):
            yield Claim(name, (name,), partial(_convert, name, kind, _Attributes(value)))


class _Attributes(dict[str, Any]):
    """Presents the attributes of an object as a mapping."""

    def __init__(self, value: Any):
        names = [*getattr(value, "tensor_data_names", ()), *getattr(value, "tensor_attribute_names", ())]
        names += [
            *getattr(value, "optional_tensor_data_names", ()),
            *getattr(value, "optional_tensor_attribute_names", ()),
        ]
        super().__init__({name: getattr(value, name, None) for name in {*names, "dtype"}})


def _in_metadata(source: Source) -> Iterator[Claim]:
    if "tensor_names" not in source.metadata:
        return
    try:
        names = [str(name) for name in json.loads(source.metadata["tensor_names"])]
        described = {name: json.loads(source.metadata[name]) for name in names if name in source.metadata}
    except (TypeError, ValueError) as error:
        raise FormatError(f"{source.origin}: its metadata of torchao is not readable: {error!r}") from None
    for name, facts in described.items():
        if not isinstance(facts, dict) or facts.get("_type") in (None, "Tensor"):
            continue
        module, _, last = name.rpartition(".")
        start = f"{module}._{last}_" if module else f"_{last}_"
        stated = facts.get("_tensor_data_names", [])
        if not isinstance(stated, list):
            raise FormatError(f"{source.origin}: the _tensor_data_names of {name} are {stated!a:.80}, not a list")
        stored = {str(field): start + str(field) for field in stated}
        missing = [tensor for tensor in stored.values() if tensor not in source]
        if missing:
            raise FormatError(f"{source.origin}: {missing[0]} is missing, which is a tensor of {name}")
        yield Claim(name, tuple(stored.values()), partial(_read, source, name, facts, stored))


def _read(source: Source, name: str, facts: Mapping[str, Any], stored: Mapping[str, str]) -> QTensor:
    attributes = facts.get("_data", {})
    if not isinstance(attributes, dict):
        raise FormatError(f"{name}: its metadata of torchao has no attributes")
    known = {key: _plain(value) for key, value in attributes.items()}
    return _convert(name, str(facts["_type"]), known | {field: source.read(tensor) for field, tensor in stored.items()})


def _plain(value: Any) -> Any:
    if isinstance(value, dict) and value.get("_type") == "torch.dtype":
        return DTYPES.get(str(value.get("_data")), value.get("_data"))  # int4 and the like by name
    return value


def _convert(name: str, kind: str, facts: Facts) -> QTensor:
    if kind not in _KINDS:
        raise UnsupportedError(
            f"{name} is torchao's {kind}, which is laid out for kernels of its own; jitgen reads {', '.join(_KINDS)}"
        )
    factors = facts.get("act_pre_scale")
    try:
        weight = _with_activation(_KINDS[kind](name, facts), facts)
        return weight if factors is None else smoothed(f"{name}: act_pre_scale", weight, factors)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise FormatError(f"{name}: its tensors are not those of torchao's {kind}: {error!r}") from None


def _with_activation(weight: QTensor, facts: Facts) -> QTensor:
    """Has products quantise activations as ``Float8DynamicActivation...`` and the like of torchao do: row by row, where
    torchao has a scale of the tensor or, of int8, zero-points too. What no kind of activations is for stays floats."""
    told = facts.get("act_quant_kwargs") or facts.get("activation_quantization")
    if told is None or format_of(weight.format).code == format_of("nvfp4").code:
        return weight
    kind = "fp8_e4m3" if format_of(weight.format).row.startswith("fp8") or "loat8" in repr(told) else "int8"
    try:
        return weight.with_activation(kind)
    except FormatError:
        return weight


def _int4(name: str, facts: Facts) -> QTensor:
    packed, scales, zeros = facts["qdata"], facts["scale"].t(), facts["zero_point"].t()
    if packed.dim() != 2:
        raise UnsupportedError(f"{name}: a weight of {packed.dim()} dimensions is not read")
    codes, group = nibbles(packed), int(facts["block_size"][-1])
    if not bool(zeros.any()):
        return assembled(name, "int4", (codes.view(torch.int8) ^ 8) - 8, scales, group, scales.dtype)
    exact = scales.float()
    origin = 8 - zeros.float() / torch.where(exact == 0, 1.0, exact)
    return assembled(name, "uint4", codes ^ 8, exact, group, scales.dtype, zeros=origin)


def _integers(name: str, facts: Facts) -> QTensor:
    codes, scales, zeros = facts["qdata"], facts["scale"], facts.get("zero_point")
    dtype = facts.get("dtype") or scales.dtype
    _require_blocks(name, facts, codes.shape, scales)
    scales, group, qualifier = shared(name, codes.shape, scales)
    bits = _bits(facts.get("target_dtype"))
    half = 1 << (bits - 1)
    if codes.numel() and not -half <= int(codes.min()) <= int(codes.max()) < half:
        raise FormatError(f"{name}: its codes are {int(codes.min())} to {int(codes.max())}, and its dtype is int{bits}")
    if bits == 1 and zeros is None:
        zeros = torch.zeros_like(scales, dtype=torch.int8)
    if zeros is None or (bits > 1 and not bool(zeros.any())):  # int1 of jitgen has -1 and 1, torchao's -1 and 0
        return assembled(name, f"int{bits}", codes, scales, group, dtype, qualifier=qualifier)
    zeros = zeros.reshape(scales.shape)
    zeros = zeros + half if zeros.is_floating_point() else (zeros.int() + half).to(torch.uint8)
    if zeros.is_floating_point():
        scales, zeros = scales.float(), zeros.float()
    return assembled(
        name,
        f"uint{bits}",
        (codes.int() + half).to(torch.uint8),
        scales,
        group,
        dtype,
        zeros=zeros,
        qualifier=qualifier,
    )


def _require_blocks(name: str, facts: Facts, shape: torch.Size, scales: torch.Tensor) -> None:
    """Raises FormatError if ``block_size`` contradicts which numbers share a scale."""
    block = facts.get("block_size")
    if not isinstance(block, list | tuple) or len(block) != len(shape) or not all(type(size) is int for size in block):
        return
    count = math.prod(
        -(-size // (length if length > 0 else size)) for size, length in zip(shape, block, strict=True) if size
    )
    if scales.numel() != count:
        raise FormatError(f"{name}: blocks of {list(block)} of {list(shape)} have {count} scales, not {scales.numel()}")


def _bits(target: Any) -> int:
    return int(str(target).rpartition("int")[2]) if target is not None else 8


def _float8(name: str, facts: Facts) -> QTensor:
    codes, scales = facts["qdata"], facts["scale"]
    dtype = facts.get("dtype") or torch.bfloat16
    _require_blocks(name, facts, codes.shape, scales)
    scales, group, qualifier = shared(name, codes.shape, scales)
    return assembled(name, FLOATS[codes.dtype], codes.view(torch.uint8), scales, group, dtype, qualifier=qualifier)


def _nvfp4(name: str, facts: Facts) -> QTensor:
    if facts.get("is_swizzled_scales"):
        raise UnsupportedError(
            f"{name}: its scales are in the order of one kernel (is_swizzled_scales); save it without"
        )
    dtype, factor = facts.get("orig_dtype") or torch.bfloat16, facts.get("per_tensor_scale")
    factor = torch.ones(()) if factor is None else factor
    packed = facts["qdata"]
    scales = facts["scale"].view(packed.shape[0], -1)
    return assembled(name, "nvfp4", nibbles(packed), scales, 16, dtype, tensor_scale=factor)


_KINDS: dict[str, Callable[[str, Facts], QTensor]] = {
    "Int4Tensor": _int4,
    "Int8Tensor": _integers,
    "IntxUnpackedToInt8Tensor": _integers,
    "Float8Tensor": _float8,
    "NVFP4Tensor": _nvfp4,
}

READER = Reader("torchao", frozenset({"torchao"}), find, ())
