"""Rewrites products of decoded values to products of their codes. A decoded value is a code cast to another dtype,
optionally less a zero-point and times a scale that is one for a row of the operand.

In ``((q - z) * s) @ ((p - y) * t).T``, with codes q and p of int8 or uint8, all but the codes leaves the product::

    s * t * (q @ p - z * sum of p - y * sum of q + K * z * y)

The product of integer codes is an exact int32. Scales and zero-points are in the epilogue, these as float64, since
their terms cancel; sums of codes over K are reductions. What multiplies is then a byte where it was a float of up to
eight, and no cast is stored. Results differ from those of the formula as it stands by the roundings that are left out;
where a scale is infinite they may be infinite and not NaN. Codes that are 8-bit floats have no zero-points, and
products of them are summed in float32, so that a product in float64 stays one. Hopper's tensor cores keep some 14 bits
of the sum of 128 products of them, and round it towards zero: sums of numbers of one sign are 6e-4 of their magnitude
too small (measured, for any K).

It is for CPUs, whose mainloops multiply integers of one byte (``gemm_integers.hpp``), and for the tensor cores of GPUs.
Where these have no instruction for 8-bit floats, a product of such is one of bfloat16, which has all of their numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jitgen.device import Device
from jitgen.families.family import Partition
from jitgen.families.gemm.block_products import multiplies_blocks, of_weight, product_of_blocks, scales_of_blocks
from jitgen.families.gemm.low_bit_products import products_of_low_bits
from jitgen.families.gemm.mainloops import multiplies_codes
from jitgen.families.gemm.quantised_results import with_quantised_results
from jitgen.ir import symbols
from jitgen.ir.analysis import nearest, one_of, unrounded, varies
from jitgen.ir.equations import axes
from jitgen.ir.exponentials import exponential_behind
from jitgen.ir.graph import Node, kinds_of, topological
from jitgen.ir.nodes import BLOCKS, CAST, CONTRACT, DEQUANTIZE, PRODUCTS
from jitgen.ir.ops import FLOATS
from jitgen.ir.patterns import Rewrite, Rewriter, Rewrites, contract, operation, wildcards
from jitgen.ir.views import Mover
from jitgen.quant.codes import CODES, FLOAT8, INTEGERS, SIGNED, longest_exact_sum

NARROW_FLOATS = ("float16", "bfloat16")

x, weight, groups = wildcards("x weight groups")


@dataclass(frozen=True)
class Operand:
    """Describes an operand of a product as ``(codes - zero) * scale``.

    Attributes:
        codes: of a dtype of ``multiplied_codes``.
        scale, zero: of the codes' shape, but the same along K; None for 1 and 0.
        blocks: scales of blocks (``block_products.py``); None for 1.
    """

    codes: Node
    scale: Node | None = None
    zero: Node | None = None
    blocks: Node | None = None


def products_of_codes(values: Sequence[Node], partition: Partition) -> Sequence[Node]:
    """Rewrites the products of ``values``, the results and temporaries of a whole graph, that are products of codes."""
    others = len(values) - len(partition.temporaries.values)
    return with_quantised_results(_products_of_codes(values, partition), partition, others)


def _products_of_codes(values: Sequence[Node], partition: Partition) -> Sequence[Node]:
    values, device = products_of_low_bits(values, partition), partition.device
    codes = multiplied_codes(device)
    if not codes or PRODUCTS.isdisjoint(kinds_of(values)):
        return values
    if not partition.mover.any_behind(values, lambda node: node.kind is CAST and node.inputs[0].dtype in codes):
        return values
    images = _Rewriter(_REWRITES, partition.mover, _scores(values), device).images(values)
    return [images[id(value)] for value in values]


def multiplied_codes(device: Device) -> tuple[str, ...]:
    """Returns the dtypes of codes whose products are rewritten for ``device``."""
    return {"cuda": tuple(CODES), "triton": SIGNED, "cpp": INTEGERS}[device.dialect]


def _scores(values: Sequence[Node]) -> frozenset[int]:
    """Returns the ids of products whose exponentials are multiplied again: attention computes these itself."""
    products = [node for node in topological(values) if node.kind is CONTRACT and exponential_behind(node.inputs[0])]
    return frozenset(id(score) for node in products for score in nearest(node.inputs[0], [CONTRACT], lambda _: True))


class _Rewriter(Rewriter):
    """Rewrites products for ``device``, but for ``scores``."""

    def __init__(self, rewrites: Rewrites, mover: Mover, scores: frozenset[int], device: Device) -> None:
        super().__init__(rewrites, mover)
        self.scores, self.codes = scores, multiplied_codes(device)
        # Triton's mainloops decode 8-bit floats to float16 as they read them, where the target has no instruction.
        self.multiplies_float8 = device.dialect == "triton" or multiplies_codes(FLOAT8[0], device.target)
        self.multiplies_blocks = multiplies_blocks(device)

    def change(self, node: Node, rebuilt: Node) -> Node:
        return rebuilt if id(node) in self.scores else super().change(node, rebuilt)


def _product_of_codes(rewriter: _Rewriter, node: Node, x: Node, weight: Node) -> Node | None:
    """Returns ``node`` as a product of codes; None if its operands are not computed from any, or are codes already."""
    left, right = _operand(x, rewriter), _operand(weight, rewriter, is_weight=True)
    if left is None or right is None or not {x.dtype, weight.dtype}.isdisjoint(rewriter.codes):
        return None
    if left.codes.dtype in FLOAT8 and not rewriter.multiplies_float8:
        return None
    return _product(rewriter, node, left, right)


def _grouped_product(rewriter: _Rewriter, node: Node, x: Node, weight: Node) -> Node | None:
    """Returns ``node``, the products of groups of rows, as one of codes with scales of blocks; None where its operands
    are no such."""
    left, right = _operand(x, rewriter), _operand(weight, rewriter, is_weight=True)
    if left is None or right is None or left.blocks is None or right.blocks is None or left.zero or left.scale:
        return None
    product = product_of_blocks(node, left, right, rewriter.mover)
    if product is None or node.dtype not in NARROW_FLOATS:
        return product
    return unrounded(product, node.dtype, rewriter.mover)


def _product_of_numbers(rewriter: _Rewriter, node: Node, x: Node, weight: Node) -> Node | None:
    """Returns ``node``, whose operands are computed from 8-bit floats, as a product of bfloat16 numbers."""
    left, right = _operand(x, rewriter), _operand(weight, rewriter)
    if left is None or right is None or left.blocks or right.blocks:
        return None
    if not {left.codes.dtype, right.codes.dtype} <= {*FLOAT8}:
        return None
    if left.codes is x or (x.dtype, weight.dtype, node.dtype) == ("bfloat16", "bfloat16", "float32"):
        return None
    decoded = [
        replace(one, codes=rewriter.make("cast", (one.codes,), "bfloat16", one.codes.shape, (), node.location))
        for one in (left, right)
    ]
    return _product(rewriter, node, *decoded)


def _product(rewriter: _Rewriter, node: Node, left: Operand, right: Operand) -> Node | None:
    """Returns ``node`` as the product of the codes of its operands; None if their sums may not fit int32, or have fewer
    bits than those of ``node``."""
    mover = rewriter.mover
    x = left.codes
    length = x.shape[-1]
    wide = node.dtype if node.dtype not in NARROW_FLOATS else "float32"
    sums = _sums(left.codes.dtype, right.codes.dtype, wide)
    if sums == "int32" and node.dtype != "int32":
        most = longest_exact_sum(left.codes.dtype, right.codes.dtype)
        sums = sums if mover.decide(symbols.compare("le", length, most)) else None
    if sums is None or mover.decide(symbols.compare("eq", length, 0)):
        return None
    attrs = node.attrs.equation, sums, "fast" if node.attrs.precision == "fast" else "ieee"
    has_zeros = left.zero is not None or right.zero is not None
    codes: Node | None
    if left.blocks is None and right.blocks is None:
        codes = rewriter.make("contract", (left.codes, right.codes), sums, node.shape, attrs, node.location)
    else:
        codes = None if has_zeros or wide != "float32" else product_of_blocks(node, left, right, mover)
    if codes is None:
        return None
    # The terms of zero-points cancel: each may be 2^31, and what is left of them as small as the result.
    terms = _Terms(rewriter, node, "float64" if has_zeros else wide)
    total = terms.cast(codes)
    for one, other, spread, others_spread in (
        (left, right, terms.of_rows, terms.of_columns),
        (right, left, terms.of_columns, terms.of_rows),
    ):
        if one.zero is not None:
            total = terms.pointwise(
                "sub", total, terms.pointwise("mul", spread(one.zero), others_spread(terms.sum(other.codes)))
            )
    if left.zero is not None and right.zero is not None:
        zeros = terms.pointwise("mul", terms.of_rows(left.zero), terms.of_columns(right.zero))
        count = terms.cast(mover.builder.scalar(length, "int64"))
        total = terms.pointwise("add", total, terms.pointwise("mul", zeros, count))
    terms = _Terms(rewriter, node, wide)
    total = terms.cast(total)
    if left.scale is not None:
        total = terms.pointwise("mul", total, terms.of_rows(left.scale))
    if right.scale is not None:
        total = terms.pointwise("mul", total, terms.of_columns(right.scale))
    return unrounded(total, node.dtype, mover) if node.dtype != wide else total


def _sums(left: str, right: str, wide: str) -> str | None:
    """Returns the dtype in which products of these codes, or of bfloat16 that they were decoded to, are summed; None if
    no instruction multiplies the pair, or if the sums would have fewer bits than sums in ``wide``."""
    integers = [dtype in INTEGERS for dtype in (left, right)]
    if all(integers):
        return "int32"
    return "float32" if not any(integers) and wide == "float32" else None


_REWRITES = Rewrites(
    Rewrite(
        "products of groups of rows are those of codes, with the scales of their blocks",
        operation("grouped", x, weight, groups),
        _grouped_product,
        lambda rewriter, node: rewriter.multiplies_blocks and node.dtype in ("float32", *NARROW_FLOATS),
    ),
    Rewrite(
        "a product of codes cast to another dtype is a product of the codes, with scales and zero-points after it",
        contract(x, weight),
        _product_of_codes,
    ),
    Rewrite(
        "a product of 8-bit floats, for which the target has no instruction, is one of bfloat16 numbers",
        contract(x, weight),
        _product_of_numbers,
        lambda rewriter: not rewriter.multiplies_float8,
    ),
)


# ------------------------------------------------------------------------------------------------------------ operands


def _operand(root: Node, rewriter: _Rewriter, is_weight: bool = False) -> Operand | None:
    """Describes ``root``, an operand of a product; None if it is not computed from codes in this manner."""
    node, last = root, (len(root.shape) - 1,)
    base = node.under_views
    if base.kind is DEQUANTIZE and base.attrs.layout == BLOCKS and rewriter.multiplies_blocks:
        codes, scales = of_weight(node, rewriter.mover)
        return Operand(codes, blocks=scales)
    blocks: Node | None = None
    scale: Node | None = None
    zero: Node | None = None
    while node.dtype not in rewriter.codes:
        if node.kind is CAST and (node.inputs[0].dtype in rewriter.codes or node.dtype == node.inputs[0].dtype):
            node = node.inputs[0]
            continue
        if node.op not in ("mul", "div", "sub") or zero is not None:
            return None
        value, other = node.inputs
        if node.op == "mul" and (not varies(value, last) or _is_of_codes(other, rewriter)):
            value, other = other, value
        if value.kind.is_number:
            return None
        if varies(other, last):
            if not rewriter.multiplies_blocks or node.op != "mul" or blocks is not None:
                return None
            blocks = scales_of_blocks(other, rewriter.mover, is_weight)
            if blocks is None:
                return None
            node = value
            continue
        other = one_of(other, last, rewriter.mover)
        if node.op == "sub":
            zero = other
        elif node.dtype not in FLOATS and node.dtype not in NARROW_FLOATS:
            return None
        else:
            scale = _combined(scale, node.op, other, node, rewriter)
        node = value
    return None if zero is not None and node.dtype in FLOAT8 else Operand(node, scale, zero, blocks)


def _is_of_codes(node: Node, rewriter: _Rewriter) -> bool:
    """Returns whether ``node`` is a cast of codes."""
    while node.kind is CAST and node.dtype not in rewriter.codes:
        node = node.inputs[0]
    return node.dtype in rewriter.codes


def _combined(scale: Node | None, op: str, factor: Node, node: Node, rewriter: Rewriter) -> Node:
    """Multiplies ``scale`` by ``factor``, or divides it by that."""
    if scale is None and op == "mul":
        return factor
    first = rewriter.number(1.0, node.dtype) if scale is None else scale
    shape = max(first.shape, factor.shape, key=len)
    return rewriter.make(op, (first, factor), node.dtype, shape, (), node.location)


class _Terms:
    """Makes what a product of codes is combined with: values of the shape of ``product``, computed in ``dtype``."""

    def __init__(self, rewriter: Rewriter, product: Node, dtype: str) -> None:
        self.rewriter, self.product, self.dtype = rewriter, product, dtype
        self.mover: Mover = rewriter.mover
        named = axes(product.attrs.equation)
        self.batch, self.rows = len(named.batch), len(named.rows)

    def cast(self, node: Node) -> Node:
        if node.dtype == self.dtype:
            return node
        return self.rewriter.make("cast", (node,), self.dtype, node.shape, (), self.product.location)

    def pointwise(self, op: str, left: Node, right: Node) -> Node:
        return self.rewriter.make(op, (left, right), self.dtype, self.product.shape, (), self.product.location)

    def sum(self, codes: Node) -> Node:
        """Sums ``codes`` over K, which stays as a size of 1."""
        wide = self.rewriter.make("cast", (codes,), "int32", codes.shape, (), self.product.location)
        last = len(codes.shape) - 1
        shape = (*codes.shape[:-1], 1)
        return self.rewriter.make("reduce", (wide,), "int32", shape, ("sum", (last,)), self.product.location)

    def of_rows(self, node: Node) -> Node:
        """Spreads values of rows of the activation, (batch..., rows..., 1), along the columns of the product."""
        return self._spread(self.cast(node))

    def of_columns(self, node: Node) -> Node:
        """Spreads values of rows of the weight, (batch..., columns, 1), along the rows of the product."""
        node = self.cast(node)
        if not node.shape:  # of the tensor, rounded to 16 bits
            return self._spread(node)
        order = (*range(self.batch), self.batch + 1, self.batch)
        node = self.mover.permute(node, order)
        for _ in range(self.rows - 1):
            node = self.mover.unsqueeze(node, self.batch)
        return self._spread(node)

    def _spread(self, node: Node) -> Node:
        if node.kind.is_number or node.shape == self.product.shape:
            return node
        return self.mover.move(node, ("expand",), self.product.shape)
