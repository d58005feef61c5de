"""Composes order statistics from sorted rows: medians, the k-th values, quantiles and modes.

Where torch may give any index of an element that occurs several times, the result here is always the same one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jitgen.ir.custom_gradients import shared
from jitgen.trace.proxy import TensorProxy
from jitgen.trace.table import composition

INTERPOLATIONS = ("linear", "lower", "higher", "midpoint", "nearest")


def _at(row: Tensor, index: Tensor) -> Tensor:
    """Reads the element of each row at ``index`` (..., 1), which is in the row; a 0-d ``index`` serves every row."""
    index = index if index.dim() else index.reshape([1] * row.dim())
    index, _ = torch.broadcast_tensors(index, row[..., :1])
    return row.expand(*index.shape[:-1], row.shape[-1]).gather(-1, index)


def _rows(input: Tensor, dim: Any) -> Tensor:
    """Moves dimension ``dim`` of ``input`` last; None makes one row of everything, and a 0-d tensor is a row of one."""
    if dim is None or input.dim() == 0:
        return input.reshape(-1)
    return input.movedim(dim, -1)


def _back(statistic: Tensor, input: Tensor, dim: Any, keepdim: bool) -> Tensor:
    """Gives ``statistic`` (..., 1), of rows of ``input``, the shape of torch's result."""
    if dim is None:
        return statistic.reshape([1] * input.dim() if keepdim else [])
    if input.dim() == 0:
        return statistic.reshape([])
    return statistic.movedim(-1, dim) if keepdim else statistic.squeeze(-1)


def _numbers_only(name: str, input: Tensor) -> None:
    if input.dtype == torch.bool:
        raise TypeError(f"{name} is not defined for bool tensors, in torch neither")


def _not_empty(name: str, row: Tensor, dim: Any) -> None:
    if row.shape[-1] == 0:
        raise IndexError(f"{name}: expected dimension {dim} to have a size other than 0")


@composition("median")
def median(input: Tensor, dim: Any = None, keepdim: bool = False) -> Any:
    _numbers_only("median", input)
    row = _rows(input, dim)
    if dim is None and row.shape[-1] == 0:
        return torch.full((), float("nan") if row.is_floating_point() else torch.iinfo(row.dtype).min, dtype=row.dtype)
    _not_empty("median", row, dim)
    middle = (row.shape[-1] - 1) // 2
    sorted, indices = torch.sort(row)
    value, index = sorted[..., middle : middle + 1], indices[..., middle : middle + 1]
    if row.is_floating_point():
        missing = torch.isnan(row).any(-1, keepdim=True)
        value = torch.where(missing, float("nan"), value)
        index = torch.where(missing, torch.argmax(row, -1, keepdim=True), index)
    return _both(torch.return_types.median, value, index, input, dim, keepdim)


@composition("nanmedian")
def nanmedian(input: Tensor, dim: Any = None, keepdim: bool = False) -> Any:
    if not input.is_floating_point():
        result = median(input, dim, keepdim)
        return result if dim is None else torch.return_types.nanmedian(result)
    row = _rows(input, dim)
    if dim is None and row.shape[-1] == 0:
        return torch.full((), float("nan"), dtype=row.dtype)
    _not_empty("nanmedian", row, dim)
    sorted, indices = torch.sort(row)
    there = torch.logical_not(torch.isnan(row)).sum(-1, keepdim=True)
    middle = torch.clamp(there - 1, min=0) // 2
    return _both(torch.return_types.nanmedian, _at(sorted, middle), _at(indices, middle), input, dim, keepdim)


@composition("kthvalue")
def kthvalue(input: Tensor, k: Any, dim: Any = -1, keepdim: bool = False) -> Any:
    _numbers_only("kthvalue", input)
    row = _rows(input, dim)
    if not 1 <= k <= row.shape[-1]:
        raise ValueError(f"kthvalue: k is {int(k)}, of {int(row.shape[-1])} elements")
    values, indices = (sorted_[..., k - 1 : k] for sorted_ in torch.sort(row))
    return _both(torch.return_types.kthvalue, values, indices, input, dim, keepdim)


@composition("mode")
def mode(input: Tensor, dim: Any = -1, keepdim: bool = False) -> Any:
    """Finds the least of the values that occur most often, and the last place of it."""
    row = _rows(input, dim)
    _not_empty("mode", row, dim)
    sorted, indices = torch.sort(row)
    here = torch.arange(row.shape[-1], device=row.device)
    changes = torch.cat([torch.zeros_like(sorted[..., :1], dtype=torch.bool), sorted[..., 1:] != sorted[..., :-1]], -1)
    begins = torch.cummax(torch.where(changes, here, 0), -1).values
    longest = torch.argmax(here - begins, -1, keepdim=True)
    return _both(torch.return_types.mode, _at(sorted, longest), _at(indices, longest), input, dim, keepdim)


