"""How tensors are laid out, and whether they still are as they were: the check in front of every warm launch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch


class TensorFacts(NamedTuple):
    """What of a tensor a launch depends on. Keeps nothing of its memory."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    remainder: int
    """Of its address by 16 bytes; 0 on the CPU, whose kernels take any."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorFacts:
        remainder = 0 if tensor.is_cpu else tensor.data_ptr() & 15
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device, remainder)

    @property
    def extent(self) -> int:
        """Bytes from the first element to the end of the last."""
        if not self.shape.numel():
            return 0
        reach = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return (reach + 1) * self.dtype.itemsize

    def __str__(self) -> str:
        place = f", {self.remainder} bytes past a multiple of 16" if self.remainder else ""
        return f"{self.dtype} {tuple(self.shape)} with strides {self.strides} on {self.device}{place}"


def layout_check(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A function of as many tensors: whether each has the type, dtype, device, shape and strides of its counterpart.

    torch's own guard does it in one C++ call, 0.1 us a tensor where reading the attributes from Python costs 0.4. It is
    private to torch; where a version lacks it, the attributes are read. A guard of several refuses a tensor that comes
    twice, so where one of ``tensors`` does, each place has a guard of its own, which takes any.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        def guard(*alike: torch.Tensor) -> Callable[..., bool]:
            return TensorGuards(*alike, dynamic_dims_sizes=None, dynamic_dims_strides=None).check

        return _each(len(tensors))(*map(guard, tensors)) if has_repeated(tensors) else guard(*tensors)
    except (ImportError, TypeError):
        facts = [_facts(tensor) for tensor in tensors]
        return lambda *others: [_facts(tensor) for tensor in others] == facts


def has_repeated(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether one of ``tensors`` is another one too."""
    return len(set(map(id, tensors))) < len(tensors)


@functools.cache
def _each(count: int) -> Callable[..., Callable[..., bool]]:
    """``(*checks) -> (*tensors) -> bool``, written out: a loop would cost more than the checks."""
    checks, places = [f"c{i}" for i in range(count)], [f"t{i}" for i in range(count)]
    both = " and ".join(f"{check}({place})" for check, place in zip(checks, places, strict=True))
    text = f"lambda {', '.join(checks)}: lambda {', '.join(places)}: {both}"
    function: Callable[..., Callable[..., bool]] = eval(text)
    return function


def _facts(tensor: torch.Tensor) -> tuple[object, ...]:
    return type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.requires_grad
