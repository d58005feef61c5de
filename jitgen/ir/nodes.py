"""Lists the kinds of nodes: a row for each kind that a graph may have, and for each operation of ``ir/ops.py``.

A row states what is true of every node of its kind: how many operands it has and where an element of it reads them,
what its attributes are called, which rule moves a view of it to its operands and which computes it over a batch. Code
asks the row (``node.kind.reads_elsewhere``) instead of comparing names; a new node is a row here.

What a row cannot say, because it takes more than the IR, is a table of the package that knows it, keyed by the kind:
derivatives (``gradients/structured.py``) and what a manifest may hold (``deploy/node_schema.py``). A test
(``tests/unit/test_nodes.py``) fails where one of them misses a kind.

Neighbours: ``ir/attributes.py`` names the attributes, ``ir/moves.py``, ``ir/gathers.py`` and ``ir/batching.py`` have
the rules, ``ir/graph.py`` the nodes.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jitgen.ir import batching, moves, symbols
from jitgen.ir.attributes import (
    AlongAttrs,
    BlockAttrs,
    ContractAttrs,
    ConvolveAttrs,
    CountedAttrs,
    DequantizeAttrs,
    GroupedAttrs,
    InputAttrs,
    LargestAttrs,
    LimitedAttrs,
    NothingAttrs,
    NumberAttrs,
    OwnAttrs,
    ReduceAttrs,
    ScanAttrs,
    ScatterAttrs,
    SortAttrs,
    launch_attributes,
    view,
)
from jitgen.ir.gathers import move_gather
from jitgen.ir.ops import OPS, OWN_FLOPS, Op
from jitgen.ir.symbols import Size

if TYPE_CHECKING:
    from jitgen.ir.graph import Node, Shape
    from jitgen.ir.views import Mover

MANY = 1 << 30
"""Operands without a limit."""

Move = Callable[["Mover", "Node", tuple[Any, ...], "Shape"], "Node | None"]
BatchRule = Callable[["batching.Batch", "Node", Any, Any], "batching.Replacement"]


class Reads(enum.Enum):
    """Says where an element of a node reads the operands."""

    NOTHING = enum.auto()
    OWN = enum.auto()
    """At its own coordinates: the node is pointwise."""
    FIRST = enum.auto()
    """It is the first operand's element at its own coordinates; other operands are not read for its value."""
    MOVED = enum.auto()
    """At coordinates that follow from its own and the shapes."""
    ROW = enum.auto()
    """Along its row, or the row's beginning."""
    ANYWHERE = enum.auto()


def _no_flops(node: Node) -> Size:
    return 0


def _reduced(node: Node) -> Size:
    return symbols.product(node.inputs[0].shape[dim] for dim in node.attrs.dims)


def _summed_products(node: Node) -> Size:
    return symbols.mul(2, node.inputs[0].shape[-1])  # type: ignore[return-value]


def _summed_groups(node: Node) -> Size:
    length = symbols.mul(2, node.inputs[0].shape[-1])
    groups = node.shape[0] if len(node.shape) == 3 else 1
    return symbols.floordiv(length, groups or 1)  # type: ignore[return-value]


def _summed_windows(node: Node) -> Size:
    return symbols.mul(2, symbols.product(node.inputs[1].shape[2:]))  # type: ignore[return-value]


def _one(node: Node) -> Size:
    return 1


@dataclass(frozen=True, eq=False, repr=False)
class Kind:
    """Describes one kind of node. Kinds are compared by identity.

    Attributes:
        name: ``Node.op`` of its nodes, as in manifests and request keys.
        doc: what a node is, in words.
        operands: the least and the greatest number of them.
        reads: where an element reads them.
        attributes: takes a node's attributes by position and names them (``ir/attributes.py``).
        move: moves a view of a node to its operands; None where every view stays, or where ``commutes``.
        batch: computes a node over a batch; None where no operand can be batched.
        flops: the operations that one element of a node takes, by the weights of ``ir/ops.py``; a multiply-add is two.
        is_number: whether it is one number, without dimensions.
        takes_weights: whether an operand may be a quantised weight, or a view of one.
        read_whole: whether its value is read as one tensor, whatever it is computed from.
        is_saved: whether a forward saves the value where the backward reads it, instead of computing it again.
    """

    name: str
    doc: str
    operands: tuple[int, int]
    reads: Reads
    attributes: Callable[..., Any] = NothingAttrs
    move: Move | None = None
    batch: BatchRule | None = None
    flops: Callable[[Node], Size] = _no_flops
    is_number: bool = False
    takes_weights: bool = False
    read_whole: bool = False
    is_saved: bool = False

    @cached_property
    def is_pointwise(self) -> bool:
        """Returns whether an element is computed from the operands' elements at the same coordinates."""
        return self.reads is Reads.OWN

    @cached_property
    def commutes(self) -> bool:
        """Returns whether every view of a node is the node over the same view of its operands."""
        return self.is_number or self.reads in (Reads.OWN, Reads.FIRST)

    @cached_property
    def reads_elsewhere(self) -> bool:
        """Returns whether an element needs operands at other coordinates, and not only its row, or the beginning of
        it."""
        return self.reads is Reads.ANYWHERE

    @cached_property
    def reads_others(self) -> bool:
        """Returns whether an element needs operands at other coordinates: along its row, or anywhere."""
        return self.reads in (Reads.ROW, Reads.ANYWHERE)

    def __repr__(self) -> str:
        return self.name


