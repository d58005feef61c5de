"""Pointwise work behind the ranks of sorted rows on a CPU: in the kernel of the sort, and in one of its own.

    python -m bench.sort_ranks OUTPUT.json

``MANY_RANKS`` of ``jitgen/families/rows/sort/selection.py`` is chosen by these times: of one thread's processor time,
the least of calls in turn, which other programs disturb less.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import jitgen
from bench.grouped_cpu import least
from bench.measurement import made
from jitgen.families.rows.sort import selection

RANKS = (33, 50, 64, 128, 256, 512, 1000, 10000, 50000)
ELEMENTS = 200_000
"""Elements of the rows of one call, about."""
ALWAYS, NEVER = 1, 1 << 40
"""Ranks from which on the kernel of the sort computes what is behind it."""


def of_values(x: torch.Tensor) -> torch.Tensor:
    return x.sort(stable=True)[0] * 2 + 1


def of_both(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    values, indices = x.sort(stable=True)
    return values * 2 + 1, torch.relu(values), indices % 7


def compiled(function: Callable[[torch.Tensor], Any], x: torch.Tensor, many: int) -> Any:
    """``function``, where ranks are many from ``many`` on, bound to such a call."""
    before, selection.MANY_RANKS = selection.MANY_RANKS, many
    try:
        return jitgen.jit(lambda x: function(x)).bind(x)
    finally:
        selection.MANY_RANKS = before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(86)
    results: list[dict[str, Any]] = []
    for function, ranks in itertools.product((of_values, of_both), RANKS):
        x = torch.randn(max(1, ELEMENTS // ranks), ranks)
        plans = {"one kernel": compiled(function, x, ALWAYS), "two kernels": compiled(function, x, NEVER)}
        seconds = least({name: [partial(plan, x)] for name, plan in plans.items()}, time.thread_time)
        described = {"work": function.__name__, "ranks": ranks}
        results.append(described | {name: time * 1e3 for name, time in seconds.items()})
        results[-1]["one / two"] = seconds["one kernel"] / seconds["two kernels"]
        print(results[-1], flush=True)
    record = {"milliseconds": results, "threads": 1, "level": jitgen.spec.host_target().arch}
    options.output.write_text(json.dumps(made("bench.sort_ranks", device="cpu") | record, indent=1) + "\n")


if __name__ == "__main__":
    main()
