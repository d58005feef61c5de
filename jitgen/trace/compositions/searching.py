"""Composes functions that look for elements among others, membership, buckets and histograms, and gradients on a grid.

Each element is compared with all of a few. Where there are more, they are sorted and halved.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from jitgen.trace.compositions.checks import reported, require_float, require_rank, require_shape
from jitgen.trace.compositions.pointwise import floating
from jitgen.trace.table import composition

MOST_COMPARED = 1024
"""The most elements with which each element of another tensor is compared. A search among more reads one in each step,
which depends on the one before."""


@composition("isin")
def isin(
    elements: Any = None,
    test_elements: Any = None,
    *,
    assume_unique: bool = False,
    invert: bool = False,
    element: Any = None,
    test_element: Any = None,
) -> Tensor:
    """Compares every element with every test element; either may be a number."""
    elements = element if elements is None else elements
    test_elements = test_element if test_elements is None else test_elements
    for operand in (elements, test_elements):
        if isinstance(operand, bool) or (isinstance(operand, Tensor) and operand.dtype == torch.bool):
            raise TypeError("isin is not defined for bool, as in torch; convert it first, with .int() say")
    if not isinstance(test_elements, Tensor):
        equal = elements == test_elements
    else:
        tested = test_elements.reshape(-1)
        if isinstance(elements, Tensor) and tested.shape[0] > MOST_COMPARED:
            dtype = torch.result_type(elements, tested)
            sorted_, x = tested.to(dtype).sort()[0], elements.to(dtype)
            position = _searched(sorted_, x.reshape(-1), right=False).clamp(max=tested.shape[0] - 1)
            equal = sorted_[position].reshape(x.shape) == x
        else:
            first = elements.unsqueeze(-1) if isinstance(elements, Tensor) else elements
            equal = (first == tested).any(-1)
    return ~equal if invert else equal


def _position(boundaries: Tensor, values: Any, right: bool, int32: bool) -> Tensor:
    """Counts the sorted ``boundaries`` (..., n) below each of ``values`` (..., m), or not above it, in their promoted
    dtype. NaN is above all numbers, and moves the place of some as in torch."""
    common, shape = torch.result_type(boundaries, values), None
    if not isinstance(values, Tensor):
        values = torch.scalar_tensor(values, dtype=common)
    if boundaries.dim() == 1:
        values, shape = values.reshape(-1), values.shape
    boundaries, values = boundaries.to(common), values.to(common)
    count = boundaries.shape[-1]
    if count > MOST_COMPARED:
        place = _searched(boundaries, values, right)
        if common.is_floating_point:
            place = _behind_nan_read(boundaries, place)
    else:
        edges, x = boundaries.unsqueeze(-2), values.unsqueeze(-1)
        place = _passed(edges, x, right).sum(-1)
        if common.is_floating_point:
            # NaN is after all; the boundaries that are NaN are counted for each of the values, in the same pass.
            place = _behind_nans(place, (edges.isnan() & ~x.isnan()).sum(-1), count)
    place = place.to(torch.int32 if int32 else torch.int64)
    return place if shape is None else place.reshape(shape)


def _behind_nans(place: Tensor, nans: Tensor, count: Any) -> Tensor:
    """Returns where torch's search ends among ``count`` boundaries, of which the last ``nans`` are NaN.

    It halves what is left and takes NaN for less than any value. While it goes right it reads what stands
    ``(count + 1) // 2**k`` before the end, for k = 1, 2, ...: where it comes to a NaN before a boundary that is not
    passed, it ends behind the last one.
    """
    whole = torch.scalar_tensor(count + 1, dtype=torch.int64)
    behind, half = whole, 2
    while half <= 2 * MOST_COMPARED:
        behind = torch.where(whole // half > nans, whole // half, behind)
        half *= 2
    return torch.where(place <= whole - 1 - behind, place, whole - 1)


def _behind_nan_read(boundaries: Tensor, place: Tensor) -> Tensor:
    """Computes ``_behind_nans`` by reading the first of those boundaries that is not before ``place``."""
    count, half = boundaries.shape[-1], 2
    whole, behind = torch.scalar_tensor(count + 1, dtype=torch.int64), torch.zeros_like(place)
    while half <= 2 * count:
        behind = torch.maximum(behind, torch.where(whole // half <= count - place, whole // half, 0))
        half *= 2
    read = boundaries.gather(-1, (count - behind).clamp(max=count - 1))
    return torch.where(read.isnan(), count, place)


def _passed(edges: Tensor, x: Tensor, right: bool) -> Tensor:
    """Compares: whether an edge comes before ``x``, or not after it where ``right``; NaN is after all numbers."""
    passed = ~(edges > x) if right else ~(edges >= x)
    return passed & (~edges.isnan() | x.isnan()) if edges.is_floating_point() else passed


def _searched(boundaries: Tensor, values: Tensor, right: bool) -> Tensor:
    """Counts the ``boundaries`` that are passed by halves: each step adds a power of two to the count where the last of
    so many is passed."""
    count, step = boundaries.shape[-1], 1
    while 2 * step <= count:
        step *= 2
    passed = torch.zeros_like(values, dtype=torch.int64)
    while step:
        further = passed + step
        edge = boundaries.gather(-1, further.clamp(max=count) - 1)
        passed = torch.where((further <= count) & _passed(edge, values, right), further, passed)
        step //= 2
    return passed


@composition("bucketize")
def bucketize(input: Any, boundaries: Tensor, *, out_int32: bool = False, right: bool = False) -> Tensor:
    require_rank(boundaries, (1,))
    return _position(boundaries, input, right, out_int32)


@composition("searchsorted")
def searchsorted(
    sorted_sequence: Tensor,
    input: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor:
    if sorter is not None:
        require_shape(sorter, sorted_sequence.shape, "the sorter")
        sorted_sequence = sorted_sequence.gather(-1, sorter)
    if side not in (None, "left", "right") or (side == "left" and right):
        raise ValueError(f"side={side!r} and right={right} contradict each other")
    if not isinstance(input, Tensor):
        require_rank(sorted_sequence, (1,))
    elif sorted_sequence.dim() != 1:
        require_shape(input, (*sorted_sequence.shape[:-1], input.shape[-1]), "the values")
    return _position(sorted_sequence, input, right or side == "right", out_int32)


@composition("histc")
def histc(input: Tensor, bins: int = 100, min: Any = 0, max: Any = 0) -> Tensor:
    """Counts elements within the bounds, which are those of the elements by default. Integers are counted on a GPU
    alone, as by torch."""
    whole = not input.is_floating_point() and input.device.type != "cpu"
    if not whole:
        require_float(input)
    count = int(bins)
    if count <= 0:
        raise ValueError("bins must be positive")
    low, high = min, max
    if not all(math.isfinite(bound) for bound in (low, high) if isinstance(bound, float)):
        raise ValueError(f"the range of histc is not finite: min={low}, max={high}")
    x = input.reshape(-1)
    if low == high and x.shape[0]:
        low, high = x.amin(), x.amax()
        if not whole:
            low = reported(low, ~(low.isfinite() & high.isfinite()))  # torch's error: such a range is not finite
        low, high = torch.where(low == high, low - 1, low), torch.where(low == high, high + 1, high)
    elif low == high:
        low, high = low - 1, high + 1
    elif low > high:
        raise ValueError("max must be larger than min")
    bucket = (x - low) * count // (high - low) if whole else ((x - low) * count / (high - low)).floor()
    bucket = torch.where(bucket >= count, count - 1, bucket)  # also where x - low is rounded to high - low
    inside = (x >= low) & (x <= high)
    if count > MOST_COMPARED:
        chosen = torch.where(inside, bucket, 0).to(torch.int64)
        return torch.zeros(count, dtype=input.dtype).scatter_add(0, chosen, inside.to(input.dtype))
    return ((bucket == torch.arange(count).unsqueeze(-1)) & inside).sum(-1).to(input.dtype)


# ------------------------------------------------------------------------------------------------------------ gradients


@composition("gradient")
def gradient(input: Tensor, *, spacing: Any = None, dim: Any = None, edge_order: int = 1) -> tuple[Tensor, ...]:
    """Computes central differences, and one-sided ones at the edges."""
    if edge_order not in (1, 2):
        raise ValueError("edge_order must be 1 or 2")
    dims = tuple(range(input.dim())) if dim is None else tuple(dim) if isinstance(dim, (tuple, list)) else (dim,)
    listed = list(spacing) if isinstance(spacing, (tuple, list)) else [1.0 if spacing is None else spacing] * len(dims)
    if len(listed) != len(dims):
        raise ValueError(f"{len(listed)} spacings for {len(dims)} dimensions")
    return tuple(_along(floating(input), spacing_, d, edge_order) for spacing_, d in zip(listed, dims, strict=True))


def _along(input: Tensor, spacing: Any, dim: int, edge_order: int) -> Tensor:
    size = int(input.shape[dim])
    if size < edge_order + 1:
        raise ValueError("gradient needs at least edge_order + 1 elements along each dimension")

    def at(start: int, count: int) -> Tensor:
        return input.narrow(dim, start % size, count)

    if not isinstance(spacing, Tensor):
        step: Any = spacing
        inner = (at(2, size - 2) - at(0, size - 2)) / (2 * step)
        steps = (step, step, step, step)
    else:
        require_shape(spacing, (size,), "the coordinates")
        apart = (spacing[1:] - spacing[:-1]).reshape(-1, *[1] * (input.dim() - 1 - dim % input.dim()))
        before, after = apart[:-1], apart[1:]
        inner = (
            -(after / before) / (before + after) * at(0, size - 2)
            + (after - before) / (before * after) * at(1, size - 2)
            + (before / after) / (before + after) * at(2, size - 2)
        )
        steps = (apart[:1], apart[1:2], apart[-2:-1], apart[-1:])
    if edge_order == 1:
        first, last = (at(1, 1) - at(0, 1)) / steps[0], (at(size - 1, 1) - at(size - 2, 1)) / steps[3]
    else:
        first = _three_points(at(0, 1), at(1, 1), at(2, 1), steps[0], steps[1])
        last = -_three_points(at(size - 1, 1), at(size - 2, 1), at(size - 3, 1), steps[3], steps[2])
    return torch.cat([first, inner, last], dim) if size > 2 else torch.cat([first, last], dim)


def _three_points(edge: Tensor, near: Tensor, far: Tensor, first: Any, second: Any) -> Tensor:
    """Returns the slope at an edge of the parabola through three points, which are ``first`` and ``second`` apart."""
    return (
        -(2 * first + second) / (first * (first + second)) * edge
        + (first + second) / (first * second) * near
        - first / (second * (first + second)) * far
    )
