"""Products whose operands are products with quantised weights, as queries and keys are: the weights stay quantised."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.compilers import host

pytestmark = pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")

WIDTH, HEADS = 64, 2
Weight = torch.Tensor


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.view(1, -1, HEADS, WIDTH // HEADS).transpose(1, 2)


def scores(x: torch.Tensor, q: Weight, k: Weight, v: Weight) -> torch.Tensor:
    return F.linear(x, q) @ F.linear(x, k).T


def scores_of_heads(x: torch.Tensor, q: Weight, k: Weight, v: Weight) -> torch.Tensor:
    return heads(F.linear(x, q)) @ heads(F.linear(x, k)).transpose(-1, -2)


def attention(x: torch.Tensor, q: Weight, k: Weight, v: Weight) -> torch.Tensor:
    query, key, value = (heads(F.linear(x, weight)) for weight in (q, k, v))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def as_a_weight(x: torch.Tensor, q: Weight, k: Weight, v: Weight) -> torch.Tensor:
    return F.linear(F.silu(F.linear(x, q)), F.linear(x, k) * 0.5).T @ F.linear(x, v)


FUNCTIONS = (scores, scores_of_heads, attention, as_a_weight)
FORMATS = ("int4", "uint4", "int8", "nf4", "fp8_e4m3", "mxfp4", "ternary")


CASES = [(FUNCTIONS, "int4", (rows,)) for rows in (1, 2, 33, 64)]
CASES += [((scores, attention), format, (1, 33)) for format in FORMATS[1:]]


@pytest.mark.parametrize(("functions", "format", "numbers_of_rows"), CASES)
@pytest.mark.quick(where=lambda format, numbers_of_rows: format == "int4" and numbers_of_rows[0] in (1, 33))
def test_against_float64(functions: tuple[Any, ...], format: str, numbers_of_rows: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    weights = [jitgen.quantize(torch.randn(WIDTH, WIDTH) / WIDTH**0.5, format) for _ in range(3)]
    exact = [weight.dequantize(torch.float64) for weight in weights]
    for function in functions:
        compiled = jitgen.jit(function)
        for rows in numbers_of_rows:
            x = torch.randn(rows, WIDTH)
            expected = function(x.double(), *exact)
            # Sums of WIDTH products of float32, each rounded once, of elements as large as the largest.
            bound = WIDTH * 2.0**-24 * expected.abs().max().item()
            torch.testing.assert_close(compiled(x, *weights).double(), expected, rtol=0.0, atol=bound)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.covering(1)
def test_are_kernels_of_gpus(function: object, backend: str) -> None:
    weights = [jitgen.quantize(torch.randn(WIDTH, WIDTH), "int4", 32) for _ in range(3)]
    for rows in (1, 2, 33, 64):
        x = jitgen.TensorSpec((rows, WIDTH), torch.bfloat16)
        lowered = jitgen.jit(function).lower(x, *weights, target="sm_90a", backend=backend)  # type: ignore[arg-type]
        assert all(kernel.source for kernel in lowered.kernels)


def test_a_decoder_of_one_row_is_all_kernels() -> None:
    """Within a compiled model, too."""
    import jitgen.dynamo.registration

    weights = [jitgen.quantize(torch.randn(WIDTH, WIDTH) / 8, "int4", 32) for _ in range(3)]
    model = torch.compile(lambda x: attention(x, *weights), backend="jitgen")
    x = torch.randn(1, WIDTH)
    found = model(x)
    exact = attention(x.double(), *(weight.dequantize(torch.float64) for weight in weights))
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)
    assert jitgen.report(model).share_of_nodes == 1.0


def test_a_weight_that_is_cut_is_refused_with_the_line() -> None:
    @jitgen.jit
    def cut(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(x, w[:, ::2])

    weight = jitgen.quantize(torch.randn(WIDTH, WIDTH), "int4", 32)
    with pytest.raises(jitgen.UnsupportedError, match=r"(?s)neighbouring columns.*test_products_that_meet\.py"):
        cut(torch.randn(3, 32), weight)
