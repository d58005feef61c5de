"""Products of codes in Triton against float64 products of the codes, under Triton's interpreter on CPU tensors.

``tests/unit/test_codes_triton.py`` runs them, as ``tests/interpreter.py`` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

import jitgen
from jitgen.families.gemm import low_bit_products
from jitgen.families.gemm.mainloops import TritonSchedule, TritonSlices, TritonTokens, TritonWeights
from jitgen.quant.activations import ACTIVATIONS, codes_of, scales_of
from tests.interpreter import Check, serve
from tests.triton_matmuls import tiled

CHECKS: dict[str, Check] = {}
SIZES = ((1, 32, 16), (9, 256, 40), (70, 288, 33))
"""M, K and N."""
WEIGHTS = (
    *(
        ("int8", None, "int8"),
        ("int8", 64, "int8"),
        ("int4", 32, "int8"),
        ("uint4", None, "int8"),
        ("int3", 32, "int8"),
        ("int2", 48, "int8"),
    ),
    *(("fp8_e4m3", None, "fp8_e4m3"), ("fp8_e4m3.tensor", None, "fp8_e4m3"), ("fp8_e4m3.rows128", 128, "fp8_e4m3")),
    *(("int4", 64, "fp8_e4m3"), ("uint4", 32, "fp8_e4m3"), ("mxfp4", None, "fp8_e4m3"), ("mxfp8", None, "fp8_e4m3")),
    *(("mxfp8", None, "mxfp8"), ("nvfp4", None, "fp8_e4m3"), ("fp8_e4m3.rows128", 128, "fp8_e4m3.block128")),
    ("int8.rows128", 128, "int8.block128"),
)
TILES = {
    "tokens": TritonTokens(32, 32, 32, 4, 3, raster=2),
    "weights": TritonWeights(32, 64, 32, 4, 3, raster=2),
    "slices": TritonSlices(16, 16, 32, 4, 3),
    "decoded": TritonTokens(32, 32, 32, 4, 3, decoded=True),
}


def exact(x: torch.Tensor, weight: Any) -> torch.Tensor:
    """The product of the codes, in float64."""
    kind = ACTIVATIONS[weight.activation]
    scales = scales_of(x, kind) if weight.input_scale is None else weight.input_scale.reshape(1)
    values = codes_of(x, scales, kind, weight.input_scale is not None).double()
    if kind.block:
        values = (values.unflatten(-1, (-1, kind.block)) * scales.double().unsqueeze(-1)).flatten(-2)
    else:
        values = values * scales.double()
    return values @ weight.dequantize(torch.float64).T


def wrong(got: torch.Tensor, want: torch.Tensor, relative: float, *facts: Any) -> str | None:
    """A sentence where results differ by more than ``relative`` of a row's largest magnitude."""
    error = ((got.double() - want).abs() / want.abs().amax(-1, keepdim=True).clamp(min=1e-30)).max().item()
    return None if error <= relative else f"{' '.join(map(str, facts))}: off by {error:.2g}"


def linear(x: torch.Tensor, weight: Any) -> torch.Tensor:
    return F.linear(x, weight)


def _weights(format: str, group: int | None, kind: str) -> Iterator[str | None]:
    function = jitgen.jit(linear, backend="triton")
    for m, k, n in SIZES:
        columns = k if ".block" not in kind else 256  # K of all sizes is a multiple of 32, the blocks of "mxfp8"
        weight = jitgen.quantize(torch.randn(n, columns), format, group, activation=kind)
        x = torch.randn(m, columns) * torch.logspace(-2, 2, m)[:, None]
        yield wrong(function(x, weight), exact(x, weight), 2e-6, m, k, n)
        if ACTIVATIONS[kind].block is None:
            static = weight.with_input_scale(float(x.abs().max()) / 100)
            yield wrong(function(x, static), exact(x, static), 2e-6, m, k, n, "static")


for _format, _group, _kind in WEIGHTS:
    CHECKS[f"{_format}-{_group}-{_kind}"] = partial(_weights, _format, _group, _kind)


