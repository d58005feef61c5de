"""Matrix products on a GPU against float64 on the same (rounded, quantised) numbers: formats, shapes, strides."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from tests.rounding import of_subnormals

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
TOLERANCE = {BF16: 2.0**-8, F16: 2.0**-10, F32: 2.0**-20, F64: 2.0**-45}
"""Of the norm of the difference, relative to the result's: half a unit in the last place of the result's rounding, as
much again for a weight rounded once, and float32 sums far below both."""
FORMATS = [("int4", 128), ("int4", 32), ("int4", 96), ("int4", None), ("uint4", 64), ("uint4", None), ("int8", None)]
FORMATS += [("int8", 128)]
SHAPES = [(1, 64, 64), (1, 1, 1), (3, 100, 100), (4, 130, 1000), (8, 256, 4096), (13, 48, 96), (16, 512, 776)]
SHAPES += [(17, 300, 333), (64, 130, 1024), (100, 257, 640), (300, 512, 128)]


def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w)


def swiglu(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def sum_of_products(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    first, *others = (F.linear(x, weight) for weight in weights)
    return sum(others, first)


def projections(x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    return F.linear(x, q), F.linear(x, k).relu(), F.linear(x, v) * 2


def epilogue(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, scale: torch.Tensor, y: torch.Tensor) -> Any:
    out = F.linear(x, w, bias) * scale
    return out + y, torch.where(out > 0, out, 0.1 * out)


def functions(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, y: torch.Tensor) -> Any:
    out = F.linear(x, w, bias)
    return F.gelu(out) + y, torch.exp(-out.abs()), torch.sigmoid(out)


def random(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, device="cuda").to(dtype)


def quantized(n: int, k: int, format: str, group: int | None) -> Any:
    return jitgen.quantize(torch.randn(n, k, device="cuda"), format, group_size=group)


def wide(value: Any) -> torch.Tensor:
    return value.dequantize(F64) if isinstance(value, jitgen.QTensor) else value.double()


def check(
    function: Callable[..., Any],
    *given: Any,
    slack: float = 1.0,
    backend: str = "cuda",
    dtype: torch.dtype | None = None,
) -> None:
    """The kernel's results, of the first argument's dtype or ``dtype``, written into poison, against ``function`` in
    float64."""
    expected = function(*map(wide, given))
    expected = expected if isinstance(expected, tuple) else (expected,)
    dtype = dtype or given[0].dtype
    poisoned = tuple(torch.full(e.shape, float("nan"), dtype=dtype, device="cuda") for e in expected)
    plan = jitgen.jit(function, backend=backend).bind(*given)
    out = poisoned if len(poisoned) > 1 else poisoned[0]
    plan(*given, out=out)
    for got, want in zip(poisoned, expected, strict=True):
        if want.numel() == 0:
            continue
        error, size = (got.double() - want).norm(), want.norm()
        most = slack * TOLERANCE[dtype] * size + of_subnormals(dtype, want.numel())
        assert error <= most, f"relative error {(error / size).item():.2e}"


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(("format", "group"), FORMATS)
@pytest.mark.quick(
    where=lambda group, dtype: dtype == (BF16 if group in (128, 96) else F16) and group in (128, 96, 64, None)
)
def test_quantised_weights(format: str, group: int | None, dtype: torch.dtype) -> None:
    for m, n, k in SHAPES:
        check(linear, random(m, k, dtype=dtype), quantized(n, k, format, group))


@pytest.mark.parametrize(("format", "group"), FORMATS)
@pytest.mark.quick(where=lambda format, group: group in (32, None))
def test_quantised_weights_in_float32(format: str, group: int | None) -> None:
    for m, n, k in SHAPES[::2]:
        check(linear, random(m, k, dtype=F32), quantized(n, k, format, group))


@pytest.mark.parametrize("dtype", [BF16, F16, F32, F64])
def test_dense_weights(dtype: torch.dtype) -> None:
    for m, n, k in SHAPES:
        check(linear, random(m, k, dtype=dtype), random(n, k, dtype=dtype))


@pytest.mark.parametrize("dtype", [BF16, F32, F64])
@pytest.mark.parametrize("count", [3, 5])
@pytest.mark.quick(where=lambda count, dtype: (count == 3) == (dtype is BF16))
def test_several_dense_products_in_one_kernel(count: int, dtype: torch.dtype) -> None:
    """Tiles have whole pieces of each of the weights, in every mainloop. A product may be rounded before the sum."""
    for m, n, k in SHAPES[::2]:
        check(sum_of_products, *(random(rows, k, dtype=dtype) for rows in (m, *[n] * count)), slack=2.0)


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_functions_of_an_epilogue(dtype: torch.dtype) -> None:
    """Coarse ones for results of 16 bits, and on wgmma also where rows of K begin within a line of the cache."""
    for m, n, k in [*SHAPES[-2:], (300, 1160, 1528), (777, 264, 2056)]:
        operands = random(m, k, dtype=dtype), random(n, k, dtype=dtype) / k**0.5
        check(functions, *operands, random(n, dtype=dtype), random(m, n, dtype=dtype))


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("x_lies", ["rows", "columns", "strided", "shifted"])
@pytest.mark.parametrize("w_lies", ["rows", "columns", "strided", "shifted"])
@pytest.mark.quick(
    where=lambda x_lies, w_lies, dtype: dtype == BF16 and (x_lies == w_lies or "rows" in (x_lies, w_lies))
)
def test_dense_operands_lie_anyhow(x_lies: str, w_lies: str, dtype: torch.dtype) -> None:
    def laid(rows: int, columns: int, lies: str) -> torch.Tensor:
        if lies == "columns":
            return random(columns, rows, dtype=dtype).t()
        if lies == "strided":
            return random(rows, 3 * columns, dtype=dtype)[:, ::3]
        if lies == "shifted":
            return random(rows, columns + 3, dtype=dtype)[:, 3:]
        return random(rows, columns, dtype=dtype)

    for m, n, k in [(1, 64, 200), (7, 130, 64), (16, 96, 520), (130, 200, 328)]:
        check(linear, laid(m, k, x_lies), laid(n, k, w_lies))


@pytest.mark.parametrize("lies", ["columns", "strided", "shifted"])
def test_activations_of_quantised_weights_lie_anyhow(lies: str) -> None:
    for m, k in [(1, 200), (5, 512), (70, 328)]:
        x = {
            "columns": random(k, m).t(),
            "strided": random(m, 3 * k)[:, ::3],
            "shifted": random(m, k + 3)[:, 3:],
        }[lies]
        check(linear, x, quantized(96, k, "int4", 32))


@pytest.mark.parametrize("dtype", [BF16, F16, F32, F64])
@pytest.mark.parametrize("lies", ["rows", "columns"])
@pytest.mark.quick(where=lambda dtype: dtype == BF16)
def test_dense_weights_of_few_rows(lies: str, dtype: torch.dtype) -> None:
    shapes = [(1, 1), (16, 8), (100, 64), (33, 65), (130, 200), (256, 1032), (257, 1000), (1024, 4096)]
    for m in (1, 2, 4, 7, 8, 13, 16):
        for n, k in shapes:
            w = random(n, k, dtype=dtype) if lies == "rows" else random(k, n, dtype=dtype).t()
            x = random(m, k, dtype=dtype)
            check(linear, x, w)
            check(projections, x, w, w[: n // 2], random(n + 3, k, dtype=dtype))
            if n >= 100:
                check(swiglu, (x / k**0.5).to(dtype), w, random(n, k, dtype=dtype), slack=3)


def gated(gate: torch.Tensor, up: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(F.silu(gate) * up, w)


def normalised(x: torch.Tensor, scale: torch.Tensor, gain: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(x * scale[:, None] * gain, w)


def activated(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    # A prologue that is not 0 at 0, with what the epilogue reads too.
    y = 1 / (1.5 + x.abs())
    return F.linear(y, first) * F.linear(y, second).sigmoid()


def shifted(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    places = torch.arange(x.shape[1], device=x.device)
    return F.linear(x + places % 3, w) + torch.arange(w.shape[0], device=x.device) % 5


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("weights", ["int4", "int8", "uint4", "dense", "transposed", "strided"])
@pytest.mark.quick(where=lambda weights, dtype: (weights, dtype) in (("int4", BF16), ("uint4", F16), ("dense", F32)))
def test_prologues(weights: str, dtype: torch.dtype) -> None:
    def weight(n: int, k: int) -> Any:
        if weights == "dense":
            return random(n, k, dtype=dtype)
        if weights == "transposed":
            return random(k, n, dtype=dtype).t()
        if weights == "strided":
            return random(n, 3 * k, dtype=dtype)[:, ::3]
        return quantized(n, k, weights, 64)

    for m in (1, 3, 4, 8, 16, 20):
        for n, k in [(1, 1), (40, 64), (130, 200), (257, 1001), (512, 4096)]:
            x, y = random(m, k, dtype=dtype), random(m, k, dtype=dtype)
            # The activation is rounded to its dtype where it meets the weights.
            check(gated, x, y, weight(n, k), slack=2)
            check(normalised, x, random(m, dtype=dtype), random(k, dtype=dtype), weight(n, k), slack=2)
            check(activated, random(k, m, dtype=dtype).t(), weight(n, k), weight(n, k), slack=4)
            check(shifted, x, weight(n, k), slack=2)


@pytest.mark.parametrize("rows", [1, 5, 16, 30])
def test_an_activation_that_is_cast(rows: int) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(x.to(w.dtype), w)

    for n, k in [(64, 64), (257, 1000)]:
        check(function, random(rows, k, dtype=F32), random(n, k), slack=2, dtype=BF16)


def test_an_activation_that_is_returned_too() -> None:
    def function(x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor) -> Any:
        hidden = x + residual
        return F.linear(hidden, w), hidden

    for m in (1, 8, 40):
        x, residual, w = random(m, 512), random(m, 512), quantized(300, 512, "int4", 64)
        product, hidden = jitgen.jit(function, backend="cuda")(x, residual, w)
        assert torch.equal(hidden, x + residual)
        exact = F.linear(hidden.double(), wide(w))
        assert (product.double() - exact).norm() <= TOLERANCE[BF16] * exact.norm()


def returned_products(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> Any:
    a, b = F.linear(x, gate), F.linear(x, up)
    return F.linear(F.silu(a) * b, down), a, b


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.quick(where=lambda backend: backend == "cuda")
def test_products_that_are_returned_and_read(backend: str) -> None:
    """One kernel computes both, and what the next one reads of them."""
    for m, n, k in [(5, 96, 64), (200, 264, 136), (520, 1160, 512)]:
        weights = [random(n, k) / k**0.5 for _ in range(2)]
        check(returned_products, random(m, k), *weights, random(k, n) / n**0.5, slack=2, backend=backend)


@pytest.mark.parametrize("step", [1, 2])
def test_slices_of_a_transposed_activation(step: int) -> None:
    """Those that tensor maps describe are read as they lie, others copied where that pays: (M, N, K, the first element,
    how far rows are apart beyond M)."""
    for m, n, k, first, more in [(4092, 512, 200, 0, 12), (4096, 4096, 200, 4, 8), (1000, 14336, 136, 1, 3)]:
        x = random(k, step * (m + more))[:, first * step : (first + m) * step : step]
        check(lambda x, w: x.mT @ w, x, random(k, n))


def test_slices_of_a_weight() -> None:
    """Those that no tensor map describes are copied where that pays."""
    for m, n, k in [(520, 4096, 1096), (1000, 1000, 8)]:
        check(F.linear, random(m, k), random(n, k + 12)[:, 4 : 4 + k])
        check(torch.matmul, random(m, k), random(k, n + 12)[:, 4 : 4 + n])


@pytest.mark.parametrize("rows", [1, 4, 8, 16, 50, 200])
@pytest.mark.parametrize("weights", ["int4", "uint4", "int8", "dense"])
@pytest.mark.quick(where=lambda weights, rows: rows in (1, 16, 200) and weights in ("int4", "dense"))
def test_products_of_one_activation(weights: str, rows: int) -> None:
    def weight(n: int) -> Any:
        return random(n, 512) if weights == "dense" else quantized(n, 512, weights, 64)

    # Two products, each as wrong as one, multiplied.
    check(swiglu, random(rows, 512), weight(384), weight(384), slack=3)
    check(projections, random(rows, 512), weight(256), weight(40), weight(72))


def summed(x: torch.Tensor, *weights: torch.Tensor) -> Any:
    return sum(F.linear(x, weight) for weight in weights)


def neighbours(x: torch.Tensor, *weights: torch.Tensor) -> Any:
    products = [F.linear(x, weight) for weight in weights]
    return tuple(left + right for left, right in itertools.pairwise(products))


@pytest.mark.parametrize("weights", ["int4", "int8", "dense"])
@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.quick(where=lambda weights, backend: weights == "int4" and backend == "cuda")
def test_more_products_than_a_kernel_sums(weights: str, backend: str) -> None:
    """The others are in memory, rounded; of two rows an int4 product has tiles of its own."""
    several = [random(136, 512) if weights == "dense" else quantized(136, 512, weights, 64) for _ in range(6)]
    for rows in (1, 2, 7, 16, 70):
        for function in (summed, neighbours):
            check(function, random(rows, 512), *several, slack=3, backend=backend)


@pytest.mark.parametrize("rows", [1, 6, 16, 80])
def test_epilogues(rows: int) -> None:
    for n in (256, 100, 33):
        for w in (quantized(n, 256, "int4", 128), random(n, 256)):
            check(epilogue, random(rows, 256), w, random(n), random(rows, 1), random(rows, n), slack=2)
            check(epilogue, random(rows, 256), w, random(n), random(1, 1), random(n, rows).t(), slack=2)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_degenerate_sizes(dtype: torch.dtype, backend: str) -> None:
    for m, n, k in [(0, 16, 64), (0, 16, 4096), (4, 16, 0), (1, 1, 0), (5, 0, 8), (5, 0, 4096)]:
        check(linear, random(m, k, dtype=dtype), random(n, k, dtype=dtype), backend=backend)


def test_layers_of_llama() -> None:
    for n, k in [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]:
        w = quantized(n, k, "int4", 128)
        for m in (1, 4, 8, 16, 64):
            check(linear, random(m, k), w)


@pytest.mark.parametrize("rows", [1, 3, 8, 16, 50, 64, 200, 1000])
@pytest.mark.parametrize("weights", ["int4", "int4 rows", "uint4", "int8", "dense"])
@pytest.mark.quick(
    where=lambda weights, rows: (
        (rows in (1, 64, 1000) and weights in ("int4", "dense")) or (rows, weights) == (16, "uint4")
    )
)
def test_products_in_triton(weights: str, rows: int) -> None:
    """The narrow ones of them are split along K."""

    def weight(n: int, k: int) -> Any:
        format, _, by_rows = weights.partition(" ")
        return random(n, k) if weights == "dense" else quantized(n, k, format, None if by_rows else 128)

    for n, k in [(4096, 4096), (512, 14336), (8192, 2048), (257, 1000), (1030, 4128)]:
        check(linear, random(rows, k), weight(n, k), backend="triton")
    check(swiglu, random(rows, 4096), weight(384, 4096), weight(384, 4096), slack=3, backend="triton")
    check(projections, random(rows, 4096), *(weight(n, 4096) for n in (256, 40, 72)), backend="triton")
    for n in (512, 131):
        w, y = weight(n, 4096), random(rows, n)
        check(epilogue, random(rows, 4096), w, random(n), random(rows, 1), y, slack=2, backend="triton")


def test_split_products_are_split() -> None:
    for w in (quantized(4096, 4096, "int4", 128), random(4096, 4096)):
        low = jitgen.jit(linear).lower(random(64, 4096), w, backend="triton")
        assert [kernel.name for kernel in low.kernels] == ["linear", "linear_sum"]


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("rows", [1, 16, 64, 300])
def test_the_same_call_gives_the_same_bits(rows: int, backend: str) -> None:
    x, w = random(rows, 4096), quantized(1024, 4096, "int4", 128)
    function = jitgen.jit(linear, backend=backend)
    first = function(x, w)
    assert all(torch.equal(first, function(x, w)) for _ in range(10))


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_infinities_and_nan_stay_in_their_rows(backend: str) -> None:
    x, w = random(16, 2048), quantized(256, 2048, "int4", 128)
    clean = jitgen.jit(linear, backend=backend)(x, w)
    dirty = x.clone()
    dirty[3, 7], dirty[5, 9] = float("nan"), float("inf")
    got = jitgen.jit(linear, backend=backend)(dirty, w)
    assert got[3].isnan().all()
    assert not got[5].isfinite().any()
    others = [row for row in range(16) if row not in (3, 5)]
    assert torch.equal(got[others], clean[others])


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("weights", ["float32", "float16", "bfloat16", "int4", "int8"])
def test_argmax_of_columns(weights: str, backend: str) -> None:
    """It is joined from the tiles of the product. Sums of small integers are exact, and many of them equal."""
    function = jitgen.jit(lambda h, w: F.linear(h, w).argmax(-1), backend=backend)
    dtype = BF16 if weights.startswith("int") else getattr(torch, weights)
    for rows, columns, length in ((1, 128256, 256), (2, 32000, 512), (3, 2064, 96), (5, 1040, 4096), (8, 151936, 128)):
        h = torch.randint(-3, 4, (rows, length), device="cuda").to(dtype)
        w = torch.randint(-3, 4, (columns, length), device="cuda").to(dtype)
        weight = jitgen.quantize(w, weights, group_size=32) if weights.startswith("int") else w
        assert "argmax of a product" in function.lower(h, weight).explain()
        found, sums = function(h, weight), F.linear(h.double(), wide(weight))
        if weight is w:
            assert torch.equal(found, sums.to(dtype).argmax(-1)), (rows, columns)
        else:  # sums of scaled groups are rounded, and so is their number
            lost = sums.amax(-1) - sums.gather(-1, found[:, None])[:, 0]
            assert (lost <= 2 * torch.finfo(dtype).eps * sums.abs().amax(-1)).all(), (rows, columns)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("weights", ["bfloat16", "int4"])
def test_bits_of_a_row_in_any_batch(weights: str, backend: str) -> None:
    """However the activation lies: as rows, as rows that begin anywhere, and along M."""
    dense = random(520, 1024)
    w = jitgen.quantize(dense, weights, group_size=128) if weights == "int4" else dense
    run = jitgen.jit(linear, backend=backend, batch_invariant=True)
    rows = random(300, 1024)
    slices = F.pad(rows, (1, 3))[:, 1:-3]
    for lie in (lambda m: rows[:m], lambda m: slices[:m], lambda m: rows[:m].T.contiguous().T):
        few = run(lie(1), w)
        for m in (8, 63, 64, 65, 300):
            got = run(lie(m), w)
            assert torch.equal(got[:1], few), (m, lie(m).stride())
        error = (got.double() - F.linear(rows.double(), wide(w))).norm() / got.double().norm()
        assert error <= TOLERANCE[BF16]
