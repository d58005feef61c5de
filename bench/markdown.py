"""The tables of docs/measured and the chart of README, made from the JSON of ``jitgen bench``.

``python -m bench.markdown docs/measured`` writes a page beside every JSON file of that directory, and the chart.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import attention, chart, plots, sweep
from bench.measurement import duration
from bench.records import failure_of, failures, line_of

RATES = (("bytes_per_second", "GB/s"), ("flops_per_second", "GFLOP/s"))
"""The rates a row may have, each with the unit of its billions; the last one that it has is printed."""


def tables(content: Mapping[str, Any]) -> str:
    """The figures of one machine: a line with the environment, throughput compared with peers, and times of calls."""
    environment, measured = content["environment"], content["measurements"]
    rows = [row for row in measured if not failure_of(row)]
    known = ("gpu", "driver", "cuda") if "gpu" in environment else ("cpu", "threads", "target")
    facts = [f"{name} {environment[name]}" for name in (*known, "torch", "triton", "compiler", "commit")]
    one_size = [
        [row for row in rows if row["group"] in groups]
        for groups in (("streaming", "intensity"), ("batched",), ("attention", attention.SWEEP))
    ]
    by_size = [
        [row for row in rows if row["group"] == group] for group in ("rows", "columns", "reductions", "products")
    ]
    calls = [row for row in rows if row["group"] in ("overhead", "coldstart")]
    swept = [row for row in measured if row["group"] in (sweep.SWEEP, sweep.EPILOGUES)]
    failed = [one for one in failures(measured) if one["group"] not in (sweep.SWEEP, sweep.EPILOGUES)]
    blocks = [", ".join(facts) + "."]
    blocks += [_one_size(cases) for cases in one_size if cases]
    blocks += [_by_size(cases) for cases in by_size if cases]
    if swept:
        blocks += _sweep(swept)
    if calls:
        blocks.append(_table(("call", "backend", "time", "peers"), map(_call, calls)))
    if failed:
        blocks += ["Cases that failed:", "\n".join(f"- {line}" for line in map(line_of, failed))]
    return "\n\n".join(blocks)


def _sweep(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A table of each kind and range of rows, one of epilogues, and the worst cases."""
    yield "The fastest peer's time as a multiple of jitgen's:"
    yield _table(sweep.HEADER, sweep.tabulated(rows))
    if epilogues := sweep.epilogues(rows):
        yield "Products with bias and gelu, beside the bare ones:"
        yield _table(sweep.EPILOGUES_HEADER, epilogues)
    yield "The worst cases of each kind, and all that failed:"
    yield "\n".join(f"- {line}" for line in sweep.worst(rows))


def _one_size(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table with a line for each function: its time, its rate, and each peer's time as a multiple of its own."""
    peers = _peers(rows)
    header = ("case", "backend", "dtype", "time", "rate", *(f"{peer} over jitgen" for peer in peers))
    lines = []
    for row in rows:
        rate = next((f"{row[name] / 1e9:.0f} {unit}" for name, unit in reversed(RATES) if name in row), "")
        ratios = (f"{row['ratios'][peer]:.2f}" if peer in row["ratios"] else "" for peer in peers)
        lines.append((row["name"], row["backend"], row["dtype"], duration(row["seconds"]["jitgen"]), rate, *ratios))
    return _table(header, lines)


def _peers(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(peer for row in rows for peer in row["ratios"]))


def _by_size(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table with a line for each function and a column for each size: its time, and each peer's as a multiple."""
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    peers = _peers(rows)
    for row in rows:
        name, _, size = row["name"].rpartition(", ")
        ratios = " ".join(f"{row['ratios'][peer]:.2f}" if peer in row["ratios"] else "-" for peer in peers)
        line = cells.setdefault((name, row["backend"], row["dtype"]), {})
        line[size] = f"{duration(row['seconds']['jitgen'])} ({ratios})"
    sizes = sorted({size for line in cells.values() for size in line}, key=_numbers)
    header = (f"time ({', '.join(peers)} over it)", "backend", "dtype", *sizes)
    return _table(header, ((*key, *(line.get(size, "") for size in sizes)) for key, line in cells.items()))


def _numbers(size: str) -> tuple[int, list[int], str]:
    """The key by which columns such as "M=16" and "64 rows of 1024" are sorted."""
    numbers = [int(number) for number in re.findall(r"\d+", size)]
    return len(numbers), numbers, size


def _call(row: Mapping[str, Any]) -> tuple[str, ...]:
    peers = ", ".join(f"{name} {duration(time)}" for name, time in row["seconds"].items() if name != "jitgen")
    return (row["name"], row["backend"], duration(row["seconds"]["jitgen"]), peers)


def _table(header: Sequence[str], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page(path: Path) -> str:
    """The page of one file of measurements."""
    title = f"# {path.stem}\n\nMade from [{path.name}]({path.name}) by `python -m bench.markdown`; "
    title += "[how it was measured](README.md).\n\n"
    content = json.loads(path.read_text())
    shown = f"![best peer's time over jitgen's]({path.stem}.svg)\n\n" if _scatter(content) else ""
    return title + shown + tables(content) + "\n"


def _scatter(content: Mapping[str, Any]) -> str:
    """The plot of a sweep; empty where there is none."""
    made = plots.plots([row for row in content["measurements"] if row["group"] == sweep.SWEEP])
    return plots.panels(list(made.values())) if made else ""


def pages(directory: Path) -> dict[str, str]:
    """Every generated file of ``directory``: its name, and what it holds."""
    contents = {path: json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))}
    paths = [path for path, content in contents.items() if "measurements" in content]
    made = {path.with_suffix(".md").name: page(path) for path in paths}
    made |= {path.with_suffix(".svg").name: drawn for path in paths if (drawn := _scatter(contents[path]))}
    return made | {"headline.svg": chart.headline(directory)}


if __name__ == "__main__":
    for name, content in pages(Path(sys.argv[1])).items():
        (Path(sys.argv[1]) / name).write_text(content)
