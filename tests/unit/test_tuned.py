"""Measured choices: a row wins over the model, decides the request key, and can do nothing but choose."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import jitgen
from jitgen._data import data_directory
from jitgen.deploy import manifest
from jitgen.errors import CacheError, CacheMissError, CacheWarning
from jitgen.families import registry
from jitgen.families.gemm.mainloops import WgmmaQuantized, WgmmaTilings
from jitgen.lowering import Route
from jitgen.schedule import tuned
from jitgen.spec import Target

SHIPPED = data_directory("cache/tuned")
FACTS = {
    "rows": 64,
    "columns": [1024],
    "length": 512,
    "matrices": 1,
    "dtype": "bfloat16",
    "weight": "int4",
    "group_size": 128,
    "contractions": 1,
    "wide": False,
}


def linear(x: torch.Tensor, w: Any) -> torch.Tensor:
    return F.linear(x, w)


def lowered(rows: int, columns: int, length: int, target: str = "sm_90a") -> Any:
    weight = jitgen.TensorSpec((columns, length), torch.bfloat16, format="int4", group_size=128)
    return jitgen.jit(linear).lower(jitgen.TensorSpec((rows, length), torch.bfloat16), weight, target=target)


def table(**changes: Any) -> dict[str, Any]:
    schedule = {"mainloop": "WgmmaQuantized", "warpgroups": 4, "blocks_of_rows": 1, "tokens": 16}
    measured = {"seconds": 1e-5, "seconds_of_the_model": None, "source": "a test"}
    row = {"chip": "NVIDIA H200", "dialect": "cuda", "problem": FACTS, "schedule": schedule, "measured": measured}
    return {"schema": 1, "target": "sm_90a", "family": "gemm", "rows": [row | changes]}


def write(directory: Path, content: Any) -> Path:
    path = directory / "sm_90a" / "gemm.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_the_shipped_row_wins_over_the_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    chosen = lowered(64, 57344, 8192)
    (row,) = tuned.read(SHIPPED / "sm_90a" / "gemm.json", "sm_90a", "gemm")
    assert chosen.lowered.choices[0].row == row.digest
    assert row.digest[:12] in chosen.explain()
    monkeypatch.setattr(tuned, "data_directory", lambda name: tmp_path)
    model = lowered(64, 57344, 8192)
    assert model.lowered.choices[0].row == ""
    (ours,), (theirs,) = chosen.lowered.schedules, model.lowered.schedules
    assert isinstance(ours, WgmmaQuantized)
    assert (ours.tokens, ours.blocks_of_rows) == (64, 2)
    assert theirs != ours
    assert chosen.key != model.key
    assert chosen.source != model.source


def test_every_shipped_row_is_taken() -> None:
    for path in SHIPPED.glob("*/*.json"):
        for row in tuned.read(path, path.parent.name, path.stem):
            assert path.stem == "gemm", "this test makes products only"
            low = lowered(row.problem["rows"], row.problem["columns"][0], row.problem["length"], path.parent.name)
            assert low.lowered.choices[0].row == row.digest


@pytest.mark.parametrize("order", [1, -1])
def test_a_row_can_name_several_tilings(order: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A launch takes one of them, whichever order the row has them in."""
    model = lowered(64, 1024, 512).lowered
    family, device = registry.named("gemm"), model.route.device
    problem = family.problem(model.program.kernels[0], model.layouts[0], model.laid_out.geometries[0], device)
    wanted = [each for each in family.candidates(problem, device) if isinstance(each, WgmmaTilings)][-1]
    assert len(wanted.tilings) == tuned.SCHEDULE_LIMIT
    assert wanted != model.schedules[0]
    named = [{"mainloop": type(each).__name__} | dataclasses.asdict(each) for each in wanted.tilings[::order]]
    write(tmp_path, table(schedule=named))
    monkeypatch.setenv("JITGEN_TUNED", str(tmp_path))
    chosen = lowered(64, 1024, 512)
    assert chosen.lowered.schedules == (wanted,)
    assert chosen.lowered.choices[0].row
    assert chosen.source.count('extern "C"') == len(wanted.tilings)


def test_a_row_is_for_its_problem_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write(tmp_path, table())
    monkeypatch.setenv("JITGEN_TUNED", str(tmp_path))
    assert lowered(64, 1024, 512).lowered.schedules[0].warpgroups == 4
    assert lowered(17, 1024, 512).lowered.choices[0].row, "another call of the bucket"
    for rows, columns, length in ((65, 1024, 512), (16, 1024, 512), (64, 1032, 512), (64, 1024, 640)):
        assert not lowered(rows, columns, length).lowered.choices[0].row
    assert not lowered(64, 1024, 512, "sm_80").lowered.choices[0].row


def test_a_row_that_changes_nothing_changes_the_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = lowered(64, 1024, 512)
    schedule = {"mainloop": "WgmmaQuantized", "warpgroups": model.lowered.schedules[0].warpgroups}
    write(tmp_path, table(schedule=schedule | {"blocks_of_rows": model.lowered.schedules[0].blocks_of_rows}))
    monkeypatch.setenv("JITGEN_TUNED", str(tmp_path))
    with pytest.warns(CacheWarning, match=r"names 6 candidates, and needs more of their fields"):
        again = lowered(64, 1024, 512)  # the model's choice, which is among them
    assert again.lowered.schedules == model.lowered.schedules
    assert again.source == model.source
    assert again.key != model.key


def recorded(path: Path) -> dict[str, Any]:
    with jitgen.record(path):
        lowered(64, 4096, 2048)
    (entry,) = json.loads(path.read_text())["entries"]
    return entry


