"""Resolves a new call: finds or makes its trace, lowers it, fetches its kernels and binds a launch.

A ``Resolver`` belongs to one decorated function and has everything that its calls have resolved. ``dispatch.py`` and
``plan.py`` ask it for a ``BoundLaunch`` when the arguments are not those of a call they know.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils import _pytree as pytree

from jitgen import console, events, pipeline
from jitgen.call.bound import BoundLaunch, asks_gradients
from jitgen.call.routing import Routing
from jitgen.call.signature import (
    NUMBERS,
    Call,
    at_sizes_of_one,
    environment_of,
    is_object,
    number_symbols,
    same_trace_fact,
    size_symbols,
    trace_key,
)
from jitgen.call.specialization import Specialization, memory_of
from jitgen.call.table import Table
from jitgen.errors import CaptureMissError, RequiresGrad, UnsupportedError
from jitgen.events import CallEvent, MissEvent
from jitgen.forks import Lock
from jitgen.ir import symbols
from jitgen.lowering import Route
from jitgen.quant import weights
from jitgen.store.default import default_store
from jitgen.trace import autocast
from jitgen.trace.captured import argument, arguments_are
from jitgen.trace.guards import Guards
from jitgen.trace.host_scalars import SymbolicScalar, base
from jitgen.trace.journal import changes_stay
from jitgen.trace.numbers import wrap
from jitgen.trace.request import TraceRequest
from jitgen.trace.traced import Traced
from jitgen.trace.weak_method import WeakMethod, weakly

if TYPE_CHECKING:
    from jitgen.gradients.backward import Backward

Resolution = TypeVar("Resolution")

_adding = Lock()
"""Held while a trace joins those of its resolver, but not while it is made, because that runs the user's code."""

MANY_TRACES = 16
"""How many traces for arguments of the same types there are when a warning says that a function is traced
repeatedly."""
MOST_TRACES = 256
"""How many traces for arguments of the same types are kept, the last ones, since a look-up compares their guards one by
one."""


def _fitting(
    specializations: Sequence[Specialization], tensors: Sequence[torch.Tensor], numbers: Mapping[str, Any]
) -> tuple[Specialization, list[torch.Tensor], dict[str, Any]] | None:
    """Returns the first specialisation that fits a call, its captured tensors, and a value for every symbol; None
    without one.

    Args:
        numbers: values of the symbols of numeric arguments.
    """
    for specialization in specializations:
        captured = [captured.read() for captured in specialization.traced.captured]
        if all(guard.holds() for guard in specialization.traced.guards) and all(
            same_trace_fact(spec, tensor)
            for spec, tensor in zip(specialization.traced.graph.inputs[len(tensors) :], captured, strict=True)
        ):
            full = {**numbers, **size_symbols([*tensors, *captured])}
            if specialization.fits(full):
                return specialization, captured, full
    return None


class _Specializations(Table[Any, tuple[Specialization, ...]]):
    """Holds the traces of a function, by what calls of one trace have in common.

    There are fewer than a table has calls, since each has a graph and its kernels.
    """

    __slots__ = ()
    limit = 512


def after_capture(resolved: Callable[[], Resolution]) -> Resolution:
    """Returns ``resolved()``, which remembers what it returns. Where it is called within the capture of a CUDA graph,
    the error that it raises has it as what resolves the call once the capture has ended: in the modes of the call,
    which its key has, and in which it is traced."""
    try:
        return resolved()
    except CaptureMissError as miss:
        from jitgen.trace import modes

        miss.resolve = modes.as_now(changes_stay(False)(resolved))
        raise


