"""``record``, ``jitgen prewarm`` and strict serving, from one store to another and from one process to the next."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import jitgen
from jitgen import settings
from jitgen.cli.group import jitgen as command
from jitgen.compilers import host, nvrtc
from jitgen.deploy import manifest as manifests
from jitgen.errors import CacheError, UnsupportedError
from tests import fresh

pytestmark = pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")

forked = multiprocessing.get_context("fork")

PROGRAM = """
import torch
import jitgen
from tests import fresh

@jitgen.jit
def gate(x, y, scale):
    return torch.relu(x) * y * scale

compiled = []
jitgen.on_compile(compiled.append)
x, y = torch.randn(3, 50), torch.randn(50)
torch.testing.assert_close(gate(x, y, 2.0), torch.relu(x) * y * 2.0)
torch.testing.assert_close(gate(x.double(), y.double(), 2.0), torch.relu(x).double() * y.double() * 2.0)
print(len(compiled))
"""


@pytest.fixture(autouse=True)
def _plain_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in settings.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JITGEN_CACHE_DIR", str(tmp_path / "store"))


def run_program(**environment: str) -> subprocess.CompletedProcess[str]:
    return fresh.run(PROGRAM, env=dict(os.environ) | environment)


def prewarm(manifest: Path, *targets: str, code: int = 0) -> Result:
    options = [word for target in targets for word in ("--target", target)]
    result = CliRunner().invoke(command, ["prewarm", str(manifest), *options, "--jobs", "1", "--json"])
    assert result.exit_code == code, (result.output, result.exception)
    return result


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What another process recorded, in a store that nothing here reads."""
    directory = tmp_path_factory.mktemp("development")
    done = run_program(JITGEN_RECORD=str(directory / "specs.json"), JITGEN_CACHE_DIR=str(directory / "store"))
    assert done.returncode == 0, done.stderr
    return (directory / "specs.json").read_text()


@pytest.fixture
def manifest(recorded: str, tmp_path: Path) -> Path:
    path = tmp_path / "specs.json"
    path.write_text(recorded)
    return path


def test_a_prewarmed_store_serves_strictly(manifest: Path, tmp_path: Path) -> None:
    refused = run_program(JITGEN_STRICT="1")
    assert "CacheMissError" in refused.stderr
    report = json.loads(prewarm(manifest, "cpu").stdout)
    assert report["complete"]
    assert {(entry["name"], entry["origin"]) for entry in report["entries"]} == {("gate", "compiled")}
    assert len(report["entries"]) == 2 * 2, "float32 and float64, for several rows and for one"
    served = run_program(JITGEN_STRICT="1", JITGEN_CXX="/nonexistent/g++")
    assert served.returncode == 0, served.stderr
    assert served.stdout.strip() == "0"


def test_the_second_prewarm_compiles_nothing(manifest: Path) -> None:
    prewarm(manifest, "cpu", "x86-64-v2")
    report = json.loads(prewarm(manifest, "cpu", "x86-64-v2").stdout)
    assert {entry["origin"] for entry in report["entries"]} == {"store"}
    assert len({entry["key"] for entry in report["entries"]}) == len(report["entries"])


def test_a_manifest_names_no_device_no_path_and_no_code(manifest: Path, tmp_path: Path) -> None:
    text = manifest.read_text()
    assert str(tmp_path) not in text
    assert "x86" not in text
    assert "relu(" not in text


@pytest.mark.skipif(nvrtc.toolchain() is None, reason="needs NVRTC")
def test_gpu_targets_without_a_gpu(manifest: Path) -> None:
    """What a CPU recorded is built for GPUs: a manifest names no kind of device."""
    report = json.loads(prewarm(manifest, "sm_80", "sm_90a").stdout)
    assert {entry["target"] for entry in report["entries"]} == {"sm_80", "sm_90a"}
    assert {entry["origin"] for entry in report["entries"]} == {"compiled"}


