"""Prewarming in worker processes, in shards and by other executors; what it tells meanwhile, and what it verifies."""

from __future__ import annotations

import json
import os
import pickle
import signal
import time
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import jitgen
from jitgen.cli.group import jitgen as command
from jitgen.compilers import bounds, host
from jitgen.compilers.workers import WorkerDied, WorkerProcesses
from jitgen.deploy import executors, prewarm, work
from jitgen.families import registry
from jitgen.store import Store, layout, remote

pytestmark = [
    pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler"),
    pytest.mark.usefixtures("own_store"),
]


COUNT = 6


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, session_store: Path) -> Path:
    """A manifest of three functions, each for many rows and for one: ``COUNT`` entries for each target."""
    path = tmp_path_factory.mktemp("manifest") / "specs.json"
    with jitgen.record(path), pytest.MonkeyPatch.context() as patched:
        patched.setenv("JITGEN_CACHE_DIR", str(path.parent / "development"))
        for number in (2.0, 3.0, 4.0):
            jitgen.jit(lambda x, number=number: torch.relu(x) * number)(torch.randn(5, 33).t())
    return path


class Recording(Executor):
    """Runs what it is given at once, as if elsewhere: what goes in and comes out is pickled."""

    def __init__(self) -> None:
        self.tasks: list[Any] = []

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        function, args = pickle.loads(pickle.dumps((function, args)))
        self.tasks.append(args[0])
        future: Future[Any] = Future()
        future.set_result(pickle.loads(pickle.dumps(function(*args, **kwargs))))
        return future


def test_worker_processes_build_and_the_driver_hears_of_it(recorded: Path) -> None:
    events: list[jitgen.CompileEvent] = []
    told: list[tuple[str, int, int]] = []
    unsubscribe = jitgen.on_compile(events.append)
    pool = WorkerProcesses(1, bounds.WORKER_BYTES)
    with pool:
        report = jitgen.prewarm(
            recorded, ["cpu"], executor=pool, progress=lambda entry, done, total: told.append((entry.key, done, total))
        )
    unsubscribe()
    assert report.count("compiled") == len(report.entries) == COUNT
    assert {event.key for event in events} == {
        key
        for entry in report.entries
        for key in Store.open().get_plan(entry.key)["artifacts"]  # type: ignore[index]
    }
    assert [(done, total) for _, done, total in told] == [(done, COUNT) for done in range(1, COUNT + 1)]
    assert {entry.signature for entry in report.entries} == {f"<lambda>(float32[{rows}, 5])" for rows in (1, 33)}
    assert all(entry.seconds > 0 for entry in report.entries)


def test_a_worker_that_dies_fails_its_own_task() -> None:
    with WorkerProcesses(1, bounds.WORKER_BYTES) as pool:
        killed = pool.submit(os.kill, pool.submit(os.getpid).result(), 0)
        assert killed.result() is None
        with pytest.raises(WorkerDied, match="SIGKILL"):
            pool.submit(signal.raise_signal, signal.SIGKILL).result()
        assert pool.submit(os.getpid).result() != os.getpid()
        with pytest.raises(ZeroDivisionError):
            pool.submit(divmod, 1, 0).result()
        assert pool.submit(print, "to standard error").result() is None


@pytest.mark.slow
def test_a_worker_that_grew_is_replaced() -> None:
    with WorkerProcesses(1, bytes_each=1) as pool:
        assert pool.submit(os.getpid).result() != pool.submit(os.getpid).result()


def test_workers_are_bounded_by_processors_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "processors", lambda: 8)
    monkeypatch.setattr(bounds, "available_bytes", lambda: 5 * bounds.WORKER_BYTES)
    assert [bounds.workers(asked) for asked in (None, 3, 100)] == [5, 3, 5]
    monkeypatch.setattr(bounds, "available_bytes", lambda: 0)
    assert bounds.workers(4) == 1


