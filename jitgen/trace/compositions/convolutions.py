"""Composes convolutions and transposed convolutions of ``convolve`` nodes (``ir/convolutions.py``), and ``F.unfold``
and ``F.fold`` of slices.

A window's elements at one offset are a slice of every stride-th element (``compositions/pooling.py``); the columns that
``F.unfold`` returns are these slices, stacked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jitgen.errors import UnsupportedError
from jitgen.ir.convolutions import convolve
from jitgen.trace.compositions.checks import require_float, require_one_dtype, require_rank, require_shape
from jitgen.trace.compositions.pooling import Windows, listed
from jitgen.trace.table import composition


def _columns(input: Tensor, windows: Windows) -> Tensor:
    """Rearranges (N, channels, ...) as (N, channels, elements of a window, windows)."""
    padded = windows.padded(input, 0)
    pieces = [windows.piece(padded, offset).flatten(2) for offset in windows.offsets()]
    return torch.stack(pieces, 2)


def _checked(input: Tensor, weight: Tensor, bias: Tensor | None, groups: int, count: int) -> tuple[Tensor, bool]:
    """Returns (N, channels, ...) of an input that may lack N, and whether it does."""
    require_one_dtype(input, weight, bias)
    require_rank(weight, (count + 2,))
    require_rank(input, (count + 1, count + 2))
    if groups <= 0:
        raise ValueError("groups must be positive")
    if any(size == 0 for size in (*weight.shape, *input.shape[-count:])):
        raise ValueError("the images, or the filters, have no elements")
    return (input.unsqueeze(0), True) if input.dim() == count + 1 else (input, False)


def _padding(padding: Any, kernel: Sequence[int], dilation: Sequence[int], stride: Sequence[int]) -> list[list[int]]:
    """Returns the padding (before, after) of each dimension."""
    if padding == "valid":
        return [[0, 0] for _ in kernel]
    if padding == "same":
        if any(amount != 1 for amount in stride):
            raise ValueError("padding='same' is not supported for strided convolutions")
        totals = [amount * (size - 1) for size, amount in zip(kernel, dilation, strict=True)]
        return [[total // 2, total - total // 2] for total in totals]
    if isinstance(padding, str):
        raise ValueError(f"padding is 'same', 'valid' or numbers, not {padding!r}")
    return [[amount, amount] for amount in listed(padding, len(kernel))]


def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    *,
    count: int,
) -> Tensor:
    x, single = _checked(input, weight, bias, groups, count)
    kernel, groups = [int(size) for size in weight.shape[2:]], int(groups)
    if x.shape[1] != weight.shape[1] * groups or weight.shape[0] % groups:
        raise ValueError(
            f"{int(x.shape[1])} channels in {groups} groups for a weight {tuple(int(n) for n in weight.shape)}"
        )
    if bias is not None:
        require_shape(bias, (weight.shape[0],), "the bias")
    steps, dilations = listed(stride, count), listed(dilation, count)
    amounts = _padding(padding, kernel, dilations, steps)
    if any(amount < 0 for pair in amounts for amount in pair):
        raise ValueError("negative padding is not supported")
    _require_positive(kernel, steps, dilations)
    pixels = []
    for size, length, step, apart, pair in zip(x.shape[2:], kernel, steps, dilations, amounts, strict=True):
        free = int(size) + sum(pair) - apart * (length - 1) - 1
        if free < 0:
            raise ValueError(f"a filter of {kernel} elements, {dilations} apart, is larger than the padded input")
        pixels.append(free // step + 1)
    images = x.reshape(x.shape[0], groups, weight.shape[1], *map(int, x.shape[2:]))
    filters = weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], *kernel)
    offset = [-before for before, _ in amounts]
    result = convolve(images, filters, steps, dilations, offset, [1] * count, pixels)
    return _finished(result, bias, single)


def _require_positive(*numbers: Sequence[int]) -> None:
    if any(number <= 0 for several in numbers for number in several):
        raise ValueError("the sizes, strides and dilations of filters must be positive")


def _finished(result: Tensor, bias: Tensor | None, single: bool) -> Tensor:
    """Makes a convolution (N, groups, outputs, ...) the result of torch's function."""
    result = result.flatten(1, 2)
    if bias is not None:
        result = result + bias.reshape(-1, *[1] * (result.dim() - 2))
    return result.squeeze(0) if single else result


