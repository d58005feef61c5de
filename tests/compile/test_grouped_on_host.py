"""Grouped products in CUDA by ``mma.sync``, of weights and activations that are quantised: the kernels a GPU would get,
run on the CPU with the instructions of ``tests/host_ptx.cuh``."""

from __future__ import annotations

import pytest
import torch

import jitgen
from jitgen.compilers import host
from tests.compile.test_formats_on_host import host_headers
from tests.cuda_on_host import run
from tests.grouped import ACTIVATIONS, failure, product, rows_as_quantized, rows_of_groups

pytestmark = pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")


@pytest.mark.parametrize(("format", "group", "activation"), ACTIVATIONS)
@pytest.mark.quick(where=lambda activation: activation == "fp8_e4m3.block128")
def test_rows_of_groups(format: str, group: int | None, activation: str | None) -> None:
    x, dense = torch.randn(20, 256, dtype=torch.bfloat16), torch.randn(3, 128, 256, dtype=torch.bfloat16)
    weight = jitgen.quantize(dense, format, group_size=group, activation=activation)
    ends = torch.tensor([3, 3, 19], dtype=torch.int32)
    exact, rows = weight.dequantize(torch.float64), rows_as_quantized(x, activation)
    (found,) = run(product, x, weight, ends, target="sm_80", headers=host_headers())
    assert not failure(found, rows_of_groups(rows, exact, ends.tolist()), format)
