"""Rows of the functions that move elements without computing: indexing, reshaping, splitting, joining.

Sizes stay symbolic. Where torch's rules depend on a size (a slice that may reach past the end, a split into as many
pieces as fit), the size at hand decides and the decision becomes a guard.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from jitgen.errors import UnsupportedError
from jitgen.ir import symbols
from jitgen.ir.graph import Node, Shape
from jitgen.trace.numbers import SymbolicNumber, unwrap
from jitgen.trace.table import prop, row
from jitgen.trace.typing import broadcast_shapes, expand, result_dtype

if TYPE_CHECKING:
    from jitgen.trace.tracer import Trace


def view(trace: Trace, node: Node, attrs: tuple[Any, ...], shape: Any) -> Node:
    return trace.make("view", (node,), node.dtype, tuple(shape), attrs)


def dimension(node: Node, dim: Any, extra: int = 0) -> int:
    """``dim`` as a non-negative int; ``extra`` for operations that add a dimension."""
    rank, number = len(node.shape) + extra, int(dim)
    if not -max(rank, 1) <= number < max(rank, 1):
        raise IndexError(f"dimension {number} is out of range for a tensor of {rank} dimensions")
    return number % max(rank, 1)


def sizes_of(trace: Trace, sizes: Any) -> tuple[Any, ...]:
    """User's sizes as ints and ``Expr``."""
    return tuple(unwrap(size) if isinstance(size, SymbolicNumber) else _plain(size) for size in sizes)


def _plain(size: Any) -> Any:
    return size if isinstance(size, symbols.Expr) else int(size)


def _listed(sizes: tuple[Any, ...]) -> Any:
    return sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (tuple, list, torch.Size)) else sizes


# ---------------------------------------------------------------------------------------------------------- reshape


@row("reshape", "view", view=True)
def reshape(trace: Trace, input: Node, *shape: Any) -> Node:
    if len(shape) == 1 and isinstance(shape[0], torch.dtype):
        raise UnsupportedError("view(dtype) reinterprets bits, which jitgen has no row for")
    return to_shape(trace, input, sizes_of(trace, _listed(shape)))


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
            if not trace.guards.decide(symbols.compare("eq", remainder, 0)):
                raise ValueError(message)
        shape = (*shape[: unknown[0]], size, *shape[unknown[0] + 1 :])
    elif symbols.product(shape) != count and not trace.guards.decide(
        symbols.compare("eq", symbols.product(shape), count)
    ):
        raise ValueError(message)
    return input if shape == input.shape else view(trace, input, ("reshape",), shape)


@row("view_as", "reshape_as", view=True)
def reshape_as(trace: Trace, input: Node, other: Node) -> Node:
    return to_shape(trace, input, other.shape)


@row("flatten", view=True)
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
    return flatten(trace, input)


@row("unflatten", view=True)
def unflatten(trace: Trace, input: Node, dim: int, sizes: Any) -> Node:
    dim = dimension(input, dim)
    parts = list(sizes_of(trace, sizes))
    if -1 in parts:
        known = symbols.product(size for size in parts if size != -1)
        parts[parts.index(-1)] = symbols.floordiv(input.shape[dim], known)
    return to_shape(trace, input, (*input.shape[:dim], *parts, *input.shape[dim + 1 :]))


@row("unsqueeze", view=True)
def unsqueeze(trace: Trace, input: Node, dim: int) -> Node:
    dim = dimension(input, dim, extra=1)
    return view(trace, input, ("unsqueeze", dim), (*input.shape[:dim], 1, *input.shape[dim:]))


@row("squeeze", view=True)
def squeeze(trace: Trace, input: Node, dim: Any = None) -> Node:
    dims = range(len(input.shape)) if dim is None else dim if isinstance(dim, (tuple, list)) else (dim,)
    chosen = {dimension(input, d) for d in dims} if input.shape else set()
    for place in sorted(chosen, reverse=True):
        size = input.shape[place]
        if trace.guards.decide(symbols.compare("eq", size, 1)):
            input = view(trace, input, ("squeeze", place), (*input.shape[:place], *input.shape[place + 1 :]))
    return input


