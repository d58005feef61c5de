"""Traces ``kernel[grid](...)``, the launch of a user's Triton kernel: each tensor that it writes gets a new value.

While a function is traced, Triton's ``run`` of kernels (plain, autotuned, with heuristics, or interpreted) comes here.
Sizes among the arguments stay symbolic where the kernel takes a number; a constant of the kernel that depends on one
is a guard. A grid that is a function is called with the arguments, once for each configuration of an autotuner.

Neighbours: ``launch.py`` makes the nodes, ``triton_module.py`` has the kernel's text, ``triton_accesses.py`` what it
writes.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from jitgen import settings
from jitgen.ir import symbols
from jitgen.ir.attributes import KernelText
from jitgen.ir.launches import CONFIG, CONSTANT, FLOAT, INT, TENSOR, UNSPECIALIZED
from jitgen.trace.kernels.launch import Launch, trace_in_progress
from jitgen.trace.kernels.triton_accesses import accesses
from jitgen.trace.kernels.triton_module import constant, defined, is_jit_function, module_of
from jitgen.trace.numbers import SymbolicNumber, unwrap
from jitgen.trace.replaced import Replaced

if TYPE_CHECKING:
    from jitgen.trace.tracer import Trace

_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
"""Options of a launch that decide how the kernel is compiled."""


@contextmanager
def launches_are_traced(trace: Trace) -> Iterator[None]:
    """Makes ``trace`` meet launches of Triton's kernels within this context."""
    with settings.within(trace_in_progress, trace), ExitStack() as stack:
        for replaced in _launchers() if knows_triton() else ():
            stack.enter_context(replaced.active())
        yield


def knows_triton() -> bool:
    """Returns whether Triton has been imported; before, nobody has a kernel."""
    return "triton.runtime.jit" in sys.modules


