"""Mixtures of experts: models of transformers with tiny random weights, dense and quantised, and one in training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import jitgen

VOCABULARY = 128
_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SMALL = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_QWEN = {**_SMALL, "num_experts": 8, "decoder_sparse_step": 1}
_LATENT = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "topk_group": 1,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2Moe": {**_QWEN, "shared_expert_intermediate_size": 64},
    "Qwen3Moe": {**_QWEN, "head_dim": 16, "norm_topk_prob": True},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 16},
    "Olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "GraniteMoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV2": {**_LATENT, **_SMALL, "n_group": 1, "topk_method": "greedy"},
    "DeepseekV3": {**_LATENT, **_SMALL, "n_group": 2},
    "Llama4": {
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 128,
        "head_dim": 16,
        "interleave_moe_layer_step": 1,
        "attn_temperature_tuning": False,
    },
}
COMPLEX = ("DeepseekV2", "Llama4")
"""Models whose rotary embedding is of complex numbers, which torch computes."""


def mixture(name: str, **changes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}TextConfig" if name == "Llama4" else f"{name}Config")
    torch.manual_seed(37)
    model = transformers.AutoModelForCausalLM.from_config(config(**{**_SIZES, **MIXTURES[name], **changes})).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.08)
    return model


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.quick(where=lambda name, format: (name, format) == ("Qwen3Moe", "int4"))
@pytest.mark.parametrize("format", [None, "int4"])
@pytest.mark.parametrize("name", MIXTURES)
@torch.no_grad()
def test_logits_are_those_of_eager(name: str, format: str | None) -> None:
    model, tokens = mixture(name), torch.randint(3, VOCABULARY, (2, 9))
    if format is not None:
        jitgen.quantize_(model, format, 32)
    wanted = model(tokens).logits
    compiled = torch.compile(model, backend="jitgen")
    torch.testing.assert_close(compiled(tokens).logits, wanted, rtol=0, atol=2e-5)
    one = tokens[:1, :1]  # as many rows as a token has experts
    torch.testing.assert_close(compiled(one).logits, model(one).logits, rtol=0, atol=2e-5)
    report = jitgen.report(compiled)
    assert report.graphs <= 2  # one more for other sizes
    assert name in COMPLEX or report.share_of_nodes == 1, report


@pytest.mark.usefixtures("fresh_dynamo")
@torch.no_grad()
def test_greedy_tokens_are_equal() -> None:
    model, tokens = mixture("Qwen3Moe", num_hidden_layers=1), torch.randint(3, VOCABULARY, (1, 5))
    jitgen.quantize_(model, "int4", 32)
    wanted, found = tokens, tokens
    for _ in range(4):
        wanted = torch.cat([wanted, model(wanted).logits[:, -1:].argmax(-1)], 1)
    compiled = torch.compile(model, backend="jitgen", dynamic=True)
    for _ in range(4):
        found = torch.cat([found, compiled(found).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(found, wanted)


@pytest.mark.usefixtures("fresh_dynamo")
@torch.no_grad()
def test_a_token_reads_the_matrices_that_it_chooses() -> None:
    """transformers' other implementation multiplies by ``w[ids]``."""
    model, token = mixture("Qwen3Moe", num_hidden_layers=1), torch.randint(3, VOCABULARY, (1, 1))
    jitgen.quantize_(model, "int4", 32)
    wanted = model(token).logits
    model.config._experts_implementation = "batched_mm"
    torch.testing.assert_close(model(token).logits, wanted, rtol=0, atol=2e-5)
    compiled = torch.compile(model, backend="jitgen", dynamic=False)
    torch.testing.assert_close(compiled(token).logits, wanted, rtol=0, atol=2e-5)
    assert jitgen.report(compiled).share_of_nodes == 1


