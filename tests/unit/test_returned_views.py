"""Results that are views of arguments, or of captured tensors, that the same call has updated: they share memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import jitgen

Tensor = torch.Tensor


def arguments() -> list[Tensor]:
    return [torch.arange(24.0).view(4, 6), torch.linspace(-1, 1, 24).view(6, 4)]


def shared(found: Sequence[Tensor], given: Sequence[Tensor]) -> list[list[bool]]:
    """Which of the results share memory with which argument, and with which earlier result."""
    starts = [tensor.untyped_storage().data_ptr() for tensor in (*given, *found)]
    return [[starts[len(given) + i] == starts[j] for j in range(len(given) + i)] for i in range(len(found))]


def check(function: Callable[..., Any], made: Callable[[], list[Tensor]] = arguments) -> None:
    """Results, arguments, strides and shared memory are eager torch's, and so is what a write to a result changes."""
    jitted = jitgen.jit(function)
    for _ in range(2):  # traced, and launched
        given, expected_given = made(), made()
        found, expected = jitted(*given), function(*expected_given)
        found, expected = ((r,) if isinstance(r, Tensor) else r for r in (found, expected))
        assert shared(found, given) == shared(expected, expected_given)
        for left, right in zip((*found, *given), (*expected, *expected_given), strict=True):
            torch.testing.assert_close(left, right)
            assert left.stride() == right.stride()
        for left, right, shares in zip(found, expected, shared(found, given), strict=True):
            assert left.storage_offset() == right.storage_offset() or not any(shares)
        for left, right in zip(found, expected, strict=True):
            left.add_(7)
            right.add_(7)
        for left, right in zip((*found, *given), (*expected, *expected_given), strict=True):
            torch.testing.assert_close(left, right)


def of_a_part(x: Tensor, w: Tensor) -> Any:
    x[1:3].copy_(w[:2].repeat(1, 2)[:, :6])
    return x[:3]


def of_an_updated_view(x: Tensor, w: Tensor) -> Any:
    z = x[1:3]
    z.add_(1)
    return z


def two_results(x: Tensor, w: Tensor) -> Any:
    x[0].add_(1)
    return x[1:3], x


def the_same_view_twice(x: Tensor, w: Tensor) -> Any:
    x.add_(1)
    return x[1:3], x[1:3], x[2]


def reshaped(x: Tensor, w: Tensor) -> Any:
    x.mul_(2)
    return x.view(-1), x.T, x.unflatten(1, (2, 3))


def halves(x: Tensor, w: Tensor) -> Any:
    a, b = x.chunk(2, 1)
    a.copy_(b.sin())
    b.mul_(2)
    return a, b, x.sum()


def updated_after_the_view_was_made(x: Tensor, w: Tensor) -> Any:
    y = x[::2, 1:]
    before = y.clone()
    x.mul_(3)
    y[0].sub_(1)
    return before, y, x


def whole(x: Tensor, w: Tensor) -> Any:
    x.add_(1)
    return x[:], x.view(4, 6)


def both_arguments(x: Tensor, w: Tensor) -> Any:
    x.add_(w.T)
    w.copy_(x.T)
    return w[1:], x[1:], w.T


def of_the_same_value(x: Tensor, w: Tensor) -> Any:
    y = x + 1
    x.copy_(x + 1)
    return y, x[1:]


def one_value_in_two_arguments(x: Tensor, w: Tensor) -> Any:
    x.copy_(w.T)
    w[:] = w * 1
    return x[:2], w[:2], w.T, w


def of_what_is_copied(x: Tensor, w: Tensor) -> Any:
    x.copy_(w.T)
    return w.T, w.T[1:3], x[1:3]


def read_values(x: Tensor, w: Tensor) -> Any:
    x.add_(1)
    return x.clone(), x[1:3].clone(), x[1:3] * 1


def of_a_new_tensor(x: Tensor, w: Tensor) -> Any:
    y = x + 1
    x.add_(1)
    return y[1:3], x[1:3]


def flipped(x: Tensor, w: Tensor) -> Any:
    x.add_(1)
    return x.flip(1), x[1:2].flip(0), x.flip(0, 1).flip(0, 1)


def of_an_einsum(x: Tensor, w: Tensor) -> Any:
    y, diagonal = torch.einsum("ij->ji", x), torch.einsum("ii->i", x.view(-1)[:16].view(4, 4))
    x.mul_(3)
    diagonal.add_(1)
    return y, diagonal, torch.einsum("ij->i", x)


def by_true(x: Tensor, w: Tensor) -> Any:
    y = x[True]
    x.mul_(3)
    return y, x[True, 1:], x[False]


def windows(x: Tensor, w: Tensor) -> Any:
    of_rows, of_columns = x.unfold(1, 2, 3), w.t().unfold(1, 3, 3)
    x.add_(1)
    of_rows[0].mul_(5)
    of_columns.sub_(1)
    return of_rows, of_columns, w.sum(1), x.unfold(0, 2, 1).sum(-1)


@pytest.mark.parametrize(
    "function",
    [
        windows,
        flipped,
        of_an_einsum,
        by_true,
        of_a_part,
        of_an_updated_view,
        two_results,
        the_same_view_twice,
        reshaped,
        halves,
        updated_after_the_view_was_made,
        whole,
        both_arguments,
        of_the_same_value,
        one_value_in_two_arguments,
        of_what_is_copied,
        read_values,
        of_a_new_tensor,
    ],
)
def test_a_result_shares_the_memory_that_eager_torch_shares(function: Callable[..., Any]) -> None:
    check(function)


