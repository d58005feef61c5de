"""Imports functions of jitgen's own as graphs, such as those of Dynamo's graphs.

Such a function calls torch functions of its arguments and returns what they give. It reads nothing by name, changes no
object and keeps no tensor, so nothing is done here of what ``run.py`` does for a user's function: no names are
followed, no changes are looked for, no look-ups are reported. Each call is a row that makes nodes, as there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

from jitgen.errors import TraceError, UnsupportedError
from jitgen.trace.boundary import entered, graph_of, returned, settings_guards
from jitgen.trace.guards import tracing
from jitgen.trace.proxy import TensorProxy, proxies_are_tensors, untraceable
from jitgen.trace.request import TraceRequest
from jitgen.trace.traced import Traced
from jitgen.trace.tracer import InterceptFunctions, Trace

_in_progress: ContextVar[Trace | None] = ContextVar("in_progress", default=None)
"""The import in progress in this thread."""


def imported(function: Callable[..., Any], name: str, request: TraceRequest) -> Traced:
    """Imports ``function`` as a graph for one call.

    Raises:
        UnsupportedError: an argument is an object, which no import follows.
        JitgenError: what the row of a call raises.
    """
    if request.objects:
        what = f"{request.objects[0].path} is neither a tensor nor a number"
        raise UnsupportedError(f"{name}: {what}; pass the tensors and numbers of it as arguments")
    guards = request.guards
    trace = Trace(
        _captures_nothing, name, guards, request.device, request.layouts, differentiable=request.differentiable
    )
    guards.handed_out.clear()  # of the caller's own numbers
    args, kwargs = entered(trace, request.leaves, request.tree)
    tokens = tracing.set(guards), _in_progress.set(trace)
    try:
        with proxies_are_tensors(), InterceptFunctions(trace):
            result = function(*args, **kwargs)
    except (TypeError, RuntimeError) as error:
        why = untraceable(error)
        if why is None:
            raise
        raise TraceError(f"{name}: {why}") from error
    finally:
        tracing.reset(tokens[0])
        _in_progress.reset(tokens[1])
    output = returned(trace, result)
    captures = trace.captures
    traced = Traced(
        graph_of(trace, output.outputs),
        tuple(output.leaves),
        output.tree,
        (),
        (*captures.guards, *settings_guards(guards)),
        follows_arguments=captures.follows_arguments,
    )
    trace.forget_tensors()
    return traced


def further_input(tensor: torch.Tensor) -> TensorProxy:
    """Makes a proxy for a tensor that the function of the import in progress gets besides its arguments."""
    trace = _in_progress.get()
    assert trace is not None, "no import is in progress"
    with torch._C.DisableTorchFunction():
        return trace.input(tensor, len(trace.inputs))


def import_in_progress() -> Trace | None:
    """Returns the import in progress in this thread; None without one."""
    return _in_progress.get()


def effects() -> str | None:
    """Says what the import in progress has done so far besides computing; None if nothing."""
    trace = _in_progress.get()
    assert trace is not None, "no import is in progress"
    if trace.draws:
        return "draws random numbers"
    return "updates a tensor" if trace.new_values.by_input else None


def _captures_nothing() -> None:
    """Has no names to be followed."""
