"""Launches small enough to run all of a kernel's threads on, each with some tiles and every stage several times."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from backward_kernels import Backward
from ptx_threads import Launch
from wgmma_kernels import Dense, Quantized

from jitgen.families import registry
from jitgen.kernel.entry import SIZES
from jitgen.spec import KernelSource

TILES, CHUNKS = 5, 5
"""Tiles of a cluster, and chunks of K that each block has of each: three times the stages of any configuration."""
BYTES = 128
"""Of a row of 64 elements of 16 bits."""


def of_product(config: Dense | Quantized, beyond: bool = False) -> Launch:
    """A kernel of ``wgmma_kernels.py``: one cluster has all tiles of the product.

    Args:
        beyond: whether all tiles of the last cluster but its first are outside of the result.
    """
    quantized = isinstance(config, Quantized)
    splits = max(config.most_splits, config.ranges)
    if isinstance(config, Quantized):
        rows, columns = config.tokens * TILES, config.columns * config.multicast
    else:
        of_x, of_weights = config.shares
        rows, columns = (config.columns, config.rows) if config.swapped else (config.rows, config.columns)
        rows, columns = rows * of_weights * TILES, columns * of_x
        if beyond:
            rows, columns = rows - rows // (of_weights * TILES) * (of_weights - 1), columns // of_x
    m, n, k = rows - 3, columns - 5, 64 * getattr(config, "span", 1) * CHUNKS * splits - 8
    weights = config.regions * config.contractions
    if isinstance(config, Quantized):
        tile, own = config.tokens // config.multicast, math.prod(config.box) * 4
    else:
        rows = min(n, config.weight_box) if config.swapped and config.trimmed else config.weight_box
        of_x, of_weight = config.depths
        tile, own = of_x if config.x_transposed else config.x_box, BYTES * (of_weight if config.transposed else rows)
    copies = {0: tile * BYTES} | dict.fromkeys(range(1, 1 + weights), own)
    first = 1 + weights + (3 * weights if quantized else 0) + config.regions
    values = dict(enumerate((*config.regions * [n], m, k), start=first))
    return Launch(config.threads, config.cluster, (config.cluster, 1, 1), values, copies)


def of_backward(config: Backward) -> Launch:
    """A kernel of ``backward_kernels.py``: one block has all rows of two heads."""
    batch, heads, shared, rows, keys = 1, 1, 2, 3 * config.block - 9, 5 * config.tile - 9
    values = dict(enumerate((batch, heads, shared, rows, keys, config.depth, config.width), start=8))
    block, tile = config.block * BYTES, config.tile * BYTES
    return Launch(config.threads, 1, (1, 1, 1), values, {0: block, 1: block, 2: tile, 3: tile})


def of_lowered(
    lowered: Any, number: int, schedule: Any = None, *, persistent: bool = True
) -> tuple[KernelSource, Launch]:
    """Kernel ``number`` of a lowered call, by its own schedule or another.

    Args:
        persistent: whether one cluster has all of the work of persistent blocks; else a cluster has one piece of it.
    """
    family, kernel, layouts, geometries, own = lowered._kernel(number)
    chosen, device = schedule or own, lowered.route.device
    source, _ = family.render(kernel, layouts, chosen, device, lowered.route.compiler)
    settled = family.settle(kernel, geometries, chosen, device)
    shape = family.launch(kernel, layouts, geometries, settled, device)
    arguments = family.arguments(kernel, layouts, geometries, settled, device)
    copies = {at: math.prod(each.box) * getattr(torch, each.dtype).itemsize for at, each in enumerate(arguments.maps)}
    packing = arguments.packing("")
    params = sum(
        (value & (1 << 8 * SIZES[code]) - 1) << 8 * offset
        for code, value, offset in zip(packing.codes, packing.values, packing.layout[0], strict=True)
        if value is not None
    )
    grid = (shape.cluster, 1, 1) if shape.persistence and persistent else shape.grid
    return replace(source, name=source.name + shape.entry), Launch(
        math.prod(shape.block), shape.cluster, grid, {0: params}, copies
    )


def candidates(lowered: Any, number: int) -> list[Any]:
    """Every schedule that kernel ``number`` of a lowered call may have."""
    _, kernel, layouts, geometries, _ = lowered._kernel(number)
    family, device = registry.family_of(kernel), lowered.route.device
    return list(family.candidates(family.problem(kernel, layouts, geometries, device), device))
