"""``quantize_`` beyond Linears: Conv1D, matrices of experts, embeddings and what is tied to them; weights of three
dimensions, and what equal weights are."""

from __future__ import annotations

import copy
import operator
import pickle
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import jitgen
from jitgen.errors import FormatError, TraceError, UnsupportedError
from jitgen.quant.fakes import is_traced
from jitgen.quant.qtensor import QTensor


class Conv1D(nn.Module):
    """transformers' layer of GPT-2: a Linear whose weight is (K, N)."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(columns, rows) / columns**0.5)
        self.bias = nn.Parameter(torch.randn(rows))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
        return found.view(*x.shape[:-1], -1)


class Experts(nn.Module):
    """The matrices of a mixture of experts, of which each row of x has one."""

    def __init__(self, rows: int, is_transposed: bool = False) -> None:
        super().__init__()
        self.is_transposed = is_transposed
        shape = (3, 64, rows) if is_transposed else (3, rows, 64)
        self.up_proj = nn.Parameter(torch.randn(shape) / 8)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        found = x.new_zeros(len(x), self.up_proj.shape[-1 if self.is_transposed else -2])
        for expert in chosen.unique():
            weight = self.up_proj[expert]
            taken = x[chosen == expert]
            found[chosen == expert] = taken @ weight if self.is_transposed else F.linear(taken, weight)
        return found


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embedding(tokens)))


def dense(model: nn.Module) -> nn.Module:
    """The same model on the plain weights that its quantised ones stand for."""
    plain = copy.deepcopy(model)
    for module in plain.modules():
        for name, parameter in list(module._parameters.items()):
            if isinstance(parameter, QTensor):
                module._parameters[name] = nn.Parameter(parameter.dequantize().contiguous(), requires_grad=False)
    return plain


@pytest.fixture(autouse=True)
def no_fallbacks() -> None:
    torch.manual_seed(0)
    warnings.simplefilter("error", jitgen.FallbackWarning)


def test_conv1d_runs_a_kernel() -> None:
    model = nn.Sequential(Conv1D(48, 64), nn.GELU(), Conv1D(16, 48))
    report = jitgen.quantize_(model, "int4", 32)
    assert [(layer.name, layer.shape) for layer in report.layers] == [("0", (48, 64)), ("2", (16, 48))]
    assert report.frozen_biases == ("0.bias", "2.bias")
    assert model[0].weight.shape == (64, 48)
    x = torch.randn(2, 5, 64)
    torch.testing.assert_close(model(x), dense(model)(x))


@pytest.mark.parametrize(("rows", "is_transposed"), [(48, False), (48, True), (7, False)])
def test_experts_are_a_product_each(rows: int, is_transposed: bool) -> None:
    model = nn.Sequential(Experts(rows, is_transposed))
    report = jitgen.quantize_(model, {"*up_proj": "int4"}, 32, experts="*.up_proj")
    assert [(layer.name, layer.shape) for layer in report.layers] == [("0.up_proj", (3, rows, 64))]
    x, chosen = torch.randn(6, 64), torch.tensor([0, 2, 2, 0, 1, 2])
    torch.testing.assert_close(model[0](x, chosen), dense(model)[0](x, chosen))
    weight = model[0].up_proj
    assert weight[1] is weight[torch.tensor(1)]
    if rows % 16 == 0:  # the matrices are views
        assert weight[0].tensors[0].untyped_storage().data_ptr() == weight.tensors[0].untyped_storage().data_ptr()


class ExpertRouter(nn.Module):
    """A class whose name and parameter look like those of experts, and which uses it otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(3, 16, 64))
        self.gate_up_proj = nn.Parameter(torch.randn(3, 16, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.table * x).sum(-1) + self.gate_up_proj.sum()


def test_a_class_is_not_known_by_its_name_alone() -> None:
    model, x = nn.Sequential(ExpertRouter()), torch.randn(64)
    expected = model(x)
    report = jitgen.quantize_(model, "int4", 32)
    assert not report.layers
    assert [other.name for other in report.others] == ["0.table", "0.gate_up_proj"]
    assert all("experts=" in other.reason for other in report.others)
    assert torch.equal(model(x), expected)


def test_a_weight_of_three_dimensions(tmp_path: Path) -> None:
    plain = torch.randn(3, 32, 64)
    weight = jitgen.quantize(plain, "int4", 32)
    assert weight.shape == (3, 32, 64)
    each = [jitgen.quantize(matrix, "int4", 32) for matrix in plain]
    assert torch.equal(weight.dequantize(), torch.stack([w.dequantize() for w in each]))
    assert all(torch.equal(weight[i], each[i]) for i in range(-3, 3))
    assert weight.mT.shape == weight.transpose(1, 2).shape == (3, 64, 32)
    assert torch.equal(weight.mT.dequantize(), weight.dequantize().mT)
    x = torch.randn(3, 5, 64)
    exact = torch.bmm(x.double(), weight.dequantize(torch.float64).mT).float()
    torch.testing.assert_close(torch.bmm(x, weight.mT), exact)
    torch.testing.assert_close(x @ weight.mT, exact)
    offsets = torch.tensor([5, 5, 15], dtype=torch.int32)
    grouped = torch._grouped_mm(x.flatten(0, 1), weight.mT, offs=offsets)
    torch.testing.assert_close(grouped[:5], exact[0])
    torch.testing.assert_close(grouped[10:], x[2] @ weight[2].t())
    for again in (pickle.loads(pickle.dumps(weight)), copy.deepcopy(weight), weight.clone(), weight.detach()):
        assert torch.equal(again, weight)
    jitgen.save_quantized({"w": weight}, tmp_path / "w.safetensors")
    assert torch.equal(jitgen.load_quantized(tmp_path / "w.safetensors")["w"], weight)
    for wrong in (lambda: weight[3], lambda: weight.select(0, 3), lambda: torch.select(weight, 0, -4)):
        with pytest.raises(IndexError, match=r"weight of 3 matrices|size \[3, 32, 64\] at dimension 0"):
            wrong()
    assert torch.equal(weight[:2].dequantize(), weight.dequantize()[:2])
    assert torch.equal(weight[[0, -1]].dequantize(), weight.dequantize()[[0, -1]])
    for refused in (lambda: F.linear(x, weight), lambda: weight.t(), lambda: weight[:, 0]):
        with pytest.raises(UnsupportedError):
            refused()
    with pytest.raises(TraceError, match="one or two dimensions"):
        jitgen.jit(lambda x, w: F.linear(x, w))(x, weight)
    parts = jitgen.quantize(plain[:, :24], "int4", 32)
    with pytest.raises(UnsupportedError, match=r"pass weight\[i\]"):
        jitgen.jit(lambda x, w: torch._grouped_mm(x, w.mT, offsets))(x.flatten(0, 1), parts)
    with pytest.raises(FormatError, match="share scales"):
        jitgen.quantize(plain, "fp8_e4m3.tensor")
    with pytest.raises(jitgen.FormatError, match="matrices of 32 rows would too"):
        jitgen.TensorSpec((3, 32, 128), torch.float32, format="fp8_e4m3.rows128", group_size=128)


@pytest.mark.parametrize(("format", "group"), [("int4", 32), ("fp8_e4m3.rows128", 128), ("mxfp4", None)])
def test_no_matrices_of_a_weight(format: str, group: int | None, tmp_path: Path) -> None:
    """Zero tokens choose none: shapes are those of torch, in files and products too."""
    weight, ids = jitgen.quantize(torch.randn(5, 128, 256), format, group), torch.zeros(0, dtype=torch.int64)
    empty, none = jitgen.quantize(torch.randn(0, 128, 256), format, group), torch.zeros(0, dtype=torch.int32)
    jitgen.save_quantized({"w": empty}, tmp_path / "w.safetensors")
    loaded = jitgen.load_quantized(tmp_path / "w.safetensors")["w"]
    for some in (weight[2:2], weight[9:], weight[ids], empty, pickle.loads(pickle.dumps(empty)), loaded, empty[ids]):
        assert some.shape == some.dequantize().shape == (0, 128, 256)
        assert some.mT.shape == some.mT.dequantize().shape == (0, 256, 128)
        assert torch.bmm(some, torch.randn(0, 256, 1)).shape == (0, 128, 1)
        assert (torch.randn(7, 256) @ some.mT).shape == (0, 7, 128)
        assert torch._grouped_mm(torch.randn(0, 256), some.mT, offs=none).shape == (0, 128)
    product = jitgen.jit(lambda x, w, ends: torch._grouped_mm(x, w.mT, offs=ends))
    assert torch.equal(product(torch.randn(3, 256), empty, none), torch.zeros(3, 128))
    assert jitgen.jit(lambda x, w: x @ w.mT)(torch.randn(7, 256), empty).shape == (0, 7, 128)
    with pytest.raises(IndexError):
        empty[0]


def test_numbers_that_are_out_of_range_are_errors_as_in_torch() -> None:
    weight, x = jitgen.quantize(torch.randn(3, 24, 64), "int4", 32), torch.randn(10, 64)
    assert torch.equal(weight[torch.tensor([-1, 0])].dequantize(), weight.dequantize()[[-1, 0]])
    for ids in ([0, 3], [-4, 1]):
        with pytest.raises(IndexError, match=f"ids from {ids[0]} to {ids[1]} of a weight of 3 matrices"):
            weight[torch.tensor(ids)]
    # Matrices of 24 rows are in no kernel: a product for each expert multiplies them.
    for ends in ([3, 2, 10], [3, 5, 11], [-1, 5, 10], [3, 10], [1, 2, 3, 10]):
        with pytest.raises(IndexError, match="offs are the ends of 3 groups of 10 rows"):
            torch._grouped_mm(x, weight.mT, offs=torch.tensor(ends, dtype=torch.int32))
    for refused in (lambda: weight.transpose(1, 5), lambda: weight.mT.swapaxes(-4, 1), lambda: weight[0].permute(0, 3)):
        with pytest.raises(IndexError, match="dimensions"):
            refused()
    with pytest.raises(UnsupportedError):
        weight[torch.tensor(True)]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("rows", [32, 24])
@torch.no_grad()
def test_a_loop_over_chosen_experts_is_compiled_between_its_breaks(rows: int) -> None:
    """What a weight does between the graphs of torch.compile is not compiled itself."""
    weight, x = jitgen.quantize(torch.randn(4, rows, 64), "int4", 32), torch.randn(9, 64)

    def looped(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ids, result = x[:, :4].argmax(-1), torch.zeros(x.shape[0], rows, dtype=x.dtype)
        for (expert,) in F.one_hot(ids, 4).sum(0).nonzero():
            (tokens,) = torch.where(ids == expert)
            result.index_add_(0, tokens, F.linear(x[tokens], weight[expert]))
        return result

    wanted = looped(x.double(), weight.dequantize(torch.float64)).float()
    torch.testing.assert_close(torch.compile(looped, backend="jitgen")(x, weight), wanted)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("spelling", ["torch", "transformers"])
@torch.no_grad()
def test_products_of_experts_are_compiled(spelling: str) -> None:
    if spelling == "transformers":  # has an operator of its own for what torch.compile does not take
        grouped = pytest.importorskip("transformers.integrations.moe")._grouped_mm
    else:
        grouped = getattr(F, "grouped_mm", None) or torch._grouped_mm
    weight, x = jitgen.quantize(torch.randn(3, 32, 64), "int4", 32), torch.randn(15, 64)
    dense = weight.dequantize(torch.float64)

    def function(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return grouped(x, weight.mT, offs=offsets) * 2

    for backend in ("jitgen", "eager"):
        compiled = torch.compile(function, backend=backend)
        for ends in ([5, 5, 15], [2, 4, 7]):
            pieces = x[: ends[-1]].tensor_split(ends[:-1])
            exact = torch.cat([piece.double() @ w.mT for piece, w in zip(pieces, dense, strict=True)]) * 2
            found = compiled(x[: ends[-1]], weight, torch.tensor(ends, dtype=torch.int32))
            torch.testing.assert_close(found, exact.float())
    with pytest.raises(Exception, match="cannot be recorded in a graph"):
        torch.compile(function, backend="aot_eager")(x, weight, torch.tensor([5, 5, 15], dtype=torch.int32))


@pytest.mark.parametrize(("format", "group"), [("nf4", 32), ("fp8_e4m3", None)])
def test_gradients_flow_through_tables_of_values_in_other_compilers(format: str, group: int | None) -> None:
    torch._dynamo.reset()
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)), torch.randn(5, 64)
    jitgen.quantize_(model, {"2": format}, group)
    model(x).sum().backward()
    wanted, model[0].weight.grad = model[0].weight.grad, None
    torch.compile(model, backend="aot_eager")(x).sum().backward()
    torch.testing.assert_close(model[0].weight.grad, wanted)


def test_a_tied_embedding_shares_its_codes() -> None:
    model, tokens = Tied(), torch.tensor([[3, 1, 4], [1, 5, 49]])
    before = model(tokens)
    kept = jitgen.quantize_(copy.deepcopy(model), "int8")
    assert "embeddings=True quantises both" in kept.skipped[0].reason
    assert [other.name for other in kept.others] == ["embedding.weight"]
    report = jitgen.quantize_(model, "int8", embeddings=True)
    assert [layer.names for layer in report.layers] == [("embedding", "head")]
    assert model.head.weight is model.embedding.weight
    after = model(tokens)
    torch.testing.assert_close(after, dense(model)(tokens))
    assert (after - before).norm() / before.norm() < 0.02


def test_everything_that_is_left_is_named() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 64))

    model = nn.Sequential(nn.Linear(64, 64), nn.Embedding(9, 64), nn.Conv1d(4, 4, 3), Router(), nn.LayerNorm(64))
    report = jitgen.quantize_(model, "int8")
    assert [other.name for other in report.others] == ["1.weight", "2.weight", "3.weight"]
    assert "embeddings=True" in str(report)
    assert "left as it was: 3.weight: a parameter of Router" in str(report)


