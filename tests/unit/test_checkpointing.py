"""Activation checkpointing: what the backward computes again is what the forward computed, random numbers too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import jitgen
from jitgen.compilers import host

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler"),
]

BACKENDS = [None, "aot_eager", pytest.param("inductor", marks=pytest.mark.slow), "jitgen"]
RANDOM: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: F.dropout(x.sin(), 0.5),
    "rand": lambda x: x * torch.rand(x.shape),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "randn": lambda x: x * torch.randn_like(x),
}
"""Functions whose gradient at ones is their result times a constant: of the same random numbers."""


def compiled(function: Callable[..., Any], backend: str | None) -> Callable[..., Any]:
    return function if backend is None else torch.compile(function, backend=backend)


def check(function: Callable[..., Any], name: str) -> None:
    """The numbers of forward and backward are equal, each call has others, and a seed brings them back."""
    torch.manual_seed(5)
    results = []
    for _ in range(2):
        x = torch.ones(1000, requires_grad=True)
        y = function(x)
        state = torch.get_rng_state()
        y.sum().backward()
        slope = torch.cos(torch.ones(())) / torch.sin(torch.ones(())) if name == "dropout" else 1.0
        torch.testing.assert_close(x.grad, y.detach() * slope)
        assert torch.equal(torch.get_rng_state(), state)
        results.append(y.detach())
    assert not torch.equal(*results)
    torch.manual_seed(5)
    assert torch.equal(function(torch.ones(1000, requires_grad=True)).detach(), results[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_decorated", [True, False])
@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.covering(1)
def test_random_numbers_of_the_backward_are_those_of_the_forward(
    name: str, is_decorated: bool, backend: str | None
) -> None:
    function = jitgen.jit(RANDOM[name]) if is_decorated else RANDOM[name]
    check(compiled(lambda x: checkpoint(function, x, use_reentrant=False), backend), name)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.covering(1)
def test_nested_checkpoints(use_reentrant: bool, backend: str | None) -> None:
    function = jitgen.jit(RANDOM["dropout"])

    def inner(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(function, x * 1.0, use_reentrant=use_reentrant)

    check(compiled(lambda x: checkpoint(inner, x, use_reentrant=use_reentrant), backend), "dropout")


@pytest.mark.parametrize("preserves", [True, False])
def test_the_backend_keeps_the_generator_whatever_the_checkpoint_says(preserves: bool) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(RANDOM["dropout"], x, use_reentrant=False, preserve_rng_state=preserves)

    model = torch.compile(function, backend="jitgen")
    check(model, "dropout")
    report = jitgen.report(model)
    assert (report.share_of_nodes, len(report.nodes)) == (1.0, 2), report


def saves_products(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = operator is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("backend", [None, "aot_eager", "jitgen"])
@pytest.mark.parametrize("is_decorated", [True, False])
@pytest.mark.covering(1)
def test_selective_checkpointing(is_decorated: bool, backend: str | None) -> None:
    def dropped(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.dropout((x @ weight).sin(), 0.5)

    function = jitgen.jit(dropped) if is_decorated else dropped
    contexts = functools.partial(create_selective_checkpoint_contexts, saves_products)
    torch.manual_seed(0)
    x, weight = torch.randn(8, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)
    model = compiled(lambda x, w: checkpoint(function, x, w, use_reentrant=False, context_fn=contexts), backend)
    y = model(x, weight)
    found = torch.autograd.grad(y.sum(), (x, weight))
    mask = (y != 0) * 2.0
    wanted = torch.autograd.grad(((x @ weight).sin() * mask).sum(), (x, weight))
    for each, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(each, right)
    if backend == "jitgen":
        assert jitgen.report(model).share_of_nodes == (1.0 if is_decorated else 0.0)


@pytest.mark.slow
def test_gradient_checkpointing_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=64, attn_pdrop=0.3, use_cache=False)
    config.bos_token_id = config.eos_token_id = 0
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).train()
    tokens = torch.randint(0, 64, (2, 9))
    gradients = []
    for is_checkpointed in (False, True):
        torch._dynamo.reset()
        if is_checkpointed:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        torch.manual_seed(3)
        torch.compile(model, backend="jitgen")(tokens, labels=tokens).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, again in zip(*gradients, strict=True):
        assert torch.equal(plain, again)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow), "jitgen"])
def test_random_tensors_of_a_function_without_tensor_arguments(backend: str) -> None:
    function = jitgen.jit(lambda: torch.rand(100))
    model = torch.compile(lambda: function() + 1, backend=backend)
    torch.manual_seed(1)
    first, second = model(), model()
    assert not torch.equal(first, second)
    assert first.min() >= 1
    assert first.max() < 2
    torch.manual_seed(1)
    assert torch.equal(model(), first)


@pytest.mark.parametrize("backend", ["aot_eager", "jitgen"])
def test_buffers_that_a_checkpointed_module_updates(backend: str) -> None:
    """BatchNorm counts its calls, and torch takes an updated argument of a checkpoint for a mistake."""
    torch.manual_seed(3)
    norm, x = torch.nn.BatchNorm1d(6).double(), torch.randn(5, 6, dtype=torch.float64, requires_grad=True)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda t: torch.tanh(norm(t)), x, use_reentrant=False)

    (wanted,) = torch.autograd.grad(torch.tanh(F.batch_norm(x, None, None, training=True)).square().sum(), x)
    for call in (1, 2):
        (found,) = torch.autograd.grad(compiled(forward, backend)(x).square().sum(), x)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
        assert norm.num_batches_tracked == call
        left = 0.9**call
        torch.testing.assert_close(norm.running_mean, (1 - left) * x.detach().mean(0), rtol=0, atol=1e-12)
        torch.testing.assert_close(norm.running_var, left + (1 - left) * x.detach().var(0), rtol=0, atol=1e-12)
