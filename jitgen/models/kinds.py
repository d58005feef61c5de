"""Runs units: ``Kind`` is what units of one structure share, ``Route`` what their calls of one structure share.

A route has decorated functions of plain tensors and numbers: the call's, then what of the unit is an argument
(``state.py``); a trace runs a copy of the unit (``template.py``). So the dispatch, traces, guards of sizes, kernels and
gradients are those of any decorated function.

Where the unit updates a cache that only Python can update, there is one function for each piece between two such calls
(``caches.py``). Every piece runs the unit's code from the start, with the results of the calls before it; what it does
not need for its own results is not computed. So a piece may not draw random numbers or update tensors before its call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch

from jitgen.call.function import JitFunction
from jitgen.call.resolver import ResolverOfPart
from jitgen.call.signature import NUMBERS, Call, number_symbols
from jitgen.call.specialization import Specialization
from jitgen.errors import JitgenError, UnsupportedError
from jitgen.ir import symbols
from jitgen.models import caches
from jitgen.models.state import State
from jitgen.models.structure import Flattened, rebuilt
from jitgen.models.template import Template, contents, same_contents
from jitgen.spec import DTYPES
from jitgen.trace import autocast
from jitgen.trace.checkpoints import checkpoints_are_calls
from jitgen.trace.importing import effects
from jitgen.trace.numbers import unwrap
from jitgen.trace.stand_ins import stand_ins
from jitgen.trace.traced import Traced
from jitgen.trace.transforms import transforms_are_refused


class TracedFunction(JitFunction[..., Any]):
    """Decorates a function of tensors and numbers that reads nothing else."""

    __slots__ = ()
    _resolver_class = ResolverOfPart

    def traced(self, leaves: Sequence[Any]) -> tuple[Traced, dict[str, Any]]:
        """Returns the trace of a call with these arguments, and a value for each of its symbols."""
        flat, tree, _ = self._parameters.flatten(tuple(leaves), {}, self._resolver.layout_of)
        call = Call.unchecked(flat, tree)
        needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in call.tensors)
        route = self._resolver.routing.on_device(call.device)
        specialization, _, environment = self._resolver.specialize(call, route, differentiable=needs_grad)
        return specialization.traced, environment

    @property
    def all_specializations(self) -> tuple[Specialization, ...]:
        """Returns what its calls have resolved, those with gradients among them."""
        return (*self._resolver.specializations, *self._dispatchers.of_gradients)


class Kind:
    """Holds what units of one structure share.

    Attributes:
        name: the class of the units.
        state: of the first of them.
        routes: by the structure of calls.
    """

    def __init__(self, module: torch.nn.Module, state: State, forward: Callable[..., Any]):
        self.name = type(module).__name__
        self.forward = forward
        self.routes: dict[Any, Route] = {}
        self.state = state  # whose key may have the ids of objects that only it keeps alive
        self.template = Template(module, state)

    def route(self, flat: Flattened) -> Route:
        """Returns the route of a call."""
        key = flat.key, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast.settings()
        route = self.routes.get(key)
        if route is None:
            route = self.routes[key] = Route(self, flat)
        return route


class Route:
    """Runs calls of one structure.

    Attributes:
        failures: why calls ran in torch after all; later ones do as well.
    """

    def __init__(self, kind: Kind, flat: Flattened):
        self._kind = kind
        self._key, self._cache_kind, self._leaf_count = flat.key, type(flat.cache), len(flat.leaves)
        self.failures: dict[str, int] = {}
        self._pieces: list[TracedFunction] = []
        self._updating: dict[Any, TracedFunction] = {}
        self._updates_in_kernels = flat.cache is not None
        self._layer: Any = None

    @property
    def functions(self) -> tuple[TracedFunction, ...]:
        return (*self._pieces, *self._updating.values())

    def __call__(self, state: State, flat: Flattened) -> Any:
        """Makes a call.

        Raises:
            JitgenError: it cannot be traced, or its kernels cannot be made; Interrupted where that shows after its
            cache was updated.
        """
        leaves = [*flat.leaves, *state.numbers(), *state.tensors()]
        if flat.cache is None:
            return self._piece(0)(*leaves)[0]
        if self._updates_in_kernels and (layer := self._layer_of(flat.cache, leaves)) is not None:
            tensors, facts = caches.inputs_of(layer)
            try:
                return self._function_of(facts)(*leaves, *tensors)[0]
            except _OtherUpdates:
                self._updates_in_kernels = False
        results: list[tuple[torch.Tensor, ...]] = []
        try:
            while True:
                made = self._piece(len(results))(*leaves, *chain.from_iterable(results))
                if len(made) == 1:
                    return made[0]
                args, kwargs = made
                updated = flat.cache.update(*args, **kwargs)
                results.append(updated)
                if type(updated) is not tuple or [isinstance(item, torch.Tensor) for item in updated] != [True, True]:
                    raise UnsupportedError("the update of its cache returns something else than keys and values")
        except JitgenError as error:
            if results:
                raise Interrupted(error, caches.continued(flat.cache, results)) from error
            raise

    def _piece(self, index: int) -> TracedFunction:
        """Returns the function that goes on where ``index`` calls of the cache have returned."""
        while len(self._pieces) <= index:
            self._pieces.append(TracedFunction(self._run_piece, name=self._kind.name))
        return self._pieces[index]

    def _run_piece(self, *leaves: Any) -> Any:
        """Runs the unit up to its next call of ``update``, of which it returns the arguments; else to its end."""
        inputs = self._kind.template.inputs
        results = iter(leaves[self._leaf_count + inputs :])

        def update(*args: Any, **kwargs: Any) -> Any:
            keys = next(results, None)
            if keys is None:
                raise caches.Reached(args, kwargs)
            if (effect := effects()) is not None:
                raise UnsupportedError(f"before it updates its cache it {effect}")
            return keys, next(results)

        try:
            return (self._run(leaves, update),)
        except caches.Reached as reached:
            return reached.args, reached.kwargs

    def _function_of(self, facts: tuple[Any, ...]) -> TracedFunction:
        """Returns the function that updates a layer of preallocated tensors."""
        function = self._updating.get(facts)
        if function is None:

            def run(*leaves: Any) -> Any:
                layer = caches.traced_layer(facts, leaves[-len(caches.TENSORS) :])
                indices: list[Any] = []

                def update(keys: Any, values: Any, index: Any, *args: Any, **kwargs: Any) -> Any:
                    if indices:
                        raise _OtherUpdates(f"{self._kind.name} updates several layers of its cache")
                    indices.append(index)
                    if unwrap(index) != self._layer:
                        raise _OtherUpdates(f"another layer of the cache than at other calls of {self._kind.name}")
                    return type(layer).update(layer, keys, values, *args, **kwargs)

                return (self._run(leaves, update),)

            function = self._updating[facts] = TracedFunction(run, name=self._kind.name)
        return function

    def _layer_of(self, cache: Any, leaves: Sequence[Any]) -> Any:
        """Returns the layer that the call updates, if kernels can; its tensors are there."""
        if self._layer is None:
            traced, _ = self._piece(0).traced(leaves)
            if len(traced.leaves) < 3 or traced.leaves[0].index is None or traced.tree.num_children != 2:
                self._updates_in_kernels = False
                return None
            self._layer = traced.leaves[2].value
        numbers = [leaf for leaf in leaves if type(leaf) in NUMBERS]
        layer = caches.layer_of(cache, int(symbols.evaluate(self._layer, number_symbols(numbers))))
        if layer is not None and not layer.is_initialized:
            traced, environment = self._piece(0).traced(leaves)
            device = next(leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor))
            layer.lazy_initialization(
                *(
                    torch.empty(
                        [symbols.evaluate(size, environment) for size in node.shape],
                        dtype=DTYPES[node.dtype],
                        device=device,
                    )
                    for node in traced.graph.outputs[:2]
                )
            )
        return layer

    def _run(self, leaves: Sequence[Any], update: Callable[..., Any]) -> Any:
        """Runs the unit's code on what a trace has in place of its arguments."""
        template = self._kind.template
        numbers = leaves[self._leaf_count : self._leaf_count + template.numbers]
        tensors = leaves[self._leaf_count + template.numbers : self._leaf_count + template.inputs]
        copied = template.with_inputs(tensors, numbers)
        state = self._kind.state
        was_current = state.is_current()
        cache = None if self._cache_kind is type(None) else caches.stand_in(self._cache_kind, update)
        containers: list[Any] = []
        args, kwargs = (rebuilt(key, leaves, cache, containers) for key in self._key)
        before = [*map(contents, containers)]
        try:
            with stand_ins(), transforms_are_refused(), checkpoints_are_calls():
                result = self._kind.forward(copied.module, *args, **kwargs)
        except (JitgenError, caches.Reached):
            raise
        except Exception as error:
            raise UnsupportedError(f"{type(error).__name__}: {error}") from error
        finally:
            if was_current and not state.is_current():
                state.restore()
                raise UnsupportedError("its forward changes what it reads by name")
            copied.check()
            if not all(map(same_contents, map(contents, containers), before)):
                raise UnsupportedError("its forward changes a list or dict that is an argument")
        return result


class Interrupted(Exception):
    """Says that a call cannot go on after it has updated its cache.

    Attributes:
        error: why.
        cache: what the unit gets in place of its cache when it runs in torch, where that was updated already.
    """

    def __init__(self, error: JitgenError, cache: Any):
        super().__init__(str(error))
        self.error, self.cache = error, cache


class _OtherUpdates(UnsupportedError):
    """Says that a unit updates its cache in another way than a trace can."""
