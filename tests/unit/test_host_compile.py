"""The host compiler: what it is, what comes out, that it is reproducible, and what an error says."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cpp_harness import source

from jitgen.compilers import host
from jitgen.errors import CacheError, CompileError
from jitgen.runtime import cpu
from jitgen.spec import Target, Toolchain, artifact_key, host_target

pytestmark = pytest.mark.optimised

SCALE = """
#include <jitgen/entry.hpp>
#include <jitgen/parallel.hpp>
#include <jitgen/storage.hpp>

extern "C" int omp_get_thread_num();

extern "C" void scale(const jitgen::bfloat16* x, jitgen::bfloat16* out, int64_t size, int32_t threads, float factor,
                      double shift) {
#pragma omp parallel num_threads(threads)
  {
    const jitgen::Range mine = jitgen::share(size, 100, omp_get_thread_num(), threads);
    alignas(jitgen::cache_line) jitgen::bfloat16 buffer[100];
    for (int64_t at = mine.begin; at < mine.end; at += 100) {
      const int64_t count = mine.end - at < 100 ? mine.end - at : 100;
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) {
        buffer[i] = jitgen::store<jitgen::bfloat16>(jitgen::load(x[at + i]) * factor + float(shift));
      }
      jitgen::stream(out + at, buffer, count * sizeof(jitgen::bfloat16));
    }
    jitgen::stream_fence();
  }
}
"""
ENTRY = """
struct Params {
  const jitgen::bfloat16* x;
  jitgen::bfloat16* out;
  int64_t size;
  alignas(8) int32_t threads;
  alignas(8) float factor;
  double shift;

  void run() const { scale(x, out, size, threads, factor, shift); }
};

