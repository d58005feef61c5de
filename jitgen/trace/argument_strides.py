"""Computes the strides of arguments and of their views, with a guard on what is read of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from jitgen.errors import UnsupportedError
from jitgen.ir import symbols
from jitgen.ir.graph import Node, Shape
from jitgen.ir.nodes import INPUT
from jitgen.ir.symbols import Size
from jitgen.trace.captured import OfLayout

if TYPE_CHECKING:
    from jitgen.trace.tracer import Trace

Strides = tuple[Size, ...]


def row_major(shape: Shape) -> Strides:
    """Returns the strides of a row-major tensor of ``shape``."""
    return tuple(symbols.product(shape[dim + 1 :]) for dim in range(len(shape)))


def is_row_major(tensor: torch.Tensor) -> bool:
    """Returns whether the strides of ``tensor`` are exactly those of a row-major one; torch does not ask for those
    along a dimension of one element."""
    step = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if stride != step:
            return False
        step *= max(size, 1)
    return True


def is_contiguous(trace: Trace, node: Node) -> bool:
    """Returns whether torch would call ``node``, an argument or a view of one, contiguous; a guard says so."""
    of_dims = zip(node.shape, strides_of(trace, node), row_major(node.shape), strict=True)
    return all(size == 1 or trace.guards.equal(own, due) for size, own, due in of_dims)


def strides_of(trace: Trace, node: Node) -> Strides:
    """Returns the strides of ``node``: of an argument, or a view of one, as they are, else row-major ones.

    Raises:
        UnsupportedError: it is a reshape of an argument that is not row-major.
    """
    if node.under_views.kind is not INPUT:
        return row_major(node.shape)
    if node.kind is INPUT:
        return _of_argument(trace, node)
    source, attrs = node.inputs[0], node.attrs
    strides = strides_of(trace, source)
    if attrs.kind == "permute":
        return tuple(strides[dim] for dim in attrs.order)
    if attrs.kind == "slice":
        return tuple(symbols.mul(s, attrs.step) if dim == attrs.dim else s for dim, s in enumerate(strides))  # type: ignore[misc]
    if attrs.kind == "unsqueeze":
        dim = attrs.dim
        own: Any = 1 if dim == len(strides) else symbols.mul(source.shape[dim], strides[dim])
        return (*strides[:dim], own, *strides[dim:])
    if attrs.kind == "squeeze":
        return (*strides[: attrs.dim], *strides[attrs.dim + 1 :])
    if attrs.kind == "expand":
        added = len(node.shape) - len(source.shape)
        of_source = zip(source.shape, node.shape[added:], strides, strict=True)
        return (*(0,) * added, *(s if before == after else 0 for before, after, s in of_source))
    if attrs.kind == "reshape" and strides != row_major(source.shape):
        raise UnsupportedError("the strides of a reshape of what is not row-major; call contiguous() first")
    return row_major(node.shape) if attrs.kind == "reshape" else strides


def _of_argument(trace: Trace, node: Node) -> Strides:
    source = trace.sources[node.attrs.number]
    told = is_row_major(source.value)
    strides = row_major(node.shape) if told else tuple(source.value.stride())
    if not any(guard.path == f"{source.path}.stride()" for guard in trace.captures.guards):

        def read() -> Any:
            tensor = source.read()
            return is_row_major(tensor) or tuple(tensor.stride())

        trace.captures.guards.append(OfLayout(f"{source.path}.stride()", read, told or tuple(source.value.stride())))
    return strides
