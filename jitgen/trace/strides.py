"""Tells a traced function the strides of its tensors, for kernels that users wrote and launch themselves.

An argument has its own, updated or not: whether it is row-major is a guard, and so are the strides of one that is not.
What the function computes is row-major wherever a launch reads or writes it, be it a view, so its strides are products
of its sizes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from jitgen.errors import UnsupportedError
from jitgen.trace.argument_strides import Strides, row_major, strides_of
from jitgen.trace.numbers import wrap
from jitgen.trace.table import row
from jitgen.trace.updates import before_updates

if TYPE_CHECKING:
    from jitgen.trace.proxy import TensorProxy
    from jitgen.trace.tracer import Trace


def strides_of_tensor(trace: Trace, proxy: TensorProxy) -> Strides:
    """Returns the strides of ``proxy``: what an update has made of an argument lies where the argument does."""
    return strides_of(trace, before_updates(trace, proxy))


@row("stride", proxies=True)
def stride(trace: Trace, input: TensorProxy, dim: int | None = None) -> Any:
    strides = trace.strides_read[input.memory, input.value] = strides_of_tensor(trace, input)
    if dim is None:
        return tuple(wrap(number, trace.guards) for number in strides)
    return wrap(strides[int(dim)], trace.guards)


@row("is_contiguous", proxies=True)
def is_contiguous(
    trace: Trace, input: TensorProxy, memory_format: torch.memory_format = torch.contiguous_format
) -> bool:
    if memory_format is not torch.contiguous_format:
        raise UnsupportedError("is_contiguous of a memory format; ask outside the decorated function")
    return strides_of_tensor(trace, input) == row_major(input.value.shape)
