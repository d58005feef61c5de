"""``jitgen tune`` measures candidates, keeps winners beyond noise, and goes on where it was interrupted."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner

import jitgen
from jitgen.cli import tune as cli
from jitgen.cli.group import jitgen as command
from jitgen.deploy import manifest_schema, measurements, trials, tune, work
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


def problems_in(output: Path, problem: tune.Problem) -> list[str]:
    return [line["problem"] for line in tune._files(output, problem).read()]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ROUNDS", 2), ("CAREFUL_ROUNDS", 3), ("LEAST_SECONDS", 1e-5), ("ROTATED_BYTES", 1)):
        monkeypatch.setattr(trials, name, value)


def test_candidates_are_measured_and_each_runs_its_own_schedule(
    problem: tune.Problem, tmp_path: Path, quick: None
) -> None:
    assert sorted(mainloops_of(problem)) == ["CppDecoded", "CppTiles"]
    assert {row.chip for row in problem.rows} == {host_target().arch}
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
    assert problems_in(tmp_path, problem) == ["other", problem.identity]
    assert not tune.waiting([problem], tmp_path, CPU)


def test_runs_into_one_output_keep_the_rows_of_all(problem: tune.Problem, tmp_path: Path) -> None:
    def measured(number: int) -> tune.Measured:
        rows = tuple(dataclasses.replace(row, problem={**row.problem, "rows": number}) for row in problem.rows)
        other = dataclasses.replace(problem, rows=rows, facts=rows[0].problem)
        return tune.Measured(other, (1.0, 0.5), (), rows[1], 0.5)

    files = tune._files(tmp_path, problem)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: tune._kept(measured(number), files, CPU), range(32)))
    assert len(tuned.read(files.rows, problem.route.target.arch, "gemm")) == 32
    assert len(set(problems_in(tmp_path, problem))) == 32


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
    ((waiting),) = tune.waiting([problem], tmp_path, CPU)
    assert waiting.needs == (0 if where == "build" else pytest.approx(330))


def test_the_command_counts_what_was_measured_before(
    manifest: Path, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = list(tune.problems_of(manifest_schema.read(manifest), host_target(), None))
    of_gemm = [problem for problem in problems if problem.family == "gemm"]
    assert len(of_gemm) > 1
    tune.tune(of_gemm[:1], tmp_path, CPU, 300, jobs=1)
    arguments = ["tune", str(manifest), "--family", "gemm", "--output", str(tmp_path), "--jobs", "1"]
    monkeypatch.setattr(tune, "_measured", lambda one, *_: tune.Measured(one, (1.0,) * len(one.rows), (), None, 0.0))
    result = CliRunner().invoke(command, arguments)
    total = len(of_gemm)
    assert f"{total} of {total} problems measured, 1 of them before; 0 rows kept in {tmp_path}" in result.output
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
    for name in ("gemm.json", "gemm.measured.jsonl"):
        (directory / name).unlink(missing_ok=True)
        (directory / name).mkdir()
        with pytest.raises(CacheError, match=rf"{name} .*it is no file"):
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


def timed_as(monkeypatch: pytest.MonkeyPatch, model: float, other: float) -> None:
    """Has the model's choice and all other candidates take these seconds."""
    seconds = {True: Seconds(model, model, model), False: Seconds(other, other, other)}
    monkeypatch.setattr(
        Program, "rounds", lambda self, timers, careful=False: {number: seconds[number == 0] for number in timers}
    )


def measured_by_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "_measuring_code", lambda: "other")


