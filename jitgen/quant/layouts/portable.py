"""Defines the portable layout: codes in row-major order, as checkpoints store them.

Kp is K after padding to whole groups (``Geometry.padded_columns``).

codes
    8-bit: ``int8[N, Kp]``, or ``uint8`` where codes are not in two's complement. Fewer bits: ``uint8[N, Kp * bits /
    8]``. A row is one sequence of bits: code k is its bits ``k * bits`` to ``(k + 1) * bits - 1``, and bit 0 is the
    lowest one of the first byte. Signed codes are in two's complement.
scales
    ``[R, groups]`` of the format's scale dtype; R is N, or fewer where rows share scales (``formats.scale_rows``).
zeros
    ``[R, groups]``, in formats with zero-points: uint8, or the dtype of the scales.
tensor_scale
    ``float32[1, 1]``, in formats with a factor for the whole weight.
order
    ``int32[1, K]``, in formats whose columns are in another order: the column of the weight that is stored at each
    position. Every layout has it so.
input_scale
    ``float32[1, 1]``, in formats with a scale of activations. Every layout has it so.

The codes of padding (columns K to Kp) decode to 0 in formats that have the value 0 and no floating-point zero-points.
In every format they decode to finite numbers, and what multiplies them in a kernel is 0.
"""

from __future__ import annotations

import torch

from jitgen.errors import FormatError
from jitgen.quant.formats import E8M0_BIAS, E8M0_NAN, WHOLE_TENSOR, Float, Format, Integer, geometry, scale_rows
from jitgen.quant.layouts import Tensors


def pack(format: Format, group_size: int | None, shape: tuple[int, int], tensors: Tensors) -> Tensors:
    return tensors


def unpack(format: Format, group_size: int | None, shape: tuple[int, int], tensors: Tensors) -> Tensors:
    return tensors


def pack_codes(format: Format, codes: torch.Tensor) -> torch.Tensor:
    """Packs ``[..., Kp]`` integers of any dtype, one code to an element, as the portable layout stores them."""
    # Converted to the code's own dtype first, since a negative float has no conversion to an unsigned integer.
    codes = codes.to(format.code_dtype)
    return codes if format.bits == 8 else pack_bits(codes.view(torch.uint8), format.bits)


def unpack_codes(format: Format, packed: torch.Tensor) -> torch.Tensor:
    """Undoes ``pack_codes``: one code to an element, int8 in signed formats and uint8 in the others."""
    if format.bits == 8:
        return packed
    codes = unpack_bits(packed, format.bits)
    if not format.signed:
        return codes
    sign = 1 << (format.bits - 1)
    return codes.view(torch.int8).bitwise_xor_(sign).sub_(sign)


