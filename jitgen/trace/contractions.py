"""Rows of torch's products: ``F.linear``, ``@``, ``matmul``, ``mm``, ``mv``, ``addmm``, ``addmv``, ``dot``, ``outer``.

The matrix products are one node, ``matmul``, of an activation ``(..., K)`` and a weight seen as ``(N, K)``; bias,
scaling and residuals are pointwise nodes after it, which ``ir/contractions.py`` puts into the same kernel. The product
is accumulated in float32 (float64 for float64) and not rounded before what follows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jitgen.errors import UnsupportedError
from jitgen.ir import symbols
from jitgen.ir.graph import Node, is_weight
from jitgen.spec import DTYPES
from jitgen.trace.guards import matmul_precision
from jitgen.trace.movement import view
from jitgen.trace.reductions import reduce
from jitgen.trace.table import row
from jitgen.trace.typing import pointwise

if TYPE_CHECKING:
    from jitgen.trace.tracer import Trace

ACTIVATIONS = ("float64", "float32", "float16", "bfloat16")


def contract(trace: Trace, x: Node, weight: Node) -> Node:
    """``x`` (..., K) times the transpose of ``weight`` (N, K): (..., N), in ``x``'s dtype.

    Where ``x`` is the quantised one of the two, this is the transpose of ``weight`` times the transpose of ``x``.

    Raises:
        TypeError: the dtypes differ or are not floating. ValueError: the two K differ.
        UnsupportedError: both are quantised, or the activation is of another dtype than ``ACTIVATIONS``.
    """
    if is_weight(x):
        if is_weight(weight):
            raise UnsupportedError("a product of two quantised weights is not supported; dequantise one of them")
        return transposed(trace, contract(trace, weight, x))
    if x.dtype != weight.dtype and not (is_weight(weight) and DTYPES[x.dtype].is_floating_point):
        raise TypeError(f"expected both operands to have the same dtype, but got {x.dtype} and {weight.dtype}")
    if x.dtype not in ACTIVATIONS:
        raise UnsupportedError(
            f"a matrix product of {x.dtype} is not supported; convert the operands to one of {', '.join(ACTIVATIONS)}"
        )
    length, other = x.shape[-1], weight.shape[-1]
    if length != other and not trace.guards.decide(symbols.compare("eq", length, other)):
        left, right = (tuple(map(trace.guards.hint, node.shape)) for node in (x, weight))
        raise ValueError(f"shapes {left} and {right[::-1]} cannot be multiplied: {left[-1]} is not {right[-1]}")
    precision = matmul_precision() if x.dtype == "float32" else "ieee"  # CPUs have no tf32, and are exact for either
    return trace.make("matmul", (x, weight), x.dtype, (*x.shape[:-1], weight.shape[0]), (precision,))


def transposed(trace: Trace, node: Node) -> Node:
    return view(trace, node, ("permute", (1, 0)), (node.shape[1], node.shape[0]))


def _row_vector(trace: Trace, node: Node) -> Node:
    return view(trace, node, ("unsqueeze", 0), (1, node.shape[0]))


@row("matmul", weights=True)
def matmul(trace: Trace, input: Node, other: Node) -> Node:
    if not input.shape or not other.shape:
        raise ValueError("both operands of a matrix product need at least one dimension")
    if len(input.shape) == 1 and len(other.shape) == 1:
        return dot(trace, input, other)
    if len(other.shape) > 2:
        if len(input.shape) <= 2 and all(size == 1 for size in other.shape[:-2]):
            raise UnsupportedError("a batched right operand is not supported; index its batch dimensions away")
        raise UnsupportedError(
            f"a product of {len(input.shape)} by {len(other.shape)} dimensions (a batch of matrices on the right) is "
            "not supported; jitgen multiplies activations of any rank by a 2-D weight: leave a batched product to "
            "eager torch"
        )
    if len(input.shape) == 1:
        product = contract(trace, _row_vector(trace, input), transposed(trace, other))
        return view(trace, product, ("squeeze", 0), product.shape[1:])
    if len(other.shape) == 1:
        product = contract(trace, input, _row_vector(trace, other))
        return view(trace, product, ("squeeze", len(product.shape) - 1), product.shape[:-1])
    return contract(trace, input, transposed(trace, other))


@row("mm", weights=True)
def mm(trace: Trace, input: Node, mat2: Node) -> Node:
    if len(input.shape) != 2 or len(mat2.shape) != 2:
        raise ValueError(f"mm takes two matrices, got {len(input.shape)} and {len(mat2.shape)} dimensions")
    return matmul(trace, input, mat2)


@row("mv", weights=True)
def mv(trace: Trace, input: Node, vec: Node) -> Node:
    if len(input.shape) != 2 or len(vec.shape) != 1:
        raise ValueError(f"mv takes a matrix and a vector, got {len(input.shape)} and {len(vec.shape)} dimensions")
    return matmul(trace, input, vec)


@row("dot", "vdot", "inner", weights=True)
def dot(trace: Trace, input: Node, other: Node) -> Node:
    if len(input.shape) != 1 or len(other.shape) != 1:
        raise UnsupportedError("dot and inner take two vectors; write a product with @ otherwise")
    if input.dtype != other.dtype:
        raise TypeError(f"expected both operands to have the same dtype, but got {input.dtype} and {other.dtype}")
    if input.shape != other.shape and not trace.guards.decide(symbols.compare("eq", input.shape[0], other.shape[0])):
        raise ValueError("dot: the vectors differ in length")
    product = pointwise(trace, "mul", input, other)
    total = reduce(trace, "sum", product, (0,))
    return view(trace, total, ("squeeze", 0), ())


@row("outer", "ger")
def outer(trace: Trace, input: Node, vec2: Node) -> Node:
    if len(input.shape) != 1 or len(vec2.shape) != 1:
        raise ValueError(f"outer takes two vectors, got {len(input.shape)} and {len(vec2.shape)} dimensions")
    column = view(trace, input, ("unsqueeze", 1), (input.shape[0], 1))
    return pointwise(trace, "mul", column, _row_vector(trace, vec2))


@row("linear", weights=True)
def linear(trace: Trace, input: Node, weight: Node, bias: Node | None = None) -> Node:
    if len(weight.shape) not in (1, 2) or not input.shape:
        raise ValueError(f"linear takes a weight of one or two dimensions, got {len(weight.shape)}")
    if len(weight.shape) == 1:
        product = matmul(trace, input, weight)
    elif len(input.shape) == 1:
        product = contract(trace, _row_vector(trace, input), weight)
        product = view(trace, product, ("squeeze", 0), product.shape[1:])
    else:
        product = contract(trace, input, weight)
    if bias is None:
        return product
    if bias.dtype != product.dtype:
        raise TypeError(f"the bias is {bias.dtype}, the product {product.dtype}; convert one of them")
    return pointwise(trace, "add", product, bias)


@row("addmm", "addmv", weights=True)
def addmm(trace: Trace, input: Node, mat1: Node, mat2: Node, *, beta: Any = 1, alpha: Any = 1) -> Node:
    product = matmul(trace, mat1, mat2)
    if input.dtype != product.dtype:
        raise TypeError(f"the added tensor is {input.dtype}, the product {product.dtype}; convert one of them")
    if alpha != 1:
        product = pointwise(trace, "mul", product, alpha)
    if beta == 0:  # as in torch: NaN in input is ignored
        return product
    return pointwise(trace, "add", pointwise(trace, "mul", input, beta) if beta != 1 else input, product)
