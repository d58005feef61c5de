"""The CUDA reductions whose state is no element, compiled for the CPU: arithmetic, and that a row's threads agree.

A device runs them in ``tests/device/test_reduction.py``. Here their text is that of ``jitgen/states.cuh``, and a
row is dealt to threads and combined as ``combine_row`` does it, with C's functions in place of CUDA's.
"""

from __future__ import annotations

import math
import re

import pytest
import torch
from cpp_harness import Library

from jitgen.codegen import environment
from jitgen.spec import Target

THREADS = 512
WIDTHS = (1, 4, 8)
LARGEST = torch.finfo(torch.float32).max

BEFORE = """
#include <cmath>
#include <cstdint>
#define JITGEN_DEVICE inline
namespace jitgen {
inline float abs(float a) { return __builtin_fabsf(a); }
inline double abs(double a) { return __builtin_fabs(a); }
inline float exp(float a) { return __builtin_expf(a); }
inline double exp(double a) { return __builtin_exp(a); }
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
inline float coarse_exp_root(float a) { return __builtin_exp2f(0.72134752f * a); }
"""
WALK = """
}  // namespace jitgen

template <class Op, int width, class State, class T>
void walk(const T* row, State first, State* states, int64_t length) {
  State before[threads];
  for (int t = 0; t < threads; ++t) states[t] = first;
  for (int64_t i = 0; i < length; i += width) {
    State& mine = states[i / width % threads];
    T values[width];
    for (int j = 0; j < width; ++j) values[j] = row[i + j];
    mine = Op::with(mine, values);
  }
  for (int distance = 1; distance < threads; distance *= 2) {
    for (int t = 0; t < threads; ++t) before[t] = states[t];
    for (int t = 0; t < threads; ++t) states[t] = Op::combine(before[t], before[t ^ distance]);
  }
}
"""
ENTRY = """
extern "C" void {name}(const {type}* row, {type}* out, int64_t length) {{
  jitgen::{state}<{type}> states[threads];
  walk<jitgen::{op}, {width}>(row, jitgen::{state}<{type}>{first}, states, length);
  for (int t = 0; t < threads; ++t) out[t] = states[t].{member};
}}
"""
# A thread's vectors, then the lanes of a warp and the warps of the row, by `Deviations`' moments.
MOMENTS = """
template <class T>
void fold(jitgen::Shifted<T>* states, int count) {{
  const T base = states[0].base;
  jitgen::Moments<T> moments[threads], before[threads];
  for (int t = 0; t < count; ++t) moments[t] = states[t].about(base);
  for (int distance = 1; distance < count; distance *= 2) {{
    for (int t = 0; t < count; ++t) before[t] = moments[t];
    for (int t = 0; t < count; ++t) moments[t] = add(before[t], before[t ^ distance]);
  }}
  for (int t = 0; t < count; ++t) states[t] = jitgen::Deviations::centred(jitgen::Shifted<T>{{base, moments[t]}});
}}
template <int width, class T>
void moments(const T* row, T* out, int64_t length) {{
  jitgen::Shifted<T> states[threads] = {{}}, warps[threads / 32];
  for (int64_t i = 0; i < length; i += width) {{
    T values[width];
    for (int j = 0; j < width; ++j) values[j] = row[i + j];
    states[i / width % threads] = jitgen::Deviations::with(states[i / width % threads], values);
  }}
  for (auto& state : states) state = jitgen::Deviations::centred(state);
  for (int warp = 0; warp < threads / 32; ++warp) {{
    fold(states + warp * 32, 32);
    warps[warp] = states[warp * 32];
  }}
  fold(warps, threads / 32);
  for (int warp = 0; warp < threads / 32; ++warp) {{
    out[2 * warp] = warps[warp].mean();
    out[2 * warp + 1] = warps[warp].squares();
  }}
}}
"""
MOMENTS_ENTRY = """
extern "C" void moments{width}_{type}(const {type}* row, {type}* out, int64_t length) {{
  moments<{width}>(row, out, length);
}}
"""
LOWEST = {"float": "{-3.4028234663852886e+38f, 0}", "double": "{-1.7976931348623157e+308, 0}"}
TYPES = {torch.float32: "float", torch.float64: "double"}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    header = environment.header("jitgen/states.cuh", environment.family_folder("reduction"))
    operations = header.split("namespace jitgen {")[1].split("}  // namespace jitgen")[0]
    operations = re.sub(r"asm\(.*?\);", "result = 1.0f / count;", operations)
    kinds = [("exp", "Exponentials", "SumExp<false>", LOWEST[kind], "sum", kind) for kind in TYPES.values()]
    kinds += [("coarse", "Exponentials", "SumExp<true>", LOWEST["float"], "sum", "float")]
    kinds += [("spread", "Spread", "Deviations", "{0, 0, 0}", "squares", kind) for kind in TYPES.values()]
    entries = [
        ENTRY.format(
            name=f"{name}{width}_{kind}", type=kind, state=state, op=op, first=first, member=member, width=width
        )
        for name, state, op, first, member, kind in kinds
        for width in WIDTHS
    ]
    entries += [MOMENTS.format(), *(MOMENTS_ENTRY.format(width=w, type=t) for w in WIDTHS for t in TYPES.values())]
    constants = f"constexpr int threads = {THREADS};\n"
    text = constants + BEFORE + operations + WALK + "".join(entries)
    return Library(text, Target("cpu", "generic"), tmp_path_factory.mktemp("online"))


