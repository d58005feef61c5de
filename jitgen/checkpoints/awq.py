"""Reads AWQ: ``qweight int32[K, N / 8]`` and ``qzeros int32[G, N / 8]`` along N, ``scales [G, N]``; 4 bits. Its version
GEMV: ``qweight int32[N, K / 8]``, ``qzeros int32[N, W]`` and ``scales [N, 8 W]``, of which the first G columns are in
use.

Source: AutoAWQ's ``awq/utils/packing_utils.py`` and ``modules/linear/gemv.py``. The nibbles of a word, lowest first,
are columns 0, 2, 4, 6, 1, 3, 5, 7 of its eight, and 0 to 7 in GEMV. Zero-points are as they are.

Numbers: ``(code - zero) * scale``, an integer times a float16, which float32 has exactly: equal to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from jitgen.checkpoints.source import Claim, Reader, Source
from jitgen.checkpoints.weight import GO_BY_TENSORS, assembled, fields, nominal
from jitgen.errors import FormatError, UnsupportedError
from jitgen.quant.qtensor import QTensor

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of a word in which each of its eight columns is."""
BITS = 4


def find(source: Source) -> Iterator[Claim]:
    for prefix in source.ending(".qweight"):
        names = [f"{prefix}.{name}" for name in ("qweight", "qzeros", "scales")]
        if f"{prefix}.g_idx" in source or not all(name in source for name in names):
            continue
        qweight, qzeros, scales = (source.shape(name) for name in names)
        if not len(qweight) == len(qzeros) == len(scales) == 2:
            continue
        if qweight[1] == qzeros[1] and scales[1] == 8 * qweight[1]:
            yield Claim(f"{prefix}.weight", tuple(names), partial(_read, source, prefix))
        elif qweight[0] == qzeros[0] == scales[0] and scales[1] == 8 * qzeros[1]:
            yield Claim(f"{prefix}.weight", tuple(names), partial(_read_gemv, source, prefix))
        elif source.config.get("quant_method") == "awq" and qweight[1] != scales[1]:
            described = ", ".join(source.described(name) for name in names)
            raise UnsupportedError(
                f"{source.origin}: {described} are AWQ's in the version {_version(source) or 'of some kernel'}, "
                "which is laid out for that alone; the versions gemm and gemv are read"
            )


def _read(source: Source, prefix: str) -> QTensor:
    name = f"{prefix}.weight"
    qweight, qzeros, scales = _tensors(source, prefix, "gemm")
    columns, groups = qweight.shape[0], scales.shape[0]
    if not groups or qzeros.shape[0] != groups or columns % groups:
        raise FormatError(f"{name}: {columns} columns are not divided into {groups} groups")
    size = _group_size(source)
    if size is not None and -(-columns // size) != groups:
        raise FormatError(f"{name}: {groups} groups of {columns} columns, and the config says {size} columns each")
    codes, zeros = unpacked(qweight), unpacked(qzeros)
    group_size = None if groups == 1 else columns // groups
    scales = scales.t()
    return assembled(name, "uint4", codes.t(), scales, group_size, nominal(source, scales), zeros=zeros.t())


def _read_gemv(source: Source, prefix: str) -> QTensor:
    name = f"{prefix}.weight"
    qweight, qzeros, scales = _tensors(source, prefix, "gemv")
    columns, size = 8 * qweight.shape[1], _group_size(source)
    if size is None:  # W is padded to whole words, and further for small groups
        raise FormatError(
            f"{name}: {source.described(f'{prefix}.qweight')} is AWQ's version GEMV, whose tensors do not tell the "
            "group size; pass config={'quant_method': 'awq', 'version': 'gemv', 'group_size': 128}, or what it is"
        )
    groups = columns // size
    if not groups or columns % size or groups > scales.shape[1] or bool(scales[:, groups:].any()):
        raise FormatError(
            f"{name}: {source.described(f'{prefix}.scales')} is not of groups of {size} of {columns} columns, which "
            f"the config says; {GO_BY_TENSORS}"
        )
    codes, zeros, scales = fields(qweight, BITS), fields(qzeros, BITS)[:, :groups], scales[:, :groups]
    group_size = None if groups == 1 else size
    return assembled(name, "uint4", codes, scales, group_size, nominal(source, scales), zeros=zeros)


def _tensors(source: Source, prefix: str, version: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns qweight, qzeros and scales, whose version, bits and dtypes are those that the config says."""
    name = f"{prefix}.weight"
    qweight, qzeros, scales = (source.read(f"{prefix}.{suffix}") for suffix in ("qweight", "qzeros", "scales"))
    if qweight.dtype != torch.int32 or qzeros.dtype != torch.int32 or not scales.is_floating_point():
        raise FormatError(
            f"{name}: {source.described(f'{prefix}.qweight')} and {source.described(f'{prefix}.qzeros')} are not int32"
        )
    if _version(source) in ({"gemm", "gemv", "gemv_fast", "marlin"} - {version}):
        raise FormatError(
            f"{name}: the config says version {_version(source)}, and {source.described(f'{prefix}.qweight')} is laid "
            f"out as {version}; {GO_BY_TENSORS}"
        )
    bits = next((source.config[key] for key in ("bits", "w_bit") if type(source.config.get(key)) is int), BITS)
    if bits != BITS:
        raise FormatError(f"{name}: the config says {bits} bits, and AWQ's tensors have {BITS}; {GO_BY_TENSORS}")
    return qweight, qzeros, scales


def _version(source: Source) -> str:
    return str(source.config.get("version") or "").lower()


def _group_size(source: Source) -> int | None:
    """Returns the group size that the config says; AutoAWQ's own file calls it ``q_group_size``."""
    told = [source.config.get(key) for key in ("group_size", "q_group_size")]
    return next((size for size in told if type(size) is int and size > 0), None)


def unpacked(words: torch.Tensor) -> torch.Tensor:
    """Unpacks the codes of ``int32[n, N / 8]`` as ``uint8[n, N]``."""
    return fields(words, BITS).unflatten(-1, (-1, 8))[..., list(ORDER)].flatten(-2)


READER = Reader("AWQ", frozenset({"awq"}), find, ())