# ---------------------------------------------------------------------------------------------------------- permute


def permuted(trace: Trace, input: Node, order: list[int]) -> Node:
    if order == list(range(len(order))):
        return input
    return view(trace, input, ("permute", tuple(order)), (input.shape[source] for source in order))


@row("permute", view=True)
def permute(trace: Trace, input: Node, *dims: Any) -> Node:
    order = [dimension(input, dim) for dim in _listed(dims)]
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
    sources = [dimension(input, d) for d in (source if isinstance(source, (tuple, list)) else (source,))]
    targets = [dimension(input, d) for d in (destination if isinstance(destination, (tuple, list)) else (destination,))]
    rest = iter(dim for dim in range(len(input.shape)) if dim not in sources)
    placed = dict(zip(targets, sources, strict=True))
    return permuted(trace, input, [placed[d] if d in placed else next(rest) for d in range(len(input.shape))])


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
    for dim in _listed(dims):
        place = dimension(input, dim)
        last = symbols.sub(input.shape[place], 1)
        input = view(trace, input, ("slice", place, last, -1), input.shape)
    return input


@row("roll")
def roll(trace: Trace, input: Node, shifts: Any, dims: Any = None) -> Node:
    if dims is None or dims == ():
        return to_shape(trace, roll(trace, flatten(trace, input), shifts, 0), input.shape)
    pairs = zip(
        shifts if isinstance(shifts, (tuple, list)) else (shifts,),
        dims if isinstance(dims, (tuple, list)) else (dims,),
        strict=True,
    )
    for shift, dim in pairs:
        place = dimension(input, dim)
        size = input.shape[place]
        cut = symbols.sub(size, symbols.mod(unwrap(shift), size)) if trace.guards.hint(size) else 0
        if trace.guards.decide(symbols.compare("ne", cut, size)):
            head = sliced(trace, input, place, 0, cut)
            tail = sliced(trace, input, place, cut, size)
            input = cat(trace, [tail, head], place)
    return input


# ----------------------------------------------------------------------------------------------------------- expand


@row("expand", "broadcast_to", view=True)
def expand_row(trace: Trace, input: Node, *sizes: Any, implicit: bool = False) -> Node:
    wanted = list(sizes_of(trace, _listed(sizes)))
    lead = len(wanted) - len(input.shape)
    if lead < 0:
        raise ValueError(f"expand: {len(wanted)} sizes for a tensor of {len(input.shape)} dimensions")
    for place, size in enumerate(input.shape, lead):
        if wanted[place] == -1:
            wanted[place] = size
    shape = broadcast_shapes(trace, input.shape, tuple(wanted))
    if tuple(map(trace.guards.hint, shape)) != tuple(map(trace.guards.hint, wanted)):
        raise ValueError(f"expand: {tuple(wanted)} does not broadcast from {input.shape}")
    if input.op in ("const", "scalar"):
        return view(trace, input, ("expand",), shape) if shape else input
    return expand(trace, input, shape)


@row("expand_as", view=True)
def expand_as(trace: Trace, input: Node, other: Node) -> Node:
    return expand_row(trace, input, *other.shape)


@row("broadcast_tensors", view=True)
def broadcast_tensors(trace: Trace, *tensors: Any) -> list[Node]:
    nodes = _listed(tensors)
    shape = broadcast_shapes(trace, *(node.shape for node in nodes))
    return [expand(trace, node, shape) for node in nodes]


@row("tile")
def tile(trace: Trace, input: Node, *dims: Any) -> Node:
    counts = list(_listed(dims))
    return repeat(trace, input, *[1] * (len(input.shape) - len(counts)), *counts)


