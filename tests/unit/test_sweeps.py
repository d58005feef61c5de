"""What ``jitgen bench sweep`` draws, builds ahead and leaves out."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import math
import random
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import jitgen
from bench import prebuild, products, records, reductions, sweep
from bench.measurement import MOST_ERROR, Bench, Measurement
from jitgen.families.gemm import wgmma
from jitgen.families.gemm.schedules import cuda

GPU = Bench("cuda", 2**26, 0.1, False, 1, None, 7, 200)


def test_a_sweep_has_any_numbers_of_rows_and_sides_of_which_half_have_a_large_odd_factor() -> None:
    drawn = list(sweep.cases(GPU))
    rows = [case.rows for case in drawn]
    assert {count % 2 for count in rows} == {0, 1}
    assert 1 <= min(rows) <= 2
    assert 7000 < max(rows) <= sweep.MOST_ROWS
    products = [case for case in drawn if case.kind != "attention"]
    assert all(64 <= size <= 60_416 and size % 8 == 0 for case in products for size in case.shape[-2:])
    assert any(case.length % 64 for case in products if case.kind in sweep.DENSE)
    quantised = [case for case in products if case.kind in sweep.FORMATS]
    assert {case.group for case in quantised} == set(sweep.GROUP_SIZES)
    assert all(case.length % case.group == 0 for case in quantised if case.group)
    odd = sum(case.columns % 256 != 0 for case in products) / len(products)
    assert 0.4 < odd < 0.6
    assert list(sweep.cases(GPU)) == drawn, "a seed stands for its cases"


def test_any_beginning_of_a_sweep_has_every_kind_with_few_and_many_rows() -> None:
    drawn = list(sweep.cases(dataclasses.replace(GPU, cases=3 * len(sweep.CYCLE["cuda"]))))
    for kind in set(sweep.CYCLE["cuda"]):
        rows = sorted(case.rows for case in drawn if case.kind == kind)
        assert len(rows) >= 6
        assert rows[0] < 30
        assert rows[-1] > 500
        assert any(case.epilogue for case in drawn if case.kind == kind) == (kind not in ("attention", "batched"))


@pytest.mark.parametrize("kind", sorted({*sweep.CYCLE["cuda"]}))
def test_what_is_compiled_ahead_of_a_case_has_specs(kind: str) -> None:
    case = sweep.draw(random.Random(kind), kind, 37, "cuda", True)
    for function, specs in case.calls():
        assert jitgen.jit(backend="cuda")(function).lower(*specs, target="sm_90a").kernels
    assert sweep.kind_of({"name": str(case)}) == kind
    assert case.shape[-3] == case.rows


def test_a_case_that_fails_or_is_wrong_has_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(case: sweep.Case, bench: Bench) -> Iterator[Measurement]:
        if case.kind == "float32":
            raise ValueError("why")
        times = {"jitgen": 1e-6, "F.linear": 2e-6}
        error = math.nan if case.rows < 100 else 1e-6
        yield Measurement("sweep", str(case), "cpu", "cpp", "float32", case.shape, times, error)

    monkeypatch.setattr(sweep.Case, "measured", measured)
    found = list(sweep.run(Bench("cpu", 2**16, 0.1, False, 1, None, 7, 12)))
    assert len(found) == 12
    rows = [each.to_json() for each in found]
    for row in rows:
        expected = "failed: ValueError: why" if row["name"].startswith("float32") else ""
        expected = expected or ("wrong: an error of nan" if row["shape"][-3] < 100 else "")
        assert records.failure_of(row) == expected
        assert bool(row["ratios"]) == (not expected)
    table = {line[0]: line for line in sweep.tabulated(rows) if line[2] == "all"}
    assert table["float32"][3:] == ("6", "-", "-", "-", "-", "6")
    wrong = sum(row["name"].startswith("int4") and row["shape"][-3] < 100 for row in rows)
    assert table["int4"][3:] == ("6", "2.00", "2.00", "2.00", "100%", str(wrong))
    assert any("failed: ValueError: why" in line for line in sweep.summary(found))


def test_a_sweep_measures_products_with_and_without_their_epilogue() -> None:
    tiny = Bench("cpu", 2**10, 0.001, False, 1)
    case = sweep.Case("int4", 5, 64, 64, torch.float32, 32, epilogue=True)
    bare, fused = case.measured(tiny)
    assert (bare.group, fused.group) == (sweep.SWEEP, sweep.EPILOGUES)
    assert set(fused.seconds) == {"jitgen", "bare", "F.linear and the rest"}
    for found in (bare, fused):
        assert found.error is not None
        assert found.error < MOST_ERROR[torch.float32]
    ((kind, backend, count, *_),) = sweep.epilogues([fused.to_json()])
    assert (kind, backend, count) == ("int4", "cpp", "1")


def test_the_first_case_that_is_compiled_is_measured_next(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = list(sweep.cases(GPU))
    late: set[sweep.Case] = set(drawn[:3])
    reported: list[sweep.Case] = []
    measured: list[sweep.Case] = []
    ahead = mock.Mock(ready=lambda case: case not in late or len(measured) > 100, report=reported.append)

    def attempt(case: sweep.Case, bench: Bench) -> Iterator[Measurement]:
        measured.append(case)
        yield from ()

    monkeypatch.setattr(sweep, "compiled_ahead", lambda *_: contextlib.nullcontext(ahead))
    monkeypatch.setattr(sweep.Case, "measured", attempt)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    assert not list(sweep.run(GPU))
    assert measured == [*drawn[3:104], *drawn[:3], *drawn[104:]] == reported


def test_humming_compiles_in_chunks_of_the_cases_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    submitted = []

    @contextlib.contextmanager
    def compiling(function: object, groups: dict[object, list[tuple[sweep.Case, ...]]], *_: object) -> Iterator[object]:
        submitted.append((function, groups))
        yield mock.Mock(ready=lambda group: group != 0)

    monkeypatch.setattr(sweep, "compiling", compiling)
    monkeypatch.setattr(sweep, "gpu_target", lambda: "sm_90a")
    monkeypatch.setattr(sweep.humming_products, "multiplies", lambda product: product.format == "int4")
    drawn = list(sweep.cases(GPU))
    with sweep.compiled_ahead(drawn, GPU) as ahead:
        (_, by_humming), (_, own) = submitted
        assert [case for (case, *_), *_ in own.values()] == drawn
        chunks = [chunk for (chunk,) in by_humming.values()]
        assert [case for chunk in chunks for case in chunk] == [case for case in drawn if case.kind == "int4"]
        assert {len(chunk) for chunk in chunks[:-1]} == {sweep.CHUNK}
        assert [case for case in drawn if not ahead.ready(case)] == list(chunks[0])


def test_no_case_begins_after_the_seconds_of_a_sweep() -> None:
    assert not list(sweep.run(Bench("cpu", 2**16, 0.1, False, 1, seconds=-1.0)))


def test_parts_of_a_sweep_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(case: sweep.Case, bench: Bench) -> Iterator[Measurement]:
        yield Measurement("sweep", str(case), "cpu", "cpp", "float32", case.shape, {"jitgen": 1e-6, "F.linear": 2e-6})

    monkeypatch.setattr(sweep.Case, "measured", measured)
    whole = Bench("cpu", 2**16, 0.1, False, 1, None, 7, 12)
    parts: list[dict[str, Any]] = []
    for first in (1, 2, 3):
        found = sweep.run(dataclasses.replace(whole, part=(first, 3)))
        facts: dict[str, Any] = {"gpu": "one", "command": f"part {first}", "settings": {"seed": 7, "part": (first, 3)}}
        parts.append({"environment": facts, "measurements": [each.to_json() for each in found]})
    joined = records.joined(parts)
    names = sorted(row["name"] for row in joined["measurements"])
    assert names == sorted(each.name for each in sweep.run(whole))
    assert joined["environment"]["command"] == "part 1; part 2; part 3"
    with pytest.raises(ValueError, match="are the parts 1/3 2/3: give 1/3 2/3 3/3, each once"):
        records.joined(parts[:2])
    with pytest.raises(ValueError, match="are the parts 1/3 2/3 2/3 3/3"):
        records.joined([*parts, parts[1]])
    parts[2]["environment"]["settings"]["seed"] = 8
    with pytest.raises(ValueError, match="differ in settings"):
        records.joined(parts)


@pytest.mark.parametrize("ends", ["well", "failed", "stopped"])
def test_parts_that_failed_or_were_stopped_are_told_of(
    ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    for first in (1, 2):
        facts = {"command": f"part {first}", "settings": {"part": (first, 2)}}
        failed = ends == "failed" and first == 2
        times, notes = ({}, ("failed: ValueError: why",)) if failed else ({"jitgen": 1e-6}, ())
        measurement = Measurement("sweep", f"int4: {first}", "cpu", "cpp", "float32", (1, 8, 8), times, notes=notes)
        part = records.record(facts, [measurement], complete=not (ends == "stopped" and first == 2))
        files.append(tmp_path / f"{first}.json")
        records.write(files[-1], part)
    whole = tmp_path / "whole.json"
    monkeypatch.setattr("sys.argv", ["records", str(whole), *map(str, files)])
    assert records.main() == (ends != "well")
    content, told = json.loads(whole.read_text()), capsys.readouterr().err
    assert len(content["measurements"]) == 2
    assert content["complete"] == (ends != "stopped")
    assert [failure["name"] for failure in content["failed"]] == ["int4: 2"] * (ends == "failed")
    if ends == "failed":
        assert "1 of 2 measurements failed:\n  sweep: cpp, int4: 2, float32: failed: ValueError: why\n" in told
    elif ends == "stopped":
        assert told == f"{files[1]} is of a run that was stopped\n"
    else:
        assert told == ""
    monkeypatch.setattr("sys.argv", ["records", str(whole), str(files[0])])
    with pytest.raises(SystemExit):
        records.main()
    assert "measure again what is missing" in capsys.readouterr().err


def test_a_sweep_of_reductions_has_odd_rows_and_columns_of_every_magnitude() -> None:
    source = random.Random(3)
    drawn = [reductions.draw(source, "cuda") for _ in range(400)]
    columns = [each[2] for each in drawn]
    assert min(columns) == 1
    assert max(columns) > 100_000
    assert any(size % 2 for size in columns)
    assert {each[0].name for each in drawn} == {"softmax", "rms_norm", "layer_norm", "sum", "log-sum-exp"}
    assert {each[3] for each in drawn} == {torch.bfloat16, torch.float32}
    assert max(rows * length for _, rows, length, _ in drawn) <= reductions.MOST_ELEMENTS["cuda"]


def test_what_was_built_ahead_is_what_the_measuring_process_asks_for() -> None:
    reduction, rows, columns, dtype = reductions.DRAWN[1], 3, 37, torch.float32
    target = str(jitgen.spec.host_target())
    build = prebuild.Build(reduction.function, reductions.specs_of(reduction, rows, columns, dtype), "cpp", target)
    assert prebuild._failure(build) == ""
    inputs = reduction.case(columns, rows).inputs(0, dtype, "cpu")
    with jitgen.strict():
        jitgen.jit(backend="cpp")(reduction.function).bind(*inputs)(*inputs)


SCRIPTS = {
    "attention_schedules": None,
    "attention_caches": None,
    "attention_training": None,
    "split_k_timings": None,
    "gemm_timings": ["--shapes", "1", "--kinds", "rows", "wgmma_dense"],
    "row_timings": ["--shapes", "2"],
    "schedule_timings": ["--shapes", "1"],
}
"""Scripts that need a GPU, and arguments with which they only count what they would time."""


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_find_the_rules_that_they_replace(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, arguments = importlib.import_module(f"bench.{name}"), SCRIPTS[name]
    if arguments is not None:
        monkeypatch.setattr("sys.argv", [name, "unwritten.json", "--dry", *arguments])
        rules = cuda.k_splits, wgmma.for_launch
        script.main()
        assert "timings" in capsys.readouterr().out
        assert (cuda.k_splits, wgmma.for_launch) == rules, "whoever runs next in this process has them too"


def test_worker_processes_do_not_run_the_command_again() -> None:
    runpy.run_module("jitgen.__main__", run_name="__mp_main__")  # would exit


def test_kernels_are_built_in_several_processes() -> None:
    target = str(jitgen.spec.host_target())
    spec = jitgen.TensorSpec((5, 41))
    builds = [prebuild.Build(function, (spec,), "cpp", target) for function in (reductions.total, reductions.argmax)]
    prebuild.prebuild(builds, 2)
    with jitgen.strict():
        for build in builds:
            build_again = jitgen.jit(backend="cpp")(build.function)
            build_again(torch.randn(5, 41))


def test_a_build_that_fails_says_so_and_stops_nothing() -> None:
    build = prebuild.Build(sweep.linear, (jitgen.TensorSpec((2, 3)), jitgen.TensorSpec((2, 5))), "cpp", "x86-64-v3")
    assert "TraceError" in prebuild._failure(build) or "Error" in prebuild._failure(build)


def test_a_peer_that_is_hopeless_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"fast": 1.0, "slower": 3.9, "hopeless": 4.0}
    monkeypatch.setattr(products, "trial", lambda calls, device: seconds[calls[0]])
    notes: list[str] = []
    peers = {name: [name] for name in seconds}
    kept = products._within(4.0, peers, GPU, notes)  # type: ignore[arg-type]
    assert list(kept) == ["fast", "slower"]
    assert notes == ["hopeless: left out, took 4.0 times as long as the fastest peer"]
    assert products._within(math.inf, peers, GPU, notes) == peers  # type: ignore[arg-type]


def test_the_summary_of_reductions_names_the_worst_and_the_largest_error() -> None:
    def row(name: str, eager: float, error: float) -> Measurement:
        times = {"jitgen": 1e-6, "copy_": 1e-6, "eager": eager}
        return Measurement(reductions.SWEEP, name, "cuda", "cuda", "float32", (3, 5), times, error)

    text = reductions.summary([row("sum, 3 rows of 5", 2e-6, 1e-7), row("softmax, 3 rows of 5", 5e-7, math.nan)])
    assert "geometric mean 1.00" in text[0]
    assert "largest error nan" in text[0]
    assert text[1].startswith("  0.50: softmax, 3 rows of 5")
