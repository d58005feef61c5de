"""Reads GGUF's quantised tensors: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K to Q6_K, IQ4_NL, IQ4_XS and MXFP4.

Source: llama.cpp's ``ggml/src/ggml-common.h`` (the blocks) and ``gguf-py/gguf/quants.py``. A tensor is a sequence of
blocks of 32 numbers, or super-blocks of 256 whose groups have scales of 6 or 8 bits that multiply one of the
super-block.

Numbers: types without minima are ``d * scale * code``, where ``d * scale`` is exact in float32: equal to the bit. Types
with minima are ``d * code + m``; jitgen has them as ``(code - zero) * d`` with float32 scales and zero-points ``-m /
d``, so numbers differ by the rounding of ``zero``, of the difference and of the product: at most ``2^-22 (|d code| +
|m|)``.
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from jitgen.checkpoints.gguf_file import GgufFile
from jitgen.checkpoints.source import Claim, Reader, Source
from jitgen.checkpoints.weight import assembled
from jitgen.errors import FallbackWarning, FormatError, UnsupportedError
from jitgen.quant.qtensor import QTensor


@dataclass(frozen=True)
class Blocks:
    """Holds the numbers of ``n`` blocks.

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
            read = _read if storage.kind(name).name in TYPES else _dequantized
            yield Claim(name, (name,), partial(read, source, storage, name))


def _dequantized(source: Source, file: GgufFile, name: str) -> torch.Tensor:
    """Dequantises a tensor of a type that no format has, by llama.cpp's own package if it is installed."""
    kind, shape = file.kind(name).name, file.facts(name)[0]
    problem = f"{name} is of GGUF's type {kind}; jitgen reads {', '.join(TYPES)}"
    try:
        library, numpy = importlib.import_module("gguf"), importlib.import_module("numpy")
        rows = file.blocks(name).view(*shape[:-1], -1).numpy()
        dense = library.quants.dequantize(rows, library.GGMLQuantizationType[kind])
    except ImportError:
        others = [other for other in file.names() if not (file.is_plain(other) or file.kind(other).name in TYPES)]
        raise UnsupportedError(
            f"{problem}. There are {len(others)} tensors of such types in the file: with the package gguf (pip install "
            "gguf) they are loaded as plain tensors, and with strict=False the others without them"
        ) from None
    except (KeyError, NotImplementedError) as error:
        raise UnsupportedError(
            f"{problem}, and the package gguf does not ({error!r}); strict=False loads the other tensors"
        ) from None
    warnings.warn(f"{source.origin}: loaded as a plain tensor: {problem}", FallbackWarning, stacklevel=2)
    return torch.from_numpy(numpy.ascontiguousarray(dense)).view(shape).to(source.dtype or torch.float32)


def _read(source: Source, file: GgufFile, name: str) -> QTensor | torch.Tensor:
    kind, shape = file.kind(name), file.facts(name)[0]
    if not 1 <= len(shape) <= 3:
        raise UnsupportedError(
            f"{name}: a quantised tensor of {len(shape)} dimensions, {list(shape)}; vectors, matrices and the matrices "
            "of experts are read"
        )
    weight = _weight(source, name, TYPES[kind.name], file.blocks(name), (math.prod(shape[:-1]), shape[-1]))
    if len(shape) == 1:
        return weight.dequantize().view(shape)
    return weight if len(shape) == 2 else weight.of_experts(shape[0])


def _weight(source: Source, name: str, type_: Type, bytes_: torch.Tensor, shape: tuple[int, int]) -> QTensor:
    base, group, unpack = type_
    blocks = unpack(bytes_)
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
    """Splits bytes into halves, ``[..., n]`` to ``[..., 2 n]``: all low halves, and then all high ones."""
    return torch.cat([bytes_ & 15, bytes_ >> 4], -1)


def _float16(bytes_: torch.Tensor) -> torch.Tensor:
    return bytes_.contiguous().view(torch.float16)


def _bits(bytes_: torch.Tensor) -> torch.Tensor:
    """Splits bytes into bits, ``[..., n]`` to ``[..., 8 n]``, lowest first."""
    return (bytes_.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)


def _planes(bytes_: torch.Tensor) -> torch.Tensor:
    """Splits bytes into bits, ``[..., n]`` to ``[..., 8 n]``: the lowest of all bytes, then the next, and so on."""
    return (bytes_.unsqueeze(-2) >> torch.arange(8, dtype=torch.uint8).view(8, 1) & 1).flatten(-2)


