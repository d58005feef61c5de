"""Builds the context of ``templates/gemm/gemm.cu.j2``: each region's epilogue, weights and mainloop.

The mainloops are static headers, ``templates/gemm/include/jitgen/gemm_*.cuh``. Generated are a functor for the epilogue
of each region, the types that describe its weights, and an entry that distributes blocks among the regions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jitgen.codegen.cuda import CUDA
from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Built
from jitgen.families.gemm import cutlass, stream_tiles, wgmma
from jitgen.families.gemm.codes import codes_type
from jitgen.families.gemm.context import BlockSteps, ContractionContext, GemmContext, GemmOperand, GemmRegion
from jitgen.families.gemm.cuda_operands import base_of, matrices, members, reads, vector
from jitgen.families.gemm.layout import BY_ROWS, GemmLayout
from jitgen.families.gemm.mainloops import (
    BlockMainloop,
    BlockSchedule,
    CutlassTile,
    Dense,
    GemmSchedule,
    MmaBytes,
    MmaCodes,
    MmaMainloop,
    MmaQuantized,
    MmaRows,
    Stream,
    StreamOuter,
    WgmmaBytes,
    WgmmaDense,
    WgmmaMainloop,
    WgmmaQuantized,
    WgmmaSchedule,
    WgmmaTiling,
    WgmmaTilings,
)
from jitgen.ir.body import Contraction, accumulator_dtype
from jitgen.ir.ops import FLOATS
from jitgen.ir.program import Kernel
from jitgen.kernel.operands import ACCESS_BYTES, WARP, item_size
from jitgen.kernel.printed_entry import map_names
from jitgen.quant import formats
from jitgen.quant.codes import CODES
from jitgen.schedule.declared import Member

SUMS_TOKENS = 16
"""Tokens of a tile up to which the bias of 4-bit codes is removed through the sum of x. That costs one more product for
each eight tokens, instead of four instructions for each eight codes."""
SIMT_INTEGERS = 4
"""Integers that one access of the ``simt`` mainloop reads at most: a divisor of every tile's extent."""


def build(
    kernel: Kernel, layouts: Sequence[GemmLayout], schedule: GemmSchedule, products: GemmContext, dialect: Dialect
) -> Built:
    """Builds template context and source options; see ``kernel/render.py``."""
    if isinstance(schedule, WgmmaMainloop | WgmmaTilings):
        return _mapped(kernel, layouts, schedule, products)
    if isinstance(schedule, CutlassTile):
        return cutlass.build(layouts, schedule, products, kernel.bodies[0])
    assert isinstance(schedule, BlockMainloop)
    first = products.regions[0].contractions[0]
    regions = [
        _region(region, layout, schedule.width)
        | dict(zip(("types", "config", "weight_type"), _config(region, layout, schedule), strict=True))
        | {"weights": [_weight(product, region, schedule.path) for product in region.contractions]}
        for region, layout in zip(products.regions, layouts, strict=True)
    ]
    configs = [(region["types"], region["config"]) for region in regions]
    for region, config in zip(regions, configs, strict=True):
        region["config_of"] = configs.index(config)  # regions share a struct where they can
    pair = schedule.pair if isinstance(schedule, MmaQuantized) else None
    mainloop = _MAINLOOPS[schedule.path]
    planes = first.contraction.format is not None and not formats.find(first.contraction.format).tiled
    grouped = first.contraction.groups is not None
    return {
        "maps": [],
        "index": "int64_t" if schedule.wide else "int32_t",
        "length": "params.k / 2" if isinstance(schedule, MmaMainloop) and schedule.packed > 1 else "params.k",
        "runs": regions[0]["run"] if regions[0]["run"] > 1 else 0,
        "mainloop": (*mainloop.headers, *((PLANES_HEADER,) if planes else ()), *((GROUPS_HEADER,) if grouped else ())),
        "prologue": None if first.x is not None else _prologue(first, layouts[0], dialect),
        "regions": regions,
        "tiles": [
            {
                "schedule": tile,
                "bounds": _bounds(tile, first.contraction),
                "cluster_attribute": _cluster_attribute(tile),
                "suffix": suffix,
                "configs": members,
            }
            for tile, suffix, members in (
                (schedule, "", []),
                *([(pair, stream_tiles.ENTRY_OF_A_PAIR, _configs(products, layouts, pair))] if pair else []),
            )
        ],
        "alike": all((r["config_of"], r["weight_type"]) == (0, regions[0]["weight_type"]) for r in regions),
        "epilogues": [f"epilogue{region['index']}" for region in regions],
        "function": f"{mainloop.name}_gemm",
        "shared_type": mainloop.shared.format(scalar=dialect.types[accumulator_dtype(first.contraction.dtype)]),
        "x": _activation(first, schedule.path),
        "matrices": " * ".join(f"int64_t({size})" for size in products.batch),
        "matrix_lines": _matrix_lines(products),
        "grouping": products.grouping,
        "settled": first.contraction.settled,
        "ends": _ends(products),
        "groups": " * ".join(products.batch),
        "group_lines": _group_lines(products),
        "tile": "int(found.tile)" if products.grouping in BY_ROWS else "block % m_blocks",
    }, {}


