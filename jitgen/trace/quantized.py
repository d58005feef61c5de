"""Keeps the quantised weights of a trace: the node of each, from tensors that are arguments or that the function closes
over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jitgen.errors import UnsupportedError
from jitgen.ir.graph import Node
from jitgen.quant import activations, formats, lookup, weights
from jitgen.spec import dtype_name
from jitgen.trace.captured import captured_tensor, captured_token
from jitgen.trace.proxy import TensorProxy

if TYPE_CHECKING:
    from jitgen.trace.tracer import Trace


class QuantizedWeights:
    """Holds the quantised weights that one trace has met.

    Args:
        layouts: the layouts in which kernels read them.
    """

    def __init__(self, trace: Trace, layouts: weights.Layouts):
        self._trace, self.layouts = trace, layouts
        self._captured: dict[int, Node] = {}
        self._tokens: dict[int, Any] = {}
        """The token of a weight, by the id of its node."""
        self._extras: dict[tuple[int, str], Node] = {}
        """What a weight has besides its stored columns, by the id of its node and the name of the tensor."""
        self._codes: dict[tuple[int, str, int], tuple[Node, Node, Node]] = {}
        """Activations that were quantised, with their codes and scales, by the id of their node, the kind of their
        codes, and the id of a static scale's node."""

    def argument(self, weight: Any) -> TensorProxy:
        """Makes a proxy for an unpacked weight; its tensors (codes, scales, ...) are proxies already."""
        return TensorProxy(self.node([tensor.value for tensor in weight.tensors], weight.token), self._trace)

    def node(self, tensors: Sequence[Node], token: Any) -> Node:
        """Makes the node of a weight that consists of ``tensors``.

        Raises:
            UnsupportedError: kernels read such weights in another layout.
        """
        wanted = weights.layout_of(token, self.layouts)
        if token.layout != wanted:
            raise UnsupportedError(f"a quantised weight in the layout {token.layout!r}; kernels read {wanted!r}")
        format, make = formats.find(token.format), self._trace.builder.make
        named = dict(zip(format.tensor_names, tensors, strict=True))
        attrs = (format.stored.name, token.group_size, token.layout, token.activation)
        tensors = tensors[: len(format.stored.tensor_names)]
        node = make("dequantize", tensors, dtype_name(token.dtype), token.weight_shape, attrs)
        self._tokens[id(node)] = token
        self._extras |= {(id(node), name): named[name] for name in format.extra_names}
        if token.experts is not None:
            rows, columns = token.weight_shape
            count = max(token.experts, 1)
            node = make("view", (node,), node.dtype, (count, rows // count, columns), ("reshape",))
            if token.experts == 0:
                node = make("view", (node,), node.dtype, (0, rows, columns), ("slice", 0, 0, 1))
        if token.transposed:
            swapped = (1, 0) if token.experts is None else (0, 2, 1)
            node = make("view", (node,), node.dtype, token.shape, ("permute", swapped))
        return node

    def captured(self, weight: Any) -> Node:
        """Returns the node of a weight that the function closes over; each of its tensors is a graph input."""
        node = self._captured.get(id(weight))
        if node is None:
            captured = self._trace.captured_weight(weight)
            layout = weights.layout_of(weight, self.layouts)
            unpacked = weights.unpack_weight(weight, layout)
            tensors = [captured_tensor(captured, layout, index) for index in range(len(unpacked.tensors))]
            self._trace.captures.guards.append(captured_token(captured))
            nodes = [self._trace.captured_input(tensor) for tensor in tensors]
            node = self._captured[id(weight)] = self.node(nodes, unpacked.token)
        return node

    def column_order(self, weight: Node) -> Node | None:
        """Returns the order in which the columns of ``weight`` are stored; None if they are in their own order. A view
        has the order of its weight."""
        return self._extras.get((id(weight.under_views), "order"))

    def smoothed(self, x: Node, weight: Node) -> Node:
        """Returns ``x`` (..., K) as products with ``weight`` have it: its columns multiplied by the weight's
        ``smoothing``, if it has such."""
        smoothing = self._extras.get((id(weight.under_views), "smoothing"))
        return (
            x if smoothing is None else self._trace.composed(activations.smoothed, [*map(self._proxy, (x, smoothing))])
        )

    def activation(self, weight: Node) -> str | None:
        """Returns how products quantise what they multiply with ``weight``, or with what it is a view of."""
        token = self._tokens.get(id(weight.under_views))
        return None if token is None else token.activation

    def has_blocks(self, weight: Node) -> bool:
        """Returns whether blocks of an activation's columns have scales of their own in products with ``weight``."""
        return activations.kind_of(self._tokens[id(weight.under_views)].activation).block is not None

    def codes(self, x: Node, weight: Node) -> tuple[Node, Node]:
        """Quantises ``x`` (..., K) as products with ``weight`` do, once for all of them that read it: returns its
        codes and its scales, float32 (..., 1) or (..., blocks)."""
        base = weight.under_views
        kind = activations.kind_of(self._tokens[id(base)].activation)
        static = self._extras.get((id(base), "input_scale"))
        known = self._codes.get((id(x), kind.name, id(static)))
        if known is None:
            proxy = TensorProxy(x, self._trace)
            if static is None:
                scales = self._trace.composed(lambda x: activations.scales_of(x, kind), [proxy])
            else:
                last = len(x.shape) - 1
                scales = self._trace.builder.make("view", (static,), "float32", (1,), ("squeeze", 0))
                scales = self._trace.composed(lambda scale: scale.reshape((1,) * (last + 1)), [self._proxy(scales)])
            codes = self._trace.composed(
                lambda x, scales: activations.codes_of(x, scales, kind, static is not None),
                [proxy, self._proxy(scales)],
            )
            known = self._codes[id(x), kind.name, id(static)] = x, codes, scales
        return known[1:]

    def values(self, codes: Node, scales: Node, weight: Node) -> Node:
        """Decodes what ``codes`` returned, to float32."""
        kind = activations.kind_of(self._tokens[id(weight.under_views)].activation)
        proxies = [self._proxy(codes), self._proxy(scales)]
        return self._trace.composed(lambda codes, scales: activations.values_of(codes, scales, kind), proxies)

    def _proxy(self, node: Node) -> TensorProxy:
        return TensorProxy(node, self._trace)

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
        extras = [self._extras[id(weight), name] for name in formats.find(token.format).extra_names]
        proxies: list[Any] = [self._proxy(node) for node in (*weight.inputs, *extras, index)]
        return self._trace.composed(
            lambda *tensors: lookup.rows(tensors[:-1], token.replace(device=self._trace.device), tensors[-1]), proxies
        )
