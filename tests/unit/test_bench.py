"""The harness itself: that it measures what it says, and checks what it measures. Its figures are nobody's here."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import os
import pickle
import random
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from bench import (
    GROUPS,
    NOT_BY_DEFAULT,
    ahead,
    attention,
    batched,
    columns,
    decoder_steps,
    formats,
    intensity,
    markdown,
    measurement,
    overhead,
    packing,
    products,
    reductions,
    rows,
    streaming,
    suite,
    timing,
    whole_models,
)
from jitgen import TensorSpec, jit, settings
from jitgen.cli import bench as cli
from jitgen.cli.group import jitgen
from jitgen.compilers import host
from jitgen.deploy.measurements import cpu_model
from jitgen.errors import UnsupportedError

pytestmark = pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")

TINY = measurement.Bench("cpu", elements=2**15, budget=0.0, compile_peer=False, repeats=1)
H200 = measurement.Bench("cuda", elements=60 * 2**20 + 2**16, budget=1.0, compile_peer=True, repeats=3)
GIB = 2**30


@pytest.fixture(autouse=True)
def _plain_settings(session_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in settings.SETTINGS.keys() - {"JITGEN_CXXFLAGS"}:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JITGEN_CACHE_DIR", str(session_store))


@pytest.mark.parametrize("case", streaming.CASES, ids=lambda case: case.name)
@pytest.mark.quick(where=lambda case: case.name in ("double square", "SwiGLU"))
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


def test_a_case_of_attention() -> None:
    case = attention.Case(1, 2, 1, 20, 30, 16, "window")
    assert case.scores == sum(j <= i for i in range(20) for j in range(30))
    (found,) = attention.measure(case, torch.float32, TINY, attention.SWEEP)
    assert found.error is not None
    assert found.error < 1e-5
    assert set(found.seconds) == {"jitgen", "eager"}
    assert len(attention.summary([found])) == 2


def test_a_sweep_of_a_group_without_one_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="no sweep of rows"):
        next(suite.run(TINY, ("sweep", "rows")))
    source = random.Random(0)
    cases = [attention.draw(source, "cuda") for _ in range(50)]
    assert len(set(map(str, cases))) > 45


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
    assert streaming._error(case, (x,), (out,)) < 1e-6
    out[12345] = torch.nan
    assert math.isnan(streaming._error(case, (x,), (out,)))


def test_a_wrong_tail_is_seen() -> None:
    case = streaming.CASES[0]
    (x,) = case.inputs(2**22, torch.float32, "cpu")
    out = case.function(x)
    out[-1] += 1e3
    assert streaming._error(case, (x,), (out,)) > 1e-2


ROW_CASES = [each.case(1024) for each in rows.REDUCTIONS]


@pytest.mark.parametrize("case", ROW_CASES, ids=lambda case: case.name)
@pytest.mark.quick(where=lambda case: case.name.startswith("softmax"))
def test_a_case_of_rows(case: streaming.Case) -> None:
    for dtype in case.dtypes:
        (found,) = streaming.measure(case, dtype, TINY, "rows")
        assert found.shape == (2**17 // dtype.itemsize // 1024, 1024)
        assert found.error is not None
        assert found.error < {torch.bfloat16: 4e-3, torch.float32: 1e-6}[dtype]


@pytest.mark.parametrize("case", columns.CASES, ids=lambda case: case.name)
@pytest.mark.slow
def test_a_case_of_columns(case: streaming.Case) -> None:
    (x,) = case.inputs(2**18, torch.float32, "cpu")
    assert x.numel() >= 2**18
    want = case.function(x)
    out = torch.full_like(want, torch.nan)
    case.eager(x, out)
    torch.testing.assert_close(out, want)
    for dtype in case.dtypes:
        (found,) = streaming.measure(case, dtype, TINY, "columns")
        assert found.error is not None
        assert found.error < {torch.bfloat16: 4e-3, torch.float32: 1e-6}[dtype]


@pytest.mark.parametrize("case", reductions.CASES, ids=lambda case: case.name)
@pytest.mark.slow
def test_a_case_of_other_reductions(case: streaming.Case) -> None:
    inputs = case.inputs(2**18, torch.float32, "cpu")
    assert inputs[0].numel() <= 2**18
    want = case.function(*inputs)
    out = torch.full_like(want, streaming._unwritten(want.dtype))
    allocated = case.eager(*inputs, out)  # cross entropy, which has no out=
    torch.testing.assert_close(out if allocated is None else allocated, want)
    for dtype in case.dtypes:
        (found,) = streaming.measure(case, dtype, TINY, "reductions")
        assert found.error is not None
        # A sum of as many positive as negative numbers may be much smaller than they are.
        assert found.error < {torch.bfloat16: 4e-3, torch.float32: 1e-6}[dtype] * (100 if "sum" in case.name else 1)


@pytest.mark.parametrize("reduction", rows.REDUCTIONS, ids=lambda reduction: reduction.name)
def test_what_a_reduction_says_of_its_tensors(reduction: rows.Reduction) -> None:
    inputs = reduction.case(64, 5).inputs(0, torch.float32, "cpu")
    assert [each.shape for each in inputs] == [(5, 64)] * (reduction.tensors + reduction.weights)
    results = streaming._tuple(reduction.function(*inputs))
    assert len(results) == reduction.outputs
    outs = tuple(torch.full_like(each, torch.nan) for each in results)
    last = reduction.eager(*inputs, streaming._one(outs))
    if last is not None:  # the norms, which torch allocates
        assert outs[-1].isnan().all()
        outs = (*outs[:-1], last)
    torch.testing.assert_close(outs, results)


def test_every_output_is_moved_and_checked() -> None:
    case = rows.REDUCTIONS[-1].case(1024)
    (found,) = streaming.measure(case, torch.float32, TINY, "rows")
    assert found.name == "add_rms_norm, rows of 1024"
    assert found.moved == 4 * 4 * TINY.elements + 4 * 1024
    inputs = case.inputs(TINY.elements, torch.float32, "cpu")
    h, normed = streaming._tuple(case.function(*inputs))
    assert streaming._error(case, inputs, (h, normed)) < 1e-6
    assert streaming._error(case, inputs, (h, h)) > 1e-2
    assert streaming._error(case, inputs, (normed, normed)) > 1e-2
    h[3, 5] = torch.nan
    assert math.isnan(streaming._error(case, inputs, (h, normed)))


def test_torch_compile_writes_every_output() -> None:
    case = rows.REDUCTIONS[-1].case(64, 5)
    inputs = case.inputs(0, torch.float32, "cpu")
    expected = streaming._tuple(case.function(*inputs))
    outs = tuple(torch.full_like(each, torch.nan) for each in expected)
    (call,) = streaming.compiled(case.function, [inputs], [outs], backend="eager")
    call()
    torch.testing.assert_close(outs, expected)


AHEAD = """
from bench import ahead, measurement, rows, streaming
from torch._dynamo.utils import counters