@pytest.mark.quick(where=lambda name: name == "GptOss")
@pytest.mark.parametrize("name", ["GptOss", "Mixtral", "DeepseekV3", "Llama4"])
@torch.no_grad()
def test_files_hold_quantised_experts(name: str, tmp_path: Path) -> None:
    model, tokens = mixture(name), torch.randint(3, VOCABULARY, (1, 5))
    jitgen.quantize_(model, "int4", 32)
    wanted = model(tokens).logits
    jitgen.save_quantized(model, tmp_path / "model.safetensors")
    again = mixture(name)
    jitgen.load_quantized(tmp_path / "model.safetensors", model=again)
    assert torch.equal(again(tokens).logits, wanted)


def mixed(x: Any, router: Any, up: Any, down: Any) -> Any:
    """A mixture of two experts of each row, as transformers computes it with grouped products."""
    weights, chosen = torch.topk(torch.softmax(F.linear(x, router), -1), 2)
    weights = (weights / weights.sum(-1, keepdim=True)).reshape(-1)
    ids, order = torch.sort(chosen.reshape(-1))
    counts = (ids[:, None] == torch.arange(router.shape[0])).sum(0)
    ends = counts.cumsum(0).to(torch.int32)
    gate, value = torch._grouped_mm(x[order // 2], up.transpose(-2, -1), ends).chunk(2, -1)
    rows = torch._grouped_mm(F.silu(gate) * value, down.transpose(-2, -1), ends) * weights[order].unsqueeze(-1)
    back = torch.empty_like(order).scatter(0, order, torch.arange(order.shape[0]))
    return rows[back].view(x.shape[0], 2, x.shape[1]).sum(1)


def looped(x: torch.Tensor, router: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """The same as a sum over all experts."""
    weights, chosen = torch.topk(torch.softmax(F.linear(x, router), -1), 2)
    weights = weights / weights.sum(-1, keepdim=True)
    result = torch.zeros(x.shape[0], down.shape[1], dtype=x.dtype)
    for expert in range(router.shape[0]):
        gate, value = F.linear(x, up[expert]).chunk(2, -1)
        share = (weights * (chosen == expert)).sum(-1, keepdim=True)
        result = result + F.linear(F.silu(gate) * value, down[expert]) * share
    return result


@pytest.mark.parametrize("tokens", [0, 3])
def test_every_weight_has_a_gradient(tokens: int) -> None:
    """Of no tokens gradients are zeros, as in torch: what waits for those of all weights would wait for ever."""
    weights = [torch.randn(size, requires_grad=True) for size in ((tokens, 16), (6, 16), (6, 32, 16), (6, 16, 16))]
    jitgen.jit(mixed)(*weights).sum().backward()
    exact = [weight.detach().double().requires_grad_() for weight in weights]
    looped(*exact).sum().backward()
    for weight, wanted in zip(weights, exact, strict=True):
        assert weight.grad is not None
        assert wanted.grad is not None
        torch.testing.assert_close(weight.grad.double(), wanted.grad, rtol=1e-4, atol=1e-4)


def test_a_mixture_is_trained() -> None:
    """Losses of some steps, with the router in them, are those of float64."""
    generator = torch.Generator().manual_seed(5)
    sizes = ((6, 16), (6, 32, 16), (6, 16, 16))
    start = [torch.randn(size, generator=generator) * 0.3 for size in sizes]
    x, target = (torch.randn(40, 16, generator=generator) for _ in range(2))
    run = jitgen.jit(lambda x, target, *weights: F.mse_loss(mixed(x, *weights), target))

    def reference(x: torch.Tensor, target: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(looped(x, *weights), target)

    losses = []
    functions: tuple[tuple[Callable[..., Any], torch.dtype], ...] = ((run, torch.float32), (reference, torch.float64))
    for function, dtype in functions:
        weights = [nn.Parameter(weight.to(dtype, copy=True)) for weight in start]
        optimiser = torch.optim.SGD(weights, lr=0.5)
        history = []
        for _ in range(6):
            loss = function(x.to(dtype), target.to(dtype), *weights)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            history.append(loss.item())
        losses.append(history)
    assert losses[0][-1] < 0.9 * losses[0][0]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
