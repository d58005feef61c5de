"""Defines the rows of torch's products: ``F.linear``, ``@``, ``matmul``, ``mm``, ``bmm``, ``addmm``, ``einsum`` and the
like.

Every product of matrices becomes one ``contract`` node, of an activation ``(..., K)`` and a weight that views bring to
``(N, K)``, or of two batches of these; its equation names the axes (``ir/equations.py``). Bias, scaling and residuals
are pointwise nodes after it, which the gemm family computes in the same kernel. Sums are accumulated in float32
(float64 for float64), and the pointwise nodes read them before they are rounded to the result's dtype. Sums of integers
are accumulated in int32 or int64 and wrap around in the result's dtype, as torch's do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jitgen.errors import UnsupportedError
from jitgen.ir import symbols
from jitgen.ir.body import FACTORS, accumulator_dtype
from jitgen.ir.equations import equation
from jitgen.ir.graph import Node, Shape
from jitgen.ir.nodes import GATHER
from jitgen.quant.token import from_text
from jitgen.spec import DTYPES
from jitgen.trace.cut_weights import with_whole_tiles
from jitgen.trace.groups import (
    CHOSEN_OTHERWISE,
    by_codes,
    by_ids,
    by_one_id,
    by_several_ids,
    is_chosen,
    is_of_some,
    mT,
    of_batches,
    reshaped,
    stored_columns,
)
from jitgen.trace.guards import matmul_precision
from jitgen.trace.movement import permuted, squeezed, unsqueeze, view
from jitgen.trace.reductions import reduce, sum_
from jitgen.trace.table import row
from jitgen.trace.typing import broadcast_shapes, expand, pointwise, require_computable, require_range, result_dtype

if TYPE_CHECKING:
    from jitgen.trace.tracer import Trace


def contract(trace: Trace, x: Node, weight: Node, batch: int = 0, dtype: str | None = None) -> Node:
    """Multiplies ``x`` (batch..., ..., K) by the transpose of ``weight`` (batch..., N, K).

    Where ``x`` is a quantised weight and ``weight`` is not, the result is computed as the transpose of ``weight`` times
    the transpose of ``x``.

    Args:
        batch: the number of leading batch dimensions; their sizes are equal in both operands.
        dtype: of the result; by default that of ``x``. Of 8-bit integers it may be that of the accumulator, int32.

    Raises:
        TypeError: the dtypes differ.
        ValueError: the two K differ.
        UnsupportedError: both operands are quantised, or the dtype of the activation is none of ``FACTORS``.
    """
    chosen = by_ids(trace, x, weight, dtype) if batch == 1 and trace.chosen else None
    if chosen is None and batch and trace.chosen:
        chosen = by_several_ids(trace, x, weight, batch, dtype)
    if not batch and trace.chosen:
        chosen = by_one_id(trace, x, weight, dtype)
    if chosen is not None:
        return chosen
    if x.is_weight:
        if weight.is_weight:
            raise UnsupportedError("a product of two quantised weights is not supported; dequantise one of them")
        return transposed(trace, contract(trace, weight, x))
    if x.dtype != weight.dtype and not (weight.is_weight and DTYPES[x.dtype].is_floating_point):
        raise TypeError(f"expected both operands to have the same dtype, but got {x.dtype} and {weight.dtype}")
    if x.dtype not in FACTORS:
        raise UnsupportedError(
            f"a matrix product of {x.dtype} is not supported; convert the operands to one of {', '.join(FACTORS)}"
        )
    length, other = x.shape[-1], weight.shape[-1]
    if length != other and not trace.guards.equal(length, other):
        left, right = (tuple(map(trace.guards.hint, node.shape)) for node in (x, weight))
        raise ValueError(f"shapes {left} and {right[::-1]} cannot be multiplied: {left[-1]} is not {right[-1]}")
    precision = matmul_precision() if x.dtype == "float32" else "ieee"  # a CPU has no tf32: there, both mean ieee
    attrs = (equation(batch, len(x.shape) - 1 - batch), accumulator_dtype(x.dtype), precision)
    columns, cut = weight.shape[batch], None
    if weight.is_weight and batch == 0:
        x, weight, cut = with_whole_tiles(trace, x, weight)
    x = stored_columns(trace, x, weight)
    product = trace.make("contract", (x, weight), dtype or x.dtype, (*x.shape[:-1], weight.shape[batch]), attrs)
    product = by_codes(trace, product)
    return product if cut is None else view(trace, product, ("slice", len(x.shape) - 1, *cut), (*x.shape[:-1], columns))


def transposed(trace: Trace, node: Node) -> Node:
    return view(trace, node, ("permute", (1, 0)), (node.shape[1], node.shape[0]))


@row("matmul", weights=True)
def matmul(trace: Trace, input: Node, other: Node) -> Node:
    if not input.shape or not other.shape:
        raise ValueError("both operands of a matrix product need at least one dimension")
    if len(input.shape) == 1 and len(other.shape) == 1:
        return dot(trace, input, other)
    if len(other.shape) > 2:
        return _batched(trace, input, other)
    if input.is_weight and len(input.shape) > 2:
        if len(other.shape) == 1:
            return squeezed(trace, _batched(trace, input, unsqueeze(trace, other, 1)), -1)
        return _batched(trace, input, other)
    if len(input.shape) == 1:
        return squeezed(trace, contract(trace, unsqueeze(trace, input, 0), transposed(trace, other)), 0)
    if len(other.shape) == 1:
        return squeezed(trace, contract(trace, input, unsqueeze(trace, other, 0)), -1)
    return contract(trace, input, transposed(trace, other))


def _batched(trace: Trace, input: Node, other: Node) -> Node:
    """Multiplies ``input`` (..., M, K) or (K,) by ``other`` (..., K, N); their batch dimensions broadcast."""
    of_chosen = any(node.is_weight and node.under_views.kind is GATHER for node in (input, other))
    if len(input.shape) == 1:
        return squeezed(trace, _batched(trace, unsqueeze(trace, input, 0), other), -2)
    if input.is_weight and not (other.is_weight or of_chosen):
        return mT(trace, _batched(trace, mT(trace, other), mT(trace, input)))
    if other.is_weight and len(other.shape) == 3 and len(input.shape) <= 3 and not of_chosen:
        one = len(input.shape) == 2 or input.shape[0] == 1
        input = expand(trace, input, (other.shape[0], *input.shape[-2:])) if one else input
        return of_batches(trace, input, mT(trace, other))
    if (input.is_weight or other.is_weight) and not (is_chosen(trace, input) or is_chosen(trace, other)):
        raise UnsupportedError(
            CHOSEN_OTHERWISE
            if of_chosen
            else "matrices of a quantised weight (E, N, K) multiply activations (M, K) or (E, M, K), and a matrix "
            "those of any dimensions, x @ w.T; reshape the activation to these"
        )
    batch = broadcast_shapes(trace, input.shape[:-2], other.shape[:-2])
    left = expand(trace, input, (*batch, *input.shape[-2:]))
    right = expand(trace, other, (*batch, *other.shape[-2:]))
    return contract(trace, left, mT(trace, right), len(batch))


@row("bmm", weights=True)
def bmm(trace: Trace, input: Node, mat2: Node) -> Node:
    _check_batches("bmm", trace, input, mat2)
    return _batched(trace, input, mat2)


def _check_batches(name: str, trace: Trace, left: Node, right: Node) -> None:
    """Raises ValueError unless these are two batches of equally many matrices: sizes of 1 do not broadcast."""
    if len(left.shape) != 3 or len(right.shape) != 3:
        raise ValueError(
            f"{name} takes two batches of matrices, got {len(left.shape)} and {len(right.shape)} dimensions"
        )
    sizes = left.shape[0], right.shape[0]
    if sizes[0] != sizes[1] and not trace.guards.equal(*sizes):
        raise ValueError(f"{name}: the batches differ in size")


@row("baddbmm")
def baddbmm(trace: Trace, input: Node, batch1: Node, batch2: Node, *, beta: Any = 1, alpha: Any = 1) -> Node:
    return _added(trace, input, bmm(trace, batch1, batch2), beta, alpha)


@row("addbmm")
def addbmm(trace: Trace, input: Node, batch1: Node, batch2: Node, *, beta: Any = 1, alpha: Any = 1) -> Node:
    _check_batches("addbmm", trace, batch1, batch2)
    return _added(trace, input, einsum(trace, "bmk,bkn->mn", batch1, batch2), beta, alpha)


@row("mm", weights=True)
def mm(trace: Trace, input: Node, mat2: Node) -> Node:
    if len(input.shape) != 2 or len(mat2.shape) != 2:
        raise ValueError(f"mm takes two matrices, got {len(input.shape)} and {len(mat2.shape)} dimensions")
    return matmul(trace, input, mat2)


@row("_int_mm")
def int_mm(trace: Trace, input: Node, mat2: Node) -> Node:
    """Multiplies two matrices of int8 to int32; the first one may be of uint8, as torch takes it on a CPU."""
    if len(input.shape) != 2 or len(mat2.shape) != 2:
        raise ValueError(f"_int_mm takes two matrices, got {len(input.shape)} and {len(mat2.shape)} dimensions")
    if input.dtype not in ("int8", "uint8") or mat2.dtype != "int8":
        raise TypeError(
            f"_int_mm takes matrices of int8, or uint8 times int8, got {input.dtype} and {mat2.dtype}: multiply others "
            "as a.int() @ b.int(), which is a product of their codes too"
        )
    if input.dtype != mat2.dtype:  # the gemm family makes products of codes of products of what they are cast to
        input, mat2 = trace.cast(input, "int32"), trace.cast(mat2, "int32")
    return contract(trace, input, transposed(trace, mat2), dtype="int32")


@row("mv", weights=True)
def mv(trace: Trace, input: Node, vec: Node) -> Node:
    if len(input.shape) != 2 or len(vec.shape) != 1:
        raise ValueError(f"mv takes a matrix and a vector, got {len(input.shape)} and {len(vec.shape)} dimensions")
    return matmul(trace, input, vec)


@row("dot", "vdot", weights=True)
def dot(trace: Trace, input: Node, other: Node) -> Node:
    if len(input.shape) != 1 or len(other.shape) != 1:
        raise UnsupportedError("dot takes two vectors; write a product with @ otherwise")
    if input.dtype != other.dtype:
        raise TypeError(f"expected both operands to have the same dtype, but got {input.dtype} and {other.dtype}")
    if input.shape != other.shape and not trace.guards.equal(input.shape[0], other.shape[0]):
        raise ValueError("dot: the vectors differ in length")
    return squeezed(trace, reduce(trace, "sum", pointwise(trace, "mul", input, other), (0,)), 0)


@row("outer", "ger")
def outer(trace: Trace, input: Node, vec2: Node) -> Node:
    if len(input.shape) != 1 or len(vec2.shape) != 1:
        raise ValueError(f"outer takes two vectors, got {len(input.shape)} and {len(vec2.shape)} dimensions")
    op = "bitwise_and" if result_dtype(input, vec2) == "bool" else "mul"
    return pointwise(trace, op, unsqueeze(trace, input, 1), unsqueeze(trace, vec2, 0))


@row("linear", weights=True)
def linear(trace: Trace, input: Node, weight: Node, bias: Node | None = None) -> Node:
    if not input.shape:
        raise ValueError("linear takes an input of at least one dimension, got 0")
    if len(weight.shape) not in (1, 2):
        raise ValueError(f"linear takes a weight of one or two dimensions, got {len(weight.shape)}")
    if len(weight.shape) == 1:
        product = matmul(trace, input, weight)
    elif len(input.shape) == 1:
        product = squeezed(trace, contract(trace, unsqueeze(trace, input, 0), weight), 0)
    else:
        product = contract(trace, input, weight)
    if bias is None:
        return product
    refuse_added_weight(bias, "the bias")
    if bias.dtype != product.dtype:
        raise TypeError(f"the bias is {bias.dtype}, the product {product.dtype}; convert one of them")
    return pointwise(trace, "add", product, expand_to(trace, bias, product.shape, "the bias"))


@row("jitgen.linear")
def quantized_linear(trace: Trace, input: Node, weight: Sequence[Node], bias: Node | None, token: str) -> Node:
    """Multiplies by a quantised weight where torch traces ``F.linear`` (``call/linear_operator.py``)."""
    return linear(trace, input, trace.quantized.node(weight, from_text(token, trace.device)), bias)


def refuse_added_weight(node: Node, what: str) -> None:
    """Raises UnsupportedError where what is added to a product is a quantised weight, or a view of one."""
    if node.is_weight:
        raise UnsupportedError(
            f"{what} is a quantised weight, or part of one, and these are operands of products alone; dequantise it "
            "outside the function"
        )


def expand_to(trace: Trace, node: Node, shape: Shape, what: str) -> Node:
    """Broadcasts ``node`` to ``shape``, and refuses one that would broadcast ``shape`` itself."""
    broadcast = broadcast_shapes(trace, node.shape, shape)
    if tuple(map(trace.guards.hint, broadcast)) != tuple(map(trace.guards.hint, shape)):
        here, product = (tuple(map(trace.guards.hint, sizes)) for sizes in (node.shape, shape))
        raise ValueError(f"{what} of shape {here} does not fit a product of shape {product}")
    return node


@row("addmm", weights=True)
def addmm(trace: Trace, input: Node, mat1: Node, mat2: Node, *, beta: Any = 1, alpha: Any = 1) -> Node:
    return _added(trace, input, mm(trace, mat1, mat2), beta, alpha)


@row("addmv", weights=True)
def addmv(trace: Trace, input: Node, mat: Node, vec: Node, *, beta: Any = 1, alpha: Any = 1) -> Node:
    for factor in (beta, alpha):
        require_range(trace, factor, input.dtype)
    return _added(trace, input, mv(trace, mat, vec), beta, alpha)


def _added(trace: Trace, input: Node, product: Node, beta: Any, alpha: Any) -> Node:
    """Adds ``beta * input + alpha * product``."""
    refuse_added_weight(input, "the added tensor")
    if input.dtype != product.dtype:
        raise TypeError(f"the added tensor is {input.dtype}, the product {product.dtype}; convert one of them")
    expand_to(trace, input, product.shape, "the added tensor")
    for factor in (beta, alpha):
        require_computable(trace, factor, product.dtype)
    if alpha != 1:  # of integers, a float is rounded towards 0
        product = pointwise(trace, "mul", product, alpha, dtype=product.dtype)
    if beta == 0:  # then torch ignores input, NaN in it included
        return product
    return pointwise(
        trace, "add", pointwise(trace, "mul", input, beta, dtype=input.dtype) if beta != 1 else input, product
    )


# ------------------------------------------------------------------------------------------------------------ einsum

WEIGHT_IN_EINSUM = (
    "a quantised weight in einsum has to be multiplied by an activation over one of its dimensions, as in 'mk,nk->mn', "
    "or matrix by matrix, as in 'emk,enk->emn', and 'bk,bnk->bn' or 'tk,tenk->ten' of w[ids]; sum what they return "
    "over more dimensions, or dequantise it outside the decorated function"
)


@row("einsum", weights=True, view=True)
def einsum(trace: Trace, equation: str, *operands: Any) -> Node:
    """Computes an einsum. A dimension of one operand alone that the result lacks is summed first; without one, what an
    einsum of one operand returns is a view of it.

    Operands are multiplied from left to right, as torch does without the package opt_einsum, but for one that shares no
    dimension with what is multiplied before: it waits for the others.
    """
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    inputs, result = _parsed(equation, [len(operand.shape) for operand in operands])
    if len(operands) == 1 and operands[0].is_weight:
        raise UnsupportedError(WEIGHT_IN_EINSUM)
    terms = []
    for position, (names, node) in enumerate(zip(inputs, operands, strict=True)):
        others = set(result).union(*(other for number, other in enumerate(inputs) if number != position))
        names, node = _diagonals(trace, names, node)
        terms.append(_sum_unshared(trace, names, node, others))
    names, node = terms.pop(0)
    if not terms:
        return _ordered(trace, names, node, result)
    while terms:
        connected = (number for number, term in enumerate(terms) if set(term[0]) & set(names))
        second = terms.pop(next(connected, 0))
        needed = set(result).union(*(later for later, _ in terms))
        product = [name for name in dict.fromkeys([*names, *second[0]]) if name in needed] if terms else result
        names, node = product, _product_of(trace, (names, node), second, product)
    return node


_Term = tuple[list[str], Node]
"""The names of an operand's dimensions, and the operand."""


