"""Keeps what ``tune`` measures: files of one family and target, in a directory that several runs may share.

::

    <target>/<family>.json                  rows of winners, as ``cache/tuned/README.md`` describes them
    <target>/<family>.measured.jsonl        a line for each problem, with the seconds of every candidate
    <target>/.<family>.<digest>.claim       the lock of a problem that a run measures now

A line says what measured it (``Origin``): the device, and the digest of the code and of the compiler that made the
kernels. A run goes on after the lines of its own origin; others are replaced when their problem is measured again. A
line may also say that a problem's timings did not end, and how many seconds they need.

What is measured of a problem decides alone about its row: without a winner, the row that it had goes.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jitgen._version import __version__
from jitgen.deploy import shared_files
from jitgen.errors import CacheError
from jitgen.schedule import tuned
from jitgen.schedule.tuned import Row
from jitgen.spec import digest

Line = Mapping[str, Any]
"""``problem``, ``origin``; ``candidates``, or ``needs``: the seconds that a run needs for it."""


@dataclass(frozen=True)
class Origin:
    """Says what measures: the name of the device, and the digest of the code and the compiler of the kernels."""

    device: str
    code: str

    @property
    def as_json(self) -> dict[str, str]:
        return {"device": self.device, "code": self.code, "jitgen": __version__}

    def made(self, line: Line) -> bool:
        """Returns whether ``line`` is of this origin."""
        made = line.get("origin")
        return isinstance(made, dict) and made == self.as_json


@dataclass(frozen=True)
class Files:
    """Describes the files of one family and target in the directory of an output."""

    output: Path
    target: str
    family: str

    @property
    def rows(self) -> Path:
        return self.output / self.target / f"{self.family}.json"

    @property
    def lines(self) -> Path:
        return self.output / self.target / f"{self.family}.measured.jsonl"

    def read(self) -> list[Line]:
        """Returns the lines, of which a process that was killed may have left a part at the end.

        Raises:
            CacheError: there is another line.
        """
        if not self.lines.exists():
            return []
        number = 0
        try:
            if not self.lines.is_file():
                raise ValueError("it is no file")
            text = self.lines.read_text()
            lines: list[Line] = []
            for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), 1):  # noqa: B007  named below
                content = json.loads(line)
                if not isinstance(content, dict) or not isinstance(content.get("problem"), str):
                    raise ValueError("it names no problem")
                lines.append(content)
        except (OSError, ValueError) as error:
            problem = f"line {number}: {error}" if number else str(error)
            text = f"{self.lines} has no measurements of jitgen tune: {problem}; remove the line, or the file"
            raise CacheError(text) from error
        return lines

    def known(self, origin: Origin) -> tuple[set[str], dict[str, float]]:
        """Returns the problems that ``origin`` has measured, and the seconds that others need, whose timings did not
        end."""
        own = [line for line in self.read() if origin.made(line)]
        needed = {line["problem"]: float(line["needs"]) for line in own if "needs" in line}
        return {line["problem"] for line in own if "candidates" in line}, needed

    def check(self) -> None:
        """Raises CacheError where rows cannot be read, or nothing can be written."""
        with shared_files.locked(self.rows):
            self._content()
            probe = self.rows.with_name(f".{self.rows.name}.probe")
            shared_files.replace(probe, " " * 4096)
            probe.unlink(missing_ok=True)

    def row_of(self, row: Row) -> Row | None:
        """Returns the row that is kept for the chip, the dialect and the problem of ``row``."""
        if not self.rows.exists():
            return None
        rows = tuned.read(self.rows, self.target, self.family)
        return next((one for one in rows if _key(one.as_json) == _key(row.as_json)), None)

    def keep(self, problem: str, line: Line, replaced: Row, measured: Line | None) -> bool:
        """Replaces the line of ``problem``, and the row of the problem of ``replaced``, if there is one.

        Args:
            measured: the row, as the file has it; None where there is no winner: then the one that was there goes.

        Returns:
            Whether there was a row that went.
        """
        with shared_files.locked(self.rows):  # of both files
            content, gone = self._content(), False
            others = [row for row in content["rows"] if _key(row) != _key(replaced.as_json)]
            if measured is not None or len(others) < len(content["rows"]):
                gone = measured is None
                content["rows"] = [*others, *([measured] if measured is not None else [])]
                shared_files.replace(self.rows, json.dumps(content, indent=1) + "\n")
            self._replace_line(problem, line)
        return gone

    def postpone(self, problem: str, line: Line) -> None:
        """Replaces the line of ``problem``, whose timings did not end; rows stay."""
        with shared_files.locked(self.rows):
            self._replace_line(problem, line)

    def _replace_line(self, problem: str, line: Line) -> None:
        others = [other for other in self.read() if other["problem"] != problem]
        shared_files.replace(self.lines, "".join(f"{json.dumps(one)}\n" for one in (*others, line)))

    def _content(self) -> dict[str, Any]:
        """Returns the content of the file of rows, whose lock is held, or that of a file without rows.

        Raises:
            CacheError: it is a file of another form, to which nothing is added.
        """
        if not self.rows.exists():
            return {"schema": tuned.SCHEMA, "target": self.target, "family": self.family, "rows": []}
        tuned.read(self.rows, self.target, self.family)
        content: dict[str, Any] = json.loads(self.rows.read_text())
        return content

    @contextmanager
    def claimed(self, problem: str) -> Iterator[bool]:
        """Claims a problem for the context; False where another run has it."""
        from filelock import FileLock, Timeout

        path = self.rows.with_name(f".{self.family}.{digest(problem)[:16]}.claim")
        lock = FileLock(path)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            yield False
            return
        except OSError as error:
            raise CacheError(f"{path} cannot be written: {error.strerror or error}") from error
        try:
            yield True
        finally:
            path.unlink(missing_ok=True)
            lock.release()


def cpu_model() -> str:
    """Returns the name of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def rounded_up(seconds: float) -> float:
    """Returns ``seconds`` rounded up to two digits, for people to give as a budget."""
    unit = 10.0 ** max(0, math.floor(math.log10(max(seconds, 1.0))) - 1)
    return math.ceil(seconds / unit) * unit


def _key(row: Mapping[str, Any]) -> Sequence[Any]:
    return [row[name] for name in ("chip", "dialect", "problem")]
