"""Thirteen kinds of models of transformers through ``torch.compile(backend="jitgen")``: tiny, with random weights."""

from __future__ import annotations

import os
from typing import Any

import huggingface
import pytest
import torch

import jitgen
from jitgen.compilers import host

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("transformers", reason="needs transformers: pip install 'jitgen[test]'")
pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler"),
    pytest.mark.slow,
]

WHOLE = ("Llama", "Granite", "Qwen2", "Mistral", "Gemma")
"""Models of which every product and every attention must be in a generated kernel."""


@pytest.mark.parametrize("name", huggingface.MAKERS)
@torch.no_grad()
def test_a_forward_is_that_of_eager_torch_at_every_size(name: str) -> None:
    model = huggingface.made(name)
    compiled = torch.compile(model, backend="jitgen")
    for batch, length in ((2, 9), (3, 12), (1, 5)):
        inputs = huggingface.inputs(name, model, batch, length)
        found, expected = huggingface.result(compiled(**inputs)), huggingface.result(model(**inputs))
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    report = jitgen.report(model)
    assert report.graphs >= 1
    if name in WHOLE:
        assert report.share_of_flops == 1.0, str(report)


@pytest.mark.parametrize("name", huggingface.GENERATORS)
@torch.no_grad()
def test_text_that_is_generated_with_a_cache_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = huggingface.made(name)
    inputs: dict[str, Any] = huggingface.inputs(name, model, 2, 5)
    inputs.pop("decoder_input_ids", None)
    expected = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    monkeypatch.setattr(model, "forward", torch.compile(model.forward, backend="jitgen"))
    assert torch.equal(model.generate(**inputs, max_new_tokens=8, do_sample=False), expected)
