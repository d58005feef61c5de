"""Handles calls where torch traces, exports or transforms a program: their arguments have shapes but no memory.

The function is traced all the same, for the sizes that torch has as hints, and the graph is the text of one operator
(``operator.py``). What a function does besides computing new tensors is written around the operator in torch's own
calls, which torch traces, too: views of arguments are made again, updates of arguments are copies, and gradients are an
autograd function (``derivative.py``) whose forward and backward are operators.

Neighbours: ``dispatch.py`` comes here with arguments that have no address.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor
from torch.utils._python_dispatch import _disable_current_modes

from jitgen import pipeline
from jitgen.call.operator import LIBRARY, NAMES, Program, call_operator, operator_of, parsed
from jitgen.call.resolver import Resolver, ResolverOfBackward
from jitgen.call.routing import Routing
from jitgen.call.signature import NUMBERS, Call, environment_of, sizes_of_one
from jitgen.call.specialization import Specialization, memory_of
from jitgen.call.table import LIMIT
from jitgen.errors import TraceError, UnsupportedError
from jitgen.ir.fixed import with_sizes
from jitgen.ir.graph import Graph, topological
from jitgen.ir.nodes import INPUT
from jitgen.quant.fakes import is_symbolic, is_traced, with_fakes
from jitgen.runtime import overlap
from jitgen.spec import DTYPES
from jitgen.store.default import default_store
from jitgen.trace.readable import refuse_tangents
from jitgen.trace.traced import Traced

if TYPE_CHECKING:
    from jitgen.call.derivative import Derivative
    from jitgen.gradients.backward import Backward


def call(resolver: Resolver, leaves: Sequence[Any], tree: Any) -> Any:
    """Returns the result of a call whose arguments have no memory.

    Raises:
        TraceError, UnsupportedError: as a call with memory would.
    """
    leaves = with_fakes(leaves)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    numbers = [leaf for leaf in leaves if type(leaf) in NUMBERS or isinstance(leaf, torch.SymInt)]
    refuse_tangents(resolver.name, tensors)  # as within torch.func.jvp
    if any(isinstance(leaf, (torch.SymFloat, torch.SymBool)) for leaf in leaves):
        raise UnsupportedError(f"{resolver.name}: a symbolic float or bool; pass a tensor without dimensions")
    device = tensors[0].device if tensors else torch.device("cpu")
    route = resolver.routing.on_device(device)
    needs_grad = torch.is_grad_enabled()
    with _no_tracing():
        stand_ins = {id(leaf): _described(leaf) for leaf in leaves}  # one tensor has one
        described = Call.unchecked([stand_ins[id(leaf)] for leaf in leaves], tree, device)
        specialization, captured, _ = resolver.specialize(described, route, False, needs_grad)
    inputs = with_fakes([*tensors, *captured])
    refuse_tangents(resolver.name, captured)
    changes = specialization.traced.changes
    if changes is not None and any(map(is_symbolic, tensors)):
        raise TraceError(
            f"{resolver.name} changes {changes.path} at every call, and a program that torch records would not; return "
            "the new value, and store it after the call"
        )
    _refuse_shared(specialization.traced.graph, inputs)
    environment = environment_of(inputs, numbers)
    wanted = [index for index, tensor in enumerate(inputs) if tensor.requires_grad] if needs_grad else []
    is_transformed = any(map(is_functorch_wrapped_tensor, inputs))
    if wanted and not is_transformed:
        return specialization.returned(
            derivative_of(specialization, wanted, resolver.routing)(inputs, numbers), environment
        )
    # Within torch.func the operator itself has gradients, by ``_gradients``, which every level of transforms takes.
    results = _results(specialization.traced.graph, resolver.routing, inputs, numbers)
    return specialization.returned(results, environment)


def _refuse_shared(graph: Graph, inputs: Sequence[Any]) -> None:
    """Raises UnsupportedError if an argument that is updated shares memory with another input, as launchers do."""
    for index, node in graph.mutated:
        updated, start, end = _memory_range(inputs[index])
        for other in graph.inputs_used - {index}:
            tensor, first, last = _memory_range(inputs[other])
            shares = torch._C._is_alias_of(tensor, updated)  # type: ignore[attr-defined]
            if shares and first < end and start < last:
                raise UnsupportedError(overlap.message(graph.name, node.location))


def _memory_range(tensor: Any) -> tuple[torch.Tensor, int, int]:
    """Returns the tensor behind one without memory of its own, and the range of its elements in its storage."""
    with torch._C._DisableFuncTorch():
        while is_functorch_wrapped_tensor(tensor):
            tensor = get_unwrapped(tensor)
        start = _hint(tensor.storage_offset())
        shape, strides = tuple(map(_hint, tensor.shape)), tuple(map(_hint, tensor.stride()))
        return tensor, start, start + overlap.extent(shape, strides, 1)


def derivative_of(specialization: Specialization, wanted: Sequence[int], routing: Routing) -> Derivative:
    """Returns the derivative of a specialisation, with operators as its forward and backward."""
    from jitgen.call.derivative import Derivative

    def backward_of(backward: Backward, name: str) -> Callable[..., Any]:
        resolver = ResolverOfBackward(backward, replace(routing, name=name))
        return lambda *leaves: call(resolver, leaves, None)

    def forward_of(traced: Any) -> Callable[..., Any]:
        return lambda *leaves: _call_operator(traced.graph, routing, leaves)

    return Derivative(specialization, wanted, forward_of, backward_of, keeps_marks=True)


def _results(graph: Graph, routing: Routing, inputs: Sequence[Any], numbers: Sequence[Any]) -> list[Any]:
    """Computes what ``graph`` returns, and makes its updates."""
    from jitgen.gradients.replay import Replay

    written = [value for _, value in graph.mutated]
    viewed = graph.viewed_updates()
    ends = [*(node for position, node in enumerate(graph.outputs) if position not in viewed), *written]
    computed = tuple(dict.fromkeys(node for node in ends if not node.is_in_memory))
    values: Sequence[torch.Tensor] = ()
    if computed:
        values = _call_operator(replace(graph, outputs=computed, mutated=()), routing, [*inputs, *numbers])
    known = {id(node): inputs[node.attrs.number] for node in topological(ends) if node.kind is INPUT}
    known |= {id(node): value for node, value in zip(computed, values, strict=True)}
    environment = environment_of(inputs, numbers)
    replay = Replay(known, environment)
    by_id = {id(node): replay.value(node) for node in ends}
    for index, node in graph.mutated:
        inputs[index].copy_(by_id[id(node)])
        by_id[id(node)] = inputs[index]
    views = Replay(by_id, environment)
    by_id |= {id(graph.outputs[position]): views.value(graph.outputs[position]) for position in viewed}
    return [by_id[id(node)] for node in graph.outputs]


def _call_operator(graph: Graph, routing: Routing, leaves: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    count = len(graph.inputs)
    kinds = "".join("f" if isinstance(number, float) else "i" for number in leaves[count:])
    program = Program(graph, kinds, *routing.requested, routing.is_batch_invariant)
    without_memory = not count or any(map(is_traced, leaves[:count]))
    if without_memory and not any(map(is_batchedtensor, leaves[:count])):  # vmap runs another graph, over the batch
        _compile_ahead(program, leaves[:count], leaves[count:])
    if torch.is_grad_enabled() and any(map(is_functorch_wrapped_tensor, leaves[:count])):
        return Transformed.apply(program.text(), *program.divided(leaves[count:]), *leaves[:count])
    return operator_of(program)(*leaves)


def _compile_ahead(program: Program, tensors: Sequence[Any], numbers: Sequence[Any]) -> None:
    """Compiles the kernels of the sizes that torch traces for. The first call may be where nothing may compile, such as
    in the capture of a CUDA graph."""
    device = tensors[0].device if tensors else torch.device("cpu")
    with _no_tracing():
        described = [_described(tensor) for tensor in tensors]
        environment = environment_of(described, [_described(number) for number in numbers])
        if not all(guard.holds(dict(environment)) for guard in program.graph.guards):
            return
        memory = [memory_of(tensor, True) for tensor in described]
        lowered = pipeline.lower(program.launched, environment, memory, program.routing.on_device(device), (), [])
        if not lowered.is_empty:
            pipeline.fetch(lowered, default_store())


@contextmanager
def _no_tracing() -> Iterator[None]:
    """Enters a context in which torch neither records nor transforms what is called."""
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    with ExitStack() as active:
        active.enter_context(disable_proxy_modes_tracing())
        active.enter_context(_disable_current_modes())
        active.enter_context(torch._C._DisableFuncTorch())
        yield


def _described(leaf: Any) -> Any:
    """Returns a leaf as a trace takes it: a tensor without memory, of hint sizes; a symbolic number as its hint."""
    if isinstance(leaf, torch.SymInt):
        return _hint(leaf)
    if not isinstance(leaf, torch.Tensor):
        return leaf
    shape, strides = tuple(map(_hint, leaf.shape)), tuple(map(_hint, leaf.stride()))
    return torch.empty_strided(shape, strides, dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad)


def _hint(size: Any) -> int:
    if not isinstance(size, torch.SymInt):
        return int(size)
    hint = size.node.hint
    if hint is None:
        raise UnsupportedError(f"a size that depends on data, {size}; jitgen has no kernels for such")
    return int(hint)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Any, keyword_only_inputs: Any = None) -> None:
    tensors, ctx.integers, ctx.floats, ctx.graph = inputs
    ctx.save_for_backward(*tensors)
    wanted = tuple(index for index, tensor in enumerate(tensors) if tensor.requires_grad)
    ctx.mark_non_differentiable(*(output[index] for index in _without_gradient(ctx.graph, wanted)))


@lru_cache(maxsize=LIMIT)
def _without_gradient(text: str, wanted: tuple[int, ...]) -> tuple[int, ...]:
    """Lists the results of a program that do not depend differentiably on the inputs ``wanted``."""
    from jitgen.gradients.plan import without_gradient

    return without_gradient(parsed(text).graph, wanted)


@lru_cache(maxsize=LIMIT)
def _derivative(text: str, wanted: tuple[int, ...], device: torch.device, ones: tuple[str, ...]) -> Derivative:
    """Returns the derivative of a program in the inputs ``wanted`` where the sizes ``ones`` are 1."""
    program = parsed(text)
    graph = with_sizes(program.graph, dict.fromkeys(ones, 1))
    assert graph is not None  # or the forward had been refused
    specialization = Specialization(graph.name, Traced.from_graph(graph), program.routing.on_device(device))
    return derivative_of(specialization, wanted, program.routing)


def _gradients(ctx: Any, grads: Sequence[torch.Tensor | None]) -> Any:
    """Returns the gradients of the operator's arguments."""
    wanted = tuple(index for index, needed in enumerate(ctx.needs_input_grad[0]) if needed)
    gradients = _gradients_of(ctx.graph, ctx.saved_tensors, ctx.integers, ctx.floats, wanted, grads)
    # torch takes an empty list for one of tensors.
    of_numbers: Any = ([] if not values else None for values in (ctx.integers, ctx.floats))
    return [gradients.get(index) for index in range(len(ctx.saved_tensors))], *of_numbers, None


