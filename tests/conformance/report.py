"""The figures of a conformance run: operators by what became of their samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from tests.conformance.judgement import Verdict

CLASSES = ("right", "some samples refused", "refused", "wrong", "crash", "no samples")


def classes(operators: Iterable[str], verdicts: Iterable[Verdict]) -> dict[str, str]:
    """The class of each operator: the worst that became of a sample."""
    found: dict[str, Counter[str]] = {name: Counter() for name in operators}
    for verdict in verdicts:
        found[verdict.operator][verdict.verdict] += 1
    return {name: _class(counts) for name, counts in found.items()}


def _class(counts: Counter[str]) -> str:
    for verdict in ("crash", "wrong"):
        if counts[verdict]:
            return verdict
    if counts["refused"]:
        return "some samples refused" if counts["right"] else "refused"
    return "right" if counts["right"] else "no samples"


def table(operators: dict[str, str], verdicts: Iterable[Verdict]) -> str:
    """The figures in words."""
    by_class, by_verdict = Counter(operators.values()), Counter(verdict.verdict for verdict in verdicts)
    lines = [f"{len(operators)} operators, {sum(by_verdict.values())} samples", ""]
    lines += [f"{name:<22}{by_class[name]:>6}" for name in CLASSES]
    lines += ["", *(f"samples {name:<14}{by_verdict[name]:>6}" for name in ("right", "refused", "wrong", "crash"))]
    return "\n".join(lines)


def faults(verdicts: Iterable[Verdict]) -> str:
    """Every wrong sample and every crash, a line each."""
    bad = [verdict for verdict in verdicts if verdict.verdict in ("wrong", "crash")]
    return "".join(f"{each.verdict:<6} {each.operator} [{each.label}]: {each.reason}\n" for each in bad)


def as_json(operators: dict[str, str], verdicts: Iterable[Verdict]) -> dict[str, Any]:
    return {"operators": operators, "samples": [vars(verdict) for verdict in verdicts]}
