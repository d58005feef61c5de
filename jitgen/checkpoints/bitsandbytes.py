"""Reads bitsandbytes: nf4 with ``weight uint8[N K / 2, 1]`` and its quant_state, and LLM.int8 with ``weight int8[N,
K]`` and ``SCB``.

Source: bitsandbytes' ``functional.py`` (``QuantState``, ``int8_vectorwise_dequant``) and ``nn/modules.py``.

nf4: the bytes of codes may be stored as a dtype of floats (``bnb_4bit_quant_storage``). Blocks of ``blocksize`` numbers
of the flattened weight share ``absmax``; the high half of a byte comes first. With double quantisation ``absmax`` is
codes of 8 bits itself, of a table and in blocks with an ``absmax`` of their own, plus an offset; jitgen has its values
in float32, as bitsandbytes computes them. Numbers: ``table[code] * absmax`` in float32: equal to the bit.

int8: ``code * SCB / 127``. jitgen has ``SCB / 127`` as a float32 scale, so numbers differ by one rounding of float32.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from jitgen.checkpoints.source import Claim, Reader, Source
from jitgen.checkpoints.weight import GO_BY_TENSORS, assembled
from jitgen.errors import FormatError, UnsupportedError
from jitgen.quant.formats import NF4
from jitgen.quant.qtensor import QTensor
from jitgen.spec import DTYPES

_STATE = ".quant_state.bitsandbytes__"
_TENSORS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")


def find(source: Source) -> Iterator[Claim]:
    for name in list(source):
        prefix, state, kind = name.partition(_STATE)
        if state:
            uses = [f"{prefix}.{tensor}" for tensor in _TENSORS if f"{prefix}.{tensor}" in source]
            yield Claim(prefix, (prefix, name, *uses), partial(_read_nf4, source, prefix, name, kind))
        elif name.endswith(".SCB"):
            prefix = name.removesuffix(".SCB")
            layout = [f"{prefix}.weight_format"] if f"{prefix}.weight_format" in source else []
            yield Claim(f"{prefix}.weight", (f"{prefix}.weight", name, *layout), partial(_read_int8, source, prefix))


def _read_nf4(source: Source, name: str, state_name: str, kind: str) -> QTensor:
    state = _state(source, state_name)
    if kind != "nf4":
        raise UnsupportedError(f"{name}: bitsandbytes' {kind} has a table of values of its own; nf4 is read")
    try:
        rows, columns = state["shape"]
        block, dtype = int(state["blocksize"]), DTYPES[str(state["dtype"]).removeprefix("torch.")]
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{state_name} does not describe a weight: {error!r}") from None
    if state.get("quant_type", kind) != kind:
        raise FormatError(f"{state_name} says quant_type {state['quant_type']!a:.80}, and its name {kind}")
    told = source.config.get("bnb_4bit_quant_type", kind)
    if told != kind or (source.config.get("load_in_8bit") and not source.config.get("load_in_4bit")):
        raise FormatError(f"{name}: the config says other codes than {kind}, which the file has; {GO_BY_TENSORS}")
    packed, table = source.read(name), source.read(f"{name}.quant_map")
    if packed.is_floating_point():  # bnb_4bit_quant_storage: the bytes of codes as floats, for FSDP
        packed = packed.contiguous().flatten().view(torch.uint8)
    if block <= 0 or columns % block:
        raise UnsupportedError(
            f"{name}: rows of {columns} columns are not whole blocks of {block}, which share a scale"
        )
    if packed.dtype != torch.uint8 or packed.numel() * 2 != rows * columns:
        raise FormatError(f"{source.described(name)} has not {rows} x {columns} codes of 4 bits")
    if table.shape != (16,) or not torch.equal(table.float(), torch.tensor(NF4)):
        raise FormatError(f"{name}.quant_map is not the table of nf4")
    scales = _absmax(source, name, state)
    if scales.numel() != rows * columns // block:
        raise FormatError(f"{source.described(f'{name}.absmax')} is not one number for each block of {block}")
    codes = torch.stack([packed.flatten() >> 4, packed.flatten() & 15], -1).view(rows, columns)
    return assembled(name, "nf4", codes, scales.view(rows, -1), block, dtype)


def _state(source: Source, name: str) -> dict[str, Any]:
    try:
        state = json.loads(bytes(source.read(name).tolist()))
    except (ValueError, TypeError) as error:
        raise FormatError(f"{name} is not readable: {error!r}") from None
    if not isinstance(state, dict):
        raise FormatError(f"{name} is not readable: it is no object")
    return state


def _absmax(source: Source, name: str, state: dict[str, Any]) -> torch.Tensor:
    absmax = source.read(f"{name}.absmax").flatten()
    if f"{name}.nested_absmax" not in source:
        if not absmax.is_floating_point():
            raise FormatError(f"{source.described(f'{name}.absmax')} is quantised, and {name}.nested_absmax is missing")
        return absmax.float()
    table, nested = (source.read(f"{name}.{suffix}").float() for suffix in ("nested_quant_map", "nested_absmax"))
    try:
        block, offset = int(state["nested_blocksize"]), float(state["nested_offset"])
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{name}: its double quantisation is not described: {error!r}") from None
    floats = (torch.float32, torch.bfloat16, torch.float16)
    if (
        absmax.dtype != torch.uint8
        or not (source.is_of(f"{name}.nested_absmax", *floats) and source.is_of(f"{name}.nested_quant_map", *floats))
        or table.numel() != 256
        or block <= 0
        or nested.numel() != -(-absmax.numel() // block)
    ):
        raise FormatError(
            f"{source.described(f'{name}.absmax')} does not fit {source.described(f'{name}.nested_absmax')}"
        )
    return table[absmax.int()] * nested.repeat_interleave(block)[: absmax.numel()] + torch.tensor(offset)


def _read_int8(source: Source, prefix: str) -> QTensor:
    name = f"{prefix}.weight"
    if source.config.get("load_in_4bit") and not source.config.get("load_in_8bit"):
        raise FormatError(f"{name}: the config says load_in_4bit, and its codes have 8 bits; {GO_BY_TENSORS}")
    layout = f"{prefix}.weight_format"
    if layout in source and int(source.read(layout)) != 0:
        raise UnsupportedError(f"{name}: {layout} is not 0: the weight is in a layout of one GPU; save it as rows")
    codes, stored = source.read(name), source.read(f"{prefix}.SCB")
    largest = stored.float().flatten()
    if (
        codes.dtype != torch.int8
        or codes.dim() != 2
        or largest.numel() != codes.shape[0]
        or not stored.is_floating_point()
    ):
        raise FormatError(f"{source.described(name)} does not fit {source.described(f'{prefix}.SCB')}")
    dtype = source.dtype or torch.float16
    return assembled(name, "int8", codes, (largest / 127).unsqueeze(1), None, dtype)


READER = Reader("bitsandbytes", frozenset({"bitsandbytes"}), find, (_STATE + "nf4", _STATE + "fp4", ".absmax", ".SCB"))
