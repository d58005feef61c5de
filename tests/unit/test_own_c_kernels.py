"""Kernels that users wrote in C++, within decorated functions and outside; how the text of such a kernel is read."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import jitgen
from jitgen.codegen.c_text import types
from jitgen.codegen.c_text.definition import definition_of
from jitgen.codegen.c_text.files import includes_of
from jitgen.codegen.c_text.hooks import EPILOGUE, PROLOGUE, hook_refusal
from jitgen.codegen.c_text.tokens import tokens_of
from jitgen.deploy.launch_schema import c_refusal
from jitgen.errors import NumberRangeError, TraceError, UnsupportedError
from jitgen.families.launch import hooks
from tests.cuda_on_host import run

pytest.importorskip("triton")
own_c_kernels: Any = pytest.importorskip("tests.own_c_kernels")
own_kernel_programs: Any = pytest.importorskip("tests.own_kernel_programs")

ADD = """
extern "C" void add(const float* x, const float* y, float* out, int n) {
  for (int i = 0; i < n; ++i) out[i] = JITGEN_EPILOGUE(x[i] + y[i], 0, i);
}
"""
add = jitgen.cpp_kernel(ADD, "add")


@pytest.mark.parametrize("number", range(6))
def test_random_rules(number: int) -> None:
    torch.manual_seed(number)
    assert own_kernel_programs.check(number, "cpu", own_c_kernels.KERNELS) is None


@pytest.mark.parametrize("number", range(3))
def test_random_rules_in_cuda_on_the_host(number: int, tmp_path: Path) -> None:
    torch.manual_seed(number)
    launches = own_c_kernels.cuda_launches(own_c_kernels.cuda(tmp_path))
    assert own_kernel_programs.check(number, "cpu", launches, run) is None


def test_what_is_around_a_kernel_is_computed_in_it() -> None:
    function = own_c_kernels._matmul
    low = jitgen.jit(lambda a, b, bias: (function(a * 2, b) + bias).relu()).lower(
        torch.randn(5, 7), torch.randn(7, 3), torch.randn(3)
    )
    assert len(low.kernels) == 1
    assert (
        "      for (int i = 0; i < k; ++i) sum += jitgen_launch::prologue0<float>(jitgen_params, row * k + i, row, i)"
        in low.source
    )
    assert "jitgen_launch::epilogue2(jitgen_params, row * n + column, (float)(sum), row, column);" in low.source
    assert "own_c_kernels" not in low.source  # no path is in a source


@pytest.mark.parametrize("debug", [0, 5])
def test_a_call_by_itself_updates_a_tensor_that_it_gets_twice(debug: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITGEN_DEBUG", str(debug))
    kernel = jitgen.cpp_kernel(ADD, "add")
    for size in (3, 3, 70):
        x, y = torch.randn(2, size)
        right = x + y
        kernel(x, y, x, size)
        assert torch.equal(x, right)
        kernel(y, y, x, size)
        assert torch.equal(x, y + y)
        kernel(y, y, y, size)
        assert torch.equal(x, y)
    if not debug:
        assert set(kernel._configured._functions) == {None, (0, 1, 0, 3), (0, 0, 0, 3)}
        with pytest.raises(jitgen.JitgenError, match="shares memory"):
            kernel(x[1:], y[1:], x[:-1], size - 1)


REVERSE = """
extern "C" void reverse(const float* x, float* out, int n) {
  for (int i = 0; i < n; ++i) out[i] = 2 * x[n - 1 - i];
}
"""


@pytest.mark.parametrize("shape", [(7, 3), (1, 1), (0, 3)])
def test_a_launch_writes_to_out(shape: tuple[int, int]) -> None:
    reverse = jitgen.cpp_kernel(REVERSE, "reverse")

    def one(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        reverse(x, out, x.numel())
        return out

    def several(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first, second = torch.empty_like(x), torch.ones_like(x)
        reverse(x, first, x.numel())
        reverse(first, second, x.shape[0])  # not all of it
        return first * first, second, first

    x = torch.randn(shape)
    first, second = 2 * x.flatten().flip(0).view(shape), torch.ones(shape)
    second.view(-1)[: shape[0]] = 2 * first.flatten()[: shape[0]].flip(0)
    for function, right in ((one, (first,)), (several, (first * first, second, first))):
        own = jitgen.jit(function)
        plan = own.bind(x)
        assert "temporar" not in own.lower(x).explain().replace("0 temporaries", "")
        for transposed in (False, False, True, False):
            out = [torch.full(shape[::-1], float("nan")).t() if transposed else torch.empty(shape) for _ in right]
            passed = tuple(out) if len(out) > 1 else out[0]
            assert plan(x, out=passed) is passed
            for got, result in zip(out, right, strict=True):
                assert torch.equal(got, result)


def test_a_launch_does_not_write_to_out_what_it_reads() -> None:
    reverse = jitgen.cpp_kernel(REVERSE, "reverse")

    @jitgen.jit
    def behind(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty_like(x)
        reverse(x, out, x.numel())
        return out + y

    for size in (5, 5, 64):
        memory, y = torch.randn(size + 1), torch.randn(size)
        x, beside = memory[:-1], memory[1:]
        plan = behind.bind(x, y)
        for out in (torch.empty(size), x, y, beside):
            right = 2 * x.flip(0) + y
            plan(x, y, out=out)
            assert torch.equal(out, right)


def test_zones_are_around_what_a_launch_writes_to_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITGEN_DEBUG", "5")
    beyond = jitgen.cpp_kernel(REVERSE.replace("i < n", "i <= n"), "reverse")

    @jitgen.jit
    def wrong(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        beyond(x, out, x.numel())
        return out

    x = torch.randn(16)
    with pytest.raises(jitgen.JitgenError, match="written to byte 64 of a tensor of 64 bytes"):
        wrong.bind(x)(x, out=torch.empty(32)[:16])


def test_sizes_of_launches_are_known_again() -> None:
    kernel = jitgen.cuda_kernel(own_c_kernels.CUDA.replace('#include "tile.cuh"', "#define PADDING 1"), "own::add")
    assert kernel[4, 32] is kernel[4, 32]
    assert kernel[(4, 2), 32] is kernel[(4, 2), 32]
    assert kernel[4, 32] is not kernel[4, 32, 64]
    assert kernel[[4, 2], 32] is kernel[(4, 2), 32]
    assert kernel[[1], [32]] is kernel[[1], [32]] is kernel[(1,), (32,)]
    assert kernel[np.int64(3), 32] is kernel[3, np.int32(32)] is kernel[3, 32]
    sizes = kernel[[np.int64(4), 2], 32, np.uint8(3)].sizes
    assert sizes == ((4, 2), 32, 3)
    assert {*map(type, (*sizes[0], *sizes[1:]))} == {int}
    assert kernel[5.0, 32] is not kernel[5, 32]
    of_operator = type(kernel).of_operator(kernel.operator_text)  # whose launches have seven sizes
    assert of_operator.known(((4, 1, 1), (32, 1, 1), 0)) is of_operator.known(((4, 1, 1), (32, 1, 1), 0))
    with pytest.warns(UserWarning, match="add has been launched with 16 grids, blocks or bytes of shared memory"):
        assert len({id(kernel[size, 64]) for size in range(1, 20)}) == 19
    for sizes in (4, (4,), [4, 32], (4, 32, 0, 0), ((1, 1, 1, 1), 32), ((), 32)):
        with pytest.raises(TraceError):
            kernel[sizes]


def test_threads_that_launch_with_new_sizes_share_them() -> None:
    kernel = jitgen.cuda_kernel(own_c_kernels.CUDA.replace('#include "tile.cuh"', "#define PADDING 1"), "own::add")
    with ThreadPoolExecutor(8) as pool, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = list(pool.map(lambda number: kernel[[number // 8], 32], range(8 * 40)))
    assert len(set(found)) == 40
    assert len(warned) == 1


@pytest.mark.parametrize("language", ["cuda", "cpp"])
def test_sizes_and_remedies_of_launches_in_functions(language: str) -> None:
    if language == "cuda":
        kernel = jitgen.cuda_kernel(own_c_kernels.CUDA.replace('#include "tile.cuh"', "#define PADDING 1"), "own::add")
    else:
        kernel = jitgen.cpp_kernel(own_c_kernels.CPP, "add")

    def function(x: Tensor, bias: Tensor, columns: Any) -> Tensor:
        out = torch.empty_like(x)
        here = kernel[[np.int64(4)], np.int32(32)] if language == "cuda" else kernel
        here(x, x, out, x.numel(), columns)
        return out + bias

    target = "sm_90a" if language == "cuda" else None
    x, bias = torch.randn(64, 32), torch.randn(32)
    balance = jitgen.jit(function).lower(x, bias, 32, target=target).balance
    assert balance.kernels == 1
    assert balance.moved == balance.least_moved == 4 * (2 * 64 * 32 + 32)  # bias once, and out is only written
    words = {"cuda": "launch it with the arguments of its definition, on a grid of blocks", "cpp": "call it with the"}
    with pytest.raises(TraceError, match=words[language]) as error:
        jitgen.jit(function).lower(x, bias, None, target=target)
    assert ("grid" in str(error.value)) == (language == "cuda")


@pytest.mark.parametrize(
    ("body", "is_behind"),
    [
        ("for (int i = 0; i < n; ++i) s += x[i]; HOOK", True),
        ("for (int i = 0; i < n; ++i) { s += x[i]; } if (n) HOOK else s = 0;", True),
        ("while (n) if (s) --n; else { n = 0; } HOOK", True),
        ("do { --n; } while (n); HOOK", True),
        ("do --n; while (n); { HOOK }", True),
        ("if (s) for (;;) for (;;) break; HOOK", True),
        ("HOOK", False),
        ("HOOK for (int i = 0; i < n; ++i) s += x[i];", False),
        ("for (int i = 0; i < n; ++i) HOOK", False),
        ("while (s) --s; for (int i = 0; i < n; ++i) if (i) { HOOK }", False),
        ("do { HOOK } while (n);", False),
        ("while (s) --s; HOOK while (n) HOOK", False),
        ("while (s) --s; for (int i = 0; i < n; ++i) if constexpr (true) s += x[i]; else HOOK", False),
        ("for (int i = 0; i < n; ++i) if constexpr (true) { s += x[i]; } HOOK", True),
        ("while (s) --s; while (n) if consteval { --n; } else HOOK", False),
        ("while (s) --s; while (n) if !consteval { --n; } HOOK", True),
        ("while (s) --s; while (n) if (s) [[likely]] { --n; } else HOOK", False),
        ("for (int i = 0; i < n; ++i)\n#pragma unroll\nfor (int j = 0; j < n; ++j) { s += x[i]; }\nHOOK", True),
    ],
)
def test_what_is_stored_behind_loops(body: str, is_behind: bool) -> None:
    body = body.replace("HOOK", "out[0] = JITGEN_EPILOGUE(s, 0, 0);")
    text = f"__global__ void kernel(const float* x, float* out, int n) {{ float s = 0; {body} }}"
    assert hooks.is_behind_loops(definition_of(text, "kernel"), "out") is is_behind


SCALE = """
extern "C" void scale(const float* x, float* out, int64_t rows, int64_t columns, int64_t by_row, int64_t by_column) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) out[i * columns + j] = 2 * x[i * by_row + j * by_column];
}
"""


@pytest.mark.parametrize("shape", [(4, 6), (1, 5), (5, 1), (0, 3)])
def test_a_call_by_itself_reads_a_view_by_its_strides(shape: tuple[int, int]) -> None:
    scale = jitgen.cpp_kernel(SCALE, "scale")
    rows, columns = shape
    base = torch.randn(2 * max(shape), 2 * max(shape) + 1)
    views = (base[:rows, :columns], base.t()[:rows, :columns], base[:1, :columns].expand(shape), base[:rows, ::2])
    for view in views:
        view = view[:, :columns]
        out = torch.empty(shape)
        scale(view, out, *shape, *view.stride())
        assert torch.equal(out, view * 2)


def test_a_call_by_itself_refuses_a_view_without_its_strides() -> None:
    def twice(x: Tensor, out: Tensor) -> None:
        double(x, out, x.numel())

    double = jitgen.cpp_kernel(
        'extern "C" void twice(const float* x, float* out, int n) { for (int i = 0; i < n; ++i) out[i] = 2 * x[i]; }',
        "twice",
    )
    x, out = torch.randn(5, 7), torch.zeros(35)
    for view in (x.t(), x[:1].expand(5, 7), x[:, :3], x[::2]):
        for function in (twice, torch.compile(twice, backend="eager")):
            with pytest.raises(UnsupportedError, match=r"x is not contiguous, and the launch passes no [(\d].*strides"):
                function(view, out)
    assert not out.any()
    for view in (x, x[1:3], x[:, None].transpose(0, 1), x[:0].t()):
        twice(view, out)
        assert torch.equal(out[: view.numel()], view.flatten() * 2)


@pytest.mark.covering(1)
@pytest.mark.parametrize("backend", [None, "eager", "aot_eager", "jitgen"])
@pytest.mark.parametrize("debug", [0, 5])
def test_two_views_of_the_same_elements_are_one_tensor(
    backend: str | None, debug: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JITGEN_DEBUG", str(debug))
    double = jitgen.cpp_kernel(
        'extern "C" void twice(const float* x, float* out, int n) { for (int i = 0; i < n; ++i) out[i] = 2 * x[i]; }',
        "twice",
    )

    def same(x: Tensor) -> Tensor:
        double(x, x, x.numel())
        return x.sum(0)

    def views(x: Tensor) -> Tensor:
        double(x[1:], x[1:], x.numel() - x.shape[1])
        return x.sum(0)

    for function, first in ((same, 2), (views, 1)):
        called = torch.compile(function, backend=backend) if backend else function
        for _ in range(2):
            x = torch.randn(4, 5)
            right = first * x[0].double() + 2 * x[1:].double().sum(0)
            assert torch.allclose(called(x).double(), right, rtol=1e-5, atol=1e-5)


def test_a_symbol_that_the_c_library_has_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITGEN_CACHE_DIR", str(tmp_path / "store"))
    reverse = jitgen.cpp_kernel(
        """#include <vector>