def _product_of(trace: Trace, first: _Term, second: _Term, result: list[str]) -> Node:
    """Multiplies two operands, and sums over the dimensions of both that ``result`` lacks."""
    if first[1].is_weight:  # the activation comes first
        first, second = second, first
    (left, x), (right, weight) = first, second
    if weight.is_weight and not _is_product_of_weight(left, x, right, weight, result):
        raise UnsupportedError(WEIGHT_IN_EINSUM)
    sizes = _sizes_of(trace, [first, second])
    if (len(right) > 3 and weight.is_weight) or is_of_some(weight):  # by each matrix that ids or a slice chose
        left, x = _with_ids(trace, left, x, right, weight)
    shared = [name for name in right if name in left]  # a weight's matrices stay in their order
    batch = [name for name in (shared if weight.is_weight else result) if name in shared and name in result]
    summed = [name for name in left if name in shared and name not in result]
    rows = [name for name in left if name not in right]
    columns = [name for name in right if name not in left]
    if not summed:  # an outer product, which is pointwise
        order = [*batch, *rows, *columns]
        x, weight = _broadcast(trace, left, x, order, sizes), _broadcast(trace, right, weight, order, sizes)
        return _ordered(trace, order, pointwise(trace, "mul", x, weight), result)
    left_order, right_order = [*batch, *rows, *summed], [*batch, *columns, *summed]
    x, weight = _aligned(trace, left, x, left_order, sizes), _aligned(trace, right, weight, right_order, sizes)
    batches = tuple(sizes[name] for name in batch)
    length = symbols.product(sizes[name] for name in summed)
    x = reshaped(trace, x, (*batches, *(sizes[name] for name in rows), length))
    weight = reshaped(trace, weight, (*batches, symbols.product(sizes[name] for name in columns), length))
    if not rows:
        x = unsqueeze(trace, x, len(batch))
    of_matrices = weight.is_weight and batch
    product = _batched(trace, x, mT(trace, weight)) if of_matrices else contract(trace, x, weight, len(batch))
    final = (*batches, *(sizes[name] for name in (*rows, *columns)))
    return _ordered(trace, [*batch, *rows, *columns], reshaped(trace, product, final), result)