def test_a_row_that_wins_no_more_goes(problem: tune.Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = tune._files(tmp_path, problem)
    timed_as(monkeypatch, 1.0, 0.5)
    tune.tune([problem], tmp_path, CPU, 300, jobs=1)
    content = json.loads(files.rows.read_text())
    other = {**content["rows"][0], "problem": {**content["rows"][0]["problem"], "rows": 4096}}
    files.rows.write_text(json.dumps({**content, "rows": [other, *content["rows"]]}))
    timed_as(monkeypatch, 1.0, 0.99)
    measured_by_other_code(monkeypatch)
    (result,) = tune.tune([problem], tmp_path, CPU, 300, jobs=1)
    assert result.row_gone
    assert result.winner is None
    (left,) = tuned.read(files.rows, problem.route.target.arch, "gemm")
    assert left.problem["rows"] == 4096


def test_a_row_is_judged_again_though_its_schedule_is_pruned(
    problem: tune.Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, (chosen, other) = tune._files(tmp_path, problem), problem.rows
    timed_as(monkeypatch, 1.0, 0.5)
    tune.tune([problem], tmp_path, CPU, 300, jobs=1)
    pruned = dataclasses.replace(problem, rows=(chosen,), costs=problem.costs[:1], pruned=((other, 9.0),))
    measured_by_other_code(monkeypatch)
    (again,) = tune.tune([pruned], tmp_path, CPU, 300, jobs=1)
    assert again.winner is not None
    assert again.winner.digest == other.digest
    assert files.row_of(chosen) == other
    files.rows.unlink()
    monkeypatch.setattr(tune, "_measuring_code", lambda: "a third")
    (without,) = tune.tune([pruned], tmp_path, CPU, 300, jobs=1)
    assert without.seconds == (1.0,)


@pytest.mark.parametrize("what", ["code", "compiler", "device", "old form"])
def test_measurements_of_other_origin_are_taken_anew(
    what: str, problem: tune.Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed_as(monkeypatch, 1.0, 1.0)
    tune.tune([problem], tmp_path, CPU, 300, jobs=1)
    assert tune.waiting([problem], tmp_path, CPU) == []
    files = tune._files(tmp_path, problem)
    if what == "code":
        monkeypatch.setattr(tune, "code_digest", lambda: "other")
    elif what == "compiler":
        monkeypatch.setattr(tune.routes, "toolchain", lambda *_: "gcc 99")
    elif what == "device":
        monkeypatch.setattr(tune, "cpu_model", lambda: "another processor")
    else:
        files.lines.write_text(json.dumps({"problem": problem.identity, "device": "this CPU", "candidates": []}) + "\n")
    assert [one.is_stale for one in tune.waiting([problem], tmp_path, CPU)] == [True]
    assert len(tune.tune([problem], tmp_path, CPU, 300, jobs=1)) == 1
    assert len(files.read()) == 1


def test_a_problem_that_takes_longer_than_a_run_leaves_it_to_others(
    manifest: Path, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one takes 500 s of timings; a run of 300 s notes that, and the next one measures all others."""
    problems = list(tune.problems_of(manifest_schema.read(manifest), host_target(), None))[:3]
    original, now = Program.rounds, [0.0]

    def rounds(self: Program, timers: Any, careful: bool = False) -> Any:
        if self._slow:
            now[0] += 250 * (1 + careful)
            self._samples, self._timing = self._samples + 1, now[0]
            self._check_time()
        return original(self, timers, careful)

    monkeypatch.setattr(Program, "rounds", rounds)
    monkeypatch.setattr(Program, "_slow", False, raising=False)
    monkeypatch.setattr(tune.time, "monotonic", lambda: now[0])
    made = tune.Program

    def program(entry: Any, *rest: Any) -> Program:
        result = made(entry, *rest)
        result._slow = entry is problems[0].entry
        return result

    monkeypatch.setattr(tune, "Program", program)
    assert [one.problem for one in tune.waiting(problems, tmp_path, CPU)] == problems
    assert tune.tune(problems, tmp_path, CPU, 300, jobs=1) == []
    *others, slow = tune.waiting(problems, tmp_path, CPU)
    assert [one.problem for one in others] == problems[1:]
    assert slow.problem is problems[0]
    assert slow.needs > 300
    done = tune.tune(problems, tmp_path, CPU, 300, jobs=1)
    assert [one.problem for one in done] == problems[1:]
    assert tune.tune(problems, tmp_path, CPU, 300, jobs=1) == []  # it is not begun
    monkeypatch.setattr(tune, "problems_of", lambda *_: iter(problems))
    arguments = ["tune", str(manifest), "--output", str(tmp_path), "--jobs", "1"]
    result = CliRunner().invoke(command, [*arguments, "--seconds", "300"])
    assert result.exit_code == 1
    budget = f"{measurements.rounded_up(slow.needs):g}"
    assert f"1 of these need more than --seconds 300: give --seconds {budget}" in result.output
    listed = CliRunner().invoke(command, [*arguments, "--dry-run", "--json"])
    assert [one["needs"] for one in json.loads(listed.stdout)["problems"]] == [slow.needs, None, None]
    (last,) = tune.tune(problems, tmp_path, CPU, float(budget) * 3, jobs=1)
    assert last.problem.identity == problems[0].identity
    assert tune.waiting(problems, tmp_path, CPU) == []


def test_what_a_problem_needs_is_estimated_from_its_samples(
    problem: tune.Problem, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(trials.time, "monotonic", lambda: now[0])
    program = Program(problem.entry, problem.route, CPU, ends=35.0)
    program.expects(12)

    def timer() -> float:
        now[0] += 10.0
        return 10.0

    with pytest.raises(trials.TimeIsOverError) as over:
        program.rounds({0: timer, 1: timer}, careful=True)
    assert over.value.needs == 120.0


def test_runs_at_once_share_the_problems(problem: tune.Problem, tmp_path: Path, quick: None) -> None:
    files = tune._files(tmp_path, problem)
    files.check()
    with files.claimed(problem.identity) as is_own:
        assert is_own
        assert tune.tune([problem], tmp_path, CPU, 300, jobs=1) == []
    assert len(tune.tune([problem], tmp_path, CPU, 300, jobs=1)) == 1
    left = {path.name for path in files.rows.parent.iterdir()} - {"gemm.json"}  # a row, where noise has a winner
    assert left == {"gemm.measured.jsonl"}


def test_timings_go_round_the_copies_of_the_inputs() -> None:
    seen: list[int] = []

    def call(number: int) -> None:
        seen.append(number)
        trials.time.sleep(0.003)  # longer than a timing takes at least

    calls: list[Callable[[], None]] = [functools.partial(call, number) for number in range(4)]
    timer = trials._clock_timer(calls, lambda: None)
    for _ in range(6):
        assert timer() > 0.002
    assert seen == [0, 1, 2, 3, 0, 1, 2, 3]


def test_a_store_that_cannot_be_written_is_told_of_before_anything_is_compiled(
    problem: tune.Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JITGEN_CACHE_DIR", "/proc/nowhere")
    with pytest.raises(CacheError, match=r"store /proc/nowhere cannot be written: .* Set JITGEN_CACHE_DIR"):
        tune.tune([problem], tmp_path, CPU, 300, jobs=1)


@pytest.mark.parametrize("how", ["interrupt", "full disk"])
def test_json_is_one_document_however_a_run_ends(
    how: str, manifest: Path, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, begun = tune._kept, iter(range(100))

    def kept(*arguments: Any) -> tune.Measured:
        if next(begun) < 1:
            return original(*arguments)
        if how == "interrupt":
            raise KeyboardInterrupt
        raise CacheError("gemm.json cannot be written: No space left on device")

    monkeypatch.setattr(tune, "_kept", kept)
    arguments = ["tune", str(manifest), "--output", str(tmp_path), "--jobs", "1", "--json"]
    result = CliRunner().invoke(command, arguments)
    answer = json.loads(result.stdout)
    assert result.exit_code == (130 if how == "interrupt" else 2)
    assert answer["ended_by"] == ("interrupt" if how == "interrupt" else "error")
    assert len(answer["measured"]) == 2  # what was not kept is told of
    assert len(answer["measured"]) + len(answer["left"]) == answer["problems"]
    assert how == "interrupt" or "No space left on device" in result.stderr
    monkeypatch.setattr(tune, "_kept", original)
    result = CliRunner().invoke(command, arguments)
    answer = json.loads(result.stdout)
    assert (result.exit_code, answer["ended_by"], answer["left"], answer["measured_before"]) == (0, "", [], 1)


def test_a_full_disk_is_found_before_anything_is_measured(
    problem: tune.Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(measurements.shared_files, "replace", full)
    monkeypatch.setattr(tune, "_measured", lambda *_: pytest.fail("something was measured"))
    with pytest.raises(CacheError, match=r"gemm\.json cannot be written: No space left on device"):
        tune.tune([problem], tmp_path, CPU, 300, jobs=1)


def test_names_of_problems_have_rows_and_short_digests(problem: tune.Problem) -> None:
    one = dataclasses.replace(problem, facts={"kernel": "a" * 64, "rows": 1, "matrices": 1, "wide": False})
    assert str(one).endswith(f"(gemm for {problem.route.target}: kernel {'a' * 12}, rows 1)")
    by_cutlass = dataclasses.replace(problem, facts={"rows": 64, "length": 1, "cutlass": True, "wide": False})
    assert str(by_cutlass).endswith(": rows 64, cutlass)")


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
    assert f"for {host_target()}, and not for sm_80; use --dry-run" in " ".join(other.output.split())
    endless = CliRunner().invoke(command, ["tune", "--model", "llama-3-8b", "--seconds", "nan"])
    assert endless.exit_code == 2
    assert "finite" in endless.output
    nothing = CliRunner().invoke(command, ["tune"])
    assert nothing.exit_code == 2
    assert "--model" in nothing.output


def test_a_machine_with_a_gpu_measures_its_cpu_too(
    manifest: Path, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = cli._here()[-1]
    monkeypatch.setattr(cli, "_here", lambda: [(Target.parse("sm_90a"), None, torch.device("cuda", 0)), host])
    budget = ["--output", str(tmp_path), "--jobs", "1", "--json"]
    result = CliRunner().invoke(command, ["tune", str(manifest), "--target", "cpu", *budget])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["measured"]
    assert [path.name for path in tmp_path.iterdir()] == [str(host_target())]


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
