"""``quantize_``: every Linear of a model in place, tied ones once, and a report of what was not."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import jitgen
from jitgen.errors import FallbackWarning, FormatError, UnsupportedError
from jitgen.quant.layouts import LAYOUTS
from jitgen.quant.qtensor import QTensor


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 96)
        self.down = nn.Linear(96, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    """An embedding tied to the head, two blocks that share one down projection, and a frozen output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        self.blocks = nn.Sequential(Block(), Block())
        self.blocks[1].down.weight = self.blocks[0].down.weight
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embedding(tokens))))


TOKENS = torch.arange(12).reshape(2, 6)


def reference(model: Model) -> Model:
    """The same model on plain weights that are what the quantised ones stand for."""
    plain = copy.deepcopy(model)
    for module in plain.modules():
        if isinstance(module, nn.Linear) and isinstance(module.weight, QTensor):
            module.weight = nn.Parameter(module.weight.dequantize(), requires_grad=False)
    return plain


@pytest.mark.parametrize("layout", [None, *LAYOUTS])
@pytest.mark.parametrize(("format", "group_size"), [("int8", None), ("int4", 32), ("uint4", 64)])
@pytest.mark.quick(where=lambda format, layout: format == "int4" or layout is None)
def test_the_model_runs_as_before(format: str, group_size: int | None, layout: str | None) -> None:
    model = Model().eval()
    before = model(TOKENS)
    report = jitgen.quantize_(model, format, group_size, layout=layout)
    after = model(TOKENS)
    torch.testing.assert_close(after, reference(model)(TOKENS))
    assert 0 < (after - before).norm() / before.norm() < 0.2
    assert isinstance(model.blocks[0].up.weight, QTensor)
    assert isinstance(model.blocks[0].up.weight, nn.Parameter)
    # What its kernel reads: a portable weight was converted, and another one has a copy.
    assert model.blocks[0].up.weight.layout == ("cpu" if layout in (None, "portable") else layout)
    assert [layer.names for layer in report.layers] == [
        ("blocks.0.up",),
        ("blocks.0.down", "blocks.1.down"),
        ("blocks.1.up",),
    ]


def test_tied_weights_stay_tied() -> None:
    model = Model()
    shared = model.blocks[0].down.weight
    report = jitgen.quantize_(model, "int8")
    assert model.blocks[0].down.weight is model.blocks[1].down.weight
    assert model.blocks[0].down.weight is not shared
    assert type(model.head.weight) is nn.Parameter
    assert model.head.weight is model.embedding.weight
    (skipped,) = report.skipped
    assert skipped.name == "head"
    assert "Embedding" in skipped.reason
    assert sum(1 for name, _ in model.named_parameters() if "down" in name) == 1


def test_the_report() -> None:
    model = Model()
    report = jitgen.quantize_(model, "int4", 32)
    layer = report.layers[0]
    assert (layer.name, layer.shape, layer.format, layer.group_size) == ("blocks.0.up", (96, 64), "int4", 32)
    assert layer.bytes_before == 96 * 64 * 4
    assert layer.bytes_after == model.blocks[0].up.weight.nbytes == 96 * (32 + 2 * 2)
    assert 18 < layer.sqnr < 30
    assert report.bytes_before == 3 * layer.bytes_before
    assert report.bytes_after == sum(layer.bytes_after for layer in report.layers)
    text = str(report)
    for expected in ("blocks.0.down = blocks.1.down", "96x64", "int4 g32", "24,576", "3,456", "dB", "3 weights"):
        assert expected in text
    assert "left as it was: head: " in text
    assert max(map(len, text.splitlines()[:5])) <= 120
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.layers = ()  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        layer.sqnr = 0.0  # type: ignore[misc]


def test_the_filter_is_asked_by_name() -> None:
    model, asked = Model(), []

    def only_up(module: nn.Module, name: str) -> bool:
        asked.append(name)
        return name.endswith("up")

    report = jitgen.quantize_(model, "int8", filter_fn=only_up)
    assert asked == ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "head"]
    assert [layer.name for layer in report.layers] == ["blocks.0.up", "blocks.1.up"]
    assert (report.skipped[0].name, report.skipped[0].reason) == ("blocks.0.down", "filter_fn")
    model = Model()
    report = jitgen.quantize_(model, "int8", filter_fn=lambda module, name: name == "blocks.0.down")
    assert report.layers == ()
    assert "tied" in str(report)
    assert model.blocks[0].down.weight is model.blocks[1].down.weight
    assert type(model.blocks[0].down.weight) is nn.Parameter


