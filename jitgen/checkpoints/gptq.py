"""Reads GPTQ: ``qweight int32[K * bits / 32, N]`` along K, ``qzeros int32[G, N * bits / 32]`` along N, ``scales [G,
N]``.

Sources: AutoGPTQ's and GPTQModel's ``nn_modules/qlinear`` (packing), GPTQModel's ``convert_gptq_v1_to_v2_format``. Each
column of ``qweight`` is one sequence of bits, lowest first, for 3 bits too. ``g_idx int32[K]`` has the group of each
column of the weight; where these are not in order (act-order), columns are stored by group and the weight has their
order. The first version stores zero-points less one, subtracted from whole words; the second as they are. Which one a
file has, its numbers tell where the quantisation is symmetric (all zero-points are half the range), else its label
(``checkpoint_format``), which is the first version where a GPTQ config has none.

Numbers: ``scale * (code - zero)`` in both, an integer times a float16, which float32 has exactly: equal to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from jitgen.checkpoints.source import Claim, Reader, Source
from jitgen.checkpoints.weight import GO_BY_TENSORS, assembled, fields, nominal, require_groups
from jitgen.errors import FormatError
from jitgen.quant.qtensor import QTensor

BITS = (2, 3, 4, 8)
_SHARED = {"gptq": 1, "gptq_v2": 2}


def find(source: Source) -> Iterator[Claim]:
    for prefix in source.ending(".qweight"):
        names = [f"{prefix}.{name}" for name in ("qweight", "qzeros", "scales")]
        if not all(name in source for name in names):
            missing = next(name for name in names if name not in source)
            raise FormatError(f"{source.origin}: {missing} is missing, beside {prefix}.qweight")
        qweight, _, scales = (source.shape(name) for name in names)
        if len(qweight) == len(scales) == 2 and qweight[1] == scales[1]:
            index = [f"{prefix}.g_idx"] if f"{prefix}.g_idx" in source else []
            yield Claim(f"{prefix}.weight", (*names, *index), partial(_read, source, prefix))


def _read(source: Source, prefix: str) -> QTensor:
    name = f"{prefix}.weight"
    qweight, qzeros, scales = (source.read(f"{prefix}.{suffix}") for suffix in ("qweight", "qzeros", "scales"))
    groups, rows = scales.shape
    bits = 32 * qzeros.shape[-1] // rows if rows else 0
    for suffix, tensor in (("qweight", qweight), ("qzeros", qzeros)):
        if tensor.dtype != torch.int32:
            raise FormatError(f"{name}: {source.described(f'{prefix}.{suffix}')} is not int32")
    if not scales.is_floating_point():
        raise FormatError(f"{name}: {source.described(f'{prefix}.scales')} is no floating-point tensor")
    if bits not in BITS or qzeros.shape != (groups, rows * bits // 32) or qweight.shape[0] * 32 % bits:
        raise FormatError(
            f"{name}: {source.described(f'{prefix}.qzeros')} beside {source.described(f'{prefix}.scales')} is no "
            f"packing of {', '.join(map(str, BITS))} bits"
        )
    columns = qweight.shape[0] * 32 // bits
    _require_labelled(source, name, bits, columns, groups)
    group_size, order = _grouping(source, prefix, columns, groups)
    codes = fields(qweight.t(), bits)
    zeros = fields(_zero_words(source, prefix, qzeros, bits), bits)[:, :rows].t()
    if order is not None:
        codes = codes[:, order]
    scales = scales.t()
    half, dtype = 1 << (bits - 1), nominal(source, scales)
    if source.config.get("sym") is True and not source.config.get("dynamic") and bool((zeros != half).any()):
        raise FormatError(
            f"{name}: the config says symmetric (sym), and {prefix}.qzeros has other zero-points than {half}; "
            + GO_BY_TENSORS
        )
    if bool((zeros == half).all()):
        signed = (codes ^ half).view(torch.int8) if bits == 8 else codes.view(torch.int8) - half
        return assembled(name, f"int{bits}", signed, scales, group_size, dtype, order=order)
    return assembled(name, f"uint{bits}", codes, scales, group_size, dtype, zeros=zeros, order=order)


def _require_labelled(source: Source, name: str, bits: int, columns: int, groups: int) -> None:
    """Raises FormatError where the config says other bits or groups, and has no rules (``dynamic``) for single
    modules."""
    told, size = source.config.get("bits"), source.config.get("group_size")
    if source.config.get("dynamic"):
        return
    if isinstance(told, int) and told != bits:
        raise FormatError(f"{name}: the config says {told} bits, and its tensors have {bits}; {GO_BY_TENSORS}")
    require_groups(name, {size} if isinstance(size, int) and size > 0 else set(), columns, groups)


def _grouping(source: Source, prefix: str, columns: int, groups: int) -> tuple[int | None, torch.Tensor | None]:
    """Returns the group size (None for one group) and the order of the columns (None if groups are in order)."""
    stated = source.config.get("group_size")
    size = -(-columns // groups) if groups else 0
    if isinstance(stated, int) and stated > 0 and -(-columns // stated) == groups:
        size = stated
    if not groups or -(-columns // size) != groups:
        raise FormatError(f"{prefix}.weight: {columns} columns are not divided into {groups} groups")
    group_size = None if groups == 1 else size
    if f"{prefix}.g_idx" not in source:
        if source.config.get("desc_act") and not source.config.get("static_groups"):
            raise FormatError(f"{source.origin}: {prefix}.g_idx is missing, and the config says act-order (desc_act)")
        return group_size, None
    index = source.read(f"{prefix}.g_idx").long()
    if index.shape != (columns,):
        raise FormatError(
            f"{prefix}.weight: {source.described(f'{prefix}.qweight')} has {columns} columns, and "
            f"{source.described(f'{prefix}.g_idx')} names the groups of others"
        )
    if columns and not 0 <= int(index.min()) <= int(index.max()) < groups:
        raise FormatError(f"{source.described(f'{prefix}.g_idx')} does not name one of {groups} groups for each column")
    if torch.equal(index, torch.arange(columns) // size):
        return group_size, None
    order = index.argsort(stable=True)
    if not torch.equal(index[order], torch.arange(columns) // size):
        raise FormatError(f"{prefix}.g_idx: groups of act-order have {size} columns each; these have others")
    return group_size, order


def _zero_words(source: Source, prefix: str, qzeros: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns ``qzeros`` in the second version's form."""
    half = 1 << (bits - 1)
    zeros = fields(qzeros, bits)
    told = 1 if bool((zeros == half - 1).all()) else 2 if bool((zeros == half).all()) else None
    label = source.config.get("checkpoint_format")
    labelled = _SHARED.get(str(label)) if label is not None else None
    if label is not None and labelled is None:
        raise FormatError(f"{source.origin}: checkpoint_format is {label!r}; expected one of {', '.join(_SHARED)}")
    if told and labelled and told != labelled and source.config.get("sym", True):
        raise FormatError(
            f"{prefix}.qzeros: all zero-points are {int(zeros.flatten()[0])}, which is version {told} of a symmetric "
            f"weight, and the config says {label!r}; correct it, or say sym: false"
        )
    version = labelled or told or (1 if source.config.get("quant_method") == "gptq" else None)
    if version is None:
        raise FormatError(
            f"{prefix}.qzeros: nothing tells whether zero-points are stored less one; pass "
            "config={'checkpoint_format': 'gptq'} where they are, or 'gptq_v2'"
        )
    if version == 2:
        return qzeros
    if bits == 3:  # whose fields are divided between words
        from jitgen.quant.layouts.portable import pack_bits

        return pack_bits((zeros + 1) & 7, 3)
    one_in_each = sum(1 << shift for shift in range(0, 32, bits))
    return ((qzeros.long() + one_in_each) & 0xFFFFFFFF).to(torch.uint32).view(torch.int32)


READER = Reader("GPTQ", frozenset({"gptq"}), find, (".qweight", ".qzeros", ".g_idx"))
