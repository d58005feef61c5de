"""Resolving a call that is new: find or make its trace, lower it, fetch its kernels and bind a launch.

A ``Resolver`` belongs to one decorated function and has everything that its calls have resolved. ``dispatch.py`` and
``plan.py`` ask it for a ``BoundLaunch`` when the arguments are not those of a call they know.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from jitgen.call import recording
from jitgen.call.routing import Routing
from jitgen.call.signature import NUMBERS, check, number_symbols, same_trace_fact, size_symbols, trace_key
from jitgen.call.specialization import Specialization, memory_of
from jitgen.errors import UnsupportedError
from jitgen.ir import symbols
from jitgen.lowering import Lowered, Route
from jitgen.quant import weights
from jitgen.runtime.guards import TensorFacts
from jitgen.store.default import default_store
from jitgen.trace import autocast
from jitgen.trace.captures import same_value
from jitgen.trace.guards import Guards
from jitgen.trace.host_scalars import SymbolicScalar, base
from jitgen.trace.numbers import wrap
from jitgen.trace.readable import TENSORS, why_unreadable
from jitgen.trace.tracer import Traced, trace
from jitgen.trace.weak_method import WeakGuard, WeakMethod, weakly


class BoundLaunch:
    """A launch, and what must hold at a call that takes it.

    Attributes:
        launch: the launcher; see ``runtime/launcher.py`` for its arguments.
        specialization, lowered: what it was made of.
        captured: tensors that the function closes over, inputs of the launch after the arguments.
        guards: values that the function closes over, which must be what they were at the trace.
        depends_on_arguments_alone: whether there are neither, nor autocast: equal arguments suffice for this launch.
    """

    __slots__ = (
        *("_expected", "_objects", "_values"),
        *("captured", "depends_on_arguments_alone", "guards", "launch", "lowered", "specialization"),
    )

    def __init__(self, launch: Any, specialization: Specialization, lowered: Lowered, captured: Sequence[torch.Tensor]):
        """``captured``: the captured tensors that the launch was bound for."""
        self.launch = launch
        self.specialization = specialization
        self.lowered = lowered
        self.guards = specialization.traced.guards
        self.captured = specialization.traced.captured
        within = autocast.settings()
        self.depends_on_arguments_alone = not (self.captured or self.guards or within)
        self._expected = [(now, TensorFacts.of(then)) for now, then in zip(self.captured, captured, strict=True)]
        self._values = [(guard.read, guard.value) for guard in self.guards if not isinstance(guard, WeakGuard)]
        self._values += [(autocast.settings, within)] if within else []  # else the check of the arguments suffices
        self._objects = [(guard.read, guard.reference) for guard in self.guards if isinstance(guard, WeakGuard)]

    def current(self, needs_grad: bool) -> Callable[[], list[torch.Tensor] | None] | None:
        """What a call with equal arguments asks before it launches: the captured tensors now, or None where this launch
        is not for it. None where there is nothing to ask.

        ``needs_grad``: whether an argument requires grad; then this launch is for calls without gradients alone.
        """
        if needs_grad:
            return lambda: None if torch.is_grad_enabled() else self.captured_tensors()
        return None if self.depends_on_arguments_alone else self.captured_tensors

    @property
    def captured_extents(self) -> list[int]:
        """Bytes that each captured tensor spans."""
        return [facts.extent for _, facts in self._expected]

    def captured_tensors(self) -> list[torch.Tensor] | None:
        """The captured tensors now; None where the layout of one, or a guarded value, is not what it was.

        Raises:
            UnsupportedError: a captured tensor requires grad.
        """
        for read, value in self._values:
            now = read()
            if now is not value and not same_value(now, value):
                return None
        for read, reference in self._objects:
            now = read()
            if now is None or now is not reference():
                return None
        tensors = []
        for captured, facts in self._expected:
            tensor = captured.read()
            if type(tensor) not in TENSORS or TensorFacts.of(tensor) != facts:
                return None
            if not tensor.data_ptr() and (unreadable := why_unreadable(tensor)) is not None:
                raise UnsupportedError(f"{captured.path}: {unreadable}")
            if tensor.requires_grad and torch.is_grad_enabled():
                raise UnsupportedError(
                    f"{captured.path} requires grad, and gradients are not supported in this version; "
                    "call the function under torch.no_grad(), or detach it"
                )
            tensors.append(tensor)
        return tensors


class Resolver:
    """What the calls of one function have resolved, and how the next is.

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
        self.static_numbers: set[int] = set()
        self.when_numbers_become_static: Callable[[], None] = lambda: None
        self._specializations: dict[Any, list[Specialization]] = {}

    @property
    def specializations(self) -> tuple[Specialization, ...]:
        """In the order calls met them."""
        return tuple(found for group in self._specializations.values() for found in group)

    def forget(self) -> None:
        """Release everything resolved."""
        self._specializations.clear()

    def layout_of(self, weight: Any) -> str:
        """The layout in which kernels read a quantised weight, where it is now."""
        return weights.LAYOUTS[self.routing.on_device(weight.device).backend]

    def inline(self, leaves: Sequence[Any], tree: Any) -> Any:
        """The call as part of the trace in progress."""
        args, kwargs = (leaves, {}) if tree is None else pytree.tree_unflatten(list(leaves), tree)
        return self.function(*args, **kwargs)

    def resolve(
        self, leaves: Sequence[Any], tree: Any, out: Sequence[torch.Tensor] = ()
    ) -> tuple[BoundLaunch, list[torch.Tensor]]:
        """The launch of a call, and its captured tensors.

        Args:
            leaves, tree: the arguments (``call/arguments.py``).
            out: caller-owned outputs.

        Raises:
            JitgenError: what tracing, lowering and compiling raise; UnsupportedError for arguments no kernel takes.
        """
        tensors, numbers = check(self.name, leaves)
        device = tensors[0].device if tensors else torch.device("cpu")
        route = self.routing.on_device(device)
        specialization, captured, environment = self.specialize(leaves, tree, tensors, numbers, device, route)
        on_cpu = device.type == "cpu"
        memory = [memory_of(tensor, on_cpu) for tensor in (*tensors, *captured)]
        wanted = [memory_of(tensor, on_cpu) for tensor in out]
        lowered = specialization.lower(environment, memory, wanted)
        if recording.active():
            recording.note(specialization.traced.graph, lowered, environment, memory, self.routing)
            recording.note_more_rows(
                leaves, tree, route, self.routing, lambda more: self._trace(more, tree, device, route)
            )
        kernels = specialization.built(lowered, default_store())
        caller_outputs = frozenset(range(len(wanted)))
        launch = specialization.bind(lowered, kernels, environment, device, len(numbers), caller_outputs)
        return BoundLaunch(launch, specialization, lowered, captured), list(captured)

    def specialize(
        self,
        leaves: Sequence[Any],
        tree: Any,
        tensors: Sequence[torch.Tensor],
        numbers: Sequence[Any],
        device: torch.device,
        route: Route,
        runs: bool = True,
    ) -> tuple[Specialization, list[torch.Tensor], dict[str, Any]]:
        """A specialisation that fits the call, traced if none does; its captured tensors; a value for every symbol.

        ``runs``: whether the call is made. If it is only lowered for a target, captured tensors may be elsewhere.
        """
        key = (route, device, runs, tree, trace_key(leaves), autocast.settings())
        environment = number_symbols(numbers)
        for found in self._specializations.get(key, ()):
            captured = [captured.read() for captured in found.traced.captured]
            if all(guard.holds() for guard in found.traced.guards) and all(
                same_trace_fact(spec, tensor)
                for spec, tensor in zip(found.traced.graph.inputs[len(tensors) :], captured, strict=True)
            ):
                full = environment | size_symbols([*tensors, *captured])
                if found.fits(full):
                    return found, captured, full
        traced = self._trace(leaves, tree, device, route, runs)
        specialization = Specialization(self.name, traced, route)
        self._specializations.setdefault(key, []).append(specialization)
        self._note_static_numbers(specialization)
        captured = [found.value for found in traced.captured]
        return specialization, captured, environment | size_symbols([*tensors, *captured])

    def _trace(self, leaves: Sequence[Any], tree: Any, device: torch.device, route: Route, runs: bool = True) -> Traced:
        numbers = [base(type(leaf))(leaf) for leaf in leaves if type(leaf) in NUMBERS]
        guards = Guards(number_symbols(numbers))
        count = iter(range(len(numbers)))
        symbolic = [_symbolic(leaf, next(count), guards) if type(leaf) in NUMBERS else leaf for leaf in leaves]
        structure = tree or pytree.tree_flatten((tuple(leaves), {}))[1]
        layout = weights.LAYOUTS[route.backend]
        traced = trace(self.function, self.name, symbolic, structure, guards, device, layout, runs)
        if isinstance(self.function, WeakMethod):
            return dataclasses.replace(traced, guards=tuple(map(weakly, traced.guards)))
        return traced

    def _note_static_numbers(self, specialization: Specialization) -> None:
        names = {name for guard in specialization.guards for name in symbols.symbols_of(guard.expr)}
        found = {int(name[1:]) for name in names if name.startswith("a")}
        if not found <= self.static_numbers:
            self.static_numbers |= found
            self.when_numbers_become_static()


def _symbolic(number: Any, index: int, guards: Guards) -> Any:
    """Numeric argument ``index`` as the trace meets it."""
    kind = type(number)
    expr = symbols.argument_symbol(index, base(kind).__name__)
    return wrap(expr, guards) if kind is base(kind) else SymbolicScalar(expr, kind.dtype)
