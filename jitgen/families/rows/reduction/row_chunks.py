"""Reduces a few very long rows, or columns, in two kernels: chunks of each row first, then the chunks' results.

Rows too few to keep a GPU busy are divided into chunks, each of which is reduced as a row of its own into a temporary.
What reads the temporary combines the chunks of a row, in an order that depends on the row's length alone, so that the
same call gives the same bits. Each chunk is read from memory once:

- For a sum of squared deviations from the mean, each chunk's deviations are taken from its own mean. The chunks are
  combined by adding what lies between the two means (Chan, Golub and LeVeque, "Updating formulae and a pairwise
  algorithm for computing sample variances", 1979).
- For a sum of exp(v - max v), each chunk's exponentials are taken from its own maximum. The chunks are combined by
  scaling each sum to the row's maximum (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018).
- For argmax and argmin, each chunk gives its extremum and the index of it.

Any other reduction that depends on another one (softmax's sum, for what is stored) is computed from the elements again:
a temporary for the elements would be as long as the rows.

The threads of a CPU share a row without any of this. Its rows are divided into chunks only where one reduction depends
on another one and nothing else reads the elements: then the second reduction of a chunk finds it in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jitgen.families.family import Partition
from jitgen.families.rows.reduction.claim import Materialize, are_columns, without_reductions
from jitgen.families.rows.reduction.inner_rows import inner_rows_first
from jitgen.families.rows.reduction.schedule import blocks_per_row
from jitgen.ir import symbols
from jitgen.ir.analysis import rewritten, unrounded
from jitgen.ir.graph import Node, Shape, kinds_of, topological
from jitgen.ir.nodes import CONST, INPUT, REDUCE
from jitgen.ir.symbols import Size
from jitgen.ir.views import Mover
from jitgen.spec import DTYPES

CHUNKS = 512
"""The most chunks of a row."""
CHUNK_UNIT = 8
"""Elements that the length of a chunk is a multiple of, so that chunks are as aligned as rows are; the last chunk is
shorter. Chunks of columns are as even as they can be."""
CHUNKED_ROW = 2**18
"""Elements from which on at most ``CHUNKED_ROWS`` rows are divided into chunks, whatever the kernel."""
CHUNKED_ROWS = 64
"""Rows up to which they are: a row would keep only one block busy, and a sum of so many terms in one sequence would
lose digits."""
SINGLE_BLOCK_ROW = 2**15
"""Elements from which on at most ``SINGLE_BLOCK_ROWS`` rows are divided where a row can have one block only, and at
most ``CHUNKED_ROWS`` rows where it can have a cluster but is read once anyway."""
SINGLE_BLOCK_ROWS = 48
"""Rows up to which chunks are better than one block for each row: softmax of 48 rows is a sixth faster in chunks, of 64
rows it is not (H200)."""
COLUMN_CHUNKS = 64
"""Chunks of a column."""
CHUNKED_COLUMN = 2**11
"""Elements of a column from which on it is divided into chunks, for each block that could share it."""
CHUNKED_COLUMNS = 2**13
"""Columns below which they are divided: a block takes as many columns as fill a line of the cache."""
CHUNKED_COLUMN_BYTES = 2**14
"""Bytes of one element of every column below which columns whose elements are needed again are divided: with a line for
each block, half of a GPU is idle. Wider matrices are left whole."""
CPU_CHUNKED_ROW = 2**20
"""Elements of a row from which on a CPU reads a chunk again faster than the whole row."""

_COMBINE = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum", "any": "bitwise_or", "all": "bitwise_and"}
_EXTREMUM = {"argmax": "max", "argmin": "min"}


def in_shorter_rows(values: Sequence[Node], partition: Partition) -> Sequence[Node]:
    """Returns ``values`` with rows that are made of other rows reduced in two steps, and a few long rows in chunks."""
    return chunk_long_rows(inner_rows_first(values, partition), partition)


def chunk_long_rows(values: Sequence[Node], partition: Partition) -> Sequence[Node]:
    """Returns ``values`` with each reduction of a few long rows made of reductions of their chunks."""
    if partition.device.batch_invariant:
        return list(values)
    mover, materialize = partition.mover, partition.materialize
    blocks = blocks_per_row(partition.device)
    reduced = [node.inputs[0] for node in topological(values) if node.kind is REDUCE]
    needed_again = any(value.shape == node.shape for value in values for node in reduced)
    is_dependent = REDUCE in kinds_of(reduced)
    if not blocks and (needed_again or not is_dependent):
        return list(values)
    if blocks == 1:
        most_rows = SINGLE_BLOCK_ROWS
    else:
        # A cluster keeps the row in registers where it is needed again or one reduction depends on another one.
        most_rows = 0 if needed_again or is_dependent else CHUNKED_ROWS

    def change(node: Node, rebuilt: Node) -> Node:
        if node.kind is not REDUCE:
            return rebuilt
        count = _chunk_count(node, needed_again, most_rows, mover, blocks)
        return _ChunkedReduction(node, rebuilt, count, mover, materialize).result() if count > 1 else rebuilt

    return [rewritten(value, mover, change) if REDUCE in value.kinds else value for value in values]


def _chunk_count(node: Node, needed_again: bool, most_rows: int, mover: Mover, blocks: int) -> int:
    """Returns the most chunks into which the rows that ``node`` reduces are divided; 1 if they stay whole.

    Args:
        node: the reduction.
        needed_again: whether the elements are needed again when they have been reduced.
        most_rows: up to this many rows of at least ``SINGLE_BLOCK_ROW`` elements are divided.
        mover: decides comparisons of sizes; each becomes a guard.
        blocks: the most blocks that can share a row; 0 on a CPU.
    """
    length = symbols.product(node.inputs[0].shape[dim] for dim in node.attrs.dims)
    count, columns = symbols.product(node.shape), are_columns(node)
    if not blocks:
        is_long = not columns and mover.decide(symbols.compare("ge", length, CPU_CHUNKED_ROW))
        return CHUNKS if is_long and mover.decide(symbols.compare("le", count, CHUNKED_ROWS)) else 1
    if not (columns or mover.decide(symbols.compare("ge", length, SINGLE_BLOCK_ROW))):
        return 1
    is_long = mover.decide(symbols.compare("ge", length, CHUNKED_ROW))
    if is_long and mover.decide(symbols.compare("le", count, CHUNKED_ROWS)):
        return CHUNKS
    if not columns:
        return CHUNKS if most_rows and mover.decide(symbols.compare("le", count, most_rows)) else 1
    if mover.decide(symbols.compare("ge", length, CHUNKED_COLUMN * blocks)):
        most_columns = CHUNKED_COLUMN_BYTES // (blocks * widest_bytes(node)) if needed_again else CHUNKED_COLUMNS
        return COLUMN_CHUNKS if mover.decide(symbols.compare("lt", count, most_columns)) else 1
    return 1


def widest_bytes(node: Node) -> int:
    """Returns the bytes of the widest element from which ``node`` is computed."""
    return max((DTYPES[source.dtype].itemsize for source in topological([node]) if source.kind is INPUT), default=1)


@dataclass(frozen=True)
class _Chunks:
    """Describes elements of every row: all its equal chunks, or the shorter one that is left behind them.

    ``node`` has the ``length`` elements of a chunk along ``axis``; the first of them is number ``start`` of the row.
    """

    node: Node
    axis: int
    length: Size
    start: Size


class _ChunkedReduction:
    """Composes a reduction of long rows of reductions of their chunks.

    The dimensions are permuted so that the row is one run: the last dimension of rows, the first of columns. The
    results of its chunks then lie along the axis where the row was, ``row_axis``: side by side for each row, and for
    columns, which are neighbours in memory, for each chunk.
    """

    def __init__(self, source: Node, rebuilt: Node, count: int, mover: Mover, materialize: Materialize):
        """Takes the reduction ``source``, ``rebuilt`` over an operand that was itself rewritten, and ``count``
        chunks."""
        self.source, self.rebuilt = source, rebuilt
        self.mover, self.builder, self.materialize = mover, mover.builder, materialize
        self.kind, self.dims = source.attrs
        shape = source.inputs[0].shape
        outer = tuple(dim for dim in range(len(shape)) if dim not in self.dims)
        self.columns = are_columns(source)
        self.order = (*self.dims, *outer) if self.columns else (*outer, *self.dims)
        self.row_axis = 0 if self.columns else len(outer)
        self.outer_sizes = tuple(shape[dim] for dim in outer)
        self.length: Size = symbols.product(shape[dim] for dim in self.dims)
        step = count * CHUNK_UNIT
        rounded = symbols.mul(symbols.floordiv(symbols.add(self.length, step - 1), step), CHUNK_UNIT)
        even = symbols.floordiv(self.length, count)
        self.chunk_length: Size = even if self.columns else rounded  # type: ignore[assignment]
        self.count: Size = symbols.floordiv(self.length, self.chunk_length)  # type: ignore[assignment]
        self.accumulator = "float32" if source.dtype in ("float16", "bfloat16") else source.dtype

    def result(self) -> Node:
        """Returns what stands for the reduction."""
        if self.kind in _EXTREMUM:
            return self._in_source_order(self._index())
        for rewrite in (self._deviations, self._exponentials):
            total = rewrite() if self.kind == "sum" else None
            if total is not None:
                return self._in_source_order(total)
        partials = self._partials(self.kind, self._chunks(self.rebuilt.inputs[0]))
        return self._in_source_order(self._combined(self.kind, partials))

    # ------------------------------------------------------------------------------------------------------- chunks

    def _shape(self, *sizes: Size) -> Shape:
        return (*sizes, *self.outer_sizes) if self.columns else (*self.outer_sizes, *sizes)

    def _chunks(self, value: Node, dtype: str | None = None) -> list[_Chunks]:
        """Divides ``value``, as ``dtype`` (None for the accumulator's), into equal chunks and a shorter one if any is
        left."""
        # What reductions of whole rows give is computed first.
        value = self._cast(without_reductions(value, self.mover, self.materialize), dtype or self.accumulator)
        if self.order != tuple(range(len(self.order))):
            value = self.mover.permute(value, self.order)
        flat = self.mover.move(value, ("reshape",), self._shape(self.length))
        even: Size = symbols.mul(self.count, self.chunk_length)  # type: ignore[assignment]
        equal = self.mover.slice(flat, self.row_axis, 0, even)
        equal = self.mover.move(equal, ("reshape",), self._shape(self.count, self.chunk_length))
        chunks = [_Chunks(equal, self.row_axis + 1, self.chunk_length, 0)]
        if not self.mover.decide(symbols.compare("eq", even, self.length)):
            left: Size = symbols.sub(self.length, even)  # type: ignore[assignment]
            chunks.append(_Chunks(self.mover.slice(flat, self.row_axis, even, left), self.row_axis, left, even))
        return chunks

    def _partials(self, kind: str, chunks: Sequence[_Chunks], dtype: str | None = None) -> list[Node]:
        """Stores ``kind`` of every chunk in temporaries, along the axis of the row."""
        partials = []
        for some in chunks:
            node = self._reduce(kind, some.node, some.axis, dtype)
            if some.axis > self.row_axis:
                node = self.mover.move(node, ("squeeze", some.axis), self._shape(self.count))
            partials.append(self.materialize(node))
        return partials

    def _combined(self, kind: str, partials: Sequence[Node]) -> Node:
        """Combines the results of all chunks of every row by ``kind``."""
        total = self._reduce(kind, partials[0], self.row_axis)
        for left in partials[1:]:
            total = self._make(_COMBINE[kind], total, left)
        return total

    def _in_source_order(self, total: Node) -> Node:
        """Returns ``total``, one value of every row, with dtype, shape and order of dimensions of what it stands
        for."""
        if total.dtype != self.source.dtype:
            total = unrounded(total, self.source.dtype, self.mover)
        for _ in range(len(self.dims) - 1):
            total = self.mover.unsqueeze(total, self.row_axis)
        inverse = tuple(self.order.index(dim) for dim in range(len(self.order)))
        if inverse != tuple(range(len(inverse))):
            total = self.mover.permute(total, inverse)
        return total

    # -------------------------------------------------------------------------------------------------------- nodes

    def _make(self, op: str, *operands: Node, dtype: str | None = None) -> Node:
        """Applies ``op`` to operands of one shape, numbers among them."""
        like = next(node for node in operands if not node.kind.is_number)
        return self.builder.make(op, operands, dtype or like.dtype, like.shape, (), self.source.location)

    def _reduce(self, kind: str, node: Node, axis: int, dtype: str | None = None) -> Node:
        shape = (*node.shape[:axis], 1, *node.shape[axis + 1 :])
        return self.builder.make("reduce", (node,), dtype or node.dtype, shape, (kind, (axis,)), self.source.location)

    def _cast(self, node: Node, dtype: str) -> Node:
        if node.dtype == dtype:
            return node
        return self.builder.make("cast", (node,), dtype, node.shape, (), self.source.location)

    def _expand(self, node: Node, like: Node) -> Node:
        return self.mover.move(node, ("expand",), like.shape)

    def _number(self, size: Size) -> Node:
        """Returns a number of elements, in the accumulator's dtype."""
        return self.builder.scalar(symbols.mul(size, 1.0), self.accumulator)

    def _is_finite(self, node: Node) -> Node:
        limit = self.builder.const(math.inf, node.dtype)
        return self._make("lt", self._make("abs", node), limit, dtype="bool")

    # ----------------------------------------------------------------------------------------------------- rewrites

    def _index(self) -> Node:
        """Computes argmax or argmin: the index within the first chunk that has the extremum; as in torch, NaN is beyond
        all numbers."""
        kind = _EXTREMUM[self.kind]
        value = self.rebuilt.inputs[0]
        chunks = self._chunks(value, "uint8" if value.dtype == "bool" else value.dtype)
        extrema, indices = self._partials(kind, chunks), self._partials(self.kind, chunks, "int64")
        chosen = self._reduce(self.kind, extrema[0], self.row_axis, "int64")
        number = self.builder.make("iota", (), "int64", extrema[0].shape, (self.row_axis,), self.source.location)
        size = self.builder.scalar(chunks[0].length, "int64")
        index = self._make("add", indices[0], self._make("mul", number, size))
        is_chosen = self._make("eq", number, self._expand(chosen, number), dtype="bool")
        zero = self.builder.const(0, "int64")
        index_ = self._reduce("sum", self._make("where", is_chosen, index, zero, dtype="int64"), self.row_axis)
        for some, extremum, left in zip(chunks[1:], extrema[1:], indices[1:], strict=True):
            before = self._reduce(kind, extrema[0], self.row_axis)
            wins = self._make("gt" if kind == "max" else "lt", extremum, before, dtype="bool")
            if DTYPES[extremum.dtype].is_floating_point:
                is_nan, was_nan = (self._make("ne", node, node, dtype="bool") for node in (extremum, before))
                wins = self._make("bitwise_or", wins, self._make("gt", is_nan, was_nan, dtype="bool"))
            start = self.builder.scalar(some.start, "int64")
            index_ = self._make("where", wins, self._make("add", left, start), index_, dtype="int64")
        return index_

    def _deviations(self) -> Node | None:
        """Computes sum(d * d), where d = v - sum(v) / length."""
        square = self.source.inputs[0]
        if square.op != "mul" or square.inputs[0] is not square.inputs[1] or square.inputs[0].op != "sub":
            return None
        value, mean = square.inputs[0].inputs
        if mean.op != "div" or not self._is_reduction(mean.inputs[0], "sum", value):
            return None
        if not _is_number(mean.inputs[1], symbols.mul(self.length, 1.0)):
            return None
        chunks = self._chunks(self.rebuilt.inputs[0].inputs[0].inputs[0])
        distances = [self._make("sub", some.node, self._mean_of(some)) for some in chunks]
        squares = [
            _Chunks(self._make("mul", distance, distance), some.axis, some.length, some.start)
            for distance, some in zip(distances, chunks, strict=True)
        ]
        sums, deviations = self._partials("sum", chunks), self._partials("sum", squares)
        row_mean = self._make("div", self._combined("sum", sums), self._number(self.length))
        terms = []
        for total, within, some in zip(sums, deviations, chunks, strict=True):
            size = self._number(some.length)
            between = self._make("sub", self._make("div", total, size), self._expand(row_mean, total))
            terms.append(self._make("add", within, self._make("mul", self._make("mul", between, between), size)))
        return self._combined("sum", terms)

    def _mean_of(self, chunks: _Chunks) -> Node:
        total = self._reduce("sum", chunks.node, chunks.axis)
        return self._expand(self._make("div", total, self._number(chunks.length)), chunks.node)

    def _exponentials(self) -> Node | None:
        """Computes sum(exp(v - m)), where m is v's maximum, or that if it is finite and else a finite number."""
        power = self.source.inputs[0]
        if power.op != "exp" or power.inputs[0].op != "sub":
            return None
        value, subtrahend = power.inputs[0].inputs
        otherwise = None
        if not self._is_reduction(subtrahend, "max", value):
            if subtrahend.op != "where" or not self._is_reduction(subtrahend.inputs[1], "max", value):
                return None
            condition, otherwise = subtrahend.inputs[0], subtrahend.inputs[2].under_expand
            is_guard = condition.op == "lt" and condition.inputs[0].op == "abs"
            if not is_guard or condition.inputs[0].inputs[0] is not subtrahend.inputs[1] or otherwise.kind is not CONST:
                return None
            if not _is_number(condition.inputs[1], math.inf) or not math.isfinite(otherwise.attrs.value):
                return None
        chunks = self._chunks(self.rebuilt.inputs[0].inputs[0].inputs[0])
        maxima = self._partials("max", chunks)
        zero = self.builder.const(0.0, self.accumulator)
        powers = []
        for some in chunks:
            own = self._reduce("max", some.node, some.axis)
            own = self._expand(self._make("where", self._is_finite(own), own, zero, dtype=own.dtype), some.node)
            scaled = self._make("exp", self._make("sub", some.node, own))
            powers.append(_Chunks(scaled, some.axis, some.length, some.start))
        maximum = self._combined("max", maxima)
        terms = []
        for own, total in zip(maxima, self._partials("sum", powers), strict=True):
            scale = self._make("exp", self._make("sub", own, self._expand(maximum, own)))
            # A chunk of -inf alone has a sum of 0, whatever its scale; a maximum of +inf or NaN is the row's too.
            scaled = self._make("mul", total, scale)
            terms.append(self._make("where", self._is_finite(own), scaled, total, dtype=total.dtype))
        # Where the maximum is not finite, every term is exp(-inf - m), or some term is exp(inf - m) or NaN. The maximum
        # tells which.
        base = maximum
        if otherwise is not None:
            number = self.builder.const(otherwise.attrs.value, self.accumulator)
            base = self._make("where", self._is_finite(maximum), maximum, number, dtype=maximum.dtype)
        not_finite = self._make("exp", self._make("sub", maximum, base))
        total = self._combined("sum", terms)
        return self._make("where", self._is_finite(maximum), total, not_finite, dtype=total.dtype)

    def _is_reduction(self, node: Node, kind: str, value: Node) -> bool:
        """Returns whether ``node`` is, for every element, ``kind`` of its row of ``value``."""
        node = node.under_expand
        return node.kind is REDUCE and node.attrs == (kind, self.dims) and node.inputs[0] is value


def _is_number(node: Node, value: object) -> bool:
    node = node.under_expand
    return node.kind.is_number and bool(node.attrs.value == value)
