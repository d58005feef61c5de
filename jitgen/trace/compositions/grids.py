"""Composes functions that make tensors of evenly spaced numbers and of coordinates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jitgen.errors import UnsupportedError
from jitgen.trace.compositions.checks import require_float, require_rank
from jitgen.trace.compositions.reductions import distance
from jitgen.trace.table import composition


@composition("eye")
def eye(n: int, m: int | None = None, *, dtype: Any = None, device: Any = None) -> Tensor:
    columns = n if m is None else m
    same = torch.arange(columns) == torch.arange(n)[:, None]
    return same.to(torch.get_default_dtype() if dtype is None else dtype)


def _require_arithmetic(name: str, dtype: torch.dtype) -> None:
    if dtype.itemsize == 1:
        raise TypeError(f"{name} of {dtype} is not defined, in torch neither; convert the result with .to()")


@composition("linspace")
def linspace(start: Any, end: Any, steps: int, *, dtype: Any = None, device: Any = None) -> Tensor:
    """Computes the second half from the end backwards, so that both ends are exact."""
    dtype, steps = torch.get_default_dtype() if dtype is None else dtype, int(steps)
    if not dtype.is_floating_point:
        raise UnsupportedError("linspace of integers is not supported; torch.arange is")
    _require_arithmetic("linspace", dtype)
    for bound in (start, end):
        if isinstance(bound, Tensor):
            require_rank(bound, (0,))
    if steps < 0:
        raise ValueError("the number of steps must not be negative")
    index = torch.arange(steps)
    for bound in (start, end):
        if not isinstance(bound, Tensor):
            torch.full((), bound, dtype=dtype)  # is refused where it is beyond the dtype
    start, end = (bound.to(dtype) if isinstance(bound, Tensor) else float(bound) for bound in (start, end))
    if steps <= 1:
        return torch.zeros(steps, dtype=dtype) + start
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    step = (end - start) / (steps - 1)
    low, high = start + step * index.to(wide), end - step * (steps - 1 - index).to(wide)
    return torch.where(index < steps // 2, low, high).to(dtype)


@composition("logspace")
def logspace(start: Any, end: Any, steps: int, base: float = 10.0, *, dtype: Any = None, device: Any = None) -> Tensor:
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if not dtype.is_floating_point:
        raise UnsupportedError("logspace of integers is not supported; write torch.logspace(...).to(dtype)")
    _require_arithmetic("logspace", dtype)
    for bound in (start, end):
        if not isinstance(bound, Tensor):
            torch.full((), bound, dtype=dtype)
    exponents = linspace(start, end, steps, dtype=torch.float64)
    return torch.pow(base, exponents).to(dtype)


@composition("torch.meshgrid", view=True)
def meshgrid(*tensors: Any, indexing: str = "ij") -> tuple[Tensor, ...]:
    listed = list(tensors[0] if len(tensors) == 1 and not isinstance(tensors[0], Tensor) else tensors)
    if indexing not in ("ij", "xy"):
        raise ValueError(f"indexing must be 'ij' or 'xy', not {indexing!r}")
    for tensor in listed:
        require_rank(tensor, (0, 1))
    exchanged = indexing == "xy" and len(listed) >= 2
    if exchanged:
        listed[:2] = listed[1::-1]
    shape = [tensor.numel() for tensor in listed]
    grids = [
        tensor.reshape(*(-1 if number == dim else 1 for dim in range(len(listed)))).expand(shape)
        for number, tensor in enumerate(listed)
    ]
    if exchanged:
        grids[:2] = grids[1::-1]
    return tuple(grids)


@composition("_VF.cartesian_prod", itself=True)
def cartesian_prod(tensors: Any) -> Tensor:
    for tensor in tensors:
        require_rank(tensor, (0, 1))
    if len(tensors) == 1:
        return tensors[0]
    return torch.stack(meshgrid(*tensors), -1).reshape(-1, len(tensors))


def _triangle(lengths: Tensor, first: Tensor, total: int, dtype: torch.dtype) -> Tensor:
    """Returns (2, total): the row and the column of each element; row r has ``lengths[r]`` of them from ``first[r]``
    on."""
    ends = lengths.cumsum(0)
    index = torch.arange(total)
    row = torch.searchsorted(ends, index, right=True)
    return torch.stack([row, index - (ends - lengths - first)[row]]).to(dtype)


@composition("tril_indices")
def tril_indices(row: int, col: int, offset: int = 0, *, dtype: Any = torch.int64, device: Any = None) -> Tensor:
    rows, columns, offset = int(row), int(col), int(offset)
    total = sum(min(max(r + 1 + offset, 0), columns) for r in range(rows))
    lengths = (torch.arange(rows) + (1 + offset)).clamp(0, columns)
    return _triangle(lengths, torch.zeros_like(lengths), total, dtype or torch.int64)


@composition("triu_indices")
def triu_indices(row: int, col: int, offset: int = 0, *, dtype: Any = torch.int64, device: Any = None) -> Tensor:
    rows, columns, offset = int(row), int(col), int(offset)
    total = sum(columns - min(max(r + offset, 0), columns) for r in range(rows))
    first = (torch.arange(rows) + offset).clamp(0, columns)
    return _triangle(columns - first, first, total, dtype or torch.int64)


@composition("pdist")
def pdist(input: Tensor, p: float = 2) -> Tensor:
    """Computes the distances of all pairs of rows."""
    require_float(input)
    require_rank(input, (2,))
    if p < 0:
        raise ValueError("pdist only supports non-negative p values")
    first, second = triu_indices(int(input.shape[0]), int(input.shape[0]), 1)
    return distance(input[first] - input[second], p)
