"""``jitgen.calibrate``: what each method does to a model's error, and what it refuses."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import jitgen
from jitgen.errors import FallbackWarning, FormatError
from jitgen.quant import calibration, migration


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """The data of a test depends on its name alone."""
    random.seed(request.node.name)
    torch.manual_seed(random.getrandbits(32))


class Block(nn.Module):
    """A block before which a norm stands; ``post`` is a norm whose result is read by a sum too."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.post, self.last = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.post(x + self.down(F.gelu(self.up(self.norm(x)))))
        result: torch.Tensor = h + self.last(h)
        return result


def model() -> Block:
    """A block some of whose activations are large in a few columns, as those of language models are."""
    made = Block().requires_grad_(False)
    made.norm.weight[::16] = 25.0
    made.up.weight[:, ::16] /= 10
    return made


def batches(count: int = 3) -> list[torch.Tensor]:
    """Rows that are correlated, as those of a model are."""
    mix = torch.randn(24, 64)
    return [torch.randn(40, 24) @ mix / 5 + 0.1 * torch.randn(40, 64) for _ in range(count)]


def error(quantised: Callable[[torch.Tensor], torch.Tensor], plain: nn.Module, x: torch.Tensor) -> float:
    wanted = plain(x)
    return ((quantised(x) - wanted).norm() / wanted.norm()).item()


def calibrated(plain: nn.Module, data: list[torch.Tensor], method: str, **more: Any) -> Any:
    made = copy.deepcopy(plain)
    report = jitgen.calibrate(made, data, method, **more)
    assert [layer.name for layer in report.layers] == ["up", "down", "last"]
    return made


@pytest.mark.parametrize("method", ["absmax", "percentile"])
def test_static_scales_are_those_of_what_was_seen(method: str) -> None:
    plain, data = model(), batches()
    made = calibrated(plain, data, method, percentile=90.0)
    largest = torch.cat([plain.norm(x) for x in data]).abs()
    most = largest.max() if method == "absmax" else largest.flatten().quantile(0.9)
    assert made.up.weight.format == "int8.static"
    assert made.up.weight.input_scale.item() == pytest.approx(most.item() / 127, rel=2e-2)
    if method == "absmax":
        assert error(made, plain, data[0]) < 0.05


def test_smoothquant_migrates_where_nothing_else_reads() -> None:
    plain, data = model(), batches()
    direct = copy.deepcopy(plain)
    jitgen.quantize_(direct, "int8", activation="int8")
    made = calibrated(plain, data, "smoothquant", activation="int8")
    assert not torch.equal(made.norm.weight, plain.norm.weight)
    assert torch.equal(made.post.weight, plain.post.weight)
    assert error(made, plain, data[0]) < 0.8 * error(direct, plain, data[0])


class PostNorm(nn.Module):
    """A layer as BERT has it: a residual reads what the norm returns, so that nothing can be divided."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.again = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.out = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        result: torch.Tensor = self.again(h + self.out(F.gelu(self.q(h)) * torch.sigmoid(self.k(h))))
        return result


def test_weights_keep_factors_that_nothing_takes(tmp_path: Path) -> None:
    plain, data = PostNorm().requires_grad_(False), batches()
    plain.norm.weight[::16] = 25.0
    direct, made = copy.deepcopy(plain), copy.deepcopy(plain)
    jitgen.quantize_(direct, "int8", activation="int8")
    report = jitgen.calibrate(made, data, "smoothquant", format="int8", activation="int8")
    assert [layer.format for layer in report.layers][:2] == ["int8.smoothed"] * 2
    assert report.migrated == ()
    assert torch.equal(made.norm.weight, plain.norm.weight)
    assert torch.equal(made.q.weight.smoothing, made.k.weight.smoothing)
    assert bool((made.q.weight.smoothing.log2() % 1 == 0).all())
    assert error(made, plain, data[0]) < 0.8 * error(direct, plain, data[0])
    jitgen.save_quantized(made, tmp_path / "model.safetensors")
    other = PostNorm().requires_grad_(False)
    jitgen.load_quantized(tmp_path / "model.safetensors", model=other)
    assert torch.equal(other(data[0]), made(data[0]))


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", ["smoothquant", "awq"])
def test_factors_are_moved_in_every_dtype(method: str, dtype: torch.dtype) -> None:
    plain, data = model(), batches()
    made = copy.deepcopy(plain).to(dtype)
    report = jitgen.calibrate(made, [x.to(dtype) for x in data], method, format="int8", activation="int8")
    assert report.migrated == ("up",)
    assert "factors of activations are in 1 weights: up" in str(report)
    assert made.up.weight.dtype == dtype
    direct = copy.deepcopy(plain).to(dtype)
    jitgen.quantize_(direct, "int8", activation="int8")
    x = data[0]
    assert error(lambda x: made(x.to(dtype)).float(), plain, x) < 0.9 * error(
        lambda x: direct(x.to(dtype)).float(), plain, x
    )


class Attention(nn.Module):
    """Attention of one head before which no norm stands, and SwiGLU behind it; ``conv`` has its weight as (K, N)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = torch.softmax(self.q(x) @ self.k(x).mT / 8, -1) @ self.v(x)
        h = x + self.o(mixed)
        result: torch.Tensor = self.down(F.silu(self.gate(h)) * self.up(h))
        return result


