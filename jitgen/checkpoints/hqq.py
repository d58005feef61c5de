"""Reads HQQ: ``W_q`` with its facts, each of them a tensor in safetensors files and a value in state dicts.

Source: hqq's ``core/quantize.py`` (``HQQLinear.state_dict``, ``Quantizer.dequantize``) and ``core/bitpack.py``. The
weight is reshaped to ``[N K / group, group]`` (axis 1) and packed along its first dimension: the first half of its rows
is in the high bits of a byte. Axis 0 gives every column of the weight scales of its own, which no format here has.

Numbers: ``(code - zero) * scale`` with a floating-point zero-point. hqq rounds the difference to its dtype, and then
the product; jitgen rounds once, so numbers differ by that rounding of the difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from jitgen.checkpoints.source import Claim, Reader, Source
from jitgen.checkpoints.weight import GO_BY_TENSORS, assembled
from jitgen.errors import FormatError, UnsupportedError
from jitgen.quant.qtensor import QTensor

_FACTS = (
    *("nbits", "group_size", "shape", "scale", "zero", "axis", "packing", "unpack_view_dtype", "view_as_float"),
    *("quant_scale", "quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config"),
    *("channel_wise", "optimize", "round_zero", "meta"),
)
_PACKING = {1: 8, 2: 4, 3: 10, 4: 2, 8: 1}
"""The codes of an element of ``W_q``, by their bits."""


def find(source: Source) -> Iterator[Claim]:
    for prefix in source.ending(".W_q"):
        uses = [f"{prefix}.{fact}" for fact in ("W_q", *_FACTS) if f"{prefix}.{fact}" in source]
        yield Claim(f"{prefix}.weight", tuple(uses), partial(_read, source, prefix))


def _read(source: Source, prefix: str) -> QTensor:
    name = f"{prefix}.weight"
    facts = {fact: source.value(f"{prefix}.{fact}") for fact in _FACTS if f"{prefix}.{fact}" in source}
    facts |= facts.pop("meta", {}) or {}
    missing = [fact for fact in ("nbits", "shape", "scale", "zero", "axis") if fact not in facts]
    if missing:
        raise FormatError(f"{name}: {prefix}.{missing[0]} is missing, beside {prefix}.W_q")
    bits, axis, group_size = (_number(facts.get(fact), f"{prefix}.{fact}") for fact in ("nbits", "axis", "group_size"))
    shape = [int(size) for size in facts["shape"]]
    _require_labelled(source, name, facts, bits, group_size)
    if axis != 1:
        raise UnsupportedError(
            f"{name}: its groups are along axis {axis}, so every column has its own scales; quantise it with axis=1"
        )
    if bits not in _PACKING or len(shape) != 2:
        raise FormatError(f"{name}: {bits} bits of a weight {shape} are no packing of HQQ's")
    rows, columns = shape
    group = columns if group_size is None else group_size
    if not group or columns % group:
        raise FormatError(f"{name}: rows of {columns} columns are not whole groups of {group}")
    packed = source.read(f"{prefix}.W_q")
    words = torch.int32 if bits == 3 else torch.uint8
    if packed.is_floating_point() and packed.element_size() >= 2:  # view_as_float
        packed = packed.view(words)
    groups = rows * columns // group
    if packed.dtype != words or packed.shape != (-(-groups // _PACKING[bits]), group):
        raise FormatError(
            f"{name}: {source.described(f'{prefix}.W_q')} has not {rows} x {columns} codes of {bits} bits in groups of "
            f"{group}"
        )
    for fact in ("scale", "zero"):
        if not facts[fact].is_floating_point():
            raise FormatError(f"{name}: {prefix}.{fact} is of {facts[fact].dtype}, not floating-point")
    codes = _unpacked(packed.reshape(-1, group), bits)[:groups]
    if any(facts[fact].numel() != groups for fact in ("scale", "zero")):
        raise FormatError(f"{name}: {prefix}.scale and {prefix}.zero are not a number for each of {groups} groups")
    scales, zeros = (facts[fact].reshape(rows, -1) for fact in ("scale", "zero"))
    return assembled(
        name, f"uint{bits}", codes.reshape(rows, columns), scales, group_size, _dtype(facts, scales), zeros=zeros
    )


def _require_labelled(source: Source, name: str, facts: dict[str, Any], bits: int | None, group: int | None) -> None:
    """Raises FormatError where the config, or the name of the packing, says other bits or groups than the facts do."""
    told = source.config.get("quant_config")
    told = told.get("weight_quant_params", told) if isinstance(told, dict) else {}
    for key, value in (("nbits", bits), ("group_size", group)):
        said = told.get(key) if isinstance(told, dict) else None
        if type(said) is int and said != value:
            raise FormatError(f"{name}: the config says {key} {said}, and {value} is beside it; {GO_BY_TENSORS}")
    packing = facts.get("packing")
    if isinstance(packing, str) and not packing.startswith(f"{bits}bit"):
        raise FormatError(f"{name}: its packing is {packing!r}, which is not of {bits} bits")


def _unpacked(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpacks the codes, uint8: rows in the high bits come first."""
    if bits == 8:
        return packed
    shifts = range(27, -1, -3) if bits == 3 else range(8 - bits, -1, -bits)
    return torch.cat([(packed >> shift & ((1 << bits) - 1)).to(torch.uint8) for shift in shifts])


def _number(value: Any, name: str) -> int | None:
    if value is None or (isinstance(value, torch.Tensor) and value.numel() == 0):
        return None
    try:
        return int(value)
    except (TypeError, ValueError, RuntimeError):
        raise FormatError(f"{name} is {value!r:.80}; a number is expected") from None


def _dtype(facts: dict[str, Any], scales: torch.Tensor) -> torch.dtype:
    dtype = facts.get("compute_dtype")
    return dtype if isinstance(dtype, torch.dtype) else scales.dtype


READER = Reader("HQQ", frozenset({"hqq"}), find, (".W_q", ".nbits", ".unpack_view_dtype"))
