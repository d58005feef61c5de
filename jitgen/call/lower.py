"""Lowers for arguments without a call: for tensors or ``TensorSpec``s, and a target that this machine need not have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from jitgen import events, lowering
from jitgen.call.arguments import Parameters
from jitgen.call.resolver import Resolver
from jitgen.call.routing import Routing
from jitgen.call.signature import Call, check
from jitgen.call.specialization import memory_of
from jitgen.errors import RequiresGrad
from jitgen.events import CallEvent
from jitgen.ir.views import Memory, Strided
from jitgen.lowering import Route
from jitgen.quant import weights
from jitgen.spec import SYMBOL_HINT, Target, TensorSpec, host_target

_PRIMES = (17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79)


def lower(
    resolver: Resolver,
    parameters: Parameters,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: str | Target | None,
    backend: str | None,
) -> tuple[lowering.Lowered, lowering.Lowered | None]:
    """Returns what a call with these arguments would run, and its backward where it computes gradients.

    Nothing is compiled, and quantised weights keep their layout. With a ``target``, tensors that the function closes
    over may be on any device: like specs, they stand for tensors there.

    Raises:
        TraceError, UnsupportedError: as a call would.
    """
    route = _route(resolver.routing, (args, kwargs), target, backend)
    leaves, concrete, tree = _described(parameters, args, kwargs, route)
    tensors = [leaf for leaf in concrete if isinstance(leaf, torch.Tensor)]
    specs = [leaf for leaf in leaves if isinstance(leaf, (torch.Tensor, TensorSpec))]
    for spec in specs:
        if isinstance(spec, torch.Tensor):
            check(resolver.name, [spec], gradients=True)
    device = torch.device("cuda:0" if route.target.kind in ("cuda", "hip") else "cpu")
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)

    call = Call.unchecked(concrete, tree, device)

    def specialized(differentiable: bool) -> Any:
        return resolver.specialize(call, route, target is None, differentiable)

    try:
        specialization, captured, environment = specialized(needs_grad)
    except RequiresGrad:  # a tensor that the function closes over does
        needs_grad = True
        specialization, captured, environment = specialized(needs_grad)
    memory = [
        _memory(tensor, spec, route) for tensor, spec in zip([*tensors, *captured], [*specs, *captured], strict=True)
    ]
    if needs_grad:
        from jitgen.call.lower_gradients import lower_both

        return lower_both(
            resolver, specialization, [*tensors, *captured], call.numbers, environment, memory, device, route
        )
    lowered = specialization.lower(environment, memory, ())
    graph, described = specialization.traced.graph, (*specs, *captured)
    events.publish(CallEvent(graph, lowered, environment, memory, resolver.routing.requested, tensors=described))
    return lowered, None


def specialize(
    resolver: Resolver, parameters: Parameters, args: tuple[Any, ...], device: torch.device, differentiable: bool
) -> None:
    """Traces what a call with these arguments on ``device`` needs, so that it is there when the call is made.

    Args:
        args: tensors, ``TensorSpec``s, and whatever else a call takes.
        differentiable: whether the call is to compute gradients.

    Raises:
        TraceError, UnsupportedError: as a call would.
    """
    route = resolver.routing.on_device(device)
    _, concrete, tree = _described(parameters, args, {}, route)
    resolver.specialize(Call.unchecked(concrete, tree, device), route, differentiable=differentiable)


def _described(
    parameters: Parameters, args: tuple[Any, ...], kwargs: dict[str, Any], route: Route
) -> tuple[Sequence[Any], list[Any], Any]:
    """Flattens the arguments: returns the leaves, the leaves as a call has them (a spec becomes a tensor without
    memory), and their structure."""
    layouts = route.layouts
    leaves, tree, _ = parameters.flatten(
        args, kwargs, lambda weight: weights.layout_of(weight, layouts), in_place=False
    )
    sizes = _Sizes()
    return leaves, [sizes.tensor(leaf) if isinstance(leaf, TensorSpec) else leaf for leaf in leaves], tree


def _route(routing: Routing, arguments: Any, target: str | Target | None, backend: str | None) -> Route:
    devices = (
        torch.device("meta") if isinstance(leaf, TensorSpec) else getattr(leaf, "device", None)
        for leaf in pytree.tree_leaves(arguments)
    )
    device = next((device for device in devices if device is not None), torch.device("cpu"))
    if target is not None:
        return routing.for_target(Target.parse(target), backend)
    if device.type == "meta":
        return routing.for_target(host_target(), backend)
    return (replace(routing, backend=backend, compiler=None) if backend else routing).on_device(device)


def _memory(tensor: torch.Tensor, spec: torch.Tensor | TensorSpec, route: Route) -> Memory:
    if isinstance(spec, TensorSpec):
        alignment = 16 if route.target.kind == "cpu" else min(16, spec.alignment)
        return Memory(Strided(tuple(tensor.shape), tuple(tensor.stride())), alignment)
    return memory_of(tensor, route.target.kind == "cpu")


class _Sizes:
    """Chooses concrete sizes for symbolic ones; the same name has the same size."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}

    def size(self, size: int | str) -> int:
        if isinstance(size, int):
            return size
        if size not in self._sizes:
            # Distinct primes times 16: the sizes of two names are neither equal nor multiples of each other.
            self._sizes[size] = SYMBOL_HINT * _PRIMES[len(self._sizes) % len(_PRIMES)]
        return self._sizes[size]

    def tensor(self, spec: TensorSpec) -> torch.Tensor:
        """Returns a tensor like ``spec``, without memory."""
        shape = tuple(map(self.size, spec.shape))
        with torch._C.DisableTorchFunction():
            if spec.strides is None:
                return torch.empty(shape, dtype=spec.dtype, device="meta")
            return torch.empty_strided(shape, spec.strides, dtype=spec.dtype, device="meta")
