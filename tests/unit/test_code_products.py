"""Formulas of quantised products in plain PyTorch: they become products of the codes, on the CPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.errors import JitgenError, TraceError
from jitgen.quant import formats, layouts
from jitgen.quant.layouts import portable

SIZES = [(1, 1, 1), (1, 300, 33), (3, 64, 17), (20, 257, 40)]
"""M, K and N."""
REWRITE = "a product of codes cast to another dtype is a product of the codes"


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """The data of a test depends on its name alone."""
    random.seed(request.node.name)
    torch.manual_seed(random.getrandbits(32))


def codes(*shape: int, dtype: torch.dtype = torch.int8) -> torch.Tensor:
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max + 1, shape, dtype=dtype)


Q, P, S, T, Z, Y, ZP = "q", "p", "s", "t", "z", "y", "u"
FORMULAS: dict[str, tuple[Callable[..., Any], str]] = {
    "floats": (lambda q, p, s, t: (q.float() @ p.float().T) * s * t, "qpst"),
    "16 bits": (lambda q, p, s, t: (q.bfloat16() @ p.bfloat16().T).float() * s * t, "qpst"),
    "doubles": (lambda q, p: q.double() @ p.double().T, "qp"),
    "int32": (lambda q, p, s, t: (q.to(torch.int32) @ p.to(torch.int32).T) * s * t, "qpst"),
    "int64": (lambda q, p: q.long() @ p.long().T, "qp"),
    "scales inside": (lambda q, p, s, t: (q * s) @ (p * t[:, None]).T, "qpst"),
    "a scale of all, divided": (lambda q, p, s: F.linear(q.float() / 3.5, p.float() * s[0]), "qps"),
    "a zero-point of rows": (lambda q, p, s, z: ((q.float() - z) * s) @ p.float().T, "qpsz"),
    "a zero-point of columns": (lambda q, p, t, y: q.float() @ ((p.float() - y[:, None]) * t[:, None]).T, "qpty"),
    "two zero-points": (lambda q, p, s, z, y: ((q.float() - z) * s) @ (p.float() - y[:, None]).T, "qpszy"),
    "a number as zero-point": (lambda q, p: (q.float() - 3) @ (p.float() - 5).T, "qp"),
    "integers as zero-points": (lambda q, p, z, y: (q.int() - z.int()) @ (p.int() - y.int()[:, None]).T, "qpzy"),
    "unsigned": (lambda u, p, s, z: ((u.float() - z) * s) @ p.float().T, "upsz"),
    "both unsigned": (lambda u, v: (u.float() - 128) @ (v.float() - 128).T, "uv"),
    "a batch": (lambda q, p: torch.stack([q, q + 1]).float() @ torch.stack([p, p + 3]).float().mT, "qp"),
    "three dimensions": (
        lambda q, p, t, y: F.linear(q.float()[None].expand(2, -1, -1), (p.float() - y[:, None]) * t[:, None]),
        "qpty",
    ),
    "with an epilogue": (lambda q, p, s, t: torch.relu((q.float() @ p.float().T) * s * t - 1) + s, "qpst"),
}


def arguments(names: str, m: int, k: int, n: int) -> list[torch.Tensor]:
    made = {
        "q": codes(m, k),
        "p": codes(n, k),
        "u": codes(m, k, dtype=torch.uint8),
        "v": codes(n, k, dtype=torch.uint8),
    }
    made |= {"s": torch.rand(m, 1), "t": torch.rand(n), "z": torch.randint(-9, 9, (m, 1)).float()}
    made["y"] = torch.randint(-9, 9, (n,)).float()
    return [made[name] for name in names]


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.quick(where=lambda name: name in ("floats", "two zero-points", "integers as zero-points", "unsigned"))
def test_formulas_are_products_of_the_codes(name: str) -> None:
    formula, names = FORMULAS[name]
    function = jitgen.jit(formula)
    for m, k, n in SIZES:
        given = arguments(names, m, k, n)
        found, eager = function(*given), formula(*given)
        assert (found.dtype, found.shape) == (eager.dtype, eager.shape)
        if not eager.is_floating_point():
            assert torch.equal(found, eager)
            continue
        wanted = exact(formula, given)
        size = wanted.abs().amax() + (given[0].double().abs().amax() * given[1].double().abs().amax() * k) * 1e-2
        relative = 8e-3 if name == "16 bits" else 1e-5
        assert ((found.double() - wanted).abs() <= relative * size).all()
    assert REWRITE in function.lower(*given).explain()


@pytest.mark.parametrize("length", [300, 8200])
def test_terms_of_zero_points_cancel_exactly(length: int) -> None:
    """Codes near a zero-point of 200: each term is about 40,000 times K, and the result some sqrt(K)."""

    def formula(q: torch.Tensor, p: torch.Tensor, z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (q.float() - z) @ (p.float() - y[:, None]).T

    q, p = ((200 + torch.randint(-2, 3, (rows, length))).to(torch.uint8) for rows in (5, 11))
    given = q, p, torch.full((5, 1), 200.0), torch.full((11,), 199.0)
    function = jitgen.jit(formula)
    assert torch.equal(function(*given).double(), exact(formula, [*given]))
    assert REWRITE in function.lower(*given).explain()


def exact(formula: Callable[..., Any], given: list[torch.Tensor]) -> torch.Tensor:
    """Computes a formula with floats of 64 bits in place of all others."""
    names = ("float", "bfloat16")
    kept = {name: getattr(torch.Tensor, name) for name in names}
    try:
        for name in names:
            setattr(torch.Tensor, name, torch.Tensor.double)
        return formula(*(value.double() if value.is_floating_point() else value for value in given)).double()
    finally:
        for name, function in kept.items():
            setattr(torch.Tensor, name, function)


def test_a_sum_too_long_for_int32_stays_a_product_of_floats() -> None:
    formula = FORMULAS["floats"][0]
    q, p = torch.full((2, 140_000), -128, dtype=torch.int8), torch.full((3, 140_000), -128, dtype=torch.int8)
    found = jitgen.jit(formula)(q, p, torch.ones(2, 1), torch.ones(3))
    assert (found == 140_000 * 2.0**14).all()


def test_what_varies_along_k_is_left_alone() -> None:
    function = jitgen.jit(lambda q, p, scale: (q.float() * scale) @ p.float().T)
    q, p, scale = codes(5, 64), codes(7, 64), torch.rand(64)
    torch.testing.assert_close(function(q, p, scale), (q.double() * scale @ p.double().T).float(), rtol=1e-4, atol=1e-1)
    assert REWRITE not in function.lower(q, p, scale).explain()


def test_triton_multiplies_int8_alone_of_the_integers() -> None:
    function = jitgen.jit(FORMULAS["floats"][0])
    shapes = (("M", 64), (48, 64), ("M", 1), (48,))
    for dtype in (torch.int8, torch.uint8):
        dtypes = (dtype, torch.int8, torch.float32, torch.float32)
        specs = [jitgen.TensorSpec(shape, kind) for shape, kind in zip(shapes, dtypes, strict=True)]
        explained = function.lower(*specs, target="sm_90a", backend="triton").explain()
        assert (REWRITE in explained) == (dtype == torch.int8)


FLOAT8 = torch.float8_e4m3fn
AS_BFLOAT16 = "is one of bfloat16 numbers"


@pytest.mark.parametrize(
    ("rows", "length", "dtype", "target", "path", "says"),
    [
        (1000, 4112, torch.int8, "sm_90a", "wgmma_dense", "products of int8 codes summed in int32"),
        (1000, 4112, FLOAT8, "sm_90a", "wgmma_dense", "products of float8_e4m3fn codes summed in float32"),
        (3, 4112, FLOAT8, "sm_90a", "bytes", REWRITE),
        (1000, 4111, FLOAT8, "sm_90a", "dense", REWRITE),
        (1000, 4112, torch.int8, "sm_80", "dense", REWRITE),
        (1000, 4112, FLOAT8, "sm_89", "dense", REWRITE),
        (3, 4112, FLOAT8, "sm_80", "rows", AS_BFLOAT16),
        (1000, 4112, FLOAT8, "sm_80", "dense", AS_BFLOAT16),
    ],
)
def test_tensor_cores_multiply_codes(
    rows: int, length: int, dtype: torch.dtype, target: str, path: str, says: str
) -> None:
    specs = [jitgen.TensorSpec(shape, dtype) for shape in ((rows, length), (528, length))]
    specs += [jitgen.TensorSpec((528,), torch.float32)]
    low = jitgen.jit(lambda x, w, t: (x.float() @ w.float().T) * t).lower(*specs, target=target, backend="cuda")
    assert low.lowered.schedules[-1].path == path
    assert says in low.explain()


def test_sums_in_float64_stay() -> None:
    specs = [jitgen.TensorSpec((64, 64), FLOAT8)] * 2
    low = jitgen.jit(lambda x, w: x.double() @ w.double().T).lower(*specs, target="sm_90a", backend="cuda")
    assert REWRITE not in low.explain()


def test_codes_of_one_activation_and_weights_of_two_kinds_are_two_kernels() -> None:
    specs = [
        jitgen.TensorSpec((200, 64), FLOAT8),
        *[jitgen.TensorSpec((48, 64), d) for d in (FLOAT8, torch.float8_e5m2)],
    ]

    def both(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Any:
        return (x.float() @ w.float().T) * (x.float() @ v.float().T)

    assert len(jitgen.jit(both).lower(*specs, target="sm_90a", backend="cuda").kernels) == 2


def by_row(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    s = x.abs().amax(-1, keepdim=True) / 127
    return ((x / s).round().clamp(-127, 127).to(torch.int8).float() @ w.float().T) * s


def by_block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    blocks = x.unflatten(-1, (-1, 128))
    s = blocks.abs().amax(-1, keepdim=True) / 448
    return ((blocks / s).to(FLOAT8).float() * s).flatten(-2) @ w.float().T


@pytest.mark.parametrize(("backend", "target"), [("cuda", "sm_90a"), ("triton", "sm_90a"), ("cpp", "cpu")])
@pytest.mark.parametrize(("product", "dtype"), [(by_row, torch.int8), (by_block, FLOAT8)])
def test_layers_that_quantise_one_activation_share_its_codes(
    product: Callable[..., torch.Tensor], dtype: torch.dtype, backend: str, target: str
) -> None:
    def layers(x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return product(x, q), product(x, k), product(x, v).relu()

    weights = [torch.zeros(rows, 256, dtype=dtype) for rows in (128, 256, 384)]
    x = torch.randn(200, 256)
    low = jitgen.jit(layers).lower(x, *weights, target=target, backend=backend)
    assert low.explain().count("row reduction") == 1, low.explain()


def test_a_dynamic_quantisation_is_one_kernel_and_its_products_another() -> None:
    @jitgen.jit
    def layer(x: torch.Tensor, norm: torch.Tensor, w: torch.Tensor, v: torch.Tensor, t: torch.Tensor) -> Any:
        h = F.rms_norm(x, (x.shape[-1],), norm)
        s = h.abs().amax(-1, keepdim=True) / 127
        q = (h / s).round().clamp(-127, 127).to(torch.int8)
        return (q.float() @ w.float().T) * s * t, (q.float() @ v.float().T) * s * t

    given = torch.randn(6, 128), torch.rand(128) + 0.5, codes(40, 128), codes(40, 128), torch.rand(40)
    low = layer.lower(*given)
    assert len(low.kernels) == 2, low.explain()
    assert "temporary int8" in low.explain()
    for found, wanted in zip(layer(*given), layer.reference(*given), strict=True):
        assert (found - wanted).norm() <= 2e-3 * wanted.norm()


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("rowwise", [False, True], ids=["tensorwise", "rowwise"])
def test_scaled_mm(dtype: torch.dtype, rowwise: bool) -> None:
    for m, k, n in ((1, 16, 16), (5, 64, 48)):
        a, b, bias = torch.randn(m, k).to(dtype), torch.randn(n, k).to(torch.float8_e4m3fn), torch.randn(n).bfloat16()
        s, t = (torch.rand(m, 1), torch.rand(1, n)) if rowwise else (torch.tensor(0.5), torch.tensor(3.0))
        function = jitgen.jit(
            lambda a, b, s, t, bias: torch._scaled_mm(a, b.T, s, t, bias=bias, out_dtype=torch.bfloat16).relu()
        )
        found = function(a, b, s, t, bias)
        wanted = ((a.double() @ b.double().T) * s * t + bias.double()).relu()
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.double(), wanted, rtol=8e-3, atol=1e-3)


@pytest.mark.parametrize(("rows", "path"), [(1000, "wgmma_dense"), (3, "bytes")])
def test_fast_sums_are_those_of_the_tensor_cores(rows: int, path: str) -> None:
    """With ``use_fast_accum`` wgmma's sums are not promoted; a CPU has float32 sums either way."""
    specs = [jitgen.TensorSpec(shape, FLOAT8) for shape in ((rows, 4112), (528, 4112))]
    specs += [jitgen.TensorSpec((), torch.float32)] * 2
    for fast in (False, True):
        function = jitgen.jit(lambda x, w, s, t, fast=fast: torch._scaled_mm(x, w.t(), s, t, use_fast_accum=fast))
        low = function.lower(*specs, target="sm_90a", backend="cuda")
        assert low.lowered.schedules[-1].path == path
        assert ("with the bits that tensor cores keep" in low.explain()) == fast
        if path == "wgmma_dense":
            assert ("jitgen::FastBytes<" in low.lowered.render(0)[0].text) == fast
        low = function.lower(*specs, target="sm_90", backend="triton")
        assert "max_num_imprecise_acc=128" in low.lowered.render(0)[0].text
        x, w = torch.randn(rows, 64).to(FLOAT8), torch.randn(48, 64).to(FLOAT8)
        found = function(x, w, torch.tensor(0.01), torch.tensor(1.0))
        assert (found.double() - (x.double() @ w.double().T) * 0.01).abs().max() < 0.02


