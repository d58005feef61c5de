"""Composes diagonals, and functions that put a tensor into a part of another."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from jitgen.trace.compositions.checks import require_rank, require_shape, valid_dim
from jitgen.trace.table import composition


@composition("diagonal", view=True)
def diagonal(input: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """Merges the last two dimensions, and then takes every (columns + 1)-th element."""
    if valid_dim(input, dim1) == valid_dim(input, dim2):
        raise ValueError("the dimensions of a diagonal must differ")
    matrices = input.movedim((dim1, dim2), (-2, -1))
    rows, columns = map(int, matrices.shape[-2:])
    length = max(0, min(rows, columns - offset) if offset >= 0 else min(rows + offset, columns))
    start = offset if offset >= 0 else -offset * columns
    flat = matrices.reshape(*matrices.shape[:-2], rows * columns)
    return flat[..., start : start + (length - 1) * (columns + 1) + 1 : columns + 1] if length else flat[..., :0]


composition("diagonal_copy")(lambda input, offset=0, dim1=0, dim2=1: diagonal(input, offset, dim1, dim2).clone())


@composition("linalg_diagonal", view=True)
def linalg_diagonal(A: Tensor, *, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    return diagonal(A, offset, dim1, dim2)


@composition("trace")
def trace(input: Tensor) -> Tensor:
    require_rank(input, (2,))
    return diagonal(input).sum()


@composition("fill_diagonal")
def fill_diagonal(input: Tensor, fill_value: float, wrap: bool = False) -> Tensor:
    """Computes what ``fill_diagonal_`` makes of a tensor.

    With ``wrap`` the diagonal of a tall matrix begins again after a row that is left out.
    """
    if input.dim() < 2:
        raise ValueError(f"expected a tensor of at least 2 dimensions, got {input.dim()}")
    if input.dim() > 2 and len(set(map(int, input.shape))) > 1:
        raise ValueError("all dimensions of a tensor with more than two must be of one length")
    rows, *others = (
        torch.arange(size).reshape(-1, *[1] * (input.dim() - 1 - dim)) for dim, size in enumerate(input.shape)
    )
    rows = rows % (input.shape[1] + 1) if wrap and input.dim() == 2 else rows
    on_diagonal = functools.reduce(torch.logical_and, [rows == columns for columns in others])
    return torch.where(on_diagonal, torch.full_like(input, fill_value), input)


@composition("diag_embed")
def diag_embed(input: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    rank = input.dim() + 1
    first, second = dim1 % rank, dim2 % rank
    if first == second:
        raise ValueError("the dimensions of a diagonal must differ")
    length = int(input.shape[-1]) + abs(offset)
    of_rows = torch.nn.functional.pad(input, (max(0, -offset), max(0, offset)))
    index = torch.arange(length)
    matrices = torch.where(index == index[:, None] + offset, of_rows.unsqueeze(-1), 0).to(input.dtype)
    return matrices.movedim((-2, -1), (first, second))


@composition("diag")
def diag(input: Tensor, diagonal_: int = 0, *, diagonal: int | None = None) -> Tensor:
    require_rank(input, (1, 2))
    offset = diagonal_ if diagonal is None else diagonal
    return diag_embed(input, offset) if input.dim() == 1 else input.diagonal(offset).clone()


composition("diagflat")(lambda input, offset=0: diag_embed(input.reshape(-1), offset))


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
    """Reshapes a vector so that it broadcasts along ``dim`` of ``input``."""
    return vector.reshape(-1, *[1] * (input.dim() - 1 - dim % input.dim()))
