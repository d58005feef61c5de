"""Takes the bits of a tensor for those of another dtype, as ``x.view(dtype)`` does.

Integers are between all dtypes: a float's bits are one of its size (``BITS``, a node of its own), and integers of
another size are taken apart along the last dimension, or put together, by shifts. The first of several has the low
bits, as on every machine that torch runs on.

Torch returns a view, whatever its dtype. What is made here is computed of the tensor, so an update of either of the two
is refused (``updates.py``), and so is the result of a call that would be a view of an argument (``Trace.returned``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jitgen.errors import UnsupportedError
from jitgen.ir import symbols
from jitgen.ir.graph import Node
from jitgen.ir.nodes import BITS
from jitgen.spec import BITS_OF, DTYPES
from jitgen.trace.typing import pointwise

if TYPE_CHECKING:
    from jitgen.trace.tracer import Trace


def reinterpreted(trace: Trace, node: Node, dtype: str) -> Node:
    """Returns the elements of ``dtype`` that lie in memory where those of ``node`` do, if it is row-major."""
    if node.dtype == dtype:
        return node
    if node.is_weight:
        raise UnsupportedError(
            f"view({DTYPES[dtype]}) of a quantised weight, whose elements are in no memory; dequantise it outside the "
            "function, or pass its tensors"
        )
    size, wanted = DTYPES[node.dtype].itemsize, DTYPES[dtype].itemsize
    if size != wanted and not node.shape:
        raise ValueError(f"a tensor without dimensions has no view({DTYPES[dtype]}), of elements of another size")
    bits, integer = _bits(trace, node), BITS_OF.get(dtype, dtype)
    if size > wanted:
        bits = _taken_apart(trace, bits, "uint8" if integer == "bool" else integer, size // wanted)
    elif size < wanted:
        _require_whole(trace, node, dtype, wanted // size)
        bits = _put_together(trace, bits, integer, wanted // size)
    bits = trace.cast(bits, integer)
    return bits if integer == dtype else trace.detached(_changed(trace, bits, dtype))


def _bits(trace: Trace, node: Node) -> Node:
    if node.dtype in BITS_OF:
        return _changed(trace, node, BITS_OF[node.dtype])
    return trace.cast(node, "uint8") if node.dtype == "bool" else node


def _changed(trace: Trace, node: Node, dtype: str) -> Node:
    if node.kind is BITS and node.inputs[0].dtype == dtype:
        return node.inputs[0]
    return trace.make(BITS.name, (node,), dtype, node.shape)


def _taken_apart(trace: Trace, node: Node, dtype: str, count: int) -> Node:
    """Makes ``count`` integers of each, along the last dimension."""
    *outer, length = node.shape
    width = 8 * DTYPES[dtype].itemsize
    word = trace.make("view", (node,), node.dtype, (*node.shape, 1), ("unsqueeze", len(node.shape)))
    pieces = [
        trace.cast(pointwise(trace, "right_shift", word, width * number), dtype) if number else trace.cast(word, dtype)
        for number in range(count)
    ]
    joined = trace.make("cat", pieces, dtype, (*node.shape, count), (len(node.shape),))
    shape: tuple[Any, ...] = (*outer, symbols.mul(length, count))
    return trace.make("view", (joined,), dtype, shape, ("reshape",))


def _require_whole(trace: Trace, node: Node, dtype: str, count: int) -> None:
    length = node.shape[-1]
    if not trace.guards.equal(symbols.mod(length, count), 0):
        raise ValueError(
            f"view({DTYPES[dtype]}) makes one element of {count}, and the last size, {trace.guards.hint(length)}, is "
            "not divisible by that; slice or pad it first"
        )


def _put_together(trace: Trace, node: Node, dtype: str, count: int) -> Node:
    """Makes one integer of each ``count`` along the last dimension."""
    *outer, length = node.shape
    width, last = 8 * DTYPES[node.dtype].itemsize, len(node.shape)
    shape: tuple[Any, ...] = (*outer, symbols.floordiv(length, count))
    split = trace.make("view", (node,), node.dtype, (*shape, count), ("reshape",))
    total = None
    for number in range(count):
        picked = trace.make("view", (split,), node.dtype, (*shape, 1), ("slice", last, number, 1))
        piece = trace.cast(trace.make("view", (picked,), node.dtype, shape, ("squeeze", last)), dtype)
        piece = pointwise(trace, "bitwise_and", piece, 2**width - 1)
        piece = pointwise(trace, "left_shift", piece, width * number) if number else piece
        total = piece if total is None else pointwise(trace, "bitwise_or", total, piece)
    assert total is not None
    return total
