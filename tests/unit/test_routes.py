"""Routes by which torch reaches a decorated function or a quantised weight without running it: fake tensors,
TorchScript, checkpoints and autograd functions within it. Each works, or is refused with the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import jitgen
from jitgen.compilers import host

pytestmark = pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")

WEIGHT = torch.randn(8, 64)


def quantized() -> torch.Tensor:
    return jitgen.quantize(torch.randn(64, 64), "int4", 32)


def sine(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


CALLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "pointwise": jitgen.jit(sine),
    "closes over a tensor": jitgen.jit(lambda x: F.linear(x, WEIGHT).half()),
    "random": jitgen.jit(lambda x: F.dropout(x, 0.5)),
    "a view": jitgen.jit(lambda x: x[1:].T),
}


@pytest.mark.parametrize("name", CALLS)
def test_fake_tensors_have_the_dtype_and_shape_of_real_ones(name: str) -> None:
    function = CALLS[name]
    real = function(torch.randn(3, 64))
    with FakeTensorMode():
        found = function(torch.randn(3, 64))
    assert isinstance(found, FakeTensor)
    assert (found.dtype, found.shape) == (real.dtype, real.shape)


def test_fake_tensors_meet_real_weights_which_stay_real() -> None:
    weight = quantized()
    layer = torch.nn.Sequential(torch.nn.Linear(64, 64))
    jitgen.quantize_(layer, "int8")
    with FakeTensorMode() as mode:
        x = torch.randn(3, 64)
        results = [jitgen.jit(lambda x, w: F.linear(x, w))(x, weight), F.linear(x, weight), x @ weight.T, layer(x)]
    assert mode.from_tensor(torch.ones(2)).fake_mode is mode
    for found in results:
        assert isinstance(found, FakeTensor)
        assert found.shape == (3, 64)
    x = torch.randn(3, 64)
    torch.testing.assert_close(F.linear(x, weight), F.linear(x, weight.dequantize()), rtol=1e-4, atol=1e-4)


def test_gradients_of_fake_tensors() -> None:
    with FakeTensorMode():
        x = torch.randn(3, 64, requires_grad=True)
        jitgen.jit(sine)(x).sum().backward()
        assert isinstance(x.grad, FakeTensor)
        assert x.grad.shape == (3, 64)


def test_a_plan_of_fake_tensors_is_refused_with_the_remedy() -> None:
    function = jitgen.jit(sine)
    with FakeTensorMode():
        x = torch.randn(3, 64)
        for refused in (lambda: function.bind(x), lambda: function(x, out=x), lambda: function.lower(x)):
            with pytest.raises(jitgen.UnsupportedError, match=r"(?s)fake tensor.*TensorSpec"):
                refused()


class Decorated(torch.nn.Module):
    @jitgen.jit
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["function", "method", "layer"])
def test_torch_script_is_refused(kind: str) -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(64, 64))
    jitgen.quantize_(layer, "int8")
    subject: Any = {"function": jitgen.jit(sine), "method": Decorated(), "layer": layer}[kind]
    with pytest.raises(jitgen.UnsupportedError, match=r"torch\.export\.export"):
        torch.jit.script(subject)


@pytest.mark.parametrize("backend", [None, "eager"])
def test_activations_of_float8_are_refused_with_the_dtypes_to_cast_to(backend: str | None) -> None:
    weight, x = quantized(), torch.randn(3, 64).to(torch.float8_e4m3fn)
    for function in (
        lambda x: F.linear(x, weight),
        lambda x: F.linear(x, weight, torch.ones(64)),
        lambda x: x @ weight.T,
    ):
        call = torch.compile(function, backend=backend) if backend else function
        with pytest.raises(jitgen.UnsupportedError, match=r"cast it to one of torch\.float32"):
            call(x)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


def test_an_autograd_function_is_refused_with_its_name_and_the_line() -> None:
    @jitgen.jit
    def squared(x: torch.Tensor) -> torch.Tensor:
        return Square.apply(x) + 1  # type: ignore[no-any-return]

    with pytest.raises(jitgen.TraceError, match=r"(?s)Square, a torch\.autograd\.Function.*test_routes\.py"):
        squared(torch.randn(3))
    x = torch.randn(3)
    assert torch.equal(Square.apply(x), x * x)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_within_a_decorated_function_is_a_call(use_reentrant: bool) -> None:
    weight = torch.randn(64, 64)

    def step(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda y: torch.tanh(y @ weight) * 2, x, use_reentrant=use_reentrant) + x

    def steps(x: torch.Tensor) -> torch.Tensor:
        return checkpoint_sequential([step, torch.sin], 2, x, use_reentrant=use_reentrant)

    for function in (step, steps):
        x = torch.randn(5, 64, requires_grad=True)
        found = jitgen.jit(function)(x)
        torch.testing.assert_close(found, function(x), rtol=1e-4, atol=1e-5)
        (grad,) = torch.autograd.grad(found.sum(), x)
        exact = x.detach().double().requires_grad_()
        wide = weight.double()
        value = torch.tanh(exact @ wide) * 2 + exact
        (wanted,) = torch.autograd.grad((value if function is step else value.sin()).sum(), exact)
        torch.testing.assert_close(grad.double(), wanted, rtol=1e-4, atol=1e-4)


def test_checkpoints_outside_of_traces_are_torchs() -> None:
    calls = []

    def noted(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.sin()

    jitgen.jit(lambda x: checkpoint(torch.cos, x, use_reentrant=False))(torch.randn(3))
    x = torch.randn(3, requires_grad=True)
    checkpoint(noted, x, use_reentrant=False).sum().backward()
    assert len(calls) == 2
