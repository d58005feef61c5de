"""Connects jitgen to torch.compile, both ways.

::

    torch.compile(f)                          a decorated function within it is an operator           region.py
    torch.compile(model, backend="jitgen")    the model's graph is cut into programs of kernels       backend.py
        Dynamo's graph -> segments            what has rows, and what stays with torch, by layer      cut.py
        fake storages of values               what is new, and what a view, which torch makes         aliasing.py
        segment -> Program                    a decorated function; equal layers share one            program.py
        report                                shares of nodes, FLOPs and time in generated kernels    report.py

Torch finds the backend by its entry point. Where jitgen is on the path and not installed, ``import
jitgen.dynamo.registration`` registers it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

Function = TypeVar("Function", bound=Callable[..., Any])


def run_as_it_is(function: Function) -> Function:
    """Returns ``function``, of whose frames, and those of what it calls, Dynamo compiles none. Where it traces a
    caller, it follows the function as any other."""
    code: Any = function.__code__
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, skip))
    return function