extern "C" void reverse(const float* x, float* out, int64_t n) {
  std::vector<float> kept(x, x + n);
  for (int64_t i = 0; i < n; ++i) out[i] = kept[n - 1 - i];
}""",
        "reverse",
    )
    for _ in range(2):
        with pytest.raises(jitgen.CompileError, match=r"uses .*_Znwm.*the C library alone"):
            reverse(torch.randn(4), torch.empty(4), 4)
    assert not list((tmp_path / "store").rglob("*.so"))


COUNTED = """
#include <cstdint>
#define ROW 0
{head}
  const int row = 0;
  {each} {{
    const float loaded = JITGEN_PROLOGUE(x[i], {place});
    out[i] = JITGEN_EPILOGUE(loaded + y[i], {place});
  }}
}}
"""
ARGUMENTS = "const float* x, const float* y, float* out, int64_t n, int64_t columns"
PLACES = {
    "constant": "0, i",
    "local": "row, i",
    "macro": "ROW, i",
    "cast": "static_cast<int>(0), i",
    "braces": "std::int64_t{0}, i",
    "bool": "false, i",
    "mirror": "i, 0",
    "columns": "i % columns, i / columns",
    "nonsense": "-i, int64_t(1) << 62",
    "wide": "i / columns + (int64_t(1) << 32), i % columns",
    "matrix": "i / columns, i % columns",
}


def _around(kernel: Any) -> Any:
    def function(x: Tensor, y: Tensor, column: Tensor, bias: Tensor) -> Tensor:
        out = torch.empty_like(x)
        kernel(x * column, y, out, x.numel(), x.shape[-1])
        return out * column + bias

    return function


def _around_arguments(sizes: tuple[int, ...]) -> tuple[list[Tensor], Tensor]:
    x, y = torch.randn(2, *sizes)
    column, bias = torch.randn(*sizes[:-1], 1), torch.randn(sizes[-1])
    return [x, y, column, bias], (x.double() * column + y) * column + bias


@pytest.mark.parametrize("place", PLACES)
def test_a_hook_may_count_in_any_way(place: str) -> None:
    head = f"void add({ARGUMENTS}) {{"
    each = "for (int64_t i = 0; i < n; ++i)"
    kernel = jitgen.cpp_kernel(COUNTED.format(head=head, each=each, place=PLACES[place]), "add")
    function = jitgen.jit(_around(kernel))
    for sizes in ((2, 3), (7, 5), (3, 4, 5), (1, 9), (9, 1)):
        arguments, right = _around_arguments(sizes)
        assert torch.allclose(function(*arguments).double(), right, atol=1e-5)
        assert len(function.lower(*arguments).kernels) == 1


def test_a_hook_may_count_in_any_way_in_cuda_on_the_host() -> None:
    each = "const int64_t i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n)"
    for place in PLACES.values():
        head = f"__global__ void add({ARGUMENTS}) {{"
        kernel = jitgen.cuda_kernel(COUNTED.format(head=head, each=each, place=place), "add")
        function = _around(kernel[2, 32])
        arguments, right = _around_arguments((7, 5))
        assert torch.allclose(run(function, *arguments)[0].double(), right, atol=1e-5), place


@pytest.mark.parametrize("sizes", [(0,), (1,), (3, 5), (2, 0, 4), (17, 3, 2)])
def test_a_call_by_itself_writes_in_place(sizes: tuple[int, ...]) -> None:
    x, y, out = torch.randn(sizes), torch.randn(sizes), torch.full(sizes, 7.0)
    version = out._version
    add(x, y, out, x.numel())
    assert torch.equal(out, x + y)
    assert out._version > version
    add(x, y, out, 0)  # another number is no other kernel
    assert torch.equal(out, x + y)
    assert len({kernel.key for s in add._configured._function_of(None).specializations for kernel in s.kernels}) <= 1


def test_an_argument_is_updated_by_one_kernel() -> None:
    scale = jitgen.cpp_kernel(
        "void scale(float* x, double f, long n) { for (long i = 0; i < n; ++i) x[i] *= f; }", "scale"
    )

    @jitgen.jit
    def twice(x: Tensor, f: float) -> Tensor:
        scale(x, f, x.numel())
        return x + 1

    x = torch.randn(4, 6)
    right = x.double() * 0.3
    result = twice(x, 0.3)
    assert torch.allclose(x.double(), right, rtol=2**-22)
    assert torch.equal(result, x + 1)
    low = twice.lower(torch.randn(4, 6), 0.3)
    assert sum("launch" in kernel.template for kernel in low.kernels) == 1
    assert len(low.kernels) == 2


def test_several_launches_keep_their_order() -> None:
    @jitgen.jit
    def chained(x: Tensor, y: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        before = total * 2
        add(x, y, total, x.numel())
        first = total.clone()
        add(first, total, total, x.numel())
        return before, first

    x, y, total = torch.randn(3, 4, 5)
    right, before = x + y, total * 2
    with pytest.raises(UnsupportedError, match="shares memory"):
        jitgen.jit(lambda x, y: add(x, y, x.view(-1), x.numel()))(x, y)
    found = chained(x, y, total)
    assert torch.equal(found[0], before)
    assert torch.equal(found[1], right)
    assert torch.equal(total, right * 2)


def test_templates_types_and_defaults() -> None:
    text = """
