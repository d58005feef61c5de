"""Keeps Dynamo out of frames of jitgen: calls of decorated functions, and what a quantised weight does in torch.

Dynamo would follow a call into jitgen's look-ups, and on a cold call into the tracer, which it does not understand. So
it is led elsewhere: where it traces, a function that is ``followed_as`` another is that other one
(``jitgen/dynamo/stand_ins.py``). What is ``opaque`` is neither followed nor compiled: Dynamo ends its graph before it,
runs it, and goes on behind it (a "graph break"). With ``fullgraph=True`` it says so in an error that has ``REASON``.
What is ``run_as_it_is`` is followed, but not compiled where Python runs it between two graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

REASON = "it is decorated with jitgen.jit, whose kernels run between the graphs of torch.compile"

Function = TypeVar("Function", bound=Callable[..., Any])


def run_as_it_is(function: Function) -> Function:
    """Returns ``function``, of whose frames, and those of what it calls, Dynamo compiles none. Where it traces a
    caller, it follows the function as any other."""
    code: Any = function.__code__
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, skip))
    return function


def opaque(function: Function) -> Function:
    """Returns ``function`` marked so that Dynamo neither follows it nor compiles what it calls.

    ``torch.compiler.disable`` says the same with a wrapper, which takes time at every call, and imports Dynamo.
    """
    marks: Any = function
    marks._torchdynamo_disable, marks._torchdynamo_disable_msg = True, REASON
    return run_as_it_is(function)


def followed_as(stand_in: Callable[..., Any]) -> Callable[[Function], Function]:
    """Makes Dynamo follow a function into ``stand_in`` where it traces. Where it does not, the function, and what it
    calls, runs as it is."""

    def mark(function: Function) -> Function:
        marks: Any = function
        marks._torchdynamo_inline = stand_in
        return run_as_it_is(function)

    return mark
