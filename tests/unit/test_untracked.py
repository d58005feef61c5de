"""Views and values that are made where gradients are disabled, which autograd does not know of."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.errors import JitgenError, TraceError

X = torch.arange(9.0).reshape(3, 3) + 1


def two_or_three(flag: bool, t: Any) -> Any:
    return t * 2 if flag else t * 3


def flags(v: Any, p: Any) -> Any:
    read = (v.requires_grad, v.is_leaf, v.grad_fn is None, v[:1].requires_grad, v.detach().requires_grad)
    return sum(two_or_three(flag, p) * 10**place for place, flag in enumerate(read))


def of_a_view(x: Any, p: Any) -> Any:
    with torch.no_grad():
        v = x[0]
    return flags(v, p)


def of_a_transposed_view(x: Any, p: Any) -> Any:
    with torch.no_grad():
        v = x.T
    return flags(v, p) + v * v


def of_a_view_of_a_result(x: Any, p: Any) -> Any:
    y = x * 2
    with torch.set_grad_enabled(False):
        v = y.view(3, 3)
    return flags(v, p)


def of_data(x: Any, p: Any) -> Any:
    with torch.no_grad():
        v = x.data
    return flags(v, p)


def of_a_copy(x: Any, p: Any) -> Any:
    with torch.no_grad():
        v = x[0].clone()
    return flags(v, p)


def of_what_is_computed(x: Any, p: Any) -> Any:
    with torch.no_grad():
        v = x * 2
    return flags(v, p)


def read_elsewhere(x: Any, p: Any) -> Any:
    y = x * 2
    with torch.no_grad():
        return two_or_three(y.requires_grad, p)


def of_an_updated_argument(x: Any, p: Any) -> Any:
    x = x.clone()
    x.mul_(p)
    return two_or_three(x.requires_grad, p)


def itself(x: Any, p: Any) -> Any:
    with torch.no_grad():
        y, z, w = x.float(), F.dropout(x, 0.5, False), torch.atleast_2d(x)
        a, _ = torch.broadcast_tensors(x, x)
        assert y is x
        assert z is x
        assert w is x
    return y * z * w * a * p


def converted(x: Any, p: Any) -> Any:
    with torch.no_grad():
        y = x.double()
    return (y * p).float()


def dense_for_reading(x: Any, p: Any) -> Any:
    with torch.no_grad():
        total = x.contiguous().sum()
    return total * p


def dense_copy_of_a_view(x: Any, p: Any) -> Any:
    with torch.no_grad():
        v = x.t().contiguous()
    return v * p


def updated_beside_a_view(x: Any, p: Any) -> Any:
    y = x.clone()
    with torch.no_grad():
        v = y[0]
        v.mul_(2)
    return y * p, (v > 3).float(), v.detach()


RIGHT = [of_a_view, of_a_transposed_view, of_a_view_of_a_result, of_data, of_a_copy, of_what_is_computed]
RIGHT += [read_elsewhere, of_an_updated_argument, itself, converted, dense_for_reading, dense_copy_of_a_view]
RIGHT += [updated_beside_a_view]


def gradients(function: Callable[..., Any], arguments: Any) -> Any:
    results = function(*arguments)
    results = [r for r in (results if isinstance(results, tuple) else (results,)) if r.requires_grad]
    wanted = [t for t in arguments if t.requires_grad]
    return torch.autograd.grad([r.sum() for r in results], wanted, allow_unused=True) if results and wanted else ()


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("function", RIGHT)
@pytest.mark.covering(1)
def test_flags_values_and_gradients_are_eager_torchs(function: Callable[..., Any], enabled: bool) -> None:
    jitted = jitgen.jit(function)
    for x_needs, x_is_leaf in ((True, True), (True, False), (False, True)):
        x = X.clone().requires_grad_(x_needs)
        x = x if x_is_leaf else x * 1
        p = torch.full_like(X, 3.0).requires_grad_()
        with torch.set_grad_enabled(enabled):
            torch.testing.assert_close(jitted(x, p), function(x, p))
        if enabled:
            torch.testing.assert_close(gradients(jitted, (x, p)), gradients(function, (x, p)))


def test_a_view_that_is_returned_is_torchs() -> None:
    def f(x: Any) -> Any:
        with torch.no_grad():
            return x[0]

    x = X.clone().requires_grad_()
    found, wanted = jitgen.jit(f)(x), f(x)
    for view in (found, wanted):
        assert view.requires_grad
        assert view.is_leaf
    with pytest.raises(RuntimeError, match="no_grad mode"):
        found.add_(1)


def update_of_a_view(x: Any, p: Any) -> Any:
    y = x.clone()
    with torch.no_grad():
        v = y[0]
    v.mul_(2)
    return y * p


def update_in_inference(x: Any, p: Any) -> Any:
    y = x.clone()
    with torch.inference_mode():
        v = y[0]
    v[1:].mul_(2)
    return y * p


def update_by_what_requires_grad(x: Any, p: Any) -> Any:
    y = x.detach().clone()
    with torch.no_grad():
        v = y[0]
    v.mul_(p[0])
    return y * 2


def reading_after_an_update(x: Any, p: Any) -> Any:
    y = x.clone()
    with torch.no_grad():
        v = y[0]
    y.mul_(p)
    return v * 2


@pytest.mark.parametrize(
    "function", [update_of_a_view, update_in_inference, update_by_what_requires_grad, reading_after_an_update]
)
def test_what_eager_torch_refuses_is_refused(function: Callable[..., Any]) -> None:
    x, p = X.clone().requires_grad_(), X.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="mode"):
        function(x, p)
    with pytest.raises(TraceError, match=rf"as torch refuses\n[^\n]*{__file__}(.|\n)*both outside of it"):
        jitgen.jit(function)(x, p)
    with torch.no_grad():
        torch.testing.assert_close(jitgen.jit(function)(x, p), function(x, p))


@pytest.mark.parametrize("name", ["contiguous", "reshape"])
def test_what_depends_on_strides_is_refused(name: str) -> None:
    def f(x: Any, p: Any) -> Any:
        with torch.no_grad():
            y = x.contiguous() if name == "contiguous" else x.reshape(9)
        return p * 2 if y.requires_grad else p * 3

    def g(x: Any, p: Any) -> Any:
        with torch.no_grad():
            y = x.contiguous()
        return y * p

    x = X.clone().requires_grad_()
    with pytest.raises(TraceError, match=f"{__file__}"):
        jitgen.jit(f)(x, X)
    torch.testing.assert_close(jitgen.jit(f)(X, X), X * 3)
    if name == "contiguous":
        with pytest.raises(TraceError, match=rf"the tensor itself or a copy of it\n[^\n]*{__file__}"):
            jitgen.jit(g)(x, X)


def test_gradients_that_are_enabled_in_a_call_without_are_not_asked_for() -> None:
    def f(x: Any) -> Any:
        with torch.enable_grad():
            y = x * 2
        return y * 2 if y.requires_grad else y

    with torch.no_grad(), pytest.raises(TraceError, match="enables gradients in a call under"):
        jitgen.jit(f)(X.clone().requires_grad_())
    torch.testing.assert_close(jitgen.jit(f)(X), X * 2)


def test_functions_that_copy_never_return_their_argument() -> None:
    def f(x: Any) -> Any:
        y = x * 2
        copies = [torch.block_diag(y), torch.rot90(y, 0)]
        for copied in copies:
            copied.mul_(3)
        return y, *copies

    torch.testing.assert_close(jitgen.jit(f)(X), f(X))


def test_inference_mode_in_a_compiled_function() -> None:
    def f(x: Any, p: Any) -> Any:
        with torch.inference_mode():
            v = x[0]
        return v * p

    x, p = X.clone().requires_grad_(), X.clone().requires_grad_()
    for function in (f, torch.compile(f, backend="jitgen")):
        first, second = torch.autograd.grad(function(x, p).sum(), (x, p), allow_unused=True)
        assert first is None
        torch.testing.assert_close(second, X[:1].expand(3, 3))


DETACHED: dict[str, Callable[[Any], Any]] = {
    "detach": lambda w: w.detach(),
    "torch.detach": lambda w: torch.detach(w),
    "data": lambda w: w.data,
    "a view of detach": lambda w: w.detach()[1],
    "detach of a view": lambda w: w[1].detach(),
    "data of a view": lambda w: w.T.data,
    "views of detach": lambda w: w.detach().unbind(),
    "what returns it itself": lambda w: w.detach().float(),
    "among others": lambda w: (w * 2, w, w.detach(), w.T),
    "twice": lambda w: [w.data] * 2,
    "view": lambda w: w.T,
    "copy": lambda w: copy.copy(w),
}
MODES = (torch.no_grad, torch.inference_mode, torch.enable_grad)


def flags_of(result: Any) -> list[tuple[bool, bool]]:
    return [(tensor.requires_grad, tensor.is_leaf) for tensor in torch.utils._pytree.tree_leaves(result)]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("name", DETACHED)
def test_what_is_detached_requires_no_grad_where_the_call_disables_gradients(name: str, mode: Any) -> None:
    function = DETACHED[name]
    compiled, w = jitgen.jit(function), X.clone().requires_grad_()
    with mode():
        expected = function(w)
        for _ in range(2):  # the first call, and a warm one
            result = compiled(w)
            assert flags_of(result) == flags_of(expected)
            torch.testing.assert_close(result, expected)


def test_a_plan_and_a_kept_tensor_are_detached() -> None:
    w, kept = X.clone().requires_grad_(), {}

    def keeps(w: Any) -> Any:
        kept["w"] = w.detach()
        return w * 2

    with torch.no_grad():
        plan = jitgen.jit(DETACHED["a view of detach"]).bind(w)
        assert not plan(w).requires_grad
        assert plan(w).data_ptr() == w[1].data_ptr()
        jitgen.jit(keeps)(w)
    assert not kept["w"].requires_grad
    assert kept["w"].data_ptr() == w.data_ptr()


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("name", ["detach", "a view of detach", "view"])
def test_views_of_captured_tensors_that_are_made_under_no_grad(name: str, mode: Any) -> None:
    w = X.clone().requires_grad_()

    def function(x: Any) -> Any:
        with torch.no_grad():
            return x + 1, DETACHED[name](w)

    with mode():
        assert flags_of(jitgen.jit(function)(X)) == flags_of(function(X))


def adds(x: Any) -> Any:
    x.add_(2)
    return x.sum()


def adds_to_a_view(x: Any) -> Any:
    x[0].add_(2)
    return x * 1


def writes(x: Any) -> Any:
    x[1] = 5
    return x.sum()


@pytest.mark.parametrize("function", [adds, adds_to_a_view, writes])
def test_an_inference_tensor_is_updated_in_inference_mode_alone(function: Callable[..., Any]) -> None:
    compiled, plain = jitgen.jit(function), X.clone()
    with torch.inference_mode():
        x = X.clone()
    torch.testing.assert_close(compiled(plain), function(X.clone()))  # warm for a tensor of the same layout
    plan = compiled.bind(plain)
    for call in (compiled, plan):
        with pytest.raises(JitgenError, match=r"(?s)made in inference mode, at .*test_untracked.py:\d+.*clone"):
            call(x)
        torch.testing.assert_close(x, X)
    with torch.inference_mode():
        expected = X.clone()
        for call in (compiled, plan):
            torch.testing.assert_close(call(x), function(expected))
        torch.testing.assert_close(x, expected)
    with pytest.raises(JitgenError, match="made in inference mode"):
        compiled(x)
    torch.testing.assert_close(x, expected)


def test_an_inference_tensor_that_is_captured_or_beside_gradients_is_not_updated() -> None:
    with torch.inference_mode():
        state = torch.zeros(3)

    def captures(x: Any) -> Any:
        state.add_(x)
        return x * 2

    def differentiates(state: Any, w: Any) -> Any:
        state.add_(1)
        return (w * 3).sum()

    with pytest.raises(JitgenError, match="made in inference mode"):
        jitgen.jit(captures)(torch.ones(3))
    with pytest.raises(JitgenError, match="made in inference mode"):
        jitgen.jit(differentiates)(state, torch.ones(3, requires_grad=True))
    torch.testing.assert_close(jitgen.jit(lambda x: x.clone().add_(1))(state), torch.ones(3))  # reading is allowed
    torch.testing.assert_close(state, torch.zeros(3))


def test_out_that_is_an_inference_tensor() -> None:
    plan, plain = jitgen.jit(lambda x: x + 1).bind(X), torch.zeros(3, 3)
    with torch.inference_mode():
        out = torch.zeros(3, 3)
        torch.testing.assert_close(plan(X, out=out), X + 1)
        out.zero_()
    for _ in range(2):
        plan(X, out=plain)
        with pytest.raises(JitgenError, match="made in inference mode"):
            plan(X, out=out)
    torch.testing.assert_close(out, torch.zeros(3, 3))
