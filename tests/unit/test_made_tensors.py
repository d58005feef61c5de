"""Updates of a part of a tensor that the function itself has made, and of views of it, in every dialect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import jitgen
from jitgen.errors import TraceError, UnsupportedError


def zeros_like(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    y[:, 0] += x[:, 1]
    return y


def whole_row(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(4, 3)
    y[1] += 1
    return y + x


def element(x: torch.Tensor) -> torch.Tensor:
    y = x.new_zeros(4, 3)
    y[0, 1] += 5
    y[0][2] = 7
    return y + x


def scaled(x: torch.Tensor) -> torch.Tensor:
    y = torch.ones(4, 3)
    y[1:] *= 2
    y[1:][1:] -= x[1:3]
    return y * x


def of_full(x: torch.Tensor) -> torch.Tensor:
    y = torch.full((4, 3), 2.0)
    y[0][1] = 5
    y.t()[2] += x[:, 0]
    return y + x


def of_empty(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty(8, 3)
    y[:4].copy_(x)
    y[4:] = x.flip(0) * 2
    return y


def of_arange(x: torch.Tensor) -> torch.Tensor:
    y = torch.arange(12, dtype=torch.float32).view(4, 3)
    y[2] = x[0]
    y[:, 1].mul_(3)
    return y + x


def by_flat_view(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(4, 3)
    y.view(-1)[2:5] = 3
    y.view(2, 6)[1, 1:3] += x[0, :2]
    return y * x


def reshaped_slices(x: torch.Tensor) -> torch.Tensor:
    y = x.new_ones(6, 4)
    rows = y[2:].view(2, 8)
    rows[0] += 2
    rows.view(2, 2, 4)[1, 0] = x[0, :1]
    return y.sum(1) * x.sum()


def chained(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    first, rest = y[0], y[1:]
    first.add_(x[0])
    rest[1:].add_(first)
    y *= 2
    return y + first + rest.sum(0)


def alone(x: torch.Tensor) -> torch.Tensor:
    row = torch.zeros(4, 3)[1]
    row += 1
    row[:2] *= 4
    return row + x


def unbound(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(4, 3)
    for index, row in enumerate(y):
        row.add_(x[index].detach() * index)
    return y * x


def of_clone(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:, 0] += x[:, 1]
    y[1, 1:] = 0
    return y


def of_result(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y[:, :2].mul_(x[:, 1:])
    y[0] -= 1
    return y.tanh()


def flat_view_of_a_clone(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y.view(-1)[2:7] += 3
    y.view(2, 2, 3)[1, :, 1] = x[:2, 0]
    rows = torch.zeros_like(x).view(2, 6)
    rows[0] = y.view(-1)[:6]
    return y + rows.view(4, 3)


def two_of_a_kind(x: torch.Tensor) -> torch.Tensor:
    left, right = torch.zeros(4, 3), torch.zeros(4, 3)
    left[0] += 1
    return left * x + right


FUNCTIONS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    *(zeros_like, whole_row, element, scaled, of_full, of_empty, of_arange, by_flat_view, reshaped_slices, chained),
    *(alone, unbound, of_clone, of_result, flat_view_of_a_clone, two_of_a_kind),
]


def operand() -> torch.Tensor:
    return torch.linspace(-1, 2, 12).reshape(4, 3)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_values_and_gradients(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x, jitted = operand(), jitgen.jit(function)
    torch.testing.assert_close(jitted(x), function(x))
    leaf, other = operand().requires_grad_(), operand().requires_grad_()
    result, expected = jitted(leaf), function(other)
    torch.testing.assert_close(result, expected)
    if expected.requires_grad:
        weights = torch.linspace(0.5, 1, expected.numel()).reshape(expected.shape)
        (found,) = torch.autograd.grad((result * weights).sum(), leaf)
        (wanted,) = torch.autograd.grad((expected * weights).sum(), other)
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("function", [zeros_like, element, reshaped_slices, chained, of_clone, flat_view_of_a_clone])
@pytest.mark.covering(1)
def test_other_dialects(function: Callable[[torch.Tensor], torch.Tensor], backend: str) -> None:
    lowered = jitgen.jit(function).lower(jitgen.TensorSpec((4, 3), torch.float32), target="sm_90a", backend=backend)
    assert all(kernel.source for kernel in lowered.kernels)


def test_an_argument_is_updated_through_a_flat_view() -> None:
    def function(cache: torch.Tensor, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        cache.view(-1, 3)[slots] = x
        cache.view(-1)[1:3].mul_(2)
        return cache.sum() + x

    x, slots, jitted = operand(), torch.tensor([5, 0, 3, 7]), jitgen.jit(function)
    ours, theirs = torch.ones(2, 4, 3), torch.ones(2, 4, 3)
    for _ in range(2):
        torch.testing.assert_close(jitted(ours, x, slots), function(theirs, x, slots))
        torch.testing.assert_close(ours, theirs)


def test_a_view_that_may_be_a_copy_is_refused_with_the_cause() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        flat = y.t().reshape(-1)
        flat += 1
        return y

    def of_a_copy(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.t().reshape(-1).view(3, 4)[0] += 1
        return y

    with pytest.raises(UnsupportedError, match="may be a view of it or a copy"):
        jitgen.jit(of_a_copy)(operand())
    with pytest.raises(UnsupportedError, match="may be a view of it or a copy") as refused:
        jitgen.jit(function)(operand())
    update = f"{__file__}:{function.__code__.co_firstlineno + 3}"
    made = f"it is made\n  at {__file__}:{function.__code__.co_firstlineno + 2}"
    assert update in str(refused.value)
    assert made in str(refused.value)

    def remedied(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        flat = y.t().reshape(-1).clone()
        flat += 1
        return y + flat.sum()

    torch.testing.assert_close(jitgen.jit(remedied)(operand()), remedied(operand()))


DIAGONALS: dict[str, tuple[Callable[[torch.Tensor], Any], torch.Tensor]] = {
    "product": (lambda x: x.diagonal().mul_(3.0), torch.rand(4, 3)),
    "above, of a transposed tensor": (lambda x: torch.diagonal(x, 1).add_(x[0, 0]), torch.rand(5, 3).t()),
    "below, of matrices": (
        lambda x: (torch.linalg.diagonal(x, offset=-1).copy_(x[..., 0, :1]), x * 2),
        torch.rand(2, 3, 4),
    ),
    "filled": (lambda x: x.fill_diagonal_(5), torch.rand(7, 3)),
    "filled again and again": (lambda x: x.fill_diagonal_(2.5, wrap=True), torch.rand(7, 3)),
    "filled, of integers": (lambda x: x.fill_diagonal_(2.5), torch.arange(6).reshape(2, 3)),
    "filled, of a cube": (lambda x: x.mT.fill_diagonal_(-1.0), torch.rand(3, 3, 3)),
}


@pytest.mark.parametrize("name", DIAGONALS)
def test_diagonals_are_updated(name: str) -> None:
    function, given = DIAGONALS[name]

    def of_new(x: torch.Tensor) -> Any:
        y = x + 1
        return function(y), y

    ours, theirs = given.clone(), given.clone()
    torch.testing.assert_close(jitgen.jit(function)(ours), function(theirs))
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(jitgen.jit(of_new)(given), of_new(given))


def test_gradients_of_filled_diagonals() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = x * 2
        z.diagonal().mul_(y)
        w = z.clone().fill_diagonal_(1.0) * z
        return w.sum() + (z * 1).diagonal(1).add_(y[:2]).square().sum()

    given = torch.rand(3, 3, requires_grad=True), torch.rand(3, requires_grad=True)
    ours, theirs = (torch.autograd.grad(f(*given), given) for f in (jitgen.jit(function), function))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("shape", [(3,), (2, 3, 3)])
def test_what_has_no_diagonal_to_fill(shape: tuple[int, ...]) -> None:
    with pytest.raises(TraceError, match="dimensions"):
        jitgen.jit(lambda x: x.fill_diagonal_(1.0))(torch.rand(shape))


def test_a_value_without_elements_leaves_its_history() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros(3, 4, dtype=torch.float64)
        y[1:1].copy_(x[3:].double())
        return y

    x = torch.rand(3, 4, requires_grad=True)
    y = jitgen.jit(function)(x)
    assert y.requires_grad
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.zeros(3, 4))


def _row(x: torch.Tensor) -> torch.Tensor:
    spread = x[1].expand(3, -1)
    x[1] += 1
    return spread * 1


def _all(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    spread = x.broadcast_to(2, *x.shape)
    x.mul_(2)
    return spread.sum(0), spread


def _column(x: torch.Tensor) -> torch.Tensor:
    spread = x[:, :1].expand(x.shape).t()
    x[:, 0].mul_(3)
    return spread @ x


def _not_expanded(x: torch.Tensor) -> torch.Tensor:
    x.expand(4, 3).mul_(2)
    return x + 1


@pytest.mark.parametrize("function", [_row, _all, _column, _not_expanded])
def test_expanded_views_see_updates_of_their_tensor(function: Callable[[torch.Tensor], Any]) -> None:
    x, y = operand(), operand()
    torch.testing.assert_close(jitgen.jit(function)(x), function(y))
    assert torch.equal(x, y)


def test_an_expanded_tensor_is_not_updated() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        x[:1].expand(4, 3).add_(1)
        return x * 2

    x = operand()
    with pytest.raises(UnsupportedError, match=r"updates an expanded tensor[^$]*clone it first"):
        jitgen.jit(function)(x)
    assert torch.equal(x, operand())