#include "jitgen/storage.hpp"
namespace own {
template <typename T, int step = 2, class Sum = float>
void every(T const *x, T y[], size_t n, bool negative) {
  const Sum sign = negative ? -1 : 1;
  for (size_t i = 0; i < n; i += step) y[i] = jitgen::store<T>(sign * jitgen::load(x[i]));
}
}
"""
    every = jitgen.cpp_kernel(text, "own::every<jitgen::bfloat16>")
    x, y = torch.randn(7).bfloat16(), torch.zeros(7).bfloat16()
    every(x, y, 7, True)
    assert torch.equal(y[::2], -x[::2])
    assert not y[1::2].any()
    with pytest.raises(TraceError, match="convert it to bfloat16"):
        every(x.half(), y, 7, True)


def test_a_manifest_has_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function = jitgen.jit(lambda x, y: own_c_kernels._add(x * 2, y) - 1)
    x, y, out = torch.randn(3, 4, 5)
    with jitgen.record(tmp_path / "specs.json"):
        function(x, y)
        add(x, y, out, 20)
    monkeypatch.setenv("JITGEN_CACHE_DIR", str(tmp_path / "store"))
    assert jitgen.prewarm(tmp_path / "specs.json", ["cpu"]).count("failed") == 0
    fresh = jitgen.jit(lambda x, y: own_c_kernels._add(x * 2, y) - 1)
    with jitgen.strict():
        assert torch.allclose(fresh(x, y), x * 2 + y - 1)
        jitgen.cpp_kernel(ADD, "add")(x, y, out, 20)
    assert torch.equal(out, x + y)


@pytest.mark.parametrize("backend", ["aot_eager", "jitgen"])
def test_torch_compile(backend: str) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty_like(x)
        add(x * 2, y, out, x.numel())
        return torch.relu(out + y)

    x, y = torch.randn(3, 5), torch.randn(3, 5)  # of memories of their own, as torch asks of a region
    right = torch.relu(x * 2 + y + y)
    assert torch.allclose(torch.compile(function, backend=backend, fullgraph=True)(x, y), right)
    decorated = jitgen.jit(function)
    assert torch.allclose(
        torch.compile(lambda x, y: decorated(x, y) + 1, backend=backend, fullgraph=True)(x, y), right + 1
    )


def test_a_write_outside_of_a_tensor_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITGEN_DEBUG", "5")
    wrong = jitgen.cpp_kernel(
        "void wrong(const float* x, float* out, int n) { for (int i = 0; i <= n; ++i) out[i] = x[0]; }", "wrong"
    )

    @jitgen.jit
    def function(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        wrong(x, out, x.numel())
        return out

    x, out = torch.randn(9), torch.zeros(9)
    with pytest.raises(jitgen.JitgenError, match=r"wrong .* has written to byte 36 of a tensor of 36 bytes, behind it"):
        wrong(x, out, 9)
    with pytest.raises(jitgen.JitgenError, match="has written to byte 36 of a tensor of 36 bytes, behind it"):
        function(x)
    wrong(x, out, 8)
    assert torch.equal(out, x[:1].expand(9))


# ---------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (lambda x: (x, x, x.clone()), "takes 4 arguments .*, and 3 are given"),
        (lambda x: (x, x.double(), x.clone(), 4), "y is const float. y in .*, and a tensor of float64"),
        (lambda x: (x, 1.0, x.clone(), 4), "y is const float. y in .*, and a float is given"),
        (lambda x: (x, x, x.clone(), 4.5), "n is the integer int n in .*, and a float"),
        (lambda x: (x, x, x.clone(), x), "n is the number int n in .*, and a tensor"),
        (lambda x: (x, x, x.clone(), None), "n is the number int n in .*, and a NoneType"),
        (lambda x: (x, x, torch.zeros(2, 4).t()[:, :1], 4), "out, which it writes, is not contiguous"),
        (lambda x: (x[1:], x[1:], x[:-1], 3), "shares memory"),
        (lambda x: (x.to("meta"), x, x.clone(), 4), "const float. x is on meta"),
    ],
)
def test_a_mistake_names_the_kernel_and_the_line(arguments: Any, words: str) -> None:
    with pytest.raises(jitgen.JitgenError, match=words) as caught:
        add(*arguments(torch.randn(4)))
    assert str(caught.value).count("test_own_c_kernels.py:") >= 1


@pytest.mark.parametrize(
    ("text", "entry", "words"),
    [
        (ADD, "sub", "defines no function sub; it defines add"),
        (ADD + ADD, "add", "defines add in lines 2 and 6"),
        ("void k(float** x) {}", "k", "neither a pointer to elements nor a number"),
        ("void k(float& x) {}", "k", "neither a pointer to elements nor a number"),
        ("void k(float x = 3) {}", "k", "neither a pointer to elements nor a number"),
        ("void k(const float* x, int n) {}", "k", "writes nothing, as none of its pointers"),
        ("void k(float*, int n) {}", "k", "has no name"),
        ("template <class T> void k(T* x) {}", "k", "is a template; name its arguments, as in 'k<T>'"),
        ("void k(float* x) {}", "k<float>", "is no template"),
    ],
)
def test_what_is_no_kernel(text: str, entry: str, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        jitgen.cpp_kernel(text, entry)


def test_a_file_and_an_option_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"cannot read .*absent\.cpp"):
        jitgen.cpp_kernel(str(tmp_path / "absent.cpp"), "k")
    with pytest.raises(UnsupportedError, match=r"'-fplugin=x\.so' is not passed"):
        jitgen.cpp_kernel(ADD, "add", options=["-O2", "-fplugin=x.so"])
    with pytest.raises(UnsupportedError, match="no __global__ function add"):
        jitgen.cuda_kernel(ADD, "add")


def test_what_requires_grad_is_refused() -> None:
    x, y = torch.randn(4, requires_grad=True), torch.randn(4)

    @jitgen.jit
    def function(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty_like(y)
        add(x, y, out, 4)
        return out

    with pytest.raises(UnsupportedError, match=r"torch\.autograd\.Function"):
        function(x, y)
    for backend in ("aot_eager", "jitgen"):
        with pytest.raises(Exception, match="nobody knows the derivative"):
            torch.compile(function.function, backend=backend, fullgraph=True)(x, y)
    assert torch.equal(torch.compile(function.function, backend="aot_eager")(x.detach(), y), x + y)


def test_dynamo_follows_a_launch_in_both_spellings() -> None:
    kernel = jitgen.cuda_kernel('extern "C" __global__ void k(const float* x, float* y) { y[0] = x[0]; }', "k")
    graphs = []

    def noted(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return lambda *arguments: arguments

    def function(x: Tensor, out: Tensor) -> None:
        kernel[2, (4, 8)](x, out)
        kernel(2, (4, 8), (x, out))

    torch._dynamo.reset()
    torch.compile(function, backend=noted, fullgraph=True)(torch.ones(4), torch.ones(4))
    (graph,) = graphs
    launches = [node.args for node in graph.graph.nodes if node.target is torch.ops.jitgen.launch]
    assert len(launches) == 2
    assert launches[0] == launches[1]


def test_a_kernel_of_another_language_is_refused() -> None:
    kernel = jitgen.cuda_kernel('extern "C" __global__ void k(const float* x, float* y) { y[0] = x[0]; }', "k")

    @jitgen.jit
    def function(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        kernel[1, 1](x, out)
        return out

    with pytest.raises(UnsupportedError, match=r"is a kernel in CUDA C\+\+, .* in C\+\+; pass CUDA tensors"):
        function(torch.randn(4))
    with pytest.raises(TraceError, match="is launched as"):
        kernel[1]


@pytest.mark.parametrize(
    ("body", "parameter", "why"),
    [
        ("out[i] = JITGEN_EPILOGUE(x[i], 0, i);", "out", ""),
        (
            "if (i) out[f(i, 2)] = JITGEN_EPILOGUE(g(x[i], 1), h(i, 0), i); else out[0] = JITGEN_EPILOGUE(1, 0, 0);",
            "out",
            "",
        ),
        ("// out is x\n out[i] = JITGEN_EPILOGUE(x[i], 0, i); s.out = p->out;", "out", ""),
        ("out[i] = JITGEN_EPILOGUE(x[i], 0, i); out[i] += 1;", "out", "used outside of its hooks, in line 2: out"),
        ("float* o = out; o[i] = JITGEN_EPILOGUE(x[i], 0, i);", "out", "no hook for it"),
        ("out[i] = JITGEN_EPILOGUE(x[i], 0, i) + 1;", "out", "no hook for it"),
        ("out[i] += JITGEN_EPILOGUE(x[i], 0, i);", "out", "no hook for it"),
        ("out[i] = JITGEN_EPILOGUE(out[i - 1], 0, i);", "out", "used outside of its hooks"),
        ("out[i] = JITGEN_EPILOGUE(x[i], i);", "out", "no hook for it"),
        ("out[0] = JITGEN_PROLOGUE(x[i], 0, i);", "x", ""),
        ("out[0] = JITGEN_PROLOGUE(x[i], 0, i) + x[0];", "x", "used outside of its hooks"),
        ("out[0] = JITGEN_PROLOGUE(2 * x[i], 0, i);", "x", "no hook for it"),
        ("out[0] = x[i];", "x", "no hook for it"),
        ("\n#define X x[i]\n out[0] = JITGEN_PROLOGUE(x[i], 0, i) + X;", "x", "used in a directive"),
        ("out[0] = JITGEN_PROLOGUE(x[i], 0, i) + RAW(0);", "x", "the macro OF is or uses x"),
        ("out[0] = JITGEN_PROLOGUE(x[i], 0, i) + HEADER;", "x", "the macro HEADER is or uses x"),
        ("out[0] = JITGEN_PROLOGUE(x[i], 0, i) + FLAG;", "x", "the macro FLAG is or uses x"),
        ("out[0] = JITGEN_PROLOGUE(x[i], 0, i) + JOINED(x, );", "x", "used outside of its hooks"),
        ("out[0] = JITGEN_PROLOGUE(x[i], 0, i) + MAX(i, s->MEMBER);", "x", ""),
        ("  #define X x[i]\n out[0] = JITGEN_PROLOGUE(x[i], 0, i) + X;", "x", "used in a directive"),
        ("out[i++] = JITGEN_EPILOGUE(x[0], 0, i);", "out", "changes a variable"),
        ("out[i <<= 1] = JITGEN_EPILOGUE(x[0], 0, i);", "out", "changes a variable"),
        ("out[NEXT(i)] = JITGEN_EPILOGUE(x[0], 0, i);", "out", "changes a variable"),
        ("out[0] = JITGEN_PROLOGUE(x[i], 0, i = 4);", "x", "changes a variable"),
        ("out[0] = JITGEN_PROLOGUE(x[i <= 4 != (i >> 1)], i == 2, i - - 1);", "x", ""),
        ("out[int(JITGEN_PROLOGUE(x[i], 0, i))] = JITGEN_EPILOGUE(1, 0, i);", "out", ""),
        ("out[] = JITGEN_EPILOGUE(1, 0, i);", "out", "changes a variable"),
        ("while (i-->x[0]) out[0] = JITGEN_PROLOGUE(x[i], 0, i);", "x", "used outside of its hooks"),
        ("out[0] = JITGEN_PROLOGUE(x[i], 0, i) + s--->x;", "x", ""),
        ("v[i] = JITGEN_PROLOGUE(v[i], 0, i);", "v", "nobody can tell of which dtype float4 is"),
    ],
)
def test_where_a_rule_may_stand(body: str, parameter: str, why: str) -> None:
    macros = "#define MAX(x, y) ((x) < (y) ? (y) : (x))\n  # define \\\n OF [0] + x\n#define RAW(i) 2 * OF\n"
    text = f"void k(const float* x, float* out, float4* v, int i) {{\n{body}\n}}\n{macros}"
    others = ["  #define HEADER x[0]\n#define MEMBER p->x\n#define NEXT(i) i++", "#define FLAG x[0]"]
    definition = definition_of(text, "k", language="cpp")
    kind = EPILOGUE if parameter == "out" else PROLOGUE
    said = hook_refusal(definition, parameter, kind, others)
    assert (why in said) if why else not said


def test_a_macro_above_a_kernel_is_seen() -> None:
    text = """
