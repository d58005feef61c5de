"""Finds the largest column of a product by the largest of each run of neighbours, so that no column is stored.

``logits = h @ W.T; logits.argmax(-1)`` writes a number for each word of a vocabulary and reads all of them again. Here
the product's epilogue makes a *key* of each element, an int64: its rank among all numbers in the upper half, and how
far its column is from the last of 2**32 in the lower one. So the largest key is that of the largest number, and of
equal ones that of the first, as torch has it; NaN is beyond all numbers, and -0.0 is 0.0. A kernel stores the largest
key of each ``RUN`` columns (a ``largest`` node), and a reduction takes the largest of a row, which has its column.

It is done for few rows, whose mainloops end in one epilogue (``gemm_epilogue.cuh``), where nothing else reads what is
compared. Neighbours: ``claim.py`` makes stores of ``largest`` nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jitgen.families.family import Partition
from jitgen.families.gemm.code_products import products_of_codes
from jitgen.families.gemm.matrices import batch_rank, products_of
from jitgen.ir import symbols
from jitgen.ir.body import FLOAT_FACTORS
from jitgen.ir.graph import Movement, Node, Shape, walked
from jitgen.ir.index import Index
from jitgen.ir.nodes import CONTRACT, LARGEST, PRODUCTS, REDUCE
from jitgen.ir.patterns import Rewrite, Rewriter, Rewrites, operation, wildcards
from jitgen.ir.regions import Store
from jitgen.ir.symbols import Size
from jitgen.ir.views import Mover

RUN = 16
"""Neighbouring columns of which the largest is stored: every tile has a multiple of them."""
FEWEST_COLUMNS = 1024
"""Columns from which on it is done. A shorter row is little to write, and its argmax one kernel as well."""
MOST_ROWS = 8
"""Rows up to which it is done: above them mainloops by tensor maps, which have an epilogue of their own, are faster."""
COMPARED = ("float16", "bfloat16", "float32")
"""Dtypes whose numbers have a rank of 32 bits."""
NAN_RANK, COLUMNS = 2**31 - 1, 2**32
"""The rank of a NaN, above which an int32 has no number; and the factor of a rank in a key, whose low half is for the
column."""


def respelled(values: Sequence[Node], partition: Partition) -> Sequence[Node]:
    """Rewrites the products of ``values``, the results and temporaries of a whole graph, and what is read of them."""
    values, device = products_of_codes(values, partition), partition.device
    if device.uses_cutlass or device.batch_invariant or not partition.mover.any_behind(values, _is_argmax):
        return values
    images = _Rewriter(partition, values).images(values)
    return [images[id(value)] for value in values]


def _is_argmax(node: Node) -> bool:
    return node.kind is REDUCE and node.attrs == ("argmax", (len(node.shape) - 1,))


class _Rewriter(Rewriter):
    """Rewrites what is read of the products of ``values``, and of nothing else."""

    def __init__(self, partition: Partition, values: Sequence[Node]) -> None:
        super().__init__(_REWRITES, partition.mover)
        self.materialize, self.index, self.roots = partition.materialize, Index(values), set(values)

    def is_read_once(self, node: Node, product: Node) -> bool:
        """Returns whether ``product`` and what ``node`` has made of it is read for ``node`` alone."""
        inside = set(walked([node], lambda one: () if one.kind in PRODUCTS else one.inputs))
        from_product = set(walked([product], lambda one: [user for user in self.index.users[one] if user in inside]))
        before = from_product - {node}
        readers = (user for one in before for user in self.index.users[one])
        return self.roots.isdisjoint(before) and inside.issuperset(readers)

    def change(self, node: Node, rebuilt: Node) -> Node:
        return super().change(node, rebuilt) if _is_argmax(node) and node is rebuilt else rebuilt


def _is_joined(rewriter: _Rewriter, node: Node, x: Node) -> bool:
    products = products_of(x)
    if x.dtype not in COMPARED or len(products) != 1:
        return False
    (product,) = products
    if product.kind is not CONTRACT or product.shape != x.shape or batch_rank(product):
        return False
    if product.inputs[0].dtype not in FLOAT_FACTORS or not rewriter.is_read_once(node, product):
        return False
    decide, columns = rewriter.mover.decide, x.shape[-1]
    return (
        decide(symbols.compare("ge", columns, FEWEST_COLUMNS))
        and decide(symbols.compare("eq", symbols.mod(columns, RUN), 0))
        and decide(symbols.compare("le", symbols.product(x.shape[:-1]), MOST_ROWS))
    )


def _column_of_largest_key(rewriter: _Rewriter, node: Node, x: Node) -> Node:
    """Returns ``node``, the column of the largest number of each row of ``x``."""
    make, number = rewriter.make, rewriter.number

    def apply(op: str, *operands: Node, dtype: str) -> Node:
        return make(op, operands, dtype, x.shape, (), node.location)

    value = x if x.dtype == "float32" else apply("cast", x, dtype="float32")
    is_zero = apply("eq", value, number(0.0, "float32"), dtype="bool")
    bits = apply("bits", apply("where", is_zero, number(0.0, "float32"), value, dtype="float32"), dtype="int32")
    is_negative = apply("lt", bits, number(0, "int32"), dtype="bool")
    reversed_ = apply("bitwise_xor", bits, number(NAN_RANK, "int32"), dtype="int32")
    rank = apply("where", is_negative, reversed_, bits, dtype="int32")
    is_nan = apply("ne", value, value, dtype="bool")
    rank = apply("where", is_nan, number(NAN_RANK, "int32"), rank, dtype="int32")
    high = apply("mul", apply("cast", rank, dtype="int64"), number(COLUMNS, "int64"), dtype="int64")
    column = make("iota", (), "int64", x.shape, (len(x.shape) - 1,), node.location)
    key = apply("add", high, apply("sub", number(COLUMNS - 1, "int64"), column, dtype="int64"), dtype="int64")
    runs = _runs(x.shape, RUN)
    keys = rewriter.materialize(make(LARGEST.name, (key,), "int64", runs, (RUN,), node.location))
    largest = make("reduce", (keys,), "int64", node.shape, ("max", (len(runs) - 1,)), node.location)
    low = make("bitwise_and", (largest, number(COLUMNS - 1, "int64")), "int64", node.shape, (), node.location)
    return make("sub", (number(COLUMNS - 1, "int64"), low), "int64", node.shape, (), node.location)


(x,) = wildcards("x")

_REWRITES = Rewrites(
    Rewrite(
        f"the argmax of a product's columns is that of the largest of each {RUN}, which alone are stored",
        operation("reduce", x).where(_is_argmax),
        _column_of_largest_key,
        _is_joined,
    )
)

# -------------------------------------------------------------------------------------------------------------- stores


def _runs(shape: Shape, run: int) -> Shape:
    """Returns the shape of the runs of columns, the last dimension of ``shape``."""
    count: Size = symbols.floordiv(shape[-1], run)  # type: ignore[assignment]
    return (*shape[:-1], count)


def store_of(position: int, node: Node) -> Store:
    """Stores ``node``, result number ``position``; of a ``largest`` node its elements, as runs."""
    if node.kind is not LARGEST:
        return Store(position, node)
    return Store(position, node.inputs[0], run=node.attrs.run)


def of_runs(store: Store) -> Store:
    """Returns ``store`` with the movements of a result that has runs of columns, where it had those of columns."""
    movements: tuple[Movement, ...] = tuple((attrs, _runs(shape, store.run)) for attrs, shape in store.movements)
    return replace(store, movements=movements) if store.run > 1 else store


def in_memory(node: Node, store: Store, mover: Mover) -> Node:
    """Returns what ``store`` was made for, over ``node``, in which its elements are: a reduction for runs of them."""
    if store.run == 1:
        return node
    shape = (*_runs(node.shape, store.run), store.run)
    runs = mover.move(node, ("reshape",), shape)
    last = len(shape) - 1
    largest = mover.builder.make("reduce", (runs,), node.dtype, (*shape[:-1], 1), ("max", (last,)), node.location)
    return mover.move(largest, ("squeeze", last), shape[:-1])
