"""Functions that move, join, cut and repeat elements, and those that make tensors of indices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jitgen.errors import UnsupportedError
from jitgen.trace.compositions.checks import require_rank, require_shape
from jitgen.trace.table import composition

Sizes = Sequence[Any]

# ------------------------------------------------------------------------------------------------------------ as they are


@composition("conj", "resolve_conj", "resolve_neg", "real", view=True)
def same(input: Tensor) -> Tensor:
    """Of a real tensor."""
    return input


@composition("conj_physical", "alias_copy")
def conj_physical(input: Tensor) -> Tensor:
    return input.clone()


def _copies() -> None:
    """``view_copy`` and the like: what the function of that name views, in memory of its own."""
    for name in ("expand", "permute", "t", "transpose", "view", "squeeze", "unsqueeze", "narrow", "diagonal", "unfold"):
        composition(f"{name}_copy")(_method_copy(name))
    for name in ("unbind", "split_with_sizes"):
        composition(f"{name}_copy")(_method_copies(name))


def _method_copy(name: str) -> Any:
    def copied(input: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        return getattr(input, name)(*arguments, **keywords).clone()

    return copied


def _method_copies(name: str) -> Any:
    def copied(input: Tensor, *arguments: Any, **keywords: Any) -> tuple[Tensor, ...]:
        return tuple(piece.clone() for piece in getattr(input, name)(*arguments, **keywords))

    return copied


# ------------------------------------------------------------------------------------------------------------- diagonals


@composition("diagonal", view=True)
def diagonal(input: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """The last two dimensions are merged; then every (columns + 1)-th element is taken."""
    if _dimension(input, dim1) == _dimension(input, dim2):
        raise ValueError("the dimensions of a diagonal must differ")
    matrices = input.movedim((dim1, dim2), (-2, -1))
    rows, columns = map(int, matrices.shape[-2:])
    length = max(0, min(rows, columns - offset) if offset >= 0 else min(rows + offset, columns))
    start = offset if offset >= 0 else -offset * columns
    flat = matrices.reshape(*matrices.shape[:-2], rows * columns)
    return flat[..., start : start + (length - 1) * (columns + 1) + 1 : columns + 1] if length else flat[..., :0]


@composition("linalg_diagonal", view=True)
def linalg_diagonal(A: Tensor, *, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    return diagonal(A, offset, dim1, dim2)


@composition("trace")
def trace(input: Tensor) -> Tensor:
    require_rank(input, (2,))
    return diagonal(input).sum()


@composition("diag_embed")
def diag_embed(input: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    rank = input.dim() + 1
    first, second = dim1 % rank, dim2 % rank
    if first == second:
        raise ValueError("the dimensions of a diagonal must differ")
    length = int(input.shape[-1]) + abs(offset)
    of_rows = torch.nn.functional.pad(input, (max(0, -offset), max(0, offset)))
    index = torch.arange(length)
    matrices = torch.where(index == index[:, None] + offset, of_rows.unsqueeze(-1), 0)
    return matrices.movedim((-2, -1), (first, second))


@composition("diag")
def diag(input: Tensor, diagonal_: int = 0, *, diagonal: int | None = None) -> Tensor:
    require_rank(input, (1, 2))
    offset = diagonal_ if diagonal is None else diagonal
    return diag_embed(input, offset) if input.dim() == 1 else input.diagonal(offset).clone()


@composition("diagflat")
def diagflat(input: Tensor, offset: int = 0) -> Tensor:
    return diag_embed(input.reshape(-1), offset)


@composition("diagonal_scatter")
def diagonal_scatter(input: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    require_shape(src, diagonal(input, offset, dim1, dim2).shape, "the source")
    matrices = input.movedim((dim1, dim2), (-2, -1))
    rows, columns = matrices.shape[-2:]
    on_diagonal = torch.arange(columns) == torch.arange(rows)[:, None] + offset
    # Row r of the result has element r of the source, counted from the first row that the diagonal is in.
    first = max(0, -offset)
    padded = torch.nn.functional.pad(src, (first, int(rows) - first - int(src.shape[-1])))
    return torch.where(on_diagonal, padded.unsqueeze(-1).to(input.dtype), matrices).movedim((-2, -1), (dim1, dim2))


@composition("select_scatter")
def select_scatter(input: Tensor, src: Tensor, dim: int, index: int) -> Tensor:
    require_shape(src, input.select(dim, index).shape, "the source")
    size = input.shape[dim]
    return torch.where(
        _along(torch.arange(size) == index % size, input, dim), src.unsqueeze(dim).to(input.dtype), input
    )


@composition("slice_scatter")
def slice_scatter(
    input: Tensor, src: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    size = int(input.shape[dim])
    first, last, _ = slice(start, end, step).indices(size)
    positions = range(first, last, step)
    expected = [len(positions) if d == dim % input.dim() else n for d, n in enumerate(input.shape)]
    require_shape(src, expected, "the source")
    if not positions:
        return input.clone()
    spread = src.to(input.dtype).unsqueeze(dim % input.dim() + 1)
    if step > 1:  # each element of the source is followed by step - 1 elements that the mask leaves out
        spread = spread.expand(*(step if d == dim % input.dim() + 1 else n for d, n in enumerate(spread.shape)))
    flat = spread.flatten(dim % input.dim(), dim % input.dim() + 1).narrow(dim, 0, positions[-1] - first + 1)
    index = torch.arange(size)
    chosen = (index >= first) & (index <= positions[-1]) & ((index - first) % step == 0)
    edges = [0, 0] * (input.dim() - 1 - dim % input.dim()) + [first, size - 1 - positions[-1]]
    return torch.where(_along(chosen, input, dim), torch.nn.functional.pad(flat, edges), input)


def _along(vector: Tensor, input: Tensor, dim: int) -> Tensor:
    """A vector that broadcasts along ``dim`` of ``input``."""
    return vector.reshape(-1, *[1] * (input.dim() - 1 - dim % input.dim()))


def _dimension(input: Tensor, dim: int, extra: int = 0) -> int:
    rank = max(input.dim() + extra, 1)
    if not -rank <= dim < rank:
        raise IndexError(f"dimension {dim} is out of range for a tensor of {input.dim()} dimensions")
    return dim % rank


# ---------------------------------------------------------------------------------------------------- cutting and joining


@composition("unsafe_chunk")
def unsafe_chunk(input: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    return input.chunk(chunks, dim)


@composition("unsafe_split", "unsafe_split_with_sizes")
def unsafe_split(input: Tensor, split_size_or_sections: Any, dim: int = 0) -> tuple[Tensor, ...]:
    return input.split(split_size_or_sections, dim)


@composition("tensor_split", view=True)
def tensor_split(
    input: Tensor, indices_or_sections: Any = None, dim: int = 0, *, sections: Any = None, indices: Any = None
) -> tuple[Tensor, ...]:
    cuts = next(given for given in (indices_or_sections, sections, indices) if given is not None)
    if isinstance(cuts, Tensor):
        raise UnsupportedError("tensor_split by a tensor has results whose sizes depend on data")
    size = int(input.shape[_dimension(input, dim)])
    if isinstance(cuts, int):
        if cuts <= 0:
            raise ValueError("the number of sections must be positive")
        longer, each = size % cuts, size // cuts
        cuts = [number * each + min(number, longer) for number in range(1, cuts)]
    bounds = [0, *(int(cut) for cut in cuts), size]
    starts_and_ends = [(slice(a, b).indices(size)) for a, b in zip(bounds, bounds[1:], strict=False)]
    return tuple(input.narrow(dim, start, max(0, end - start)) for start, end, _ in starts_and_ends)


def _split(input: Tensor, cuts: Any, dim: int) -> tuple[Tensor, ...]:
    if isinstance(cuts, int) and int(input.shape[dim]) % cuts:
        raise ValueError(f"dimension {dim} cannot be divided into {cuts} equal sections")
    return tensor_split(input, cuts, dim)


@composition("hsplit", view=True)
def hsplit(input: Tensor, indices_or_sections: Any) -> tuple[Tensor, ...]:
    if input.dim() < 1:
        raise ValueError("hsplit needs a tensor of at least one dimension")
    return _split(input, indices_or_sections, 0 if input.dim() == 1 else 1)


@composition("vsplit", view=True)
def vsplit(input: Tensor, indices_or_sections: Any) -> tuple[Tensor, ...]:
    if input.dim() < 2:
        raise ValueError("vsplit needs a tensor of at least two dimensions")
    return _split(input, indices_or_sections, 0)


@composition("dsplit", view=True)
def dsplit(input: Tensor, indices_or_sections: Any) -> tuple[Tensor, ...]:
    if input.dim() < 3:
        raise ValueError("dsplit needs a tensor of at least three dimensions")
    return _split(input, indices_or_sections, 2)


def _each(tensors: Any, function: Any) -> Any:
    """``function`` of one tensor, or of each of several."""
    if len(tensors) == 1 and isinstance(tensors[0], Tensor):
        return function(tensors[0])
    listed = tensors[0] if len(tensors) == 1 else tensors
    return tuple(map(function, listed))


@composition("torch.atleast_1d", view=True)
def atleast_1d(*tensors: Any) -> Any:
    return _each(tensors, lambda x: x.reshape(1) if x.dim() == 0 else x)


@composition("torch.atleast_2d", view=True)
def atleast_2d(*tensors: Any) -> Any:
    return _each(tensors, lambda x: x.reshape(1, 1) if x.dim() == 0 else x.unsqueeze(0) if x.dim() == 1 else x)


def _deep(x: Tensor) -> Tensor:
    if x.dim() == 0:
        return x.reshape(1, 1, 1)
    if x.dim() == 1:
        return x.unsqueeze(0).unsqueeze(-1)
    return x.unsqueeze(-1) if x.dim() == 2 else x


@composition("torch.atleast_3d", view=True)
def atleast_3d(*tensors: Any) -> Any:
    return _each(tensors, _deep)


@composition("column_stack")
def column_stack(tensors: Any) -> Tensor:
    return torch.hstack([x.reshape(-1, 1) if x.dim() <= 1 else x for x in tensors])


@composition("dstack")
def dstack(tensors: Any) -> Tensor:
    return torch.cat([_deep(x) for x in tensors], 2)


@composition("_VF.block_diag")
def block_diag(tensors: Any) -> Tensor:
    blocks = [x.reshape(1, 1) if x.dim() == 0 else x.unsqueeze(0) if x.dim() == 1 else x for x in tensors]
    for block in blocks:
        require_rank(block, (2,))
    columns = [int(block.shape[1]) for block in blocks]
    padded = [
        torch.nn.functional.pad(block, (sum(columns[:number]), sum(columns[number + 1 :])))
        for number, block in enumerate(blocks)
    ]
    return torch.cat(padded, 0)


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


@composition("_VF.cartesian_prod")
def cartesian_prod(tensors: Any) -> Tensor:
    for tensor in tensors:
        require_rank(tensor, (0, 1))
    if len(tensors) == 1:
        return tensors[0]
    return torch.stack(meshgrid(*tensors), -1).reshape(-1, len(tensors))


@composition("fliplr")
def fliplr(input: Tensor) -> Tensor:
    if input.dim() < 2:
        raise ValueError("fliplr needs a tensor of at least two dimensions")
    return input.flip(1)


@composition("flipud")
def flipud(input: Tensor) -> Tensor:
    if input.dim() < 1:
        raise ValueError("flipud needs a tensor of at least one dimension")
    return input.flip(0)


@composition("rot90")
def rot90(input: Tensor, k: int = 1, dims: Sizes = (0, 1)) -> Tensor:
    if len(dims) != 2:
        raise ValueError("a rotation is in a plane of two dimensions")
    first, second = (_dimension(input, dim) for dim in dims)
    if first == second:
        raise ValueError("the dimensions of a rotation must differ")
    turns = int(k) % 4
    if turns == 1:
        return input.flip(second).transpose(first, second)
    if turns == 2:
        return input.flip(first, second)
    return input.flip(first).transpose(first, second) if turns == 3 else input.clone()


def _shifted(input: Tensor, dim: Any, forward: bool) -> Tensor:
    dims = tuple(range(input.dim())) if dim is None else tuple(dim) if isinstance(dim, (tuple, list)) else (dim,)
    for each in dims:
        size = int(input.shape[each])
        input = input.roll(size // 2 if forward else (size + 1) // 2, each)
    return input


@composition("fft_fftshift", "fftshift")
def fftshift(input: Tensor, dim: Any = None) -> Tensor:
    return _shifted(input, dim, forward=True)


@composition("fft_ifftshift", "ifftshift")
def ifftshift(input: Tensor, dim: Any = None) -> Tensor:
    return _shifted(input, dim, forward=False)


# --------------------------------------------------------------------------------------------------------------- windows

MOST_PIECES = 128
"""Shifted copies of a tensor that a function is composed of, at most."""


@composition("Tensor.unfold")
def unfold(input: Tensor, dimension: int, size: int, step: int) -> Tensor:
    """Windows along a dimension: their elements at each offset are a slice of every ``step``-th element."""
    size, step = int(size), int(step)
    if input.dim() == 0:
        _dimension(input, dimension)
        if size > 1 or step <= 0:
            raise ValueError(f"windows of {size} elements, every {step} elements, of 1")
        return input.reshape(1)[:size]
    dim = _dimension(input, dimension)
    length = int(input.shape[dim])
    if not 0 <= size <= length or step <= 0:
        raise ValueError(f"windows of {size} elements, every {step} elements, of {length}")
    if size > MOST_PIECES or size == 0:
        raise UnsupportedError(f"windows of {size} elements are not supported; 1 to {MOST_PIECES} are")
    count = (length - size) // step + 1
    return torch.stack([_every(input, dim, start, count, step) for start in range(size)], -1)


def _every(input: Tensor, dim: int, start: int, count: int, step: int) -> Tensor:
    """``count`` elements along ``dim``, from ``start`` on, ``step`` apart."""
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


# --------------------------------------------------------------------------------------------------------------- indices


@composition("eye")
def eye(n: int, m: int | None = None, *, dtype: Any = None, device: Any = None) -> Tensor:
    columns = n if m is None else m
    same = torch.arange(columns) == torch.arange(n)[:, None]
    return same.to(torch.get_default_dtype() if dtype is None else dtype)


@composition("linspace")
def linspace(start: Any, end: Any, steps: int, *, dtype: Any = None, device: Any = None) -> Tensor:
    """Both ends are exact: the second half is computed from the end backwards."""
    dtype, steps = torch.get_default_dtype() if dtype is None else dtype, int(steps)
    if not dtype.is_floating_point:
        raise UnsupportedError("linspace of integers is not supported; torch.arange is")
    for bound in (start, end):
        if isinstance(bound, Tensor):
            require_rank(bound, (0,))
    if steps < 0:
        raise ValueError("the number of steps must not be negative")
    index = torch.arange(steps)
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
        raise UnsupportedError("logspace of integers is not supported")
    exponents = linspace(start, end, steps, dtype=torch.float64)
    return torch.pow(base, exponents).to(dtype)


@composition("sum_to_size")
def sum_to_size(input: Tensor, *size: Any) -> Tensor:
    sizes = tuple(size[0]) if len(size) == 1 and isinstance(size[0], (tuple, list)) else size
    lead = input.dim() - len(sizes)
    if lead < 0 or any(n not in (1, m) for n, m in zip(sizes, input.shape[lead:], strict=True)):
        raise ValueError(f"size {tuple(map(int, sizes))} does not broadcast to {tuple(map(int, input.shape))}")
    summed = [lead + d for d, n in enumerate(sizes) if n == 1 and input.shape[lead + d] != 1]
    if not lead and not summed:
        return input
    result = input.sum((*range(lead), *summed), keepdim=True) if lead or summed else input
    return result.reshape(sizes)


@composition("isreal")
def isreal(input: Tensor) -> Tensor:
    return torch.ones_like(input, dtype=torch.bool)


@composition("angle")
def angle(input: Tensor) -> Tensor:
    """0 or pi, or NaN."""
    x = input if input.is_floating_point() else input.to(torch.get_default_dtype())
    result = torch.where(x < 0, math.pi, 0.0).to(x.dtype)
    return torch.where(x.isnan(), x, result)


_copies()
