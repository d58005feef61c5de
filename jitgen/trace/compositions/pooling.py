"""Composes pooling: windows over the last dimensions.

A window's elements at one offset are a slice of every stride-th element; a pool combines as many slices as its window
has elements, ``MOST_PIECES`` at most.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jitgen.errors import UnsupportedError
from jitgen.ir.custom_gradients import saved, with_gradient
from jitgen.trace.compositions.checks import require_float, require_rank
from jitgen.trace.compositions.shapes import MOST_PIECES
from jitgen.trace.table import composition


def listed(value: Any, count: int) -> list[int]:
    values = [int(item) for item in value] if isinstance(value, (tuple, list)) else [int(value)]
    if len(values) not in (1, count):
        raise ValueError(f"expected a number, or {count} of them, got {len(values)}")
    return values if len(values) == count else values * count


class Windows:
    """Describes the windows of a pool over the last ``count`` dimensions.

    Attributes:
        counts: the number of windows along each dimension.
    """

    def __init__(
        self, input: Tensor, count: int, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
    ):
        require_rank(input, (count + 1, count + 2))
        self.kernel = listed(kernel, count)
        self.stride = self.kernel if stride in (None, [], ()) else listed(stride, count)
        self.padding, self.dilation = listed(padding, count), listed(dilation, count)
        self.sizes = [int(size) for size in input.shape[-count:]]
        if min(*self.kernel, *self.stride, *self.dilation) <= 0:
            raise ValueError("the sizes, strides and dilations of windows must be positive")
        if any(not 0 <= pad <= size // 2 for pad, size in zip(self.padding, self.kernel, strict=True)):
            raise ValueError("the padding must be half of the window's size at most")
        if math.prod(self.kernel) > MOST_PIECES:
            raise UnsupportedError(
                f"windows of {math.prod(self.kernel)} elements are not supported, up to {MOST_PIECES} are; reduce "
                "x.unfold(dim, size, step) along its last dimension, for each dimension of a window"
            )
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
        """Returns the elements of all windows at one offset."""
        key: list[Any] = [Ellipsis]
        for at, dilation, count, stride in zip(offset, self.dilation, self.counts, self.stride, strict=True):
            key.append(slice(at * dilation, at * dilation + (count - 1) * stride + 1, stride))
        return padded[tuple(key)]


def _average_pool(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: Any = None,
    *,
    count: int,
) -> Tensor:
    """Computes the mean of each window of the last ``count`` dimensions; of int64 it is rounded towards 0, as in torch,
    which has no other integers."""
    if input.dtype != torch.int64:
        require_float(input)
    rounding = None if input.is_floating_point() else "trunc"
    windows = Windows(input, count, kernel_size, stride, padding, 1, ceil_mode)
    padded = windows.padded(input, 0)
    total = None
    for offset in windows.offsets():
        piece = windows.piece(padded, offset)
        total = piece if total is None else total + piece
    assert total is not None
    if divisor_override is not None:
        if divisor_override == 0:
            raise ZeroDivisionError("the divisor must not be 0")
        return torch.div(total, divisor_override, rounding_mode=rounding)
    for dim in range(count):
        elements = _elements(windows, dim, count_include_pad).reshape(-1, *[1] * (count - 1 - dim))
        total = torch.div(total, elements, rounding_mode=rounding)
    return total


def _elements(windows: Windows, dim: int, pads: bool) -> Tensor:
    """Counts the elements of each window along a dimension, with ``pads`` those of the padding too."""
    size, padding = windows.sizes[dim], windows.padding[dim]
    start = torch.arange(windows.counts[dim]) * windows.stride[dim] - padding
    end = (start + windows.kernel[dim]).clamp(max=size + padding)
    return end - start if pads else end.clamp(max=size) - start.clamp(min=0)


composition("torch.avg_pool1d")(partial(_average_pool, count=1))
for _count in (2, 3):
    composition(f"_nn.avg_pool{_count}d", f"avg_pool{_count}d")(partial(_average_pool, count=_count))


# --------------------------------------------------------------------------------------------------------------- maxima


def _maximum(input: Tensor, windows: Windows) -> tuple[Tensor, Tensor]:
    """Finds the largest element of each window, and its index in the flattened dimensions.

    Of equal elements the first is taken, and of several NaN the last, as in torch. It has the gradient.

    The forward saves which of its elements every window chose, in a byte, so that a backward need not read the windows.
    """
    padded = windows.padded(input, -math.inf if input.is_floating_point() else torch.iinfo(input.dtype).min)
    offsets = list(windows.offsets())
    pieces = [windows.piece(padded, offset) for offset in offsets]
    best, index, inside = pieces[0], _flat_indices(windows, offsets[0]).expand(pieces[0].shape), None
    choice = torch.zeros_like(best, dtype=torch.uint8)
    for number, (piece, offset) in enumerate(zip(pieces, offsets, strict=True)):
        chosen = (piece > best) | piece.isnan()
        if any(windows.padding):  # elements before the first are never chosen
            valid = _inside(windows, offset)
            chosen, inside = (valid & (~inside | chosen), inside | valid) if inside is not None else (valid, valid)
        if number:
            best, index = torch.maximum(best, piece), torch.where(chosen, _flat_indices(windows, offset), index)
            choice = torch.where(chosen, number, choice)
    choice = saved(choice)
    slopes = (torch.where(choice == number, 1.0, 0.0) for number in range(len(pieces)))
    return with_gradient(best, *itertools.chain(*zip(pieces, slopes, strict=True))), index


def _grid(windows: Windows, offset: Sequence[int]) -> list[Tensor]:
    """Returns the index of each window's element at ``offset`` along every dimension, as it broadcasts."""
    count = len(windows.sizes)
    return [
        (
            torch.arange(windows.counts[dim]) * windows.stride[dim]
            + (offset[dim] * windows.dilation[dim] - windows.padding[dim])
        ).reshape(-1, *[1] * (count - 1 - dim))
        for dim in range(count)
    ]


