"""CUDA C++ compiles without a GPU: every operation for every architecture, and what the machine code looks like."""

from __future__ import annotations

import hashlib
import json
import os
import re

import pytest

from jitgen.codegen import environment
from jitgen.compilers import disassemble, nvrtc
from jitgen.errors import CompileError, UnsupportedError
from jitgen.ir.ops import COMPUTE_DTYPES, OPS
from jitgen.spec import Artifact, KernelSource, Target, Toolchain
from tests import fresh

pytestmark = pytest.mark.skipif(nvrtc.toolchain() is None, reason=f"NVRTC: {nvrtc.missing()}")

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a")
C_TYPES = {"float32": "float", "float64": "double", "bool": "bool"}


def source(text: str, arch: str = "sm_90a", **options: object) -> KernelSource:
    text = "#include <jitgen/vector.cuh>\n" + text
    headers = environment.headers(environment.family_folder("reduction"), text)
    return KernelSource(
        "kernel", "cuda", "nvrtc", Target.parse(arch), text, headers, options=tuple(sorted(options.items()))
    )


def compile(text: str, arch: str = "sm_90a", **options: object) -> Artifact:
    return nvrtc.compile(source(text, arch, **options))


def machine_code(artifact: Artifact) -> str:
    return disassemble.sass(artifact.files["kernel.cubin"])


# ---------------------------------------------------------------------------------------------------------- headers


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", COMPUTE_DTYPES)
@pytest.mark.quick(where=lambda arch, dtype: arch == "sm_90a" or dtype == "float32")
def test_every_operation_is_defined(dtype: str, arch: str) -> None:
    kind = C_TYPES.get(dtype, f"{dtype}_t")
    lines = []
    for op in OPS.values():
        if dtype in op.domain:
            operands = ["c[i]", "x[i]", "y[i]"] if op.name == "where" else ["x[i]", "y[i]", "z[i]"][: op.arity]
            result = "bool" if op.predicate else kind
            call = f"jitgen::{op.name}({', '.join(operands)})"
            lines.append(f'static_assert(Same<decltype({call}), {result}>, "{op.name}"); sum += double({call});')
    text = "\n".join(
        (
            "template <class A, class B> constexpr bool Same = false;",
            "template <class A> constexpr bool Same<A, A> = true;",
            f'extern "C" __global__ void kernel(const {kind}* x, const {kind}* y, const {kind}* z, const bool* c,',
            "    double* out) { int i = threadIdx.x; double sum = 0;",
            *lines,
            "out[i] = sum; }",
        )
    )
    assert compile(text, arch).meta["registers"] > 0


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_cast_is_defined(arch: str) -> None:
    kinds = [C_TYPES.get(dtype, f"{dtype}_t") for dtype in COMPUTE_DTYPES]
    casts = [f"sum += double(jitgen::cast<{to}>({kind}(x[i])));" for kind in kinds for to in kinds]
    text = 'extern "C" __global__ void kernel(const double* x, double* out) { int i = threadIdx.x; double sum = 0;'
    compile("\n".join((text, *casts, "out[i] = sum; }")), arch)


CONVERSION = (
    'extern "C" __global__ void kernel(const STORAGE* x, STORAGE* y) {'
    "  y[0] = jitgen::store<STORAGE>(jitgen::load(x[0]) * 3.0f); }"
)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("storage", "instruction"),
    [("float16", "F2FP"), ("bfloat16", "F2FP"), ("float8_e4m3fn", "F2FP.*E4M3"), ("float8_e5m2", "F2FP.*E5M2")],
)
@pytest.mark.quick(where=lambda storage, arch: arch == "sm_90a" or (storage, arch) == ("float8_e4m3fn", "sm_80"))
def test_conversions_use_the_hardware(storage: str, instruction: str, arch: str) -> None:
    code = machine_code(compile(CONVERSION.replace("STORAGE", f"jitgen::{storage}"), arch))
    has_instruction = arch != "sm_80" or not storage.startswith("float8")
    assert bool(re.search(instruction, code)) == has_instruction