def test_scaled_mm_refuses_other_scales() -> None:
    a, b = torch.randn(4, 32).to(torch.float8_e4m3fn), torch.randn(16, 32).to(torch.float8_e4m3fn)
    function = jitgen.jit(lambda a, b, s, t: torch._scaled_mm(a, b.T, s, t, out_dtype=torch.bfloat16))
    with pytest.raises(JitgenError, match="write other blocks as a formula"):
        function(a, b, torch.rand(4, 2), torch.rand(2, 16))
    with pytest.raises(JitgenError, match=r"float8_e8m0fnu is not supported.*\n.*before the call"):
        jitgen.jit(lambda s: s)(torch.ones(4).to(torch.float8_e8m0fnu))
    with pytest.raises(JitgenError, match="takes two matrices of float8"):
        function(a.float(), b.float(), torch.tensor(1.0), torch.tensor(1.0))
    specs = [jitgen.TensorSpec((16, 32), torch.float8_e4m3fn)] * 2 + [jitgen.TensorSpec((), torch.float32)] * 2
    for backend in ("cuda", "triton"):
        assert REWRITE in function.lower(*specs, target="sm_90a", backend=backend).explain()


@pytest.mark.parametrize("out_dtype", [FLOAT8, torch.bfloat16, None], ids=str)
def test_scaled_mm_takes_the_scale_of_a_result_as_torch_does(out_dtype: torch.dtype | None) -> None:
    a, b = torch.randn(16, 32).to(FLOAT8), torch.randn(16, 32).to(FLOAT8)

    def scaled(a: torch.Tensor, b: torch.Tensor, s: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(a, b.T, s, s, scale_result=r, out_dtype=out_dtype)

    given = a, b, torch.tensor(0.5), torch.tensor(2.0)
    found, wanted = jitgen.jit(scaled)(*given), scaled(*given)  # on a CPU torch divides, by cuBLASLt it multiplies
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found.float(), wanted.float(), rtol=2**-3, atol=2**-9)


