"""Defines the rows of grouped products, of which a mixture of experts is made: ``F.grouped_mm``, ``torch._grouped_mm``.

A grouped product is one ``grouped`` node (``ir/nodes.py``). Its offsets are a tensor on the device, which the kernel
reads: no size and no launch depends on them. Offsets are the ends of the groups, and have to ascend up to the number of
rows at most. A kernel on a CPU reports others; on a GPU a group is cut to the rows that there are. Rows behind the last
offset are 0, which torch leaves undefined.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jitgen.errors import UnsupportedError
from jitgen.ir import symbols
from jitgen.ir.body import accumulator_dtype
from jitgen.ir.equations import LENGTHS_OF_GROUPS, ROWS_OF_GROUPS
from jitgen.ir.graph import Node
from jitgen.spec import DTYPES, dtype_name
from jitgen.trace.contractions import ACTIVATIONS, bmm, by_codes, mT, ordered_columns, transposed
from jitgen.trace.guards import matmul_precision
from jitgen.trace.table import row

if TYPE_CHECKING:
    from jitgen.trace.tracer import Trace

OFFSETS = ("int32", "int64")


@row("_grouped_mm", "transformers.grouped_mm_fallback", weights=True)
def grouped_mm(
    trace: Trace, input: Node, weight: Node, offs: Node | None = None, bias: Node | None = None, out_dtype: Any = None
) -> Node:
    """Multiplies groups of rows by matrices (2-d by 3-d), matrices by groups of columns (3-d by 2-d), or groups of
    columns by groups of rows (2-d by 2-d, with a matrix for each group)."""
    if bias is not None:
        raise UnsupportedError("grouped_mm with a bias: add bias[ids] to its result, as torch has no bias here either")
    dtype = input.dtype if out_dtype is None else dtype_name(out_dtype)
    ranks = len(input.shape), len(weight.shape)
    if ranks == (3, 3):
        if offs is not None:
            raise ValueError("grouped_mm: a batch of matrices by another one takes no offs")
        return trace.cast(bmm(trace, input, weight), dtype)
    if offs is None:
        raise ValueError("grouped_mm: offs, the ends of the groups, is needed unless both operands have 3 dimensions")
    if ranks == (2, 3):
        return grouped(trace, input, mT(trace, weight), offs, dtype)
    if ranks == (3, 2):
        return transposed(trace, grouped(trace, transposed(trace, weight), input, offs, dtype))
    if ranks == (2, 2):
        return grouped(trace, input, transposed(trace, weight), offs, dtype)
    raise ValueError(f"grouped_mm takes operands of 2 or 3 dimensions, got {ranks[0]} and {ranks[1]}")


@row("grouped_mm", weights=True)
def functional_grouped_mm(
    trace: Trace, mat_a: Node, mat_b: Node, *, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Node:
    return grouped_mm(trace, mat_a, mat_b, offs, bias, out_dtype)


def grouped(trace: Trace, x: Node, weight: Node, groups: Node, dtype: str, by: str = "offsets") -> Node:
    """Multiplies the rows of ``x`` (M, K) by the matrices (N, K) of their groups, where ``weight`` is (G, N, K); for a
    ``weight`` (N, K), multiplies ranges of K, one for each group, to (G, M, N).

    Args:
        groups: the end of each group, or by ``"ids"`` the group of each row.
        dtype: of the result.
    """
    if x.is_weight:
        raise UnsupportedError(
            "grouped_mm: the matrices that share a quantised weight's groups come second, as (G, K, N)"
        )
    if x.dtype != weight.dtype and not (weight.is_weight and DTYPES[x.dtype].is_floating_point):
        raise TypeError(f"grouped_mm: expected operands of one dtype, but got {x.dtype} and {weight.dtype}")
    if x.dtype not in ACTIVATIONS:
        raise UnsupportedError(f"grouped_mm of {x.dtype} is not supported; use one of {', '.join(ACTIVATIONS)}")
    if groups.dtype not in OFFSETS or len(groups.shape) != 1:
        raise TypeError(f"grouped_mm: offs is {groups.dtype} of {len(groups.shape)} dimensions, not a vector of int32")
    _same(trace, x.shape[-1], weight.shape[-1], "K")
    precision = matmul_precision() if x.dtype == "float32" else "ieee"
    accumulator = accumulator_dtype(x.dtype)
    if len(weight.shape) == 2:
        if weight.is_weight:
            raise UnsupportedError("grouped_mm: groups along K of a quantised weight; dequantise it")
        shape = (groups.shape[0], x.shape[0], weight.shape[0])
        return trace.make("grouped", (x, weight, groups), dtype, shape, (LENGTHS_OF_GROUPS, accumulator, precision, by))
    _same(trace, groups.shape[0], x.shape[0] if by == "ids" else weight.shape[0], "the number of groups")
    x = ordered_columns(trace, x, weight)
    attrs = (ROWS_OF_GROUPS, accumulator, precision, by)
    product = trace.make("grouped", (x, weight, groups), dtype, (x.shape[0], weight.shape[1]), attrs)
    return by_codes(trace, product)


def _same(trace: Trace, left: Any, right: Any, what: str) -> None:
    if left != right and not trace.guards.decide(symbols.compare("eq", left, right)):
        raise ValueError(
            f"grouped_mm: {what} is {trace.guards.hint(left)} of one and {trace.guards.hint(right)} of another"
        )
