"""What a function keeps of its tensors is stored at every call; what a call cannot rebuild is refused."""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

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


def stored_view(x: torch.Tensor) -> Any:
    holder.last = x[0]
    return x * 2


def stored_nested(x: torch.Tensor) -> Any:
    holder.last = {"a": [x + 1, (x.shape, 3)], "q": collections.deque([x], 4), "p": Pair(x * 2, None)}
    log.append(holder.last["a"])
    return x * 2


def averaged(x: torch.Tensor) -> Any:
    before = 0.0 if holder.last is None else holder.last
    holder.last = before * 0.9 + x.mean(0).detach() * 0.1
    return x - holder.last


def cached(x: torch.Tensor) -> Any:
    if not log:
        log.append(x)
    else:
        log[0] = torch.cat([log[0], x])
    return log[0].sum(0)


def stored_and_updated(x: torch.Tensor) -> Any:
    holder.last = x * 2
    holder.last.add_(1)
    log.append(holder.last)
    return holder.last * 2


def stored_list(x: torch.Tensor, values: list[int]) -> Any:
    holder.last = values
    return x * 2


def stored_weakly(x: torch.Tensor) -> Any:
    holder.last = [weakref.ref(x)]
    return x * 2


def stored_key(x: torch.Tensor) -> Any:
    holder.last = {x + 1: 2}
    return x * 2


def stored_in_a_set(x: torch.Tensor) -> Any:
    holder.last = {x + 1}
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
REFUSED: dict[str, tuple[Callable[..., Any], str, int]] = {
    "attribute's attribute": (stored_in_a_box, "keeps a tensor in", 1),
    "argument's container": (stored_list, "keeps its argument, a list, in attribute 'last' of a Holder", 1),
    "weak reference": (stored_weakly, "keeps a weak reference to a tensor", 1),
    "key": (stored_key, "keeps a tensor in", 1),
    "set": (stored_in_a_set, "keeps a tensor in", 1),
    "cached function": (lambda x: x + ones(3), "keeps a tensor in", 0),
}
STORED: dict[str, Callable[..., Any]] = {
    "attribute": stored,
    "attribute and result": stored_and_returned,
    "argument": stored_argument,
    "view of an argument": stored_view,
    "size": stored_size,
    "number": stored_number,
    "list": appended,
    "nested": stored_nested,
    "average": averaged,
    "keys and values": cached,
    "updated after it is stored": stored_and_updated,
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


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept(name: str) -> None:
    function, words, offset = REFUSED[name]
    arguments = (x, [1, 2]) if name == "argument's container" else (x,)
    with pytest.raises(TraceError, match=words) as refused:
        jitgen.jit(function)(*arguments)
    assert (holder.last, log) == (None, [])
    if offset:
        assert f"{__file__}:{function.__code__.co_firstlineno + offset}" in str(refused.value), "the line that keeps it"


def kept() -> Any:
    """What ``STORED`` functions keep, which is put back to what it was at first."""
    found = holder.last, list(log)
    holder.last = None
    log.clear()
    return found


@pytest.mark.parametrize("route", ["plain", "gradients", "no grad", "bind"])
@pytest.mark.parametrize("name", STORED)
@pytest.mark.covering(1)
def test_what_is_kept(name: str, route: str) -> None:
    """The tensors that eager torch keeps, after each of several calls of other sizes; and what is one with what."""
    function = STORED[name]
    given = [torch.randn(rows, 3, requires_grad=route in ("gradients", "no grad")) for rows in (2, 2, 4)]
    given = given[:1] * 3 if route == "bind" else given
    seen: list[Any] = []
    for called in (function, jitgen.jit(function)):
        called = called.bind(given[0]) if route == "bind" and called is not function else called
        steps = []
        assert (holder.last, log) == (None, [])
        for each in given:
            each = each * 1 if route == "gradients" else each
            with torch.set_grad_enabled(route != "no grad"):
                result = called(each)
            tensors = pytree.tree_leaves((result, holder.last, log, each))
            tensors = [leaf for leaf in tensors if isinstance(leaf, torch.Tensor)]
            same = [[left is right for right in tensors] for left in tensors]
            steps.append((result, pytree.tree_map(lambda leaf: leaf, (holder.last, log)), same))
            requires = [tensor.requires_grad for tensor in tensors]
            steps.append(requires)
        if route == "gradients":
            wanted = [tensor for tensor in tensors if tensor.requires_grad]
            steps.append(torch.autograd.grad(sum(tensor.sum() for tensor in wanted), given, allow_unused=True))
        kept()
        seen.append(steps)
    torch.testing.assert_close(seen[1], seen[0])


def test_calls_that_keep_tensors_release_them() -> None:
    jitted, references = jitgen.jit(stored), []
    for _ in range(3):
        jitted(x)
        references.append(weakref.ref(holder.last))
    holder.last = None
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


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


def test_a_tensor_that_is_put_into_a_set_among_the_arguments_is_refused() -> None:
    def f(x: torch.Tensor, known: set[Any]) -> torch.Tensor:
        known.add(x)
        return x * 1

    known: set[Any] = {1, 2}
    with pytest.raises(TraceError, match=rf"keeps a tensor in known, a set[^\n]*\n[^\n]*{__file__}"):
        jitgen.jit(f)(torch.ones(2), known)
    assert known == {1, 2}


def text_returned(x: torch.Tensor) -> Any:
    return x + 1, f"{x.sum():.3f}"


def text_kept(x: torch.Tensor) -> Any:
    log.append(f"loss {x.sum()}")
    return x + 1


def text_as_key(x: torch.Tensor) -> Any:
    holder.last = {str(x): 1}
    return x + 1


def text_as_returned_key(x: torch.Tensor) -> Any:
    return x + 1, [{"a": x, ("b", f"{x}"): 1}]


def text_in_returned_set(x: torch.Tensor) -> Any:
    return x + 1, {f"{x}"}


def text_in_set(x: torch.Tensor) -> Any:
    log.append({1, frozenset([f"{x}"])})
    return x + 1


TEXTS = [text_returned, text_kept, text_as_key, text_as_returned_key, text_in_returned_set, text_in_set]


@pytest.mark.parametrize("function", TEXTS)
def test_a_text_of_a_tensor_is_neither_returned_nor_kept(function: Callable[..., Any]) -> None:
    """It has none of the tensor's values."""
    holder.last = None
    with pytest.raises(TraceError, match=rf"{function.__name__} (returns|keeps) the text of a tensor"):
        jitgen.jit(function)(x)
    assert not log
    assert holder.last is None


def test_a_text_of_a_tensor_may_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    @jitgen.jit
    def printing(x: torch.Tensor) -> Any:
        print(f"{x.sum(0, keepdim=True):.3f}", [x])
        return x + 1, f"{x.shape}"

    assert printing(x)[1] == "torch.Size([3])"
    assert "shape (1,), dtype float32> [<a tensor whose values are not known" in capsys.readouterr().out