@cache
def _launchers() -> tuple[Replaced, ...]:
    from triton.runtime import autotuner, jit

    classes: list[Any] = [jit.JITFunction, autotuner.Autotuner, autotuner.Heuristics]
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is not None:
        classes.append(interpreter.InterpretedFunction)

    def run_of(original: Any) -> Callable[..., Any]:
        def run(self: Any, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> Any:
            trace = trace_in_progress.get()
            if trace is None or warmup:
                return original(self, *args, grid=grid, warmup=warmup, **kwargs)
            with torch._C.DisableTorchFunction():
                return _Launch(trace, self, args, grid, kwargs).trace()

        return run

    def call_of(owner: type) -> Callable[..., Any]:
        original: Any = next((vars(kind)["__call__"] for kind in owner.__mro__ if "__call__" in vars(kind)), None)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            trace = trace_in_progress.get()
            if trace is None and original is None:
                raise TypeError(f"{owner.__name__!r} object is not callable")  # as in Python
            return original(self, *args, **kwargs) if trace is None else run_of(None)(self, *args, **kwargs)

        return call

    import triton

    rounding = triton.next_power_of_2
    function = getattr(rounding, "fn", rounding)  # of triton.constexpr_function

    def next_power_of_2(n: Any) -> Any:
        return function(n) if trace_in_progress.get() is None else _power_of_two(n)

    of_rounding = Replaced(rounding, {"fn": next_power_of_2}) if function is not rounding else None
    launchers = (Replaced(owner, {"run": run_of(owner.run), "__call__": call_of(owner)}) for owner in classes)
    return (*launchers, of_rounding or Replaced(triton, {"next_power_of_2": next_power_of_2}))


def _power_of_two(n: Any) -> Any:
    """Returns the least power of two that is no less than ``n``; for a symbolic number a guard says between which two
    it lies, so that other numbers between them need no other trace."""
    if not isinstance(n, SymbolicNumber):
        return 1 << max(int(n) - 1, 0).bit_length()
    rounded = 1 << max(int(n.guards.hint(n.expr)) - 1, 0).bit_length()
    n.guards.decide(symbols.compare("le", n.expr, rounded))
    n.guards.decide(symbols.compare("gt", n.expr, rounded // 2))
    return rounded


def launched(trace: Trace, launcher: Any, grids: list[Any], arguments: Mapping[str, Any]) -> None:
    """Traces a launch of which Dynamo knows the grid of each configuration.

    Args:
        arguments: by the names of the kernel's parameters, options among them.
    """
    with torch._C.DisableTorchFunction():
        _Launch(trace, launcher, (), grids, arguments).trace()


def written_by(launcher: Any) -> set[str]:
    """Returns the names of the parameters that a kernel may write through."""
    while not is_jit_function(launcher):
        launcher = launcher.fn
    return accesses(launcher).written


@dataclass
class _Way:
    """Describes one way to launch the kernel, while decorators are followed: constants and options by name."""

    constants: dict[str, Any]
    options: dict[str, Any]


class _Launch(Launch):
    """Holds one launch of a kernel in Triton."""

    def __init__(self, trace: Trace, launcher: Any, args: Sequence[Any], grid: Any, kwargs: Mapping[str, Any]) -> None:
        self.launcher, self.grid = launcher, grid
        self.kernel = launcher
        while not is_jit_function(self.kernel):
            self.kernel = self.kernel.fn
        self.own = defined(self.kernel)
        super().__init__(trace, self.own.tree.name, f"{self.own.file}:{self.own.line}")
        self.signature = inspect.signature(self.own.function)
        # A kernel may have a parameter that is called like an option, and gets it too.
        names = set(_OPTIONS) - self.signature.parameters.keys()
        self.values = self._bound(args, {name: value for name, value in kwargs.items() if name not in names})
        self.options = {name: kwargs[name] for name in _OPTIONS if kwargs.get(name) is not None}

    # ----------------------------------------------------------------------------------------------- arguments

    def _bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments by their names, without those that the kernel has defaults for."""
        known = self.signature.parameters
        unknown = [name for name in kwargs if name not in known]
        if unknown:
            raise self.wrong(f"it has no parameter {unknown[0]}; its parameters are {', '.join(known)}")
        try:
            return dict(self.signature.bind_partial(*args, **kwargs).arguments)
        except TypeError as error:
            raise self.wrong(str(error)) from None

    def _ways(self) -> list[_Way]:
        """Returns the ways to launch the kernel: those of its autotuner, with the constants of its heuristics."""
        ways = [_Way({}, {})]
        layer = self.launcher
        while layer is not self.kernel:
            if hasattr(layer, "configs"):
                ways = [w for way in ways for w in self._tuned(layer, way)]
            elif hasattr(layer, "values"):
                for way in ways:
                    for name, heuristic in layer.values.items():
                        way.constants[name] = heuristic({**self.values, **way.constants})
            else:
                raise self.refused(f"it is under {type(layer).__name__}", "launch the function under @triton.jit")
            layer = layer.fn
        return ways

    def _tuned(self, tuner: Any, way: _Way) -> Iterator[_Way]:
        configs = list(tuner.configs)
        if tuner.early_config_prune is not None and len(configs) > 1:
            configs = list(tuner.early_config_prune(configs, dict(self.values), **way.constants))
        hooks = {config.pre_hook for config in configs}
        if len(hooks) > 1:
            raise self.refused("its configurations have different hooks", "give all of them the same pre_hook, or none")
        for hook in hooks - {None}:
            with torch._C._EnableTorchFunction():
                hook({**self.values, **configs[0].kwargs})
        for config in configs:
            twice = sorted(config.kwargs.keys() & self.values.keys())
            if twice:
                raise self.wrong(f"{twice[0]} is given, and its autotuner chooses it")
            options = {name: getattr(config, name, None) for name in _OPTIONS}
            options = {name: number for name, number in options.items() if number is not None}
            known = {name: number for name, number in options.items() if name in self.signature.parameters}
            yield _Way({**way.constants, **config.kwargs, **known}, {**way.options, **options})

    def _is_constant(self, parameter: inspect.Parameter) -> bool:
        return "constexpr" in str(getattr(parameter.annotation, "__name__", parameter.annotation))

    # --------------------------------------------------------------------------------------------------- nodes

    def trace(self) -> None:
        """Gives each tensor that the kernel writes its new value."""
        if self.grid is None:
            raise self.wrong(f"it has no grid; write {self.name}[grid](...)")
        ways = self._ways()
        helpers: dict[int, str] = {}
        functions = [v for v in self.values.values() if is_jit_function(v)]

        def name_helpers(add: Callable[[Any], str]) -> None:
            helpers.update((id(function), add(function)) for function in functions)

        entry, text = module_of(self.kernel, name_helpers)
        parameters = [self._parameter(parameter, ways, helpers) for parameter in self.signature.parameters.values()]
        tensors = {name: value for name, how, value in parameters if how == TENSOR}
        written = sorted({tensors[name] for name in accesses(self.kernel).written if name in tensors})
        chosen = {name for name, how, _ in parameters if how == CONFIG}
        configs = [self._config(way, chosen, number) for number, way in enumerate(ways)]
        self.emit(KernelText("triton", entry, text), parameters, configs, written, tensors)

    def _parameter(
        self, parameter: inspect.Parameter, ways: Sequence[_Way], helpers: Mapping[int, str]
    ) -> tuple[str, str, Any]:
        """Returns name of a parameter, how it is passed, and what."""
        name = parameter.name
        if any(name in way.constants for way in ways):
            missing = next((way for way in ways if name not in way.constants), None)
            if missing is not None:
                raise self.wrong(f"a configuration of its autotuner has no {name}")
            return name, CONFIG, None
        value = self.values.get(name, parameter.default)
        if value is inspect.Parameter.empty:
            raise self.wrong(f"the argument {name} is missing")
        if isinstance(value, torch.Tensor) or type(value).__name__ == "TensorProxy":
            if self._is_constant(parameter):
                raise self.wrong(f"{name} is a constant of the kernel (tl.constexpr), and a tensor is given")
            return name, TENSOR, self.operand(name, value)
        if is_jit_function(value):
            return name, CONSTANT, helpers[id(value)]
        if isinstance(value, str) and not self._is_constant(parameter):
            raise self.wrong(f"{name} is the string {value!r}; declare it as {name}: tl.constexpr, or pass a number")
        if self._is_constant(parameter) or value is None or isinstance(unwrap(value), bool):
            return name, CONSTANT, self._constant(name, value)
        expr = unwrap(value)
        kind = symbols.kind_of(expr)
        if kind == "bool":
            return name, CONSTANT, repr(bool(value))
        if kind not in ("int", "float"):
            text = constant(value)
            if text is None:
                raise self.wrong(f"{name} is a {type(value).__name__}; a kernel takes tensors, numbers and constants")
            return name, CONSTANT, text
        if kind == "float":
            return name, FLOAT, expr
        unspecialized = getattr(self.kernel, "do_not_specialize", None) or getattr(self.kernel, "kwargs", {}).get(
            "do_not_specialize"
        )
        position = list(self.signature.parameters).index(name)
        is_plain = name in (unspecialized or ()) or position in (unspecialized or ())
        return name, UNSPECIALIZED if is_plain else INT, expr

    def _constant(self, name: str, value: Any) -> str:
        """Returns the text of a constant; a symbolic number is that of this call, which becomes a guard."""
        if isinstance(value, SymbolicNumber):
            value = self.trace_.guards.value(value.expr)
        text = constant(value)
        if text is None:
            raise self.wrong(
                f"the constant {name} is a {type(value).__name__}; it may be a number, a string, None, a dtype of "
                "triton.language, or a function under @triton.jit"
            )
        return text

    def _config(self, way: _Way, chosen: set[str], number: int) -> tuple[Any, ...]:
        constants = tuple((name, self._constant(name, way.constants[name])) for name in sorted(chosen))
        options = {**way.options, **self.options}
        options = {name: self.trace_.guards.value(unwrap(number)) for name, number in options.items()}
        for name, number in options.items():
            if not isinstance(number, int):
                raise self.wrong(f"{name} is {number!r}, which is no integer")
        return constants, tuple(sorted(options.items())), self._grid(way, number)

    def _grid(self, way: _Way, number: int) -> tuple[Any, Any, Any]:
        """Returns the grid of configuration ``number`` in three dimensions."""
        grid = self.grid
        if isinstance(grid, list):  # one for each configuration, or one for all
            grid = grid[number] if len(grid) > 1 else grid[0]
        if callable(grid):
            defaults = {
                name: parameter.default
                for name, parameter in self.signature.parameters.items()
                if parameter.default is not inspect.Parameter.empty
            }
            with torch._C._EnableTorchFunction():
                grid = grid({**defaults, **self.values, **way.constants, **way.options, **self.options})
        return self.sizes(grid, "grid")