def test_two_arguments_with_one_new_value_are_returned_as_themselves() -> None:
    def function(x: Tensor, y: Tensor, z: Tensor) -> Any:
        x.copy_(z + 1)
        y.copy_(z + 1)
        return y, x, y[1:]

    check(function, lambda: [torch.zeros(3, 4), torch.zeros(3, 4), torch.ones(3, 4)])


def test_what_a_reshape_has_to_copy_has_the_new_value() -> None:
    def function(x: Tensor) -> Any:
        x.add_(1)
        return x.reshape(-1)

    jitted = jitgen.jit(function)
    for given in (torch.arange(12.0).view(3, 4), torch.arange(12.0).view(4, 3).T, torch.arange(12.0).view(3, 4)):
        before = given.clone()
        found = jitted(given)
        assert torch.equal(found, (before + 1).reshape(-1))
        assert torch.equal(given, before + 1)
        assert (found.data_ptr() == given.data_ptr()) == given.is_contiguous()


def test_a_view_of_a_captured_tensor_that_is_updated() -> None:
    cache = torch.zeros(5, 3)

    def function(new: Tensor) -> Any:
        cache[1:3].copy_(new)
        return cache[:4], new[0]

    new = torch.ones(2, 3)
    found, row = jitgen.jit(function)(new)
    assert found.data_ptr() == cache.data_ptr()
    assert row.data_ptr() == new.data_ptr()
    found.fill_(9)
    assert torch.equal(cache, torch.tensor([9.0, 9, 9, 9, 0])[:, None].expand(5, 3))


def test_a_kept_view_of_an_updated_argument() -> None:
    class Holder:
        kept: Any = None

    holder = Holder()

    def function(x: Tensor) -> Any:
        x.add_(1)
        holder.kept = x[1:]
        return x.sum()

    x = torch.zeros(3, 2)
    jitgen.jit(function)(x)
    assert holder.kept.data_ptr() == x[1:].data_ptr()
    assert torch.equal(holder.kept, torch.ones(2, 2))


def test_a_plan_returns_the_view() -> None:
    jitted = jitgen.jit(of_an_updated_view)
    x, w = arguments()
    plan = jitted.bind(x, w)
    for _ in range(2):
        assert plan(x, w).data_ptr() == x[1].data_ptr()
    assert torch.equal(x[1:3], arguments()[0][1:3] + 2)


@pytest.mark.parametrize("function", [of_a_part, of_an_updated_view, two_results, reshaped, both_arguments])
def test_gradients_of_the_view_are_those_of_eager_torch(function: Callable[..., Any]) -> None:
    def run(call: Callable[..., Any]) -> tuple[list[Tensor], list[Tensor], list[list[bool]]]:
        leaves = [leaf.requires_grad_() for leaf in arguments()]
        given = [leaf * 1 for leaf in leaves]
        found = call(*given)
        found = (found,) if isinstance(found, Tensor) else found
        sharing = shared(found, given)
        sum((result * (n + 2)).sin().sum() for n, result in enumerate((*found, given[0]))).backward()
        return [*found, *given], [leaf.grad for leaf in leaves if leaf.grad is not None], sharing

    found, expected = run(jitgen.jit(function)), run(function)
    assert found[2] == expected[2]
    for left, right in zip((*found[0], *found[1]), (*expected[0], *expected[1]), strict=True):
        torch.testing.assert_close(left, right)
        assert left.requires_grad == right.requires_grad


def test_views_without_gradients() -> None:
    def function(x: Tensor) -> Any:
        x.mul_(2)
        with torch.no_grad():
            y = x[:2]
        return x.detach()[1:], y

    leaf = torch.ones(3, 2, requires_grad=True)
    for call in (jitgen.jit(function), function):
        x = leaf * 1
        found = call(x)
        assert [t.requires_grad for t in found] == [False, True]  # torch's view of what has a history has one
        assert [t.data_ptr() for t in found] == [x[1].data_ptr(), x.data_ptr()]
        assert torch.equal(found[0], torch.full((2, 2), 2.0))


def test_a_program_that_torch_records_has_the_view() -> None:
    recorded = make_fx(jitgen.jit(of_an_updated_view))(*arguments())
    given = arguments()
    found = recorded(*given)
    assert found.data_ptr() == given[0][1].data_ptr()
    assert torch.equal(given[0][1:3], arguments()[0][1:3] + 1)


@pytest.mark.parametrize("view", [lambda x: x[:], lambda x: x.view_as(x), lambda x: x.t().t(), lambda x: x.squeeze()])
def test_a_view_of_all_of_an_argument_is_another_tensor(view: Callable[[Tensor], Tensor]) -> None:
    def function(x: Tensor) -> Any:
        return view(x), x, x.contiguous()

    jitted, x = jitgen.jit(function), torch.ones(3, 2)
    for _ in range(2):
        found, itself, contiguous = jitted(x)
        assert itself is x
        assert contiguous is x
        assert found is not x
        assert found.data_ptr() == x.data_ptr()
        found.unsqueeze_(0)
        assert x.shape == (3, 2)
