"""Lists the derivatives of operations that have attributes (views, reductions, products, gathers, scans), and of values
whose gradients are stated.

``DERIVATIVES`` has a row for each kind of node (``ir/nodes.py``) that a gradient flows through and that is no operation
of ``ir/ops.py``; those have rows in ``rules.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from jitgen.errors import UnsupportedError
from jitgen.gradients.values import Functions, Value, fn
from jitgen.ir.convolutions import convolve
from jitgen.ir.custom_gradients import EXCLUDED_BASE, PRODUCT_OF_ALL, SHARED_EXTREMUM, TRANSPARENT
from jitgen.ir.equations import LENGTHS_OF_GROUPS, axes
from jitgen.ir.gathers import gathered_dims
from jitgen.ir.graph import Node
from jitgen.ir.nodes import (
    BITS,
    CAST,
    CAT,
    CONTRACT,
    CONVOLVE,
    CUSTOM_GRADIENT,
    GATHER,
    GROUPED,
    LAUNCH,
    OWN,
    REDUCE,
    SCAN,
    SCATTER,
    SORT,
    VIEW,
    Kind,
)
from jitgen.spec import DTYPES
from jitgen.trace.scatters import scattered


class Forward(Protocol):
    """Tells a backward what it must know of the forward."""

    def value(self, node: Node) -> Any:
        """Returns the value of a node: a tensor, or a number of a constant."""

    def shape(self, node: Node) -> tuple[Any, ...]:
        """Returns the sizes of a node."""

    def size(self, expr: Any) -> Any:
        """Returns the value of a symbolic integer."""

    def viewed(self, source: Any, attrs: tuple[Any, ...], shape: tuple[Any, ...]) -> Any:
        """Applies to a tensor a movement whose result has the symbolic ``shape``."""

    def symbolic(self, attrs: Any) -> Any:
        """Returns attributes in the symbols of the backward."""

    def has_other_sums(self, node: Node) -> bool:
        """Returns whether the value of a node that was asked for may differ from the forward's in its last bits."""

    def has_other_bits(self, node: Node) -> bool:
        """Returns whether the value of a node that was asked for may differ from the forward's in its last bits, and is
        the same in all kernels of the backward."""


Gradients = dict[int, Any]
Reads = Callable[[Node, Sequence[int]], Iterable[Node]]


@dataclass(frozen=True)
class Derivative:
    """Describes the derivative of a kind of node.

    Attributes:
        reads: takes a node and positions of operands; the nodes whose values the gradients of these operands read.
        gradients: takes a node, the gradient of its value, positions of operands, and the forward; the gradients of
            these operands by their positions.
    """

    reads: Reads
    gradients: Callable[[Node, Any, Sequence[int], Forward], Gradients]


DERIVATIVES: dict[Kind, Derivative] = {}


def _derivative(kind: Kind, reads: Reads = lambda node, positions: ()) -> Callable[[Any], Any]:
    """Makes a function the gradients of ``kind``; by default they read no values."""

    def register(gradients: Any) -> Any:
        DERIVATIVES[kind] = Derivative(reads, gradients)
        return gradients

    return register


# ------------------------------------------------------------------------------------------------------------- views


@_derivative(CAST)
def _cast(node: Node, g: Any, positions: Sequence[int], at: Forward) -> Gradients:
    return {0: g}


@_derivative(VIEW)
def _view(node: Node, g: Any, positions: Sequence[int], at: Forward) -> Gradients:
    kind, source = node.attrs.kind, node.inputs[0]
    if kind == "permute":
        return {0: g.permute([node.attrs.order.index(dim) for dim in range(len(source.shape))])}
    if kind == "unsqueeze":
        return {0: g.squeeze(node.attrs.dim)}
    if kind == "squeeze":
        return {0: g.unsqueeze(node.attrs.dim)}
    if kind == "reshape":
        return {0: g.reshape(at.shape(source))}
    if kind == "expand":
        dims = [dim for dim, size in enumerate(source.shape) if size == 1 and node.shape[dim] != 1]
        return {0: g.sum(dims, keepdim=True) if dims else g}
    if node.attrs in TRANSPARENT:
        return {0: g}
    return {0: _unsliced(node, g, at)}


