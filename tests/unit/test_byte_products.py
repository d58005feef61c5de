"""Products of integers of 8 and 16 bits on the CPU, to the bit: no sum saturates, at any size and stride."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from cpp_harness import TYPES

import jitgen
from jitgen.codegen import environment
from jitgen.compilers import host
from jitgen.quant.formats import find
from jitgen.runtime import cpu
from jitgen.spec import KernelSource, Target, runs_here

LEVELS = [level for level in ("x86-64-v2", "x86-64-v3", "x86-64-v4") if runs_here(Target.parse(level))]
SIZES = [(1, 1, 1), (1, 301, 65), (2, 5, 33), (7, 63, 130), (9, 64, 16), (26, 1031, 100), (250, 130, 20), (5, 0, 40)]
"""M, K and N: with a single row, few and many of them, K that no vector divides, and no terms."""
PLANES = [("int2", 16), ("int5", None), ("int6", 48), ("int7", 64), ("int8.bfloat16", None), ("int1", None)]


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """The data of a test depends on its name alone."""
    random.seed(request.node.name)
    torch.manual_seed(random.getrandbits(32))


def matrix(rows: int, columns: int, dtype: torch.dtype, order: str = "k") -> torch.Tensor:
    """Random integers, of which half are the least and the largest, in memory along K, along the rows or with gaps."""
    limits = torch.iinfo(dtype)
    values = torch.randint(limits.min, limits.max + 1, (rows, columns), dtype=dtype)
    extremes = torch.tensor([limits.min, limits.max], dtype=dtype)[torch.randint(2, (rows, columns))]
    values = torch.where(torch.rand(rows, columns) < 0.5, values, extremes)
    if order == "outer":
        return values.T.contiguous().T
    if order == "gaps":
        return torch.empty(rows, 2, columns, 3, dtype=dtype)[:, 0, :, 1].copy_(values)
    return values


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("order", ["k", "outer", "gaps"])
@pytest.mark.quick(where=lambda level, order: level == "x86-64-v3")
def test_int8_products_are_exact(level: str, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITGEN_CPU_TARGET", level)
    function = jitgen.jit(lambda a, b: torch._int_mm(a, b.T))
    for m, k, n in SIZES:
        a, b = matrix(m, k, torch.int8, order), matrix(n, k, torch.int8, order)
        found = function(a, b)
        assert found.dtype == torch.int32
        assert torch.equal(found.long(), a.long() @ b.long().T), (m, k, n)


def test_sums_of_extremes_do_not_saturate() -> None:
    function = jitgen.jit(torch._int_mm)
    for m in (1, 3, 40):
        for left in (-128, 127):
            for right in (-128, 127):
                a, b = (
                    torch.full(shape, value, dtype=torch.int8)
                    for shape, value in (((m, 4099), left), ((4099, 18), right))
                )
                assert (function(a, b) == 4099 * left * right).all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16], ids=str)
def test_other_small_integers_wrap_around(dtype: torch.dtype) -> None:
    function = jitgen.jit(lambda a, b: a @ b.T)
    for m, k, n in SIZES:
        a, b = matrix(m, k, dtype), matrix(n, k, dtype, random.choice(["k", "outer", "gaps"]))
        assert torch.equal(function(a, b), (a.long() @ b.long().T).to(dtype)), (m, k, n)


def test_epilogues_prologues_and_batches() -> None:
    scaled = jitgen.jit(lambda a, b, s, t: torch.relu(torch._int_mm(a.clamp(-100, 100), b.T) * s * t - 3))
    batched = jitgen.jit(lambda a, b: torch.bmm(a, b.mT))
    for m, k, n in SIZES:
        a, b, s, t = matrix(m, k, torch.int8), matrix(n, k, torch.int8), torch.rand(m, 1), torch.rand(n)
        exact = (a.long().clamp(-100, 100) @ b.long().T).double() * s * t - 3
        torch.testing.assert_close(scaled(a, b, s, t).double(), exact.relu(), rtol=1e-5, atol=1e-5)
        a, b = a.expand(3, m, k) + torch.arange(3, dtype=torch.int8)[:, None, None], b.expand(3, n, k)
        assert torch.equal(batched(a, b), (a.long() @ b.long().mT).to(torch.int8))


def test_a_processor_with_products_of_bytes_is_asked() -> None:
    """Operands of bytes of which one is signed have a copy of the mainloop for VPDPBUSD; others have none."""
    product = jitgen.jit(lambda a, b: a @ b.T)
    for dtype, quads in ((torch.int8, True), (torch.uint8, False), (torch.int16, False)):
        specs = jitgen.TensorSpec(("M", 64), dtype), jitgen.TensorSpec((48, 64), dtype)
        source = product.lower(*specs, target="x86-64-v4").source
        assert ("jitgen::has_byte_dot()" in source) == quads
        assert ("jitgen::has_byte_matrices()" in source) == quads


@pytest.mark.parametrize("dtypes", [(torch.int8, torch.int8), (torch.uint8, torch.int8), (torch.int8, torch.uint8)])
def test_matrix_registers_have_the_sums_of_vectors(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """Many rows of bytes are multiplied by matrix registers where the processor has such, few rows never are."""
    product = jitgen.jit(lambda a, b: a.int() @ b.int().T)
    for m, k, n in ((16, 64, 16), (33, 1029, 17), (31, 3, 130), (241, 130, 33)):
        a, b = (matrix(rows, k, dtype) for rows, dtype in zip((m, n), dtypes, strict=True))
        assert torch.equal(product(a, b).long(), a.long() @ b.long().T), (m, k, n)


@pytest.mark.parametrize(("m", "k", "n"), [(17, 65, 40), (49, 2100, 31)])
@pytest.mark.parametrize(
    ("format", "group"), [("int8", None), ("int4", 64), ("uint4", 128), ("int4", None), ("int3", 64), ("uint2", 128)]
)
@pytest.mark.covering(1)
def test_matrix_registers_have_the_bits_of_vectors(format: str, group: int | None, m: int, k: int, n: int) -> None:
    linear = jitgen.jit(torch.nn.functional.linear)
    x, weight = torch.randn(m, k), jitgen.quantize(torch.randn(n, k), format, group, activation="int8")
    assert torch.equal(linear(x, weight), torch.cat([linear(rows, weight) for rows in x.split(7)]))


@pytest.mark.parametrize("level", [level for level in LEVELS if level > "x86-64-v2"])
@pytest.mark.parametrize(
    ("format", "group"), [("int8", None), ("int8", 32), ("int4", 64), ("int4", None), ("int3", 64), *PLANES]
)
@pytest.mark.quick(where=lambda level, format, group: level == "x86-64-v3" and (format, group) not in PLANES)
@pytest.mark.covering(1)
def test_a_level_alone_has_exact_sums_of_codes(
    level: str, format: str, group: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VPMADDUBSW saturates nowhere: neither where all neighbours are large, of one sign or both, nor where few are."""
    linear, largest = jitgen.jit(torch.nn.functional.linear), min(-int(find(format).low), int(find(format).high))
    cases = []
    for m, k, n in ((1, 960, 33), (7, 700, 16), (26, 3, 40), (13, 2117, 20)):
        codes = (torch.randn(m, k) * 40).round().clamp(-127, 127)
        x = torch.cat([codes, matrix(m, k, torch.int8).float().clamp(-127, 127), torch.full((2, k), 127.0)])
        x[:, 0], x[-1] = 127, -127  # which makes the scale 1
        w = torch.randint(-largest, largest + 1, (n, k)).float()
        w[0], w[1] = largest, -largest
        w[:, :: group or k] = largest
        cases.append((x, jitgen.quantize(w, format, group, method="absmax", activation="int8")))
    wanted = [linear(*case) for case in cases]
    monkeypatch.setenv("JITGEN_CPU_TARGET", level)
    monkeypatch.setenv("JITGEN_CXXFLAGS", "-O0 -DJITGEN_LEVEL_ALONE")
    alone = jitgen.jit(torch.nn.functional.linear)
    for (x, weight), bits in zip(cases, wanted, strict=True):
        found, exact = alone(x, weight), x.double() @ weight.dequantize(torch.float64).T
        if x.shape[1] <= 960:  # whose sums are below 2^24
            assert torch.equal(found.double(), exact)
        # Exact sums of a group are added in float32, and rounded once for each group.
        groups = -(-x.shape[1] // group) if group else 1
        sums = (x.abs().double() @ weight.dequantize(torch.float64).abs().T).max()
        assert (found.double() - exact).abs().max() <= groups * torch.finfo(torch.float32).eps / 2 * sums
        assert torch.equal(found, bits), "the bits of other arithmetics"


# ---------------------------------------------------------------------------- sums of four bytes, on any processor

QUADS = """
#include <jitgen/gemm.hpp>
namespace {
struct Activation {
  using Storage = %(x)s;
  const %(x)s* from;
  int64_t k;
  void fill(int64_t m, int64_t at, int64_t count, Storage* to) const {
    for (int64_t i = 0; i < count; ++i) to[i] = from[m * k + at + i];
  }
};
struct Region {
  jitgen::gemm::Dense<%(w)s, jitgen::gemm::Along::%(along)s> w;
  int32_t* to;
  int64_t columns() const { return w.n; }
  template <class Function>
  void each(const Function& function) const { function(0, w); }
  void epilogue(int64_t m, int64_t first, int64_t count, const int32_t* sums, int64_t) const {
    for (int64_t j = 0; j < count; ++j) to[m * w.n + first + j] = sums[j];
  }
};
}
extern "C" void product(const %(x)s* x, const %(w)s* w, int32_t* to, int64_t m, int64_t n, int64_t k,
                        int64_t stride_n, int64_t stride_k) {
  jitgen::gemm::multiply<jitgen::gemm::%(compute)s>(Activation{x, k}, m, k, 2,
                                                     Region{{w, n, k, stride_n, stride_k}, to});
}
"""


@pytest.mark.parametrize("signs", [(True, True), (False, True), (True, False)], ids=str)
@pytest.mark.parametrize("order", ["k", "outer", "gaps"])
@pytest.mark.quick(where=lambda signs, order: signs == (True, True))
def test_sums_of_four_bytes(signs: tuple[bool, bool], order: str, tmp_path: Path) -> None:
    """The mainloop of VPDPBUSD, with the instruction written out for processors without it."""
    x_dtype, w_dtype = (torch.int8 if signed else torch.uint8 for signed in signs)
    along = {"k": "k", "outer": "n", "gaps": "neither"}[order]
    compute = f"Quads<{str(signs[0]).lower()}, {str(signs[1]).lower()}>"
    text = QUADS % {"x": TYPES[x_dtype], "w": TYPES[w_dtype], "along": along, "compute": compute}
    headers = environment.headers(environment.family_folder("gemm"), text)
    artifact = host.compile(KernelSource("kernel", "cpp", "host", Target("cpu", "x86-64-v2"), text, headers))
    (tmp_path / artifact.binary).write_bytes(artifact.files[artifact.binary])
    product: Any = cpu.load(str(tmp_path / artifact.binary), "product", "PPPqqqqq")
    for m, k, n in [*SIZES, (3, 8203, 17)]:
        x, w = matrix(m, k, x_dtype).contiguous(), matrix(n, k, w_dtype, order)
        found = torch.full((m, n), -1, dtype=torch.int32)
        product(x.data_ptr(), w.data_ptr(), found.data_ptr(), m, n, k, w.stride(0), w.stride(1))
        assert torch.equal(found.long(), x.long() @ w.long().T), (m, k, n)
