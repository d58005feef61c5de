"""The MLP of Llama-3-8B with int4 weights: SwiGLU in one kernel, down projection and residual in another.

Run:   make demo            (python examples/12_llama_mlp.py)
Shows: two weights that share x, silu and the product are one kernel over 4-bit weights, whatever the number of rows;
       that and the down projection at 1 and 16 rows against torch's own int4 operator on the very same codes.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import jitgen

HIDDEN, INNER, GROUP = 4096, 14336, 128
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ERROR = torch.finfo(torch.bfloat16).eps
"""At most, relative and in norm: two results are rounded to bfloat16, and each rounding adds at most half of this."""
Tensor = torch.Tensor


@jitgen.jit
def swiglu(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


@jitgen.jit
def down_residual(x: Tensor, down: Tensor, residual: Tensor) -> Tensor:
    return F.linear(x, down) + residual


def torchs_int4(weight: jitgen.QTensor) -> Callable[[Tensor], Tensor]:
    """``x -> x @ weight.T`` by torch's own operator, which counts codes from 0: value = (code - 8) * scale + offset."""
    codes = (weight.codes.view(torch.uint8) ^ 0x88).contiguous()  # two's complement nibbles, plus 8
    scales = weight.scales.t().bfloat16()
    scales_and_offsets = torch.stack([scales, torch.zeros_like(scales)], -1).contiguous()
    high_first = codes << 4 | codes >> 4
    if DEVICE == "cuda":
        packed = torch.ops.aten._convert_weight_to_int4pack(high_first, 8)
        return lambda x: torch.ops.aten._weight_int4pack_mm(x, packed, GROUP, scales_and_offsets)
    unpacked = torch.stack([codes & 15, codes >> 4], -1).flatten(1).int()
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(unpacked, 1)
    return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, GROUP, scales_and_offsets)


def medians(*calls: Callable[[], object], repeats: int = 20) -> list[float]:
    """Median milliseconds of each, taken in turn."""
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for times, call in zip(samples, calls, strict=True):
            started = time.perf_counter()
            call()
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
    return [statistics.median(times) * 1e3 for times in samples]


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def source_of(kernel: Any) -> str:
    """The kernel's source in the store, as a pattern that a shell expands."""
    directory = kernel.artifact.directory
    (name,) = (name for name in kernel.artifact.files if name in ("kernel.cpp", "kernel.cu", "kernel.py"))
    return f"{os.path.relpath(directory.parent)}/{kernel.key[:12]}*/{name}"


@torch.inference_mode()
def main() -> int:
    compiled: list[jitgen.CompileEvent] = []
    jitgen.on_compile(compiled.append)
    shapes = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
    gate, up, down = (
        jitgen.quantize(torch.randn(shape, device=DEVICE).mul_(shape[1] ** -0.5).bfloat16(), "int4", GROUP)
        for shape in shapes.values()
    )
    theirs = [torchs_int4(weight) for weight in (gate, up, down)]
    print(f"\nThe MLP of Llama-3-8B on {DEVICE}: bfloat16 activations, weights int4 in groups of {GROUP}\n")
    print(f"{'rows':14}{'generated, 2 kernels':>20}{'torch int4, 6 operations':>30}   error against float64")
    good = True
    for rows in (1, 16):
        x = torch.randn(rows, HIDDEN, dtype=torch.bfloat16, device=DEVICE)

        def generated(x: Tensor = x) -> Tensor:
            return down_residual(swiglu(x, gate, up), down, x)

        def eager(x: Tensor = x) -> Tensor:
            return theirs[2](F.silu(theirs[0](x)) * theirs[1](x)) + x

        exact = F.silu(x.double() @ gate.dequantize(torch.float64).T) * (x.double() @ up.dequantize(torch.float64).T)
        exact = exact @ down.dequantize(torch.float64).T + x.double()
        errors = error(generated(), exact), error(eager(), exact)
        ours, torchs = medians(generated, eager)
        good = good and errors[0] <= ERROR
        print(
            f"{rows:<14}{ours:10.2f} ms{torchs / ours:5.2f} x{torchs:27.2f} ms"
            f"   {errors[0]:.0e} (torch {errors[1]:.0e}): {'correct' if errors[0] <= ERROR else 'WRONG'}"
        )
    print(f"{'':14}(x: times as fast as torch)\n")
    ran = [kernel for piece in (swiglu, down_residual) for found in piece.specializations for kernel in found.kernels]
    again = "; run this again: nothing is compiled" if compiled else ""
    print(f"kernels   {len(ran)} ran: {len(compiled)} compiled, {len(ran) - len(compiled)} from the store{again}")
    print(f"source    {source_of(ran[0])}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