def transposed(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
    *,
    count: int,
) -> Tensor:
    x, single = _checked(input, weight, bias, groups, count)
    require_float(input)
    groups, kernel = int(groups), [int(size) for size in weight.shape[2:]]
    steps, dilations = listed(stride, count), listed(dilation, count)
    around, beyond = listed(padding, count), listed(output_padding, count)
    if x.shape[1] != weight.shape[0] or x.shape[1] % groups:
        raise ValueError(
            f"{int(x.shape[1])} channels in {groups} groups for a weight {tuple(int(n) for n in weight.shape)}"
        )
    if any(more >= max(step, outputs) for more, step, outputs in zip(beyond, steps, dilations, strict=True)):
        raise ValueError("the output padding must be smaller than the stride or the dilation")
    _require_positive(kernel, steps, dilations)
    if bias is not None:
        require_shape(bias, (weight.shape[1] * groups,), "the bias")
    pixels = []
    for size, length, step, apart, pad, more in zip(x.shape[2:], kernel, steps, dilations, around, beyond, strict=True):
        pixels.append((int(size) - 1) * step - 2 * pad + apart * (length - 1) + more + 1)
    if any(size <= 0 for size in pixels):
        raise ValueError(f"the result would have the sizes {pixels}")
    channels = weight.shape[0] // groups
    images = x.reshape(x.shape[0], groups, channels, *map(int, x.shape[2:]))
    filters = weight.reshape(groups, channels, weight.shape[1], *kernel).transpose(1, 2)
    result = convolve(images, filters, [1] * count, [-apart for apart in dilations], around, steps, pixels)
    return _finished(result, bias, single)


def spread(input: Tensor, dim: int, step: int) -> Tensor:
    """Inserts ``step - 1`` zeros between neighbours along ``dim``."""
    if step == 1:
        return input
    size = input.shape[dim]
    wide = F.pad(input.unsqueeze(dim + 1), [0, 0] * (input.dim() - 1 - dim) + [0, step - 1])
    return wide.flatten(dim, dim + 1).narrow(dim, 0, (size - 1) * step + 1)


for _count in (1, 2, 3):
    composition(f"conv{_count}d")(partial(convolution, count=_count))
    composition(f"conv_transpose{_count}d")(partial(transposed, count=_count))


@composition("conv_tbc")
def conv_tbc(input: Tensor, weight: Tensor, bias: Tensor, pad: int = 0) -> Tensor:
    """Convolves (time, batch, channels) with (time, channels, outputs)."""
    require_rank(input, (3,))
    require_rank(weight, (3,))
    return F.conv1d(input.permute(1, 2, 0), weight.permute(2, 1, 0), bias, padding=pad).permute(2, 0, 1)


@composition("_nn.im2col")
def im2col(input: Tensor, kernel_size: Any, dilation: Any, padding: Any, stride: Any) -> Tensor:
    """Computes ``F.unfold``: (N, channels * elements of a window, windows) of (N, channels, height, width)."""
    require_rank(input, (3, 4))
    x = input.unsqueeze(0) if input.dim() == 3 else input
    around = listed(padding, 2)
    x = F.pad(x, (around[1], around[1], around[0], around[0]))
    columns = _columns(x, Windows(x, 2, kernel_size, listed(stride, 2), 0, dilation, False)).flatten(1, 2)
    return columns.squeeze(0) if input.dim() == 3 else columns


@composition("_nn.col2im")
def col2im(input: Tensor, output_size: Any, kernel_size: Any, dilation: Any, padding: Any, stride: Any) -> Tensor:
    """Computes ``F.fold``: the windows' elements, each added where it came from."""
    require_rank(input, (2, 3))
    x = input.unsqueeze(0) if input.dim() == 2 else input
    sizes, kernel, apart = listed(output_size, 2), listed(kernel_size, 2), listed(dilation, 2)
    around, steps = listed(padding, 2), listed(stride, 2)
    counts = [
        (size + 2 * pad - dilated * (length - 1) - 1) // step + 1
        for size, pad, dilated, length, step in zip(sizes, around, apart, kernel, steps, strict=True)
    ]
    if x.shape[1] % math.prod(kernel) or x.shape[2] != math.prod(counts):
        raise ValueError(f"{math.prod(counts)} windows of {math.prod(kernel)} elements are not those of the input")
    channels = x.shape[1] // math.prod(kernel)
    windows = x.reshape(x.shape[0], channels, *kernel, *counts)
    total = None
    for row in range(kernel[0]):
        for column in range(kernel[1]):
            piece = windows[:, :, row, column]
            amounts: list[int] = []
            for dim, offset in ((1, column), (0, row)):
                piece = spread(piece, dim + 2, steps[dim])
                start = offset * apart[dim] - around[dim]
                amounts += [start, sizes[dim] - start - ((counts[dim] - 1) * steps[dim] + 1)]
            piece = F.pad(piece, amounts)
            total = piece if total is None else total + piece
    if total is None:
        raise UnsupportedError("windows of no elements are not supported; write torch.zeros of the result's shape")
    return total.squeeze(0) if input.dim() == 2 else total