def _matrix_lines(products: GemmContext) -> list[str]:
    """Writes the statements that locate a block's matrices of the batch."""
    lines = [f"const int64_t {name} = {expression};" for name, expression in products.indices("matrix")]
    for operand in (operand for region in products.regions for operand in region.operands if not products.grouping):
        if operand.batch_strides:
            kind, name = base_of(operand)
            moved = f"{operand.source} + {_steps(operand)}"
            lines.append(f"{kind} const {name} = {moved if operand.pointer else f'Index({moved})'};")
    return lines


def _ends(products: GemmContext) -> str:
    """Prints the address of what divides rows, or K, among groups, and its stride; empty where nothing does."""
    groups = products.groups
    return f"{groups.pointer}, {groups.own[1]}" if groups is not None else ""


def _group_lines(products: GemmContext) -> list[str]:
    """Writes the statements that locate what a block's group reads and writes."""
    lines = []
    for operand, step in products.group_steps if products.grouping else ():
        kind, name = base_of(operand)
        moved = f"{operand.source} + {step}"
        lines.append(f"{kind} const {name} = {moved if operand.pointer else f'Index({moved})'};")
    return lines


def _steps(operand: GemmOperand) -> str:
    """Prints the offset of the matrix at the indices ``z0`` and so on of the batch."""
    return " + ".join(f"z{dim} * {stride}" for dim, stride in enumerate(operand.batch_strides))


@dataclass(frozen=True)
class _Mainloop:
    """Describes a mainloop.

    Attributes:
        name: its function is ``jitgen::<name>_gemm``.
        shared: the type whose ``bytes`` is the shared memory of a block.
        headers: the files that define it.
    """

    name: str
    shared: str
    headers: tuple[str, ...]


GROUPS_HEADER = "jitgen/gemm_groups.cuh"
"""The header of how a block finds its group."""
PLANES_HEADER = "jitgen/gemm_planes.cuh"
"""The header of weights whose codes are in bit planes; it follows that of the mainloop."""
WGMMA_PLANES_HEADER = "jitgen/gemm_wgmma_planes.cuh"
"""The same for the wgmma mainloop."""
WGMMA_CODES_HEADER = "jitgen/gemm_wgmma_codes.cuh"
"""The header of 4-bit codes that meet an activation of codes."""
WGMMA_BYTES_HEADER = "jitgen/wgmma_bytes.cuh"
"""The header of wgmma for operands of one byte."""

