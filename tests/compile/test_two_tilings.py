"""Sources with several entries: NVRTC compiles all, and each has resources of its own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.compilers import nvrtc
from jitgen.families.gemm import stream_tiles
from jitgen.families.gemm.stream_tiles import PAIR, StreamWeights
from jitgen.schedule.chips import H200

pytestmark = pytest.mark.skipif(nvrtc.toolchain() is None, reason="needs NVRTC and the headers of CUDA")


SPILLED_BYTES = {None: 0, "int4": 140}
"""Bytes that the entry of the largest tile spills at most, 128 x 256 of int4 as NVRTC 13.5 compiles it; others none."""


@pytest.mark.parametrize("format", [None, "int4"])
@pytest.mark.quick(where=lambda format: format is None)
def test_every_entry_compiles(format: str | None) -> None:
    """Each is compiled for its own tiles: for as many warpgroups, and with registers for all of them; and launches of
    several numbers of rows take several entries, with the threads of each."""
    function = jitgen.jit(lambda x, w: F.linear(x, w), backend="cuda")
    weight = jitgen.TensorSpec((3000, 4096), torch.bfloat16)
    w = weight if format is None else jitgen.quantize(torch.randn(3000, 4096), format, 128)
    launches = []
    for rows in (600, 777, 1000, 1400):
        program = function.lower(jitgen.TensorSpec((rows, 4096), torch.bfloat16), w, target="sm_90a").lowered
        launches.append(program.launch(0))
    source, _ = program.render(0)
    tilings = program.schedules[0].tilings
    entries = {f"_{number}" if number else "": tiling for number, tiling in enumerate(tilings)}
    assert len({launch.entry for launch in launches}) > 1
    for launch in launches:
        tiling = entries[launch.entry]
        assert (launch.block[0], launch.shared_bytes) == (32 * tiling.warps, tiling.shared_bytes)
    meta = nvrtc.compile(source).meta
    compiled = {source.name: meta, **meta["entries"]}
    assert set(compiled) == {source.name + entry for entry in entries}
    largest = max(tiling.block_m * tiling.block_n for tiling in tilings)
    for entry, tiling in entries.items():
        resources = compiled[source.name + entry]
        assert len(resources["register_pool"]) == tiling.warps // 4
        assert 0 < 32 * tiling.warps * resources["registers"] <= 2**16
        is_largest = tiling.block_m * tiling.block_n == largest
        assert resources["spill_bytes"] <= (SPILLED_BYTES[format] if is_largest else 0)


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


def test_the_largest_tiles_of_two_rows_do_not_spill(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = StreamWeights(256, 1, 14336, bits=4.125, quantized=True, light=True, chip=H200)
    tilings = {(tile.row_tiles, tile.stages): tile for tile in stream_tiles.candidates(PAIR, weights, True)}
    most = max(row_tiles * stages for row_tiles, stages in tilings)
    for shape in (shape for shape in tilings if shape[0] * shape[1] == most):
        monkeypatch.setattr(stream_tiles, "for_a_pair", lambda *_, shape=shape: tilings[shape])
        specs = jitgen.TensorSpec((4096, 14336), torch.bfloat16, format="int4", group_size=128)
        x = jitgen.TensorSpec((2, 14336), torch.bfloat16)
        low = jitgen.jit(lambda x, w: F.linear(x, w), backend="cuda").lower(x, specs, target="sm_90a").lowered
        source, _ = low.render(0)
        entries = nvrtc.compile(nvrtc.prepare(source)).meta["entries"]
        assert entries[source.name + stream_tiles.ENTRY_OF_A_PAIR]["spill_bytes"] == 0, shape


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
