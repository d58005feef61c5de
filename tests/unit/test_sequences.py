"""Arguments of torch functions that are lists or tuples of a subclass, however it is constructed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import jitgen
from jitgen.errors import TraceError
from jitgen.trace.sequences import flattened, rebuilt


class Size2d(tuple[Any, ...]):
    """A tuple whose constructor takes its items one by one."""

    def __new__(cls, height: Any, width: Any) -> Size2d:
        return super().__new__(cls, (height, width))


class Pair(list[Any]):
    """A list whose constructor takes its items one by one."""

    def __init__(self, left: Any, right: Any):
        super().__init__((left, right))


class Named(NamedTuple):
    left: Any
    right: Any


x = torch.arange(6.0)
y = torch.arange(10.0, 16.0)


def check(function: Callable[..., Any], *arguments: torch.Tensor) -> None:
    """Compare results and updated arguments of ``function`` with torch's."""
    given, expected = ([value.clone() for value in arguments] for _ in range(2))
    got, want = jitgen.jit(function)(*given), function(*expected)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    torch.testing.assert_close(given, expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [Size2d, Pair, Named, lambda *sizes: torch.Size(sizes)])
def test_sizes_are_of_any_subclass(kind: Callable[..., Any]) -> None:
    size = kind(2, 3)
    check(lambda x: x.reshape(size) + 1, x)
    check(lambda x: torch.zeros(size) + torch.reshape(x, size), x)
    check(lambda x: x.reshape(2, 3).permute(kind(1, 0)) + 1, x)


@pytest.mark.parametrize("kind", [Size2d, Pair, Named])
def test_sizes_of_any_subclass_stay_symbolic(kind: Callable[..., Any]) -> None:
    @jitgen.jit
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(kind(x.shape[0] // 3, 3)) + 1

    for length in (6, 9, 12):
        value = torch.arange(float(length))
        torch.testing.assert_close(f(value), value.reshape(-1, 3) + 1)
    assert len(f.specializations) == 1


@pytest.mark.parametrize("kind", [Size2d, Pair, Named])
def test_tensors_are_in_lists_and_tuples_of_any_subclass(kind: Callable[..., Any]) -> None:
    check(lambda x, y: torch.cat(kind(x, y)) + 1, x, y)
    check(lambda x, y: torch.stack(kind(x, torch.cat(kind(y[:3], y[3:])))) * 2, x, y)
    check(lambda x, rows, columns: x.reshape(2, 3)[tuple(kind(rows, columns))], x, torch.tensor([1]), torch.tensor([2]))
    check(lambda x, at: x.reshape(2, 3).index_put(kind(at, at), torch.tensor(5.0)), x, torch.tensor([1]))


@pytest.mark.parametrize("kind", [Size2d, Pair, Named])
def test_views_of_tensors_in_a_subclass_update_them(kind: Callable[..., Any]) -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        left, right = torch.atleast_2d(kind(x, y))
        left.add_(1)
        return right * 2

    check(f, x, y)


@pytest.mark.parametrize("kind", [Size2d, Pair, Named])
def test_autocast_converts_tensors_in_a_subclass(kind: Callable[..., Any]) -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.einsum("ij,jk->ik", kind(x, y))

    check(f, x.reshape(2, 3), y.reshape(3, 2))


def test_what_torch_returns_is_an_argument() -> None:
    check(lambda x: torch.stack(torch.aminmax(x)) + 1, x)
    found = jitgen.jit(lambda x: torch.max(x.reshape(2, 3), 0))(x)
    assert type(found) is torch.return_types.max
    torch.testing.assert_close(tuple(found), tuple(torch.max(x.reshape(2, 3), 0)))
    assert type(jitgen.jit(lambda x: x.sort())(x)) is torch.return_types.sort


def test_a_mistake_with_a_subclass_names_the_line() -> None:
    with pytest.raises(TraceError, match=r"test_sequences\.py:\d+"):
        jitgen.jit(lambda x, y: torch.cat(Pair(x, y.reshape(2, 3))) + 1)(x, y)


def test_rebuilt_constructs_only_known_classes() -> None:
    size, pair = Size2d(2, 3), Pair(2, 3)
    assert rebuilt(size, [2, 3]) is size
    assert rebuilt(pair, [2, 3]) is pair
    assert type(rebuilt(size, [2, 4])) is tuple
    assert type(rebuilt(pair, [2, 4])) is list
    assert rebuilt(size, [2, 4]) == (2, 4)
    assert rebuilt(pair, [2, 4]) == [2, 4]
    assert rebuilt(Named(1, 2), [3, 4]) == Named(3, 4)
    assert type(rebuilt(Named(1, 2), [3, 4])) is Named
    returned = rebuilt(torch.return_types.max((x, y)), [y, x])
    assert type(returned) is torch.return_types.max
    assert returned.values is y
    assert returned.indices is x
    assert type(rebuilt(torch.Size((2, 3)), [2, "n"])) is tuple
    items = [1, 2]
    assert rebuilt(items, [1, 2]) == items
    assert rebuilt(items, [1, 2]) is not items


def test_flattened_looks_into_subclasses() -> None:
    assert list(flattened((Pair(1, Size2d(2, [3])), {"key": Named(4, 5)}, 6))) == [1, 2, 3, 4, 5, 6]


def test_tuples_within_a_returned_tuple_stay() -> None:
    """There are as many tensors as items of the outer tuple."""

    @jitgen.jit
    def nested(x: torch.Tensor) -> Any:
        return ((x + 1,),)

    @jitgen.jit
    def uneven(x: torch.Tensor) -> Any:
        return (x + 1, x + 2), ()

    x = torch.ones(3)
    for function in (nested, uneven):
        torch.testing.assert_close(function(x), function.reference(x))
        assert torch.utils._pytree.tree_structure(function(x)) == torch.utils._pytree.tree_structure(
            function.reference(x)
        )
