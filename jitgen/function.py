"""``JitFunction``: what ``@jitgen.jit`` makes of a function, and how a call finds its launch.

A warm call does three look-ups at most. Its argument types select a *dispatcher* (``dispatch.py``); that compares the
arguments with those of its last call (shape, strides, dtype, device, alignment), else finds the launch in a table by
the same facts. A call with ``out=`` finds its ``LaunchPlan`` (``plan.py``) by them. A call seen for the first time goes
through ``JitFunction._resolve``: find or make the ``Specialization``, lower, fetch kernels, bind.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from jitgen import manifest, pipeline, quant, row_buckets, settings, weights
from jitgen.compile import routes
from jitgen.dispatch import MAX_LAUNCHES, NUMBERS, TENSORS, make_dispatcher, make_quantized_dispatcher
from jitgen.errors import UnsupportedError
from jitgen.ir import symbols
from jitgen.ir.graph import size_one_pattern
from jitgen.pipeline import Lowered, Route
from jitgen.plan import LaunchPlan
from jitgen.runtime.guards import TensorFacts
from jitgen.spec import Target, dtype_name, host_target, runs_here
from jitgen.specialization import Specialization, memory_of
from jitgen.trace.guards import Guards, tracing
from jitgen.trace.host_scalars import SymbolicScalar, base, common_device, is_host_scalar
from jitgen.trace.numbers import wrap
from jitgen.trace.tracer import Traced, trace

STATIC = (bool, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class Entry:
    """A bound launch and what must still hold for it."""

    __slots__ = ("captured", "facts", "guards", "launch", "lowered", "specialization")

    def __init__(self, launch: Any, specialization: Specialization, lowered: Lowered, tensors: Sequence[torch.Tensor]):
        self.launch = launch
        self.specialization = specialization
        self.lowered = lowered
        self.guards = specialization.traced.guards
        self.captured = specialization.traced.captured
        self.facts = tuple(map(TensorFacts.of, tensors))

    def captured_tensors(self) -> list[torch.Tensor] | None:
        """The captured tensors now; None where one has changed its shape or place, or a guarded value has changed."""
        for guard in self.guards:
            if guard.read() is not guard.value and not guard.holds():
                return None
        tensors = []
        for captured, facts in zip(self.captured, self.facts, strict=True):
            tensor = captured.read()
            if type(tensor) not in TENSORS or TensorFacts.of(tensor) != facts:
                return None
            if tensor.requires_grad and torch.is_grad_enabled():
                raise UnsupportedError(
                    f"{captured.path} requires grad, and gradients are not supported in this version; "
                    "call the function under torch.no_grad(), or detach it"
                )
            tensors.append(tensor)
        return tensors


class JitFunction:
    """A function whose calls run generated kernels. Made by ``jitgen.jit``; see there."""

    def __init__(self, function: Callable[..., Any], backend: str | None, compiler: str | None):
        self.function = function
        self.backend = backend
        self.compiler = compiler
        self.name = getattr(function, "__name__", type(function).__name__)
        functools.update_wrapper(self, function)
        self.__jitgen_function__ = function
        self._parameters = _parameter_names(function)
        self._dispatchers: dict[Any, Callable[..., Any]] = {}
        self._plans: dict[Any, LaunchPlan] = {}
        """Of calls with ``out=``."""
        self._specializations: dict[Any, list[Specialization]] = {}
        self._static_numbers: set[int] = set()
        self._methods: weakref.WeakKeyDictionary[Any, JitFunction] = weakref.WeakKeyDictionary()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not kwargs:
            dispatcher = self._dispatchers.get(tuple(map(type, args)))
            if dispatcher is not None:
                return dispatcher(*args)
        return self._call(args, kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        try:
            bound = self._methods.get(instance)
            if bound is None:
                bound = self._methods[instance] = JitFunction(
                    types.MethodType(self.function, instance), self.backend, self.compiler
                )
            return bound
        except TypeError:  # no weak reference, or no hash: traced anew for each look-up of the method
            return JitFunction(types.MethodType(self.function, instance), self.backend, self.compiler)

    def __repr__(self) -> str:
        return f"<jitgen.jit {self.name}>"

    @property
    def requested(self) -> tuple[str, str | None]:
        """Backend, which may be ``"auto"``, and compiler, if one was asked for, as the user has them."""
        return self.backend or settings.get("JITGEN_BACKEND"), self.compiler

    # ------------------------------------------------------------------------------------------------- inspection

    def reference(self, *args: Any, **kwargs: Any) -> Any:
        """The same call in eager torch, on dequantised weights."""
        token = quant.plain.set(True)
        try:
            return self.function(*args, **kwargs)
        finally:
            quant.plain.reset(token)

    @property
    def specializations(self) -> tuple[Specialization, ...]:
        """What this process has resolved, in the order it met them."""
        return tuple(found for group in self._specializations.values() for found in group)

    def bind(self, *args: Any, **kwargs: Any) -> LaunchPlan:
        """The launch plan of these arguments' signature. ``plan(*args, out=...)`` skips the look-up.

        Raises:
            what a call raises; TraceError for keyword or nested arguments, which a plan does not take.
        """
        leaves, tree, out = self._leaves(args, kwargs)
        if out is not None:
            raise TypeError("bind takes the function's arguments; give out= to the plan")
        apart = [arg.token if weights.is_quantized(arg) else None for arg in args] if tree is not None else []
        return LaunchPlan(self, leaves, tree, apart if any(apart) and not kwargs else ())

    # --------------------------------------------------------------------------------------------------- dispatch

    def _leaves(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], layout_of: Callable[[Any], str] | None = None
    ) -> tuple[tuple[Any, ...], Any, Any]:
        """(leaves, structure or None for plain positional arguments, out=).

        ``layout_of``: gives the layout in which a copy of a quantised weight is taken apart; by default the weight
        itself is, in its backend's.
        """
        out = None
        if "out" in kwargs and "out" not in self._parameters:
            kwargs = dict(kwargs)
            out = kwargs.pop("out")
        if kwargs and self._parameters and set(kwargs) <= set(self._parameters):
            bound = inspect.signature(self.function).bind(*args, **kwargs)
            args, kwargs = bound.args, bound.kwargs
        if (weights.exist() or layout_of is not None) and weights.among((args, kwargs)):
            args, kwargs = weights.take_apart((args, kwargs), layout_of or self._layout, layout_of is None)
            leaves, tree = pytree.tree_flatten((args, kwargs))
            return tuple(leaves), tree, out
        if not kwargs and not any(isinstance(arg, (list, tuple, dict)) for arg in args):
            return args, None, out
        leaves, tree = pytree.tree_flatten((args, kwargs))
        return tuple(leaves), tree, out

    def _layout(self, weight: Any) -> str:
        return weights.LAYOUTS[self.route(weight.device).backend]

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if tracing.get() is not None:  # called by a function being traced: part of its kernel
            return self.function(*args, **kwargs)
        leaves, tree, out = self._leaves(args, kwargs)
        if out is not None:
            return self._plan(leaves, tree)(*leaves, out=out)
        dispatcher = self._dispatcher(leaves, tree)
        if not kwargs and any(map(weights.is_quantized, args)):
            self._dispatchers.setdefault(tuple(map(type, args)), make_quantized_dispatcher(self, args))
        return dispatcher(*leaves)

    def _plan(self, leaves: Sequence[Any], tree: Any) -> LaunchPlan:
        """The plan of a call with ``out=``, made where there is none for such arguments yet."""
        plan = self._plans.get(self._signature(leaves, tree))
        if plan is None:
            plan = LaunchPlan(self, leaves, tree)
            if len(self._plans) >= MAX_LAUNCHES:
                self._plans.clear()
            self._plans[self._signature(leaves, tree)] = plan  # the trace may have found out about numbers
        return plan

    def _signature(self, leaves: Sequence[Any], tree: Any) -> tuple[Any, ...]:
        """What of a call's leaves a plan is bound for."""
        signature = [tree]
        for leaf in leaves:
            kind = type(leaf)
            if kind in TENSORS:
                signature.append(TensorFacts.of(leaf))
            elif kind in NUMBERS and self._static_numbers:
                signature.append((kind, leaf.hex() if kind is float else leaf))
            else:
                signature.append((kind, leaf) if kind in STATIC else kind)
        return tuple(signature)

    def _dispatcher(self, leaves: Sequence[Any], tree: Any) -> Callable[..., Any]:
        kinds = tuple(map(type, leaves))
        key = kinds if tree is None else (tree, kinds)
        dispatcher = self._dispatchers.get(key)
        if dispatcher is None:
            self._check(leaves, host_scalars=True)
            dispatcher = self._dispatchers[key] = make_dispatcher(self, kinds, tree)
        return dispatcher

    def _forget_dispatchers(self) -> None:
        self._dispatchers.clear()

    # ---------------------------------------------------------------------------------------------------- resolving

    def _resolve(
        self, leaves: Sequence[Any], tree: Any, out: Sequence[torch.Tensor] | None = None
    ) -> tuple[Entry, list[torch.Tensor]]:
        """The entry of a call seen for the first time, and its captured tensors."""
        tensors, numbers = self._check(leaves)
        device = tensors[0].device if tensors else torch.device("cpu")
        route = self.route(device)
        specialization, captured, environment = self._specialize(leaves, tree, tensors, numbers, device, route)
        everything = [*tensors, *captured]
        on_cpu = device.type == "cpu"
        memory = [memory_of(tensor, on_cpu) for tensor in everything]
        wanted = [memory_of(tensor, on_cpu) if tensor is not None else None for tensor in out or ()]
        lowered = specialization.lower(environment, memory, wanted)
        if manifest.recording():
            manifest.note(specialization.traced.graph, lowered, environment, memory, self.requested)
            self._note_more_rows(leaves, tree, device, route)
        kernels = specialization.built(lowered, pipeline.default_store())
        given = frozenset(range(len(wanted)))
        launch = specialization.bind(lowered, kernels, environment, device, len(numbers), given)
        return Entry(launch, specialization, lowered, captured), list(captured)

    def _check(self, leaves: Sequence[Any], host_scalars: bool = False) -> tuple[list[torch.Tensor], list[Any]]:
        """The tensors and numbers among ``leaves``, after everything about them that can be wrong.

        ``host_scalars``: whether 0-d CPU tensors may be among CUDA tensors.
        """
        tensors: list[torch.Tensor] = []
        numbers: list[Any] = []
        for leaf in leaves:
            if type(leaf) in TENSORS:
                tensors.append(leaf)
            elif isinstance(leaf, torch.Tensor):
                raise UnsupportedError(f"{self.name}: tensors of type {type(leaf).__name__} are not supported")
            elif type(leaf) in NUMBERS:
                numbers.append(base(type(leaf))(leaf))
            elif not isinstance(leaf, STATIC):
                raise UnsupportedError(
                    f"{self.name}: an argument of type {type(leaf).__name__}; jitgen takes tensors, numbers, bools, "
                    "strings, dtypes and None, in lists, tuples and dicts too. Close over any other object"
                )
        device = common_device(tensors) if tensors else None
        for tensor in tensors:
            if tensor.layout != torch.strided:
                raise UnsupportedError(
                    f"{self.name}: a tensor of layout {tensor.layout}; only strided ones are supported"
                )
            if tensor.device != device and not (host_scalars and device and is_host_scalar(tensor, device)):
                raise UnsupportedError(
                    f"{self.name}: arguments on {device} and {tensor.device}; move them to one device, with .to(device)"
                )
            if tensor.requires_grad and torch.is_grad_enabled():
                raise UnsupportedError(
                    f"{self.name}: an argument requires grad, and gradients are not supported in this version; "
                    "call it under torch.no_grad(), or detach the argument"
                )
            dtype_name(tensor.dtype)
        if device is not None and device.type not in ("cpu", "cuda"):
            raise UnsupportedError(f"{self.name}: tensors on {device}; jitgen runs on cpu and cuda")
        return tensors, numbers

    def route(self, device: torch.device) -> Route:
        """Backend, compiler and target for tensors on ``device``; ``auto`` as ``routes.backend_for`` has it."""
        backend = routes.backend_for(self.requested[0], "cuda" if device.type == "cuda" else "cpu")
        compiler = self.compiler or routes.default_compiler(backend)
        if device.type == "cuda":
            from jitgen.runtime.cuda import target_of

            target = target_of(device.index)
        elif backend == "triton" and settings.interpreting_triton():
            target = Target.parse("interpreter")
        else:
            target = host_target()
            if not runs_here(target):
                raise UnsupportedError(f"this processor cannot run code for {target}; unset JITGEN_CPU_TARGET")
        if backend != "cpp" and target.kind == "cpu":
            raise UnsupportedError(
                f"{self.name}: backend {backend!r} needs CUDA tensors, these are on the CPU"
                + ("; set TRITON_INTERPRET=1 to run Triton's interpreter" if backend == "triton" else "")
            )
        routes.check(backend, compiler, target)
        return Route(backend, compiler, target)

    def _specialize(
        self,
        leaves: Sequence[Any],
        tree: Any,
        tensors: Sequence[torch.Tensor],
        numbers: Sequence[Any],
        device: torch.device,
        route: Route,
    ) -> tuple[Specialization, list[torch.Tensor], dict[str, Any]]:
        """A specialisation that fits the call, traced if none does; its captured tensors; a value for every symbol."""
        key = (route, device, tree, tuple(map(self._static, leaves)))
        environment = {f"a{index}": number for index, number in enumerate(numbers)}
        for found in self._specializations.get(key, ()):
            captured = [captured.read() for captured in found.traced.captured]
            if all(guard.holds() for guard in found.traced.guards) and all(
                _same_kind(spec, tensor)
                for spec, tensor in zip(found.traced.graph.inputs[len(tensors) :], captured, strict=True)
            ):
                full = environment | _sizes([*tensors, *captured])
                if found.fits(full):
                    return found, captured, full
        traced = self._trace(leaves, tree, numbers, device, route)
        specialization = Specialization(self.name, traced, route)
        self._specializations.setdefault(key, []).append(specialization)
        self._note_static_numbers(specialization)
        captured = [found.value for found in traced.captured]
        return specialization, captured, environment | _sizes([*tensors, *captured])

    def _trace(
        self, leaves: Sequence[Any], tree: Any, numbers: Sequence[Any], device: torch.device, route: Route
    ) -> Traced:
        guards = Guards({f"a{index}": number for index, number in enumerate(numbers)})
        count = iter(range(len(numbers)))
        wrapped = [_symbolic(leaf, next(count), guards) if type(leaf) in NUMBERS else leaf for leaf in leaves]
        structure = tree or pytree.tree_flatten((tuple(leaves), {}))[1]
        return trace(self.function, self.name, wrapped, structure, guards, device, weights.LAYOUTS[route.backend])

    def _note_more_rows(self, leaves: Sequence[Any], tree: Any, device: torch.device, route: Route) -> None:
        """Record what this call would be with two rows where it has one: sizes of 1 are traces of their own."""
        for enlarged in row_buckets.enlarged(leaves, tree):
            numbers = [leaf for leaf in enlarged if type(leaf) in NUMBERS]
            try:
                traced = self._trace(enlarged, tree, numbers, device, route)
            except Exception:  # the function's own included: it is for one row
                continue
            captured = [found.value for found in traced.captured]
            tensors = [*(leaf for leaf in enlarged if isinstance(leaf, torch.Tensor)), *captured]
            environment = {f"a{index}": number for index, number in enumerate(numbers)} | _sizes(tensors)
            if any(not guard.holds(environment) for guard in traced.graph.guards):
                continue
            memory = [memory_of(tensor, True) for tensor in tensors]
            lowered = pipeline.lower(traced.graph, environment, memory, route)
            manifest.note(traced.graph, lowered, environment, memory, self.requested)

    def _note_static_numbers(self, specialization: Specialization) -> None:
        """Numeric arguments a guard depends on become part of the dispatchers' comparison."""
        names = {name for guard in specialization.guards for name in symbols.symbols_of(guard.expr)}
        found = {int(name[1:]) for name in names if name.startswith("a")}
        if not found <= self._static_numbers:
            self._static_numbers |= found
            self._forget_dispatchers()

    @staticmethod
    def _static(leaf: Any) -> Any:
        """A leaf's part of the key under which specialisations are kept."""
        if isinstance(leaf, torch.Tensor):
            return leaf.dtype, size_one_pattern(leaf.shape)
        if type(leaf) in NUMBERS:
            return type(leaf)
        return type(leaf), leaf


def _symbolic(number: Any, index: int, guards: Guards) -> Any:
    """Numeric argument ``index`` as the trace meets it."""
    kind = type(number)
    expr = symbols.argument_symbol(index, base(kind).__name__)
    return wrap(expr, guards) if kind is base(kind) else SymbolicScalar(expr, kind.dtype)


def _same_kind(spec: Any, tensor: Any) -> bool:
    return (
        type(tensor) in TENSORS
        and dtype_name(tensor.dtype) == spec.dtype
        and size_one_pattern(tensor.shape) == size_one_pattern(spec.shape)
    )


def _sizes(tensors: Sequence[torch.Tensor]) -> dict[str, int]:
    return {f"s{i}_{dim}": size for i, tensor in enumerate(tensors) for dim, size in enumerate(tensor.shape)}


def _parameter_names(function: Callable[..., Any]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()
