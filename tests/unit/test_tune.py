"""``jitgen tune`` measures candidates, keeps winners beyond noise, and goes on where it was interrupted."""

from __future__ import annotations

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner

import jitgen
from jitgen.cli.group import jitgen as command
from jitgen.deploy import manifest_schema, trials, tune, work
from jitgen.deploy.trials import Program, Seconds
from jitgen.errors import CacheError
from jitgen.schedule import tuned
from jitgen.spec import Target, host_target

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A manifest of one product of int4 weights, of which a CPU has two candidates."""
    path = tmp_path_factory.mktemp("tune") / "manifest.json"
    weight = jitgen.quantize(torch.randn(64, 128), "int4", group_size=128)

    @jitgen.jit(backend="cpp")
    def up(x: torch.Tensor, w: Any) -> torch.Tensor:
        return F.relu(F.linear(x, w))

    with jitgen.record(path):
        up(torch.randn(40, 128), weight)
    return path


@pytest.fixture
def problem(manifest: Path) -> tune.Problem:
    problems = list(tune.problems_of(manifest_schema.read(manifest), host_target(), None))
    assert len({problem.identity for problem in problems}) == len(problems) > 1  # the other buckets of rows too
    return next(problem for problem in problems if problem.facts["rows"] == 64)


def mainloops_of(problem: tune.Problem) -> list[str]:
    """The candidates, of which processors prefer different ones: what the model chooses comes first."""
    return [row.schedules[0].mainloop for row in problem.rows]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ROUNDS", 2), ("CAREFUL_ROUNDS", 3), ("LEAST_SECONDS", 1e-5), ("ROTATED_BYTES", 1)):
        monkeypatch.setattr(trials, name, value)


def test_candidates_are_measured_and_each_runs_its_own_schedule(
    problem: tune.Problem, tmp_path: Path, quick: None
) -> None:
    assert sorted(mainloops_of(problem)) == ["CppDecoded", "CppTiles"]
    (result,) = tune.tune([problem], tmp_path, CPU, 300, jobs=1)
    assert not result.failures
    assert all(seconds is not None and seconds > 0 for seconds in result.seconds)
    assert tune.tune([problem], tmp_path, CPU, 300, jobs=1) == []  # it was measured before


@pytest.mark.parametrize("chooses", ["ends", "ids"])
def test_groups_have_rows(chooses: str, tmp_path: Path, quick: None) -> None:
    """Ends that are all 0 would leave nothing to multiply, and equal ids one matrix."""
    x, ends = torch.randn(50, 32), torch.tensor([10, 20, 30, 50], dtype=torch.int32)
    weight = torch.randn(4, 32, 16)

    @jitgen.jit(backend="cpp")
    def product(x: torch.Tensor, w: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        if chooses == "ends":
            return torch._grouped_mm(x, w, offs=groups)
        return (x.unsqueeze(1) @ w[groups]).squeeze(1)

    with jitgen.record(tmp_path / "manifest.json"):
        product(x, weight, ends if chooses == "ends" else torch.arange(50) % 4)
    (entry,) = manifest_schema.read(tmp_path / "manifest.json")
    program = Program(entry, work.route_of(entry, host_target(), None), CPU)
    x, weight, groups = program._copies[0]
    (result,) = program.results(program.calls())
    if chooses == "ends":
        assert groups.diff().min() >= 0
        assert groups[-1] == len(x)
        groups = torch.bucketize(torch.arange(len(x)), groups, right=True)
    assert len(groups.unique()) > 1
    torch.testing.assert_close(result, (x.unsqueeze(1) @ weight[groups.long()]).squeeze(1))


def test_every_candidate_of_few_rows_computes_the_same(manifest: Path, tmp_path: Path, quick: None) -> None:
    problems = tune.problems_of(manifest_schema.read(manifest), host_target(), None)
    few = [problem for problem in problems if problem.family == "gemm" and problem.facts["rows"] <= 16]
    assert few
    for result in tune.tune(few, tmp_path, CPU, 300, jobs=1):
        assert not result.failures, str(result.problem)


def test_a_trial_comes_before_every_file(problem: tune.Problem) -> None:
    with tuned.trying(problem.family, problem.route.target.arch, problem.rows[1]):
        lowered = tune.manifests.relower(problem.entry, problem.route)
    assert type(lowered.schedules[0]).__name__ == mainloops_of(problem)[1]
    assert lowered.choices[0].row == problem.rows[1].digest
    assert type(tune.manifests.relower(problem.entry, problem.route).schedules[0]).__name__ == mainloops_of(problem)[0]


@pytest.mark.parametrize(
    ("model", "other", "kept"),
    [
        (Seconds(1.0, 0.98, 1.02), Seconds(0.9, 0.89, 0.91), True),
        (Seconds(1.0, 0.98, 1.02), Seconds(0.98, 0.97, 0.99), False),  # within the margin
        (Seconds(1.0, 0.80, 1.20), Seconds(0.9, 0.80, 1.00), False),  # within the noise
        (Seconds(1.0, 0.98, 1.02), Seconds(1.2, 1.19, 1.21), False),
    ],
)
def test_a_winner_is_kept_beyond_noise(
    problem: tune.Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Seconds, other: Seconds, kept: bool
) -> None:
    monkeypatch.setattr(Program, "rounds", lambda self, calls, careful=False: {0: model, 1: other})
    (result,) = tune.tune([problem], tmp_path, CPU, 300, jobs=1)
    assert (result.winner is not None) is kept
    path = tmp_path / problem.route.target.arch / "gemm.json"
    assert path.is_file() is kept
    if kept:
        (row,) = tuned.read(path, problem.route.target.arch, "gemm")
        assert row.digest == problem.rows[1].digest
        measured = json.loads(path.read_text())["rows"][0]["measured"]
        assert (measured["seconds"], measured["seconds_of_the_model"]) == (0.9, 1.0)


def test_a_candidate_that_computes_something_else_never_wins(
    problem: tune.Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    original, made = Program.results, iter(range(10))

    def wrong(self: Program, calls: Any) -> Any:
        results = original(self, calls)
        results[0][3, 5] += next(made)  # those of the model's choice are as they are
        return results

    monkeypatch.setattr(Program, "results", wrong)
    monkeypatch.setattr(Program, "rounds", lambda self, timers, careful=False: {n: Seconds(1, 1, 1) for n in timers})
    (result,) = tune.tune([problem], tmp_path, CPU, 300, jobs=1)
    assert result.winner is None
    assert result.seconds == (1, None)
    assert "result 0 differs by" in result.failures[0]


def test_differences_of_results() -> None:
    one = torch.randn(40, 30)
    assert trials.difference([one], [one + 1e-5]) == ""
    assert trials.difference([one.bfloat16()], [(one * 1.003).bfloat16()]) == ""
    assert "differs by" in trials.difference([one], [one * 1.01])
    with_nan = one.clone()
    with_nan[2, 3] = torch.nan
    assert trials.difference([with_nan], [with_nan]) == ""
    assert "finite at other elements" in trials.difference([with_nan], [one])
    indices = torch.arange(1000)
    assert trials.difference([indices], [indices]) == ""
    assert "integers of result 1" in trials.difference([one, indices], [one, indices.flip(0)])


def test_a_program_that_cannot_be_made_is_a_failure(
    problem: tune.Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(tune, "Program", fails)
    (result,) = tune.tune([problem], tmp_path, CPU, 300, jobs=1)
    assert result.winner is None
    assert result.failed
    assert result.failures == ("RuntimeError: out of memory",)
    assert len(tune.tune([problem], tmp_path, CPU, 300, jobs=1)) == 1  # it was not measured: the next run tries it


def test_a_part_of_a_line_is_measured_again(problem: tune.Problem, tmp_path: Path, quick: None) -> None:
    path = tmp_path / problem.route.target.arch / "gemm.measured.jsonl"
    path.parent.mkdir()
    path.write_text('{"problem": "other"}\n' + json.dumps({"problem": problem.identity})[:-9])
    assert len(tune.tune([problem], tmp_path, CPU, 300, jobs=1)) == 1
    assert tune.measured_before(tmp_path, problem) == {"other", problem.identity}


def test_runs_into_one_output_keep_the_rows_of_all(problem: tune.Problem, tmp_path: Path) -> None:
    def measured(number: int) -> tune.Measured:
        rows = tuple(dataclasses.replace(row, problem={**row.problem, "rows": number}) for row in problem.rows)
        other = dataclasses.replace(problem, rows=rows, facts=rows[0].problem)
        return tune.Measured(other, (1.0, 0.5), (), rows[1], 0.5)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: tune._keep(tmp_path, measured(number), CPU), range(32)))
    assert len(tuned.read(tmp_path / problem.route.target.arch / "gemm.json", problem.route.target.arch, "gemm")) == 32
    assert len(tune.measured_before(tmp_path, problem)) == 32


@pytest.mark.parametrize(
    ("format", "activation"), [("int8", "int8"), ("int8", None), ("fp8_e4m3", None), ("mxfp8", None), ("nvfp4", None)]
)
def test_inputs_are_ordinary_numbers(format: str, activation: str | None, tmp_path: Path, quick: None) -> None:
    weight = jitgen.quantize(torch.randn(64, 128), format, activation=activation)
    function = jitgen.jit(lambda x, w, q: (F.linear(x, w), q.int().sum(-1)), backend="cpp")
    with jitgen.record(tmp_path / "specs.json"):
        function(torch.randn(5, 128), weight, torch.ones(5, 70, dtype=torch.int8))
    entry = next(iter(manifest_schema.read(tmp_path / "specs.json")))
    route = work.route_of(entry, host_target())
    program = Program(entry, route, CPU)
    product, codes = program.results(program.calls())
    assert product.isfinite().all()
    assert product.abs().max() > 0
    assert codes.unique().numel() > 1


def test_a_family_that_is_not_there_is_refused() -> None:
    result = CliRunner().invoke(command, ["tune", "--model", "llama-3-8b", "--family", "gem", "--dry-run"])
    assert result.exit_code == 2
    assert "no family is called 'gem'; there are" in result.output
    assert "gemm" in result.output


def test_the_rows_that_are_kept_choose_the_schedule(
    problem: tune.Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast, slow = Seconds(0.5, 0.5, 0.5), Seconds(1.0, 1.0, 1.0)
    monkeypatch.setattr(Program, "rounds", lambda self, calls, careful=False: {0: slow, 1: fast})
    tune.tune([problem], tmp_path, CPU, 300, jobs=1)
    before = tune.manifests.relower(problem.entry, problem.route)
    monkeypatch.setenv("JITGEN_TUNED", str(tmp_path))
    after = tune.manifests.relower(problem.entry, problem.route)
    assert type(after.schedules[0]).__name__ == mainloops_of(problem)[1]
    assert after.key != before.key


def test_a_run_ends_when_its_seconds_are_over(problem: tune.Problem, tmp_path: Path) -> None:
    assert tune.tune([problem], tmp_path, CPU, 1e-9, jobs=1) == []


@pytest.mark.parametrize("where", ["build", "calls", "rounds"])
def test_time_that_ends_amid_a_problem_leaves_it_to_the_next_run(
    where: str, problem: tune.Problem, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends within the second build, the second candidate's calls, or the first timing."""
    owner, now, count = tune.work if where == "build" else Program, [0.0], iter(range(100))
    original = getattr(owner, where)

    def late(*arguments: Any, **keywords: Any) -> Any:
        if next(count) == (where != "rounds"):
            now[0] = 301.0
        return original(*arguments, **keywords)

    monkeypatch.setattr(owner, where, late)
    monkeypatch.setattr(tune.time, "monotonic", lambda: now[0])
    assert tune.tune([problem], tmp_path, CPU, 300, jobs=1) == []
    assert tune.measured_before(tmp_path, problem) == set()