bench = measurement.Bench("cpu", elements=2**15, budget=0.0, compile_peer=True, repeats=1)
cases = [rows.REDUCTIONS[-1].case(64), streaming.CASES[0]]
ahead.compile_ahead(cases, bench, 2)
for case in cases:
    for dtype in case.dtypes:
        list(streaming.measure(case, dtype, bench, "rows"))
print(counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"])
"""


@pytest.mark.slow
def test_what_is_compiled_ahead_is_found(tmp_path: Path) -> None:
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run([sys.executable, "-c", AHEAD], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["4", "0"], done.stderr


@pytest.mark.slow
def test_what_fails_ahead_is_told_of(capfd: pytest.CaptureFixture[str]) -> None:
    case = dataclasses.replace(streaming.CASES[0], dtypes=(torch.float32,), inputs=_no_inputs)
    ahead.compile_ahead([case], TINY, 1)
    assert "torch.compile, ahead: " in capfd.readouterr().err


def _no_inputs(*_: Any) -> tuple[torch.Tensor, ...]:
    raise ValueError("no inputs")


def test_cases_compiled_ahead_can_be_sent_to_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_free_memory", lambda: 138 * GIB)
    assert set(suite.AHEAD) <= set(suite.RUNS)
    for cases in suite.AHEAD.values():
        for bench in (TINY, H200):
            assert pickle.loads(pickle.dumps(list(cases(bench))))


def test_the_shapes_of_rows_on_a_gpu() -> None:
    lengths = (1024, 4096, 8192, 16384, 32768, 151936)
    dtypes = (torch.bfloat16, torch.float32)
    wanted = {
        (count, length, dtype) for count, length in [*((8192, n) for n in lengths), (64, 151936)] for dtype in dtypes
    }
    for reduction in rows.REDUCTIONS:
        extra = {(4096, 32768, torch.bfloat16)} if reduction.name == "softmax" else set()
        assert set(rows.gpu_shapes(reduction)) == wanted | extra
    assert [each.name for each in rows.REDUCTIONS] == [
        "softmax",
        "log_softmax",
        "rms_norm",
        "layer_norm",
        "add_rms_norm",
    ]


def test_cases_of_rows_on_a_gpu_have_names_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_free_memory", lambda: 138 * GIB)
    cases = list(rows.cases(H200))
    names = [(case.name, case.dtypes) for case in cases]
    assert len(set(names)) == len(names) == 71
    assert {"softmax, rows of 151936", "softmax, 64 rows of 151936", "softmax, 4096 rows of 32768"} <= {
        name for name, _ in names
    }


def test_the_lengths_of_rows_on_the_cpu() -> None:
    names = [case.name for case in rows.cases(TINY)]
    for name in ("softmax", "rms_norm", "layer_norm"):
        found = [each for each in names if each.startswith(f"{name}, ")]
        assert found == [f"{name}, rows of {length}" for length in (1024, 4096, 8192, 16384, 151936)]


@pytest.mark.parametrize("reduction", rows.REDUCTIONS, ids=lambda reduction: reduction.name)
def test_an_h200_holds_every_shape(reduction: rows.Reduction) -> None:
    for count, length, dtype in rows.gpu_shapes(reduction):
        row_bytes = (reduction.tensors + reduction.outputs) * length * dtype.itemsize
        assert rows.rows_that_fit(count, row_bytes, 138 * GIB) == count


@pytest.mark.parametrize("free", [GIB, 8 * GIB, 24 * GIB, 32 * GIB, 70 * GIB])
def test_rows_fit_half_the_free_memory(free: int) -> None:
    def taken(count: int) -> int:
        return 2 * (count * row_bytes + min(count * row_bytes, streaming.COPIED))

    row_bytes = 4 * 151936 * 4
    count = rows.rows_that_fit(8192, row_bytes, free)
    assert 0 < count < 8192
    assert taken(count) <= free // 2 < taken(count + 2)
    assert rows.rows_that_fit(64, row_bytes // 8, free) == 64
    assert rows.rows_that_fit(8192, row_bytes, 1) == 1


@pytest.mark.parametrize("moved", [2 * 64 * 151936 * 2, 2 * 8192 * 1024 * 2, 4 * 8192 * 1024 * 4, 2**28, 2**34])
def test_buffers_on_a_gpu_go_round_more_than_its_cache(moved: int) -> None:
    count = streaming.buffer_sets(moved, H200)
    assert count >= 2
    assert count * moved > 4 * 60 * 2**20
    assert count == 2 or (count - 1) * moved <= 4 * H200.elements
    assert streaming.buffer_sets(moved, TINY) == 1


@pytest.mark.parametrize("sets", [1, 2, 3, 5, 8, 13])
def test_a_graph_goes_round_every_buffer_alike(sets: int) -> None:
    calls = [lambda place=place: place for place in range(sets)]
    order = [call() for call in timing.in_turn(calls)]
    assert len(order) >= timing.CALLS_PER_GRAPH
    assert order == [*range(sets)] * (len(order) // sets)


def test_what_a_call_allocates_is_kept_until_it_runs_again() -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def allocate() -> torch.Tensor:
        result = torch.empty(1000)
        made.append(weakref.ref(result))
        return result

    for call in streaming.retaining([allocate] * 3) * 2:
        call()
        assert [each() is not None for each in made] == [False] * (len(made) - 3) + [True] * min(3, len(made))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_copy_moves_whole_vectors_and_not_too_much(dtype: torch.dtype) -> None:
    for moved in (1, 503819776, 503842816, 2 * 8192 * 1024 * 2, 4 * 8192 * 151936 * 4):
        count = streaming.copied_elements(moved, dtype)
        assert count > 0
        assert count % 4096 == 0
        copied = 2 * count * dtype.itemsize
        assert copied <= streaming.COPIED
        assert min(moved, streaming.COPIED) <= copied + 2 * dtype.itemsize < moved + 2 * 4097 * dtype.itemsize


def test_the_copy_is_timed_as_if_of_as_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "medians", lambda subjects, *_: dict.fromkeys(subjects, 1.0))
    monkeypatch.setattr(streaming, "COPIED", 2**16)
    (found,) = streaming.measure(streaming.CASES[0], torch.float32, TINY, "streaming")
    assert found.seconds["copy_"] == found.moved / 2**16 == 4.0
    assert found.seconds["eager"] == 1.0


def test_buffers_are_given_up_with_their_case(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def remember(*arguments: Any) -> tuple[torch.Tensor, ...]:
        tensors = rows.rows_of(5, 64, 2, 1, *arguments)
        made.extend(map(weakref.ref, tensors))
        return tensors

    case = dataclasses.replace(rows.REDUCTIONS[-1].case(64), inputs=remember)
    list(streaming.measure(case, torch.float32, TINY, "rows"))
    gc.collect()
    assert made
    assert not [each for each in made if each() is not None]


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
    monkeypatch.setattr(suite, "configure", lambda *_: TINY)
    path = tmp_path / "results" / "cpu.json"
    result = CliRunner().invoke(jitgen, ["bench", "overhead", "--json", str(path)])
    assert result.exit_code == 0, result.output
    assert "call, 3 arguments" in result.stdout
    content = json.loads(path.read_text())
    assert {"torch", "cpu", "threads", "commit", "command", "compiler"} <= set(content["environment"])
    assert str(tmp_path) not in json.dumps({**content["environment"], "command": ""})
    assert "| call, 3 arguments | cpp |" in markdown.tables(content)
    assert all({"seconds", "ratios", "error", "dtype", "shape"} <= set(row) for row in content["measurements"])


def test_cases_that_fail_are_named_and_the_others_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(name: str, error: float) -> measurement.Measurement:
        return measurement.Measurement(
            "rows", name, "cpu", "cpp", "float32", (1,), {"jitgen": 2.0, "eager": 6.0}, error
        )

    def run(bench: measurement.Bench) -> Iterator[measurement.Measurement]:
        yield of("right", 1e-7)
        yield of("wrong", 1e-3)
        yield of("unwritten", math.nan)
        raise ValueError("why")

    path = tmp_path / "rows.json"
    monkeypatch.setattr(suite, "configure", lambda *_: TINY)
    monkeypatch.setitem(suite.RUNS, "rows", run)
    monkeypatch.setitem(suite.RUNS, "columns", lambda bench: iter([of("next", 1e-7)]))
    result = CliRunner().invoke(jitgen, ["bench", "rows", "columns", "--json", str(path), "--plot", str(tmp_path)])
    assert result.exit_code == 1
    assert result.stderr.partition("3 of 5 measurements failed:\n")[2].splitlines() == [
        "  rows: cpp, wrong, float32: wrong: an error of 1.0e-03",
        "  rows: cpp, unwritten, float32: wrong: an error of nan",
        "  rows: cpp, the rest of the group: failed: ValueError: why",
    ]
    content = json.loads(path.read_text())
    assert content["complete"]
    assert [failure["name"] for failure in content["failed"]] == ["wrong", "unwritten", "the rest of the group"]
    assert [bool(row["ratios"]) for row in content["measurements"]] == [True, False, False, False, True]
    text = markdown.tables(content)
    assert "- rows: cpp, wrong, float32: wrong: an error of 1.0e-03" in text
    assert "| unwritten |" not in text


@pytest.mark.parametrize("group", ["streaming", "attention", "batched", "products"])
def test_a_case_that_fails_leaves_the_next_to_be_measured(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Iterator[Any]:
        raise ValueError("why")
        yield

    module = {"streaming": streaming, "attention": attention, "batched": batched, "products": products}[group]
    monkeypatch.setattr(module, "measure", fails)
    found = list(suite.run(TINY, [group]))
    assert len({each.name for each in found}) > 2
    assert {each.failure for each in found} == {"failed: ValueError: why"}


def test_a_backend_that_was_measured_has_not_failed() -> None:
    def measured() -> Iterator[measurement.Measurement]:
        yield measurement.Measurement("rows", "one", "cuda", "cuda", "float32", (1,), {"jitgen": 2.0})
        raise ValueError("why")

    found = list(measurement.attempted(measured(), H200, "rows", "one"))
    assert [(each.backend, each.failure) for each in found] == [("cuda", ""), ("triton", "failed: ValueError: why")]


def test_a_run_that_is_stopped_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(bench: measurement.Bench) -> Iterator[measurement.Measurement]:
        yield measurement.Measurement("rows", "one", "cpu", "cpp", "float32", (1,), {"jitgen": 2.0})
        raise KeyboardInterrupt

    path = tmp_path / "rows.json"
    monkeypatch.setattr(suite, "configure", lambda *_: TINY)
    monkeypatch.setitem(suite.RUNS, "rows", run)
    assert CliRunner().invoke(jitgen, ["bench", "rows", "--json", str(path)]).exit_code == 1
    content = json.loads(path.read_text())
    assert (content["complete"], len(content["measurements"])) == (False, 1)


def test_sizes_stand_side_by_side_in_a_table() -> None:
    def row(name: str, seconds: float, **ratios: float) -> dict[str, object]:
        each = {"group": "rows", "backend": "cuda", "dtype": "float32", "name": name, "notes": ()}
        return each | {"seconds": {"jitgen": seconds}, "ratios": ratios}

    names = ("softmax, 64 rows of 1024", "softmax, rows of 16384", "softmax, rows of 4096")
    found = [row(name, 2e-6, copy_=1.0, eager=2.5) for name in names]
    found.append(row("norm, rows of 4096", 3e-6, copy_=0.5))
    names = ("cpu", "threads", "target", "torch", "triton", "compiler", "commit")
    text = markdown.tables({"environment": dict.fromkeys(names, "-"), "measurements": found})
    assert text.splitlines()[2:] == [
        "| time (copy_, eager over it) | backend | dtype | rows of 4096 | rows of 16384 | 64 rows of 1024 |",
        "| --- | --- | --- | --- | --- | --- |",
        "| softmax | cuda | float32 | 2 us (1.00 2.50) | 2 us (1.00 2.50) | 2 us (1.00 2.50) |",
        "| norm | cuda | float32 | 3 us (0.50 -) |  |  |",
    ]


def test_the_command_knows_the_groups() -> None:
    assert set(suite.RUNS) == {*GROUPS, *NOT_BY_DEFAULT}
    assert CliRunner().invoke(jitgen, ["bench", "nothing"]).exit_code == 2


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_what_cannot_be_written_is_told_before_anything_is_measured(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "run", lambda *_: pytest.fail("something was measured"))
    result = CliRunner().invoke(jitgen, ["bench", "rows", option, "/proc/nowhere/file"])
    assert result.exit_code == 1
    assert "Error: /proc/nowhere cannot be written: No such file or directory" in result.output


def test_a_part_that_there_is_not_is_refused() -> None:
    result = CliRunner().invoke(jitgen, ["bench", "sweep", "--part", "5", "4"])
    assert result.exit_code == 2
    assert "--part 5 4: there are 4 parts" in result.output


def test_the_command_needs_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "checkout_directory", lambda: None)
    for arguments in ([], ["rows", "--device", "cpu"]):
        done = CliRunner().invoke(cli.command(), arguments)
        assert done.exit_code == 1
        assert cli.NEEDS_CHECKOUT in done.output
    assert "needs a source checkout of jitgen" in CliRunner().invoke(cli.command(), ["--help"]).output


def test_formats_are_timed_beside_int4() -> None:
    for device, ranges in formats.ROWS.items():
        for name, (least, most) in ranges.items():
            count, columns, length = formats.draw(random.Random(3), device, name)
            assert least <= count <= most
            assert formats.WEIGHTS[device][0] * 0.9 < columns * length < formats.WEIGHTS[device][1] * 1.1
    found = list(formats.measure(("int2", "nvfp4"), formats.FEW, (1, 40, 256), torch.float32, "cpp", TINY))
    assert [each.name for each in found] == ["int2, few rows", "nvfp4, few rows"]
    assert all(set(each.seconds) == {"jitgen", "int4"} and (each.error or 1) < 1e-6 for each in found)
    first, second = formats.summary(found)
    assert first.startswith("cpp, few rows: int2 takes")
    assert "nvfp4" in second


def test_packing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "SHAPES", {"cpu": (32, 256)})
    monkeypatch.setattr(packing, "NAMES", ("int4",))
    found = list(packing.run(TINY))
    assert [each.name for each in found] == ["int4, mse", "int4, absmax"]
    assert all("packing 7e+09 weights as int4" in line for line in packing.summary(found))


def test_buffers_are_larger_than_the_cache() -> None:
    from jitgen.runtime.cpu import last_level_cache

    assert suite.configure("cpu").elements * 4 > 4 * last_level_cache()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_decoding_is_measured_on_every_route_with_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    monkeypatch.setattr(whole_models, "model_of", lambda *_: None)
    monkeypatch.setattr(
        whole_models, "decode", lambda model, sizes, route, batch, *_: measured.append((route, batch)) or {}
    )
    arguments = ["decode", "--device", "cuda", "--routes", "eager", "inductor", "--batches", "1", "8"]
    monkeypatch.setattr("sys.argv", ["whole_models", *arguments])
    with torch._dynamo.config.patch(recompile_limit=8):  # which the command sets; monkeypatch would delete it
        whole_models.main()
        assert measured == [("eager", 1), ("eager", 8), ("inductor", 1), ("inductor", 8)]
        monkeypatch.setattr(whole_models, "decode", lambda *_: 1 / 0)
        with pytest.raises(SystemExit, match="4 of 4 rows failed"):
            whole_models.main()


def test_decoding_is_measured_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    sizes = {**whole_models.SIZES["tiny"], "num_hidden_layers": 1}
    monkeypatch.setitem(whole_models.SIZES, "tiny", sizes)
    with torch.no_grad():
        (row,) = whole_models.decode_on_cpu("tiny", torch.float32, ["eager"], None)
    weights = 1000 * 256 + 2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 512 + 3 * 256
    assert row["GB"] == round(4 * (weights + 2 * 512 * 128) / 1e9, 3)
    assert all(0 < row[name] < math.inf for name in ("ms", "processor ms"))


@pytest.mark.parametrize(("variant", "kernels"), [("", 8), ("no norms", 6), ("counter", 9)])
def test_kernels_of_a_step(variant: str, kernels: int) -> None:
    decoder = decoder_steps.Decoder(decoder_steps.SMALL, 1, "meta")
    inputs = decoder_steps.inputs_of(decoder, decoder_steps.Case("cuda", "bf16", 1))
    weights, cache = decoder.layers[0], inputs.caches[0]
    x = decoder_steps.begin(inputs.tokens, decoder.words)
    args = (x, *inputs.angles, inputs.places, inputs.mask, *weights, *cache)
    block = jit(decoder_steps.block_of(decoder_steps.SMALL, variant), backend="cuda")
    specs = [TensorSpec(tuple(arg.shape), arg.dtype) for arg in args if arg is not None]
    assert len(block.lower(*specs, target="sm_90a").kernels) == kernels


@pytest.mark.slow
def test_steps_of_a_decoder_are_measured() -> None:
    rows: list[dict[str, Any]] = []
    decoder = decoder_steps.Decoder(decoder_steps.SMALL, 1, "cpu")
    cases = [decoder_steps.Case("cpp", weights, 2) for weights in ("bf16", "int4")]
    with torch.no_grad():
        decoder_steps.measure(decoder, cases, 1e10, rows.append)
    assert [row["same tokens"] for row in rows] == ["2 of 2"] * 2
    assert all(row["error"] < 2 * torch.finfo(torch.bfloat16).eps for row in rows)


def test_no_gpu_is_said_so() -> None:
    result = CliRunner().invoke(jitgen, ["bench", "--device", "cuda"])
    assert result.exit_code == 1
    assert "doctor" in result.stderr


@pytest.mark.parametrize(("seconds", "text"), [(2.5, "2.5 s"), (0.0123, "12.3 ms"), (4.56e-6, "4.56 us")])
def test_duration(seconds: float, text: str) -> None:
    assert measurement.duration(seconds) == text


MEASURED = sorted((Path(__file__).parents[2] / "docs" / "measured").glob("*.json"))
OLD = {
    "commit": {"cpu-grouped", "h100-candidates", "h100-candidates-fitted"} | {"h100-cutlass", "h200-grouped", "store"},
    "command": {"cpu-whole-models"},
    "device": {"cpu-grouped", "store"},
}
"""Records that were made before their script wrote these facts. What makes one anew takes it off this list."""


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
def test_a_record_says_what_made_it(path: Path) -> None:
    record = json.loads(path.read_text())
    if path.stem == "store":  # each of its parts says what made it
        record = next(iter(record.values()))
    facts = record.get("environment", record)
    missing = {name for name in ("command", "commit") if not facts.get(name)}
    if all("commit" in row for row in record.get("rows", [{}])):
        missing.discard("commit")
    if not any(facts.get(name) for name in ("gpu", "card", "cpu")):
        missing.add("device")
    assert missing == {name for name, records in OLD.items() if path.stem in records}


def test_what_made_a_record() -> None:
    made = measurement.made("bench.products", "1a2b3c4", "cpu")
    assert made["command"].startswith("python -m bench.products")
    assert made["commit"] == "1a2b3c4"
    assert made["cpu"] == cpu_model()


def test_a_backend_without_kernels_for_the_device_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="backend 'cuda' has no kernels for cpu"):
        suite.configure("cpu", backend="cuda")