@row("repeat")
def repeat(trace: Trace, input: Node, *sizes: Any) -> Node:
    """Each repeated dimension as (copies, size): an expanded dimension in front, then merged."""
    counts = list(sizes_of(trace, _listed(sizes)))
    if len(counts) < len(input.shape):
        raise ValueError(f"repeat: {len(counts)} numbers for a tensor of {len(input.shape)} dimensions")
    for _ in range(len(counts) - len(input.shape)):
        input = unsqueeze(trace, input, 0)
    for dim, count in enumerate(counts):
        if count != 1:
            size = input.shape[dim]
            apart = view(trace, input, ("unsqueeze", dim), (*input.shape[:dim], 1, *input.shape[dim:]))
            apart = view(trace, apart, ("expand",), (*input.shape[:dim], count, *input.shape[dim:]))
            merged = (*input.shape[:dim], symbols.mul(count, size), *input.shape[dim + 1 :])
            input = view(trace, apart, ("reshape",), merged)
    return input


@row("repeat_interleave")
def repeat_interleave(trace: Trace, input: Node, repeats: Any, dim: Any = None, *, output_size: Any = None) -> Node:
    if isinstance(repeats, Node):
        raise UnsupportedError("repeat_interleave by a tensor has a result whose size depends on data")
    if dim is None:
        input, dim = flatten(trace, input), 0
    place, count = dimension(input, dim), unwrap(repeats)
    size = input.shape[place]
    apart = unsqueeze(trace, input, place + 1)
    apart = view(trace, apart, ("expand",), (*input.shape[: place + 1], count, *input.shape[place + 1 :]))
    return view(trace, apart, ("reshape",), (*input.shape[:place], symbols.mul(size, count), *input.shape[place + 1 :]))


# --------------------------------------------------------------------------------------------------------- indexing


def _bound(trace: Trace, value: Any, size: Any, default: Any) -> Any:
    """A slice bound as Python has it: negative from the end, clamped to [0, size]."""
    if value is None:
        return default
    bound = unwrap(value)
    if isinstance(bound, Node):
        raise UnsupportedError("indexing by a tensor is not supported; slices, ints, None and ... are")
    if not trace.guards.decide(symbols.compare("ge", bound, 0)):
        bound = symbols.add(size, bound)
        return bound if trace.guards.decide(symbols.compare("ge", bound, 0)) else 0
    return bound if trace.guards.decide(symbols.compare("le", bound, size)) else size


def sliced(trace: Trace, input: Node, dim: int, start: Any, stop: Any, step: int = 1) -> Node:
    """Elements [start, stop) of ``dim``, bounds already within it."""
    length = symbols.sub(stop, start)
    if not trace.guards.decide(symbols.compare("ge", length, 0)):
        length = 0
    if step != 1:
        length = symbols.floordiv(symbols.add(length, step - 1), step)
    if step == 1 and start == 0 and length == input.shape[dim]:
        return input
    shape = (*input.shape[:dim], length, *input.shape[dim + 1 :])
    return view(trace, input, ("slice", dim, start, step), shape)


def selected(trace: Trace, input: Node, dim: int, index: Any) -> Node:
    size, place = input.shape[dim], unwrap(index)
    if not trace.guards.decide(symbols.compare("ge", place, 0)):
        place = symbols.add(size, place)
    inside = trace.guards.decide(symbols.compare("ge", place, 0))
    if not (inside and trace.guards.decide(symbols.compare("lt", place, size))):
        raise IndexError(f"index {index} is out of range for dimension {dim} of size {trace.guards.hint(size)}")
    shape = (*input.shape[:dim], 1, *input.shape[dim + 1 :])
    one = view(trace, input, ("slice", dim, place, 1), shape)
    return view(trace, one, ("squeeze", dim), (*input.shape[:dim], *input.shape[dim + 1 :]))


