"""The load_inline route: a real torch operator from a generated source, for C++ and (compiled only) for CUDA."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from jitgen.codegen import environment
from jitgen.compilers import load_inline
from jitgen.errors import CacheError, CompileError
from jitgen.runtime import torch_operator
from jitgen.spec import Artifact, KernelSource, Target, artifact_key, host_target

WAVE = """
#include <jitgen/math.hpp>
#include <jitgen/storage.hpp>

namespace {
void wave(const jitgen::bfloat16* x, float* sine, const float* y, float* sum, int64_t size, int32_t threads,
          bool negate, float scale) {
#pragma omp parallel for simd num_threads(threads)
  for (int64_t i = 0; i < size; ++i) {
    sine[i] = jitgen::sin(jitgen::load(x[i])) * (negate ? -scale : scale);
    sum[i] = jitgen::load(x[i]) + y[i];
  }
}
}  // namespace
"""
SCALE = """
extern "C" __global__ void scale(const float* x, float* out, long long size, float factor) {
  const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < size) out[i] = x[i] * factor;
}
"""


@pytest.fixture(autouse=True)
def temporary_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that does not compile is kept for reading: here where the test's own files are."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def source(text: str = WAVE) -> KernelSource:
    return KernelSource(
        "wave",
        "cpp",
        "load_inline",
        host_target(),
        text,
        environment.headers(environment.family_folder("reduction"), text),
    )


@pytest.fixture(scope="module")
def artifact() -> Artifact:
    lack = load_inline.missing()
    if lack:
        pytest.skip(f"this machine lacks {lack}")
    return load_inline.compile(source())


@pytest.fixture(scope="module")
def path(artifact: Artifact, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("operator") / artifact.binary
    path.write_bytes(artifact.files[artifact.binary])
    return path


@pytest.mark.slow
def test_building_registers_nothing(artifact: Artifact) -> None:
    code = f"import torch; assert not hasattr(torch.ops.jitgen, {artifact.meta['operator']!r})"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert artifact.binary == "kernel.so"
    assert artifact.meta["operator"].startswith("wave_")
    assert artifact.files["kernel.cpp"].startswith(WAVE.encode())


def test_the_operator_computes(artifact: Artifact, path: Path) -> None:
    wave = torch_operator.load(str(path), artifact.meta["operator"])
    assert torch_operator.load(str(path), artifact.meta["operator"]) is wave
    x, y = torch.randn(101).bfloat16(), torch.randn(101)
    sine, total = torch.full((101,), torch.nan), torch.full((101,), torch.nan)
    wave([x, y], [sine, total], [2, 4], [0, 0], [100, 2, 1], [3.0], [])
    torch.testing.assert_close(sine[:100], -3 * x[1:].float().sin())
    torch.testing.assert_close(total[:100], x[1:].float() + y[1:])
    assert sine[100].isnan()
    assert total[100].isnan()


@pytest.mark.slow
def test_the_operator_works_under_torch_compile(artifact: Artifact, path: Path) -> None:
    wave = torch_operator.load(str(path), artifact.meta["operator"])

    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        sine, total = torch.empty_like(y), torch.empty_like(y)
        wave([x, y], [sine, total], [0, 0], [0, 0], [y.numel(), 1, 0], [1.0], [])
        return sine * 2 + total

    x, y = torch.randn(64).bfloat16(), torch.randn(64)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, y), model(x, y))


@pytest.mark.parametrize(("integers", "how"), [([64, 1], "too few"), ([64, 1, 0, 0], "too many")])
def test_wrong_arguments_are_errors(artifact: Artifact, path: Path, integers: list[int], how: str) -> None:
    wave = torch_operator.load(str(path), artifact.meta["operator"])
    x, y = torch.randn(64).bfloat16(), torch.randn(64)
    with pytest.raises(RuntimeError, match=f"{how} values in the argument integers"):
        wave([x, y], [y.clone(), y.clone()], [0, 0], [0, 0], integers, [1.0], [])


@pytest.mark.slow
def test_a_new_process_needs_no_compiler(artifact: Artifact, path: Path) -> None:
    code = f"""
