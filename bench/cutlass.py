"""Times products by CUTLASS beside torch's and jitgen's own, checks them against float64, and times their compiles.

::

    python -m bench.cutlass cutlass.json --seed 7 --shapes 4

Rows are ``ROWS``, columns and lengths are drawn by the seed. Every tile of the rule is compiled ahead in as many
processes as there are cores, and timed in a CUDA graph over rotating copies of the weights. A line of the output is
``[rows, columns, length, microseconds of torch, of jitgen's own kernel, of the tile that the rule chooses, [of every
tile]]``; ``compiles`` has the seconds of each tile.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import random
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import jitgen
from bench.measurement import made, relative_error
from bench.products import linear
from bench.sizes import side
from bench.timing import graph_seconds
from jitgen.families.gemm.schedules import cutlass

ROWS = (777, 1024, 4096, 8192)
COPIED_BYTES = 2**28
MOST_WEIGHTS, MOST_PRODUCTS = 1.2e8, 4e11


def compiled(tile: Any) -> list[float]:
    """The seconds and the processor seconds of one tile's compile."""
    cutlass.TILES = (tile,)
    x, w = (jitgen.TensorSpec(shape, torch.bfloat16) for shape in ((1000, 512), (512, 512)))
    lowered = jitgen.jit(backend="cutlass")(linear).lower(x, w, target="sm_90a")
    wall, used = time.time(), time.process_time()
    lowered.compile()
    return [round(time.time() - wall, 2), round(time.process_time() - used, 2)]


def timed(rows: int, columns: int, length: int, tiles: Any) -> list[Any]:
    weight = (torch.randn(columns, length, device="cuda") * 0.02).to(torch.bfloat16)
    weights = [weight, *(weight.clone() for _ in range(max(1, min(7, COPIED_BYTES // weight.nbytes))))]
    x = torch.randn(rows, length, device="cuda").to(torch.bfloat16)
    exact = x.double() @ weight.double()[:256].T

    def microseconds(function: Any) -> float:
        error = relative_error(function(x, weight)[:, :256], exact)
        if not error < 0.01:
            print("WRONG", rows, columns, length, cutlass.TILES, error, flush=True)
        return round(graph_seconds([partial(function, x, each) for each in weights]) * 1e6, 2)

    row: list[Any] = [rows, columns, length, microseconds(F.linear)]
    row.append(microseconds(jitgen.jit(backend="cuda")(linear)))
    cutlass.TILES = tiles
    row.append(microseconds(jitgen.jit(backend="cutlass")(linear)))
    every = []
    for tile in tiles:
        cutlass.TILES = (tile,)
        every.append(microseconds(jitgen.jit(backend="cutlass")(linear)))
    return [*row, every]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--shapes", type=int, default=4, help="columns and lengths, for each of the rows")
    parser.add_argument("--seconds", type=float, default=60, help="after which no further product is timed")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it times kernels on an H100 or H200, and there is no GPU here")
    source, tiles, result = random.Random(options.seed), cutlass.TILES, made("bench.cutlass")
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count()) as pool:
        result["compiles"] = dict(zip(map(str, tiles), pool.map(compiled, tiles), strict=True))
    print(result, flush=True)
    started = time.time()
    result |= {"tiles": tiles, "rows": []}
    with torch.no_grad():
        while len(result["rows"]) < options.shapes * len(ROWS):
            columns, length = side(source, 8), side(source, 128)
            if columns * length > MOST_WEIGHTS:
                continue
            for rows in ROWS:
                if rows * columns * length <= MOST_PRODUCTS and time.time() - started < options.seconds:
                    result["rows"].append(timed(rows, columns, length, tiles))
                    print(result["rows"][-1], flush=True)
                    options.output.write_text(json.dumps(result, indent=1))
            if time.time() - started >= options.seconds:
                break


if __name__ == "__main__":
    main()