def _unsliced(node: Node, g: Any, at: Forward) -> Any:
    """Computes the gradient of what was sliced: ``g`` where the slice is, and 0 elsewhere."""
    _, dim, start, step = node.attrs
    start, step, length = at.size(start), at.size(step), at.size(node.shape[dim])
    whole = at.size(node.inputs[0].shape[dim])
    if step < 0:
        g, start, step = g.flip(dim), start + step * (length - 1), -step
    if step == 1:
        behind = len(node.shape) - 1 - dim
        return fn.pad(g, (*(0, 0) * behind, start, whole - start - length))
    zeros = g.functions.zeros(at.shape(node.inputs[0]), dtype=g.dtype)
    index = g.functions.arange(length) * step + start
    return zeros.index_copy(dim, index, g)


@_derivative(CUSTOM_GRADIENT, lambda node, positions: [node.inputs[position + 1] for position in positions])
def _custom(node: Node, g: Any, positions: Sequence[int], at: Forward) -> Gradients:
    gradients_ = {}
    for position in positions:
        slope = at.value(node.inputs[position + 1])
        if isinstance(slope, Value):
            gradients_[position] = g * slope.to(g.dtype)
        else:
            gradients_[position] = g * slope if slope else fn.zeros_like(g)
        if node.inputs[position].shape != node.shape:
            gradients_[position] = gradients_[position].expand(at.shape(node.inputs[position]))
    return gradients_


@_derivative(CAT)
def _cat(node: Node, g: Any, positions: Sequence[int], at: Forward) -> Gradients:
    (dim,), begin, gradients_ = node.attrs, 0, {}
    for position, piece in enumerate(node.inputs):
        length = at.size(piece.shape[dim])
        if position in positions:
            gradients_[position] = g.narrow(dim, begin, length)
        begin = begin + length
    return gradients_


# -------------------------------------------------------------------------------------------------------- reductions


def _reduce_reads(node: Node, positions: Sequence[int]) -> Iterable[Node]:
    return {"sum": (), "prod": (node, node.inputs[0]), "max": (node, node.inputs[0]), "min": (node, node.inputs[0])}[
        node.attrs.kind
    ]


@_derivative(REDUCE, _reduce_reads)
def _reduce(node: Node, g: Any, positions: Sequence[int], at: Forward) -> Gradients:
    """Computes the gradient of a reduction. Equal extrema share it evenly, as those of ``torch.amax`` do; if the
    extremum is NaN, the whole row has one (``SHARED_EXTREMUM``: the NaNs share it). Where no element may be the
    extremum that the forward saved, since it has other bits, it is found again. Where products that are computed again
    may differ even between kernels of the backward, the first element that is one now has the gradient."""
    kind, dims = node.attrs
    if kind == "sum":
        return {0: g.expand(at.shape(node.inputs[0]))}
    a, out = at.value(node.inputs[0]).to(g.dtype), at.value(node).to(g.dtype)
    if kind == "prod":
        of_all = node.inputs[0].attrs == PRODUCT_OF_ALL
        return {0: _product(g, a, out, dims, of_all and not g.functions.trace.differentiable)}
    if at.has_other_sums(node.inputs[0]):
        selected = fn.where(_first_extremum(a, kind, dims), g, 0.0)
    else:
        if at.has_other_bits(node.inputs[0]):
            out = (fn.amax if kind == "max" else fn.amin)(a, dims, keepdim=True)
        chosen = (a == out) | (fn.isnan(a) & fn.isnan(out))
        selected = fn.where(chosen, g / chosen.sum(dims, keepdim=True), 0.0)
    return {0: selected if node.inputs[0].attrs == SHARED_EXTREMUM else fn.where(fn.isnan(out), out, selected)}


def _product(g: Any, a: Any, out: Any, dims: Sequence[int], has_zeros: bool) -> Any:
    """Computes ``g`` times the product of the other elements: the whole product divided by the element, unless one of
    the tensor is zero. Then it is that of the elements before and of those behind.

    Args:
        has_zeros: whether all gradients are 0 where two elements are, be others NaN: those of ``torch.prod(x)``, unless
            the backward is differentiated.
    """
    zero = a == 0
    order = [*(dim for dim in range(a.dim()) if dim not in dims), *dims]
    moved = a.permute(order)
    rows = moved.flatten(-len(dims))
    others = _before(rows) * _before(rows.flip(-1)).flip(-1)
    others = others.reshape(moved.shape).permute([order.index(dim) for dim in range(a.dim())])
    zeros = zero.sum()
    by_others = fn.where(zeros > 1, 0.0, g * others) if has_zeros else g * others
    return fn.where(zeros == 0, g * (out / fn.where(zero, 1.0, a)), by_others)


