"""torch's modes and the generators of random numbers, which a traced function may read or set.

A mode that the function reads is guarded: each call compares it with what it was. Setting one, seeding and drawing
would happen at the trace alone and are refused: where the user's code names such a function (``refusal``), and where
the trace leaves other modes behind (``kept``).
"""

from __future__ import annotations

import os
import random
import secrets
import sys
import types
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from jitgen.errors import TraceError
from jitgen.trace import autocast

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_BEFORE = "call it before the decorated function"
RANDOM = "draws a random number", "draw it before the call, and pass it as an argument"
_SEEDS = "seeds random numbers", _BEFORE
_STATES = "reads or sets the state of random numbers", _BEFORE
_SETS = "sets a mode of torch", _BEFORE


def _backend_flags() -> tuple[Any, ...]:
    """The settings of ``torch.backends`` that user code reads as attributes."""
    backends = torch.backends
    flags = [backends.cuda.flash_sdp_enabled(), backends.cuda.mem_efficient_sdp_enabled()]
    flags += [backends.cuda.math_sdp_enabled(), backends.cuda.cudnn_sdp_enabled(), backends.cuda.matmul.allow_tf32]
    cudnn = backends.cudnn
    flags += [cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32]
    return (*flags, backends.mkldnn.enabled, torch.get_float32_matmul_precision())


_READ: dict[str, Callable[[], Any]] = {
    name: getattr(torch, name)
    for name in (
        *("is_grad_enabled", "is_inference_mode_enabled", "get_default_dtype", "get_default_device"),
        *("are_deterministic_algorithms_enabled", "is_deterministic_algorithms_warn_only_enabled"),
        *("get_deterministic_debug_mode", "get_float32_matmul_precision", "get_num_threads", "is_anomaly_enabled"),
        *("is_anomaly_check_nan_enabled", "is_warn_always_enabled", "initial_seed", "is_autocast_cache_enabled"),
    )
}
_AUTOCAST = "is_autocast_enabled", "get_autocast_dtype", "get_autocast_gpu_dtype", "get_autocast_cpu_dtype"
_READ |= dict.fromkeys((*_AUTOCAST, "is_autocast_cpu_enabled"), autocast.settings)
_READ |= dict.fromkeys(
    ("backends", "flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled"),
    _backend_flags,
)
"""Names by which user code reads modes, and what reads the same."""


def read_by(names: frozenset[str]) -> list[tuple[str, Callable[[], Any]]]:
    """The modes that code with ``names`` reads: the name of each, and the function that reads it."""
    return [(name, _READ[name]) for name in sorted(names & _READ.keys())]


def reader(function: Any) -> Callable[[], Any] | None:
    """What reads the mode that ``function``, one of torch's, returns; None where it returns none."""
    return next((read for name, read in _READ.items() if getattr(torch, name, None) is function), None)


@cache
def _functions() -> dict[Any, tuple[str, str]]:
    found: dict[Any, tuple[str, str]] = {}
    for owner in (torch, torch.random, torch.cuda, torch.cuda.random):
        for name, why in (
            *((name, _SEEDS) for name in ("manual_seed", "manual_seed_all", "seed", "seed_all")),
            *((name, _STATES) for name in ("get_rng_state", "set_rng_state", "get_rng_state_all", "set_rng_state_all")),
        ):
            if hasattr(owner, name):
                found[getattr(owner, name)] = why
    for name in (
        *("set_default_dtype", "set_default_device", "set_default_tensor_type", "set_float32_matmul_precision"),
        *("use_deterministic_algorithms", "set_deterministic_debug_mode", "set_num_threads", "set_num_interop_threads"),
        *("set_flush_denormal", "set_warn_always", "set_autocast_enabled", "set_autocast_dtype"),
        *("set_autocast_cache_enabled", "set_anomaly_enabled"),
    ):
        if hasattr(torch, name):
            found[getattr(torch, name)] = _SETS
    found |= dict.fromkeys((os.urandom, uuid.uuid1, uuid.uuid4, *map(vars(secrets).get, secrets.__all__)), RANDOM)
    return found


def refusal(value: Any) -> tuple[str, str] | None:
    """(what is wrong, what to do) of a function that seeds, draws, or sets a mode; None of any other value."""
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
def kept(name: str) -> Iterator[None]:
    """A context after which the modes of this thread are what they were before it.

    Raises:
        TraceError: they were not, and nothing else was raised.
    """
    grad, cast = torch.is_grad_enabled(), autocast.settings()
    try:
        yield
        changed = "grad mode" if torch.is_grad_enabled() != grad else "state of autocast"
        if torch.is_grad_enabled() != grad or autocast.settings() != cast:
            raise TraceError(
                f"{name} leaves another {changed} behind: later calls launch kernels without running the function, and "
                "would not\n  set it in a context (with torch.no_grad():), or outside of the decorated function"
            )
    finally:
        torch._C._set_grad_enabled(grad)
