"""Finds the launch of a warm call with *dispatchers*.

The types of a call's arguments select a *dispatcher*, a function generated for exactly those types (``warm.py``). It
compares what may differ from the last call: shapes, strides, dtypes, devices, alignment, static values. Where something
does, its ``DispatchState`` looks in a table of all calls, and asks the ``Resolver`` for those it does not know.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, MutableSequence, Sequence
from typing import TYPE_CHECKING, Any

import torch

from jitgen.call import observers
from jitgen.call.arguments import Parameters, leaf_kinds, walk
from jitgen.call.bound import BoundLaunch
from jitgen.call.dispatch_text import DispatchFacts, make_dispatch, make_unpacking
from jitgen.call.resolver import MANY_TRACES, Resolver, ResolverOfBackward, ResolverOfGraph, after_capture
from jitgen.call.signature import Call, check
from jitgen.call.table import LaunchTable, Table
from jitgen.errors import RequiresGrad
from jitgen.quant import weights
from jitgen.runtime.guards import layout_check
from jitgen.trace import autocast
from jitgen.trace.guards import tracing
from jitgen.trace.host_scalars import exchanged
from jitgen.trace.journal import changes_stay
from jitgen.trace.readable import any_traced, refuse_tangents

if TYPE_CHECKING:
    from jitgen.call.derivative import Derivative, GradientCall, Launch
    from jitgen.call.specialization import Specialization

Dispatcher = Callable[..., Any]


class Dispatchers:
    """Holds the dispatchers of one function.

    Attributes:
        table: by the types of positional arguments, or by (structure, types of leaves).
    """

    def __init__(self, resolver: Resolver, parameters: Parameters):
        self.table: Table[Any, Dispatcher] = Table()
        self._resolver = resolver
        self._parameters = parameters
        self._derivatives: Table[tuple[Specialization, tuple[int, ...]], tuple[Derivative, list[Resolver]]] = Table()
        """The derivatives with the resolvers of their forwards and backwards, keyed by specialisation and by which
        inputs require grad."""
        self._of_one_call: deque[list[Resolver]] = deque(maxlen=MANY_TRACES)
        """The resolvers of the last traces that serve a single call."""
        resolver.when_numbers_become_static = self.table.clear

    def find(self, leaves: Sequence[Any], tree: Any) -> Dispatcher:
        """Returns the dispatcher of these leaves: ``(*leaves) -> result``."""
        kinds = tuple(map(type, leaves))
        key = kinds if tree is None else (tree, kinds)
        dispatcher = self.table.get(key)
        if dispatcher is None:
            dispatcher = self._make(kinds, tree)
            self.table.put(key, dispatcher)
        return dispatcher

    def renewed(self, leaves: Sequence[Any], tree: Any) -> Dispatcher:
        """Finds the dispatcher of these leaves where the one that was found compares too few numbers."""
        self.table.clear()
        return self.find(leaves, tree)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes a call without ``out=`` whose dispatcher the types of its arguments do not tell, or not yet."""
        if tracing.get() is not None:  # a function being traced calls this one: it is part of that kernel
            return self._resolver.function(*args, **kwargs)
        args, kwargs = self._parameters.arranged(args, kwargs)
        walked = walk(args, kwargs, self._resolver.layout_of)
        if walked is not None and (known := self.table.get(walked[0])) is not None:
            return known(*walked[1])
        leaves, tree, _ = self._parameters.flatten(args, kwargs, self._resolver.layout_of)
        if any_traced(leaves):
            return traced_call(self._resolver, leaves, tree)
        dispatcher = self.find(leaves, tree)
        if walked is not None:
            self.table.put(walked[0], dispatcher)
        self._add_unnested(args, kwargs, dispatcher)
        return dispatcher(*leaves)

    def derivative(self, call: Call) -> tuple[GradientCall, Any]:
        """Returns how calls like this one compute gradients, and the result of this call with its history
        (``derivative.py``).

        Raises:
            JitgenError: what tracing, lowering and compiling raise; UnsupportedError where an operation has no
                derivative.
        """
        from jitgen.call.derivative import Derivative, GradientCall  # only a program that trains needs these
        from jitgen.call.lower_gradients import plan_backward

        resolver = self._resolver
        specialization, captured, environment = resolver.specialize(
            call, resolver.routing.on_device(call.device), differentiable=True
        )
        inputs = [*call.tensors, *captured]
        refuse_tangents(resolver.name, captured)
        wanted = tuple(index for index, tensor in enumerate(inputs) if tensor.requires_grad)
        key = specialization, wanted
        derivative, resolvers = self._derivatives.get(key, (None, []))
        if derivative is None:
            derivative = Derivative(
                specialization,
                wanted,
                lambda traced: _launch(ResolverOfGraph(traced, resolver.routing), resolvers),
                lambda backward, name: _launch(
                    ResolverOfBackward(backward, dataclasses.replace(resolver.routing, name=name)), resolvers
                ),
            )
            plan_backward(derivative, resolvers, inputs, call.numbers, environment, call.device)
            if specialization.traced.changes is not None:
                self._of_one_call.append(resolvers)
            else:
                self._derivatives.put(key, (derivative, resolvers))
        result = specialization.returned(derivative(inputs, call.numbers), environment)
        return GradientCall(specialization, derivative, captured), result

    @property
    def of_gradients(self) -> tuple[Specialization, ...]:
        """Returns the specialisations of forwards and backwards of calls that compute gradients."""
        known = (*(resolvers for _, resolvers in list(self._derivatives.values())), *self._of_one_call)
        return tuple(
            specialization
            for resolvers in known
            for resolver in list(resolvers)
            for specialization in resolver.specializations
        )

    def forget(self) -> None:
        """Releases everything resolved."""
        self.table.clear()
        self._of_one_call.clear()
        self._derivatives.clear()

    def _add_unnested(self, args: tuple[Any, ...], kwargs: dict[str, Any], dispatcher: Dispatcher) -> None:
        """Enters the dispatcher of these arguments by their types, where none is a container."""
        values = (*args, *kwargs.values())
        quantized = list(map(weights.is_quantized, values))
        kinds = tuple(map(type, values))
        if leaf_kinds([kind for kind, is_weight in zip(kinds, quantized, strict=True) if not is_weight]):
            key = (tuple(kwargs), *kinds) if kwargs else kinds
            if key not in self.table:
                if any(quantized):
                    dispatcher = self._make_quantized(len(args), tuple(kwargs), quantized)
                self.table.put(key, dispatcher)

    def _make(self, kinds: tuple[type, ...], tree: Any) -> Dispatcher:
        """Makes the dispatcher for leaves of exactly these types."""
        facts = DispatchFacts(kinds, self._resolver.static_numbers)
        return make_dispatch(self._resolver.name, facts, DispatchState(self, self._resolver, tree, facts))

    def _make_quantized(self, count: int, names: tuple[str, ...], quantized: Sequence[bool]) -> Dispatcher:
        """Makes a function of ``count`` positional arguments and then keywords, some of which are quantised weights.

        It unpacks them and calls the dispatcher of their tensors; which one that is depends on their tokens alone.
        """
        table: Table[Any, Dispatcher] = Table()
        resolver, parameters = self._resolver, self._parameters

        def learn(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if tracing.get() is not None:
                return resolver.function(*args, **kwargs)
            leaves, tree, _ = parameters.flatten(args, kwargs, resolver.layout_of)
            if any_traced(leaves):
                return traced_call(resolver, leaves, tree)
            dispatcher = self.find(leaves, tree)
            # Weights of the portable layout get the layout, and so the token, of later calls only now.
            packed = [value for value in (*args, *kwargs.values()) if weights.is_quantized(value)]
            tokens = tuple(weight.token for weight in packed)
            if all(token.layout == resolver.layout_of(weight) for token, weight in zip(tokens, packed, strict=True)):
                table.put(tokens, dispatcher)
            return dispatcher(*leaves)

        return make_unpacking(resolver.name, count, names, quantized, table, learn)


class DispatchState:
    """Holds what one dispatcher knows of its calls.

    Attributes:
        last: (layout check, launcher, what must be asked at each call, static values and address remainders) of the
            last call.
        table: the launches of all calls, by layouts and values; several where they differ in captured values.
        gradients: the same of calls that compute gradients.
        static_numbers: the numbers that are compared by value. Another thread may make more of them static while a call
            is under way: what depends on these is not remembered here, and later calls have another dispatcher.
    """

    __slots__ = ("dispatchers", "gradients", "last", "resolver", "static_numbers", "table", "tensors", "tree")

    def __init__(self, dispatchers: Dispatchers, resolver: Resolver, tree: Any, facts: DispatchFacts):
        self.dispatchers = dispatchers
        self.resolver = resolver
        self.tree = tree
        self.tensors = facts.tensors
        self.static_numbers = facts.static_numbers
        self.last: tuple[Any, ...] = (_never, None, None, *(None,) * len(facts.values))
        self.table: LaunchTable[BoundLaunch] = LaunchTable()
        self.gradients: LaunchTable[GradientCall] = LaunchTable()

    def inline(self, *leaves: Any) -> Any:
        """Handles a call with a tensor that has no address: it joins the trace in progress, or is refused."""
        if tracing.get() is None:
            if any_traced(leaves):
                return traced_call(self.resolver, leaves, self.tree)
            check(self.resolver.name, leaves, self.tree, host_scalars=True)
        return self.resolver.inline(leaves, self.tree)

    def _observed(self, leaves: tuple[Any, ...]) -> Any:
        """Makes a call that one of torch's modes must see."""
        if tracing.get() is not None:
            return self.resolver.inline(leaves, self.tree)
        check(self.resolver.name, leaves, self.tree, host_scalars=True, gradients=True)
        observers.refuse_recording(self.resolver.name)
        return traced_call(self.resolver, leaves, self.tree)

    def cold(
        self, layout: tuple[Any, ...], values: tuple[Any, ...], leaves: tuple[Any, ...], launched: tuple[Any, ...]
    ) -> Any:
        """Makes a call that differs from the last one, or whose launch needs checks at every call.

        Args:
            layout: facts of every tensor.
            values: static values, and the remainders of addresses.
            leaves: the arguments.
            launched: what the launch takes of them: tensors, addresses, numbers.
        """
        if observers.are_there():
            return self._observed(leaves)
        if self.static_numbers != self.resolver.static_numbers:
            return self.dispatchers.renewed(leaves, self.tree)(*leaves)
        name, tensors = self.resolver.name, [leaves[index] for index in self.tensors]
        needs_grad = any(tensor.requires_grad for tensor in tensors)
        count = len(tensors)
        addresses, numbers = launched[count : 2 * count], launched[2 * count :]
        have_addresses = all(addresses)
        key = (layout, values, autocast.settings())
        if torch.is_grad_enabled() and (needs_grad or key in self.gradients):
            known_gradients = self.gradients.fitting(key, leaves) if have_addresses else None
            if known_gradients is not None:
                gradient_call, captured = known_gradients
                refuse_tangents(name, (*tensors, *captured))
                return gradient_call([*tensors, *captured], numbers)
            if needs_grad:
                return self._differentiated(key, check(name, leaves, self.tree, gradients=True))
        known = self.table.fitting(key, leaves)
        # Without an address a tensor is empty, or has lost its memory.
        call = None if have_addresses else check(name, leaves, self.tree, host_scalars=True)
        if known is not None:
            return self._launched(*known, tensors, values, addresses, numbers)
        if (scalars := exchanged(leaves)) is not None:
            return self.dispatchers.find(scalars, self.tree)(*scalars)
        call = call or check(name, leaves, self.tree)
        try:
            with changes_stay():
                bound, captured = after_capture(functools.partial(self._resolved, key, call))
                return self._launched(bound, captured, tensors, values, addresses, numbers)
        except RequiresGrad:  # a captured tensor does
            return self._differentiated(key, call)

    def _resolved(self, key: Any, call: Call) -> tuple[BoundLaunch, list[torch.Tensor]]:
        """Resolves a new call, and remembers how it is launched."""
        bound, captured = self.resolver.resolve(call)
        if self._compares_numbers_of(bound):
            self.table.add(key, bound)
        return bound, captured

    def _launched(
        self,
        bound: BoundLaunch,
        captured: list[torch.Tensor],
        tensors: list[torch.Tensor],
        values: tuple[Any, ...],
        addresses: tuple[Any, ...],
        numbers: tuple[Any, ...],
    ) -> Any:
        """Launches, and makes this call the one that the next is compared with."""
        refuse_tangents(self.resolver.name, (*tensors, *captured))
        if self._compares_numbers_of(bound):
            needs_grad = any(tensor.requires_grad for tensor in tensors)
            self.last = (layout_check(tensors), bound.launch, bound.current(needs_grad), *values)
        return bound.launch(*tensors, *captured, *addresses, *(t.data_ptr() for t in captured), *numbers)

    def _differentiated(self, key: Any, call: Call) -> Any:
        """Makes a new call that computes gradients, and remembers how."""
        with changes_stay():
            gradient_call, result = self.dispatchers.derivative(call)
        if self._compares_numbers_of(gradient_call):
            self.gradients.add(key, gradient_call)
        return result

    def _compares_numbers_of(self, launch: BoundLaunch | GradientCall) -> bool:
        """Tells whether this dispatcher compares all numbers that the trace of ``launch`` depends on."""
        return launch.specialization.static_numbers <= self.static_numbers


def traced_call(resolver: Resolver, leaves: Sequence[Any], tree: Any) -> Any:
    """Makes a call that torch traces or transforms: see ``traced_call.py``."""
    from jitgen.call import traced_call  # only a program that is traced needs it

    return traced_call.call(resolver, leaves, tree)


def _launch(resolver: Resolver, resolvers: MutableSequence[Resolver]) -> Launch:
    """Wraps ``resolver``, which joins ``resolvers``, as a function of tensors and then numbers."""
    resolvers.append(resolver)
    dispatchers = Dispatchers(resolver, Parameters(resolver.function))
    return lambda *leaves: dispatchers.find(leaves, None)(*leaves)


def _never(*tensors: torch.Tensor) -> bool:
    return False
