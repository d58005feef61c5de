"""``torch.compile(backend="jitgen")`` and tensors that share memory: arguments and results are eager torch's, in value
and in what shares memory with what."""

from __future__ import annotations

import importlib
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import view_programs
from torch import nn

import jitgen
from jitgen.compilers import host
from jitgen.dynamo import backend, cut

pytestmark = pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")

Tensor = torch.Tensor
bump, doubled = view_programs.bump, view_programs.doubled


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    importlib.import_module("jitgen.dynamo.registration")
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error", jitgen.FallbackWarning)
        yield
    torch._dynamo.reset()
    backend._compiled.clear()  # Dynamo keeps graphs that follow a break


class Layer(nn.Module):
    def forward(self, x: Tensor, row: Tensor) -> Tensor:
        row.copy_(x.sum(0))
        return x * 2


class RowForEachLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: Tensor) -> Any:
        cache = x.new_zeros(2, x.shape[1])
        for index, layer in enumerate(self.layers):
            x = layer(x, cache[index])
        return x, cache


def diagonal(x: Tensor) -> Any:
    y = x * 2
    y.diagonal().add_(1)
    return y


def flat(x: Tensor) -> Any:
    y = x * 2
    y.view(-1)[2:5] = 3
    return y


def filled_diagonal(x: Tensor) -> Any:
    y = x * 2
    y[:, :2].fill_diagonal_(9.0)
    return y


def custom_operator(x: Tensor) -> Any:
    y = x * 2
    bump(y[0])
    torch.ops.view_programs.bump(y[1])
    return y


def read_after_update(x: Tensor) -> Any:
    y = x * 2
    v = y[1:3]
    bump(y)
    return v * 3, v, y


def strided(x: Tensor) -> Any:
    return (x * 2).t().as_strided((3, 3), (3, 1)), (x.t() * 2).as_strided((2,), (1,))


def across_a_break(x: Tensor) -> Any:
    y = x * 2
    v = y[0]
    torch._dynamo.graph_break()
    v.mul_(3)
    return y + 0, y


def slice_copied(x: Tensor) -> Any:
    y = x.new_empty(4, 8)
    y[:, :4].copy_(x)
    y[:, 4:].copy_(x.flip(1))
    return y, y[:, 2:6]


def results_that_alias(x: Tensor) -> Any:
    y = x + 1
    return y, y[1], y.t(), y.view(-1), x[0], x, y.add_(1), y.reshape(-1), y.t().reshape(-1)


def windows(x: Tensor) -> Any:
    y = x * 2
    y.unfold(0, 2, 2).add_(1)
    return y


def items(x: Tensor) -> Any:
    values, order = torch.sort(x * -1, 0)
    values[0].add_(5)
    return values, values[0], order, order[1:]


def returned_by_dropout(x: Tensor) -> Any:
    y = x * 2
    d = F.dropout(y, 0.5, False)
    d.add_(1)
    return y, d


@jitgen.jit
def decorated(x: Tensor) -> Tensor:
    return x * 3


def of_a_decorated_function(x: Tensor) -> Any:
    y = decorated(x)
    v = y[1:]
    bump(v)
    return y, v


def shapes_change_in_place(x: Tensor) -> Any:
    y = x * 2
    z = y[1:]
    y.t_()
    y[0].add_(1)
    return y, z, y + 1


FUNCTIONS: list[Callable[..., Any]] = [RowForEachLayer(), diagonal, flat, filled_diagonal, custom_operator]
FUNCTIONS += [read_after_update, strided, across_a_break, slice_copied, results_that_alias, windows, items]
FUNCTIONS += [returned_by_dropout, of_a_decorated_function, shapes_change_in_place]


