"""``torch.compile(model, backend="jitgen")`` and ``jitgen.report``."""

from __future__ import annotations

import copy
import gc
import importlib
import operator
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import view_programs
from torch import nn
from torch._dynamo.utils import counters

import jitgen
from jitgen.compilers import host
from jitgen.dynamo import backend, program, updates
from jitgen.dynamo.program import Program

pytestmark = pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    importlib.import_module("jitgen.dynamo.registration")
    torch._dynamo.reset()
    gc.collect()
    counters.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error", jitgen.FallbackWarning)
        yield
    torch._dynamo.reset()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return x @ self.embedding.weight.T


def test_a_model_is_programs_of_equal_layers_for_all_sizes() -> None:
    model = Model()
    compiled = torch.compile(model, backend="jitgen", fullgraph=True)
    for batch, length in ((2, 5), (3, 7), (4, 9), (5, 4)):
        tokens = torch.randint(0, 11, (batch, length))
        torch.testing.assert_close(compiled(tokens), model(tokens))
    assert counters["stats"]["unique_graphs"] <= 3, "static, one dynamic size, two"
    graph = backend.compiled()[-1]
    programs = [step.program for step in graph.steps if step.segment.layer]
    assert len(programs) == 3
    assert len(set(map(id, programs))) == 1
    report = jitgen.report(model)
    assert (report.share_of_nodes, report.share_of_flops) == (1.0, 1.0)
    assert jitgen.report(compiled, tokens).share_of_time == 1.0
    assert jitgen.report(Model()).graphs == 0


def test_training_is_that_of_eager_torch() -> None:
    model, tokens = Model(2), torch.randint(0, 11, (2, 5))
    compiled = torch.compile(model, backend="jitgen")
    wanted = torch.autograd.grad(F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()), model.parameters())
    found = torch.autograd.grad(F.cross_entropy(compiled(tokens).flatten(0, 1), tokens.flatten()), model.parameters())
    torch.testing.assert_close(found, wanted)


def test_what_has_no_row_stays_with_torch_and_the_report_says_so() -> None:
    def mixed(x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(torch.sin(x) @ x.T)
        return spectrum.abs() * 2 + torch.cos(x).sum()

    compiled = torch.compile(mixed, backend="jitgen")
    x = torch.randn(6, 6)
    torch.testing.assert_close(compiled(x), mixed(x))
    report = jitgen.report(compiled)
    reasons = {node.function: node.reason for node in report.nodes}
    assert "no row" in str(reasons["fft_rfft"])
    assert reasons["sin"] is None
    assert 0 < report.share_of_nodes < 1
    assert report.share_of_flops == 1.0
    assert "in torch: 1 x fft_rfft" in str(report)


def test_updates_keep_their_order() -> None:
    def update(cache: torch.Tensor, x: torch.Tensor, at: torch.Tensor) -> Any:
        before = cache.sum()
        cache.index_copy_(0, at, x)
        between = torch.fft.fft(cache[0]).real.sum()
        cache[1:3] *= 2
        return before, between, cache.sum()

    at = torch.tensor([2, 0])
    caches = torch.zeros(4, 3), torch.zeros(4, 3)
    x = torch.randn(2, 3)
    found = torch.compile(update, backend="jitgen")(caches[0], x, at)
    torch.testing.assert_close(found, update(caches[1], x, at))
    torch.testing.assert_close(caches[0], caches[1])


UPDATES: dict[str, Callable[[torch.Tensor], Any]] = {
    "leaky_relu": nn.LeakyReLU(0.1, inplace=True),
    "elu": nn.ELU(inplace=True),
    "hardtanh": nn.Hardtanh(inplace=True),
    "relu": nn.ReLU(inplace=True),
    "positional": lambda x: F.dropout(x, 0.5, False, True) * 3,
    "power": lambda x: operator.ipow(x, 2),
    "remainder": lambda x: operator.imod(x, 2),
    "quotient": lambda x: operator.ifloordiv(x, 0.5),
    "operator": lambda x: torch.ops.aten.mul_.Tensor(x, 2),
}


def test_every_update_keeps_its_place_among_reads() -> None:
    def update(xs: dict[str, torch.Tensor]) -> Any:
        doubled = {name: UPDATES[name](x) * 2 for name, x in xs.items()}
        return doubled, [torch.linalg.svdvals(x) for x in xs.values()]  # no kernel computes it, nor needs its values

    given = {name: torch.randn(4, 3) for name in UPDATES}
    found, expected = ({name: x.clone() for name, x in given.items()} for _ in range(2))
    torch.testing.assert_close(torch.compile(update, backend="jitgen")(found), update(expected))
    torch.testing.assert_close(found, expected)


def test_what_a_call_writes_to() -> None:
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    for target, arguments in ((operator.iadd, (x, y)), (operator.setitem, (x, 0, y)), (torch.Tensor.add_, (x, y))):
        node = graph.call_function(target, arguments)
        assert updates.updates(node)
        assert updates.written(node) == [x]
    node = graph.call_function(F.relu, (x,), {"inplace": True})
    assert updates.updates(node)
    assert updates.written(node) == [x]


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(3), nn.InstanceNorm1d(3, track_running_stats=True)])
def test_running_statistics_are_read_after_their_update(norm: Any) -> None:
    def trained(norm: Any, x: torch.Tensor) -> Any:
        return norm(x) * 2, torch.fft.fft(norm.running_mean).real

    norm.requires_grad_(False)
    other, x = copy.deepcopy(norm), torch.randn(5, 3, 4) + 3
    torch.testing.assert_close(torch.compile(trained, backend="jitgen")(norm, x), trained(other, x))