def test_products_pass_factors_on_where_what_lies_between_commutes() -> None:
    plain = Attention().requires_grad_(False)
    plain.v.weight[::8] *= 20
    plain.up.weight[::8] *= 20
    data, made = batches(), copy.deepcopy(plain)
    report = jitgen.calibrate(made, data, "smoothquant", format="int8", activation="int8")
    assert report.migrated == ("o", "down")
    direct = copy.deepcopy(plain)
    jitgen.quantize_(direct, "int8", activation="int8")
    assert error(made, plain, data[0]) < 0.9 * error(direct, plain, data[0])


def test_that_nothing_is_moved_is_said() -> None:
    made = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8))
    with pytest.warns(FallbackWarning, match="awq moves nothing"):
        report = jitgen.calibrate(made, [torch.randn(4, 32)], "awq", format="int4", group_size=32)
    assert len(report.layers) == 2
    assert report.migrated == ()


def test_awq_tries_the_format_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = set()
    quantize = migration.quantize

    def noted(weight: torch.Tensor, format: str, group_size: int | None, **more: Any) -> Any:
        tried.add((format, group_size))
        return quantize(weight, format, group_size, **more)

    monkeypatch.setattr(migration, "quantize", noted)
    jitgen.calibrate(model(), batches(1), "awq", format={"up": ("uint3", 64), "*": ("int8", None)})
    assert tried == {("uint3", 64)}


