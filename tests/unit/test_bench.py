"""The harness itself: that it measures what it says, and checks what it measures. Its figures are nobody's here."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from jitgen import settings
from jitgen.bench import intensity, markdown, measurement, overhead, streaming, suite, timing
from jitgen.cli import bench as cli
from jitgen.cli.group import jitgen
from jitgen.compile import host

pytestmark = pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")

TINY = measurement.Bench("cpu", elements=2**15, budget=0.0, compile_peer=False, repeats=1)


@pytest.fixture(autouse=True)
def _own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in settings.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JITGEN_CACHE_DIR", str(tmp_path / "store"))


@pytest.mark.parametrize("case", streaming.CASES, ids=lambda case: case.name)
def test_a_streaming_case(case: streaming.Case) -> None:
    for dtype in case.dtypes:
        (found,) = streaming.measure(case, dtype, TINY, "streaming")
        assert set(found.seconds) == {"jitgen", "copy_", "eager"}
        assert all(seconds > 0 for seconds in found.seconds.values())
        assert found.error is not None
        assert found.error < {torch.bfloat16: 4e-3, torch.float32: 1e-6}[dtype]


@pytest.mark.parametrize("case", [*streaming.CASES, intensity.repeated_multiply(3)], ids=lambda case: case.name)
def test_the_hand_written_peer_computes_the_same(case: streaming.Case) -> None:
    inputs = case.inputs(2**15, torch.float32, "cpu")
    expected = case.function(*inputs)
    out = torch.full_like(expected, torch.nan)
    case.eager(*inputs, out)
    torch.testing.assert_close(out, expected)


def test_bytes_are_counted_once_each() -> None:
    (found,) = streaming.measure(streaming.CASES[0], torch.float32, TINY, "streaming")
    assert found.moved == 2 * 4 * TINY.elements
    assert found.to_json()["bytes_per_second"] == found.moved / found.seconds["jitgen"]


def test_repeated_multiply_counts_its_operations() -> None:
    (found,) = streaming.measure(intensity.repeated_multiply(8), torch.float32, TINY, "intensity")
    assert found.flops == 8 * TINY.elements


def test_unwritten_output_is_seen() -> None:
    case = streaming.CASES[0]
    (x,) = case.inputs(2**15, torch.float32, "cpu")
    out = case.function(x)
    assert streaming._error(case, (x,), out) < 1e-6
    out[12345] = torch.nan
    assert math.isnan(streaming._error(case, (x,), out))


def test_a_wrong_tail_is_seen() -> None:
    case = streaming.CASES[0]
    (x,) = case.inputs(2**22, torch.float32, "cpu")
    out = case.function(x)
    out[-1] += 1e3
    assert streaming._error(case, (x,), out) > 1e-2


def test_subjects_are_timed_in_turn() -> None:
    order: list[str] = []
    calls = {name: [lambda name=name: order.append(name)] for name in "ab"}
    timing.medians(calls, "cpu", 0.0)
    assert order[-6:] == ["a", "b"] * 3


def test_overhead_has_its_floor() -> None:
    found = {each.name: each for each in overhead.run(TINY)}
    assert {"call, 3 arguments", "plan, 3 arguments, out="} <= set(found)
    for each in found.values():
        assert "empty_like + ctypes" in each.seconds
        assert each.error is not None
        assert each.error < 1e-6


def test_ratios_are_above_one_where_jitgen_is_faster() -> None:
    found = measurement.Measurement("g", "n", "cpu", "cpp", "float32", (1,), {"jitgen": 2.0, "eager": 6.0})
    assert found.ratios == {"eager": 3.0}


def test_the_command_writes_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "configure", lambda device, quick: TINY)
    path = tmp_path / "results" / "cpu.json"
    result = CliRunner().invoke(jitgen, ["bench", "overhead", "--json", str(path)])
    assert result.exit_code == 0, result.output
    assert "call, 3 arguments" in result.stdout
    content = json.loads(path.read_text())
    assert {"torch", "cpu", "threads", "commit", "command", "compiler"} <= set(content["environment"])
    assert str(tmp_path) not in json.dumps({**content["environment"], "command": ""})
    assert "| call, 3 arguments | cpp |" in markdown.tables(content)
    assert all({"seconds", "ratios", "error", "dtype", "shape"} <= set(row) for row in content["measurements"])


def test_the_command_knows_the_groups() -> None:
    assert set(suite.GROUPS) == set(cli.GROUPS)
    assert CliRunner().invoke(jitgen, ["bench", "nothing"]).exit_code == 2


def test_buffers_are_larger_than_the_cache() -> None:
    from jitgen.runtime.cpu import last_level_cache

    assert suite.configure("cpu").elements * 4 > 4 * last_level_cache()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_said_so() -> None:
    result = CliRunner().invoke(jitgen, ["bench", "--device", "cuda"])
    assert result.exit_code == 1
    assert "doctor" in result.stderr


@pytest.mark.parametrize(("seconds", "text"), [(2.5, "2.5 s"), (0.0123, "12.3 ms"), (4.56e-6, "4.56 us")])
def test_duration(seconds: float, text: str) -> None:
    assert measurement.duration(seconds) == text
