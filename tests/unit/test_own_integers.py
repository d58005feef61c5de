"""Integers that a user's kernel takes are those of the recorded call, or what the user states, where schedules are
timed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner

import jitgen
from jitgen.cli.group import jitgen as command
from jitgen.deploy import manifest_schema, own_integers, trials, tune, work
from jitgen.deploy.trials import Program
from jitgen.errors import CacheError
from jitgen.ir import graph as graphs
from jitgen.spec import host_target

CPU = torch.device("cpu")
ROWS, COLUMNS = 5, 128
LENGTHS = torch.tensor([3, 128, 1, 0, 77], dtype=torch.int32)
FIRST = """
extern "C" void first(const float* x, const int32_t* lengths, float* out, int rows, int columns) {
  for (int row = 0; row < rows; ++row)
    for (int i = 0; i < lengths[row]; ++i) out[row * columns + i] = x[row * columns + i];
}
"""
first = jitgen.cpp_kernel(FIRST, "first")


def ragged(x: torch.Tensor, lengths: torch.Tensor, weight: Any) -> torch.Tensor:
    out = torch.zeros_like(x)
    first(x, lengths, out, x.shape[0], x.shape[1])
    return F.linear(out, weight)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("integers") / "manifest.json"
    weight = jitgen.quantize(torch.randn(64, COLUMNS), "int4", group_size=COLUMNS)
    with jitgen.record(path):
        x = torch.randn(ROWS, COLUMNS)
        result = jitgen.jit(backend="cpp")(ragged)(x, LENGTHS, weight)
    shorter = x * (torch.arange(COLUMNS) < LENGTHS[:, None])
    torch.testing.assert_close(result, F.linear(shorter, weight.dequantize()), rtol=1e-4, atol=1e-3)
    return path


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ROUNDS", 2), ("CAREFUL_ROUNDS", 3), ("LEAST_SECONDS", 1e-5), ("ROTATED_BYTES", 1)):
        monkeypatch.setattr(trials, name, value)


def lengths_of(problem: tune.Problem) -> list[torch.Tensor]:
    program = Program(problem.entry, problem.route, CPU)
    return [next(tensor for tensor in copy if tensor.dtype == torch.int32) for copy in program._copies]


def problems_of(manifest: Path, **ranges: tuple[int, int]) -> list[tune.Problem]:
    entries = manifest_schema.read(manifest)
    read = [graphs.from_json(entry["graph"]) for entry in entries]
    stated = [own_integers.stated(entry, graph, ranges) for entry, graph in zip(entries, read, strict=True)]
    return list(tune.problems_of(stated, host_target(), None))


def test_a_recorded_call_leaves_its_integers(manifest: Path, quick: None) -> None:
    problems = problems_of(manifest)
    assert problems
    for problem in problems:
        assert problem.entry["inputs"][0]["sizes"] == [ROWS, COLUMNS]  # with more rows it would read beyond the lengths
        assert all(torch.equal(lengths, LENGTHS) for lengths in lengths_of(problem))
        assert not own_integers.undecided(problem.entry)


def test_bytes_that_choose_are_those_of_the_call(tmp_path: Path, quick: None) -> None:
    chosen = jitgen.cpp_kernel(
        """
        extern "C" void chosen(const float* x, const uint8_t* ids, float* out, int n) {
          for (int i = 0; i < n; ++i) out[i] = x[ids[i]];
        }
        """,
        "chosen",
    )

    def by_ids(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        out = torch.empty(ids.shape)
        chosen(x, ids, out, ids.numel())
        return out

    ids = torch.tensor([2, 0, 1, 2], dtype=torch.uint8)
    with jitgen.record(tmp_path / "manifest.json"):
        jitgen.jit(by_ids)(torch.randn(3), ids)
    (entry,) = manifest_schema.read(tmp_path / "manifest.json")
    program = Program(entry, work.route_of(entry, host_target()), CPU)
    assert all(torch.equal(copy[1], ids) for copy in program._copies)  # random bytes would lead it outside of x


def test_a_call_of_one_row_is_timed_with_no_more(tmp_path: Path) -> None:
    weight = jitgen.quantize(torch.randn(64, COLUMNS), "int4", group_size=COLUMNS)
    with jitgen.record(tmp_path / "manifest.json"):
        jitgen.jit(backend="cpp")(ragged)(torch.randn(1, COLUMNS), LENGTHS[:1], weight)
    entries = manifest_schema.read(tmp_path / "manifest.json")
    rows = {entry["inputs"][0]["sizes"][0]: entry for entry in entries}
    assert rows.keys() == {1, 2}  # one to build, of a call that nobody has made: there are lengths of one row
    assert rows[2]["enlarged"]
    assert rows[1]["integers"] == [[1, [3]]]
    assert {problem.entry["inputs"][0]["sizes"][0] for problem in problems_of(tmp_path / "manifest.json")} == {1}


def test_a_user_states_integers(manifest: Path, quick: None) -> None:
    drawn, before = problems_of(manifest, lengths=(1, COLUMNS)), problems_of(manifest)
    assert len({problem.identity for problem in (*drawn, *before)}) == len(drawn) + len(before)  # each is measured
    for problem in drawn:
        for lengths in lengths_of(problem):
            assert lengths.min() >= 1
            assert lengths.max() <= COLUMNS
            assert len(lengths.unique()) > 1
    for problem in problems_of(manifest, lengths=(COLUMNS, COLUMNS)):
        assert all(bool((lengths == COLUMNS).all()) for lengths in lengths_of(problem))
    with pytest.raises(jitgen.UnsupportedError, match=r"lengths=0..4294967296 are no integers of int32"):
        problems_of(manifest, lengths=(0, 2**32))


def test_what_is_described_alone_has_names_and_no_integers(tmp_path: Path) -> None:
    def doubled(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        first(x * 2, lengths.view(-1).int(), out, x.shape[0], x.shape[1])
        return out

    with jitgen.record(tmp_path / "manifest.json"):
        jitgen.jit(doubled).lower(jitgen.TensorSpec((6, 64)), jitgen.TensorSpec((2, 3), torch.int64))
    (entry,) = manifest_schema.read(tmp_path / "manifest.json")
    assert "integers" not in entry
    assert list(own_integers.names(graphs.from_json(entry["graph"]))) == [("lengths", 1)]
    assert own_integers.undecided(entry) == ["lengths"]


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64, torch.uint8])
def test_any_range_of_a_dtype_is_drawn_from(dtype: torch.dtype) -> None:
    limits, generator = torch.iinfo(dtype), torch.Generator().manual_seed(0)
    for least, most in ((limits.min, limits.max), (limits.max, limits.max), (limits.min, limits.min), (7, 9)):
        tensor = torch.empty(400, dtype=dtype)
        own_integers.fillers({"integers": [[0, {"least": least, "most": most}]]})[0](tensor, generator)
        assert least <= tensor.min()
        assert tensor.max() <= most
        assert (len(tensor.unique()) > 1) == (least < most)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda integers: [[0, integers[0][1]]], r"integers\[0\]\[0\]: is an input of float32"),
        (lambda integers: [[9, [0]]], r"integers\[0\]\[0\]: 9 is not an integer"),
        (lambda integers: [*integers, *integers], r"integers\[1\]\[0\]: 1 is not an integer of at least 2"),
        (lambda integers: [[1, [1, 2]]], r"integers\[0\]\[1\]: has 2 items"),
        (lambda integers: [[1, [2**31, *integers[0][1][1:]]]], r"integers\[0\]\[1\]\[0\]: 2147483648"),
        (lambda integers: [[1, {"least": 3, "most": 2}]], r"most: 2 is not an integer of at least 3"),
        (lambda integers: [[1, {"least": 3}]], r"lacks most"),
        (lambda integers: {"1": 3}, r"is not an array"),
    ],
)
def test_what_is_not_recorded_is_refused(
    manifest: Path, tmp_path: Path, changed: Callable[[Any], Any], message: str
) -> None:
    content = json.loads(manifest.read_text())
    entry = next(entry for entry in content["entries"] if "integers" in entry)
    entry["integers"] = changed(entry["integers"])
    (tmp_path / "other.json").write_text(json.dumps(content))
    with pytest.raises(CacheError, match=message):
        manifest_schema.read(tmp_path / "other.json")


def test_the_command_takes_integers(manifest: Path, tmp_path: Path, quick: None) -> None:
    content = json.loads(manifest.read_text())
    for entry in content["entries"]:
        entry.pop("integers", None)
    (tmp_path / "without.json").write_text(json.dumps(content))
    arguments = ["tune", str(tmp_path / "without.json"), "--target", "cpu", "--output", str(tmp_path), "--jobs", "1"]
    listed = CliRunner().invoke(command, [*arguments, "--dry-run"])
    assert "ragged: lengths is 0, as nobody recorded it" in " ".join(listed.output.split())
    result = CliRunner().invoke(command, [*arguments, "--integers", "lengths=1..128"])
    assert result.exit_code == 0, result.output
    assert "lengths is 0" not in result.output
    again = CliRunner().invoke(command, [*arguments, "--integers", "lengths = 1 .. 128", "--dry-run", "--json"])
    assert all(problem["measured"] for problem in json.loads(again.stdout)["problems"])
    other = CliRunner().invoke(command, [*arguments, "--integers", "lengths=128", "--dry-run", "--json"])
    assert not any(problem["measured"] for problem in json.loads(other.stdout)["problems"])


@pytest.mark.parametrize(
    ("text", "message"),
    [("pages=1", "parameter 'pages'; there are lengths"), ("lengths=9..2", "no name with a value"), ("7", "no name")],
)
def test_the_command_refuses_integers(manifest: Path, text: str, message: str) -> None:
    result = CliRunner().invoke(command, ["tune", str(manifest), "--target", "cpu", "--dry-run", "--integers", text])
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", "").split())
