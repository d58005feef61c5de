"""Quantised weights as arguments of jitted functions: signatures, plans, closures, modules, layouts."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gemm_numeric import assert_near, bounds, product

import jitgen
from jitgen.compilers import host

pytestmark = pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")
N, K = 40, 96


def quantized(format: str = "int4", group: int | None = 32, columns: int = N) -> jitgen.QTensor:
    return jitgen.quantize(torch.randn(columns, K), format, group)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Of float32 sums of K products of order 1."""
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=K * 4 * torch.finfo(torch.float32).eps)


def linear(x: torch.Tensor, w: Any) -> torch.Tensor:
    return F.linear(x, w)


def test_a_weight_lies_as_its_backend_reads_it_from_the_first_call_on() -> None:
    function, weight, x = jitgen.jit(linear), quantized(), torch.randn(3, K)
    values = weight.dequantize()
    assert weight.layout == "portable"
    close(function(x, weight), F.linear(x, values))
    assert weight.layout == "cpu"
    assert torch.equal(weight.dequantize(), values)
    close(function(x, weight), F.linear(x, values))


def test_looking_at_what_would_run_leaves_the_weight_as_it_is() -> None:
    weight = quantized()
    low = jitgen.jit(linear).lower(torch.randn(3, K), weight, target="sm_90a", backend="triton")
    assert "tl." in low.source
    assert weight.layout == "portable"


def test_weights_alike_share_what_was_resolved_and_others_do_not() -> None:
    function, x = jitgen.jit(linear), torch.randn(3, K)
    for weight in (quantized(), quantized(), quantized("int8", None), quantized("uint4"), quantized(columns=24)):
        for _ in range(2):
            close(function(x, weight), F.linear(x, weight.dequantize()))
    assert len(function.specializations) == 4


def test_a_transposed_weight() -> None:
    weight, x = quantized(), torch.randn(3, K)
    close(jitgen.jit(lambda x, w: x @ w)(x, weight.t()), F.linear(x, weight.dequantize()))
    close(jitgen.jit(lambda x, w: x @ w.T)(x, weight), F.linear(x, weight.dequantize()))


def test_a_weight_on_the_left() -> None:
    weight, x = quantized(), torch.randn(3, K)
    dense = weight.dequantize()
    close(jitgen.jit(lambda w, x: w @ x.T + 1)(weight, x), dense @ x.T + 1)
    close(jitgen.jit(lambda w, x: torch.relu(w @ x))(weight, x[0]), torch.relu(dense @ x[0]))
    close(jitgen.jit(torch.mv)(weight, x[0]), dense @ x[0])
    close(jitgen.jit(F.linear)(weight, x), dense @ x.T)
    with pytest.raises(jitgen.UnsupportedError, match="two quantised weights"):
        jitgen.jit(F.linear)(weight, weight)


def test_the_reference_of_a_function_that_takes_rows_of_a_weight() -> None:
    function = jitgen.jit(lambda x, w: F.linear(x, w[:16]) + F.linear(x, w.chunk(2)[1][:16]))
    weight, x = quantized(columns=64), torch.randn(3, K)
    close(function(x, weight), function.reference(x, weight))


def test_a_plan_takes_every_weight_like_the_one_it_was_bound_for() -> None:
    function, x, bias = jitgen.jit(lambda x, w, b: F.linear(x, w, b)), torch.randn(3, K), torch.randn(N)
    weight, other = quantized(), quantized()
    plan = function.bind(x, weight, bias)
    function(x, other, bias)  # lays it out
    for _ in range(2):
        for used in (weight, other):
            out = torch.full((3, N), torch.nan)
            assert plan(x, used, bias, out=out) is out
            close(out, F.linear(x, used.dequantize(), bias))
            close(plan(x, used, bias), out)
    for wrong in (quantized("int8", 32), quantized(group=96), quantized(), torch.randn(N, K)):
        with pytest.raises(ValueError, match="bound for a quantised weight"):
            plan(x, wrong, bias)
    with pytest.raises((TypeError, ValueError)):
        plan(x, weight)


def test_a_weight_the_function_closes_over_is_read_at_every_call() -> None:
    x = torch.randn(3, K)
    weight = quantized()
    function = jitgen.jit(lambda x: F.relu(F.linear(x, weight)))
    for replacement in (weight, quantized(), quantized("int8", None), quantized("uint4")):
        weight = replacement
        for _ in range(2):
            close(function(x), F.relu(F.linear(x, weight.dequantize())))


