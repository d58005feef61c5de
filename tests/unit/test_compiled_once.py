"""The compiler of tests: kernels that differ in their name are compiled once; all else is as without it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

import jitgen
from jitgen.compilers import host
from jitgen.errors import CompileError
from jitgen.spec import KernelSource
from tests import compiled_once

pytestmark = pytest.mark.skipif(shutil.which(compiled_once.PROGRAM) is None, reason="needs g++")


@pytest.fixture
def kept(tmp_path: Path, own_store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's object files are."""
    kept, directory = tmp_path / "objects", tmp_path / "program"
    directory.mkdir()
    compiler = shutil.which(compiled_once.PROGRAM) or ""
    monkeypatch.setenv("PATH", compiled_once.on_path(compiler, str(kept), str(directory)))
    return kept


def objects(kept: Path) -> list[Path]:
    return sorted(kept.glob("*.o"))


def test_a_kernel_of_another_name_is_linked(kept: Path) -> None:
    def first(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1

    def the_second_one(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1

    def another(x: torch.Tensor) -> torch.Tensor:
        return x * 2 - 1

    x = torch.randn(7, 33)
    for function, number in ((first, 1), (the_second_one, 1), (another, 2)):
        assert torch.equal(jitgen.jit(function)(x), function(x))
        assert len(objects(kept)) == number
    assert len(list(kept.glob("*.gch"))) == 1, "what they include is compiled once"


def test_a_kernel_that_calls_the_c_library_is_linked_with_it(kept: Path) -> None:
    x = torch.randn(9, dtype=torch.float64)
    torch.testing.assert_close(jitgen.jit(lambda x: torch.erf(x))(x), torch.erf(x))
    (path,) = objects(kept)
    assert "erf" in compiled_once.symbols_of(path.read_bytes())[1] - compiled_once.RUNTIME


def test_flags_and_headers_are_distinguished(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(5)
    for number, flags in enumerate(("-Og", "-Og -DUNUSED", "-O1"), 1):
        monkeypatch.setenv("JITGEN_CXXFLAGS", flags)
        assert torch.equal(jitgen.jit(lambda x: x + 1)(x), x + 1)
        assert len(objects(kept)) == number
    header = jitgen.jit(lambda x: x + 1).lower(x)._lowered.render(0)[0]
    host.compile(header)
    text = dict(header.headers)
    changed = {**text, "jitgen/base.hpp": text["jitgen/base.hpp"] + "\n// changed\n"}
    host.compile(KernelSource(header.name, "cpp", "host", header.target, header.text, tuple(changed.items())))
    assert len(objects(kept)) == 4


def test_a_kernel_that_does_not_compile_has_the_compilers_error_once(kept: Path) -> None:
    source = jitgen.jit(lambda x: x + 1).lower(torch.randn(5))._lowered.render(0)[0]
    text = source.text.replace("JITGEN_ENTRY", "unknown;\nJITGEN_ENTRY")
    with pytest.raises(CompileError) as caught:
        host.compile(KernelSource(source.name, "cpp", "host", source.target, text, source.headers))
    assert [line.text for line in caught.value.lines] == ["unknown;"]
    assert "one.cpp" not in str(caught.value)
    assert objects(kept) == []


def test_other_commands_go_to_the_compiler(kept: Path) -> None:
    assert host.toolchain() is not None
    source = jitgen.jit(lambda x: x + 1).lower(torch.randn(5))._lowered.render(0)[0]
    assert source.name in host.assembly(source)
    assert b"kernel_of_mine_packed" in host.object_file(source, "kernel_of_mine")
    assert objects(kept) == []


def test_what_was_not_used_for_longest_is_deleted(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        path = kept / f"{number}.o"
        path.write_bytes(bytes(100))
        os.utime(path, (number, number))
    monkeypatch.setattr(compiled_once, "KEPT_BYTES", 250)
    compiled_once.prune(str(kept))
    assert [path.name for path in objects(kept)] == ["2.o", "3.o"]
