"""Grouped products of int4 experts on a CPU, beside a loop over experts of torch's int4 product.

    python -m bench.grouped_cpu OUTPUT.json

A projection of a Qwen3-30B-A3B layer with fewer experts: 32 of 768 x 2048, of which a token chooses 8. Both read the
same rows, in bfloat16, sorted by expert; the loop has the offsets on the host. Times are the least of calls in turn; of
one thread they are its processor time, which other programs disturb less.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import jitgen
from bench.measurement import made

EXPERTS, CHOSEN, LENGTH, COLUMNS, GROUP = 32, 8, 2048, 768, 128
TOKENS = (1, 16, 64, 256)
SECONDS = 5.0
"""How long the calls of one row of the table are timed."""
SETS = 3
"""Sets of weights that calls take in turn, together larger than a cache."""


def product(x: Any, weight: Any, ends: Any) -> Any:
    return torch._grouped_mm(x, weight.transpose(-2, -1), ends)


def packed(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One matrix as torch's int4 product takes it on a CPU; random codes take the same time as any."""
    codes = torch.randint(0, 16, matrix.shape, dtype=torch.int32)
    scales = torch.rand(LENGTH // GROUP, COLUMNS, 2).to(torch.bfloat16)
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1), scales


def loop(x: torch.Tensor, weights: list[tuple[torch.Tensor, torch.Tensor]], ends: list[int]) -> torch.Tensor:
    result, first = x.new_empty(x.shape[0], COLUMNS), 0
    for (codes, scales), last in zip(weights, ends, strict=True):
        if last > first:
            result[first:last] = torch.ops.aten._weight_int4pack_mm_for_cpu(x[first:last], codes, GROUP, scales)
        first = last
    return result


def least(subjects: Mapping[str, Sequence[Callable[[], Any]]], clock: Callable[[], float]) -> dict[str, float]:
    """The least time of a call of each subject, in seconds."""
    best, ends, turn = dict.fromkeys(subjects, float("inf")), time.monotonic() + SECONDS, 0
    while turn < 3 or time.monotonic() < ends:
        for name, calls in subjects.items():
            started = clock()
            calls[turn % len(calls)]()
            best[name] = min(best[name], clock() - started)
        turn += 1
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(37)
    run = jitgen.jit(product)
    dense = [torch.randn(EXPERTS, COLUMNS, LENGTH, dtype=torch.bfloat16) * 0.02 for _ in range(SETS)]
    weights = [jitgen.quantize(each, "int4", GROUP) for each in dense]
    of_torch = [[packed(matrix) for matrix in each] for each in dense]
    results = []
    with torch.no_grad():
        for tokens in TOKENS:
            chosen = torch.stack([torch.randperm(EXPERTS)[:CHOSEN] for _ in range(tokens)]).flatten()
            ends = torch.bincount(chosen, minlength=EXPERTS).cumsum(0).to(torch.int32)
            x, listed = torch.randn(tokens * CHOSEN, LENGTH, dtype=torch.bfloat16), ends.tolist()
            calls = {
                "jitgen": [partial(run, x, each, ends) for each in weights],
                "torch": [partial(loop, x, each, listed) for each in of_torch],
            }
            seconds = least(calls, time.thread_time if options.threads == 1 else time.perf_counter)
            results.append({"tokens": tokens, **{name: time * 1e3 for name, time in seconds.items()}})
            results[-1]["torch / jitgen"] = seconds["torch"] / seconds["jitgen"]
            print(results[-1], flush=True)
    described = {"milliseconds": results, "threads": options.threads, "level": jitgen.spec.host_target().arch}
    options.output.write_text(json.dumps(made("bench.grouped_cpu", device="cpu") | described, indent=1) + "\n")


if __name__ == "__main__":
    main()
