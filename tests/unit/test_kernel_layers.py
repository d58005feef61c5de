"""Layers for the ``kernels`` package, and the attention function for transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import jitgen
from jitgen.compilers import host
from jitgen.huggingface import layers

pytestmark = pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.rand(width) + 0.5), 1e-5

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden_states, hidden_states.shape[-1:], self.weight, self.variance_epsilon)


class Gated(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up


def test_kernelize_puts_generated_kernels_into_a_model() -> None:
    kernels = pytest.importorskip("kernels", reason="the kernels package is not installed")
    norm = kernels.use_kernel_forward_from_hub("RMSNorm")(type("Norm", (Norm,), {}))
    gated = kernels.use_kernel_forward_from_hub("SiluAndMul")(type("Gated", (Gated,), {}))

    @kernels.use_kernel_forward_from_hub("rotary_pos_emb")
    def rotary(q, k, cos, sin, unsqueeze_dim=1):  # type: ignore[no-untyped-def]
        raise AssertionError("this is to be replaced")

    model = nn.Sequential(norm(8), gated())
    model.add_module("rotary", rotary)
    x = torch.randn(3, 8)
    expected = nn.Sequential(model[0], model[1])(x)
    with kernels.use_kernel_mapping(layers.mapping()):
        kernels.kernelize(model, mode=kernels.Mode.TRAINING, device="cpu", use_fallback=False)
    assert model[0].forward.__func__ is layers.RMSNorm.forward
    found = model[1](model[0](x))
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    assert model[0].weight.grad is not None
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    cos, sin = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    for ours, each in zip(rotary(q, k, cos, sin), (q, k), strict=True):
        torch.testing.assert_close(ours, rotated(each, cos, sin))


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]


@pytest.mark.parametrize("name", layers.LAYERS)
def test_a_layer_is_stateless(name: str) -> None:
    """What ``kernels`` asks of a layer, where it is not installed."""
    layer = layers.mapping()[name]["cuda"].load()
    assert layer.__init__ is nn.Module.__init__
    assert set(dir(layer)) - set(dir(nn.Module)) <= {"can_torch_compile", "has_backward"}
    assert hash(layers.Here(name)) == hash(layers.Here(name))


def test_layers_compute_what_modules_do() -> None:
    norm, x = Norm(16), torch.randn(3, 5, 16)
    torch.testing.assert_close(layers.RMSNorm.forward(norm, x), norm(x))  # type: ignore[arg-type]
    torch.testing.assert_close(layers.SiluAndMul()(x), Gated()(x))
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    cos, sin = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    ours = layers.Rotary()(q.transpose(1, 2), k.transpose(1, 2), cos, sin, 2)
    torch.testing.assert_close(ours[0].transpose(1, 2), rotated(q, cos, sin))
    torch.testing.assert_close(ours[1].transpose(1, 2), rotated(k, cos, sin))


@pytest.mark.parametrize("masked", [False, True])
def test_attention_of_transformers(masked: bool) -> None:
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    mask = torch.randn(2, 1, 5, 5) if masked else None
    found, weights = layers.attention(nn.Module(), q, k, v, mask, 0.3)
    assert weights is None
    expected = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(found, expected.transpose(1, 2))
    with pytest.raises(jitgen.UnsupportedError, match="dropout"):
        layers.attention(nn.Module(), q, k, v, mask, dropout=0.1)


@pytest.mark.parametrize("name", [*layers.CHANGES_RESULTS, "sliding_window"])
def test_attention_refuses_what_it_does_not_compute(name: str) -> None:
    q, k, v = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    with pytest.raises(jitgen.UnsupportedError, match=name.replace("_", "[ _]")):
        layers.attention(nn.Module(), q, k, v, None, **{name: 1})


def llama(name: str) -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 50}
    config = transformers.LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)
    torch.manual_seed(3)
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation=name).eval()


TOKENS, PADDED = torch.arange(18).reshape(2, 9), torch.ones(2, 9, dtype=torch.long)
PADDED[1, :4] = 0


def of_padded_tokens(model: Any) -> torch.Tensor:
    return model(TOKENS, attention_mask=PADDED).logits[PADDED.bool()]  # type: ignore[no-any-return]


def in_chunks(model: Any) -> torch.Tensor:
    first = model(TOKENS[:, :4], use_cache=True)
    second = model(TOKENS[:, 4:8], past_key_values=first.past_key_values, use_cache=True)
    third = model(TOKENS[:, 8:], past_key_values=second.past_key_values, use_cache=True)
    return torch.cat((first.logits, second.logits, third.logits), 1)


@pytest.mark.parametrize("run", [of_padded_tokens, in_chunks])
def test_a_model_of_transformers_attends_with_it(run: Callable[[Any], torch.Tensor]) -> None:
    model = llama("eager")
    with torch.no_grad():
        expected = run(model)
        layers.register_attention()
        model.set_attn_implementation("jitgen")
        torch.testing.assert_close(run(model), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("run", [of_padded_tokens, in_chunks])
def test_attention_without_masks_is_refused(run: Callable[[Any], torch.Tensor]) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    transformers.AttentionInterface.register("no_masks", layers.attention)
    with torch.no_grad(), pytest.raises(jitgen.UnsupportedError, match=r"register_attention\('no_masks'\)"):
        run(llama("no_masks"))


@pytest.mark.slow
def test_a_model_with_sliding_windows() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    layers.register_attention()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 50}
    config = transformers.MistralConfig(num_attention_heads=4, num_key_value_heads=2, sliding_window=3, **sizes)
    model = transformers.MistralForCausalLM._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = of_padded_tokens(model), in_chunks(model)
        model.set_attn_implementation("jitgen")
        found = of_padded_tokens(model), in_chunks(model)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
