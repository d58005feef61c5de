"""Times users' kernels with what stands around them: computed in the kernel, and by a generated kernel beside it.

::

    python -m bench.own_kernels docs/measured/h100-own-kernels.json

A row has microseconds of the bare kernel; of the kernel with its rule as jitgen decides, and with the rule in the
kernel whatever that takes; of the kernel and a generated one; and of jitgen's own kernel of the same function. Each
result is compared with float64. Calls are CUDA graphs, in turn. The times of warm calls on the host come first. Needs
an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

import jitgen
from bench.measurement import made, relative_error
from bench.overhead import empty_launch
from bench.prebuild import compile_each, gpu_target
from bench.records import write
from bench.timing import host_medians, medians
from jitgen.families.launch import accumulators
from tests import own_c_kernels
from tests import own_kernels as kernels

BUDGET = 0.15
"""Seconds of timing for each case."""
ROWS_IN_CUDA = r"""
extern "C" __global__ void rms_norm(const float* x, const float* weight, float* out, int columns, float eps) {
  __shared__ float of_warps[32];
  const int64_t row = blockIdx.x, first = row * columns;
  float sum = 0;
  for (int i = threadIdx.x; i < columns; i += blockDim.x) {
    const float value = JITGEN_PROLOGUE(x[first + i], row, i);
    sum += value * value;
  }
  for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xffffffff, sum, lane);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0;
  for (int warp = 0; warp < blockDim.x / 32; ++warp) sum += of_warps[warp];
  const float scale = rsqrtf(sum / columns + eps);
  for (int i = threadIdx.x; i < columns; i += blockDim.x) {
    out[first + i] = JITGEN_EPILOGUE(JITGEN_PROLOGUE(x[first + i], row, i) * scale * weight[i], row, i);
  }
}
"""
_CUDA = own_c_kernels.CUDA.replace('#include "tile.cuh"', "#define PADDING 1")
_SUM = "const int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) out[i] = x[i] + y[i];"
product_in_cuda, add_in_cuda = (jitgen.cuda_kernel(_CUDA, entry) for entry in ("own::matmul<float, 16>", "own::add"))
rms_norm_in_cuda = jitgen.cuda_kernel(ROWS_IN_CUDA, "rms_norm")


def tile_of_256(a: Tensor, b: Tensor) -> Tensor:
    return _matmul(a, b, 128, 256, 64, num_warps=8, num_stages=3)


def tile_of_128(a: Tensor, b: Tensor) -> Tensor:
    return _matmul(a, b, 128, 128, 32, num_warps=4, num_stages=4)


def tile_of_64(a: Tensor, b: Tensor) -> Tensor:
    return _matmul(a, b, 128, 64, 32, num_warps=4, num_stages=4)


def _matmul(a: Tensor, b: Tensor, block_m: int, block_n: int, block_k: int, **options: int) -> Tensor:
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty((m, n), dtype=a.dtype, device=a.device)
    sizes = {"BLOCK_SIZE_M": block_m, "BLOCK_SIZE_N": block_n, "BLOCK_SIZE_K": block_k, "GROUP_SIZE_M": 8}
    strides = a.stride(0), a.stride(1), b.stride(0), b.stride(1), c.stride(0), c.stride(1)
    grid = (triton.cdiv(m, block_m) * triton.cdiv(n, block_n),)
    kernels.matmul[grid](a, b, c, m, n, k, *strides, **sizes, ACTIVATION="none", **options)
    return c


def product(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = torch.empty_like(q)
    heads, seq, dim = q.shape
    kernels.flash_attention[(triton.cdiv(seq, 64), heads)](
        q, k, v, out, q.stride(0), q.stride(1), seq, dim**-0.5, BLOCK_M=64, BLOCK_N=64, DIM=dim, CAUSAL=True
    )
    return out


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y, rows = torch.empty_like(x), x.shape[0]
    mean, rstd = torch.empty((rows,), device=x.device), torch.empty((rows,), device=x.device)
    kernels.layer_norm[(rows,)](
        x, y, weight, bias, mean, rstd, x.stride(0), x.shape[1], 1e-5, BLOCK_SIZE=1024, num_warps=8
    )
    return y


def normalized(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x.to(weight.dtype), weight.shape, weight, bias, 1e-5)


def cuda_product(a: Tensor, b: Tensor) -> Tensor:
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty((m, n), device=a.device)
    product_in_cuda[(-(-n // 16), -(-m // 16)), (16, 16)](a, b, c, m, n, k)
    return c


def cuda_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    out = torch.empty_like(x)
    rms_norm_in_cuda[x.shape[0], 256](x, weight, out, x.shape[1], 1e-5)
    return out


def root_mean_square(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-5)


def rows_of_softmax(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    block = triton.next_power_of_2(x.shape[1])
    kernels.softmax[(x.shape[0],)](out, x, x.stride(0), out.stride(0), x.shape[1], BLOCK_SIZE=block, num_warps=8)
    return out


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, 1)


def bias_behind(c: Tensor, bias: Tensor) -> Tensor:
    return F.relu(c + bias)


def relu_behind(c: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return F.relu(c + bias) + residual


def gelu_behind(c: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return F.gelu(c + bias) + residual


def gate_behind(out: Tensor, gate: Tensor) -> Tensor:
    return (out * torch.sigmoid(gate)).bfloat16()


def int8_behind(y: Tensor) -> Tensor:
    return (y * 20).round().clamp(-127, 127).to(torch.int8)


@dataclass(frozen=True)
class Case:
    """A user's kernel and what follows it.

    Attributes:
        kernel: launches it.
        plain: what it computes, in torch.
        rule: what follows, of the kernel's result and further tensors.
        operands, others: the shape and dtype of each tensor that the kernel takes, and of each further one.
    """

    kernel: Callable[..., Tensor]
    plain: Callable[..., Tensor]
    rule: Callable[..., Tensor]
    operands: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    others: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()

    def behind(self, kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Returns a function of all tensors: the rule behind ``kernel``."""
        count = len(self.operands)
        return lambda *tensors: self.rule(kernel(*tensors[:count]), *tensors[count:])


