"""A program as it is deployed: an MLP with int4 weights, called for a few numbers of rows.

Run:   python examples/container/serve.py        (as it is, it compiles; see Containerfile for the rest)
Shows: what a container without a compiler, Triton and Jinja serves. The build stage runs this once to record what it
       calls (JITGEN_RECORD), prewarms that for the targets of the fleet, and exports one bundle of kernels. The serving
       stage has that bundle in JITGEN_CACHE_PATH, and JITGEN_STRICT=1: a call that nobody prewarmed is an error.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F

import jitgen

HIDDEN, INNER, GROUP = 256, 512, 64
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Tensor = torch.Tensor


@jitgen.jit
def swiglu(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


@jitgen.jit
def down_residual(x: Tensor, down: Tensor, residual: Tensor) -> Tensor:
    return F.linear(x, down) + residual


@torch.inference_mode()
def main() -> None:
    compiled: list[jitgen.CompileEvent] = []
    jitgen.on_compile(compiled.append)
    torch.manual_seed(0)
    gate, up, down = (
        jitgen.quantize(torch.randn(shape, device=DEVICE).mul_(shape[1] ** -0.5).bfloat16(), "int4", GROUP)
        for shape in ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
    )
    for rows in (1, 4, 50):
        x = torch.randn(rows, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
        found = down_residual(swiglu(x, gate, up), down, x)
        exact = down_residual.reference(swiglu.reference(x, gate, up), down, x)
        print(f"{rows:3} rows: difference from eager torch {float((found - exact).abs().max()):.4f}")
    tools = [name for name in ("triton", "jinja2", "click", "filelock") if name in sys.modules]
    print(
        f"{len(compiled)} kernels compiled; imported: {', '.join(tools) or 'none of triton, jinja2, click, filelock'}"
    )


if __name__ == "__main__":
    main()
