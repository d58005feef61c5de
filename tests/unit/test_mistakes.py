"""A mistake of jitgen's in planning kernels is an error with the user's line, and a compiled model runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import jitgen
from jitgen import lowering, pipeline
from jitgen.dynamo import backend
from jitgen.errors import FallbackWarning, InternalError
from jitgen.ir.graph import Graph, topological
from jitgen.trace import tracer

Tensor = torch.Tensor


def function(x: Tensor, y: Tensor) -> Any:
    z = torch.exp(x) + y
    z = torch.tanh(z) * 2  # what no kernel is planned for
    z.mul_(x)
    return z.sum(-1), z


def has_tanh(graph: Graph) -> bool:
    return any(node.op == "tanh" for node in topological(graph.results))


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    def partition(graph: Graph, *arguments: Any) -> Any:
        if has_tanh(graph):
            raise KeyError("no such row")
        return lowering.partition(graph, *arguments)

    monkeypatch.setattr(pipeline, "partition", partition)


@pytest.fixture
def arguments() -> tuple[Tensor, Tensor]:
    torch._dynamo.reset()  # each test compiles the function anew
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 5, generator=generator), torch.randn(5, generator=generator)


def test_the_error_names_the_line(faulty: None, arguments: tuple[Tensor, Tensor]) -> None:
    for call in (jitgen.jit(function), jitgen.jit(function).lower):
        with pytest.raises(InternalError, match=r"failed to plan kernels for this: KeyError: 'no such row'") as raised:
            call(*arguments)
        assert "what no kernel is planned for" in str(raised.value)
        assert "torch.exp" not in str(raised.value)
        assert "please report it" in str(raised.value)
        assert isinstance(raised.value.__cause__, KeyError)


def test_what_no_operation_has_by_itself_names_the_last_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    def partition(graph: Graph, *arguments: Any) -> Any:
        if len(graph.outputs) > 1:
            raise AssertionError("two results")
        return lowering.partition(graph, *arguments)

    monkeypatch.setattr(pipeline, "partition", partition)
    with pytest.raises(InternalError, match=r"two results\n  at .*\n    .*\n  at ") as raised:
        jitgen.jit(function)(torch.ones(3, 5), torch.ones(5))
    assert "return z.sum(-1), z" in str(raised.value)


def test_a_kernel_that_is_not_generated(monkeypatch: pytest.MonkeyPatch, arguments: tuple[Tensor, Tensor]) -> None:
    def render(self: Any, number: int) -> Any:
        raise IndexError("a table has no such row")

    monkeypatch.setattr(lowering.Lowered, "render", render)
    with pytest.raises(InternalError, match="failed to generate a kernel for this: IndexError: a table"):
        jitgen.jit(lambda x, y: torch.sin(x) * y - 17.25)(*arguments)


@pytest.mark.parametrize("error", [TimeoutError("an alarm"), MemoryError(), KeyboardInterrupt(), UserWarning("strict")])
def test_errors_of_others_stay_what_they_are(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def partition(graph: Graph, *arguments: Any) -> Any:
        raise error

    monkeypatch.setattr(pipeline, "partition", partition)
    with pytest.raises(type(error)):
        jitgen.jit(lambda x: x * 2)(torch.ones(3))


@pytest.mark.parametrize("needs_grad", [False, True])
def test_a_compiled_model_runs_it_in_torch(faulty: None, arguments: tuple[Tensor, Tensor], needs_grad: bool) -> None:
    compiled: Callable[..., Any] = torch.compile(function, backend="jitgen")
    given = [argument.clone().requires_grad_(needs_grad) for argument in arguments]
    expected = function(*arguments)
    with pytest.warns(FallbackWarning, match=r"run in torch, not in generated kernels: .*failed to plan kernels"):
        found = compiled(*given)
    again = compiled(*given)
    for got, same, want in zip(found, again, expected, strict=True):
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(same, want)
    assert "KeyError: 'no such row'" in str(jitgen.report(compiled))
    if needs_grad:
        torch.autograd.grad(found[0].sum(), given)


@pytest.fixture
def faulty_backward(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fails to plan backwards; the list has what was planned."""
    planned: list[str] = []

    def partition(graph: Graph, *arguments: Any) -> Any:
        planned.append(graph.name)
        if "backward" in graph.name and has_tanh(graph):
            raise KeyError("no such row")
        return lowering.partition(graph, *arguments)

    monkeypatch.setattr(pipeline, "partition", partition)
    return planned


def test_a_backward_that_is_not_planned_refuses_the_forward(
    faulty_backward: list[str], arguments: tuple[Tensor, Tensor]
) -> None:
    def trained(x: Tensor, y: Tensor) -> Tensor:
        z = torch.sin(x)
        return torch.tanh(z) * y  # what has no backward

    x, y = (argument.requires_grad_() for argument in arguments)
    with pytest.raises(InternalError, match=r"trained_backward: .*failed to plan kernels .*KeyError") as raised:
        jitgen.jit(trained)(x, y)
    assert "what has no backward" in str(raised.value)
    with torch.no_grad():
        torch.testing.assert_close(jitgen.jit(trained)(x, y), trained(x, y))
    compiled: Callable[..., Any] = torch.compile(trained, backend="jitgen")
    with pytest.warns(FallbackWarning, match="run in torch"):
        got = compiled(x, y)
    grads, wanted = (torch.autograd.grad(result.sum(), (x, y)) for result in (got, trained(x, y)))
    for grad, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, want)


def test_a_backward_is_planned_once(faulty_backward: list[str]) -> None:
    function = jitgen.jit(lambda x, y: torch.exp(x) @ y)
    for rows in (3, 7):
        x, y = torch.randn(rows, 5, requires_grad=True), torch.randn(5, 4, requires_grad=True)
        result = function(x, y)
        result.backward(torch.randn(rows, 4))
    assert len([name for name in faulty_backward if "backward" in name]) == 1


def test_a_graph_that_is_not_divided_runs_in_torch(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[Tensor, Tensor]
) -> None:
    def failing(*arguments: Any) -> Any:
        raise AssertionError("an alias of nothing")

    monkeypatch.setattr(backend, "Aliasing", failing)
    compiled: Callable[..., Any] = torch.compile(function, backend="jitgen")
    with pytest.warns(FallbackWarning, match="failed to divide this graph, please report it: AssertionError: an alias"):
        found = compiled(*arguments)
    for got, want in zip(found, function(*arguments), strict=True):
        torch.testing.assert_close(got, want)
    assert "an alias of nothing" in str(jitgen.report(compiled))
    monkeypatch.setenv("JITGEN_STRICT", "1")
    with pytest.raises(Exception, match="an alias of nothing"):
        torch.compile(lambda x: x * 3, backend="jitgen")(arguments[0])


def test_an_operation_whose_row_fails_in_a_trial_runs_in_torch(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[Tensor, Tensor]
) -> None:
    def failing(*arguments: Any) -> Any:
        raise LookupError("no memory")

    def updating(x: Tensor, y: Tensor) -> Tensor:  # which no other test compiles: programs are remembered
        return (torch.exp(x) + y).mul_(3.25).sin()

    monkeypatch.setattr(tracer, "updated", failing)
    compiled: Callable[..., Any] = torch.compile(updating, backend="jitgen")
    torch.testing.assert_close(compiled(*arguments), updating(*arguments))
    assert "no memory" in str(jitgen.report(compiled))
