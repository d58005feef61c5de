"""What wgmma kernels bring to the cache ahead of an epilogue that reads matrices: which elements, and for which."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.compilers import host, nvrtc, routes
from tests.compile.test_grouped_on_host import wgmma_headers
from tests.cuda_on_host import on_host

needs_compiler = pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")
needs_nvrtc = pytest.mark.skipif(nvrtc.toolchain() is None, reason="needs NVRTC")

_TEXT = """
#include <jitgen/gemm_wgmma_walk.cuh>

struct Params {
  int* count;
  int first, end, column, columns;
};
struct Counted {
  static constexpr bool reads_matrices = true;
  const Params& params;
  template <int W>
  __device__ void prefetch(int m, int n, int live) const {
    for (int i = 0; i < live && i < W; ++i) ++params.count[m * params.columns + n + i];
  }
};

extern "C" __global__ void
prefetched(const __grid_constant__ Params params) {
  jitgen::prefetch_for_epilogue<64>(Counted{params}, params.first, params.end, params.column, params.columns);
}
"""


@needs_compiler
@pytest.mark.parametrize("column", [0, 64, 128])
@pytest.mark.parametrize("end", [8, 37])
def test_each_element_of_a_tile_once(column: int, end: int, tmp_path: Path) -> None:
    """Tiles of 64 columns, of which the second has 23 and the third none, and of rows 3 to ``end``."""
    rows, columns, first = 40, 87, 3
    source = jitgen.jit(backend="cuda")(F.linear).lower(*_specs("int8"), target="sm_90a").lowered.render(0)[0]
    text = SimpleNamespace(name="prefetched", text=_TEXT, headers=source.headers)
    call = on_host(text, tmp_path, wgmma_headers())
    count = torch.zeros(rows, columns, dtype=torch.int32)
    call(1, 32, struct.pack("Q4i", count.data_ptr(), first, end, column, columns))
    wanted = torch.zeros_like(count)
    wanted[first:end, column : column + 64] = 1
    assert torch.equal(count, wanted)


def _specs(format: str | None) -> tuple[jitgen.TensorSpec, ...]:
    x, dtype = jitgen.TensorSpec((300, 512), torch.bfloat16), torch.bfloat16
    return x, jitgen.TensorSpec((1024, 512), dtype, format=format, group_size=128 if format else None)


ROW, MATRIX = jitgen.TensorSpec((1024,), torch.bfloat16), jitgen.TensorSpec((300, 1024), torch.bfloat16)


@needs_nvrtc
@pytest.mark.parametrize("format", [None, "int8"])
@pytest.mark.parametrize(
    ("function", "operand", "reads"),
    [(lambda x, w, r: F.linear(x, w) + r, MATRIX, True), (lambda x, w, b: F.linear(x, w, b), ROW, False)],
    ids=["matrix", "row"],
)
def test_matrices_alone(
    function: Callable[..., Any], operand: jitgen.TensorSpec, reads: bool, format: str | None
) -> None:
    low = jitgen.jit(backend="cuda")(function).lower(*_specs(format), operand, target="sm_90a").lowered
    source = low.render(0)[0]
    assert ("reads_matrices" in source.text) is reads
    assert (b"prefetch.global.L2 " in nvrtc.compile(routes.prepare(source)).files["kernel.ptx"]) is reads