_MAINLOOPS = {
    "mma": _Mainloop("mma", "MmaShared<Config0>", ("jitgen/gemm_quant.cuh", "jitgen/gemm_mma.cuh")),
    "codes": _Mainloop("mma", "MmaShared<Config0>", ("jitgen/gemm_mma_codes.cuh", "jitgen/gemm_mma.cuh")),
    "rows": _Mainloop("mma", "MmaShared<Config0>", ("jitgen/gemm_rows.cuh", "jitgen/gemm_mma.cuh")),
    "bytes": _Mainloop("mma", "MmaShared<Config0>", ("jitgen/gemm_rows.cuh", "jitgen/gemm_mma.cuh")),
    "columns": _Mainloop("mma", "MmaShared<Config0>", ("jitgen/gemm_rows.cuh", "jitgen/gemm_mma.cuh")),
    "dense": _Mainloop("dense", "DenseShared<Config0>", ("jitgen/gemm_dense.cuh",)),
    "stream": _Mainloop("stream", "StreamShared<Config0>", ("jitgen/gemm_stream.cuh",)),
    "stream_outer": _Mainloop("stream", "StreamShared<Config0>", ("jitgen/gemm_stream.cuh",)),
    "simt": _Mainloop("simt", "SimtShared<Config0, {scalar}>", ("jitgen/gemm_simt.cuh",)),
}


def _bounds(schedule: BlockSchedule, contraction: Contraction) -> str:
    """Prints the arguments of ``__launch_bounds__``."""
    threads, resident = schedule.warps * WARP, _blocks_by_registers(schedule, contraction)
    return f"{threads}, {resident}" if resident else str(threads)


def _cluster_attribute(schedule: BlockSchedule) -> str:
    splits = schedule.cluster_k_splits
    return f"__cluster_dims__({splits}, 1, 1) " if splits > 1 else ""


def _configs(products: GemmContext, layouts: Sequence[GemmLayout], schedule: BlockSchedule) -> list[list[Member]]:
    """Returns the members of each region's Config for other tiles than the kernel's first."""
    return [_config(*pair, schedule)[1] for pair in zip(products.regions, layouts, strict=True)]


def _blocks_by_registers(schedule: BlockSchedule, contraction: Contraction) -> int:
    """Returns how many blocks the registers of a multiprocessor should hold, or 0: fewer than the schedule says if
    weights need more registers to decode than 4-bit codes for bfloat16 do."""
    if not isinstance(schedule, MmaQuantized):
        return 0
    if stream_tiles.is_plain(contraction) or stream_tiles.folds_scales(contraction):
        return schedule.blocks_by_registers
    return min(schedule.blocks_by_registers, 3 if schedule.tokens == 1 and schedule.row_tiles == 1 else 1)


# -------------------------------------------------------------------------------------------------------- activation


def _activation(product: ContractionContext, path: str) -> str:
    """Returns the mainloop's argument for x: the ``Activation`` functor of a prologue, or a type that describes the
    tensor."""
    if product.x is None:
        return "jitgen::SimtComputed<Activation>{activation}" if path == "simt" else "activation"
    x = product.x
    if path in ("bytes", "codes"):
        pair = _bytes(product, "BytePair") if path == "bytes" else _times_codes(product, "BytePair")
        pointer = f"reinterpret_cast<const {pair}*>({x.pointer})"
        return f"jitgen::StoredActivation<{_list(pair, x.unit // 2)}>{{{pointer}, {x.own[0]} / 2, 1}}"
    vector = x.unit if path == "dense" or x.kind in ("k", "repeated") else 1
    type_of_x = _simt_dense([x]) if path == "simt" else f"jitgen::StoredActivation<{_list(x.storage, vector)}>"
    return f"{type_of_x}{{{', '.join([str(x.pointer), *x.own])}}}"


def _prologue(product: ContractionContext, layout: GemmLayout, dialect: Dialect) -> dict[str, Any]:
    """Describes the functor that computes x, 16 bytes of it in one call."""
    width = ACCESS_BYTES // item_size(product.contraction.dtype)
    fields, arguments = members(product.x_loads)
    return {
        **reads(product.x_loads, width),
        "fields": fields,
        "arguments": arguments,
        "element": dialect.storage_types[product.contraction.dtype],
        "vector": width,
        "whole": layout.length_unit >= width,
        "lines": product.x_lines,
        "value": product.x_value,
    }


