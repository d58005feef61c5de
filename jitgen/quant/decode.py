"""The number a code stands for, in plain torch: what every kernel's decoding is held to."""

from __future__ import annotations

import torch

from jitgen.quant.formats import Format, geometry
from jitgen.quant.layouts import Parts, portable

CHUNK = {"cpu": 1 << 19}
"""Elements worked on at a time, by device type: few enough to stay in a CPU's cache."""
CHUNK_ELSEWHERE = 1 << 25


def row_chunks(rows: int, columns: int, device: torch.device) -> list[slice]:
    """The rows of a weight in slices whose float32 copies are small."""
    step = max(1, CHUNK.get(device.type, CHUNK_ELSEWHERE) // max(1, columns))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def decode(
    format: Format, group_size: int | None, shape: tuple[int, int], parts: Parts, dtype: torch.dtype
) -> torch.Tensor:
    """The weight [N, K] of portable ``parts``: ``(code - zero) * scale``, rounded to ``dtype``.

    In float64 for float64; else in float32, where products of codes of 4 bits and bfloat16 scales are exact.
    """
    weight = torch.empty(shape, dtype=dtype, device=parts[0].device)
    for rows in row_chunks(*shape, parts[0].device):
        weight[rows] = decode_rows(format, group_size, shape, tuple(part[rows] for part in parts), dtype)
    return weight


def decode_rows(
    format: Format, group_size: int | None, shape: tuple[int, int], parts: Parts, dtype: torch.dtype
) -> torch.Tensor:
    """The same for some of the rows, given their parts: float32 or float64 of ``[rows, K]``."""
    sizes = geometry(group_size, shape)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    codes, scales, *zeros = parts
    values = portable.unpack_codes(format, codes).to(compute).unflatten(-1, (sizes.groups, sizes.group))
    if zeros:
        values -= zeros[0].unsqueeze(-1)
    values *= scales.unsqueeze(-1).to(compute)
    return values.flatten(-2)[:, : sizes.columns]
