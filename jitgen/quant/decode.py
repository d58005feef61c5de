"""Dequantises in plain torch: the reference that every kernel's decoding is compared with."""

from __future__ import annotations

import torch

from jitgen.quant.formats import Format, geometry
from jitgen.quant.layouts import Tensors, portable

CHUNK_ELEMENTS = {"cpu": 1 << 19}
"""How many elements are decoded at a time, by device type. On the CPU 2^19 elements are 2 MiB of float32, which fit its
cache."""
DEFAULT_CHUNK_ELEMENTS = 1 << 25
"""The same for every other device type: 128 MiB of float32, a bound on the memory of temporaries."""


def row_chunks(rows: int, columns: int, device: torch.device) -> list[slice]:
    """Cuts ``rows`` into slices of about ``CHUNK_ELEMENTS`` elements, or of a single row."""
    step = max(1, CHUNK_ELEMENTS.get(device.type, DEFAULT_CHUNK_ELEMENTS) // max(1, columns))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def decode(
    format: Format, group_size: int | None, shape: tuple[int, int], tensors: Tensors, dtype: torch.dtype
) -> torch.Tensor:
    """Returns the dense weight [N, K], ``(value - zero) * scale`` rounded to ``dtype``, of ``tensors`` in the portable
    layout.

    It is computed in float64 if ``dtype`` is float64, else in float32, where the product of a 4-bit code and a bfloat16
    scale is exact.
    """
    weight = torch.empty(shape, dtype=dtype, device=tensors[0].device)
    for rows in row_chunks(*shape, tensors[0].device):
        weight[rows] = decode_rows(format, group_size, shape, tensors, rows, dtype)
    return weight


def decode_rows(
    format: Format, group_size: int | None, shape: tuple[int, int], tensors: Tensors, rows: slice, dtype: torch.dtype
) -> torch.Tensor:
    """Returns ``rows`` of a weight of ``shape``, ``[rows, K]`` in float32, or in float64 if ``dtype`` is that."""
    sizes = geometry(group_size, shape)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    named = dict(zip(format.tensor_names, tensors, strict=True))
    values = portable.decode_codes(format, named["codes"][rows], compute).unflatten(-1, (sizes.groups, sizes.group))
    if format.zero_point:
        values -= portable.of_rows(format, named["zeros"], rows).unsqueeze(-1).to(compute)
    scales = portable.decode_scales(format, portable.of_rows(format, named["scales"], rows), compute)
    if format.tensor_scale:
        scales = scales * named["tensor_scale"].to(compute)
    values *= scales.unsqueeze(-1)
    dense = values.flatten(-2)[:, : sizes.columns]
    if format.ordered:
        dense = torch.empty_like(dense).index_copy_(1, named["order"][0].long(), dense)
    return dense * named["smoothing"].to(compute) if format.smoothed else dense
