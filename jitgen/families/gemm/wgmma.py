"""Describes the wgmma mainloops of sm_90a as Python sees them: their configurations, shared memory and tensor maps.

The headers ``gemm_wgmma_quantized.cuh`` and ``gemm_wgmma_dense.cuh`` say how they are called. What they ask of the host
is computed here: shared memory for the schedule, tensor maps for the launch, and configurations for the template.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from jitgen.families.gemm.block_mainloops import CHUNK_BYTES
from jitgen.families.gemm.layout import GemmGeometry, GemmLayout
from jitgen.families.gemm.mainloops import CHUNK, WgmmaDense, WgmmaLaunch, WgmmaQuantized, WgmmaSchedule, WgmmaTiling
from jitgen.families.gemm.wgmma_times import Weights, estimate, slices
from jitgen.ir.body import Body, Contraction, accumulator_dtype
from jitgen.ir.ops import FLOATS
from jitgen.kernel.operands import MappedTensor, item_size, mapped_tensor
from jitgen.quant import formats
from jitgen.schedule.chips import Chip

STAGING_PITCH = 68
"""Floats from one row to the next where an epilogue stages 64 columns in shared memory; four banks are skipped."""
EPILOGUE_WIDTH = 8
"""Columns of the result that one call of the epilogue computes."""
MOST_BOX = 256
"""Elements of a box of a tensor map along a dimension, at most."""
BATCH_RANK = 2
"""Batch dimensions of the dense mainloop; its tensor maps have two more dimensions."""


def shared_bytes(schedule: WgmmaTiling, contractions: Sequence[Contraction]) -> int:
    """Returns the dynamic shared memory of a block in bytes, as the header's ``Shape::bytes``: stages, two barriers for
    each stage, and room for the epilogue. The generated source asserts that both are equal."""
    count, warpgroups = len(contractions), schedule.warpgroups
    if isinstance(schedule, WgmmaDense):
        stage = (schedule.block_m + schedule.block_n * count) * 2 * CHUNK
        stage += _scales(schedule, contractions) * 4
        staging = warpgroups * (STAGING_PITCH if schedule.swapped else 64) * schedule.staged * 4
        return schedule.stages * (stage + 16) + staging
    first = contractions[0]
    format = formats.find(first.format or "")
    tiles, depth = warpgroups * schedule.blocks_of_rows * 4, schedule.block_k
    group = first.group_size or depth
    # K's of a stage that are certainly of one group, and the scales of a stage: one for each row of a tile and group.
    in_one_group = next(k for k in (depth, CHUNK, CHUNK // 2, CHUNK // 4) if group % k == 0)
    scales = tiles * (depth // in_one_group) * 16
    scale_bytes = scales * format.scale_dtype.itemsize if first.group_size is not None else 0
    zero_bytes = scales * format.zero_dtype.itemsize if format.zero_point else 0
    stage = (schedule.block_m * item_size(first.dtype) + tiles * 2 * format.bits) * depth + scale_bytes + zero_bytes
    few = warpgroups * schedule.resident <= 2
    tokens = 16 if schedule.block_m % 32 else (64 if few and schedule.block_m % 64 == 0 else 32) // count
    staging = warpgroups * count * tokens * STAGING_PITCH * 4
    return schedule.stages * (stage + 16) + staging


def _scales(schedule: WgmmaDense, contractions: Sequence[Contraction]) -> int:
    """Counts the scales of a stage, as the header's ``Shape::stage_scales``: where blocks have scales, those of the
    rows of a tile, and of each slice of its columns."""
    if not contractions[0].blocks:
        return 0
    width = schedule.columns // schedule.across
    pieces = slices(width) * schedule.across * len(contractions)
    return schedule.height + -(-pieces // 4) * 4


def weights_of(
    contractions: Sequence[Contraction],
    columns: Sequence[int],
    length: int,
    chip: Chip,
    transposed: bool = False,
    x_transposed: bool = False,
) -> Weights:
    """Returns the facts on which the choice of tiles depends, for regions of these columns that have these contractions
    each."""
    first, sizes = contractions[0], (tuple(columns), length, len(contractions), chip)
    if first.format is None:
        item = item_size(first.dtype)
        promoted = item == 1 and (_is_promoted(first) or bool(first.blocks))
        return Weights(
            *sizes,
            8 * item,
            transposed=transposed,
            x_transposed=x_transposed,
            item=item,
            promoted=promoted,
            in_blocks=bool(first.blocks),
        )
    format = formats.find(first.format)
    few_registers = format.scale_dtype == torch.bfloat16 or first.group_size is None
    if not format.tiled:  # in bit planes: scales of a byte are numbers of bfloat16 too, and tables take registers
        few_registers = format.scale in ("bfloat16", "e8m0") and not isinstance(format.code, formats.Table)
    light = first.dtype == "bfloat16" and format.bits <= 4 and few_registers and not format.zero_point
    return Weights(*sizes, format.bits, light, item=item_size(first.dtype), planes=not format.tiled)


def _is_promoted(contraction: Contraction) -> bool:
    return accumulator_dtype(contraction.dtype) in FLOATS and contraction.precision != "fast"


def entry_suffix(number: int) -> str:
    """Returns what follows the kernel's name in the name of the entry of tiling ``number``."""
    return f"_{number}" if number else ""


