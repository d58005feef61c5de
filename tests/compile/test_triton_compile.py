"""Triton to binaries, without a GPU: every row on every target, the same bytes everywhere, errors with their lines."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from jitgen.compilers import triton as compiler
from jitgen.errors import CompileError
from jitgen.ir.ops import COMPUTE_DTYPES
from jitgen.spec import KernelSource, Target, artifact_key
from tests import fresh, triton_rows

ROOT = Path(__file__).parents[2]
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")

SCALE = """import triton
import triton.language as tl


@triton.jit
def double(x):
    return x + x


@triton.jit
def scale(X, Y, factor, stride, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + at * stride, mask=at < n).to(tl.float32)
    tl.store(Y + at, (double(x) * factor).to(tl.bfloat16), mask=at < n)
"""


def scale_source(target: str = "sm_90a", text: str = SCALE, **options: object) -> KernelSource:
    given = {
        "signature": ["*bf16", "*bf16", "fp32", "i64"],
        "constants": {"BLOCK": 1024, "stride": 1},
        "multiples": [16, 16, 1, 16],
        "num_warps": 4,
    } | options
    return KernelSource("scale", "triton", "triton", Target.parse(target), text, options=tuple(sorted(given.items())))


# ------------------------------------------------------------------------------------------------------------ rows

QUICK_ROWS = (("float64", "sm_90"), ("float32", "gfx942"), ("int32", "sm_90"), ("bool", "sm_90"))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", COMPUTE_DTYPES)
@pytest.mark.quick(where=lambda dtype, target: (dtype, target) in QUICK_ROWS)
def test_every_row_compiles(dtype: str, target: str) -> None:
    artifact = compiler.compile(triton_rows.rows_source(dtype, target))
    assert artifact.files[artifact.binary][:4] == b"\x7fELF"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("storage", triton_rows.FLOAT_STORAGES)
@pytest.mark.quick(where=lambda storage, target: target == "sm_80" or (storage, target) == ("bfloat16", "gfx942"))
def test_every_storage_conversion_compiles(storage: str, target: str) -> None:
    assert compiler.compile(triton_rows.storage_source(storage, target)).binary


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", COMPUTE_DTYPES)
@pytest.mark.quick(where=lambda dtype, target: (dtype, target) in QUICK_ROWS)
def test_every_cast_and_constant_compiles(dtype: str, target: str) -> None:
    assert compiler.compile(triton_rows.cast_source(dtype, target)).binary


def test_float32_arithmetic_is_ieee() -> None:
    names = ("div", "reciprocal", "sqrt", "minimum", "maximum")
    ptx = compiler.compile(triton_rows.rows_source("float32", "sm_90a", names)).files["kernel.ptx"].decode()
    for instruction in ("div.rn.f32", "sqrt.rn.f32", "min.NaN.f32", "max.NaN.f32"):
        assert instruction in ptx
    assert not re.search(r"\.(approx|full|ftz)\b", ptx)


# -------------------------------------------------------------------------------------------------------- artifact


def test_files_and_meta() -> None:
    source = scale_source()
    artifact = compiler.compile(source)
    assert artifact.key == artifact_key(source, compiler.toolchain())
    assert list(artifact.files) == ["kernel.py", "kernel.ttir", "kernel.ptx", "kernel.cubin"]
    assert artifact.binary == "kernel.cubin"
    meta = artifact.meta
    assert (meta["entry"], meta["target"]) == ("scale", "sm_90a")
    assert meta["toolchain"].startswith("triton ")
    assert (meta["num_warps"], meta["warp_size"], meta["num_ctas"], meta["cluster"]) == (4, 32, 1, [1, 1, 1])
    assert (meta["shared_bytes"], meta["global_scratch"], meta["profile_scratch"]) == (0, [0, 1], [0, 1])
    assert not meta["cooperative"]
    assert not meta["pdl"]


def test_parameters_are_those_of_the_binary() -> None:
    artifact = compiler.compile(scale_source())
    assert artifact.meta["parameters"] == "PPfqPP"
    ptx = artifact.files["kernel.ptx"].decode()
    kinds = re.findall(r"\.param \.(\w+)(?: \.ptr)?[^,\n]* scale_param_\d+", ptx)
    assert kinds == ["u64", "u64", "f32", "u64", "u64", "u64"]
    hip = compiler.compile(scale_source("gfx942"))
    assert hip.meta["parameters"] == "PPfqPP"
    assert hip.meta["warp_size"] == 64
    offsets = re.findall(r"^\s+(?:- )?\.offset:\s+(\d+)", hip.files["kernel.amdgcn"].decode(), re.MULTILINE)
    assert offsets == ["0", "8", "16", "24", "32", "40"]


def test_divisible_parameters_give_wide_accesses() -> None:
    wide = compiler.compile(scale_source()).files["kernel.ptx"]
    narrow = compiler.compile(scale_source(multiples=[])).files["kernel.ptx"]
    assert b"ld.global.v4" in wide
    assert b"ld.global.v4" not in narrow


def test_contraction_is_off_unless_asked_for() -> None:
    text = SCALE.replace("(double(x) * factor)", "(x * factor + x)")
    assert b"fma.rn.f32" not in compiler.compile(scale_source(text=text)).files["kernel.ptx"]


def test_interpreter_artifact_is_the_source() -> None:
    artifact = compiler.compile(scale_source("interpreter"))
    assert (list(artifact.files), artifact.binary) == (["kernel.py"], "kernel.py")
    assert artifact.meta["signature"] == ["*bf16", "*bf16", "fp32", "i64"]
    assert artifact.meta["constants"] == {"BLOCK": 1024, "stride": 1}


def test_environment_is_left_alone() -> None:
    before = dict(os.environ)
    compiler.compile(scale_source())
    assert dict(os.environ) == before


# ----------------------------------------------------------------------------------------------------- determinism

_DIGESTS = """
import hashlib
from tests.compile.test_triton_compile import compiler, scale_source
for target in ("sm_90a", "gfx942"):
    files = compiler.compile(scale_source(target)).files
    print({name: hashlib.sha256(content).hexdigest() for name, content in files.items()})