def test_equality_is_of_codes_and_scales() -> None:
    plain = torch.randn(32, 64)
    weight = jitgen.quantize(plain, "int4", 32)
    assert torch.equal(weight, jitgen.quantize(plain, "int4", 32, layout="mma"))
    assert torch.equal(weight, weight.half())
    assert not torch.equal(weight, weight.t())
    assert not torch.equal(weight, jitgen.quantize(plain, "int4", 64))
    assert not torch.equal(weight, jitgen.quantize(plain, "int4", 32, method="absmax"))
    assert not torch.equal(weight, weight.dequantize())
    assert not torch.equal(weight.dequantize(), weight)
    with pytest.raises(UnsupportedError, match="__eq__"):
        operator.eq(weight, weight)


@pytest.mark.parametrize(
    ("qualifier", "instead"), [("ordered", "as they are"), ("smoothed", "with_smoothing"), ("static", "input_scale")]
)
def test_what_a_weight_has_by_other_means_is_no_format_to_quantise_to(qualifier: str, instead: str) -> None:
    with pytest.raises(FormatError, match=rf"{instead}.*without \.{qualifier}"):
        jitgen.quantize(torch.randn(8, 64), f"int4.{qualifier}", 32, activation="int8")


def test_an_error_names_the_line_that_calls_the_layer() -> None:
    layer = nn.Linear(64, 5)
    jitgen.quantize_(layer, "int8")
    with pytest.raises(
        jitgen.TraceError, match=r"63 is not 64\n  at .*test_quant_layers.py:\d+\n    layer\(torch.randn\(3, 63\)\)"
    ):
        layer(torch.randn(3, 63))


