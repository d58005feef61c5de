"""Implements ``jitgen.compile``: the units of a model run generated kernels, in place."""

from __future__ import annotations

import functools
import weakref
from typing import Any, TypeVar

import torch
from torch import nn

from jitgen import console, settings
from jitgen.errors import CacheMissError, CaptureMissError, FallbackWarning, JitgenError, SharedMemoryError
from jitgen.models.graphs import GraphForward
from jitgen.models.kinds import Interrupted, Kind, Route, TracedFunction
from jitgen.models.state import State, Varying, varying_numbers
from jitgen.models.structure import Flattened
from jitgen.models.units import members, units
from jitgen.trace.guards import tracing

Model = TypeVar("Model", bound=nn.Module)


class UnitForward:
    """Runs in place of the ``forward`` of one module: an attribute of that module alone.

    Attributes:
        path: of the module in its model.
        reason: why its last call ran in torch; None if generated kernels ran it.
        divided: whether its modules have become units in its place, since it cannot be one.
        kinds: those that it has been of: another one each time its attributes became others.
    """

    def __init__(self, module: nn.Module, path: str, varying: Varying, shared: dict[Any, Kind]):
        self._module = module
        self._varying = varying
        self._shared = shared
        self._state: State | None = None
        self.path = path
        self.reason: str | None = None
        self.divided = False
        self.kinds: list[Kind] = []
        functools.update_wrapper(self, type(module).forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.divided or torch.compiler.is_compiling() or tracing.get() is not None:
            return self.eager(*args, **kwargs)
        module = self._module
        if module.training and getattr(module, "gradient_checkpointing", False):
            checkpoint = getattr(module, "_gradient_checkpointing_func", None)
            if checkpoint is not None and hasattr(type(module).forward, "__wrapped__"):
                return self._checkpointed(checkpoint, args, kwargs)
        return self._run(args, kwargs)

    @property
    def name(self) -> str:
        """Returns the class of the module."""
        return type(self._module).__name__

    @property
    def functions(self) -> list[TracedFunction]:
        """Lists the decorated functions that ran its calls."""
        routes = [route for kind in self.kinds for route in kind.routes.values()]
        return [function for route in routes for function in route.functions]

    def eager(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module's own forward."""
        return type(self._module).forward(self._module, *args, **kwargs)

    def remove(self) -> None:
        """Gives the module its own forward again."""
        del vars(self._module)["forward"]

    def _checkpointed(self, checkpoint: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes a call of which the backward computes the forward again, as a layer of transformers makes it."""
        if not getattr(self._module, "_can_checkpoint_with_cache", False):
            without = {name: None for name in ("past_key_values", "layer_past") if kwargs.get(name) is not None}
            kwargs = {**kwargs, **without, **({"use_cache": False} if kwargs.get("use_cache") else {})}
        return checkpoint(lambda *arguments: self._run(arguments, kwargs), *args)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state = self._state
        if state is None or not state.is_current():
            state = self._renewed()
        route: Route | None = None
        if (reason := state.problem or state.replaced_forward) is None:
            try:
                flat = Flattened(args, kwargs)
                route = self.kinds[-1].route(flat)
                if not route.failures:
                    result = route(state, flat)
                    self.reason = None
                    return result
                reason = next(iter(route.failures))
            except (CacheMissError, CaptureMissError):
                raise
            except JitgenError as error:
                return self._run_in_torch(error, route, args, kwargs)
            except Interrupted as interrupted:
                args, kwargs = flat.with_cache(interrupted.cache)
                return self._run_in_torch(interrupted.error, route, args, kwargs)
        self.reason = reason
        self._divide()
        return self.eager(*args, **kwargs)

    def _divide(self) -> None:
        """Makes units of the module's own modules: what cannot be traced as a whole may be in parts."""
        for path, child in members(self._module):
            varying = frozenset(
                (name[len(path) + 1 :], n) for name, n in self._varying if f"{name}.".startswith(f"{path}.")
            )
            install(child, f"{self.path}.{path}".lstrip("."), varying, self._shared)
            self.divided = True

    def _renewed(self) -> State:
        """Reads the module again."""
        module = self._module
        state = self._state = State(module, self._varying)
        if state.problem is None and state.replaced_forward is None:
            kind = self._shared.get(state.key)
            if kind is None:
                forward: Any = type(module).forward
                if getattr(module, "gradient_checkpointing", None) is not None:
                    forward = getattr(forward, "__wrapped__", forward)
                kind = self._shared[state.key] = Kind(module, state, forward)
            self.kinds = [*(known for known in self.kinds if known is not kind), kind]
        return state

    def _run_in_torch(self, error: JitgenError, route: Route | None, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Runs a call in torch, and notes why; calls like it do as well, unless the reason lies in their tensors alone.
        Where torch refuses the call too, nothing is noted."""
        if settings.is_strict() or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            raise error
        result = self.eager(*args, **kwargs)
        self.reason = reason = str(error).strip().splitlines()[0].removeprefix(f"{self.name}: ")
        if route is not None and not isinstance(error, SharedMemoryError):
            route.failures[reason] = route.failures.get(reason, 0) + 1
            self._divide()
        console.warn(
            f"{self.path or type(self._module).__name__} is not traced as a whole, and runs in torch where its modules "
            f"are not either: {error}",
            FallbackWarning,
            stacklevel=4,
        )
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _forward_of(memo.get(id(self._module), self._module))

    def __reduce__(self) -> Any:
        return _forward_of, (self._module,)


def _forward_of(module: nn.Module) -> Any:
    """Returns what a copy of a module has as its forward: its own one."""
    return type(module).forward.__get__(module)


def compile(model: Model, *, cuda_graph: bool = False) -> Model:
    """Makes a model run generated kernels, without Dynamo; returns the same object, with all its methods.

    The blocks of its lists (``nn.ModuleList``) are traced once for each kind, and what is around them too; Python runs
    the rest of the model as ever, so ``generate``, caches, hooks and adapters work as they do. What a trace cannot
    express stays with torch, with a warning, and a line in ``jitgen.report(model)``.

    Args:
        model: any module; it is changed in place. ``decompile`` undoes it.
        cuda_graph: whether calls that repeat, such as the steps of decoding with a ``StaticCache``, are captured as
            CUDA graphs (``graphs.py``). Where one cannot be, the report says why.

    Raises:
        TypeError: ``model`` is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"compile takes a module, not {type(model).__name__}; decorate functions with jitgen.jit")
    shared: dict[Any, Kind] = {}
    chosen = units(model)
    groups: dict[Any, list[nn.Module]] = {}
    for path, unit in chosen:
        groups.setdefault((path.rpartition(".")[0], type(unit)), []).append(unit)
    varying = {group: varying_numbers(alike) for group, alike in groups.items()}
    for path, unit in chosen:
        install(unit, path, varying[path.rpartition(".")[0], type(unit)], shared)
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(generation, "disable_compile"):
        generation.disable_compile = True  # else generate() has torch.compile compile the steps of a static cache
    inner = vars(model).get("forward", type(model).forward.__get__(model))
    if cuda_graph and not isinstance(inner, GraphForward):
        vars(model)["forward"] = GraphForward(model, inner)
    return model


def install(module: nn.Module, path: str, varying: Varying, shared: dict[Any, Kind]) -> None:
    """Replaces the forward of one module, unless something else has replaced it."""
    forward = vars(module).get("forward")
    if forward is None or getattr(forward, "__func__", None) is type(module).forward:
        made = vars(module)["forward"] = UnitForward(module, path, varying, shared)
        _installed.add(made)


def decompile(model: Model) -> Model:
    """Undoes ``compile``: the modules of ``model`` run their own forward again."""
    graphs = vars(model).get("forward")
    if isinstance(graphs, GraphForward):
        del vars(model)["forward"]
        if isinstance(graphs.inner, UnitForward):
            vars(model)["forward"] = graphs.inner
    for unit in forwards(model):
        unit.remove()
    return model


def graph_of(model: nn.Module) -> GraphForward | None:
    """Returns what captures the calls of ``model``; None if nothing does."""
    graphs = vars(model).get("forward")
    return graphs if isinstance(graphs, GraphForward) else None


_installed: weakref.WeakSet[UnitForward] = weakref.WeakSet()


def forwards(model: nn.Module | None = None) -> list[UnitForward]:
    """Lists what runs in place of the forward of units of ``model``, or of all models."""
    if model is None:
        return sorted(_installed, key=lambda made: made.path)
    modules = [vars(module).get("forward") for module in model.modules()]
    inner = [made.inner if isinstance(made, GraphForward) else made for made in modules]
    return [made for made in inner if isinstance(made, UnitForward)]
