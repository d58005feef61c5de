"""Tells a traced function the strides of its tensors, for kernels that users wrote and launch themselves.

An argument has its own, updated or not: whether it is row-major is a guard, and so are the strides of one that is not.
What the function computes is row-major wherever a launch reads or writes it, be it a view, so its strides are products
of its sizes.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch

from jitgen.errors import UnsupportedError
from jitgen.ir import symbols
from jitgen.ir.graph import Node
from jitgen.trace.argument_strides import Strides, row_major, strides_of
from jitgen.trace.captured import derived
from jitgen.trace.movement import new_shape
from jitgen.trace.numbers import unwrap, wrap
from jitgen.trace.table import ROWS, Row, row
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
    return wrap(strides[operator.index(dim)], trace.guards)


@row("is_contiguous", proxies=True)
def is_contiguous(
    trace: Trace, input: TensorProxy, memory_format: torch.memory_format = torch.contiguous_format
) -> bool:
    if memory_format is not torch.contiguous_format:
        raise UnsupportedError("is_contiguous of a memory format; ask outside the decorated function")
    return strides_of_tensor(trace, input) == row_major(input.value.shape)


def as_strided(trace: Trace, input: TensorProxy, size: Any, stride: Any, storage_offset: Any = None) -> Node:
    """Reads elements of a row-major tensor at computed positions; a run of them is a view."""
    _require_row_major(trace, input)
    shape, steps = new_shape(trace, tuple(size)), tuple(unwrap(step) for step in stride)
    if len(shape) != len(steps):
        raise ValueError(f"as_strided takes a stride for each of {len(shape)} sizes, not {len(steps)}")
    first = 0 if storage_offset is None else symbols.sub(unwrap(storage_offset), _storage_offset(trace, input))
    extent: Any = symbols.add(first, 1)
    for length, step in zip(shape, steps, strict=True):
        extent = symbols.add(extent, symbols.mul(symbols.sub(length, 1), step))
    within = (symbols.compare("ge", first, 0), symbols.compare("le", extent, symbols.product(input.value.shape)))
    if not all(map(trace.guards.decide, within)):
        raise UnsupportedError(
            "as_strided of elements that are in the tensor's memory, but not among its own; take it of the whole tensor"
        )
    sizes, numbers = ([wrap(number, trace.guards) for number in numbers] for numbers in (shape, steps))
    begin, count = wrap(first, trace.guards), wrap(symbols.product(shape), trace.guards)
    if steps == row_major(shape):
        return trace.composed(lambda x: x.reshape(-1)[begin : begin + count].view(sizes), [input])

    def selected(x: torch.Tensor) -> torch.Tensor:
        position: Any = begin
        for dim, (length, step) in enumerate(zip(sizes, numbers, strict=True)):
            along = torch.arange(length, device=x.device) * step
            position = position + along.reshape([-1] + [1] * (len(sizes) - 1 - dim))
        return x.reshape(-1)[position]

    return trace.composed(selected, [input])


ROWS["as_strided"] = Row(as_strided, copied=True, proxies=True)


def _require_row_major(trace: Trace, tensor: TensorProxy) -> None:
    """Raises UnsupportedError where torch may have another order of elements in memory than that of their numbers."""
    if tensor.memory.input is not None:
        if strides_of_tensor(trace, tensor) != row_major(tensor.value.shape):
            raise UnsupportedError("as_strided of an argument that is not contiguous; call it on x.contiguous()")
    elif not (tensor.memory.is_row_major and tensor.value is tensor.memory.base):
        raise UnsupportedError(
            "as_strided of what the function computes, whose strides follow from those of the operands in torch; write "
            "it by slices, unfold or expand, or copy it to a tensor of torch.empty first"
        )


def _storage_offset(trace: Trace, tensor: TensorProxy) -> Any:
    """Returns where the first element of ``tensor`` is in its storage; for an argument this is a guard."""
    if tensor.input is None and tensor.memory.input is not None:
        raise UnsupportedError("as_strided of a view with a storage_offset; leave it out, or call it on the argument")
    if tensor.input is None:
        return 0
    source = trace.sources[tensor.input]
    trace.captures.guards.append(derived(f"{source.path}.storage_offset()", source, torch.Tensor.storage_offset))
    trace.captures.follows_arguments = True
    return source.value.storage_offset()
