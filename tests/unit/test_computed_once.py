"""What is returned and read by other kernels too is computed once, by one kernel, and read from memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen import TensorSpec
from jitgen.compilers import host


def scan_and_softmax(x: Any) -> Any:
    scanned = x.cumsum(-1)
    return scanned, scanned.softmax(-1)


def extrema_and_softmax(x: Any) -> Any:
    values, indices = x.cummax(-1)
    return values.softmax(-1), indices


def sums_and_scan(x: Any) -> Any:
    total = (x * x).sum(-1, keepdim=True)
    return total, (x / total).cumsum(-1)


def softmax_and_scan(x: Any) -> Any:
    p = x.softmax(-1)
    return p, p.cumsum(-1)


def ranks_and_scan(x: Any) -> Any:
    values, indices = x.sort(-1)
    return indices, values.cumsum(-1)


def best_eight(x: Any) -> Any:
    values, indices = x.topk(8)
    return values.softmax(-1), indices


def norm_of_columns(x: Any) -> Any:
    normal = F.layer_norm(x, x.shape[-1:])
    return normal.sum(0), normal.amax(-1)


def beams(x: Any) -> Any:
    values, indices = F.log_softmax(x.view(4, -1, x.shape[1]), -1).flatten(1).topk(8)
    return values, indices // x.shape[1]


def entropy(x: Any) -> Any:
    p = x.softmax(-1)
    return -(p * p.log()).sum()


def greatest_share(x: Any) -> Any:
    p = x.softmax(-1)
    return p.amax(), (p > 0.5).any()


CASES = [
    (scan_and_softmax, 2),
    (extrema_and_softmax, 2),
    (sums_and_scan, 2),
    (softmax_and_scan, 2),
    (ranks_and_scan, 2),
    (best_eight, 1),
    (norm_of_columns, 2),
    (beams, 4),
    (entropy, 2),
    (greatest_share, 2),
]


@pytest.mark.parametrize(("function", "kernels"), CASES)
def test_a_plan_has_no_kernel_twice(function: Callable[..., Any], kernels: int) -> None:
    low = jitgen.jit(function).lower(TensorSpec((64, 96), torch.float32), target="x86-64-v3")
    assert low.balance.kernels == kernels, low.explain()


@pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")
@pytest.mark.parametrize("function", [function for function, _ in CASES])
def test_values_are_those_of_eager(function: Callable[..., Any]) -> None:
    x = torch.randn(24, 19, dtype=torch.float64)
    ours, theirs = (f(x) for f in (jitgen.jit(function), function))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")
def test_a_result_in_the_memory_of_the_caller_is_written() -> None:
    x = torch.randn(8, 12, dtype=torch.float64)
    out = torch.empty(12, 8, dtype=torch.float64).t(), torch.empty(8, 12, dtype=torch.float64)
    for function in (scan_and_softmax, softmax_and_scan):
        jitgen.jit(function)(x, out=out)
        torch.testing.assert_close(out, function(x))


@pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")
def test_a_result_waits_for_no_update_of_what_it_reads() -> None:
    def function(x: Any, memory: Any) -> Any:
        total = (x * memory).sum(-1, keepdim=True)
        kept = (x / total).cumsum(-1)
        memory.mul_(0.5)
        return total, kept, memory.sum(-1)

    x, memory = torch.rand(6, 10, dtype=torch.float64), torch.rand(6, 10, dtype=torch.float64)
    ours, theirs = memory.clone(), memory.clone()
    torch.testing.assert_close(jitgen.jit(function)(x, ours), function(x, theirs))
    torch.testing.assert_close(ours, theirs)


def recurrence(steps: int) -> Callable[..., Any]:
    def function(x: Any, decay: Any, weight: Any) -> Any:
        state, sums = torch.zeros_like(decay), []
        for step in range(steps):
            state = decay * state + weight * x[step]
            sums.append((state * weight).sum())
        return torch.stack(sums)

    return function


def test_a_long_recurrence_is_kernels_of_some_steps_each() -> None:
    specs = [TensorSpec((96, 1), torch.float32), *2 * [TensorSpec((64,), torch.float32)]]
    low = jitgen.jit(recurrence(96)).lower(*specs, target="x86-64-v3")
    assert low.balance.operations_ratio < 1.05, low.explain()
    sizes = [len(body.instructions) for kernel in low.lowered.program.kernels for body in kernel.bodies]
    assert len(low.kernels) < 12
    assert max(sizes) <= 512
    assert len({kernel.source for kernel in low.kernels}) < 7, "equal steps are one source"


@pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")
def test_a_recurrence_in_several_kernels_has_the_values_of_eager() -> None:
    function = recurrence(70)
    x, decay, weight = torch.randn(70, 1), torch.rand(5), torch.randn(5)
    torch.testing.assert_close(jitgen.jit(function)(x, decay, weight), function(x, decay, weight))


def rows_of_states(x: Any, decay: Any, weight: Any) -> Any:
    state, sums = torch.zeros_like(decay), []
    for step in range(14):
        state = torch.exp(decay) * state + weight * x[step]
        sums.append((state * x[step + 1]).sum(-1))
    return torch.stack(sums), state


@pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")
@pytest.mark.parametrize("length", [16, 21, 64])
def test_long_bodies_of_short_rows_serve_all_lengths(length: int) -> None:
    x, decay, weight = torch.randn(15, 9, length), -torch.rand(9, length), torch.randn(9, length)
    found, wanted = (
        jitgen.jit(rows_of_states)(x, decay, weight),
        rows_of_states(x.double(), decay.double(), weight.double()),
    )
    torch.testing.assert_close([part.double() for part in found], list(wanted), rtol=1e-5, atol=1e-5)
    sources = [
        k.source for k in jitgen.jit(rows_of_states).lower(x, decay, weight).kernels if "rows_together" in k.source
    ]
    assert sources
    assert all("template <bool whole>" not in source for source in sources)


def test_rows_that_are_gathered_are_no_part_of_a_reduction_over_them() -> None:
    def function(table: Any, index: Any, x: Any, weight: Any) -> Any:
        return (table[index] + x) @ weight, (x * 2).sum(-1).cumsum(0)

    given = torch.randn(9, 12), torch.randint(9, (5,)), torch.randn(5, 12), torch.randn(12, 3)
    for found, wanted in zip(jitgen.jit(function)(*given), function(*given), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_class_is_compared_once_for_each_row() -> None:
    specs = TensorSpec((256, 1024), torch.float32), TensorSpec((256,), torch.int64)
    low = jitgen.jit(F.cross_entropy).lower(*specs, target="x86-64-v3")
    assert low.balance.bytes_ratio < 1.05, low.explain()


def grouped(x: Any, weight: Any, bias: Any) -> Any:
    return F.group_norm(x, 3, weight, bias)


def grouped_by_time(x: Any, weight: Any, bias: Any) -> Any:
    return F.group_norm(x, 3) * (1 + weight[:, None, None]) + bias[:, None, None]


def regrouped(x: Any, weight: Any, bias: Any) -> Any:
    rows = torch.softmax(x, -1).view(x.shape[0], x.shape[3], x.shape[2], x.shape[1])
    return rows * weight + bias


@pytest.mark.parametrize("function", [grouped, grouped_by_time, regrouped])
def test_rows_of_another_shape_are_combined_with_other_operands(function: Callable[..., Any]) -> None:
    """In the shape of the rows, one weight for each channel would need a copy."""
    x, weight, bias = torch.randn(2, 6, 9, 3), torch.randn(6), torch.randn(6)
    found, wanted = jitgen.jit(function)(x, weight, bias), function(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


def test_a_router_before_gathered_experts_is_one_kernel() -> None:
    def function(x: Any, router: Any, up: Any, down: Any) -> Any:
        weights, chosen = F.softmax(x @ router.T, -1).topk(2)
        weights = weights / weights.sum(-1, keepdim=True)
        inner = F.silu(torch.einsum("td,tkhd->tkh", x, up[chosen]))
        return (torch.einsum("tkh,tkdh->tkd", inner, down[chosen]) * weights[:, :, None]).sum(1)

    shapes = (16, 32), (8, 32), (8, 24, 32), (8, 32, 24)
    low = jitgen.jit(function).lower(*(TensorSpec(shape, torch.float32) for shape in shapes), target="x86-64-v3")
    families = [kernel.family for kernel in low.lowered.program.kernels]
    assert (families.count("sort"), families.count("gemm"), len(families)) == (1, 3, 6), low.explain()
