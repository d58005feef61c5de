"""Differentiates composed functions by torch's formulas; see ``ir/custom_gradients.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from jitgen.ir.custom_gradients import SAVED_VIEW, SHARED_EXTREMUM
from jitgen.ir.graph import Node
from jitgen.ir.nodes import CUSTOM_GRADIENT
from jitgen.trace.table import row
from jitgen.trace.typing import Value, broadcast_shapes, expand, is_float, operand

if TYPE_CHECKING:
    from jitgen.trace.tracer import Trace


@row("jitgen.with_gradient")
def with_gradient(trace: Trace, value: Node, *pairs: Value) -> Node:
    """Traces ``ir.custom_gradients.with_gradient``."""
    operands, slopes = pairs[::2], pairs[1::2]
    active = [
        (node, slope if isinstance(slope, Node) else operand(trace, slope, value.dtype))
        for node, slope in zip(operands, slopes, strict=True)
        if isinstance(node, Node) and is_float(node)
    ]
    if not (trace.differentiable and active and is_float(value)):
        return value
    inputs = [value]
    for node, slope in active:
        shape = broadcast_shapes(trace, value.shape, node.shape, slope.shape)
        inputs += [expand(trace, node, shape), expand(trace, slope, shape)]
    return trace.make(CUSTOM_GRADIENT.name, inputs, value.dtype, value.shape)


@row("jitgen.saved")
def saved(trace: Trace, value: Node) -> Node:
    """Traces ``ir.custom_gradients.saved``."""
    return marked(trace, value, SAVED_VIEW)


@row("jitgen.shared")
def shared(trace: Trace, value: Node) -> Node:
    """Traces ``ir.custom_gradients.shared``."""
    return marked(trace, value, SHARED_EXTREMUM)


def marked(trace: Trace, value: Node, attrs: tuple[str]) -> Node:
    """Marks ``value`` for its gradients by ``attrs`` of ``ir/custom_gradients.py``, where any are computed."""
    if not (trace.differentiable and is_float(value)):
        return value
    return trace.make("view", (value,), value.dtype, value.shape, attrs)


def derived(trace: Trace, value: Node, operands: Sequence[Value], slopes: Callable[[Node], Sequence[Value]]) -> Node:
    """Gives ``value`` the slope in each of ``operands`` that ``slopes`` makes of the value.

    In a second derivative the value that a slope reads has these slopes again.
    """
    if not trace.differentiable:
        return value
    for _ in range(2):
        pairs = zip(operands, slopes(value), strict=True)
        value = with_gradient(trace, value, *(item for pair in pairs for item in pair))
    return value
