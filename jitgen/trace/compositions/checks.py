"""Checks the arguments of compositions; what they refuse, torch refuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def require_float(*tensors: Tensor) -> None:
    for tensor in tensors:
        if not tensor.is_floating_point():
            raise TypeError(f"not defined for {_name(tensor)} tensors")


def require_one_dtype(*tensors: Tensor | None) -> None:
    """Refuses tensors of different dtypes, for functions that do not promote."""
    names = list(dict.fromkeys(_name(tensor) for tensor in tensors if tensor is not None))
    if len(names) > 1:
        raise TypeError(f"the tensors must have one dtype, as in torch; they are {' and '.join(names)}")


def require_shape(tensor: Tensor, shape: Sequence[Any], what: str) -> None:
    """Refuses a tensor of another shape, for functions that do not broadcast."""
    if tensor.dim() != len(shape) or any(size != other for size, other in zip(tensor.shape, shape, strict=True)):
        raise ValueError(f"{what} has shape {_plain(tensor.shape)}, expected {_plain(shape)}")


def require_rank(tensor: Tensor, ranks: Sequence[int]) -> None:
    if tensor.dim() not in ranks:
        expected = " or ".join(map(str, ranks))
        raise ValueError(f"expected a tensor of {expected} dimensions, got {tensor.dim()}")


def valid_dim(input: Tensor, dim: int, extra: int = 0) -> int:
    rank = max(input.dim() + extra, 1)
    if not -rank <= dim < rank:
        raise IndexError(f"dimension {dim} is out of range for a tensor of {input.dim()} dimensions")
    return dim % rank


def reported(value: Tensor, wrong: Tensor) -> Tensor:
    """Returns ``value``, which makes a kernel on a CPU report an IndexError if an element of ``wrong`` is true. It
    reads a table of one element, itself 0, at index 1 then."""
    return value + torch.arange(1)[wrong.long()] if value.device.type == "cpu" else value


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _plain(shape: Sequence[Any]) -> tuple[int, ...]:
    return tuple(map(int, shape))