def _simt_dense(operands: Sequence[GemmOperand]) -> str:
    """Returns the type of dense operands of the ``simt`` mainloop. All of them have one type: where their layouts
    differ, every one is read element by element. Integers and 8-bit floats are read at most ``SIMT_INTEGERS`` at a
    time."""
    kinds = {operand.kind for operand in operands}
    vector = min(operand.unit for operand in operands) if len(kinds) == 1 else 1
    storage, scalar = operands[0].storage, CUDA.types[accumulator_dtype(operands[0].dtype)]
    if accumulator_dtype(operands[0].dtype) in FLOATS and item_size(operands[0].dtype) > 1:
        return f"jitgen::SimtDense<{_list(storage, kinds != {'outer'}, vector)}>"
    return f"jitgen::SimtDense<{_list(storage, kinds != {'outer'}, min(vector, SIMT_INTEGERS), scalar)}>"


# ------------------------------------------------------------------------------------------------------------- wgmma


def _mapped(kernel: Kernel, layouts: Sequence[GemmLayout], schedule: WgmmaSchedule, products: GemmContext) -> Built:
    """Builds the context of a mainloop that copies by tensor maps."""
    first = products.regions[0].contractions[0]
    assert first.x is not None
    count = len(products.regions[0].contractions)
    quantised = isinstance(schedule.tilings[0], WgmmaQuantized)
    planes = quantised and not formats.find(first.contraction.format or "").tiled
    of_bytes = isinstance(schedule.tilings[0], WgmmaBytes)
    copied = [first.x, *(product.weight[0] for region in products.regions for product in region.contractions)]
    maps_of = map_names(operand.source for operand in copied)
    names = [f"params.{name}" for name in maps_of]
    regions = [
        _mapped_region(region, layout, names[1 + count * region.index :][:count], schedule, products)
        for region, layout in zip(products.regions, layouts, strict=True)
    ]
    fast = "FastBytes" if first.contraction.precision == "fast" else "Bytes"
    return {
        "map_names": maps_of,
        "runs": 0,
        "index": "int64_t" if schedule.wide else "int32_t",
        "maps": names,
        "mainloop": (
            f"jitgen/gemm_{schedule.path}.cuh",
            *((WGMMA_PLANES_HEADER,) if planes else ()),
            *((WGMMA_BYTES_HEADER,) if of_bytes else ()),
            *((WGMMA_CODES_HEADER,) if quantised and item_size(first.x.dtype) == 1 else ()),
        ),
        "prologue": None,
        "tilings": [
            {
                "suffix": wgmma.entry_suffix(number),
                "schedule": tiling,
                "config": _mapped_config(tiling, products),
                "cluster_attribute": f"__cluster_dims__({tiling.cluster}, 1, 1) " if tiling.cluster > 1 else "",
            }
            for number, tiling in enumerate(schedule.tilings)
        ],
        "types": [] if quantised else [("Element", _bytes(first, fast) if of_bytes else first.x.storage)],
        "weight_type": _quantised(first, _times_codes(first)) if quantised else "",
        "shape_type": "jitgen::QuantizedShape" if quantised else "jitgen::DenseShape",
        "defaults": schedule.tilings[0].default_struct,
        "region_type": f"jitgen::QuantizedRegion<Weight, {count}>" if quantised else f"jitgen::DenseRegion<{count}>",
        "function": f"gemm_{schedule.path}",
        "regions": regions,
        "alike": True,
        "epilogues": [f"epilogue{region['index']}" for region in regions],
        "batch": _batch(products),
        "batch_type": _batch_type(products),
        "block_scales": _block_scales(products.regions[0].contractions, products),
    }, {}


def _mapped_region(
    region: GemmRegion, layout: GemmLayout, maps: Sequence[str], schedule: WgmmaSchedule, products: GemmContext
) -> dict[str, Any]:
    """Describes a region whose weights are copied by the tensor ``maps``; see ``_region``."""
    values = [f"{{{', '.join(f'&{name}' for name in maps)}}}", f"int({region.columns})"]
    if isinstance(schedule.tilings[0], WgmmaQuantized):
        weights = [f"Weight{_weight(_of_all(product), region, schedule.path)}" for product in region.contractions]
        values = [f"{{{', '.join(weights)}}}", *values]
    described = _region(region, layout, wgmma.EPILOGUE_WIDTH, is_moved=True)
    described["prefetched"] = matrices(region.loads, wgmma.EPILOGUE_WIDTH)
    if products.batch and not products.grouping:
        described["matrix_lines"] = _epilogue_moves(region, products)
    elif scaled := [load for load in region.loads if load.batch_strides]:
        described["matrix_lines"] = [
            f"moved.{base_of(load)[1]} += matrix * {load.batch_strides[0]};" for load in scaled
        ]
    return described | {"initializer": f"{{{', '.join(values)}}}"}


