"""Guards torch's modes and the generators of random numbers, which a traced function may read or set.

A mode that the function reads is guarded: each call compares it with what it was. Setting one, seeding and drawing
would happen at the trace alone and are refused: where the user's code names such a function (``refusal``), and where
the trace leaves other modes behind (``kept``). ``as_now`` keeps them for a trace that is made later.
"""

from __future__ import annotations

import contextvars
import os
import random
import secrets
import sys
import types
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar

import torch

from jitgen.errors import TraceError
from jitgen.trace import autocast
from jitgen.trace.guards import float32_matmul_precision

Result = TypeVar("Result")

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_BEFORE = "call it before the decorated function"
RANDOM = "draws a random number", "draw it before the call, and pass it as an argument"
_SEEDS = "seeds random numbers", _BEFORE
_STATES = "reads or sets the state of random numbers", _BEFORE
_SETS = "sets a mode of torch", _BEFORE


_UNKNOWN = "unknown"
"""The value of a setting that torch refuses to read."""


_PRECISIONS = frozenset({"allow_tf32", "set_float32_matmul_precision", "fp32_precision"})
"""Names of one setting: torch sets all where one is set."""


@dataclass(frozen=True)
class Setting:
    """Describes a setting that a function may change for all that runs after it.

    Attributes:
        path: of the attribute, or of the function that sets it.
    """

    path: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]


def _has(owner: Any, name: str) -> bool:
    try:
        return hasattr(owner, name)
    except RuntimeError:
        return True


def _attribute(owner: Any, path: str, name: str) -> Setting:
    def read() -> Any:
        try:
            return getattr(owner, name)
        except RuntimeError:  # torch has no answer, where fp32_precision and the older settings are mixed
            return _UNKNOWN

    return Setting(f"{path}.{name}", read, lambda value: setattr(owner, name, value))