def _dense(form: str, tile: TritonSchedule) -> Iterator[str | None]:
    """Formulas: int8 sums are exact, and so are those of 8-bit floats whose products are few."""
    scaled: Callable[..., Any] = lambda q, p, s, t: torch.relu((q.float() @ p.float().T) * s * t + 1)  # noqa: E731
    for m, k, n in SIZES:
        for order in ("rows", "columns"):
            for dtype in (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2):
                if dtype == torch.int8 and tile.decoded:
                    continue
                q, p = (torch.randint(-127, 128, (size, k)).float() for size in (m, n))
                q, p = (v.to(torch.int8) if dtype == torch.int8 else (v / 16).to(dtype) for v in (q, p))
                p = p.T.contiguous().T if order == "columns" else p
                s, t = torch.rand(m, 1), torch.rand(n)
                function = jitgen.jit(scaled, backend="triton")
                if "a product of codes" not in function.lower(q, p, s, t, target="interpreter").explain():
                    yield f"{dtype}: no product of codes"
                with tiled(tile):
                    got = function(q, p, s, t)
                want = torch.relu((q.double() @ p.double().T) * s.double() * t.double() + 1)
                yield wrong(got, want, 1e-6, form, m, k, n, order, dtype)


for _form, _tile in TILES.items():
    CHECKS[f"formula-{_form}"] = partial(_dense, _form, _tile)


