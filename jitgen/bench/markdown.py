"""README's tables, made from the JSON of ``jitgen bench``.

Run it as ``python -m jitgen.bench.markdown bench-results/cpu.json``.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jitgen.bench.measurement import duration

PEERS = ("copy_", "eager", "torch.compile")
RATES = (("bytes_per_second", "GB/s"), ("flops_per_second", "GFLOP/s"))
"""The rates a row may have, each with the unit of its billions; the last one that it has is printed."""


def tables(content: Mapping[str, Any]) -> str:
    """The figures of one machine: a line with the environment, throughput compared with peers, and times of calls."""
    environment, rows = content["environment"], content["measurements"]
    known = ("gpu", "driver", "cuda") if "gpu" in environment else ("cpu", "threads", "target")
    facts = [f"{name} {environment[name]}" for name in (*known, "torch", "triton", "compiler", "commit")]
    header = ("case", "backend", "dtype", "time", "rate", *(f"{peer} over jitgen" for peer in PEERS))
    work = [row for row in rows if row["group"] in ("streaming", "intensity")]
    reductions = [[row for row in rows if row["group"] == group] for group in ("rows", "columns", "reductions")]
    calls = [row for row in rows if row["group"] in ("overhead", "coldstart")]
    products = [row for row in rows if row["group"] == "products"]
    blocks = [", ".join(facts) + "."]
    if work:
        blocks.append(_table(header, map(_work, work)))
    blocks += [_by_size(cases) for cases in (*reductions, products) if cases]
    if calls:
        blocks.append(_table(("call", "backend", "time", "peers"), map(_call, calls)))
    return "\n\n".join(blocks)


def _by_size(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table with a line for each function and a column for each size: its time, and each peer's as a multiple."""
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    peers = list(dict.fromkeys(peer for row in rows for peer in row["ratios"]))
    for row in rows:
        name, _, size = row["name"].rpartition(", ")
        ratios = " ".join(f"{row['ratios'][peer]:.2f}" if peer in row["ratios"] else "-" for peer in peers)
        line = cells.setdefault((name, row["backend"], row["dtype"]), {})
        line[size] = f"{duration(row['seconds']['jitgen'])} ({ratios})"
    sizes = sorted({size for line in cells.values() for size in line}, key=_numbers)
    header = (f"time ({', '.join(peers)} over it)", "backend", "dtype", *sizes)
    return _table(header, ((*key, *(line.get(size, "") for size in sizes)) for key, line in cells.items()))


def _numbers(size: str) -> tuple[int, list[int]]:
    """The key by which columns such as "M=16" and "64 rows of 1024" are sorted."""
    numbers = [int(number) for number in re.findall(r"\d+", size)]
    return len(numbers), numbers


def _work(row: Mapping[str, Any]) -> tuple[str, ...]:
    rate = next((f"{row[name] / 1e9:.0f} {unit}" for name, unit in reversed(RATES) if name in row), "")
    ratios = (f"{row['ratios'][peer]:.2f}" if peer in row["ratios"] else "" for peer in PEERS)
    return (row["name"], row["backend"], row["dtype"], duration(row["seconds"]["jitgen"]), rate, *ratios)


def _call(row: Mapping[str, Any]) -> tuple[str, ...]:
    peers = ", ".join(f"{name} {duration(time)}" for name, time in row["seconds"].items() if name != "jitgen")
    return (row["name"], row["backend"], duration(row["seconds"]["jitgen"]), peers)


def _table(header: Sequence[str], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    for path in sys.argv[1:]:
        print(tables(json.loads(Path(path).read_text())), end="\n\n")
