"""Judges the model by which tiles of wgmma are chosen: what it chooses, beside the fastest of all candidates.

::

    python -m bench.gemm_timings timings.json --seed 39001 --shapes 5 --kinds wgmma_dense wgmma_quantized \\
        --fewest-rows 65 --most-rows 1000 --within 1.6                                  # on a GPU
    python -m bench.judged timings.json --write docs/measured/h100-candidates.json      # anywhere
    python -m bench.judged docs/measured/h100-candidates.json
    python -m bench.judged docs/measured/h100-candidates*.json --worth

The timings of a problem are those of every candidate that the model estimated to take at most 1.6 times as long as its
choice when they were taken, and of some that were not candidates then. A record holds them by what tells tiles apart
(``label``), so that whatever the model chooses later is judged by the same timings
(``tests/unit/test_judged_choices.py``).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any
from unittest import mock

from bench.gemm_timings import lowered
from jitgen.families import registry
from jitgen.families.gemm import wgmma_tables, wgmma_tiles
from jitgen.families.gemm.mainloops import WgmmaLaunch, WgmmaTiling

TARGET = "sm_90a"


@dataclasses.dataclass(frozen=True)
class Problem:
    """Holds the timings of one product.

    Attributes:
        kind: as of ``gemm_timings.KINDS``.
        rows, columns, length: M, N and K.
        torch: microseconds of torch's dense product of these sizes.
        times: microseconds of each candidate, by its label.
        before: microseconds of what an earlier version launched, where that was timed beside these.
    """

    kind: str
    rows: int
    columns: int
    length: int
    torch: float
    times: Mapping[str, float]
    before: float | None = None

    @property
    def best(self) -> float:
        return min(self.times.values())


def label(fields: Mapping[str, Any], splits: int) -> str:
    """What tells a tiling and the blocks that share its K from those of other candidates."""
    if "tokens" in fields:
        shape = f"{fields['tokens']} x {64 * fields['warpgroups'] * fields['blocks_of_rows']}"
        facts = [f"{fields['warpgroups']} warpgroups", f"span {fields['span']}"]
    else:
        swapped, blocks = fields.get("swapped", False), fields.get("blocks", 1)
        height, columns = 64 * fields["down"] * blocks, fields["columns"]
        shape = f"{columns} x {height}" if swapped else f"{height} x {columns}"
        facts = ["swapped"] * swapped + ["tall"] * (blocks > 1)
        facts += ["across"] * (fields["across"] > 1) + ["in turn"] * fields["pingpong"]
        if fields["multicast"] > 1:
            both = ("x", "weights") if fields["shares_x"] else ("weights", "x")
            facts.append(f"{both[0]} for {fields['multicast']}")
            if fields.get("other_multicast", 1) > 1:
                facts.append(f"{both[1]} for {fields['other_multicast']}")
    facts += [f"{fields['resident']} resident"] * (fields["resident"] > 1) + [f"split {splits}"] * (splits > 1)
    facts += [f"{ranges} ranges"] if (ranges := fields.get("k_splits", 1)) > 1 else []
    return ", ".join((shape, *facts))


def label_of(tiling: WgmmaTiling, splits: int) -> str:
    return label(dataclasses.asdict(tiling), splits)


def read(path: Path) -> list[Problem]:
    """Reads a record, or timings as ``gemm_timings`` writes them."""
    content = json.loads(path.read_text())
    if isinstance(content, Mapping):
        return [Problem(**one) for one in content["problems"]]
    times: dict[tuple[str, int, int, int], dict[str, float]] = {}
    for kind, *sizes, fields, splits, microseconds in content:
        if kind == "cublas":
            own = next(key for key in reversed(times) if key[1:] == tuple(sizes))
            times[own]["torch"] = microseconds
        else:
            times.setdefault((kind, *sizes), {})[label(fields, splits)] = microseconds
    return [Problem(*key, torch=found.pop("torch"), times=found) for key, found in times.items()]


def launch_of(problem: Problem) -> WgmmaLaunch | None:
    """What a call of this product launches; None where it is another mainloop, or two kernels that have no timing.

    Where that has no timing, it is chosen of those of ``wgmma_tables.ARRANGED`` that have, and without ``NARROW``,
    ``TALLEST`` and, if there is still none, ``TALL_TOKENS``: some records are older than these tiles."""
    launch = _launch(problem)
    if launch is None or label_of(launch.tiling, launch.splits) in problem.times:
        return launch
    if launch.tiling.k_splits > 1:
        return None
    timed = tuple(tiling for tiling in wgmma_tables.ARRANGED if label_of(tiling, 1) in problem.times)
    with mock.patch.multiple(wgmma_tables, ARRANGED=timed, NARROW=()), mock.patch.object(wgmma_tiles, "TALLEST", ()):
        launch = _launch(problem)
        if launch is None or label_of(launch.tiling, launch.splits) in problem.times:
            return launch
        with mock.patch.object(wgmma_tiles, "TALL_TOKENS", ()):
            return _launch(problem)


def _launch(problem: Problem) -> WgmmaLaunch | None:
    low = lowered(problem.kind, problem.rows, problem.columns, problem.length, TARGET)
    kernel, geometries = low.program.kernels[0], low.laid_out.geometries[0]
    if kernel.family != "gemm":
        return None
    settled = registry.family_of(kernel).settle(kernel, geometries, low.schedules[0], low.route.device)
    return settled if isinstance(settled, WgmmaLaunch) else None


def judge(problems: Iterable[Problem]) -> list[tuple[float, Problem, str]]:
    """For each product of wgmma: the time of the fastest candidate divided by that of what is
    chosen, and the label of that. KeyError where it has no timing."""
    found = []
    for problem in problems:
        launch = launch_of(problem)
        if launch is not None:
            name = label_of(launch.tiling, launch.splits)
            if name not in problem.times:
                raise KeyError(f"{problem.kind} {problem.rows} x {problem.columns} x {problem.length}: {name}")
            found.append((problem.best / problem.times[name], problem, name))
    return found


def summary(judged: Sequence[tuple[float, Problem, str]]) -> str:
    ratios = [ratio for ratio, *_ in judged]
    mean, worst = geometric_mean(ratios), min(ratios)
    return f"{len(ratios)} problems: {mean:.3f} of the fastest by the geometric mean, {worst:.3f} at worst"


CLASSES: Mapping[str, Callable[[str], bool]] = {
    "blocks of a cluster that share K": lambda name: "split" in name and " for " not in name,
    "ranges of K, added up by a second kernel": lambda name: "ranges" in name,
    "blocks that share the weight's tile": lambda name: "weights for" in name,
    "blocks that share x's tile": lambda name: "x for" in name,
    "two warpgroups in turn": lambda name: "in turn" in name,
    "tiles of 64 rows": lambda name: name.startswith("64 x"),
    "tiles of 192 rows": lambda name: name.startswith("192 x"),
    "several blocks on a multiprocessor": lambda name: "resident" in name,
}
"""Kinds of candidates, by their labels."""


def worth(problems: Sequence[Problem], kind: Callable[[str], bool]) -> tuple[float, float, int]:
    """What the fastest candidate takes without those of a kind, as a multiple of what it takes with them: the geometric
    mean, the most, and for how many problems it is one of the kind."""
    ratios = []
    for problem in problems:
        others = [time for name, time in problem.times.items() if not kind(name)]
        ratios.append(min(others, default=problem.best) / problem.best)
    return geometric_mean(ratios), max(ratios), sum(ratio > 1 for ratio in ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("timings", type=Path, nargs="+")
    parser.add_argument("--write", type=Path, help="a record of the timings, which is smaller")
    parser.add_argument("--command", help="which took the timings, for the record")
    parser.add_argument("--commit", help="at which they were taken")
    parser.add_argument("--gpu", help="which they are of")
    parser.add_argument("--worth", action="store_true", help="what kinds of candidates are worth, instead of choices")
    options = parser.parse_args()
    problems = [problem for path in options.timings for problem in read(path)]
    if options.write:
        facts = {name: getattr(options, name) for name in ("command", "commit", "gpu")}
        content = facts | {"problems": [dataclasses.asdict(problem) for problem in problems]}
        options.write.write_text(json.dumps(content, indent=1) + "\n")
    for kinds in (("wgmma_dense",), ("wgmma_quantized", "wgmma_quantized g64", "wgmma_quantized g32")):
        own = [problem for problem in problems if problem.kind in kinds]
        if options.worth:
            for name, kind in CLASSES.items():
                mean, most, count = worth(own, kind)
                if count:
                    print(f"{kinds[0]}, {name}: {mean:.3f}, {most:.2f} at most, fastest of {count} of {len(own)}")
            continue
        judged = judge(own)
        print(kinds[0], summary(judged) if judged else "no problems")
        for ratio, problem, name in sorted(judged, key=lambda one: one[0])[:10]:
            fastest = min(problem.times, key=lambda each: problem.times[each])
            chosen = f"{problem.rows} x {problem.columns} x {problem.length}: {name} {problem.times[name]:.1f}"
            print(f"  {ratio:.2f} {chosen}, {fastest} {problem.best:.1f} us, torch {problem.torch:.1f}")


if __name__ == "__main__":
    main()