def name_of(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def observed(function: Callable[..., Any], arguments: tuple[list[Tensor], list[Tensor]], grad: bool = False) -> Any:
    """Everything that a caller can tell: layouts and what shares memory; values; gradients; values after updates."""
    tensors, buffers = arguments
    given = [tensor.requires_grad_() * 1 if grad else tensor for tensor in tensors]
    found = function(*given)
    results = [*(found if isinstance(found, tuple) else (found,)), *given]
    values = [each.detach().clone() for each in (*results, *buffers)]
    loss: Any = sum(each.sum() * (n + 1) for n, each in enumerate(results) if each.requires_grad)
    grads = torch.autograd.grad(loss, tensors, allow_unused=True, materialize_grads=True) if grad else ()
    after = view_programs.updated_one_after_another(results, buffers)
    return view_programs.layout(results), [*values, *grads, *after]


def check(
    function: Callable[..., Any], make: Callable[[], Any], grad: bool = False, dynamic: bool | None = None
) -> None:
    layouts, values = observed(function, make(), grad)
    compiled = torch.compile(function, backend="jitgen", dynamic=dynamic)
    found_layouts, found_values = observed(compiled, make(), grad)
    assert found_layouts == layouts
    torch.testing.assert_close(found_values, values, rtol=0, atol=0, equal_nan=True)  # bits of floats may be NaN's


def square() -> tuple[list[Tensor], list[Tensor]]:
    x = torch.arange(16.0).reshape(4, 4)
    return [x], [x]


@pytest.mark.parametrize("function", FUNCTIONS, ids=name_of)
def test_updates_through_views_are_seen(function: Callable[..., Any]) -> None:
    check(function, square)


@pytest.mark.parametrize(
    "function", [RowForEachLayer(), read_after_update, across_a_break, results_that_alias], ids=name_of
)
@pytest.mark.parametrize("grad", [False, True], ids=["dynamic", "training"])
@pytest.mark.covering(1)
def test_updates_through_views_with_symbolic_sizes_and_gradients(function: Callable[..., Any], grad: bool) -> None:
    check(function, square, grad, dynamic=None if grad else True)


def beyond_its_view(x: Tensor) -> Any:
    """``as_strided`` reaches an element of ``x`` that the diagonal has not."""
    flat, diagonal = x.view(-1), x.diagonal()
    flat.add_(1)
    diagonal.as_strided((2,), (3,)).mul_(2)
    return flat, diagonal


def a_view_beyond_its_view(x: Tensor) -> Any:
    row = x[0]
    square = row.as_strided((2, 4), (4, 1))
    square[1].mul_(3)
    x.mul_(2)
    return row, x * 1


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("function", [beyond_its_view, a_view_beyond_its_view], ids=name_of)
@pytest.mark.filterwarnings("ignore::jitgen.FallbackWarning")
def test_updates_beyond_a_view_have_the_gradient_of_the_memory(function: Callable[..., Any], grad: bool) -> None:
    check(function, square, grad)


SEEDS = (92, 97, 102, 106)
"""Of programs that together meet most lines of ``view_programs``; any other seed is as good."""


@pytest.mark.parametrize("mode", ["plain", "breaks", "grad", "dynamic"])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.covering(1)
def test_random_programs_of_views(seed: int, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most are cut into programs of few nodes, so that views and their tensors are in different ones."""
    # Windows that overlap are updated by torch.
    warnings.filterwarnings("ignore", "(?s).*several of its elements share memory", jitgen.FallbackWarning)
    if mode == "grad":  # an argument that requires grad and gets a constant is updated by torch
        warnings.simplefilter("ignore", jitgen.FallbackWarning)
    monkeypatch.setattr(cut, "layer_of", view_programs.layers_of(random.Random(seed).choice((2, 4, 160))))
    program = view_programs.view_program(seed, breaks=mode == "breaks", layouts=mode == "plain", grad=mode == "grad")
    check(
        program.function,
        lambda: view_programs.inputs_of(program.kind),
        mode == "grad",
        True if mode == "dynamic" else None,
    )


@pytest.mark.parametrize("kind", sorted(set(view_programs.INPUTS)))
def test_arguments_that_share_memory(kind: str) -> None:
    def update(x: Tensor, y: Tensor, z: Tensor) -> Any:
        before = y.sum()
        x.add_(1)
        z.mul_(2)
        return y * 2 + before, y, x[0]

    check(update, lambda: view_programs.inputs_of(kind))


def test_arguments_that_share_memory_in_a_later_call_alone() -> None:
    def update(x: Tensor, y: Tensor) -> Tensor:
        before = y.sum()
        x.add_(1)
        return y * 2 + before

    compiled = torch.compile(update, backend="jitgen")
    for shared in (False, True, False):
        pairs = []
        for function in (update, compiled):
            buffer = torch.arange(40.0).reshape(10, 4)
            x, y = buffer[:4], buffer[1:5] if shared else buffer[5:9]
            with (
                pytest.warns(jitgen.FallbackWarning, match="shares memory")
                if shared and function is compiled
                else nullcontext()
            ):
                pairs.append((function(x, y), buffer))
        torch.testing.assert_close(*pairs, rtol=0, atol=0)
    assert jitgen.report(compiled).share_of_nodes == 1.0, "one call's arguments say nothing of those of others"


def test_a_static_cache_is_updated_by_kernels() -> None:
    class Attention(nn.Module):
        def forward(self, x: Tensor, keys: Tensor, at: Tensor) -> Tensor:
            keys.index_copy_(1, at, x)
            keys[:, :1] = x
            return F.scaled_dot_product_attention(x, keys, keys)

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Attention() for _ in range(2))

        def forward(self, x: Tensor, cache: Tensor, at: Tensor) -> Tensor:
            for index, layer in enumerate(self.layers):
                x = layer(x, cache[index], at)
            return x

    model, caches = Decoder(), [torch.zeros(2, 2, 6, 8) for _ in range(2)]
    x, at = torch.randn(2, 1, 8), torch.tensor([3])
    torch.testing.assert_close(torch.compile(model, backend="jitgen")(x, caches[0], at), model(x, caches[1], at))
    torch.testing.assert_close(caches[0], caches[1])
    assert jitgen.report(torch.compile(model, backend="jitgen")).share_of_nodes == 1.0
    assert len({step.program for step in backend.compiled()[-1].steps if step.program is not None}) == 1, (
        "equal layers are one program"
    )


def test_a_result_that_a_later_step_overwrites_is_what_the_backward_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut, "layer_of", view_programs.layers_of(1))

    def function(x: Tensor) -> Any:
        y = torch.sort(x, 0)[0]
        x.add_(1)
        z = torch.sort(y, 0)[0]
        y.mul_(2)
        return y, z

    check(function, square, grad=True)


def test_what_stays_with_torch_has_its_reason() -> None:
    def function(x: Tensor, y: Tensor) -> Any:
        x.add_(1)
        return y * 2

    buffer = torch.arange(40.0).reshape(10, 4)
    compiled = torch.compile(function, backend="jitgen")
    compiled(buffer[:4], buffer[1:5])
    reasons = {node.function: node.reason for node in jitgen.report(compiled).nodes}
    assert reasons["mul"] is None
    assert "another argument of the program shares" in str(reasons["add_"])
