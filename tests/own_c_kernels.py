"""Kernels as users write them in C++ and CUDA C++, with hooks, for the tests of launches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import jitgen
from tests.own_kernel_programs import KERNELS as IN_TRITON
from tests.own_kernel_programs import Kernel

CPP = r"""
#include <cmath>

extern "C" void add(const float* x, const float* y, float* out, int n, int columns) {
  for (int i = 0; i < n; ++i) {
    out[i] = JITGEN_EPILOGUE(JITGEN_PROLOGUE(x[i], i / columns, i % columns) + y[i], i / columns, i % columns);
  }
}

extern "C" void matmul(const float* a, const float* b, float* c, int m, int n, int k) {
#pragma omp parallel for
  for (int row = 0; row < m; ++row) {
    for (int column = 0; column < n; ++column) {
      float sum = 0;
      for (int i = 0; i < k; ++i) sum += JITGEN_PROLOGUE(a[row * k + i], row, i) * b[i * n + column];
      c[row * n + column] = JITGEN_EPILOGUE(sum, row, column);
    }
  }
}

template <class T>
void softmax(const T* x, T* out, int64_t rows, int64_t columns) {
  for (int64_t row = 0; row < rows; ++row) {
    T largest = -INFINITY, sum = 0;
    for (int64_t i = 0; i < columns; ++i) largest = fmax(largest, JITGEN_PROLOGUE(x[row * columns + i], row, i));
    for (int64_t i = 0; i < columns; ++i) sum += exp(JITGEN_PROLOGUE(x[row * columns + i], row, i) - largest);
    for (int64_t i = 0; i < columns; ++i) {
      const T power = exp(JITGEN_PROLOGUE(x[row * columns + i], row, i) - largest);
      out[row * columns + i] = JITGEN_EPILOGUE(power / sum, row, i);
    }
  }
}
"""
CUDA = r"""
#include <cstdint>
#include "tile.cuh"

namespace own {

extern "C" __global__ void add(const float* __restrict__ x, const float* __restrict__ y, float* out, int n,
                               int columns) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  out[i] = JITGEN_EPILOGUE(JITGEN_PROLOGUE(x[i], i / columns, i % columns) + y[i], i / columns, i % columns);
}

template <typename T, int tile>
__global__ void __launch_bounds__(tile * tile) matmul(const T* a, const T* b, T* c, int m, int n, int k) {
  __shared__ T of_a[tile][tile + PADDING], of_b[tile][tile + PADDING];
  const int row = blockIdx.y * tile + threadIdx.y, column = blockIdx.x * tile + threadIdx.x;
  T sum = 0;
  for (int first = 0; first < k; first += tile) {
    const int i = first + threadIdx.x, j = first + threadIdx.y;
    of_a[threadIdx.y][threadIdx.x] = row < m && i < k ? JITGEN_PROLOGUE(a[row * k + i], row, i) : T(0);
    of_b[threadIdx.y][threadIdx.x] = j < k && column < n ? b[j * n + column] : T(0);
    __syncthreads();
    for (int l = 0; l < tile; ++l) sum += of_a[threadIdx.y][l] * of_b[l][threadIdx.x];
    __syncthreads();
  }
  if (row < m && column < n) c[row * n + column] = JITGEN_EPILOGUE(sum, row, column);
}

__global__ void sums(const float* x, float* out, int64_t columns) {
  extern __shared__ float of_threads[];
  float sum = 0;
  for (int64_t i = threadIdx.x; i < columns; i += blockDim.x) {
    sum += JITGEN_PROLOGUE(x[blockIdx.x * columns + i], blockIdx.x, i);
  }
  of_threads[threadIdx.x] = sum;
  __syncthreads();
  for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) of_threads[threadIdx.x] += of_threads[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) out[blockIdx.x] = JITGEN_EPILOGUE(of_threads[0], 0, blockIdx.x);
}

}  // namespace own
"""

add, matmul = (jitgen.cpp_kernel(CPP, entry) for entry in ("add", "matmul"))
softmax = jitgen.cpp_kernel(CPP, "softmax<float>")


def _add(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty_like(x)
    add(x, y, out, x.numel(), x.shape[-1])
    return out


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    c = torch.empty((a.shape[0], b.shape[1]))
    matmul(a, b, c, a.shape[0], b.shape[1], a.shape[1])
    return c


def _softmax(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    softmax(x, out, x.shape[0], x.shape[1])
    return out


def _with(launch: Any, name: str) -> Kernel:
    return Kernel(launch, IN_TRITON[name].reference, IN_TRITON[name].shapes)


KERNELS: dict[str, Kernel] = {
    name: _with(launch, name) for name, launch in (("add", _add), ("matmul", _matmul), ("softmax", _softmax))
}


def cuda(directory: Any) -> dict[str, Any]:
    """The kernels in CUDA C++, of a file in ``directory`` that includes another."""
    (directory / "tile.cuh").write_text("#pragma once\n#define PADDING 1\n")
    file = directory / "kernels.cu"
    file.write_text(CUDA)
    entries = {"add": "own::add", "matmul": "own::matmul<float, 8>", "sums": "own::sums"}
    return {name: jitgen.cuda_kernel(file, entry) for name, entry in entries.items()}


def cuda_launches(kernels: dict[str, Any]) -> dict[str, Kernel]:
    """Functions that launch the kernels in CUDA C++."""

    def add(x: Tensor, y: Tensor) -> Tensor:
        out, n = torch.empty_like(x), x.numel()
        kernels["add"][-(-n // 128), 128](x, y, out, n, x.shape[-1])
        return out

    def matmul(a: Tensor, b: Tensor) -> Tensor:
        (m, k), n = a.shape, b.shape[1]
        c = torch.empty((m, n), device=a.device)
        kernels["matmul"][(-(-n // 8), -(-m // 8)), (8, 8)](a, b, c, m, n, k)
        return c

    def sums(x: Tensor) -> Tensor:
        out = torch.empty(x.shape[0], device=x.device)
        kernels["sums"][x.shape[0], 32, 32 * 4](x, out, x.shape[1])
        return out

    of_rows = Kernel(sums, lambda x: x.sum(1), IN_TRITON["softmax"].shapes)
    return {"add": _with(add, "add"), "matmul": _with(matmul, "matmul"), "sums": of_rows}
