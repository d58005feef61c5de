"""Rows of numbers below a bound, such as the experts of tokens, are counted: order, ranks and ends by one kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import jitgen
from tests.cuda_on_host import run as run_cuda

NUMBERS = 7


def by_histogram(ids: torch.Tensor, ordered: torch.Tensor) -> torch.Tensor:
    return torch.histc(ordered.float(), bins=NUMBERS, min=0, max=NUMBERS - 1)


def by_comparisons(ids: torch.Tensor, ordered: torch.Tensor) -> torch.Tensor:
    return (ids[:, None] == torch.arange(NUMBERS)).sum(0)


def by_classes(ids: torch.Tensor, ordered: torch.Tensor) -> torch.Tensor:
    return F.one_hot(ids, NUMBERS).sum(0)


def routed(x: Any, counts: Callable[..., Any] = by_histogram, chosen: int = 3) -> Any:
    """Returns numbers, order, ends and ranks of the ``chosen`` greatest of each row."""
    ids = torch.topk(x, chosen, -1)[1].reshape(-1)
    ordered, order = torch.sort(ids, stable=True)
    ends = torch.cumsum(counts(ids, ordered), 0, dtype=torch.int32)
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(order.shape[0])
    return ordered, order, ends, ranks


@pytest.mark.parametrize("counts", [by_histogram, by_comparisons, by_classes])
def test_one_kernel_counts(counts: Callable[..., Any]) -> None:
    run = jitgen.jit(lambda x: routed(x, counts))
    for rows in (0, 1, 2, 5, 0, 64, 1000):
        x = torch.randn(rows, NUMBERS)
        for found, wanted in zip(run(x), routed(x, counts), strict=True):
            assert found.dtype == wanted.dtype
            assert torch.equal(found, wanted)
        assert len(run.lower(x).kernels) == 2


def test_blocks_rank_several_of_many_numbers() -> None:
    numbers, rows = 130, 33

    def counts(ids: torch.Tensor, ordered: torch.Tensor) -> torch.Tensor:
        return torch.histc(ordered.float(), bins=numbers, min=0, max=numbers - 1)

    x = torch.randn(rows, numbers)
    x[: rows // 2, numbers - 1] = 5.0
    for found, wanted in zip(run_cuda(lambda x: routed(x, counts, 8), x), routed(x, counts, 8), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("rows", [0, 1, 11, 400, 3001])
def test_in_cuda(rows: int) -> None:
    """Of 9,003 numbers a warp reads its own twice, to count them and to rank them."""
    x = torch.randn(rows, NUMBERS)
    x[:, 2] = 5.0  # of one number there are many
    for found, wanted in zip(run_cuda(routed, x), routed(x), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("backend", ["cuda", "cpp"])
def test_ranks_are_selected_once_for_what_counts_them_and_for_their_weights(backend: str) -> None:
    def routed_with_weights(x: Any) -> Any:
        weights, ids = torch.topk(torch.softmax(x, -1), 3)
        ordered, order = torch.sort(ids.reshape(-1))
        ends = torch.cumsum(by_histogram(ids, ordered), 0, dtype=torch.int32)
        return weights / weights.sum(-1, keepdim=True), order, ends

    target = {"cuda": "sm_90a", "cpp": "cpu"}[backend]
    x = torch.randn(50, NUMBERS)
    assert len(jitgen.jit(routed_with_weights).lower(x, backend=backend, target=target).kernels) == 2


def test_numbers_without_a_bound_are_sorted() -> None:
    def sorted_(ids: Any) -> Any:
        ordered, order = torch.sort(ids)
        return ordered, order, torch.cumsum(by_comparisons(ids, ordered), 0)

    run, ids = jitgen.jit(sorted_), torch.randint(-50, 50, (40,))
    wanted = torch.sort(ids, stable=True)
    found = run(ids)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])
    assert torch.equal(found[2], sorted_(ids)[2])
    assert "counted" not in run.lower(ids).explain()


@pytest.mark.parametrize(
    "other",
    [
        lambda ids: (ids[:, None] <= torch.arange(NUMBERS)).sum(0),
        lambda ids: (ids[:, None] == torch.arange(NUMBERS)).sum(0) * 2,
        lambda ids: (ids[:, None] == 6 - torch.arange(NUMBERS)).sum(0),
        lambda ids: ((ids[:, None] == torch.arange(NUMBERS)) & (ids[:, None] > 0)).sum(0),
    ],
)
def test_other_sums_stay_what_they_are(other: Callable[..., Any]) -> None:
    def function(x: Any) -> Any:
        ids = torch.topk(x, 3, -1)[1].reshape(-1)
        return torch.sort(ids)[1], torch.cumsum(other(ids), 0)

    x = torch.randn(20, NUMBERS)
    for found, wanted in zip(jitgen.jit(function)(x), function(x), strict=True):
        assert found.shape == wanted.shape
    assert torch.equal(jitgen.jit(function)(x)[1], function(x)[1])


def mixture(x: Any, router: Any, up: Any, down: Any) -> Any:
    weights, ids = torch.topk(torch.softmax(F.linear(x, router), -1, dtype=torch.float), 3)
    weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype).reshape(-1)
    ordered, order = torch.sort(ids.reshape(-1))
    ends = torch.cumsum(torch.histc(ordered.float(), bins=NUMBERS, min=0, max=NUMBERS - 1), 0, dtype=torch.int32)
    gate, value = torch._grouped_mm(x[order // 3], up.transpose(-2, -1), ends).chunk(2, -1)
    rows = torch._grouped_mm(F.silu(gate) * value, down.transpose(-2, -1), ends) * weights[order].unsqueeze(-1)
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(order.shape[0])
    return rows[ranks].view(x.shape[0], 3, -1).sum(1)


def exact(x: torch.Tensor, router: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Of float64, by every expert of every row."""
    weights, ids = torch.topk(torch.softmax(F.linear(x, router), -1), 3)
    weights = weights / weights.sum(-1, keepdim=True)
    result = x.new_zeros(x.shape[0], down.shape[1])
    for expert in range(router.shape[0]):
        gate, value = F.linear(x, up[expert]).chunk(2, -1)
        share = (weights * (ids == expert)).sum(-1, keepdim=True)
        result += F.linear(F.silu(gate) * value, down[expert]) * share
    return result


