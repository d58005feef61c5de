"""Rows of numbers below a bound, such as the experts of tokens, are counted: order, ranks and ends by one kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import jitgen
from jitgen.families import rewrites
from jitgen.families.rows.sort import counting
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


PTX = {"jitgen/ptx.cuh": (Path(__file__).parents[1] / "host_ptx.cuh").read_text()}


@pytest.mark.parametrize(("numbers", "rows"), [(130, 33), (33, 700), (600, 150)])
def test_many_numbers(numbers: int, rows: int) -> None:
    """Of 5,600 numbers a cluster of 8 blocks has a piece each; for 600 a block has fewer threads than numbers."""

    def counts(ids: torch.Tensor, ordered: torch.Tensor) -> torch.Tensor:
        return torch.histc(ordered.float(), bins=numbers, min=0, max=numbers - 1)

    x = torch.randn(rows, numbers)
    x[: rows // 2, numbers - 1] = 5.0
    for found, wanted in zip(
        run_cuda(lambda x: routed(x, counts, 8), x, headers=PTX, clusters=True), routed(x, counts, 8), strict=True
    ):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("rows", [0, 1, 11, 400, 3001, 9001])
def test_in_cuda(rows: int) -> None:
    """Of 9,003 numbers a cluster of 8 blocks has a piece each; of 27,003 each of 4 clusters ranks some."""
    x = torch.randn(rows, NUMBERS)
    x[:, 2] = 5.0  # of one number there are many
    for found, wanted in zip(run_cuda(routed, x, headers=PTX, clusters=True), routed(x), strict=True):
        assert torch.equal(found, wanted)


def greatest(x: Any) -> Any:
    return torch.topk(torch.softmax(x, -1), 3)


def corrected(x: Any) -> Any:
    """Chooses experts as DeepSeek-V3 does: by scores with a bias, which their weights have not."""
    scores = torch.sigmoid(x)
    ids = torch.topk(scores + torch.arange(NUMBERS) * 0.1, 3, sorted=False)[1]
    return scores.gather(1, ids), ids


@pytest.mark.parametrize("backend", ["cuda", "cpp"])
@pytest.mark.parametrize("choose", [greatest, corrected])
def test_ranks_are_selected_once_for_what_counts_them_and_for_their_weights(
    choose: Callable[..., Any], backend: str
) -> None:
    def routed_with_weights(x: Any) -> Any:
        weights, ids = choose(x)
        ordered, order = torch.sort(ids.reshape(-1), stable=True)
        ends = torch.cumsum(by_histogram(ids, ordered), 0, dtype=torch.int32)
        return weights / weights.sum(-1, keepdim=True), order, ends

    target = {"cuda": "sm_90a", "cpp": "cpu"}[backend]
    x = torch.randn(50, NUMBERS)
    assert len(jitgen.jit(routed_with_weights).lower(x, backend=backend, target=target).kernels) == 2
    found = run_cuda(routed_with_weights, x) if backend == "cuda" else jitgen.jit(routed_with_weights)(x)
    weights, order, ends = routed_with_weights(x)
    torch.testing.assert_close(
        found[0].sort(-1)[0], weights.sort(-1)[0]
    )  # torch leaves the order of unsorted ranks open
    assert torch.equal(found[2], ends)
    by_expert = [weights.reshape(-1)[order], found[0].reshape(-1)[found[1]]]
    torch.testing.assert_close(by_expert[0], by_expert[1])


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


def test_ranks_that_are_repeated_along_rows_take_elements() -> None:
    """Of as many rows as columns: an element of each column, and no row."""

    def function(x: Any, table: Any, shares: Any) -> Any:
        order = torch.argsort(torch.topk(x, 3, -1)[1].reshape(-1), stable=True)
        ranks = torch.empty_like(order)
        ranks[order] = torch.arange(order.shape[0])
        rows = table * shares[order].unsqueeze(-1)
        return rows.gather(0, ranks.unsqueeze(0).expand(9, 9)), rows[ranks]

    run = jitgen.jit(function)
    x, table, shares = torch.randn(3, NUMBERS), torch.randn(9, 9), torch.randn(9)
    for found, wanted in zip(run(x, table, shares), function(x, table, shares), strict=True):
        torch.testing.assert_close(found, wanted)


def mixture(x: Any, router: Any, up: Any, down: Any) -> Any:
    return by_logits(x, F.linear(x, router), up, down)


def by_logits(x: Any, logits: Any, up: Any, down: Any) -> Any:
    weights, ids = torch.topk(torch.softmax(logits, -1, dtype=torch.float), 3)
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
    return exact_by_logits(x, F.linear(x, router), up, down)


def exact_by_logits(x: torch.Tensor, logits: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    weights, ids = torch.topk(torch.softmax(logits, -1), 3)
    weights = weights / weights.sum(-1, keepdim=True)
    result = x.new_zeros(x.shape[0], down.shape[1])
    for expert in range(NUMBERS):
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


def with_biases(x: Any, logits: Any, up: Any, down: Any, up_bias: Any, down_bias: Any) -> Any:
    """As gpt-oss has it in transformers: biases of experts, rows repeated before they are put in order."""
    weights, ids = torch.topk(logits, 3)
    weights, ids = torch.softmax(weights, -1).reshape(-1), ids.reshape(-1)
    order = torch.argsort(ids)
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(order.shape[0])
    ordered = ids[order]
    ends = torch.cumsum(torch.histc(ordered.float(), bins=NUMBERS, min=0, max=NUMBERS - 1), 0, dtype=torch.int32)
    rows = x[torch.arange(x.shape[0]).unsqueeze(1).expand(-1, 3).reshape(-1)][order]
    gate, value = (torch._grouped_mm(rows, up.transpose(-2, -1), ends) + up_bias[ordered]).chunk(2, -1)
    inner = (value.clamp(-7, 7) + 1) * gate.clamp(max=7) * torch.sigmoid(gate * 1.702)
    rows = torch._grouped_mm(inner, down.transpose(-2, -1), ends) + down_bias[ordered]
    return (rows * weights[order].unsqueeze(-1))[ranks].view(x.shape[0], 3, -1).sum(1)


def exact_with_biases(x: Any, logits: Any, up: Any, down: Any, up_bias: Any, down_bias: Any) -> Any:
    """Of one token, in float64."""
    weights, (ids,) = torch.topk(logits, 3)
    result = x.new_zeros(1, down.shape[1])
    for weight, expert in zip(torch.softmax(weights, -1)[0], ids.tolist(), strict=True):
        gate, value = (F.linear(x, up[expert]) + up_bias[expert]).chunk(2, -1)
        inner = (value.clamp(-7, 7) + 1) * gate.clamp(max=7) * torch.sigmoid(gate * 1.702)
        result += weight * (F.linear(inner, down[expert]) + down_bias[expert])
    return result


BY_IDS = "products of few rows in the order of their groups are by ids"


@pytest.mark.parametrize(("function", "of_float64"), [(by_logits, exact_by_logits), (with_biases, exact_with_biases)])
def test_one_token_needs_no_order_of_its_experts(
    function: Callable[..., Any], of_float64: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Top-k; gate and up; down; the sum. Rounding of float32 sums: 2**-18 of the norm."""
    sizes = [(1, 64), (1, NUMBERS), (NUMBERS, 64, 64), (NUMBERS, 64, 32), (NUMBERS, 64), (NUMBERS, 64)]
    tensors = [torch.randn(*size) for size in sizes[: 4 if function is by_logits else 6]]
    monkeypatch.setattr(counting, "multiplies_by_ids", lambda device: True)  # on a CPU, too
    monkeypatch.setattr(counting, "ROWS_BY_IDS", range(17))
    for matrices in ((2, 3), ()):
        weights = [
            jitgen.quantize(tensor, "int4", group_size=32) if number in matrices else tensor
            for number, tensor in enumerate(tensors)
        ]
        wanted = of_float64(
            *(w.dequantize(torch.float64) if isinstance(w, jitgen.QTensor) else w.double() for w in weights)
        )
        found = jitgen.jit(function)(*weights)
        assert (found.double() - wanted).norm() <= 2.0**-18 * wanted.norm()
        for text in (
            jitgen.jit(function).lower(*weights).explain(),
            jitgen.jit(function).lower(*weights, backend="cuda", target="sm_90a").explain(),
        ):
            assert BY_IDS in text
            assert "counted along a row" not in text


