"""Widens values within one torch function to float32 where its kernel would compute in float32.

A row composes a torch function of several nodes: ``mean`` is a sum and a quotient, ``layer_norm`` two statistics and
what is done with them. Eager torch computes all of that in one kernel and rounds the result alone. So only the results
of a row have the 16-bit dtype that eager gives them; what they are computed from is float32. Within a kernel this makes
no difference, since registers are float32 (``ir/body.py``). It does where such a value passes from one kernel to
another: the sum of 65,536 elements does not fit float16, and a mean in bfloat16 has 8 bits.

What the user's function makes of several torch functions is rounded between kernels where eager rounds it, to the
results' own dtypes: the result of a product that a softmax reads stays two bytes an element.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jitgen.ir.body import compute_dtype
from jitgen.ir.graph import Builder, Node, topological
from jitgen.ir.nodes import BITS, CAST, CUSTOM_GRADIENT, VIEW

_NARROW = ("float16", "bfloat16")


def with_wide_intermediates(builder: Builder, results: Sequence[Node], arguments: Iterable[Node]) -> list[Node]:
    """Recomputes ``results`` of a row from float32 intermediates where they are of 16 bits.

    Args:
        arguments: of the row; neither they nor what they are computed from is changed.
    """
    own = {id(node): node for node in arguments}
    """Each node in its own dtype, computed from wide operands."""
    made = [node for node in topological(results, known=frozenset(own)) if id(node) not in own]
    if not any(node.dtype in _NARROW for node in made):
        return [*results]
    wide = dict(own)
    for node in made:
        stored = node.kind.reads_elsewhere or node.kind is BITS
        stored |= node.kind is CAST and node.inputs[0].dtype == node.dtype
        operands = [(own if stored else wide)[id(child)] for child in node.inputs]
        if node.kind is VIEW:
            own[id(node)] = builder.like(node, [own[id(child)] for child in node.inputs])
            wide[id(node)] = _retyped(builder, node, operands, operands[0].dtype)
        elif node.kind is CUSTOM_GRADIENT:
            own[id(node)] = builder.like(node, [own[id(node.inputs[0])], *operands[1:]])
            wide[id(node)] = _retyped(builder, node, operands, operands[0].dtype)
        elif node.kind is CAST and not stored and operands[0].dtype == node.dtype:
            own[id(node)] = wide[id(node)] = operands[0]
        else:
            own[id(node)] = wide[id(node)] = builder.like(node, operands)
            if node.dtype in _NARROW and node.kind is not CAST and node.inputs and not stored:
                wide[id(node)] = _retyped(builder, node, operands, compute_dtype(node.dtype))
    return [own[id(node)] for node in results]


def _retyped(builder: Builder, node: Node, operands: Sequence[Node], dtype: str) -> Node:
    return builder.make(node.op, operands, dtype, node.shape, node.attrs, node.location)
