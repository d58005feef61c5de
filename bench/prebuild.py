"""Building the kernels of many cases in parallel processes, before the measuring process needs them.

They go into the store, where the measuring process finds them. A build takes functions and specs, as a prewarm does, so
that these processes need neither tensors nor a device. Neighbour: ``ahead.py``, which does the same for torch.compile.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from typing import Any

import jitgen


@dataclass(frozen=True)
class Build:
    """One call to build.

    Attributes:
        function: plain torch, which another process can import.
        specs: its arguments, as ``jitgen.TensorSpec``.
        backend, target: as ``JitFunction.lower`` takes them.
    """

    function: Callable[..., Any]
    specs: tuple[Any, ...]
    backend: str
    target: str


def gpu_target() -> str:
    """The target of this machine's GPU."""
    from jitgen.runtime import cuda

    return str(cuda.target_of(0))


def prebuild(builds: Iterable[Build], jobs: int | None = None) -> None:
    """Build all of ``builds`` in ``jobs`` processes, by default one for each core. Where one fails, the measuring
    process builds it again, and reports the reason. The processes are forks of one that has imported torch and has no
    device."""
    distinct = tuple(dict.fromkeys(builds))
    jobs = min(jobs or len(os.sched_getaffinity(0)), len(distinct))
    if jobs < 2:
        return
    with ProcessPoolExecutor(jobs, mp_context=importing(*{build.function.__module__ for build in distinct})) as pool:
        for failure in pool.map(_failure, distinct):
            if failure:
                print(failure, file=sys.stderr)


def importing(*modules: str) -> BaseContext:
    """A context whose processes are forks of one that has imported these modules and has no device."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *modules])
    return context


def compile_each(compiled: Callable[..., str], jobs: Sequence[tuple[Any, ...]]) -> None:
    """Call ``compiled`` with the arguments of each of ``jobs``, in a process for each core; it returns what went wrong,
    or nothing, and that is printed."""
    with compiling(compiled, {"": jobs}) as wait_for:
        wait_for("")


class Compiled:
    """What is being compiled for groups of jobs.

    Attributes:
        groups: the jobs of each group.
        futures: what each of them will return: what went wrong, or nothing.
    """

    def __init__(self, groups: Mapping[Any, Sequence[tuple[Any, ...]]], futures: Mapping[Any, Sequence[Future[str]]]):
        self.groups = groups
        self.futures = futures

    def __call__(self, group: Any) -> bool:
        """Waits for the jobs of one group, and returns whether nothing went wrong."""
        failures = [future.result() for future in self.futures[group]]
        for job, failure in zip(self.groups[group], failures, strict=True):
            if failure:
                print("not compiled", job, failure, flush=True)
        return not any(failures)

    def ready(self, group: Any) -> bool:
        """Whether the jobs of one group are done."""
        return all(future.done() for future in self.futures[group])


@contextmanager
def compiling(
    compiled: Callable[..., str],
    groups: Mapping[Any, Sequence[tuple[Any, ...]]],
    context: BaseContext | None = None,
    processes: int | None = None,
) -> Iterator[Compiled]:
    """Calls ``compiled`` as ``compile_each`` does, for several groups of jobs, so that what needs one group may begin
    before the others are done. There are as many ``processes`` as cores by default. They are forks of this one, which
    may not have a device yet, unless ``context`` says otherwise."""
    with ProcessPoolExecutor(processes or len(os.sched_getaffinity(0)), mp_context=context) as pool:
        futures = {group: [pool.submit(compiled, *job) for job in jobs] for group, jobs in groups.items()}
        try:
            yield Compiled(groups, futures)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _failure(build: Build) -> str:
    """Build one; why it failed, or nothing."""
    try:
        jitgen.jit(backend=build.backend)(build.function).lower(*build.specs, target=build.target).compile()
    except Exception as error:  # the measuring process meets it again
        return f"ahead of {build.specs}: {type(error).__name__}: {str(error)[:200]}"
    return ""
