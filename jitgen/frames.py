"""Keeps Dynamo from compiling frames of jitgen that Python runs between the graphs of torch.compile."""

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
