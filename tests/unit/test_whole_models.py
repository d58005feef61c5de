"""``jitgen.compile``: a model computes what it computes in eager torch, and no call is answered by another's trace."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import jitgen
from jitgen.models.compile import forwards
from tests import blocks
from tests.blocks import Block, Net

SEEN: list[Any] = []


class Third(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).relu() if self.index % 3 == 2 else super().forward(x) * self.index


class Counts(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x)


class Logs(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        SEEN.append(x)
        return super().forward(x)


class Refused(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum().item() > 1e9 else super().forward(-x)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    SEEN.clear()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", jitgen.FallbackWarning)
        yield


X = torch.linspace(-2, 2, 40).reshape(5, 8)


def matches(model: nn.Module, *args: Any) -> torch.Tensor:
    """Compares a compiled model with itself in eager torch; returns the result."""
    compiled = model(*args)
    jitgen.decompile(model)
    torch.testing.assert_close(compiled, model(*args), atol=1e-5, rtol=1e-5)
    jitgen.compile(model)
    return compiled


def traces(model: nn.Module) -> int:
    functions = {function for unit in forwards(model) for function in unit.functions}
    return sum(len(function.all_specializations) for function in functions)


def test_blocks_share_one_trace() -> None:
    model = Net()
    assert jitgen.compile(model) is model
    matches(model, X)
    model(X)
    assert traces(model) == 2  # of the blocks and of what embeds
    model(X.repeat(3, 1))
    assert traces(model) == 2
    report = jitgen.report(model)
    assert "5 modules are compiled as a whole: 5 in generated kernels" in str(report)
    assert {kernel.program for kernel in report.kernels} == {"Block", "Linear"}


def test_numbers_in_which_blocks_differ_are_arguments_or_guards() -> None:
    model = jitgen.compile(Net(Third, 4))
    matches(model, X)
    model(X)
    assert traces(model) == 3  # index % 3 is 2 in one of four


def test_what_changes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = jitgen.compile(Net())
    results = [matches(model, X)]
    changes = (
        lambda: setattr(model.layers[1], "kind", "tanh"),
        lambda: model.layers[2].options.update(shift=0.5),
        lambda: setattr(model.layers[3], "up", nn.Linear(16, 24, bias=False)),
        lambda: setattr(model.layers[0].norm, "eps", 0.5),
        lambda: model.layers[0].down.weight.mul_(2),
        lambda: setattr(model.layers[0], "down", nn.Linear(24, 16)),
    )
    for change in changes:
        model(X)
        change()
        results.append(model(X))
        jitgen.decompile(model)
        torch.testing.assert_close(results[-1], model(X), atol=1e-5, rtol=1e-5)
        jitgen.compile(model)
        assert not torch.allclose(results[-1], results[-2])
    monkeypatch.setattr(blocks, "SCALE", 3.0)
    assert not torch.allclose(matches(model, X), results[-1])


def test_hooks_run() -> None:
    model = jitgen.compile(Net())
    plain = model(X)
    model.layers[0].register_forward_hook(lambda module, args, result: result + 1)
    model.layers[1].up.register_forward_hook(lambda module, args, result: result * 2)
    hooked = model(X)
    assert not torch.allclose(plain, hooked)
    jitgen.decompile(model)
    torch.testing.assert_close(hooked, model(X), atol=1e-5, rtol=1e-5)
    jitgen.compile(model)
    model(X)
    [divided] = [unit for unit in jitgen.report(model).units if unit.divided]
    assert divided.path == "layers.1"
    assert divided.reason == "up has forward hooks"


@pytest.mark.parametrize("block", [Counts, Logs, Refused])
def test_what_no_trace_does_stays_with_torch(block: type[Block]) -> None:
    model, eager = Net(block, 2), Net(block, 2)
    eager.load_state_dict(model.state_dict())
    jitgen.compile(model)
    with pytest.warns(jitgen.FallbackWarning, match="is not traced as a whole"):
        result = model(X)
    seen = len(SEEN)
    torch.testing.assert_close(result, eager(X), atol=1e-5, rtol=1e-5)
    if block is Counts:
        assert [layer.calls for layer in model.layers] == [1, 1]
    if block is Logs:
        assert seen == 2
        assert {*map(type, SEEN)} == {torch.Tensor}
    report = jitgen.report(model)
    assert sum(unit.divided for unit in report.units) == 2
    assert all(unit.reason is None for unit in report.units if not unit.divided)  # the layers of the blocks


def test_a_call_that_torch_refuses_changes_nothing() -> None:
    model = jitgen.compile(Net(Block, 2))
    model(X)
    for wrong in (torch.randn(5, 7), X.to(torch.int64)):
        with pytest.raises(RuntimeError):
            model(wrong)
    matches(model, X)
    model(X)
    assert all(unit.reason is None and not unit.divided for unit in jitgen.report(model).units)


def test_asserted_sizes_are_guards() -> None:
    """As patches of images are embedded; what is asserted of a tensor's value is not traced."""

    class Asserts(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._assert(x.shape[-1] == 16, f"16 features, not {x.shape[-1]}")
            return super().forward(x)

    model = jitgen.compile(Net(Asserts, 2))
    matches(model, X)
    with pytest.raises(AssertionError, match="16 features, not 15"):
        model.layers[0](torch.randn(5, 15))
    matches(model, X)
    assert all(unit.reason is None for unit in jitgen.report(model).units)


def test_strict_mode_raises_what_cannot_be_traced() -> None:
    model = jitgen.compile(Net(Refused, 2))
    model.embed(X)
    with jitgen.strict(), pytest.raises(jitgen.TraceError, match="item"):
        model.layers[0](torch.zeros(5, 16))


def test_gradients() -> None:
    model = Net(Block, 2)
    eager = copy.deepcopy(model)
    jitgen.compile(model)
    with torch.enable_grad():
        for net in (model, eager):
            net(X).square().sum().backward()
    for left, right in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad, atol=1e-4, rtol=1e-4)


