"""compute-sanitizer over products of small sizes with weights of every format: memcheck, and racecheck if asked.

Run:  python tools/formats_sanitizer.py [--tool memcheck] [--formats int3,nvfp4] [--backend cuda]

Each size takes another mainloop: few rows mma.sync, more of them wgmma (on Hopper), and float32 ordinary multiply-adds.
N and K are ragged, so that an access beyond an operand is one beyond an allocation. Where there is no compute-sanitizer
the products run without it, and only their results are checked. The exit status is 0 if nothing was found.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F

import jitgen
from jitgen.quant.formats import FORMATS, find

SIZES = ((1, 45, 200), (16, 33, 152), (70, 61, 264))
"""(M, N, K); K is a multiple of 8, as tensor maps ask."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EXTRA = ("uint4.floatzeros", "fp8_e4m3.rows128", "int4.float16")
INSIDE = "JITGEN_UNDER_SANITIZER"
FOUND = 3
"""The exit status of compute-sanitizer where it found an error."""


def operands(name: str, rows: int, columns: int, length: int) -> tuple[torch.Tensor, jitgen.QTensor]:
    """A float32 activation and a weight, with short groups where there are many rows."""
    group = find(name).group_size or (32 if rows > 1 else 64)
    weight = jitgen.quantize(torch.randn(columns, length), name, group).cuda()
    return torch.randn(rows, length, device="cuda"), weight


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight)


def compile_all(names: list[str], backend: str) -> None:
    """Put every kernel into the store, so that none is compiled under the sanitizer."""
    function = jitgen.jit(backend=backend)(linear)

    def build(name: str) -> None:
        for size in SIZES:
            x, weight = operands(name, *size)
            for dtype in DTYPES:
                function.lower(x.to(dtype), weight).compile()

    with ThreadPoolExecutor() as pool:
        list(pool.map(build, names))


def run(names: list[str], backend: str) -> int:
    """Compute every product, and return how many results were wrong."""
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # an allocation for each tensor, so that none hides an overrun
    function = jitgen.jit(backend=backend)(linear)
    wrong = 0
    for name in names:
        for rows, columns, length in SIZES:
            exact_x, weight = operands(name, rows, columns, length)
            for dtype in DTYPES:
                x = exact_x.to(dtype)
                exact = F.linear(x.double(), weight.dequantize(torch.float64))
                error = float((function(x, weight).double() - exact).norm() / exact.norm())
                if not error <= 8 * torch.finfo(dtype).eps:
                    wrong += 1
                    print(f"{name} {(rows, columns, length)} {dtype}: relative error {error:.1e}", file=sys.stderr)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tool", choices=("memcheck", "racecheck", "synccheck", "initcheck"), default="memcheck")
    parser.add_argument("--formats", default=",".join((*FORMATS, *EXTRA)), help="separated by commas")
    parser.add_argument("--backend", choices=("cuda", "triton"), default="cuda")
    options = parser.parse_args()
    names = options.formats.split(",")
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to run")
        return 0
    sanitizer = shutil.which("compute-sanitizer")
    if not os.environ.get(INSIDE):
        compile_all(names, options.backend)
    if os.environ.get(INSIDE) or sanitizer is None:
        if sanitizer is None:
            print("no compute-sanitizer here: results are checked without it")
        wrong = run(names, options.backend)
        print(f"{len(names)} formats, {len(names) * len(SIZES) * len(DTYPES)} products: {wrong} wrong")
        return 1 if wrong else 0
    command = [sanitizer, "--tool", options.tool, "--error-exitcode", str(FOUND), "--report-api-errors", "no"]
    return subprocess.run(
        [*command, sys.executable, *sys.argv], env={**os.environ, INSIDE: "1"}, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
