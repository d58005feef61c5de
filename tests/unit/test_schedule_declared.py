"""Schedules as declared values: their words, and that every word that a class declares is said."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import pytest

from jitgen.families.gemm.mainloops import SCHEDULES, MmaRows, Simt, WgmmaDense, WgmmaQuantized
from jitgen.ir.program import plain
from jitgen.schedule.declared import Schedule, about, declared, derived


@dataclass(frozen=True)
class Example(Schedule):
    sentence = ("tiles of {rows} x {columns}", "stages", "splits", "absent", "wide")
    rows: int
    stages: int = field(metadata=about("{} stages"))
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


def test_a_derived_number_is_no_field_and_cannot_be_set() -> None:
    schedule = Example(8, 1)
    assert replace(schedule, rows=4).columns == 8
    assert "columns" not in {each.name for each in fields(schedule)}
    with pytest.raises(AttributeError):
        schedule.columns = 3  # type: ignore[misc]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda each: each.__name__)
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
