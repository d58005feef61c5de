"""What a function changes besides computing, where other threads use the same objects meanwhile."""

from __future__ import annotations

import collections
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import jitgen
from jitgen.errors import TraceError
from jitgen.trace import journal, places

X = torch.arange(4.0)


@pytest.fixture(autouse=True)
def short_turns() -> Iterator[None]:
    """Threads take turns so often that each step of a call meets one of another's."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


class Meanwhile:
    """Calls ``step`` again and again in another thread; ``count`` is how often."""

    def __init__(self, step: Callable[[], Any]):
        self.step, self.count, self.is_over = step, 0, False
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        try:
            while not self.is_over:
                self.step()
                self.count += 1
        except BaseException as error:
            self.error = error

    def __enter__(self) -> Meanwhile:
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.is_over = True
        self.thread.join()


@pytest.mark.parametrize("route", ["plain", "gradients", "plan"])
def test_a_lock_of_the_function_holds(route: str) -> None:
    lock, state = threading.Lock(), {"calls": 0}

    @jitgen.jit
    def f(x: torch.Tensor) -> torch.Tensor:
        with lock:
            state["calls"] += 1
        return x + 1

    x = X.clone().requires_grad_(route == "gradients")
    called: Callable[[torch.Tensor], Any] = f.bind(x) if route == "plan" else f
    called(x)

    def call() -> None:
        for _ in range(5):
            called(x)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert state["calls"] == 21


@pytest.mark.parametrize("kind", ["dict", "list", "attributes"])
def test_what_other_threads_read_is_never_gone(kind: str) -> None:
    """They may read between any two instructions of what takes back the changes of a call that ends in an error."""
    owner = threading.Event()  # any object with attributes
    members: dict[str, Any] = {"calls": 0, "other": 1}
    numbers = [0, 1]
    vars(owner).update(members)

    @jitgen.jit
    def f(x: torch.Tensor) -> torch.Tensor:
        if kind == "dict":
            members["calls"] += 1
        elif kind == "list":
            numbers[0] += 1
        else:
            owner.calls += 1  # type: ignore[attr-defined]
        raise ValueError

    reads = list[tuple[Any, ...]]()

    def read(frame: types.FrameType, event: str, value: Any) -> Any:
        if frame.f_code.co_filename != places.__file__:
            return None
        frame.f_trace_opcodes = True
        reads.append((members.get("other"), *numbers[1:], vars(owner).get("other")))
        return read

    before = sys.gettrace()
    sys.settrace(read)
    try:
        with pytest.raises(ValueError):
            f(X)
    finally:
        sys.settrace(before)
    assert len(reads) > 100
    assert {*reads} == {(1, 1, 1)}
    assert (members["calls"], numbers[0], owner.calls) == (0, 0, 0)  # type: ignore[attr-defined]


def test_what_other_threads_write_during_a_trace_stays() -> None:
    shared = {"scale": 2.0, "written": 0}

    @jitgen.jit
    def f(x: torch.Tensor, name: str) -> torch.Tensor:
        time.sleep(0.002)
        return x * shared["scale"]

    def write() -> None:
        shared["written"] += 1

    with Meanwhile(write) as writer:
        for number in range(10):
            torch.testing.assert_close(f(X, str(number)), X * 2)
    assert writer.error is None
    assert shared["written"] == writer.count


def test_what_other_threads_write_stays_where_a_call_is_refused() -> None:
    shared: dict[str, Any] = {"calls": 0}
    entered, written = threading.Event(), threading.Event()

    @jitgen.jit
    def f(x: torch.Tensor) -> torch.Tensor:
        shared["calls"] += 1
        entered.set()
        written.wait(timeout=0.5)  # a second trace waits in vain
        shared["kept"] = {x * 2}
        return x

    def write() -> None:
        entered.wait(timeout=10)
        shared["other"] = 1
        shared["calls"] = 50
        written.set()

    thread = threading.Thread(target=write)
    thread.start()
    with pytest.raises(TraceError, match="keeps a tensor"):
        f(X)
    thread.join()
    assert "kept" not in shared


@pytest.mark.parametrize("now", [{"a": 1, "b": 3}, {"a": 1}, {"a": 5, "b": 2, "c": 9}, {"c": 9, "b": 2, "a": 1}])
def test_only_what_is_as_it_was_left_is_taken_back(now: dict[str, int]) -> None:
    """The function sets ``b`` to 2, which was 1; another thread has made ``now`` of the dict since."""
    owner = {"a": 1, "b": 1}
    noted = journal.Journal()
    noted.note("owner", owner)
    owner["b"] = 2
    (change,) = noted.changed()
    owner.clear()
    owner.update(now)
    change.undo()
    assert owner == now | ({"b": 1} if now.get("b") == 2 else {})


@pytest.mark.parametrize("kind", [list, collections.deque])
@pytest.mark.parametrize("old", [[1, 2, 3], [1], [], [3, 2, 1]])
@pytest.mark.parametrize("new", [[1, 2, 3], [1, 2], [2, 3], [], [1, 5, 3]])
def test_sequences_are_as_they_were(kind: Any, old: list[int], new: list[int]) -> None:
    owner = kind(old)
    noted = journal.Journal()
    noted.note("owner", owner)
    owner.clear()
    owner.extend(new)
    for change in noted.changed():
        change.undo()
        assert [*owner] == old
        change.make()
        assert [*owner] == new