def pack_bits(fields: torch.Tensor, bits: int) -> torch.Tensor:
    """Packs the low ``bits`` bits of ``uint8[..., K]``, one after another, in ``uint8[..., K * bits / 8]``."""
    mask = (1 << bits) - 1
    if 8 % bits == 0:
        split = (fields & mask).unflatten(-1, (fields.shape[-1] * bits // 8, 8 // bits))
        packed = split[..., 0].clone()
        for index in range(1, 8 // bits):
            packed |= split[..., index] << (index * bits)
        return packed
    eight = (fields & mask).unflatten(-1, (fields.shape[-1] // 8, 8))
    # Byte j has bits 8j to 8j + 7 of the eight fields, which are those of the fields that overlap them.
    bytes_ = []
    for byte in range(bits):
        value = None
        for index in range(8 * byte // bits, min(8, -(-8 * (byte + 1) // bits))):
            shift = index * bits - 8 * byte
            field = eight[..., index] << shift if shift >= 0 else eight[..., index] >> -shift
            value = field if value is None else value | field
        bytes_.append(value)
    return torch.stack(bytes_, -1).flatten(-2)  # type: ignore[arg-type]


def unpack_bits(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Undoes ``pack_bits``: ``uint8[..., K]`` from ``uint8[..., K * bits / 8]``."""
    mask = (1 << bits) - 1
    if 8 % bits == 0:
        return torch.stack([packed >> (index * bits) & mask for index in range(8 // bits)], -1).flatten(-2)
    bytes_ = packed.unflatten(-1, (packed.shape[-1] // bits, bits))
    fields = []
    for index in range(8):
        byte, shift = divmod(index * bits, 8)
        field = bytes_[..., byte] >> shift
        if shift + bits > 8:
            field = field | bytes_[..., byte + 1] << (8 - shift)
        fields.append(field & mask)
    return torch.stack(fields, -1).flatten(-2)


def unsigned_codes(format: Format, codes: torch.Tensor) -> torch.Tensor:
    """Returns the codes of a portable weight as kernels store them: ``uint8[N, Kp]``, one to an element. Those in two's
    complement are stored with a bias of half their range, so that they ascend as their values do."""
    if format.bits == 8:
        unsigned = codes.view(torch.uint8)
    else:
        unsigned = unpack_bits(codes, format.bits)
    return unsigned ^ (1 << (format.bits - 1)) if format.signed else unsigned


def from_unsigned_codes(format: Format, unsigned: torch.Tensor) -> torch.Tensor:
    """Undoes ``unsigned_codes``."""
    if format.signed:
        unsigned = unsigned ^ (1 << (format.bits - 1))
    if format.bits == 8:
        return unsigned.contiguous().view(format.storage_dtype)
    return pack_bits(unsigned, format.bits)


def decode_codes(format: Format, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the values of packed codes, ``[..., Kp]`` of ``dtype``."""
    codes = unpack_codes(format, packed)
    if isinstance(format.code, Integer):
        values = codes.to(dtype)
        return values if format.code.step == 1 else values.mul_(format.code.step).add_(format.code.low)
    return format.values.to(codes.device, dtype)[codes.int()]


def decode_scales(format: Format, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Converts stored scales to numbers of ``dtype``."""
    if format.scale == "e8m0":
        return torch.exp2(scales.to(dtype) - E8M0_BIAS)
    if format.scale == "e4m3":
        return scales.view(torch.float8_e4m3fn).to(dtype)
    return scales.to(dtype)


def of_rows(format: Format, tensor: torch.Tensor, rows: slice) -> torch.Tensor:
    """Returns the scales or zero-points of some rows, one for each row, from a tensor that rows may share."""
    if format.scale_rows == 1:
        return tensor[rows]
    if format.scale_rows == WHOLE_TENSOR:
        return tensor[:1].expand(rows.stop - rows.start, tensor.shape[1])
    index = torch.arange(rows.start, rows.stop, device=tensor.device) // format.scale_rows
    return tensor.index_select(0, index)


def empty(format: Format, group_size: int | None, shape: tuple[int, int], device: torch.device | str) -> Tensors:
    """Returns uninitialised tensors of the shapes and dtypes that a weight of ``shape`` has in this layout."""
    return tuple(torch.empty(size, dtype=dtype, device=device) for size, dtype in _expected(format, group_size, shape))


def check(format: Format, group_size: int | None, shape: tuple[int, int], tensors: Tensors) -> None:
    """Raises FormatError unless ``tensors`` are what a weight of this format and shape consists of."""
    expected = _expected(format, group_size, shape)
    actual = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    if actual != expected or any(not tensor.is_contiguous() for tensor in tensors):
        grouping = f"groups of {group_size}" if group_size else "one scale per row"
        raise FormatError(
            f"a weight {tuple(shape)} of format {format.name} with {grouping} has contiguous {_named(format, expected)}"
            f"; these tensors are {_named(format, actual)}"
        )


_OF_ACTIVATIONS = {
    "smoothing": "factors of an activation's columns",
    "input_scale": "a scale of activations, the size of one step of their codes",
}
"""What belongs to activations, all of it above 0: by the name of a weight's tensor, in words."""


def check_finite(format: Format, tensors: Tensors) -> None:
    """Raises FormatError if a code or a scale is NaN or infinite, which kernels do not decode. The tensors have
    numbers."""
    named = dict(zip(format.tensor_names, tensors, strict=True))
    if isinstance(format.code, Float) and format.code.specials != "none":
        least = 0x7F if format.code.specials == "nan" else 0x7C
        if bool((named["codes"] & 0x7F >= least).any()):
            raise FormatError(f"codes of {format.name} are NaN or infinite; a quantised weight is finite")
    if format.ordered:
        order = named["order"][0]
        if not torch.equal(order.sort().values, torch.arange(len(order), dtype=order.dtype, device=order.device)):
            raise FormatError(f"the order of columns of a weight of {format.name} does not name each column once")
    for name, what in _OF_ACTIVATIONS.items():
        values = named.get(name, tensors[0].new_ones((), dtype=torch.float32))
        wrong = values[~(values.isfinite() & (values >= torch.finfo(torch.float32).tiny))]
        if len(wrong):
            raise FormatError(
                f"a weight of {format.name} has {what}, and {wrong[0].item():g} is none: it is finite and no smaller "
                "than 2^-126"
            )
    bad = False
    if format.scale == "e8m0":
        bad = bool((named["scales"] == E8M0_NAN).any())
    elif format.scale == "e4m3":
        bad = bool((named["scales"] & 0x7F == 0x7F).any())
    if bad or not all(bool(tensor.isfinite().all()) for tensor in tensors[1:] if tensor.is_floating_point()):
        raise FormatError(f"scales or zero-points of a weight of {format.name} are NaN or infinite")


def _expected(
    format: Format, group_size: int | None, shape: tuple[int, int]
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Returns the shape and dtype of each tensor of a weight of ``shape``."""
    sizes = geometry(group_size, shape)
    scales = (scale_rows(format, sizes.rows), sizes.groups)
    codes = (sizes.rows, sizes.padded_columns * format.bits // 8)
    expected: list[tuple[tuple[int, ...], torch.dtype]] = [(codes, format.storage_dtype), (scales, format.scale_dtype)]
    if format.zero_point:
        expected.append((scales, format.zero_dtype))
    if format.tensor_scale:
        expected.append(((1, 1), torch.float32))
    if format.ordered:
        expected.append(((1, sizes.columns), torch.int32))
    if format.smoothed:
        expected.append(((1, sizes.columns), torch.float32))
    if format.static:
        expected.append(((1, 1), torch.float32))
    return expected


def _named(format: Format, tensors: list[tuple[tuple[int, ...], torch.dtype]]) -> str:
    names = [*format.tensor_names, *("?" * len(tensors))]
    return ", ".join(
        f"{name} {str(dtype).removeprefix('torch.')}{list(size)}"
        for name, (size, dtype) in zip(names, tensors, strict=False)
    )


def padded(tensor: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Pads ``tensor`` with zeros below and to the right, for layouts that store rows and columns in blocks."""
    if tensor.shape == (rows, columns):
        return tensor
    larger = tensor.new_zeros(rows, columns)
    larger[: tensor.shape[0], : tensor.shape[1]] = tensor
    return larger
