"""torch.compile's work of many cases in processes of their own, ahead of the measuring one.

What they compile goes into Inductor's cache on disk, where the measuring process finds it, as its graphs are the same.
They compile for tensors without memory and run nothing, so that as many fit beside each other as there are cores.

Inductor's keys hold the first module in which pickle finds ``torch``, and the number of threads: both must be alike. A
script that imports torch at its top, which these processes import too, spoils the first; the command does not.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from jitgen.bench.measurement import Bench
from jitgen.bench.streaming import Case, compiled, one_set


def compile_ahead(cases: Iterable[Case], bench: Bench, jobs: int) -> None:
    """Compile the peers of ``cases``, which must survive pickling, in ``jobs`` processes.

    What fails here is left to the measuring process, which compiles it again and tells why.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_prepare) as pool:
        for case in cases:
            for dtype in case.dtypes:
                pool.submit(compile_one, case, dtype, bench).add_done_callback(_tell)


def compile_one(case: Case, dtype: torch.dtype, bench: Bench) -> None:
    with FakeTensorMode():
        inputs, outs = one_set(case, dtype, bench)
        compiled(case.function, [inputs], [outs], backend=_without_running)


def _without_running(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    compile_fx(graph, inputs)
    return lambda *_: ()  # everything is written into arguments


def _prepare() -> None:
    """These processes are the parallel ones; Inductor would start a pool of its own in each."""
    import torch._inductor.config as config

    config.compile_threads = 1


def _tell(done: Any) -> None:
    if done.exception() is not None:
        print(f"torch.compile, ahead: {type(done.exception()).__name__}", file=sys.stderr)