@pytest.mark.parametrize("method", ["smoothquant", "awq", "gptq", "absmax"])
@pytest.mark.parametrize("at", ["a batch", "a weight"])
def test_an_error_changes_nothing(method: str, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = model().requires_grad_(True).train()
    before = {name: parameter.clone() for name, parameter in made.named_parameters()}
    data: list[Any] = batches()
    if at == "a batch":
        data[-1] = torch.randn(3, 5)
    else:
        function = "with_feedback" if method == "gptq" else "quantize"
        original, count = getattr(calibration, function), iter(range(10))

        def breaks(*arguments: Any, **more: Any) -> Any:
            if next(count) == 1:
                raise RuntimeError("out of memory")
            return original(*arguments, **more)

        monkeypatch.setattr(calibration, function, breaks)
    with pytest.raises(RuntimeError):
        jitgen.calibrate(made, data, method)
    assert made.training
    assert made.up.training
    assert all(type(parameter) is nn.Parameter and parameter.requires_grad for parameter in made.parameters())
    assert all(torch.equal(parameter, before[name]) for name, parameter in made.named_parameters())


@pytest.mark.parametrize("sequential", [True, False])
def test_what_follows_is_calibrated_on_what_comes_before(sequential: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, data = model(), batches()
    sums = []
    original = calibration.with_feedback

    def noted(weight: torch.Tensor, products: torch.Tensor, *more: Any) -> Any:
        sums.append(products)
        return original(weight, products, *more)

    monkeypatch.setattr(calibration, "with_feedback", noted)
    made = calibrated(plain, data, "gptq", format="int4", group_size=32, activation="int8", sequential=sequential)
    inner = torch.cat([F.gelu(made.up(plain.norm(x))) if sequential else F.gelu(plain.up(plain.norm(x))) for x in data])
    torch.testing.assert_close(sums[1], inner.T @ inner, rtol=2e-2, atol=0.02 * float((inner.T @ inner).max()))


def test_products_of_one_tensor_are_calibrated_together() -> None:
    plain = Attention().requires_grad_(False)
    runs = []
    plain.register_forward_pre_hook(lambda *_: runs.append(1))
    jitgen.calibrate(plain, batches(2), "gptq", format="int4", group_size=32)
    assert len(runs) == 2 + 2 * 4  # once to look, and for q k v, o, gate up, down


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_weights_lose_less(method: str) -> None:
    plain, data = model(), batches()
    direct = copy.deepcopy(plain)
    jitgen.quantize_(direct, "int4", 32)
    made = calibrated(plain, data[:2], method, format="int4", group_size=32)
    assert error(made, plain, data[2]) < (0.95 if method == "awq" else 0.8) * error(direct, plain, data[2])


@pytest.mark.parametrize(("format", "group"), [("uint4", 32), ("int8", None), ("uint3", None)])
def test_feedback_in_other_formats(format: str, group: int | None) -> None:
    plain, data = nn.Sequential(nn.Linear(72, 40)).requires_grad_(False), [torch.randn(200, 24) @ torch.randn(24, 72)]
    direct, made = copy.deepcopy(plain), copy.deepcopy(plain)
    jitgen.quantize_(direct, format, group)
    jitgen.calibrate(made, data, "gptq", format=format, group_size=group)
    assert error(made, plain, data[0]) < error(direct, plain, data[0])


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("method", ["gptq", "smoothquant", "awq", "absmax"])
@pytest.mark.filterwarnings("ignore::jitgen.errors.FallbackWarning")
def test_a_layer_of_infinite_activations_is_left_as_it_was(method: str, value: float) -> None:
    plain, data = nn.Sequential(nn.Linear(64, 40)).requires_grad_(False), [torch.randn(20, 64)]
    data[0][3, 5] = value
    report = jitgen.calibrate(plain, data, method, format="int4", group_size=32, activation="int8")
    assert type(plain[0].weight) is nn.Parameter
    assert "infinite or NaN" in report.skipped[0].reason


@pytest.mark.parametrize("method", ["smoothquant", "awq"])
@pytest.mark.parametrize(("width", "hidden"), [(64, 40), (40, 64)])
@pytest.mark.filterwarnings("ignore::jitgen.errors.FallbackWarning")
def test_nothing_moves_to_weights_that_are_left_as_they_were(method: str, width: int, hidden: int) -> None:
    plain = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))
    plain, data = plain.requires_grad_(False), [torch.randn(20, width) * torch.linspace(0.1, 9, width)]
    made = copy.deepcopy(plain)
    report = jitgen.calibrate(made, data, method, format="fp8_e4m3", activation="mxfp8")
    left = "3" if hidden == 40 else "1"
    assert [skip.name for skip in report.skipped] == [left]
    assert left not in report.migrated
    assert torch.equal(made.get_submodule(left).weight, plain.get_submodule(left).weight)
    assert error(made, plain, data[0]) < 0.1  # e4m3 has 2^-4 of a number at most, both operands have it


def test_importance_weights_errors() -> None:
    weight, importance = torch.randn(32, 64), torch.ones(64)
    importance[::8] = 1e4
    plain, weighted = jitgen.quantize(weight, "int4"), jitgen.quantize(weight, "int4", importance=importance)

    def loss(quantised: Any) -> torch.Tensor:
        return ((quantised.dequantize() - weight).square() * importance).sum()

    assert loss(weighted) < loss(plain)
    with pytest.raises(FormatError, match="importance is of 64 columns"):
        jitgen.quantize(weight, "int4", importance=torch.ones(3))