"""


def _run(code: str, home: Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    given = os.environ | {"HOME": str(home), "PYTHONPATH": str(ROOT)} | environment
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, env=given, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_same_bytes_in_two_homes_and_no_cache_left(tmp_path: Path) -> None:
    """One of which cannot be written."""
    outputs = []
    (tmp_path / "file").touch()
    (tmp_path / "one").mkdir()
    for home in (tmp_path / "one", tmp_path / "file" / "home"):
        temporary = tmp_path / f"{home.name}_tmp"
        temporary.mkdir()
        done = _run(_DIGESTS, home, temporary, TMPDIR=str(temporary))
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
        assert list(temporary.iterdir()) == []
    assert list((tmp_path / "one").iterdir()) == []
    assert outputs[0] == outputs[1]
    cubin = compiler.compile(scale_source()).files["kernel.cubin"]
    assert hashlib.sha256(cubin).hexdigest() in outputs[0]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.quick(where=lambda target: target in ("sm_90", "gfx942"))
def test_no_path_of_this_machine_in_any_file(target: str) -> None:
    artifact = compiler.compile(triton_rows.rows_source("float64", target))
    for content in artifact.files.values():
        for path in (str(ROOT), sys.prefix, "/tmp/", str(Path.home()) + "/"):
            assert path.encode() not in content


# ---------------------------------------------------------------------------------------------------------- errors


def _line_of(text: str, part: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if part in line)


def test_an_error_names_its_line() -> None:
    text = SCALE.replace("double(x) * factor", "double(x) * undefined_factor")
    with pytest.raises(CompileError, match="undefined_factor") as caught:
        compiler.compile(scale_source(text=text))
    (line,) = caught.value.lines
    assert line.line == _line_of(text, "undefined_factor")
    assert "undefined_factor" in line.text
    assert "undefined_factor" in caught.value.log


def test_an_error_in_a_called_function_names_both_lines() -> None:
    text = SCALE.replace("return x + x", "return x + tl.arange(0, 3)")
    with pytest.raises(CompileError) as caught:
        compiler.compile(scale_source(text=text))
    lines = [line.line for line in caught.value.lines]
    assert lines == [_line_of(text, "tl.arange(0, 3)"), _line_of(text, "double(x) * factor")]


def test_a_syntax_error_names_its_line() -> None:
    text = SCALE.replace("return x + x", "return x +")
    with pytest.raises(CompileError) as caught:
        compiler.compile(scale_source(text=text))
    assert caught.value.lines[0].line == _line_of(text, "return x +")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"signature": ["*bf16", "*bf16", "fp32"]}, "takes X, Y, factor, n"),
        ({"signature": ["*bf16", "*bf16", "bf16", "i64"]}, "neither a pointer nor"),
        ({"num_warps": 3}, "power of 2"),
    ],
)
def test_options_that_do_not_fit(change: dict[str, object], message: str) -> None:
    with pytest.raises(CompileError, match=message):
        compiler.compile(scale_source(**change))


def test_a_cpu_target_is_refused() -> None:
    with pytest.raises(CompileError, match="x86-64-v3"):
        compiler.compile(replace(scale_source(), target=Target.parse("x86-64-v3")))


def test_interpreting_and_compiling_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(CompileError, match="TRITON_INTERPRET"):
        compiler.compile(scale_source())


# --------------------------------------------------------------------------------------------------------- imports


def test_toolchain_does_not_import_triton(tmp_path: Path) -> None:
    code = "import sys; from jitgen.compilers import triton; print(triton.toolchain(), 'triton' in sys.modules)"
    done = fresh.run(code, cwd=tmp_path, env=os.environ | {"HOME": str(tmp_path)})
    assert re.fullmatch(r"triton \d+\.\d+\.\S+ False\n", done.stdout), done.stderr