def _of_all(product: ContractionContext) -> ContractionContext:
    """Returns ``product`` with the weights of all groups, where the mainloop itself goes to those of one."""
    return replace(product, weight=tuple(replace(operand, pointer=operand.source) for operand in product.weight))


def _bytes(product: ContractionContext, name: str = "Bytes") -> str:
    """Returns the Element of a product whose operands are of one byte."""
    assert product.x is not None
    return f"jitgen::{name}<{product.x.storage}, {product.weight[0].storage}>"


def _times_codes(product: ContractionContext, name: str = "Bytes") -> str:
    """Returns the Element of a quantised weight's product: the type of x, or a pair of codes."""
    assert product.x is not None
    storage = product.x.storage
    return storage if item_size(product.x.dtype) > 1 else f"jitgen::{name}<{storage}, {storage}>"


def _block_scales(products_of_region: Sequence[ContractionContext], products: GemmContext) -> str:
    """Prints the mainloop's last arguments, what follows the epilogue: one product, unless it is a batch, and its
    ``BlockScales``; empty without scales of blocks."""
    first, *others = products_of_region
    blocks = first.contraction.blocks
    if not blocks:
        return ""
    of_both = dict(zip(blocks, first.weight[1:], strict=True))
    x = of_both.get("x")
    values = [x.source, *x.own] if x is not None else ["nullptr", "0", "0"]
    for product in products_of_region:
        if "weight" not in of_both:
            values += ["nullptr", "0", "0", *(["0"] if products.grouping or others else [])]
            continue
        weight = product.weight[1]
        values += [weight.source, *weight.own]
        values += weight.batch_strides if products.grouping else ["0"] if others else []
    flags = ["x" in of_both, "weight" in of_both]
    many = [len(products_of_region)] if others else []
    if not products.grouping:
        arguments = _list(*flags, *([False, *many] if many else []))
        return f", jitgen::OneMatrix(), jitgen::BlockScales<{arguments}>{{{', '.join(values)}}}"
    values.append(f"int({products.name('group_count')})")
    return f", jitgen::BlockScales<{_list(*flags, True, *many)}>{{{', '.join(values)}}}"


def _batch_type(products: GemmContext) -> str:
    """Prints the type that describes a batch, or groups of rows, after the number of contractions."""
    if products.groups is None:
        return "MatrixBatch<{}>"
    scaled = any(load.batch_strides for region in products.regions for load in region.loads)
    kind = "RowIds" if products.grouping == "ids" else "RowGroups"
    return f"{kind}<{{}}, {products.groups.storage}{', true' if scaled else ''}>"


def _batch(products: GemmContext) -> str:
    """Prints the initializer of the mainloop's ``MatrixBatch``, or ``RowGroups``; empty without a batch or groups."""
    if products.grouping:
        count = f"int({products.name('group_count')})"
        of_weights = ", ".join(f"{{0, {_group_walk(product)}}}" for product in products.regions[0].contractions)
        return f"{{{_ends(products)}, {count}, {count} + 1, {{{of_weights}}}}}"
    if not products.batch:
        return ""
    (region,) = products.regions
    sizes = [f"int({size})" for size in products.batch]
    assert region.contractions[0].x is not None
    operands = (region.contractions[0].x, *(product.weight[0] for product in region.contractions))
    walks = [_batch_walk(operand) for operand in operands]
    return f"{{{' * '.join(sizes)}, {sizes[-1]}, {walks[0]}, {{{', '.join(walks[1:])}}}}}"