#define RAW(i) x[i]
void k(const float* x, float* out, int n) {
  for (int i = 0; i < n; ++i) out[i] = JITGEN_PROLOGUE(x[i], 0, i) + RAW(i);
}
"""
    kernel, x = jitgen.cpp_kernel(text, "k"), torch.randn(9)

    def function(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        kernel(x * 2, out, x.numel())
        return out

    assert torch.allclose(jitgen.jit(function)(x), x * 4)
    assert "the macro RAW is or uses x" in jitgen.jit(function).lower(x).explain()


def test_what_an_index_calls_is_done() -> None:
    text = """
static int next(int* at) { return (*at)++; }
void k(const float* x, float* out, int n) {
  int at = 0, stored = 0;
  for (int i = 0; i < n; ++i) {
    const float value = JITGEN_PROLOGUE(x[next(&at)] /* a, b */, 0, i);
    if (value > 1e30f) return; else out[next(&stored)] = JITGEN_EPILOGUE(value + at // of calls, so far
      , 0, i);
  }
}
"""
    kernel, x = jitgen.cpp_kernel(text, "k"), torch.randn(9)

    @jitgen.jit
    def function(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        kernel(x * 2, out, x.numel())
        return out - 1

    assert torch.allclose(function(x), x * 2 + torch.arange(9))
    assert len(function.lower(x).kernels) == 1


@pytest.mark.parametrize("sizes", [(2, 4), (3, 1), (1, 7), (5, 3)])
def test_a_hook_stores_where_its_index_says(sizes: tuple[int, int]) -> None:
    text = """