def _is_product_of_weight(left: list[str], x: Node, right: list[str], weight: Node, result: list[str]) -> bool:
    """Returns whether a sum over one dimension is a product of ``x`` and a quantised weight: a matrix, or the matrix of
    each element of a batch, which has several dimensions where ids of as many chose the matrices."""
    shared = set(left) & set(right)
    batch = shared & set(result)
    is_batch = len(batch) == 1 and len(weight.shape) == 3 and right[0] in batch
    is_batch |= len(weight.shape) > 3 and set(right[:-2]) <= set(result)
    return not x.is_weight and len(shared - batch) == 1 and (not batch or is_batch)


def _with_ids(trace: Trace, left: list[str], x: Node, right: list[str], weight: Node) -> _Term:
    """Returns ``x`` repeated along the dimensions of the ids that chose ``weight`` (ids..., N, K) that it lacks."""
    for name, size in zip(right[:-2], weight.shape, strict=False):
        if name not in left:
            left, x = [name, *left], expand(trace, unsqueeze(trace, x, 0), (size, *x.shape))
    return left, x


def _parsed(equation: Any, ranks: list[int]) -> tuple[list[list[str]], list[str]]:
    """Parses an equation: the names of each operand's dimensions, and those of the result.

    The dimensions that an ellipsis stands for are named ``...n``, ``...(n - 1)``, ..., ``...1``, from the outermost on.
    """
    if not isinstance(equation, str):
        raise UnsupportedError("einsum takes an equation string; the form with lists of numbers is not supported")
    text = equation.replace(" ", "")
    left, arrow, right = text.partition("->")
    terms = left.split(",")
    if len(terms) != len(ranks):
        raise ValueError(f"einsum: {equation!r} names {len(terms)} operands, got {len(ranks)}")
    inputs = []
    for term, rank in zip(terms, ranks, strict=True):
        names = list(term.replace("...", ""))
        if not all(name.isalpha() for name in names):
            raise ValueError(f"einsum: {equation!r} is not made of letters")
        free = rank - len(names)
        if free < 0 or (free and "..." not in term):
            raise ValueError(f"einsum: {term!r} names {len(names)} dimensions of an operand that has {rank}")
        before = term.index("...") if "..." in term else 0
        inputs.append([*names[:before], *(f"...{free - number}" for number in range(free)), *names[before:]])
    dots = sorted({name for names in inputs for name in names if name.startswith("...")}, key=lambda n: -int(n[3:]))
    if not arrow:
        every = [name for names in inputs for name in names if not name.startswith("...")]
        return inputs, [*dots, *sorted(name for name in set(every) if every.count(name) == 1)]
    before = right.index("...") if "..." in right else 0
    names = list(right.replace("...", ""))
    result = [*names[:before], *(dots if "..." in right else []), *names[before:]]
    known = {name for names in inputs for name in names}
    if len(set(result)) != len(result) or not set(result) <= known:
        raise ValueError(f"einsum: the result of {equation!r} names a dimension twice, or one that no operand has")
    return inputs, result