class Resolver:
    """Holds what the calls of one function have resolved, and resolves new ones.

    Attributes:
        function: the user's.
        name: its name, for messages and kernels.
        routing: backend and compiler that were asked for.
        static_numbers: indices of numeric arguments whose value a trace depends on: they are compared by value.
        when_numbers_become_static: called when there are more of them, so that comparisons are made again.
    """

    def __init__(self, function: Callable[..., Any], routing: Routing):
        self.function = function
        self.name = routing.name
        self.routing = routing
        self.static_numbers: frozenset[int] = frozenset()
        self.when_numbers_become_static: Callable[[], None] = lambda: None
        self._specializations: _Specializations = _Specializations()

    @property
    def specializations(self) -> tuple[Specialization, ...]:
        """Lists the specialisations in the order in which calls met them."""
        return tuple(specialization for group in self._specializations.values() for specialization in group)

    def forget(self) -> None:
        """Releases everything resolved."""
        self._specializations.clear()

    def layout_of(self, weight: Any) -> str:
        """Returns the layout in which kernels read a quantised weight, where that weight is now."""
        return weights.layout_of(weight, self.routing.on_device(weight.device).layouts)

    def inline(self, leaves: Sequence[Any], tree: Any) -> Any:
        """Makes the call part of the trace in progress."""
        args, kwargs = (leaves, {}) if tree is None else pytree.tree_unflatten(list(leaves), tree)
        return self.function(*args, **kwargs)

    def resolve(self, call: Call, out: Sequence[torch.Tensor] = ()) -> tuple[BoundLaunch, list[torch.Tensor]]:
        """Returns the launch for a call, and its captured tensors.

        Args:
            call: which was checked.
            out: caller-owned outputs.

        Raises:
            JitgenError: what tracing, lowering and compiling raise; RequiresGrad where a captured tensor requires grad;
                CaptureMissError within the capture of a CUDA graph.
        """
        device = call.device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise CaptureMissError(
                f"{self.name}: the first call with such arguments is within the capture of a CUDA graph, where nothing "
                "can be compiled or loaded; call it once before the capture. After jitgen prewarm that call compiles "
                "nothing. A model whose code asks whether a stream is captured, as masks of transformers do, makes "
                "such calls in captures alone: jitgen.compile(model, cuda_graph=True) captures it"
            )
        route = self.routing.on_device(device)
        specialization, captured, environment = self.specialize(call, route)
        if torch.is_grad_enabled() and (path := asks_gradients(specialization.traced, captured)) is not None:
            raise RequiresGrad(
                f"{path} requires grad, and neither a plan nor a call with out= computes gradients; call the function "
                "itself, or this under torch.no_grad()"
            )
        on_cpu = device.type == "cpu"
        memory = [memory_of(tensor, on_cpu) for tensor in (*call.tensors, *captured)]
        results = [memory_of(tensor, on_cpu) for tensor in out]
        lowered = specialization.lower(environment, memory, results)
        event = CallEvent(
            specialization.traced.graph,
            lowered,
            environment,
            memory,
            self.routing.requested,
            call.leaves,
            call.tree,
            (*call.tensors, *captured),
            lambda leaves: self._lowered_with(Call.unchecked(leaves, call.tree, device), route),
        )
        events.publish(event)
        kernels = specialization.built(
            lowered, default_store(), lambda: next(iter(events.publish(MissEvent(event))), None)
        )
        caller_outputs = frozenset(range(len(results)))
        launch = specialization.bind(lowered, kernels, environment, device, len(call.numbers), caller_outputs)
        return BoundLaunch(launch, specialization, lowered, captured), list(captured)

    def _lowered_with(self, call: Call, route: Route) -> CallEvent | None:
        """Lowers a call that is not made; None if the function cannot be traced for it."""
        with changes_stay(False), arguments_are(call.leaves):
            try:
                traced = self._trace(call, route)
            except Exception:  # the function's own included: the user wrote it for other arguments
                return None
            tensors = [*call.tensors, *(capture.value for capture in traced.captured)]
            environment = environment_of(tensors, call.numbers)
            if any(not guard.holds(environment) for guard in traced.graph.guards):
                return None
            memory = [memory_of(tensor, True) for tensor in tensors]
            lowered = pipeline.lower(traced.graph, environment, memory, route)
            return CallEvent(traced.graph, lowered, environment, memory, self.routing.requested)

    def specialize(
        self, call: Call, route: Route, runs: bool = True, differentiable: bool = False
    ) -> tuple[Specialization, list[torch.Tensor], dict[str, Any]]:
        """Returns a specialisation that fits the call (a new one if none does), its captured tensors, and a value for
        every symbol.

        Args:
            runs: whether the call is made. If it is only lowered for a target, captured tensors may be elsewhere.
            differentiable: whether gradients are computed.
        """
        with arguments_are(call.leaves):
            return self._specialize(call, route, runs, differentiable)

    def _specialize(
        self, call: Call, route: Route, runs: bool, differentiable: bool
    ) -> tuple[Specialization, list[torch.Tensor], dict[str, Any]]:
        key = (route, call.device, runs, differentiable, call.tree, trace_key(call.leaves), autocast.settings())
        tensors = call.tensors
        environment = number_symbols(call.numbers)
        alike = self._specializations.get(key, ())
        known = _fitting(alike, tensors, environment)
        if known is not None:
            return known
        traced = self._trace(call, route, runs, differentiable)
        captured = [capture.value for capture in traced.captured]
        # A specialisation outlives the call, and must not keep its captured tensors alive.
        traced = dataclasses.replace(
            traced, captured=tuple(dataclasses.replace(capture, value=None) for capture in traced.captured)
        )
        specialization = Specialization(self.name, traced, route)
        if not specialization.static_numbers <= self.static_numbers:
            self._note_static_numbers(specialization)  # before another thread can use it
        if traced.changes is not None and len(alike) >= MANY_TRACES:  # it is for this call alone
            return specialization, captured, environment | size_symbols([*tensors, *captured])
        while True:
            with _adding:
                before, alike = alike, self._specializations.get(key, ())
                others = [trace for trace in alike if trace not in before]
                if not others:
                    alike = (*alike, specialization)[-MOST_TRACES:]
                    self._specializations.put(key, alike)
                    break
            # Another thread has added a trace meanwhile, which may fit this call: a trace serves all sizes.
            known = _fitting(others, tensors, environment)
            if known is not None:
                return known
        if len(alike) == MANY_TRACES:
            self._warn_of_traces(alike)
        return specialization, captured, environment | size_symbols([*tensors, *captured])

    def _trace(self, call: Call, route: Route, runs: bool = True, differentiable: bool = False) -> Traced:
        """Traces the call, within ``arguments_are`` of its leaves."""
        leaves, tree = call.leaves, call.tree
        guards = Guards(number_symbols(call.numbers))
        count = iter(range(len(call.numbers)))
        symbolic = [_symbolic(leaf, next(count), guards) if type(leaf) in NUMBERS else leaf for leaf in leaves]
        structure = tree or pytree.tree_flatten((tuple(leaves), {}))[1]
        objects = [
            argument(index, self._path(index, tree), leaf) for index, leaf in enumerate(leaves) if is_object(type(leaf))
        ]
        request = TraceRequest(symbolic, structure, guards, call.device, route.layouts, objects, runs, differentiable)
        traced = self._run(request)
        if objects or isinstance(self.function, WeakMethod):
            traced = dataclasses.replace(traced, guards=tuple(map(weakly, traced.guards)))
        return dataclasses.replace(traced, follows_arguments=traced.follows_arguments or bool(objects))

    def _run(self, request: TraceRequest) -> Traced:
        """Runs the function once on what stands for its arguments; see ``trace/run.py``."""
        from jitgen.trace.run import trace  # with the rows, which a function that is only decorated does not need

        return trace(self.function, self.name, request)

    def _warn_of_traces(self, alike: Sequence[Specialization]) -> None:
        """Warns that calls are traced repeatedly, and says what has changed since the last trace but one."""
        changed = [guard.path for guard in alike[-2].traced.guards if not guard.holds()]
        because = f"; last because {changed[0]} has changed" if changed else ""
        console.warn(
            f"{self.name} has been traced {len(alike)} times for arguments of the same types{because}. A trace takes "
            "milliseconds, and may compile: pass what changes as a tensor or a number, or keep it as it is",
            stacklevel=2,
        )

    def _path(self, index: int, tree: Any) -> str:
        """Returns the name of a leaf of the arguments, for messages."""
        names = list(inspect.signature(self.function).parameters)
        return names[index] if tree is None and index < len(names) else f"argument {index}"

    def _note_static_numbers(self, specialization: Specialization) -> None:
        with _adding:
            self.static_numbers |= specialization.static_numbers
        self.when_numbers_become_static()