def _plain(*attributes: Any) -> tuple[Any, ...]:
    return attributes


NO, ONE, TWO = (0, 0), (1, 1), (2, 2)

INPUT = Kind("input", "a tensor input of the graph", NO, Reads.NOTHING, InputAttrs, read_whole=True)
CONST = Kind("const", "an exact number, rounded where it is used", NO, Reads.NOTHING, NumberAttrs, is_number=True)
SCALAR = Kind("scalar", "a host scalar known at the call", NO, Reads.NOTHING, NumberAttrs, is_number=True)
IOTA = Kind("iota", "the index along a dimension, an integer", NO, Reads.NOTHING, AlongAttrs)
VIEW = Kind(
    "view",
    "movement without arithmetic (``ir/views.py``)",
    ONE,
    Reads.MOVED,
    view,
    batch=batching.batch_view,
    takes_weights=True,
    read_whole=True,
)
CAT = Kind(
    "cat",
    "the operands, one after the other along a dimension",
    (2, MANY),
    Reads.ANYWHERE,
    AlongAttrs,
    moves.move_cat,
    batching.batch_cat,
)
REDUCE = Kind(
    "reduce",
    "the elements along dimensions, which stay as sizes of 1, combined to one; kinds are ``graph.REDUCTIONS``",
    ONE,
    Reads.ROW,
    ReduceAttrs,
    moves.move_reduce,
    batching.batch_reduce,
    _reduced,
    is_saved=True,
)
CONTRACT = Kind(
    "contract",
    "the product of an activation and a weight, whose axes an equation names (``ir/equations.py``)",
    TWO,
    Reads.ANYWHERE,
    ContractAttrs,
    moves.move_contract,
    batching.batch_contract,
    _summed_products,
    takes_weights=True,
    read_whole=True,
    is_saved=True,
)
GROUPED = Kind(
    "grouped",
    "products of an activation and the weights of groups, among which offsets or ids (the third operand, integers) "
    "divide rows, or K (``ir/equations.py``); rows beyond the last group are 0",
    (3, 3),
    Reads.ANYWHERE,
    GroupedAttrs,
    moves.move_grouped,
    flops=_summed_groups,
    takes_weights=True,
    read_whole=True,
    is_saved=True,
)
CONVOLVE = Kind(
    "convolve",
    "images convolved with filters (``ir/convolutions.py``)",
    TWO,
    Reads.ANYWHERE,
    ConvolveAttrs,
    batch=batching.batch_convolve,
    flops=_summed_windows,
    read_whole=True,
    is_saved=True,
)
GATHER = Kind(
    "gather",
    "the elements of the first operand that integers, the other operands, choose (``ir/gathers.py``)",
    (2, MANY),
    Reads.ANYWHERE,
    _plain,
    move_gather,
    batching.batch_gather,
    is_saved=True,
)
SCATTER = Kind(
    "scatter",
    "the first operand, of which elements that integers, the operands from the third on, choose are replaced by the "
    "second one's or combined with them (``ir/scatters.py``)",
    (2, MANY),
    Reads.ANYWHERE,
    ScatterAttrs,
    batch=batching.batch_scatter,
    is_saved=True,
)
LAUNCH = Kind(
    "launch",
    "the operands as the launch of a user's kernel leaves one of them, which it writes (``ir/launches.py``)",
    (1, MANY),
    Reads.ANYWHERE,
    launch_attributes,
    read_whole=True,
    is_saved=True,
)
OWN = Kind(
    "own",
    "a pointwise function that a user spelled in each dialect (``codegen/own_functions.py``)",
    (1, MANY),
    Reads.OWN,
    OwnAttrs,
    batch=batching.batch_pointwise,
    flops=lambda _: OWN_FLOPS,
    is_saved=True,
)
SCAN = Kind(
    "scan",
    "at every element, those up to it along a dimension combined (``ir/scans.py``)",
    ONE,
    Reads.ROW,
    ScanAttrs,
    moves.move_scan,
    batching.batch_along,
    _one,
    read_whole=True,
    is_saved=True,
)
SORT = Kind(
    "sort",
    "along a dimension, the elements of some ranks, or their indices (``ir/sorts.py``)",
    ONE,
    Reads.ANYWHERE,
    SortAttrs,
    moves.move_sort,
    batching.batch_along,
    read_whole=True,
    is_saved=True,
)
COUNTED = Kind(
    "counted",
    "a row of whole numbers below a bound in order, the rank of each, or how many there are up to each number "
    "(``ir/sorts.py``); only plans have such nodes",
    ONE,
    Reads.ANYWHERE,
    CountedAttrs,
    read_whole=True,
)
LIMITED = Kind(
    "limited",
    "at every element of a row whether it is of the groups that are kept (``ir/sorts.py``): 1 or 0; the second operand "
    "is the same, computed by other nodes; only plans have such nodes",
    (1, 2),
    Reads.ROW,
    LimitedAttrs,
    moves.move_limited,
)
TAKEN = Kind(
    "taken",
    "the elements of a row, the first operand, at the places of ranks, which the second operand sorts; only plans have "
    "such nodes",
    TWO,
    Reads.ROW,
)
LARGEST = Kind(
    "largest",
    "of each run of neighbours along the rows, which the last dimension has, the largest; only plans have such nodes",
    ONE,
    Reads.ANYWHERE,
    LargestAttrs,
)
BLOCKED = Kind(
    "blocked",
    "at every element, the combination of those of its block, neighbours of a row of which it has whole blocks; only "
    "plans have such nodes",
    ONE,
    Reads.ROW,
    BlockAttrs,
    flops=_one,
)
ROWS = "rows"
"""The layout of a ``dequantize`` node of dense codes (rows, K) of 8 bits, and a scale for each row."""
BLOCKS = "blocks"
"""The layout of a ``dequantize`` node of dense codes (rows, K) and scales of blocks, of x and of weights."""
DEQUANTIZE = Kind(
    "dequantize",
    "the weight (N, K) of codes, scales and, for some formats, zero-points; products read it, or views of it",
    (2, 4),
    Reads.ANYWHERE,
    DequantizeAttrs,
)
CAST = Kind(
    "cast",
    "the operand in the node's dtype, rounded where that is narrower; in the same dtype a copy",
    ONE,
    Reads.OWN,
    _plain,
    batch=batching.batch_pointwise,
)
BITS = Kind(
    "bits",
    "the number of the node's dtype that has the bits of the operand's, which is of the same size",
    ONE,
    Reads.OWN,
    batch=batching.batch_pointwise,
)
CUSTOM_GRADIENT = Kind(
    "custom_gradient",
    "the first operand, whose gradients the other operands state (``ir/custom_gradients.py``)",
    (1, MANY),
    Reads.FIRST,
    batch=batching.batch_stated,
)