@pytest.mark.parametrize("recipe", ["TensorWise", "RowWise", "BlockWise1x128"])
def test_the_newer_scaled_mm(recipe: str) -> None:
    kinds = F.ScalingType
    a, b, bias = torch.randn(5, 256).to(FLOAT8), torch.randn(128, 256).to(FLOAT8), torch.randn(128).bfloat16()
    first, second = getattr(kinds, recipe), getattr(kinds, recipe)
    s, t = torch.tensor(0.5), torch.tensor(3.0)
    if recipe == "RowWise":
        s, t = torch.rand(5, 1), torch.rand(1, 128)
    if recipe == "BlockWise1x128":
        second, s, t = kinds.BlockWise128x128, torch.rand(5, 2), torch.rand(2, 1)

    @jitgen.jit
    def scaled(a: torch.Tensor, b: torch.Tensor, s: torch.Tensor, t: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return F.scaled_mm(a, b.T, s, first, t, second, bias=c, contraction_dim=(1, 0))

    found = scaled(a, b, s, t, bias)
    x = a.double() * (s.double() if recipe != "BlockWise1x128" else s.double().repeat_interleave(128, 1))
    w = b.double() * (
        t.double().mT.repeat_interleave(128, 1) if recipe == "BlockWise1x128" else t.double().reshape(-1, 1)
    )
    wanted = x @ w.T + bias.double()
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), wanted, rtol=8e-3, atol=1e-2)
    with pytest.raises(JitgenError, match="are not"):
        scaled(a, b, torch.rand(5, 3), t, bias)
    with pytest.raises(JitgenError, match="TensorWise, RowWise"):
        jitgen.jit(lambda a, b, s: F.scaled_mm(a, b.T, s, kinds.BlockWise1x32, s, kinds.BlockWise1x32))(a, b, s)
    with pytest.raises(JitgenError, match=r"contraction_dim=\(0, 1\)\): .*transpose an operand"):
        jitgen.jit(lambda a, b, s: F.scaled_mm(a, b.T, s, first, s, first, contraction_dim=(0, 1)))(a, b, s)


