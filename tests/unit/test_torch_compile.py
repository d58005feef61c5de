"""Decorated functions and quantised layers within torch.compile, export and torch.func: operators of torch."""

from __future__ import annotations

import importlib
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import checkpoint_writers
import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import jitgen
from jitgen.compilers import host
from jitgen.quant.token import COMPUTED

pytestmark = pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")

BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow), "jitgen"]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    importlib.import_module("jitgen.dynamo.registration")

    torch._dynamo.reset()
    counters.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)  # torch's copies of programs
        warnings.filterwarnings("ignore", message="The given buffer is not writable")  # torch.export.load of torch 2.11
        warnings.filterwarnings("ignore", category=ResourceWarning)  # of servers that tests before this one had
        yield
    torch._dynamo.reset()


SCALE = torch.randn(4)


@jitgen.jit
def shifted(x: torch.Tensor, by: float = 1.0) -> torch.Tensor:
    return torch.sin(x) * SCALE + by


def plain(x: torch.Tensor, by: float = 1.0) -> torch.Tensor:
    return torch.sin(x) * SCALE + by


X = torch.randn(3, 4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_function_is_an_operator_for_every_size(backend: str) -> None:
    compiled = torch.compile(lambda x: shifted(x * 2) * 3 - shifted(x, by=2.0), backend=backend, fullgraph=True)
    for rows in (3, 5, 6, 7, 130):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(compiled(x), plain(x * 2) * 3 - plain(x, 2.0))
    assert counters["stats"]["unique_graphs"] == 2, "one of the first size, one of all others"


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.randn(4))

    @jitgen.jit
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * self.scale).sum(-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(x + 1) - self.scaled(x=x)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_method_and_its_gradients(backend: str) -> None:
    model = Scaled()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for rows in (3, 5):
        x = torch.randn(rows, 4, requires_grad=True)
        expected = torch.tanh((x + 1) * model.scale).sum(-1) - torch.tanh(x * model.scale).sum(-1)
        wanted = torch.autograd.grad(expected.square().sum(), (x, model.scale))
        y = compiled(x)
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(torch.autograd.grad(y.square().sum(), (x, model.scale)), wanted)
    with torch.no_grad():
        model.scale.mul_(2)
        torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_views_several_results_and_structures(backend: str) -> None:
    @jitgen.jit
    def several(x: torch.Tensor, pair: Any, *, flip: bool = False) -> Any:
        return {"sum": x.sum(-1), "pair": (pair[0] + pair[1], x * 2 if flip else x)}

    def use(x: torch.Tensor) -> Any:
        return several(x + 1, [x, x * 3], flip=True)

    found = torch.compile(use, backend=backend, fullgraph=True)(X)
    torch.testing.assert_close(found, several.reference(X + 1, [X, X * 3], flip=True))


def test_an_update_of_an_argument_is_refused_as_an_operator_and_right_without() -> None:
    @jitgen.jit
    def update(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * 2

    with pytest.raises(torch._dynamo.exc.Unsupported, match="mutation"):
        torch.compile(lambda x: update(x) + 1, backend="eager", fullgraph=True)(torch.zeros(3))
    x = torch.zeros(3)
    torch.testing.assert_close(torch.compile(lambda x: update(x) + 1, backend="eager")(x), torch.full((3,), 3.0))
    torch.testing.assert_close(x, torch.ones(3))


def test_a_plan_runs_between_graphs() -> None:
    plan = shifted.bind(X)
    torch.testing.assert_close(torch.compile(lambda x: plan(x) + 1, backend="eager")(X), plain(X) + 1)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"decorated with jitgen\.jit"):
        torch.compile(lambda x: plan(x) + 1, backend="eager", fullgraph=True)(X)


# ------------------------------------------------------------------------------------------------ quantised weights


def quantised() -> torch.nn.Sequential:
    model = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.GELU(), torch.nn.Linear(48, 16)).eval()
    jitgen.quantize_(model, "int8")
    return model


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_quantised_layer_is_an_operator(backend: str) -> None:
    model = quantised()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for rows in (3, 5, 7):
        x = torch.randn(rows, 64, requires_grad=True)
        y = compiled(x)
        torch.testing.assert_close(y, model(x))
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x), torch.autograd.grad(model(x).sum(), x))
    assert counters["stats"]["unique_graphs"] <= 2
    assert not any(type(found).__name__ == "Fallback" and found.calls for found in _new_fallbacks())


