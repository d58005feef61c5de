"""Gradients of what a program computes from the exponentials of an attention and from their sums, beside its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import jitgen
from jitgen.gradients import plan
from tests.attention import INF

Q, K, V = (2, 3, 37, 8), (2, 3, 53, 8), (2, 3, 53, 16)
Case = Callable[[Any, Any, Any, Any, Any, Any, Any], Any]


def _attention(case: Case, sink: Callable[[Any, Any], Any] | None = None) -> Callable[..., Any]:
    """``case(output, scores, base, e, total, sink exponential, v)`` of causal attention; a sink, by its score and
    exponential, is one more term of the sum."""

    def function(q: Any, k: Any, v: Any) -> Any:
        i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
        s = (q @ k.mT * 0.3).masked_fill(j > i + 16, -INF)
        base, x = s.amax(-1, keepdim=True), None
        score = k[..., :1, :1] * 0.5 + 0 * q[..., :1]
        if sink is not None:
            base = torch.maximum(base, score)
            x = torch.exp(score - base)
        e = torch.exp(s - base)
        total = e.sum(-1, keepdim=True)
        if sink is not None:
            total = total + sink(score, x)
        return case(e / total @ v, s, base, e, total, x, v)

    return function


INVARIANT: dict[str, Callable[..., Any]] = {
    "attention": _attention(lambda o, s, m, e, total, x, v: o),
    "log-sum-exp": _attention(lambda o, s, m, e, total, x, v: (o, m + total.log())),
    "reciprocal": _attention(lambda o, s, m, e, total, x, v: e * (1 / total) @ v),
    "guarded": _attention(lambda o, s, m, e, total, x, v: e / torch.where(total == 0, 1, total) @ v),
    "divided last": _attention(lambda o, s, m, e, total, x, v: e @ v / total + m + total.log()),
    "half": _attention(lambda o, s, m, e, total, x, v: e / (2 * total) @ v),
    "sink": _attention(lambda o, s, m, e, total, x, v: (o, m + total.log(), x / total), lambda t, x: x),
    "sink twice": _attention(lambda o, s, m, e, total, x, v: o, lambda t, x: x * 2),
}
DEPENDENT: dict[str, Callable[..., Any]] = {
    "sum": _attention(lambda o, s, m, e, total, x, v: (o, total)),
    "sum by 3": _attention(lambda o, s, m, e, total, x, v: (o, total / 3)),
    "sum in float64": _attention(lambda o, s, m, e, total, x, v: (o, e.double().sum(-1) * 2)),
    "reciprocal too": _attention(lambda o, s, m, e, total, x, v: (o, 1 / total)),
    "logarithm": _attention(lambda o, s, m, e, total, x, v: (o, total.log())),
    "two logarithms": _attention(lambda o, s, m, e, total, x, v: (o, m + total.log(), 2 * total.log())),
    "sum and a score": _attention(lambda o, s, m, e, total, x, v: (o, total + s[..., :1])),
    "base": _attention(lambda o, s, m, e, total, x, v: (o, m)),
    "epsilon": _attention(lambda o, s, m, e, total, x, v: e / (total + 0.5) @ v),
    "not divided": _attention(lambda o, s, m, e, total, x, v: e @ v),
    "divided by another row's": _attention(lambda o, s, m, e, total, x, v: e @ v / total.flip(-2)),
    "squared": _attention(lambda o, s, m, e, total, x, v: e / (total * total) @ v),
    "clamped": _attention(lambda o, s, m, e, total, x, v: e / torch.where(total < 2, 2, total) @ v),
    "guarded, and its logarithm": _attention(
        lambda o, s, m, e, total, x, v: (lambda safe: (e / safe @ v, m + safe.log()))(torch.where(total == 0, 1, total))
    ),
    "detached": _attention(lambda o, s, m, e, total, x, v: e / total.detach() @ v),
    "other rows": _attention(lambda o, s, m, e, total, x, v: e / total.flip(-2) @ v),
    "score of a sink": _attention(lambda o, s, m, e, total, x, v: o, lambda t, x: t.abs()),
    "sink too": _attention(lambda o, s, m, e, total, x, v: (o, x), lambda t, x: x),
}


@pytest.mark.quick(where=lambda name: name in ("log-sum-exp", "sink", "sum in float64", "logarithm", "clamped"))
@pytest.mark.parametrize("name", [*INVARIANT, *DEPENDENT])
def test_gradients(name: str) -> None:
    function = (INVARIANT | DEPENDENT)[name]
    torch.manual_seed(len(name))
    leaves = [torch.randn(shape, requires_grad=True) for shape in (Q, K, V)]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    found, wanted = jitgen.jit(function)(*leaves), function(*wide)
    found, wanted = (each if isinstance(each, tuple) else (each,) for each in (found, wanted))
    weights = [torch.randn(each.shape) for each in wanted]
    gradients = torch.autograd.grad(found, leaves, [g.to(each.dtype) for g, each in zip(weights, found, strict=True)])
    references = torch.autograd.grad(wanted, wide, [g.double() for g in weights])
    for gradient, reference in zip(gradients, references, strict=True):
        # Sums of at most 53 terms of both signs, each of a few roundings.
        bound = 53 * torch.finfo(torch.float32).eps * reference.abs().max().item()
        torch.testing.assert_close(gradient.double(), reference, rtol=0, atol=bound)


@pytest.mark.parametrize("name", [*INVARIANT, *(name for name in DEPENDENT if name != "detached")])
def test_where_the_subtracted_value_changes_nothing(name: str) -> None:
    specs = [jitgen.TensorSpec(shape, torch.float32) for shape in (Q, K, V)]
    graph = jitgen.jit((INVARIANT | DEPENDENT)[name]).lower(*specs)._lowered.graph
    found = plan.plan(graph, (0, 1, 2))
    assert [of.cancels for of in found.weighted] == [name in INVARIANT]
    scores = [node for node in found.saved if node.op == "contract" and node.shape[-1] == graph.inputs[1].shape[-2]]
    assert len(scores) == (name in DEPENDENT), "computed again, unless they are compared with their maximum"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["log-sum-exp", "logarithm", "sink"])
def test_second_derivatives(name: str) -> None:
    args = [torch.randn(1, 1, size, 2, dtype=torch.float64, requires_grad=True) for size in (3, 4, 4)]
    assert torch.autograd.gradgradcheck(jitgen.jit((INVARIANT | DEPENDENT)[name]), args, fast_mode=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rows of weights", "scores", "scores, with a maximum", "sums"])
def test_second_derivatives_with_random_numbers(kind: str) -> None:
    """They are saved, so that what is computed from them has gradients of its own in a second backward."""

    def function(q: Any, k: Any, v: Any, noise: Any = None) -> Any:
        s = q @ k.mT
        if noise is None:
            noise = torch.rand(s.shape, dtype=s.dtype)
        row = noise[..., :1]
        if kind == "rows of weights":
            return torch.softmax(s, -1) * row @ v, noise
        if kind == "scores":
            return torch.softmax(s * (1 + noise), -1) @ v, noise
        s = s + noise if kind == "scores, with a maximum" else s
        e = torch.exp(s - s.amax(-1, keepdim=True))
        return e / (e.sum(-1, keepdim=True) + (row if kind == "sums" else 0)) @ v, noise

    args = [torch.randn(1, 2, size, 4, dtype=torch.float64, requires_grad=True) for size in (5, 7, 7)]

    def second(output: torch.Tensor) -> list[torch.Tensor]:
        first = torch.autograd.grad(output.sin().sum(), args, create_graph=True)
        return list(torch.autograd.grad(sum(each.cos().sum() for each in first), args))  # type: ignore[arg-type]

    output, noise = jitgen.jit(function)(*args)
    torch.testing.assert_close(second(output), second(function(*args, noise.detach())[0]), rtol=0, atol=1e-10)


@pytest.mark.parametrize(("rows", "keys"), [(4, 1), (1, 1), (4, 5)])
def test_gradients_of_keys_that_a_mask_hides_from_rows_without_others(rows: int, keys: int) -> None:
    """The weights of such a row are NaN by the plain formula, and eager's gradients of its scores are zeros."""

    def function(q: Any, k: Any, v: Any) -> Any:
        i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
        return torch.softmax((q @ k.mT).masked_fill(torch.minimum(i, j * 0) < 2, -INF), -1) @ v

    leaves = [torch.randn(2, 2, size, 8, requires_grad=True) for size in (rows, keys, keys)]
    found, wanted = (torch.autograd.grad(each(*leaves).sum(), leaves[:2]) for each in (jitgen.jit(function), function))
    assert [each.count_nonzero().item() for each in found] == [each.count_nonzero().item() for each in wanted] == [0, 0]