COPY = (
    'extern "C" __global__ void kernel(const jitgen::STORAGE* x, jitgen::STORAGE* y) {'
    "  auto v = jitgen::LOAD<COUNT>(x + threadIdx.x * COUNT);"
    "  jitgen::STORE(y + threadIdx.x * COUNT, v); }"
)


@pytest.mark.parametrize(
    ("load", "store", "ldg", "stg"),
    [
        ("load_vector", "store_vector", r"LDG\.E\.128(\.CONSTANT)? ", r"STG\.E\.128 "),
        ("load_vector_once", "store_vector_streaming", r"LDG\.E\.NA\.128 ", r"STG\.E\.EF\.128 "),
        ("load_vector_streaming", "store_vector_streaming", r"LDG\.E\.EF\.128 ", r"STG\.E\.EF\.128 "),
    ],
)
@pytest.mark.parametrize("bytes_per_thread", [16, 32])
@pytest.mark.quick(where=lambda bytes_per_thread: bytes_per_thread == 32)
def test_vectors_move_16_bytes_at_once(load: str, store: str, ldg: str, stg: str, bytes_per_thread: int) -> None:
    text = COPY.replace("LOAD", load).replace("STORE", store).replace("STORAGE", "bfloat16")
    code = machine_code(compile(text.replace("COUNT", str(bytes_per_thread // 2)), "sm_90a"))
    assert len(re.findall(ldg, code)) == len(re.findall(stg, code)) == bytes_per_thread // 16
    assert len(re.findall("LDG", code)) == bytes_per_thread // 16


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("count", [1, 2, 4, 8, 16, 32])
@pytest.mark.quick(where=lambda arch, count: arch == "sm_90a")
def test_narrow_vectors_compile(count: int, arch: str) -> None:
    for load in ("load_vector", "load_vector_once", "load_vector_streaming"):
        text = COPY.replace("LOAD", load).replace("STORE", "store_vector_streaming")
        compile(text.replace("STORAGE", "float8_e5m2").replace("COUNT", str(count)), arch)


# ---------------------------------------------------------------------------------------------------------- compiler


def test_the_artifact_is_complete() -> None:
    shared = 'extern "C" __global__ void kernel(float* x) { __shared__ float s[64]; s[threadIdx.x] = x[threadIdx.x];'
    artifact = compile(shared + " __syncthreads(); x[threadIdx.x] = s[63 - threadIdx.x]; }")
    assert artifact.binary == "kernel.cubin"
    assert artifact.files["kernel.cubin"].startswith(b"\x7fELF")
    assert b".target sm_90a" in artifact.files["kernel.ptx"]
    assert artifact.meta["entry"] == "kernel"
    assert artifact.meta["target"] == "sm_90a"
    assert artifact.meta["shared_bytes"] == 256
    assert artifact.meta["spill_bytes"] == 0
    usage = disassemble.resource_usage(artifact.files["kernel.cubin"], "kernel")
    assert usage["registers"] == artifact.meta["registers"] > 0


def test_contraction_is_off_unless_asked_for() -> None:
    text = 'extern "C" __global__ void kernel(float* x) { x[0] = x[1] * x[2] + x[3]; }'
    assert "FFMA" not in machine_code(compile(text))
    assert "FFMA" in machine_code(compile(text, fmad=True))


def test_failing_lines_are_named() -> None:
    text = 'extern "C" __global__ void kernel(float* x) {\n  x[0] = nosuch(x[1]);\n  x[1] = jitgen::bfloat16{};\n}'
    with pytest.raises(CompileError) as caught:
        compile(text)
    first, second = caught.value.lines
    assert (first.line, second.line) == (3, 4)
    assert first.text == "  x[0] = nosuch(x[1]);"
    assert "nosuch" in first.message
    assert "nosuch" in caught.value.log


def test_errors_inside_a_header_are_told_at_the_line_that_led_there() -> None:
    header = "\ntemplate <class T> __device__ T field(T a) { return a.x; }\n__device__ int broken() { return nosuch; }"
    text = '#include <jitgen/x.cuh>\nextern "C" __global__ void kernel(int* x) {\n  x[0] = field(x[1]);\n}'
    with pytest.raises(CompileError) as caught:
        nvrtc.compile(KernelSource("kernel", "cuda", "nvrtc", Target.parse("sm_80"), text, (("jitgen/x.cuh", header),)))
    lines = {line.line: line for line in caught.value.lines}
    assert set(lines) == {0, 3}
    assert "jitgen/x.cuh line 2" in lines[3].message
    assert "field(x[1])" in lines[3].text
    assert "jitgen/x.cuh line 3" in lines[0].message


def test_an_error_at_the_end_is_told_at_the_last_line() -> None:
    with pytest.raises(CompileError) as caught:
        compile('extern "C" __global__ void kernel() {\n')
    assert caught.value.lines[0].line == 2


def test_an_unknown_architecture_is_a_compile_error() -> None:
    with pytest.raises(UnsupportedError, match="sm_91"):
        compile('extern "C" __global__ void kernel() {}', "sm_91")


def test_missing_headers_say_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "find_headers", lambda package: None)
    assert nvrtc.toolchain(("cuda",)) is None
    assert "pip install" in (nvrtc.missing(("cuda",)) or "")


def test_the_toolchain_names_every_header_package() -> None:
    tools = nvrtc.toolchain(("nvidia-cutlass", "cuda"))
    if tools is None:
        pytest.skip(nvrtc.missing(("nvidia-cutlass", "cuda")) or "")
    assert isinstance(tools, Toolchain)
    assert {"nvidia-cutlass"} < {package for package, _ in tools.headers}


IN_A_PROCESS = """
import hashlib, json, sys
from jitgen.compilers import nvrtc
from jitgen.spec import KernelSource, Target
name, arch, text, headers = json.loads(sys.argv[1])
source = KernelSource(name, "cuda", "nvrtc", Target.parse(arch), text, tuple(map(tuple, headers)))
artifact = nvrtc.compile(source)
print(json.dumps([artifact.key, {n: hashlib.sha256(data).hexdigest() for n, data in artifact.files.items()}]))
"""


def test_the_same_source_gives_the_same_bytes_elsewhere(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = source(CONVERSION.replace("STORAGE", "jitgen::float8_e4m3fn"))
    artifact = nvrtc.compile(here)
    # A file where a relative include would look must not be found.
    decoy = tmp_path / "jitgen" / artifact.key[:12] / "jitgen"
    decoy.mkdir(parents=True)
    (decoy / "vector.cuh").write_text("#error decoy\n")
    question = json.dumps([here.name, here.target.arch, here.text, here.headers])
    answer = fresh.run(IN_A_PROCESS, question, cwd=tmp_path, env=os.environ | {"HOME": str(tmp_path)})
    assert answer.returncode == 0, answer.stderr
    key, digests = json.loads(answer.stdout)
    assert key == artifact.key
    assert digests == {name: hashlib.sha256(data).hexdigest() for name, data in artifact.files.items()}


def test_added_flags_come_last_and_make_another_toolchain(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = source('extern "C" __global__ void kernel(float* x) { x[threadIdx.x] = ADDED; }')
    monkeypatch.setenv("JITGEN_NVRTCFLAGS", "-lineinfo -DADDED=3.0f")
    tools, added = nvrtc.toolchain(), nvrtc.compile(kernel)
    assert tools is not None
    assert tools.version.endswith(" -lineinfo -DADDED=3.0f")
    assert added.meta["toolchain"] == str(tools)
    assert "kernel.cu" in added.files["kernel.ptx"].decode()  # the line of an instruction
    monkeypatch.setenv("JITGEN_NVRTCFLAGS", "-DADDED=4.0f")
    assert nvrtc.compile(kernel).key != added.key
    monkeypatch.delenv("JITGEN_NVRTCFLAGS")
    assert nvrtc.toolchain() != tools
    with pytest.raises(CompileError, match="ADDED"):
        nvrtc.compile(kernel)