@pytest.mark.skipif(nvrtc.toolchain() is None, reason="needs NVRTC")
@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.quick(where=lambda rows, backend: (rows, backend) == (1, "cuda"))
def test_what_a_cpu_recorded_serves_a_gpu_strictly(
    rows: int, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quantised weights lie otherwise there; a call of one row stands for calls of many, and the other way round."""

    def function(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        h = torch.nn.functional.silu(torch.nn.functional.linear(x, up))
        return torch.nn.functional.rms_norm(torch.nn.functional.linear(h, down), (32,))

    up, down = jitgen.quantize(torch.randn(48, 64), "uint4", 32), jitgen.quantize(torch.randn(32, 48), "int8")
    path = tmp_path / "specs.json"
    with jitgen.record(path):
        jitgen.jit(function)(torch.randn(rows, 64), up, down)
    assert "mma" not in path.read_text()
    monkeypatch.setenv("JITGEN_CACHE_DIR", str(tmp_path / "deployed"))
    monkeypatch.setenv("JITGEN_BACKEND", backend)
    schedules = importlib.import_module("jitgen.families.gemm.schedule")
    monkeypatch.setattr(schedules, "ROW_BUCKETS", (1, 4))  # fewer kernels to compile
    content = json.loads(path.read_text())
    for entry in content["entries"]:
        entry["backend"] = backend
    path.write_text(json.dumps(content))
    report = jitgen.prewarm(path, ["sm_90a"])  # in this process, where the buckets are those
    assert report.count("compiled") + report.count("store") == len(report.entries)
    weights = [
        jitgen.TensorSpec(tuple(w.shape), torch.float32, format=w.format, group_size=w.group_size) for w in (up, down)
    ]
    with jitgen.strict():
        for count in (1, 2, 3, 4):
            x = jitgen.TensorSpec((count, 64), torch.float32)
            low = jitgen.jit(function).lower(x, *weights, target="sm_90a", backend=backend)
            assert {kernel["origin"] for kernel in low.compile().report} == {"store"}


@pytest.mark.parametrize("strided_first", [False, True])
@pytest.mark.slow
def test_what_was_called_before_does_not_change_a_key(
    strided_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strides of which a reshape needs a copy, rows too long to be kept: recorded and served in opposite orders."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.reshape(-1) + 1, torch.softmax(x, -1)

    calls = [torch.randn(6, 8), torch.randn(8, 6).t(), torch.randn(2, 300_000)]
    order = list(reversed(calls)) if strided_first else calls
    path = tmp_path / "specs.json"
    with jitgen.record(path):
        recorded = jitgen.jit(function)
        for x in order:
            recorded(x)
    monkeypatch.setenv("JITGEN_CACHE_DIR", str(tmp_path / "deployed"))
    jitgen.prewarm(path, ["cpu"])
    served = jitgen.jit(function)
    with jitgen.strict():
        for x in reversed(order):
            for found, wanted in zip(served(x), function(x), strict=True):
                torch.testing.assert_close(found, wanted)
    contiguous, strided = (served.lower(call) for call in calls[:2])
    assert contiguous.key == jitgen.jit(function).lower(calls[0]).key
    assert contiguous.key != strided.key


@pytest.mark.slow
def test_a_step_of_decoding_prewarms_the_prefill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(q: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
        return torch.softmax(q * cos, -1)

    def norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (24,), w)

    def calls(batch: int, length: int) -> list[tuple[torch.Tensor, ...]]:
        return [
            (torch.randn(batch, 3, length, 24), torch.randn(length, 24)),
            (torch.randn(batch, length, 24), torch.randn(24)),
        ]

    path = tmp_path / "specs.json"
    with jitgen.record(path):
        for function, arguments in zip((attend, norm), calls(1, 1), strict=True):
            jitgen.jit(function)(*arguments)
    monkeypatch.setenv("JITGEN_CACHE_DIR", str(tmp_path / "deployed"))
    jitgen.prewarm(path, ["cpu"])
    with jitgen.strict():
        for batch, length in ((1, 1), (1, 7), (2, 1), (3, 5)):
            for function, arguments in zip((attend, norm), calls(batch, length), strict=True):
                torch.testing.assert_close(jitgen.jit(function)(*arguments), function(*arguments))


def test_a_function_for_one_row_is_recorded_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "specs.json"

    @jitgen.jit
    def single(x: torch.Tensor) -> torch.Tensor:
        assert x.shape[0] == 1
        return x.expand(3, 5) * 2

    with jitgen.record(path):
        single(torch.randn(1, 5))
    assert jitgen.prewarm(path, ["cpu"]).count("store") == 1


def test_a_target_for_which_there_is_nothing_is_an_error(manifest: Path) -> None:
    content = json.loads(manifest.read_text())
    for entry in content["entries"]:
        entry["backend"] = "cpp"  # as a function has it that asks for this backend
    manifest.write_text(json.dumps(content))
    result = prewarm(manifest, "cpu", "sm_90a", code=1)
    report = json.loads(result.stdout)
    assert not report["complete"]
    assert {entry["origin"] for entry in report["entries"] if entry["target"] == "sm_90a"} == {"skipped"}
    assert "is for sm_90a" in result.stderr


def test_what_does_not_compile_is_listed_and_the_rest_is_built(manifest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITGEN_CXX", "/nonexistent/g++")
    result = prewarm(manifest, "cpu", code=1)
    report = json.loads(result.stdout)
    assert {entry["origin"] for entry in report["entries"]} == {"failed"}
    assert "gate(float32[" in result.stderr
    assert result.stderr.count("source kept at") == 1, "a reason is given once"
    assert f"and {len(report['entries']) - 1} more failed for the same reason" in result.stderr


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"schema": 0, "entries": []}', '{"schema": 1}'])
def test_an_unreadable_manifest(tmp_path: Path, content: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(content)
    assert "manifest" in prewarm(path, "cpu", code=2).stderr


def test_wrong_use(manifest: Path) -> None:
    runner = CliRunner()
    assert "--target" in runner.invoke(command, ["prewarm", str(manifest)]).stderr
    assert runner.invoke(command, ["prewarm", "absent.json", "--target", "cpu"]).exit_code == 2
    assert "unknown target" in prewarm(manifest, "sm90", code=1).stderr


def test_recordings_merge(tmp_path: Path) -> None:
    path = tmp_path / "specs.json"
    function = jitgen.jit(lambda x: x * 2)
    for dtype in (torch.float32, torch.float64, torch.float32):
        with jitgen.record(path):
            function(torch.randn(5, dtype=dtype))
    assert len(json.loads(path.read_text())["entries"]) == 2
    assert jitgen.prewarm(path, ["cpu"]).count("store") == 2


@pytest.mark.parametrize("format", [None, "int4"])
@pytest.mark.parametrize("lead", [(5,), (2, 5)])
@pytest.mark.quick(where=lambda lead, format: len(lead) == 2 and format)
def test_every_number_of_rows_of_a_product_is_prewarmed(
    lead: tuple[int, ...], format: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded at one number of rows, served strictly at any other, 1 included."""
    weight, bias = torch.randn(48, 64), torch.randn(48)
    given = weight if format is None else jitgen.quantize(weight, format, 32)

    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = torch.nn.functional.gelu(torch.nn.functional.linear(x, w, b)) + r
        return h, torch.nn.functional.rms_norm(h, (48,))

    manifest = tmp_path / "products.json"
    with jitgen.record(manifest):
        jitgen.jit(function)(torch.randn(*lead, 64), given, bias, torch.randn(*lead, 48))
    monkeypatch.setenv("JITGEN_CACHE_DIR", str(tmp_path / "deployed"))
    compiled: list[jitgen.CompileEvent] = []
    unsubscribe = jitgen.on_compile(compiled.append)
    report = jitgen.prewarm(manifest, ["cpu"])
    unsubscribe()
    assert report.count("failed") == 0
    assert len(compiled) <= 8 + 8, "at most eight kernels of the product, and the norm's"
    served = jitgen.jit(function)
    dense = weight if format is None else given.dequantize()
    last = (0, 1, 2, 3, 4, 8, 30, 120, 700, 1500)
    leads = [(rows,) for rows in last] if len(lead) == 1 else [(b, s) for b in (1, 2) for s in last]
    with jitgen.strict():
        for shape in leads:
            x, r = torch.randn(*shape, 64), torch.randn(*shape, 48)
            for found, wanted in zip(served(x, given, bias, r), function(x, dense, bias, r), strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_recorders_of_many_processes_lose_nothing(tmp_path: Path) -> None:
    """Each process records a function of its own into the same file, and all write it at the same time."""
    path = tmp_path / "specs.json"
    with jitgen.record(path):
        jitgen.jit(torch.relu)(torch.randn(3))
    [sample] = [entry for entry in manifests.manifest_schema.read(path) if entry["inputs"][0]["sizes"] == [3]]
    gate = forked.Barrier(8)

    def write(number: int) -> None:
        renamed = {**sample, "name": f"f{number}", "graph": {**sample["graph"], "name": f"f{number}"}}
        gate.wait()
        manifests.write(path, {manifests.identity_of(renamed): renamed})

    writers = [forked.Process(target=write, args=(number,)) for number in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0] * 8
    assert {f"f{number}" for number in range(8)} <= {entry["name"] for entry in manifests.manifest_schema.read(path)}
    assert [found.name for found in tmp_path.glob(".specs*")] == []


def test_a_recorder_that_cannot_write_is_a_cache_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(jitgen.CacheError, match="cannot be written"):
        manifests.write(tmp_path / "file" / "specs.json", {})


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ("cpu", r"targets is 'cpu', and no list of targets: pass targets=\['cpu'\]"),
        (None, "targets is None, and no list of targets"),
        ([], "targets is empty"),
        ([3], "3 is no target"),
    ],
)
def test_what_is_no_list_of_targets_is_refused(targets: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        jitgen.prewarm("llama-3-8b", targets)


def test_what_is_no_manifest_is_refused() -> None:
    with pytest.raises(CacheError, match=r"Linear\(.* is no manifest"):
        jitgen.prewarm(torch.nn.Linear(2, 2), ["cpu"])  # type: ignore[arg-type]
