"""Whether two tensors share elements: what an update in place must not do with another argument.

Neighbour: the launchers of functions that update an argument (``launcher.py``) compare addresses at every call, and ask
here only where the two lie within each other's reach, as parts of one buffer do.
"""

from __future__ import annotations

import torch

from jitgen.errors import UnsupportedError


def refuse(name: str, updated: torch.Tensor, other: torch.Tensor) -> None:
    """UnsupportedError when an element of ``updated`` is one of ``other`` too."""
    if share(updated, other):
        raise UnsupportedError(
            f"{name}: an argument that is updated in place shares memory with another argument; "
            "clone one of them before the call"
        )


def share(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether an element of ``left`` may be one of ``right``; exact for parts of one buffer with equal strides."""
    distance = right.data_ptr() - left.data_ptr()
    if left.stride() != right.stride() or left.dtype != right.dtype or distance % left.element_size():
        return True
    dims = sorted(zip(left.stride(), left.shape, right.shape, strict=True), reverse=True)
    return _meet(distance // left.element_size(), dims)


def _meet(distance: int, dims: list[tuple[int, int, int]]) -> bool:
    """Whether indices i of one and j of the other differ by ``distance`` in memory: sum of stride * (i - j)."""
    if not dims:
        return distance == 0
    (stride, here, there), rest = dims[0], dims[1:]
    if stride == 0:
        return _meet(distance, rest)
    # What the inner dimensions reach is less than a stride or two, so the quotient is one of its neighbours.
    quotient = distance // stride
    reach = sum(inner * (max(a, b) - 1) for inner, a, b in rest) // stride + 1
    steps = range(max(quotient - reach, 1 - there), min(quotient + reach, here - 1) + 1)
    return any(_meet(distance - step * stride, rest) for step in steps)


def extent(shape: tuple[int, ...], strides: tuple[int, ...], item_size: int) -> int:
    """Bytes from the first element's to behind the last one's; 0 for an empty tensor."""
    if 0 in shape:
        return 0
    return (sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1) * item_size
