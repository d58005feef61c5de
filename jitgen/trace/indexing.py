"""Defines the rows of functions that divide and join tensors: indexing, ``chunk``, ``split``, ``cat``, ``stack``,
``pad``.

Whether an index or bound is in range, and into how many pieces a tensor is divided, is decided by the sizes of the call
that is traced, and becomes a guard.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jitgen.errors import UnsupportedError
from jitgen.ir import symbols
from jitgen.ir.graph import Node, Shape
from jitgen.ir.nodes import CONST, GATHER, VIEW
from jitgen.trace import gathers
from jitgen.trace.contents import is_numpy
from jitgen.trace.gathers import INDEX_DTYPES, MASKED, along, at_least_1d, indexed, require_index
from jitgen.trace.groups import is_of_some, without_swaps
from jitgen.trace.movement import dimension, flatten, narrowed, sizes_of, squeezed, to_shape, unsqueeze, view
from jitgen.trace.numbers import SymbolicNumber, unwrap
from jitgen.trace.padding import MODES, padded
from jitgen.trace.selection import where
from jitgen.trace.table import row
from jitgen.trace.typing import compare, element, expand, filled, is_constant, operand, result_dtype

if TYPE_CHECKING:
    from jitgen.trace.tracer import Trace


def _bound(trace: Trace, value: Any, size: Any, default: Any) -> Any:
    """Returns a slice bound by Python's rules: a negative one counts from the end, and it is clamped to [0, size]."""
    if value is None:
        return default
    bound = _index(value)
    if not trace.guards.at_least(bound, 0):
        bound = symbols.add(size, bound)
        return bound if trace.guards.at_least(bound, 0) else 0
    return bound if trace.guards.decide(symbols.compare("le", bound, size)) else size


def _index(value: Any) -> Any:
    """Returns a number as an index."""
    index = unwrap(value)
    if isinstance(index, Node):
        raise UnsupportedError("indexing by a tensor is not supported; slices, ints, None and ... are")
    if symbols.kind_of(index) not in ("int", "bool"):
        raise TypeError(f"an index is an int, a slice, None or ..., not {value!r}")
    return index


def sliced(trace: Trace, input: Node, dim: int, start: Any, stop: Any, step: int = 1) -> Node:
    """Slices elements [start, stop) along ``dim``; both bounds are within [0, size]."""
    length = symbols.sub(stop, start)
    if not trace.guards.at_least(length, 0):
        length = 0
    if step != 1:
        length = symbols.floordiv(symbols.add(length, step - 1), step)
    if step == 1 and start == 0 and length == input.shape[dim]:
        return input
    return narrowed(trace, input, dim, start, length, step)


def selected(trace: Trace, input: Node, dim: int, index: Any) -> Node:
    """Selects the element ``index`` along ``dim``, without that dimension; a negative index counts from the end."""
    size, start = input.shape[dim], _index(index)
    if not trace.guards.at_least(start, 0):
        start = symbols.add(size, start)
    inside = trace.guards.at_least(start, 0)
    if not (inside and trace.guards.decide(symbols.compare("lt", start, size))):
        raise IndexError(f"index {index} is out of range for dimension {dim} of size {trace.guards.hint(size)}")
    return squeezed(trace, narrowed(trace, input, dim, start, 1), dim)


_OF_WEIGHT = (
    "rows of a quantised weight by a tensor of indices, or matrices of those that ids have chosen; use "
    "F.embedding(ids, w) for rows, and one tensor of integers for matrices, w[ids]"
)
MOST_NUMBERS = 64
"""The most numbers of a list that becomes a tensor inside a function; a kernel selects among them."""


def listed_numbers(data: Any) -> tuple[list[Any], tuple[int, ...]]:
    """Flattens nested lists of numbers; returns the numbers and the shape that torch makes of them."""
    if not isinstance(data, (list, tuple)):
        if not isinstance(data, (bool, int, float, SymbolicNumber)):
            raise UnsupportedError(f"torch.tensor of a {type(data).__name__}; torch.stack makes a tensor of tensors")
        return [data], ()
    pieces = [listed_numbers(item) for item in data]
    if len({shape for _, shape in pieces}) > 1:
        raise ValueError("the lists of torch.tensor must have equal lengths")
    numbers = [value for values, _ in pieces for value in values]
    if len(numbers) > MOST_NUMBERS:
        raise UnsupportedError(
            f"more than {MOST_NUMBERS} numbers in a list inside a decorated function; make a tensor of it outside and "
            "close over it"
        )
    return numbers, (len(data), *(pieces[0][1] if pieces else ()))