def _new_fallbacks() -> tuple[Any, ...]:
    return tuple(f for f in jitgen.quantized_linear.specializations if "torch.compile" in getattr(f, "reason", ""))


@pytest.mark.parametrize("backend", BACKENDS)
def test_quantised_weights_that_a_function_closes_over(backend: str) -> None:
    gate, up = (jitgen.quantize(torch.randn(96, 64), "int4", group_size=32) for _ in range(2))

    @jitgen.jit
    def swiglu(x: torch.Tensor) -> torch.Tensor:
        return F.silu(F.linear(x, gate)) * F.linear(x, up)

    compiled = torch.compile(lambda x: swiglu(x + 1) * 2, backend=backend, fullgraph=True)
    x = torch.randn(5, 64)
    torch.testing.assert_close(compiled(x), swiglu(x + 1) * 2)


@pytest.mark.parametrize("format", ["int4", pytest.param("fp8_e4m3", marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_quantised_weights_that_a_function_takes(backend: str, format: str) -> None:
    """One graph, in which the weight is an argument of the function and an operand of a product outside of it."""
    weights = [jitgen.quantize(torch.randn(64, 64), format, group_size=32) for _ in range(2)]
    parameter = torch.nn.Parameter(jitgen.quantize(torch.randn(64, 64), "int8"), requires_grad=False)

    @jitgen.jit
    def products(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.silu(F.linear(x, w)) * (x @ parameter.T)

    def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return products(x + 1, w) * 2 - F.linear(x, w)

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for rows in (3, 5, 7):
        for weight in weights:
            x = torch.randn(rows, 64, requires_grad=True)
            found, expected = compiled(x, weight), model(x, weight)
            torch.testing.assert_close(found, expected)
            torch.testing.assert_close(torch.autograd.grad(found.sum(), x), torch.autograd.grad(expected.sum(), x))


@pytest.mark.parametrize("kind", ["dense", "quantised", "layer"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "jitgen"])
def test_gradients_of_torch_func(backend: str, kind: str) -> None:
    layer, x = torch.nn.Linear(64, 32), torch.randn(3, 64)
    if kind != "dense":
        jitgen.quantize_(layer, "int4", group_size=32)
    weight: Any = layer.weight
    dense, bias = weight.detach() if kind == "dense" else weight.dequantize(), layer.bias.detach()

    def product(x: torch.Tensor) -> torch.Tensor:
        return F.silu(F.linear(x, weight, bias))

    function = (lambda x: F.silu(layer(x))) if kind == "layer" else jitgen.jit(product)

    def gradients(called: Callable[..., Any]) -> Callable[..., Any]:
        def model(x: torch.Tensor) -> Any:
            grad = torch.func.grad(lambda x: called(x).sum())
            pulled = torch.func.vjp(called, x)[1](torch.ones(3, 32))
            return grad(x), torch.vmap(grad)(x), pulled, torch.func.jacrev(lambda x: called(x).sum(0))(x)

        return model

    found = torch.compile(gradients(function), backend=backend, fullgraph=True)(x)
    wanted = gradients(lambda x: F.silu(F.linear(x, dense, bias)))(x)
    # 32 sums of 64 products of about 1, each rounded to 2^-24 of it
    torch.testing.assert_close(found, wanted, rtol=0, atol=32 * 64 * 2**-24)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "jitgen"])
def test_a_function_of_a_quantised_weight_that_returns_its_argument_is_no_operator(backend: str) -> None:
    weight = jitgen.quantize(torch.randn(64, 64), "int4", group_size=32)
    function = jitgen.jit(lambda x, w: (x, F.linear(x, w)))
    x = torch.randn(3, 64)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="aliasing"):
        torch.compile(lambda x: function(x, weight), backend=backend, fullgraph=True)(x)
    same, product = torch.compile(lambda x: function(x, weight), backend=backend)(x)
    assert same is x
    torch.testing.assert_close(product, F.linear(x, weight))


# ------------------------------------------------------------------------------------------------ the operators


def product(x: torch.Tensor, w: torch.Tensor, scale: float, power: int) -> Any:
    return F.silu(x @ w) * scale, x.sum(-1) ** power


def traced(function: Callable[..., Any], *args: Any) -> torch.fx.GraphModule:
    return make_fx(function, tracing_mode="symbolic")(*args)


def operator_nodes(module: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return [node for node in module.graph.nodes if "jitgen" in str(node.target)]


@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(requires_grad: bool) -> None:
    x, w = torch.randn(4, 8), torch.randn(8, 16)
    module = traced(lambda x, w: jitgen.jit(product)(x, w, 2.0, 3), x, w)
    (node,) = operator_nodes(module)
    tensors = [x.clone().requires_grad_(requires_grad), w.clone().requires_grad_(requires_grad)]
    torch.library.opcheck(torch.ops.jitgen.call.default, (tensors, [3], [2.0], node.args[3]))
    weight = jitgen.quantize(torch.randn(16, 64), "int8")
    bias = torch.randn(16, requires_grad=requires_grad)
    arguments = torch.randn(3, 64, requires_grad=requires_grad), list(weight.tensors), bias, weight.token.text
    torch.library.opcheck(torch.ops.jitgen.linear.default, arguments)


def multiplied(x: Any, w: Any, ids: Any) -> Any:
    """Products with matrices of a quantised weight, each of which a graph computes."""
    return x @ w[ids].mT, x @ w[1:4].mT, x @ w[:6].chunk(2)[1].mT, F.linear(x, w[3]), F.linear(x, w[2, :32])


@pytest.mark.parametrize("backend", BACKENDS)
def test_matrices_that_a_graph_computes(backend: str) -> None:
    """Inductor has one buffer for the codes of several of them."""
    weight = jitgen.quantize(torch.randn(8, 64, 128), "int4", group_size=32)
    x, ids = torch.randn(3, 4, 128), torch.tensor([5, 0, 7])
    compiled = torch.compile(multiplied, backend=backend)
    for _ in range(2):
        exact = multiplied(x.double(), weight.dequantize(torch.float64), ids)
        for found, wanted in zip(compiled(x, weight, ids), exact, strict=True):
            torch.testing.assert_close(found.double(), wanted, rtol=0, atol=128 * 2**-23 * wanted.abs().max().item())
        weight = jitgen.quantize(torch.randn(8, 64, 128), "int4", group_size=32)


def test_a_weight_that_a_graph_computes_is_not_remembered() -> None:
    """What a kernel of a graph writes to memory that it uses again has no version."""
    weights = [jitgen.quantize(torch.randn(16, 64), "int8") for _ in range(2)]
    tensors, x = [tensor.clone() for tensor in weights[0].tensors], torch.randn(3, 64)
    for weight in weights:
        for tensor, values in zip(tensors, weight.tensors, strict=True):
            tensor.numpy()[...] = values.numpy()
        found = torch.ops.jitgen.linear(x, tensors, None, COMPUTED + weight.token.text)
        assert torch.equal(found, F.linear(x, weight))


def test_a_compiled_weight_has_the_names_of_its_tensors_that_the_graph_has() -> None:
    """Torch 2.11 asks for them at each call, without a context of what it traces."""
    weight = jitgen.quantize(torch.randn(16, 64), "int8")
    torch.compile(F.linear, backend="aot_eager")(torch.randn(3, 64), weight)
    names, token = weight.__tensor_flatten__()
    assert not any(name.startswith("portable") for name in names)
    assert token is weight.token


def test_one_operator_serves_all_sizes_and_compiles_where_it_is_traced() -> None:
    x, w = torch.randn(4, 8), torch.randn(8, 16)
    module = traced(lambda x, w: jitgen.jit(product)(x, w, 2.0, 3), x, w)
    with jitgen.strict():
        torch.testing.assert_close(module(x, w), product(x, w, 2.0, 3))
    for rows in (1, 7):
        y = torch.randn(rows + 1, 8)
        torch.testing.assert_close(module(y, w), product(y, w, 2.0, 3))


def test_an_operator_says_for_which_sizes_it_is_not() -> None:
    def halves(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > 8 else x * 3

    module = traced(lambda x: jitgen.jit(halves)(x), torch.randn(4))
    text = operator_nodes(module)[0].args[3]
    with pytest.raises(jitgen.UnsupportedError, match="is for calls where"):
        torch.ops.jitgen.call([torch.randn(16)], [], [], text)


def test_an_update_where_torch_traces_is_an_update() -> None:
    @jitgen.jit
    def update(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(y)
        return x * 2

    module = traced(lambda x, y: update(x, y), torch.zeros(3), torch.ones(3))
    x = torch.zeros(3)
    torch.testing.assert_close(module(x, torch.ones(3)), torch.full((3,), 2.0))
    torch.testing.assert_close(x, torch.ones(3))


# --------------------------------------------------------------------------------------------------- torch.func


@pytest.mark.parametrize(
    "function",
    [lambda x, w: torch.sin(x) + w, lambda x, w: torch.softmax(x, -1) * w, lambda x, w: x @ w.T],
    ids=["elementwise", "reduction", "product"],
)
@pytest.mark.parametrize("in_dims", [(0, None), (1, None), (0, 0)])
@pytest.mark.covering(1)
def test_vmap(function: Callable[..., Any], in_dims: Any) -> None:
    x = torch.randn(3, 3, 5)
    w = torch.randn(3, 5) if in_dims[1] is None else torch.randn(3, 3, 5)
    found = torch.vmap(jitgen.jit(function), in_dims)(x, w)
    torch.testing.assert_close(found, torch.vmap(function, in_dims)(x, w))


def test_inference_mode_and_deterministic_algorithms() -> None:
    with torch.inference_mode():
        y = shifted(X)
        torch.testing.assert_close(shifted(y), plain(plain(X)))
    torch.use_deterministic_algorithms(True)
    try:
        index = torch.tensor([0, 2, 0, 2])
        added = jitgen.jit(lambda x, i: torch.zeros(3, 4).index_add(0, i, x))
        x = torch.randn(4, 4)
        assert torch.equal(added(x, index), added(x, index))
    finally:
        torch.use_deterministic_algorithms(False)


def test_ordered_weights_and_embeddings_are_in_one_graph() -> None:
    state, _ = checkpoint_writers.gptq(act=True)
    weight = jitgen.load_quantized(state, config={"checkpoint_format": "gptq"}, dtype=torch.float32)["l.weight"]
    x = torch.randn(3, 128)
    product = torch.compile(lambda x: F.linear(x, weight) + 1, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(product(x), F.linear(x, weight) + 1)
    embedding = torch.nn.Embedding(37, 64)
    jitgen.quantize_(embedding, "int8", embeddings=True)
    index = torch.tensor([[1, 36], [0, 5]])
    compiled = torch.compile(embedding, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(index), embedding(index))


@pytest.mark.parametrize("format", ["uint4", "mxfp4"])
def test_sizes_of_a_quantised_embedding_stay_dynamic(format: str) -> None:
    embedding = torch.nn.Embedding(37, 64)
    jitgen.quantize_(embedding, format, 32, embeddings=True)
    count = {1: torch.export.Dim("count", min=2, max=3000)}
    index = torch.randint(0, 37, (2, 5))
    exported = torch.export.export(embedding, (index,), dynamic_shapes=(count,)).module()
    for columns in (2, 1001):
        index = torch.randint(0, 37, (2, columns))
        assert torch.equal(exported(index), embedding(index))


# ------------------------------------------------------------------------------------------------------- export


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_exported_program_runs_at_every_size_and_from_a_file(strict: bool) -> None:
    model = Scaled().eval()
    rows = {"x": {0: torch.export.Dim("rows", min=2, max=1000)}}
    with torch.no_grad():
        program = torch.export.export(model, (torch.randn(3, 4),), dynamic_shapes=rows, strict=strict)
    assert any("jitgen" in str(node.target) for node in program.graph.nodes)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    x = torch.randn(9, 4)
    for each in (program, torch.export.load(file)):
        torch.testing.assert_close(each.module()(x), model(x))


def test_a_quantised_model_is_exported() -> None:
    model = quantised()
    x = torch.randn(3, 64)
    program = torch.export.export(model, (x,))
    assert sum("jitgen.linear" in str(node.target) for node in program.graph.nodes) == 2
    torch.testing.assert_close(program.module()(x), model(x))
    # The call of the model has converted its weights.
    torch.testing.assert_close(program.module()(x), model(x))
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), model(x))


@pytest.mark.parametrize(
    ("format", "called_before"),
    [("int4", True), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("uint4", False), ("nvfp4", True)))],
)
def test_a_quantised_model_is_exported_to_a_file(format: str, called_before: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.GELU(), torch.nn.Linear(48, 5, bias=False))
    jitgen.quantize_(model, format)
    x = torch.randn(3, 64)
    if called_before:
        model(x)
    rows = ({0: torch.export.Dim("rows", min=2, max=1000)},)
    program = torch.export.export(model, (x,), dynamic_shapes=rows)
    plain = program.run_decompositions({})
    assert all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in plain.state_dict.values())
    expected = model(y := torch.randn(9, 64))
    for each in (program, plain):
        file = io.BytesIO()
        torch.export.save(each, file)
        file.seek(0)
        loaded = torch.export.load(file)
        torch.testing.assert_close(loaded.module()(y), expected)
        torch.export.save(loaded, io.BytesIO())
        torch.testing.assert_close(each.module()(y), expected)