half, single, float16, SIZE = torch.bfloat16, torch.float32, torch.float16, 4096
_SQUARE = ((SIZE, SIZE), half)
_PRODUCT: Any = ((_SQUARE, _SQUARE), (((SIZE,), half), _SQUARE))
_HEADS = ((32, 2048, 64), float16)
_SMALL = ((2048, 2048), single)
_LONG = ((8192, 4096), single)
CASES = {
    "product in tiles of 128 x 256; bias, ReLU": Case(
        tile_of_256, product, bias_behind, (_SQUARE, _SQUARE), (((SIZE,), half),)
    ),
    "product in tiles of 128 x 256; bias, ReLU, residual": Case(tile_of_256, product, relu_behind, *_PRODUCT),
    "product in tiles of 128 x 256; bias, GELU, residual": Case(tile_of_256, product, gelu_behind, *_PRODUCT),
    "product in tiles of 128 x 128; bias, ReLU, residual": Case(tile_of_128, product, relu_behind, *_PRODUCT),
    "product in tiles of 128 x 128; bias, GELU, residual": Case(tile_of_128, product, gelu_behind, *_PRODUCT),
    "product in tiles of 128 x 64; bias, GELU, residual": Case(tile_of_64, product, gelu_behind, *_PRODUCT),
    "attention of 32 heads, 2048 tokens, width 64; a gate, a cast": Case(
        attention, causal, gate_behind, (_HEADS,) * 3, (_HEADS,)
    ),
    "layer norm of 8192 x 4096 in bfloat16; scaled and rounded to int8": Case(
        layer_norm, normalized, int8_behind, (((8192, SIZE), half), ((SIZE,), single), ((SIZE,), single))
    ),
    "softmax of 8192 x 4096; a second softmax, joined": Case(rows_of_softmax, softmax, rows_of_softmax, (_LONG,)),
    "CUDA C++: tiled product of 2048 x 2048 in float32; bias, GELU, residual": Case(
        cuda_product, product, gelu_behind, (_SMALL, _SMALL), (((2048,), single), _SMALL)
    ),
    "CUDA C++: RMS norm of 8192 x 4096 in float32; scaled and rounded to int8": Case(
        cuda_rms_norm, root_mean_square, int8_behind, (_LONG, ((4096,), single))
    ),
}


def functions(case: Case) -> dict[str, tuple[Callable[..., Tensor], bool]]:
    """Returns the functions of a case that are one plan, and whether they take all tensors."""
    found = {
        "bare": (case.kernel, False),
        "decided": (case.behind(case.kernel), True),
        "in the kernel": (case.behind(case.kernel), True),
    }
    if case.rule is not rows_of_softmax:
        found["jitgen's own"] = (case.behind(case.plain), True)
    return found


def compiled(name: str, subject: str, target: str) -> str:
    """Compiles a kernel into the store; returns what went wrong, or nothing."""
    case = CASES[name]
    specs = [jitgen.TensorSpec(*each) for each in (*case.operands, *case.others)]
    try:
        if subject == "behind":
            result = jitgen.TensorSpec(shape_of_result(case), case.operands[0][1])
            jitgen.jit(case.rule).lower(result, *specs[len(case.operands) :], target=target).compile()
        else:
            function, takes_all = functions(case)[subject]
            with decided_by(subject):
                specs = specs if takes_all else specs[: len(case.operands)]
                jitgen.jit(function).lower(*specs, target=target).compile()
    except jitgen.JitgenError as error:
        return str(error)[:200]
    return ""


