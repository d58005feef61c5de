"""Which files decide what runs on a GPU, their digests, and which of them differ from those that a card has tested.

::

    python tools/gpu_code.py            # what docs/measured does not show of this code (`make lint`)

Every file counts unless it is listed here as one that cannot change a kernel for a GPU or its launch, so that a new one
counts.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jitgen.fingerprint import without_comments

CHECKOUT = Path(__file__).resolve().parents[1]
ROOTS = ("jitgen", "templates", "cache/tuned")
FOR_OTHERS = (
    *(
        "jitgen/__main__.py",
        "jitgen/_version.py",
        "jitgen/progress.py",
        "jitgen/inspect.py",
        "jitgen/console.py",
        "jitgen/forks.py",
    ),
    *("jitgen/checkpoints", "jitgen/cli", "jitgen/deploy", "jitgen/export", "jitgen/huggingface"),
    *("jitgen/store", "jitgen/compilers/host.py", "jitgen/runtime/cpu.py", "jitgen/runtime/interpreter.py"),
    *("jitgen/codegen/cpp.py", "jitgen/quant/layouts/cpu.py", "templates/cli"),
)
"""Files and folders that decide nothing on a GPU."""
NOT_FOR_GPUS = (".cpp.j2", ".hpp", "/cpp.py", "cpp_rows.j2", "cpp_columns.j2", "cpp_short.j2", ".md", ".pyc")
"""Ends of the names of files that are for CPUs or for readers alone."""
CARDS = ("h100", "h200")
"""The cards that test what is released."""
DIGITS = 8
"""Of a file's sha256, in hexadecimal: enough to notice a change."""


def files(root: Path = CHECKOUT) -> Iterator[str]:
    """The names of the files that decide what runs on a GPU, sorted."""
    for path in sorted(path for folder in ROOTS for path in (root / folder).rglob("*") if path.is_file()):
        name = path.relative_to(root).as_posix()
        other = any(name == each or name.startswith(f"{each}/") for each in FOR_OTHERS)
        if not (other or name.endswith(NOT_FOR_GPUS)):
            yield name


def digests(root: Path = CHECKOUT) -> dict[str, dict[str, str]]:
    """Returns folder -> file name -> digest. Comments and docstrings of Python, which run nowhere, do not count."""
    found: dict[str, dict[str, str]] = {}
    for name in files(root):
        folder, _, own = name.rpartition("/")
        content = (root / name).read_bytes()
        if name.endswith(".py"):
            content = without_comments(content.decode()).encode()
        found.setdefault(folder, {})[own] = hashlib.sha256(content).hexdigest()[:DIGITS]
    return found


def tree(of: Mapping[str, Mapping[str, str]]) -> str:
    """One digest of ``digests()``."""
    return hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:16]


def changed(recorded: Mapping[str, Mapping[str, str]], now: Mapping[str, Mapping[str, str]]) -> list[str]:
    """The files that differ, were added or are gone since ``recorded``."""
    before, after = (
        {f"{folder}/{name}": digest for folder, names in each.items() for name, digest in names.items()}
        for each in (recorded, now)
    )
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def notices(directory: Path, root: Path = CHECKOUT, cards: Sequence[str] = CARDS) -> Iterator[str]:
    """A line for each of ``cards`` without a record of its tests in ``directory``, for each record in which something
    failed, and for each that was made of other GPU code than that of ``root``."""
    now = digests(root)
    for card in cards:
        if not (directory / f"device-tests-{card}.json").exists():
            yield f"there is no device-tests-{card}.json: no {card} has run the tests (make gpu-test)"
    for path in sorted(directory.glob("device-*.json")):
        record: dict[str, Any] = json.loads(path.read_text())
        bad = [f"{kind}: {record[kind]}" for kind in ("failed", "hangs", "not_run") if record.get(kind)]
        if bad or record.get("clean") is False:
            yield f"{path.name} is of a run that was not clean{', '.join(['', *bad])}"
        found = changed(record["gpu_code"], now)
        if found:
            shown = ", ".join(found[:8]) + (f" and {len(found) - 8} more" if len(found) > 8 else "")
            yield (
                f"{path.name} was recorded at commit {record['commit']}; files that decide what runs on a "
                f"GPU have changed since ({len(found)}): {shown}"
            )


def main() -> int:
    for notice in notices(CHECKOUT / "docs" / "measured"):
        print(f"notice: {notice}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
