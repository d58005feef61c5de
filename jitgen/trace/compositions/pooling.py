"""Windows over the last dimensions: pooling.

A window's elements at one offset are a slice of every stride-th element; a pool combines as many slices as its window
has elements, ``MOST_PIECES`` at most.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jitgen.errors import UnsupportedError
from jitgen.trace.compositions.checks import require_float, require_rank
from jitgen.trace.compositions.shapes import MOST_PIECES
from jitgen.trace.table import composition


def _listed(value: Any, count: int) -> list[int]:
    values = [int(each) for each in value] if isinstance(value, (tuple, list)) else [int(value)]
    if len(values) not in (1, count):
        raise ValueError(f"expected a number, or {count} of them, got {len(values)}")
    return values if len(values) == count else values * count


class Windows:
    """The windows of a pool over the last ``count`` dimensions.

    Attributes:
        counts: the number of windows along each dimension.
    """

    def __init__(
        self, input: Tensor, count: int, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
    ):
        require_rank(input, (count + 1, count + 2))
        self.kernel = _listed(kernel, count)
        self.stride = self.kernel if stride in (None, [], ()) else _listed(stride, count)
        self.padding, self.dilation = _listed(padding, count), _listed(dilation, count)
        self.sizes = [int(size) for size in input.shape[-count:]]
        if min(*self.kernel, *self.stride, *self.dilation) <= 0:
            raise ValueError("the sizes, strides and dilations of windows must be positive")
        if any(not 0 <= pad <= size // 2 for pad, size in zip(self.padding, self.kernel, strict=True)):
            raise ValueError("the padding must be half of the window's size at most")
        if math.prod(self.kernel) > MOST_PIECES:
            raise UnsupportedError(f"windows of {math.prod(self.kernel)} elements are not supported; {MOST_PIECES} are")
        self.counts = [self._count(dim, ceil_mode) for dim in range(count)]
        if min(self.counts) <= 0:
            raise ValueError("the input is smaller than a window")

    def _reach(self, dim: int) -> int:
        return self.dilation[dim] * (self.kernel[dim] - 1)

    def _count(self, dim: int, ceil_mode: bool) -> int:
        free, stride = self.sizes[dim] + 2 * self.padding[dim] - self._reach(dim) - 1, self.stride[dim]
        count = (free + (stride - 1 if ceil_mode else 0)) // stride + 1
        # A window that starts in the padding behind the last element is left out.
        return count - 1 if ceil_mode and (count - 1) * stride >= self.sizes[dim] + self.padding[dim] else count

    def padded(self, input: Tensor, value: Any) -> Tensor:
        amounts = []
        for dim in reversed(range(len(self.sizes))):
            end = (self.counts[dim] - 1) * self.stride[dim] + self._reach(dim) + 1
            amounts += [self.padding[dim], max(0, end - self.padding[dim] - self.sizes[dim])]
        return F.pad(input, amounts, value=value) if any(amounts) else input

    def offsets(self) -> Iterator[tuple[int, ...]]:
        return itertools.product(*map(range, self.kernel))

    def piece(self, padded: Tensor, offset: Sequence[int]) -> Tensor:
        """The elements of all windows at one offset."""
        key = [
            slice(at * dilation, at * dilation + (count - 1) * stride + 1, stride)
            for at, dilation, count, stride in zip(offset, self.dilation, self.counts, self.stride, strict=True)
        ]
        return padded[(..., *key)]


def _average(
    input: Tensor, count: int, kernel: Any, stride: Any, padding: Any, ceil_mode: bool, pads: bool, divisor: Any
) -> Tensor:
    require_float(input)
    windows = Windows(input, count, kernel, stride, padding, 1, ceil_mode)
    padded = windows.padded(input, 0.0)
    total = None
    for offset in windows.offsets():
        piece = windows.piece(padded, offset)
        total = piece if total is None else total + piece
    assert total is not None
    if divisor is not None:
        if divisor == 0:
            raise ZeroDivisionError("the divisor must not be 0")
        return total / divisor
    for dim in range(count):
        total = total / _elements(windows, dim, pads).reshape(-1, *[1] * (count - 1 - dim))
    return total


def _elements(windows: Windows, dim: int, pads: bool) -> Tensor:
    """How many elements each window along a dimension counts: with ``pads`` those of the padding too."""
    size, padding = windows.sizes[dim], windows.padding[dim]
    start = torch.arange(windows.counts[dim]) * windows.stride[dim] - padding
    end = (start + windows.kernel[dim]).clamp(max=size + padding)
    return end - start if pads else end.clamp(max=size) - start.clamp(min=0)


@composition("torch.avg_pool1d")
def avg_pool1d(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Tensor:
    return _average(input, 1, kernel_size, stride, padding, ceil_mode, count_include_pad, None)


@composition("_nn.avg_pool2d", "avg_pool2d")
def avg_pool2d(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: Any = None,
) -> Tensor:
    return _average(input, 2, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)


@composition("_nn.avg_pool3d", "avg_pool3d")
def avg_pool3d(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: Any = None,
) -> Tensor:
    return _average(input, 3, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)


# ---------------------------------------------------------------------------------------------------------------- maxima


def _maximum(input: Tensor, count: int, windows: Windows) -> tuple[Tensor, Tensor]:
    """The largest element of each window, and its place in the flattened dimensions. NaN is larger than all."""
    padded = windows.padded(input, -math.inf if input.is_floating_point() else torch.iinfo(input.dtype).min)
    best, place = None, None
    for offset in windows.offsets():
        piece = windows.piece(padded, offset)
        where = _places(windows, offset)
        if best is None or place is None:
            best, place = piece, where.expand(piece.shape)
            inside = _inside(windows, offset)
            continue
        valid = _inside(windows, offset)
        larger = valid & (~inside | (piece > best) | (piece.isnan() & ~best.isnan()))
        best, place, inside = torch.where(larger, piece, best), torch.where(larger, where, place), inside | valid
    assert best is not None
    assert place is not None
    return best, place


def _grid(windows: Windows, offset: Sequence[int]) -> list[Tensor]:
    """The index of each window's element at ``offset`` along every dimension, as it broadcasts."""
    count = len(windows.sizes)
    return [
        (
            torch.arange(windows.counts[dim]) * windows.stride[dim]
            + (offset[dim] * windows.dilation[dim] - windows.padding[dim])
        ).reshape(-1, *[1] * (count - 1 - dim))
        for dim in range(count)
    ]


