"""Sources with several entries: NVRTC compiles all, and each has resources of its own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.compilers import nvrtc

pytestmark = pytest.mark.skipif(nvrtc.toolchain() is None, reason="needs NVRTC and the headers of CUDA")


MOST_SPILLED = {None: 0, "int4": 140}
"""Bytes that an entry spills at most: NVRTC 13.5 spills some of the largest tile of int4, 128 x 256."""


@pytest.mark.parametrize("format", [None, "int4"])
@pytest.mark.quick(where=lambda format: format is None)
def test_every_entry_compiles(format: str | None) -> None:
    function = jitgen.jit(lambda x, w: F.linear(x, w), backend="cuda")
    weight = jitgen.TensorSpec((3000, 4096), torch.bfloat16)
    w = weight if format is None else jitgen.quantize(torch.randn(3000, 4096), format, 128)
    found = set()
    for rows in (600, 777, 1000, 1400):
        program = function.lower(jitgen.TensorSpec((rows, 4096), torch.bfloat16), w, target="sm_90a").lowered
        source, _ = program.render(0)
        found.add(program.launch(0).entry)
    count = len(program.schedules[0].tilings)
    assert count > 1
    assert found <= {"", *(f"_{number}" for number in range(1, count))}
    meta = nvrtc.compile(source).meta
    assert set(meta["entries"]) == {f"{source.name}_{number}" for number in range(1, count)}
    for entry in (meta, *meta["entries"].values()):
        assert entry["spill_bytes"] <= MOST_SPILLED[format]
        assert entry["registers"] > 0


@pytest.mark.parametrize("weights", [1, 2])
def test_two_rows_launch_an_entry_with_half_of_the_shared_memory(weights: int) -> None:
    def gated(x: torch.Tensor, *w: torch.Tensor) -> torch.Tensor:
        return F.silu(F.linear(x, w[0])) * F.linear(x, w[-1])

    quantised = [jitgen.quantize(torch.randn(520, 1024), "int4", 128) for _ in range(weights)]
    of_rows = {}
    for rows in (1, 2, 3, 8, 9):
        x = jitgen.TensorSpec((rows, 1024), torch.bfloat16)
        of_rows[rows] = jitgen.jit(gated, backend="cuda").lower(x, *quantised, target="sm_90a").lowered
    shapes = {rows: program.launch(0) for rows, program in of_rows.items()}
    assert [rows for rows, shape in shapes.items() if shape.entry] == [2]
    assert shapes[3] == shapes[8]
    assert shapes[2].grid == shapes[8].grid
    assert shapes[2].shared_bytes <= shapes[8].shared_bytes * 0.6
    source, _ = of_rows[2].render(0)
    assert source == of_rows[8].render(0)[0]  # one kernel for both
    meta = nvrtc.compile(nvrtc.prepare(source)).meta
    (other,) = meta["entries"]
    assert other == source.name + shapes[2].entry
    assert meta["spill_bytes"] == meta["entries"][other]["spill_bytes"] == 0


def test_two_rows_of_a_long_product_have_tiles_of_their_own() -> None:
    """Their windows of x have a quarter of the bytes."""
    specs = jitgen.TensorSpec((4096, 14336), torch.bfloat16, format="int4", group_size=128)
    function = jitgen.jit(lambda x, w: F.linear(x, w), backend="cuda")
    programs = [
        function.lower(jitgen.TensorSpec((rows, 14336), torch.bfloat16), specs, target="sm_90a").lowered
        for rows in (2, 8)
    ]
    two, eight = (program.launch(0) for program in programs)
    pair = programs[1].schedules[0].pair
    assert (two.block[0], two.cluster, two.shared_bytes) == (32 * pair.warps, pair.cluster_k_splits, pair.shared_bytes)
    assert two.grid[0] == pair.cluster_k_splits * 4096 // pair.block_n
    assert two.shared_bytes < eight.shared_bytes
    assert f"for two rows tiles of 2 x {pair.block_n}" in "\n".join(programs[0].explain(0))
    meta = nvrtc.compile(nvrtc.prepare(programs[0].render(0)[0])).meta
    assert meta["spill_bytes"] == meta["entries"][programs[0].render(0)[0].name + two.entry]["spill_bytes"] == 0