import torch
torch.ops.load_library({str(path)!r})
x, y, sine, total = torch.randn(8).bfloat16(), torch.randn(8), torch.empty(8), torch.empty(8)
torch.ops.jitgen.{artifact.meta["operator"]}([x, y], [sine, total], [0, 0], [0, 0], [8, 1, 0], [1.0], [])
torch.testing.assert_close(sine, x.float().sin())
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={"PATH": "/nonexistent"})


@pytest.mark.slow
def test_building_is_reproducible_and_keyed(artifact: Artifact) -> None:
    again = load_inline.compile(source())
    assert again.files == artifact.files
    tools = load_inline.toolchain()
    assert tools is not None
    assert dict(tools.headers)["torch"] == torch.__version__
    assert again.key == artifact.key == artifact_key(load_inline.with_operator(source()), tools)
    assert load_inline.with_operator(load_inline.with_operator(source())) == load_inline.with_operator(source())


def test_ninja_is_found_beside_python(monkeypatch: pytest.MonkeyPatch) -> None:
    beside = Path(sys.executable).parent / "ninja"
    if not beside.exists():
        pytest.skip("ninja is not installed beside Python")
    monkeypatch.setattr(shutil, "which", lambda name, path=None: str(beside) if path else None)
    assert load_inline._ninja() == str(beside)


def test_an_error_names_its_line() -> None:
    text = WAVE.replace("jitgen::sin(", "jitgen::sinus(")
    with pytest.raises(CompileError) as caught:
        load_inline.compile(source(text))
    [line] = caught.value.lines
    assert "jitgen::sinus(" in line.text
    assert text.splitlines()[line.line - 1] == line.text


def test_a_damaged_library_is_a_cache_error(tmp_path: Path) -> None:
    broken = tmp_path / "kernel.so"
    broken.write_bytes(b"\x7fELF and nothing else")
    with pytest.raises(CacheError, match="cannot load the operator library"):
        torch_operator.load(str(broken), "wave_of_nothing")


@pytest.mark.slow
def test_the_cuda_operator_compiles(tmp_path: Path) -> None:
    """nvcc takes the generated source with its registration; linking and running need a CUDA build of torch."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    kernel = replace(source(SCALE), name="scale", language="cuda", target=Target.parse("sm_90a"), headers=())
    complete = load_inline.with_operator(kernel)
    (tmp_path / "kernel.cu").write_text(complete.text)
    for name, text in complete.headers:
        (tmp_path / name).write_text(text)
    include = Path(torch.__file__).parent / "include"
    command = [nvcc, "-c", "-std=c++17", "-arch=sm_90a", "-I", ".", "-I", str(include), "kernel.cu", "-o", "kernel.o"]
    subprocess.run(command, cwd=tmp_path, check=True)


@pytest.mark.skipif(torch.version.cuda is not None, reason="for CPU builds of torch")
def test_without_cuda_libraries_the_error_says_so() -> None:
    kernel = replace(source(SCALE), language="cuda", target=Target.parse("sm_90a"))
    with pytest.raises(CompileError, match="lacks"):
        load_inline.compile(kernel)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_cuda_operator_runs(tmp_path: Path) -> None:
    major, minor = torch.cuda.get_device_capability()
    target = Target.parse(f"sm_{major}{minor}{'a' if major >= 9 else ''}")
    kernel = replace(source(SCALE), name="scale", language="cuda", target=target, headers=())
    artifact = load_inline.compile(kernel)
    path = tmp_path / artifact.binary
    path.write_bytes(artifact.files[artifact.binary])
    scale = torch_operator.load(str(path), artifact.meta["operator"])
    x = torch.randn(1001, device="cuda")
    out = torch.full_like(x, torch.nan)
    scale([x], [out], [4], [0], [1000], [2.5], [8, 1, 1, 128, 1, 1, 0])
    torch.testing.assert_close(out[:1000], x[1:] * 2.5)
    assert out[1000].isnan()
