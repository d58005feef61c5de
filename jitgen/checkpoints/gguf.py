"""GGUF's quantised tensors: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K and MXFP4.

Source: llama.cpp's ``ggml/src/ggml-common.h`` (the blocks) and ``gguf-py/gguf/quants.py``. A tensor is a sequence of
blocks of 32 numbers, or super-blocks of 256 whose groups have scales of 6 or 8 bits that multiply one of the
super-block.

Numbers: types without minima are ``d * scale * code``, where ``d * scale`` is exact in float32: equal to the bit. Types
with minima are ``d * code + m``; jitgen has them as ``(code - zero) * d`` with float32 scales and zero-points ``-m /
d``, so numbers differ by the rounding of ``zero``, of the difference and of the product: at most ``2^-22 (|d code| +
|m|)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from jitgen.checkpoints.gguf_file import GgufFile
from jitgen.checkpoints.source import Claim, Reader, Source
from jitgen.checkpoints.weight import assembled
from jitgen.errors import FormatError, UnsupportedError
from jitgen.quant.qtensor import QTensor


@dataclass(frozen=True)
class Blocks:
    """The numbers of ``n`` blocks.

    Attributes:
        codes: ``[n, numbers of a block]``.
        scales: ``[n, groups of a block]``, float16, float32 or e8m0 as uint8.
        minima: what is added to ``code * scale``, of the shape of ``scales``; None for none.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None = None


def find(source: Source) -> Iterator[Claim]:
    for name, storage in source.storages.items():
        if isinstance(storage, GgufFile) and not storage.is_plain(name):
            yield Claim(name, (name,), partial(_read, source, storage, name))


def _read(source: Source, file: GgufFile, name: str) -> QTensor:
    kind, shape = file.kind(name), file.facts(name)[0]
    if kind.name not in TYPES:
        raise UnsupportedError(f"{name} is of GGUF's type {kind.name}; jitgen reads {', '.join(TYPES)}")
    if len(shape) != 2:
        raise UnsupportedError(
            f"{name}: a quantised tensor of {len(shape)} dimensions, {list(shape)}; matrices are read"
        )
    base, group, unpack = TYPES[kind.name]
    blocks = unpack(file.blocks(name))
    rows, columns = shape
    codes, scales = blocks.codes.reshape(rows, columns), blocks.scales.reshape(rows, -1)
    if scales.is_floating_point() and not bool(scales.isfinite().all()):
        raise FormatError(f"{name}: its scales are NaN or infinite")
    dtype = source.dtype or torch.float32
    if blocks.minima is None:
        return assembled(name, base, codes, scales, group, dtype)
    minima, exact = blocks.minima.reshape(rows, -1).float(), scales.float()
    # Where the scale is 0 every number is the minimum: a scale of that, of codes that are 0 and a zero-point of -1.
    flat = exact == 0
    codes = codes * (~flat).repeat_interleave(group, 1)
    zeros = torch.where(flat, -1.0, -minima / torch.where(flat, 1.0, exact))
    return assembled(name, base, codes, torch.where(flat, minima, exact), group, dtype, zeros=zeros)


def _halves(bytes_: torch.Tensor) -> torch.Tensor:
    """``[..., n]`` to ``[..., 2 n]``: all low halves, and then all high ones."""
    return torch.cat([bytes_ & 15, bytes_ >> 4], -1)


def _float16(bytes_: torch.Tensor) -> torch.Tensor:
    return bytes_.contiguous().view(torch.float16)


def _bits(bytes_: torch.Tensor) -> torch.Tensor:
    """``[..., n]`` to ``[..., 8 n]``: the bits of each byte, lowest first."""
    return (bytes_.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)


def _q4_0(block: torch.Tensor) -> Blocks:
    d, codes = block.split([2, 16], -1)
    return Blocks(_halves(codes).view(torch.int8) - 8, _float16(d))


def _q4_1(block: torch.Tensor) -> Blocks:
    d, minimum, codes = block.split([2, 2, 16], -1)
    return Blocks(_halves(codes), _float16(d), _float16(minimum))


def _q5_0(block: torch.Tensor) -> Blocks:
    d, high, codes = block.split([2, 4, 16], -1)
    return Blocks((_halves(codes) | _bits(high) << 4).view(torch.int8) - 16, _float16(d))


def _q5_1(block: torch.Tensor) -> Blocks:
    d, minimum, high, codes = block.split([2, 2, 4, 16], -1)
    return Blocks(_halves(codes) | _bits(high) << 4, _float16(d), _float16(minimum))


def _q8_0(block: torch.Tensor) -> Blocks:
    d, codes = block.split([2, 32], -1)
    return Blocks(codes.contiguous().view(torch.int8), _float16(d))


def _k_scales(d: torch.Tensor, minimum: torch.Tensor, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales and minima ``[n, 8]`` of super-blocks, float32, from twelve bytes of 6-bit numbers."""
    low, middle, high = packed.split([4, 4, 4], -1)
    scales = torch.cat([low & 63, (high & 15) | (low >> 2 & 48)], -1)
    minima = torch.cat([middle & 63, (high >> 4) | (middle >> 2 & 48)], -1)
    return _float16(d).float() * scales, -(_float16(minimum).float() * minima)


def _q4_k(block: torch.Tensor) -> Blocks:
    d, minimum, packed, codes = block.split([2, 2, 12, 128], -1)
    return Blocks(_halves(codes.unflatten(-1, (4, 32))).flatten(-2), *_k_scales(d, minimum, packed))


def _q5_k(block: torch.Tensor) -> Blocks:
    d, minimum, packed, high, codes = block.split([2, 2, 12, 32, 128], -1)
    fifth = high.unsqueeze(-2) >> torch.arange(8, dtype=torch.uint8).view(8, 1) & 1
    low = _halves(codes.unflatten(-1, (4, 32))).flatten(-2)
    return Blocks(low | fifth.flatten(-2) << 4, *_k_scales(d, minimum, packed))


def _q6_k(block: torch.Tensor) -> Blocks:
    low, high, scales, d = block.split([128, 64, 16, 2], -1)
    low = _halves(low.unflatten(-1, (2, 64))).flatten(-2)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8).view(4, 1)
    high = (high.unflatten(-1, (2, 32)).unsqueeze(-2) >> shifts & 3).flatten(-3)
    return Blocks((low | high << 4).view(torch.int8) - 32, _float16(d).float() * scales.contiguous().view(torch.int8))


def _mxfp4(block: torch.Tensor) -> Blocks:
    # Its table has doubled values and its scales halve them: these are e2m1 and e8m0.
    scales, codes = block.split([1, 16], -1)
    return Blocks(_halves(codes), scales)


TYPES: dict[str, tuple[str, int, Callable[[torch.Tensor], Blocks]]] = {
    "Q4_0": ("int4", 32, _q4_0),
    "Q4_1": ("uint4", 32, _q4_1),
    "Q5_0": ("int5", 32, _q5_0),
    "Q5_1": ("uint5", 32, _q5_1),
    "Q8_0": ("int8", 32, _q8_0),
    "Q4_K": ("uint4", 32, _q4_k),
    "Q5_K": ("uint5", 32, _q5_k),
    "Q6_K": ("int6", 16, _q6_k),
    "MXFP4": ("mxfp4", 32, _mxfp4),
}
"""By GGUF type: the format, the columns that share a scale, what unpacks ``uint8[n, bytes of a block]``."""

READER = Reader("GGUF", frozenset(), find, ())