def _before(rows: Any) -> Any:
    """Computes the product of what is before each element of a row."""
    return fn.pad(rows.cumprod(-1), (1, 0), value=1.0).narrow(-1, 0, rows.shape[-1])


def _first_extremum(a: Any, kind: str, dims: Sequence[int]) -> Any:
    """Returns whether each element of ``a`` is the first of the greatest (``"max"``) or least ones along ``dims``."""
    others = [dim for dim in range(a.dim()) if dim not in dims]
    order = [*others, *dims]
    last = a.permute(order)
    rows = last.reshape(*last.shape[: len(others)], -1)
    index = (fn.argmax if kind == "max" else fn.argmin)(rows, -1, keepdim=True)
    first = a.functions.arange(rows.shape[-1]) == index
    return first.reshape(last.shape).permute([order.index(dim) for dim in range(a.dim())])


def _scan_reads(node: Node, positions: Sequence[int]) -> Iterable[Node]:
    return {"sum": (), "prod": (node, *node.inputs), "logsumexp": (node, *node.inputs)}.get(
        node.attrs.kind, node.inputs
    )


@_derivative(SCAN, _scan_reads)
def _scan(node: Node, g: Any, positions: Sequence[int], at: Forward) -> Gradients:
    """Gives each result's gradient of a running extremum to the element that the result is, which is located again."""
    kind, dim, reverse = node.attrs
    if kind == "sum":
        return {0: g.cumsum(dim) if reverse else g.flip(dim).cumsum(dim).flip(dim)}
    if kind == "prod" and node.shape[dim] == 1:
        return {0: g}
    if kind in ("prod", "logsumexp"):
        rule = _cumulative_product if kind == "prod" else _cumulative_logsumexp
        a, out = (at.value(node_).to(g.dtype) for node_ in (node.inputs[0], node))
        if reverse:
            return {0: rule(g.flip(dim), a.flip(dim), out.flip(dim), dim).flip(dim)}
        return {0: rule(g, a, out, dim)}
    a = at.value(node.inputs[0])
    extremum = fn.cummax if kind == "max" else fn.cummin
    chosen = extremum(a.flip(dim), dim).indices.flip(dim) if reverse else extremum(a, dim).indices
    if reverse:
        chosen = at.size(node.shape[dim]) - 1 - chosen
    return {0: fn.zeros_like(a, dtype=g.dtype).scatter_add(dim, chosen, g)}


def _cumulative_product(g: Any, a: Any, out: Any, dim: int) -> Any:
    """Computes, up to the first zero, the sum of ``g * out`` from an element on, divided by the element. The zero has a
    gradient by the products without it, and the elements behind it have none. Products behind a zero that are NaN do
    not count; others are zero, and count in a second derivative. There the gradients behind the first zero have a
    derivative too: they are its value times those of the products without it."""
    zero = a == 0
    zeros = zero.long().cumsum(dim)
    first = zero & (zeros == 1)

    def total(products: Any, is_behind: Any) -> Any:
        weighed = g * products
        weighed = fn.where(is_behind & fn.isnan(weighed), 0.0, weighed)
        return weighed.flip(dim).cumsum(dim).flip(dim)

    before = fn.where(zeros == 0, a, 1.0).cumprod(dim)
    behind = fn.where((zeros == 0) | first, 1.0, a).cumprod(dim)
    at_first = fn.where(first, before * total(behind, zeros - zero.long() > 1), 0.0)
    gradient = fn.where(zeros == 0, total(out, zeros > 0) / fn.where(zero, 1.0, a), at_first)
    if not a.functions.trace.differentiable:
        return gradient
    second = zero & (zeros == 2)
    later = total(fn.where(first, 1.0, a).cumprod(dim), zeros > 1) / fn.where(zero, 1.0, a)
    at_second = total(fn.where(first | second, 1.0, a).cumprod(dim), zeros > 2)
    value = fn.where(first, a, 0.0).sum(dim, keepdim=True)
    without = fn.where(second, at_second, fn.where(zeros == 1, later, 0.0))
    return fn.where((zeros == 0) | first, gradient, value * without)


