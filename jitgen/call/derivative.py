"""Runs calls with gradients: the ``torch.autograd.Function`` of a specialisation, whose forward and backward are
kernels.

A call of which a tensor requires grad is traced with marks where no gradient flows (``Trace.differentiable``). Its
``Derivative`` runs that graph with the values that a backward needs as further results (``gradients/plan.py``), and
makes the backward, a graph that is lowered and stored as any other. What is saved are results of the autograd
function too, so that a backward of the backward reaches them.

Neighbours: ``dispatch.py`` comes here, ``gradients/`` knows how graphs are differentiated, ``resolver.py`` resolves the
forward and the backward.
"""

from __future__ import annotations

import atexit
import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, reduce
from typing import TYPE_CHECKING, Any

import torch

from jitgen.call.bound import Captures
from jitgen.call.signature import environment_of
from jitgen.errors import UnsupportedError
from jitgen.frames import opaque
from jitgen.gradients.backward import Backward
from jitgen.gradients.plan import Plan, inputs_reached, launched, plan
from jitgen.gradients.replay import Replay
from jitgen.ir import symbols
from jitgen.ir.graph import Graph, Node, topological
from jitgen.ir.nodes import PRODUCTS
from jitgen.ir.symbols import Expr
from jitgen.quant.weights import dense
from jitgen.runtime import inference, overlap
from jitgen.spec import DTYPES
from jitgen.trace.readable import any_traced
from jitgen.trace.traced import Traced

if TYPE_CHECKING:
    from jitgen.call.specialization import Specialization

Launch = Callable[..., tuple[torch.Tensor, ...]]
"""Runs a graph: tensors, then numbers, to results."""
EXIT_SECONDS = 0.02
"""What ``_let_autograd_finish_at_exit`` waits: a thread needs microseconds, or, on a busy machine, its turn."""
ABORTS_AT_EXIT = sys.version_info < (3, 14)
"""Whether the interpreter ends threads that ask for the GIL while it ends; later ones stop them."""


