"""Makes nodes of a graph again, as values of another: what ``backward.py`` needs of a forward.

Views are made of torch's tensors too, where a function returns one of an argument.

Only what needs no kernel of its own is here: constants, indices, views, casts and pointwise operations, and products
that the kernel of an attention's backward computes again. The results of all other operations are saved by the forward
(``plan.py``).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

from jitgen.gradients.values import Value, fn
from jitgen.ir import symbols
from jitgen.ir.custom_gradients import TRANSPARENT, UNTRACKED_VIEW, with_gradient
from jitgen.ir.graph import Node, postorder
from jitgen.ir.nodes import BITS, CAST, CAT, CONTRACT, CUSTOM_GRADIENT, IOTA, VIEW
from jitgen.ir.ops import OPS, OWN_FLOPS
from jitgen.ir.symbols import Expr
from jitgen.spec import DTYPES
from jitgen.trace.numbers import unwrap

_TAKES_NUMBERS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "pow", "eq", "ne", "lt", "le", "gt", "ge")},
    "div": operator.truediv,
    "where": fn.where,
}
"""Functions whose operands may be numbers."""
_NAMED_OTHERWISE: dict[str, Callable[..., Any]] = {
    "trunc_divide": lambda a, b: fn.div(a, b, rounding_mode="trunc"),
    "left_shift": fn.bitwise_left_shift,
    "right_shift": fn.bitwise_right_shift,
}

_PRINTED_IN_TWO_WAYS = {"div", "reciprocal", "own", *(op.name for op in OPS.values() if op.flops >= OWN_FLOPS)}
"""Operations that a kernel may compute in a form of its own, which differs in the last bits: quotients, and functions
such as exponentials."""


def function_of(op: str) -> Callable[..., Any]:
    """Returns the torch function that is the pointwise operation ``op``."""
    function = _TAKES_NUMBERS.get(op) or _NAMED_OTHERWISE.get(op)
    return function or getattr(fn, op)


class Replay:
    """Computes the values of a forward's nodes, each once, when it is first asked for.

    Args:
        values: the values that are known, by the ids of their nodes: inputs and what was saved.
        environment: a value for every symbol, of sizes and of numeric arguments.
        functions: makes constants, where values of a graph are computed; views of tensors need none.
    """

    def __init__(self, values: Mapping[int, Any], environment: Mapping[str, Any], functions: Any = None):
        self._values = dict(values)
        self._known = frozenset(values)
        self._environment = environment
        self._functions = functions
        self._of_products: set[int] = set()
        """Nodes that are computed from products that are computed again, by their ids."""
        self._of_functions: set[int] = set()
        """Nodes that are computed by ``_PRINTED_IN_TWO_WAYS``, again, by their ids."""

    def at(self, node: Node) -> None:
        """Notes that the gradient of ``node`` is computed next: what is made belongs to its line."""
        self._functions.trace.line = node.location

    def size(self, expr: Any) -> Any:
        return symbols.evaluate(expr, self._environment) if isinstance(expr, Expr) else expr

    def shape(self, node: Node) -> tuple[Any, ...]:
        return tuple(map(self.size, node.shape))

    def symbolic(self, attrs: Any) -> Any:
        """Returns ``attrs``, of a node of the forward, in the symbols of the backward."""
        if isinstance(attrs, tuple):
            return tuple(map(self.symbolic, attrs))
        return unwrap(self.size(attrs))

    def value(self, node: Node) -> Any:
        """Returns the value of ``node``: a tensor of its dtype and shape; a number where it is a constant."""
        for one in postorder([node], lambda one: () if id(one) in self._values else one.inputs):
            if id(one) in self._values:
                continue
            self._values[id(one)] = self._computed(one, [self._values[id(child)] for child in one.inputs])
            if one.kind is CONTRACT or any(id(child) in self._of_products for child in one.inputs):
                self._of_products.add(id(one))
            if one.op in _PRINTED_IN_TWO_WAYS or any(id(child) in self._of_functions for child in one.inputs):
                self._of_functions.add(id(one))
        return self._values[id(node)]

    def has_other_sums(self, node: Node) -> bool:
        """Returns whether the value of ``node``, which was asked for, may differ from the forward's in its last bits:
        another kernel adds up a product in another order."""
        return id(node) in self._of_products

    def has_other_bits(self, node: Node) -> bool:
        """Returns whether the value of ``node``, which was asked for, may differ from the forward's in its last bits,
        and is the same in all kernels of a backward: it has more bits than its 16-bit dtype, since kernels round what
        they store alone, or is of an exponential, for which the kernel of a softmax has a form of its own."""
        is_unrounded = node.dtype in ("bfloat16", "float16") and id(node.under_views) not in self._known
        return is_unrounded or id(node) in self._of_functions

    def _computed(self, node: Node, operands: list[Any]) -> Any:
        if node.kind.is_number:
            return self.size(node.attrs.value)
        if node.kind is IOTA:
            return self._index(node)
        if node.kind is VIEW:
            if not _has_elements(operands[0]):
                return self._functions.full(self.shape(node), operands[0], dtype=DTYPES[node.dtype])
            return self.viewed(operands[0], node.attrs, node.shape)
        if node.kind is CAST:
            return self._tensor(operands[0], node.dtype).to(DTYPES[node.dtype])
        if node.kind is BITS:
            return self._tensor(operands[0], node.inputs[0].dtype).view(DTYPES[node.dtype])
        if node.kind is CAT:
            return fn.cat(operands, node.attrs.dim)
        if node.kind is CONTRACT:
            return fn.einsum(node.attrs.equation, *operands).to(DTYPES[node.dtype])
        if node.kind is CUSTOM_GRADIENT:
            return operands[0].functions.called(with_gradient, *operands)
        if node.op not in OPS:
            raise AssertionError(f"{node.op} is computed again; the forward should have saved it")
        return self._pointwise(node, operands)

    def _tensor(self, value: Any, dtype: str) -> Any:
        """Converts ``value`` to a tensor; a number to one without dimensions."""
        return value if _has_elements(value) else self._functions.full((), value, dtype=DTYPES[dtype])

    def _index(self, node: Node) -> Any:
        """Computes the index along one dimension, for every element."""
        (dim,) = node.attrs
        index = self._functions.arange(self.size(node.shape[dim]))
        return index.reshape([-1 if other == dim else 1 for other in range(len(node.shape))]).expand(self.shape(node))

    def viewed(self, source: Any, attrs: tuple[Any, ...], shape: tuple[Any, ...]) -> Any:
        """Applies to ``source`` a movement (``ir/views.py``) whose result has the symbolic ``shape``."""
        kind = attrs[0]
        if kind == "permute":
            return source.permute(attrs[1])
        if kind == "unsqueeze":
            return source.unsqueeze(attrs[1])
        if kind == "squeeze":
            return source.squeeze(attrs[1])
        if kind == "expand":
            return source.expand(tuple(map(self.size, shape)))
        if kind == "reshape":
            return source.reshape(tuple(map(self.size, shape)))
        if attrs in TRANSPARENT:
            return source
        if attrs == UNTRACKED_VIEW:
            if isinstance(source, Value):
                return source.detached(attrs)
            with torch.no_grad():
                return source.view_as(source)
        if kind in ("detach", "untracked_contiguous"):  # for the derivative of what reads it
            return source.detach()
        _, dim, start, step = attrs
        start, step, length = self.size(start), self.size(step), self.size(shape[dim])
        if step < 0:
            source = source.narrow(dim, start + step * (length - 1), -step * (length - 1) + 1).flip(dim)
            start, step = 0, -step
        if step == 1:
            return source.narrow(dim, start, length)
        whole = slice(start, start + step * (length - 1) + 1, step)
        return source[tuple([slice(None)] * dim + [whole])]

    def _pointwise(self, node: Node, operands: list[Any]) -> Any:
        """Computes ``node`` in its own dtype, or that of wider operands, and rounds once. Comparisons are made in the
        dtype that their operands have in common."""
        op, dtype = OPS[node.op], DTYPES[node.dtype]
        if op.predicate:
            kinds = [DTYPES[child.dtype] for child in node.inputs]
            common = kinds[0] if len(kinds) == 1 else torch.promote_types(*kinds)
        else:
            common = dtype
            for child in node.inputs:
                if dtype.is_floating_point and DTYPES[child.dtype].is_floating_point:
                    common = torch.promote_types(common, DTYPES[child.dtype])
        conditions = 1 if node.op == "where" else 0
        values = [
            value.to(common) if index >= conditions and _has_elements(value) else value
            for index, value in enumerate(operands)
        ]
        if node.op not in _TAKES_NUMBERS or not any(_has_elements(value) for value in values):
            values = [self._tensor(v, c.dtype) for v, c in zip(values, node.inputs, strict=True)]
        result = function_of(node.op)(*values)
        return result if op.predicate else result.to(dtype)


def _has_elements(value: Any) -> bool:
    """Returns whether ``value`` is no number."""
    return isinstance(value, (Value, torch.Tensor))
