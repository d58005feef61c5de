"""What is read through several views is computed once, and results that share no element may share memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import jitgen

Tensor = torch.Tensor


def softmax_in_orders(x: Tensor) -> Any:
    p = x.softmax(-1)
    return p, p[0], p.T


def product_in_orders(x: Tensor, w: Tensor) -> Any:
    y = x @ w
    return torch.relu(y[:, :2]), y[:, 2:].sigmoid(), y.T.contiguous()


def slices_of_a_scan(x: Tensor) -> Any:
    scanned = x.cumsum(-1)
    return scanned[:, :3], scanned[:, 3:]


def chunks_of_a_scan(x: Tensor) -> Any:
    left, right = (x.exp().cumsum(0) * 2).chunk(2, 0)
    return left * 2, right, left[0]


def a_scan_and_its_end(x: Tensor) -> Any:
    scanned = x.cumsum(-1)
    return scanned, scanned[:, -1:]


def differences_of_a_scan(x: Tensor) -> Any:
    scanned = x.cumsum(-1)
    return (scanned[..., None] - scanned[..., None, :]).exp()


def a_scan_in_orders(x: Tensor) -> Any:
    scanned = x.cumprod(-1) + 1
    return scanned, scanned.T


def rows_of_a_scan(x: Tensor) -> Any:
    return x.cumsum(-1).unbind(0)


def windows_of_a_sort(x: Tensor) -> Any:
    values, indices = x.sort(-1)
    return values, indices[:, :4]


def halves_of_a_sort(x: Tensor) -> Any:
    values = x.sort(-1, descending=True).values
    return values[:, :4], values[:, 4:]


def values_and_indices(x: Tensor) -> Any:
    values, indices = x.topk(3)
    return values.T, indices.T


def thirds_of_a_product(x: Tensor, w: Tensor) -> Any:
    return tuple(each.view(6, 2, -1).transpose(0, 1) for each in (x @ torch.cat([w, w, w], 1)).chunk(3, -1))


def attention_in_orders(x: Tensor) -> Any:
    mixed = torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])
    return mixed, mixed.transpose(0, 1)


X, W = (6, 8), (8, 10)
FUNCTIONS: list[tuple[Callable[..., Any], tuple[tuple[int, ...], ...], dict[str, int]]] = [
    (softmax_in_orders, (X,), {"reduction": 1, "elementwise": 1}),
    (product_in_orders, (X, W), {"gemm": 1, "elementwise": 1}),
    (slices_of_a_scan, (X,), {"scan": 1}),
    (chunks_of_a_scan, (X,), {"scan": 1, "elementwise": 1}),
    (a_scan_and_its_end, (X,), {"scan": 1}),
    (differences_of_a_scan, (X,), {"scan": 1, "elementwise": 1}),
    (a_scan_in_orders, (X,), {"scan": 1, "elementwise": 1}),
    (rows_of_a_scan, (X,), {"scan": 1}),
    (windows_of_a_sort, (X,), {"sort": 1}),
    (halves_of_a_sort, (X,), {"sort": 1}),
    (values_and_indices, (X,), {"sort": 1}),
    (attention_in_orders, (X,), {"attention": 1}),
]
NAMES = [function.__name__ for function, _, _ in FUNCTIONS]


@pytest.mark.parametrize(("function", "shapes", "kernels"), FUNCTIONS, ids=NAMES)
@pytest.mark.parametrize(("backend", "target"), [("cpp", "x86-64-v3"), ("cuda", "sm_90a"), ("triton", "gfx942")])
def test_kernels(
    function: Callable[..., Any],
    shapes: tuple[tuple[int, ...], ...],
    kernels: dict[str, int],
    backend: str,
    target: str,
) -> None:
    if function is attention_in_orders and backend == "cuda":
        pytest.skip("attention in float32 is several kernels there")
    arguments = [torch.rand(shape) for shape in shapes]
    lowered = jitgen.jit(function).lower(*arguments, backend=backend, target=target)
    assert Counter(kernel.family for kernel in lowered._lowered.program.kernels) == kernels


@pytest.mark.covering(1)
@pytest.mark.parametrize(("function", "shapes", "kernels"), FUNCTIONS, ids=NAMES)
@pytest.mark.parametrize("lead", [1, 2, 7])
def test_values_and_gradients(
    function: Callable[..., Any], shapes: tuple[tuple[int, ...], ...], kernels: dict[str, int], lead: int
) -> None:
    arguments = [torch.randn(lead * shapes[0][0], *shapes[0][1:]) / 4, *map(torch.randn, shapes[1:])]
    exact = [argument.double().requires_grad_() for argument in arguments]
    arguments = [argument.requires_grad_() for argument in arguments]
    found, wanted = (
        [r] if isinstance(r, Tensor) else list(r) for r in (jitgen.jit(function)(*arguments), function(*exact))
    )
    for left, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(left, right.to(left.dtype), rtol=1e-5, atol=1e-5)
    weights = [torch.randn(result.shape) for result in found]
    for results in (found, wanted):
        pairs = zip(results, weights, strict=True)
        sum((result * weight).sum() for result, weight in pairs if result.is_floating_point()).backward()
    for left, right in zip(arguments, exact, strict=True):
        torch.testing.assert_close(left.grad, right.grad.float(), rtol=1e-4, atol=1e-4)


def test_disjoint_products_have_no_temporary_of_all() -> None:
    lowered = jitgen.jit(thirds_of_a_product).lower(torch.rand(6, 8), torch.rand(8, 10), target="x86-64-v3")
    program = lowered._lowered.program
    assert not any(buffer.shape[-1] == 30 for buffer in program.temporaries)


def test_results_in_one_memory_share_no_element() -> None:
    x = torch.rand(4, 8, requires_grad=True)
    for arguments in ((x.detach(),), (x,)):
        left, right = jitgen.jit(slices_of_a_scan)(*arguments)
        assert left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
        version = right._version
        wanted = right.detach().clone()
        left.mul_(2)
        torch.testing.assert_close(right.detach(), wanted)
        assert right._version == version
    (left.sum() + right.square().sum()).backward()
    expected = x.detach().clone().requires_grad_()
    left, right = slices_of_a_scan(expected)
    (2 * left.sum() + right.square().sum()).backward()
    torch.testing.assert_close(x.grad, expected.grad)


def test_results_that_share_elements_share_no_memory() -> None:
    x = torch.rand(4, 8)
    for function in (a_scan_and_its_end, softmax_in_orders):
        results = jitgen.jit(function)(x)
        assert len({result.untyped_storage().data_ptr() for result in results}) == len(results)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x.cummax(1).values.flip(1), x.cummax(1).values.tanh()),
        lambda x: (x.sort(1).values, x.sort(1).values.flip(0, 1)),
        lambda x: tuple(x.cumsum(0)[:, start:].flip(1) for start in (0, 2)),
    ],
)
def test_a_stored_value_that_is_returned_flipped_is_copied(function: Callable[[Tensor], Any]) -> None:
    x = torch.randn(4, 6)
    for result, wanted in zip(jitgen.jit(function)(x), function(x), strict=True):
        torch.testing.assert_close(result, wanted)
        assert result.stride() == wanted.stride()


def test_a_flip_of_nothing_starts_in_its_memory() -> None:
    def flipped(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, y.flip(1) * 2

    low = jitgen.jit(flipped).lower(torch.randn(3, 3), torch.randn(3, 0), target="sm_90a").lowered
    offsets = [offset for number in range(len(low.program.kernels)) for _, offset in low.arguments(number).pointers]
    assert len(offsets) >= 2
    assert min(offsets) == 0


JOINED: dict[str, tuple[Callable[..., Any], int]] = {
    "all chunks": (lambda x: torch.cat(x.cumsum(-1).chunk(4, -1), -1) * 2, 1),
    "pieces of several sizes": (lambda x: torch.cat(x.softmax(-1).split([1, 7, 4], -1), -1), 1),
    "chunks in the middle": (lambda x: torch.cat(x.cumsum(-1).chunk(4, -1)[1:3], -1), 1),
    "an argument": (lambda x: torch.cat([x[:, :5], x[:, 5:]], -1), 1),
    "in another order": (lambda x: torch.cat(x.cumsum(-1).chunk(4, -1)[::-1], -1), 1),
    "with a gap": (lambda x: torch.cat([x.exp()[:, :5], x.exp()[:, 6:]], -1), 1),
    "with an overlap": (lambda x: torch.cat([x[:2], x[1:]], 0), 1),
    "every second row": (lambda x: torch.cat([x[::2], x[1::2]], 0), 1),
    "of another dimension": (lambda x: torch.cat([x[:3], x[3:]], 1), 1),
}


@pytest.mark.parametrize("case", JOINED)
def test_consecutive_pieces_joined_again_are_what_they_are_of(case: str) -> None:
    function, kernels = JOINED[case]
    x = torch.randn(6, 12)
    decorated = jitgen.jit(function)
    assert len(decorated.lower(x).kernels) == kernels
    found = decorated(x)
    torch.testing.assert_close(found, function(x))
    assert found.data_ptr() != x.data_ptr()


def test_pieces_joined_again_are_a_tensor_of_their_own() -> None:
    def updated(x: Tensor, y: Tensor) -> Any:
        joined = torch.cat(x.chunk(2), 0)
        before = torch.cat([y[:3], y[3:]])
        joined.add_(1)
        y.mul_(2)
        return joined, before

    x, y = torch.randn(6, 12), torch.randn(6, 12)
    given = x.clone(), y.clone()
    joined, before = jitgen.jit(updated)(x, y)
    torch.testing.assert_close((joined, before, x, y), (given[0] + 1, given[1], given[0], given[1] * 2), rtol=0, atol=0)
