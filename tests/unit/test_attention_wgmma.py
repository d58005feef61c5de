"""Schedules, tensor maps and launches of the CUDA attention kernel, without a device."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen import TensorSpec
from jitgen.device import Device
from jitgen.families.attention.forward import schedule
from jitgen.families.attention.forward.decode import DecodeSchedule
from jitgen.families.attention.forward.resident import ResidentSchedule
from jitgen.kernel.launch import Persistence
from jitgen.runtime.tensor_map import TensorMap
from jitgen.spec import Target

SHARED_BYTES = 227 * 1024


def attend(q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def lowered(
    batch: int, heads: int, shared: int, rows: int, keys: int, depth: int, width: int = 0, backend: Any = "cuda"
) -> Any:
    sizes = ((heads, rows, depth), (shared, keys, depth), (shared, keys, width or depth))
    dtype = torch.bfloat16 if backend == "cuda" else torch.float32
    specs = (TensorSpec((batch, *size), dtype) for size in sizes)
    return jitgen.jit(attend).lower(*specs, backend=backend, target="sm_90a").lowered


def bucket(size: int, ends: tuple[int, ...]) -> int:
    return 0 if size == 1 else 1 + sum(size > end for end in ends)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_sizes_of_one_bucket_have_one_schedule(backend: str) -> None:
    """So that what is built for a recorded size serves all others of its buckets (``schedule.buckets``)."""
    found: dict[tuple[int, ...], Any] = {}
    device = Device(Target.parse("sm_90a"), backend)
    row_counts = (2, 3, 4, 5, 8, 9, 10, 11, 16, 17, 21, 22, 32, 33, 64, 65, 128, 129, 900)
    for group in (1, 3, 4):
        graph = lowered(2, 4 * group, 4, 20, 20, 64, backend=backend).graph
        shapes = ((2, 4 * group, 20, 64), (2, 4, 20, 64), (2, 4, 20, 64))
        environment = {f"s{i}_{dim}": size for i, shape in enumerate(shapes) for dim, size in enumerate(shape)}
        of_rows, of_keys, of_tasks = (each.ends for each in schedule.buckets(graph, environment, device))
        for batch, rows, keys in itertools.product((2,), row_counts, (2, 65, 77, 4095, 4096)):
            kernels = lowered(batch, 4 * group, 4, rows, keys, 64, backend=backend)
            key = (group, bucket(batch * 4 * group, of_tasks), bucket(rows, of_rows), bucket(keys, of_keys))
            facts = kernels.schedules, kernels.layouts
            assert found.setdefault(key, facts) == facts, (group, batch, rows, keys)


@pytest.mark.parametrize(("depth", "width"), [(8, 8), (64, 64), (70, 30), (128, 128), (192, 64), (256, 256)])
@pytest.mark.parametrize("rows", [1, 40, 100, 1000])
def test_shared_memory_fits(depth: int, width: int, rows: int) -> None:
    kernels = lowered(2, 4, 4, rows, 300, depth, width)
    launch = kernels.launch(0)
    assert launch.shared_bytes <= SHARED_BYTES
    (chosen,) = kernels.schedules
    assert chosen.block_d >= depth
    assert chosen.block_e >= width
    if isinstance(chosen, DecodeSchedule):
        assert rows == 1
        assert launch.block[0] == chosen.warps * 32
        return
    assert chosen.stages >= 2
    assert launch.block[0] == (chosen.warpgroups + 1) * 128
    assert 32 % (chosen.staged // 8) == 0


def test_tensor_maps_describe_heads_of_any_strides() -> None:
    packed = torch.empty(2, 200, 3, 4, 64, dtype=torch.bfloat16)
    q, k, v = (packed[:, :, number].transpose(1, 2) for number in range(3))
    for args in ((q, k, v), (q, k[:, :2], v[:, :2])):
        kernels = jitgen.jit(attend).lower(*args, backend="cuda", target="sm_90a").lowered
        maps = [TensorMap(**dataclasses.asdict(each)) for each in kernels.arguments(0).maps]
        assert [each.sizes[-2:] for each in maps] == [(200, 64)] * 3
        assert all(each.strides[-2:] == (3 * 4 * 64, 1) for each in maps)
        heads = args[1].shape[1]
        assert sorted(maps[1].sizes[:-2])[-2:] == [2, heads]
        assert [each.offset for each in maps] == [0, 0, 0]


@pytest.mark.parametrize("change", ["odd", "flipped", "transposed", "repeated"])
def test_what_no_tensor_map_describes_is_copied_element_by_element(change: str) -> None:
    whole = torch.empty(2, 4, 200, 72, dtype=torch.bfloat16)
    q, v = torch.empty(2, 4, 200, 64, dtype=torch.bfloat16), torch.empty(2, 4, 200, 64, dtype=torch.bfloat16)
    k = {
        "odd": whole[..., 1:65],
        "flipped": whole[..., :64],
        "transposed": torch.empty(2, 4, 64, 200, dtype=torch.bfloat16).transpose(-1, -2),
        "repeated": whole[:, :, :1, :64].expand(-1, -1, 200, -1),
    }[change]

    def attend(q: Any, k: Any, v: Any) -> Any:
        k = k.flip(-2) if change == "flipped" else k
        return torch.softmax(q @ k.transpose(-1, -2), -1) @ v

    low = jitgen.jit(attend).lower(q, k, v, backend="cuda", target="sm_90a")
    (chosen,) = low.lowered.schedules
    assert not chosen.copied[1]
    assert "copied element by element" in low.explain()


@pytest.mark.parametrize("rows", [100, 1000])
def test_one_matrix_is_copied_as_several_are(rows: int) -> None:
    for batch, heads in ((1, 1), (1, 2), (2, 1)):
        kernels = lowered(batch, heads, heads, rows, rows, 64)
        assert kernels.schedules[0].copied == (True, True, True)
        assert kernels.layouts[0][0].unit == 16


def test_few_blocks_of_many_rows_share_keys_among_a_cluster() -> None:
    def cluster(batch: int, rows: int, keys: int, depth: int) -> int:
        launch = lowered(batch, 5, 5, rows, keys, depth).launch(0)
        assert launch.grid[0] % launch.cluster == 0
        return int(launch.cluster)

    assert cluster(1, 207, 3532, 64) >= 4
    assert cluster(1, 70, 1843, 248) == 8
    assert cluster(2, 6000, 6000, 128) == 1
    assert cluster(2, 300, 100, 128) == 1


def test_few_rows_share_keys_among_a_cluster_where_that_is_faster() -> None:
    def cluster(batch: int, keys: int) -> int:
        kernels = lowered(batch, 32, 8, 1, keys, 128)
        assert len(kernels.program.kernels) == 1
        launch = kernels.launch(0)
        assert launch.grid[0] % launch.cluster == 0
        assert launch.any_cluster
        return int(launch.cluster)

    assert cluster(1, 1024) == 8
    assert cluster(4, 3000) == 3
    assert cluster(64, 4096) == 1
    assert cluster(2, 100) == 1


@pytest.mark.parametrize(
    ("keys", "depth", "tile", "warpgroups", "slots"),
    [
        *((1, 64, 32, 3, 2), (47, 128, 64, 3, 2), (77, 64, 80, 3, 2), (77, 128, 80, 3, 2), (128, 128, 128, 3, 1)),
        *((154, 80, 160, 3, 1), (129, 64, 160, 3, 2), (192, 64, 192, 3, 2), (193, 128, 256, 2, 1), (50, 256, 64, 2, 1)),
    ],
)
def test_few_keys_stay_in_shared_memory(keys: int, depth: int, tile: int, warpgroups: int, slots: int) -> None:
    kernels = lowered(6, 64, 16, 2282, keys, depth)
    (chosen,) = kernels.schedules
    assert isinstance(chosen, ResidentSchedule)
    assert (chosen.block_n, chosen.warpgroups, chosen.slots) == (tile, warpgroups, slots)
    assert chosen.fewest <= keys <= chosen.block_n
    launch = kernels.launch(0)
    assert launch.shared_bytes <= SHARED_BYTES
    assert launch.grid[0] == 6 * 64 * 36
    assert launch.persistence == Persistence("multiprocessors")
    assert [each.box[-2] for each in kernels.arguments(0).maps] == [64, tile, tile]


def test_few_keys_that_fit_no_block_or_no_tensor_map_are_walked() -> None:
    """Neither more keys than a tile, nor keys and queries that no tensor map copies, nor rows that share a tile."""
    for sizes in ((2, 4, 4, 1000, 257, 64), (2, 4, 4, 1000, 150, 256), (2, 4, 4, 1000, 77, 36), (2, 8, 2, 30, 300, 64)):
        assert not any(isinstance(each, ResidentSchedule) for each in lowered(*sizes).schedules), sizes


def test_a_block_keeps_keys_that_tasks_share() -> None:
    """Whether two tasks have the same keys is a question of the indices along which keys have a stride."""
    low = jitgen.jit(attend).lower(
        *(TensorSpec((6, heads, rows, 128), torch.bfloat16) for heads, rows in ((64, 2282), (16, 47), (16, 47))),
        backend="cuda",
        target="sm_90a",
    )
    same = low.source.partition("bool shares_keys")[2].partition("}")[0]
    for stride in (f"params.{name}.strides[{dim}]" for name in ("key", "value") for dim in (0, 1)):
        assert f"{stride} == 0 ||" in same


@pytest.mark.parametrize("result", ["alone", "beside", "halved", "gated", "wide"])
def test_results_of_sums_and_rows_are_computed_in_pairs(result: str) -> None:
    def attend(q: Any, k: Any, v: Any, gate: Any) -> Any:
        scores = (q @ k.transpose(-1, -2)).float()
        out = torch.softmax(scores, -1).to(v.dtype) @ v
        return {
            "alone": lambda: out,
            "beside": lambda: (out, torch.logsumexp(scores, -1)),
            "halved": lambda: out * 0.5,
            "gated": lambda: out * torch.sigmoid(gate),
            "wide": lambda: out.float(),
        }[result]()

    sizes = (2, 4, 300, 64), (2, 4, 77, 64), (2, 4, 77, 64), (2, 4, 300, 64)
    low = jitgen.jit(attend).lower(
        *(TensorSpec(size, torch.bfloat16) for size in sizes), backend="cuda", target="sm_90a"
    )
    (chosen,) = low.lowered.schedules
    assert isinstance(chosen, ResidentSchedule)
    assert chosen.in_pairs == (result in ("alone", "beside", "halved"))
    assert ("results_in_pairs" in low.source) == chosen.in_pairs