_LEAVES = (INPUT, CONST, SCALAR, IOTA)
_SUMMED = (CONTRACT, GROUPED, CONVOLVE)
_ALONG = (SCAN, SORT, COUNTED, LIMITED, TAKEN, LARGEST, BLOCKED)
_MOVED = (VIEW, CAT, GATHER, SCATTER)
_COMPUTED = (*_MOVED, REDUCE, *_SUMMED, LAUNCH, OWN, *_ALONG, DEQUANTIZE, CAST, BITS, CUSTOM_GRADIENT)
PRODUCTS = frozenset({CONTRACT, GROUPED})
"""The kinds that the family of matrix products computes; an activation and a weight are their first operands."""
STRUCTURED = (*_LEAVES, *_COMPUTED)
"""The kinds that are no operation of ``ir/ops.py``."""


def _pointwise(op: Op) -> Kind:
    doc, operands, batch = op.doc or op.name, (op.arity, op.arity), batching.batch_pointwise
    return Kind(op.name, doc, operands, Reads.OWN, batch=batch, flops=lambda _: op.flops, is_saved=op.name == "philox")


KINDS: dict[str, Kind] = {
    **{kind.name: kind for kind in STRUCTURED},
    **{name: _pointwise(op) for name, op in OPS.items()},
}
"""Every kind by its name."""
EXP, EXP2, PHILOX = (KINDS[name] for name in ("exp", "exp2", "philox"))
