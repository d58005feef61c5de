"""Reads Quark: int4 and uint4 in int32 words, and mxfp4.

Source: AMD Quark's ``torch/export/nn/modules/realquantizer.py`` and ``torch/utils/pack.py``. Of integers in groups,
``weight int32[K, N / 8]`` and ``weight_zero_point int32[G, N / 8]`` are packed along N, in AWQ's order or, where the
config says so (``pack_method``), in theirs; ``weight_scale`` is ``[G, N]``. Codes are two's complement in int4 and
unsigned in uint4, which the label ``dtype`` of the config tells; where all zero-points are half the range they can only
be unsigned. Of mxfp4, ``weight uint8[N, K / 2]`` has the low half of a byte first and ``weight_scale uint8[N, K / 32]``
is e8m0. Quark's fp8 is read by ``scaled.py``.

Numbers: ``(code - zero) * scale``, which float32 has exactly: equal to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from jitgen.checkpoints.awq import unpacked
from jitgen.checkpoints.scaled import activation_names
from jitgen.checkpoints.source import Claim, Reader, Source
from jitgen.checkpoints.weight import assembled, fields, nibbles, nominal, require_groups
from jitgen.errors import FormatError
from jitgen.quant.qtensor import QTensor


def find(source: Source) -> Iterator[Claim]:
    for prefix in source.ending(".weight_scale"):
        weight, scale = f"{prefix}.weight", f"{prefix}.weight_scale"
        if f"{prefix}.weight_scale_2" in source:
            continue
        uses = (weight, scale, *activation_names(source, prefix))
        if source.is_of(weight, torch.int32):
            yield Claim(weight, uses, partial(_read_integers, source, prefix))
        elif source.is_of(weight, torch.uint8) and source.is_of(scale, torch.uint8):
            yield Claim(weight, uses, partial(_read_mxfp4, source, prefix))


def _read_integers(source: Source, prefix: str) -> QTensor:
    name, zero_name = f"{prefix}.weight", f"{prefix}.weight_zero_point"
    words, scales = source.read(name), source.read(f"{prefix}.weight_scale")
    rows, columns = 8 * words.shape[-1], words.shape[0]
    if (
        words.dim() != 2
        or scales.dim() != 2
        or scales.shape[1] != rows
        or not scales.shape[0]
        or columns % scales.shape[0]
    ):
        raise FormatError(
            f"{source.described(name)} and {source.described(f'{prefix}.weight_scale')} are not Quark's int4"
        )
    unpack = unpacked if _is_reordered(source, name) else partial(fields, bits=4)
    groups, codes, zeros = scales.shape[0], unpack(words).t(), None
    told = _of_weights(source.config, "group_size")
    require_groups(name, {told} if type(told) is int and told > 0 else set(), columns, groups)
    if zero_name in source:
        zeros = unpack(source.read(zero_name)).t()
        if zeros.shape != (rows, groups):
            raise FormatError(f"{source.described(zero_name)} is no packing of {rows} x {groups} zero-points")
    scales, group_size = scales.t(), None if groups == 1 else columns // groups
    dtype = nominal(source, scales)
    if _is_signed(source, name, zeros):
        return assembled(name, "int4", (codes.view(torch.int8) ^ 8) - 8, scales, group_size, dtype)
    if zeros is None or bool((zeros == 8).all()):
        return assembled(name, "int4", codes.view(torch.int8) - 8, scales, group_size, dtype)
    return assembled(name, "uint4", codes, scales, group_size, dtype, zeros=zeros)


def _is_reordered(source: Source, name: str) -> bool:
    """Returns whether the nibbles of a word are in AWQ's order: the ``pack_method`` of the config, by default
    ``reorder``."""
    export = source.config.get("export")
    method = export.get("pack_method", "reorder") if isinstance(export, dict) else "reorder"
    if method not in ("reorder", "order"):
        raise FormatError(f"{name}: the config says pack_method {method!a:.80}; expected reorder or order")
    return bool(method == "reorder")


def _is_signed(source: Source, name: str, zeros: torch.Tensor | None) -> bool:
    told = _of_weights(source.config, "dtype")
    if zeros is not None and bool(zeros.any()):
        if told == "int4":
            raise FormatError(f"{name}: the config says int4, which has no zero-points, and there are some")
        return False
    if told not in ("int4", "uint4"):
        raise FormatError(
            f"{name}: nothing tells whether its codes are signed; pass config={{'global_quant_config': {{'weight': "
            "{'dtype': 'int4'}}} or 'uint4'"
        )
    if told == "uint4" and zeros is None:
        raise FormatError(f"{name}: {name}_zero_point is missing, which uint4 needs")
    return told == "int4"


def _of_weights(config: Any, fact: str) -> Any:
    """Returns what the config says of all weights."""
    settings = config.get("global_quant_config")
    weight = settings.get("weight") if isinstance(settings, dict) else None
    weight = weight[0] if isinstance(weight, list) and weight else weight
    return weight.get(fact) if isinstance(weight, dict) else None


def _read_mxfp4(source: Source, prefix: str) -> QTensor:
    name = f"{prefix}.weight"
    packed, scales = source.read(name), source.read(f"{prefix}.weight_scale")
    if packed.dim() != 2 or scales.dim() != 2:
        raise FormatError(f"{source.described(name)} and {source.described(f'{prefix}.weight_scale')} are not mxfp4's")
    return assembled(name, "mxfp4", nibbles(packed), scales, 32, source.dtype or torch.bfloat16)


READER = Reader("Quark", frozenset({"quark"}), find, ())
