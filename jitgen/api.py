"""Defines ``jit``, the decorator.

Everything public is exported by ``jitgen/__init__.py``; what a decorated function does is ``call/function.py``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

import torch

from jitgen import settings
from jitgen.call import eager_linear, linear_operator, traced_call
from jitgen.call.eager_linear import quantized_linear
from jitgen.call.function import JitFunction
from jitgen.compilers import routes
from jitgen.deploy import record
from jitgen.dynamo import stand_ins
from jitgen.errors import UnsupportedError
from jitgen.frames import followed_as

__all__ = ["JitFunction", "jit", "linear_operator", "quantized_linear", "traced_call"]

eager_linear.register()
record.listen()
followed_as(stand_ins.call)(JitFunction.__call__)
followed_as(stand_ins.look_up)(JitFunction.__get__)
if "torch._dynamo.backends.registry" in sys.modules:  # else torch finds the backend by its entry point
    importlib.import_module("jitgen.dynamo.registration")


P = ParamSpec("P")
R = TypeVar("R")
Owner = TypeVar("Owner", contravariant=True)
Result = TypeVar("Result", covariant=True)


class Method(Protocol[Owner, P, Result]):
    """Describes, for type checkers, a function whose first parameter is called ``self``."""

    def __call__(_, self: Owner, *args: P.args, **kwargs: P.kwargs) -> Result: ...


class Decorator(Protocol):
    """Describes, for type checkers, what ``jit(...)`` returns: it takes a function and keeps its signature.

    They take a method of a module for a plain function, since ``JitFunction`` is no method that may override another.
    """

    @overload
    def __call__(self, function: torch.nn.Module) -> JitFunction[..., Any]: ...
    @overload
    def __call__(self, function: Method[Owner, P, R]) -> Callable[Concatenate[Owner, P], R]: ...
    @overload
    def __call__(self, function: Callable[P, R]) -> JitFunction[P, R]: ...


@overload
def jit(function: torch.nn.Module) -> JitFunction[..., Any]: ...
@overload
def jit(function: Method[Owner, P, R]) -> Callable[Concatenate[Owner, P], R]: ...
@overload
def jit(function: Callable[P, R]) -> JitFunction[P, R]: ...
@overload
def jit(
    *, backend: str | None = None, compiler: str | None = None, batch_invariant: bool | None = None
) -> Decorator: ...
def jit(
    function: Any = None,
    *,
    backend: str | None = None,
    compiler: str | None = None,
    batch_invariant: bool | None = None,
) -> Any:
    """Makes calls of a plain PyTorch function run generated, compiled, cached kernels.

    Args:
        function: the function, method, lambda or module; omitted when options are given. Of a static or class method
            the function is decorated, so that the decorators may be in either order.
        backend: ``"auto"`` (CUDA tensors: ``cuda``; CPU tensors: ``cpp``), ``"cuda"``, ``"triton"``, ``"cpp"`` or
            ``"cutlass"``, for products on sm_90a; the default is ``JITGEN_BACKEND``.
        compiler: another route to the same kernel: ``"load_inline"`` builds ``cpp`` and ``cuda`` sources as torch
            operators through ``torch.utils.cpp_extension``.
        batch_invariant: whether the bits of a row's result must not depend on how many rows come with it: kernels are
            then chosen as for ``device.INVARIANT_ROWS`` rows. The default is ``JITGEN_BATCH_INVARIANT``.

    Returns:
        a ``JitFunction``.

    Raises:
        UnsupportedError: no such backend, or no such compiler for it.
    """
    if backend is not None and backend not in settings.BACKENDS:
        raise UnsupportedError(f"unknown backend {backend!r}; expected one of {', '.join(settings.BACKENDS)}")
    if compiler is not None:
        if backend in (None, "auto"):
            raise UnsupportedError(f"compiler={compiler!r} needs a backend: it is one of a backend's compilers")
        if (backend, compiler) not in routes.ROUTES:
            names = [name for owner, name in routes.ROUTES if owner == backend]
            raise UnsupportedError(f"backend {backend!r} has no compiler {compiler!r}; it has {', '.join(names)}")

    def decorate(function: Any) -> Any:
        if isinstance(function, (staticmethod, classmethod)):
            return type(function)(decorate(function.__func__))
        if isinstance(function, property):
            raise TypeError("jit decorates functions, not property; write @property above @jit")
        if isinstance(function, JitFunction):
            function = function.function
        name = None
        if isinstance(function, torch.nn.Module):
            function, name = function.__call__, type(function).__name__
        if not callable(function):
            raise TypeError(f"jit decorates functions, not {type(function).__name__}")
        return JitFunction(function, backend, compiler, name, batch_invariant)

    return decorate if function is None else decorate(function)