def _pairs(bytes_: torch.Tensor) -> torch.Tensor:
    """Splits bytes into pairs of bits, ``[..., 64]`` to ``[..., 256]``: of each 32 bytes the lowest two bits, then the
    next, and so on."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8).view(4, 1)
    return (bytes_.unflatten(-1, (2, 32)).unsqueeze(-2) >> shifts & 3).flatten(-3)


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
    """Decodes the scales and minima ``[n, 8]`` of super-blocks, float32, from twelve bytes of 6-bit numbers."""
    low, middle, high = packed.split([4, 4, 4], -1)
    scales = torch.cat([low & 63, (high & 15) | (low >> 2 & 48)], -1)
    minima = torch.cat([middle & 63, (high >> 4) | (middle >> 2 & 48)], -1)
    return _float16(d).float() * scales, -(_float16(minimum).float() * minima)


def _q4_k(block: torch.Tensor) -> Blocks:
    d, minimum, packed, codes = block.split([2, 2, 12, 128], -1)
    return Blocks(_halves(codes.unflatten(-1, (4, 32))).flatten(-2), *_k_scales(d, minimum, packed))


def _q5_k(block: torch.Tensor) -> Blocks:
    d, minimum, packed, high, codes = block.split([2, 2, 12, 32, 128], -1)
    low = _halves(codes.unflatten(-1, (4, 32))).flatten(-2)
    return Blocks(low | _planes(high) << 4, *_k_scales(d, minimum, packed))


def _q6_k(block: torch.Tensor) -> Blocks:
    low, high, scales, d = block.split([128, 64, 16, 2], -1)
    low = _halves(low.unflatten(-1, (2, 64))).flatten(-2)
    codes = (low | _pairs(high) << 4).view(torch.int8) - 32
    return Blocks(codes, _float16(d).float() * scales.contiguous().view(torch.int8))


def _mxfp4(block: torch.Tensor) -> Blocks:
    # Its table has doubled values and its scales halve them: these are e2m1 and e8m0.
    scales, codes = block.split([1, 16], -1)
    return Blocks(_halves(codes), scales)


IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The values of the codes of IQ4_NL and IQ4_XS. jitgen has them as codes of 8 bits."""


def _iq4_nl(block: torch.Tensor) -> Blocks:
    d, codes = block.split([2, 16], -1)
    return Blocks(torch.tensor(IQ4, dtype=torch.int8)[_halves(codes).int()], _float16(d))


def _iq4_xs(block: torch.Tensor) -> Blocks:
    d, high, low, codes = block.split([2, 2, 4, 128], -1)
    low = torch.stack([low & 15, low >> 4], -1).flatten(-2)
    high = (high.unsqueeze(-1) >> torch.arange(0, 8, 2, dtype=torch.uint8) & 3).flatten(-2)
    scales = _float16(d).float() * ((low | high << 4).view(torch.int8) - 32)
    values = _halves(codes.unflatten(-1, (8, 16))).flatten(-2)
    return Blocks(torch.tensor(IQ4, dtype=torch.int8)[values.int()], scales)


def _q2_k(block: torch.Tensor) -> Blocks:
    scales, codes, d, minimum = block.split([16, 64, 2, 2], -1)
    return Blocks(_pairs(codes), _float16(d).float() * (scales & 15), -(_float16(minimum).float() * (scales >> 4)))


def _q3_k(block: torch.Tensor) -> Blocks:
    high, low, packed, d = block.split([32, 64, 12, 2], -1)
    codes = (_pairs(low) | _planes(high) << 2).view(torch.int8) - 4
    four, two = packed.split([8, 4], -1)
    two = (two.unsqueeze(-2) >> torch.arange(0, 8, 2, dtype=torch.uint8).view(4, 1) & 3).flatten(-2)
    return Blocks(codes, _float16(d).float() * ((_halves(four) | two << 4).view(torch.int8) - 32))


Type = tuple[str, int, Callable[[torch.Tensor], Blocks]]
TYPES: dict[str, Type] = {
    "Q4_0": ("int4", 32, _q4_0),
    "Q4_1": ("uint4", 32, _q4_1),
    "Q5_0": ("int5", 32, _q5_0),
    "Q5_1": ("uint5", 32, _q5_1),
    "Q8_0": ("int8", 32, _q8_0),
    "Q2_K": ("uint2", 16, _q2_k),
    "Q3_K": ("int4", 16, _q3_k),
    "Q4_K": ("uint4", 32, _q4_k),
    "Q5_K": ("uint5", 32, _q5_k),
    "Q6_K": ("int6", 16, _q6_k),
    "IQ4_NL": ("int8", 32, _iq4_nl),
    "IQ4_XS": ("int8", 32, _iq4_xs),
    "MXFP4": ("mxfp4", 32, _mxfp4),
}
"""For each GGUF type its format, the columns that share a scale, and the function that unpacks ``uint8[n, bytes of a
block]``."""

READER = Reader("GGUF", frozenset(), find, ())