@dataclass(frozen=True)
class Listed:
    """Represents an index that is a list of numbers.

    Attributes:
        numbers: in nested lists.
        size: of the dimension, which a list of bools must have; None for a list of integers.
    """

    numbers: Any
    size: int | None = None

    def index(self, trace: Trace, size: Any) -> Node:
        """Makes a tensor of indices along a dimension of ``size`` from the list."""
        if self.size is not None and not trace.guards.equal(size, self.size):
            raise IndexError(f"a list of {self.size} bools indexes a dimension of size {trace.guards.hint(size)}")
        numbers, shape = listed_numbers(self.numbers)
        if not all(symbols.kind_of(unwrap(number)) == "int" for number in numbers):
            raise IndexError("the numbers of a list that is an index are integers")
        ones = [filled(trace, operand(trace, number, "int64"), (1,)) for number in numbers]
        return to_shape(trace, cat(trace, ones), shape) if ones else filled(trace, operand(trace, 0, "int64"), shape)


def refuse_nested(key: Any) -> None:
    """Raises UnsupportedError for a nested list as the whole index, whose meaning depends on torch's release."""
    if isinstance(key, list) and any(isinstance(item, (list, tuple)) for item in key):
        raise UnsupportedError(
            "a nested list as an index is a tuple of lists in some releases of torch, and a tensor in others; write "
            "x[tuple(index)] for the one, x[torch.tensor(index)] for the other"
        )


def _listed_key(item: Any) -> list[Any]:
    """Returns an index in the form that the rows read: a list of integers as ``Listed``, a list of bools as the
    positions of True, and any other index as it is."""
    if is_numpy(item):
        item = item.tolist()
    if isinstance(item, range):
        item = list(item)
    if not isinstance(item, list):
        return [item]
    shape: list[int] = []
    inner: Any = item
    while isinstance(inner, list):
        shape.append(len(inner))
        inner = inner[0] if inner else 0
    if not isinstance(inner, bool):
        if any(isinstance(item_, (Node, slice)) or item_ is None or item_ is Ellipsis for item_ in item):
            raise UnsupportedError("an index that is a list of other indices than numbers; make it a tuple")
        return [Listed(item)]
    positions = [
        position
        for position in itertools.product(*map(range, shape))
        if functools.reduce(lambda value, index: value[index], position, item)
    ]
    return [Listed([position[dim] for position in positions], size) for dim, size in enumerate(shape)]


@row("getitem", "__getitem__", view=True)
def getitem(trace: Trace, input: Node, key: Any) -> Node:
    refuse_nested(key)
    if input.is_weight and len(input.shape) == 3:
        key = _key_of_matrices(trace, input, key)
        if (matrices := matrices_of_weight(trace, input, key)) is not None:
            return matrices
        if isinstance(key, tuple) and len(key) > 1 and type(key[0]) is int:
            return getitem(trace, getitem(trace, input, key[0]), key[1:])
    viewed, by_dim = viewed_by(trace, input, key)
    if input.is_weight and by_dim:
        raise UnsupportedError(_OF_WEIGHT)
    if any(isinstance(item, bool) for item in (key if isinstance(key, tuple) else (key,))):
        return trace.copy(viewed, viewed.dtype)  # a mask, to torch
    if not by_dim:
        return viewed
    result = indexed(trace, viewed, by_dim)
    if len(viewed.shape) == 3 and list(by_dim) == [0] and by_dim[0].shape and result.kind is GATHER:
        trace.chosen[id(result)] = result, viewed, by_dim[0]
    return result


def _is_whole(index: Any) -> bool:
    return index is Ellipsis or (isinstance(index, slice) and index.start is index.stop is index.step is None)


def _key_of_matrices(trace: Trace, weight: Node, key: Any) -> Any:
    """Returns ``key`` without what stands for whole rows and columns behind an index of matrices, with a tensor in
    place of a list of these, and with a number in place of a tensor of one that is known."""
    first, *others = key if isinstance(key, tuple) and key else (key,)
    if isinstance(first, Node) and first.kind is CONST and first.dtype in INDEX_DTYPES:  # torch.tensor(2)
        first = int(first.attrs.value)
        key = (first, *others)
    if first is not Ellipsis and all(map(_is_whole, others)):
        key = first
    items = _listed_key(key)
    if len(items) == 1 and isinstance(items[0], Listed) and weight.under_views.kind is not GATHER:
        index = items[0].index(trace, weight.shape[0])
        return index if len(index.shape) == 1 else key
    return key


