"""The figures of a conformance run: operators by what became of their samples."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from tests.conformance.judgement import VERDICTS, Verdict
from tests.conformance.samples import SAMPLES

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


DOCUMENT = Path(__file__).parents[2] / "docs" / "conformance.md"


EVERY_DTYPE = """\
`python -m tests.conformance --every-dtype --types` compares dtypes and shapes of results in every real dtype that an
operator has, and compiles nothing. Of 15,173 samples, at most 4 of an operator and dtype, 14,671 were right,
452 refused, 1 too slow, and 49 wrong. These 49 were of 11 operators (`arange`, `diag_embed`, `bilinear`,
`entr`, `batch_norm`'s statistics and the like), which were mended; no sample of them is wrong since. Values in every
dtype are compared by tests of `make test-all`: of 4,370 pairs of an operator and a dtype, a sample each, 4,275 are
right and 95 are refused; 23 were wrong at first and were mended."""
"""What a run in every dtype found, which this page does not repeat."""


def document(operators: dict[str, str], verdicts: Iterable[Verdict]) -> str:
    """``docs/conformance.md``: the figures of a run of every operator, and where samples of an operator are refused."""
    verdicts = list(verdicts)
    by_class, by_verdict = Counter(operators.values()), Counter(verdict.verdict for verdict in verdicts)
    lines = [
        "# Conformance",
        "",
        "torch's own operator tests (`op_db` of `torch.testing._internal`), called through `jitgen.jit` on the CPU and",
        "compared with float64 and with eager torch. A call is right, or refused with an error that names the",
        "operation.",
        "This page is written by `python -m tests.conformance --write`; `tests/conformance/refusals.txt` has the",
        "operators that are refused as a whole, and why.",
        "",
        f"torch {torch.__version__.partition('+')[0]}: {len(operators)} operators, {len(verdicts)} samples in their",
        f"main dtype ({SAMPLES} of an operator at most).",
        "",
        EVERY_DTYPE,
        "",
        "| operators | |",
        "| --- | ---: |",
        *(f"| {name} | {by_class[name]} |" for name in CLASSES),
        "",
        "| samples | |",
        "| --- | ---: |",
        *(f"| {name} | {by_verdict[name]} |" for name in VERDICTS),
        "",
        "Operators of which some samples are refused:",
        "",
    ]
    for name in sorted(name for name, kind in operators.items() if kind == "some samples refused"):
        reasons = Counter(v.reason for v in verdicts if v.operator == name and v.verdict == "refused")
        lines.append(f"- `{name}`: {reasons.most_common(1)[0][0]}")
    return "\n".join([*lines, ""])


def read(files: Iterable[Path]) -> tuple[list[str], list[Verdict]]:
    """The operators and the verdicts of runs that wrote them; those of a later file replace an earlier one's."""
    operators: dict[str, list[Verdict]] = {}
    for file in files:
        found = json.loads(file.read_text())
        operators |= {name: [] for name in found["operators"]}
        for sample in found["samples"]:
            operators[sample["operator"]].append(Verdict(**sample))
    return list(operators), [verdict for verdicts in operators.values() for verdict in verdicts]


def as_json(operators: dict[str, str], verdicts: Iterable[Verdict]) -> dict[str, Any]:
    return {"operators": operators, "samples": [vars(verdict) for verdict in verdicts]}
