"""A CUDA C++ kernel of your own, a C++ one, and a function of yours in all dialects, within decorated functions.

Run:   python examples/19_own_cuda_kernel.py
Shows: a tiled product in CUDA C++ whose hooks take what stands before and behind it, compiled for an H200 (sm_90a) on
       any machine that has NVRTC; the same for a kernel in C++, which runs on this processor and is compared with
       float64; and `device_function`, a pointwise function spelled in CUDA C++, Triton and C++. With a GPU, the product
       runs too.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import jitgen

TILED = r"""
template <int tile>
__global__ void __launch_bounds__(tile * tile)
product(const float* __restrict__ a, const float* __restrict__ b, float* c, int m, int n, int k) {
  __shared__ float of_a[tile][tile + 1], of_b[tile][tile + 1];
  const int row = blockIdx.y * tile + threadIdx.y, column = blockIdx.x * tile + threadIdx.x;
  float sum = 0;
  for (int first = 0; first < k; first += tile) {
    const int i = first + threadIdx.x, j = first + threadIdx.y;
    of_a[threadIdx.y][threadIdx.x] = row < m && i < k ? JITGEN_PROLOGUE(a[row * k + i], row, i) : 0.0f;
    of_b[threadIdx.y][threadIdx.x] = j < k && column < n ? b[j * n + column] : 0.0f;
    __syncthreads();
    for (int l = 0; l < tile; ++l) sum += of_a[threadIdx.y][l] * of_b[l][threadIdx.x];
    __syncthreads();
  }
  if (row < m && column < n) c[row * n + column] = JITGEN_EPILOGUE(sum, row, column);
}
"""
RUNNING = r"""
#include <cmath>

extern "C" void running_mean(const float* x, float* out, int64_t rows, int64_t columns) {
#pragma omp parallel for
  for (int64_t row = 0; row < rows; ++row) {
    double sum = 0;
    for (int64_t i = 0; i < columns; ++i) {
      sum += JITGEN_PROLOGUE(x[row * columns + i], row, i);
      out[row * columns + i] = JITGEN_EPILOGUE(sum / (i + 1), row, i);
    }
  }
}
"""
product = jitgen.cuda_kernel(TILED, "product<16>")
running_mean = jitgen.cpp_kernel(RUNNING, "running_mean")
softened = jitgen.device_function(
    lambda x: x / (1 + x.abs()),
    cuda="x / (T(1) + abs(x))",
    triton="x / (1 + tl.abs(x))",
    cpp="x / (T(1) + (x < T(0) ? -x : x))",
    derivative=lambda x: 1 / (1 + x.abs()) ** 2,
)


@jitgen.jit
def layer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    (m, k), n = x.shape, weight.shape[1]
    out = torch.empty((m, n), device=x.device)
    product[(-(-n // 16), -(-m // 16)), (16, 16)](x * 0.5, weight, out, m, n, k)
    return softened(out + bias).bfloat16()


@jitgen.jit
def smoothed(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    running_mean(F.relu(x), out, x.shape[0], x.shape[1])
    return softened(out) * torch.sigmoid(gate)


def main() -> None:
    x, gate = torch.randn(64, 100), torch.randn(100)
    print(smoothed.lower(x, gate).explain(), "\n")
    mean = F.relu(x.double()).cumsum(1) / torch.arange(1, 101)
    right = mean / (1 + mean.abs()) * torch.sigmoid(gate.double())
    print(f"largest difference from float64: {(smoothed(x, gate).double() - right).abs().max().item():.1e}")
    out = torch.empty(64, 100)
    running_mean(x, out, 64, 100)  # by itself, as in eager torch; compiled once, and stored
    print(f"by itself: {(out - x.double().cumsum(1) / torch.arange(1, 101)).abs().max().item():.1e}\n")

    matrix = jitgen.TensorSpec(("M", 96))
    lowered = layer.lower(matrix, jitgen.TensorSpec((96, 80)), jitgen.TensorSpec((80,)), target="sm_90a")
    print(lowered.explain(), "\n")
    try:
        (report,) = lowered.compile().report
        print(f"for sm_90a: {report['registers']} registers, {report['spill_bytes']} bytes of spills")
    except jitgen.CompileError as error:
        print(f"not compiled here: {error}")
    if torch.cuda.is_available():
        x, weight, bias = (torch.randn(size, device="cuda") for size in ((50, 96), (96, 80), (80,)))
        exact = x.double() * 0.5 @ weight.double() + bias
        error = (layer(x, weight, bias).double() - exact / (1 + exact.abs())).abs().max().item()
        print(f"on the GPU, largest difference from float64: {error:.1e}")


if __name__ == "__main__":
    main()
