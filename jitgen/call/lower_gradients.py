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
from jitgen.call import integers
from jitgen.call.derivative import Derivative
from jitgen.call.resolver import Resolver, ResolverOfBackward
from jitgen.call.signature import Call
from jitgen.call.specialization import Specialization
from jitgen.events import CallEvent
from jitgen.gradients.backward import Backward
from jitgen.ir.graph import Graph
from jitgen.ir.views import Memory, Strided
from jitgen.lowering import Route
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
    if not derivative.made_ready():
        return forward, None
    ((backward, name),) = backwards
    tensors = derivative.expected(inputs, environment)
    of_backward = ResolverOfBackward(backward, replace(resolver.routing, name=name))
    specialization, _, around = of_backward.specialize(Call.unchecked([*tensors, *numbers], None, device), route, False)
    return forward, _lowered(of_backward, specialization.traced.graph, around, _memory_of(tensors), route)


def plan_backward(
    derivative: Derivative,
    resolvers: Sequence[Resolver],
    inputs: Sequence[torch.Tensor],
    numbers: Sequence[Any],
    environment: Mapping[str, Any],
    device: torch.device,
) -> None:
    """Traces and plans the backward of a call before its forward runs, for gradients that lie in memory as the results
    do, so that what it refuses is refused there.

    Args:
        resolvers: to which ``derivative`` adds that of its backward.

    Raises:
        UnsupportedError: there are no kernels for the backward; InternalError where that is a mistake of jitgen's.
    """
    if derivative.made_ready():
        resolver, tensors = resolvers[-1], derivative.expected(inputs, environment)
        call = Call.unchecked([*tensors, *numbers], None, device)
        specialization, _, around = resolver.specialize(call, resolver.routing.on_device(device))
        specialization.lower(around, _memory_of(tensors), ())


def _memory_of(tensors: Sequence[torch.Tensor]) -> list[Memory]:
    return [Memory(Strided(tuple(tensor.shape), tensor.stride()), ALIGNMENT) for tensor in tensors]


def _lowered(
    resolver: Resolver, graph: Graph, environment: Mapping[str, Any], memory: Sequence[Memory], route: Route
) -> lowering.Lowered:
    lowered = pipeline.lower(graph, environment, memory, route)
    integers.check(lowered.program.kernels, environment)
    events.publish(CallEvent(graph, lowered, environment, memory, resolver.routing.requested))
    return lowered
