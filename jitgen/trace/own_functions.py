"""Traces calls of pointwise functions that users spelled in the dialects (``jitgen.device_function``).

The dtype of a call is that of the reference, which is asked with a few elements; integers of which it makes floats are
converted first. A derivative is a function of the same
arguments, written in torch, which gives a slope for each of them.

Neighbours: ``codegen/own_functions.py`` prints a call; ``call/own_functions.py`` is what users hold.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import handle_torch_function

from jitgen.codegen.c_text.tokens import is_expression
from jitgen.codegen.own_functions import DIALECTS
from jitgen.errors import UnsupportedError
from jitgen.ir.attributes import OwnAttrs
from jitgen.ir.graph import Node
from jitgen.ir.nodes import OWN
from jitgen.spec import DTYPES, dtype_name
from jitgen.trace.derivatives import derived
from jitgen.trace.proxy import TensorProxy
from jitgen.trace.table import row
from jitgen.trace.typing import broadcast_shapes, expand, operand, result_dtype

if TYPE_CHECKING:
    from jitgen.trace.tracer import Trace


class OwnFunction:
    """Represents a pointwise function.

    Attributes:
        reference: the same in torch.
        derivative: gives slopes; None where nobody knows the derivative.
        attrs: its name, parameters and spellings.
    """

    __jitgen_follows__ = ("derivative",)
    """What a trace that meets a function follows of it (``trace/captures.py``)."""

    def __init__(
        self, reference: Callable[..., Any], texts: dict[str, str | None], derivative: Callable[..., Any] | None
    ) -> None:
        self.reference, self.derivative = reference, derivative
        name = getattr(reference, "__name__", "function")
        name = "function" if name == "<lambda>" else name
        parameters = tuple(inspect.signature(reference).parameters)
        spelled = {dialect: texts[dialect] for dialect in DIALECTS if texts.get(dialect) is not None}
        if not spelled or not parameters:
            raise UnsupportedError(
                f"{name} has no parameters, or no expression; give it both, in one of {', '.join(DIALECTS)}"
            )
        for dialect, text in spelled.items():
            self._check(name, dialect, str(text), parameters)
        self.attrs = OwnAttrs(name, parameters, tuple((dialect, str(text)) for dialect, text in spelled.items()))

    def _check(self, name: str, dialect: str, text: str, parameters: Sequence[str]) -> None:
        """Raises UnsupportedError where a spelling is no expression."""
        if dialect == "triton":
            try:
                ast.parse(text.strip(), mode="eval")
            except SyntaxError as error:
                raise UnsupportedError(
                    f"{name}: {text!r} is no expression in Triton ({error.msg}); write one of {', '.join(parameters)}"
                ) from None
            return
        if not is_expression(text):
            raise UnsupportedError(
                f"{name}: {text!r} is no expression in {dialect}; write one without statements and outer commas, of "
                f"{', '.join(parameters)}"
            )

    def __repr__(self) -> str:
        return f"<jitgen.device_function {self.attrs.name}({', '.join(self.attrs.parameters)})>"

    def result_of(self, dtypes: Sequence[str], rank: int) -> str:
        """Returns the dtype of a call whose arguments have ``dtypes`` and, together, ``rank`` dimensions."""
        shape = [2 + dim % 2 for dim in range(rank)]
        arguments = ", ".join(dtypes)
        try:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                result = self.reference(*(torch.ones(shape, dtype=DTYPES[dtype]) for dtype in dtypes))
            dtype, made = dtype_name(result.dtype), list(result.shape)
        except Exception as error:
            raise UnsupportedError(
                f"the reference of {self.attrs.name} fails for arguments of {arguments}; convert them: {error}"
            ) from error
        if made != shape:
            raise UnsupportedError(
                f"the reference of {self.attrs.name} is not pointwise: of arguments {shape} it makes a result {made}; "
                "leave what sums, moves or chooses elements to the function that calls it"
            )
        return dtype

    def used(self, trace: Trace, dtypes: Sequence[str]) -> None:
        """Hears of each call that is traced."""


def applied(function: OwnFunction, *arguments: Any) -> Any:
    """Calls ``function`` in a trace."""
    return handle_torch_function(applied, arguments, function, *arguments)


def is_traced(arguments: Sequence[Any]) -> bool:
    """Returns whether one of ``arguments`` is a tensor of a trace."""
    return any(isinstance(argument, TensorProxy) for argument in arguments)


@row("jitgen.applied")
def traced(trace: Trace, function: OwnFunction, *arguments: Any) -> Node:
    attrs = function.attrs
    if len(arguments) != len(attrs.parameters):
        raise TypeError(f"{attrs.name} takes {', '.join(attrs.parameters)}, and {len(arguments)} arguments are given")
    dtype = result_dtype(*arguments)
    shape = broadcast_shapes(trace, *(value.shape for value in arguments if isinstance(value, Node)))
    result = function.result_of([dtype] * len(arguments), len(shape))
    # Of integers a quotient, say, is one of floats, as in torch; in a dialect it would be an integer.
    is_float = DTYPES[result].is_floating_point and not DTYPES[dtype].is_floating_point
    operands = [expand(trace, operand(trace, value, result if is_float else dtype), shape) for value in arguments]
    node: Node = trace.make(OWN.name, operands, result, shape, tuple(attrs))
    function.used(trace, [dtype] * len(arguments))
    derivative = function.derivative
    if derivative is None:
        return node

    def slopes(value: Node) -> Sequence[Any]:
        proxies = [TensorProxy(argument, trace) for argument in operands]
        with torch._C._EnableTorchFunction():
            made = derivative(*proxies)
        listed = made if isinstance(made, (tuple, list)) else (made,)
        if len(listed) != len(operands):
            raise TypeError(f"the derivative of {attrs.name} gives {len(listed)} slopes for {len(operands)} arguments")
        return [slope.value if isinstance(slope, TensorProxy) else slope for slope in listed]

    return derived(trace, node, operands, slopes)