def for_launch(
    schedule: WgmmaSchedule, bodies: Sequence[Body], geometries: Sequence[GemmGeometry], chip: Chip
) -> WgmmaLaunch:
    """Returns the tiling that is estimated to be the fastest for one launch on ``chip``, and how many blocks share its
    K."""
    contractions, first = bodies[0].contractions, geometries[0]
    if first.grouping or not first.elements:
        return WgmmaLaunch(schedule.tilings[0], 0, schedule.tilings[0].cluster_k_splits)
    x, weight = contractions[0].activation, contractions[0].weight[0]
    crossed = [operand is not None and first.strides[operand][1] > 1 for operand in (weight, x)]  # stride along K
    weights = weights_of(contractions, [geometry.columns for geometry in geometries], first.length, chip, *crossed)
    estimates = [estimate(tiling, first.rows, weights, first.matrices) for tiling in schedule.tilings]
    number = min(range(len(estimates)), key=lambda index: estimates[index][1])
    tiling = schedule.tilings[number]
    # With multicast a cluster always has all its blocks.
    return WgmmaLaunch(tiling, number, tiling.cluster_k_splits if tiling.multicast > 1 else estimates[number][0])


def tensor_maps(
    bodies: Sequence[Body], layouts: Sequence[GemmLayout], geometries: Sequence[GemmGeometry], schedule: WgmmaTiling
) -> Iterator[MappedTensor]:
    """Yields the kernel's tensor maps in the order of its parameters: the activation, then the weights of each
    region."""
    first = bodies[0].contractions[0]
    assert first.activation is not None
    yield _activation(bodies[0], layouts[0], geometries[0], first.activation, schedule)
    for body, layout, geometry in zip(bodies, layouts, geometries, strict=True):
        for contraction in body.contractions:
            if isinstance(schedule, WgmmaQuantized):
                yield _codes(body, geometry, contraction, schedule)
            else:
                yield _dense(body, layout, geometry, contraction.weight[0], schedule)


def _activation(
    body: Body, layout: GemmLayout, geometry: GemmGeometry, index: int, schedule: WgmmaTiling
) -> MappedTensor:
    if layout.operands[index] == "outer":
        assert isinstance(schedule, WgmmaDense)
        box = (_transposed_depth(schedule.block_m, schedule.shares[0]), CHUNK)
        return _mapped(body, geometry, index, (geometry.length, geometry.rows), 1, box)
    # The box has no more rows than x. Rows outside a matrix slow the copy engine down.
    shares = schedule.shares[0] if isinstance(schedule, WgmmaDense) else 1
    rows = _piece(schedule.block_m, shares)
    rows = rows if isinstance(schedule, WgmmaDense) and schedule.swapped else min(rows, geometry.rows)
    if isinstance(schedule, WgmmaQuantized) and schedule.multicast > 1:  # a block's share
        rows = schedule.block_m // schedule.multicast
    depth = CHUNK_BYTES // item_size(body.operands[index].dtype)
    return _mapped(body, geometry, index, (geometry.rows, geometry.length), 0, (rows, depth))


def _piece(rows: int, shares: int) -> int:
    """Returns the rows that each of ``shares`` blocks copies of a tile: whole rows of the swizzle, which are eight."""
    return -(-rows // (8 * shares)) * 8


def _transposed_depth(columns: int, shares: int) -> int:
    """Returns the k's of a copy of a tile that lies along its columns and that ``shares`` blocks copy together, as
    ``transposed_depth`` of ``gemm_wgmma_dense_shape.cuh``."""
    return CHUNK * math.gcd(columns // CHUNK, shares) // shares


def _codes(body: Body, geometry: GemmGeometry, contraction: Contraction, schedule: WgmmaQuantized) -> MappedTensor:
    """Maps the codes as a matrix of 32-bit words with a row for each 16 rows of the weight, or of all matrices."""
    index = contraction.weight[0]
    bits = formats.find(contraction.format or "").bits
    tiles, count = -(-geometry.columns // 16), max(geometry.group_count, 1)
    words = geometry.touched[index].elements // (4 * tiles * count)
    if count > 1:
        tiles += (count - 1) * (geometry.strides[index][-1] // (4 * words))
    buffer = body.operands[index].buffer
    assert buffer is not None
    width = 32 * bits * schedule.span
    box = (schedule.block_n // 16, width if width <= MOST_BOX else width // schedule.span)
    return MappedTensor(buffer, geometry.offsets[index], "uint32", (tiles, words), (words, 1), box, 0)


def _dense(body: Body, layout: GemmLayout, geometry: GemmGeometry, index: int, schedule: WgmmaDense) -> MappedTensor:
    if layout.operands[index] == "k":
        rows = _piece(schedule.block_n, schedule.shares[1])
        box = (min(rows, geometry.columns) if schedule.swapped else rows, schedule.block_k)
        return _mapped(body, geometry, index, (geometry.columns, geometry.length), 0, box)
    box = (_transposed_depth(schedule.block_n, schedule.shares[1]), CHUNK)
    return _mapped(body, geometry, index, (geometry.length, geometry.columns), 1, box)


def _mapped(
    body: Body, geometry: GemmGeometry, index: int, shape: tuple[int, int], along: int, box: tuple[int, int]
) -> MappedTensor:
    """Makes the tensor map of operand ``index``, a matrix of these sizes and strides, or a batch of such matrices."""
    strides = geometry.strides[index]
    rank = BATCH_RANK if strides[2:] else 0
    sizes = geometry.batch or (geometry.group_count,) * (len(strides) - 2)
    batch = list(zip(sizes, strides[2:], strict=True))
    return mapped_tensor(body.operands[index], geometry.offsets[index], batch, rank, shape, strides[along], box)
