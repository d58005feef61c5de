"""The example of a whole decoder: its logits are those of transformers, and its sampling that of the formulas."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from jitgen import _data

CHECKOUT = _data.checkout_directory()
DIRECTORY = CHECKOUT / "examples" / "17_llama" if CHECKOUT else None
pytestmark = pytest.mark.skipif(DIRECTORY is None or not DIRECTORY.is_dir(), reason="needs the checkout")
pytest.importorskip("transformers")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(DIRECTORY))
    for name in ("generate", "model"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import generate  # type: ignore[import-not-found]

    yield generate
    for name in ("generate", "model"):
        sys.modules.pop(name, None)


GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
    "logits_scaling": 8.0,
}


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("Llama", {}),
        pytest.param("Qwen2", {}, marks=pytest.mark.slow),
        pytest.param("Granite", GRANITE, marks=pytest.mark.slow),
    ],
)
def test_logits_are_those_of_transformers(example: Any, kind: str, more: dict[str, float]) -> None:
    example.SIZES["here"] = kind, {**example.SIZES["tiny"][1], **more}
    model = example.model_of("here", "cpu", torch.float32)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms are ones and biases zeros
            parameter.data += torch.randn_like(parameter) * 0.1
    tokens = torch.randint(1, 128, (2, 9))
    decoder = example.Decoder.of(model)
    cache = decoder.cache(2, 16)
    with torch.no_grad():
        expected = model(tokens).logits
    for begin, end in ((0, 6), (6, 7), (7, 8)):
        torch.testing.assert_close(decoder(tokens[:, begin:end], cache), expected[:, end - 1], atol=1e-4, rtol=1e-4)
    assert cache.start.tolist() == [8, 8]
    if kind == "Llama":
        steps: list[Any] = []
        likeliest = decoder.generate(tokens, 3, put=steps.append)
        assert likeliest.equal(decoder.generate(tokens, 3, lambda logits: logits.argmax(-1)))
        assert likeliest[:, 9:].T.equal(torch.stack(steps))


def test_sampling(example: Any) -> None:
    from model import draw, draw_of_the_largest, without_the_least_likely  # type: ignore

    torch.manual_seed(0)
    logits = torch.randn(3, 128)
    chances = torch.softmax(logits / 0.7, -1)
    likely = without_the_least_likely(logits, 0.7, 0.5).isfinite()
    for row, kept in zip(chances, likely, strict=True):
        assert row[kept].sum() >= 0.5 > row[kept].sum() - row[kept].min()
        assert row[kept].min() > row[~kept].max()
    assert draw_of_the_largest(logits, 1, 0.7, 2.0).equal(logits.argmax(-1))
    assert draw_of_the_largest(logits, 9, 0.7, 1e-6).equal(logits.argmax(-1))
    largest = torch.where(logits[0] >= logits[0].topk(20).values[-1], logits[0], -torch.inf)
    among = torch.softmax(largest / 0.7, -1)
    kept = without_the_least_likely(largest[None], 0.7, 0.8)[0].isfinite()
    fewest = torch.where(kept, among, 0.0) / among[kept].sum()
    for function, wanted in (
        (lambda rows: draw(rows, 0.7), chances[0]),
        (lambda rows: draw_of_the_largest(rows, 20, 0.7, 2.0), among),
        (lambda rows: draw_of_the_largest(rows, 20, 0.7, 0.8), fewest),
    ):
        drawn = torch.cat([function(logits[:1].repeat(500, 1)) for _ in range(20)])
        shares = torch.bincount(drawn, minlength=128) / len(drawn)
        assert (shares - wanted).abs().max() < 4 * (0.25 / len(drawn)) ** 0.5
        assert not shares[wanted == 0].any()


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", "--weights int4", "--plain --temperature 0.8 --top-k 20 --top-p 0.9"])
def test_it_generates(example: Any, options: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = example.main(["tiny", "--prompt", "8", "--tokens", "6", *options.split()])["result"]
    assert result.shape == (2, 14)
    assert "tokens a second" in capsys.readouterr().out
