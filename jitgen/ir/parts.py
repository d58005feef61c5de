"""Rows too few to keep a GPU busy, or too long for a CPU's caches, reduced in parts.

One kernel reduces the parts of every row, as rows of their own, into temporaries; what reads those combines them, in an
order that depends on the row's length alone. Each part is read once:

- of a sum of squared deviations from the mean, each part's are taken from its own mean, and what lies between the two
  means is added (Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances",
  1979);
- of a sum of exp(v - max v), each part's from its own maximum, and scaled (Milakov and Gimelshein, "Online normalizer
  calculation for softmax", 2018);
- of argmax and argmin, the extremum beside its place.

Any other reduction that waits for another one is computed from the elements again, not from temporaries as long as they
are. A CPU's threads share rows by themselves: what they take in parts is only what would be read from memory twice,
once for each of two reductions of which one waits for the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jitgen.ir import symbols
from jitgen.ir.graph import Node, Shape, topological
from jitgen.ir.rows import Materialize, are_columns, has_reduce, rewritten, unrounded, without_reductions
from jitgen.ir.symbols import Size
from jitgen.ir.views import Mover
from jitgen.spec import DTYPES

PARTS, PART_UNIT = 512, 8
LONG_ROW = 2**18
FEW_ROWS = 64
"""Rows at most this many, of at least ``LONG_ROW`` elements, are reduced in ``PARTS`` parts first: one row would keep
one block busy, and a sum of so many terms in one sequence would lose digits. Parts are multiples of ``PART_UNIT``
elements, so that they are as aligned as rows are, and the last is shorter. Parts of columns are as even as can be."""
SPLIT_ROW, SPLIT_ROWS = 2**15, 48
"""The same of shorter rows where a block is all that a row can have: of 48 softmax is a sixth faster in parts on an
H200, of 64 it is not. Where blocks can share rows, they do if its elements are needed again or its reductions wait for
one another; up to ``FEW_ROWS`` that are read once are taken in parts there too."""
COLUMN_PARTS = 64
LONG_COLUMN, SOME_COLUMNS = 2**11, 2**13
"""The same of rows that lie side by side, as columns do, of which a block takes as many as fill a line of the cache:
fewer than ``SOME_COLUMNS`` of at least ``LONG_COLUMN`` elements for each block that can share them."""
FEW_BYTES = 2**14
"""Of neighbouring elements of all columns, below which blocks with a line each leave half of a GPU idle. Columns whose
elements are needed again, once they are reduced, are left whole from here on."""

CACHED_ROW = 2**20
"""Elements of a row from which on a CPU reads a part again faster than the whole row."""

_COMBINE = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum", "any": "bitwise_or", "all": "bitwise_and"}
_EXTREMUM = {"argmax": "max", "argmin": "min"}


def split_long_rows(roots: Sequence[Node], mover: Mover, materialize: Materialize, blocks: int) -> list[Node]:
    """``roots`` with each reduction of few long rows made of reductions of their parts.

    ``blocks``: that can share rows within one kernel; 0 for a CPU's threads.
    """
    reduced = [node.inputs[0] for node in topological(roots) if node.op == "reduce"]
    again = any(root.shape == node.shape for root in roots for node in reduced)
    waits = any(map(has_reduce, reduced))
    if not blocks and (again or not waits):
        return list(roots)
    split = SPLIT_ROWS if blocks == 1 else 0 if again or waits else FEW_ROWS

    def change(node: Node, rebuilt: Node) -> Node:
        if node.op != "reduce":
            return rebuilt
        count = _parts(node, again, split, mover, blocks)
        return _Rows(node, rebuilt, count, mover, materialize).reduced() if count > 1 else rebuilt

    return [rewritten(root, mover, change) if has_reduce(root) else root for root in roots]


def _parts(node: Node, again: bool, split: int, mover: Mover, blocks: int) -> int:
    """How many parts the rows that ``node`` reduces are taken in.

    ``again``: whether their elements are needed then; ``split``: so many rows of at least ``SPLIT_ROW`` are.
    """
    length = symbols.product(node.inputs[0].shape[dim] for dim in node.attrs[1])
    count, columns = symbols.product(node.shape), are_columns(node)
    if not blocks:
        long = not columns and mover.decide(symbols.compare("ge", length, CACHED_ROW))
        return PARTS if long and mover.decide(symbols.compare("le", count, FEW_ROWS)) else 1
    if not (columns or mover.decide(symbols.compare("ge", length, SPLIT_ROW))):
        return 1
    if mover.decide(symbols.compare("ge", length, LONG_ROW)) and mover.decide(symbols.compare("le", count, FEW_ROWS)):
        return PARTS
    if not columns:
        return PARTS if split and mover.decide(symbols.compare("le", count, split)) else 1
    if mover.decide(symbols.compare("ge", length, LONG_COLUMN * blocks)):
        few = FEW_BYTES // (blocks * _widest(node)) if again else SOME_COLUMNS
        return COLUMN_PARTS if mover.decide(symbols.compare("lt", count, few)) else 1
    return 1


def _widest(node: Node) -> int:
    """Bytes of the widest element that ``node`` is computed from."""
    return max((DTYPES[part.dtype].itemsize for part in topological([node]) if part.op == "input"), default=1)


@dataclass(frozen=True)
class _Piece:
    """Elements of every row: ``node``, along ``axis``, ``length`` of them in each of its parts, from ``start`` on."""

    node: Node
    axis: int
    length: Size
    start: Size


class _Rows:
    """The rows that ``source`` reduces, and ``rebuilt`` the same over operands that are rewritten.

    Their parts, ``count`` of ``each`` elements and one of what is left, have their values in one piece for each row; of
    columns, which are neighbours in memory, for each part.
    """

    def __init__(self, source: Node, rebuilt: Node, count: int, mover: Mover, materialize: Materialize):
        self.source, self.rebuilt = source, rebuilt
        self.mover, self.builder, self.materialize = mover, mover.builder, materialize
        self.kind, self.dims = source.attrs
        shape = source.inputs[0].shape
        outer = tuple(dim for dim in range(len(shape)) if dim not in self.dims)
        self.columns = are_columns(source)
        self.order = (*self.dims, *outer) if self.columns else (*outer, *self.dims)
        self.at = 0 if self.columns else len(outer)
        self.others = tuple(shape[dim] for dim in outer)
        self.length: Size = symbols.product(shape[dim] for dim in self.dims)
        step = count * PART_UNIT
        rounded = symbols.mul(symbols.floordiv(symbols.add(self.length, step - 1), step), PART_UNIT)
        self.each: Size = symbols.floordiv(self.length, count) if self.columns else rounded  # type: ignore[assignment]
        self.count: Size = symbols.floordiv(self.length, self.each)  # type: ignore[assignment]
        self.accumulator = "float32" if source.dtype in ("float16", "bfloat16") else source.dtype

    def reduced(self) -> Node:
        if self.kind in _EXTREMUM:
            return self._back(self._place())
        for rewrite in (self._deviations, self._exponentials):
            total = rewrite() if self.kind == "sum" else None
            if total is not None:
                return self._back(total)
        return self._back(self._combined(self.kind, self._partials(self.kind, self._pieces(self.rebuilt.inputs[0]))))

    # ------------------------------------------------------------------------------------------------------- pieces

    def _shape(self, *sizes: Size) -> Shape:
        return (*sizes, *self.others) if self.columns else (*self.others, *sizes)

    def _pieces(self, value: Node, dtype: str | None = None) -> list[_Piece]:
        """``value`` (as ``dtype``, the accumulator's if None) in equal parts, and a shorter one at the end."""
        # What rows as a whole give is known before their parts are walked.
        value = self._cast(without_reductions(value, self.mover, self.materialize), dtype or self.accumulator)
        if self.order != tuple(range(len(self.order))):
            value = self.mover.move(value, ("permute", self.order), tuple(value.shape[dim] for dim in self.order))
        flat = self.mover.move(value, ("reshape",), self._shape(self.length))
        even: Size = symbols.mul(self.count, self.each)  # type: ignore[assignment]
        body = self.mover.slice(flat, self.at, 0, even)
        body = self.mover.move(body, ("reshape",), self._shape(self.count, self.each))
        pieces = [_Piece(body, self.at + 1, self.each, 0)]
        if not self.mover.decide(symbols.compare("eq", even, self.length)):
            left: Size = symbols.sub(self.length, even)  # type: ignore[assignment]
            pieces.append(_Piece(self.mover.slice(flat, self.at, even, left), self.at, left, even))
        return pieces

    def _partials(self, kind: str, pieces: Sequence[_Piece], dtype: str | None = None) -> list[Node]:
        """In memory: ``kind`` of every part of each of ``pieces``, along the axis where the row was."""
        found = []
        for piece in pieces:
            node = self._reduce(kind, piece.node, piece.axis, dtype)
            if piece.axis > self.at:
                node = self.mover.move(node, ("squeeze", piece.axis), self._shape(self.count))
            found.append(self.materialize(node))
        return found

    def _combined(self, kind: str, partials: Sequence[Node]) -> Node:
        """``kind`` of all parts of every row."""
        total = self._reduce(kind, partials[0], self.at)
        for left in partials[1:]:
            total = self._make(_COMBINE[kind], total, left)
        return total

    def _back(self, total: Node) -> Node:
        """``total``, of every row in this order of dimensions, as the result of what is replaced."""
        if total.dtype != self.source.dtype:
            total = unrounded(total, self.source.dtype, self.mover)
        for _ in range(len(self.dims) - 1):
            shape = (*total.shape[: self.at], 1, *total.shape[self.at :])
            total = self.mover.move(total, ("unsqueeze", self.at), shape)
        back = tuple(self.order.index(dim) for dim in range(len(self.order)))
        if back != tuple(range(len(back))):
            total = self.mover.move(total, ("permute", back), self.source.shape)
        return total

    # -------------------------------------------------------------------------------------------------------- nodes

    def _make(self, op: str, *operands: Node, dtype: str | None = None) -> Node:
        """``op`` of operands of one shape, numbers among them."""
        like = next(node for node in operands if node.op not in ("const", "scalar"))
        return self.builder.make(op, operands, dtype or like.dtype, like.shape, (), self.source.location)

    def _reduce(self, kind: str, node: Node, axis: int, dtype: str | None = None) -> Node:
        shape = (*node.shape[:axis], 1, *node.shape[axis + 1 :])
        return self.builder.make("reduce", (node,), dtype or node.dtype, shape, (kind, (axis,)), self.source.location)

    def _cast(self, node: Node, dtype: str) -> Node:
        if node.dtype == dtype:
            return node
        return self.builder.make("cast", (node,), dtype, node.shape, (), self.source.location)

    def _spread(self, node: Node, like: Node) -> Node:
        return self.mover.move(node, ("expand",), like.shape)

    def _number(self, size: Size) -> Node:
        """A number of elements, as one of them."""
        return self.builder.scalar(symbols.mul(size, 1.0), self.accumulator)

    def _is_finite(self, node: Node) -> Node:
        limit = self.builder.const(math.inf, node.dtype)
        return self._make("lt", self._make("abs", node), limit, dtype="bool")

    # ----------------------------------------------------------------------------------------------------- rewrites

    def _place(self) -> Node:
        """argmax or argmin: the place within the first part that has the extremum, which NaN is."""
        kind = _EXTREMUM[self.kind]
        value = self.rebuilt.inputs[0]
        pieces = self._pieces(value, "uint8" if value.dtype == "bool" else value.dtype)
        tops, places = self._partials(kind, pieces), self._partials(self.kind, pieces, "int64")
        chosen = self._reduce(self.kind, tops[0], self.at, "int64")
        number = self.builder.make("iota", (), "int64", tops[0].shape, (self.at,), self.source.location)
        size = self.builder.scalar(pieces[0].length, "int64")
        place = self._make("add", places[0], self._make("mul", number, size))
        is_chosen = self._make("eq", number, self._spread(chosen, number), dtype="bool")
        zero = self.builder.const(0, "int64")
        found = self._reduce("sum", self._make("where", is_chosen, place, zero, dtype="int64"), self.at)
        for piece, top, left in zip(pieces[1:], tops[1:], places[1:], strict=True):
            before = self._reduce(kind, tops[0], self.at)
            later = self._make("gt" if kind == "max" else "lt", top, before, dtype="bool")
            if DTYPES[top.dtype].is_floating_point:
                here, there = (self._make("ne", node, node, dtype="bool") for node in (top, before))
                later = self._make("bitwise_or", later, self._make("gt", here, there, dtype="bool"))
            start = self.builder.scalar(piece.start, "int64")
            found = self._make("where", later, self._make("add", left, start), found, dtype="int64")
        return found

    def _deviations(self) -> Node | None:
        """sum(d * d), where d = v - sum(v) / length."""
        square = self.source.inputs[0]
        if square.op != "mul" or square.inputs[0] is not square.inputs[1] or square.inputs[0].op != "sub":
            return None
        value, mean = square.inputs[0].inputs
        if mean.op != "div" or not self._is_reduction(mean.inputs[0], "sum", value):
            return None
        if not _is_number(mean.inputs[1], symbols.mul(self.length, 1.0)):
            return None
        pieces = self._pieces(self.rebuilt.inputs[0].inputs[0].inputs[0])
        apart = [self._make("sub", piece.node, self._mean_of(piece)) for piece in pieces]
        squares = [
            _Piece(self._make("mul", d, d), piece.axis, piece.length, piece.start)
            for d, piece in zip(apart, pieces, strict=True)
        ]
        sums, deviations = self._partials("sum", pieces), self._partials("sum", squares)
        middle = self._make("div", self._combined("sum", sums), self._number(self.length))
        terms = []
        for total, inner, piece in zip(sums, deviations, pieces, strict=True):
            size = self._number(piece.length)
            between = self._make("sub", self._make("div", total, size), self._spread(middle, total))
            terms.append(self._make("add", inner, self._make("mul", self._make("mul", between, between), size)))
        return self._combined("sum", terms)

    def _mean_of(self, piece: _Piece) -> Node:
        total = self._reduce("sum", piece.node, piece.axis)
        return self._spread(self._make("div", total, self._number(piece.length)), piece.node)

    def _exponentials(self) -> Node | None:
        """sum(exp(v - m)), where m is v's maximum, or that where it is finite and else some other number."""
        power = self.source.inputs[0]
        if power.op != "exp" or power.inputs[0].op != "sub":
            return None
        value, less = power.inputs[0].inputs
        otherwise = None
        if not self._is_reduction(less, "max", value):
            if less.op != "where" or not self._is_reduction(less.inputs[1], "max", value):
                return None
            condition, otherwise = less.inputs[0], _under_expand(less.inputs[2])
            is_guard = condition.op == "lt" and condition.inputs[0].op == "abs"
            if not is_guard or condition.inputs[0].inputs[0] is not less.inputs[1] or otherwise.op != "const":
                return None
            if not _is_number(condition.inputs[1], math.inf) or not math.isfinite(otherwise.attrs[0]):
                return None
        pieces = self._pieces(self.rebuilt.inputs[0].inputs[0].inputs[0])
        tops = self._partials("max", pieces)
        zero = self.builder.const(0.0, self.accumulator)
        powers = []
        for piece in pieces:
            own = self._reduce("max", piece.node, piece.axis)
            own = self._spread(self._make("where", self._is_finite(own), own, zero, dtype=own.dtype), piece.node)
            scaled = self._make("exp", self._make("sub", piece.node, own))
            powers.append(_Piece(scaled, piece.axis, piece.length, piece.start))
        top = self._combined("max", tops)
        terms = []
        for own, total in zip(tops, self._partials("sum", powers), strict=True):
            scale = self._make("exp", self._make("sub", own, self._spread(top, own)))
            # A part of -inf has no exponentials, whatever their scale would be; any other extreme is the row's.
            scaled = self._make("mul", total, scale)
            terms.append(self._make("where", self._is_finite(own), scaled, total, dtype=total.dtype))
        # Every term is exp(-inf - m), or one of them is exp(inf - m), or NaN: which it is, the maximum tells.
        base = top
        if otherwise is not None:
            number = self.builder.const(otherwise.attrs[0], self.accumulator)
            base = self._make("where", self._is_finite(top), top, number, dtype=top.dtype)
        beyond = self._make("exp", self._make("sub", top, base))
        total = self._combined("sum", terms)
        return self._make("where", self._is_finite(top), total, beyond, dtype=total.dtype)

    def _is_reduction(self, node: Node, kind: str, value: Node) -> bool:
        """Whether ``node`` is, for every element, ``kind`` of its row of ``value``."""
        node = _under_expand(node)
        return node.op == "reduce" and node.attrs == (kind, self.dims) and node.inputs[0] is value


def _under_expand(node: Node) -> Node:
    return node.inputs[0] if node.op == "view" and node.attrs[0] == "expand" else node


def _is_number(node: Node, value: object) -> bool:
    node = _under_expand(node)
    return node.op in ("const", "scalar") and bool(node.attrs[0] == value)