class Derivative:
    """Runs calls of one specialisation where gradients are wanted of the inputs ``wanted``.

    Args:
        specialization: of a differentiable trace.
        wanted: the indices of inputs that require grad, captured tensors among them.
        forward_of: makes the launch of a graph, which it is given as ``Traced``.
        backward_of: makes the launch of a backward, given its name.
        keeps_marks: whether the graph of ``forward_of`` has the marks, since its launch has gradients of its own.
    """

    def __init__(
        self,
        specialization: Specialization,
        wanted: Sequence[int],
        forward_of: Callable[[Traced], Launch],
        backward_of: Callable[[Backward, str], Launch],
        keeps_marks: bool = False,
    ):
        graph = specialization.traced.graph
        # The new value of an argument that the function updates is a result, which torch then copies to the argument:
        # so torch knows the history of that, too.
        self.updated = [index for index, _ in graph.mutated]
        self._lines = {index: node.location for index, node in graph.mutated}
        self._inputs_used = graph.inputs_used
        # Views of it are made of the argument then.
        self._views = {position: graph.outputs[position] for position in graph.viewed_updates()}
        self._new_values = dict(graph.mutated)
        others = (node for position, node in enumerate(graph.outputs) if position not in self._views)
        graph = dataclasses.replace(graph, outputs=tuple(others)) if self._views else graph
        new = {id(node): len(graph.outputs) + number for number, (_, node) in enumerate(graph.mutated)}
        self._returned = [new.get(id(node), position) for position, node in enumerate(graph.outputs)]
        graph = dataclasses.replace(graph, outputs=graph.results, mutated=())
        self.plan = plan(graph, wanted)
        updates = list(zip(self.updated, graph.outputs[len(graph.outputs) - len(self.updated) :], strict=True))
        if any(index in wanted and id(node) not in self.plan.active for index, node in updates):
            raise UnsupportedError(
                f"{graph.name} updates an argument that requires grad with a value that has no gradient, as under "
                "torch.no_grad(); call the function itself under torch.no_grad(), or make the update outside of it"
            )
        self._read_and_updated = [index for index in self.updated if index in self.plan.inputs]
        self.graph = graph
        self.name = graph.name
        self._backward_of = backward_of
        self._backwards: dict[tuple[Any, ...], tuple[Launch, tuple[int, ...]]] = {}
        # Results that are an input, or a view of one, are made of it by torch, which knows their gradients.
        computed = [node for node in graph.outputs if not node.is_in_memory]
        self.results: tuple[Node, ...] = tuple(dict.fromkeys([*computed, *self.plan.saved]))
        position = {id(node): index for index, node in enumerate(self.results)}
        self.outputs = [position.get(id(node), node) for node in graph.outputs]
        self._viewed = [output.under_views for output in self.outputs if isinstance(output, Node)]
        self._saved = [position[id(node)] for node in self.plan.saved]
        self.without_gradient = [i for i, node in enumerate(self.results) if id(node) not in self.plan.active]
        self._weight_dtypes = [_dtype_of_products(graph, weight) for weight in self.plan.weights]
        self.sizes_of = _inputs_with_needed_sizes(self.plan, self.results)
        program, self._launched = launched(graph, self.results, len(set(computed)))
        if keeps_marks:
            program, self._launched = dataclasses.replace(graph, outputs=self.results), tuple(range(len(self.results)))
        self._twins = {i for i, number in enumerate(self._launched) if number in self._launched[:i]}
        self._forward = forward_of(Traced.from_graph(program))

    def __call__(self, tensors: Sequence[torch.Tensor], numbers: Sequence[Any]) -> list[torch.Tensor]:
        """Returns the function's results for the inputs ``tensors``, with their history."""
        for index in self.updated:
            if tensors[index].is_inference():
                inference.refuse(self.name, tensors[index], self._lines[index])
        results = self.computed(tensors, numbers)
        if not self._viewed:
            values = [results[position] for position in self.outputs]  # type: ignore[index]
            return self._with_updates(values, tensors, numbers) if self.updated else values
        known = {id(node): tensors[node.attrs.number] for node in self._viewed}
        views = Replay(known, environment_of(tensors, numbers))
        values = [results[output] if isinstance(output, int) else views.value(output) for output in self.outputs]
        return self._with_updates(values, tensors, numbers) if self.updated else values

    def _with_updates(
        self, values: list[torch.Tensor], tensors: Sequence[torch.Tensor], numbers: Sequence[Any]
    ) -> list[torch.Tensor]:
        """Returns what the function returns of ``computed``, results and then new values of arguments, which are
        copied."""
        first = len(values) - len(self.updated)
        for number, index in enumerate(self.updated, first):
            tensors[index].copy_(values[number])
            values[number] = tensors[index]
        returned = [values[position] for position in self._returned]
        if self._views:
            known = {id(node): tensors[index] for index, node in self._new_values.items()}
            views = Replay(known, environment_of(tensors, numbers))
            for position, node in self._views.items():
                returned.insert(position, views.value(node))
        return returned

    def computed(self, tensors: Sequence[torch.Tensor], numbers: Sequence[Any]) -> Sequence[torch.Tensor]:
        """Returns the values of ``results``, with their history."""
        if not self.results:
            return ()
        if self.updated and not any_traced(tensors):
            self._refuse_shared(tensors)
        read = list(tensors)
        for index in self._read_and_updated:
            read[index] = tensors[index].clone()  # what it was is read by the backward
        return _Function.apply(self, tuple(numbers), *read)

    def _refuse_shared(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raises UnsupportedError, as launchers raise it, if an argument that is updated shares memory with another
        input or among its own elements."""
        for index, line in self._lines.items():
            overlap.refuse_repeated(self.name, index, tensors[index].shape, tensors[index].stride())
            for other in self._inputs_used - {index}:
                overlap.refuse(self.name, tensors[index], tensors[other], line)

    def forward(self, tensors: Sequence[torch.Tensor], numbers: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """Returns the values of ``results``, each a tensor of its own: those of one value may differ in their
        gradients."""
        values = self._forward(*tensors, *numbers)
        if not self._twins:
            return values
        return tuple(
            values[number].detach() if index in self._twins else values[number]
            for index, number in enumerate(self._launched)
        )

    def kept(self, tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the tensors that the backward reads: inputs, saved results, and those of quantised weights."""
        inputs = [tensors[index] for index in self.plan.inputs]
        codes = [tensors[tensor.attrs.number] for weight in self.plan.weights for tensor in weight.inputs]
        return [*inputs, *(results[index] for index in self._saved), *codes]

    def _with_dense_weights(self, kept: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Dequantises each quantised weight in ``kept``, in place of the tensors of which it consists."""
        if not self.plan.weights:
            return list(kept)
        weights_from = len(kept) - sum(len(weight.inputs) for weight in self.plan.weights)
        inputs, rest = list(kept[:weights_from]), list(kept[weights_from:])
        for weight, dtype in zip(self.plan.weights, self._weight_dtypes, strict=True):
            tensors, rest = rest[: len(weight.inputs)], rest[len(weight.inputs) :]
            format, group_size, layout, _ = weight.attrs
            shape: Any = weight.shape
            inputs.append(dense(tuple(tensors), format, group_size, layout, shape, dtype))
        return inputs

    def backward(
        self,
        wanted: tuple[int, ...],
        grads: Sequence[Any],
        kept: Sequence[torch.Tensor],
        shapes: Sequence[torch.Size],
        numbers: Sequence[Any],
    ) -> Sequence[Any]:
        """Returns the gradients of the inputs ``wanted``; None where none flows from ``grads``, as in eager torch.

        Args:
            grads: the gradient of each of ``results``, or None.
            shapes: of the inputs ``sizes_of``.
        """
        defined = tuple(i for i, g in enumerate(grads) if g is not None and i not in self.without_gradient)
        key = wanted, defined
        if key not in self._backwards:
            self._backwards[key] = self.launch_of(wanted, defined)
        launch, reached = self._backwards[key]
        if not reached:
            return [None] * len(wanted)
        present = [grads[i].resolve_neg() for i in defined]
        sizes = [present[0].new_empty(()).expand(shape) for shape in shapes]  # one element each
        gradients = launch(*present, *self._with_dense_weights(kept), *sizes, *numbers)
        if len(reached) == len(wanted):
            return gradients
        by_index = dict(zip(reached, gradients, strict=True))
        return [by_index.get(index) for index in wanted]

    @property
    def with_gradient(self) -> tuple[int, ...]:
        """Returns the positions of results that a loss may have gradients of."""
        outputs = dict.fromkeys(output for output in self.outputs if isinstance(output, int))
        return tuple(sorted(index for index in outputs if index not in self.without_gradient))

    def expected(self, inputs: Sequence[torch.Tensor], environment: Mapping[str, Any]) -> list[torch.Tensor]:
        """Returns what the backward of a call with ``inputs`` is passed where gradients lie in memory as the results
        do: tensors without memory."""
        results = [_like(node, environment) for node in self.results]
        kept = self.kept([_described(tensor) for tensor in inputs], results)
        weights = self.plan.weights
        codes = sum(len(weight.inputs) for weight in weights)
        kept = [*kept[: len(kept) - codes], *(_like(weight, environment) for weight in weights)]
        grads = [results[index] for index in self.with_gradient]
        sizes = [grads[0].new_empty(()).expand(inputs[index].shape) for index in self.sizes_of]
        return [*grads, *kept, *sizes]

    def made_ready(self) -> bool:
        """Makes the launch of the backward of all results; False where no gradient flows to an input."""
        key = self.plan.wanted, self.with_gradient
        if not self.with_gradient:
            return False
        self._backwards[key] = self.launch_of(*key)
        return bool(self._backwards[key][1])

    def launch_of(self, wanted: tuple[int, ...], defined: tuple[int, ...]) -> tuple[Launch, tuple[int, ...]]:
        """Returns the launch of the backward from the results ``defined``, and the inputs that it differentiates."""
        flows = inputs_reached(self.plan, [self.results[index] for index in defined])
        reached = tuple(index for index in wanted if index in flows)
        plan = dataclasses.replace(self.plan, wanted=reached)
        backward = Backward(plan, tuple(self.results[index] for index in defined), tuple(self.sizes_of))
        return self._backward_of(backward, f"{self.name.strip('<>')}_backward"), reached


class GradientCall(Captures):
    """Makes calls of one specialisation that compute gradients, if what the function captures is as it was."""

    __slots__ = ("_derivative", "_first")

    def __init__(self, specialization: Specialization, derivative: Derivative, captured: Sequence[torch.Tensor]):
        """Records ``captured``, the captured tensors of the call at hand."""
        super().__init__(specialization, captured, computes_gradients=True)
        self._derivative = derivative
        self._first = specialization.returns_one_tensor

    def __call__(self, tensors: Sequence[torch.Tensor], numbers: Sequence[Any]) -> Any:
        """Returns the function's result for arguments and captured tensors, with its history."""
        results = self._derivative(tensors, numbers)
        if self._first:
            return results[0]
        return self.specialization.returned(results, environment_of(tensors, numbers))


class _Function(torch.autograd.Function):
    """Presents a ``Derivative`` to autograd."""

    @staticmethod
    def forward(ctx: Any, derivative: Derivative, numbers: tuple[Any, ...], *tensors: torch.Tensor) -> Any:
        results = derivative.forward(tensors, numbers)
        ctx.derivative, ctx.numbers = derivative, numbers
        ctx.shapes = [tensors[index].shape for index in derivative.sizes_of]
        ctx.set_materialize_grads(False)
        if derivative.without_gradient:
            ctx.mark_non_differentiable(*(results[index] for index in derivative.without_gradient))
        ctx.save_for_backward(*derivative.kept(tensors, results))
        return results

    @staticmethod
    @opaque  # a compiled function may call backward()
    def backward(ctx: Any, *grads: Any) -> Any:
        if ABORTS_AT_EXIT and any(grad is not None and grad.is_cuda for grad in grads):
            _let_autograd_finish_at_exit()
        wanted = tuple(index for index, needed in enumerate(ctx.needs_input_grad[2:]) if needed)
        gradients = ctx.derivative.backward(wanted, grads, ctx.saved_tensors, ctx.shapes, ctx.numbers)
        by_index = dict(zip(wanted, gradients, strict=True))
        return None, None, *(by_index.get(index) for index in range(len(ctx.needs_input_grad) - 2))


@cache
def _let_autograd_finish_at_exit() -> None:
    """Makes the interpreter wait a moment at exit, in which torch's autograd threads release the last gradients.

    Such a thread, one for each GPU, releases gradients after ``backward()`` has returned, and needs the GIL for those
    that Python knows. CPython before 3.14 ends a thread that asks for the GIL while the interpreter ends. Within a C++
    destructor that aborts the process, after everything was computed: "terminate called without an active exception".
    Torch has no function that waits for the thread.
    """
    atexit.register(time.sleep, EXIT_SECONDS)


def _like(node: Node, environment: Mapping[str, Any]) -> torch.Tensor:
    """Returns a tensor without memory, of the dtype and sizes of ``node``."""
    sizes = [int(symbols.evaluate(size, environment)) for size in node.shape]
    return torch.empty(sizes, dtype=DTYPES[node.dtype], device="meta")


def _described(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor without memory, with the layout of ``tensor``."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _dtype_of_products(graph: Graph, weight: Node) -> torch.dtype:
    """Returns the dtype in which a backward multiplies with a quantised weight: the widest of the operands that meet
    it.

    The weight's own dtype is what it is dequantised to where nothing says otherwise, and says nothing here.
    """
    products = (node for node in topological(graph.outputs) if node.kind in PRODUCTS)
    dtypes = [DTYPES[node.inputs[0].dtype] for node in products if node.inputs[1].under_views is weight]
    return reduce(torch.promote_types, dtypes)


def _inputs_with_needed_sizes(plan: Plan, results: Sequence[Node]) -> list[int]:
    """Returns the inputs whose sizes a backward may ask for, and whose values it is not given."""
    names = {
        name
        for node in topological(results)
        for item in (*node.shape, *node.attrs)
        for value in (item if isinstance(item, tuple) else (item,))
        if isinstance(value, Expr)
        for name in symbols.symbols_of(value)
    }
    inputs = {int(name[1:].partition("_")[0]) for name in names if name.startswith("s")}
    return sorted(inputs - set(plan.inputs))