def test_attention_of_codes_stays_one_kernel() -> None:
    function = jitgen.jit(lambda q, k, v, s, t: torch.softmax(((q.float() * s) @ (k.float() * t).mT) * 0.1, -1) @ v)
    q, k, v = codes(2, 3, 40, 64), codes(2, 3, 50, 64), torch.randn(2, 3, 50, 64)
    low = function.lower(q, k, v, torch.rand(2, 3, 40, 1), torch.rand(2, 3, 50, 1))
    assert len(low.kernels) == 1
    assert REWRITE not in low.explain()


RANGES = [(-128, 127), (0, 255), (-8, 7), (-32768, 32767)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("codes", RANGES, ids=str)
@pytest.mark.covering(1)
def test_fake_quantisation_has_the_bits_and_gradients_of_torch(dtype: torch.dtype, codes: tuple[int, int]) -> None:
    def of_tensor(x: torch.Tensor, s: Any, z: Any) -> torch.Tensor:
        return torch.fake_quantize_per_tensor_affine(x, s, z, *codes)

    def of_channels(x: torch.Tensor, s: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return torch.fake_quantize_per_channel_affine(x, s, z, 0, *codes)

    zeros = torch.randint(0, 5, (7,), dtype=torch.int32)
    cases: list[tuple[Any, Any, Any]] = [
        (of_tensor, 0.013, 3),
        (of_tensor, torch.tensor([0.02]), torch.tensor([2], dtype=torch.int32)),
    ]
    if dtype in (torch.float32, torch.float16):  # the others have no such kernel in torch
        cases.append((of_channels, torch.rand(7) * 0.05 + 0.005, zeros))
    for function, scale, zero in cases:
        x = (torch.randn(7, 33) * 3).to(dtype)
        x[0, 0] = torch.nan
        x = x.requires_grad_()
        results = [f(x, scale, zero) for f in (jitgen.jit(function), function)]
        assert torch.equal(*results)
        assert torch.equal(*(torch.autograd.grad(result.sum(), x)[0] for result in results))


def test_products_of_fake_quantised_operands_are_products_of_codes() -> None:
    def product(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor, z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        rounded = torch.fake_quantize_per_tensor_affine(x, s, z, 0, 255)
        none = torch.zeros(24, dtype=torch.int32)
        return F.linear(rounded, torch.fake_quantize_per_channel_affine(w, t, none, 0, -127, 127))

    x, w = torch.randn(5, 64), torch.randn(24, 64)
    given = x, w, torch.tensor(0.02), torch.tensor(120, dtype=torch.int32), w.abs().amax(1) / 127
    function = jitgen.jit(product)
    wanted = product(*given)
    assert ((function(*given) - wanted).abs() <= 1e-5 * wanted.abs().max()).all()
    for backend, target in (("cpp", "cpu"), ("cuda", "sm_90a")):
        low = function.lower(*given, backend=backend, target=target)
        assert REWRITE in low.explain()
        assert len(low.kernels) == 3
    for wrong in (
        lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 300, -128, 127),
        lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, 5, 4),
        lambda x: torch.fake_quantize_per_channel_affine(x, torch.ones(3), torch.zeros(3).int(), 0, -128, 127),
    ):
        with pytest.raises(TraceError, match=r"zero-point|quant_min"):
            jitgen.jit(wrong)(x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_one_scale_of_a_16_bit_operand(dtype: torch.dtype) -> None:
    a, b = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((33, 67), (67, 31)))
    scale = torch.tensor(0.25, dtype=dtype)

    def number(a: Any, b: Any) -> Any:
        return (a.to(dtype) - 3) @ (b.to(dtype) * 0.25)

    def tensor(a: Any, b: Any) -> Any:
        return (a.to(dtype) * 0.5) @ ((b.to(dtype) - 5) * scale)

    for function in (number, tensor):
        wanted = function(a, b)  # codes times powers of two: sums are exact in float32, and rounded once
        assert torch.equal(jitgen.jit(function)(a, b), wanted)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=str)
