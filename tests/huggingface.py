"""Thirteen kinds of models of transformers with tiny random weights, made here: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

VOCABULARY = 160
_DECODER = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DECODERS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Granite": {"mlp_bias": True, "attention_bias": True},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Mistral": {"sliding_window": 16},
    "Gemma": {"head_dim": 16},
    "Gemma2": {"head_dim": 16, "sliding_window": 16},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
}


def _decoder(name: str, **changes: Any) -> Any:
    import transformers

    config = getattr(transformers, f"{name}Config")(**{**_DECODER, **_DECODERS[name], **changes})
    return getattr(transformers, f"{name}ForCausalLM")(config)


def _gpt2(**changes: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 128}
    return GPT2LMHeadModel(GPT2Config(**{**sizes, "bos_token_id": 1, "eos_token_id": 2, **changes}))


def _bert(**changes: Any) -> Any:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    return BertModel(BertConfig(**{**sizes, "vocab_size": VOCABULARY, "max_position_embeddings": 128, **changes}))


def _t5(**changes: Any) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
    return T5ForConditionalGeneration(T5Config(**{**sizes, "decoder_start_token_id": 0, **changes}))


def _whisper(**changes: Any) -> Any:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    layers = {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers",)}
    heads = {f"{side}_attention_heads": 4 for side in ("encoder", "decoder")}
    widths = {f"{side}_ffn_dim": 96 for side in ("encoder", "decoder")}
    sizes = {"d_model": 64, "vocab_size": VOCABULARY, "num_mel_bins": 16, "max_source_positions": 32}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    others = {"max_target_positions": 64, "suppress_tokens": None}
    config = WhisperConfig(**{**sizes, **layers, **heads, **widths, **tokens, **others, **changes})
    return WhisperForConditionalGeneration(config)


def _vit(**changes: Any) -> Any:
    from transformers import ViTConfig, ViTModel

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    return ViTModel(ViTConfig(**{**sizes, "image_size": 32, "patch_size": 8, **changes}))


MAKERS: dict[str, Callable[..., Any]] = {
    **{name: lambda name=name, **changes: _decoder(name, **changes) for name in _DECODERS},
    "BERT": _bert,
    "GPT2": _gpt2,
    "T5": _t5,
    "Whisper": _whisper,
    "ViT": _vit,
}
GENERATORS = (*_DECODERS, "GPT2", "T5", "Whisper")
"""Those that write text."""


def made(name: str, **changes: Any) -> Any:
    """The model, with random weights that are the same at every call; for inference."""
    torch.manual_seed(0)
    return MAKERS[name](**changes).eval()


def inputs(name: str, model: Any, batch: int = 2, length: int = 9) -> dict[str, Any]:
    """Keyword arguments of a forward."""
    vocabulary = getattr(model.config, "vocab_size", VOCABULARY)
    tokens = torch.randint(3, vocabulary, (batch, length))
    if name == "ViT":
        return {"pixel_values": torch.randn(batch, 3, model.config.image_size, model.config.image_size)}
    if name == "Whisper":
        frames = 2 * model.config.max_source_positions
        return {"input_features": torch.randn(batch, model.config.num_mel_bins, frames), "decoder_input_ids": tokens}
    if name == "T5":
        return {"input_ids": tokens, "decoder_input_ids": tokens.flip(1)}
    return {"input_ids": tokens}


def result(output: Any) -> torch.Tensor:
    """The tensor of a forward's output that tests compare."""
    logits = getattr(output, "logits", None)
    return output.last_hidden_state if logits is None else logits
