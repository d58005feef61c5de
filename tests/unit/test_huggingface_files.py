"""Every file that jitgen writes of a model of transformers is read back by every loader, for a table of models.

The models have what makes files differ: heads that another class has not, tied weights, weights that are stored (K, N),
experts, parameters whose names in checkpoints are others than in memory, and models of several models.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import jitgen
from jitgen.quant.qtensor import QTensor

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip(
    "transformers", minversion="5.0", reason="needs transformers 5: pip install transformers"
)
pytest.importorskip("jitgen.huggingface.quantizer")
safe_open = pytest.importorskip("safetensors").safe_open

_ONE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
_TEXT = {**_ONE, "vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_EXPERTS = {**_TEXT, "num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
_GPT2 = {"vocab_size": 97, "n_embd": 64, "n_layer": 1, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 1, "num_heads": 4, "vocab_size": 97}
_IMAGE = {**_ONE, "image_size": 32, "patch_size": 16}


def _llava() -> Any:
    vision = transformers.CLIPVisionConfig(**_IMAGE, projection_dim=64)
    return transformers.LlavaConfig(vision_config=vision, text_config=transformers.LlamaConfig(**_TEXT))


def _laguna() -> Any:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    layers = {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 16}
    return transformers.LagunaConfig(**_TEXT | experts | layers)


def _hrm() -> Any:
    return transformers.HrmTextConfig(**_TEXT, num_key_value_heads=4, head_dim=16)


MODELS: dict[str, tuple[str, Callable[[], Any], tuple[str, ...]]] = {
    "Llama": (
        "LlamaForCausalLM",
        lambda: transformers.LlamaConfig(**_TEXT),
        ("LlamaModel", "LlamaForSequenceClassification"),
    ),
    "Llama without head": ("LlamaModel", lambda: transformers.LlamaConfig(**_TEXT), ("LlamaForCausalLM",)),
    "tied Llama": ("LlamaForCausalLM", lambda: transformers.LlamaConfig(**_TEXT, tie_word_embeddings=True), ()),
    "GPT-2": ("GPT2LMHeadModel", lambda: transformers.GPT2Config(**_GPT2), ("GPT2Model",)),
    "GPT-NeoX": ("GPTNeoXForCausalLM", lambda: transformers.GPTNeoXConfig(**_TEXT), ("GPTNeoXModel",)),
    "Mixtral": ("MixtralForCausalLM", lambda: transformers.MixtralConfig(**_EXPERTS), ("MixtralModel",)),
    "Laguna, whose files have other names": ("LagunaForCausalLM", _laguna, ("LagunaModel",)),
    "gpt-oss": ("GptOssForCausalLM", lambda: transformers.GptOssConfig(**_EXPERTS, head_dim=16), ("GptOssModel",)),
    "HRM, whose projections are one tensor in files": ("HrmTextForCausalLM", _hrm, ("HrmTextModel",)),
    "BERT": (
        "BertForMaskedLM",
        lambda: transformers.BertConfig(**_TEXT),
        ("BertModel", "BertForSequenceClassification"),
    ),
    "CamemBERT": (
        "CamembertForMaskedLM",
        lambda: transformers.CamembertConfig(**_TEXT),
        ("CamembertModel", "CamembertForCausalLM"),
    ),
    "T5": ("T5ForConditionalGeneration", lambda: transformers.T5Config(**_T5), ("T5EncoderModel",)),
    "ViT": ("ViTForImageClassification", lambda: transformers.ViTConfig(**_IMAGE), ("ViTModel",)),
    "LLaVA": ("LlavaForConditionalGeneration", _llava, ("LlavaModel",)),
}
"""By name: the class, its configuration, and the classes that load its checkpoints too."""


def fresh(name: str) -> Any:
    torch.manual_seed(0)
    kind, config, _ = MODELS[name]
    return getattr(transformers, kind)(config()).eval()


def quantized(state: dict[str, torch.Tensor]) -> dict[str, QTensor]:
    return {key: tensor for key, tensor in state.items() if isinstance(tensor, QTensor)}


def assert_same(found: Any, expected: Any) -> None:
    ours, theirs = found.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    assert quantized(ours).keys() == quantized(theirs).keys()
    assert [key for key in theirs if not torch.equal(ours[key], theirs[key])] == []


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.quick(where=lambda name: list(MODELS).index(name) % 2 == 0)
def test_save_quantized_and_load_quantized(name: str, tmp_path: Path) -> None:
    model, other = fresh(name), fresh(name)
    jitgen.quantize_(model, "int4", 32, embeddings=name == "tied Llama")
    assert quantized(model.state_dict())
    jitgen.save_quantized(model, tmp_path / "m.safetensors")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    state = jitgen.load_quantized(tmp_path / "m.safetensors", model=other)
    assert_same(other, model)
    assert quantized(state).keys() == quantized(model.state_dict()).keys()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.quick(where=lambda name: list(MODELS).index(name) % 2 == 1 or name == "tied Llama")
def test_save_pretrained_and_every_loader(name: str, tmp_path: Path) -> None:
    kind, _, others = MODELS[name]
    fresh(name).save_pretrained(tmp_path / "plain")
    kind, config = getattr(transformers, kind), jitgen.JitgenConfig("int8", None, embeddings=name == "tied Llama")
    model = kind.from_pretrained(tmp_path / "plain", quantization_config=config)
    weights = quantized(model.state_dict())
    assert weights
    model.save_pretrained(tmp_path / "quantized")
    assert_same(kind.from_pretrained(tmp_path / "quantized"), model)
    state = jitgen.load_quantized(tmp_path / "quantized")
    assert {key for key, tensor in state.items() if isinstance(tensor, QTensor)} == weights.keys()
    filled = fresh(name)
    jitgen.load_quantized(tmp_path / "quantized", model=filled)
    assert_same(filled, model)
    for other in others:
        loaded = getattr(transformers, other).from_pretrained(tmp_path / "quantized")
        prefix = f"{model.base_model_prefix}."
        found = {key.removeprefix(prefix): tensor for key, tensor in quantized(loaded.state_dict()).items()}
        wanted = {key.removeprefix(prefix): tensor for key, tensor in weights.items()}
        assert found
        assert found.keys() <= wanted.keys()
        assert all(torch.equal(tensor, wanted[key]) for key, tensor in found.items())
    model.save_pretrained(tmp_path / "again")
    assert_same(kind.from_pretrained(tmp_path / "again"), model)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.quick(where=lambda name: list(MODELS).index(name) % 2 == 0 or name == "tied Llama")
def test_save_pretrained_of_a_model_that_was_quantised_in_memory(name: str, tmp_path: Path) -> None:
    model, kind = fresh(name), getattr(transformers, MODELS[name][0])
    jitgen.quantize_(model, {"*.0.*": ("int4", 32), "*": "int8"}, embeddings=name == "tied Llama")
    conversions = getattr(model, "_weight_conversions", None)
    for folder in ("first", "again"):
        model.save_pretrained(tmp_path / folder)
    assert model.hf_quantizer is None
    assert getattr(model, "_weight_conversions", None) is conversions
    assert not hasattr(model.config, "quantization_config")
    for found in (kind.from_pretrained(tmp_path / "again"), fresh(name)):
        jitgen.load_quantized(tmp_path / "first", model=found)
        assert_same(found, model)


@pytest.mark.parametrize("method", ["absmax", "smoothquant", "gptq"])
def test_save_pretrained_of_a_calibrated_model(method: str, tmp_path: Path) -> None:
    model, ids = fresh("Llama").eval(), torch.randint(0, 64, (2, 9))
    jitgen.calibrate(model, [{"input_ids": ids}], method, format="int8", activation="int8")
    model.save_pretrained(tmp_path)
    found = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert_same(found, model)
    with torch.no_grad():
        assert torch.equal(found(ids).logits, model(ids).logits)


@torch.no_grad()
def test_what_weights_keep_of_activations_is_in_files(tmp_path: Path) -> None:
    fresh("BERT").save_pretrained(tmp_path / "plain")
    kind = transformers.BertForMaskedLM
    config = jitgen.JitgenConfig("int8", None, activation="int8")
    model = kind.from_pretrained(tmp_path / "plain", quantization_config=config)
    for number, module in enumerate(model.modules()):
        weight = module._parameters.get("weight")
        if isinstance(weight, QTensor):
            smoothed = weight.with_smoothing(torch.rand(weight.shape[1]) + 0.5)
            made = smoothed.with_input_scale(0.01 * (number + 1))
            module.weight = torch.nn.Parameter(made, requires_grad=False)
    model.save_pretrained(tmp_path / "quantized")
    found = kind.from_pretrained(tmp_path / "quantized")
    assert_same(found, model)
    for key, weight in quantized(found.state_dict()).items():
        assert torch.equal(weight.input_scale, model.state_dict()[key].input_scale)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_a_file_is_dense_again(name: str, tmp_path: Path) -> None:
    kind = getattr(transformers, MODELS[name][0])
    fresh(name).save_pretrained(tmp_path / "plain")
    config = jitgen.JitgenConfig("int8", None)
    kind.from_pretrained(tmp_path / "plain", quantization_config=config).save_pretrained(tmp_path / "quantized")
    model = kind.from_pretrained(tmp_path / "quantized")
    expected = {key: w.dequantize() for key, w in quantized(model.state_dict()).items()}
    assert expected
    model.dequantize()
    model.save_pretrained(tmp_path / "dense")
    found = kind.from_pretrained(tmp_path / "dense").state_dict()
    assert [key for key, tensor in expected.items() if not torch.equal(found[key], tensor)] == []
    assert not quantized(found)
    plain, dense = (safe_open(tmp_path / name / "model.safetensors", "pt") for name in ("plain", "dense"))
    assert set(dense.keys()) == set(plain.keys())


@torch.no_grad()
def test_a_model_that_initialises_rows_of_its_embedding(tmp_path: Path) -> None:
    sizes = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
    kind = transformers.YoutuForCausalLM
    torch.manual_seed(0)
    dense = kind(transformers.YoutuConfig(**_TEXT, **sizes, num_key_value_heads=4))
    dense.model.embed_tokens.weight.normal_()  # its row of padding too
    dense.save_pretrained(tmp_path / "plain")
    config = jitgen.JitgenConfig("int8", None, embeddings=True)
    model = kind.from_pretrained(tmp_path / "plain", quantization_config=config)
    weight = model.model.embed_tokens.weight
    assert isinstance(weight, QTensor)
    torch.testing.assert_close(weight.dequantize(), dense.model.embed_tokens.weight, atol=0.02, rtol=0)
    model.save_pretrained(tmp_path / "quantized")
    assert_same(kind.from_pretrained(tmp_path / "quantized"), model)