class ResolverOfGraph(Resolver):
    """Resolves calls with one graph, which exists already. Sizes of 1 at a call are fixed in a graph of their own."""

    def __init__(self, traced: Traced, routing: Routing):
        super().__init__(_called_as_a_graph, routing)
        self._traced = traced

    def _trace(self, call: Call, *others: Any) -> Traced:
        graph = at_sizes_of_one(self._traced.graph, call.tensors)
        if graph is None or not all(map(same_trace_fact, graph.inputs, call.tensors)):
            raise UnsupportedError(f"{self.name}: a call of another kind than the graph is for")
        return dataclasses.replace(self._traced, graph=graph)


class ImportingResolver(Resolver):
    """Resolves calls of jitgen's own functions, which do nothing but call torch functions."""

    def _run(self, request: TraceRequest) -> Traced:
        from jitgen.trace.importing import imported  # as in the other

        return imported(self.function, self.name, request)


class ResolverOfPart(ImportingResolver):
    """Resolves calls of one of many functions that make up a model: where one compiles, others will."""

    def resolve(self, call: Call, out: Sequence[torch.Tensor] = ()) -> tuple[BoundLaunch, list[torch.Tensor]]:
        from jitgen.compilers import together

        with together.many_follow():
            return super().resolve(call, out)


class ResolverOfBackward(Resolver):
    """Resolves calls of a backward, whose graph is made of that of the forward."""

    def __init__(self, backward: Backward, routing: Routing):
        super().__init__(_called_as_a_graph, routing)
        self._backward = backward

    def _run(self, request: TraceRequest) -> Traced:
        return self._backward.traced(self.name, request)


def _called_as_a_graph(*leaves: Any) -> Any:
    raise AssertionError("what is made of a graph alone has no function to call")


def _symbolic(number: Any, index: int, guards: Guards) -> Any:
    """Returns numeric argument ``index`` as the trace meets it."""
    kind = type(number)
    expr = symbols.argument_symbol(index, base(kind).__name__)
    return wrap(expr, guards) if kind is base(kind) else SymbolicScalar(expr, kind.dtype)
