"""Writing what was measured as JSON. A file is whole at any time, so that a run that is stopped has lost nothing.

``python -m bench.records JOINED PART...`` makes one file of those of ``jitgen bench sweep --part``. Its exit status is
1 where a case failed, or a part was stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.measurement import Measurement

FAILED = ("failed", "wrong")
"""How a note begins that says why a case has no times."""
Row = Mapping[str, Any]
"""A measurement, as ``Measurement.to_json`` has it."""


def record(environment: Mapping[str, Any], measurements: Sequence[Measurement], *, complete: bool) -> dict[str, Any]:
    """What ``jitgen bench --json`` writes: what was measured where, which cases failed, and whether the run ended."""
    rows = [measurement.to_json() for measurement in measurements]
    return {"environment": environment, "complete": complete, "failed": failures(rows), "measurements": rows}


def failure_of(row: Row) -> str:
    """Why a case has no times; empty where it has them."""
    unknown = "" if "jitgen" in row["seconds"] else "failed: it has no time"
    return next((note for note in row["notes"] if note.startswith(FAILED)), unknown)


def failures(rows: Sequence[Row]) -> list[dict[str, str]]:
    """The cases that failed: which, and why."""
    facts = ("group", "name", "backend", "dtype")
    return [{**{fact: row[fact] for fact in facts}, "why": why} for row in rows if (why := failure_of(row))]


def line_of(failure: Mapping[str, str]) -> str:
    """One of ``failures`` in words."""
    case = ", ".join(filter(None, (failure["backend"], failure["name"], failure["dtype"])))
    return f"{failure['group']}: {case}: {failure['why']}"


def told(failed: Sequence[Mapping[str, str]], count: int) -> list[str]:
    """``failed`` of so many measurements, as lines."""
    return [f"{len(failed)} of {count} measurements failed:", *(f"  {line_of(failure)}" for failure in failed)]


def end(rows: Sequence[Mapping[str, Any]]) -> None:
    """Ends the process with status 1 where rows of a script have a member ``failed``."""
    if failed := sum("failed" in row for row in rows):
        sys.exit(f"{failed} of {len(rows)} rows failed")


def write(path: Path, content: Any) -> None:
    """Write ``content`` to ``path`` as indented JSON, or replace what is there."""
    _replace(path, json.dumps(content, indent=1) + "\n")


def write_rows(path: Path, rows: Sequence[Any]) -> None:
    """Write ``rows`` to ``path`` as a JSON list with one row a line, or replace what is there."""
    _replace(path, "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(path.name + ".part")
    written.write_text(text)
    written.replace(path)


def joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One record of the parts of a sweep, with the first one's environment, and the commands of all. It is complete
    where every part is.

    Raises:
        ValueError: the parts are not of one sweep, measured by the same code and software on one kind of card, or not
            each of its parts once.
    """
    environments = [part["environment"] for part in parts]
    own = {"command": "", "part": None}
    first, *others = ({**facts, **own, "settings": {**facts["settings"], **own}} for facts in environments)
    for other in others:
        if differing := sorted(key for key in first.keys() | other if first.get(key) != other.get(key)):
            raise ValueError(f"the files are no parts of one sweep: they differ in {', '.join(differing)}")
    numbers = [tuple(facts["settings"]["part"]) for facts in environments]
    wanted = [(number, numbers[0][1]) for number in range(1, numbers[0][1] + 1)]
    if sorted(numbers) != wanted:
        shown, all_parts = (" ".join(f"{n}/{m}" for n, m in pairs) for pairs in (sorted(numbers), wanted))
        raise ValueError(f"the files are the parts {shown}: give {all_parts}, each once; measure again what is missing")
    commands = "; ".join(facts["command"] for facts in environments)
    rows = [row for part in parts for row in part["measurements"]]
    return {
        "environment": {**environments[0], "command": commands},
        "complete": all(part.get("complete", True) for part in parts),
        "failed": failures(rows),
        "measurements": rows,
    }


def main() -> int:
    """Joins files; returns the exit status."""
    parser = argparse.ArgumentParser(description="Joins the files of the parts of a sweep.")
    parser.add_argument("output", type=Path)
    parser.add_argument("parts", type=Path, nargs="+")
    arguments = parser.parse_args()
    parts = {source: json.loads(source.read_text()) for source in arguments.parts}
    try:
        whole = joined(list(parts.values()))
    except ValueError as error:
        parser.error(str(error))
    write(arguments.output, whole)
    lines = [f"{source} is of a run that was stopped" for source, part in parts.items() if not part.get("complete", 1)]
    lines += told(whole["failed"], len(whole["measurements"])) if whole["failed"] else []
    print(*lines, sep="\n", end="\n" * bool(lines), file=sys.stderr)
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
