"""Whether two tensors share elements. An argument that is updated in place must share none with another argument.

Neighbour: launchers of functions that update an argument (``runtime/launcher.py``) compare address ranges at every
call, and call ``refuse`` only where the ranges of two arguments intersect, as those of two slices of one tensor may.
"""

from __future__ import annotations

import torch

from jitgen.errors import UnsupportedError


def refuse(name: str, updated: torch.Tensor, other: torch.Tensor) -> None:
    """UnsupportedError if ``updated`` and ``other`` share an element."""
    if share(updated, other):
        raise UnsupportedError(
            f"{name}: an argument that is updated in place shares memory with another argument; "
            "clone one of them before the call"
        )


def share(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether ``left`` and ``right`` may share an element; exact where their dtypes and strides are equal."""
    distance = right.data_ptr() - left.data_ptr()
    if left.stride() != right.stride() or left.dtype != right.dtype or distance % left.element_size():
        return True
    dims = sorted(zip(left.stride(), left.shape, right.shape, strict=True), reverse=True)
    return _has_solution(distance // left.element_size(), dims)


def _has_solution(distance: int, dims: list[tuple[int, int, int]]) -> bool:
    """Whether some indices i of one tensor and j of the other satisfy: sum of stride * (i - j) is ``distance``.

    Args:
        distance: from the one tensor's first element to the other's, in elements.
        dims: (stride, size of the one, size of the other) of each dimension, by descending stride.
    """
    if not dims:
        return distance == 0
    (stride, here, there), rest = dims[0], dims[1:]
    if stride == 0:
        return _has_solution(distance, rest)
    # The inner dimensions span ``reach`` strides at most, so i - j is that close to the quotient.
    quotient = distance // stride
    reach = sum(inner * (max(a, b) - 1) for inner, a, b in rest) // stride + 1
    steps = range(max(quotient - reach, 1 - there), min(quotient + reach, here - 1) + 1)
    return any(_has_solution(distance - step * stride, rest) for step in steps)


def extent(shape: tuple[int, ...], strides: tuple[int, ...], item_size: int) -> int:
    """Bytes from the start of the first element to the end of the last one; 0 for an empty tensor."""
    if 0 in shape:
        return 0
    return (sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1) * item_size
