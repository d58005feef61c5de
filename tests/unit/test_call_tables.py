"""What calls are looked up in: how many entries a table holds, which ones go, and threads that add to one."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import jitgen
from jitgen.call import resolver, table
from jitgen.call.table import LaunchTable, Table
from jitgen.codegen.python import PythonFunction, block, tuple_text
from jitgen.compilers import host


class Launch:
    """A launch for one state of what its function captures."""

    def __init__(self, state: int):
        self.state = state

    def captured_tensors(self, leaves: Sequence[Any]) -> list[torch.Tensor] | None:
        return [] if leaves[0] == self.state else None


def test_a_full_table_forgets_its_older_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "LIMIT", 8)
    calls: Table[int, int] = Table()
    for key in range(8):
        calls.put(key, -key)
    calls.put(3, 30)  # a key that is there needs no room
    assert [*calls] == [*range(8)]
    assert calls[3] == 30
    calls.put(8, -8)
    assert [*calls] == [4, 5, 6, 7, 8]
    assert calls.get(3) is None
    for key in range(100):
        calls.put(key, key)
        assert len(calls) <= 8
        assert calls[key] == key


def test_launches_of_equal_arguments_are_bounded_too() -> None:
    launches: LaunchTable[Launch] = LaunchTable()
    for state in range(table.ALTERNATIVES + 3):
        launches.add("key", Launch(state))
    assert len(launches["key"]) == table.ALTERNATIVES
    found = launches.fitting("key", [table.ALTERNATIVES + 2])
    assert found is not None
    assert found[0].state == table.ALTERNATIVES + 2
    assert launches.fitting("key", [0]) is None
    assert launches.fitting("other", [5]) is None


def test_threads_that_add_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "ALTERNATIVES", 4000)
    launches: LaunchTable[Launch] = LaunchTable()
    failures: list[BaseException] = []

    def add(thread: int) -> None:
        try:
            for number in range(500):
                launches.add("key", Launch(number))
                launches.add((thread, number), Launch(number))
                assert launches.fitting((thread, number), [number])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=add, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(launches["key"]) == 4000
    assert len(launches) == 4001


def test_threads_see_a_table_that_is_always_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "LIMIT", 4)
    calls: Table[int, int] = Table()
    failures: list[BaseException] = []

    def call(first: int) -> None:
        try:
            for key in range(first, first + 2000):
                calls.put(key % 16, key % 16)
                assert calls.get(key % 7, key % 7) == key % 7
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=call, args=(thread,)) for thread in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(calls) <= 4 + len(threads)


@pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")
def test_calls_of_more_shapes_than_a_table_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "LIMIT", 4)
    function = jitgen.jit(lambda x, scale: x * scale)
    plan = function.bind(torch.ones(3), 2.0)
    for _ in range(2):
        for size in range(2, 13):
            x = torch.randn(size)
            assert torch.equal(function(x, 2.0), x * 2)
            assert torch.equal(function(x, scale=2.0, out=torch.empty(size)), x * 2)
            assert torch.equal(plan(torch.ones(3), 3.0, out=torch.empty(2 * size)[:3]), torch.full((3,), 3.0))
            with torch.enable_grad():
                y = x.clone().requires_grad_()
                function(y, 2.0).sum().backward()
            assert y.grad is not None
            assert torch.equal(y.grad, torch.full((size,), 2.0))


def test_a_generated_function_shows_its_lines() -> None:
    function = PythonFunction("divide", ("a", "b"), ["c = a", *block("if b is not None:", ["return c / b"])])
    assert function.text == "def divide(a, b):\n    c = a\n    if b is not None:\n        return c / b\n"
    divide = function.define("division", {})
    assert divide(6, 3) == 2
    assert divide(1, None) is None
    assert divide.__globals__.get("divide") is None  # else it would be freed by the cycle collector alone
    with pytest.raises(ZeroDivisionError) as raised:
        divide(1, 0)
    assert "return c / b" in "".join(traceback.format_tb(raised.value.__traceback__))
    assert (tuple_text([]), tuple_text("a"), tuple_text("ab")) == ("()", "(a, )", "(a, b, )")


def test_traces_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver, "MOST_TRACES", 3)
    monkeypatch.setattr(resolver._Specializations, "limit", 4)
    x = torch.rand(5)

    @jitgen.jit
    def scaled(x: torch.Tensor, n: int, mode: str) -> torch.Tensor:
        return x * range(1, 100)[n] + len(mode)

    for _ in range(2):
        for n in range(6):
            torch.testing.assert_close(scaled(x, n, "a"), x * (n + 1) + 1)
    assert len(scaled.specializations) == 3
    for length in range(1, 9):
        torch.testing.assert_close(scaled(x, 1, "m" * length), x * 2 + length)
    assert 2 <= len(scaled.specializations) <= 4 * 3


def test_gradients_of_traces_that_were_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver, "MOST_TRACES", 2)
    scaled = jitgen.jit(lambda x, n: x * range(1, 100)[n])
    for n in (*range(5), *range(5)):
        x = torch.rand(3, requires_grad=True)
        scaled(x, n).sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(x.grad, torch.full((3,), n + 1.0))


def test_calls_of_two_threads_make_a_number_static() -> None:
    both = threading.Barrier(2)

    def scaled(x: torch.Tensor, n: int) -> torch.Tensor:
        if both.n_waiting < 2 and not both.broken:
            both.wait(20)
        return x * 2 if n > 2 else x * 3

    function = jitgen.jit(scaled)
    x = torch.rand(5)
    dispatcher = function._dispatchers.find((x, 1), None)  # found before a trace depends on the number
    results: dict[int, torch.Tensor] = {}

    def call(n: int) -> None:
        results[n] = dispatcher(x, n)

    threads = [threading.Thread(target=call, args=(n,)) for n in (1, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    both.abort()
    for n in (1, 3, 1):
        torch.testing.assert_close(results[n], x * (2 if n > 2 else 3))
        torch.testing.assert_close(dispatcher(x, n), x * (2 if n > 2 else 3))
    function._dispatchers.table[type(x), int] = dispatcher  # a thread that enters it late
    for n in (1, 3, 1, 3):
        torch.testing.assert_close(function(x, n), x * (2 if n > 2 else 3))
    assert function._dispatchers.table[type(x), int] is not dispatcher