@jitgen.jit
def partly_detached(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.exp(x)
    return torch.softmax(x, -1) * torch.softmax(x.detach(), -1) * x, y.detach() + 1


def _exported(function: Any, x: torch.Tensor) -> Any:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return function(x)

    return torch.export.export(Model(), (x,), dynamic_shapes=({0: torch.export.Dim("rows")},)).module()


def _first_and_second(function: Any, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    result, constant = function(x)
    assert result.requires_grad
    assert not constant.requires_grad
    (first,) = torch.autograd.grad(result.sin().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    return [result, constant, first, second]


@pytest.mark.parametrize("traced", [_exported, lambda function, x: make_fx(function)(x)], ids=["export", "make_fx"])
def test_gradients_of_a_program_traced_without_stop_where_it_detaches(traced: Any) -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    program = traced(partly_detached, torch.randn(3, 4, dtype=torch.float64))
    expected = _first_and_second(partly_detached.reference, x)
    torch.testing.assert_close(_first_and_second(program, x), expected)


def test_an_exported_program_runs_and_trains_with_one_row() -> None:
    program = _exported(partly_detached, torch.randn(3, 4, dtype=torch.float64))
    for rows in (1, 2, 0):
        x = torch.randn(rows, 4, dtype=torch.float64)
        expected = _first_and_second(partly_detached.reference, x)
        torch.testing.assert_close(_first_and_second(program, x), expected)


def test_the_backward_of_an_exported_program_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from jitgen.gradients.backward import Backward

    program = _exported(partly_detached, torch.randn(3, 4))
    made, traced = list[str](), Backward.traced
    monkeypatch.setattr(Backward, "traced", lambda *args: made.append(args[1]) or traced(*args))
    for _ in range(3):
        program(torch.randn(5, 4, requires_grad=True))[0].sum().backward()
    assert made == ["partly_detached_backward"]


# ----------------------------------------------------------------------------------------------- torch's other tracers


@jitgen.jit
def rectified(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ weight) + 1


def test_make_fx_records_an_operator() -> None:
    x, weight = torch.randn(3, 4), torch.randn(4, 5)
    layer = torch.nn.Linear(64, 4)
    jitgen.quantize_(layer, "int8")
    wide = torch.randn(3, 64)
    for function, example in (
        (lambda x: rectified(x * 2, weight) * 3, x),
        (lambda x: rectified(layer(x), weight), wide),
    ):
        function(example)  # a warm call is no other than a cold one
        graph = make_fx(function)(example)
        assert any("jitgen" in str(node.target) for node in graph.graph.nodes)
        other = torch.randn_like(example)
        torch.testing.assert_close(graph(other), function(other))
    plan = rectified.bind(x, weight)
    for call in (lambda x: plan(x, weight), lambda x: rectified(x, weight, out=torch.empty(3, 5))):
        with pytest.raises(jitgen.UnsupportedError, match="make_fx"):
            make_fx(call)(x)


def test_a_counter_of_operations_sees_an_operator() -> None:
    seen: list[str] = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x, weight = torch.randn(3, 4), torch.randn(4, 5)
    expected = rectified(x, weight)
    with Log():
        torch.testing.assert_close(rectified(x, weight), expected)
    assert "jitgen.call.default" in seen
    weight.requires_grad_(True)
    with Log():
        rectified(x, weight).sum().backward()
    torch.testing.assert_close(weight.grad, ((x @ weight > 0).float().T @ x).T)


@pytest.mark.filterwarnings("ignore")
def test_tracers_that_would_record_constants_are_refused() -> None:
    x, weight = torch.randn(3, 4), torch.randn(4, 5)
    rectified(x, weight)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(jitgen.UnsupportedError, match=r"torch\.export\.export"):
            torch.jit.trace(lambda x: rectified(x, weight), (x,))
    with pytest.raises(jitgen.UnsupportedError, match=r"torch\.fx\.wrap"):
        torch.fx.symbolic_trace(lambda x: rectified(x, weight))
