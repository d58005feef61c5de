"""Takes 0-d CPU tensors among CUDA arguments as numbers, as torch does.

At each call such a tensor is read and becomes a *host scalar*: the number it holds, of a type that tells the tensor's
dtype. In the trace that is a 0-d tensor, which promotes as one; in a launch it is a number like any other.
``call/dispatch.py`` exchanges the arguments, ``tracer.py`` meets them as ``SymbolicScalar``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from jitgen.ir.symbols import Expr
from jitgen.spec import DTYPES


@dataclass(frozen=True)
class SymbolicScalar:
    """Represents a host scalar at the trace: its value is ``expr``."""

    expr: Expr
    dtype: str


def _host_scalar(name: str, dtype: torch.dtype) -> type:
    return type(f"HostScalar_{name}", (float if dtype.is_floating_point else int,), {"dtype": name})


HOST_SCALARS: dict[torch.dtype, type] = {dtype: _host_scalar(name, dtype) for name, dtype in DTYPES.items()}


def base(kind: type) -> type:
    """Returns the number type of an argument's type: int or float."""
    return float if issubclass(kind, float) else int


def host_scalar(tensor: torch.Tensor) -> Any:
    return HOST_SCALARS[tensor.dtype](tensor.item())


def is_host_scalar(tensor: torch.Tensor, device: torch.device) -> bool:
    """Returns whether ``tensor`` counts as a number among tensors on ``device``."""
    return tensor.device.type == "cpu" and device.type != "cpu" and not tensor.ndim


def common_device(tensors: Sequence[torch.Tensor]) -> torch.device:
    """Returns the device of the kernel: that of the first tensor that does not count as a number."""
    return next((t.device for t in tensors if t.device.type != "cpu" or t.ndim), tensors[0].device)


def exchanged(leaves: Sequence[Any]) -> list[Any] | None:
    """Replaces the tensors in ``leaves`` that count as numbers by host scalars; returns None if there are none."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if not tensors:
        return None
    device = common_device(tensors)
    if not any(is_host_scalar(tensor, device) for tensor in tensors):
        return None
    return [
        host_scalar(leaf) if isinstance(leaf, torch.Tensor) and is_host_scalar(leaf, device) else leaf
        for leaf in leaves
    ]