@row("getitem", "__getitem__", view=True)
def getitem(trace: Trace, input: Node, key: Any) -> Node:
    keys = list(key) if isinstance(key, tuple) else [key]
    for part in keys:
        if isinstance(part, (Node, list, bool)):
            kind = "a tensor" if isinstance(part, Node) else type(part).__name__
            raise UnsupportedError(f"indexing by {kind} is not supported; slices, ints, None and ... are")
    consumed = sum(part is not None and part is not Ellipsis for part in keys)
    if consumed > len(input.shape):
        raise IndexError(f"too many indices for a tensor of {len(input.shape)} dimensions")
    if Ellipsis not in [part for part in keys if part is None or part is Ellipsis]:
        keys.append(Ellipsis)
    dim = 0
    for part in keys:
        if part is Ellipsis:
            dim += len(input.shape) - dim - sum(p is not None for p in keys[keys.index(Ellipsis) + 1 :])
        elif part is None:
            input = unsqueeze(trace, input, dim)
            dim += 1
        elif isinstance(part, slice):
            step = 1 if part.step is None else int(part.step)
            if step < 1:
                raise ValueError("a slice's step must be positive, as in torch; use flip")
            size = input.shape[dim]
            start, stop = _bound(trace, part.start, size, 0), _bound(trace, part.stop, size, size)
            input = sliced(trace, input, dim, start, stop, step)
            dim += 1
        else:
            input = selected(trace, input, dim, part)
    return input


@row("narrow", view=True)
def narrow(trace: Trace, input: Node, dim: int, start: Any, length: Any) -> Node:
    dim = dimension(input, dim)
    size, first = input.shape[dim], unwrap(start)
    if not trace.guards.decide(symbols.compare("ge", first, 0)):
        first = symbols.add(size, first)
    stop = symbols.add(first, unwrap(length))
    if not trace.guards.decide(symbols.compare("le", stop, size)):
        raise IndexError("narrow reaches past the end")
    return sliced(trace, input, dim, first, stop)


@row("select", view=True)
def select(trace: Trace, input: Node, dim: int, index: Any) -> Node:
    return selected(trace, input, dimension(input, dim), index)


@row("unbind", view=True)
def unbind(trace: Trace, input: Node, dim: int = 0) -> tuple[Node, ...]:
    if not input.shape:
        raise TypeError("iteration over a 0-d tensor")
    dim = dimension(input, dim)
    return tuple(selected(trace, input, dim, index) for index in range(trace.guards.value(input.shape[dim])))


# ------------------------------------------------------------------------------------------------ splitting, joining


