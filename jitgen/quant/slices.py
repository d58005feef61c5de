"""Cuts rows and columns of a quantised weight for tensor parallelism, and dequantises the rows that an embedding looks
up.

The functions take and return tensors in the portable layout.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from jitgen.errors import UnsupportedError
from jitgen.quant import fakes
from jitgen.quant.decode import decode, decode_rows
from jitgen.quant.formats import WHOLE_TENSOR, Format, Integer, geometry
from jitgen.quant.layouts import Tensors, portable

_ROW_TENSORS = ("scales", "zeros")
"""Tensors with a row for each row of the weight, or for each set of rows that share it."""


def rows(format: Format, tensors: Tensors, index: torch.Tensor) -> Tensors:
    """Returns the rows of a weight with these numbers (int64).

    Raises:
        UnsupportedError: rows share scales (``Format.scale_rows``), and they are not whole sets of these.
    """
    index = index.to(tensors[0].device)
    shared = index
    if format.scale_rows not in (1, WHOLE_TENSOR):
        sharing = format.scale_rows
        shared = index[::sharing] // sharing
        whole = (shared * sharing).repeat_interleave(sharing)[: len(index)]
        if not torch.equal(index, whole + torch.arange(len(index), device=index.device) % sharing):
            raise UnsupportedError(
                f"rows of a weight of {format.name}, of which {sharing} share their scales: take whole sets of them, "
                f"such as w[{sharing}:{2 * sharing}]"
            )
    cut = []
    for name, tensor in zip(format.tensor_names, tensors, strict=True):
        if name == "codes":
            cut.append(tensor.index_select(0, index))
        elif name in _ROW_TENSORS and format.scale_rows != WHOLE_TENSOR:
            cut.append(tensor.index_select(0, shared))
        else:
            cut.append(tensor[: 1 if len(index) else 0] if name in _ROW_TENSORS else tensor)
    return tuple(tensor.contiguous() for tensor in cut)


def dense_rows(
    format: Format,
    group_size: int | None,
    shape: tuple[int, int],
    tensors: Tensors,
    index: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Returns the dequantised rows with these numbers (int64, one dimension), ``[index.shape[0], K]`` of ``dtype``."""
    shared = index if format.scale_rows == 1 else index // format.scale_rows if format.scale_rows else index * 0
    taken = []
    for name, tensor in zip(format.tensor_names, tensors, strict=True):
        numbers = index if name == "codes" else shared
        taken.append(tensor.index_select(0, numbers) if name == "codes" or name in _ROW_TENSORS else tensor)
    # A row has scales of its own now.
    own = replace(format, scale_rows=1)
    rows = index.shape[0], shape[1]
    if fakes.is_symbolic(index):  # their number may be symbolic, of which nobody knows the pieces
        return decode_rows(own, group_size, rows, tuple(taken), slice(0, rows[0]), dtype).to(dtype)
    return decode(own, group_size, rows, tuple(taken), dtype)


def columns(
    format: Format, group_size: int | None, shape: tuple[int, int], tensors: Tensors, first: int, last: int
) -> Tensors:
    """Returns the columns from ``first`` to before ``last`` of a weight of ``shape``.

    Raises:
        UnsupportedError: they are not whole groups.
    """
    if format.ordered:
        raise UnsupportedError(
            f"columns {first} to {last} of a weight of {format.name}, whose columns are stored in another order: "
            "dequantise it, or slice it by rows"
        )
    if group_size is not None and (first % group_size or (last % group_size and last != shape[1])):
        raise UnsupportedError(
            f"columns {first} to {last} of a weight with groups of {group_size}: both ends must be multiples of "
            f"{group_size}, or the last one the end of the weight"
        )
    sizes, cut = geometry(group_size, (shape[0], last - first)), []
    for name, tensor in zip(format.tensor_names, tensors, strict=True):
        if name == "codes":
            fields = portable.unpack_codes(format, tensor)[:, first:last]
            filled = zero_codes(format, tensors, sizes.rows).expand(sizes.rows, sizes.padded_columns).clone()
            filled[:, : last - first] = fields
            cut.append(portable.pack_codes(format, filled))
        elif name == "smoothing":
            cut.append(tensor[:, first:last])
        elif name in _ROW_TENSORS and group_size is not None:
            cut.append(tensor[:, first // group_size : first // group_size + sizes.groups])
        else:
            cut.append(tensor)
    return tuple(tensor.contiguous() for tensor in cut)


def zero_codes(format: Format, tensors: Tensors, rows: int) -> torch.Tensor:
    """Returns a code of value 0 for each row, ``[rows, 1]`` or ``[1, 1]``; any finite code in formats without such."""
    if format.zeros == "integer":  # only a weight with one group a row has padding after a slice
        zeros = tensors[format.tensor_names.index("zeros")][:, -1:]
        return portable.of_rows(format, zeros, slice(0, rows)).clamp(max=(1 << format.bits) - 1)
    with fakes.with_numbers():
        zeros_at = (format.values == 0).nonzero().flatten().tolist()
    code = zeros_at[0] if zeros_at and not isinstance(format.code, Integer) else 0
    return torch.full((1, 1), code, dtype=format.code_dtype, device=tensors[0].device)
