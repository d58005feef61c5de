"""Decides which elements of tensors are the same memory: of two tensors, and within one.

Two questions are asked of strides and addresses. Both answers are exact, because a slice of a buffer next to another
slice of it is common and safe, and a false alarm would cost a copy or refuse the call.

Neighbours: launchers of functions that update an argument (``runtime/launcher.py``) compare address ranges at every
call, and call ``refuse`` only where the ranges of two arguments intersect; ``call/outputs.py`` asks about ``out=``,
``lowering.py`` about arguments that are updated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from jitgen.errors import SharedMemoryError


def refuse(name: str, updated: torch.Tensor, other: torch.Tensor, line: str | None = None) -> None:
    """Raises SharedMemoryError if ``updated`` and ``other`` share an element.

    Args:
        line: of the user's, where the update is.
    """
    if share(updated, other):
        raise SharedMemoryError(message(name, line))


def message(name: str, line: str | None) -> str:
    """Returns the error's text for an argument that is updated and shares memory with another input.

    Args:
        line: see ``refuse``.
    """
    where = f", or before the update at {line}" if line else ""
    return (
        f"{name}: an argument that is updated in place shares memory with another argument; clone one of them before "
        f"the call{where}"
    )


@dataclass(frozen=True)
class Ranges:
    """Compares many arguments of a function that updates some of them, in their order in memory.

    Attributes:
        name: the function's.
        arguments: for each its number, its extent in bytes, and whether it is updated.
        lines: of the user's, where an argument is updated, by its number.
    """

    name: str
    arguments: tuple[tuple[int, int, bool], ...]
    lines: Mapping[int, str | None]

    def refuse(self, addresses: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        """Raises SharedMemoryError if an updated argument shares an element with another one.

        Args:
            addresses, tensors: of ``arguments``.
        """
        # Of the arguments before, those that end behind the start of this one, with their ends. Arguments that are only
        # read are never compared with one another, however many share their memory.
        written: list[tuple[int, int]] = []
        read: list[tuple[int, int]] = []
        for position in sorted(range(len(addresses)), key=addresses.__getitem__):
            start = addresses[position]
            number, extent, updated = self.arguments[position]
            written = [(end, other) for end, other in written if end > start]
            for _, other in written:
                line = self.lines.get(number if updated else self.arguments[other][0])
                refuse(self.name, tensors[other], tensors[position], line)
            if updated:
                read = [(end, other) for end, other in read if end > start]
                for _, other in read:
                    refuse(self.name, tensors[position], tensors[other], self.lines.get(number))
            (written if updated else read).append((start + extent, position))


def refuse_repeated(name: str, index: int, sizes: Sequence[int], strides: Sequence[int]) -> None:
    """Raises SharedMemoryError if elements share memory within argument ``index``, which is updated."""
    if is_repeated(sizes, strides):
        raise SharedMemoryError(
            f"{name}: argument {index} is updated in place, but several of its elements share memory (an expanded "
            "tensor, say); clone it first"
        )


def share(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Returns whether ``left`` and ``right`` may share an element; exact where their dtypes and strides are equal."""
    return intersect(
        *(Elements(tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.element_size()) for tensor in (left, right))
    )


@dataclass(frozen=True)
class Elements:
    """Describes where the elements of a tensor lie: ``address`` is that of the first, in bytes, and ``size`` the bytes
    of an element."""

    address: int
    shape: Sequence[int]
    strides: Sequence[int]
    size: int

    @property
    def extent(self) -> int:
        """Returns the bytes from the start of the first element to the end of the last one; 0 for an empty tensor."""
        return extent(self.shape, self.strides, self.size)


def intersect(left: Elements, right: Elements) -> bool:
    """Returns whether the two may share an element; exact where their sizes in bytes and strides are equal."""
    distance = right.address - left.address
    if distance >= left.extent or -distance >= right.extent:
        return False
    if tuple(left.strides) != tuple(right.strides) or left.size != right.size or distance % left.size:
        return True
    return _has_solution(distance // left.size, _dims(left.strides, left.shape, right.shape))


def is_same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Returns whether every element of ``left`` is the element of ``right`` with the same index."""
    return (
        left.data_ptr() == right.data_ptr()
        and left.shape == right.shape
        and left.stride() == right.stride()
        and left.dtype == right.dtype
    )


def is_repeated(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Returns whether two elements of one tensor are the same memory, as those of an expanded tensor are."""
    if 0 in sizes:
        return False
    dims = _dims(strides, sizes, sizes)
    for index, (stride, size, _) in enumerate(dims):
        # Two different indices of the same element: ``step`` is their distance in the first dimension in which
        # they differ. By as much the inner dimensions have to go back.
        inner = dims[index + 1 :]
        reach = sum(step * (length - 1) for step, length, _ in inner)
        last = size - 1 if stride == 0 else min(size - 1, reach // stride)
        if any(_has_solution(-step * stride, inner) for step in range(1, last + 1)):
            return True
    return False


def extent(shape: Sequence[int], strides: Sequence[int], item_size: int) -> int:
    """Returns the bytes from the start of the first element to the end of the last one; 0 for an empty tensor."""
    if 0 in shape:
        return 0
    return (sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1) * item_size


_Dims = list[tuple[int, int, int]]
"""(stride, size of the one tensor, size of the other) of each dimension, by descending stride."""


def _dims(strides: Sequence[int], left: Sequence[int], right: Sequence[int]) -> _Dims:
    return sorted(zip(strides, left, right, strict=True), reverse=True)


def _has_solution(distance: int, dims: _Dims) -> bool:
    """Returns whether some indices i of one tensor and j of the other satisfy: the sum of stride * (i - j) is
    ``distance``.

    ``distance``: from the one tensor's first element to the other's, in elements.
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