def _blocks() -> Iterator[str | None]:
    """Formulas with scales of blocks of both operands, or of one; each is one kernel."""

    def both(q: torch.Tensor, s: torch.Tensor, p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        x = (q.to(s.dtype).unflatten(-1, (-1, 128)) * s.unsqueeze(-1)).flatten(-2)
        w = p.to(s.dtype).view(p.shape[0] // 128, 128, p.shape[1] // 128, 128) * t[:, None, :, None]
        return torch.relu(x @ w.view(p.shape).T + 1)

    def one(q: torch.Tensor, s: torch.Tensor, p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return (q.to(s.dtype).unflatten(-1, (-1, 128)) * s.unsqueeze(-1)).flatten(-2) @ p.to(s.dtype).T

    for function in (both, one):
        for m, k, n in ((1, 256, 128), (5, 128, 256), (40, 384, 128), (200, 256, 256)):
            for dtype in (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2):
                q, p = (torch.randint(-127, 128, (size, k)) for size in (m, n))
                q, p = (v.to(torch.int8) if dtype == torch.int8 else (v / 16).to(dtype) for v in (q, p))
                s, t = torch.rand(m, k // 128) + 0.1, torch.rand(n // 128, k // 128) + 0.1
                generated = jitgen.jit(function, backend="triton")
                low = generated.lower(q, s, p, t, target="interpreter")
                if len(low.kernels) != 1 or "for each block of 128 of K" not in low.explain():
                    yield f"{dtype}: no product of blocks"
                want = function(q, s.double(), p, t.double())
                yield wrong(generated(q, s, p, t), want, 2e-6, function.__name__, m, k, n, dtype)


CHECKS["blocks"] = _blocks


def _scaled_mm() -> Iterator[str | None]:
    for rowwise in (False, True):
        a, b, bias = torch.randn(5, 64), torch.randn(48, 64), torch.randn(48).bfloat16()
        a, b = (value.to(torch.float8_e4m3fn) for value in (a, b))
        s, t = (torch.rand(5, 1), torch.rand(1, 48)) if rowwise else (torch.tensor(0.5), torch.tensor(3.0))
        function = jitgen.jit(
            lambda a, b, s, t, bias: torch._scaled_mm(a, b.T, s, t, bias=bias, out_dtype=torch.bfloat16),
            backend="triton",
        )
        yield wrong(function(a, b, s, t, bias), (a.double() @ b.double().T) * s * t + bias.double(), 8e-3, rowwise)


CHECKS["scaled_mm"] = _scaled_mm


def _chain() -> Iterator[str | None]:
    """A norm, two weights of int8 and SwiGLU, whose result a static scale quantises for the next: three kernels."""
    k, n = 256, 96
    gate, up = (jitgen.quantize(torch.randn(n, k) / 16, "int8", activation="int8") for _ in range(2))
    down = jitgen.quantize(torch.randn(k, n) / 10, "int8", activation="int8", input_scale=0.02)

    def mlp(x: torch.Tensor, norm: torch.Tensor, gate: Any, up: Any, down: Any) -> torch.Tensor:
        h = F.rms_norm(x, (k,), norm, 1e-5)
        return F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)

    function = jitgen.jit(mlp, backend="triton")
    x, norm = torch.randn(5, k), torch.rand(k) + 0.5
    low = function.lower(x, norm, gate, up, down, target="interpreter")
    if len(low.kernels) != 3:
        yield f"{len(low.kernels)} kernels: {low.explain()}"
    h = F.rms_norm(x, (k,), norm, 1e-5)
    want = exact((F.silu(exact(h, gate)) * exact(h, up)).float(), down)
    got = function(x, norm, gate, up, down)
    yield None if (got - want).norm() <= 1e-2 * want.norm() else f"off by {(got - want).norm() / want.norm()}"


CHECKS["chain"] = _chain


def _two_of_blocks() -> Iterator[str | None]:
    """Two weights with scales of blocks of their own: their products are one kernel."""
    gate, up = (
        jitgen.quantize(torch.randn(256, 384) / 16, "fp8_e4m3.rows128", 128, activation="fp8_e4m3.block128")
        for _ in range(2)
    )
    function = jitgen.jit(lambda x, gate, up: F.silu(F.linear(x, gate)) * F.linear(x, up), backend="triton")
    for rows in (1, 5, 70):
        x = torch.randn(rows, 384)
        low = function.lower(x, gate, up, target="interpreter")
        if len(low.kernels) != 2:
            yield f"{len(low.kernels)} kernels: {low.explain()}"
        want = F.silu(exact(x, gate)) * exact(x, up)
        yield wrong(function(x, gate, up), want, 1e-5, rows)


CHECKS["two of blocks"] = _two_of_blocks


def _scaled() -> Iterator[str | None]:
    """Codes with scales of 32 columns of both operands by ``tl.dot_scaled``, as on targets that have it: in tiles of
    few and of many rows, a K that no step divides, rows of a weight, SwiGLU, and a NaN, which spoils its row alone."""
    functions: dict[str, Callable[..., Any]] = {
        "linear": lambda x, gate, up: F.linear(x, up),
        "rows": lambda x, gate, up: F.linear(x, up[16:48]) + 1,
        "swiglu": lambda x, gate, up: F.silu(F.linear(x, gate)) * F.linear(x, up),
    }
    wanted: dict[str, Callable[..., torch.Tensor]] = {
        "linear": lambda x, gate, up: exact(x, up),
        "rows": lambda x, gate, up: exact(x, up)[..., 16:48] + 1,
        "swiglu": lambda x, gate, up: F.silu(exact(x, gate)) * exact(x, up),
    }
    with mock.patch.object(low_bit_products, "scaled_formats", return_value=("mxfp8", "mxfp4")):
        for format in ("mxfp8", "mxfp4"):
            for shape, k in (((1,), 32), ((20,), 416), ((2, 35), 256), ((130,), 160)):
                gate, up = (jitgen.quantize(torch.randn(49, k), format, activation="mxfp8") for _ in range(2))
                x = torch.randn(*shape, k) * torch.logspace(-2, 2, shape[-1])[:, None]
                x[..., shape[-1] // 2, 0] *= 1 if k > 400 else torch.nan
                for name, function in functions.items():
                    scaled = jitgen.jit(function, backend="triton")
                    if "by tl.dot_scaled" not in scaled.lower(x, gate, up, target="interpreter").explain():
                        yield f"{format} {name}: no product of scaled codes"
                    got, want = scaled(x, gate, up), wanted[name](x, gate, up)
                    yield None if torch.equal(got.isnan(), want.isnan()) else f"{format} {name} {shape}: NaN elsewhere"
                    yield wrong(got.nan_to_num(), want.nan_to_num(), 2e-6, format, name, shape, k)


CHECKS["scaled"] = _scaled

if __name__ == "__main__":
    serve(CHECKS)