def test_limits_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "_CGROUP", tmp_path)
    for name, text in {"cpu.max": "100000 100000\n", "memory.max": "3000\n", "memory.current": "1000\n"}.items():
        (tmp_path / name).write_text(text)
    assert bounds.processors() == 1
    assert bounds.available_bytes() == 2000
    (tmp_path / "memory.max").write_text("max\n")
    assert bounds.available_bytes() > 2000


def test_shards_are_everything_and_share_nothing(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Recording()
    whole = jitgen.prewarm(recorded, ["cpu", "x86-64-v2"], executor=pool)
    assert len(whole.entries) == len(pool.tasks) == 2 * COUNT
    shards = [jitgen.prewarm(recorded, ["cpu", "x86-64-v2"], shard=(i, 5)).entries for i in (1, 2, 3, 4, 5)]
    assert sorted(len(shard) for shard in shards) == [2, 2, 2, 3, 3]
    assert {entry.key for shard in shards for entry in shard} == {entry.key for entry in whole.entries}
    for shard in ((0, 4), (5, 4)):
        with pytest.raises(ValueError, match="expected i/n"):
            jitgen.prewarm(recorded, ["cpu"], shard=shard)


def test_tasks_are_plain_data(recorded: Path) -> None:
    pool = Recording()
    jitgen.prewarm(recorded, ["cpu"], executor=pool)
    for task in pool.tasks:
        assert json.loads(json.dumps(task)) == task
        assert str(Store.open().root) == task["store"]["root"], "without a remote the directory must be shared"


def test_a_thread_pool_tells_of_each_kernel_once(recorded: Path) -> None:
    events: list[jitgen.CompileEvent] = []
    unsubscribe = jitgen.on_compile(events.append)
    with ThreadPoolExecutor(2) as pool:
        jitgen.prewarm(recorded, ["cpu"], executor=pool)
    unsubscribe()
    assert len(events) == len({event.key for event in events})


def test_workers_with_stores_of_their_own_share_through_the_remote(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fsspec")
    remote._opened.cache_clear()
    driver = Store.open(tmp_path / "driver", layers=[], remote=f"file://{tmp_path}/share")
    monkeypatch.setenv("JITGEN_CACHE_DIR", str(tmp_path / "worker"))
    report = jitgen.prewarm(recorded, ["cpu"], store=driver, executor=Recording())
    assert report.count("compiled") == COUNT
    for entry in report.entries:
        assert layout.plan_path(tmp_path / "worker", entry.key).exists()
        assert layout.plan_path(driver.root, entry.key).exists(), "it was verified"


def test_what_an_executor_loses_is_reported(recorded: Path) -> None:
    class Losing(Executor):
        def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_exception(WorkerDied("the worker process ended by SIGSEGV"))
            return future

    with pytest.raises(jitgen.JitgenError, match="SIGSEGV") as failure:
        jitgen.prewarm(recorded, ["cpu"], executor=Losing())
    assert failure.value.report.count("failed") == COUNT  # type: ignore[attr-defined]


def test_what_is_gone_or_does_not_load_is_a_failure(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = jitgen.prewarm(recorded, ["cpu"])
    store = Store.open()
    key = built.entries[0].key
    plan = store.get_plan(key)
    assert plan is not None
    assert work.why_unusable(store, key) is None
    artifact = store.get_artifact(plan["artifacts"][0])
    assert artifact is not None
    store.remove("artifact", artifact.key)
    assert "is not in the store" in str(work.why_unusable(store, key))
    for content in (b"not a library", b"\x7fELF, but no more of it"):
        made = artifact.artifact() if artifact.content == content else None
        assert made is None
        whole = {"kernel.cpp": b"", "kernel.so": content}
        store.put_artifact(jitgen.spec.Artifact(artifact.key, whole, "kernel.so", dict(artifact.meta)))
        assert "does not load" in str(work.why_unusable(store, key))
        store.remove("artifact", artifact.key)
    store.remove("plan", key)
    assert "is not in the store" in str(work.why_unusable(store, key))


@pytest.mark.filterwarnings("ignore::jitgen.errors.CacheWarning")
def test_a_store_that_cannot_be_written_is_a_failure(recorded: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(jitgen.JitgenError, match="cannot be written"):
        jitgen.prewarm(recorded, ["cpu"], store=Store(tmp_path / "file" / "store"))


def test_a_family_that_a_worker_cannot_find(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.own_family import FAMILY, HERE, family

    before = list(registry.FAMILIES)
    try:
        registry.register(FAMILY)
        assert work.families_outside() == ["tests.own_family"]
        registry.register(family(HERE / "templates"))
        with pytest.raises(jitgen.UnsupportedError, match="export it as FAMILY"):
            jitgen.prewarm(recorded, ["cpu"], jobs=2)
    finally:
        registry.FAMILIES[:] = before


def run(*arguments: str) -> Any:
    return CliRunner().invoke(command, ["prewarm", *arguments])


def test_lines_where_there_is_no_terminal(recorded: Path) -> None:
    done = run(str(recorded), "--target", "cpu", "--jobs", "1", "--shard", "2/6")
    assert done.exit_code == 0, done.output
    assert done.stderr.startswith("[1/1] compiled ")
    assert "<lambda>(float32[" in done.stderr
    assert "1 entries in" in done.stderr
    assert "1 compiled, 0 store, 0 skipped, 0 failed" in done.stderr


def test_a_bar_on_a_terminal(recorded: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    from jitgen.cli import prewarm as command

    monkeypatch.setattr(command.sys.stderr, "isatty", lambda: True, raising=False)
    entry = prewarm.Prewarmed("f", "cpu", "", "failed", "no such luck\nand more", "f(float32[3])", 0.1)
    with command.progress() as tell:
        tell(entry, 1, 2)
        time.sleep(0.2)
    shown = capfd.readouterr().err
    assert "no such luck" in shown
    assert "and more" not in shown
    assert "1/2" in shown


def test_wrong_options(recorded: Path) -> None:
    for shard in ("0/3", "4/3", "x", "1/0"):
        assert run(str(recorded), "--target", "cpu", "--shard", shard).exit_code == 2
    wrong = run(str(recorded), "--target", "cpu", "--executor", "ray://somewhere")
    assert (wrong.exit_code, "dask://HOST:PORT" in wrong.stderr) == (1, True)
    unknown = run("llama-0-8b", "--target", "cpu")
    assert (unknown.exit_code, "neither a file nor the name" in unknown.stderr) == (2, True)
    with pytest.raises(jitgen.JitgenError, match="names no executor"):
        executors.at("dask://")


@pytest.mark.slow
def test_a_dask_cluster_with_a_shared_remote(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers with stores of their own; the driver's store has every entry afterwards, by the command line too."""
    distributed = pytest.importorskip("distributed")
    remote._opened.cache_clear()
    monkeypatch.setenv("JITGEN_CACHE_REMOTE", f"file://{tmp_path}/share")
    cluster = distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, env={"JITGEN_CACHE_DIR": ""}
    )
    with cluster, distributed.Client(cluster) as client:

        def use_own_store(dask_worker: Any) -> str:
            os.environ["JITGEN_CACHE_DIR"] = f"{tmp_path}/worker-{dask_worker.name}"
            return os.environ["JITGEN_CACHE_DIR"]

        assert len(set(client.run(use_own_store).values())) == 2
        report = jitgen.prewarm(recorded, ["cpu", "x86-64-v2"], executor=client.get_executor())
        assert report.count("compiled") == len(report.entries) == 2 * COUNT
        monkeypatch.setenv("JITGEN_CACHE_DIR", str(tmp_path / "second"))
        address = cluster.scheduler_address.removeprefix("tcp://")
        done = run(str(recorded), "--target", "cpu", "--executor", f"dask://{address}")
        assert done.exit_code == 0, done.output
    with jitgen.strict():
        x = torch.randn(5, 33).t()
        served = jitgen.jit(lambda x, number=3.0: torch.relu(x) * number)
        torch.testing.assert_close(served(x), torch.relu(x) * 3.0)
    assert Store.open().verify().clean
