"""Decides in which order an operand lies whose rows are neighbours in memory, as in a gradient ``dy.T @ x``, and
whether one that is in memory is copied.

Products on a CPU read either order as fast. On Hopper tensor maps describe, and ``wgmma`` reads, an activation of 16
bits along K, its own order, and along M, if the lines of that order begin at multiples of 16 bytes. Other kernels of a
GPU read it faster along K.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jitgen.device import Device
from jitgen.families.family import Partition, Question
from jitgen.ir.graph import Node, topological
from jitgen.ir.nodes import CONTRACT, DEQUANTIZE, GATHER, GROUPED, PRODUCTS, REDUCE, VIEW
from jitgen.ir.program import Decision
from jitgen.ir.views import is_transposed
from jitgen.kernel.operands import ACCESS_BYTES, item_size
from jitgen.schedule.cost import Effort

SLOWER = 3.0
"""What products without tensor maps take longer than those with them, as a share of the time of these: the ``dense``
mainloop takes 804 us for 4096 x 4096 x 4096 where a copy and ``wgmma`` take 203, and ``mma`` with int4 weights 7.5 ms
for 4096 x 14336 x 4096 where a copy that transposes and ``wgmma`` take 0.76 (H200,
``docs/measured/h200-transposed-activations.json``)."""
STREAMED_ROWS = 16
"""Rows of an activation up to which products read it without tensor maps."""
TRANSPOSING = 12
"""How many times as long a copy takes that transposes: 2.5 ms where its bytes take 0.2 (gradients of the products of
Llama-3-8B's layer, 4,096 rows, H200)."""


@dataclass(frozen=True)
class Order(Question):
    """Asks whether a computed or copied operand is stored along its rows, as what it is computed from lies.

    Attributes:
        rows, length: of the operand: M or N of the product, and K.
        dtype: of the operand.
        is_weight: whether it is the weight.
    """

    rows: Any
    length: Any
    dtype: str
    is_weight: bool = False

    def __str__(self) -> str:
        return f"transposed {'weight' if self.is_weight else 'activation'} [{self.rows}, {self.length}]"

    def placement(self, fused: bool) -> str:
        return f"stored along {('N' if self.is_weight else 'M') if fused else 'K'}"

    def decide(self, device: Device) -> Decision:
        if not self.rows > STREAMED_ROWS:
            return Decision(False, "products of few rows read it along K")
        is_mapped = self.rows * item_size(self.dtype) % ACCESS_BYTES == 0
        return Decision(is_mapped, f"its lines are {'' if is_mapped else 'no '}multiples of {ACCESS_BYTES} bytes")


@dataclass(frozen=True)
class Unmapped(Question):
    """Asks whether an operand in memory is copied that tensor maps do not describe as it lies: products without them
    (the ``dense`` mainloop) are slower.

    Attributes:
        rows, length: of the operand: M or N of the product, and K.
        columns: N where it is the activation, and M where it is the weight.
        dtype: of the operand.
        batch: the sizes of the dimensions before its rows.
        along: how it lies: see ``Lines``.
        either: whether kernels read it along its rows as well as along K.
        is_weight: whether it is the weight.
    """

    placements = ("copied before its product", "read as it lies")
    rows: Any
    columns: Any
    length: Any
    dtype: str
    batch: tuple[Any, ...]
    along: str
    either: bool
    is_weight: bool = False

    def __str__(self) -> str:
        words = "weight [{}, {}] of {} rows" if self.is_weight else "activation [{}, {}] of {} columns"
        return f"{words.format(self.rows, self.length, self.columns)} that no tensor map describes"

    def decide(self, device: Device) -> Decision:
        size = item_size(self.dtype)
        if device.batch_invariant:  # one mainloop computes a row, whatever the number of rows
            is_copied = not self.is_weight and self.length * size % ACCESS_BYTES == 0
            return Decision(is_copied, f"{'' if is_copied else 'not '}for any number of rows")
        keeps_order = self.along != "rows" or (self.either and self.rows * size % ACCESS_BYTES == 0)
        if (self.rows if keeps_order and self.along == "rows" else self.length) * size % ACCESS_BYTES:
            return Decision(False, f"lines of a copy are no multiples of {ACCESS_BYTES} bytes either")
        matrices = math.prod(self.batch)
        elements = matrices * self.rows * self.length
        moved = 2 * size * elements * (1 if keeps_order else TRANSPOSING)
        copied = Effort(moved=moved, launches=1).microseconds(device)
        product = Effort(products=2 * elements * self.columns, dtype=self.dtype).microseconds(device)
        activations, streamed = (self.columns, self.rows) if self.is_weight else (self.rows, self.columns)
        weights = Effort(moved=size * matrices * streamed * self.length).microseconds(device)
        more = max((1 + SLOWER) * product, weights) - max(product, weights)
        words = f"{copied:.3g} us to copy it, {more:.3g} us more to multiply it as it lies"
        return Decision(activations > STREAMED_ROWS and copied < more, words)


def is_copied(product: Node, partition: Partition) -> bool:
    """Returns whether the activation of ``product``, a tensor, is copied because no tensor map describes it as its
    kernel reads it, while one describes the weights."""
    if product.kind is not CONTRACT or not _is_mapped(product.inputs[0].dtype, partition.device):
        return False
    (x, weight), (*batch, rows, columns) = product.inputs, product.shape
    either = weight.under_views.kind is not DEQUANTIZE
    lines = partition.memory.lines(x)
    if lines.are_mapped and (either or lines.along == "columns"):
        return False
    if weight.is_in_memory and not partition.memory.lines(weight).are_mapped:
        return False
    question = Unmapped(rows, columns, x.shape[-1], x.dtype, tuple(batch), lines.along, either)
    return partition.decide("gemm", question).fused


def is_weight_copied(product: Node, x: Node, partition: Partition) -> bool:
    """Returns whether the weight of ``product``, a tensor, is copied because no tensor map describes it, while one
    describes ``x``, the activation as it will lie."""
    weight = product.inputs[1]
    if product.kind is not CONTRACT or len(product.inputs) != 2 or len(product.shape) != 2:
        return False
    if not (_is_mapped(x.dtype, partition.device) and x.is_in_memory and weight.is_in_memory):
        return False
    lines = partition.memory.lines(weight)
    if lines.are_mapped or not partition.memory.lines(x).are_mapped:
        return False
    rows, columns = product.shape
    question = Unmapped(columns, rows, x.shape[-1], x.dtype, (), lines.along, either=True, is_weight=True)
    return partition.decide("gemm", question).fused


def is_stored_along_rows(x: Node, partition: Partition) -> bool:
    """Returns whether the computed activation ``x`` (..., M, K) of a product of dense operands may be stored along
    M."""
    if not partition.device.is_gpu:
        return True
    if not _is_mapped(x.dtype, partition.device):
        return False
    *_, rows, length = x.shape
    return partition.decide("gemm", Order(rows, length, x.dtype)).fused


def copied_weight(product: Node, partition: Partition, materialize: Callable[[Node], Node]) -> Node:
    """Copies the weight of ``product``, a tensor, along N as it lies where a tensor map describes that, else along
    K."""
    weight = product.inputs[1]
    columns, length = weight.shape
    order = Order(columns, length, weight.dtype, is_weight=True)
    if _lies_across(weight, partition) and partition.decide("gemm", order).fused:
        return _crossed(weight, partition, materialize)
    return materialize(weight)


def _is_mapped(dtype: str, device: Device) -> bool:
    """Returns whether products of ``device`` read an activation of ``dtype`` by tensor maps along M."""
    is_hopper = device.dialect == "cuda" and not device.uses_cutlass and device.target.has_warpgroup_products
    return is_hopper and dtype in ("float16", "bfloat16")


def repeated_row(product: Node, partition: Partition, materialize: Callable[[Node], Node]) -> Node | None:
    """Returns the activation of the grouped ``product`` as a view that repeats the only row of a tensor, if it is
    gathered from that, as the rows of one token's experts are; else None. A GPU reads the first element wherever an
    index is, in range or not. Bits that must not depend on the number of rows are those of the mainloop for many."""
    x, device = product.inputs[0], partition.device
    if product.kind is not GROUPED or not device.is_gpu or device.batch_invariant:
        return None
    if x.kind is not GATHER or len(x.shape) != 2:
        return None
    source = x.inputs[0]
    if x.attrs != (-1, 1) or source.shape[0] != 1 or source.under_views.kind is DEQUANTIZE:
        return None
    row = source if source.is_in_memory else materialize(source)
    return partition.mover.move(row, ("expand",), x.shape)


def activation_in_its_order(product: Node, partition: Partition, materialize: Callable[[Node], Node]) -> Node:
    """Materialises the activation of ``product``, computed or to be copied, in its order, where kernels read either.
    Otherwise one that is computed of reductions is copied from that order, so that they are computed once."""
    x, weight = product.inputs[:2]
    if not partition.device.is_gpu:
        return in_its_order(x, partition, materialize)
    is_dense = product.kind is CONTRACT and weight.under_views.kind is not DEQUANTIZE
    if not is_dense or not _lies_across(x, partition):
        return materialize(x)
    if is_stored_along_rows(x, partition):
        return in_its_order(x, partition, materialize)
    return materialize(_crossed(x, partition, materialize) if REDUCE in x.kinds else x)


def in_its_order(node: Node, partition: Partition, materialize: Callable[[Node], Node]) -> Node:
    """Materialises the computed operand ``node`` (..., rows or columns, k) in the order of what it is computed from:
    transposed if most of that is so.

    Products on a CPU, and of 16-bit weights, read either order as fast, and a value that another product reads
    untransposed is computed once.
    """
    if (partition.device.is_gpu and item_size(node.dtype) != 2) or not _lies_across(node, partition):
        return materialize(node)
    return _crossed(node, partition, materialize)


def _crossed(node: Node, partition: Partition, materialize: Callable[[Node], Node]) -> Node:
    """Materialises the matrices ``node`` transposed."""
    last = len(node.shape) - 1
    swap = "permute", (*range(last - 1), last, last - 1)
    crossed = (*node.shape[:-2], node.shape[last], node.shape[last - 1])
    return partition.mover.move(materialize(partition.mover.move(node, swap, crossed)), swap, node.shape)


def _lies_across(node: Node, partition: Partition) -> bool:
    """Returns whether most of what ``node`` is computed from has its last dimension but one innermost in memory. Where
    no strides describe a view, because it joins dimensions, it is innermost as far as that of its tensor is."""
    last = len(node.shape) - 1
    if last < 1:
        return False
    leaves = [
        leaf for leaf in topological([node], leaves={VIEW}) if leaf.under_views.kind in PRODUCTS or leaf.is_in_memory
    ]
    across = along = 0
    for leaf in leaves:
        if len(leaf.shape) != len(node.shape):
            continue
        if partition.memory.strides(leaf) is None:
            across, along = across + is_transposed(leaf), along + (not is_transposed(leaf))
        else:
            contiguous = partition.memory.lines(leaf, unit=1).along
            across, along = across + (contiguous == "rows"), along + (contiguous == "columns")
    return across > along
