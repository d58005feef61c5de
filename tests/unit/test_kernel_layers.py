"""Layers for the ``kernels`` package, and the attention function for transformers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import jitgen
from jitgen.compile import host
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


@pytest.mark.slow
def test_a_model_of_transformers_attends_with_it() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    layers.register_attention()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 50}
    config = transformers.LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager").eval()
    tokens, padded = torch.randint(0, 50, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    padded[1, :4] = 0
    found = {}
    for name in ("eager", "jitgen"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            found[name] = model(tokens, attention_mask=padded).logits[padded.bool()]
    torch.testing.assert_close(found["jitgen"], found["eager"], rtol=1e-4, atol=1e-5)
