"""Products that quantise their activations, ``quantize(..., activation=...)``, on the CPU."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import jitgen
from jitgen.codegen import environment
from jitgen.compilers import host
from jitgen.errors import FormatError
from jitgen.quant import activations
from jitgen.runtime import cpu
from jitgen.spec import KernelSource, Target, runs_here

LEVELS = [level for level in ("x86-64-v2", "x86-64-v3", "x86-64-v4") if runs_here(Target.parse(level))]
FORMATS = [("int8", None), ("int8", 64), ("int4", 32), ("int4", None), ("uint4", 128), ("uint4", None)]
PLANES = [("int3", 128), ("uint3", 32), ("ternary", None), ("uint2", 48), ("uint7", None), ("uint1", 96)]
SIZES = [(1, 1, 1), (1, 300, 65), (2, 33, 16), (3, 1100, 33), (4, 260, 17), (7, 520, 40), (24, 65, 17), (130, 1030, 70)]
"""M, K and N."""


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """The data of a test depends on its name alone."""
    random.seed(request.node.name)
    torch.manual_seed(random.getrandbits(32))


def exact(x: torch.Tensor, weight: Any) -> torch.Tensor:
    """The product of the codes, in float64."""
    kind = activations.ACTIVATIONS[weight.activation]
    scales = activations.scales_of(x, kind) if weight.input_scale is None else weight.input_scale.reshape(1)
    values = activations.codes_of(x, scales, kind, weight.input_scale is not None).double()
    if kind.block:
        values = (values.unflatten(-1, (-1, kind.block)) * scales.double().unsqueeze(-1)).flatten(-2)
        return values @ weight.dequantize(torch.float64).T
    return values @ weight.dequantize(torch.float64).T * scales.double()


def assert_near(found: torch.Tensor, wanted: torch.Tensor, relative: float) -> None:
    """Errors are taken relative to the largest magnitude of a row: sums cancel."""
    size = wanted.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    assert ((found.double() - wanted).abs() <= relative * size).all()


def rows_of(m: int, k: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows of very different magnitudes, one of zeros among them."""
    x = torch.randn(m, k) * torch.logspace(-3, 3, m)[:, None]
    x[m // 2] *= m > 1
    return x.to(dtype)


@pytest.mark.parametrize(("format", "group"), [*FORMATS, *PLANES], ids=str)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.quick(
    where=lambda level, format, group: level == "x86-64-v3" and (format, group) in (*FORMATS[1::3], PLANES[1])
)
def test_products_are_those_of_the_codes(
    format: str, group: int | None, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JITGEN_CPU_TARGET", level)
    linear = jitgen.jit(lambda x, w: F.linear(x, w))
    for m, k, n in SIZES:
        weight = jitgen.quantize(torch.randn(n, k), format, group, activation="int8")
        x = rows_of(m, k)
        found = linear(x, weight)
        assert_near(found, exact(x, weight), 2e-6)
        assert_near(linear.reference(x, weight), exact(x, weight), 1e-5)


KINDS = [
    *(("int8", 32, "int8.block128"), ("int3", 32, "int8"), ("fp8_e4m3", None, "fp8_e4m3")),
    *(("fp8_e4m3.rows128", 128, "fp8_e4m3.block128"), ("uint4", 64, "fp8_e4m3"), ("mxfp4", None, "fp8_e4m3")),
    *(("mxfp8", None, "mxfp8"), ("int4", 64, "mxfp8")),
]


@pytest.mark.parametrize(("format", "group", "kind"), KINDS, ids=str)
@pytest.mark.quick(where=lambda format, group, kind: format in ("fp8_e4m3", "fp8_e4m3.rows128"))
def test_every_kind_of_codes(format: str, group: int | None, kind: str) -> None:
    """Those that no integer units multiply are decoded again, to float32: floats, and codes in blocks."""
    linear = jitgen.jit(lambda x, w: F.linear(x, w))
    weight = jitgen.quantize(torch.randn(33, 256), format, group, activation=kind)
    x = rows_of(9, 256)
    assert_near(linear(x, weight), exact(x, weight), 2e-6)
    assert_near(linear.reference(x, weight), exact(x, weight), 1e-5)


@pytest.mark.parametrize(("format", "kind"), [("int4", "int8"), ("fp8_e4m3", "fp8_e4m3")])
def test_a_static_scale_saturates_and_is_kept(format: str, kind: str, tmp_path: Path) -> None:
    weight = jitgen.quantize(torch.randn(24, 64), format, activation=kind, input_scale=0.01)
    assert weight.format == f"{format}.static"
    assert weight.input_scale.item() == pytest.approx(0.01)
    largest = activations.ACTIVATIONS[kind].largest * 0.01
    linear = jitgen.jit(lambda x, w: F.linear(x, w))
    x = torch.randn(5, 64)
    x[0] = largest * torch.sign(x[0])
    wanted = exact(x, weight)
    assert_near(linear(x, weight), wanted, 2e-6)
    x[0] *= 100
    assert_near(linear(x, weight), wanted, 2e-6)
    assert len(linear.lower(x, weight).kernels) == 1 or format == "fp8_e4m3"
    layer = nn.Linear(64, 24, bias=False).requires_grad_(False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    jitgen.save_quantized(layer, tmp_path / "layer.safetensors")
    loaded = jitgen.load_quantized(tmp_path / "layer.safetensors")["weight"]
    assert_near(F.linear(x, loaded), wanted, 2e-6)
    assert_near(F.linear(x, weight[4:8]), wanted[:, 4:8], 2e-6)
    again = weight.with_input_scale(torch.tensor([0.02]))
    assert again.format == weight.format
    assert_near(F.linear(x, again), exact(x, again), 2e-6)


@pytest.mark.parametrize(
    ("format", "group", "kind"),
    [("int8", None, "int8"), ("int4", 32, None), ("fp8_e4m3", None, "fp8_e4m3"), ("int8.static", None, "int8")],
    ids=str,
)
def test_columns_of_activations_are_multiplied_first(
    format: str, group: int | None, kind: str | None, tmp_path: Path
) -> None:
    """Factors that are powers of two round nothing, so that results are those of the product of ``x * factors``."""
    factors = torch.exp2(torch.randint(-4, 5, (96,)).float())
    row, scale = format.removesuffix(".static"), 0.03 if format.endswith(".static") else None
    plain = jitgen.quantize(torch.randn(40, 96), row, group, activation=kind, input_scale=scale)
    weight = plain.with_smoothing(factors)
    assert weight.format == f"{row}.smoothed{'.static' if scale else ''}"
    assert torch.equal(weight.dequantize(), plain.dequantize() * factors)
    x = torch.randn(7, 96) / factors
    linear = jitgen.jit(lambda x, w: F.linear(x, w))
    wanted = exact(x * factors, plain) if kind else x.double() @ weight.dequantize(torch.float64).T
    assert_near(linear(x, weight), wanted, 2e-6)
    assert_near(linear.reference(x, weight), wanted, 1e-5)
    assert_near(F.linear(x, weight), wanted, 2e-6)
    assert_near(x @ weight[8:24].T, wanted[:, 8:24], 2e-6)
    experts = jitgen.quantize(torch.randn(2, 16, 96), row, group, activation=kind, input_scale=scale)
    assert_near(
        torch.bmm(x.expand(2, -1, -1), experts.with_smoothing(factors).mT).flatten(0, 1),
        torch.bmm((x * factors).expand(2, -1, -1), experts.mT).flatten(0, 1).double(),
        2e-6,
    )
    index = torch.tensor([3, 39, 0])
    assert torch.equal(F.embedding(index, weight), weight.dequantize()[index])
    assert torch.equal(jitgen.jit(lambda i, w: F.embedding(i, w))(index, weight), weight.dequantize()[index])
    layer = nn.Linear(96, 40, bias=False).requires_grad_(False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    jitgen.save_quantized(layer, tmp_path / "layer.safetensors")
    loaded = jitgen.load_quantized(tmp_path / "layer.safetensors")["weight"]
    assert torch.equal(F.linear(x, loaded), F.linear(x, weight))
    x.requires_grad_(True)
    torch.autograd.backward(F.linear(x, weight).sum())
    assert torch.allclose(x.grad, weight.dequantize().sum(0).expand_as(x), rtol=1e-4, atol=1e-3)
    if group is not None:
        assert torch.equal(weight[:, 32:64].dequantize(), weight.dequantize()[:, 32:64])
    assert weight.with_smoothing(None).format == plain.format


def test_bad_factors_of_columns_are_refused() -> None:
    weight = jitgen.quantize(torch.randn(32, 64), "int8", activation="int8")
    for other in (torch.ones(32), 2.0):
        with pytest.raises(FormatError, match="a factor for each of 64 columns"):
            weight.with_smoothing(other)  # type: ignore[arg-type]
    for value in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(FormatError, match="factors"):
            weight.with_smoothing(torch.ones(64).index_fill(0, torch.tensor([5]), value))


def test_bad_scales_of_activations_are_refused() -> None:
    weight = torch.randn(32, 64)
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(FormatError, match="scale"):
            jitgen.quantize(weight, "int8", activation="int8", input_scale=scale)
    for several in (torch.ones(2), "1.0", 10**400):
        with pytest.raises(FormatError, match="one number"):
            jitgen.quantize(weight, "int8", activation="int8", input_scale=several)  # type: ignore[arg-type]
    with pytest.raises(FormatError, match="pass activation="):
        jitgen.quantize(weight, "int8", input_scale=0.1)
    with pytest.raises(FormatError, match="leaves activations as they are"):
        jitgen.quantize(weight, "int8").with_input_scale(0.1)
    with pytest.raises(FormatError, match="unknown activation"):
        jitgen.quantize(weight, "int8", activation=["int8"])  # type: ignore[arg-type]
    with pytest.raises(FormatError, match="no multiple of it"):
        jitgen.quantize(weight, "int8", activation="int8.block128")
    with pytest.raises(FormatError, match="a scale for each block"):
        jitgen.quantize(torch.randn(8, 128), "int8", activation="int8.block128", input_scale=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_any_activation_dtype(dtype: torch.dtype) -> None:
    """The product is not rounded before the bias and what is computed of it: their result is, once, to half an eps of
    its dtype. What comes before is float32, with sums of exact integers: 1e-5 of a row's largest magnitude."""
    weight = jitgen.quantize(torch.randn(40, 96), "int4", 32, activation="int8")
    x = torch.randn(2, 9, 96).to(dtype)
    bias = torch.randn(40).to(dtype)
    for epilogue in (lambda y: y, F.silu):
        found = jitgen.jit(lambda x, w, b, epilogue=epilogue: epilogue(F.linear(x, w, b)))(x, weight, bias)
        assert found.dtype == dtype
        wanted = epilogue(exact(x, weight) + bias.double())
        limit = torch.finfo(dtype).eps / 2 * wanted.abs() + 1e-5 * wanted.abs().amax(-1, keepdim=True)
        assert ((found.double() - wanted).abs() <= limit).all()


@pytest.mark.parametrize(("format", "kind"), [("int4", "int8.block128"), ("fp8_e4m3", "fp8_e4m3.block128")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
@pytest.mark.covering(1)
def test_blocks_of_any_activation_dtype(format: str, kind: str, dtype: torch.dtype) -> None:
    """Their sums are float32, as those of rows are."""
    weight = jitgen.quantize(torch.randn(40, 256), format, 64, activation=kind)
    x = torch.randn(3, 256).to(dtype)
    found = jitgen.jit(lambda x, w: F.silu(F.linear(x, w)))(x, weight)
    assert found.dtype == dtype
    # Of 16 bits, a product of a code and a scale is rounded too: 256 terms of 2^-11 of either sign.
    assert_near(found, F.silu(exact(x, weight)), 2e-6 if dtype == torch.float64 else 4e-3)


def test_special_rows() -> None:
    """A row with a number that is not finite is NaN, and others are as they were; a row of tiny numbers is not lost."""
    weight = jitgen.quantize(torch.randn(24, 64), "int8", activation="int8")
    x = torch.randn(6, 64)
    x[1, 3], x[2, 5], x[3, 7] = torch.nan, torch.inf, -torch.inf
    x[4] *= 1e-30
    found = jitgen.jit(lambda x, w: x @ w.T)(x, weight)
    assert found[1:4].isnan().all()
    kept = torch.tensor([0, 4, 5])
    assert_near(found[kept], exact(x[kept], weight), 2e-6)
    assert jitgen.jit(lambda x, w: F.linear(x, w))(torch.empty(0, 64), weight).shape == (0, 24)
    nothing = jitgen.quantize(torch.randn(5, 0), "int8", activation="int8")
    assert (jitgen.jit(lambda x, w: F.linear(x, w))(torch.empty(3, 0), nothing) == 0).all()


def test_a_norm_two_weights_and_a_product_are_two_kernels() -> None:
    """The activation is quantised once, by the kernel of what is before it."""
    k = 256
    gate, up = (jitgen.quantize(torch.randn(n, k), "int4", 64, activation="int8") for n in (48, 48))

    @jitgen.jit
    def mlp(x: torch.Tensor, norm: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        h = F.rms_norm(x, (k,), norm)
        return F.silu(F.linear(h, gate)) * F.linear(h, up)

    x, norm = torch.randn(5, k), torch.rand(k) + 0.5
    low = mlp.lower(x, norm, gate, up)
    assert len(low.kernels) == 2
    assert "times codes of int8" in low.explain()
    h = F.rms_norm(x.double(), (k,), norm.double()).float()
    wanted = F.silu(exact(h, gate)) * exact(h, up)
    assert (mlp(x, norm, gate, up) - wanted).norm() <= 2e-3 * wanted.norm()


def test_gradients_pass_straight_through() -> None:
    weight = jitgen.quantize(torch.randn(24, 64), "uint4", 32, activation="int8")
    x = torch.randn(5, 64, requires_grad=True)
    seed = torch.randn(5, 24)
    for function in (jitgen.jit(lambda x, w: F.linear(x, w)), lambda x, w: F.linear(x, w)):
        x.grad = None
        found = function(x, weight)
        assert_near(found.detach(), exact(x.detach(), weight), 2e-6)
        found.backward(seed)
        torch.testing.assert_close(x.grad, seed @ weight.dequantize(), rtol=1e-4, atol=1e-4)


def small_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)).requires_grad_(False)


def test_a_model_keeps_it_in_files_copies_and_compiled_code(tmp_path: Path) -> None:
    model = small_model()
    report = jitgen.quantize_(model, "int4", 32, activation="int8")
    assert [layer.activation for layer in report.layers] == ["int8", "int8"]
    assert "activations int8" in str(report)
    x = torch.randn(3, 64)
    wanted = model(x)
    first = exact(x, model[0].weight) + model[0].bias
    assert_near(wanted, exact(first.relu().float(), model[2].weight) + model[2].bias, 1e-2)

    jitgen.save_quantized(model, tmp_path / "model.safetensors")
    loaded = small_model()
    loaded.load_state_dict(jitgen.load_quantized(tmp_path / "model.safetensors"), assign=True)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    unpickled = small_model()
    unpickled.load_state_dict(torch.load(buffer, weights_only=True), assign=True)
    for other in (loaded, unpickled, copy.deepcopy(model), torch.compile(model, backend="eager")):
        assert torch.equal(other(x), wanted)
    assert "activation='int8'" in repr(loaded[0].weight)
    torch.testing.assert_close(torch.compile(model, backend="jitgen")(x), wanted)


def test_patterns_choose_activations() -> None:
    model = small_model()
    report = jitgen.quantize_(model, {"0": "int4", "*": "nf4"}, 32, activation={"0": "int8", "none": "int8"})
    assert [(layer.format, layer.activation) for layer in report.layers] == [("int4", "int8"), ("nf4", None)]
    assert report.unmatched == ("none",)
    model = small_model()
    with pytest.raises(FormatError, match="int8, int4 or uint4"):
        jitgen.quantize_(model, {"0": "int4", "*": "nf4"}, 32, activation="int8")
    assert type(model[0].weight) is nn.Parameter


def test_a_weight_without_it_is_another_view() -> None:
    weight = jitgen.quantize(torch.randn(24, 64), "int8", activation="int8")
    plain = weight.with_activation(None)
    assert (weight.activation, plain.activation) == ("int8", None)
    x = torch.randn(4, 64)
    dense = x.double() @ weight.dequantize(torch.float64).T
    linear = jitgen.jit(lambda x, w: F.linear(x, w))
    assert_near(linear(x, plain), dense, 2e-6)
    assert_near(linear(x, weight), exact(x, weight), 2e-6)
    assert not torch.equal(linear(x, plain), linear(x, weight))
    assert_near(F.linear(x, weight[8:16]), exact(x, weight)[:, 8:16], 2e-6)


def test_specs_and_manifests_have_it(tmp_path: Path) -> None:
    spec = jitgen.TensorSpec((48, 64), torch.float32, format="int4", group_size=32, activation="int8")
    linear = jitgen.jit(lambda x, w: F.linear(x, w))
    low = linear.lower(jitgen.TensorSpec(("M", 64), torch.float32), spec, target="x86-64-v3")
    assert "times codes of int8" in low.explain()
    weight = jitgen.quantize(torch.randn(48, 64), "int4", 32, activation="int8")
    with jitgen.record(tmp_path / "specs.json"):
        linear(torch.randn(4, 64), weight)
    assert jitgen.prewarm(tmp_path / "specs.json", targets=["cpu"], jobs=1)


def test_what_has_no_kernel_is_refused() -> None:
    weight = torch.randn(32, 64)
    for format, activation, words in (
        ("int4", "int7", "unknown activation 'int7'"),
        ("nf4", "int8", "int8, int4 or uint4"),
        ("uint8", "int8", "int8, int4 or uint4"),
        ("int8", "fp8_e4m3", "fp8_e4m3, int4 or uint4"),
        ("uint4.floatzeros", "fp8_e4m3", "fp8_e4m3, int4 or uint4"),
    ):
        with pytest.raises(FormatError, match=words):
            jitgen.quantize(weight, format, 32, activation=activation)
    with pytest.raises(FormatError, match="without a format"):
        jitgen.TensorSpec((32, 64), torch.float32, activation="int8")


@pytest.mark.parametrize(
    ("format", "group", "kind", "says"),
    [
        ("int8", None, "int8", "products of int8 codes summed in int32"),
        ("fp8_e4m3.tensor", None, "fp8_e4m3", "products of float8_e4m3fn codes summed in float32"),
        ("int4", 32, "int8", "int4 with groups of 32, times codes of int8"),
        ("int8", 32, "int8", "temporary bfloat16[s0_0, 128]"),
        ("int4", 32, "fp8_e4m3.block128", "temporary bfloat16[s0_0, 128]"),
        ("fp8_e4m3.rows128", 128, "fp8_e4m3.block128", "for each block of 128 of K"),
    ],
)
def test_what_cuda_multiplies_is_said(format: str, group: int | None, kind: str, says: str) -> None:
    """Codes where its mainloops have them, and otherwise what they are in 16 bits."""
    spec = jitgen.TensorSpec((48, 128), torch.bfloat16, format=format, group_size=group, activation=kind)
    x = jitgen.TensorSpec(("M", 128), torch.bfloat16)
    assert says in jitgen.jit(lambda x, w: F.linear(x, w)).lower(x, spec, target="sm_90a", backend="cuda").explain()


# ------------------------------------------------------------------------ sums of four bytes, on any processor

CODES = """
#include <jitgen/gemm.hpp>
namespace {
struct Activation {
  using Storage = int8_t;
  const int8_t* from;
  int64_t k;
  void fill(int64_t m, int64_t at, int64_t count, Storage* to) const {
    for (int64_t i = 0; i < count; ++i) to[i] = from[m * k + at + i];
  }
};
struct Region {
  jitgen::gemm::Quantised<%(bits)s, %(group)s, %(zeroed)s, %(scale)s> w;
  float* to;
  int64_t n;
  int64_t columns() const { return n; }
  template <class Function>
  void each(const Function& function) const { function(0, w); }
  void epilogue(int64_t m, int64_t first, int64_t count, const float* sums, int64_t) const {
    for (int64_t j = 0; j < count; ++j) to[m * n + first + j] = sums[j];
  }
};
}
extern "C" void product(const int8_t* x, const uint8_t* codes, const %(scale)s* scales, const uint8_t* zeros, float* to,
                        int64_t m, int64_t n, int64_t k) {
  jitgen::gemm::multiply<jitgen::gemm::CodeBytes<%(bits)s, %(zeroed)s, jitgen::Ints>>(
      Activation{x, k}, m, k, 2, Region{{codes, scales, zeros, k}, to, n});
}
"""


@pytest.mark.parametrize(("format", "group"), [*FORMATS, ("int8", 96)], ids=str)
@pytest.mark.quick(where=lambda format, group: (format, group) in (("int8", None), ("uint4", 128)))
def test_sums_of_four_bytes(format: str, group: int | None, tmp_path: Path) -> None:
    """The tiles of VPDPBUSD, with the instruction written out for processors without it."""
    facts = {"bits": format[-1], "group": group or 0, "zeroed": str(format == "uint4").lower()}
    scale = "float" if format == "int8" else "jitgen::bfloat16"
    text = CODES % (facts | {"scale": scale})
    headers = environment.headers(environment.family_folder("gemm"), text)
    artifact = host.compile(KernelSource("kernel", "cpp", "host", Target("cpu", "x86-64-v2"), text, headers))
    (tmp_path / artifact.binary).write_bytes(artifact.files[artifact.binary])
    product: Any = cpu.load(str(tmp_path / artifact.binary), "product", "PPPPPqqq")
    for m, k, n in [*SIZES, (3, 4200, 17)]:
        weight = jitgen.quantize(torch.randn(n, k), format, group, layout="cpu")
        x = torch.randint(-128, 128, (m, k), dtype=torch.int8)
        found = torch.full((m, n), -1.0)
        codes, scales, *zeros = weight.tensors
        product(
            x.data_ptr(),
            codes.data_ptr(),
            scales.data_ptr(),
            zeros[0].data_ptr() if zeros else 0,
            found.data_ptr(),
            m,
            n,
            k,
        )
        assert_near(found, x.double() @ weight.dequantize(torch.float64).T, 2e-6)


@pytest.mark.parametrize(("backend", "target"), [("cuda", "sm_90a"), ("triton", "sm_90a"), ("cpp", "x86-64-v3")])
@pytest.mark.parametrize("kind", ["int8", "fp8_e4m3"])
def test_products_store_codes_for_the_next(backend: str, target: str, kind: str) -> None:
    """A norm with codes of its rows, SwiGLU with codes by a static scale, and the product of these: three kernels."""

    def block(x: torch.Tensor, gain: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(F.rms_norm(x, (64,), gain), gate_up).chunk(2, -1)
        return F.linear(F.silu(gate) * up, down)

    gate_up, down = (jitgen.quantize(torch.randn(n, k), kind, activation=kind) for n, k in ((192, 64), (64, 96)))
    x, gain = (jitgen.TensorSpec(shape, torch.bfloat16) for shape in ((33, 64), (64,)))
    for first in (gate_up, gate_up.with_input_scale(0.05)):
        arguments = x, gain, first, down.with_input_scale(0.02)
        assert len(jitgen.jit(block).lower(*arguments, backend=backend, target=target).kernels) == 3


@pytest.mark.parametrize(("backend", "target"), [("cuda", "sm_90a"), ("triton", "sm_90a"), ("cpp", "x86-64-v3")])
@pytest.mark.parametrize(
    ("format", "group", "kind"),
    [("fp8_e4m3.rows128", 128, "fp8_e4m3.block128"), ("int4", 128, "int8.block128"), ("mxfp8", None, "mxfp8")],
)
def test_blocks_are_quantised_in_one_pass(backend: str, target: str, format: str, group: int | None, kind: str) -> None:
    """The norm is one kernel, the products of SwiGLU are another, and each quantisation is, of which no temporary is as
    wide as float32; but what is quantised in the kernel of a norm, or of a product."""

    def block(x: torch.Tensor, gain: torch.Tensor, gate: Any, up: Any, down: Any) -> torch.Tensor:
        x = F.rms_norm(x, (256,), gain)
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    shapes = (384, 256), (384, 256), (256, 384)
    weights = [jitgen.quantize(torch.randn(shape), format, group, activation=kind) for shape in shapes]
    x, gain = (jitgen.TensorSpec(shape, torch.bfloat16) for shape in ((33, 256), (256,)))
    low = jitgen.jit(block).lower(x, gain, *weights, backend=backend, target=target)
    families = [kernel.family for kernel in low.lowered.program.kernels]
    rows = 1 if format.endswith(".rows128") and backend == "cuda" else 3
    assert (families.count("reduction"), families.count("gemm"), len(families)) == (rows, 2, rows + 2)
    wide = [buffer for buffer in low.lowered.program.temporaries if buffer.dtype == "float32"]
    assert all(buffer.shape[-1] < 32 for buffer in wide)  # scales


@pytest.mark.parametrize("kind", ["int8.block128", "mxfp8"])
@pytest.mark.parametrize("rows", [1, 7, 130])
def test_codes_in_blocks_are_returned_by_one_kernel(kind: str, rows: int) -> None:
    """Codes of the shape of what is quantised, whose rows are longer than those of the kernel, and scales."""

    def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales = activations.scales_of(x, activations.ACTIVATIONS[kind])
        return activations.codes_of(x, scales, activations.ACTIVATIONS[kind]), scales

    function = jitgen.jit(quantise)
    for x in (torch.randn(rows, 384), torch.randn(2, rows, 768)[..., ::2]):
        codes, scales = function(x)
        expected, expected_scales = quantise(x)
        assert torch.equal(scales, expected_scales)
        assert torch.equal(codes.float(), expected.float())
        assert len(function.lower(x).kernels) == 1


@pytest.mark.parametrize(("backend", "target"), [("cuda", "sm_90a"), ("triton", "sm_90a")])
@pytest.mark.parametrize("kind", ["int8", "fp8_e4m3", "fp8_e4m3.block128"])
def test_what_comes_before_is_quantised_with_it(backend: str, target: str, kind: str) -> None:
    """SwiGLU, a sum, and attention, whose heads are one row, are followed by one kernel of codes and scales, which the
    products share. In CUDA a norm is that kernel."""
    format, group = ("fp8_e4m3.rows128", 128) if kind.endswith("128") else (kind, None)

    def linear(h: torch.Tensor, a: Any, b: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return F.linear(h, a), F.linear(h, b)

    x, heads = (jitgen.TensorSpec(shape, torch.bfloat16) for shape in ((33, 256), (1, 2, 33, 128)))
    attention = F.scaled_dot_product_attention
    cases: list[tuple[Callable[..., Any], int, int]] = [
        (lambda x, h, a, b: linear(F.rms_norm(x, (256,)), a, b), 1 if group is None or backend == "cuda" else 2, 0),
        (lambda x, h, a, b: linear(F.silu(x) * x, a, b), 1, 0),
        (lambda x, h, a, b: linear(x + 1, a, b), 1, 0),
        (lambda x, h, a, b: linear(attention(h, h, h).transpose(1, 2).flatten(-2), a, b), 1, 1),
    ]
    weights = [
        jitgen.TensorSpec((n, 256), torch.bfloat16, format=format, group_size=group, activation=kind)
        for n in (384, 128)
    ]
    for function, rows, others in cases:
        low = jitgen.jit(function).lower(x, heads, *weights, backend=backend, target=target)
        families = [kernel.family for kernel in low.lowered.program.kernels]
        assert families.count("reduction") == rows
        assert len(families) == others + rows + families.count("gemm")


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_no_kernel_stores_what_nothing_reads(format: str, target: str) -> None:
    """The sum of a norm's row and the scale of a row, which several kernels were to read, are computed where they are
    read."""
    x, gain = torch.randn(8, 256).bfloat16(), torch.rand(256).bfloat16()
    weight = jitgen.quantize(torch.randn(64, 256), format, activation="int8")
    low = jitgen.jit(lambda x, gain, w: F.linear(F.rms_norm(x, (256,), gain), w)).lower(
        x, gain, weight, target=target, backend="cuda"
    )
    assert "read by" in low.explain()
    assert "read by none" not in low.explain()
