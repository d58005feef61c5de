"""Defines the rows of torch's dtype conversions: ``x.float()``, ``x.to(...)``, ``x.type_as(y)``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from jitgen.errors import UnsupportedError
from jitgen.ir.attributes import CHANNELS_LAST, CONTIGUOUS
from jitgen.ir.graph import Node
from jitgen.spec import DTYPES, dtype_name
from jitgen.trace.table import row

if TYPE_CHECKING:
    from jitgen.trace.tracer import Trace


def ordered(trace: Trace, input: Node, memory_format: torch.memory_format | None) -> Node:
    """Returns ``input`` as a result in a memory format; torch returns a tensor that is in it already itself."""
    if memory_format in (None, torch.preserve_format):
        return input
    if memory_format is torch.contiguous_format:
        return trace.marked(input, CONTIGUOUS)
    rank = 4 if memory_format is torch.channels_last else 5
    if len(input.shape) != rank:
        raise ValueError(f"{memory_format} is for tensors of {rank} dimensions, not {len(input.shape)}")
    return trace.marked(input, CHANNELS_LAST)


CASTS = {"double": "float64", "float": "float32", "half": "float16", "bfloat16": "bfloat16", "long": "int64"}
CASTS |= {"int": "int32", "short": "int16", "char": "int8", "byte": "uint8", "bool": "bool"}


def _register_casts() -> None:
    for name, dtype in CASTS.items():

        def convert(trace: Trace, input: Node, *, memory_format: Any = None, dtype: str = dtype) -> Node:
            return ordered(trace, trace.cast(input, dtype), memory_format)

        row(name, itself=True)(convert)


_register_casts()


@row("to", itself=True)
def to(
    trace: Trace,
    input: Node,
    *target: Any,
    device: Any = None,
    dtype: torch.dtype | None = None,
    other: Node | None = None,
    copy: bool = False,
    memory_format: Any = None,
) -> Node:
    """Converts the dtype. A device other than that of the inputs is an error.

    Args:
        target: ``(dtype, ...)``, ``(device, dtype, ...)`` or ``(other, ...)``, then ``non_blocking`` and ``copy``.
    """
    for value in (*target, other, device, dtype):
        if isinstance(value, Node):
            dtype = DTYPES[value.dtype]
        elif isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, (torch.device, str, int)) and not isinstance(value, bool):
            wanted = torch.device(value)
            if wanted.type != trace.device.type or wanted.index not in (None, trace.device.index):
                raise UnsupportedError(
                    f"moving a tensor from {trace.device} to {wanted} is not a kernel's work; move arguments before "
                    "the call, and results after it"
                )
    flags = [value for value in target if isinstance(value, bool)]
    if copy or flags[1:2] == [True]:
        return ordered(trace, trace.copy(input, dtype_name(dtype) if dtype else input.dtype), memory_format)
    return ordered(trace, trace.cast(input, dtype_name(dtype)) if dtype else input, memory_format)


@row("type", itself=True)
def type_(trace: Trace, input: Node, dtype: torch.dtype | str | None = None, non_blocking: bool = False) -> Node:
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedError(
            "Tensor.type takes a torch.dtype here; write x.to(torch.float32), or x.dtype for its dtype"
        )
    return trace.cast(input, dtype_name(dtype))


row("type_as", itself=True)(lambda trace, input, other: trace.cast(input, other.dtype))
