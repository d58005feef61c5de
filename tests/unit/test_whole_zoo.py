"""``jitgen.compile`` of models from timm, diffusers and peft, where these are installed, and of caches of transformers.

``pip install timm diffusers peft``; nothing is downloaded besides.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import jitgen

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", jitgen.FallbackWarning)
        yield


def matches(model: Any, call: Callable[[Any], Any]) -> None:
    """Compares a model with itself in eager torch; all of its units run generated kernels."""
    model.eval()
    with torch.no_grad():
        expected = call(model)
        jitgen.compile(model)
        for _ in range(2):
            torch.testing.assert_close(call(model), expected, atol=1e-4, rtol=1e-3)
    assert [(unit.path, unit.reason) for unit in jitgen.report(model).units if unit.reason or unit.divided] == []


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_tiny_patch16_224", {"img_size": 64}),
        ("convnext_atto", {}),
        ("resnet18", {}),
        ("mixer_s16_224", {"img_size": 64}),
    ],
)
def test_timm(name: str, options: dict[str, Any]) -> None:
    timm = pytest.importorskip("timm")
    images = torch.randn(2, 3, 64, 64)
    matches(timm.create_model(name, **options), lambda model: model(images))


LATENTS, TEXT, TIMES = (2, 4, 16, 16), (2, 7, 32), (3, 7)
TRANSFORMER = {"num_attention_heads": 4, "attention_head_dim": 16, "in_channels": 4, "sample_size": 16, "patch_size": 2}


def test_diffusion_transformer() -> None:
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.DiTTransformer2DModel(**TRANSFORMER, num_layers=3, num_embeds_ada_norm=10)
    latents, times, labels = torch.randn(LATENTS), torch.tensor(TIMES), torch.tensor([1, 2])
    matches(model, lambda model: model(latents, timestep=times, class_labels=labels).sample)


def test_unet() -> None:
    diffusers = pytest.importorskip("diffusers")
    blocks = {"down_block_types": ("CrossAttnDownBlock2D",), "up_block_types": ("CrossAttnUpBlock2D",)}
    sizes = {"block_out_channels": (32,), "cross_attention_dim": 32, "attention_head_dim": 8, "norm_num_groups": 8}
    model = diffusers.UNet2DConditionModel(sample_size=16, layers_per_block=2, **blocks, **sizes)
    latents, text, times = torch.randn(LATENTS), torch.randn(TEXT), torch.tensor(TIMES)
    matches(model, lambda model: model(latents, times, text).sample)


SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "vocab_size": 50, "max_position_embeddings": 64, "pad_token_id": 0}
SMALL |= {"bos_token_id": 1, "eos_token_id": None}


def decoder() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).eval()


def padded() -> dict[str, torch.Tensor]:
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, :3] = 0
    return {"input_ids": torch.randint(2, 50, (2, 9)), "attention_mask": mask}


def test_adapters_of_peft() -> None:
    """Switched off and on, merged, a second one; their gradients, with activation checkpointing too."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    model, given = peft.get_peft_model(decoder(), lora).eval(), padded()

    def logits() -> torch.Tensor:
        with torch.no_grad():
            result: torch.Tensor = model(**given).logits
        return result

    def without_adapter() -> torch.Tensor:
        with model.disable_adapter():
            return logits()

    expected = [logits(), without_adapter()]
    jitgen.compile(model)
    torch.testing.assert_close([logits(), without_adapter(), logits()], [*expected, expected[0]], atol=1e-5, rtol=1e-4)
    model.merge_adapter()
    torch.testing.assert_close(logits(), expected[0], atol=1e-4, rtol=1e-3)
    model.unmerge_adapter()
    model.add_adapter("second", lora)
    model.set_adapter("second")
    compiled = logits()
    torch.testing.assert_close(compiled, jitgen.decompile(model)(**given).logits, atol=1e-5, rtol=1e-4)
    model.train()

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(**given, labels=given["input_ids"], use_cache=False).loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    eager = gradients()
    assert len(eager) == 12
    jitgen.compile(model)
    torch.testing.assert_close(gradients(), eager, atol=1e-5, rtol=1e-3)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    torch.testing.assert_close(gradients(), eager, atol=1e-5, rtol=1e-3)
    assert all(unit.reason is None for unit in jitgen.report(model).units)


def rounded_cache(config: Any) -> Any:
    """Makes a quantised cache of transformers whose codes are numbers rounded to halves."""
    cache_utils = pytest.importorskip("transformers.cache_utils")

    class Rounded(cache_utils.QuantizedLayer):  # type: ignore[name-defined, misc]
        def _quantize(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
            return (tensor * 2).round().to(torch.int8)

        def _dequantize(self, codes: torch.Tensor) -> torch.Tensor:
            return codes.float() / 2

    return cache_utils.Cache(layers=[Rounded(residual_length=4) for _ in range(config.num_hidden_layers)])


@pytest.mark.parametrize("kind", ["quantised", "sliding", "sliding static", "none"])
def test_caches(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    model, options = decoder(), {"do_sample": False, "max_new_tokens": 8, "output_scores": True}
    if kind.startswith("sliding"):
        config = transformers.MistralConfig(**SMALL, sliding_window=6)
        model = transformers.MistralForCausalLM(config).eval()
    options |= {"cache_implementation": "static"} if kind == "sliding static" else {"use_cache": kind != "none"}

    def scores() -> list[torch.Tensor]:
        cache = {"past_key_values": rounded_cache(model.config)} if kind == "quantised" else {}
        torch.manual_seed(1)
        return list(model.generate(**padded(), **options, **cache, return_dict_in_generate=True).scores)

    eager = scores()
    jitgen.compile(model)
    torch.testing.assert_close(scores(), eager, atol=1e-4, rtol=1e-4)
    assert all(unit.reason is None for unit in jitgen.report(model).units)