def test_prewarm_makes_the_keys_that_calls_ask_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    entry, route = recorded(tmp_path / "specs.json"), Route("cuda", "nvrtc", Target.parse("sm_90a"))
    model = manifest.relower(entry, route)
    write(tmp_path, table(problem=FACTS | {"columns": [4096], "length": 2048}))
    monkeypatch.setenv("JITGEN_TUNED", str(tmp_path))
    measured = manifest.relower(entry, route)
    assert measured.key == lowered(64, 4096, 2048).key != model.key
    assert measured.schedules != model.schedules


@pytest.mark.slow
def test_prewarm_and_strict_agree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own_store: Path) -> None:
    """Sizes for which no other bucket of rows has the model's schedule of this one, and with it the same key."""
    write(tmp_path, table(problem=FACTS | {"columns": [4096], "length": 2048}))
    monkeypatch.setenv("JITGEN_TUNED", str(tmp_path))
    recorded(tmp_path / "specs.json")
    jitgen.prewarm(tmp_path / "specs.json", targets=["sm_90a"], jobs=1)
    with jitgen.strict():
        assert len(lowered(64, 4096, 2048).compile().report) == 1
        monkeypatch.delenv("JITGEN_TUNED")
        with pytest.raises(CacheMissError):
            lowered(64, 4096, 2048).compile()


# ------------------------------------------------------------------------------------------------------ hostile files

BAD: dict[str, Any] = {
    "empty": "",
    "cut": json.dumps(table())[:-5],
    "a list": [],
    "another schema": table() | {"schema": 2},
    "a schema of True": table() | {"schema": True},
    "another target": table() | {"target": "sm_80"},
    "another family": table() | {"family": "reduction"},
    "a further member": table() | {"code": "print()"},
    "a member twice": json.dumps(table()).replace('"schema": 1', '"schema": 1, "schema": 1'),
    "rows that are no list": table() | {"rows": {}},
    "two rows for a problem": table() | {"rows": table()["rows"] * 2},
    "a dialect": table(dialect="python"),
    "a chip": table(chip=3),
    "no mainloop": table(schedule={"tokens": 64}),
    "an array of one schedule": table(schedule=[{"mainloop": "WgmmaQuantized"}]),
    "five schedules": table(schedule=[{"mainloop": "WgmmaQuantized"}] * 5),
    "a mainloop that is no text": table(schedule={"mainloop": 64}),
    "a field's name": table(schedule={"mainloop": "WgmmaQuantized", "__class__ x": 1}),
    "a nested field": table(schedule={"mainloop": "WgmmaQuantized", "tokens": {"of": 1}}),
    "a list of lists": table(problem=FACTS | {"columns": [[1024]]}),
    "a float": table(problem=FACTS | {"rows": 64.0}),
    "a number too large": table(problem=FACTS | {"rows": 2**70}),
    "text with a line feed": table(problem=FACTS | {"dtype": "bfloat16\n"}),
    "seconds of NaN": json.dumps(table()).replace("1e-05", "NaN"),
    "nested too deeply": "[" * 100000,
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_of_another_form_is_ignored(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = write(tmp_path, BAD[name])
    with pytest.raises(CacheError, match="no table of measured choices"):
        tuned.read(path, "sm_90a", "gemm")
    monkeypatch.setenv("JITGEN_TUNED", str(tmp_path))
    with pytest.warns(CacheWarning, match="no table of measured choices"):
        assert tuned.find("gemm", "sm_90a", "NVIDIA H200", "cuda", FACTS) is None


@pytest.mark.parametrize(
    "schedule",
    [
        {"mainloop": "WgmmaQuantized", "tokens": 48},
        {"mainloop": "Simt"},
        {"mainloop": "object"},
        {"mainloop": "WgmmaQuantized", "warpgroups": True},
        {"mainloop": "WgmmaQuantized", "__doc__": "text"},
    ],
)
def test_a_row_that_selects_no_candidate_is_passed_over(
    schedule: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = lowered(64, 1024, 512)
    write(tmp_path, table(schedule=schedule))
    monkeypatch.setenv("JITGEN_TUNED", str(tmp_path))
    with pytest.warns(CacheWarning, match=r"gemm\.json, rows\[0\]: a measured choice for .* names no candidate"):
        low = lowered(64, 1024, 512)
    assert low.lowered.schedules == model.lowered.schedules
    assert low.key == model.key


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ('{"schema": 1,\n "target": ', r"line 2 column 12"),
        (table(problem=FACTS | {"rows": 1.5}), r"rows\[0\]\.problem\.rows: 1\.5 is not an integer"),
        (table(measured={"seconds": 1e-5}), r"rows\[0\]\.measured: lacks seconds_of_the_model, source"),
    ],
)
def test_a_malformed_file_is_refused_by_its_name_and_the_way_to_what_is_wrong(
    content: Any, place: str, tmp_path: Path
) -> None:
    path = write(tmp_path, content)
    with pytest.raises(CacheError, match=place) as caught:
        tuned.read(path, "sm_90a", "gemm")
    assert str(path) in str(caught.value)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(where=st.sampled_from(("schema", "rows", "chip", "dialect", "problem", "schedule", "measured")), value=VALUES)
@settings(max_examples=60, deadline=None)
def test_whatever_a_file_holds_it_is_read_or_refused(
    where: str, value: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = copy.deepcopy(table())
    (content if where in content else content["rows"][0])[where] = value
    path = write(tmp_path_factory.getbasetemp() / "fuzz", content)
    try:
        rows = tuned.read(path, "sm_90a", "gemm")
    except CacheError:
        return
    assert all(isinstance(row, tuned.Row) for row in rows)