def _cumulative_logsumexp(g: Any, a: Any, out: Any, dim: int) -> Any:
    """Computes the sum of ``g * exp(a - out)`` from an element on, of positive and of negative ``g``, by their
    logarithms."""

    def total(g: Any) -> Any:
        logarithm = fn.where(g > 0, fn.where(g > 0, g, 1.0).log(), torch.finfo(g.dtype).min)
        return (a + (logarithm - out).flip(dim).logcumsumexp(dim).flip(dim)).exp()

    return total(g) - total(-g)


@_derivative(SORT, lambda node, positions: node.inputs)
def _sort(node: Node, g: Any, positions: Sequence[int], at: Forward) -> Gradients:
    """Gives each rank's gradient to the element of that rank; the ranks are computed again."""
    _, dim, descending, start = node.attrs
    a = at.value(node.inputs[0])
    order = fn.argsort(a, dim=dim, descending=descending, stable=True)
    chosen = order.narrow(dim, at.size(start), at.size(node.shape[dim]))
    return {0: fn.zeros_like(a, dtype=g.dtype).scatter_add(dim, chosen, g)}


# ---------------------------------------------------------------------------------------------------------- products


def _contract_reads(node: Node, positions: Sequence[int]) -> Iterable[Node]:
    return [node.inputs[1 - position] for position in positions]


@_derivative(CONTRACT, _contract_reads)
def _contract(node: Node, g: Any, positions: Sequence[int], at: Forward) -> Gradients:
    """Computes the gradient of either operand as the product of ``g`` and the other one."""
    named = axes(node.attrs.equation)
    x, weight = (names for names in node.attrs.equation.partition("->")[0].split(","))
    result = "".join(named.result)
    dtype, gradients_ = DTYPES[node.inputs[0].dtype], {}
    if 0 in positions:
        gradients_[0] = fn.einsum(f"{result},{weight}->{x}", g.to(dtype), at.value(node.inputs[1]).to(dtype))
    if 1 in positions:
        value, g = at.value(node.inputs[0]), g.to(dtype)
        if named.batch or len(named.rows) < 2:
            gradients_[1] = fn.einsum(f"{result},{x}->{weight}", g, value)
        else:  # both as matrices, in the order of their memory
            gradients_[1] = fn.einsum("mn,mk->nk", g.flatten(0, -2), value.flatten(0, -2))
    return gradients_


@_derivative(GROUPED, lambda node, positions: [*_contract_reads(node, positions), node.inputs[2]])
def _grouped(node: Node, g: Any, positions: Sequence[int], at: Forward) -> Gradients:
    """Computes the gradients of grouped products as grouped products: of the weights of groups over ranges of rows."""
    dtype, offsets, gradients_ = DTYPES[node.inputs[0].dtype], at.value(node.inputs[2]), {}
    if node.attrs.by == "ids":
        chosen = at.value(node.inputs[1]).to(dtype)[offsets]
        return {0: fn.bmm(g.to(dtype).unsqueeze(1), chosen).squeeze(1)}
    g, of_lengths = g.to(dtype), node.attrs.equation == LENGTHS_OF_GROUPS
    if 0 in positions:
        weight = at.value(node.inputs[1]).to(dtype)
        grouped = fn._grouped_mm(weight.transpose(0, 1), g.transpose(1, 2), offsets) if of_lengths else None
        gradients_[0] = fn._grouped_mm(g, weight, offsets) if grouped is None else grouped.transpose(0, 1)
    if 1 in positions:
        x = at.value(node.inputs[0]).transpose(0, 1)
        if of_lengths:
            gradients_[1] = fn._grouped_mm(x, g, offsets).transpose(0, 1)
        else:
            gradients_[1] = fn._grouped_mm(g.transpose(0, 1), x.transpose(0, 1), offsets)
    return gradients_