def matrices_of_weight(trace: Trace, weight: Node, key: Any) -> Node | None:
    """Chooses one matrix of a quantised weight of three dimensions by a number, or one for each of a tensor of ids,
    which may have no dimensions; None by another key."""
    if type(key) is int:
        whole, swapped = without_swaps(weight)
        count, rows, columns = whole.shape
        if not -count <= key < count:  # type: ignore[operator]
            raise IndexError(f"index {key} is out of range for a weight of {count} matrices")
        start: Any = key % count  # type: ignore[operator]
        while whole.kind is VIEW and whole.attrs[:2] == ("slice", 0):  # of some of the matrices
            start, whole = symbols.add(whole.attrs[2], symbols.mul(start, whole.attrs[3])), whole.inputs[0]
        if symbols.product(whole.shape[:2]) != whole.under_views.shape[0]:
            raise UnsupportedError("a matrix of a quantised weight whose matrices are cut; cut the matrix: w[i][j:k]")
        start = symbols.mul(start, rows)
        matrix = view(trace, whole.under_views, ("slice", 0, start, 1), (rows, columns))
        return view(trace, matrix, ("permute", (1, 0)), (columns, rows)) if swapped else matrix
    is_ids = isinstance(key, Node) and not key.kind.is_number and key.dtype in INDEX_DTYPES
    if not is_ids or weight.under_views.kind is GATHER:
        return None
    if is_of_some(weight):
        raise UnsupportedError("ids of some matrices of a quantised weight, w[i:j][ids]; choose of all, w[ids + i]")
    shape, rank = (*key.shape, *weight.shape[1:]), len(key.shape)
    ids = trace.cast(key, "int64")
    if rank == 1:
        ids = along(trace, ids, 0, 3)
    else:
        ids = view(trace, ids, ("reshape",), (*key.shape, 1, 1))
    index = expand(trace, ids, shape)
    result = trace.make("gather", (weight, index), weight.dtype, shape, (-1, rank, rank + 1))
    trace.chosen[id(result)] = result, weight, key
    return result


@row("index_select", weights=True)
def index_select(trace: Trace, input: Node, dim: int, index: Node) -> Node:
    if not input.is_weight or index.is_weight:
        return gathers.index_select(trace, input, dim, index)
    require_index(index)
    index = at_least_1d(trace, index)
    if len(input.shape) == 3 and dimension(input, dim) == 0 and len(index.shape) == 1:
        below = compare(trace, "lt", index, 0)  # is no number from the end, as one of w[ids] is
        ids = where(trace, below, trace.builder.scalar(input.shape[0], index.dtype), index)
        if (matrices := matrices_of_weight(trace, input, ids)) is not None:
            return matrices
    raise UnsupportedError(_OF_WEIGHT)


def viewed_by(trace: Trace, input: Node, key: Any) -> tuple[Node, dict[int, Node]]:
    """Views ``input`` by the slices, ints and None of ``key``; returns also its integer tensors by the dimensions of
    the view."""
    keys = [index for item in (key if isinstance(key, tuple) else (key,)) for index in _listed_key(item)]
    if any(isinstance(item, bool) for item in keys) and any(isinstance(item, (Node, Listed)) for item in keys):
        raise UnsupportedError("an index True or False beside tensors and lists; use unsqueeze")
    for item in keys:
        if isinstance(item, Node) and item.dtype in ("bool", "uint8"):
            raise UnsupportedError(MASKED)
        if isinstance(item, Node):
            require_index(item)
    added = [item is None or isinstance(item, bool) for item in keys]
    consumed = sum(not adds and item is not Ellipsis for item, adds in zip(keys, added, strict=True))
    if consumed > len(input.shape):
        raise IndexError(f"too many indices for a tensor of {len(input.shape)} dimensions")
    if not any(item is Ellipsis for item in keys):
        keys.append(Ellipsis)
        added.append(False)
    dim = 0
    by_dim: dict[int, Node] = {}
    for number, item in enumerate(keys):
        if item is Ellipsis:
            dim += len(input.shape) - dim - sum(not adds for adds in added[number + 1 :])
        elif isinstance(item, Node):
            by_dim[dim] = item
            dim += 1
        elif isinstance(item, Listed):
            by_dim[dim] = item.index(trace, input.shape[dim])
            dim += 1
        elif item is None or isinstance(item, bool):
            input = unsqueeze(trace, input, dim)
            input = input if item is not False else sliced(trace, input, dim, 0, 0)
            dim += 1
        elif isinstance(item, slice):
            step = 1 if item.step is None else int(item.step)
            if step < 1:
                raise ValueError("a slice's step must be positive, as in torch; use flip")
            size = input.shape[dim]
            start, stop = _bound(trace, item.start, size, 0), _bound(trace, item.stop, size, size)
            input = sliced(trace, input, dim, start, stop, step)
            dim += 1
        else:
            input = selected(trace, input, dim, item)
    return input, by_dim