def test_batches_are_arguments_of_any_kind() -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.unused = nn.Linear(32, 8), nn.Linear(32, 8)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.layer(x + y)
            return result

    x, y = torch.randn(4, 32), torch.randn(4, 32)
    for batch in ((x, y), {"x": x, "y": y}):
        made = Adds().train()
        with pytest.warns(FallbackWarning, match="do not reach unused"):
            jitgen.calibrate(made, [batch])
        assert made.training
        assert made.layer.weight.input_scale.item() == pytest.approx((x + y).abs().max().item() / 127)
        assert made.unused.weight.input_scale is None


@pytest.mark.parametrize(("method", "value"), [("absmax", 0.0), ("percentile", 2.0)])
def test_activations_that_are_0_give_no_scale(method: str, value: float) -> None:
    """Of one-hot rows the percentile is 0; a scale of next to nothing would make 0 of every later activation."""
    made = nn.Sequential(nn.Linear(2000, 8))
    x = torch.zeros(16, 2000)
    x[torch.arange(16), torch.arange(16) * 7] = value
    plain = made(x + 1)
    with pytest.warns(FallbackWarning, match=f"{method} finds no scale of what 0 multiply"):
        jitgen.calibrate(made, [x], method)
    assert (made[0].weight.activation, made[0].weight.input_scale) == ("int8", None)
    assert (made(x + 1) - plain).norm() <= 0.03 * plain.norm()


@pytest.mark.parametrize(("format", "kind"), [("uint4", "int8"), ("fp8_e4m3", "fp8_e4m3"), ("mxfp4", "fp8_e4m3")])
def test_the_kind_of_activations_follows_the_codes(format: str, kind: str) -> None:
    made = nn.Sequential(nn.Linear(64, 8))
    jitgen.calibrate(made, [torch.randn(9, 64)], "absmax", format=format)
    assert made[0].weight.activation == kind
    assert made[0].weight.input_scale is not None


def test_a_format_that_a_method_has_nothing_for_is_refused() -> None:
    made, data = nn.Sequential(nn.Linear(64, 8)), [torch.randn(9, 64)]
    with pytest.raises(FormatError, match="absmax finds scales of activations, and not all codes of nf4"):
        jitgen.calibrate(made, data, "absmax", format="nf4")
    with pytest.raises(FormatError, match="gptq is for integers"):
        jitgen.calibrate(made, data, "gptq", format="fp8_e4m3")
    with pytest.raises(FormatError, match="bring no rows"):
        jitgen.calibrate(made, [torch.zeros(0, 64)])
    assert type(made[0].weight) is nn.Parameter


def test_what_is_refused_leaves_the_model_as_it_was() -> None:
    made = nn.Sequential(nn.Linear(32, 8))
    x = torch.randn(4, 32)
    for arguments, words in (
        (([x], "best"), "unknown method 'best'"),
        (([], "absmax"), "no batch"),
    ):
        with pytest.raises(FormatError, match=words):
            jitgen.calibrate(made, *arguments)
    with pytest.raises(FormatError, match="expected a number above 0"):
        jitgen.calibrate(made, [x], "percentile", percentile=0)
    with pytest.raises(FormatError, match=r"no weight to quantise: the pattern 'up\*' matches no layer; 0: no pattern"):
        jitgen.calibrate(made, [x], format={"up*": "int8"})
    with pytest.raises(FormatError, match="no weight to quantise: the model has no layer"):
        jitgen.calibrate(nn.ReLU(), [x])
    assert type(made[0].weight) is nn.Parameter


@pytest.mark.parametrize("method", ["awq", "smoothquant"])
@pytest.mark.filterwarnings("error::jitgen.errors.FallbackWarning")
def test_of_weights_that_fit_no_format_their_reason_is_said_alone(method: str) -> None:
    made, batches = nn.Sequential(nn.Linear(40, 8)), [torch.randn(4, 40)]
    report = jitgen.calibrate(made, batches, method, format="fp8_e4m3", activation="mxfp8")
    assert [skipped.name for skipped in report.skipped] == ["0"]
