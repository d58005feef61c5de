"""Reads measured choices: rows of ``cache/tuned/<target>/<family>.json``, which a choice of a schedule reads before a
model.

A row says that on a chip, for one problem of a family, one of the family's own candidates was measured to be the best.
It names the problem by the facts that the family tells problems apart by (``Family.facts``), and the candidate by its
class and as many of its fields as single it out. So a file is data and no more: whatever it holds, a kernel is one that
jitgen could have chosen by itself. The format is documented in ``cache/tuned/README.md``.

A directory of the user's, ``JITGEN_TUNED``, comes before what jitgen ships. A file that is not of the known form is
ignored as a whole, with a warning. The digest of the row that was taken is a part of the request key.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jitgen import console, settings
from jitgen._data import data_directory
from jitgen.errors import CacheError, CacheWarning
from jitgen.fields import Field, object_of, shown
from jitgen.spec import digest

SCHEMA = 1
"""Version of the format."""
FILE_LIMIT = 2**24
"""Bytes of a file."""
ROW_LIMIT = 100_000
SCHEDULE_LIMIT = 4
"""Schedules of a row, and tilings of a source, of which a launch takes one."""
MEMBER_LIMIT = 64
"""Members of a problem or of a schedule, and items of an array in one: of each at most so many."""
NUMBER_LIMIT = 2**40
"""Numbers of a problem or of a schedule are below this."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_TEXT = re.compile(r"[ -~]{0,200}")


@dataclass(frozen=True)
class Row:
    """Records one measured choice.

    Attributes:
        chip: on which it was measured, as ``jitgen/schedule/chips.py`` names it.
        dialect: of the kernel.
        problem: the facts of the problem.
        schedules: the schedule, or those of which a launch takes one.
        source: the file and the number of the row in it, for people.
    """

    chip: str
    dialect: str
    problem: Mapping[str, Any]
    schedules: tuple[Selection, ...]
    source: str = ""

    @functools.cached_property
    def digest(self) -> str:
        """Returns the sha256 of all but the source."""
        return digest({name: value for name, value in asdict(self).items() if name != "source"})

    @property
    def as_json(self) -> dict[str, Any]:
        """Returns the row as a file has it, without what was measured."""
        schedules = [{"mainloop": one.mainloop, **one.fields} for one in self.schedules]
        facts = {"chip": self.chip, "dialect": self.dialect, "problem": dict(self.problem)}
        return facts | {"schedule": schedules[0] if len(schedules) == 1 else schedules}

    def selects(self, candidate: Any) -> bool:
        """Returns whether ``candidate`` is the row's schedule, or consists of the row's in any order (``tilings``)."""
        tilings = getattr(candidate, "tilings", (candidate,))
        orders = itertools.permutations(self.schedules)
        return len(tilings) == len(self.schedules) and any(
            all(map(Selection.selects, order, tilings)) for order in orders
        )

    def __str__(self) -> str:
        return " and ".join(map(str, self.schedules))


@dataclass(frozen=True)
class Selection:
    """Selects one schedule among a family's candidates.

    Attributes:
        mainloop: its class.
        fields: fields of it, by name, that tell it from other candidates.
    """

    mainloop: str
    fields: Mapping[str, Any]

    def selects(self, candidate: Any) -> bool:
        """Returns whether ``candidate`` is this schedule."""
        if type(candidate).__name__ != self.mainloop:
            return False
        return all(_equal(getattr(candidate, name, None), value) for name, value in self.fields.items())

    def __str__(self) -> str:
        return f"{self.mainloop} {dict(self.fields)}"


_trial: ContextVar[tuple[str, str, Row] | None] = ContextVar("trial", default=None)


def trying(family: str, target: str, row: Row) -> AbstractContextManager[None]:
    """Provides a context in which ``row`` comes before every file, so that its schedule can be measured."""
    return settings.within(_trial, (family, target, row))


def row_of(chip: str, dialect: str, problem: Mapping[str, Any], candidate: Any) -> Row:
    """Returns the row that selects ``candidate`` for ``problem``."""
    schedules = tuple(map(_selection_of, getattr(candidate, "tilings", (candidate,))))
    return Row(chip, dialect, problem, schedules)


def row_from_json(data: Mapping[str, Any]) -> Row:
    """Returns the row that ``Row.as_json`` has encoded."""
    unmeasured = {"measured": {"seconds": None, "seconds_of_the_model": None, "source": ""}}
    return _row(Field({**data, **unmeasured}))


def _selection_of(schedule: Any) -> Selection:
    values = {field.name: getattr(schedule, field.name) for field in dataclasses.fields(schedule)}
    fields = {name: value for name, value in values.items() if value is None or isinstance(value, (bool, int, str))}
    return Selection(type(schedule).__name__, fields)


def has_rows(family: str, target: str) -> bool:
    """Returns whether there is any row of ``family`` for ``target``, so that its facts are worth computing."""
    trial = _trial.get()
    tried = trial is not None and trial[:2] == (family, target)
    return tried or any(_table(directory, target, family) for directory in _directories())


