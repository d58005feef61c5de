"""Split-K over a temporary in the cuda dialect, where a cluster of blocks is not enough. (Results: device tests.)"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.errors import UnsupportedError
from jitgen.families import registry
from jitgen.families.gemm.mainloops import WgmmaDense, WgmmaQuantized, WgmmaTiling, blocks
from jitgen.families.gemm.schedule import ROW_BUCKETS
from jitgen.families.gemm.schedules import cuda


def linear(x: torch.Tensor, w: Any) -> torch.Tensor:
    return F.linear(x, w).relu()


def swiglu(x: torch.Tensor, gate: Any, up: Any) -> torch.Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def spec(*shape: int, format: str | None = None, **more: Any) -> jitgen.TensorSpec:
    return jitgen.TensorSpec(shape, torch.bfloat16, format=format, group_size=128 if format else None, **more)


def lowered(function: Any, *specs: jitgen.TensorSpec, target: str = "sm_90a", **options: Any) -> Any:
    return jitgen.jit(function, **options).lower(*specs, target=target, backend="cuda")


@pytest.mark.parametrize("format", [None, "int4"])
def test_few_tiles_and_long_k_are_split(format: str | None) -> None:
    low = lowered(linear, spec(79, 43776), spec(256, 43776, format=format))
    program, (choice, _) = low.lowered.program, low.lowered.schedules
    assert [kernel.family for kernel in program.kernels] == ["gemm", "elementwise"]
    assert all(isinstance(tiling, WgmmaQuantized if format else WgmmaDense) for tiling in choice.tilings)
    splits = program.kernels[0].bodies[0].contractions[0].k_splits
    assert splits > max(low.lowered.route.device.model.resident_clusters)
    assert all(tiling.k_splits == splits and tiling.cluster_k_splits == 1 for tiling in choice.tilings)
    grids = {blocks(tiling, [(79, 256)]) for tiling in choice.tilings}
    assert low.lowered.launch(0).grid[0] in grids
    assert f"static constexpr int ranges = {splits};" in low.lowered.render(0)[0].text
    assert f"K is split over {splits} blocks" in low.explain()


@pytest.mark.parametrize("size", [(306, 3840, 28216), (705, 1024, 21544), (481, 256, 27272)], ids=str)
def test_tiles_too_few_for_the_device_sum_ranges_of_k(size: tuple[int, int, int]) -> None:
    """Clusters whose blocks share operands sum ranges too; most of the device has a tile."""
    rows, columns, length = size
    low = lowered(linear, spec(rows, length), spec(columns, length)).lowered
    settled = registry.family_of(low.program.kernels[0]).settle(
        low.program.kernels[0], low.laid_out.geometries[0], low.schedules[0], low.route.device
    )
    assert settled.tiling.k_splits > 1
    assert low.launch(0).grid[0] >= low.route.device.model.multiprocessors * 0.7


@pytest.mark.parametrize("size", [(194, 1128, 58880), (98, 1280, 40320)], ids=str)
def test_codes_of_few_tiles_are_summed_in_ranges_that_occupy_the_device(size: tuple[int, int, int]) -> None:
    rows, columns, length = size
    low = lowered(linear, spec(rows, length), spec(columns, length, format="int4")).lowered
    assert len(low.program.kernels) == 2
    assert low.launch(0).grid[0] >= low.route.device.model.multiprocessors * 0.8


def test_enough_tiles_for_the_device_are_not_split() -> None:
    for rows, columns, length in ((512, 4096, 4096), (2048, 4096, 14336), (64, 14336, 4096)):
        low = lowered(linear, spec(rows, length), spec(columns, length)).lowered
        assert len(low.program.kernels) == 1


def test_two_products_have_sums_of_their_own() -> None:
    low = lowered(swiglu, spec(100, 30720), *[spec(256, 30720, format="int4")] * 2).lowered
    assert [kernel.name for kernel in low.program.kernels] == ["swiglu", "swiglu_sum"]
    assert len(low.program.temporaries) == 2


@pytest.mark.parametrize(
    ("x", "w", "target", "options"),
    [
        (spec(4096, 4096), spec(4096, 4096), "sm_90a", {}),  # tiles enough
        (spec(79, 1024), spec(256, 1024), "sm_90a", {}),  # too short
        (spec(8, 43776), spec(256, 43776), "sm_90a", {}),  # another mainloop
        (spec(79, 43780), spec(256, 43780), "sm_90a", {}),  # rows that no tensor map describes
        (spec(79, 43776), spec(256, 43776), "sm_80", {}),
        (spec(79, 43776), spec(256, 43776), "sm_90a", {"batch_invariant": True}),
    ],
    ids=["tiles", "short", "rows", "unaligned", "sm_80", "batch_invariant"],
)
def test_others_are_kept(x: jitgen.TensorSpec, w: jitgen.TensorSpec, target: str, options: dict[str, Any]) -> None:
    low = lowered(linear, x, w, target=target, **options).lowered
    assert low.program is low.partitioned.program


def test_all_numbers_of_rows_are_at_most_eight_plans() -> None:
    rows = (2, 16, 17, 64, 65, 100, 129, 192, 193, 500, 512, 513, 1536, 1537, 8192)
    keys = {lowered(linear, spec(each, 30720), spec(256, 30720)).lowered.key for each in rows}
    assert len(keys) <= len(ROW_BUCKETS) + 1


@pytest.mark.parametrize(
    ("tiles", "what"),
    [
        (WgmmaDense(1, 1, 128, stages=4, k_splits=2), "stores the sums of 2 ranges of K, and there is memory for 1"),
        (WgmmaDense(1, 1, 128, stages=4, resident=4), "fewer than two stages"),
        (WgmmaQuantized(128, 2, 2, 1, stages=8, resident=4), "fewer than two stages"),
    ],
)
def test_a_schedule_that_its_memory_cannot_hold_is_refused(
    tiles: WgmmaTiling, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such kernels would write beyond the result, or wait for ever."""
    monkeypatch.setattr(cuda, "candidates", lambda problem: [cuda._with_wgmma_stages_that_fit(tiles, problem)])
    weight = spec(4096, 4096, format="int4" if isinstance(tiles, WgmmaQuantized) else None)
    with pytest.raises(UnsupportedError, match=what):
        lowered(linear, spec(1000, 4096), weight).lowered.render(0)