@row("narrow", view=True)
def narrow(trace: Trace, input: Node, dim: int, start: Any, length: Any) -> Node:
    dim = dimension(input, dim)
    size, first = input.shape[dim], unwrap(start)
    if isinstance(first, Node):
        raise UnsupportedError("narrow by a tensor is not supported; a start that is a number is")
    if not trace.guards.at_least(first, 0):
        first = symbols.add(size, first)
        if not trace.guards.at_least(first, 0):
            raise IndexError("narrow starts before the first element")
    if not trace.guards.at_least(unwrap(length), 0):
        raise ValueError("narrow to a negative length")
    stop = symbols.add(first, unwrap(length))
    if not trace.guards.decide(symbols.compare("le", stop, size)):
        raise IndexError("narrow reaches past the end")
    return sliced(trace, input, dim, first, stop)


@row("select", view=True)
def select(trace: Trace, input: Node, dim: int, index: Any) -> Node:
    dim = dimension(input, dim)
    if input.is_weight and len(input.shape) == 3 and dim == 0 and type(index) is int:
        return getitem(trace, input, index)
    return selected(trace, input, dim, index)


@row("unbind", view=True)
def unbind(trace: Trace, input: Node, dim: int = 0) -> tuple[Node, ...]:
    if not input.shape:
        raise TypeError("iteration over a 0-d tensor")
    dim = dimension(input, dim)
    return tuple(select(trace, input, dim, index) for index in range(trace.guards.value(input.shape[dim])))


# ------------------------------------------------------------------------------------------------ splitting, joining


