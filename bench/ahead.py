"""Compiling torch.compile's kernels of many cases in parallel processes, before the measuring process needs them.

The results go into Inductor's cache on disk. The measuring process finds them there, because its graphs are the same.
These processes compile for tensors without memory and run nothing, so that one for each core fits on a machine.

Inductor's keys contain the first module in which pickle finds ``torch``, and the number of threads; both must be the
same in all processes. The command ``jitgen bench`` takes care of that. A script that imports torch at its top does not,
because these processes import the script as well.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bench.measurement import Bench
from bench.streaming import Case, compiled, one_set


def compile_ahead(cases: Iterable[Case], bench: Bench, jobs: int) -> None:
    """Compile the torch.compile peers of ``cases``, which must be picklable, in ``jobs`` processes.

    If a compilation fails here, the measuring process compiles it again and reports the reason.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_prepare) as pool:
        for case in cases:
            for dtype in case.dtypes:
                pool.submit(compile_one, case, dtype, bench).add_done_callback(_report_failure)


def compile_one(case: Case, dtype: torch.dtype, bench: Bench) -> None:
    """Compile one peer for tensors without memory."""
    with FakeTensorMode():
        inputs, outs = one_set(case, dtype, bench)
        compiled(case.function, [inputs], [outs], backend=_without_running)


def _without_running(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    """A Dynamo backend that compiles ``graph`` as Inductor does and returns a function that does nothing."""
    from torch._inductor.compile_fx import compile_fx

    compile_fx(graph, inputs)
    return lambda *_: ()  # the function returns nothing: results are written to arguments


def _prepare() -> None:
    """Initialise a process: Inductor must not start a pool of its own in it."""
    import torch._inductor.config as config

    config.compile_threads = 1


def _report_failure(done: Any) -> None:
    if done.exception() is not None:
        print(f"torch.compile, ahead: {type(done.exception()).__name__}", file=sys.stderr)
