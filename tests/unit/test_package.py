"""``jitgen.package``: packages of AOTInductor that run where jitgen cannot be imported."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from packages import QUICK, Model, Product, exported, run_elsewhere
from torch import nn
from torch.utils import cpp_extension

import jitgen
from jitgen.compilers import host, nvrtc
from jitgen.errors import UnsupportedError
from jitgen.export import source
from jitgen.export.build import Kernels, object_of
from jitgen.export.nodes import convert, is_ours, open_size
from jitgen.export.table import Row, Variant, segments_of, table_of
from jitgen.lowering import Route
from jitgen.spec import Target

pytestmark = [
    pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]


def test_a_package_runs_where_jitgen_cannot_be_imported(tmp_path: Path) -> None:
    model = Model()
    model(torch.randn(3, 64))
    path = jitgen.package(exported(model, torch.randn(5, 64), 40), tmp_path / "model.pt2", **QUICK)
    inputs = [torch.randn(rows, 64) for rows in (2, 3, 16, 17, 40)]
    torch.save((inputs, [model(x) for x in inputs]), tmp_path / "expected.pt")
    printed = run_elsewhere(
        Path(path),
        """
        again = torch._inductor.aoti_load_package(sys.argv[1])
        inputs, expected = torch.load(sys.argv[2])
        for x, y in zip(inputs, expected):
            torch.testing.assert_close(m(x), y)
        del m
        torch.testing.assert_close(again(inputs[1]), expected[1])
        for wrong in (torch.randn(41, 64), torch.randn(4, 64).double()):
            try:
                again(wrong)
            except RuntimeError:
                print("refused")
        """,
        path,
        str(tmp_path / "expected.pt"),
    )
    assert printed.split() == ["refused", "refused"]
    x = torch.randn(7, 64)
    torch.testing.assert_close(torch._inductor.aoti_load_package(path)(x), model(x))


class Several(nn.Module):
    """Two results, a gather that checks its indices, numbers, a product of a size with itself, an empty result."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(11, 8))
        self.work = jitgen.jit(self._work)

    @staticmethod
    def _work(x: torch.Tensor, index: torch.Tensor, rows: torch.Tensor, scale: float) -> Any:
        scores = torch.softmax(x @ x.T * scale, -1)
        return scores @ x, rows[index] / x.shape[0], x[:0], (x > 0).sum(0)

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> Any:
        return self.work(x.T.contiguous().T, index, self.rows, 0.5)


