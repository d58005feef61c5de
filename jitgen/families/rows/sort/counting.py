"""Recognises sorted rows of whole numbers below a bound, and what is computed of their order: ``counted`` nodes.

A mixture of experts sorts the experts that its tokens have chosen, counts the tokens of each, adds the counts up, and
looks up where each token went. One pass that counts gives all of it (counting sort; Knuth, The Art of Computer
Programming, vol. 3, algorithm 5.2D): the order, the rank of each element, and the ends of the runs of equal ones. The
numbers are known to be below a bound where they are indices of a sort themselves, as those of a top-k are.

* ``sort(ids)``, its values and its indices, are the order.
* ``inverse[order] = arange(n)`` has the rank of each element.
* ``cumsum(counts)`` are the ends of runs, however counts are spelled: as a sum over elements of what is true for one
  number alone. That is tried on all numbers below the bound.
* What is taken at ranks of what was taken by the order is as it was.
* Products of few rows in that order, taken at their ranks, are those of rows as they were, with matrices by ids. One
  token's experts need no order then, and no block looks for its group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from jitgen.device import Device
from jitgen.ir import symbols
from jitgen.ir.analysis import rewritten_graph
from jitgen.ir.equations import ROWS_OF_GROUPS
from jitgen.ir.graph import Graph, Node, topological
from jitgen.ir.nodes import CAST, CONST, COUNTED, GATHER, GROUPED, IOTA, REDUCE, SCALAR, SCAN, SCATTER, SORT, VIEW
from jitgen.ir.symbols import Size
from jitgen.ir.views import Mover
from jitgen.spec import DTYPES

MOST_NUMBERS = {"cuda": 2048, "triton": 512, "cpp": 2048}
"""The largest bound in each dialect: counters of a block's warps are in its shared memory, and a Triton program
compares each column with every number."""
LONGEST = {"triton": 1 << 16}
"""The most numbers that are counted, in dialects where each program ranks few columns: each reads all numbers, so that
65,536 of them, below 512, are read 4,096 times (2 GB from the L2 cache), and twice as many four times as often."""
ROWS_BY_IDS = range(2, 17)
"""Rows of grouped products that are multiplied by the matrix that the id of each says, whatever other rows have the
same: the experts of one token, which differ. Whole blocks of one token with 2 to 8 of 8 to 128 experts take 0.79 to
0.93 of the time that they take in order on an H100 (``docs/measured/experts.md``)."""
NAME = "numbers below a bound are sorted by counting them"
BY_IDS = "products of few rows in the order of their groups are by ids"
_WHOLE = ("int32", "int64")


@dataclass(frozen=True)
class Numbers:
    """Holds a row of numbers that is sorted, and their ``bound``."""

    row: Node
    bound: int


def recognised(graph: Graph, mover: Mover, device: Device) -> Graph:
    """Returns ``graph`` with rows of numbers counted."""
    most, longest = MOST_NUMBERS[device.dialect], LONGEST.get(device.dialect)
    sorted_ = filter(None, (_numbers(node, most, longest, mover) for node in topological(graph.results)))
    rows = {numbers.row: numbers for numbers in sorted_}
    if not rows:
        return graph
    mover.fired.setdefault(NAME)
    return _Counted(mover, rows, by_ids=multiplies_by_ids(device)).graph(graph)


def multiplies_by_ids(device: Device) -> bool:
    """Returns whether products of few rows in the order of their groups become products by ids. On a CPU a thread looks
    for groups once for all tiles; bits that must not depend on the number of rows are those of one mainloop."""
    return device.is_gpu and not device.batch_invariant


def _numbers(node: Node, most: int, longest: int | None, mover: Mover) -> Numbers | None:
    """Returns what ``node`` sorts if it is all of one row of numbers below a bound of at most ``most``, in ascending
    order, and not of more than ``longest``."""
    if node.kind is not SORT or len(node.shape) != 1 or node.attrs[1:] != (0, False, 0):
        return None
    (row,) = node.inputs
    base = row
    while base.kind is VIEW or (base.kind is CAST and base.dtype in _WHOLE):
        base = base.inputs[0]
    if base.kind is not SORT or base.attrs.what != "indices" or row.dtype not in _WHOLE or row.shape != node.shape:
        return None
    size: Any = base.inputs[0].shape[base.attrs.dim]
    bound = symbols.evaluate(size, mover.environment)
    if not 2 <= bound <= most or not mover.decide(symbols.compare("eq", size, bound)):
        return None
    if longest is not None and not mover.decide(symbols.compare("le", row.shape[0], longest)):
        return None
    return Numbers(row, bound)


class _Counted:
    """Rewrites a graph; ``rows`` are what is counted of it, and ``by_ids`` says whether products of few rows in their
    order become products by ids."""

    def __init__(self, mover: Mover, rows: Mapping[Node, Numbers], by_ids: bool) -> None:
        self.mover, self.rows, self.by_ids = mover, rows, by_ids
        self.rebuilt: dict[Node, Numbers] = {}

    def graph(self, graph: Graph) -> Graph:
        """Returns ``graph`` with what is counted."""
        return rewritten_graph(graph, self.mover, self._change)

    def _change(self, node: Node, rebuilt: Node) -> Node:
        if node.kind is SORT and node.inputs[0] in self.rows and _is_whole_order(node):
            numbers = self.rows[node.inputs[0]]
            self.rebuilt[rebuilt.inputs[0]] = numbers
            return self._counted(node.attrs.what, rebuilt.inputs[0], node)
        if node.op == "where":
            return _unwrapped(rebuilt)
        if node.kind is SCATTER:
            return self._ranks(rebuilt)
        if node.kind is SCAN:
            return self._ends(rebuilt)
        if node.kind is GATHER:
            return self._taken_back(rebuilt)
        return rebuilt

    def _counted(self, what: str, row: Node, like: Node) -> Node:
        numbers = self.rebuilt[row]
        dtype = {"values": row.dtype, "ends": "int32"}.get(what, "int64")
        shape = like.shape if what == "ends" else row.shape
        return self.mover.builder.make("counted", (row,), dtype, shape, (what, numbers.bound), like.location)

    def _ranks(self, node: Node) -> Node:
        """Returns the ranks that the scatter ``node`` stores, or the node itself."""
        base, value, *indices = node.inputs
        if len(indices) != 1 or node.attrs != ("set", (-1,), ()) or not _is_order(indices[0]):
            return node
        index = value
        while index.kind is CAST or (index.kind is VIEW and _keeps_row(index)):
            index = index.inputs[0]
        if index.kind is not IOTA or value.shape != base.shape or value.shape != indices[0].shape:
            return node
        ranks = self._counted("ranks", indices[0].inputs[0], node)
        return self._cast(ranks, node.dtype)

    def _cast(self, node: Node, dtype: str) -> Node:
        return node if node.dtype == dtype else self.mover.builder.make("cast", (node,), dtype, node.shape)

    def _ends(self, node: Node) -> Node:
        """Returns the ends of runs that the scan ``node`` computes from counts, or the node itself."""
        if node.attrs != ("sum", 0, False) or len(node.shape) != 1:
            return node
        counts = node.inputs[0]
        while counts.kind is CAST or (counts.kind is VIEW and counts.attrs.kind in ("squeeze", "reshape")):
            counts = counts.inputs[0]
        if counts.kind is not REDUCE or counts.attrs.kind != "sum" or len(counts.attrs.dims) != 1:
            return node
        for row, numbers in self.rebuilt.items():
            if self._is_bound(node.shape[0], numbers) and _counts_each(counts, row, numbers.bound, self.mover):
                ends = self._counted("ends", row, node)
                return self._cast(ends, node.dtype)
        return node

    def _is_bound(self, size: Size, numbers: Numbers) -> bool:
        same = symbols.evaluate(size, self.mover.environment) == numbers.bound
        return bool(same) and self.mover.decide(symbols.compare("eq", size, numbers.bound))

    def _taken_back(self, node: Node) -> Node:
        """Returns the gather ``node`` of a product of rows and of what was gathered by the order: the product of rows
        that are gathered, and of what that was gathered from."""
        source, *indices = node.inputs
        if len(indices) != 1 or node.attrs[0] != -1:
            return node
        if _is_order(indices[0]) and indices[0].inputs[0] is source and node.attrs == (-1,):
            return self._counted("values", source, node)
        ranks = _under_repeats(indices[0])
        if ranks.kind is not COUNTED or ranks.attrs.what != "ranks":
            return node
        (row,) = ranks.inputs
        if self.by_ids and row.shape[0] in ROWS_BY_IDS and GROUPED in source.kinds:
            unordered = _Unordered(self.mover, row).rows(source) if node.shape == source.shape else None
            if unordered is not None:
                self.mover.fired.setdefault(BY_IDS)
                return unordered
        if source.op != "mul" or node.shape != source.shape:
            return node
        earlier = [_before_order(operand, ranks.inputs[0], self.mover) for operand in source.inputs]
        if sum(operand is not None for operand in earlier) != 1:
            return node
        like = self.mover.builder.like
        pairs = zip(source.inputs, earlier, strict=True)
        return like(source, [like(node, (o, indices[0])) if before is None else before for o, before in pairs])


class _Unordered:
    """Finds what values of rows in the order of ``row``, their groups, are of these rows as they were."""

    def __init__(self, mover: Mover, row: Node) -> None:
        self.mover, self.row = mover, row
        self.memo: dict[int, Node | None] = {}

    def rows(self, node: Node) -> Node | None:
        """Returns the rows of ``node`` as they were before they were put in order; None where that is not known."""
        if id(node) not in self.memo:
            self.memo[id(node)] = self._rows(node)
        return self.memo[id(node)]

    def _rows(self, node: Node) -> Node | None:
        like = self.mover.builder.like
        if COUNTED not in node.kinds and node.shape[:1] != self.row.shape:
            return node  # a number, or a row that all repeat
        if node.kind is GATHER:
            return self._gathered(node)
        if node.kind is GROUPED:
            x, weight, ends = node.inputs
            ends = ends.inputs[0] if ends.kind is CAST else ends
            rows = self.rows(x) if node.attrs.equation == ROWS_OF_GROUPS and self._is("ends", ends) else None
            return None if rows is None else like(node, (rows, weight, self.row), attrs=node.attrs._replace(by="ids"))
        if node.kind is VIEW:
            (operand,), is_expanded = node.inputs, node.attrs.kind == "expand"
            if is_expanded and (len(operand.shape), *operand.shape[:1]) != (len(node.shape), *self.row.shape):
                return node if COUNTED not in node.kinds else None  # all rows are the same
            if not is_expanded and (node.attrs.kind not in ("slice", "unsqueeze") or node.attrs.dim == 0):
                return None
        elif not (node.kind.is_pointwise or node.kind is CAST):
            return None
        operands = [self.rows(operand) for operand in node.inputs]
        return None if None in operands else like(node, [operand for operand in operands if operand is not None])

    def _gathered(self, node: Node) -> Node | None:
        source, *indices = node.inputs
        if len(indices) != 1 or node.attrs != (-1, *range(1, len(node.shape))):
            return None
        index = _under_repeats(indices[0])
        if self._is("indices", index) and source.shape == node.shape:
            return source
        if source.shape[0] == 1:  # its only row, wherever an index is
            make, (like,) = self.mover.builder.make, indices
            first = make("const", (), like.dtype, (), (0,))
            return self.mover.builder.like(node, (source, make("view", (first,), like.dtype, like.shape, ("expand",))))
        if self._is("values", index):
            return self.mover.builder.like(node, (source, self.mover.substituted(indices[0], {id(index): self.row})))
        return None

    def _is(self, what: str, node: Node) -> bool:
        return node.kind is COUNTED and node.attrs.what == what and node.inputs[0] is self.row


def _is_whole_order(node: Node) -> bool:
    return node.attrs[1:] == (0, False, 0) and node.shape == node.inputs[0].shape


def _is_order(node: Node) -> bool:
    return node.kind is COUNTED and node.attrs.what == "indices"


def _unwrapped(node: Node) -> Node:
    """Returns the index that the ``where`` node counts from the end if it is negative, where it never is."""
    condition, wrapped, plain = node.inputs
    counts_back = condition.op == "lt" and condition.inputs[0] is plain and wrapped.op == "add"
    base = plain
    while base.op == "floor_divide" and base.inputs[1].kind is CONST and base.inputs[1].attrs.value > 0:
        base = base.inputs[0]
    is_natural = base.kind is COUNTED or (base.under_views.kind is SORT and base.under_views.attrs.what == "indices")
    zero = condition.inputs[1] if counts_back else node
    is_zero = zero.under_views.kind is CONST and zero.under_views.attrs.value == 0
    return plain if counts_back and is_natural and is_zero and wrapped.inputs[0] is plain else node


def _keeps_row(view: Node) -> bool:
    """Returns whether ``view``, of a row, is that row: an expansion of more than one element is of as many."""
    (row,) = view.inputs
    return view.attrs.kind == "expand" and len(row.shape) == len(view.shape) == 1 and row.shape != (1,)


def _under_repeats(node: Node) -> Node:
    """Returns the row that ``node`` repeats along further dimensions, behind that of the row."""
    while node.kind is VIEW and node.attrs.kind in ("unsqueeze", "expand"):
        (inner,) = node.inputs
        if inner.shape[:1] != node.shape[:1] or (node.attrs.kind == "unsqueeze" and node.attrs.dim == 0):
            break
        node = inner
    return node


def _before_order(node: Node, row: Node, mover: Mover) -> Node | None:
    """Returns what ``node``, repeated along further dimensions, was before it was gathered in the order of ``row``."""
    base = _under_repeats(node)
    if base.kind is not GATHER or base.attrs != (-1,) or not _is_order(base.inputs[1]):
        return None
    if base.inputs[1].inputs[0] is not row or base.inputs[0].shape != base.shape:
        return None
    return mover.substituted(node, {id(base): base.inputs[0]})


# ---------------------------------------------------------------------------------------------------------- counts

_FUNCTIONS: dict[str, Any] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "floor": torch.floor,
    "floor_divide": torch.floor_divide,
    "eq": torch.eq,
    "ne": torch.ne,
    "ge": torch.ge,
    "gt": torch.gt,
    "le": torch.le,
    "lt": torch.lt,
    "bitwise_and": torch.bitwise_and,
    "bitwise_or": torch.bitwise_or,
    "where": torch.where,
}
"""What predicates are made of."""


def _counts_each(counts: Node, row: Node, most: int, mover: Mover) -> bool:
    """Returns whether ``counts``, a sum over the elements of ``row``, has for each number below ``most`` how many of
    them are that. The summands are computed of each pair of numbers."""
    (summed,), (dim,) = counts.inputs, counts.attrs.dims
    elements = row.shape[0]
    if elements in (most, 1) or summed.shape[dim] != elements:
        return False
    try:
        summands = _tried(summed, row, elements, most, mover)
    except _UntriedError:
        return False
    pairs = summands.movedim(dim, -1).reshape(-1, most)
    if pairs.shape[0] != most or pairs.max().item() != 1:
        return False
    return torch.equal(pairs != 0, torch.eye(most, dtype=torch.bool))


class _UntriedError(Exception):
    """Says that a summand is more than a predicate of pairs."""


def _tried(root: Node, row: Node, elements: Size, most: int, mover: Mover) -> torch.Tensor:
    """Computes ``root``, in which the dimension of ``elements`` has each number below ``most`` once."""
    memo: dict[int, torch.Tensor] = {}
    environment = mover.environment

    def sizes(shape: Iterable[Size]) -> list[int]:
        return [most if size == elements else int(symbols.evaluate(size, environment)) for size in shape]

    def is_row(node: Node) -> bool:
        is_sorted = node.kind is COUNTED and node.attrs.what == "values" and node.inputs[0] is row
        return node is row or is_sorted

    order = topological([root], leaves=(COUNTED,), known={id(row)})
    if not any(map(is_row, order)):
        raise _UntriedError
    for node in order:
        if is_row(node):
            memo[id(node)] = torch.arange(most).to(DTYPES[node.dtype])
            continue
        operands = [memo[id(child)] for child in node.inputs]
        if node.kind.is_number:
            value = symbols.evaluate(node.attrs.value, environment)
            if node.kind is SCALAR and not mover.decide(symbols.compare("eq", node.attrs.value, value)):
                raise _UntriedError
            memo[id(node)] = torch.tensor(value, dtype=DTYPES[node.dtype])
        elif node.kind is IOTA and node.shape[node.attrs.dim] != elements:
            shape = [-1 if dim == node.attrs.dim else 1 for dim in range(len(node.shape))]
            size = int(symbols.evaluate(node.shape[node.attrs.dim], environment))
            memo[id(node)] = torch.arange(size).view(shape).expand(sizes(node.shape)).to(DTYPES[node.dtype])
        elif _is_table(node) and operands[0].numel() >= most:
            memo[id(node)] = operands[1]
        elif node.kind is CAST:
            memo[id(node)] = operands[0].to(DTYPES[node.dtype])
        elif node.kind is VIEW and node.attrs.kind in ("unsqueeze", "expand", "squeeze"):
            kind, operand = node.attrs.kind, operands[0]
            moved = operand.unsqueeze(node.attrs.dim) if kind == "unsqueeze" else operand
            moved = moved.squeeze(node.attrs.dim) if kind == "squeeze" else moved
            memo[id(node)] = moved.expand(sizes(node.shape))
        elif node.op in _FUNCTIONS:
            memo[id(node)] = _FUNCTIONS[node.op](*operands)
        else:
            raise _UntriedError
    return memo[id(root)]


def _is_table(node: Node) -> bool:
    """Returns whether ``node`` looks numbers up in a table of all numbers, which gives the same."""
    return node.kind is GATHER and node.inputs[0].kind is IOTA and node.attrs == (-1,)