@pytest.mark.parametrize("format", [None, "int4", "mxfp4"])
def test_products_by_ids_read_weights_while_the_kernel_ahead_runs(
    format: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "ROWS_BY_IDS", range(17))
    sizes = [(1, 128), (NUMBERS, 128), (NUMBERS, 128, 128), (NUMBERS, 128, 64)]
    specs = [
        jitgen.TensorSpec(size, torch.bfloat16, format=format if number > 1 else None, group_size=None)
        for number, size in enumerate(sizes)
    ]
    low = jitgen.jit(mixture).lower(*specs, backend="cuda", target="sm_90a")
    assert len(low.kernels) == 5
    waits = ["jitgen::previous_kernel_wait();" in kernel.source for kernel in low.kernels]
    assert waits == [False, True, True, False, True]  # the router's, and down's, are those of the mainloop
    assert low.explain().count("ids and weights are read while the kernel ahead runs") == 1
    older = jitgen.jit(mixture).lower(*specs, backend="cuda", target="sm_80")
    assert "while the kernel ahead runs" not in older.explain()
    several = jitgen.jit(mixture).lower(jitgen.TensorSpec((9, 128), torch.bfloat16), *specs[1:], target="sm_90a")
    assert BY_IDS not in several.explain()


def test_weights_that_the_program_writes_are_read_after_the_kernel_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a kernel two ahead writes the weights, and only there."""
    monkeypatch.setattr(counting, "ROWS_BY_IDS", range(17))
    sizes = [(1, 128), (NUMBERS, 128), (NUMBERS, 128, 128), (NUMBERS, 128, 64)]
    specs = [jitgen.TensorSpec(size, torch.bfloat16) for size in sizes]
    program = jitgen.jit(mixture).lower(*specs, backend="cuda", target="sm_90a").lowered.program
    kernel = next(kernel for kernel in program.kernels if any(c.settled for c in kernel.bodies[0].contractions))
    ahead = program.kernels[program.kernels.index(kernel) - 1]
    (body,) = kernel.bodies
    plain = replace(kernel, bodies=(replace(body, contractions=(replace(body.contractions[0], settled=False),)),))
    weight = body.operands[body.contractions[0].weight[0]].buffer
    stores = [replace(o, buffer=weight) if o.kind == "store" else o for o in ahead.bodies[0].operands]
    writer = replace(ahead, bodies=(replace(ahead.bodies[0], operands=tuple(stores)), *ahead.bodies[1:]))
    assert rewrites._settled(plain, ahead, program) == kernel
    assert rewrites._settled(plain, ahead, replace(program, kernels=(writer, ahead, plain))) == plain


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