void k(const float* x, const int* order, float* out, int rows, int columns) {
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < columns; ++c)
      out[int(JITGEN_PROLOGUE(order[r * columns /* , ] */ + c], r, c))] = JITGEN_EPILOGUE(x[r * columns + c], r, c);
}
"""
    kernel = jitgen.cpp_kernel(text, "k")
    x, order = torch.randn(sizes), torch.randperm(sizes[0] * sizes[1]).int()

    @jitgen.jit
    def function(x: Tensor, order: Tensor, bias: Tensor) -> Tensor:
        out = torch.empty(x.numel())  # of one dimension, where the kernel counts in two
        kernel(x, order.flip(0) - 1, out, *x.shape)
        return out * 2 + bias

    bias = torch.randn(x.numel())
    right = torch.empty_like(bias).scatter_(0, order.flip(0).long(), x.flatten())
    assert torch.allclose(function(x, order + 1, bias), right * 2 + bias)
    assert len(function.lower(x, order + 1, bias).kernels) == 1


def test_indented_directives_are_directives() -> None:
    text = 'int a; /* b */\n /* c\n */ # \\\n include /**/ "own.h" // d \\\n e\n\f#inc\\\nlude <own2.h>\n a # b'
    assert [name for name, *_ in includes_of(text)] == ["own.h", "own2.h"]
    assert [token.text for token in tokens_of(text) if token.kind != "directive"] == ["int", "a", ";", *"a#b"]
    (_, quoted) = tokens_of('#define A "/*"\nint')
    assert quoted.text == "int"


@pytest.mark.parametrize(
    "flag", ["-march=native", "-mtune=native", "-m32", "-mavx512f", "-Wl", "-Wl,-rpath=x", "-std=c++11", "-D A"]
)
def test_flags_that_are_refused(flag: str) -> None:
    with pytest.raises(UnsupportedError, match="is not passed to a compiler"):
        jitgen.cpp_kernel(ADD, "add", options=[flag])


@pytest.mark.parametrize(
    ("type_name", "dtypes", "is_integer"),
    [
        ("std::int32_t", ("int32",), True),
        ("::std::uint32_t", ("int32",), True),
        ("std::size_t", ("int64",), True),
        ("std::uint8_t", ("uint8", "bool"), True),
        ("jitgen::bfloat16", ("bfloat16",), False),
        ("unsigned char", ("uint8", "bool"), True),
        ("own::pair", (), None),
    ],
)
def test_types_of_pointers(type_name: str, dtypes: tuple[str, ...], is_integer: bool | None) -> None:
    definition = definition_of(f"void k(const {type_name} *x, {type_name} n) {{}}", "k", language="cpp")
    for parameter in definition.parameters:
        assert types.dtypes_of(parameter.type) == dtypes
        assert types.is_integer(parameter.type) is is_integer


@pytest.mark.parametrize(
    ("before", "type_name", "dtypes"),
    [
        ("typedef float real;", "real", ("float32",)),
        ("using own = long long; using real = own;", "real", ("int64",)),
        ("namespace a { using real = double; } namespace b {", "real", ()),
        ("namespace a { using real = double; struct s { typedef int real; };", "real", ()),
        ("namespace a { using real = double; struct s { typedef int other; };", "other", ()),
        ("using std::real; namespace a { using real = double;", "real", ("float64",)),
        ("#ifdef A\ntypedef float real;\n#else\ntypedef double real;\n#endif", "real", ()),
        ("#ifdef A\ntypedef float real;\n#endif", "real", ()),
        ("#ifdef A\n#endif\ntypedef float real;", "real", ("float32",)),
        ("using real = real;", "real", ()),
    ],
)
def test_types_that_a_file_names(before: str, type_name: str, dtypes: tuple[str, ...]) -> None:
    definition = definition_of(f"{before}\nvoid k(const {type_name}* x) {{}}", "k", language="cpp")
    assert types.dtypes_of(definition.type_of(definition.parameters[0])) == dtypes


def test_a_rule_at_a_hook_of_a_named_type() -> None:
    text = "using real = float;\n" + ADD.replace("float", "real").replace("x[i] +", "JITGEN_PROLOGUE(x[i], 0, i) +")
    kernel = jitgen.cpp_kernel(text, "add")

    @jitgen.jit
    def function(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty_like(x)
        kernel(x * 2, y, out, x.numel())
        return torch.relu(out)

    x, y = torch.randn(2, 9)
    assert torch.equal(function(x, y), torch.relu(x * 2 + y))
    assert len(function.lower(x, y).kernels) == 1
    with pytest.raises(TraceError, match="convert it to float32"):
        function(x.double(), y.double())


def test_indices_of_rules_are_as_wide_as_their_operands() -> None:
    kernel = jitgen.cuda_kernel(
        "__global__ void k(const float* x, float* y) { y[0] = JITGEN_EPILOGUE(JITGEN_PROLOGUE(x[0], 0, 0), 0, 0); }",
        "k",
    )

    @jitgen.jit
    def function(x: Tensor, count: Tensor) -> Tensor:
        out = torch.empty((x.shape[0], 16), device=x.device)
        kernel[1, 1](count[:, :16] * 2, out)
        return out + x[:, :16]

    for columns, bits in ((16, 32), (4096, 64)):
        specs = [jitgen.TensorSpec((1_000_000, columns)), jitgen.TensorSpec((1_000_000, 16))]
        for arguments in (specs, specs[::-1]):
            assert f"using Index = int{bits}_t;" in function.lower(*arguments, target="sm_90a").source


def test_a_message_quotes_the_kernels_own_lines(tmp_path: Path) -> None:
    (tmp_path / "other.y").write_text("of another file\n")
    markers = [f'#line 1 "{tmp_path}/other.y"', f'/* x */ # \\\n 1 "{tmp_path}/other.y" 2', f'#li\\\nne 1 "{tmp_path}"']
    text = "\n".join(["#include <cmath> // line 1", *markers, "int of_no_type(x);\n" + ADD])
    kernel = jitgen.cpp_kernel(text, "add")
    assert kernel.text.text.count("\n") == text.count("\n")
    with pytest.raises(jitgen.CompileError, match="of_no_type") as caught:
        kernel(*torch.zeros(3, 4), 4)
    assert "of another file" not in str(caught.value)
    assert str(tmp_path) not in kernel.text.text


@pytest.mark.parametrize(
    ("text", "language", "is_refused"),
    [
        ('#include <cmath>\n#include "a/b.h"\nint x;', "cpp", False),
        ('#include "/etc/passwd"', "cpp", True),
        ('int x;\n  #include "/etc/passwd"', "cpp", True),
        ('/* x */ #include "/etc/passwd"', "cpp", True),
        ('#/* x */include "/etc/passwd"', "cpp", True),
        ('#define S "/*"\n#include "/etc/passwd"\n// */', "cpp", True),
        ('R\\\n"(" /* )"\n#include "/etc/passwd"\n// */', "cpp", True),
        ('"x??/" /* "\n#include "/etc/passwd"\n// */', "cpp", True),
        ('#inc\\ \nlude "/etc/passwd"', "cpp", True),
        ('// x\r#include "/etc/passwd"', "cuda", True),
        ('#pragma GCC dependency "/etc/passwd"', "cpp", True),
        ("#include <cmath> /* of\n */ // x", "cpp", False),
        ('#include "../secret"', "cpp", True),
        ('#inc\\\nlude "/etc/passwd"', "cpp", True),
        ("#define F </etc/passwd>\n#include F", "cpp", True),
        ('%:include "/etc/passwd"', "cpp", True),
        ('#embed "/etc/passwd"', "cpp", True),
        ('asm(".inc" "bin \\"/etc/passwd\\"");', "cpp", True),
        ("#define J(a, b) a##b\nJ(as, m)(x);", "cpp", True),
        ('asm volatile("bar.sync 0;");', "cuda", False),
        ('#line 1 "/etc/passwd"', "cpp", True),
        ('#define F "/etc/passwd"\n /* x */ # 1 F', "cpp", True),
        ("#ifdef X // of #12\n#endif\nint x; // line # 1", "cpp", False),
        ('#if __has_include("/dev/stdin")\n#endif', "cpp", True),
        ("#ifdef __has_include\n#endif", "cpp", True),
        ("#if __has_include(<cuda_fp8.h>)\n#endif", "cuda", False),
    ],
)
def test_a_manifest_compiles_no_other_file(text: str, language: str, is_refused: bool) -> None:
    assert (c_refusal(text, language) is not None) == is_refused


def test_an_integer_that_a_parameter_does_not_hold_is_refused() -> None:
    text = 'using own = unsigned char; extern "C" void stored(int64_t* x, int n, own m) { x[0] += n; x[0] += m; }'
    stored = jitgen.cpp_kernel(text, "stored")

    @jitgen.jit
    def function(x: Tensor, n: int) -> Tensor:
        stored(x, n, x.shape[0])
        return x

    def refused(least: int, greatest: int, number: int) -> Any:
        return pytest.raises(
            NumberRangeError, match=rf"(int n|own m).*holds {least} to {greatest}, and {number} is given"
        )

    x, end = torch.zeros(4, dtype=torch.int64), 2**31
    for _ in range(2):  # the first launch is traced, and the second is not
        stored(x, end - 1, 255)
        function(x, -end)
        for number in (end, -end - 1, 2**32 + 3):
            for launch in (stored, stored.lower):
                with refused(-end, end - 1, number):
                    launch(x, number, 1)
            for call in (function, function.lower):
                with refused(-end, end - 1, number):
                    call(x, number)
        for number in (-1, 256):
            with refused(0, 255, number):
                stored(x, 1, number)
        with refused(0, 255, 256):
            function(torch.zeros(256, dtype=torch.int64), 1)
    assert x[0] == 2 * (end - 1 + 255 - end + 4)
    wide = jitgen.cpp_kernel('extern "C" void wide(int64_t* x, uint64_t n) { x[0] = n; }', "wide")
    wide(x, 2**63 - 1)
    assert x[0] == 2**63 - 1
    for call in (wide, wide.lower):
        with pytest.raises(NumberRangeError, match=rf"uint64_t n .* to {2**63 - 1}, .*\n  pass a number within it$"):
            call(x, -1)
    kernel = jitgen.cuda_kernel("__global__ void fill(float* x, int n) { x[0] = n; }", "fill")
    with pytest.raises(NumberRangeError, match=r"fill.*int n"):
        kernel[1, 1].lower(jitgen.TensorSpec((5,), torch.float32), 2**32, target="sm_90a")
