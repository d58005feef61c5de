"""Defines the rows of grouped products, of which a mixture of experts is made: ``F.grouped_mm``, ``torch._grouped_mm``.

A grouped product is one ``grouped`` node (``ir/nodes.py``). Its offsets are a tensor on the device, which the kernel
reads: no size and no launch depends on them. Offsets are the ends of the groups, and have to ascend up to the number of
rows at most. A kernel on a CPU reports others; on a GPU a group is cut to the rows that there are. Rows behind the last
offset are 0, which torch leaves undefined.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jitgen.errors import UnsupportedError
from jitgen.ir.graph import Node
from jitgen.spec import dtype_name
from jitgen.trace.contractions import bmm, transposed
from jitgen.trace.groups import grouped, mT
from jitgen.trace.table import row

if TYPE_CHECKING:
    from jitgen.trace.tracer import Trace


@row("_grouped_mm", "transformers.grouped_mm_fallback", weights=True)
def grouped_mm(
    trace: Trace, input: Node, weight: Node, offs: Node | None = None, bias: Node | None = None, out_dtype: Any = None
) -> Node:
    """Multiplies groups of rows by matrices (2-d by 3-d), matrices by groups of columns (3-d by 2-d), or groups of
    columns by groups of rows (2-d by 2-d, with a matrix for each group)."""
    if bias is not None:
        raise UnsupportedError("grouped_mm with a bias, as torch has none here either; add bias[ids] to its result")
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