def of_row(library: Library, name: str, row: torch.Tensor) -> torch.Tensor:
    """What every thread has in the end, which must be the same."""
    every = library(f"{name}_{TYPES[row.dtype]}", row, dtype=row.dtype)[:THREADS]
    assert torch.equal(every.isnan(), every.isnan()[:1].expand(THREADS))
    assert every[0].isnan() or (every == every[0]).all()
    return every[0].double()


def rows(length: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Rows without infinities or NaN, except that -inf may be an element that adds nothing."""
    normal = torch.randn(length, dtype=dtype)
    some = {"normal": normal, "constant": torch.full((length,), 3.0, dtype=dtype)}
    some["rising"], some["falling"] = normal.sort().values * 20, normal.sort(descending=True).values * 20
    some["far"], some["denormal"] = normal + 1e4, normal * 1e-41
    for name, place in (("first", 0), ("last", -1), ("within", length // 2)):
        some[f"outlier {name}"] = normal.clone()
        some[f"outlier {name}"][place] = 1e30
    return some


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("length", [600, 2048, 40008])
@pytest.mark.covering(2)
def test_sums_of_exponentials(library: Library, dtype: torch.dtype, length: int, width: int) -> None:
    some = rows(length, dtype)
    most, alone = some["normal"].clone(), some["normal"].clone()
    most[: length // 2], alone[1:] = -math.inf, -math.inf
    ends = some["normal"].clone()
    ends[0], ends[-1] = LARGEST, -LARGEST
    some |= {"half -inf": most, "all but one -inf": alone, "largest": ends, "lowest": torch.full_like(ends, -LARGEST)}
    for name, row in some.items():
        want = (row.double() - row.double().max()).exp().sum()
        for kind, bound in (("exp", 64 * torch.finfo(dtype).eps), ("coarse", 2.0**-14)):
            if kind == "exp" or dtype == torch.float32:
                error = (of_row(library, f"{kind}{width}", row) / want - 1).abs().item()
                assert error <= bound, (name, kind, error)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("length", [600, 2048, 40008])
def test_deviations(library: Library, dtype: torch.dtype, length: int, width: int) -> None:
    eps = torch.finfo(dtype).eps
    for name, row in rows(length, dtype).items():
        exact = row.double()
        want = ((exact - exact.mean()) ** 2).sum()
        got = of_row(library, f"spread{width}", row)
        if want > torch.finfo(dtype).max:
            assert got == math.inf, name
            continue
        # Welford's bound: the means round to their own unit, which the deviations meet once for each thread.
        size = want + length * exact.mean().abs() * exact.std() * 4
        assert (got - want).abs() <= 16 * eps * size + 1e-40, (name, got, want)
        assert got >= 0


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("place", [0, 5, -1])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_deviations_of_no_numbers_are_none(library: Library, dtype: torch.dtype, place: int, value: float) -> None:
    for length in (600, 5000):
        row = torch.randn(length, dtype=dtype)
        row[place] = value
        for width in WIDTHS:
            assert of_row(library, f"spread{width}", row).isnan()
    for width in WIDTHS:
        assert of_row(library, f"spread{width}", torch.full((length,), value, dtype=dtype)).isnan()


def moments_of_row(library: Library, row: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean and the squared deviations that every warp has in the end, which must be the same."""
    found = library(f"moments{width}_{TYPES[row.dtype]}", row, dtype=row.dtype)[: THREADS // 16].view(-1, 2)
    assert all(torch.equal(each, found[0]) or torch.equal(each.isnan(), found[0].isnan()) for each in found)
    mean, squares = found[0].double()
    return mean, squares


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("length", [600, 2048, 40008])
def test_moments(library: Library, dtype: torch.dtype, length: int, width: int) -> None:
    """A base is the mean of ``width`` of a thread's values, of a thread of 32, of a warp of 16: of values without order
    it lies within a few deviations of the mean; beside an outlier the squares lose what ``Deviations`` says."""
    eps = torch.finfo(dtype).eps
    for name, row in rows(length, dtype).items():
        exact = row.double()
        want = ((exact - exact.mean()) ** 2).sum()
        mean, squares = moments_of_row(library, row, width)
        assert (mean - exact.mean()).abs() <= 32 * eps * (exact.mean().abs() + exact.std()) + 1e-44, name
        if want > torch.finfo(dtype).max:
            assert not squares.isfinite(), name
            continue
        lost = -(-length // THREADS) / width + 32 + THREADS // 32 if "outlier" in name else 4
        assert (squares - want).abs() <= 32 * eps * lost * want + 1e-40, (name, squares, want)
        assert squares >= 0


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_mean_of_equal_values_is_one_of_them(library: Library, dtype: torch.dtype, width: int) -> None:
    for value in (0.1, -1e4 / 3, 1e30):
        row = torch.full((5008,), value, dtype=dtype)
        mean, squares = moments_of_row(library, row, width)
        assert mean == row[0].double()
        assert squares == 0


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("place", [0, 5, 3000, -1])
def test_moments_of_no_numbers(library: Library, dtype: torch.dtype, width: int, place: int) -> None:
    for value in (math.inf, -math.inf, math.nan):
        row = torch.randn(5000, dtype=dtype)
        row[place] = value
        mean, squares = moments_of_row(library, row, width)
        assert mean.isnan() if math.isnan(value) else mean == value
        assert not squares.isfinite()
        row[place - 300] = -math.inf
        row[place - 301] = math.inf
        mean, squares = moments_of_row(library, row, width)
        assert mean.isnan()
        assert not squares.isfinite()
