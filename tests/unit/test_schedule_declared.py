"""Schedules as declared values: their words, their ``struct Config``, and what is part of their key."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pytest

from jitgen._data import data_directory
from jitgen.families.attention.backward import wgmma as backward_wgmma
from jitgen.families.attention.forward import wgmma
from jitgen.families.attention.forward.decode import DecodeSchedule
from jitgen.families.attention.forward.resident import ResidentSchedule
from jitgen.families.gemm.mainloops import (
    SCHEDULES,
    Dense,
    MmaCodes,
    MmaColumns,
    MmaQuantized,
    MmaRows,
    Simt,
    Stream,
    StreamOuter,
    WgmmaDense,
    WgmmaQuantized,
)
from jitgen.families.rows.reduction import forms
from jitgen.ir.program import plain
from jitgen.schedule.declared import DeclaredSchedule, about, declared, derived


@dataclass(frozen=True)
class Example(DeclaredSchedule):
    sentence = ("tiles of {rows} x {columns}", "stages", "splits", "absent", "wide")
    config = ("rows", "depth", "masked", "wide", "columns", "along")
    rows: int
    stages: int = field(metadata=about("{} stages", member="depth"))
    splits: int = field(default=0, metadata=about("{} splits", least=1))
    wide: bool = field(default=False, metadata=about("64-bit indices"))

    @derived("never in the sentence")
    def columns(self) -> int:
        return 2 * self.rows


def test_words_follow_the_sentence_and_leave_out_what_is_ordinary() -> None:
    assert str(Example(8, 1)) == "tiles of 8 x 16"
    assert str(Example(8, 3, 1, True)) == "tiles of 8 x 16, 3 stages, 1 splits, 64-bit indices"
    assert str(Example(8, 2, 0, False)) == "tiles of 8 x 16, 2 stages"


def test_a_subclass_shares_the_sentence() -> None:
    @dataclass(frozen=True)
    class Narrow(Example):
        absent: int = field(default=7, metadata=about("{} that the base lacks"))

    assert str(Narrow(8, 1)) == "tiles of 8 x 16, 7 that the base lacks"
    assert list(declared(Narrow)) == ["stages", "splits", "wide", "absent", "columns"]


def test_a_number_is_said_with_what_it_counts() -> None:
    @dataclass(frozen=True)
    class Counted(DeclaredSchedule):
        sentence = ("{rows:row}", "{accesses:access|accesses} a thread", "tiles", "in order")
        rows: int
        accesses: int
        tiles: int = field(default=0, metadata=about("{:tile} at once", least=1))

    assert str(Counted(1, 2)) == "1 row, 2 accesses a thread, in order"
    assert str(Counted(3, 1, 1)) == "3 rows, 1 access a thread, 1 tile at once, in order"


def test_a_derived_number_is_no_field_and_cannot_be_set() -> None:
    schedule = Example(8, 1)
    assert replace(schedule, rows=4).columns == 8
    assert "columns" not in {each.name for each in fields(schedule)}
    with pytest.raises(AttributeError):
        schedule.columns = 3  # type: ignore[misc]


ATTENTION = [wgmma.WgmmaSchedule, ResidentSchedule, DecodeSchedule, backward_wgmma.WgmmaSchedule]
FORMS = [*SCHEDULES, *forms.SCHEDULES, *ATTENTION]


@pytest.mark.parametrize("schedule", FORMS, ids=lambda each: each.__name__)
def test_every_declared_word_is_in_the_sentence(schedule: Any) -> None:
    said = {name for name, about in declared(schedule).items() if about.words}
    assert said <= set(schedule.sentence)


@pytest.mark.parametrize(
    "schedule",
    [
        MmaRows(8, 1, 2, 4, 2),
        Simt(64, 64, 16, 4),
        WgmmaQuantized(64, 2, 1, 2, stages=4),
        WgmmaDense(2, 1, 128, stages=4),
    ],
    ids=lambda each: type(each).__name__,
)
def test_every_field_is_part_of_the_key(schedule: Any) -> None:
    for each in fields(schedule):
        value = getattr(schedule, each.name)
        other = replace(schedule, **{each.name: not value if isinstance(value, bool) else value + 1})
        assert plain(other) != plain(schedule), each.name
        assert other != schedule
    assert plain(replace(schedule)) == plain(schedule)


def test_members_follow_the_config_of_the_mainloop() -> None:
    members = Example(8, 3, wide=True).members(masked=False, along="jitgen::Along::k")
    assert [" ".join(each) for each in members] == [
        "int rows 8",
        "int depth 3",
        "bool masked false",
        "bool wide true",
        "int columns 16",
        "jitgen::Along along jitgen::Along::k",
    ]


def test_a_fact_comes_before_a_number_of_the_schedule() -> None:
    (rows, *_) = Example(8, 3).members(rows=2, masked=True, along="jitgen::Along::k")
    assert rows == ("int", "rows", "2")


def test_members_are_complete_and_no_others() -> None:
    with pytest.raises(AttributeError, match="masked"):
        Example(8, 3).members(along="jitgen::Along::k")
    with pytest.raises(AssertionError, match="unread"):
        Example(8, 3).members(masked=True, along="jitgen::Along::k", unread=1)


HEADERS = [
    *((each, "gemm/include/jitgen/gemm_mma.cuh") for each in (MmaQuantized, MmaCodes, MmaRows, MmaColumns)),
    *((each, "gemm/include/jitgen/gemm_stream.cuh") for each in (Stream, StreamOuter)),
    (Dense, "gemm/include/jitgen/gemm_dense.cuh"),
    (Simt, "gemm/include/jitgen/gemm_simt.cuh"),
    (WgmmaQuantized, "gemm/include/jitgen/gemm_wgmma_quantized.cuh"),
    (WgmmaDense, "gemm/include/jitgen/gemm_wgmma_dense_shape.cuh"),
    (wgmma.WgmmaSchedule, "attention/include/jitgen/attention_wgmma.cuh"),
    (ResidentSchedule, "attention/include/jitgen/attention_resident.cuh"),
    (DecodeSchedule, "attention/include/jitgen/attention_decode.cuh"),
    (backward_wgmma.WgmmaSchedule, "attention_backward/include/jitgen/attention_backward.cuh"),
]


@pytest.mark.parametrize(("schedule", "header"), HEADERS, ids=lambda each: getattr(each, "__name__", each))
def test_a_header_documents_the_members_that_a_schedule_has(schedule: Any, header: str) -> None:
    text = (data_directory("templates") / header).read_text()
    struct = text[text.index("//   struct Config") : text.index("//   };")]
    found = re.findall(r"static constexpr [\w:]+ ([^;]+);", struct)
    names = [name.partition("=")[0].strip() for each in found for name in each.split(",")]
    assert sorted(names) == sorted(schedule.config)
