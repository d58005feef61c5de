"""Composes functions that move, join, cut and repeat elements, and those that make tensors of indices."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from jitgen.errors import UnsupportedError
from jitgen.trace.compositions.checks import require_rank, valid_dim
from jitgen.trace.table import composition

Sizes = Sequence[Any]

# ---------------------------------------------------------------------------------------------------------- as they are


@composition("conj", "resolve_conj", "resolve_neg", "real", itself=True)
def same(input: Tensor) -> Tensor:
    """Returns a real tensor itself."""
    return input


@composition("_assert")
def require(condition: Any, message: str) -> None:
    """Raises where a size or a number is not what is asserted; a tensor's value no trace has."""
    assert condition, message


composition("conj_physical", itself=True)(lambda input: input.clone())
composition("unfold_copy")(lambda input, dimension, size, step: unfold(input, dimension, size, step).clone())


# -------------------------------------------------------------------------------------------------- cutting and joining


@composition("aten.slice", view=True)
def aten_slice(input: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Tensor:
    key: list[Any] = [slice(None)] * input.dim()
    key[valid_dim(input, dim)] = slice(start, end, step)
    return input[tuple(key)]


composition("unsafe_chunk", view=True)(lambda input, chunks, dim=0: input.chunk(chunks, dim))


@composition("unsafe_split", "unsafe_split_with_sizes", view=True)
def unsafe_split(input: Tensor, split_size_or_sections: Any, dim: int = 0) -> tuple[Tensor, ...]:
    return input.split(split_size_or_sections, dim)


@composition("tensor_split", view=True)
def tensor_split(
    input: Tensor, indices_or_sections: Any = None, dim: int = 0, *, sections: Any = None, indices: Any = None
) -> tuple[Tensor, ...]:
    cuts = next(choice for choice in (indices_or_sections, sections, indices) if choice is not None)
    if isinstance(cuts, Tensor):
        raise UnsupportedError(
            "tensor_split by a tensor has results whose sizes depend on data; pass a list of numbers"
        )
    size = int(input.shape[valid_dim(input, dim)])
    if isinstance(cuts, int):
        if cuts <= 0:
            raise ValueError("the number of sections must be positive")
        longer, piece = size % cuts, size // cuts
        cuts = [number * piece + min(number, longer) for number in range(1, cuts)]
    bounds = [0, *(int(cut) for cut in cuts), size]
    spans = [slice(start, end).indices(size) for start, end in itertools.pairwise(bounds)]
    return tuple(input.narrow(dim, start, max(0, end - start)) for start, end, _ in spans)


def _split(input: Tensor, indices_or_sections: Any, *, name: str, rank: int, dim: int) -> tuple[Tensor, ...]:
    _require_rank_of(name, input, rank)
    dim, cuts = min(dim, input.dim() - 1), indices_or_sections
    if isinstance(cuts, int) and int(input.shape[dim]) % cuts:
        raise ValueError(f"dimension {dim} cannot be divided into {cuts} equal sections")
    return tensor_split(input, cuts, dim)


def _require_rank_of(name: str, input: Tensor, rank: int) -> None:
    if input.dim() < rank:
        dimensions = ("one dimension", "two dimensions", "three dimensions")[rank - 1]
        raise ValueError(f"{name} needs a tensor of at least {dimensions}")


for _name, _rank, _dim in (("hsplit", 1, 1), ("vsplit", 2, 0), ("dsplit", 3, 2)):
    composition(_name, view=True)(partial(_split, name=_name, rank=_rank, dim=_dim))


def _applied(*tensors: Any, function: Any) -> Any:
    """Applies ``function`` to one tensor, or to each of several."""
    if len(tensors) == 1 and isinstance(tensors[0], Tensor):
        return function(tensors[0])
    listed = tensors[0] if len(tensors) == 1 else tensors
    return tuple(map(function, listed))


def _matrix(x: Tensor) -> Tensor:
    return x.reshape(1, 1) if x.dim() == 0 else x.unsqueeze(0) if x.dim() == 1 else x


def _deep(x: Tensor) -> Tensor:
    if x.dim() == 0:
        return x.reshape(1, 1, 1)
    if x.dim() == 1:
        return x.unsqueeze(0).unsqueeze(-1)
    return x.unsqueeze(-1) if x.dim() == 2 else x


for _rank, _made in ((1, lambda x: x.reshape(1) if x.dim() == 0 else x), (2, _matrix), (3, _deep)):
    composition(f"torch.atleast_{_rank}d", itself=True)(partial(_applied, function=_made))


@composition("column_stack")
def column_stack(tensors: Any) -> Tensor:
    return torch.hstack([x.reshape(-1, 1) if x.dim() <= 1 else x for x in tensors])


composition("dstack")(lambda tensors: torch.cat([_deep(x) for x in tensors], 2))


@composition("_VF.block_diag")
def block_diag(tensors: Any) -> Tensor:
    blocks = [_matrix(x) for x in tensors]
    for block in blocks:
        require_rank(block, (2,))
    columns = [int(block.shape[1]) for block in blocks]
    padded = [
        torch.nn.functional.pad(block, (sum(columns[:number]), sum(columns[number + 1 :])))
        for number, block in enumerate(blocks)
    ]
    return torch.cat(padded, 0)


def _flipped(input: Tensor, *, name: str, dim: int) -> Tensor:
    _require_rank_of(name, input, dim + 1)
    return input.flip(dim)


composition("fliplr")(partial(_flipped, name="fliplr", dim=1))
composition("flipud")(partial(_flipped, name="flipud", dim=0))


@composition("rot90")
def rot90(input: Tensor, k: int = 1, dims: Sizes = (0, 1)) -> Tensor:
    if len(dims) != 2:
        raise ValueError("a rotation is in a plane of two dimensions")
    first, second = (valid_dim(input, dim) for dim in dims)
    if first == second:
        raise ValueError("the dimensions of a rotation must differ")
    quarters = int(k) % 4
    if quarters == 1:
        return input.flip(second).transpose(first, second)
    if quarters == 2:
        return input.flip(first, second)
    return input.flip(first).transpose(first, second) if quarters == 3 else input.clone()


def _shifted(input: Tensor, dim: Any = None, *, forward: bool) -> Tensor:
    dims = tuple(range(input.dim())) if dim is None else tuple(dim) if isinstance(dim, (tuple, list)) else (dim,)
    for dim_ in dims:
        size = int(input.shape[dim_])
        input = input.roll(size // 2 if forward else (size + 1) // 2, dim_)
    return input


composition("fft_fftshift", "fftshift")(partial(_shifted, forward=True))
composition("fft_ifftshift", "ifftshift")(partial(_shifted, forward=False))


# -------------------------------------------------------------------------------------------------------------- windows

MOST_PIECES = 128
"""The most shifted copies of a tensor of which a function is composed."""


@composition("Tensor.unfold", copied=True)
def unfold(input: Tensor, dimension: int, size: int, step: int) -> Tensor:
    """Cuts windows along a dimension. Those that do not overlap are a view; of others the elements at each offset are a
    slice of every ``step``-th element."""
    size, step = int(size), int(step)
    if input.dim() == 0:
        valid_dim(input, dimension)
        if size > 1 or step <= 0:
            raise ValueError(f"windows of {size} elements, every {step} elements, of 1")
        return input.reshape(1)[:size]
    dim = valid_dim(input, dimension)
    length = int(input.shape[dim])
    if not 0 <= size <= length or step <= 0:
        raise ValueError(f"windows of {size} elements, every {step} elements, of {length}")
    count = (length - size) // step + 1
    if size <= step and count * step <= length:
        windows = input.narrow(dim, 0, count * step).unflatten(dim, (count, step))
        return windows.narrow(dim + 1, 0, size).movedim(dim + 1, -1)
    if size > MOST_PIECES:
        numbers = torch.arange(count).unsqueeze(-1) * step + torch.arange(size)
        return input.movedim(dim, -1)[..., numbers].movedim(-2, dim)
    if size == 0:
        raise UnsupportedError("windows of no elements are not supported; write x.new_zeros of the result's shape")
    return torch.stack([_every(input, dim, start, count, step) for start in range(size)], -1)


def _every(input: Tensor, dim: int, start: int, count: int, step: int) -> Tensor:
    """Selects ``count`` elements along ``dim``, from ``start`` on, ``step`` apart."""
    key: list[Any] = [slice(None)] * input.dim()
    key[dim] = slice(start, start + (count - 1) * step + 1, step)
    return input[tuple(key)]


@composition("pixel_shuffle")
def pixel_shuffle(input: Tensor, upscale_factor: int) -> Tensor:
    factor = int(upscale_factor)
    if input.dim() < 3 or factor <= 0:
        raise ValueError("pixel_shuffle takes (..., channels, height, width) and a positive factor")
    *batch, channels, height, width = input.shape
    if channels % (factor * factor):
        raise ValueError(f"{int(channels)} channels cannot be divided by {factor * factor}")
    rank = len(batch)
    pixels = input.reshape(*batch, channels // (factor * factor), factor, factor, height, width)
    order = (*range(rank + 1), rank + 3, rank + 1, rank + 4, rank + 2)
    return pixels.permute(order).reshape(*batch, channels // (factor * factor), height * factor, width * factor)


@composition("pixel_unshuffle")
def pixel_unshuffle(input: Tensor, downscale_factor: int) -> Tensor:
    factor = int(downscale_factor)
    if input.dim() < 3 or factor <= 0:
        raise ValueError("pixel_unshuffle takes (..., channels, height, width) and a positive factor")
    *batch, channels, height, width = input.shape
    if height % factor or width % factor:
        raise ValueError(f"{int(height)} x {int(width)} pixels cannot be divided by {factor}")
    rank = len(batch)
    pixels = input.reshape(*batch, channels, height // factor, factor, width // factor, factor)
    order = (*range(rank + 1), rank + 2, rank + 4, rank + 1, rank + 3)
    return pixels.permute(order).reshape(*batch, channels * factor * factor, height // factor, width // factor)


@composition("channel_shuffle")
def channel_shuffle(input: Tensor, groups: int) -> Tensor:
    if input.dim() < 3 or groups <= 0 or input.shape[1] % groups:
        raise ValueError("channel_shuffle takes (N, channels, ...) and a divisor of the channels")
    rows, channels, *spatial = input.shape
    return input.reshape(rows, groups, channels // groups, *spatial).transpose(1, 2).reshape(input.shape)


@composition("sum_to_size", itself=True)
def sum_to_size(input: Tensor, *size: Any) -> Tensor:
    sizes = tuple(size[0]) if len(size) == 1 and isinstance(size[0], (tuple, list)) else size
    if not sizes:
        return input.sum()
    lead = input.dim() - len(sizes)
    if lead < 0 or any(n not in (1, m) for n, m in zip(sizes, input.shape[lead:], strict=True)):
        raise ValueError(f"size {tuple(map(int, sizes))} does not broadcast to {tuple(map(int, input.shape))}")
    summed = [lead + d for d, n in enumerate(sizes) if n == 1 and input.shape[lead + d] != 1]
    if not lead and not summed:
        return input
    result = input.sum((*range(lead), *summed), keepdim=True) if lead or summed else input
    return result.reshape(sizes)
