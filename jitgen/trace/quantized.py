"""Keeps the quantised weights of a trace: the node of each, from tensors that are arguments or that the function closes
over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jitgen.errors import UnsupportedError
from jitgen.ir.graph import Node
from jitgen.quant import activations, formats, lookup, weights
from jitgen.spec import dtype_name
from jitgen.trace.captured import captured_part, captured_token
from jitgen.trace.proxy import TensorProxy

if TYPE_CHECKING:
    from jitgen.trace.tracer import Trace


class QuantizedWeights:
    """Holds the quantised weights that one trace has met.

    Args:
        layout: the layout in which kernels read them.
    """

    def __init__(self, trace: Trace, layout: str):
        self._trace, self.layout = trace, layout
        self._captured: dict[int, Node] = {}
        self._tokens: dict[int, Any] = {}
        """The token of a weight, by the id of its node."""
        self._column_orders: dict[int, Node] = {}
        self._codes: dict[int, tuple[Node, Node, Node]] = {}
        """Activations that were quantised, with their codes and scales, by the id of their node."""

    def argument(self, weight: Any) -> TensorProxy:
        """Makes a proxy for an unpacked weight; its tensors (codes, scales, ...) are proxies already."""
        return TensorProxy(self.node([tensor.value for tensor in weight.tensors], weight.token), self._trace)

    def node(self, tensors: Sequence[Node], token: Any) -> Node:
        """Makes the node of a weight that consists of ``tensors``.

        Raises:
            UnsupportedError: kernels read such weights in another layout.
        """
        if token.layout != self.layout:
            raise UnsupportedError(f"a quantised weight in the layout {token.layout!r}; kernels read {self.layout!r}")
        format, make = formats.find(token.format), self._trace.builder.make
        order = tensors[-1] if format.ordered else None
        attrs = (format.stored.name, token.group_size, token.layout)
        tensors = tensors[: len(format.stored.tensor_names)]
        node = make("dequantize", tensors, dtype_name(token.dtype), token.weight_shape, attrs)
        self._tokens[id(node)] = token
        if order is not None:
            self._column_orders[id(node)] = order
        if token.experts is not None:
            rows, columns = token.weight_shape
            shape = token.experts, rows // max(token.experts, 1), columns
            node = make("view", (node,), node.dtype, shape, ("reshape",))
        if token.transposed:
            swapped = (1, 0) if token.experts is None else (0, 2, 1)
            node = make("view", (node,), node.dtype, token.shape, ("permute", swapped))
        return node

    def captured(self, weight: Any) -> Node:
        """Returns the node of a weight that the function closes over; each of its tensors is a graph input."""
        node = self._captured.get(id(weight))
        if node is None:
            captured = self._trace.captured_weight(weight)
            unpacked = weights.unpack_weight(weight, self.layout)
            parts = [captured_part(captured, self.layout, index) for index in range(len(unpacked.tensors))]
            self._trace.captures.guards.append(captured_token(captured))
            nodes = [self._trace.captured_input(part) for part in parts]
            node = self._captured[id(weight)] = self.node(nodes, unpacked.token)
        return node

    def column_order(self, weight: Node) -> Node | None:
        """Returns the order in which the columns of ``weight``, or of what it is a view of, are stored; None for their
        own."""
        return self._column_orders.get(id(weight.under_views))

    def activation(self, weight: Node) -> str | None:
        """Returns how products quantise what they multiply with ``weight``, or with what it is a view of.

        Raises:
            UnsupportedError: kernels of this backend do not.
        """
        token = self._tokens.get(id(weight.under_views))
        if token is None or token.activation is None:
            return None
        activations.refuse_backend(token.activation, self.layout)
        return str(token.activation)

    def codes(self, x: Node) -> tuple[Node, Node]:
        """Quantises ``x`` (..., K), once for all products that read it: returns its codes, and a scale for each row."""
        known = self._codes.get(id(x))
        if known is None:
            proxy = TensorProxy(x, self._trace)
            scales = self._trace.composed(activations.scales_of, [proxy])
            codes = self._trace.composed(activations.codes_of, [proxy, TensorProxy(scales, self._trace)])
            known = self._codes[id(x)] = x, codes, scales
        return known[1:]

    def rows(self, weight: Node, index: Node) -> Node:
        """Looks up the rows of ``weight`` that ``index`` numbers, by torch operations on its tensors
        (``quant/lookup.py``).

        Raises:
            UnsupportedError: ``weight`` is a view of a quantised weight.
        """
        token = self._tokens.get(id(weight))
        if token is None:
            raise UnsupportedError(
                "an embedding takes a quantised weight as it is; pass the weight itself, not a view of it"
            )
        proxies: list[Any] = [TensorProxy(node, self._trace) for node in (*weight.inputs, index)]
        return self._trace.composed(
            lambda *tensors: lookup.rows(tensors[:-1], token.replace(device=self._trace.device), tensors[-1]), proxies
        )