def _diagonals(trace: Trace, names: list[str], node: Node) -> tuple[list[str], Node]:
    """Takes the diagonal of two dimensions with one name: every (size + 1)-th element of both."""
    while repeated := next((name for name in names if names.count(name) > 1), None):
        first = names.index(repeated)
        second = names.index(repeated, first + 1)
        size = node.shape[first]
        if not trace.guards.equal(size, node.shape[second]):
            raise ValueError(f"einsum: dimension {repeated} has sizes that differ")
        order = [dim for dim in range(len(names)) if dim not in (first, second)]
        rest = tuple(node.shape[dim] for dim in order)
        square = permuted(trace, node, [*order, first, second])
        flat = view(trace, square, ("reshape",), (*rest, symbols.mul(size, size)))
        step = trace.guards.value(size) + 1
        node = view(trace, flat, ("slice", len(rest), 0, step), (*rest, size))
        names = [*(names[dim] for dim in order), repeated]
    return names, node


def _sum_unshared(trace: Trace, names: list[str], node: Node, others: set[str]) -> tuple[list[str], Node]:
    """Sums ``node`` over its dimensions that are not in ``others``; returns the names that remain, and the sum, which
    for integers is an int64."""
    dims = [dim for dim, name in enumerate(names) if name not in others]
    if not dims:
        return names, node
    if node.is_weight:
        raise UnsupportedError(WEIGHT_IN_EINSUM)
    total = sum_(trace, node, dims)
    return [name for name in names if name in others], total