def test_one_import_tells_all_that_no_kernel_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    imports, specialize = list[Any](), program.specialize
    monkeypatch.setattr(program, "specialize", lambda *args: imports.append(args) or specialize(*args))
    refused, called = list[torch.fx.Node](), program.called

    def refusing(node: torch.fx.Node, values: Any) -> Any:
        if node.target is operator.add:
            refused.append(node)
            raise jitgen.UnsupportedError("no")
        return called(node, values)

    monkeypatch.setattr(program, "called", refusing)  # torch itself calls these nodes elsewhere

    def function(x: torch.Tensor) -> torch.Tensor:
        for step in range(70):
            x = torch.tanh(x) + 1 if step % 2 else x * x
        return x

    x = torch.randn(5)
    compiled = torch.compile(function, backend="jitgen")
    torch.testing.assert_close(compiled(x), function(x))
    reasons = {node.function: node.reason for node in jitgen.report(compiled).nodes}
    assert (reasons["add"], reasons["tanh"], reasons["mul"]) == ("no", None, None)
    assert len(refused) == 35, "no refusal has the others looked at again"
    assert len(imports) <= 3, "the whole, and what is left of it, each once"


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "jitgen"])
def test_vmap_of_a_quantised_layer(backend: str, bias: bool) -> None:
    layer, x = nn.Linear(64, 32, bias=bias), torch.randn(3, 5, 64)
    jitgen.quantize_(layer, "int8")
    compiled = torch.compile(lambda x: torch.vmap(layer, in_dims=1)(x), backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x).movedim(1, 0))


def test_a_compiled_quantised_model_is_converted() -> None:
    model = nn.Linear(64, 32)
    jitgen.quantize_(model, "int8")
    compiled, x = torch.compile(model, backend="jitgen"), torch.randn(3, 64)
    compiled(x)
    model.to(torch.bfloat16)
    found = compiled(x.bfloat16())
    assert found.dtype == torch.bfloat16
    assert jitgen.report(model).nodes
    torch.testing.assert_close(found, model(x.bfloat16()))