def _group_walk(product: ContractionContext) -> str:
    """Prints the steps from the matrix of one group to the next: of a quantised weight the tiles of 16 rows, whose
    codes are chunks of 64 k's."""
    if product.contraction.format is None:
        return "1"
    codes = product.weight[0]
    return f"int({codes.batch_strides[0]} / (int64_t(Weight::chunks(int(params.k))) * (128 * Weight::bits)))"


def _batch_walk(operand: GemmOperand) -> str:
    """Prints the initializer of a ``MatrixWalk``: for the outer and the inner dimension of the batch, whether an
    operand has a matrix for each step. It has only one where its stride is 0."""
    steps = [f"{stride} != 0" for stride in operand.batch_strides]
    return f"{{{', '.join(['0'] * (wgmma.BATCH_RANK - len(steps)) + steps)}}}"


def _epilogue_moves(region: GemmRegion, products: GemmContext) -> list[str]:
    """Writes the statements that move the pointers of an epilogue to one matrix of the batch."""
    moved = [operand for operand in (*region.loads, *region.stores) if operand.batch_strides]
    lines = [f"const int64_t {name} = {expression};" for name, expression in products.indices("matrix")]
    lines += [f"moved.{base_of(operand)[1]} += {_steps(operand)};" for operand in moved]
    return lines if moved else []


def _mapped_config(schedule: WgmmaTiling, products: GemmContext) -> list[Member]:
    """Returns the members of the mainloop's Config."""
    shares_x = isinstance(schedule, WgmmaQuantized) and schedule.multicast > 1
    in_pairs = _in_pairs(schedule, products)
    facts: dict[str, bool | int] = {"trimmed": not shares_x, "regions": len(products.regions), "in_pairs": in_pairs}
    if isinstance(schedule, WgmmaDense):
        first = products.regions[0].contractions[0]
        assert first.x is not None
        facts |= {"transposed": first.weight[0].kind != "k", "x_transposed": first.x.kind != "k"}
        facts |= {"contractions": len(products.regions[0].contractions)}
        stored = [item_size(store.dtype) for region in products.regions for store in region.stores]
        facts |= {"run": 4 if set(stored) == {4} and not schedule.swapped else wgmma.EPILOGUE_WIDTH}
        of_bytes = isinstance(schedule, WgmmaBytes)
        reads = any(operand.kind != "scalar" for operand in products.regions[0].loads)
        facts |= {"scaled": bool(first.contraction.blocks), "at_once": in_pairs and reads and of_bytes}
    return schedule.members(**facts)


def _in_pairs(schedule: WgmmaTiling, products: GemmContext) -> bool:
    """Returns whether an epilogue computes its results as the sums lie in registers, two columns of a row or two rows
    of a column at a time: it has one result, of 16 bits, and reads no matrix, which would be read in many pieces."""
    first, *others = products.regions
    if others or products.grouping:
        return False
    of_codes = isinstance(schedule, WgmmaQuantized) and first.contractions[0].contraction.dtype in CODES
    kinds = {operand.kind for operand in first.loads}
    stored = [(item_size(store.dtype), store.run, store.kind) for store in first.stores]
    one = len(first.contractions) == 1 or of_codes
    return one and stored == [(2, 1, "full")] and kinds <= {"row", "column", "scalar"}


# ----------------------------------------------------------------------------------------------------------- regions


def _region(region: GemmRegion, layout: GemmLayout, width: int, is_moved: bool = False) -> dict[str, Any]:
    """Describes a region's epilogue; one call computes ``width`` columns of a row. See ``members``."""
    fields, arguments = members((*region.loads, *region.stores), is_moved)
    return {
        "index": region.index,
        "title": region.title,
        "columns": region.columns,
        "fields": fields,
        "arguments": arguments,
        "contractions": len(region.contractions),
        "accumulator": region.contractions[0].type,
        "accumulators": [product.accumulator for product in region.contractions],
        "whole": layout.columns_unit >= width,
        "matrix_lines": [],
        "prefetched": [],
        **reads(region.loads, width),
        "lines": region.lines,
        "steps": region.steps and _block_steps(region.steps, width),
        "stores": [_store(operand, width) for operand in region.stores],
        "run": max(operand.run for operand in region.stores),
    }


