"""Batched products on the CPU: every spelling, against float64 torch; what is refused; sizes that change."""

from __future__ import annotations

import pytest
import torch

import jitgen
from jitgen.ir.equations import axes, equation
from tests.batched_products import CASES, difference, tensors

QUICK = (
    *("baddbmm", "addbmm", "five dimensions", "a vector on the right"),
    *("prologue and epilogue", "softmax behind", "einsum over two dimensions", "no length"),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.quick(where=lambda name, dtype: dtype == torch.float32 and name in QUICK)
def test_against_float64(name: str, dtype: torch.dtype) -> None:
    function, shapes, _ = CASES[name]
    arguments = tensors(shapes, dtype)
    assert difference(function, arguments, jitgen.jit(function)(*arguments)) is None


@pytest.mark.parametrize("name", CASES)
def test_is_as_few_kernels_as_can_be(name: str) -> None:
    function, shapes, kernels = CASES[name]
    assert len(jitgen.jit(function).lower(*tensors(shapes, torch.float32)).kernels) == kernels


def test_one_specialisation_for_any_sizes() -> None:
    made = jitgen.jit(torch.bmm)
    for b, m, n, k in ((2, 3, 4, 5), (7, 30, 9, 100), (3, 2, 2, 2), (130, 5, 66, 17)):
        arguments = tensors(((b, m, k), (b, k, n)), torch.float32)
        assert difference(torch.bmm, arguments, made(*arguments)) is None
    assert len(made.specializations) == 1


def test_results_go_where_the_caller_wants_them() -> None:
    x, w = tensors(((5, 7, 9), (5, 9, 11)), torch.float32)
    out = torch.full((5, 11, 7), float("nan")).mT
    jitgen.jit(torch.bmm)(x, w, out=out)
    assert difference(torch.bmm, [x, w], out) is None


@pytest.mark.parametrize(
    ("function", "shapes", "error"),
    [
        (torch.bmm, ((2, 3, 4), (3, 4, 5)), ValueError),
        (torch.bmm, ((3, 4), (4, 5)), ValueError),
        (lambda a, b: a @ b, ((2, 3, 4), (2, 5, 6)), ValueError),
        (lambda a, b: torch.einsum("ij,jk->ik", a, b), ((3, 4), (5, 6)), ValueError),
        (lambda a, b: torch.einsum("ij,jk->iz", a, b), ((3, 4), (4, 6)), ValueError),
        (lambda a, b: torch.einsum("ij,jk,kl->il", a, b, a), ((3, 4), (4, 6)), ValueError),
    ],
)
def test_what_is_refused(function: object, shapes: tuple[tuple[int, ...], ...], error: type[Exception]) -> None:
    with pytest.raises((error, jitgen.TraceError)):
        jitgen.jit(function)(*tensors(shapes, torch.float32))  # type: ignore[arg-type]


@pytest.mark.parametrize("batch", [1, 4])
def test_an_element_of_a_batch_of_dot_products(batch: int) -> None:
    x, y = torch.randn(batch, 3, generator=torch.Generator().manual_seed(batch)), torch.randn(batch, 3)
    function = jitgen.jit(lambda x, y: torch.einsum("bi,bi->b", x, y)[0])
    # Three products and two sums in float32, in any order.
    size = float((x[0] * y[0]).abs().sum())
    expected = (x[0].double() * y[0].double()).sum()
    assert function(x, y).shape == ()
    torch.testing.assert_close(function(x, y).double(), expected, rtol=0.0, atol=4 * 2**-24 * size)


def test_a_quantised_weight_is_no_batch() -> None:
    weight = jitgen.quantize(torch.randn(64, 64), "int4", 32)
    with pytest.raises(jitgen.JitgenError, match="quantised weight"):
        jitgen.jit(lambda w, x: w @ x)(weight, torch.randn(3, 64, 5))


def test_equations_name_axes_by_role() -> None:
    assert equation(0, 1) == "mk,nk->mn"
    named = axes(equation(2, 2))
    assert (named.batch, named.rows, named.columns, named.contracted) == (("a", "b"), ("m", "o"), ("n",), ("k",))
    with pytest.raises(ValueError, match="more axes than there are names"):
        equation(11, 1)


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "gfx942"])
def test_lowers_for_gpus(target: str) -> None:
    """One kernel with the batch in its grid, whatever the sizes."""
    x, w = jitgen.TensorSpec(("B", "M", 64), torch.bfloat16), jitgen.TensorSpec(("B", 64, "N"), torch.bfloat16)
    for backend in ("triton",) if target == "gfx942" else ("triton", "cuda"):
        low = jitgen.jit(torch.bmm).lower(x, w, target=target, backend=backend)
        assert len(low.kernels) == 1
        assert "matrix" in low.source


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layouts", [("nt",), ("nn", "tn", "tt")], ids=" ".join)
@pytest.mark.quick(where=lambda dtype, layouts: dtype is torch.float32 and len(layouts) == 1)
def test_small_products(dtype: torch.dtype, layouts: tuple[str, ...]) -> None:
    """On a CPU they have a path without packing: sizes about its limits, both orders of the weight, an epilogue."""

    def scaled(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.bmm(a, b)) * 0.5

    function = jitgen.jit(scaled)
    sizes = [(4, 4, 4), (17, 17, 17), (3, 0, 5), (64, 64, 32), (65, 64, 32), (64, 65, 32), (64, 64, 33), (7, 9, 31)]
    for m, k, n in sizes:
        for layout in layouts:
            a = torch.randn(5, m, k).to(dtype) if layout[0] == "n" else torch.randn(5, k, m).to(dtype).mT
            b = torch.randn(5, k, n).to(dtype) if layout[1] == "n" else torch.randn(5, n, k).to(dtype).mT
            exact = scaled(a.double(), b.double())
            # Of every sum its roundings in the accumulator, and one of the result.
            half = torch.finfo(torch.float32 if dtype.itemsize < 4 else dtype).eps / 2
            bound = (k + 2) * half * torch.bmm(a.double().abs(), b.double().abs())
            bound = bound + torch.finfo(dtype).eps / 2 * (exact.abs() + bound) + torch.finfo(dtype).tiny
            assert ((function(a, b).double() - exact).abs() <= bound).all(), (m, k, n)
