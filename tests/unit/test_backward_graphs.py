"""Backwards are graphs that are made of the forward's nodes (``jitgen/gradients/backward.py``)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import jitgen
from jitgen.gradients.backward import Backward
from jitgen.gradients.replay import function_of
from jitgen.gradients.rules import RULES
from jitgen.gradients.values import fn
from jitgen.ir.graph import Graph, topological
from jitgen.ir.nodes import INPUT
from jitgen.ir.ops import OPS
from jitgen.trace import table
from jitgen.trace.traced import Traced

OTHERS = {"philox", "exp2_normal", "fma"}
"""Operations that a forward saves the result of, or that kernels alone have."""


class Refuses(TorchFunctionMode):
    """No torch function is called within it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "promote_types") or getattr(func, "__objclass__", None) is torch.Tensor:
            return func(*args, **(kwargs or {}))  # facts of the tensors of a call, and of dtypes
        raise AssertionError(f"{name} is called")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """The backwards that are made, within which no torch function is called."""
    graphs, traced = list[Graph](), Backward.traced

    def recorded(*arguments: Any) -> Traced:
        with Refuses():
            found = traced(*arguments)
        graphs.append(found.graph)
        return found

    monkeypatch.setattr(Backward, "traced", recorded)
    return graphs


def block(x: torch.Tensor, weight: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    hidden = F.gelu(F.linear(F.layer_norm(x, x.shape[-1:]), weight))
    return torch.softmax(hidden, -1).cumsum(-1).gather(1, index) + x.amax(-1, keepdim=True)


def test_a_backward_is_made_without_a_call_of_torch(made: list[Graph]) -> None:
    function = jitgen.jit(block)
    for rows in (3, 7):
        x = torch.randn(rows, 8, dtype=torch.float64, requires_grad=True)
        weight = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
        index = torch.randint(0, 5, (rows, 4))
        assert_same_gradients(function, block, x, weight, index)
    assert [graph.name for graph in made] == ["block_backward"], "one for all sizes"


def test_what_a_backward_computes_belongs_to_lines_of_the_forward(made: list[Graph]) -> None:
    assert_same_gradients(jitgen.jit(block), block, *example())
    lines, first = inspect.getsourcelines(block)
    own = {f"{__file__}:{first + number}" for number in range(1, len(lines))}
    (graph,) = made
    nodes = [node for node in topological(graph.results) if not (node.kind is INPUT or node.kind.is_number)]
    assert {node.location for node in nodes} == own


@pytest.mark.parametrize("op", sorted(OPS.keys() - OTHERS))
def test_operations_are_computed_again_by_rows_of_nodes(op: str) -> None:
    name = {"trunc_divide": "div", "left_shift": "bitwise_left_shift", "right_shift": "bitwise_right_shift"}.get(op, op)
    row, _ = table.find(getattr(torch, name))
    assert row is not None
    assert not row.composed
    assert callable(function_of(op))


def test_a_function_that_is_made_of_others_is_none_of_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "sin", (lambda g, a: fn.trapezoid(g * a),))
    x = torch.randn(4, 3, requires_grad=True)
    with pytest.raises(AssertionError, match="made of other functions"):
        jitgen.jit(torch.sin)(x).sum().backward()


def scattered(x: torch.Tensor, y: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return x.exp().scatter(1, index, y.sin())


def added(x: torch.Tensor, y: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return x.exp().scatter_add(1, index, y.sin())


def assigned(x: torch.Tensor, y: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    new = x.exp() + 1
    new[:, 1::2] = y.sin()[:, : new[:, 1::2].shape[1]]
    new.T[2:4, :] = x[:, 2:4].T * 3
    return new.cos()


def indexed(x: torch.Tensor, y: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    new = x.exp() + 1
    new[:, index[0]] = y.sin()
    return new * x


@pytest.mark.parametrize("function", [scattered, added, assigned, indexed])
def test_gradients_of_values_that_are_written(function: Callable[..., Any]) -> None:
    compiled = jitgen.jit(function)
    for rows, columns in ((3, 8), (5, 10), (1, 6), (0, 6)):
        x = torch.randn(rows, columns, dtype=torch.float64, requires_grad=True)
        y = torch.randn(rows, columns, dtype=torch.float64, requires_grad=True)
        index = torch.stack([torch.randperm(columns) for _ in range(max(rows, 1))])
        if function is not indexed:
            index = index[:rows]
        assert_same_gradients(compiled, function, x, y, index)
        if rows == 3:
            assert_same_second_derivatives(compiled, function, x, y, index)


def example() -> tuple[torch.Tensor, ...]:
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    return x, torch.randn(5, 8, dtype=torch.float64, requires_grad=True), torch.randint(0, 5, (4, 4))


def gradients_of(function: Any, *arguments: torch.Tensor, create_graph: bool = False) -> tuple[torch.Tensor, ...]:
    result = function(*arguments)
    weights = torch.linspace(-1, 1, result.numel(), dtype=result.dtype).reshape(result.shape)
    wanted = [argument for argument in arguments if argument.requires_grad]
    return torch.autograd.grad((result * weights).sum(), wanted, create_graph=create_graph)


def assert_same_gradients(function: Any, reference: Any, *arguments: torch.Tensor) -> None:
    torch.testing.assert_close(gradients_of(function, *arguments), gradients_of(reference, *arguments))


def assert_same_second_derivatives(function: Any, reference: Any, *arguments: torch.Tensor) -> None:
    wanted = [argument for argument in arguments if argument.requires_grad]
    found = []
    for each in (function, reference):
        first = gradients_of(each, *arguments, create_graph=True)
        found.append(torch.autograd.grad(sum((g * g).sum() for g in first), wanted))
    torch.testing.assert_close(found[0], found[1])