def test_a_quantised_module() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = torch.nn.Linear(K, N), torch.nn.Linear(N, K)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(F.gelu(self.up(x)))

    block, x = Block().requires_grad_(False), torch.randn(2, 5, K)
    jitgen.quantize_(block, "int8")
    function = jitgen.jit(block)
    assert function.name == "Block"
    expected = function.reference(x)
    close(function(x), expected)
    close(block(x), expected)  # in eager torch the products are generated kernels too
    kernels = function.lower(x).kernels
    assert len(kernels) == 2
    replaced = torch.nn.Parameter(jitgen.quantize(torch.randn(N, K), "int8"), requires_grad=False)
    block.up.weight = replaced
    close(function(x), function.reference(x))


def test_keywords_and_containers() -> None:
    weight, x = quantized(), torch.randn(3, K)
    expected = F.linear(x, weight.dequantize())
    close(jitgen.jit(linear)(x, w=weight), expected)
    close(jitgen.jit(lambda x, p: F.linear(x, p["w"][0]))(x, {"w": [weight]}), expected)


def test_one_jitted_function_in_another() -> None:
    inner, weight, x = jitgen.jit(linear), quantized(), torch.randn(3, K)
    outer = jitgen.jit(lambda x, w: F.silu(inner(x, w)))
    close(outer(x, weight), F.silu(F.linear(x, weight.dequantize())))
    inner(x, weight)
    outer = jitgen.jit(lambda x, w: F.silu(inner(x, w)))
    close(outer(x, weight), F.silu(F.linear(x, weight.dequantize())))


def test_halves_of_one_quantised_weight_are_one_kernel() -> None:
    def swiglu(x: torch.Tensor, w: Any) -> torch.Tensor:
        gate, up = F.linear(x, w).chunk(2, -1)
        return F.silu(gate) * up

    function, x = jitgen.jit(swiglu), torch.randn(5, K)
    for columns, kernels in ((64, 1), (40, 2)):  # halves of whole tiles of 16 rows, and not
        weight = quantized(columns=columns)
        products = [product(x, half) for half in weight.dequantize(torch.float64).chunk(2)]
        exact, spread = bounds(lambda gate, up: F.silu(gate) * up, products, [])
        assert_near(function(x, weight), exact, spread, operations=64)
        assert len(function.lower(x, weight).kernels) == kernels


def test_weights_and_activations_on_two_devices() -> None:
    weight = jitgen.quantize(torch.randn(N, K, device="meta"), "int4", 32)
    with pytest.raises(jitgen.UnsupportedError, match="meta"):
        jitgen.jit(linear)(torch.randn(3, K), weight)


def test_a_signature_names_the_weight_and_not_its_parts() -> None:
    function = jitgen.jit(linear)
    function(torch.randn(3, K), quantized("uint4", 32))
    (specialization,) = function.specializations
    assert specialization.signature == f"(float32[s0_0, {K}], uint4 g32[{N}, {K}])"
    assert "uint4 g32" in function.lower(torch.randn(3, K), quantized("uint4", 32)).explain()


def test_what_is_copied_into_a_weight_reaches_every_tensor_that_is_it() -> None:
    weight, x = quantized(), torch.randn(3, K)
    transposed, detached = weight.t(), weight.detach()
    function = jitgen.jit(lambda x, w: x @ w)
    function(x, transposed)  # lays out this one, and not the others
    assert (transposed.layout, weight.layout) == ("cpu", "portable")
    new = quantized()
    weight.copy_(new)
    expected = F.linear(x, new.dequantize())
    close(function(x, transposed), expected)
    close(jitgen.jit(linear)(x, detached), expected)
    weight.copy_(quantized())
    close(jitgen.jit(linear)(x, detached), F.linear(x, weight.dequantize()))
    close(function(x, transposed), F.linear(x, weight.dequantize()))


def test_threads_that_first_take_a_weight_together() -> None:
    function, x = jitgen.jit(linear), torch.randn(3, K)
    function(x, quantized())
    for _ in range(20):
        weight = quantized()
        expected = F.linear(x, weight.dequantize())
        start = threading.Barrier(8)

        def call(weight: Any = weight, start: threading.Barrier = start) -> torch.Tensor:
            start.wait()
            return function(x, weight)

        with ThreadPoolExecutor(8) as pool:
            for found in [future.result() for future in [pool.submit(call) for _ in range(8)]]:
                close(found, expected)
