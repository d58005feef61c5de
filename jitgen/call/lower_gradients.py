"""Lowers a call that computes gradients: its forward, which also returns what is saved, and its backward.

Nothing is run, so the backward is lowered for gradients that lie in memory as the results do; those that a loss passes
may lie otherwise (``sum().backward()`` passes one element, expanded), and have other kernels then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from jitgen import events, lowering, pipeline
from jitgen.call.derivative import Derivative
from jitgen.call.resolver import Resolver, ResolverOfBackward
from jitgen.call.signature import Call
from jitgen.call.specialization import Specialization
from jitgen.events import CallEvent
from jitgen.gradients.backward import Backward
from jitgen.ir import symbols
from jitgen.ir.graph import Graph, Node
from jitgen.ir.views import Memory, Strided
from jitgen.lowering import Route
from jitgen.spec import DTYPES
from jitgen.trace.traced import Traced

ALIGNMENT = 16
"""The alignment, in bytes, of memory that torch allocates, as far as kernels ask for it."""


def lower_both(
    resolver: Resolver,
    specialization: Specialization,
    inputs: Sequence[torch.Tensor],
    numbers: Sequence[Any],
    environment: Mapping[str, Any],
    memory: Sequence[Memory],
    device: torch.device,
    route: Route,
) -> tuple[lowering.Lowered, lowering.Lowered | None]:
    """Lowers the forward and the backward; the backward is None where no gradient flows to an input.

    Args:
        specialization: of a differentiable trace.
        inputs: arguments and captured tensors, of which some require grad.
        memory: of each of them.
        device: which the kernels are for.
    """
    graphs: list[Graph] = []
    backwards: list[tuple[Backward, str]] = []

    def forward_of(traced: Traced) -> Any:
        graphs.append(traced.graph)

    def backward_of(backward: Backward, name: str) -> Any:
        backwards.append((backward, name))

    wanted = tuple(index for index, tensor in enumerate(inputs) if tensor.requires_grad)
    derivative = Derivative(specialization, wanted, forward_of, backward_of)
    (graph,) = graphs
    forward = _lowered(resolver, graph, environment, memory, route)
    results = [_like(node, environment) for node in derivative.results]
    outputs = dict.fromkeys(output for output in derivative.outputs if isinstance(output, int))
    with_gradient = tuple(sorted(index for index in outputs if index not in derivative.without_gradient))
    if not with_gradient or not derivative.launch_of(wanted, with_gradient)[1]:
        return forward, None
    ((backward, name),) = backwards
    kept = derivative.kept([_described(tensor) for tensor in inputs], results)
    weights = derivative.plan.weights
    codes = sum(len(weight.inputs) for weight in weights)
    kept = [*kept[: len(kept) - codes], *(_like(weight, environment) for weight in weights)]
    grads = [results[index] for index in with_gradient]
    sizes = [grads[0].new_empty(()).expand(inputs[index].shape) for index in derivative.sizes_of]
    tensors = [*grads, *kept, *sizes]
    of_backward = ResolverOfBackward(backward, replace(resolver.routing, name=name))
    specialization, _, around = of_backward.specialize(Call.unchecked([*tensors, *numbers], None, device), route, False)
    lies = [Memory(Strided(tuple(tensor.shape), tensor.stride()), ALIGNMENT) for tensor in tensors]
    return forward, _lowered(of_backward, specialization.traced.graph, around, lies, route)


def _lowered(
    resolver: Resolver, graph: Graph, environment: Mapping[str, Any], memory: Sequence[Memory], route: Route
) -> lowering.Lowered:
    lowered = pipeline.lower(graph, environment, memory, route)
    events.publish(CallEvent(graph, lowered, environment, memory, resolver.routing.requested))
    return lowered


def _like(node: Node, environment: Mapping[str, Any]) -> torch.Tensor:
    """Returns a tensor without memory, of the dtype and sizes of ``node``."""
    sizes = [int(symbols.evaluate(size, environment)) for size in node.shape]
    return torch.empty(sizes, dtype=DTYPES[node.dtype], device="meta")


def _described(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor without memory, with the layout of ``tensor``."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
