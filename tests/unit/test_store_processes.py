"""The store among processes: killed writers, races, single flight."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from store_samples import ARTIFACT, KEY, PLAN, PLAN_KEY, cut, filled, flip, make_old, numbered_key

from jitgen.errors import CacheError
from jitgen.spec import Artifact
from jitgen.store import Store, atomic, layout

pytestmark = pytest.mark.filterwarnings("ignore::jitgen.errors.CacheWarning")

forked = multiprocessing.get_context("fork")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store", layers=[])


def _in_child(work: Callable[[], None]) -> int:
    process = forked.Process(target=work)
    process.start()
    process.join(60)
    assert process.exitcode is not None
    return process.exitcode


def _die_at(step: int, names: tuple[str, ...]) -> None:
    """SIGKILL this process at the ``step``-th of the system calls by which ``atomic`` writes."""
    left = [step]

    def dying(original: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)

        return call

    for name in names:
        setattr(atomic.os, name, dying(getattr(atomic.os, name)))


@pytest.mark.parametrize("damaged_before", [False, True], ids=["fresh", "over damage"])
@pytest.mark.quick(where=lambda damaged_before: damaged_before)
def test_a_writer_killed_at_any_step_leaves_no_part(tmp_path: Path, damaged_before: bool) -> None:
    finished = False
    for step in range(80):
        store = Store.open(tmp_path / str(step), layers=[])
        if damaged_before:
            filled(store)
            flip(layout.artifact_path(store.root, KEY) / "kernel.cubin")
            cut(layout.plan_path(store.root, PLAN_KEY))

        def write(store: Store = store, step: int = step) -> None:
            _die_at(step, ("fsync", "rename", "replace", "mkdir", "open"))
            filled(store)

        code = _in_child(write)
        assert code in (0, -signal.SIGKILL)
        found = store.get_artifact(KEY)
        assert found is None or found.artifact().files == ARTIFACT.files
        assert store.get_plan(PLAN_KEY) in (None, PLAN)
        for leftover in atomic.leftovers(store.root, older_than=0.0):
            make_old(leftover)
        filled(store)
        atomic.sweep(store.root)
        result = store.verify()
        assert result.clean
        assert not result.leftovers
        if code == 0:
            finished = True
            break
    assert finished
    assert step > 8


def test_later_writers_sweep_what_is_an_hour_old(store: Store) -> None:
    filled(store)
    staging = layout.staging_path(store.root)
    for name in ("old", "young"):
        (staging / name).mkdir()
        (staging / name / "kernel.cubin").write_bytes(b"half")
    make_old(staging / "old")
    store.put_plan(numbered_key(1), {"artifacts": []})
    assert (staging / "old").exists(), "swept at most once an hour"
    make_old(staging / ".swept")
    store.put_plan(numbered_key(2), {"artifacts": []})
    assert not (staging / "old").exists()
    assert (staging / "young").exists()
    assert store.verify().clean


def test_writers_and_readers_at_once_see_whole_entries(store: Store) -> None:
    """Four writers write, damage and prune the same few entries while two readers look."""
    gate = forked.Barrier(6)  # on a machine with much to do, some start when others would have ended

    def artifact(number: int) -> Artifact:
        content = numbered_key(number).encode() * 300
        return Artifact(numbered_key(number), {"kernel.cpp": content, "kernel.so": content[::-1]}, "kernel.so")

    def write(seed: int, until: float) -> None:
        turn = seed
        while time.monotonic() < until:
            turn += 1
            store.put_artifact(artifact(turn % 5))
            store.put_plan(numbered_key(turn % 5), {"artifacts": [numbered_key(turn % 5)], "turn": turn})
            if turn % 7 == 0:
                path = layout.artifact_path(store.root, numbered_key(turn % 5)) / "kernel.so"
                if path.exists():
                    path.write_bytes(b"damaged") if turn % 2 else store.prune(0)

    def read() -> None:
        gate.wait()
        hits, until = 0, time.monotonic() + 1.5
        while time.monotonic() < until:
            for number in range(5):
                found = store.get_artifact(numbered_key(number))
                if found is not None:
                    assert found.read() == artifact(number).files["kernel.so"]
                    hits += 1
                plan = store.get_plan(numbered_key(number))
                assert plan is None or plan["artifacts"] == [numbered_key(number)]
        assert hits

    # A writer whose entry another one prunes or damages at once may be told so; it must not fail otherwise.
    def write_allowed(seed: int) -> None:
        gate.wait()
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            try:
                write(seed, until)
            except (CacheError, FileNotFoundError):
                continue

    workers = [forked.Process(target=write_allowed, args=(seed,)) for seed in range(4)]
    workers += [forked.Process(target=read) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 6
    for number in range(5):
        store.put_artifact(artifact(number))
        store.put_plan(numbered_key(number), {"artifacts": [numbered_key(number)]})
    assert store.verify().clean
    assert not store.verify().leftovers


def test_of_many_processes_one_compiles(store: Store, tmp_path: Path) -> None:
    log = tmp_path / "compiles"

    def first_call() -> None:
        if store.get_artifact(KEY) is None:
            with store.single_flight(KEY) as held:
                assert held
                if store.get_artifact(KEY) is None:
                    with open(log, "a") as file:
                        file.write("compiled\n")
                    time.sleep(0.2)
                    store.put_artifact(ARTIFACT)
        assert store.get_artifact(KEY) is not None

    workers = [forked.Process(target=first_call) for _ in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 6
    assert log.read_text() == "compiled\n"


def test_a_killed_holder_frees_its_lock(store: Store) -> None:
    def hold() -> None:
        with store.single_flight(KEY):
            os.kill(os.getpid(), signal.SIGKILL)

    assert _in_child(hold) == -signal.SIGKILL
    start = time.monotonic()
    with store.single_flight(KEY) as held:
        assert held
    assert time.monotonic() - start < 5


def test_patience_ends(store: Store) -> None:
    with store.single_flight(KEY) as held, store.single_flight(KEY, patience=0.05) as second:
        assert held
        assert not second
    with store.single_flight(numbered_key(1)) as other:
        assert other


def test_locks_nobody_holds_are_swept(store: Store) -> None:
    for number in range(3):
        with store.single_flight(numbered_key(number)):
            pass
    locks = layout.locks_path(store.root)
    for path in locks.iterdir():
        make_old(path)
    with store.single_flight(numbered_key(0)):
        atomic.sweep(store.root)
        assert [path.name for path in locks.iterdir()] == [f"{numbered_key(0)}.lock"]
