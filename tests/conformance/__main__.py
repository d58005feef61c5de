"""``python -m tests.conformance``: torch's operator tests through jitgen, as a table and as JSON."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.conformance import refusals, report
from tests.conformance.judgement import Verdict, judge, judge_types
from tests.conformance.samples import SAMPLES, VARIANTS, dtypes, operators, samples


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--operators", default="", metavar="REGEX", help="operators whose name the expression matches")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="samples of an operator and dtype at most")
    parser.add_argument("--seed", type=int, default=0, help="which samples are chosen")
    parser.add_argument("--dtype", help="of the samples, such as bfloat16; by default float32 where there is one")
    parser.add_argument("--every-dtype", action="store_true", help="samples in every dtype that an operator has")
    parser.add_argument("--types", action="store_true", help="compare dtypes and shapes alone; nothing is compiled")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["function"], help="spellings of a call")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every verdict")
    parser.add_argument(
        "--read", type=Path, nargs="+", default=[], metavar="FILE", help="take these verdicts; run none"
    )
    parser.add_argument("--write", action="store_true", help="rewrite refusals.txt and docs/conformance.md by this run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.read:
        names, verdicts = report.read(options.read)
        return _told(names, verdicts, options)
    names = [name for name in operators() if re.search(options.operators, name)]
    dtype = getattr(torch, options.dtype) if options.dtype else None
    verdicts, start = [], time.time()
    for number, name in enumerate(names):
        for each in dtypes(name) if options.every_dtype else [dtype]:
            for sample in samples(name, each, options.variants, options.samples, options.seed):
                if sys.stderr.isatty():
                    print(f"\r\033[K{number}/{len(names)} {sample}", end="", file=sys.stderr, flush=True)
                verdicts.append(judge_types(sample) if options.types else judge(sample))
                print(report.faults(verdicts[-1:]), end="", flush=True)
    print(f"{time.time() - start:.0f} s", file=sys.stderr)
    return _told(names, verdicts, options)


def _told(names: Sequence[str], verdicts: Sequence[Verdict], options: argparse.Namespace) -> int:
    """Print and write the figures; 1 if a sample is wrong or crashes."""
    found = report.classes(names, verdicts)
    print(report.table(found, verdicts))
    if options.json:
        options.json.write_text(json.dumps(report.as_json(found, verdicts), indent=1))
    if options.write:
        refusals.write(found, verdicts)
        if found.keys() == operators().keys():
            report.DOCUMENT.write_text(report.document(found, verdicts))
    return int(any(verdict.verdict in ("wrong", "crash") for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
