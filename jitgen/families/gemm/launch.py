"""Turns a call's geometry into a launch: grid, tensor maps and the amount of work.

Neither a template nor a compiler nor a device is needed for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from jitgen.device import Device
from jitgen.families.gemm import cutlass, stream_tiles, wgmma
from jitgen.families.gemm.layout import BY_ROWS, GemmGeometry, GemmLayout
from jitgen.families.gemm.mainloops import (
    BlockMainloop,
    CutlassTile,
    GemmSchedule,
    MmaQuantized,
    TritonMainloop,
    WgmmaLaunch,
    WgmmaMainloop,
    WgmmaTiling,
    WgmmaTilings,
    blocks,
)
from jitgen.ir.body import Body
from jitgen.ir.program import Kernel
from jitgen.kernel.launch import LaunchShape, Persistence, Work, attributes_of
from jitgen.kernel.launch import work as pointwise_work
from jitgen.kernel.operands import WARP, MappedTensor, pointwise_flops

MOST_MATRICES_PER_GRID_ROW = 32768
"""Matrices along the grid's second dimension, which CUDA limits to 65535 blocks; more of them use the third one too."""


def settle(
    kernel: Kernel, geometries: Sequence[GemmGeometry], schedule: GemmSchedule, device: Device
) -> GemmSchedule | WgmmaLaunch:
    """Decides what one launch takes of ``schedule``: for wgmma mainloops a tiling, and the number of blocks that share
    K; for one or two rows tiles of two, where it has them."""
    if isinstance(schedule, WgmmaMainloop | WgmmaTilings):
        return wgmma.for_launch(schedule, kernel.bodies, geometries, device.model)
    if geometries[0].rows > stream_tiles.PAIR:
        return schedule
    return (schedule.pair if isinstance(schedule, MmaQuantized) else None) or schedule


def tensor_maps(
    kernel: Kernel,
    layouts: Sequence[GemmLayout],
    geometries: Sequence[GemmGeometry],
    settled: GemmSchedule | WgmmaLaunch,
    device: Device,
) -> Sequence[MappedTensor]:
    """Returns the tensors that a launch of what ``settle`` returned copies by tensor maps."""
    if not isinstance(settled, WgmmaLaunch | CutlassTile) or not any(geometry.elements for geometry in geometries):
        return ()
    if isinstance(settled, CutlassTile):
        return tuple(cutlass.tensor_maps(kernel.bodies[0], layouts[0], geometries[0], settled))
    return tuple(wgmma.tensor_maps(kernel.bodies, layouts, geometries, settled.tiling))


def work(kernel: Kernel, geometries: Sequence[GemmGeometry], schedule: GemmSchedule) -> Work:
    """Counts the work of one launch. A product over K = 0 has work too: its accumulators are 0."""
    flops = sum(_product_flops(body, geometry) for body, geometry in zip(kernel.bodies, geometries, strict=True))
    return pointwise_work(kernel, geometries, schedule, flops=flops, writes=kernel.bodies[0].contractions[0].k_splits)


def launch(
    kernel: Kernel,
    layouts: Sequence[GemmLayout],
    geometries: Sequence[GemmGeometry],
    schedule: GemmSchedule | WgmmaLaunch,
    device: Device,
) -> LaunchShape:
    """Returns a block or a cluster for each tile of each region; a persistent kernel has at most what is resident at
    once. ``schedule`` is what ``settle`` returned."""
    sizes = [(_tiled_rows(geometry, schedule), geometry.columns) for geometry in geometries]
    matrices = geometries[0].matrices
    overlaps, none = attributes_of(device), frozenset[str]()
    if isinstance(schedule, WgmmaLaunch):  # these mainloops number the tiles of all matrices in one sequence
        tiling, splits = schedule.tiling, schedule.splits
        return LaunchShape(
            grid=(splits * blocks(tiling, sizes) * matrices, 1, 1),
            block=(tiling.warps * WARP, 1, 1),
            cluster=max(splits, tiling.cluster),
            any_cluster=tiling.multicast == 1,
            shared_bytes=tiling.shared_bytes,
            attributes=overlaps if tiling.dependent_launch else none,
            persistence=_persistence(tiling, splits),
            entry=wgmma.entry_suffix(schedule.entry),
        )
    assert not isinstance(schedule, WgmmaTilings), "settled before a launch"
    tiles, attributes = blocks(schedule, sizes), overlaps if schedule.dependent_launch else none
    if isinstance(schedule, CutlassTile):
        return LaunchShape(
            grid=(tiles, 1, 1),
            block=(schedule.warps * WARP, 1, 1),
            cluster=schedule.cluster,
            shared_bytes=schedule.shared_bytes,
            persistence=Persistence("clusters") if schedule.cluster > 1 else Persistence("multiprocessors"),
        )
    if isinstance(schedule, BlockMainloop):
        splits = schedule.cluster_k_splits
        is_pair = isinstance(schedule, MmaQuantized) and schedule.tokens == stream_tiles.PAIR
        return LaunchShape(
            grid=(splits * tiles, *_grid_of_matrices(matrices)),
            block=(schedule.warps * WARP, 1, 1),
            cluster=splits,
            shared_bytes=schedule.shared_bytes,
            attributes=attributes,
            entry=stream_tiles.ENTRY_OF_A_PAIR if is_pair else "",
        )
    threads = schedule.warps * WARP if isinstance(schedule, TritonMainloop) else 1
    return LaunchShape((tiles, *_grid_of_matrices(matrices)), (threads, 1, 1), attributes=attributes)


def _tiled_rows(geometry: GemmGeometry, schedule: GemmSchedule | WgmmaLaunch) -> int:
    """Returns the rows whose tiles a launch has. Of groups of rows, whose number of tiles only the device knows, these
    are as many as there may be: whole tiles of all rows, and one that is not whole for each group and for the rows of
    none."""
    if geometry.grouping not in BY_ROWS:
        return geometry.rows
    tiling = schedule.tiling if isinstance(schedule, WgmmaLaunch) else schedule
    assert not isinstance(tiling, WgmmaTilings)
    rows, block = geometry.rows, tiling.block_m * (tiling.multicast if isinstance(tiling, WgmmaMainloop) else 1)
    tiles = rows if geometry.grouping == "ids" else rows // block + min(geometry.group_count + 1, rows)
    return tiles * block


def _persistence(schedule: WgmmaTiling, splits: int) -> Persistence:
    """Makes blocks that split K wait for one another, so that a grid of them has no more clusters than are resident."""
    # Of pairs that only share tiles as many are resident as multiprocessors have room for.
    waiting = splits > 1 or schedule.cluster > 2
    return Persistence("clusters") if waiting else Persistence("multiprocessors", schedule.resident)


def _grid_of_matrices(matrices: int) -> tuple[int, int]:
    """Returns the grid's second and third dimension. The last row of the third may have more blocks than matrices are
    left."""
    if matrices <= MOST_MATRICES_PER_GRID_ROW:
        return max(matrices, 1), 1
    return MOST_MATRICES_PER_GRID_ROW, -(-matrices // MOST_MATRICES_PER_GRID_ROW)


def _product_flops(body: Body, geometry: GemmGeometry) -> int:
    """Counts the operations of the products and the prologue."""
    total = 0
    for contraction in body.contractions:
        matrices = 1 if geometry.grouping == "lengths" else geometry.matrices
        total += 2 * matrices * geometry.rows * geometry.columns * geometry.length
        total += pointwise_flops(contraction.x, geometry.matrices * geometry.rows * geometry.length)
    return total
