"""Chooses schedules of the kernel of sm_90a."""

from __future__ import annotations

from jitgen.device import Device
from jitgen.families.attention.backward.cuda import words_of
from jitgen.families.attention.backward.layout import Layout
from jitgen.families.attention.backward.wgmma import WIDTHS, WgmmaSchedule, left_operands, roles, tile_operands
from jitgen.families.attention.rule.layout import TileGeometry, results_of
from jitgen.families.attention.rule.wgmma import Mapped, with_most_stages
from jitgen.ir.body import Body

MOST_STAGES = 4
"""Tiles in shared memory at most: three and four were equally fast (H200, D 128)."""


def candidates(body: Body, layout: Layout, geometry: TileGeometry, device: Device) -> list[WgmmaSchedule]:
    """Returns the schedule for a kernel with this body."""
    role = roles(body, layout)
    tiles = sorted(role.products)
    depths = tuple(-(-max(geometry.depths[tiles.index(number)], 1) // 16) * 16 for number in role.products)
    results = results_of(body)
    columns = tuple(
        next(width for width in WIDTHS if geometry.widths[results.index(number)] <= width) for number in role.results
    )
    large = max(*depths, *columns)
    tile, overlap = _tile(large, len(role.results), role.early)
    block_words, tile_words = words_of(body, layout, role)

    def is_copied(index: int, rows: int) -> bool:
        return device.has_tensor_maps and Mapped(index, rows).is_copied(body, layout, geometry)

    first = WgmmaSchedule(
        warpgroups=2,
        tile=tile,
        stages=1,
        depths=depths,
        columns=columns,
        slots=role.slots,
        tile_words=tile_words,
        block_words=block_words,
        block_copied=tuple(is_copied(index, geometry.rows) for index in left_operands(body, role)),
        tile_copied=tuple(index is None or is_copied(index, geometry.keys) for index in tile_operands(body, role)),
        overlap=overlap,
        wide=layout.wide,
    )
    return [with_most_stages(first, range(1, MOST_STAGES + 1))]


def _tile(large: int, results: int, early: bool) -> tuple[int, bool]:
    """Returns the streamed rows of a tile, and whether the last product of a tile runs on, by what fits registers: two
    products of a tile, their 16-bit forms, and sums."""
    if results == 1:
        return 128, large <= 64
    if not early:
        return 32, False
    return (64, False) if large > 64 else (64, True)
