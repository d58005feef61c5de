"""Grouped products on sm_90a: wgmma mainloops divide many rows among groups, and compile for that without spills."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import jitgen
from tests.grouped import ACTIVATIONS, gated, product

BF16 = torch.bfloat16


def lowered(
    function: Any,
    rows: int,
    format: str | None,
    *others: Any,
    sizes: tuple[int, ...] = (8, 512, 1024),
    group: int | None = None,
    activation: str | None = None,
) -> Any:
    weight = jitgen.TensorSpec(sizes, BF16, format=format, group_size=group, activation=activation)
    ends = jitgen.TensorSpec(sizes[:1], torch.int32)
    x = jitgen.TensorSpec((rows, sizes[-1]), BF16)
    return jitgen.jit(backend="cuda")(function).lower(x, weight, ends, *others, target="sm_90a", backend="cuda")


@pytest.mark.parametrize("format", [None, "int4", "uint4", "int8", "mxfp4", "nvfp4", "fp8_e4m3"])
@pytest.mark.quick(where=lambda format: format in (None, "int4"))
def test_rows_of_groups_by_wgmma(format: str | None) -> None:
    """A group of few rows streams weights instead."""
    paths = {"wgmma_dense"} if format is None else {"wgmma_quantized"}
    few = lowered(product, 40, format)
    assert few._lowered.schedules[0].path in ("rows", "mma")
    for rows in (300, 3000):
        low = lowered(product, rows, format)
        assert {low._lowered.schedules[0].path} == paths
        built = low.compile()
        assert built.report[0]["spill_bytes"] <= 64
        assert "HGMMA" in built.asm["sass"]


@pytest.mark.parametrize(("format", "paths"), [(None, ["rows", "wgmma_dense"]), ("int4", ["mma", "wgmma_quantized"])])
def test_large_matrices_of_few_rows(format: str | None, paths: list[str]) -> None:
    """Of 32 large matrices an average of 10 rows each is by wgmma where they are quantised, and an average of one never
    is; dense ones are by wgmma from more rows on than are streamed."""
    sizes = (32, 2048, 7168)
    found = [lowered(product, rows, format, sizes=sizes)._lowered.schedules[0].path for rows in (16, 300, 3000)]
    assert found == [paths[0], paths[format is not None], paths[1]]


@pytest.mark.parametrize(
    ("rows", "sizes", "tile"),
    [
        (16, (32, 2048, 7168), ("mma", 8)),
        (64, (32, 2048, 7168), ("mma", 8)),
        (300, (32, 2048, 7168), ("wgmma_quantized", 32)),
        (32, (8, 14336, 4096), ("mma", 8)),
        (128, (8, 14336, 4096), ("wgmma_quantized", 32)),
        (512, (128, 768, 2048), ("mma", 8)),
        (2400, (128, 768, 2048), ("wgmma_quantized", 32)),
    ],
)
def test_tiles_of_few_rows(rows: int, sizes: tuple[int, int, int], tile: tuple[str, int]) -> None:
    """Rows of a tile are those that groups of such sizes have: the fastest on an H200, or within 8 % of it
    (docs/measured/h200-grouped-tiles.json)."""
    for format in ("int4", "mxfp4"):
        schedule = lowered(product, rows, format, sizes=sizes)._lowered.schedules[0]
        assert (schedule.path, schedule.tokens) == tile
        assert schedule.block_n >= 64  # of a weight that is long


@pytest.mark.parametrize(("format", "group", "activation"), ACTIVATIONS)
@pytest.mark.quick(where=lambda activation: activation == "fp8_e4m3.block128")
def test_quantised_activations_and_blocks(format: str, group: int | None, activation: str | None) -> None:
    """Codes of 8 bits meet those of the activation; codes with scales of blocks have no mainloop for few rows."""
    by_codes = activation is not None and format != "int4"
    in_blocks = format == "fp8_e4m3.rows128"
    few = "mma" if not by_codes else "wgmma_dense" if in_blocks else "bytes"
    for rows, path in ((40, few), (3000, "wgmma_dense" if by_codes else "wgmma_quantized")):
        low = lowered(product, rows, format, group=group, activation=activation)
        assert low._lowered.schedules[-1].path == path
        built = low.compile()
        assert built.report[-1]["spill_bytes"] <= 64
        if path == "wgmma_dense":
            assert ("IGMMA" if format == "int8" else "QGMMA") in built.asm["sass"]


@pytest.mark.parametrize("format", ["int8", "fp8_e4m3"])
def test_gate_and_up_of_codes_are_one_kernel(format: str) -> None:
    scales = jitgen.TensorSpec((3000,), torch.float32)
    low = lowered(gated, 3000, format, scales, activation=format)
    assert [kernel.template for kernel in low.kernels if kernel.template.startswith("gemm")] == ["gemm/gemm.cu.j2"]
    assert low._lowered.schedules[-1].path == "wgmma_dense"
    assert low.compile().report[-1]["spill_bytes"] <= 64


@pytest.mark.parametrize("format", [None, "int4"])
def test_gate_and_up_are_one_kernel(format: str | None) -> None:
    low = lowered(gated, 3000, format, jitgen.TensorSpec((3000,), torch.float32))
    assert len(low.kernels) == 1
    assert low._lowered.schedules[0].path.startswith("wgmma")
    assert low.compile().report[0]["spill_bytes"] <= 64