def _sizes_of(trace: Trace, operands: list[_Term]) -> dict[str, Any]:
    """Returns the size of each name. A size of 1 broadcasts to the size of the other operand."""
    sizes: dict[str, Any] = {}
    for names, node in operands:
        for name, size in zip(names, node.shape, strict=True):
            try:
                (sizes[name],) = broadcast_shapes(trace, (sizes.get(name, 1),), (size,))
            except ValueError as error:
                raise ValueError(f"einsum: dimension {name} has sizes that differ") from error
    return sizes


def _broadcast(trace: Trace, names: list[str], node: Node, order: list[str], sizes: dict[str, Any]) -> Node:
    """Broadcasts ``node`` to one dimension for each name of ``order``, of the size in ``sizes``."""
    node = _ordered(trace, names, node, [name for name in order if name in names])
    for dim, name in enumerate(order):
        if name not in names:
            node = unsqueeze(trace, node, dim)
    return expand(trace, node, tuple(sizes[name] for name in order))


def _aligned(trace: Trace, names: list[str], node: Node, order: list[str], sizes: dict[str, Any]) -> Node:
    """Permutes ``node`` to the dimensions in ``order``, and broadcasts sizes of 1."""
    return expand(trace, _ordered(trace, names, node, order), tuple(sizes[name] for name in order))


def _ordered(trace: Trace, names: list[str], node: Node, order: list[str]) -> Node:
    """Permutes ``node`` to the dimensions in ``order``."""
    return permuted(trace, node, [names.index(name) for name in order])