def _is_differentiated(input: Tensor) -> bool:
    return isinstance(input, TensorProxy) and input.owner.differentiable and input.is_floating_point()


def _both(kind: Any, value: Tensor, index: Tensor, input: Tensor, dim: Any, keepdim: bool) -> Any:
    """Returns torch's pair of values and indices; without a dimension the value alone.

    Where gradients are computed, the element that the index names has that of the value, a NaN too.
    """
    differentiable = _is_differentiated(input)
    if dim is None:
        if differentiable:
            value = _shared(_rows(input, dim), value)
        return _back(value, input, dim, keepdim)
    if differentiable:
        value = _at(_rows(input, dim), index)
    return kind((_back(value, input, dim, keepdim), _back(index, input, dim, keepdim)))


def _shared(row: Tensor, value: Tensor) -> Tensor:
    """Returns ``value`` as the maximum of the elements of ``row`` equal to it, which share its gradient, as in
    torch."""
    equal = (row == value) | (torch.isnan(row) & torch.isnan(value))
    return shared(torch.where(equal, row, float("-inf"))).amax(-1, keepdim=True)


@composition("quantile")
def quantile(input: Tensor, q: Any, dim: Any = None, keepdim: bool = False, *, interpolation: str = "linear") -> Tensor:
    return _quantile("quantile", input, q, dim, keepdim, interpolation)


@composition("nanquantile")
def nanquantile(
    input: Tensor, q: Any, dim: Any = None, keepdim: bool = False, *, interpolation: str = "linear"
) -> Tensor:
    return _quantile("nanquantile", input, q, dim, keepdim, interpolation)


def _quantile(name: str, input: Tensor, q: Any, dim: Any, keepdim: bool, interpolation: str) -> Tensor:
    if input.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{name} is defined for float32 and float64 tensors, as in torch; convert the input")
    if interpolation not in INTERPOLATIONS:
        raise ValueError(f"{name}: the interpolation is one of {', '.join(INTERPOLATIONS)}, not {interpolation!r}")
    row = _rows(input, dim)
    if row.shape[-1] == 0:
        raise ValueError(f"{name}: the input must not be empty")
    if not isinstance(q, Tensor):
        if not 0 <= q <= 1:
            raise ValueError(f"{name}: q must be in the range from 0 to 1")
        q = torch.full((), q, dtype=row.dtype, device=row.device)
    if q.dtype != row.dtype:
        raise TypeError(f"{name}: q must have the dtype of the input, as in torch")
    if q.dim() > 1:
        raise ValueError(f"{name}: q must be a number, or a tensor of at most 1 dimension")
    missing = torch.isnan(row)
    last = torch.full((), row.shape[-1] - 1, dtype=row.dtype, device=row.device)
    if name == "nanquantile":
        last = torch.clamp(torch.logical_not(missing).sum(-1, keepdim=True) - 1, min=0).to(row.dtype)
    sorted = torch.sort(row).values
    if q.dim() == 1:
        # A dimension in front of the rows': one for each q.
        q = q.reshape([-1] + [1] * row.dim())
        sorted, missing = sorted[None], missing[None]
    ranks = q * last
    if name == "quantile" and _is_differentiated(input):  # a NaN of the row has the gradient
        ranks = torch.where(missing.any(-1, keepdim=True), last, ranks)
    if interpolation in ("lower", "higher", "nearest"):
        ranks = {"lower": torch.floor, "higher": torch.ceil, "nearest": torch.round}[interpolation](ranks)
    below = torch.floor(ranks)
    lower, upper = _at(sorted, below.to(torch.int64)), _at(sorted, torch.ceil(ranks).to(torch.int64))
    weight = 0.5 if interpolation == "midpoint" else ranks - below
    interpolated = torch.lerp(lower, upper, torch.full_like(ranks, weight) if interpolation == "midpoint" else weight)
    if name == "quantile" and not _is_differentiated(input):
        interpolated = torch.where(missing.any(-1, keepdim=True), float("nan"), interpolated)
    if q.dim() == 0:
        return _back(interpolated, input, dim, keepdim)
    if dim is None or input.dim() == 0:
        return interpolated.reshape([-1] + [1] * (input.dim() if keepdim else 0))
    return interpolated.movedim(-1, dim + 1 if dim >= 0 else dim) if keepdim else interpolated.squeeze(-1)