def _store(operand: GemmOperand, width: int) -> dict[str, Any]:
    """Describes an operand that the epilogue writes; of runs of columns the largest."""
    described = vector(operand, width) | {"step": operand.own[1], "run": operand.run}
    if operand.run == 1:
        return described
    return described | {"address": f"{operand.pointer} + ({operand.position('m', f'n / {operand.run}')})"}


def _block_steps(steps: BlockSteps, width: int) -> dict[str, Any]:
    """Describes the epilogue of a region that is quantised in blocks."""
    return {
        "kind": steps.kind.capitalize(),
        "before": steps.before,
        "kept": [name for name, _ in steps.kept],
        "reduced": steps.reduced,
        "extremum": steps.extremum[0],
        "of_block": steps.of_block,
        "before_codes": steps.before_codes,
        "of_codes": steps.of_codes,
        "codes": vector(steps.codes, width) | {"step": steps.codes.own[1]},
        "scales": vector(steps.scales, 1) | {"address": _address_of_block(steps.scales)},
    }


def _address_of_block(scales: GemmOperand) -> str:
    return f"{scales.pointer} + ({scales.position('m', 'block')})"


Types = list[tuple[str, str]]
"""(name, type) of each type that a Config has."""


def _config(region: GemmRegion, layout: GemmLayout, schedule: BlockSchedule) -> tuple[Types, list[Member], str]:
    """Returns the types and the members of a region's Config, and the type of its weights."""
    first = region.contractions[0]
    dtype, name = first.contraction.dtype, first.contraction.format
    format = formats.find(name) if name is not None else None
    storage = first.x.storage if first.x is not None else CUDA.storage_types[dtype]
    if isinstance(schedule, MmaMainloop) and format is not None:
        sums = _biased(format, first.contraction.group_size) and dtype == "bfloat16" and schedule.tokens <= SUMS_TOKENS
        weight = _codes(first) if isinstance(schedule, MmaCodes) else _quantised(first, storage)
        return [], schedule.members(sums=sums), weight
    if isinstance(schedule, MmaMainloop):
        kind = "DenseRows" if isinstance(schedule, MmaRows) else "DenseColumns"
        of_bytes = isinstance(schedule, MmaBytes)
        element, whole = (_bytes(first, "BytePair"), 128) if of_bytes else (storage, 64)
        ahead = first.contraction.constant or first.contraction.settled  # weights are read while the kernel ahead runs
        is_constant = [True] if isinstance(schedule, MmaRows) and ahead else []
        weight = f"jitgen::{kind}<{_list(element, layout.length_unit % whole != 0, *is_constant)}>"
        return [], schedule.members(sums=False), weight
    if isinstance(schedule, Stream | StreamOuter):
        return [("Scalar", storage)], schedule.members(), f"jitgen::StreamWeight<{storage}>"
    if isinstance(schedule, Dense):
        # The mainloop takes one layout for all weights of a region: where they differ, none is taken to be contiguous.
        kinds = {product.weight[0].kind for product in region.contractions}
        unit = min(product.weight[0].unit for product in region.contractions)
        x, (w, vector) = first.x.kind if first.x else "k", (kinds.pop(), unit) if len(kinds) == 1 else ("strided", 1)
        members = schedule.members(x_along=_along(x), w_along=_along(w), w_vector=vector)
        return [], members, f"jitgen::DenseWeight<{first.weight[0].storage}>"
    if format is not None:
        kind = "SimtQuant" if format.tiled else "SimtPlanes"
        scalar = CUDA.types[accumulator_dtype(dtype)]
        return [], schedule.members(), f"jitgen::{kind}<{_list(_quantised(first, 'jitgen::bfloat16'), scalar)}>"
    return [], schedule.members(), _simt_dense([product.weight[0] for product in region.contractions])


def _biased(format: formats.Format, group_size: int | None) -> bool:
    """Returns whether codes may be decoded with a bias, which is removed through the sum of x: of a group of 32 at
    least."""
    if format.tiled:
        return format.bits == 4
    whole = isinstance(format.code, formats.Integer) and format.bits < 8
    return whole and (group_size is None or group_size % 32 == 0)


