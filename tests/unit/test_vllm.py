"""``jitgen.integrations.vllm``, with stand-ins for vLLM: its layers compute products with quantised weights."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import jitgen
from jitgen import _data
from jitgen.errors import FormatError, UnsupportedError
from tests import vllm_stand_in
from tests.vllm_stand_in import LinearBase, UnquantizedLinearMethod


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    torch.manual_seed(0)
    vllm_stand_in.install(monkeypatch)
    yield importlib.import_module("jitgen.integrations.vllm")
    sys.modules.pop("jitgen.integrations.vllm", None)


def product(x: torch.Tensor, weights: list[torch.Tensor], bias: Any, *format: Any) -> torch.Tensor:
    dense = jitgen.quantize(torch.cat(weights), *format).dequantize(torch.float64)
    return F.linear(x.double(), dense, None if bias is None else bias.double())


def close(left: torch.Tensor, right: torch.Tensor) -> None:
    torch.testing.assert_close(left.double(), right, atol=0.02, rtol=0.02)


def test_without_vllm_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.delitem(sys.modules, "jitgen.integrations.vllm", raising=False)
    with pytest.raises(UnsupportedError, match="pip install vllm"):
        importlib.import_module("jitgen.integrations.vllm")


def test_the_plugin_registers_the_method(vllm: Any) -> None:
    checkout = _data.checkout_directory()
    if checkout is not None and (checkout / "pyproject.toml").is_file():
        text = (checkout / "pyproject.toml").read_text()
        assert '[project.entry-points."vllm.general_plugins"]\njitgen = "jitgen.integrations.vllm:register"' in text
    vllm.register()
    vllm.register()  # in one process perhaps several times
    assert {"jitgen": vllm.JitgenConfig} == vllm_stand_in.METHODS


@pytest.mark.parametrize(
    ("options", "format"), [({}, ("int4", 128)), ({"format": "int8", "group_size": None}, ("int8", None))]
)
@pytest.mark.parametrize("bias", [False, True])
def test_layers_multiply_with_quantised_weights(vllm: Any, options: Any, format: Any, bias: bool) -> None:
    config = vllm.JitgenConfig.from_config({"quant_method": "jitgen", "rows": [1, 3], **options})
    weights = [torch.randn(rows, 256).bfloat16() / 16 for rows in (96, 32, 32)]
    layer = LinearBase(weights, config, "model.layers.0.self_attn.qkv_proj", bias)
    x = torch.randn(3, 256).bfloat16()
    close(layer(x), product(x, weights, layer.bias, *format))
    assert "weight" not in dict(layer.named_parameters())
    dense = sum(weight.nbytes for weight in weights)
    assert sum(tensor.nbytes for name, tensor in layer.named_parameters() if name != "bias") < 0.6 * dense


@pytest.mark.parametrize("along", [0, 1])
def test_each_process_quantises_its_part(vllm: Any, along: int) -> None:
    """As tensor parallelism shards a layer: by outputs, or by inputs, whose products are added."""
    config, whole = vllm.JitgenConfig(rows=[2]), torch.randn(64, 512).bfloat16() / 16
    layers = [LinearBase([whole], config, "down_proj", part=part, parts=2, along=along) for part in range(2)]
    x = torch.randn(2, 512).bfloat16()
    for layer, part, columns in zip(
        layers, whole.chunk(2, along), (x, x) if along == 0 else x.chunk(2, 1), strict=True
    ):
        close(layer(columns), product(columns, [part], None, "int4", 128))


def test_kernels_are_there_when_a_model_has_been_loaded(vllm: Any) -> None:
    """A capture of a CUDA graph can compile nothing; strict mode cannot either."""
    config = vllm.JitgenConfig(rows=[1, 5])
    layer = LinearBase([torch.randn(32, 256).bfloat16()], config, "o_proj")
    compiled: list[Any] = []
    unsubscribe = jitgen.events.on_compile(compiled.append)
    try:
        for rows in (1, 5):
            layer(torch.randn(rows, 256).bfloat16())
    finally:
        unsubscribe()
    assert compiled == []


def test_torch_compile_has_one_graph_with_the_operator(vllm: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = vllm.JitgenConfig(rows=[4])
            self.up = LinearBase([torch.randn(64, 256).bfloat16() / 16], config, "up_proj")
            self.down = LinearBase([torch.randn(256, 64).bfloat16() / 8], config, "down_proj", bias=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(self.up(x).relu())

    torch._dynamo.reset()
    model, x, graphs = Model(), torch.randn(4, 256).bfloat16(), []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    with torch.no_grad():
        compiled = torch.compile(model, backend=backend, fullgraph=True)(x)
        torch.testing.assert_close(compiled, model(x))
    [targets] = graphs
    assert sum("jitgen.linear" in target for target in targets) == 2
    torch._dynamo.reset()


def test_layers_that_are_ignored_stay_dense(vllm: Any) -> None:
    config = vllm.JitgenConfig(ignore=["*.down_proj", "*.layers.1.*.[qkv]_proj", "*.o_proj"])
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    made = object.__new__(LinearBase)
    for prefix, dense in (
        ("model.layers.0.mlp.down_proj", True),
        ("model.layers.0.self_attn.qkv_proj", False),
        ("model.layers.1.self_attn.qkv_proj", True),
    ):
        assert isinstance(config.get_quant_method(made, prefix), UnquantizedLinearMethod) is dense
    assert config.get_quant_method(nn.Embedding(2, 2), "lm_head") is None
    config.ignore = ("*.q_proj",)
    with pytest.raises(UnsupportedError, match="is one layer in vLLM"):
        config.get_quant_method(made, "model.layers.0.self_attn.qkv_proj")


def test_mistakes_in_the_configuration(vllm: Any) -> None:
    for config, message in (
        ({"format": "int9"}, "int9"),
        ({"group_size": 50}, "50"),
        ({"bits": 4}, "has bits; expected format"),
    ):
        with pytest.raises(FormatError, match=message):
            vllm.JitgenConfig.from_config({"quant_method": "jitgen", **config})