def _flat_indices(windows: Windows, offset: Sequence[int]) -> Tensor:
    flat: Any = 0
    for size, index in zip(windows.sizes, _grid(windows, offset), strict=True):
        flat = flat * size + index
    return flat


def _inside(windows: Windows, offset: Sequence[int]) -> Tensor:
    inside: Any = None
    for size, index in zip(windows.sizes, _grid(windows, offset), strict=True):
        valid = (index >= 0) & (index < size)
        inside = valid if inside is None else inside & valid
    return inside


def _max_pool_with_indices(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
    *,
    count: int,
) -> tuple[Tensor, Tensor]:
    return _maximum(input, Windows(input, count, kernel_size, stride, padding, dilation, ceil_mode))


@wraps(_max_pool_with_indices)
def _max_pool(*arguments: Any, **keywords: Any) -> Tensor:
    return _max_pool_with_indices(*arguments, **keywords)[0]


for _count in (1, 2, 3):
    composition(f"max_pool{_count}d")(partial(_max_pool, count=_count))
    composition(f"max_pool{_count}d_with_indices")(partial(_max_pool_with_indices, count=_count))


# ------------------------------------------------------------------------------------------------------------- adaptive


def _outputs(input: Tensor, output_size: Any, count: int) -> list[tuple[int, int]]:
    """Returns (dimension, outputs) of each pooled dimension, the last one first."""
    require_rank(input, (count + 1, count + 2))
    wanted = list(output_size) if isinstance(output_size, (tuple, list)) else [output_size] * count
    sizes = [
        int(size) if asked is None else int(asked) for size, asked in zip(input.shape[-count:], wanted, strict=True)
    ]
    if min(sizes, default=0) < 0:
        raise ValueError("the output sizes must not be negative")
    if max(sizes) > MOST_PIECES:
        raise UnsupportedError(
            f"adaptive pooling to {max(sizes)} elements is not supported, up to {MOST_PIECES} are; "
            "where windows are equal reduce x.unflatten(dim, (outputs, -1)) along its dimension dim + 1"
        )
    return [(input.dim() - 1 - number, size) for number, size in enumerate(reversed(sizes))]


