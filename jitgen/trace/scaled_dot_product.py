"""Defines the row of ``F.scaled_dot_product_attention``: products and a softmax, which the attention family puts in one
kernel.

A row without any unmasked key gives zeros, as torch's function does, and so does a call without keys; the plain formula
gives NaN there, which is what its softmax gives.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from jitgen.errors import UnsupportedError
from jitgen.ir import symbols
from jitgen.ir.graph import Node
from jitgen.trace.contractions import matmul
from jitgen.trace.groups import mT
from jitgen.trace.movement import unsqueeze, view
from jitgen.trace.numbers import unwrap
from jitgen.trace.reductions import broadcast_like, reduce
from jitgen.trace.selection import where
from jitgen.trace.table import row
from jitgen.trace.typing import broadcast_shapes, compare, one_dtype, pointwise, require_float

if TYPE_CHECKING:
    from jitgen.trace.tracer import Trace


@row("scaled_dot_product_attention")
def scaled_dot_product_attention(
    trace: Trace,
    query: Node,
    key: Node,
    value: Node,
    attn_mask: Node | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Any = None,
    enable_gqa: bool = False,
) -> Node:
    """Computes attention of ``query`` (..., M, D), ``key`` (..., N, D) and ``value`` (..., N, E): (..., M, E).

    With ``enable_gqa`` the dimension before M may be a multiple of that of key and value, whose heads then serve so
    many neighbouring heads of the query each.
    """
    for tensor in (query, key, value):
        if len(tensor.shape) < 2:
            raise ValueError("scaled_dot_product_attention takes tensors of at least two dimensions")
    require_float(query.dtype)
    one_dtype(query, key, value)
    if attn_mask is not None and len(attn_mask.shape) < 2:
        raise ValueError("attn_mask has at least two dimensions; write attn_mask[None] for one row")
    if dropout_p != 0:
        raise UnsupportedError(
            "scaled_dot_product_attention with dropout_p has no row; pass dropout_p=0.0 (if not self.training), or "
            "write the formula with F.dropout on the probabilities"
        )
    shape = query.shape
    query, key, value, mask = _grouped(trace, query, key, value, attn_mask, enable_gqa)
    factor = unwrap(scale)
    if factor is None:  # Scores without a depth are zeros, whatever they are multiplied with.
        deep = not trace.guards.equal(shape[-1], 0)
        factor = symbols.truediv(1.0, symbols.power(shape[-1], 0.5)) if deep else 1.0
    scores = pointwise(trace, "mul", matmul(trace, query, mT(trace, key)), factor)
    if mask is not None:
        scores = _masked(trace, scores, mask, query.dtype)
    if is_causal:
        rows, keys = scores.shape[-2:]
        future = compare(trace, "gt", _indices(trace, keys, 0), _indices(trace, rows, 1))
        scores = where(trace, future, -math.inf, scores)
    weights = _safe_softmax(trace, scores)
    result = matmul(trace, trace.cast(weights, query.dtype), value)
    if len(query.shape) == len(shape):
        return result
    return view(trace, result, ("reshape",), (*result.shape[:-4], shape[-3], *result.shape[-2:]))


def _grouped(
    trace: Trace, query: Node, key: Node, value: Node, mask: Node | None, enable_gqa: bool
) -> tuple[Node, Node, Node, Node | None]:
    """Gives heads that share keys a dimension of their own, if ``enable_gqa`` says so."""
    if not enable_gqa or len(query.shape) < 3 or query.shape[-3] == key.shape[-3] == value.shape[-3]:
        return query, key, value, mask
    heads, groups = query.shape[-3], key.shape[-3]
    same = trace.guards.equal(groups, value.shape[-3])
    if trace.guards.equal(heads, groups) and same:
        return query, key, value, mask
    if not same or not trace.guards.equal(symbols.mod(heads, groups), 0):
        counts = ", ".join(str(trace.guards.hint(shared.shape[-3])) for shared in (query, key, value))
        raise ValueError(f"enable_gqa: the heads of query, key and value do not divide: {counts}")
    shared = symbols.floordiv(heads, groups)

    def split(node: Node) -> Node:
        shape: Any = (*node.shape[:-3], groups, shared, *node.shape[-2:])
        return view(trace, node, ("reshape",), shape)

    def single(node: Node) -> Node:
        return unsqueeze(trace, node, len(node.shape) - 2)

    if mask is not None and len(mask.shape) > 2:
        one = trace.guards.equal(mask.shape[-3], 1)
        mask = single(mask) if one else split(mask)
    return split(query), single(key), single(value), mask


def _masked(trace: Trace, scores: Node, mask: Node, dtype: str) -> Node:
    """Masks ``scores``: -inf where a bool ``mask`` is False, or a float ``mask`` added."""
    shape = broadcast_shapes(trace, mask.shape, scores.shape)
    if tuple(map(trace.guards.hint, shape)) != tuple(map(trace.guards.hint, scores.shape)):
        here, wanted = (tuple(map(trace.guards.hint, sizes)) for sizes in (mask.shape, scores.shape))
        raise ValueError(f"attn_mask of shape {here} does not fit scores of shape {wanted}")
    if mask.dtype == "bool":
        return where(trace, mask, scores, -math.inf)
    if mask.dtype not in (dtype, "float32"):
        raise TypeError(f"attn_mask is {mask.dtype}, the query {dtype}; make it bool, float32 or {dtype}")
    return pointwise(trace, "add", scores, mask)


def _indices(trace: Trace, size: Any, dim: int) -> Node:
    """Returns the indices below ``size``, as a row (``dim`` 0) or as a column."""
    return unsqueeze(trace, trace.make("iota", (), "int64", (size,), (0,)), dim)


def _safe_softmax(trace: Trace, scores: Node) -> Node:
    """Computes softmax over the last dimension; zeros where every score of a row is -inf."""
    dims = (len(scores.shape) - 1,)
    top = reduce(trace, "max", scores, dims)
    hidden = compare(trace, "eq", top, -math.inf)
    base = where(trace, hidden, 0.0, top)
    powers = pointwise(trace, "exp", pointwise(trace, "sub", scores, broadcast_like(trace, base, scores)))
    total = reduce(trace, "sum", powers, dims)
    if trace.differentiable:  # the reciprocal of 0 would have gradients that are NaN
        empty = compare(trace, "eq", total, 0)
        share = pointwise(trace, "reciprocal", where(trace, empty, 1.0, total))
    else:
        share = where(trace, hidden, 0.0, pointwise(trace, "reciprocal", total))
    return pointwise(trace, "mul", powers, broadcast_like(trace, share, scores))