@pytest.mark.slow
def test_results_that_gathers_and_numbers_give(tmp_path: Path) -> None:
    model = Several().eval().requires_grad_(False)
    rows = torch.export.Dim("rows", min=2, max=20)
    example = torch.randn(5, 8), torch.arange(5)
    with torch.no_grad():
        program = torch.export.export(model, example, dynamic_shapes=({0: rows}, {0: rows}))
    path = jitgen.package(program, tmp_path / "model.pt2", **QUICK)
    found = torch._inductor.aoti_load_package(path)
    for count in (2, 3, 20):
        x, index = torch.randn(count, 8), torch.randint(0, 11, (count,))
        for ours, expected in zip(found(x, index), model(x, index), strict=True):
            torch.testing.assert_close(ours, expected)
    with pytest.raises(RuntimeError):
        found(torch.randn(2, 8), torch.tensor([0, 11]))


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.work = jitgen.jit(lambda x: x * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.work(x)  # type: ignore[no-any-return]


@pytest.mark.slow
def test_a_model_is_packaged_again(tmp_path: Path) -> None:
    """After its package was loaded in this process, and by two threads at once."""
    x = torch.randn(3, 5)
    program = exported(Doubled(), x)

    def packaged(name: str) -> str:
        return jitgen.package(program, tmp_path / f"{name}.pt2", **QUICK)

    torch.testing.assert_close(torch._inductor.aoti_load_package(packaged("first"))(x), x * 2)
    with ThreadPoolExecutor(2) as threads:
        paths = list(threads.map(packaged, ("second", "third")))
    for path in paths:
        torch.testing.assert_close(torch._inductor.aoti_load_package(path)(x), x * 2)
    run_elsewhere(Path(paths[0]), "x = torch.randn(3, 5); torch.testing.assert_close(m(x), x * 2)")


@pytest.mark.slow
def test_a_package_is_loaded_while_another_one_of_its_kernels_is_made(tmp_path: Path) -> None:
    """In a process of its own, which has loaded no such package before."""
    code = f"""
import threading, torch, jitgen
from jitgen.export import package as making
x, compiled = torch.randn(2, 7), making._compiled
work = jitgen.jit(lambda x: torch.sinh(x) - 3)
class Model(torch.nn.Module):
    def forward(self, x):
        return work(x)
program = torch.export.export(Model(), (x,))
first = jitgen.package(program, {str(tmp_path / "first.pt2")!r}, **{QUICK!r})
found = []
def meanwhile(*of):
    def load():
        found.append(torch._inductor.aoti_load_package(first)(x))
    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    return compiled(*of)
making._compiled = meanwhile
second = jitgen.package(program, {str(tmp_path / "second.pt2")!r}, **{QUICK!r})
torch.testing.assert_close([*found, torch._inductor.aoti_load_package(second)(x)], [torch.sinh(x) - 3] * 2)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("format", ["int8", "uint4", "nvfp4", "int3"])
def test_formats(format: str, tmp_path: Path) -> None:
    model, x = Model(format), torch.randn(5, 64)
    path = jitgen.package(exported(model, x), tmp_path / "model.pt2", **QUICK)
    torch.testing.assert_close(torch._inductor.aoti_load_package(path)(x), model(x))


def test_what_a_package_cannot_hold_is_refused(tmp_path: Path) -> None:
    class Random(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return jitgen.jit(lambda x: F.dropout(x, 0.5, True))(x)  # type: ignore[no-any-return]

    with pytest.raises(jitgen.UnsupportedError, match="random numbers"):
        jitgen.package(exported(Random(), torch.randn(3, 4)), tmp_path / "model.pt2")
    sizes = {0: torch.export.Dim("rows", min=2, max=9), 1: torch.export.Dim("columns", min=2, max=9)}

    program = torch.export.export(Doubled(), (torch.randn(3, 4),), dynamic_shapes=(sizes,))
    with pytest.raises(jitgen.UnsupportedError, match="one size open"):
        jitgen.package(program, tmp_path / "model.pt2")
    with pytest.raises(jitgen.UnsupportedError, match="at most 4096 values"):
        jitgen.package(exported(Doubled(), torch.randn(3, 4), 100_000), tmp_path / "model.pt2")

    class Sliced(Doubled):
        def forward(self, x: torch.Tensor, rows: int) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x[:rows])

    program = torch.export.export(Sliced(), (torch.randn(9, 4), 5), dynamic_shapes=({}, torch.export.Dim.DYNAMIC))
    with pytest.raises(jitgen.UnsupportedError, match="depends on"):
        jitgen.package(program, tmp_path / "model.pt2")


def test_segments_have_every_row() -> None:
    chosen = random.Random(0)
    variants = [Variant((), (), (index,)) for index in range(2)]
    for _ in range(200):
        rows: list[Row] = []
        key = 1
        for _ in range(chosen.randint(1, 12)):
            key += chosen.randint(1, 3)
            values = tuple(chosen.choice((7, 2 * key, -key // 3, key * key)) for _ in range(3))
            rows.append((key, chosen.choice(variants), values))
        found = list(segments_of(rows))
        for key, variant, values in rows:
            segment = [each for each in found if each.first <= key][-1]
            assert (segment.variant, segment.at(key)) == (variant, values)
    straight: list[Row] = [(key, variants[0], (3 * key, 5)) for key in range(2, 1000)]
    assert len(list(segments_of(straight))) == 1


# ---------------------------------------------------------------------------------------------------------- CUDA


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_operators_of_a_gpu_compile(backend: str) -> None:
    """The tables, cubins and C++ of operators for sm_90a, on a machine without a GPU."""
    lack = nvrtc.missing() if backend == "cuda" else None
    if lack:
        pytest.skip(f"this machine lacks {lack}")
    route = Route(backend, {"cuda": "nvrtc", "triton": "triton"}[backend], Target.parse("sm_90a"))
    kernels, tables = Kernels(), []
    for model, x in ((Model(), torch.randn(5, 64)), (Product(), torch.randn(256, 512, dtype=torch.bfloat16))):
        program = exported(model.eval().requires_grad_(False), x, 300).run_decompositions({})
        size = open_size(program)
        [call] = [node for node in program.graph.nodes if is_ours(node) and "call" in node.target.name()]
        sizes = range(2, 301, 13)
        tables.append(table_of(convert(call, size).use, sizes, route, kernels))
    letters = {step.arguments[0] for each in tables for segment in each.segments for step in segment.variant.steps}
    assert letters == ({"T", "P"} if backend == "cuda" else {"P"})
    text = source.operators_source("jitgen_test", tables, kernels.refs.values(), "CUDA")
    assert object_of(text, kernels)[:4] == b"\x7fELF"


DRIVER = """
#include <cuda.h>
#include <cstdio>
// A driver that prints what it is asked for.
static thread_local CUcontext current = nullptr;
static CUcontext of(CUdevice device) { return reinterpret_cast<CUcontext>(static_cast<intptr_t>(device + 1)); }
#define JITGEN_SAYS(...) do { std::printf(__VA_ARGS__); std::puts(current ? "" : " without a context"); } while (0)
extern "C" {
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice d) {
  std::printf("retain %d\\n", d); *context = of(d); return CUDA_SUCCESS; }
CUresult cuCtxPushCurrent(CUcontext context) { current = context; return CUDA_SUCCESS; }
CUresult cuCtxPopCurrent(CUcontext* context) { *context = current; current = nullptr; return CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule*, const void*) { JITGEN_SAYS("load"); return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction* found, CUmodule, const char*) {
  *found = reinterpret_cast<CUfunction>(8); return CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int bytes) {
  JITGEN_SAYS("shared %d", bytes); return CUDA_SUCCESS; }
CUresult cuLaunchKernelEx(const CUlaunchConfig*, CUfunction, void**, void**) { return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult, const char**) { return CUDA_SUCCESS; }
CUresult cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
    const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
    CUtensorMapL2promotion, CUtensorMapFloatOOBfill) { return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveClusters(int*, CUfunction, const CUlaunchConfig*) { return CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int*, CUdevice_attribute, CUdevice) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* version) { *version = 12000; return CUDA_SUCCESS; }
}
"""
LAUNCHES = """
#define JITGEN_CUDA
#include <operators.hpp>
#include <thread>
using namespace jitgen::operators;
int main() {
  const Kernel kernel{nullptr, "k", false, false, {}, {}};
  const Operator op{"op"};
  for (int bytes : {1000, 100000, 60000, 200000, 100000}) {
    std::thread([&] {
      const CurrentContext context(op, 1);
      function_on(op, kernel, 1, bytes);
    }).join();
  }
  check_parameters(op, 4096);
  try {
    check_parameters(op, 4104);
  } catch (const std::exception& error) {
    std::puts(error.what());
  }
}
"""


@pytest.mark.slow
def test_what_operators_ask_of_the_driver(tmp_path: Path) -> None:
    """``operators.hpp`` with a driver that prints what it is asked for: threads launch in the context of the device and
    never lower its shared memory, and many parameters are refused by an old driver."""
    headers = nvrtc.find_headers("cuda")
    if headers is None:
        pytest.skip("this machine lacks CUDA's headers")
    (tmp_path / source.HEADER).write_text(source.header())
    (tmp_path / "driver.cpp").write_text(DRIVER)
    (tmp_path / "launches.cpp").write_text(LAUNCHES)
    words = [*(host.command() or ()), "-std=c++20", "-w", "-O1"]
    for path in (".", *headers.directories, *cpp_extension.include_paths()):
        words += ["-I", str(path)]
    libraries = str(Path(torch.__file__).parent / "lib")
    linked = ["-L", libraries, f"-Wl,-rpath,{libraries}", "-ltorch", "-ltorch_cpu", "-lc10", "-ldl", "-pthread"]
    subprocess.run([*words, "-shared", "-fPIC", "driver.cpp", "-o", "libcuda.so.1"], cwd=tmp_path, check=True)
    subprocess.run([*words, "launches.cpp", *linked, "-o", "launches"], cwd=tmp_path, check=True)
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run(["./launches"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    *launches, refused = done.stdout.splitlines()
    assert launches == ["retain 1", "load", "shared 100000", "shared 200000"]
    assert refused.startswith(
        "op: a kernel takes 4104 bytes of parameters; more than 4096 need the driver of CUDA 12.1"
    )
    assert "this one is of CUDA 12.0: update the driver" in refused


@pytest.mark.parametrize(
    ("program", "name", "message"),
    [
        (nn.Linear(2, 2), "model.pt2", r"not of a Linear: pass torch\.export\.export\(model, args\)"),
        ("model.pt2", "model.pt2", "not of a str"),
        (None, "model", r"ends in \.pt2"),
        (None, "nowhere/model.pt2", "there is no directory .*nowhere; make it first"),
    ],
)
def test_what_is_no_package_is_refused(program: Any, name: str, message: str, tmp_path: Path) -> None:
    program = program or torch.export.export(nn.Linear(2, 2), (torch.randn(1, 2),))
    with pytest.raises(UnsupportedError, match=message):
        jitgen.package(program, tmp_path / name)