def shape_of_result(case: Case) -> tuple[int, ...]:
    return case.operands[0][0] if len(case.operands[1:]) != 1 else (case.operands[0][0][0], case.operands[1][0][-1])


def decided_by(subject: str) -> Any:
    """Has rules computed in kernels of any number of sums, for the subject that is about that."""
    return patch.object(accumulators, "MANY", sys.maxsize if subject == "in the kernel" else accumulators.MANY)


def tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def measured(case: Case) -> dict[str, Any]:
    """Returns the microseconds of the subjects of a case, their errors, and how many kernels each is."""
    tensors = [tensor(*each) for each in (*case.operands, *case.others)]
    operands, others = tensors[: len(case.operands)], tensors[len(case.operands) :]
    exact = case.plain(*(each.double() for each in operands))
    right = (softmax if case.rule is rows_of_softmax else case.rule)(exact, *(each.double() for each in others))
    subjects: dict[str, Any] = {}
    errors, counts = {}, {}
    for subject, (function, takes_all) in functions(case).items():
        with decided_by(subject):
            given, own = tensors if takes_all else operands, jitgen.jit(function)
            plan = own.bind(*given)
        subjects[subject] = [partial(plan, *given)]
        errors[subject] = relative_error(plan(*given).double(), right.double() if takes_all else exact)
        counts[subject] = len(own.lower(*given).kernels) if subject != "in the kernel" else 1
    bare = subjects["bare"][0]
    behind = jitgen.jit(case.rule).bind(bare(), *others)
    subjects["two kernels"] = [lambda: behind(bare(), *others)]
    errors["two kernels"] = relative_error(subjects["two kernels"][0]().double(), right.double())
    times = medians(subjects, "cuda", BUDGET)
    rounded = {name: round(seconds * 1e6, 2) for name, seconds in times.items()}
    return {"us": rounded, "error": errors, "kernels": counts}


# --------------------------------------------------------------------------------------------------- calls on the host


def triton_sum(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty_like(x)
    kernels.add[(4,)](x, y, out, x.numel(), BLOCK=1024)
    return out


def cuda_sum(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty_like(x)
    add_in_cuda[4, 1024](x, y, out, x.numel(), x.numel())
    return out


def generated_sum(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def host() -> dict[str, float]:
    """Returns the microseconds of a warm call on the host: of a function, of its plan, and of a kernel by itself."""
    x, y = torch.randn(2, 4096, device="cuda")
    out = torch.empty_like(x)
    calls: dict[str, Callable[[], Any]] = {}
    functions = {
        "generated kernel": generated_sum,
        "own kernel in Triton": triton_sum,
        "own kernel in CUDA C++": cuda_sum,
    }
    for backend in ("cuda", "triton"):
        for name, function in functions.items():
            if name != "generated kernel" and (backend == "triton") is ("CUDA" in name):
                continue
            own = jitgen.jit(backend=backend)(function)
            label = f"{name}, {backend}" if function is generated_sum else name
            calls[label], calls[f"{label}, bind"] = partial(own, x, y), partial(own.bind(x, y), x, y)
            calls[f"{label}, bind, out="] = partial(own.bind(x, y), x, y, out=out)
    calls["own kernel in CUDA C++ by itself"] = lambda: add_in_cuda[4, 1024](x, y, out, 4096, 4096)
    source = 'extern "C" __global__ void add(const float* x, const float* y, float* out, int n) {' + _SUM + "}"
    if hasattr(torch.cuda, "_compile_kernel"):
        peer = torch.cuda._compile_kernel(source, "add")
        calls["torch.cuda._compile_kernel"] = lambda: peer((4, 1, 1), (1024, 1, 1), (x, y, out, 4096))
    calls["driver launch"] = empty_launch()
    calls["Triton's own dispatch"] = lambda: kernels.add[(4,)](x, y, out, 4096, BLOCK=1024)
    return {name: round(seconds * 1e6, 3) for name, seconds in host_medians(calls, "cuda").items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--commit", help="the commit to record, of a copy that is not a git checkout")
    parser.add_argument("--only", default="", help="a word in the names of the cases to time, and no calls on the host")
    options = parser.parse_args()
    target, cases = gpu_target(), {name: case for name, case in CASES.items() if options.only in name}
    compile_each(
        compiled, [(name, subject, target) for name, case in cases.items() for subject in [*functions(case), "behind"]]
    )
    found: dict[str, Any] = made("bench.own_kernels", options.commit) | {"cases": {}}
    if not options.only:
        found["host"] = host()
        print("host", found["host"], flush=True)
        write(options.output, found)
    for name, case in cases.items():
        try:
            row = found["cases"][name] = measured(case)
        except (jitgen.JitgenError, RuntimeError) as error:  # of one case; the others are measured
            print(name, error, flush=True)
            continue
        print(name, row["us"], "largest error", max(row["error"].values()), row["kernels"], flush=True)
        write(options.output, found)


if __name__ == "__main__":
    main()
