"""Makes grouped products, and what products with quantised weights have in common.

A grouped product is one ``grouped`` node (``ir/nodes.py``) with groups of rows by offsets or by ids, or ranges of K. By
ids are products of single rows with matrices that were chosen of a tensor of three dimensions, ``w[ids]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jitgen.errors import UnsupportedError
from jitgen.ir import symbols
from jitgen.ir.body import FLOAT_FACTORS, accumulator_dtype
from jitgen.ir.equations import LENGTHS_OF_GROUPS, ROWS_OF_GROUPS
from jitgen.ir.graph import Node, Shape
from jitgen.ir.nodes import GATHER, VIEW
from jitgen.spec import DTYPES
from jitgen.trace.derivatives import with_gradient
from jitgen.trace.gathers import index_select
from jitgen.trace.guards import matmul_precision
from jitgen.trace.movement import permuted, squeezed, unsqueeze, view
from jitgen.trace.typing import expand, filled, operand, pointwise

if TYPE_CHECKING:
    from jitgen.trace.tracer import Trace

OFFSETS = ("int32", "int64")

CHOSEN_OTHERWISE = (
    "matrices that ids chose of a quantised weight, in another order or cut; flatten the ids, x @ w[ids.flatten()].mT, "
    "reshape the product, and cut its columns instead of the matrices' rows"
)


def grouped(trace: Trace, x: Node, weight: Node, groups: Node, dtype: str, by: str = "offsets") -> Node:
    """Multiplies the rows of ``x`` (M, K) by the matrices (N, K) of their groups, where ``weight`` is (G, N, K); for a
    ``weight`` (N, K), multiplies ranges of K, one for each group, to (G, M, N).

    Args:
        groups: the end of each group, or by ``"ids"`` the group of each row; a negative one counts from the end.
        dtype: of the result.
    """
    if x.is_weight:
        raise UnsupportedError(
            "grouped_mm: a quantised weight is its first operand; give the matrices second, as (G, K, N)"
        )
    if x.dtype != weight.dtype and not (weight.is_weight and DTYPES[x.dtype].is_floating_point):
        raise TypeError(f"grouped_mm: expected operands of one dtype, but got {x.dtype} and {weight.dtype}")
    if x.dtype not in FLOAT_FACTORS:
        raise UnsupportedError(f"grouped_mm of {x.dtype} is not supported; use one of {', '.join(FLOAT_FACTORS)}")
    if groups.dtype not in OFFSETS or len(groups.shape) != 1:
        raise TypeError(
            f"grouped_mm: offs is {groups.dtype} of {len(groups.shape)} dimensions, not a vector of int32 or int64"
        )
    _same(trace, x.shape[-1], weight.shape[-1], "K")
    precision = matmul_precision() if x.dtype == "float32" else "ieee"
    accumulator = accumulator_dtype(x.dtype)
    if len(weight.shape) == 2:
        if weight.is_weight:
            raise UnsupportedError("grouped_mm: groups along K of a quantised weight; dequantise it")
        shape = (groups.shape[0], x.shape[0], weight.shape[0])
        return trace.make("grouped", (x, weight, groups), dtype, shape, (LENGTHS_OF_GROUPS, accumulator, precision, by))
    _same(trace, groups.shape[0], x.shape[0] if by == "ids" else weight.shape[0], "the number of groups")
    if weight.is_weight and weight.shape[0] == 0:
        return filled(trace, operand(trace, 0, dtype), (x.shape[0], weight.shape[1]))
    x = stored_columns(trace, x, weight)
    attrs = (ROWS_OF_GROUPS, accumulator, precision, by)
    product = trace.make("grouped", (x, weight, groups), dtype, (x.shape[0], weight.shape[1]), attrs)
    return by_codes(trace, product)


def is_chosen(trace: Trace, node: Node) -> bool:
    """Returns whether ``node`` has the matrices that ids chose, or their transposes."""
    return id(without_swaps(node)[0]) in trace.chosen


def by_ids(trace: Trace, x: Node, weight: Node, dtype: str | None) -> Node | None:
    """Computes the product of ``x`` (S, R, K) and the transpose of ``weight`` (S, N, K), of which one operand has the
    matrices that ids chose and the other the rows for each, without a copy of the matrices; None for other operands.
    Several rows for an id are rows of their own where the matrices are quantised; copies multiply them elsewhere."""
    for rows, matrices, dim in ((x, weight, 1), (weight, x, 2)):
        chosen, swapped = without_swaps(matrices)
        repeated = chosen.kind is VIEW and chosen.inputs[0].shape[0] == 1 and chosen.attrs.kind == "expand"
        if repeated and matrices.is_weight:  # one matrix for every batch of rows
            chosen, inner = without_swaps(chosen.inputs[0])
            swapped = swapped != inner
        if id(chosen) not in trace.chosen or (rows.shape[1] != 1 and not matrices.is_weight):
            continue
        _, whole, ids = trace.chosen[id(chosen)]
        if trace.differentiable and not whole.is_weight:
            continue  # the gradient of a matrix adds up those of its rows, as that of a gather does
        whole = mT(trace, whole) if swapped else whole
        if repeated:
            ids = expand(trace, ids, rows.shape[:1])
        if rows.shape[1] == 1:
            product = grouped(trace, squeezed(trace, rows, 1), whole, ids, dtype or rows.dtype, "ids")
            return unsqueeze(trace, product, dim)
        product = _rows_of_ids(trace, rows, whole, ids, dtype)
        return product if dim == 1 else mT(trace, product)
    return None


def by_one_id(trace: Trace, x: Node, weight: Node, dtype: str | None) -> Node | None:
    """Computes the product of ``x`` (..., K) and the transpose of ``weight`` (N, K), the matrix of a quantised weight
    that an id without dimensions chose; None for another weight.

    Raises:
        UnsupportedError: the chosen matrix is cut.
    """
    if not weight.is_weight or weight.under_views.kind is not GATHER:
        return None
    chosen, swapped = without_swaps(weight)
    if id(chosen) not in trace.chosen:
        raise UnsupportedError(CHOSEN_OTHERWISE)
    _, whole, ids = trace.chosen[id(chosen)]
    return _rows_of_ids(trace, x, mT(trace, whole) if swapped else whole, expand(trace, ids, x.shape[:-2]), dtype)


def by_several_ids(trace: Trace, x: Node, weight: Node, batch: int, dtype: str | None) -> Node | None:
    """Computes the product of ``x`` (batch..., R, K) and the transpose of ``weight`` (batch..., N, K), of which one
    operand has a row and the other the matrices that ids of several dimensions chose, without a copy of these; None for
    other operands. The columns of ``weight`` may be those of several matrices, all of which the row multiplies. Of
    quantised matrices each may have several rows.

    Raises:
        UnsupportedError: chosen matrices of a quantised weight are reshaped, cut or in another order.
    """
    for rows, matrices in ((x, weight), (weight, x)):
        chosen, swapped = without_swaps(matrices)
        if matrices is weight and chosen.kind is VIEW and chosen.attrs.kind == "reshape" and not swapped:
            chosen, swapped = without_swaps(chosen.inputs[0])
        if id(chosen) not in trace.chosen or trace.differentiable:
            continue  # the gradient of a matrix adds up those of its rows, as that of a gather does
        _, whole, ids = trace.chosen[id(chosen)]
        whole = mT(trace, whole) if swapped else whole
        leading, length = ids.shape[:batch], whole.shape[-1]
        sizes: Any = (*leading, symbols.mul(symbols.product(ids.shape[batch:]), whole.shape[-2]), length)
        if len(ids.shape) < batch or not _are_equal(trace, (*rows.shape[-2:], *matrices.shape), (1, length, *sizes)):
            continue
        ones = (1,) * len(ids.shape[batch:])
        rows = expand(trace, view(trace, rows, ("reshape",), (*leading, *ones, length)), (*ids.shape, length))
        count = symbols.product(ids.shape)
        rows, ids = view(trace, rows, ("reshape",), (count, length)), view(trace, ids, ("reshape",), (count,))
        product = grouped(trace, rows, whole, ids, dtype or rows.dtype, "ids")
        columns = (1, sizes[-2]) if matrices is weight else (sizes[-2], 1)
        return view(trace, product, ("reshape",), (*leading, *columns))
    for rows, matrices in ((x, weight), (weight, x)):
        if not matrices.is_weight or matrices.under_views.kind is not GATHER:
            continue
        chosen, swapped = without_swaps(matrices)
        while id(chosen) not in trace.chosen and _is_broadcast(chosen):
            chosen, inner = without_swaps(chosen.inputs[0])
            swapped = swapped != inner
        if id(chosen) not in trace.chosen:
            raise UnsupportedError(CHOSEN_OTHERWISE)
        _, whole, ids = trace.chosen[id(chosen)]
        whole = mT(trace, whole) if swapped else whole
        if not _are_equal(trace, matrices.shape[batch:], whole.shape[1:]):
            raise UnsupportedError(CHOSEN_OTHERWISE)
        product = _rows_of_ids(trace, rows, whole, expand(trace, ids, matrices.shape[:batch]), dtype)
        return product if matrices is weight else mT(trace, product)
    return None


def _is_broadcast(node: Node) -> bool:
    return node.kind is VIEW and (node.attrs.kind == "expand" or node.attrs[:2] == ("unsqueeze", 0))


def _rows_of_ids(trace: Trace, rows: Node, whole: Node, ids: Node, dtype: str | None) -> Node:
    """Multiplies ``rows`` (batch..., R, K) by the matrices of ``whole`` (G, N, K) that ``ids`` (batch...) choose, to
    (batch..., R, N)."""
    batch = rows.shape[:-1]
    flat = reshaped(trace, rows, (symbols.product(batch), rows.shape[-1]))
    of_rows = reshaped(trace, expand(trace, unsqueeze(trace, ids, len(ids.shape)), batch), flat.shape[:1])
    product = grouped(trace, flat, whole, of_rows, dtype or rows.dtype, "ids")
    return reshaped(trace, product, (*batch, product.shape[1]))


def _are_equal(trace: Trace, left: Shape, right: Shape) -> bool:
    """Returns whether two shapes are equal in this call; then guards say so."""
    here = [tuple(map(trace.guards.hint, shape)) for shape in (left, right)]
    pairs = zip(left, right, strict=False)
    return here[0] == here[1] and all(trace.guards.equal(*pair) for pair in pairs)


def of_batches(trace: Trace, x: Node, weight: Node) -> Node:
    """Multiplies a batch of matrices ``x`` (E, M, K) by a quantised weight of as many (E, N, K), or by some of its
    matrices, as ids choose them."""
    count, rows, length = x.shape
    _same(trace, count, weight.shape[0], "the number of matrices")
    if is_of_some(weight):
        ids = _iota(trace, count)
        while is_of_some(weight):
            some, swapped = without_swaps(weight)
            start, step = some.attrs[2:]
            ids = pointwise(trace, "mul", ids, step)
            ids = pointwise(trace, "add", ids, trace.builder.scalar(start, "int64"))
            weight = mT(trace, some.inputs[0]) if swapped else some.inputs[0]
        return _rows_of_ids(trace, x, weight, ids, x.dtype)
    ends = pointwise(trace, "mul", pointwise(trace, "add", _iota(trace, count), 1), trace.builder.scalar(rows, "int64"))
    flat = view(trace, x, ("reshape",), (symbols.mul(count, rows), length))
    product = grouped(trace, flat, weight, ends, x.dtype)
    return view(trace, product, ("reshape",), (count, rows, product.shape[1]))


def is_of_some(weight: Node) -> bool:
    """Returns whether ``weight`` has some of the matrices of a quantised weight, from one to another."""
    some, _ = without_swaps(weight)
    return weight.is_weight and some.kind is VIEW and len(some.shape) == 3 and some.attrs[:2] == ("slice", 0)


def _iota(trace: Trace, size: Any) -> Node:
    return trace.make("iota", (), "int64", (size,), (0,))


def _same(trace: Trace, left: Any, right: Any, what: str) -> None:
    if left != right and not trace.guards.equal(left, right):
        raise ValueError(
            f"grouped_mm: {what} is {trace.guards.hint(left)} of rows or offs, and {trace.guards.hint(right)} of the "
            "matrices; these are (G, K, N) as the second operand"
        )


def stored_columns(trace: Trace, x: Node, weight: Node) -> Node:
    """Returns ``x`` with its last dimension as ``weight`` has its columns stored: multiplied by ``smoothing``, and
    reordered."""
    x = trace.quantized.smoothed(x, weight)
    order = trace.quantized.column_order(weight)
    if order is None:
        return x
    return index_select(trace, x, len(x.shape) - 1, squeezed(trace, order, 0))


def by_codes(trace: Trace, product: Node) -> Node:
    """Computes ``product``, where its weight is quantised and says so, with the activation quantised: sums of codes
    times scales. Its gradients are those of ``product``."""
    x, weight, *groups = product.inputs
    quantized = trace.quantized
    if not weight.is_weight or quantized.activation(weight) is None or weight.shape[-1] == 0:
        return product
    attrs = product.attrs._replace(accumulator="float32", precision="ieee")

    def sums(left: Node, right: Node, dtype: str) -> Node:
        return trace.make(product.op, (left, right, *groups), dtype, product.shape, attrs)

    # 16 bits have all codes, but no product of a code and a scale. The gemm family multiplies codes where it can. What
    # is computed of a result of 16 bits goes on in float32, where a cast would round it.
    dtype = x.dtype if x.dtype in ("float16", "bfloat16") else "float32"
    codes, scales = quantized.codes(x, weight)
    if quantized.has_blocks(weight):
        scaled = sums(trace.cast(quantized.values(codes, scales, weight), dtype), weight, dtype)
    else:
        scaled = pointwise(trace, "mul", sums(trace.cast(codes, dtype), weight, "float32"), scales, result=dtype)
    return with_gradient(trace, trace.cast(scaled, x.dtype), product, 1.0)


def reshaped(trace: Trace, node: Node, shape: tuple[Any, ...]) -> Node:
    """Returns ``node`` in ``shape``; itself where it has it: graphs of one row have no such view (``ir/fixed.py``)."""
    return node if node.shape == shape else view(trace, node, ("reshape",), shape)


def mT(trace: Trace, node: Node) -> Node:
    """Exchanges the last two dimensions of ``node``."""
    rank = len(node.shape)
    return permuted(trace, node, [*range(rank - 2), rank - 1, rank - 2])


def without_swaps(node: Node) -> tuple[Node, bool]:
    """Returns what ``node`` is, a matrix or a batch of matrices, without views that exchange rows and columns, and
    whether these leave them exchanged."""
    swapped = False
    while node.kind is VIEW:
        inner = node.under_expand
        if inner is not node:  # sizes that only a guard says are equal, or matrices that are repeated
            if len(inner.shape) != len(node.shape) or any(
                one == 1 != size for one, size in zip(inner.shape, node.shape, strict=True)
            ):
                break
            node = inner
        elif node.attrs.kind == "permute" and _exchanges_the_last(node.attrs.order):
            node, swapped = node.inputs[0], not swapped
        else:
            break
    return node, swapped


def _exchanges_the_last(order: Sequence[int]) -> bool:
    """Returns whether ``order`` exchanges the last two dimensions, and no others."""
    rank = len(order)
    return rank > 1 and tuple(order) == (*range(rank - 2), rank - 1, rank - 2)
