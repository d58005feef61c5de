"""Convolutions: values and gradients beside float64, how many kernels they take, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from tests import convolutions, triton_convolutions
from tests.convolutions import cases, wrong
from tests.cuda_on_host import run
from tests.interpreter import Interpreter

single, half = torch.float32, torch.bfloat16


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    with Interpreter("tests.triton_convolutions") as process:
        yield process


def kernels(function: Callable[..., Any], *arguments: Any) -> list[str]:
    low = jitgen.jit(function, backend="cpp").lower(*arguments, target="x86-64-v3")
    return [kernel.family for kernel in low._lowered.program.kernels]


@pytest.mark.parametrize("dtype", [single, half, torch.float16, torch.float64])
@pytest.mark.quick(where=lambda dtype: dtype == single)
def test_random_convolutions(dtype: torch.dtype) -> None:
    count = 24 if dtype == single else 6
    assert [found for found in convolutions.failures(count, 7, dtype) if found] == []


@pytest.mark.parametrize("check", triton_convolutions.CHECKS)
def test_convolutions_in_triton(check: str, interpreter: Interpreter) -> None:
    assert interpreter[check] == []


def test_a_convolution_in_cuda() -> None:
    """The windows; a product of integers needs no instructions of tensor cores, which the host does not know."""
    x, w = (torch.randint(-9, 9, sizes, dtype=torch.int32) for sizes in ((1, 3, 4, 5), (4, 3, 3, 2)))
    options = {"padding": (2, 1), "stride": (2, 1), "dilation": (1, 2)}
    (got,) = run(lambda x, w: F.conv2d(x, w, **options), x, w)
    assert torch.equal(got.flatten().double(), F.conv2d(x.double(), w.double(), **options).flatten())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.quick(where=lambda seed: seed == 0)
def test_gradients(seed: int) -> None:
    """Of the images, the filters and the bias; every third convolution is transposed."""
    for name, call, arguments in cases(seed, 6):
        ours = [argument.requires_grad_() for argument in arguments]
        exact = [argument.detach().double().requires_grad_() for argument in arguments]
        got, want = jitgen.jit(call)(*ours), call(*exact)
        g = torch.randn_like(got)
        g = torch.where(want.abs() < 1e-4, 0.0, g)  # where relu may turn
        gradients = torch.autograd.grad(got, ours, g), torch.autograd.grad(want, exact, g.double())
        for one, other in zip(*gradients, strict=True):
            assert wrong(name, one, other, g.numel() + arguments[1].numel()) is None


def test_second_derivatives() -> None:
    x, w = torch.randn(1, 2, 5, 4).double().requires_grad_(), torch.randn(4, 1, 3, 2).double().requires_grad_()
    function = jitgen.jit(lambda x, w: F.conv2d(x, w, stride=2, padding=1, groups=2) ** 2)
    assert torch.autograd.gradgradcheck(function, (x, w))


def test_each_way_is_one_kernel() -> None:
    def layer(x: Any, w: Any, b: Any, scale: Any, residual: Any) -> Any:
        return F.relu(F.conv2d(x, w, b, stride=2, padding=3) * scale[:, None, None] + residual)

    x, w, channel = torch.randn(2, 3, 20, 21), torch.randn(8, 3, 7, 7), torch.randn(8)
    assert kernels(layer, x, w, channel, channel, torch.randn(2, 8, 10, 11)) == ["convolution"]

    for transform in (lambda x, w: F.conv2d(x, w, stride=2), lambda x, w: F.conv_transpose2d(x, w.transpose(0, 1))):
        assert kernels(transform, x, w) == ["convolution"]


def test_two_layers_are_two_kernels_and_a_shortcut_reads_what_is_stored() -> None:
    def block(x: Any, first: Any, second: Any) -> Any:
        h = F.relu(F.conv2d(x, first, padding=1))
        return F.relu(F.conv2d(h, second, padding=1) + h)

    x, w = torch.randn(1, 4, 6, 6), torch.randn(4, 4, 3, 3)
    assert kernels(block, x, w, w) == ["convolution"] * 2
    torch.testing.assert_close(jitgen.jit(block)(x, w, w), block(x, w, w))


def test_what_several_kernels_read_is_computed_once() -> None:
    def statistics(x: Any, w: Any) -> Any:
        y = F.conv2d(x, w)
        return (y - y.mean((0, 2, 3), keepdim=True)).relu(), y[:, ::2]

    x, w = torch.randn(2, 4, 6, 6), torch.randn(4, 4, 3, 3)
    assert kernels(statistics, x, w).count("convolution") == 1
    torch.testing.assert_close(jitgen.jit(statistics)(x, w), statistics(x, w))


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_a_gpu_multiplies_by_windows(backend: str) -> None:
    spec = jitgen.TensorSpec
    function = jitgen.jit(lambda x, w: F.conv3d(x, w, padding=5).relu(), backend=backend)
    low = function.lower(spec((2, 4, 8, 9, 10), half), spec((8, 4, 11, 11, 11), half), target="sm_90a")
    assert [kernel.family for kernel in low._lowered.program.kernels] == ["elementwise", "gemm"]


@pytest.mark.parametrize(
    ("batched", "own_filters"), [((0, None), False), ((None, 0), True), ((0, 0), True)], ids=["x", "w", "both"]
)
def test_over_a_batch(batched: Any, own_filters: bool) -> None:
    x = torch.randn(*[3] * (batched[0] == 0), 2, 4, 5, 6)
    w = torch.randn(*[3] * own_filters, 6, 2, 3, 2)
    function = jitgen.jit(lambda x, w: F.conv2d(x, w, padding=1, groups=2))
    got = torch.func.vmap(function, in_dims=batched)(x, w)
    each = [F.conv2d(x[i] if batched[0] == 0 else x, w[i] if own_filters else w, padding=1, groups=2) for i in range(3)]
    torch.testing.assert_close(got, torch.stack(each))


def test_results_do_not_depend_on_threads() -> None:
    x, w = torch.randn(3, 5, 17, 19), torch.randn(70, 5, 3, 3)
    function, threads = jitgen.jit(lambda x, w: F.conv2d(x, w, padding=1)), torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(function(x, w))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_values_beside_the_padding_do_not_spread() -> None:
    """Padding is no product by zero: what is not finite reaches only windows that it is in."""
    x, w = torch.randn(1, 1, 6, 6), torch.randn(2, 1, 3, 3)
    x[0, 0, 0, 5] = math.inf
    function = jitgen.jit(lambda x, w: F.conv2d(x, w, padding=1))
    assert torch.equal(function(x, w).isfinite(), F.conv2d(x, w, padding=1).isfinite())


@pytest.mark.parametrize(
    ("shape", "options", "match"),
    [
        ((2, 3, 4, 9), {}, "larger than the padded input"),
        ((2, 4, 9, 9), {}, "channels in 1 groups"),
        ((2, 3, 9, 9), {"stride": 0}, "must be positive"),
        ((2, 3, 9, 9), {"padding": "same", "stride": 2}, "not supported for strided"),
        ((2, 3, 0, 9), {"padding": 4}, "no elements"),
    ],
)
def test_refused(shape: Any, options: Any, match: str) -> None:
    with pytest.raises((ValueError, jitgen.JitgenError), match=match):
        jitgen.jit(lambda x, w: F.conv2d(x, w, **options))(torch.randn(shape), torch.randn(4, 3, 5, 5))


def test_of_nothing() -> None:
    function = jitgen.jit(lambda x, w: F.conv2d(x, w, padding=1))
    x, w = torch.randn(0, 3, 5, 5).requires_grad_(), torch.randn(4, 3, 3, 3).requires_grad_()
    got = function(x, w)
    assert got.shape == (0, 4, 5, 5)
    gradients = torch.autograd.grad(got, (x, w), torch.randn_like(got))
    assert gradients[0].shape == x.shape
    assert torch.equal(gradients[1], torch.zeros_like(w))


def test_of_time_batch_and_channels() -> None:
    x, w, bias = torch.randn(7, 2, 3), torch.randn(3, 3, 4), torch.randn(4)
    got, want = jitgen.jit(torch.conv_tbc)(x, w, bias, 1), torch.conv_tbc(x.double(), w.double(), bias.double(), 1)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
