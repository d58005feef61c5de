"""compressed-tensors: pack-quantized (integers of 1 to 8 bits in int32), nvfp4 and mxfp4.

Source: compressed-tensors' ``compressors/pack_quantized`` and ``compressors/nvfp4``. ``weight_packed int32[N, words]``
has codes plus half their range; each row is one sequence of bits, lowest first. ``weight_shape`` has N and K,
``weight_scale`` is ``[N, groups]``, ``weight_zero_point int32[words, groups]`` is packed along N, ``weight_g_idx`` has
act-order's groups. Of nvfp4, ``weight_packed uint8[N, K / 2]`` has the low half of a byte first, and
``weight_global_scale`` divides.

Numbers: of integers ``(code - zero) * scale``, which float32 has exactly: equal to the bit. Of nvfp4 the library
divides each scale by the global one; jitgen multiplies by its reciprocal, so scales differ by one rounding of float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from jitgen.checkpoints.scaled import activation_names
from jitgen.checkpoints.source import Claim, Reader, Source
from jitgen.checkpoints.weight import assembled, fields, nibbles, nominal, require_groups
from jitgen.errors import FormatError, UnsupportedError
from jitgen.quant.qtensor import QTensor


def find(source: Source) -> Iterator[Claim]:
    for prefix in source.ending(".weight_packed"):
        scale = f"{prefix}.weight_scale"
        if scale not in source:
            raise FormatError(f"{source.origin}: {scale} is missing, beside {prefix}.weight_packed")
        uses = [f"{prefix}.weight_packed", scale, *activation_names(source, prefix)]
        uses += [name for name in (f"{prefix}.weight_global_scale",) if name in source]
        read = _read_integers if source.is_of(f"{prefix}.weight_packed", torch.int32) else _read_floats
        yield Claim(f"{prefix}.weight", tuple(uses), partial(read, source, prefix))


def _read_integers(source: Source, prefix: str) -> QTensor:
    name, packed_name = f"{prefix}.weight", f"{prefix}.weight_packed"
    packed, scales = source.read(packed_name), source.read(f"{prefix}.weight_scale")
    rows, columns = (int(size) for size in source.read(f"{prefix}.weight_shape").flatten().tolist())
    bits = _bits(source, packed_name, packed.shape, (rows, columns))
    if scales.numel() == 1:
        scales = scales.reshape(1, 1)
    elif scales.dim() == 1:
        scales = scales[:, None]
    groups = scales.shape[-1]
    qualifier = "tensor" if scales.numel() == 1 and rows != 1 else ""
    if scales.dim() != 2 or not (qualifier or scales.shape[0] == rows) or not groups or columns % groups:
        raise FormatError(
            f"{source.described(f'{prefix}.weight_scale')} is not of groups of a weight {[rows, columns]}"
        )
    group_size = None if groups == 1 else columns // groups
    _require_labelled(source, name, columns, groups)
    codes = fields(_aligned(packed, bits), bits)[:, :columns]
    order = _order(source, prefix, columns, groups)
    codes = codes[:, order] if order is not None else codes
    dtype, half = nominal(source, scales), 1 << (bits - 1)
    zero_name = f"{prefix}.weight_zero_point"
    if zero_name not in source:
        if _told(source, "symmetric") == {False}:
            raise FormatError(
                f"{source.origin}: {zero_name} is missing, and the config says that weights have zero-points"
            )
        signed = (codes ^ half).view(torch.int8) if bits == 8 else codes.view(torch.int8) - half
        if bits == 1:  # whose codes are -1 and 0, while int1 has -1 and 1
            return assembled(
                name, "uint1", codes, scales, group_size, dtype, zeros=torch.ones_like(scales).byte(), order=order
            )
        return assembled(name, f"int{bits}", signed, scales, group_size, dtype, order=order, qualifier=qualifier)
    words = source.read(zero_name)
    zeros = fields(_aligned(words.t(), bits), bits)[:, :rows].t()
    if words.dtype != torch.int32 or words.shape != (-(-rows * bits // 32), groups):
        raise FormatError(f"{source.described(zero_name)} is no packing of {rows} x {groups} zero-points")
    return assembled(name, f"uint{bits}", codes, scales, group_size, dtype, zeros=zeros, order=order)


def _bits(source: Source, name: str, words: torch.Size, shape: tuple[int, int]) -> int:
    """The width of a code, for which rows of K codes take as many words as these do."""
    rows, columns = shape
    found = [bits for bits in range(1, 9) if -(-columns * bits // 32) == words[-1]]
    if len(words) != 2 or words[0] != rows or not found:
        raise FormatError(f"{source.described(name)} is no packing of a weight {[rows, columns]}")
    if len(found) > 1:  # few columns: the label decides between what the content allows
        told = _told(source, "num_bits") & set(found)
        if len(told) != 1:
            raise FormatError(f"{source.described(name)}: codes may have {found} bits; pass the config that tells")
        return int(told.pop())
    return found[0]


def _require_labelled(source: Source, name: str, columns: int, groups: int) -> None:
    """FormatError where every group of the config says another number of columns that share a scale."""
    told = {size for size in _told(source, "group_size") if isinstance(size, int) and size > 0}
    if all(strategy == "group" for strategy in _told(source, "strategy")):
        require_groups(name, told, columns, groups)


def _told(source: Source, fact: str) -> set[Any]:
    """What the groups of the config say of weights."""
    groups = source.config.get("config_groups")
    weights = [group.get("weights") for group in groups.values()] if isinstance(groups, dict) else []
    return {weight[fact] for weight in weights if isinstance(weight, dict) and fact in weight}


def _aligned(words: torch.Tensor, bits: int) -> torch.Tensor:
    """``words``, with words of 0 at the end so that rows have a multiple of 32 codes."""
    missing = -words.shape[1] % bits
    return torch.nn.functional.pad(words, (0, missing)) if missing else words


def _order(source: Source, prefix: str, columns: int, groups: int) -> torch.Tensor | None:
    if f"{prefix}.weight_g_idx" not in source:
        if _told(source, "actorder") & {"group", True}:
            raise FormatError(f"{source.origin}: {prefix}.weight_g_idx is missing, and the config says act-order")
        return None
    index = source.read(f"{prefix}.weight_g_idx").long()
    if index.shape == (columns,) and bool((index == -1).all()):  # act-order that was not used
        return None
    in_order = torch.arange(columns) // (columns // groups)
    order = index.argsort(stable=True)
    if index.shape != (columns,) or not torch.equal(index[order], in_order):
        raise FormatError(f"{prefix}.weight_g_idx does not give each of {groups} groups as many of {columns} columns")
    return None if torch.equal(index, in_order) else order


def _read_floats(source: Source, prefix: str) -> QTensor:
    name = f"{prefix}.weight"
    packed, scales = source.read(f"{prefix}.weight_packed"), source.read(f"{prefix}.weight_scale")
    if packed.dtype != torch.uint8 or packed.dim() != 2:
        raise UnsupportedError(f"{source.described(f'{prefix}.weight_packed')} is neither int32 nor uint8[N, K / 2]")
    dtype, codes = source.dtype or torch.bfloat16, nibbles(packed)
    if scales.dtype == torch.uint8:
        return assembled(name, "mxfp4", codes, scales, 32, dtype)
    factor = f"{prefix}.weight_global_scale"
    if scales.dtype != torch.float8_e4m3fn or factor not in source:
        raise FormatError(
            f"{source.described(f'{prefix}.weight_scale')} is neither nvfp4's, with {factor}, nor mxfp4's"
        )
    return assembled(name, "nvfp4", codes, scales, 16, dtype, tensor_scale=1 / source.read(factor).float())


_MARKS = (".weight_packed", ".weight_shape", ".weight_zero_point", ".weight_g_idx", ".weight_global_scale")

READER = Reader("compressed-tensors", frozenset({"compressed-tensors"}), find, _MARKS)