def test_int_mm(dtype: torch.dtype) -> None:
    a, b = torch.randint(0, 256, (20, 48)).to(dtype), torch.randint(-128, 128, (48, 9)).to(torch.int8)
    function = jitgen.jit(lambda a, b: torch._int_mm(a, b))
    assert torch.equal(function(a, b), a.int() @ b.int())
    specs = [jitgen.TensorSpec((512, 256), dtype), jitgen.TensorSpec((256, 128), torch.int8)]
    low = function.lower(*specs, target="sm_90a", backend="cuda")
    assert len(low.kernels) == 1
    assert REWRITE in low.explain() or dtype == torch.int8
    with pytest.raises(JitgenError, match=r"a\.int\(\) @ b\.int\(\)"):
        function(b, a.to(torch.uint8))


def blocks_of_both(q: torch.Tensor, s: torch.Tensor, p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    x = (q.float().unflatten(-1, (-1, 128)) * s.unsqueeze(-1)).flatten(-2)
    w = p.float().view(p.shape[0] // 128, 128, p.shape[1] // 128, 128) * t[:, None, :, None]
    return (x @ w.view(p.shape).T).to(torch.bfloat16)


def specs_of_blocks(dtype: torch.dtype, *lead: int) -> list[jitgen.TensorSpec]:
    shapes = ((*lead, 1152), dtype), ((*lead, 9), torch.float32), ((640, 1152), dtype), ((5, 9), torch.float32)
    return [jitgen.TensorSpec(shape, kind) for shape, kind in shapes]


@pytest.mark.parametrize("dtype", [FLOAT8, torch.int8], ids=str)
@pytest.mark.parametrize("lead", [(500,), (3, 500), (1,)], ids=str)
def test_scales_of_blocks_are_one_kernel(lead: tuple[int, ...], dtype: torch.dtype) -> None:
    low = jitgen.jit(blocks_of_both).lower(*specs_of_blocks(dtype, *lead), target="sm_90a", backend="cuda")
    assert len(low.kernels) == 1, low.explain()
    assert "for each block of 128 of K, and these, times scales of the weight and of x, in float32" in low.explain()


def test_scales_of_blocks_stay_a_formula_elsewhere() -> None:
    function, specs = jitgen.jit(blocks_of_both), specs_of_blocks(FLOAT8, 500)
    for target, backend in (("sm_89", "cuda"), ("x86-64-v3", "cpp")):
        assert "for each block" not in function.lower(*specs, target=target, backend=backend).explain()
    q, p = (torch.randn(shape).to(FLOAT8) for shape in ((3, 256), (128, 256)))
    s, t = torch.rand(3, 2), torch.rand(1, 2)
    torch.testing.assert_close(function(q, s, p, t), blocks_of_both(q, s, p, t), rtol=2e-2, atol=1e-2)


def test_scales_that_differ_within_blocks_stay() -> None:
    specs = [jitgen.TensorSpec(shape, FLOAT8) for shape in ((64, 256), (128, 256))] + [
        jitgen.TensorSpec((64, 4), torch.float32)
    ]

    def halves(q: torch.Tensor, p: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return (q.float().unflatten(-1, (-1, 64)) * s.unsqueeze(-1)).flatten(-2) @ p.float().T

    assert REWRITE not in jitgen.jit(halves).lower(*specs, target="sm_90a", backend="cuda").explain()


def test_scaled_mm_with_scales_of_blocks() -> None:
    a, b, s, t = torch.randn(5, 256).to(FLOAT8), torch.randn(384, 256).to(FLOAT8), torch.rand(5, 2), torch.rand(3, 2)
    function = jitgen.jit(lambda a, b, s, t: torch._scaled_mm(a, b.T, s, t.T, out_dtype=torch.bfloat16))
    wide = a.double() * s.double().repeat_interleave(128, 1)
    weight = b.double() * t.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    torch.testing.assert_close(function(a, b, s, t).double(), wide @ weight.T, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("format", "group", "columns", "target", "path"),
    [
        ("int4", 128, 1152, "sm_90a", "wgmma_quantized"),
        ("uint4", 32, 1152, "sm_90a", "wgmma_quantized"),
        ("int4", 128, 1152, "sm_80", None),
        ("int4", 64, 1152, "sm_89", None),
    ],
)
def test_low_bit_weights_meet_codes(format: str, group: int, columns: int, target: str, path: str | None) -> None:
    """Elsewhere the activation's codes become bfloat16, which ``explain`` says."""
    x = jitgen.TensorSpec((500, columns), torch.bfloat16)
    w = jitgen.TensorSpec((640, columns), torch.bfloat16, format=format, group_size=group, activation="int8")
    low = jitgen.jit(lambda x, w: F.linear(x, w)).lower(x, w, target=target, backend="cuda")
    assert ("codes of an activation become bfloat16" in low.explain()) == (path is None)
    if path is not None:
        assert len(low.kernels) == 2
        assert low.lowered.schedules[-1].path == path
        assert "times codes of int8" in low.explain()


@pytest.mark.parametrize(("backend", "target"), [("cuda", "sm_90a"), ("cuda", "sm_80"), ("triton", "sm_90a")])
@pytest.mark.parametrize(
    ("format", "group", "kind"),
    [
        ("int4", None, "int8"),
        ("uint4", 32, "int8"),
        ("int8", None, "int8"),
        ("fp8_e4m3", None, "fp8_e4m3"),
        ("fp8_e4m3.rows128", 128, "fp8_e4m3.block128"),
    ],
)
@pytest.mark.parametrize(("rows", "columns"), [(40, 16), (40, 48), (40, 0), (0, 128), (0, 0)])
@pytest.mark.covering(2)
def test_weights_with_few_columns_or_none_have_kernels(
    backend: str, target: str, format: str, group: int | None, kind: str, rows: int, columns: int
) -> None:
    """Mainloops of codes take 64 columns or 128 at a time; weights with fewer are decoded."""
    if "block" in kind and columns % 128:
        pytest.skip("blocks are whole")
    w = jitgen.TensorSpec((rows, columns), torch.bfloat16, format=format, group_size=group, activation=kind)
    function = jitgen.jit(lambda x, w: F.linear(x, w))
    for m in (1, 300):
        low = function.lower(jitgen.TensorSpec((m, columns), torch.bfloat16), w, backend=backend, target=target)
        assert low.kernels or not rows


@pytest.mark.parametrize(
    ("format", "group", "name"),
    [("int4", 128, "mma8"), ("uint4", 32, "mma8"), ("int4", None, "mma8"), ("fp8_e4m3.rows128", 128, "blocks")],
)
def test_layouts_of_codes_lose_nothing(format: str, group: int | None, name: str) -> None:
    weight = jitgen.quantize(torch.randn(200, 384), format, group)
    layout, row = layouts.find(name), formats.find(format)
    packed = layout.pack(row, group, (200, 384), weight.tensors)
    back = layout.unpack(row, group, (200, 384), packed)
    assert all(torch.equal(a, b) for a, b in zip(back, weight.tensors, strict=True))
    if name == "mma8":  # the nibbles of a word are the bytes of two rows of a fragment
        codes = portable.unpack_codes(row, weight.tensors[0]).int()
        words = packed[0].view(torch.int32)
        for lane, step in ((0, 0), (13, 3), (31, 2)):
            word, (row_of_lane, t) = int(words[1, 2, lane, step]) & 0xFFFFFFFF, divmod(lane, 4)
            for half in range(2):
                nibbles = [(word >> 4 * half + 8 * byte & 15) - (8 if row.signed else 0) for byte in range(4)]
                first = 2 * 64 + 16 * step + 4 * t
                assert nibbles == codes[16 + row_of_lane + 8 * half, first : first + 4].tolist()


BLOCKS_128 = {"format": "fp8_e4m3.rows128", "group_size": 128, "activation": "fp8_e4m3.block128"}


def chain(x: torch.Tensor, up: Any, down: Any) -> torch.Tensor:
    return F.linear(F.gelu(F.linear(x, up)), down)


def swiglu(x: torch.Tensor, gain: torch.Tensor, gate: Any, up: Any, down: Any) -> torch.Tensor:
    x = F.rms_norm(x, gain.shape, gain)
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def both(x: torch.Tensor, up: Any, down: Any) -> tuple[torch.Tensor, torch.Tensor]:
    y = F.gelu(F.linear(x, up))
    return F.linear(y, down), y


def deep(x: torch.Tensor, gain: torch.Tensor, *weights: Any) -> torch.Tensor:
    for _ in range(2):
        x = x + swiglu(x, gain, *weights)
    return x


@pytest.mark.parametrize(
    ("function", "kernels", "apart", "fused"),
    [(chain, 3, 1, 1), (swiglu, 3, 0, 2), (both, 4, 2, 0), (deep, 6, 0, 4)],
    ids=["chain", "swiglu", "a result that is returned too", "two blocks"],
)
@pytest.mark.parametrize("lead", [(300,), (2, 150), (1,)], ids=str)
def test_results_are_quantised_by_their_kernels(
    function: Any, kernels: int, apart: int, fused: int, lead: tuple[int, ...]
) -> None:
    """A norm and a product in blocks leave codes and scales for the next product. What is an argument, or is returned
    besides, a kernel of its own quantises: where rows have several dimensions, the scales have another."""
    weights = [jitgen.TensorSpec(shape, torch.bfloat16, **BLOCKS_128) for shape in ((640, 1024), (1024, 640))]
    x, gain = (jitgen.TensorSpec(shape, torch.bfloat16) for shape in ((*lead, 1024), (1024,)))
    arguments = (x, *weights) if function in (chain, both) else (x, gain, weights[0], *weights)
    low = jitgen.jit(function).lower(*arguments, target="sm_90a", backend="cuda")
    assert len(low.kernels) == kernels + apart * (len(lead) > 1), low.explain()
    assert low.explain().count("quantised to float8_e4m3fn with a scale for each 128 columns of a row") == fused


def test_a_row_of_one_block() -> None:
    """What 128 columns are quantised from is stored as that of several blocks is."""
    x, up, down = (
        jitgen.TensorSpec(shape, torch.bfloat16, **(BLOCKS_128 if number else {}))
        for number, shape in enumerate(((40, 1024), (128, 1024), (1024, 128)))
    )
    low = jitgen.jit(chain).lower(x, up, down, target="sm_90a", backend="cuda")
    bodies = [body for kernel in low._lowered.program.kernels for body in kernel.bodies]
    assert [product.blocks for body in bodies for product in body.contractions] == [("weight", "x")] * 2


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: torch.mul(*F.linear(x, w).chunk(2, -1)),
        lambda x, w: F.linear(x, w[128:]),
        lambda x, w: F.linear(x, w[48:]),
        lambda x, w: F.linear(x, w)[:, 64:200] * 2,
    ],
    ids=["chunk", "rows from a block on", "other rows", "columns"],
)
def test_a_weight_in_blocks_is_read_in_blocks(function: Any, backend: str) -> None:
    """Whatever part of it, or of its product, is asked for: no mainloop but that of blocks knows its layout."""
    weight = jitgen.TensorSpec(
        (384, 256), torch.bfloat16, format="fp8_e4m3.rows128", group_size=128, activation="fp8_e4m3.block128"
    )
    x = jitgen.TensorSpec((300, 256), torch.bfloat16)
    low = jitgen.jit(function, backend=backend).lower(x, weight, target="sm_90a", backend=backend)
    bodies = [body for kernel in low._lowered.program.kernels for body in kernel.bodies]
    assert [product.blocks for body in bodies for product in body.contractions] == [("weight", "x")]