JITGEN_ENTRY(scale_of_params)
"""
PARAMETERS = "PPqifd"
TARGETS = [host_target(), Target("cpu", "generic")]


@pytest.fixture(autouse=True)
def temporary_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that does not compile is kept for reading: here where the test's own files are."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def save(directory: Path, text: str, target: Target) -> str:
    artifact = host.compile(source(text, target, "scale"))
    path = directory / f"{artifact.key}.so"  # a loaded file must not be written to
    path.write_bytes(artifact.files[artifact.binary])
    return str(path)


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 12345])
@pytest.mark.covering(2)
def test_a_kernel_runs(tmp_path: Path, target: Target, packed: bool, size: int) -> None:
    path, entry = save(tmp_path, SCALE + ENTRY * packed, target), "scale_of_params" if packed else "scale"
    assert (cpu.load_packed(path, entry) is not None) == packed
    scale = cpu.load(path, entry, PARAMETERS)
    x = torch.randn(size).bfloat16()
    for threads in (1, 2, 3):
        for offset in range(3):  # streaming stores meet every misalignment of head and tail
            held = torch.full((size + 4,), torch.nan).bfloat16()
            scale(x.data_ptr(), held[offset:].data_ptr(), size, threads, 3.0, -0.5)
            assert torch.equal(held[offset : offset + size], (x.float() * 3 - 0.5).bfloat16())
            assert held[:offset].isnan().all()
            assert held[offset + size :].isnan().all()


def test_a_kernel_shares_torchs_openmp(tmp_path: Path) -> None:
    path = save(tmp_path, SCALE, host_target())
    needed = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True).stdout
    assert "gomp" not in needed
    assert "stdc++" not in needed
    symbols = subprocess.run(["nm", "-D", path], capture_output=True, text=True, check=True).stdout
    assert "GOMP_parallel" in symbols


def test_the_same_source_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = source(SCALE, host_target(), "scale")
    first = host.compile(kernel)
    other = tmp_path / "a directory of another name"
    other.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(other))
    second = host.compile(kernel)
    assert first.files == second.files
    assert first.key == second.key
    assert first.meta == second.meta
    assert str(other).encode() not in second.files["kernel.so"]
    assert not list(other.iterdir()), "the workplace is removed"


def test_the_artifact_describes_itself() -> None:
    kernel = source(SCALE, host_target(), "scale")
    artifact = host.compile(kernel)
    tools = host.toolchain()
    assert tools is not None
    assert artifact.key == artifact_key(kernel, tools)
    assert artifact.binary == "kernel.so"
    assert artifact.files["kernel.cpp"] == SCALE.encode()
    assert artifact.meta["entry"] == "scale"
    assert artifact.meta["toolchain"] == str(tools)
    assert set(artifact.meta["headers"]) == {name for name, _ in kernel.headers}


def test_assembly_uses_the_targets_vectors() -> None:
    assert "%zmm" in host.assembly(source(SCALE, Target("cpu", "x86-64-v4")))
    v3 = host.assembly(source(SCALE, Target("cpu", "x86-64-v3")))
    assert "%ymm" in v3
    assert "%zmm" not in v3


def test_an_error_names_its_line() -> None:
    text = SCALE.replace("* factor", "* facto")
    with pytest.raises(CompileError) as caught:
        host.compile(source(text, host_target(), "scale"))
    [line] = caught.value.lines
    assert text.splitlines()[line.line - 1] == line.text
    assert "* facto" in line.text
    assert "facto" in line.message
    assert line.template is None
    assert caught.value.path is not None
    assert Path(caught.value.path).read_text() == text
    assert "error" in caught.value.log


def test_an_error_inside_a_header_is_charged_to_the_source() -> None:
    text = (
        '#include <jitgen/storage.hpp>\nextern "C" void kernel(float* x) {\n  *x = jitgen::bit_cast<float>(1.0);\n}\n'
    )
    with pytest.raises(CompileError) as caught:
        host.compile(source(text, host_target()))
    assert [line.line for line in caught.value.lines] == [3]
    assert "jitgen/base.hpp" in caught.value.lines[0].message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "g++ (Debian 12.2.0-14+deb12u1) 12.2.0\nCopyright (C) 2022 Free Software Foundation, Inc.\n",
            Toolchain("gcc", "(Debian 12.2.0-14+deb12u1) 12.2.0"),
        ),
        (
            "Ubuntu clang version 18.1.3 (1ubuntu1)\nTarget: x86_64-pc-linux-gnu\n",
            Toolchain("clang", "18.1.3 (1ubuntu1)"),
        ),
        ("", None),
    ],
)
def test_versions_are_read_whatever_the_alias(text: str, expected: Toolchain | None) -> None:
    assert host.parse_version(text) == expected


def test_the_compiler_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tools = host.toolchain()
    monkeypatch.setattr(host, "_ask_version", lambda words: pytest.fail("asked again"))
    assert host.toolchain() == tools
    assert host.fingerprint() == host.fingerprint()


def test_added_flags_come_last_and_make_another_toolchain(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = source(SCALE, host_target(), "scale")
    plain = host.compile(kernel)
    monkeypatch.setenv("JITGEN_CXXFLAGS", "-Og -DUNUSED='1 2'")
    tools, added = host.toolchain(), host.compile(kernel)
    assert tools is not None
    assert tools.version.endswith(" -Og '-DUNUSED=1 2'")
    assert added.key != plain.key
    assert added.meta["toolchain"] == str(tools)
    assert added.meta["flags"][-4:-2] == ["-Og", "-DUNUSED=1 2"]
    monkeypatch.delenv("JITGEN_CXXFLAGS")
    assert host.toolchain() != tools


def test_without_a_compiler_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITGEN_CXX", "no-such-compiler")
    assert host.toolchain() is None
    assert host.fingerprint() is None
    with pytest.raises(CompileError, match=r"no-such-compiler.*JITGEN_CXX.*install"):
        host.compile(source(SCALE, host_target()))


def test_flags_change_the_binary_and_the_key() -> None:
    kernel = source(SCALE, host_target(), "scale")
    changed = replace(kernel, options=(("flags", ["-O1"]),))
    first, second = host.compile(kernel), host.compile(changed)
    assert first.key != second.key
    assert first.files["kernel.so"] != second.files["kernel.so"]


def test_a_damaged_or_foreign_file_is_a_cache_error(tmp_path: Path) -> None:
    broken = tmp_path / "kernel.so"
    broken.write_bytes(b"\x7fELF and nothing else")
    with pytest.raises(CacheError, match="cache verify"):
        cpu.load(str(broken), "scale", PARAMETERS)
    path = save(tmp_path, SCALE, host_target())
    with pytest.raises(CacheError, match="no entry 'other'"):
        cpu.load(path, "other", PARAMETERS)


def test_a_symbol_that_nobody_has_is_a_compile_error(tmp_path: Path) -> None:
    undefined = 'extern "C" void nowhere(); extern "C" void scale() { nowhere(); }'
    with pytest.raises(CompileError, match=r"uses nowhere, .* the C library alone"):
        save(tmp_path, undefined, host_target())


def test_shares_are_even_and_complete(tmp_path: Path) -> None:
    text = """
#include <jitgen/parallel.hpp>
extern "C" void split(int64_t* begin, int64_t* end, int64_t total, int64_t unit, int64_t threads) {
  for (int64_t thread = 0; thread < threads; ++thread) {
    const jitgen::Range range = jitgen::share(total, unit, thread, threads);
    begin[thread] = range.begin;
    end[thread] = range.end;
  }
}
"""
    split = cpu.load(save(tmp_path, text, host_target()), "split", "PPqqq")
    for total, unit, threads in [
        (0, 4, 3),
        (1, 64, 4),
        (1000, 64, 7),
        (4096, 1, 5),
        (65, 64, 2),
        (2**40 + 3, 2**20, 96),
    ]:
        begin, end = torch.full((threads,), -1), torch.full((threads,), -1)
        split(begin.data_ptr(), end.data_ptr(), total, unit, threads)
        assert begin[0] == 0
        assert end[-1] == total
        assert torch.equal(begin[1:], end[:-1])
        assert (begin[begin < total] % unit == 0).all()
        assert int((end - begin).max() - (end - begin).min()) <= 2 * unit - 1