def _backend_settings() -> list[Setting]:
    backends = torch.backends
    cuda, matmul = backends.cuda, backends.cuda.matmul
    reduced = "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"
    owners: list[tuple[Any, str, Sequence[str]]] = [
        (matmul, "torch.backends.cuda.matmul", ("allow_tf32", *reduced, "allow_fp16_accumulation")),
        (backends.cudnn, "torch.backends.cudnn", ("enabled", "benchmark", "deterministic", "allow_tf32")),
        (backends.mkldnn, "torch.backends.mkldnn", ("enabled",)),
        (backends.opt_einsum, "torch.backends.opt_einsum", ("enabled", "strategy")),
    ]
    precisions = (backends, "torch.backends"), (matmul, "torch.backends.cuda.matmul")
    settings = [_attribute(owner, path, name) for owner, path, names in owners for name in names if _has(owner, name)]
    return [
        *settings,
        Setting("torch.backends.cuda.enable_flash_sdp", cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
        Setting(
            "torch.backends.cuda.enable_mem_efficient_sdp",
            cuda.mem_efficient_sdp_enabled,
            cuda.enable_mem_efficient_sdp,
        ),
        Setting("torch.backends.cuda.enable_math_sdp", cuda.math_sdp_enabled, cuda.enable_math_sdp),
        Setting("torch.backends.cuda.enable_cudnn_sdp", cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
        Setting(
            "torch.backends.mha.set_fastpath_enabled",
            backends.mha.get_fastpath_enabled,
            backends.mha.set_fastpath_enabled,
        ),
        Setting("torch.set_float32_matmul_precision", float32_matmul_precision, torch.set_float32_matmul_precision),
        *(_attribute(owner, path, "fp32_precision") for owner, path in precisions if _has(owner, "fp32_precision")),
    ]


_BACKENDS = _backend_settings()


def _settings() -> list[Setting]:
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return _BACKENDS
    return [*_BACKENDS, Setting("numpy.seterr", numpy.geterr, lambda value: numpy.seterr(**value))]


def flags() -> tuple[Any, ...]:
    """Returns the settings of ``torch.backends``."""
    return tuple(setting.read() for setting in _BACKENDS)


def is_backend(value: Any) -> bool:
    """Returns whether ``value`` is one of the objects of ``torch.backends`` whose attributes are settings."""
    owner = value.__name__ if isinstance(value, types.ModuleType) else type(value).__module__
    return isinstance(owner, str) and owner.startswith("torch.backends")


def _numpy_errors() -> Any:
    numpy: Any = sys.modules.get("numpy")
    return None if numpy is None else numpy.geterr()


_READ: dict[str, Callable[[], Any]] = {
    name: getattr(torch, name)
    for name in (
        *("is_grad_enabled", "is_inference_mode_enabled", "get_default_dtype", "get_default_device"),
        *("are_deterministic_algorithms_enabled", "is_deterministic_algorithms_warn_only_enabled"),
        *("get_deterministic_debug_mode", "get_num_threads", "is_anomaly_enabled"),
        *("is_anomaly_check_nan_enabled", "is_warn_always_enabled", "initial_seed", "is_autocast_cache_enabled"),
    )
}
_AUTOCAST = "is_autocast_enabled", "get_autocast_dtype", "get_autocast_gpu_dtype", "get_autocast_cpu_dtype"
_READ["get_float32_matmul_precision"] = float32_matmul_precision
_READ |= dict.fromkeys((*_AUTOCAST, "is_autocast_cpu_enabled"), autocast.settings)
_READ |= dict.fromkeys(
    ("backends", "flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled"), flags
)
_READ["geterr"] = _numpy_errors
"""Names by which user code reads modes, and what reads the same."""


def read_by(names: frozenset[str]) -> list[tuple[str, Callable[[], Any]]]:
    """Returns the modes that code with ``names`` reads: the name of each, and the function that reads it."""
    return [(name, _READ[name]) for name in sorted(names & _READ.keys())]


def reader(function: Any) -> Callable[[], Any] | None:
    """Returns the function that reads the mode that ``function``, one of torch's, returns; None if it returns none."""
    return next((read for name, read in _READ.items() if getattr(torch, name, None) is function), None)


@cache
def _functions() -> dict[Any, tuple[str, str]]:
    functions: dict[Any, tuple[str, str]] = {}
    for owner in (torch, torch.random, torch.cuda, torch.cuda.random):
        for name, why in (
            *((name, _SEEDS) for name in ("manual_seed", "manual_seed_all", "seed", "seed_all")),
            *((name, _STATES) for name in ("get_rng_state", "set_rng_state", "get_rng_state_all", "set_rng_state_all")),
            ("fork_rng", _STATES),
        ):
            if hasattr(owner, name):
                functions[getattr(owner, name)] = why
    for name in (
        *("set_default_dtype", "set_default_device", "set_default_tensor_type", "set_float32_matmul_precision"),
        *("use_deterministic_algorithms", "set_deterministic_debug_mode", "set_num_threads", "set_num_interop_threads"),
        *("set_flush_denormal", "set_warn_always", "set_autocast_enabled", "set_autocast_dtype"),
        *("set_autocast_cache_enabled", "set_anomaly_enabled"),
    ):
        if hasattr(torch, name):
            functions[getattr(torch, name)] = _SETS
    functions |= dict.fromkeys((os.urandom, uuid.uuid1, uuid.uuid4, *map(vars(secrets).get, secrets.__all__)), RANDOM)
    return functions


def refusal(value: Any) -> tuple[str, str] | None:
    """Explains why a function that seeds, draws, or sets a mode is refused: (what is wrong, what to do); None for other
    values."""
    if isinstance(value, random.Random):
        return RANDOM
    numpy_random: Any = sys.modules.get("numpy.random")
    numpys: tuple[type, ...] = ()
    if numpy_random is not None:
        numpys = numpy_random.RandomState, numpy_random.Generator, numpy_random.BitGenerator
    if isinstance(value, numpys):
        return RANDOM
    if not isinstance(value, _FUNCTIONS) and type(value).__name__ != "cython_function_or_method":
        return None
    owner, name = getattr(value, "__self__", None), value.__name__
    if isinstance(owner, (random.Random, *numpys)):
        return _seeding(name)
    if numpy_random is not None and name in numpy_random.__all__ and value is getattr(numpy_random, name):
        return _seeding(name)
    return _functions().get(value) or _functions().get(getattr(value, "__wrapped__", None))  # as Dynamo wraps some


def _seeding(name: str) -> tuple[str, str]:
    if name == "seed":
        return _SEEDS
    return _STATES if name.endswith("state") and name[:3] in ("get", "set") else RANDOM


@contextmanager
def kept(name: str, mentioned: Collection[str]) -> Iterator[None]:
    """Restores the modes of this thread, and settings of all threads, at the end of this context.

    Args:
        mentioned: names in the user's code; other settings than it names are those of other threads.

    Raises:
        TraceError: they were not, and nothing else was raised.
    """
    grad, cast = torch.is_grad_enabled(), autocast.settings()
    by_any_name = "setattr" in mentioned
    names = frozenset(mentioned) if _PRECISIONS.isdisjoint(mentioned) else _PRECISIONS.union(mentioned)
    named = [item for item in _settings() if by_any_name or item.path.rpartition(".")[2] in names]
    before = [(setting, setting.read()) for setting in named]
    try:
        yield
        changed = "grad mode" if torch.is_grad_enabled() != grad else "state of autocast"
        if torch.is_grad_enabled() != grad or autocast.settings() != cast:
            raise TraceError(
                f"{name} leaves another {changed} behind: later calls launch kernels without running the function, and "
                "would not\n  set it in a context (with torch.no_grad():), or outside of the decorated function"
            )
        paths = [setting.path for setting, value in before if setting.read() != value]
        if paths:
            path = next((path for path in paths if path.rpartition(".")[2] in mentioned), paths[0])
            raise TraceError(
                f"{name} changes {path}: later calls launch kernels without running the function, and would not\n"
                "  set it before the decorated function is called"
            )
    finally:
        _set(before)
        torch._C._set_grad_enabled(grad)


def _set(values: Iterable[tuple[Setting, Any]]) -> None:
    """Gives settings these values, and writes none that has its value already."""
    for setting, value in values:
        if setting.read() != value and value != _UNKNOWN:
            setting.write(value)


def _autocast(device: str) -> list[Setting]:
    return [
        Setting(f"autocast on {device}", partial(read, device), partial(write, device))
        for read, write in (
            (torch.is_autocast_enabled, torch.set_autocast_enabled),
            (torch.get_autocast_dtype, torch.set_autocast_dtype),
        )
    ]


_MODES = [
    *(*_autocast("cpu"), *_autocast("cuda")),
    Setting("torch.set_autocast_cache_enabled", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    Setting("torch.set_grad_enabled", torch.is_grad_enabled, torch._C._set_grad_enabled),
    Setting("torch.set_default_dtype", torch.get_default_dtype, torch.set_default_dtype),
    Setting(
        "torch.set_deterministic_debug_mode", torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode
    ),
]
"""What keys, guards and traces follow beside the settings of ``torch.backends``."""


def as_now(function: Callable[[], Result]) -> Callable[[], Result]:
    """Returns a function that calls ``function`` in the modes, settings and context variables of now, and on the
    devices of now; afterwards they are as they were."""
    modes = [*_MODES, *_settings()]
    values = [(mode, mode.read()) for mode in modes]
    inference, default_device = torch.is_inference_mode_enabled(), torch.get_default_device()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def called() -> Result:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference))  # sets the mode of gradients too
            if device is not None:
                stack.enter_context(torch.cuda.device(device))
            if default_device != torch.get_default_device():
                stack.enter_context(default_device)
            stack.callback(_set, [(mode, mode.read()) for mode in modes])
            torch.autocast_increment_nesting()
            stack.callback(_leave_autocast)
            _set(values)
            return function()

    return partial(contextvars.copy_context().run, called)


def _leave_autocast() -> None:
    """Drops converted weights where no context of autocast is left, as the end of such a context does."""
    if torch.autocast_decrement_nesting() == 0:
        torch.clear_autocast_cache()
