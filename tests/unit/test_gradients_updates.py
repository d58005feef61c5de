"""Gradients of functions that update tensors in place, and the versions of what is updated."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import jitgen
from jitgen.compilers import host
from jitgen.errors import UnsupportedError

pytestmark = pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")

Way = Callable[[Any], Any]


def compiled(function: Any) -> Any:
    importlib.import_module("jitgen.dynamo.registration")
    torch._dynamo.reset()
    return torch.compile(function, backend="jitgen")


WAYS: dict[str, Way] = {"jit": jitgen.jit, "compile": compiled}
SOME = ["jit", pytest.param("compile", marks=pytest.mark.slow)]


def cached(cache: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    cache.index_copy_(0, at, x @ weight)
    return torch.softmax(x @ cache.t(), -1) @ cache


@pytest.mark.parametrize("way", SOME)
def test_keys_that_are_appended_to_a_cache_have_gradients(way: str) -> None:
    function, at = WAYS[way](cached), torch.tensor([1, 3])
    start, x, weight = torch.randn(5, 8), torch.randn(2, 8), torch.randn(8, 8)
    found = []
    for run, dtype in ((function, torch.float32), (cached, torch.float64)):
        leaves = x.to(dtype, copy=True).requires_grad_(), weight.to(dtype, copy=True).requires_grad_()
        cache = start.to(dtype, copy=True)
        (run(cache, *leaves, at).sum() + cache.square().sum()).backward()
        found.append([cache.detach(), *(leaf.grad for leaf in leaves)])
    for result, reference in zip(*found, strict=True):
        # Six sums one after another, of 8 terms at most, and the roundings of a softmax.
        bound = 64 * torch.finfo(torch.float32).eps * reference.abs().max().item()
        torch.testing.assert_close(result.double(), reference, rtol=0, atol=bound)


@pytest.mark.parametrize("way", SOME)
def test_an_argument_that_has_a_history_may_be_updated_and_returned(way: str) -> None:
    function = WAYS[way](lambda y, x: y.mul_(x))
    first, second = (torch.randn(4, requires_grad=True) for _ in range(2))
    y = first * 2
    result = function(y, second)
    assert result is y
    result.sum().backward()
    torch.testing.assert_close((first.grad, second.grad), (2 * second.detach(), 2 * first.detach()))


def test_a_leaf_is_updated_as_torch_allows() -> None:
    def step(parameter: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            parameter.sub_(x)
        return parameter * x  # its gradient reaches the leaf in eager torch

    parameter, x = torch.ones(3, requires_grad=True), torch.randn(3)
    with pytest.raises(jitgen.UnsupportedError, match=r"(?s)requires grad .* torch\.no_grad"):
        jitgen.jit(step)(parameter, x)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        jitgen.jit(lambda x: x.add_(1))(parameter)
    with torch.no_grad():
        torch.testing.assert_close(jitgen.jit(step)(parameter, x), (1 - x) * x)


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(8, 6), nn.BatchNorm1d(6)
        self.register_buffer("average", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.up(x))
        self.average.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return torch.relu(y)


def test_running_statistics_and_counters_stay_in_kernels_in_training() -> None:
    model = Normalized()
    other = copy.deepcopy(model)
    run = compiled(other)
    with warnings.catch_warnings():
        warnings.simplefilter("error", jitgen.FallbackWarning)
        for _ in range(3):
            x = torch.randn(5, 8)
            for each in (model, run):
                each(x).square().mean().backward()
    assert jitgen.report(other).share_of_nodes == 1
    torch.testing.assert_close(other.state_dict(), model.state_dict())
    found = [[parameter.grad for parameter in each.parameters()] for each in (other, model)]
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-5)
    assert not other.norm.running_mean.requires_grad


def test_autograd_sees_that_a_kernel_has_updated_what_it_saved() -> None:
    add = jitgen.jit(lambda x: x.add_(1))
    weight, x = torch.ones(3), torch.ones(3, requires_grad=True)
    y = (x * weight).sum()
    add(weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    double, out = jitgen.jit(lambda x: x * 2), torch.empty(3)
    y = (x * double(weight, out=out)).sum()
    double(weight, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    with torch.inference_mode():
        add(torch.ones(3))


def test_a_batch_norm_function_updates_nothing_that_has_gradients() -> None:
    @jitgen.jit
    def normalized(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, mean, variance, training=True)

    x = torch.randn(4, 3, requires_grad=True)
    mean, variance = torch.zeros(3), torch.ones(3)
    normalized(x, mean, variance).sum().backward()
    wanted = torch.zeros(3), torch.ones(3)
    F.batch_norm(x, *wanted, training=True)
    torch.testing.assert_close((mean, variance), wanted)
    assert not mean.requires_grad


@pytest.mark.slow
def test_a_whole_training_step_may_be_compiled_with_its_optimizer() -> None:
    def run(way: Way) -> list[torch.Tensor]:
        torch.manual_seed(0)
        leaves = [torch.randn(4, 8).requires_grad_(), torch.randn(8, 3).requires_grad_()]
        optimizer = torch.optim.AdamW(leaves, lr=1e-2)

        def step() -> torch.Tensor:
            optimizer.zero_grad()
            loss = torch.tanh(leaves[0] @ leaves[1]).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        step = way(step)
        for _ in range(3):
            step()
        return leaves

    torch.testing.assert_close(run(compiled), run(lambda step: step))


@pytest.mark.parametrize("other", [lambda b: b, lambda b: b[2:], lambda b: b.view(6)[:4]])
def test_an_updated_argument_that_shares_memory_is_refused_with_gradients_too(other: Callable[..., Any]) -> None:
    @jitgen.jit
    def function(a: Any, b: Any) -> Any:
        a.mul_(2)
        return a[:2] + b[:2]

    x = torch.arange(1.0, 7.0, requires_grad=True)
    for _ in range(2):
        b = x * 1
        with pytest.raises(UnsupportedError, match="shares memory with another argument"):
            function(b, other(b))
        assert torch.equal(b, x)
    apart = x * 1
    torch.testing.assert_close(function(apart[:3], apart[3:]), x[:2] * 2 + x[3:5])


def through_data(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.data.mul_(3)
    return y * y


def through_detach(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    part = y.detach()[1:]
    part.add_(1)
    return y[1:] * part


def under_no_grad(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    with torch.no_grad():
        y.clamp_(0.5, 3)
    return y * y


def a_part_under_no_grad(x: torch.Tensor) -> torch.Tensor:
    y = torch.sin(x)
    with torch.no_grad():
        y[1] = 3
        y[2:] *= 2
    y = y * x
    y[0] = x[1]
    return y * y


def a_new_tensor_under_no_grad(x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(x)
    with torch.no_grad():
        total += x
    total = total + x
    return total * x


def unrelated_buffer(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        BUFFER.mul_(0.5).add_(x.detach())
    return x * BUFFER


BUFFER = torch.ones(4)
UNTRACKED = [through_data, through_detach, under_no_grad, a_part_under_no_grad, a_new_tensor_under_no_grad]
UNTRACKED += [unrelated_buffer]


@pytest.mark.parametrize("is_leaf", [True, False])
@pytest.mark.parametrize("function", UNTRACKED)
@pytest.mark.covering(1)
def test_an_update_that_autograd_does_not_know_of_keeps_the_gradient_of_what_it_updates(
    function: Callable[..., Any], is_leaf: bool
) -> None:
    found = []
    for called in (function, jitgen.jit(function)):
        BUFFER.fill_(1)
        leaf = torch.tensor([0.25, 0.5, 1.0, 2.0], requires_grad=True)
        result = called(leaf if is_leaf else leaf * 1)
        found.append((result, torch.autograd.grad(result.sum(), leaf), BUFFER.clone()))
    torch.testing.assert_close(found[1], found[0])


def clamps_a_parameter(x: torch.Tensor) -> torch.Tensor:
    WEIGHT.data.clamp_(0, 1)
    return x * WEIGHT


def doubles_its_argument(x: torch.Tensor) -> torch.Tensor:
    x.detach().mul_(2)
    return x * 1


def adds_to_detached(x: torch.Tensor) -> torch.Tensor:
    y = (x * 2).detach()
    y.add_(x)
    z = x * 3
    z.detach().add_(x)
    return z


def drops_the_history(x: torch.Tensor) -> torch.Tensor:
    x.requires_grad_(False)
    return x * 2


WEIGHT = nn.Parameter(torch.full((4,), 3.0))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (clamps_a_parameter, "updates an argument that requires grad without a gradient"),
        (doubles_its_argument, "updates an argument that requires grad without a gradient"),
        (adds_to_detached, "updates a detached tensor with a value that requires grad"),
        (drops_the_history, "of what requires grad"),
    ],
)
def test_updates_whose_gradients_would_be_others_are_refused(function: Callable[..., Any], words: str) -> None:
    x = torch.ones(4, requires_grad=True)
    with pytest.raises(UnsupportedError, match=words) as refused:
        jitgen.jit(function)(x)
    assert f"{__file__}:" in str(refused.value)
    assert (x.tolist(), WEIGHT.tolist(), x.requires_grad) == ([1] * 4, [3] * 4, True)
