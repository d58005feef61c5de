"""What a traced function keeps of its tensors, or returns in objects that a call cannot rebuild, is refused."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import jitgen
from jitgen.errors import TraceError

x = torch.tensor([1.0, -2.0, 3.0])


@dataclasses.dataclass
class Box:
    value: Any


class Holder:
    last: Any = None


holder, log = Holder(), []
Pair = collections.namedtuple("Pair", "left right")


def generator(x: torch.Tensor) -> Any:
    yield x + 1


async def coroutine(x: torch.Tensor) -> Any:
    return x + 1


def stored(x: torch.Tensor) -> Any:
    y = x + 1
    holder.last = y
    return x * 2


def stored_and_returned(x: torch.Tensor) -> Any:
    holder.last = x + 1
    return holder.last


def stored_in_a_box(x: torch.Tensor) -> Any:
    holder.last = Box([x + 1])
    return x * 2


def stored_argument(x: torch.Tensor) -> Any:
    holder.last = x
    return x * 2


def stored_size(x: torch.Tensor) -> Any:
    holder.last = x.shape[0]
    return x * 2


def stored_number(x: torch.Tensor, k: int = 3) -> Any:
    holder.last = k
    return x * 2


def appended(x: torch.Tensor) -> Any:
    log.append(x + 1)
    return x * 2


@functools.lru_cache
def ones(n: int) -> torch.Tensor:
    return torch.ones(n)


RETURNED: dict[str, tuple[Callable[..., Any], str]] = {
    "dataclass": (lambda x: Box(x + 1), "returns a Box that holds a tensor"),
    "set": (lambda x: {x + 1}, "returns a set that holds a tensor"),
    "function": (lambda x: lambda: x, "returns a function that holds a tensor"),
    "size": (lambda x: Box(x.shape[0]), "returns a Box that holds"),
    "generator": (generator, "returns a generator"),
    "generator expression": (lambda x: (x + i for i in range(2)), "returns a generator"),
    "map": (lambda x: map(torch.exp, [x]), "returns a map"),
    "coroutine": (coroutine, "returns a coroutine"),
    "iterator without tensors": (lambda x: iter([1, 2]), "returns a list_iterator"),
}
KEPT: dict[str, tuple[Callable[..., Any], str, int]] = {
    "attribute": (stored, "keeps a tensor in attribute 'last' of a Holder", 2),
    "attribute and result": (stored_and_returned, "keeps a tensor in attribute 'last' of a Holder", 1),
    "attribute's attribute": (stored_in_a_box, "keeps a tensor in", 1),
    "argument": (stored_argument, "keeps a tensor in attribute 'last' of a Holder", 1),
    "size": (stored_size, "keeps a number in attribute 'last' of a Holder", 1),
    "list": (appended, "keeps a tensor in", 1),
    "cached function": (lambda x: x + ones(3), "keeps a tensor in", 0),
}


@pytest.fixture(autouse=True)
def outer() -> Any:
    yield
    holder.last = None
    log.clear()
    ones.cache_clear()


@pytest.mark.parametrize("name", RETURNED)
def test_objects_that_a_call_cannot_rebuild(name: str) -> None:
    function, words = RETURNED[name]
    with pytest.raises(TraceError, match=words) as refused:
        jitgen.jit(function)(x)
    assert f"{__file__}:{function.__code__.co_firstlineno}" in str(refused.value)


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept(name: str) -> None:
    function, words, offset = KEPT[name]
    with pytest.raises(TraceError, match=words) as refused:
        jitgen.jit(function)(x)
    if offset:
        assert f"{__file__}:{function.__code__.co_firstlineno + offset}" in str(refused.value), "the line that keeps it"


def test_a_number_that_is_kept() -> None:
    with pytest.raises(TraceError, match="keeps a number in attribute 'last'"):
        jitgen.jit(stored_number)(x, 3)


def test_reference_cycles_are_collected() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        def repeated(n: int) -> torch.Tensor:
            return x if n == 0 else repeated(n - 1) + 1

        box = Box(x)
        box.value = [box, x]
        return repeated(3)

    torch.testing.assert_close(jitgen.jit(function)(x), x + 3)


def test_containers_and_local_objects_are_fine() -> None:
    def function(x: torch.Tensor) -> Any:
        box = Box(x + 1)
        values = list(map(torch.exp, [box.value, getattr(box, "val" + "ue")]))
        return Pair(values[0], {"b": [*values, (len(values), None)]})

    jitted = jitgen.jit(function)
    for _ in range(3):
        found, want = jitted(x), function(x)
        assert type(found) is Pair
        torch.testing.assert_close(found.left, want.left)
        torch.testing.assert_close(found.right["b"][:2], want.right["b"][:2])
        assert found.right["b"][2] == (2, None)
    assert len(jitted.specializations) == 1


def test_a_registered_class_is_rebuilt() -> None:
    @dataclasses.dataclass
    class Registered:
        value: torch.Tensor

    torch.export.register_dataclass(Registered)
    found = jitgen.jit(lambda x: Registered(x + 1))(x)
    assert type(found) is Registered
    torch.testing.assert_close(found.value, x + 1)