def _places(windows: Windows, offset: Sequence[int]) -> Tensor:
    place: Any = 0
    for size, index in zip(windows.sizes, _grid(windows, offset), strict=True):
        place = place * size + index
    return place


def _inside(windows: Windows, offset: Sequence[int]) -> Tensor:
    found: Any = None
    for size, index in zip(windows.sizes, _grid(windows, offset), strict=True):
        valid = (index >= 0) & (index < size)
        found = valid if found is None else found & valid
    return found


def _max_pools() -> None:
    for count in (1, 2, 3):

        def with_indices(
            input: Tensor,
            kernel_size: Any,
            stride: Any = None,
            padding: Any = 0,
            dilation: Any = 1,
            ceil_mode: bool = False,
            return_indices: bool = False,
            *,
            count: int = count,
        ) -> tuple[Tensor, Tensor]:
            windows = Windows(input, count, kernel_size, stride, padding, dilation, ceil_mode)
            return _maximum(input, count, windows)

        def largest(
            input: Tensor,
            kernel_size: Any,
            stride: Any = None,
            padding: Any = 0,
            dilation: Any = 1,
            ceil_mode: bool = False,
            return_indices: bool = False,
            *,
            count: int = count,
        ) -> Tensor:
            windows = Windows(input, count, kernel_size, stride, padding, dilation, ceil_mode)
            padded = windows.padded(input, -math.inf if input.is_floating_point() else torch.iinfo(input.dtype).min)
            pieces = [windows.piece(padded, offset) for offset in windows.offsets()]
            result = pieces[0]
            for piece in pieces[1:]:
                result = torch.maximum(result, piece)
            return result

        composition(f"torch.max_pool{count}d", f"_nn.max_pool{count}d", f"F._max_pool{count}d")(largest)
        composition(f"torch.max_pool{count}d_with_indices", f"_nn.max_pool{count}d_with_indices")(with_indices)
        composition(f"F.max_pool{count}d_with_indices")(with_indices)


_max_pools()


# -------------------------------------------------------------------------------------------------------------- adaptive


def _adaptive_average(input: Tensor, output_size: Any, count: int) -> Tensor:
    """One dimension at a time. Window i of n covers elements floor(i * size / n) to ceil((i + 1) * size / n)."""
    require_float(input)
    require_rank(input, (count + 1, count + 2))
    wanted = list(output_size) if isinstance(output_size, (tuple, list)) else [output_size] * count
    for dim, asked in zip(range(-count, 0), wanted, strict=True):
        size = int(input.shape[dim])
        outputs = size if asked is None else int(asked)
        if outputs > MOST_PIECES:
            raise UnsupportedError(f"adaptive pooling to {outputs} elements is not supported; {MOST_PIECES} are")
        if size % outputs == 0 if outputs else False:
            input = input.unflatten(dim, (outputs, size // outputs)).mean(dim)
            continue
        edges = [(i * size // outputs, -(-(i + 1) * size // outputs)) for i in range(outputs)]
        means = [input.narrow(dim, start, end - start).mean(dim) for start, end in edges]
        input = torch.stack(means, dim) if means else input.narrow(dim, 0, 0)
    return input


def _adaptive_pools() -> None:
    for count in (1, 2, 3):

        def average(input: Tensor, output_size: Any, *, count: int = count) -> Tensor:
            return _adaptive_average(input, output_size, count)

        composition(f"torch.adaptive_avg_pool{count}d", f"_nn.adaptive_avg_pool{count}d")(average)


_adaptive_pools()
