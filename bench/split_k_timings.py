"""Times products of few tiles and long K with every number of ranges that K may be split into, on this GPU.

::

    python -m bench.split_k_timings timings.json --sizes 79x256x43776 59x184x5888

Calls are whole ones, in a CUDA graph over rotating weights: the product, and the kernel that adds the sums of ranges.
Each result is compared with float64. A line of the output is ``[format, rows, columns, length, ranges, microseconds]``;
``format`` is None for dense weights, and "torch" for ``F.linear`` of those. The rule's own choice has a star.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

import jitgen
from bench.measurement import relative_error
from bench.products import linear
from bench.records import write_rows
from bench.timing import graph_seconds
from jitgen.families.gemm.schedules import cuda

CACHED_BYTES = 2**28
"""Bytes after which a copy of the weights is certainly not in the second-level cache any more."""


def with_ranges(ranges: int | None) -> AbstractContextManager[Any]:
    """Within it, products have so many ranges of K; with None, those that the rule chooses."""
    return nullcontext() if ranges is None else mock.patch.object(cuda, "k_splits", return_value=ranges)


def lowered_with(ranges: int | None, x: torch.Tensor, w: Any) -> Any:
    with with_ranges(ranges):
        return jitgen.jit(backend="cuda")(linear).lower(x, w)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--sizes", nargs="+", help="rows x columns x length, as 79x256x43776")
    parser.add_argument("--ranges", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32])
    options = parser.parse_args()
    results: list[Any] = []
    for size in options.sizes:
        rows, columns, length = map(int, size.split("x"))
        x = torch.randn(rows, length, dtype=torch.bfloat16, device="cuda")
        whole = torch.randn(columns, length, device="cuda") / length**0.5
        for format in (None, "int4"):
            w = jitgen.quantize(whole, "int4", 128, layout="mma") if format else whole.bfloat16()
            exact = w.dequantize(torch.float64) if isinstance(w, jitgen.QTensor) else w.double()
            want = x.double() @ exact.t()
            copies = [w, *(copied(w) for _ in range(min(15, CACHED_BYTES // (columns * length * 2))))]
            wanted = [None, *options.ranges]
            lowered = [lowered_with(ranges, x, w) for ranges in wanted]
            with concurrent.futures.ThreadPoolExecutor(len(wanted)) as pool:
                list(pool.map(lambda low: low.compile(), lowered))
            for ranges in wanted:
                out = torch.full((rows, columns), float("nan"), dtype=torch.bfloat16, device="cuda")
                with with_ranges(ranges):  # a plan asks for the ranges again when it is given a result
                    plan = jitgen.jit(backend="cuda")(linear).bind(x, w)
                    time = graph_seconds([functools.partial(plan, x, copy, out=out) for copy in copies[::-1]]) * 1e6
                error = relative_error(out, want)
                mark = "*" if ranges is None else ""
                print(size, format, f"{ranges or ''}{mark} {time:.2f} us", "" if error < 0.004 else f"WRONG {error}")
                results.append([format, rows, columns, length, ranges, round(time, 3)])
            if format is None:
                time = graph_seconds([functools.partial(F.linear, x, copy) for copy in copies]) * 1e6
                print(size, f"torch {time:.2f} us", flush=True)
                results.append(["torch", rows, columns, length, 1, round(time, 3)])
            write_rows(options.output, results)


def copied(w: Any) -> Any:
    if isinstance(w, torch.Tensor):
        return w.clone()
    return jitgen.quantize(w.dequantize(torch.float32), "int4", 128, layout=w.layout)


if __name__ == "__main__":
    main()
