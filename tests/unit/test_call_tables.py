"""What calls are looked up in: how many entries a table holds, which ones go, and threads that add to one."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import jitgen
from jitgen.call import table
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
