"""``attn_implementation="jitgen"`` on every decoder of transformers: eager's logits, and no look into the future."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import jitgen
from jitgen.compilers import host
from jitgen.huggingface import layers
from tests import decoders

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'jitgen[test]'")
pytestmark = pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")

SAMPLE = ("llama", "bloom", "mpt", "codegen", "gptj", "falcon", "gpt_neo", "xglm", "bigbird_pegasus", "bart")
"""Model types that are tried in every run."""
_OWN = """
    big_bird bigbird_pegasus bloom codegen cpmant falcon falcon_mamba gpt_neo gpt_neox_japanese gptj inkling2_text mamba
    mamba2 megatron-bert mpt mvp openai-gpt prophetnet reformer rembert roformer rwkv trocr xglm xlm xlnet xlstm
"""
KEEP_THEIR_OWN = frozenset(_OWN.split())
"""Model types that compute attention themselves, or have none."""
REFUSED = {
    **dict.fromkeys(
        ("deepseek_v4", "flint", "gpt_oss", "granite_swa", "granitemoe_swa", "hy_v4", "mimo_v2_flash"), "s_aux"
    ),
    **dict.fromkeys(("axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa"), "indices"),
    **dict.fromkeys(("gemma2", "vaultgemma"), "softcap"),
    "inkling_text": "position_bias",
}
"""Model type -> what it passes to attention that jitgen's refuses."""
NOT_MADE = {"cohere_compass_text": "its rotary embedding has no default for full attention", "xlstm": "no attention"}
NOT_MADE |= {"qwen4_exp_text": "sizes of its own", "zamba2": "layers that share weights across more layers"}
TOKENS = torch.tensor([[5, 9, 12, 33, 21, 4], [7, 8, 9, 10, 11, 13]])
OTHER_END = torch.cat((TOKENS[:, :-1], torch.tensor([[50], [51]])), 1)
PADDED = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
PREPARE = {"xmod": lambda model: model.set_default_language("en_XX")}


@pytest.fixture(autouse=True)
def registered() -> None:
    layers.register_attention()


@torch.no_grad()
def logits(model: Any, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    torch.manual_seed(0)
    return model(input_ids=tokens, attention_mask=mask).logits  # type: ignore[no-any-return]


def check(name: str) -> None:
    eager, model = decoders.made(name, "eager"), decoders.made(name, "jitgen")
    for one in (eager, model):
        PREPARE.get(name, lambda model: None)(one)
    assert (model.config._attn_implementation != "jitgen") == (name in KEEP_THEIR_OWN)
    if name in REFUSED:
        with pytest.raises(jitgen.UnsupportedError, match=REFUSED[name]):
            logits(model, TOKENS)
        return
    expected = logits(eager, TOKENS)
    scale = max(1.0, float(expected.abs().max()))
    found, other = logits(model, TOKENS), logits(model, OTHER_END)
    torch.testing.assert_close(found, expected, atol=1e-4 * scale, rtol=1e-4)
    if torch.equal(logits(eager, OTHER_END)[:, :-1], expected[:, :-1]):  # some of these models are encoders by default
        torch.testing.assert_close(other[:, :-1], found[:, :-1], atol=1e-4 * scale, rtol=1e-4)
    kept = PADDED.bool()
    padded = logits(model, TOKENS, PADDED)[kept], logits(eager, TOKENS, PADDED)[kept]
    torch.testing.assert_close(*padded, atol=1e-4 * scale, rtol=1e-4)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_of_decoders(name: str) -> None:
    check(name)


@pytest.mark.slow
def test_every_decoder() -> None:
    failed = {}
    for name in decoders.classes():
        if name in NOT_MADE:
            continue
        try:
            check(name)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
    assert not failed, "\n".join(f"{name}: {why}"[:300] for name, why in failed.items())
    assert len(decoders.classes()) > 120


def test_a_model_that_keeps_its_own_attention_says_so(caplog: pytest.LogCaptureFixture) -> None:
    log = transformers.utils.logging.get_logger("transformers")
    log.addHandler(caplog.handler)
    try:
        type(log).warning_once.cache_clear()
        decoders.made("bloom", "jitgen")
    finally:
        log.removeHandler(caplog.handler)
    assert "BloomForCausalLM computes attention itself" in caplog.text
    assert decoders.made("bloom", "sdpa" if decoders.classes()["bloom"][1]._supports_sdpa else "eager")


def test_names_that_nobody_registered_are_an_error_still() -> None:
    with pytest.raises(ValueError, match="not supported"):
        decoders.made("bloom", "another")
