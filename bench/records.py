"""Writing what was measured as JSON. A file is whole at any time, so that a run that is stopped has lost nothing.

``python -m bench.records JOINED PART...`` makes one file of those of ``jitgen bench sweep --part``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


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
    """One record of the parts of a sweep, with the first one's environment, and the commands of all.

    Raises:
        ValueError: the parts are not of one sweep, measured by the same code and software on one kind of card.
    """
    environments = [part["environment"] for part in parts]
    own = {"command": "", "part": None}
    first, *others = ({**facts, **own, "settings": {**facts["settings"], **own}} for facts in environments)
    for other in others:
        if differing := sorted(key for key in first.keys() | other if first.get(key) != other.get(key)):
            raise ValueError(f"the files are no parts of one sweep: they differ in {', '.join(differing)}")
    commands = "; ".join(facts["command"] for facts in environments)
    rows = [row for part in parts for row in part["measurements"]]
    return {"environment": {**environments[0], "command": commands}, "measurements": rows}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Joins the files of the parts of a sweep.")
    parser.add_argument("output", type=Path)
    parser.add_argument("parts", type=Path, nargs="+")
    arguments = parser.parse_args()
    write(arguments.output, joined([json.loads(source.read_text()) for source in arguments.parts]))
