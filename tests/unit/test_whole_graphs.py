"""``jitgen.compile(model, cuda_graph=True)``: a graph stands for a call only where Python would do nothing else.

``tests/recorded_calls.py`` stands for CUDA's graphs; ``tests/device/test_whole_models.py`` has the same on a GPU.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import gc
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import jitgen
from jitgen.call.resolver import Resolver
from jitgen.errors import CaptureMissError
from jitgen.models import graphs
from jitgen.models.compile import graph_of
from jitgen.trace import autocast
from tests import recorded_calls
from tests.blocks import Block, Net

X = torch.linspace(-2, 2, 40).reshape(5, 8)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", jitgen.FallbackWarning)
        yield


RUNS = itertools.count()


class Counted(Net):
    """Counts the runs of its Python code."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        next(RUNS)
        return super().forward(x).tanh()  # by torch, between units


def compiled(model: nn.Module) -> tuple[Any, Any]:
    """Returns a compiled model whose calls are captured, and its copy in eager torch."""
    eager = copy.deepcopy(model)
    return jitgen.compile(model, cuda_graph=True), eager


def matches(model: Any, eager: Any, *args: Any) -> None:
    torch.testing.assert_close(model(*args), eager(*args), atol=1e-5, rtol=1e-5)


def test_a_replay_runs_kernels_and_no_python(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded_calls.install(monkeypatch)
    model, eager = compiled(Counted(Block, 2).eval())
    expected = [eager(X + index) for index in range(6)]
    before = next(RUNS)
    results = [model(X + index) for index in range(6)]
    assert next(RUNS) - before - 1 == graphs.RUNS_BEFORE + 1
    torch.testing.assert_close(results, expected, atol=1e-5, rtol=1e-5)  # none is overwritten by a later call
    assert str(jitgen.report(model)).splitlines()[1] == "1 forms of calls are CUDA graphs"
    with torch.enable_grad():
        model(X)
    assert "the last call was none: gradients are enabled" in str(jitgen.report(model))
    jitgen.decompile(model)
    assert "forward" not in vars(model)


class Asking(Net):
    """Makes calls of its units in captures that it makes nowhere else, as decoders of transformers do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.T.contiguous().T if torch.cuda.is_current_stream_capturing() else x)


def test_kernels_that_only_a_capture_misses_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded_calls.install(monkeypatch)
    missed, resolve = list[Any](), Resolver.resolve

    def within_capture(resolver: Resolver, call: Any, *others: Any) -> Any:
        if recorded_calls.Recording.current is not None:
            missed.append(resolver)
            raise CaptureMissError("the first call with such arguments is within the capture of a CUDA graph")
        return resolve(resolver, call, *others)

    monkeypatch.setattr(Resolver, "resolve", within_capture)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: recorded_calls.Recording.current is not None)
    model, eager = compiled(Asking(Block, 2).eval())
    for index in range(4):
        matches(model, eager, X + index)
    assert missed
    assert graph_of(model).captured == 1

    monkeypatch.setattr(graphs, "MOST_MISSES", 0)
    missed.clear()
    for index in range(2):
        matches(model, eager, X[:3] + index)
    with pytest.warns(jitgen.FallbackWarning, match="within the capture"):
        model(X[:3])
    assert len(missed) == graph_of(model).captured == 1


VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("variable", default=1.0)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def variable(value: float) -> Iterator[None]:
    token = VARIABLE.set(value)
    try:
        yield
    finally:
        VARIABLE.reset(token)


@pytest.mark.parametrize(
    "context",
    [
        contextlib.nullcontext,
        lambda: torch.autocast("cpu", torch.bfloat16),
        torch.inference_mode,
        lambda: default_dtype(torch.float64),
        lambda: variable(3.0),
    ],
    ids=["no_grad", "autocast", "inference_mode", "default_dtype", "variable"],
)
def test_what_a_capture_misses_is_compiled_in_the_modes_of_the_call(
    monkeypatch: pytest.MonkeyPatch, context: Callable[[], contextlib.AbstractContextManager[Any]]
) -> None:
    missed, resolve = list[CaptureMissError](), Resolver.resolve

    def first_misses(*call: Any) -> Any:
        if not missed:
            missed.append(CaptureMissError("the first call with such arguments is within the capture of a CUDA graph"))
            raise missed[0]
        return resolve(*call)

    weight = nn.Parameter(torch.randn(7, 8))
    function = jitgen.jit(lambda x: (nn.functional.linear(x, weight), x[0, 0] + torch.ones(7) * VARIABLE.get()))

    def call(function: Any) -> tuple[torch.Tensor, ...]:
        with torch.no_grad(), context():
            return function(X)

    def modes() -> Any:
        grad = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return *grad, autocast.settings(), torch.get_default_dtype(), VARIABLE.get()

    monkeypatch.setattr(Resolver, "resolve", first_misses)
    monkeypatch.setattr(graphs, "capture", lambda function: (None, function()))
    with torch.enable_grad():
        before, expected = modes(), call(function.reference)
        _, result = graphs.capture_resolved(lambda: call(function))
        assert modes() == before
        torch.testing.assert_close(result, expected)  # their dtypes too
        assert not any(tensor.requires_grad for tensor in result)
        assert len(function.specializations) == 1  # the second attempt takes what was made between
    assert len(missed) == 1


def test_every_batch_has_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded_calls.install(monkeypatch)
    model, eager = compiled(Net(Block, 2).eval())
    for size in (5, 3, 5, 1):
        for index in range(4):
            matches(model, eager, X[:size] + index)
    assert graph_of(model).captured == 3


def test_arguments_keep_their_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture cannot bind launches, so its arguments are of the strides and alignment that the calls before had."""
    recorded_calls.install(monkeypatch)
    model, eager = compiled(Net(Block, 2).eval())
    flat = torch.randn(200)
    for x in (flat[3:11].expand(5, 8), flat[1:121].view(5, 24)[:, ::3], flat[:40].view(8, 5).T, flat[:0].view(0, 8)):
        for _ in range(4):
            flat.add_(0.5)
            matches(model, eager, x)
        *_, form = graph_of(model)._without_cache.by_key.values()
        assert (form.inputs[0].stride(), form.inputs[0].data_ptr() % 16) == (x.stride(), x.data_ptr() % 16)
    assert graph_of(model).captured == 4


def test_what_changes_ends_its_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are replaced, an attribute, and a dtype; values that are written in place need no other graph."""
    recorded_calls.install(monkeypatch)
    model, eager = compiled(Net(Block, 2).eval())

    def both(change: Any) -> None:
        change(model)
        change(eager)

    replacement = torch.randn(24, 16)
    for captured, change in enumerate(
        (
            lambda net: None,
            lambda net: setattr(net.layers[1].up, "weight", nn.Parameter(replacement.clone())),
            lambda net: setattr(net.layers[0], "kind", "tanh"),
            lambda net: setattr(net.layers[0].down.weight, "data", torch.ones(16, 24)),
            lambda net: setattr(net.layers, "1", nn.Identity()),
        ),
        1,
    ):
        both(change)
        for index in range(4):
            matches(model, eager, X + index)
        assert graph_of(model).captured == captured
    both(lambda net: net.layers[0].down.weight.mul_(2))
    matches(model, eager, X)
    assert graph_of(model).captured == 5
    assert graph_of(model).reason is None


SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "vocab_size": 50, "max_position_embeddings": 64, "pad_token_id": 0}
SMALL |= {"bos_token_id": 1, "eos_token_id": None}


@pytest.mark.parametrize("format", ["int4", "nf4", "int8"])
def test_quantised_models(monkeypatch: pytest.MonkeyPatch, format: str) -> None:
    """A quantised weight has the addresses of several tensors; another in its place ends its graphs."""
    recorded_calls.install(monkeypatch)
    net = Net(Block, 2).eval()
    jitgen.quantize_(net, format, None)
    model, eager = compiled(net)
    for captured in (1, 2):
        for index in range(4):
            matches(model, eager, X + index)
        assert graph_of(model).captured == captured
        weight = jitgen.quantize(torch.randn(24, 16), format, None)
        for other in (model, eager):
            other.layers[0].up.weight = nn.Parameter(copy.deepcopy(weight), requires_grad=False)


def test_generation_with_a_static_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Left padding, another batch, and the first batch again: each is what eager torch generates."""
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).eval()
    caches: list[Any] = []
    recorded_calls.install(
        monkeypatch,
        lambda: [
            t for cache in caches for layer in cache.layers for t in (layer.keys, layer.values, layer.cumulative_length)
        ],
    )
    tokens = torch.randint(2, 50, (2, 5))
    padded = torch.ones_like(tokens)
    padded[1, :2] = 0

    def generated() -> list[torch.Tensor]:
        results = []
        for batch, mask in ((tokens, padded), (tokens[:1], padded[:1]), (tokens.flip(0), padded.flip(0))):
            caches[:] = [transformers.StaticCache(config=model.config, max_cache_len=16)]
            results.append(
                model.generate(batch, attention_mask=mask, past_key_values=caches[0], do_sample=False, max_new_tokens=8)
            )
        return results

    eager = generated()
    jitgen.compile(model, cuda_graph=True)
    assert [left.tolist() for left in generated()] == [right.tolist() for right in eager]
    assert graph_of(model).captured == 3
    assert graph_of(model).reason is None
    cache = weakref.ref(caches.pop())
    gc.collect()
    assert cache() is None  # a graph ends with its cache


