"""AWQ: ``qweight int32[K, N / 8]`` and ``qzeros int32[G, N / 8]`` along N, ``scales [G, N]``; 4 bits.

Source: AutoAWQ's ``awq/utils/packing_utils.py``. The nibbles of a word, lowest first, are columns 0, 2, 4, 6, 1, 3, 5,
7 of its eight. Zero-points are as they are.

Numbers: ``(code - zero) * scale``, an integer times a float16, which float32 has exactly: equal to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from jitgen.checkpoints.source import Claim, Reader, Source
from jitgen.checkpoints.weight import assembled, fields, nominal
from jitgen.errors import FormatError
from jitgen.quant.qtensor import QTensor

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of a word that each of its eight columns is in."""


def find(source: Source) -> Iterator[Claim]:
    for prefix in source.ending(".qweight"):
        names = [f"{prefix}.{name}" for name in ("qweight", "qzeros", "scales")]
        if f"{prefix}.g_idx" in source or not all(name in source for name in names):
            continue
        qweight, qzeros, scales = (source.shape(name) for name in names)
        if len(qweight) == len(qzeros) == 2 and qweight[1] == qzeros[1] and scales[-1] == 8 * qweight[1]:
            yield Claim(f"{prefix}.weight", tuple(names), partial(_read, source, prefix))


def _read(source: Source, prefix: str) -> QTensor:
    name = f"{prefix}.weight"
    qweight, qzeros, scales = (source.read(f"{prefix}.{part}") for part in ("qweight", "qzeros", "scales"))
    columns, groups = qweight.shape[0], scales.shape[0]
    if qweight.dtype != torch.int32 or qzeros.dtype != torch.int32 or not scales.is_floating_point():
        raise FormatError(
            f"{name}: {source.described(f'{prefix}.qweight')} and {source.described(f'{prefix}.qzeros')} are not int32"
        )
    if not groups or qzeros.shape[0] != groups or columns % groups:
        raise FormatError(f"{name}: {columns} columns are not divided into {groups} groups")
    given = source.config.get("group_size")
    if isinstance(given, int) and given > 0 and -(-columns // given) != groups:
        raise FormatError(f"{name}: {groups} groups of {columns} columns, and the config says {given} columns each")
    codes, zeros = unpacked(qweight), unpacked(qzeros)
    group_size = None if groups == 1 else columns // groups
    scales = scales.t()
    return assembled(name, "uint4", codes.t(), scales, group_size, nominal(source, scales), zeros=zeros.t())


def unpacked(words: torch.Tensor) -> torch.Tensor:
    """The codes of ``int32[n, N / 8]``, ``uint8[n, N]``."""
    return fields(words, 4).unflatten(-1, (-1, 8))[..., list(ORDER)].flatten(-2)


READER = Reader("AWQ", frozenset({"awq"}), find, ())
