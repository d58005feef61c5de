"""Reads compressed-tensors: pack-quantized (integers of 1 to 8 bits in int32), nvfp4 and mxfp4.

Source: compressed-tensors' ``compressors/pack_quantized`` and ``compressors/nvfp4``. ``weight_packed int32[N, words]``
has codes plus half their range, lowest bits first; since release 0.18 each row is one sequence of bits, and up to 0.17
each word has ``32 // bits`` codes. ``weight_shape`` has N and K, ``weight_scale`` is ``[N, groups]``,
``weight_zero_point int32[words, groups]`` is packed along N, ``weight_g_idx`` has act-order's groups. Of nvfp4,
``weight_packed uint8[N, K / 2]`` has the low half of a byte first, and ``weight_global_scale`` divides.

Numbers: of integers ``(code - zero) * scale``, which float32 has exactly: equal to the bit. Of nvfp4 the library
divides each scale by the global one; jitgen multiplies by its reciprocal, so scales differ by one rounding of float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from jitgen.checkpoints.label import Label
from jitgen.checkpoints.scaled import activation_names
from jitgen.checkpoints.source import Claim, Reader, Source
from jitgen.checkpoints.weight import GO_BY_TENSORS, assembled, fields, nibbles, nominal, require_groups
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
    shape = source.read(f"{prefix}.weight_shape").flatten().tolist()
    if len(shape) != 2 or packed.dim() != 2:
        raise UnsupportedError(f"{source.described(packed_name)} is of a weight {shape}; matrices are read")
    rows, columns = (int(size) for size in shape)
    label = Label.read(source, prefix)
    label.require(name, "type", {"int"}, "its codes are integers")
    bits, dense = _packing(source, packed, (rows, columns), label)
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
    label.require_groups(name, scales, (rows, columns))
    codes = _unpacked(packed, bits, dense)[:, :columns]
    order = _order(source, prefix, label, columns, groups)
    codes = codes[:, order] if order is not None else codes
    dtype, half = nominal(source, scales), 1 << (bits - 1)
    zero_name = f"{prefix}.weight_zero_point"
    if zero_name not in source:
        if label.symmetric == {False}:
            raise FormatError(
                f"{source.origin}: {zero_name} is missing, and the config says that weights have zero-points"
            )
        signed = (codes ^ half).view(torch.int8) if bits == 8 else codes.view(torch.int8) - half
        if bits == 1:  # whose codes are -1 and 0, while int1 has -1 and 1
            zeros = torch.ones_like(scales).byte()
            return assembled(
                name, "uint1", codes, scales, group_size, dtype, zeros=zeros, order=order, qualifier=qualifier
            )
        return assembled(name, f"int{bits}", signed, scales, group_size, dtype, order=order, qualifier=qualifier)
    zeros = _zero_points(source, zero_name, bits, dense, (rows, groups), scales)
    if label.symmetric == {True} and bool((zeros != half).any()):
        raise FormatError(f"{name}: the config says symmetric, and {zero_name} has others than 0; {GO_BY_TENSORS}")
    return assembled(
        name, f"uint{bits}", codes, scales, group_size, dtype, zeros=zeros, order=order, qualifier=qualifier
    )


# ------------------------------------------------------------------------------------------------------------- packing


def _packing(source: Source, words: torch.Tensor, shape: tuple[int, int], label: Label) -> tuple[int, bool]:
    """Returns the width of a code, and whether rows are one sequence of bits.

    Releases up to 0.17 put ``32 // bits`` codes into each word and leave its other bits 0; releases from 0.18 on leave
    none. A row of as many words may be codes of 5 bits in the one way and of 6 in the other, so both are compared with
    what the config says, and the first with the bits that it leaves.
    """
    name = f"{label.prefix}.weight_packed"
    rows, columns = shape
    packings = [(bits, dense) for bits in range(1, 9) for dense in (True, False) if dense or 32 % bits]
    packings = [(bits, dense) for bits, dense in packings if _words(columns, bits, dense) == words.shape[1]]
    if words.shape[0] != rows or not packings:
        raise FormatError(f"{source.described(name)} is no packing of a weight {[rows, columns]}")
    packings = [(bits, dense) for bits, dense in packings if dense or not _has_bits_between(words, bits)]
    allowed = sorted({bits for bits, _ in packings})
    if label.num_bits and not label.num_bits & set(allowed):
        told = ", ".join(map(str, sorted(label.num_bits)))
        raise FormatError(
            f"{source.described(name)}: the config says {told} bits, and codes of a weight {[rows, columns]} have "
            f"{' or '.join(map(str, allowed))} in so many words; {GO_BY_TENSORS}"
        )
    packings = [(bits, dense) for bits, dense in packings if bits in (label.num_bits or allowed)]
    release = _release(source)
    if len(packings) > 1 and release is not None:
        packings = [(bits, dense) for bits, dense in packings if 32 % bits == 0 or dense == (release >= DENSE_SINCE)]
    if len(packings) != 1 and len({bits for bits, _ in packings}) == 1 and columns <= 32 // packings[0][0]:
        packings = packings[:1]  # a row is in one word, where both are the same
    if len(packings) != 1:
        ways = [f"{bits}{'' if dense else ' in words of their own'}" for bits, dense in packings]
        raise FormatError(
            f"{source.described(name)}: codes may have {' or '.join(ways)} bits; pass the config that tells (num_bits "
            "and version)"
        )
    return packings[0]


DENSE_SINCE = (0, 18)
"""The first release of compressed-tensors that packs rows as one sequence of bits (its change #732)."""


def _words(count: int, bits: int, dense: bool) -> int:
    """Returns how many words ``count`` codes take."""
    return -(-count * bits // 32) if dense else -(-count // (32 // bits))


def _has_bits_between(words: torch.Tensor, bits: int) -> bool:
    """Returns whether a word has bits above those of its ``32 // bits`` codes."""
    return bool((words >> (32 // bits * bits)).any())


def _release(source: Source) -> tuple[int, int] | None:
    """Returns the release of the library that wrote the file, if the config says it."""
    numbers = str(source.config.get("version", "")).split(".")[:2]
    return (int(numbers[0]), int(numbers[1])) if len(numbers) == 2 and all(map(str.isdigit, numbers)) else None


def _unpacked(words: torch.Tensor, bits: int, dense: bool) -> torch.Tensor:
    """Unpacks the codes of rows of words, uint8: at least as many as were packed."""
    if not dense:
        shifts = torch.arange(0, 32 // bits * bits, bits, dtype=torch.int32)
        return (words.unsqueeze(-1) >> shifts & ((1 << bits) - 1)).flatten(1).to(torch.uint8)
    missing = -words.shape[1] % bits  # so that rows have a multiple of 32 codes
    return fields(torch.nn.functional.pad(words, (0, missing)) if missing else words, bits)


def _zero_points(
    source: Source, name: str, bits: int, dense: bool, shape: tuple[int, int], scales: torch.Tensor
) -> torch.Tensor:
    """Returns the zero-points of unsigned codes, of the shape of ``scales``."""
    rows, groups = shape
    stored, half = source.read(name), 1 << (bits - 1)
    if stored.dtype == torch.int8 and stored.numel() == scales.numel():  # strategies that the library does not pack
        return (stored.reshape(scales.shape).int() + half).to(torch.uint8)
    if stored.dtype != torch.int32 or stored.shape != (_words(rows, bits, dense), groups):
        raise FormatError(f"{source.described(name)} is no packing of {rows} x {groups} zero-points")
    return _unpacked(stored.t(), bits, dense)[:, :rows].t()


def _order(source: Source, prefix: str, label: Label, columns: int, groups: int) -> torch.Tensor | None:
    if f"{prefix}.weight_g_idx" not in source:
        if label.actorder & {"group", True}:
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
    label = Label.read(source, prefix)
    label.require(name, "type", {"float"}, "its codes are floats of 4 bits")
    label.require(name, "num_bits", {4}, "its codes are floats of 4 bits")
    if scales.dim() == 2 and scales.shape[1]:
        require_groups(name, label.group_size, 2 * packed.shape[1], scales.shape[1])
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
