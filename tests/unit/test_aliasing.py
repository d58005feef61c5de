"""``out=`` and arguments that are updated: right whatever they share memory with, or refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import jitgen
from jitgen.call import plan
from jitgen.errors import UnsupportedError
from jitgen.runtime import overlap

Tensor = torch.Tensor


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls whose results were copied to ``out=``."""
    calls: list[Any] = []
    copy = plan.copy_results

    def counted(name: str, results: Any, device: torch.device, out: Any) -> None:
        calls.append(out)
        copy(name, results, device, out)

    monkeypatch.setattr(plan, "copy_results", counted)
    return calls


READ_ELSEWHERE: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x + x.T,
    "one row": lambda x: x - x[:1],
    "one column": lambda x: x * x[:, 3:4],
    "flipped": lambda x: x.flip(0),
    "rolled": lambda x: x.roll(1, 0),
    "halves exchanged": lambda x: torch.cat([x[16:], x[:16]]),
    "contiguous": lambda x: x.T.contiguous(),
    "reshaped": lambda x: x + x.reshape(-1).flip(0).reshape(x.shape),
    "after a reduction": lambda x: x.softmax(-1) + x.T,
    "product": lambda x: x @ x,
    "product and more": lambda x: torch.relu(x @ x + x),
    "two kernels": lambda x: x.sum(0) + x.flip(1),
}
READ_IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "elementwise": lambda x: x * 2 + x,
    "transposed twice": lambda x: (x.T + 1).T * x,
    "reduction": lambda x: x - x.sum(1, keepdim=True),
    "reductions of both dimensions": lambda x: x - x.sum(0) - x.amax(1, keepdim=True),
    "softmax": lambda x: x.softmax(0),
    "scan": lambda x: x.cumsum(1) + x,
    "sorted rows": lambda x: torch.sort(x, 1)[0],
    "halves": lambda x: torch.cat([x[:16] + x[16:], x[:16] - x[16:]]),
}


def number_matrix(size: int) -> Tensor:
    """Whole numbers, whose sums and products are exact."""
    return torch.randint(-9, 10, (size, size)).double()


@pytest.mark.parametrize("name", READ_ELSEWHERE | READ_IN_PLACE)
@pytest.mark.quick(where=lambda name: name in list(READ_ELSEWHERE)[::3] or name == "reductions of both dimensions")
def test_out_is_the_argument(name: str, copied: list[Any]) -> None:
    """As without ``out=``, to the bit; and only what is read elsewhere goes through other memory."""
    function = jitgen.jit((READ_ELSEWHERE | READ_IN_PLACE)[name])
    x = number_matrix(32)
    expected = function(x)
    for _ in range(3):
        out = x.clone()
        assert function(out, out=out) is out
        assert torch.equal(out, expected)
    assert bool(copied) == (name in READ_ELSEWHERE)


@pytest.mark.parametrize("name", ["elementwise", "transposed twice", "reduction"])
@pytest.mark.parametrize("size", [1, 17, 67])
@pytest.mark.quick(where=lambda name, size: size == 17 and name == "transposed twice")
def test_elements_of_ragged_rows_are_written_once(name: str, size: int) -> None:
    """In place in every second column of a buffer, whose other columns stay as they are."""
    function, x = READ_IN_PLACE[name], number_matrix(size)
    buffer = torch.full((size, 2 * size + 3), 99.0, dtype=x.dtype)
    out = buffer[:, 1 : 2 * size : 2].copy_(x)
    jitgen.jit(function)(out, out=out)
    assert torch.equal(out, function(x))
    assert (buffer[:, ::2] == 99).all()


def test_a_later_call_may_alias_where_the_first_did_not() -> None:
    function = jitgen.jit(lambda x, y: x + y.T)
    x, y = number_matrix(32), number_matrix(32)
    expected = x + y.T
    bound = function.bind(x, y)
    for call in (function, bound):
        for _ in range(2):
            call(x, y, out=torch.empty_like(x))
        for _ in range(2):
            out = y.clone()
            assert torch.equal(call(x, out, out=out), expected)
            out = x.clone()
            assert torch.equal(call(out, y, out=out), expected)


