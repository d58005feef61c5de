"""Reads ModelOpt's nvfp4: ``weight uint8[N, K / 2]``, ``weight_scale float8_e4m3fn[N, K / 16]``, ``weight_scale_2
float32``.

Source: NVIDIA ModelOpt's ``torch/quantization/qtensor/nvfp4_tensor.py``. The low half of a byte comes first, and the
second scale multiplies. Its fp8 checkpoints are read by ``scaled.py``.

Numbers: ``code * (scale * second scale)`` in float32, as ModelOpt computes them: equal to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from jitgen.checkpoints.label import Label
from jitgen.checkpoints.scaled import activation_names, pre_scaled
from jitgen.checkpoints.source import Claim, Reader, Source
from jitgen.checkpoints.weight import GO_BY_TENSORS, assembled, nibbles
from jitgen.errors import FormatError
from jitgen.quant.qtensor import QTensor


def find(source: Source) -> Iterator[Claim]:
    for prefix in source.ending(".weight_scale_2"):
        names = tuple(f"{prefix}.{name}" for name in ("weight", "weight_scale", "weight_scale_2"))
        if not all(name in source for name in names):
            missing = next(name for name in names if name not in source)
            raise FormatError(f"{source.origin}: {missing} is missing, beside {prefix}.weight_scale_2")
        yield Claim(names[0], (*names, *activation_names(source, prefix)), partial(_read, source, prefix))


def _read(source: Source, prefix: str) -> QTensor:
    name = f"{prefix}.weight"
    packed, scales, factor = (
        source.read(f"{prefix}.{suffix}") for suffix in ("weight", "weight_scale", "weight_scale_2")
    )
    if packed.dtype != torch.uint8 or packed.dim() != 2 or scales.dtype != torch.float8_e4m3fn or factor.numel() != 1:
        raise FormatError(f"{source.described(name)} and {source.described(f'{prefix}.weight_scale')} are not nvfp4's")
    label, algorithm, size = (
        Label.read(source, prefix),
        source.config.get("quant_algo"),
        source.config.get("group_size"),
    )
    label.require(name, "num_bits", {4}, "its codes have 4 bits")
    label.require(name, "group_size", {16}, "its scales are of groups of 16")
    if isinstance(algorithm, str) and not ("NVFP4" in algorithm or "MIXED" in algorithm):
        raise FormatError(f"{name}: the config says {algorithm}, and its tensors are nvfp4's; {GO_BY_TENSORS}")
    if type(size) is int and size != 16:
        raise FormatError(f"{name}: the config says groups of {size}, and those of nvfp4 are of 16; {GO_BY_TENSORS}")
    dtype = source.dtype or torch.bfloat16
    weight = assembled(name, "nvfp4", nibbles(packed), scales, 16, dtype, tensor_scale=factor)
    return pre_scaled(source, prefix, weight)


READER = Reader("ModelOpt nvfp4", frozenset({"modelopt", "modelopt_fp4"}), find, (".weight_scale_2",))
