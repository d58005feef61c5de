"""The operators that jitgen refuses as a whole, and why: ``refusals.txt``, a line ``operator: reason`` each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.conformance.judgement import Verdict

FILE = Path(__file__).with_name("refusals.txt")


def expected() -> dict[str, str]:
    """The reason of each operator that is refused."""
    lines = FILE.read_text().splitlines()
    return dict(line.split(": ", 1) for line in lines if line and not line.startswith("#"))


def write(classes: Mapping[str, str], verdicts: Iterable[Verdict]) -> None:
    """Enter what a run of the operators in ``classes`` found."""
    before = expected() if FILE.exists() else {}
    told = {verdict.operator: verdict.reason for verdict in verdicts if verdict.verdict == "refused"}
    found = {name: told[name] for name, kind in classes.items() if kind == "refused"}
    kept = {name: reason for name, reason in before.items() if name not in classes}
    lines = [f"{name}: {reason}" for name, reason in sorted((kept | found).items())]
    head = "# Operators that jitgen refuses, as torch's operator tests call them in their main dtype, and why."
    FILE.write_text("\n".join([head, *lines, ""]))
