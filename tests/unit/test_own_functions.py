"""Pointwise functions that users spelled in the dialects."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import jitgen
from jitgen import TensorSpec
from jitgen.deploy.launch_schema import expression_refusal
from jitgen.errors import UnsupportedError

softened = jitgen.device_function(
    lambda x, a: x / (a + x.abs()),
    cuda="x / (a + (x < T(0) ? -x : x))",
    triton="x / (a + tl.abs(x))",
    cpp="x / (a + (x < T(0) ? -x : x))",
    derivative=lambda x, a: (a / (a + x.abs()) ** 2, -x / (a + x.abs()) ** 2),
)
is_large = jitgen.device_function(lambda x: x.abs() > 1, cpp="x > T(1) || x < T(-1)")


def softmaxed(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.softmax(softened(x * 2, 1.0) + y, -1), is_large(y), softened(y.bfloat16(), 2)


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", [(5, 70), (1, 1), (0, 3), (2, 3, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_dtypes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, y = torch.randn(shape, dtype=dtype), torch.randn(shape[-1], dtype=dtype)
    rows, large, low = jitgen.jit(softmaxed)(x, y)
    wide = 2 * x.double() / (1 + 2 * x.double().abs())
    assert torch.allclose(rows.double(), torch.softmax(wide + y, -1), rtol=1e-5 if dtype is torch.float32 else 1e-13)
    assert large.dtype is torch.bool
    assert torch.equal(large, y.abs() > 1)
    half = y.bfloat16().double()
    assert low.dtype is torch.bfloat16
    assert torch.allclose(low.double(), half / (2 + half.abs()), rtol=2**-8, atol=1e-9)


def test_of_integers_it_computes_in_integers() -> None:
    clipped = jitgen.device_function(lambda n, most: torch.minimum(n, most), cpp="n < most ? n : most")
    n, most = torch.randint(-(2**62), 2**62, (33,)), torch.randint(-(2**62), 2**62, (33,))
    found = jitgen.jit(lambda n, most: clipped(n, most) + 1)(n, most)
    assert found.dtype is torch.int64
    assert torch.equal(found, torch.minimum(n, most) + 1)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.bool])
@pytest.mark.parametrize("debug", ["0", "1"])
def test_of_integers_it_computes_the_floats_of_its_reference(
    dtype: torch.dtype, debug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JITGEN_DEBUG", debug)
    ratio = jitgen.device_function(
        lambda x, y: x / (1 + y * y), cpp="x / (T(1) + y * y)", derivative=lambda x, y: (1 / (1 + y * y), 0)
    )
    x, y = torch.randint(-9, 9, (3, 7)).to(dtype), torch.randint(-9, 9, (7,)).to(dtype)
    for x_, y_ in ((x, y), (x[0, 0], y[0]), (x[:0], y), (x, 3)):
        found = jitgen.jit(lambda x, y: ratio(x, y))(x_, y_)
        expected = x_.double() / (1 + torch.as_tensor(y_).double() ** 2)
        assert found.dtype is torch.float32
        assert torch.allclose(found.double(), expected, rtol=2**-22)


def test_a_reference_that_is_not_pointwise_is_refused() -> None:
    for reference in (lambda x: x.sum(-1), lambda x: x.t(), lambda x: x[:1], lambda x: x.mean(), lambda x: x[None]):
        own = jitgen.device_function(reference, cpp="x")
        with pytest.raises(UnsupportedError, match=r"is not pointwise: of arguments \[2, 3\] it makes a result"):
            jitgen.jit(lambda x: own(x) + 1)(torch.randn(4, 4))  # noqa: B023


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_it_is_compiled_into_kernels_of_a_gpu(backend: str) -> None:
    pytest.importorskip("triton" if backend == "triton" else "cuda.bindings")
    matrix = TensorSpec(("M", 64))
    function = jitgen.jit(lambda x, y: torch.relu(softened(x, 0.5)) + y)
    low = function.lower(matrix, matrix, target="sm_90a", backend=backend)
    assert len(low.kernels) == 1
    assert low.compile().asm["ptx"]


def test_gradients_of_both_orders() -> None:
    x, a = torch.randn(7, dtype=torch.float64, requires_grad=True), torch.full((), 1.5, dtype=torch.float64)
    function = jitgen.jit(lambda x, a: softened(x, a) * x)
    assert torch.autograd.gradcheck(function, (x, a))
    assert torch.autograd.gradgradcheck(function, (x, a))


def test_without_a_derivative_gradients_are_refused() -> None:
    cosine = jitgen.device_function(lambda x: x.cos(), cpp="__builtin_cosf(x)")
    x = torch.randn(5, requires_grad=True)
    with pytest.raises(UnsupportedError, match=r"a function that you spelled.*derivative="):
        jitgen.jit(lambda x: cosine(x) * 2)(x)
    with torch.no_grad():
        assert torch.allclose(jitgen.jit(lambda x: cosine(x) * 2)(x), 2 * x.cos(), rtol=1e-6)


def test_elsewhere_it_is_its_reference() -> None:
    x = torch.randn(3, 4)
    assert torch.equal(softened(x, 1.0), x / (1.0 + x.abs()))
    compiled = torch.compile(lambda x: softened(x, 1.0) * 2, backend="eager", fullgraph=True)
    assert torch.allclose(compiled(x), x / (1.0 + x.abs()) * 2)


def test_a_spelling_is_compared_with_its_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITGEN_DEBUG", "1")
    x = torch.randn(6)
    wrong = jitgen.device_function(lambda x: x.sin(), cpp="__builtin_cosf(x)")
    with pytest.raises(jitgen.JitgenError, match=r"as spelled for cpu, gives .* at x = .*, and its reference"):
        jitgen.jit(lambda x: wrong(x))(x)
    assert torch.allclose(jitgen.jit(lambda x: softened(x, 2.0))(x), x / (2 + x.abs()))


def test_a_manifest_has_the_spellings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    with jitgen.record(tmp_path / "specs.json"):
        jitgen.jit(lambda x, y: softened(x, y) + 1)(x, y)
    monkeypatch.setenv("JITGEN_CACHE_DIR", str(tmp_path / "store"))
    assert jitgen.prewarm(tmp_path / "specs.json", ["cpu"]).count("failed") == 0
    with jitgen.strict():
        assert torch.allclose(jitgen.jit(lambda x, y: softened(x, y) + 1)(x, y), x / (y + x.abs()) + 1)


def test_what_is_refused() -> None:
    x = torch.randn(4)
    with pytest.raises(UnsupportedError, match="is spelled in cuda, and not in cpp"):
        jitgen.jit(jitgen.device_function(lambda x: x.sin(), cuda="sinf(x)"))(x)
    with pytest.raises(UnsupportedError, match="has no parameters, or no expression"):
        jitgen.device_function(lambda x: x)
    with pytest.raises(UnsupportedError, match="is no expression in Triton"):
        jitgen.device_function(lambda x: x, triton="x +")
    for text in ("x, x", "x) * (x", "(x", "x]", "x;", "// x", "\n  #define x"):
        with pytest.raises(UnsupportedError, match="is no expression in cpp"):
            jitgen.device_function(lambda x: x, cpp=text)
    half = jitgen.device_function(lambda x: x / 2, cpp="x / /* a, b */ 2 // half")
    assert torch.equal(jitgen.jit(lambda x: half(x) * 4)(x), x * 2)
    with pytest.raises(UnsupportedError, match="is no expression in cpp"):
        jitgen.device_function(lambda x: x, cpp="float y = x; y")
    with pytest.raises(jitgen.TraceError, match="takes x, a, and 1 arguments"):
        jitgen.jit(lambda x: softened(x))(x)
    with pytest.raises(jitgen.JitgenError, match=r"the reference of .* fails"):
        jitgen.jit(lambda x: jitgen.device_function(lambda x: x.bitwise_not(), cpp="x")(x))(x)


@pytest.mark.parametrize(
    ("text", "dialect", "is_refused"),
    [
        ("x / (1 + tl.abs(x))", "triton", False),
        ("libdevice.erf(x)", "triton", False),
        ("__import__('os').system('x')", "triton", True),
        ("(lambda: x)()", "triton", True),
        ("x\nimport os", "triton", True),
        ("x * T(2)", "cuda", False),
        ("x; int y", "cpp", True),
        ('({ asm(".incbin \\"f\\""); x; })', "cpp", True),
    ],
)
def test_a_manifest_has_expressions_alone(text: str, dialect: str, is_refused: bool) -> None:
    assert (expression_refusal(text, dialect, ["x"]) is not None) == is_refused