def test_a_layer_on_the_meta_device_has_shapes_alone() -> None:
    layer = nn.Linear(64, 32)
    jitgen.quantize_(layer, "int8")
    assert layer.to("meta")(torch.randn(3, 64, device="meta")).shape == (3, 32)


@pytest.mark.filterwarnings("error")
def test_errors_of_inputs_that_no_layer_takes() -> None:
    layer = nn.Linear(64, 32)
    jitgen.quantize_(layer, "int8")
    with pytest.raises(jitgen.JitgenError, match="at least one dimension"):
        layer(torch.randn(()))
    with pytest.raises(RuntimeError, match="same dtype"):
        layer(torch.randn(3, 64, dtype=torch.float64))


def test_a_weight_that_is_converted_within_a_transform_outlives_it() -> None:
    """A first call within ``torch.func.grad`` left wrapped tensors in the weight, at the level that had ended."""
    layer, x = torch.nn.Linear(64, 64), torch.randn(3, 64)
    jitgen.quantize_(layer, "int4", group_size=32)
    gradient = torch.func.grad(lambda x: layer(x).sum())(x)
    torch.testing.assert_close(gradient, layer.weight.dequantize().sum(0).expand(3, 64))
    assert layer.weight.layout == "cpu"
    assert not any(map(is_traced, layer.weight.tensors))
