"""Times users' Triton kernels with what follows them: computed in the kernel, and by a generated kernel behind it.

``python -m bench.own_kernels [FILE]`` prints a line for each case and writes JSON: microseconds of the bare kernel, of
the kernel with its rule, of the two kernels, and of a warm call of the bare one on the host. Needs an NVIDIA GPU.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

import jitgen
from bench.measurement import made
from tests import own_kernels as kernels

REPEATS, CALLS = 15, 20


def matmul(a: Tensor, b: Tensor) -> Tensor:
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty((m, n), dtype=a.dtype, device=a.device)
    sizes = {"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 256, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 8}
    strides = a.stride(0), a.stride(1), b.stride(0), b.stride(1), c.stride(0), c.stride(1)
    grid = (triton.cdiv(m, 128) * triton.cdiv(n, 256),)
    kernels.matmul[grid](a, b, c, m, n, k, *strides, **sizes, ACTIVATION="none", num_warps=8, num_stages=3)
    return c


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = torch.empty_like(q)
    heads, seq, dim = q.shape
    kernels.flash_attention[(triton.cdiv(seq, 64), heads)](
        q, k, v, out, q.stride(0), q.stride(1), seq, dim**-0.5, BLOCK_M=64, BLOCK_N=64, DIM=dim, CAUSAL=True
    )
    return out


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y, rows = torch.empty_like(x), x.shape[0]
    mean, rstd = torch.empty((rows,), device=x.device), torch.empty((rows,), device=x.device)
    kernels.layer_norm[(rows,)](
        x, y, weight, bias, mean, rstd, x.stride(0), x.shape[1], 1e-5, BLOCK_SIZE=1024, num_warps=8
    )
    return y


def microseconds(call: Callable[[], Any]) -> float:
    """The median time of a call on the GPU."""
    for _ in range(5):
        call()
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(CALLS):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return statistics.median(times)


def host_microseconds(call: Callable[[], Any], count: int = 2000) -> float:
    """The time of a warm call on the host."""
    for _ in range(100):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(count // 5):
            call()
        times.append((time.perf_counter() - begin) * 1e6 / (count // 5))
        torch.cuda.synchronize()
    return statistics.median(times)


def cases() -> dict[str, tuple[Any, Any, tuple[Tensor, ...], tuple[Tensor, ...]]]:
    """The kernel, the rule behind it, and the tensors of each."""
    half, size = torch.bfloat16, 4096
    a, b, residual = (torch.randn(size, size, device="cuda", dtype=half) for _ in range(3))
    bias = torch.randn(size, device="cuda", dtype=half)
    q, k, v, gate = (torch.randn(32, 2048, 64, device="cuda", dtype=torch.float16) for _ in range(4))
    x, weight, shift = torch.randn(8192, 4096, device="cuda", dtype=half), bias.float(), bias.float()
    return {
        "matmul + bias, gelu, residual": (matmul, lambda c, s, r: F.gelu(c + s) + r, (a, b), (bias, residual)),
        "attention + gate, cast": (attention, lambda o, g: (o * torch.sigmoid(g)).bfloat16(), (q, k, v), (gate,)),
        "layer norm + scale, int8": (
            layer_norm,
            lambda y: (y * 20).round().clamp(-127, 127).to(torch.int8),
            (x, weight, shift),
            (),
        ),
    }


def timed(
    kernel: Callable[..., Tensor], rule: Callable[..., Tensor], operands: tuple[Tensor, ...], others: tuple[Tensor, ...]
) -> dict[str, float]:
    """The times of one case, and the largest difference of the two ways."""
    count = len(operands)
    bare, behind = jitgen.jit(lambda *tensors: kernel(*tensors)), jitgen.jit(lambda *tensors: rule(*tensors))
    fused = jitgen.jit(lambda *tensors: rule(kernel(*tensors[:count]), *tensors[count:]))
    result, right = fused(*operands, *others), rule(bare(*operands), *others).double()
    return {
        "bare": microseconds(lambda: bare(*operands)),
        "fused": microseconds(lambda: fused(*operands, *others)),
        "two kernels": microseconds(lambda: behind(bare(*operands), *others)),
        "error": (result.double() - right).abs().max().item() / max(1.0, right.abs().max().item()),
        "kernels": len(fused.specializations[0].kernels),
    }


def main() -> None:
    found: dict[str, Any] = made("bench.own_kernels") | {"cases": {}}
    for name, case in cases().items():
        times = found["cases"][name] = timed(*case)
        print(name, {key: round(value, 5) for key, value in times.items()}, flush=True)
    x, y = torch.randn(2, 4096, device="cuda")
    out = torch.empty_like(x)

    @jitgen.jit
    def add(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty_like(x)
        kernels.add[(4,)](x, y, out, x.numel(), BLOCK=1024)
        return out

    generated = jitgen.jit(lambda x, y: x + y)
    add(x, y)
    generated(x, y)
    found["host"] = {
        "own kernel": host_microseconds(lambda: add(x, y)),
        "generated kernel": host_microseconds(lambda: generated(x, y)),
        "Triton": host_microseconds(lambda: kernels.add[(4,)](x, y, out, x.numel(), BLOCK=1024)),
    }
    print("host", {key: round(value, 2) for key, value in found["host"].items()}, flush=True)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
