"""Functions that torch.compile leaves alone: a decorated function runs its own kernels within a compiled one too.

Dynamo would follow a call into jitgen's look-ups, and on a cold call into the tracer, which it does not understand.
It ends its graph before a function that is marked here, runs it, and goes on behind it (a "graph break"). With
``fullgraph=True`` it says so in an error that has ``REASON``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

Function = TypeVar("Function", bound=Callable[..., Any])

REASON = "it is decorated with jitgen.jit, whose kernels run between the graphs of torch.compile"


def opaque(function: Function) -> Function:
    """``function``, which Dynamo neither follows nor, with all that it calls, compiles.

    ``torch.compiler.disable`` says the same with a wrapper, which takes time at every call, and imports Dynamo.
    """
    marks: Any = function
    marks._torchdynamo_disable, marks._torchdynamo_disable_msg = True, REASON
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(marks.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function
