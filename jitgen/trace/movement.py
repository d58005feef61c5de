"""Defines the rows of functions that move elements without computing: reshaping, permuting, expanding, repeating.

Sizes stay symbolic. Where torch's rules depend on a size, the traced call's size decides, and the decision is a guard.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch

from jitgen.errors import UnsupportedError
from jitgen.ir import symbols
from jitgen.ir.attributes import CONTIGUOUS
from jitgen.ir.graph import Node
from jitgen.spec import dtype_name
from jitgen.trace.bits import reinterpreted
from jitgen.trace.numbers import unwrap
from jitgen.trace.table import prop, row
from jitgen.trace.typing import broadcast_shapes, filled

if TYPE_CHECKING:
    from jitgen.trace.tracer import Trace


def view(trace: Trace, node: Node, attrs: tuple[Any, ...], shape: Any) -> Node:
    return trace.make("view", (node,), node.dtype, tuple(shape), attrs)


def dimension(node: Node, dim: Any, extra: int = 0) -> int:
    """Returns ``dim`` as a non-negative int. ``extra`` is the number of dimensions that the operation adds."""
    rank, number = len(node.shape) + extra, operator.index(dim)
    if not -max(rank, 1) <= number < max(rank, 1):
        raise IndexError(f"dimension {number} is out of range for a tensor of {rank} dimensions")
    return number % max(rank, 1)


def dimensions(node: Node, dims: Any) -> list[int]:
    """Returns dimensions as non-negative ints, no two of which are the same."""
    chosen = [dimension(node, dim) for dim in (dims if isinstance(dims, (tuple, list)) else (dims,))]
    if len(set(chosen)) != len(chosen):
        raise ValueError(f"dimension {max(chosen, key=chosen.count)} appears more than once")
    return chosen


def new_shape(trace: Trace, sizes: Any) -> tuple[Any, ...]:
    """Returns sizes for a new tensor, none of which is negative."""
    shape = sizes_of(trace, sizes)
    for size in shape:
        if not trace.guards.at_least(size, 0):
            raise ValueError(f"a size must not be negative, but is {trace.guards.hint(size)}")
    return shape


def sizes_of(trace: Trace, sizes: Any) -> tuple[Any, ...]:
    """Returns sizes that the user passed, as ints and ``Expr``; a number that is negative, such as -1, is an int."""
    return tuple(_size(trace, unwrap(size)) for size in sizes)


def _size(trace: Trace, size: Any) -> Any:
    if not isinstance(size, symbols.Expr):
        return int(size)
    return size if trace.guards.at_least(size, 0) else trace.guards.value(size)


def listed(sizes: tuple[Any, ...]) -> Any:
    """Returns sizes that were given as one list or as several arguments."""
    return sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (tuple, list, torch.Size)) else sizes


# ---------------------------------------------------------------------------------------------------------- reshape

_UNSIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


@row("reshape", "view", view=True, copied=True)
def reshape(trace: Trace, input: Node, *shape: Any, dtype: torch.dtype | None = None) -> Node:
    if dtype is None and len(shape) == 1 and isinstance(shape[0], torch.dtype):
        dtype, shape = shape[0], ()
    if dtype is not None and not shape:
        if dtype in _UNSIGNED:
            raise UnsupportedError(f"kernels have no {dtype}; view({_UNSIGNED[dtype]}) has the same bits")
        return reinterpreted(trace, input, dtype_name(dtype))
    return to_shape(trace, input, sizes_of(trace, listed(shape)))


def to_shape(trace: Trace, input: Node, shape: tuple[Any, ...]) -> Node:
    count = symbols.product(input.shape)
    unknown = [dim for dim, size in enumerate(shape) if size == -1]
    here = tuple(map(trace.guards.hint, shape)), tuple(map(trace.guards.hint, input.shape))
    message = f"shape {here[0]} is invalid for a tensor of shape {here[1]}"
    if len(unknown) > 1:
        raise ValueError("only one size can be -1")
    if unknown:
        known = symbols.product(size for size in shape if size != -1)
        if not trace.guards.hint(known):
            raise ValueError(f"{message}: the size for -1 is ambiguous")
        size = symbols.floordiv(count, known)
        if symbols.mul(size, known) != count:
            remainder = symbols.mod(count, known)
            if not trace.guards.equal(remainder, 0):
                raise ValueError(message)
        shape = (*shape[: unknown[0]], size, *shape[unknown[0] + 1 :])
    elif symbols.product(shape) != count and not trace.guards.equal(symbols.product(shape), count):
        raise ValueError(message)
    return input if shape == input.shape else view(trace, input, ("reshape",), shape)


row("view_as", "reshape_as", view=True)(lambda trace, input, other: to_shape(trace, input, other.shape))


@row("flatten", itself=True)
def flatten(trace: Trace, input: Node, start_dim: int = 0, end_dim: int = -1) -> Node:
    if not input.shape:
        return view(trace, input, ("unsqueeze", 0), (1,))
    start, end = dimension(input, start_dim), dimension(input, end_dim)
    if start > end:
        raise ValueError("flatten: start_dim lies behind end_dim")
    merged = symbols.product(input.shape[start : end + 1])
    return to_shape(trace, input, (*input.shape[:start], merged, *input.shape[end + 1 :]))


@row("ravel", view=True)
def ravel(trace: Trace, input: Node) -> Node:
    """Flattens to a row-major vector: a copy if ``input`` is not row-major."""
    return trace.marked(flatten(trace, input), CONTIGUOUS)


@row("unflatten", view=True)
def unflatten(trace: Trace, input: Node, dim: int, sizes: Any) -> Node:
    dim = dimension(input, dim)
    factors = list(sizes_of(trace, sizes))
    if -1 in factors:
        known = symbols.product(size for size in factors if size != -1)
        factors[factors.index(-1)] = symbols.floordiv(input.shape[dim], known)
    return to_shape(trace, input, (*input.shape[:dim], *factors, *input.shape[dim + 1 :]))


@row("unsqueeze", view=True)
def unsqueeze(trace: Trace, input: Node, dim: int) -> Node:
    dim = dimension(input, dim, extra=1)
    return view(trace, input, ("unsqueeze", dim), (*input.shape[:dim], 1, *input.shape[dim:]))


def squeezed(trace: Trace, input: Node, dim: int) -> Node:
    """Removes dimension ``dim``, whose size is 1; a negative number counts from the end."""
    dim %= len(input.shape)
    return view(trace, input, ("squeeze", dim), (*input.shape[:dim], *input.shape[dim + 1 :]))


@row("squeeze", view=True)
def squeeze(trace: Trace, input: Node, dim: Any = None) -> Node:
    chosen = dimensions(input, tuple(range(len(input.shape))) if dim is None else dim)
    for removed in sorted(chosen, reverse=True) if input.shape else ():
        if trace.guards.equal(input.shape[removed], 1):
            input = squeezed(trace, input, removed)
    return input


def narrowed(trace: Trace, input: Node, dim: int, start: Any, length: Any, step: int = 1) -> Node:
    """Selects ``length`` elements along ``dim`` from ``start`` on, ``step`` apart; both lie within it."""
    shape = (*input.shape[:dim], length, *input.shape[dim + 1 :])
    return view(trace, input, ("slice", dim, start, step), shape)


# ---------------------------------------------------------------------------------------------------------- permute


def permuted(trace: Trace, input: Node, order: list[int]) -> Node:
    if order == list(range(len(order))):
        return input
    return view(trace, input, ("permute", tuple(order)), (input.shape[source] for source in order))


@row("permute", view=True)
def permute(trace: Trace, input: Node, *dims: Any) -> Node:
    order = [dimension(input, dim) for dim in listed(dims)]
    if sorted(order) != list(range(len(input.shape))):
        raise ValueError(f"permute: {tuple(order)} is not a permutation of {len(input.shape)} dimensions")
    return permuted(trace, input, order)


@row("transpose", "swapaxes", "swapdims", view=True)
def transpose(trace: Trace, input: Node, dim0: int, dim1: int) -> Node:
    order = list(range(len(input.shape)))
    if order:
        first, second = dimension(input, dim0), dimension(input, dim1)
        order[first], order[second] = order[second], order[first]
    return permuted(trace, input, order)


@row("movedim", "moveaxis", view=True)
def movedim(trace: Trace, input: Node, source: Any, destination: Any) -> Node:
    sources, targets = dimensions(input, source), dimensions(input, destination)
    rest = iter(dim for dim in range(len(input.shape)) if dim not in sources)
    moved = dict(zip(targets, sources, strict=True))
    return permuted(trace, input, [moved[d] if d in moved else next(rest) for d in range(len(input.shape))])


@row("t", view=True)
@prop("H")
def t(trace: Trace, input: Node) -> Node:
    if len(input.shape) > 2:
        raise ValueError(f"a transpose of {len(input.shape)} dimensions: use .mT")
    return reversed_dimensions(trace, input)


@prop("T")
def reversed_dimensions(trace: Trace, input: Node) -> Node:
    return permuted(trace, input, list(reversed(range(len(input.shape)))))


@row("adjoint", view=True)
@prop("mT", "mH")
def m_t(trace: Trace, input: Node) -> Node:
    return transpose(trace, input, -2, -1)


@row("flip")
def flip(trace: Trace, input: Node, *dims: Any) -> Node:
    flipped_dims = dimensions(input, listed(dims))
    for flipped in flipped_dims if input.shape else ():  # dimension 0 of a 0-d tensor is none
        last = symbols.sub(input.shape[flipped], 1)
        input = view(trace, input, ("slice", flipped, last, -1), input.shape)
    return input


# ----------------------------------------------------------------------------------------------------------- expand


@row("expand", "broadcast_to", view=True)
def expand_row(trace: Trace, input: Node, *sizes: Any, implicit: bool = False) -> Node:
    wanted = list(sizes_of(trace, listed(sizes)))
    lead = len(wanted) - len(input.shape)
    if lead < 0:
        raise ValueError(f"expand: {len(wanted)} sizes for a tensor of {len(input.shape)} dimensions")
    for position, size in enumerate(input.shape, lead):
        if wanted[position] == -1:
            wanted[position] = size
    new_shape(trace, wanted)
    shape = broadcast_shapes(trace, input.shape, tuple(wanted))
    if tuple(map(trace.guards.hint, shape)) != tuple(map(trace.guards.hint, wanted)):
        raise ValueError(f"expand: {tuple(wanted)} does not broadcast from {input.shape}")
    # Where guards make the sizes those of input, the view is input itself, which may be updated.
    repeats_nothing = lead == 0 and all(
        size == own or trace.guards.hint(size) == trace.guards.hint(own) != 1
        for size, own in zip(shape, input.shape, strict=True)
    )
    return input if repeats_nothing else filled(trace, input, shape)


row("expand_as", view=True)(lambda trace, input, other: expand_row(trace, input, *other.shape))


@row("broadcast_tensors", itself=True)
def broadcast_tensors(trace: Trace, *tensors: Any) -> tuple[Node, ...]:
    nodes = listed(tensors)
    shape = broadcast_shapes(trace, *(node.shape for node in nodes))
    return tuple(expand_row(trace, node, *shape) for node in nodes)


@row("tile")
def tile(trace: Trace, input: Node, *dims: Any) -> Node:
    counts = list(listed(dims))
    return repeat(trace, input, *[1] * (len(input.shape) - len(counts)), *counts)


@row("repeat")
def repeat(trace: Trace, input: Node, *sizes: Any) -> Node:
    """Puts a dimension of copies in front of every repeated one, and merges the two by a reshape."""
    counts = list(new_shape(trace, listed(sizes)))
    if len(counts) < len(input.shape):
        raise ValueError(f"repeat: {len(counts)} numbers for a tensor of {len(input.shape)} dimensions")
    for _ in range(len(counts) - len(input.shape)):
        input = unsqueeze(trace, input, 0)
    for dim, count in enumerate(counts):
        if count != 1:
            size = input.shape[dim]
            copies = unsqueeze(trace, input, dim)
            copies = view(trace, copies, ("expand",), (*input.shape[:dim], count, *input.shape[dim:]))
            merged = (*input.shape[:dim], symbols.mul(count, size), *input.shape[dim + 1 :])
            input = view(trace, copies, ("reshape",), merged)
    return input


@row("repeat_interleave")
def repeat_interleave(trace: Trace, input: Node, repeats: Any, dim: Any = None, *, output_size: Any = None) -> Node:
    if isinstance(repeats, Node):
        raise UnsupportedError(
            "repeat_interleave by a tensor has a result whose size depends on data; pass a number, or call it outside"
        )
    if dim is None:
        input, dim = flatten(trace, input), 0
    dim, count = dimension(input, dim), unwrap(repeats)
    size = input.shape[dim]
    copies = unsqueeze(trace, input, dim + 1)
    copies = view(trace, copies, ("expand",), (*input.shape[: dim + 1], count, *input.shape[dim + 1 :]))
    return view(trace, copies, ("reshape",), (*input.shape[:dim], symbols.mul(size, count), *input.shape[dim + 1 :]))