@_derivative(CONVOLVE, _contract_reads)
def _convolve(node: Node, g: Any, positions: Sequence[int], at: Forward) -> Gradients:
    """Computes the gradient of either operand as a convolution of ``g`` and the other one (``ir/convolutions.py``)."""
    (images, filters), (stride, dilation, offset, spread, *_) = node.inputs, node.attrs
    dtype, gradients_ = DTYPES[images.dtype], {}
    g, spatial = g.to(dtype), range(3, len(node.shape))
    back = [-number for number in dilation], [-number for number in offset]
    called = g.functions.called
    if 0 in positions:
        exchanged = at.value(filters).to(dtype).transpose(1, 2)
        gradients_[0] = called(convolve, g, exchanged, spread, *back, stride, at.shape(images)[3:])
    if 1 in positions:
        channels, rows = at.value(images).transpose(0, 2), g.permute(1, 2, 0, *spatial)
        if all(number > 0 for number in dilation):
            products = called(convolve, channels, rows, dilation, stride, offset, spread, at.shape(filters)[3:])
            gradients_[1] = products.permute(1, 2, 0, *spatial)
        else:  # the other way around: the elements of a filter are pixels, which only go forward
            channels, rows = at.value(images).permute(1, 2, 0, *spatial), g.transpose(0, 2)
            products = called(convolve, rows, channels, back[0], spread, back[1], stride, at.shape(filters)[3:])
            gradients_[1] = products.transpose(0, 1)
    return gradients_


# ------------------------------------------------------------------------------------------------ gathers, scatters


@_derivative(GATHER, lambda node, positions: node.inputs[1:])
def _gather(node: Node, g: Any, positions: Sequence[int], at: Forward) -> Gradients:
    """Adds each element of ``g`` to the gradient of the source, where it was read from."""
    source, coordinates = node.inputs[0], node.attrs
    zeros = g.functions.zeros(at.shape(source), dtype=g.dtype)
    indices = [at.value(index) for index in node.inputs[1:]]
    rank = len(node.shape)
    behind = len(coordinates) - 1
    whole = coordinates == (-1, *range(rank - behind, rank)) and _same_behind(node.inputs[1], behind)
    if whole:  # slices, as an embedding reads them
        return {0: _added_slices(zeros, g, indices[0], behind, at.shape(node))}
    return {0: zeros.index_put(_everywhere(coordinates, indices, node.shape, at, g.functions), g, accumulate=True)}


def _same_behind(index: Node, behind: int) -> bool:
    """Returns whether ``index`` is the same along its last ``behind`` dimensions: broadcast there, or of size 1."""
    broadcast = index.kind is VIEW and index.attrs.kind == "expand"
    shape = index.inputs[0].shape if broadcast else index.shape
    return all(size == 1 for size in shape[len(shape) - behind :]) and len(shape) == len(index.shape)


def _added_slices(zeros: Any, g: Any, index: Any, behind: int, shape: Sequence[Any]) -> Any:
    """Adds slices of ``g`` to ``zeros`` at the rows that ``index`` chooses, which varies along all but the last
    ``behind`` dimensions."""
    for _ in range(behind):
        index = index.select(-1, 0)
    return zeros.index_add(0, index.reshape(-1), g.reshape((-1, *shape[len(shape) - behind :])))


def _everywhere(
    coordinates: Sequence[int], indices: Sequence[Any], shape: Sequence[Any], at: Forward, functions: Functions
) -> tuple[Any, ...]:
    """Returns, for each dimension of a tensor, the index at which an element of ``shape`` is read or written there."""
    dims, sizes, indices_ = gathered_dims(tuple(coordinates)), tuple(map(at.size, shape)), []
    for dim, coordinate in enumerate(coordinates):
        if coordinate < 0:
            indices_.append(indices[dims.index(dim)].expand(sizes))
        else:
            along = functions.arange(sizes[coordinate])
            indices_.append(
                along.reshape([-1 if other == coordinate else 1 for other in range(len(sizes))]).expand(sizes)
            )
    return tuple(indices_)


def _scatter_reads(node: Node, positions: Sequence[int]) -> Iterable[Node]:
    if node.attrs.kind == "prod":
        raise _refused("a scatter that multiplies", "one that adds, replaces or takes extrema", node)
    return (*node.inputs, _compared(node)) if node.attrs.kind in ("max", "min") else node.inputs[2:]


