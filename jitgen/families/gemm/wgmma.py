"""The wgmma mainloops of sm_90a: what their configurations are, what they ask of memory, and their tensor maps.

``templates/cuda/include/jitgen/gemm_wgmma_quantized.cuh`` and ``gemm_wgmma_dense.cuh`` say how they are called; this is
that in Python, for the schedule (shared memory), the launch (tensor maps) and the template (configurations).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jitgen.families.gemm.layout import GemmGeometry, GemmLayout
from jitgen.families.gemm.schedule import GemmSchedule
from jitgen.families.layout import item_size
from jitgen.ir.body import Body, Contraction
from jitgen.quant import formats

QUANTIZED, DENSE = "wgmma_quantized", "wgmma_dense"
PATHS = (QUANTIZED, DENSE)
WARPGROUP = 4
"""Warps that issue one wgmma."""
CHUNK = 64
"""Of K: a stage's."""
STAGING_PITCH = 68
EPILOGUE_WIDTH = 8
"""Columns of an epilogue call."""


@dataclass(frozen=True)
class MappedTensor:
    """A matrix that a kernel copies by a tensor map; the fields are those of ``runtime/tensor_map.TensorMap``."""

    buffer: int
    offset: int
    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int


def consumers(schedule: GemmSchedule) -> int:
    """Warpgroups that compute; one more copies."""
    return schedule.warps // WARPGROUP - 1


def blocks_of_rows(schedule: GemmSchedule, contractions: int) -> int:
    """Of 64 weight rows, for one consumer of the quantised mainloop, over all contractions."""
    return schedule.block_n * contractions // (64 * consumers(schedule))


def size(schedule: GemmSchedule) -> int:
    """The n of the mainloop's wgmma."""
    if schedule.path == QUANTIZED:
        return schedule.block_m
    return schedule.block_n * (schedule.block_m // 64) // consumers(schedule)


def is_trimmed(schedule: GemmSchedule) -> bool:
    """Whether x's box has no more rows than x: the copy engine is slow with rows that are outside."""
    return schedule.path == DENSE or schedule.multicast == 1


def shared_bytes(schedule: GemmSchedule, contractions: Sequence[Contraction]) -> int:
    """Dynamic shared memory of a block, as the mainloop's Shape has it."""
    count, warpgroups = len(contractions), consumers(schedule)
    if schedule.path == DENSE:
        stage = (schedule.block_m + schedule.block_n * count) * 2 * CHUNK
        staging = warpgroups * 4 * count * 16 * (32 // count + 8) * 4
        return schedule.stages * (stage + 16) + staging
    part = contractions[0]
    format = formats.find(part.format or "")
    tiles, depth = warpgroups * blocks_of_rows(schedule, count) * 4, schedule.block_k
    group = part.group_size or depth
    together = depth if group % depth == 0 else CHUNK if group % CHUNK == 0 else CHUNK // 2
    scales = tiles * (depth // together) * 16
    side = scales * format.scale_dtype.itemsize if part.group_size is not None else 0
    side += scales if format.zero_point else 0
    stage = (schedule.block_m * 2 + tiles * 2 * format.bits) * depth + side
    tokens = 16 if schedule.block_m == 16 else 32 // count
    staging = warpgroups * count * tokens * STAGING_PITCH * 4 if schedule.split == 1 else 0
    return schedule.stages * (stage + 16) + staging


def tensor_maps(
    bodies: Sequence[Body], layouts: Sequence[GemmLayout], geometries: Sequence[GemmGeometry], schedule: GemmSchedule
) -> Iterator[MappedTensor]:
    """The kernel's tensor maps in order: the activation's, then each region's weights'."""
    first = bodies[0].contractions[0]
    assert first.activation is not None
    yield _activation(bodies[0], geometries[0], first.activation, schedule)
    for body, layout, geometry in zip(bodies, layouts, geometries, strict=True):
        for contraction in body.contractions:
            if schedule.path == QUANTIZED:
                yield _codes(body, geometry, contraction, schedule)
            else:
                yield _dense(body, layout, geometry, contraction.weight[0], schedule)


def _activation(body: Body, geometry: GemmGeometry, index: int, schedule: GemmSchedule) -> MappedTensor:
    sizes = (geometry.rows, geometry.length)
    share = schedule.multicast if schedule.path == QUANTIZED else 1
    rows = min(schedule.block_m, geometry.rows) if is_trimmed(schedule) else schedule.block_m // share
    return _mapped(body, geometry, index, sizes, (geometry.strides[index][0], 1), (rows, CHUNK))


def _codes(body: Body, geometry: GemmGeometry, contraction: Contraction, schedule: GemmSchedule) -> MappedTensor:
    """The codes as 32-bit words: a row for each 16 rows of the weight."""
    index = contraction.weight[0]
    bits = formats.find(contraction.format or "").bits
    tiles = -(-geometry.columns // 16)
    words = geometry.extents[index] // (4 * tiles)
    buffer = body.operands[index].buffer
    assert buffer is not None
    box = (schedule.block_n // 16, 32 * bits * (schedule.block_k // CHUNK))
    return MappedTensor(buffer, geometry.offsets[index], "uint32", (tiles, words), (words, 1), box, 0)


def _dense(body: Body, layout: GemmLayout, geometry: GemmGeometry, index: int, schedule: GemmSchedule) -> MappedTensor:
    columns, length = geometry.strides[index]
    if layout.operands[index] == "k":
        sizes, box = (geometry.columns, geometry.length), (schedule.block_n // schedule.multicast, CHUNK)
        return _mapped(body, geometry, index, sizes, (columns, 1), box)
    return _mapped(body, geometry, index, (geometry.length, geometry.columns), (length, 1), (CHUNK, CHUNK))


def _mapped(
    body: Body,
    geometry: GemmGeometry,
    index: int,
    sizes: tuple[int, int],
    strides: tuple[int, int],
    box: tuple[int, int],
) -> MappedTensor:
    operand = body.operands[index]
    assert operand.buffer is not None
    offset = geometry.offsets[index] * item_size(operand.dtype)
    return MappedTensor(operand.buffer, offset, operand.dtype, sizes, strides, box, 2 * CHUNK)
