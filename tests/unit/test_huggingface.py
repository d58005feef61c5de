"""``JitgenConfig`` in transformers: quantised as it is loaded, saved, loaded again; tiny models made here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import jitgen
from jitgen.errors import FormatError, UnsupportedError
from jitgen.quant.qtensor import QTensor

transformers = pytest.importorskip(
    "transformers", minversion="5.0", reason="needs transformers 5: pip install transformers"
)
quantizer = pytest.importorskip("jitgen.huggingface.quantizer")

IDS = torch.arange(14).reshape(2, 7)
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
}


def llama(directory: Path, **changes: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **changes)).eval()
    model.save_pretrained(directory)
    return model


def weights(model: torch.nn.Module) -> dict[str, QTensor]:
    return {name: weight for name, weight in model.named_parameters() if isinstance(weight, QTensor)}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("device_map", [None, "cpu"])
def test_from_pretrained_and_back(device_map: str | None, tmp_path: Path) -> None:
    plain = llama(tmp_path / "plain")
    load = transformers.AutoModelForCausalLM.from_pretrained
    config = jitgen.JitgenConfig("int4", group_size=32)
    model = load(tmp_path / "plain", quantization_config=config, device_map=device_map)
    assert len(weights(model)) == 7  # every Linear but the output layer
    assert all(weight.format == "int4" and weight.group_size == 32 for weight in weights(model).values())
    assert torch.equal(
        weights(model)["model.layers.0.mlp.up_proj.weight"],
        jitgen.quantize(plain.model.layers[0].mlp.up_proj.weight, "int4", 32),
    )
    expected = logits(model)
    assert (expected - logits(plain)).norm() < 0.25 * logits(plain).norm()
    model.save_pretrained(tmp_path / "quantised")
    again = load(tmp_path / "quantised", device_map=device_map)
    assert again.config.quantization_config.group_size == 32
    assert torch.equal(logits(again), expected)
    assert set(weights(again)) == set(weights(model))
    state = jitgen.load_quantized(tmp_path / "quantised")
    assert {name for name, tensor in state.items() if isinstance(tensor, QTensor)} == set(weights(model))
    dense = again.dequantize()
    assert not weights(dense)
    torch.testing.assert_close(logits(dense), expected, rtol=1e-4, atol=1e-4)


def test_tied_embeddings_share_their_codes(tmp_path: Path) -> None:
    llama(tmp_path / "plain", tie_word_embeddings=True)
    load = transformers.AutoModelForCausalLM.from_pretrained
    config = jitgen.JitgenConfig("int8", group_size=None, embeddings=True)
    model = load(tmp_path / "plain", quantization_config=config)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert isinstance(model.lm_head.weight, QTensor)
    model.save_pretrained(tmp_path / "quantised")
    again = load(tmp_path / "quantised")
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(logits(again), logits(model))


def test_patterns_and_modules_that_are_kept(tmp_path: Path) -> None:
    llama(tmp_path)
    config = jitgen.JitgenConfig(
        {"*mlp*": ("int3", 32), "*": "int8"}, None, modules_to_not_convert=["q_proj", "lm_head"]
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    formats = {name.split(".")[-2]: weight.format for name, weight in weights(model).items()}
    assert formats == {
        "k_proj": "int8",
        "v_proj": "int8",
        "o_proj": "int8",
        "gate_proj": "int3",
        "up_proj": "int3",
        "down_proj": "int3",
    }


def test_experts_and_conv1d(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    torch.manual_seed(0)
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4)
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path / "mixtral")
    transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=32, bos_token_id=None, eos_token_id=None)
    ).save_pretrained(tmp_path / "gpt2")
    load = transformers.AutoModelForCausalLM.from_pretrained
    mixtral = load(tmp_path / "mixtral", quantization_config=jitgen.JitgenConfig("int4", 32))
    assert weights(mixtral)["model.layers.0.mlp.experts.gate_up_proj"].shape == (4, 192, 64)
    assert logits(mixtral).isfinite().all()
    expected = logits(mixtral)
    mixtral.save_pretrained(tmp_path / "quantised")
    assert torch.equal(logits(load(tmp_path / "quantised")), expected)
    state = jitgen.load_quantized(tmp_path / "quantised")
    assert state["model.layers.0.mlp.experts.down_proj"].shape == (4, 64, 96)
    dense = mixtral.dequantize()
    dense.save_pretrained(tmp_path / "dense")
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("mixtral", "dense")]
    assert files[0].keys() == files[1].keys()
    torch.testing.assert_close(logits(load(tmp_path / "dense")), logits(dense))
    gpt2 = load(tmp_path / "gpt2", quantization_config=jitgen.JitgenConfig("int4", 32))
    assert weights(gpt2)["transformer.h.0.attn.c_attn.weight"].shape == (64, 192)
    assert not gpt2.transformer.h[0].attn.c_attn.bias.requires_grad
    assert "transformer.h.0.attn.c_attn.bias" in gpt2.hf_quantizer.frozen_biases
    expected = logits(gpt2)
    gpt2.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(load(tmp_path / "again")), expected)


def test_what_is_left_as_it_was_is_named_and_trainable(tmp_path: Path) -> None:
    model = llama(tmp_path)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = torch.nan
    model.save_pretrained(tmp_path)
    config = jitgen.JitgenConfig({"*.down_proj": None, "*": ("int4", 32)})
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    skipped = {layer.name: layer.reason for layer in loaded.hf_quantizer.skipped}
    assert skipped.keys() == {f"model.layers.0.mlp.{name}_proj" for name in ("up", "down")}
    assert "no pattern" in skipped["model.layers.0.mlp.down_proj"]
    dense = loaded.model.layers[0].mlp
    assert dense.up_proj.weight.requires_grad
    assert dense.down_proj.weight.requires_grad


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="unknown format"):
        jitgen.JitgenConfig("int9")
    llama(tmp_path)
    with pytest.raises(UnsupportedError, match="disk"):
        transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path,
            quantization_config=jitgen.JitgenConfig("int4", 32),
            device_map={"model": "disk", "lm_head": "cpu"},
        )


@pytest.mark.parametrize("kept", ["q_proj", "k_proj", "v_proj"])
def test_one_tensor_of_a_file_that_is_several_weights(
    kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file, save_file
    from transformers import conversion_mapping
    from transformers.core_model_loading import Chunk, WeightConverter

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SIZES, "num_key_value_heads": 4})
    plain = transformers.LlamaForCausalLM(config).eval()
    plain.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    attention = "model.layers.0.self_attn"
    names = [f"{attention}.{name}.weight" for name in ("q_proj", "k_proj", "v_proj")]
    state[f"{attention}.qkv.weight"] = torch.cat([state.pop(name) for name in names])
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    targets = [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj")]
    converter = WeightConverter("self_attn.qkv", targets, operations=[Chunk(dim=0)])
    cache = dict(conversion_mapping._build_checkpoint_conversion_mapping())
    monkeypatch.setattr(conversion_mapping, "_checkpoint_conversion_mapping_cache", {**cache, "llama": [converter]})
    load = transformers.AutoModelForCausalLM.from_pretrained
    quantization = jitgen.JitgenConfig("int8", 32, modules_to_not_convert=[kept, "lm_head"])
    model = load(tmp_path, quantization_config=quantization)
    assert {name for name in names if name not in weights(model)} == {f"{attention}.{kept}.weight"}
    assert model.hf_quantizer.skipped == []
    state = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        found = state[name].dequantize() if isinstance(state[name], QTensor) else state[name]
        torch.testing.assert_close(found, parameter.detach(), rtol=0.01, atol=0.01)
    torch.testing.assert_close(logits(model), logits(plain), rtol=0.02, atol=0.02)


def test_a_weight_that_no_file_has_is_not_quantised_and_named(tmp_path: Path) -> None:
    llama(tmp_path)
    load = transformers.AutoModelForSequenceClassification.from_pretrained
    config = jitgen.JitgenConfig("int8", 32, modules_to_not_convert=["lm_head"])
    model = load(tmp_path, quantization_config=config, num_labels=4)
    assert not isinstance(model.score.weight, QTensor)
    assert [layer.name for layer in model.hf_quantizer.skipped] == ["score.weight"]
    assert "random" in model.hf_quantizer.skipped[0].reason
