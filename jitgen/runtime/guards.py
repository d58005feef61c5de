"""Checks before every warm launch whether the tensors have the layout that the launch was made for.

Neighbour: ``call/`` runs the check on a call's arguments, and looks for another launch where it fails.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from jitgen.codegen.python import PythonFunction


class TensorFacts(NamedTuple):
    """Holds the facts about a tensor that a launch depends on, without a reference to the tensor's memory."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    remainder: int
    """The tensor's address modulo 16; 0 on the CPU, whose kernels accept any address."""
    negated: bool = False
    """Whether the tensor is the elements in memory times -1 (``x.conj().imag``), which no launch takes."""

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> TensorFacts:
        remainder = 0 if tensor.is_cpu else tensor.data_ptr() & 15
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device, remainder, tensor.is_neg())

    @property
    def extent(self) -> int:
        """Returns the bytes from the start of the first element to the end of the last one."""
        if not self.shape.numel():
            return 0
        reach = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return (reach + 1) * self.dtype.itemsize

    def __str__(self) -> str:
        address = f", {self.remainder} bytes past a multiple of 16" if self.remainder else ""
        return f"{self.dtype} {tuple(self.shape)} with strides {self.strides} on {self.device}{address}"


def layout_check(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Returns a function that checks whether its tensors have the types, dtypes, devices, shapes and strides of
    ``tensors``.

    torch's ``TensorGuards`` does this in one C++ call of 0.1 us per tensor; reading the attributes in Python takes 0.4
    us. The class is private to torch; in a version without it the attributes are read. A ``TensorGuards`` of several
    tensors refuses a call that passes one tensor twice. So if ``tensors`` has a tensor twice, each argument is checked
    by a ``TensorGuards`` of its own.
    """
    if not tensors:
        return lambda: True
    try:
        from torch._C._dynamo.guards import TensorGuards

        def guard(*alike: torch.Tensor) -> Callable[..., bool]:
            return TensorGuards(*alike, dynamic_dims_sizes=None, dynamic_dims_strides=None).check

        return _all_checks(len(tensors))(*map(guard, tensors)) if has_repeated(tensors) else guard(*tensors)
    except (ImportError, TypeError):
        facts = [_facts(tensor) for tensor in tensors]
        return lambda *others: [_facts(tensor) for tensor in others] == facts


def has_repeated(tensors: Sequence[torch.Tensor]) -> bool:
    """Returns whether some tensor occurs twice in ``tensors``."""
    return len(set(map(id, tensors))) < len(tensors)


@functools.cache
def _all_checks(count: int) -> Callable[..., Callable[..., bool]]:
    """Generates ``(*checks) -> (*tensors) -> bool``, because a loop would take longer than the checks."""
    checks, tensors = [f"c{i}" for i in range(count)], [f"t{i}" for i in range(count)]
    conjunction = " and ".join(f"{check}({tensor})" for check, tensor in zip(checks, tensors, strict=True))
    function = PythonFunction("all_checks", checks, [f"return lambda {', '.join(tensors)}: {conjunction}"])
    made: Callable[..., Callable[..., bool]] = function.define("layout checks", {})
    return made


def _facts(tensor: torch.Tensor) -> tuple[object, ...]:
    facts = type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride()
    return *facts, tensor.requires_grad, tensor.is_neg(), torch._C._is_any_autocast_enabled()