def test_out_is_a_captured_tensor(copied: list[Any]) -> None:
    weight, x = number_matrix(32), number_matrix(32)
    whole = number_matrix(65)
    part = whole[:32, :32]
    functions: list[tuple[Any, Tensor]] = [
        (lambda x: x + weight.T, weight),
        (lambda x: x @ weight, weight),
        (lambda x: x + part, whole[1:33, 1:33]),
        (lambda x: x + part, whole.T[:32, :32]),
        (lambda x: x + weight, weight),
    ]
    for function, out in functions:
        expected = function(x).clone()
        jitted = jitgen.jit(function)
        jitted(x, out=torch.empty_like(x))
        jitted(x, out=out)
        assert torch.equal(out, expected)
    assert len(copied) == len(functions) - 1, "of the last one each element is read where it is written"


def test_views_of_one_storage(copied: list[Any]) -> None:
    """Slices that only interleave share nothing; slices that share elements go through other memory."""
    function = jitgen.jit(lambda x: x * 2)
    buffer = number_matrix(64)
    apart = [(buffer[:, :32], buffer[:, 32:]), (buffer[::2], buffer[1::2]), (buffer[:16], buffer[16:32])]
    for x, out in apart:
        expected = x * 2
        assert torch.equal(function(x, out=out), expected)
    assert not copied
    shared = [(buffer[:32], buffer[1:33]), (buffer[1:33], buffer[:32]), (buffer[:, :-1], buffer[:, 1:])]
    shared += [(buffer, buffer.T), (buffer.flatten()[:64], buffer.T[3])]
    for x, out in shared:
        expected = x * 2
        assert torch.equal(function(x, out=out), expected)
    assert len(copied) == len(shared)


def test_outputs_that_share_memory_are_refused() -> None:
    function = jitgen.jit(lambda x: (x + 1, x + 2))
    x, buffer = number_matrix(8), torch.empty(9, 16, dtype=torch.float64)
    for out in ((buffer[:8, :8], buffer[:8, :8]), (buffer[:8, :8], buffer[1:, :8])):
        with pytest.raises(ValueError, match="two tensors of out="):
            function(x, out=out)
    function(x, out=(buffer[:8, :8], buffer[:8, 8:]))
    assert torch.equal(buffer[:8], torch.cat([x + 1, x + 2], 1))


def test_several_outputs_may_be_arguments_of_one_another() -> None:
    """The first result lies where the second one's operand does."""
    x, y = number_matrix(32), number_matrix(32)

    def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + y, F.softmax(x @ y, -1)

    function = jitgen.jit(both)
    expected = function(x, y)
    for names in itertools.permutations(range(3), 2):
        memory = [x.clone(), y.clone(), torch.empty_like(x)]
        found = function(memory[0], memory[1], out=tuple(memory[name] for name in names))
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


REPEATED = {
    "hankel": ((4, 4), (1, 1)),
    "expanded": ((3, 4), (0, 1)),
    "windows": ((3, 3), (2, 1)),
    "three dimensions": ((2, 3, 2), (4, 2, 6)),
}


@pytest.mark.parametrize("name", REPEATED)
def test_memory_that_repeats_elements_is_not_written(name: str) -> None:
    target = torch.zeros(32).as_strided(*REPEATED[name])

    def update(x: Tensor) -> None:
        x.add_(1)

    with pytest.raises(ValueError, match="share memory; pass a tensor"):
        jitgen.jit(lambda x: x + 1)(torch.zeros(target.shape), out=target)
    with pytest.raises(UnsupportedError, match="updated in place, but several of its elements share memory"):
        jitgen.jit(update)(target)


