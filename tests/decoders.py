"""Every decoder that transformers has, with a configuration of a few thousand weights: nothing is downloaded.

A configuration is made of ``SIZES``, as far as its class has attributes of these names, and of the row of its model
type in ``CHANGES``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

_LAYERS = ("n_layer", "n_layers", "num_layers", "num_hidden_layers", "decoder_layers", "encoder_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads")
_WIDTHS = ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim")
_INNER = ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")
_SIXTEEN = ("head_dim", "global_head_dim", "rotary_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "num_heads_k")
_ONE = ("n_group", "topk_group", "first_k_dense_replace", "bos_token_id")
_TWO = ("num_key_value_heads", "num_experts_per_tok", "eos_token_id")
_THIRTY_TWO = ("q_lora_rank", "kv_lora_rank", "moe_intermediate_size", "shared_expert_intermediate_size")
_DROPOUTS = ("attention_dropout", "attn_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "dropout")
SIZES: dict[str, Any] = {
    **dict.fromkeys(_LAYERS, 2),
    **dict.fromkeys(_HEADS, 4),
    **dict.fromkeys(_WIDTHS, 64),
    **dict.fromkeys(_INNER, 96),
    **dict.fromkeys(_POSITIONS, 64),
    **dict.fromkeys(_SIXTEEN, 16),
    **dict.fromkeys(_EXPERTS, 4),
    **dict.fromkeys(_ONE, 1),
    **dict.fromkeys(_DROPOUTS, 0.0),
    **dict.fromkeys(_THIRTY_TWO, 32),
    **dict.fromkeys(_TWO, 2),
    "vocab_size": 97,
    "sliding_window": 16,
    "pad_token_id": 0,
}
_NONE_SHARED = {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": 97}
_LATENT = {"num_key_value_heads": 4}
_LAST_IS_FULL = {"layer_types": ["linear_attention", "full_attention"]}
_HYBRID = {"layer_types": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4, "num_key_value_heads": 4}
CHANGES: dict[str, Mapping[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite"), _LATENT),
    **dict.fromkeys(("glm_moe_dsa", "minicpm3", "youtu", "dots3_note_text"), _LATENT),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _LAST_IS_FULL),
    "kimi_linear": {**_LAST_IS_FULL, **_LATENT},
    **dict.fromkeys(("gemma3n_text", "gemma4_text"), _NONE_SHARED),
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "dots1": {"num_key_value_heads": 2, "n_shared_experts": 1},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "bailing_hybrid": {**_LAST_IS_FULL, **_LATENT},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "reformer": {"is_decoder": True, "axial_pos_shape": (8, 8), "axial_pos_embds_dim": (32, 32)},
    "zamba": {**_HYBRID, "attention_head_dim": 32},
    "zamba2": {**_HYBRID, "mamba_headdim": 16},
    "zaya": {"num_experts_per_tok": 1},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "longcat_flash": {"expert_ffn_hidden_size": 32, "moe_topk": 2, **_LATENT},
    "roc_bert": {"pronunciation_vocab_size": 97, "shape_vocab_size": 97},
    "xlm": {"emb_dim": 64},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
}
"""Model type -> attributes of its configuration besides ``SIZES``."""


def configuration(kind: Any, **changes: Any) -> Any:
    """The small configuration of a class of configurations."""
    names = set(inspect.signature(kind.__init__).parameters)
    names |= {name for base in kind.__mro__ for name in getattr(base, "__annotations__", {})}
    known = {name: value for name, value in SIZES.items() if name in names}
    return kind(**{**known, **CHANGES.get(kind.model_type, {}), **changes})


def classes() -> dict[str, tuple[Any, Any]]:
    """Model type -> (class of configurations, class of models) of every decoder.

    Left out are types whose configuration consists of those of other models, of text and of images: their text has a
    type of its own.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    found = {}
    for kind, model in MODEL_FOR_CAUSAL_LM_MAPPING.items():
        if not (kind.sub_configs.keys() - {"attn_config"}):
            found[kind.model_type] = kind, model[0] if isinstance(model, tuple) else model
    return found


def made(name: str, attention: str) -> Any:
    """The model of a type, for inference, with random weights that are the same at every call and make a difference."""
    kind, model = classes()[name]
    torch.manual_seed(0)
    found = model._from_config(configuration(kind), attn_implementation=attention).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in sorted(found.named_parameters()):
            if parameter.dim() > 1 and parameter.is_floating_point():
                parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
    return found