@_derivative(SCATTER, _scatter_reads)
def _scatter(node: Node, g: Any, positions: Sequence[int], at: Forward) -> Gradients:
    """Reads the gradient of the values where they were written. Of values that replace one element, each gets its
    gradient, as in torch; the base gets none there."""
    (kind, coordinates, movements), gradients_ = node.attrs, {}
    if kind in ("max", "min"):
        return _extremum_of_scattered(node, g, positions, at)
    indices = [at.value(index) for index in node.inputs[2:]]
    if 0 in positions:
        gradients_[0] = g
        if kind == "set":
            trace, zeros = g.functions.trace, g.functions.zeros(at.shape(node.inputs[1]), dtype=g.dtype)
            at_indices = [index.node for index in indices]
            gradients_[0] = g.functions.left(
                scattered(trace, g.node, zeros.node, at_indices, coordinates, "set", at.symbolic(movements))
            )
    if 1 in positions:
        index = _everywhere(coordinates, indices, node.inputs[1].shape, at, g.functions)
        gradients_[1] = _moved(g, movements, at)[index]
    return gradients_


def _extremum_of_scattered(node: Node, g: Any, positions: Sequence[int], at: Forward) -> Gradients:
    """Divides the gradient of each extremum evenly among the element of the base and the values that equal it, as torch
    does; those that NaN hides have NaN. The extrema are located again."""
    kind, coordinates, movements = node.attrs
    base, values, *indices = (at.value(operand) for operand in node.inputs)
    places = [index.node for index in indices]
    movements_ = at.symbolic(movements)

    def combined(base: Any, values: Any, kind: str) -> Any:
        return g.functions.left(
            scattered(g.functions.trace, base.node, values.node, places, coordinates, kind, movements_)
        )

    index = _everywhere(coordinates, indices, node.inputs[1].shape, at, g.functions)
    out = combined(base, values, kind)
    compared = at.value(_compared(node)).reshape(at.shape(node))
    of_base = (compared == out).to(g.dtype)
    of_values = (values == _moved(out, movements, at)[index]).to(g.dtype)
    share = g / combined(of_base, of_values, "sum")
    gradients_ = {0: of_base * share, 1: of_values * _moved(share, movements, at)[index]}
    return {position: gradients_[position] for position in positions}


def _compared(node: Node) -> Node:
    """Returns what the extrema of the scatter ``node`` are compared with: its base, with the elements that it excludes
    in it, which torch counts where they equal an extremum."""
    base = node.inputs[0]
    while base.kind is VIEW and base.attrs != EXCLUDED_BASE:
        base = base.inputs[0]
    if base.kind is not VIEW:
        return node.inputs[0]
    (base,) = base.inputs
    while base.kind is not SCATTER:
        (base,) = base.inputs
    return base.inputs[0]


def _moved(tensor: Any, movements: Sequence[Any], at: Forward) -> Any:
    for attrs, shape in movements:
        tensor = at.viewed(tensor, attrs, shape)
    return tensor


def _launch_reads(node: Node, positions: Sequence[int]) -> Iterable[Node]:
    raise _refused(f"{node.attrs.kernel.entry}, a kernel that you wrote,", "a torch.autograd.Function around it", node)


def _own_reads(node: Node, positions: Sequence[int]) -> Iterable[Node]:
    instead = "jitgen.device_function(..., derivative=...), which returns a slope for each argument"
    raise _refused(f"{node.attrs.name}, a function that you spelled,", instead, node)


@_derivative(BITS)
@_derivative(OWN, _own_reads)
@_derivative(LAUNCH, _launch_reads)
def _none(node: Node, g: Any, positions: Sequence[int], at: Forward) -> Gradients:
    raise AssertionError(f"a gradient of {node.kind}: what has none is refused before, and bits are integers")


def _refused(what: str, instead: str, node: Node) -> UnsupportedError:
    where = f"\n  {node.location}" if node.location else ""
    return UnsupportedError(
        f"gradients of {what} are not supported; those of {instead} are{where}\n  call the function under "
        "torch.no_grad(), or compute this step outside of it"
    )