def test_the_command_counts_what_was_measured_before(
    manifest: Path, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = list(tune.problems_of(manifest_schema.read(manifest), host_target(), None))
    of_gemm = [problem for problem in problems if problem.family == "gemm"]
    assert len(of_gemm) > 1
    tune.tune(of_gemm[:1], tmp_path, CPU, 300, jobs=1)
    arguments = ["tune", str(manifest), "--family", "gemm", "--output", str(tmp_path), "--jobs", "1"]
    monkeypatch.setattr(tune, "_measured", lambda *_: tune.Measured(of_gemm[1], (1.0, 0.5), (), None, 0.0))
    result = CliRunner().invoke(command, arguments)
    total = len(of_gemm)
    assert f"{total} of {total} problems measured, 1 of them before; 0 new rows" in result.output
    over = CliRunner().invoke(command, [*arguments, "--seconds", "1e-9", "--output", str(tmp_path / "other")])
    assert f"0 of {total} problems measured, 0 of them before, {total} left for another run" in over.output


def test_worker_processes_compile(problem: tune.Problem, tmp_path: Path, quick: None) -> None:
    (result,) = tune.tune([problem], tmp_path, CPU, 300, jobs=2)
    assert not result.failures


def test_a_file_of_another_form_is_not_written_over(problem: tune.Problem, tmp_path: Path) -> None:
    directory = tmp_path / problem.route.target.arch
    directory.mkdir()
    (directory / "gemm.measured.jsonl").write_text("[]\n")
    with pytest.raises(CacheError, match=r"gemm\.measured\.jsonl"):
        tune.tune([problem], tmp_path, CPU, 300, jobs=1)


def test_a_table_that_nothing_may_be_added_to_is_found_before_anything_is_measured(
    problem: tune.Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "_measured", lambda *_: pytest.fail("something was measured"))
    directory = tmp_path / problem.route.target.arch
    directory.mkdir()
    (directory / "gemm.json").write_text("{")
    with pytest.raises(CacheError, match=r"gemm\.json is no table of measured choices"):
        tune.tune([problem], tmp_path, CPU, 300, jobs=1)
    with pytest.raises(CacheError, match=r"gemm\.json cannot be written"):
        tune.tune([problem], Path("/proc/nowhere"), CPU, 300, jobs=1)


def test_an_interrupt_says_where_the_measurements_are(
    manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tune, "_measured", interrupted)
    result = CliRunner().invoke(command, ["tune", str(manifest), "--output", str(tmp_path), "--jobs", "1"])
    assert result.exit_code == 130
    assert f"interrupted; {tmp_path} has what was measured" in result.output


def test_names_of_problems_have_rows_and_short_digests(problem: tune.Problem) -> None:
    one = dataclasses.replace(problem, facts={"kernel": "a" * 64, "rows": 1, "matrices": 1, "wide": False})
    assert str(one).endswith(f"(gemm for {problem.route.target}: kernel {'a' * 12}, rows 1)")


def test_backends_of_one_dialect_have_rows_of_their_own(tmp_path: Path) -> None:
    """Tiles of CUTLASS are no candidates of ``backend="cuda"``, whose products have the same facts but for one."""
    specs = (jitgen.TensorSpec((777, 1024), torch.bfloat16), jitgen.TensorSpec((2048, 1024), torch.bfloat16))
    with jitgen.record(tmp_path / "manifest.json"):
        for backend in ("cuda", "cutlass"):
            jitgen.jit(backend=backend)(lambda x, w: F.linear(x, w)).lower(*specs, target="sm_90a")
    problems = list(tune.problems_of(manifest_schema.read(tmp_path / "manifest.json"), Target.parse("sm_90a"), None))
    mainloops = {
        (problem.facts["rows"], problem.facts.get("cutlass")): mainloops_of(problem)[0] for problem in problems
    }
    assert mainloops[1536, True] == "CutlassTile"
    assert mainloops[1536, None] == "WgmmaDense"


def test_the_command_lists_problems_of_another_target(monkeypatch: pytest.MonkeyPatch) -> None:
    read = manifest_schema.read
    monkeypatch.setattr(manifest_schema, "read", lambda path: read(path)[:1])
    result = CliRunner().invoke(command, ["tune", "--model", "llama-3-8b", "--target", "sm_90a", "--dry-run", "--json"])
    assert result.exit_code == 0, result.output
    problems = json.loads(result.output)["problems"]
    assert any(problem["tried"] > 4 for problem in problems)
    assert all(2 <= problem["tried"] <= problem["candidates"] for problem in problems)


def test_the_command_measures_on_this_machine_alone() -> None:
    other = CliRunner().invoke(command, ["tune", "--model", "llama-3-8b", "--target", "sm_80"])
    assert other.exit_code == 2
    assert "--dry-run" in other.output
    endless = CliRunner().invoke(command, ["tune", "--model", "llama-3-8b", "--seconds", "nan"])
    assert endless.exit_code == 2
    assert "finite" in endless.output
    nothing = CliRunner().invoke(command, ["tune"])
    assert nothing.exit_code == 2
    assert "--model" in nothing.output


def test_the_command_says_where_there_is_nothing_to_measure(tmp_path: Path) -> None:
    path = tmp_path / "pointwise.py"
    path.write_text("def twice(x):\n    return x * 2\n")
    result = CliRunner().invoke(
        command, ["tune", f"{path}:twice", "--arg", "f32[8]", "--target", "sm_90a", "--dry-run"]
    )
    assert "has several schedules for sm_90a: there is nothing to measure" in result.output


def test_the_command_takes_a_function_and_its_arguments(tmp_path: Path) -> None:
    path = tmp_path / "gate.py"
    path.write_text("import torch.nn.functional as F\n\n\ndef gate(x, w):\n    return F.silu(F.linear(x, w))\n")
    arguments = ["--arg", "bf16[1000,512]", "--arg", "bf16[1024,512]", "--target", "sm_90a", "--dry-run", "--json"]
    result = CliRunner().invoke(command, ["tune", f"{path}:gate", *arguments])
    assert result.exit_code == 0, result.output
    problems = json.loads(result.output)["problems"]
    assert any("rows 1536" in problem["problem"] and "columns [1024]" in problem["problem"] for problem in problems)
    nothing = CliRunner().invoke(command, ["tune", *arguments[:2], "--dry-run"])
    assert nothing.exit_code == 2