class Counting(nn.Module):
    """A model that adds to its second argument, as one that gets a cache as plain tensors does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        total += self.inner(x)
        return total * 2


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_calls_that_update_an_argument_are_not_captured(monkeypatch: pytest.MonkeyPatch, context: Any) -> None:
    recorded_calls.install(monkeypatch)
    model, eager = compiled(Counting().eval())
    with context():
        left, right, x = torch.zeros(2, 8), torch.zeros(2, 8), torch.randn(2, 8)
        for _ in range(5):
            torch.testing.assert_close(model(x, left), eager(x, right), atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-5)
    assert "its forward updates an argument" in str(jitgen.report(model))


def test_models_with_hooks_within_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded_calls.install(monkeypatch)
    model = jitgen.compile(Net(Block, 2).eval(), cuda_graph=True)
    calls: list[int] = []
    next(iter(model.layers[1].children())).register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        for number in range(5):
            model(X)
            assert len(calls) == number + 1
    assert "0 forms of calls are CUDA graphs; the last call was none: layers.1.norm has forward hooks" in str(
        jitgen.report(model)
    )


def test_a_capture_that_fails_is_a_call_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "DEVICE", "cpu")
    monkeypatch.setattr(graphs, "capture", lambda function: 1 / 0)
    model = jitgen.compile(Net(Block, 2).eval(), cuda_graph=True)
    results = [model(X), model(X)]
    with pytest.warns(jitgen.FallbackWarning, match="calls of Net are not captured: division by zero"):
        results.append(model(X))
    assert torch.equal(results[0], results[2])
    assert "0 forms of calls are CUDA graphs; the last call was none: division by zero" in str(jitgen.report(model))