def test_a_mixture_is_few_kernels() -> None:
    """The router; its softmax and top-k; counts; rows of experts; gate and up; down; sums."""
    run = jitgen.jit(mixture)
    for rows in (1, 9, 130):
        tensors = [torch.randn(*shape) for shape in ((rows, 32), (NUMBERS, 32), (NUMBERS, 48, 32), (NUMBERS, 32, 24))]
        wanted = exact(*(tensor.double() for tensor in tensors))
        torch.testing.assert_close(run(*tensors).double(), wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item())
        assert len(run.lower(*tensors).kernels) <= 7
    needs = [tensor.clone().requires_grad_() for tensor in tensors]
    run(*needs).square().sum().backward()
    doubles = [tensor.double().requires_grad_() for tensor in tensors]
    exact(*doubles).square().sum().backward()
    for one, other in zip(needs, doubles, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=1e-4, atol=1e-4 * other.grad.abs().max().item())


@pytest.mark.parametrize("count", [2, 5, 16, 17])
def test_short_sums_of_what_indices_choose(count: int) -> None:
    def bags(table: Any, ids: Any, weights: Any) -> Any:
        return (table[ids.view(-1, count)] * weights.view(-1, count).unsqueeze(-1)).sum(1)

    run = jitgen.jit(bags)
    table, ids, weights = torch.randn(30, 12), torch.randint(0, 30, (9 * count,)), torch.rand(9 * count)
    wanted = bags(table.double(), ids, weights.double())
    torch.testing.assert_close(run(table, ids, weights).double(), wanted, rtol=1e-5, atol=1e-5)
    half = bags(table.bfloat16(), ids, weights.bfloat16())
    torch.testing.assert_close(run(table.bfloat16(), ids, weights.bfloat16()), half, rtol=2e-2, atol=2e-2)
    assert len(run.lower(table, ids, weights).kernels) == (1 if count < 16 else 2)
