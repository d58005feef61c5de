"""Several sources are compiled at once: each once, wherever, and none is lost with a worker process."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

import jitgen
from jitgen import pipeline
from jitgen.compilers import bounds, together
from jitgen.compilers.together import Compiled
from jitgen.errors import CompileError
from jitgen.spec import Artifact, KernelSource, Target

REAL = together.compile_one


def sources(count: int, compiler: str) -> list[KernelSource]:
    language, target = {"host": ("cpp", "x86-64-v3"), "nvrtc": ("cuda", "sm_90a")}[compiler]
    return [KernelSource(f"k{index}", language, compiler, Target.parse(target), "") for index in range(count)]


def results(of: list[KernelSource]) -> list[str]:
    made = dict(together.compile_all(of))
    return [made[index].result.key for index in range(len(of))]  # type: ignore[union-attr]


def slow(source: KernelSource) -> Compiled:
    time.sleep(0.02)
    return Compiled(Artifact(f"{source.name} in {threading.get_ident()}", {}, ""), 0.02)


@pytest.fixture(autouse=True)
def processors(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(bounds, "processors", lambda: 4)
    monkeypatch.setattr(bounds, "available_bytes", lambda: 2**40)
    monkeypatch.setattr(together, "compile_one", slow)
    monkeypatch.setattr(together, "IDLE", 0.2)


@pytest.mark.parametrize(("count", "threads"), [(1, 1), (2, 2), (9, 4)])
def test_programs_that_compile_run_in_threads(count: int, threads: int) -> None:
    made = results(sources(count, "host"))
    assert [text.split()[0] for text in made] == [f"k{index}" for index in range(count)]
    assert len({text.split(" in ")[1] for text in made}) == threads
    with together.alone():
        assert len({text.split(" in ")[1] for text in results(sources(count, "host"))}) == 1


def test_what_a_thread_cannot_compile_is_compiled_by_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that is none of the kernel, such as a full disk, is the call's; nobody waits for the thread."""
    met = threading.Event()

    def full(source: KernelSource) -> Compiled:
        if threading.current_thread() is not threading.main_thread():
            met.set()
            raise OSError("no space left on device")
        assert met.wait(10)
        if source.name == "k2":
            raise OSError("still none")
        return slow(source)

    monkeypatch.setattr(together, "compile_one", full)
    assert [text.split()[0] for text in results(sources(2, "host"))] == ["k0", "k1"]
    with pytest.raises(OSError, match="still none"):
        results(sources(3, "host"))


class Pool:
    """Stands for worker processes: each takes ``start`` seconds until it answers, and some die."""

    start, dies = 0.0, False
    made = count = 0

    def __init__(self, count: int, bytes_each: int):
        type(self).made += 1
        type(self).count = count
        self.ended = False

    def submit(self, function: Any, *args: Any) -> Any:
        from concurrent.futures import Future

        future: Any = Future()

        def run() -> None:
            if not args:
                time.sleep(self.start)
            if args and self.dies:
                future.set_exception(RuntimeError("the worker process ended"))
            else:
                future.set_result(function(*args))

        threading.Thread(target=run).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.ended = True


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Any:
    from jitgen.compilers import workers

    kind = type("FreshPool", (Pool,), {})
    monkeypatch.setattr(workers, "WorkerProcesses", kind)
    yield kind
    deadline = time.monotonic() + 5
    while together._processes and time.monotonic() < deadline:
        time.sleep(0.05)
    assert together._processes == []  # they end when they have nothing to do


def test_worker_processes_serve_further_calls(pool: Any) -> None:
    few = sources(together.MANY - 1, "nvrtc")
    assert {text.split(" in ")[1] for text in results(few)} == {str(threading.get_ident())}
    assert pool.made == 0  # they would take longer to start
    names = {text.split(" in ")[1] for text in results(sources(12, "nvrtc"))}
    assert len(names) > 2
    assert len({text.split(" in ")[1] for text in results(few)}) > 1
    assert pool.made == 1


def test_they_start_early_where_many_follow(pool: Any) -> None:
    with together.many_follow():
        assert len(results(sources(1, "nvrtc"))) == 1
    assert pool.made == 1
    assert len({text.split(" in ")[1] for text in results(sources(3, "nvrtc"))}) > 1


def test_a_compiled_model_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    compile_all = together.compile_all

    def noted(made: Any) -> Any:
        seen.append(together._many_follow.get())
        return compile_all(made)

    monkeypatch.setattr(together, "compile_all", noted)
    monkeypatch.setattr(pipeline, "_from_store", lambda *arguments: None)
    monkeypatch.setattr(pipeline, "_known_artifact", lambda *arguments: None)
    model = jitgen.compile(torch.nn.Sequential(torch.nn.Tanh()))
    monkeypatch.setattr(together, "compile_one", REAL)
    with torch.no_grad():
        model(torch.ones(3))
        jitgen.jit(lambda x: x * 3)(torch.ones(3))
    assert seen == [True, False]


def test_a_setting_limits_them(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITGEN_COMPILE_JOBS", "1")
    for compiler in ("host", "nvrtc"):
        assert {text.split(" in ")[1] for text in results(sources(9, compiler))} == {str(threading.get_ident())}
    assert pool.made == 0
    monkeypatch.setenv("JITGEN_COMPILE_JOBS", "2")
    assert len({text.split(" in ")[1] for text in results(sources(9, "host"))}) <= 2
    results(sources(9, "nvrtc"))
    assert (pool.made, pool.count) == (1, 1)
    monkeypatch.setenv("JITGEN_COMPILE_JOBS", "0")
    with pytest.raises(jitgen.SettingError, match="expected a number from 1 on"):
        results(sources(2, "host"))


def test_nothing_waits_for_workers_to_start(pool: Any) -> None:
    pool.start = 1.0
    started = time.perf_counter()
    assert len(results(sources(6, "nvrtc"))) == 6
    assert time.perf_counter() - started < 0.8


def test_what_a_worker_died_of_is_compiled_here(pool: Any) -> None:
    pool.dies = True
    made = results(sources(8, "nvrtc"))
    assert [text.split()[0] for text in made] == [f"k{index}" for index in range(8)]
    assert {text.split(" in ")[1] for text in made} == {str(threading.get_ident())}


def test_errors_are_of_their_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """What was compiled before it is stored all the same."""
    from jitgen.store import Store

    monkeypatch.undo()

    @jitgen.jit
    def two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.softmax(-1), x.sum(0)

    lowered = two.lower(jitgen.TensorSpec((64, 64), torch.float32), target="cpu")._lowered
    assert len(lowered.program.kernels) == 2
    second = lowered.render(1)[0]
    compile_one = together.compile_one

    def failing(source: KernelSource) -> Compiled:
        return Compiled(CompileError("no"), 0.0) if source.text == second.text else compile_one(source)

    monkeypatch.setattr(together, "compile_one", failing)
    store = Store(tmp_path)
    with pytest.raises(CompileError, match="no"), together.alone():
        pipeline.build(lowered, store)
    monkeypatch.setattr(together, "compile_one", compile_one)
    assert sorted(kernel.origin for kernel in pipeline.build(lowered, store)) == ["compiled", "store"]