def test_copies_run_in_eager_torch() -> None:
    model = jitgen.compile(Net(Block, 2))
    duplicate = copy.deepcopy(model)
    assert forwards(duplicate) == []
    duplicate.layers[0].kind = "tanh"
    assert not torch.allclose(duplicate(X), model(X))
    assert len(forwards(jitgen.compile(duplicate))) == 3


def test_only_modules_are_compiled() -> None:
    with pytest.raises(TypeError, match=r"jitgen\.jit"):
        jitgen.compile(F.gelu)  # type: ignore[type-var]


SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SMALL |= {"vocab_size": 50, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}


@pytest.mark.parametrize("cache", ["static", pytest.param("dynamic", marks=pytest.mark.slow)])
def test_generation(cache: str) -> None:
    """Left padding, and another batch afterwards; the mistral's window is shorter than what is generated."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MistralConfig(**SMALL, sliding_window=6 if cache == "dynamic" else None)
    model = transformers.MistralForCausalLM(config).eval()
    tokens = torch.randint(2, 50, (2, 5))
    padded = torch.ones_like(tokens)
    padded[1, :2] = 0
    options = {"do_sample": False, "max_new_tokens": 5, "cache_implementation": cache, "output_scores": True}
    options |= {"return_dict_in_generate": True}

    def scores() -> list[torch.Tensor]:
        both = [model.generate(tokens, attention_mask=padded, **options)]
        if cache == "dynamic":
            both.append(model.generate(tokens[:1, 2:], **options))
        return [score for generated in both for score in generated.scores]

    eager = scores()
    jitgen.compile(model)
    torch.testing.assert_close(scores(), eager, atol=1e-5, rtol=1e-5)
    report = jitgen.report(model)
    assert all(unit.reason is None for unit in report.units)
    programs = [program for program in report.programs if program.program == "MistralDecoderLayer"]
    assert {program.layers for program in programs} == {("model.layers.0", "model.layers.1")}


def test_prompts_of_any_length_compile_nothing_after_a_few() -> None:
    """Few rows, packed rows, a tile of rows and one row have kernels of their own; so has a chunk behind another one,
    as transformers gives it a mask."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**{**SMALL, "max_position_embeddings": 256})
    model = transformers.LlamaForCausalLM(config).eval()
    eager = copy.deepcopy(model)
    jitgen.compile(model)
    compiled: list[Any] = []

    def prompt(*chunks: int) -> None:
        caches = [(each, transformers.StaticCache(config=config, max_cache_len=256)) for each in (model, eager)]
        for length in chunks:
            tokens = torch.randint(2, 50, (1, length))
            found, expected = (each(tokens, past_key_values=cache).logits for each, cache in caches)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)

    for chunks in ((33, 33), (20, 20), (2, 2), (6, 6), (1, 1)):
        prompt(*chunks)
    unsubscribe = jitgen.on_compile(compiled.append)
    try:
        for chunks in ((3,), (4,), (5,), (9, 16, 17), (31, 32, 8), (34, 1, 2, 64), (65, 66), (129, 3, 100), (255,)):
            prompt(*chunks)
    finally:
        unsubscribe()
    assert not compiled, compiled