def _list(*values: Any) -> str:
    """Prints template arguments."""
    return ", ".join(str(value).lower() if isinstance(value, bool) else str(value) for value in values)


def _along(kind: str) -> str:
    return f"jitgen::Along::{ {'k': 'k', 'repeated': 'k', 'outer': 'outer'}.get(kind, 'neither') }"


def _quantised(product: ContractionContext, element: str) -> str:
    """Returns the type of a quantised weight, for an x of type ``element``."""
    format = formats.find(product.contraction.format or "")
    if not format.tiled:
        return _planes(product, format, element)
    values = (element, format.bits, format.zero_point, product.weight[1].storage, product.contraction.group_size or 0)
    return f"jitgen::QuantWeight<{_list(*values)}>"


def _codes(product: ContractionContext) -> str:
    """Returns the type of 4-bit codes that meet codes, in the mainloop of mma.sync."""
    format = formats.find(product.contraction.format or "")
    values = (format.zero_point, product.weight[1].storage, product.contraction.group_size or 0)
    return f"jitgen::CodeWeight<{_list(*values)}>"


def _weight(product: ContractionContext, region: GemmRegion, path: str) -> str:
    """Prints the initializer of a weight, from the kernel's parameters."""
    if product.contraction.format is None:
        (weight,) = product.weight
        if path == "bytes":
            pointer = f"reinterpret_cast<const {_bytes(product, 'BytePair')}*>({weight.pointer})"
            return f"{{{{{pointer}, {weight.own[0]} / 2, int({region.columns}), int(k)}}}}"
        if path in ("rows", "columns"):
            stride = weight.own[0 if path == "rows" else 1]
            return f"{{{{{weight.pointer}, {stride}, int({region.columns}), int(k)}}}}"
        return f"{{{', '.join([str(weight.pointer), *weight.own])}}}"
    format = formats.find(product.contraction.format)
    if not format.tiled:
        initializer = _planes_initializer(product, format)
        return f"{{{initializer}}}" if path == "simt" else initializer
    codes, scales, *zeros = (str(operand.pointer) for operand in product.weight)
    initializer = f"{{reinterpret_cast<const uint4*>({codes}), {scales}, {zeros[0] if zeros else 'nullptr'}}}"
    if path == "codes":
        return f"{{{initializer}, int(k)}}"
    return f"{{{initializer}}}" if path == "simt" else initializer


# -------------------------------------------------------------------------------------------------------- bit planes

_BYTE_SCALES = {"e8m0": "jitgen::E8m0", "e4m3": "jitgen::E4m3"}


def _planes(product: ContractionContext, format: formats.Format, element: str) -> str:
    """Returns the type of a quantised weight in bit planes (``gemm_planes.cuh``), for an x of type ``element``."""
    tensors = dict(zip(format.tensor_names, product.weight, strict=True))
    zero = tensors["zeros"].storage if format.zero_point else "jitgen::NoZero"
    scale = _BYTE_SCALES.get(format.scale, tensors["scales"].storage)
    group = product.contraction.group_size or 0
    kind = f"jitgen::{codes_type(format, cuda=True)}"
    return f"jitgen::PlaneWeight<{_list(element, format.bits, kind, zero, scale, group, format.tensor_scale)}>"


def _planes_initializer(product: ContractionContext, format: formats.Format) -> str:
    tensors = dict(zip(format.tensor_names, product.weight, strict=True))
    scales = str(tensors["scales"].pointer)
    if format.scale in _BYTE_SCALES:
        scales = f"reinterpret_cast<const {_BYTE_SCALES[format.scale]}*>({scales})"
    zeros = tensors["zeros"].pointer if format.zero_point else "nullptr"
    factors = tensors["tensor_scale"].pointer if format.tensor_scale else "nullptr"
    return f"{{reinterpret_cast<const uint32_t*>({tensors['codes'].pointer}), {scales}, {zeros}, {factors}}}"
