"""What a tensor object knows beside its elements, read or set by a function, is that of each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import jitgen
from jitgen.errors import TraceError

X = torch.arange(6.0).reshape(2, 3)


def tensor(scale: float | None = None, requires_grad: bool = False, history: bool = False, grad: Any = None) -> Any:
    found = (X + 1).requires_grad_(requires_grad)
    found = found * 2 if history else found
    if scale is not None:
        found.scale = scale  # type: ignore[attr-defined]
    found.grad = grad
    return found


READ: dict[str, tuple[Callable[[Any], Any], tuple[dict[str, Any], ...]]] = {
    "getattr": (lambda t: t * getattr(t, "scale", 5.0), ({}, {"scale": 2.0}, {"scale": 3.0}, {})),
    "attribute": (lambda t: t * t.scale, ({"scale": 2.0}, {"scale": 3.0})),
    "tensor": (lambda t: t * t.scale, ({"scale": X.clone()}, {"scale": X + 1}, {"scale": 3.0})),
    "hasattr": (lambda t: t * 2 if hasattr(t, "scale") else t, ({}, {"scale": 2.0}, {})),
    "requires_grad": (lambda t: t * 2 if t.requires_grad else t * 3, ({}, {"requires_grad": True}, {})),
    "that of a result": (
        lambda t: t * 2 if (t + 1).requires_grad else t * 3,
        ({}, {"requires_grad": True}, {"requires_grad": True, "history": True}, {}),
    ),
    "that of a detached result": (
        lambda t: t * 2 if (t + 1).detach().requires_grad else t * 3,
        ({"requires_grad": True}, {}),
    ),
    "that of indices": (lambda t: t * 2 if t.argmax(-1).requires_grad else t * 3, ({"requires_grad": True}, {})),
    "is_leaf": (
        lambda t: t * 2 if t.is_leaf else t * 3,
        ({}, {"requires_grad": True, "history": True}, {"requires_grad": True}),
    ),
    "is_leaf of a result": (lambda t: t * 2 if (t + 1).is_leaf else t * 3, ({}, {"requires_grad": True})),
    "no gradient": (lambda t: t * 2 if t.grad is None else t * 3, ({}, {"requires_grad": True})),
    "no history": (lambda t: t * 2 if t.grad_fn is None else t * 3, ({}, {"requires_grad": True})),
}


@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize("name", READ)
@pytest.mark.covering(1)
def test_of_an_argument(name: str, needs_grad: bool) -> None:
    function, calls = READ[name]
    jitted = jitgen.jit(function)
    for _ in range(2):
        for facts in calls:
            with torch.set_grad_enabled(needs_grad):
                made = tensor(**facts)
                wanted, found = function(made), jitted(made)
            torch.testing.assert_close(found, wanted)
            assert found.requires_grad == wanted.requires_grad


def test_of_a_captured_tensor() -> None:
    captured = tensor(scale=2.0)
    jitted = jitgen.jit(lambda x: x * captured.scale)
    for scale in (2.0, 3.0, X + 1, X + 2, 3.0):
        captured.scale = scale
        torch.testing.assert_close(jitted(X), X * scale)


FACTS: dict[str, Callable[[Any, Any], Any]] = {
    "requires_grad": lambda x, w: x * 2 if w.requires_grad else x * 3,
    "is_leaf": lambda x, w: x * w.is_leaf,
    "no gradient": lambda x, w: (x + w) * (2 if w.grad is None else 3),
    "after its use": lambda x, w: (x + w) * (2 if w.requires_grad else 3),
    "of a view": lambda x, w: _of_a_view(x, w),
}


def _of_a_view(x: Any, w: Any) -> Any:
    with torch.no_grad():
        view = w[1:]
    return x * 2 if (view * 2).requires_grad and view.is_leaf else x * 3


@pytest.mark.parametrize("name", FACTS)
def test_facts_of_a_captured_tensor(name: str) -> None:
    weight = torch.ones_like(X, requires_grad=True)
    jitted = jitgen.jit(lambda x: FACTS[name](x, weight))
    for needs in (True, False, True):
        weight.requires_grad_(needs)
        wanted, found = FACTS[name](X, weight), jitted(X)
        torch.testing.assert_close(found, wanted)
        assert found.requires_grad == wanted.requires_grad


@pytest.mark.parametrize("facts", [{"grad": X.clone()}, {"requires_grad": True, "history": True}])
def test_what_a_trace_does_not_know_is_refused(facts: dict[str, Any]) -> None:
    name = "grad_fn" if "history" in facts else "grad"
    jitted = jitgen.jit(lambda t: t * 2 if getattr(t, name) is None else t)
    torch.testing.assert_close(jitted(X), X * 2)
    with pytest.raises(TraceError, match=rf"reads {name} of a tensor[^\n]*\n[^\n]*{__file__}(.|\n)*as an argument"):
        jitted(tensor(**facts))


def set_on_argument(t: Any) -> Any:
    t.scale = 2
    return t + 1


def set_on_result(t: Any) -> Any:
    t = t + 1
    t.scale = 2
    return t


def set_requires_grad(t: Any) -> Any:
    t = t + 1
    t.requires_grad = True
    return t.detach()


def set_data(t: Any) -> Any:
    t.data = t * 2
    return t + 1


@pytest.mark.parametrize("function", [set_on_argument, set_on_result, set_requires_grad, set_data])
def test_what_would_be_set_at_the_trace_alone_is_refused(function: Callable[..., Any]) -> None:
    argument = tensor()
    with pytest.raises(TraceError, match="sets the attribute") as refused:
        jitgen.jit(function)(argument)
    assert str(refused.value).count("\n") >= 1, "and a remedy"
    assert not vars(argument)


def test_an_attribute_of_an_intermediate_tensor() -> None:
    def f(x: Any) -> Any:
        y = x + 1
        y.scale = 3
        return y * y.scale

    torch.testing.assert_close(jitgen.jit(f)(X), f(X))


@pytest.mark.parametrize("disabled", [False, True])
def test_views_without_gradients_of_a_view_that_requires_grad(disabled: bool) -> None:
    """torch makes them of the tensor that the argument is a view of."""

    def function(t: Any) -> Any:
        with torch.no_grad():
            y = t[0]
        return y * (2 if y.requires_grad else 3)

    jitted = jitgen.jit(function)
    with torch.set_grad_enabled(not disabled):
        for base in (torch.rand(6), torch.rand(6, requires_grad=True), torch.rand(6)):
            x = base.view(2, 3).requires_grad_() if not disabled or not base.requires_grad else base.detach().view(2, 3)
            torch.testing.assert_close(jitted(x), function(x))