def _gradients_of(
    text: str,
    tensors: Sequence[torch.Tensor],
    integers: Sequence[Any],
    floats: Sequence[float],
    wanted: tuple[int, ...],
    grads: Sequence[torch.Tensor | None],
) -> dict[int, Any]:
    """Returns the gradients of the tensors ``wanted``, computing the forward again with what its backward reads."""
    program = parsed(text)
    numbers = program.numbers(integers, floats)
    derivative = _derivative(text, wanted, tensors[0].device, sizes_of_one(program.graph, tensors))
    results = derivative.forward(tensors, numbers)
    of_results: list[Any] = [None] * len(results)
    for position, grad in zip(derivative.outputs, grads, strict=True):
        if grad is not None and isinstance(position, int):
            of_results[position] = grad if of_results[position] is None else of_results[position] + grad
    shapes = [tensors[index].shape for index in derivative.sizes_of]
    gradients = derivative.backward(wanted, of_results, derivative.kept(tensors, results), shapes, numbers)
    return dict(zip(wanted, gradients, strict=True))


class Transformed(torch.autograd.Function):
    """Wraps the operator with its gradients for a transform of ``torch.func``, which takes no operator's formula.

    ``vmap`` makes batches of the forward and of the backward, which are operators.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(text: str, integers: list[Any], floats: list[float], *tensors: torch.Tensor) -> tuple[Any, ...]:
        return tuple(call_operator(list(tensors), integers, floats, text))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.graph, ctx.integers, ctx.floats, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*(result for result in output if not result.is_floating_point()))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        tensors = ctx.saved_tensors
        wanted = tuple(index for index, needed in enumerate(ctx.needs_input_grad[3:]) if needed)
        program = parsed(ctx.graph)
        of_results = [
            grad if DTYPES[node.dtype].is_floating_point else None
            for node, grad in zip(program.graph.outputs, grads, strict=True)
        ]
        gradients = _gradients_of(ctx.graph, tensors, ctx.integers, ctx.floats, wanted, of_results)
        return None, None, None, *(gradients.get(index) for index in range(len(tensors)))


for _name in NAMES:
    torch.library.register_autograd(f"jitgen::{_name}", _gradients, setup_context=_remember, lib=LIBRARY)