@row("chunk", view=True)
def chunk(trace: Trace, input: Node, chunks: Any, dim: int = 0) -> tuple[Node, ...]:
    """As torch: pieces of ceil(size / chunks), so possibly fewer than asked for."""
    dim, wanted = dimension(input, dim), int(chunks)
    size = input.shape[dim]
    if trace.guards.decide(symbols.compare("eq", symbols.mod(size, wanted), 0)):
        each = symbols.floordiv(size, wanted)
        return _pieces(trace, input, dim, [each] * wanted)
    return split(trace, input, -(-trace.guards.value(size) // wanted), dim)


@row("split", "split_with_sizes", view=True)
def split(trace: Trace, input: Node, split_size_or_sections: Any, dim: int = 0) -> tuple[Node, ...]:
    dim = dimension(input, dim)
    size, sections = input.shape[dim], split_size_or_sections
    if isinstance(sections, (tuple, list)):
        sizes = list(sizes_of(trace, sections))
        total: Any = 0
        for part in sizes:
            total = symbols.add(total, part)
        if not trace.guards.decide(symbols.compare("eq", total, size)):
            raise ValueError(f"split sizes {sections} do not add up to {trace.guards.hint(size)}")
        return _pieces(trace, input, dim, sizes)
    each = int(sections)
    if each <= 0:
        raise ValueError("split expects a positive size")
    count = max(1, trace.guards.value(symbols.floordiv(symbols.add(size, each - 1), each)))
    last = symbols.sub(size, each * (count - 1))
    return _pieces(trace, input, dim, [each] * (count - 1) + [last])


def _pieces(trace: Trace, input: Node, dim: int, sizes: list[Any]) -> tuple[Node, ...]:
    pieces: list[Node] = []
    start: symbols.Scalar = 0
    for size in sizes:
        shape = (*input.shape[:dim], size, *input.shape[dim + 1 :])
        whole = start == 0 and size == input.shape[dim]
        pieces.append(input if whole else view(trace, input, ("slice", dim, start, 1), shape))
        start = symbols.add(start, size)
    return tuple(pieces)


@row("cat", "concat", "concatenate")
def cat(trace: Trace, tensors: Any, dim: int = 0, **keywords: Any) -> Node:
    dim = keywords.get("axis", dim)
    nodes = [node for node in tensors if len(tensors) == 1 or not _is_legacy_empty(trace, node)]
    if not nodes:
        raise ValueError("cat expects at least one tensor")
    place = dimension(nodes[0], dim)
    dtype = result_dtype(*nodes)
    total: Any = 0
    for node in nodes:
        if len(node.shape) != len(nodes[0].shape) or not node.shape:
            raise ValueError("cat: tensors must have the same number of dimensions, at least one")
        for other in range(len(node.shape)):
            if other != place and not trace.guards.decide(
                symbols.compare("eq", node.shape[other], nodes[0].shape[other])
            ):
                raise ValueError(f"cat: sizes differ in dimension {other}")
        total = symbols.add(total, node.shape[place])
    shape = (*nodes[0].shape[:place], total, *nodes[0].shape[place + 1 :])
    # Sizes a guard holds equal may differ in form; every part takes the form of the result.
    parts = [
        expand(trace, trace.cast(node, dtype), (*shape[:place], node.shape[place], *shape[place + 1 :]))
        for node in nodes
    ]
    return parts[0] if len(parts) == 1 else trace.make("cat", parts, dtype, shape, (place,))


def _is_legacy_empty(trace: Trace, node: Node) -> bool:
    """torch skips tensors of shape (0,) in cat, whatever the others' shapes."""
    return len(node.shape) == 1 and trace.guards.hint(node.shape[0]) == 0 and trace.guards.value(node.shape[0]) == 0


@row("stack")
def stack(trace: Trace, tensors: Any, dim: int = 0) -> Node:
    place = dimension(tensors[0], dim, extra=1)
    return cat(trace, [unsqueeze(trace, node, place) for node in tensors], place)


@row("hstack")
def hstack(trace: Trace, tensors: Any) -> Node:
    nodes = [node if node.shape else unsqueeze(trace, node, 0) for node in tensors]
    return cat(trace, nodes, 0 if len(nodes[0].shape) == 1 else 1)


@row("vstack", "row_stack")
def vstack(trace: Trace, tensors: Any) -> Node:
    nodes = [node if node.shape else unsqueeze(trace, node, 0) for node in tensors]
    return cat(trace, [unsqueeze(trace, node, 0) if len(node.shape) == 1 else node for node in nodes], 0)


@row("pad")
def pad(trace: Trace, input: Node, pad: Any, mode: str = "constant", value: Any = None) -> Node:
    """Constant padding, as concatenations."""
    from jitgen.trace.typing import operand

    if mode != "constant":
        raise UnsupportedError(f"pad with mode {mode!r} is not supported; 'constant' is")
    for number, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        dim = len(input.shape) - 1 - number
        if int(before) < 0 or int(after) < 0:
            raise UnsupportedError("negative padding is not supported; slice instead")
        parts = [input]
        for amount, at in ((int(before), 0), (int(after), len(parts))):
            if amount:
                shape: Shape = (*input.shape[:dim], amount, *input.shape[dim + 1 :])
                fill = view(trace, operand(trace, 0 if value is None else value, input.dtype), ("expand",), shape)
                parts.insert(at if at == 0 else len(parts), fill)
        input = cat(trace, parts, dim) if len(parts) > 1 else input
    return input