def test_what_cannot_be_quantised_is_left_and_said() -> None:
    model = nn.ModuleDict(
        {
            "normed": nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
            "lazy": nn.LazyLinear(8),
            "meta": nn.Linear(8, 8, device="meta"),
            "attention": nn.MultiheadAttention(8, 2),
            "broken": nn.Linear(8, 8),
            "done": nn.Linear(8, 8),
            "fine": nn.Linear(8, 8),
        }
    )
    with torch.no_grad():
        model["broken"].weight[0, 0] = float("nan")
    jitgen.quantize_(model["done"], "int4")
    report = jitgen.quantize_(model, "int8")
    assert [layer.name for layer in report.layers] == ["fine"]
    reasons = {skip.name: skip.reason for skip in report.skipped}
    for name, reason in {
        "normed": "parametrisation",
        "lazy": "no shape yet",
        "meta": "meta device",
        "attention.out_proj": "MultiheadAttention",
        "broken": "NaN",
        "done": "quantised already, as int4",
    }.items():
        assert reason in reasons[name]
    assert model["attention"](*[torch.randn(3, 8)] * 3)[0].shape == (3, 8)


def test_a_single_layer_and_a_model_without_any() -> None:
    layer = nn.Linear(64, 8)
    assert [row.name for row in jitgen.quantize_(layer, "int8").layers] == [""]
    assert isinstance(layer.weight, QTensor)
    report = jitgen.quantize_(nn.ReLU(), "int8")
    assert (report.layers, report.skipped, report.bytes_before) == ((), (), 0)
    assert "0 weights" in str(report)


def test_torchs_own_encoder_layer_runs() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    x = torch.randn(2, 5, 32)
    before = layer(x)
    jitgen.quantize_(layer, "int8", 32)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), before, atol=0.05, rtol=0.05)


def test_mistakes_leave_the_model_as_it_was() -> None:
    model = Model()
    weight = model.blocks[0].up.weight
    with pytest.raises(FormatError, match="int8, int4, uint4"):
        jitgen.quantize_(model, "int9")
    with pytest.raises(FormatError, match="32, 64, 128"):
        jitgen.quantize_(model, "int4", 17)
    with pytest.raises(UnsupportedError, match="layout"):
        jitgen.quantize_(model, "int4", 32, layout="sideways")
    assert model.blocks[0].up.weight is weight


@pytest.mark.parametrize(("format", "group_size"), [("int8", 32), ("int4", 64)])
def test_a_quantised_model_is_saved_and_loaded(format: str, group_size: int) -> None:
    model = Model().eval()
    jitgen.quantize_(model, format, group_size)
    fresh = Model().eval().requires_grad_(False)
    fresh.load_state_dict(model.state_dict(), assign=True)
    torch.testing.assert_close(fresh(TOKENS), model(TOKENS))
    torch.testing.assert_close(copy.deepcopy(model)(TOKENS), model(TOKENS))
    other = Model().eval()
    jitgen.quantize_(other, format, group_size)
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(TOKENS), model(TOKENS))


def test_patterns_of_names_choose_formats() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 96), nn.Linear(96, 32), nn.Linear(32, 32))
    report = jitgen.quantize_(model, {"0": "int3", "1": ("uint4.floatzeros", 64), "2": None}, 32)
    assert [(layer.name, layer.format, layer.group_size) for layer in report.layers] == [
        ("0", "int3", 32),
        ("1", "uint4.floatzeros", 64),
    ]
    assert {skip.name for skip in report.skipped} == {"2", "3"}
    assert "no pattern" in str(report)
    assert report.unmatched == ()
    report = jitgen.quantize_(nn.Sequential(nn.Linear(64, 64)), {"O": "int4", "0": None, "*": "int4"})
    assert report.unmatched == ("O",)
    assert "the pattern 'O' matches no layer" in str(report)
    tied = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    tied[1].weight = tied[0].weight
    assert not jitgen.quantize_(tied, {"0": "int4", "1": "int8"}).layers
    with pytest.raises(FormatError, match="int8, int4, uint4"):
        jitgen.quantize_(tied, {"0": "int9"})
    with pytest.raises(FormatError, match=r"takes a torch\.nn\.Module, not Tensor; jitgen\.quantize makes"):
        jitgen.quantize_(torch.randn(64, 64), "int4")  # type: ignore[arg-type]
    with pytest.raises(FormatError, match="absmax, mse, hqq"):
        jitgen.quantize_(tied, "int4", method="best")
    assert jitgen.quantize_(tied, "uint2", 32, method="hqq").layers[0].names == ("0", "1")


def test_a_pattern_of_activations_that_matches_nothing_is_said() -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    with pytest.warns(FallbackWarning, match=r"'\*\.up' matches none of the 1 layers, which are called '0'"):
        report = jitgen.quantize_(model, "int8", activation={"*.up": "int8"})
    assert report.unmatched == ("*.up",)
    assert report.layers[0].activation is None
