"""Writing what was measured as JSON. A file is whole at any time, so that a run that is stopped has lost nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
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