def test_a_cache_is_updated_once_where_the_rest_cannot_be_traced() -> None:
    """What Python alone updates is updated before that shows."""
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).eval()

    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (1.0 if x.isnan().any().item() else 0.5)

    for layer in model.model.layers:
        layer.mlp = Odd()
    tokens = torch.randint(2, 50, (2, 5))
    eager = model(tokens, past_key_values=transformers.DynamicCache(config=model.config), use_cache=True).logits
    jitgen.compile(model)
    cache = transformers.DynamicCache(config=model.config)
    with pytest.warns(jitgen.FallbackWarning):
        compiled = model(tokens, past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(compiled, eager, atol=1e-5, rtol=1e-5)
    assert cache.get_seq_length() == 5


@pytest.mark.slow
def test_checkpointed_layers_are_computed_again() -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).train()
    tokens = torch.randint(2, 50, (2, 5))

    def gradients() -> list[Any]:
        model.zero_grad()
        with torch.enable_grad():
            model(tokens, labels=tokens, use_cache=False).loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    eager = gradients()
    jitgen.compile(model)
    model.gradient_checkpointing_enable()
    torch.testing.assert_close(gradients(), eager, atol=1e-5, rtol=1e-4)
    assert all(unit.reason is None for unit in jitgen.report(model).units)


def test_tensors_that_come_and_go_are_noticed() -> None:
    """A bias where there was none, a weight that is no longer that of another module, and another class."""
    model = Net(Block, 2)
    for layer in model.layers:
        layer.up.bias = None
        layer.down.weight = nn.Parameter(torch.randn(16, 24))
        layer.norm.bias = layer.down.bias
    jitgen.compile(model)
    results = [matches(model, X)]
    model(X)

    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    for change in (
        lambda layer: setattr(layer.up, "bias", nn.Parameter(torch.randn(24))),
        lambda layer: setattr(layer.norm, "bias", nn.Parameter(torch.randn(16))),
        lambda layer: setattr(layer.up, "__class__", Doubled),
    ):
        change(model.layers[1])
        results.append(model(X))
        jitgen.decompile(model)
        torch.testing.assert_close(results[-1], model(X), atol=1e-4, rtol=1e-4)
        jitgen.compile(model)
        assert not torch.allclose(results[-1], results[-2])
        model(X)


def test_a_list_that_a_block_extends_is_extended() -> None:
    class Collects(Block):
        def forward(self, x: torch.Tensor, seen: list[Any] | None = None) -> torch.Tensor:
            result = super().forward(x)
            if seen is not None:
                seen.append(result)
            return result

    model = jitgen.compile(Net(Collects, 2))
    seen: list[Any] = []
    x = torch.randn(5, 16)
    with pytest.warns(jitgen.FallbackWarning, match="changes a list or dict that is an argument"):
        result = model.layers[0](x, seen)
    assert len(seen) == 1
    assert torch.equal(seen[0], result)