def test_a_call_that_no_kernel_takes_runs_in_torch_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = torch.compile(lambda x: torch.relu(x) * 2, backend="jitgen")
    x = torch.randn(3)
    compiled(x)

    def refuses(*values: Any) -> Any:
        raise jitgen.UnsupportedError("not today")

    monkeypatch.setattr(Program, "__call__", refuses)
    with pytest.warns(jitgen.FallbackWarning, match="not today"):
        torch.testing.assert_close(compiled(x), torch.relu(x) * 2)
    assert "not today" in [node.reason for node in jitgen.report().nodes]


def test_graphs_are_forgotten_with_dynamos() -> None:
    others = jitgen.report().graphs  # what torch keeps of functions with graph breaks, which other tests have
    torch.compile(lambda x: x + 1, backend="jitgen")(torch.randn(3))
    assert jitgen.report().graphs == others + 1
    torch._dynamo.reset()
    gc.collect()
    assert jitgen.report().graphs == others


def test_torch_finds_the_backend_by_its_entry_point() -> None:
    text = (importlib.import_module("pathlib").Path(jitgen.__file__).parents[1] / "pyproject.toml").read_text()
    assert '[project.entry-points.torch_dynamo_backends]\njitgen = "jitgen.dynamo.backend:compile_graph"' in text
    assert callable(backend.compile_graph)


def test_sizes_that_elements_decide() -> None:
    compiled, x = torch.compile(lambda x: x[x > 0] * 2 + 1, backend="jitgen", fullgraph=True), torch.randn(20)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch.testing.assert_close(compiled(x), x[x > 0] * 2 + 1)


def test_a_report_of_nothing_says_so() -> None:
    class Spectrum(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.rfft(x).abs()

    model = Spectrum()
    assert "no graph" in str(jitgen.report(model))
    torch.compile(model, backend="jitgen")(torch.randn(2, 8))
    assert jitgen.report(model).graphs == 1
    assert jitgen.report(model).share_of_nodes < 1


def test_report_takes_models_and_functions_alone() -> None:
    with pytest.raises(TypeError, match="model or a compiled function"):
        jitgen.report(3)


@pytest.mark.parametrize("count", [None, 7])
def test_a_model_without_numbered_layers_is_one_program(count: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if count is not None:  # as if so many nodes were a layer
        monkeypatch.setattr("jitgen.dynamo.cut.layer_of", view_programs.layers_of(count))

    def deep(x: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            low, high = torch.aminmax(x, dim=-1, keepdim=True)
            x = (x - low) / (high - low + 1)
        return x

    x = torch.randn(3, 5)
    torch.testing.assert_close(torch.compile(deep, backend="jitgen", fullgraph=True)(x), deep(x))
    steps = [step for step in backend.compiled()[-1].steps if step.program is not None]
    if count is None:
        assert len(steps) == 1
        return
    assert len(steps) > 2
    assert all(len(step.segment.nodes) <= count + 2 for step in steps), "the two items of a result are kept with it"


def test_sizes_that_depend_on_data_stay_with_torch() -> None:
    def positive(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)[x > 0] * 2 + torch.nonzero(x).shape[0]

    x = torch.randn(5, 4)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), warnings.catch_warnings():
        warnings.simplefilter("ignore", jitgen.FallbackWarning)
        torch.testing.assert_close(torch.compile(positive, backend="jitgen", fullgraph=True)(x), positive(x))


def test_a_report_lists_the_kernels_of_forward_and_backward() -> None:
    model = Model(layers=2)
    compiled = torch.compile(model, backend="jitgen")
    compiled(torch.tensor([[1, 2, 3]])).sum().backward()
    report = jitgen.report(model)
    layer = [kernel for kernel in report.kernels if len(kernel.layers) == 2]
    assert {kernel.program for kernel in layer} == {"Layer", "Layer_backward"}
    assert all(kernel.entry in kernel.source and kernel.key for kernel in report.kernels)
    assert any(text.startswith("Layer_backward: ") and "bytes moved" in text for text in report.explanations)