def find(family: str, target: str, chip: str, dialect: str, problem: Mapping[str, Any]) -> Row | None:
    """Returns the row for ``problem`` from the user's directory, else from what jitgen ships; None without one."""
    key = _key(chip, dialect, problem)
    trial = _trial.get()
    if trial is not None and trial[:2] == (family, target):
        tried = trial[2]
        if _key(tried.chip, tried.dialect, tried.problem) == key:
            return tried
    for directory in _directories():
        row = _table(directory, target, family).get(key)
        if row is not None:
            return row
    return None


def read(path: str | os.PathLike[str], target: str, family: str) -> tuple[Row, ...]:
    """Returns the rows of a file.

    Raises:
        CacheError: it cannot be read, or is not what ``cache/tuned/README.md`` describes; it names the way to the first
            thing that is wrong.
    """
    try:
        if not os.path.isfile(path):
            raise ValueError("it is no file")
        with open(path, "rb") as file:
            raw = file.read(FILE_LIMIT + 1)
        if len(raw) > FILE_LIMIT:
            raise ValueError(f"it has more than {FILE_LIMIT} bytes")
        return _check(json.loads(raw.decode(), object_pairs_hook=object_of), target, family)
    except RecursionError:
        problem = "it is nested too deeply"
    except (OSError, ValueError, CacheError) as error:
        problem = str(error)
    raise CacheError(f"{os.fspath(path)} is no table of measured choices: {problem}; see cache/tuned/README.md")


def _directories() -> Sequence[Path]:
    chosen = settings.get("JITGEN_TUNED")
    return (*([Path(chosen)] if chosen else []), data_directory("cache/tuned"))


@functools.lru_cache(maxsize=64)
def _table(directory: Path, target: str, family: str) -> Mapping[str, Row]:
    """Returns the rows of one file by their problem, as they were when this process first asked; none if there is no
    such file, or its form is unknown."""
    path = directory / target / f"{family}.json"
    if not path.exists():
        return {}
    try:
        rows = [replace(row, source=f"{path}, rows[{n}]") for n, row in enumerate(read(path, target, family))]
        return {_key(row.chip, row.dialect, row.problem): row for row in rows}
    except CacheError as error:
        console.warn(f"{error}. Schedules are chosen without it", CacheWarning, stacklevel=2)
        return {}


def _key(chip: str, dialect: str, problem: Mapping[str, Any]) -> str:
    return digest([chip, dialect, dict(problem)])


def _equal(left: Any, right: Any) -> bool:
    """Compares two values without taking True for 1."""
    return type(left) is type(right) and left == right


# ------------------------------------------------------------------------------------------------------- the format


def _check(content: Any, target: str, family: str) -> tuple[Row, ...]:
    schema, of_target, of_family, rows = Field(content).members("schema", "target", "family", "rows")
    schema.one_of((SCHEMA,))
    of_target.one_of((target,))
    of_family.one_of((family,))
    by_problem: dict[str, Row] = {}
    for item in rows.items(ROW_LIMIT):
        row = _row(item)
        if by_problem.setdefault(_key(row.chip, row.dialect, row.problem), row) is not row:
            item.refuse("is the second row for its chip, dialect and problem")
    return tuple(by_problem.values())


def _row(field: Field) -> Row:
    chip, dialect, problem, schedule, measured = field.members("chip", "dialect", "problem", "schedule", "measured")
    _measurement(measured)
    selections = schedule.items(SCHEDULE_LIMIT, least=2) if isinstance(schedule.value, list) else [schedule]
    return Row(
        chip.text(_TEXT, "the name of a chip"),
        dialect.one_of(("cpp", "cuda", "triton")),
        _object_of_values(problem),
        tuple(map(_selection, selections)),
    )


def _selection(field: Field) -> Selection:
    fields = _object_of_values(field)
    mainloop = fields.pop("mainloop", None)
    if not isinstance(mainloop, str):
        field.refuse("lacks the name of its class, mainloop")
    return Selection(mainloop, fields)


def _measurement(field: Field) -> None:
    """Checks what was measured, which is for people and no part of the row."""
    seconds, model, source = field.members("seconds", "seconds_of_the_model", "source")
    source.text(_TEXT, "at most 200 printable ASCII characters")
    for number in (seconds, model):
        value = number.value
        if value is not None and not (type(value) is float and math.isfinite(value) and value > 0):
            number.refuse(f"{shown(value)} is neither null nor a number of seconds above 0")


def _object_of_values(field: Field) -> dict[str, Any]:
    """Reads an object whose members are integers, booleans, text, null, or arrays of these."""
    if not isinstance(field.value, dict) or len(field.value) > MEMBER_LIMIT:
        field.refuse(f"{shown(field.value)} is not an object of at most {MEMBER_LIMIT} members")
    for name, value in field.value.items():
        member = Field(value, field, name)
        Field(name, field, name).text(_NAME, "a name")
        if isinstance(value, list):
            for item in member.items(MEMBER_LIMIT):
                _value(item)
        else:
            _value(member)
    return dict(field.value)


def _value(field: Field) -> None:
    value = field.value
    if isinstance(value, str):
        field.text(_TEXT, "at most 200 printable ASCII characters")
    elif type(value) is int:
        field.integer(-NUMBER_LIMIT, NUMBER_LIMIT)
    elif value is not None and not isinstance(value, bool):
        field.refuse(f"{shown(value)} is not an integer, a boolean, text or null")