@row("chunk", view=True)
def chunk(trace: Trace, input: Node, chunks: Any, dim: int = 0) -> tuple[Node, ...]:
    """Cuts pieces of ceil(size / chunks) elements, so possibly fewer than ``chunks``, as in torch."""
    dim, wanted = dimension(input, dim), int(chunks)
    if wanted <= 0:
        raise ValueError(f"chunk expects a positive number of chunks, not {wanted}")
    size = input.shape[dim]
    if trace.guards.equal(symbols.mod(size, wanted), 0):
        length = symbols.floordiv(size, wanted)
        return _pieces(trace, input, dim, [length] * wanted)
    return split(trace, input, -(-trace.guards.value(size) // wanted), dim)


@row("split", "split_with_sizes", view=True)
def split(trace: Trace, input: Node, split_size_or_sections: Any, dim: int = 0) -> tuple[Node, ...]:
    dim = dimension(input, dim)
    size, sections = input.shape[dim], split_size_or_sections
    if isinstance(sections, (tuple, list)):
        sizes = list(sizes_of(trace, sections))
        total = symbols.total(sizes)
        if not trace.guards.equal(total, size):
            raise ValueError(f"split sizes {sections} do not add up to {trace.guards.hint(size)}")
        return _pieces(trace, input, dim, sizes)
    length = int(sections)
    if length == 0 and trace.guards.equal(size, 0):
        return (input,)
    if length <= 0:
        raise ValueError("split expects a positive size")
    count = max(1, trace.guards.value(symbols.floordiv(symbols.add(size, length - 1), length)))
    last = symbols.sub(size, length * (count - 1))
    return _pieces(trace, input, dim, [length] * (count - 1) + [last])


def _pieces(trace: Trace, input: Node, dim: int, sizes: list[Any]) -> tuple[Node, ...]:
    pieces: list[Node] = []
    start: symbols.Scalar = 0
    for size in sizes:
        whole = start == 0 and size == input.shape[dim]
        pieces.append(input if whole else narrowed(trace, input, dim, start, size))
        start = symbols.add(start, size)
    return tuple(pieces)


@row("cat", "concat", "concatenate")
def cat(trace: Trace, tensors: Any, dim: int = 0) -> Node:
    if not tensors:
        raise ValueError("cat expects at least one tensor")
    nodes = [node for node in tensors if not _is_legacy_empty(trace, node)] or tensors[:1]
    joined = dimension(nodes[0], dim)
    dtype = result_dtype(*tensors)
    for node in nodes:
        if len(node.shape) != len(nodes[0].shape) or not node.shape:
            raise ValueError("cat: tensors must have the same number of dimensions, at least one")
        for other in range(len(node.shape)):
            if other != joined and not trace.guards.equal(node.shape[other], nodes[0].shape[other]):
                raise ValueError(f"cat: sizes differ in dimension {other}")
    total: Any = symbols.total(node.shape[joined] for node in nodes)
    shape = (*nodes[0].shape[:joined], total, *nodes[0].shape[joined + 1 :])
    # Sizes that a guard makes equal may be different expressions; every operand gets those of the result.
    operands = [
        expand(trace, trace.cast(node, dtype), (*shape[:joined], node.shape[joined], *shape[joined + 1 :]))
        for node in nodes
    ]
    whole = _rejoined(trace, operands, joined)
    return whole if whole is not None else trace.make("cat", operands, dtype, shape, (joined,))


def _rejoined(trace: Trace, pieces: list[Node], dim: int) -> Node | None:
    """Returns the tensor that ``pieces`` are consecutive slices of, or the slice of it that they are together, such as
    of ``torch.cat(x.chunk(4))``; None of other pieces."""
    if len(pieces) == 1:
        return pieces[0]
    if not all(piece.kind is VIEW and piece.attrs[:2] == ("slice", dim) and piece.attrs[3] == 1 for piece in pieces):
        return None
    source, start = pieces[0].inputs[0], pieces[0].attrs[2]
    end = start
    for piece in pieces:
        if piece.inputs[0] is not source or piece.attrs[2] != end:
            return None
        end = symbols.add(end, piece.shape[dim])
    if start == 0 and trace.guards.equal(end, source.shape[dim]):
        return source
    return narrowed(trace, source, dim, start, symbols.sub(end, start))


def _is_legacy_empty(trace: Trace, node: Node) -> bool:
    """Returns whether ``node`` has shape (0,): ``torch.cat`` skips such tensors, whatever the shapes of the others."""
    return len(node.shape) == 1 and trace.guards.hint(node.shape[0]) == 0 and trace.guards.value(node.shape[0]) == 0


@row("stack")
def stack(trace: Trace, tensors: Any, dim: int = 0) -> Node:
    added = dimension(tensors[0], dim, extra=1)
    return cat(trace, [unsqueeze(trace, node, added) for node in tensors], added)


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
    """Pads with a constant: ``input`` is concatenated with constant tensors; a negative amount is cut off."""
    if mode in MODES:
        # torch repeats what is left of the tensor, and reflects and replicates what it was.
        input, pad = _cut(trace, input, pad) if mode == "circular" else (input, pad)
        return padded(trace, input, pad, mode)
    if mode != "constant":
        raise ValueError(f"pad has no mode {mode!r}")
    # F.pad takes a float, so that -1 is refused for unsigned integers; of constant_pad_nd it is 255.
    value = 0 if value is None else float(value) if is_constant(value) else value
    return constant_pad_nd(trace, input, pad, value)


@row("constant_pad_nd")
def constant_pad_nd(trace: Trace, input: Node, pad: Any, value: Any = 0) -> Node:
    if len(pad) % 2 or len(pad) > 2 * len(input.shape):
        raise ValueError(f"{len(pad)} amounts of padding for a tensor of {len(input.shape)} dimensions")
    input, pad = _cut(trace, input, pad)
    for number, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        dim = len(input.shape) - 1 - number
        pieces = [input]
        for amount, is_front in ((before, True), (after, False)):
            if amount:
                shape: Shape = (*input.shape[:dim], amount, *input.shape[dim + 1 :])
                fill = filled(trace, element(trace, value, input.dtype), shape)
                pieces.insert(0 if is_front else len(pieces), fill)
        input = cat(trace, pieces, dim) if len(pieces) > 1 else input
    return input


def _cut(trace: Trace, input: Node, pad: Any) -> tuple[Node, list[int]]:
    """Cuts off the elements that negative amounts of padding remove; returns also the other amounts."""
    amounts = [int(amount) for amount in pad]
    for number, (before, after) in enumerate(zip(amounts[::2], amounts[1::2], strict=False)):
        if min(before, after) < 0:
            dim = len(input.shape) - 1 - number
            stop = symbols.sub(input.shape[dim], max(0, -after))
            if not trace.guards.at_least(stop, max(0, -before)):
                raise ValueError(f"padding by ({before}, {after}) cuts off more elements than there are")
            input = sliced(trace, input, dim, max(0, -before), stop)
    return input, [max(0, amount) for amount in amounts]


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
        rolled = dimension(input, dim)
        size = input.shape[rolled]
        boundary = symbols.sub(size, symbols.mod(unwrap(shift), size)) if trace.guards.hint(size) else 0
        if trace.guards.decide(symbols.compare("ne", boundary, size)):
            head = sliced(trace, input, rolled, 0, boundary)
            tail = sliced(trace, input, rolled, boundary, size)
            input = cat(trace, [tail, head], rolled)
    return input
