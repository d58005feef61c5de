"""Rows read again by each pass: how often, which functions need a pass less, and what that computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen import TensorSpec
from tests import triton_online
from tests.interpreter import Interpreter

LENGTHS = {"triton": 40000, "cuda": 220000}
"""Of float32 rows that are not kept on chip."""
STARTS = {"triton": "for start in ", "cuda": "for (Index start = "}
"""How a walk over the row begins."""


def cross_entropy(x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x, x[:, 0].long(), reduction="none")


def exponentials(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(x - x.amax(-1, keepdim=True))


def deviations(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(-1, keepdim=True)


FEWER: dict[str, tuple[Callable[..., Any], int]] = {
    "softmax": (lambda x: x.softmax(-1), 2),
    "log_softmax": (lambda x: x.log_softmax(-1), 2),
    "logsumexp": (lambda x: x.logsumexp(-1), 1),
    "cross_entropy": (cross_entropy, 1),
    "label smoothing": (lambda x: F.cross_entropy(x, x[:, 0].long(), reduction="none", label_smoothing=0.1), 1),
    "layer_norm": (lambda x: F.layer_norm(x, x.shape[-1:]), 2),
    "var": (lambda x: x.var(-1), 1),
    "std": (lambda x: x.std(-1, correction=0), 1),
    "var_mean": (lambda x: torch.var_mean(x, -1), 1),
    "exponentials": (lambda x: exponentials(x).sum(-1), 1),
    "exponentials of a product": (lambda x: (x * 2).softmax(-1), 2),
    "masked elements": (lambda x: x.masked_fill(x > 1, -torch.inf).softmax(-1), 2),
    "layer_norm, then softmax": (lambda x: F.layer_norm(x, x.shape[-1:]).softmax(-1), 3),
    "two of them": (lambda x: (x.softmax(-1), x.var(-1)), 2),
}
"""And the walks over the row that are left."""

AS_WRITTEN: dict[str, tuple[Callable[..., Any], int]] = {
    "less a number": (lambda x: torch.exp(x - 3).sum(-1) + x.amax(-1), 1),
    "less the minimum": (lambda x: torch.exp(x - x.amin(-1, keepdim=True)).sum(-1), 2),
    "less another maximum": (lambda x: torch.exp(x - (2 * x).amax(-1, keepdim=True)).sum(-1), 2),
    "maximum less": (lambda x: torch.exp(x.amax(-1, keepdim=True) - x).sum(-1), 2),
    "some exponentials": (lambda x: torch.where(x > 0, exponentials(x), 0).sum(-1), 2),
    "weighted exponentials": (lambda x: (exponentials(x) * x).sum(-1), 2),
    "powers of two": (lambda x: torch.exp2(x - x.amax(-1, keepdim=True)).sum(-1), 2),
    "squares less the maximum": (lambda x: ((x - x.amax(-1, keepdim=True)) ** 2).sum(-1), 2),
    "not the mean": (lambda x: ((x - x.sum(-1, keepdim=True) / 7) ** 2).sum(-1), 2),
    "mean of another": (lambda x: ((x - (x * x).mean(-1, keepdim=True)) ** 2).sum(-1), 2),
    "fourth powers": (lambda x: (deviations(x) ** 4).sum(-1), 2),
    "some deviations": (lambda x: torch.where(x > 0, deviations(x) ** 2, 0).sum(-1), 2),
    "products of deviations": (lambda x: (deviations(x) * deviations(x * x)).sum(-1), 2),
    "rms_norm": (lambda x: F.rms_norm(x, x.shape[-1:]), 2),
}


def lowered(function: Callable[..., Any], backend: str, length: int, dtype: torch.dtype = torch.float32) -> Any:
    return jitgen.jit(function).lower(TensorSpec((300, length), dtype), backend=backend, target="sm_90a")


@pytest.mark.parametrize("name", FEWER)
@pytest.mark.parametrize("backend", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_pass_less(name: str, backend: str, dtype: torch.dtype) -> None:
    function, walks = FEWER[name]
    low = lowered(function, backend, LENGTHS[backend], dtype)
    assert len(low.kernels) == 1
    assert low.source.count(STARTS[backend]) == walks
    assert f"in {walks} pass" in low.explain()


@pytest.mark.parametrize("name", AS_WRITTEN)
@pytest.mark.parametrize("backend", LENGTHS)
def test_other_functions_are_left_alone(name: str, backend: str) -> None:
    function, walks = AS_WRITTEN[name]
    low = lowered(function, backend, LENGTHS[backend])
    assert low.source.count(STARTS[backend]) == walks
    for word in ("exp_sum", "deviations_", "SumExp<", "Deviations::"):
        assert word not in low.source


@pytest.mark.parametrize("backend", LENGTHS)
def test_exponentials_of_rows_that_are_kept_are_left_alone(backend: str) -> None:
    low = lowered(FEWER["softmax"][0], backend, 4096)
    assert "in 3 passes" in low.explain()
    for word in ("exp_sum", "SumExp<"):
        assert word not in low.source


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("length", [64, 4096, 40000, 120000])
def test_deviations_of_rows_that_are_kept_are_moments(length: int, dtype: torch.dtype) -> None:
    """Of which the mean is one, so that nothing adds the row up for itself; Triton takes another pass."""
    low = lowered(FEWER["layer_norm"][0], "cuda", length, dtype)
    assert "in 2 passes" in low.explain()
    if dtype == torch.float64 and length == 120000:  # which nothing keeps
        assert "jitgen::Shifted<" not in low.source
    else:
        assert "jitgen::Shifted<" in low.source
        assert ".mean();" in low.source
        assert "jitgen::Sum" not in low.source
    assert "in 3 passes" in lowered(FEWER["layer_norm"][0], "triton", 4096).explain()


def test_rows_that_leave_no_registers_take_another_pass() -> None:
    """Of a single block."""
    assert "in 3 passes" in lowered(FEWER["layer_norm"][0], "cuda", 16384).explain()


def test_a_sum_beside_deviations_is_added_up() -> None:
    """It may overflow where the mean does not."""
    low = lowered(lambda x: (x.sum(-1), F.layer_norm(x, x.shape[-1:])), "cuda", 4096)
    assert "jitgen::Shifted<" in low.source
    assert "jitgen::Sum" in low.source


def test_a_cpu_walks_as_it_did() -> None:
    low = jitgen.jit(FEWER["softmax"][0]).lower(TensorSpec((300, 200000), torch.float32), target="x86-64-v4")
    assert "by max, sum in 3 passes" in low.explain()


@pytest.fixture(scope="module")
def failures() -> Iterator[Interpreter]:
    with Interpreter("tests.triton_online") as process:
        yield process


@pytest.mark.parametrize("check", triton_online.CHECKS)
@pytest.mark.quick(where=triton_online.is_quick)
def test_numbers(check: str, failures: Interpreter) -> None:
    assert failures[check] == []
