"""Composes functions that put chosen elements into place: those under a mask, maxima where they were, the rows of a
bag."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from jitgen.errors import UnsupportedError
from jitgen.trace.compositions.checks import require_one_dtype, require_rank, require_shape
from jitgen.trace.indexing import MOST_NUMBERS
from jitgen.trace.table import composition


@composition("masked_scatter")
def masked_scatter(input: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """Replaces the elements under ``mask`` by those of ``source``, in order. A source of too few is an index out of
    range."""
    require_one_dtype(input, source)
    if mask.dtype != torch.bool:
        raise TypeError("masked_scatter expects a bool mask")
    input, mask = torch.broadcast_tensors(input, mask)
    if not input.numel():
        return input.clone()
    chosen = mask.reshape(-1)
    number = torch.where(chosen, chosen.cumsum(0) - 1, 0)
    return torch.where(mask, source.reshape(-1)[number].reshape(mask.shape), input)


@composition("nonzero_static")
def nonzero_static(input: Tensor, *, size: int, fill_value: int = -1) -> Tensor:
    """Returns the indices of the first ``size`` elements that are not 0, a row each, and then rows of
    ``fill_value``."""
    if size < 0:
        raise ValueError(f"size must not be negative, but is {int(size)}")
    if not input.dim():
        return torch.zeros(size, 0, dtype=torch.int64)
    chosen = (input != 0).reshape(-1)
    number = chosen.cumsum(0) - 1
    row = torch.where(chosen & (number < size), number, size)  # all others into a row behind the last one
    flat = torch.zeros(size + 1, dtype=torch.int64).scatter(0, row, torch.arange(chosen.shape[0]))[:size]
    columns, stride = [], 1
    for extent in reversed(input.shape):
        columns.append(flat // stride % max(extent, 1))
        stride = stride * max(extent, 1)
    return torch.where((torch.arange(size) < chosen.sum())[:, None], torch.stack(columns[::-1], 1), fill_value)


def _unpooled(input: Tensor, indices: Tensor, sizes: Any, count: int) -> Tensor:
    require_rank(input, (count + 1, count + 2))
    require_shape(indices, input.shape, "the indices")
    if indices.dtype != torch.int64:
        raise TypeError("the indices must be int64")
    lead, sizes = input.shape[:-count], [int(size) for size in sizes]
    if len(sizes) != count:
        raise ValueError(f"the output size must have {count} numbers, not {len(sizes)}")
    empty = input.new_zeros(*lead, math.prod(sizes))
    return empty.scatter(-1, indices.flatten(-count), input.flatten(-count)).reshape(*lead, *sizes)


@composition("_nn.max_unpool2d")
def max_unpool2d(input: Tensor, indices: Tensor, output_size: Any) -> Tensor:
    return _unpooled(input, indices, output_size, 2)


@composition("_nn.max_unpool3d")
def max_unpool3d(input: Tensor, indices: Tensor, output_size: Any, stride: Any, padding: Any) -> Tensor:
    return _unpooled(input, indices, output_size, 3)


@composition("combinations")
def combinations(input: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    require_rank(input, (1,))
    if r < 0:
        raise ValueError(f"r must not be negative, but is {int(r)}")
    if r == 0:
        return input.new_empty(0)
    count = int(input.shape[0])
    number = math.comb(count + (int(r) - 1 if with_replacement else 0), int(r))
    if number * int(r) > MOST_NUMBERS:
        raise UnsupportedError(
            f"combinations of {number * int(r)} numbers are not supported, up to {MOST_NUMBERS} are; "
            f"pass their indices, which are torch.combinations(torch.arange({count}), {int(r)}), and write x[indices]"
        )
    choose = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    chosen = list(choose(range(count), int(r)))
    return input[torch.tensor(chosen)] if chosen else input.new_empty(0, int(r))


@composition("F.embedding_bag")
def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Combines the rows of ``weight`` (rows, columns) that ``input`` names for each bag: (bags, columns).

    Args:
        input: a bag in each row, or all bags behind one another.
        offsets: the first element of each bag, where ``input`` has one dimension.
    """
    if max_norm is not None:
        raise UnsupportedError(
            "max_norm, which rescales the weight itself, is not supported; rescale it before the call, and pass None"
        )
    if mode not in ("sum", "mean", "max"):
        raise ValueError(f"mode must be sum, mean or max, not {mode!r}")
    if per_sample_weights is not None and mode != "sum":
        raise UnsupportedError("weights of samples need mode='sum', as in torch; pass that")
    if per_sample_weights is not None:
        require_shape(per_sample_weights, input.shape, "the weights of samples")
        require_one_dtype(per_sample_weights, weight)
    require_rank(weight, (2,))
    require_rank(input, (1, 2))
    if (input.dim() == 2) != (offsets is None):
        raise ValueError("offsets are for an input of one dimension")
    if offsets is None:
        rows = input.shape[0]
        bag = torch.arange(rows)[:, None].expand(input.shape).reshape(-1)
    else:
        require_rank(offsets, (1,))
        rows = offsets.shape[0] - (1 if include_last_offset else 0)
        begins = torch.zeros(input.shape[0] + 1, dtype=torch.int64)
        bag = begins.index_add(0, offsets.long(), torch.ones_like(offsets).long()).cumsum(0)[:-1] - 1
    flat = input.reshape(-1)
    looked_up = weight.index_select(0, flat)
    if per_sample_weights is not None:
        looked_up = looked_up * per_sample_weights.reshape(-1, 1)
    counted = torch.ones_like(flat, dtype=torch.bool) if padding_idx is None else flat != padding_idx % weight.shape[0]
    bag = torch.where(counted, bag, rows)  # of what is left out, a bag behind the last one
    number = torch.zeros(rows + 1, dtype=torch.int64).index_add(0, bag, torch.ones_like(bag))[:rows, None]
    empty = weight.new_zeros(rows + 1, weight.shape[1])
    if mode == "max":
        most = empty.index_reduce(0, bag, looked_up, "amax", include_self=False)[:rows]
        return torch.where(number > 0, most, 0)
    total = empty.index_add(0, bag, looked_up)[:rows]
    return total if mode == "sum" else total / number.clamp(min=1)