def test_an_update_of_what_is_captured_too_is_refused() -> None:
    weight = number_matrix(8)

    def update(x: Tensor) -> None:
        x.add_(weight.T)

    for argument in (weight, weight.T, weight[:, :]):
        with pytest.raises(UnsupportedError, match="shares memory with another"):
            jitgen.jit(update)(argument)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: ((y := x @ x), y.clone(), y[0].clone()),
        lambda x: (x @ x).t().contiguous(),
        lambda x: ((y := x.cumsum(1)), y.t().contiguous(), y[:, 1:].contiguous()),
    ],
)
def test_results_have_memory_of_their_own_in_the_order_that_was_asked_for(function: Callable[..., Any]) -> None:
    found, expected = jitgen.jit(function)(x := number_matrix(8)), function(x)
    pairs = list(zip(found, expected, strict=True)) if isinstance(found, tuple) else [(found, expected)]
    for left, right in pairs:
        assert torch.equal(left, right)
        assert left.stride() == right.stride()
    assert len({left.untyped_storage().data_ptr() for left, _ in pairs}) == len(pairs)


@pytest.mark.parametrize(
    ("update", "is_followed"),
    [
        (lambda x: x.unfold(0, 2, 2).add_(1), True),
        (lambda x: x.unfold(0, 2, 1)[0].mul_(2), False),
        (lambda x: x.diagonal().add_(1), True),
        (lambda x: x.view(-1)[2:5].fill_(3), True),
        (lambda x: x.t().reshape(-1)[2:5].fill_(3), False),
        (lambda x: torch.broadcast_tensors(x[:1], x[1:2])[1].add_(1), True),
        (lambda x: x.movedim(0, 1)[0].sub_(1), True),
    ],
)
def test_an_update_through_a_view_is_seen_or_refused(update: Callable[..., Any], is_followed: bool) -> None:
    def function(x: Tensor) -> Tensor:
        y = x * 2
        update(y)
        return y

    x = number_matrix(8)
    if is_followed:
        assert torch.equal(jitgen.jit(function)(x), function(x))
    else:
        with pytest.raises(UnsupportedError, match="shares memory with what may be a view"):
            jitgen.jit(function)(x)


@pytest.mark.parametrize("is_view_updated", [False, True])
@pytest.mark.parametrize("rows", [4, 1])
def test_a_view_of_any_argument_is_not_read_as_it_was_before_an_update(is_view_updated: bool, rows: int) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        view = torch.broadcast_tensors(x, y)[1]
        (view if is_view_updated else y).add_(1)
        return view * 2

    y = number_matrix(4)[:rows]
    if is_view_updated and rows == 1:
        with pytest.raises(UnsupportedError, match="updates an expanded tensor"):
            jitgen.jit(function)(number_matrix(4), y)
        return
    eager = y.clone()
    assert torch.equal(jitgen.jit(function)(number_matrix(4), y), function(number_matrix(4), eager))
    assert torch.equal(y, eager)


def test_memory_that_repeats_elements_is_not_written_where_gradients_are_needed() -> None:
    def update(x: Tensor, y: Tensor) -> None:
        x.add_(y)

    target, y = torch.zeros(5).unfold(0, 2, 1), torch.ones(4, 2, requires_grad=True)
    with pytest.raises(UnsupportedError, match="updated in place, but several of its elements share memory"):
        jitgen.jit(update)(target, y)


dims = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=3)


@given(dims, st.integers(0, 9), st.integers(0, 9), st.data())
@settings(max_examples=300, deadline=None)
def test_overlaps_are_found_exactly(dims: list[tuple[int, int]], left: int, right: int, data: st.DataObject) -> None:
    sizes, strides = [size for size, _ in dims], [stride for _, stride in dims]
    others = [data.draw(st.integers(0, 4)) for _ in sizes]
    numbers = torch.arange(200)
    one, other = numbers[left:].as_strided(sizes, strides, left), numbers[right:].as_strided(others, strides, right)
    shared = set(one.flatten().tolist()) & set(other.flatten().tolist())
    assert overlap.share(one, other) == bool(shared)
    assert overlap.is_repeated(sizes, strides) == (one.unique().numel() < one.numel())
