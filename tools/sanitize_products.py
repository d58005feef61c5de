"""Small products under compute-sanitizer's memcheck and racecheck; where it is not installed, without them.

::

    python tools/sanitize_products.py              # both tools, then a summary; exits 1 where one finds something
    python tools/sanitize_products.py --bare       # the products alone, each against float64

Every mainloop of the cuda dialect is launched: few and many rows, dense and quantised weights, ragged in every size.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import jitgen

TOOLS = ("memcheck", "racecheck")
ROWS = (1, 7, 16, 33, 100, 200)
SIZES = ((72, 1152), (520, 384))
"""(N, K)"""
TOLERANCE = 2.0**-8
"""Of the norm of the difference: half a unit in the last place of bfloat16 for the result, as much for the weight."""


def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w)


def products() -> int:
    """Launches every case; the number of results that are not near float64."""
    wrong = 0
    for format in ("int4", "int8", None):
        for columns, length in SIZES:
            dense = torch.randn(columns, length, dtype=torch.bfloat16, device="cuda")
            weight = dense if format is None else jitgen.quantize(dense, format, 128 if format == "int4" else None)
            exact = dense.double() if format is None else weight.dequantize(torch.float64)
            for rows in ROWS:
                x = torch.randn(rows, length, dtype=torch.bfloat16, device="cuda")
                out = torch.full((rows, columns), float("nan"), dtype=torch.bfloat16, device="cuda")
                jitgen.jit(linear, backend="cuda").bind(x, weight)(x, weight, out=out)
                want = F.linear(x.double(), exact)
                error = ((out.double() - want).norm() / want.norm()).item()
                if not error <= TOLERANCE:
                    print(f"{format or 'dense'} {rows} x {columns} x {length}: relative error {error:.2e}")
                    wrong += 1
    return wrong


def sanitizer() -> str | None:
    """The program, from the path or a toolkit."""
    places = [None, *(str(Path(root) / "bin") for root in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if root)]
    return next(filter(None, (shutil.which("compute-sanitizer", path=place) for place in places)), None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bare", action="store_true")
    options = parser.parse_args()
    program = sanitizer()
    if options.bare or program is None:
        wrong = products()
        tool = "" if options.bare else "; compute-sanitizer is not installed here, so that nothing watched them"
        print(f"{wrong} results are wrong{tool}")
        return int(wrong > 0)
    failed = 0
    for tool in TOOLS:
        command = [program, "--tool", tool, "--error-exitcode", "9", sys.executable, __file__, "--bare"]
        found = subprocess.run(command, capture_output=True, text=True)
        lines = found.stdout.splitlines()
        print(f"{tool}: exit {found.returncode}; {'; '.join(line for line in lines[-3:])}")
        if found.returncode:
            failed += 1
            print("\n".join(lines[:40]))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