@dataclass(frozen=True)
class _Adaptive:
    """Describes the windows of one dimension: window i of n covers elements floor(i * size / n) to ceil((i + 1) * size
    / n).

    Where their sizes differ, every window is read with as many elements as the longest has.

    Attributes:
        dim: the dimension; windows have their elements along the next one.
        outputs, size: the number of windows, and of elements.
        after: dimensions after this one.
    """

    dim: int
    outputs: int
    size: int
    after: int

    @property
    def even(self) -> bool:
        """Returns whether all windows have the same size."""
        return self.outputs == 0 or self.size % self.outputs == 0

    def unfolded(self, input: Tensor) -> Tensor:
        """Reads ``input`` with its windows along ``dim``."""
        if self.outputs == 0:
            return input.narrow(self.dim, 0, 0).unsqueeze(self.dim + 1)
        if self.even:
            return input.unflatten(self.dim, (self.outputs, self.size // self.outputs))
        index = self._elements().clamp(max=self.size - 1)
        return input.index_select(self.dim, index.flatten()).unflatten(self.dim, (self.outputs, self._longest()))

    def inside(self) -> Tensor:
        """Returns whether an element belongs to its window, to be broadcast with ``unfolded``."""
        return (self._elements() < self._ends()[:, None]).reshape(self.outputs, self._longest(), *[1] * self.after)

    def lengths(self) -> Tensor:
        """Counts the elements of each window, to be broadcast with what ``unfolded`` is reduced to."""
        return (self._ends() - self._starts()).reshape(self.outputs, *[1] * self.after)

    def _elements(self) -> Tensor:
        """Returns the elements that windows read, [outputs, longest]; those of the last may be beyond the end."""
        return self._starts()[:, None] + torch.arange(self._longest())

    def _starts(self) -> Tensor:
        return torch.arange(self.outputs) * self.size // self.outputs

    def _ends(self) -> Tensor:
        return ((torch.arange(self.outputs) + 1) * self.size + self.outputs - 1) // self.outputs

    def _longest(self) -> int:
        windows = range(self.outputs)
        return max(-(-(i + 1) * self.size // self.outputs) - i * self.size // self.outputs for i in windows)


def _adaptive(input: Tensor, output_size: Any, count: int) -> Iterator[_Adaptive]:
    """Yields the windows of each pooled dimension, the last one first."""
    for dim, outputs in _outputs(input, output_size, count):
        size = int(input.shape[dim])
        if not size:
            raise ValueError("adaptive pooling needs elements")
        yield _Adaptive(dim, outputs, size, input.dim() - 1 - dim)


def _mean(input: Tensor, windows: _Adaptive) -> Tensor:
    """Computes the mean of each window; of 16-bit elements in float32 if windows differ in size."""
    if windows.even:
        return windows.unfolded(input).mean(windows.dim + 1)
    wide = windows.unfolded(input.to(torch.promote_types(input.dtype, torch.float32)))
    total = torch.where(windows.inside(), wide, 0.0).sum(windows.dim + 1)
    return total / windows.lengths()


def _largest(input: Tensor, windows: _Adaptive) -> tuple[Tensor, Tensor]:
    """Finds the largest element of each window, and its index in it (``windows.unfolded``): the first of equal ones,
    and the last NaN, as in torch."""
    values = windows.unfolded(input)
    if not windows.even:
        least = -math.inf if input.is_floating_point() else torch.iinfo(input.dtype).min
        values = torch.where(windows.inside(), values, least)
    largest = values.amax(windows.dim + 1, keepdim=True)
    length = values.shape[windows.dim + 1]
    position = torch.arange(length).reshape(-1, *[1] * windows.after)
    rank = torch.where(values.isnan(), length + position, torch.where(values == largest, length - 1 - position, -1))
    if not windows.even:
        rank = torch.where(windows.inside(), rank, -1)
    chosen = rank == rank.amax(windows.dim + 1, keepdim=True)
    return with_gradient(largest, values, torch.where(chosen, 1.0, 0.0)).squeeze(windows.dim + 1), chosen


def _adaptive_maximum(input: Tensor, output_size: Any, count: int) -> tuple[Tensor, Tensor]:
    """Pools one dimension at a time: the largest elements, and their indices in the flattened dimensions."""
    sizes = [int(size) for size in input.shape[-count:]]
    indices = torch.arange(math.prod(sizes)).reshape(sizes).expand(input.shape)
    for windows in _adaptive(input, output_size, count):
        within = windows.unfolded(indices)
        input, chosen = _largest(input, windows)
        indices = torch.where(chosen, within, -1).amax(windows.dim + 1)
    return input, indices


def _adaptive_pools() -> None:
    for count in (1, 2, 3):

        def average(input: Tensor, output_size: Any, *, count: int = count) -> Tensor:
            require_float(input)
            mean = input
            for windows in _adaptive(input, output_size, count):
                mean = _mean(mean, windows)
            return mean.to(input.dtype)

        def with_indices(
            input: Tensor, output_size: Any, return_indices: bool = False, *, count: int = count
        ) -> tuple[Tensor, Tensor]:
            return _adaptive_maximum(input, output_size, count)

        def largest(input: Tensor, output_size: Any, return_indices: bool = False, *, count: int = count) -> Tensor:
            for windows in _adaptive(input, output_size, count):
                input, _ = _largest(input, windows)
            return input

        composition(f"torch.adaptive_avg_pool{count}d", f"_nn.adaptive_avg_pool{count}d")(average)
        composition(f"F.adaptive_max_pool{count}d")(largest)
        composition(f"torch.adaptive_max_pool{count}d", f"_nn.adaptive_max_pool{count}d")(with_indices)
        composition(f"F.adaptive_max_pool{count}d_with_indices")(with_indices)


_adaptive_pools()
