"""Traces a launch of a kernel that a user wrote, in whatever language: each tensor that it writes gets a new value.

Neighbours: ``launches.py`` knows what launches in Triton are, ``c_kernel.py`` those in CUDA C++ and C++;
``ir/launches.py`` says what a node means.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch

from jitgen.errors import TraceError, UnsupportedError
from jitgen.ir import symbols
from jitgen.ir.attributes import KernelText, LaunchAttrs
from jitgen.ir.graph import Node
from jitgen.ir.launches import results_of
from jitgen.ir.nodes import LAUNCH, VIEW
from jitgen.trace.argument_strides import row_major
from jitgen.trace.location import quote, user_location
from jitgen.trace.numbers import unwrap
from jitgen.trace.strides import strides_of_tensor
from jitgen.trace.updates import before_updates, updated

if TYPE_CHECKING:
    from jitgen.trace.tracer import Trace

trace_in_progress: ContextVar[Trace | None] = ContextVar("launches", default=None)
"""The trace in progress in this thread, which meets launches."""


class Launch:
    """Holds one launch that is traced.

    Attributes:
        name, defined_at: of the kernel, and its file and line.
        operands, proxies: the tensors of the launch, each once, as nodes and as the trace has them.
        remedy: what to do about wrong arguments or sizes.
    """

    remedy = "launch it with the arguments of its definition, on a grid of programs"

    def __init__(self, trace: Trace, name: str, defined_at: str) -> None:
        self.trace_, self.name, self.defined_at = trace, name, defined_at
        self.operands: list[Node] = []
        self.proxies: list[Any] = []

    def refused(self, what: str, remedy: str) -> UnsupportedError:
        return UnsupportedError(
            f"{self.trace_.name}: the launch of {self.name} ({self.defined_at}): {what}"
            f"{quote(user_location())}\n  {remedy}"
        )

    def wrong(self, what: str) -> TraceError:
        return TraceError(
            f"{self.trace_.name}: the launch of {self.name} ({self.defined_at}): {what}"
            f"{quote(user_location())}\n  {self.remedy}"
        )

    def operand(self, name: str, value: Any) -> int:
        """Returns the number of the operand that is the tensor ``value``."""
        if type(value).__name__ == "QTensor":
            raise self.refused(f"{name} is a quantised weight", "pass its dequantised values, or its tensors")
        proxy = value if type(value).__name__ == "TensorProxy" else self.trace_.captured_proxy(value)
        for number, known in enumerate(self.proxies):
            if known is proxy or (known.memory is proxy.memory and known.value is proxy.value):
                return number
        self.proxies.append(proxy)
        self.operands.append(proxy.value)
        return len(self.operands) - 1

    def sizes(self, numbers: Any, what: str) -> tuple[Any, Any, Any]:
        """Returns one to three sizes as three expressions.

        A number that a caller passes becomes a guard, since a launcher is made for one grid.
        """
        sizes = tuple(numbers) if isinstance(numbers, (tuple, list)) else (numbers,)
        if not 1 <= len(sizes) <= 3:
            raise self.wrong(f"a {what} has one to three sizes, and this one {len(sizes)}")
        expressions = []
        for size in (*sizes, 1, 1)[:3]:
            expr = unwrap(size)
            if symbols.kind_of(expr) != "int":
                raise self.wrong(f"the size {size!r} of the {what} is no integer")
            expr = self.fixed(expr)
            hint = self.trace_.guards.hint(expr)
            if hint < 0 or (hint == 0 and not isinstance(expr, symbols.Expr)):
                words = ", ".join(str(self.trace_.guards.hint(unwrap(size))) for size in sizes)
                raise self.wrong(f"its {what} is ({words}); every size has to be at least 1")
            expressions.append(expr)
        return expressions[0], expressions[1], expressions[2]

    def fixed(self, expr: Any) -> Any:
        """Returns ``expr``, or its value in this call where that is known at each call alone."""
        of_call = any(map(symbols.is_known_at_the_call, symbols.symbols_of(expr)))
        return self.trace_.guards.value(expr) if of_call else expr

    def emit(
        self,
        kernel: KernelText,
        parameters: Sequence[tuple[str, str, Any]],
        configs: Sequence[tuple[Any, ...]],
        written: Sequence[int],
        tensors: Mapping[str, int],
    ) -> None:
        """Gives each tensor that the kernel writes its new value.

        Args:
            kernel, parameters, configs: of ``LaunchAttrs``.
            written: the operands that it writes, in ascending order.
            tensors: the operand of each parameter that is a tensor.
        """
        trace = self.trace_
        if not written:
            raise self.refused("it writes none of its tensors", "leave the launch out")
        self._check_memory(written, tensors)
        if trace.differentiable and torch.is_grad_enabled():
            self._refuse_gradients(tensors)
        unset = [n for n in written if self.proxies[n].memory.is_unset and not self.proxies[n].memory.updates]
        attrs = LaunchAttrs(
            kernel,
            tuple(parameters),
            tuple(dict.fromkeys(configs)),
            tuple(written),
            tuple(unset),
            tuple(map(self._told, range(len(self.operands)))),
            written[0],
        )
        first = self.operands[written[0]]
        node = trace.make(LAUNCH.name, self.operands, first.dtype, first.shape, tuple(attrs))
        results = results_of(node, node.inputs, trace.builder)
        for number, result in zip(written, results, strict=True):
            updated(trace, self.proxies[number], result, self.name)

    def _check_memory(self, written: Sequence[int], tensors: Mapping[str, int]) -> None:
        """Raises UnsupportedError where the kernel would not find its tensors as they are in eager torch."""
        names = {number: name for name, number in tensors.items()}
        for number in written:
            name, node = names[number], self.operands[number]
            for other, proxy in enumerate(self.proxies):
                if other != number and proxy.memory is self.proxies[number].memory:
                    raise self.refused(
                        f"{name}, which it writes, shares memory with {names[other]}",
                        "pass one tensor for both, or clone one of them",
                    )
            if any(base.attrs.kind == "expand" for base in _views(node)):
                raise self.refused(f"{name}, which it writes, repeats elements", "pass a tensor of its own")
            if (self._told(number) or row_major(node.shape)) != row_major(node.shape):
                raise self.refused(f"{name}, which it writes, is not contiguous", "write to a new tensor, and copy it")
        for number, (node, proxy) in enumerate(zip(self.operands, self.proxies, strict=True)):
            if self._told(number) is None and any(map(_reorders, _views(node))):
                raise self.refused(
                    f"{names[number]} is a view whose elements need not lie one behind the other, and the kernel is "
                    "told none of its strides",
                    f"pass {names[number]}.contiguous(), or its strides",
                )
            # A graph does not tell where the new value of an argument lies; strides of others are checked at a call.
            if before_updates(self.trace_, proxy) is node:
                continue
            lies = zip(strides_of_tensor(self.trace_, proxy), row_major(node.shape), node.shape, strict=True)
            if any(stride != expected and size != 1 for stride, expected, size in lies):
                raise self.refused(
                    f"{names[number]} was updated before, and it is not contiguous", "pass contiguous tensors"
                )

    def _told(self, number: int) -> tuple[Any, ...] | None:
        """Returns the strides of operand ``number`` that the function has asked for; None where it has not."""
        return self.trace_.strides_read.get((self.proxies[number].memory, self.operands[number]))

    def _refuse_gradients(self, tensors: Mapping[str, int]) -> None:
        from jitgen.trace import own_facts

        for name, number in tensors.items():
            if own_facts.requires_grad(self.trace_, self.operands[number]):
                raise self.refused(
                    f"{name} requires grad, and nobody knows the derivative of a kernel that you wrote",
                    "call the function under torch.no_grad(), or put the launch into a torch.autograd.Function or a "
                    "torch.library.custom_op with a backward, which is called outside of decorated functions",
                )


def _views(node: Node) -> Iterator[Node]:
    """Yields the views that ``node`` is of what is under them; none of a filled tensor, which is one of its own."""
    while node.kind is VIEW and not node.under_views.kind.is_number:
        yield node
        node = node.inputs[0]


def _reorders(view: Node) -> bool:
    """Returns whether elements of ``view`` may not lie one behind the other where those of its source do."""
    attrs, shape = view.attrs, view.shape
    if attrs.kind == "permute":
        return tuple(attrs.order) != tuple(range(len(shape)))
    if attrs.kind == "slice":
        return attrs.step != 1 or any(size != 1 for size in shape[: attrs.dim])
    return attrs.kind == "expand" and shape != view.inputs[0].shape
