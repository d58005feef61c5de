"""The context of ``templates/cuda/gemm.cu.j2``: each region's epilogue, weights and mainloop.

The mainloops are static headers, ``templates/cuda/include/jitgen/gemm_*.cuh``; what is generated is a functor for the
epilogue of each region, the types that describe its weights, and an entry that deals blocks out to the regions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jitgen.codegen.cuda import CUDA
from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Built
from jitgen.families.gemm import wgmma
from jitgen.families.gemm.context import ContractionContext, GemmContext, GemmOperand, GemmRegion
from jitgen.families.gemm.cuda_operands import members, pointer_type, reads, vector
from jitgen.families.gemm.layout import GemmLayout
from jitgen.families.gemm.schedule import GemmSchedule
from jitgen.families.gemm.schedules.cuda_shape import Shape, shape_of
from jitgen.families.layout import ACCESS_BYTES, item_size
from jitgen.ir.body import Contraction
from jitgen.ir.program import Kernel
from jitgen.quant import formats

SUMS_TOKENS = 16
"""Up to so many tokens the bias of 4-bit codes is removed through the sum of x, which costs one product for each eight
tokens and not four instructions for each eight codes."""


def build(
    kernel: Kernel, layouts: Sequence[GemmLayout], schedule: GemmSchedule, products: GemmContext, dialect: Dialect
) -> Built:
    """Template context and source options; see ``gemm/render.py``."""
    if schedule.maps:
        return _mapped(kernel, layouts, schedule, products)
    first = products.regions[0].contractions[0]
    shape = shape_of(schedule, len(products.regions[0].contractions), first.described.dtype)
    resident = _resident(shape, first.described)
    parameters = [f"{pointer_type(operand)} {operand.pointer}" for operand in products.pointers]
    parameters += [f"Index {name}" for name in products.integers]
    parameters += [f"{kind} {name}" for name, kind in products.scalars]
    regions = [
        _region(region, layout, shape.width)
        | dict(zip(("config", "weight_type"), _config(region, layout, schedule, shape), strict=True))
        | {"weights": [_weight(part, region, schedule.path) for part in region.contractions]}
        for region, layout in zip(products.regions, layouts, strict=True)
    ]
    mainloop = _MAINLOOPS[schedule.path]
    return {
        "maps": [],
        "parameters": parameters,
        "index": "int64_t" if schedule.wide else "int32_t",
        "shape": shape,
        "bounds": f"{schedule.block_threads}, {resident}" if resident else str(schedule.block_threads),
        "mainloop": mainloop.headers,
        "prologue": None if first.x is not None else _prologue(first, layouts[0], dialect),
        "cluster_attribute": f"__cluster_dims__({schedule.split}, 1, 1) " if schedule.split > 1 else "",
        "regions": regions,
        "alike": len({(part["config"], part["weight_type"]) for part in regions}) == 1,
        "epilogues": [f"epilogue{part['index']}" for part in regions],
        "call": f"{mainloop.name}_gemm",
        "shared_type": mainloop.shared.format(scalar=dialect.storage_types[first.described.dtype]),
        "x": _activation(first, schedule.path),
    }, {}


@dataclass(frozen=True)
class _Mainloop:
    """Headers, the name of its function, and the type that knows its shared memory."""

    name: str
    shared: str
    headers: tuple[str, ...]


_MAINLOOPS = {
    "mma": _Mainloop("mma", "MmaShared<Config0>", ("jitgen/gemm_quant.cuh", "jitgen/gemm_mma.cuh")),
    "rows": _Mainloop("mma", "MmaShared<Config0>", ("jitgen/gemm_rows.cuh", "jitgen/gemm_mma.cuh")),
    "columns": _Mainloop("mma", "MmaShared<Config0>", ("jitgen/gemm_rows.cuh", "jitgen/gemm_mma.cuh")),
    "dense": _Mainloop("dense", "DenseShared<Config0>", ("jitgen/gemm_dense.cuh",)),
    "stream": _Mainloop("stream", "StreamShared<Config0>", ("jitgen/gemm_stream.cuh",)),
    "stream_outer": _Mainloop("stream", "StreamShared<Config0>", ("jitgen/gemm_stream.cuh",)),
    "simt": _Mainloop("simt", "SimtShared<Config0, {scalar}>", ("jitgen/gemm_simt.cuh",)),
}


def _resident(shape: Shape, part: Contraction) -> int:
    """``shape.resident``, less where the weights need more registers than 4-bit codes for bfloat16 do."""
    fine = part.group_size is not None and part.group_size % 64 != 0
    plain = part.format == "int4" and not fine and part.dtype == "bfloat16"
    return shape.resident if plain else min(shape.resident, 3 if shape.tokens == 1 else 1)


# -------------------------------------------------------------------------------------------------------- activation


def _activation(part: ContractionContext, path: str) -> str:
    """The mainloop's argument for x."""
    if part.x is None:
        return "jitgen::SimtComputed<Activation>{activation}" if path == "simt" else "activation"
    x = part.x
    vector = 1 if path != "dense" and x.kind != "k" else x.unit
    made = _simt_dense([x]) if path == "simt" else f"jitgen::StoredActivation<{_list(x.storage, vector)}>"
    return f"{made}{{{', '.join([str(x.pointer), *x.strides])}}}"


def _prologue(part: ContractionContext, layout: GemmLayout, dialect: Dialect) -> dict[str, Any]:
    """The functor that computes x, 16 bytes of it at a time."""
    width = ACCESS_BYTES // item_size(part.described.dtype)
    fields, arguments = members(part.x_loads, part.x_scalars)
    return {
        **reads(part.x_loads, width),
        "fields": fields,
        "arguments": arguments,
        "element": dialect.storage_types[part.described.dtype],
        "vector": width,
        "whole": layout.length_unit >= width,
        "lines": part.x_lines,
        "value": part.x_value,
    }


def _simt_dense(operands: Sequence[GemmOperand]) -> str:
    """The type of dense operands of the ``simt`` mainloop; where they lie differently none is taken to lie well."""
    kinds = {operand.kind for operand in operands}
    vector = min(operand.unit for operand in operands) if len(kinds) == 1 else 1
    return f"jitgen::SimtDense<{_list(operands[0].storage, kinds != {'outer'}, vector)}>"


# ------------------------------------------------------------------------------------------------------------- wgmma


def _mapped(kernel: Kernel, layouts: Sequence[GemmLayout], schedule: GemmSchedule, products: GemmContext) -> Built:
    """The context of a mainloop that copies by tensor maps."""
    first = products.regions[0].contractions[0]
    assert first.x is not None
    count = len(products.regions[0].contractions)
    quantised = schedule.path == wgmma.QUANTIZED
    names = [f"map{number}" for number in range(1 + count * len(products.regions))]
    parameters = [f"const __grid_constant__ jitgen::TensorMap {name}" for name in names]
    parameters += [f"{pointer_type(operand)} {operand.pointer}" for operand in products.pointers]
    parameters += [f"Index {name}" for name in products.integers]
    parameters += [f"{kind} {name}" for name, kind in products.scalars]
    regions = []
    for region, layout in zip(products.regions, layouts, strict=True):
        own = [f"&{name}" for name in names[1 + count * region.index : 1 + count * (region.index + 1)]]
        weights = [f"Weight{_weight(part, region, schedule.path)}" for part in region.contractions] if quantised else []
        parts = [f"{{{', '.join(weights)}}}"] if quantised else []
        made = ", ".join([*parts, f"{{{', '.join(own)}}}", f"int({region.columns})"])
        regions.append(_region(region, layout, wgmma.EPILOGUE_WIDTH) | {"made": f"{{{made}}}"})
    return {
        "parameters": parameters,
        "index": "int64_t" if schedule.wide else "int32_t",
        "maps": names,
        "mainloop": (f"jitgen/gemm_{schedule.path}.cuh",),
        "wgmma_size": wgmma.size(schedule),
        "prologue": None,
        "config": list(_mapped_config(schedule, products)),
        "weight_type": _quantised(first, first.x.storage) if quantised else "",
        "shape_type": "jitgen::QuantizedShape<Config, Weight>" if quantised else "jitgen::DenseShape<Config>",
        "region_type": f"jitgen::QuantizedRegion<Weight, {count}>" if quantised else f"jitgen::DenseRegion<{count}>",
        "call": f"gemm_{schedule.path}<{'Config, Weight' if quantised else 'Config'}>",
        "cluster_attribute": f"__cluster_dims__({schedule.cluster}, 1, 1) " if schedule.cluster > 1 else "",
        "element": first.x.storage,
        "regions": regions,
        "alike": True,
        "epilogues": [f"epilogue{part['index']}" for part in regions],
    }, {}


def _mapped_config(schedule: GemmSchedule, products: GemmContext) -> Iterator[tuple[str, str, str]]:
    """(type, name, value) of each member of the mainloop's Config."""
    first = products.regions[0].contractions[0]
    count, consumers = len(products.regions[0].contractions), wgmma.consumers(schedule)
    numbers: dict[str, int] = {"contractions": count, "regions": len(products.regions)}
    if schedule.path == wgmma.QUANTIZED:
        numbers |= {
            "tokens": schedule.block_m,
            "warpgroups": consumers,
            "blocks": wgmma.blocks_of_rows(schedule, count),
            "span": schedule.block_k // wgmma.CHUNK,
            "steps": schedule.steps,
            "split": schedule.split,
            "stagger": schedule.stagger,
        }
    else:
        down = schedule.block_m // 64
        numbers |= {"down": down, "across": consumers // down, "columns": schedule.block_n}
        yield "bool", "transposed", str(first.weight[0].kind != "k").lower()
    yield "bool", "trimmed", str(wgmma.is_trimmed(schedule)).lower()
    numbers |= {"stages": schedule.stages, "multicast": schedule.multicast, "raster": schedule.raster}
    numbers |= {"resident": schedule.resident}
    for name, value in numbers.items():
        yield "int", name, str(value)


# ----------------------------------------------------------------------------------------------------------- regions


def _region(region: GemmRegion, layout: GemmLayout, width: int) -> dict[str, Any]:
    """A region's epilogue, computed for ``width`` columns of a row at a time."""
    fields, arguments = members((*region.loads, *region.stores), region.scalars)
    return {
        "index": region.index,
        "title": region.title,
        "columns": region.columns,
        "fields": fields,
        "arguments": arguments,
        "contractions": len(region.contractions),
        "accumulator": region.contractions[0].type,
        "accumulators": [part.accumulator for part in region.contractions],
        "whole": layout.columns_unit >= width,
        **reads(region.loads, width),
        "lines": region.lines,
        "stores": [vector(operand, width) | {"step": operand.strides[1]} for operand in region.stores],
    }


def _config(region: GemmRegion, layout: GemmLayout, schedule: GemmSchedule, s: Shape) -> tuple[str, str]:
    """The types of a region's mainloop configuration and of its weights."""
    first = region.contractions[0]
    count, dtype = len(region.contractions), first.described.dtype
    storage = first.x.storage if first.x is not None else CUDA.storage_types[dtype]
    numbers: tuple[int, ...]
    if schedule.path in ("mma", "rows", "columns"):
        numbers = (count, s.tokens, s.row_tiles, s.warps_n, s.warps_k, schedule.split, schedule.stages, s.window)
        if schedule.path != "mma":
            kind = "DenseRows" if schedule.path == "rows" else "DenseColumns"
            weight = f"jitgen::{kind}<{_list(storage, layout.length_unit % 64 != 0)}>"
            return f"jitgen::MmaConfig<{_list(*numbers, s.width, False)}>", weight
        format = formats.find(first.described.format or "")
        sums = format.bits == 4 and dtype == "bfloat16" and s.tokens <= SUMS_TOKENS
        return f"jitgen::MmaConfig<{_list(*numbers, s.width, sums)}>", _quantised(first, storage)
    if schedule.path in ("stream", "stream_outer"):
        numbers = (count, s.tokens, s.run[0], s.warps_n, s.warps_k, schedule.split, schedule.stages, s.window)
        along_k = schedule.path == "stream"
        config = f"jitgen::StreamConfig<{_list(storage, *numbers, s.width, along_k, s.run[1])}>"
        return config, f"jitgen::StreamWeight<{storage}>"
    if schedule.path == "dense":
        # Neighbouring weights of one region may lie differently; then none is taken to lie well.
        kinds = {part.weight[0].kind for part in region.contractions}
        unit = min(part.weight[0].unit for part in region.contractions)
        tiles = (s.token_tiles, s.row_tiles, s.warps_m, s.warps_n, s.warps_k)
        w = (_along(kinds.pop()), unit) if len(kinds) == 1 else (_along("strided"), 1)
        steps = (schedule.split, schedule.stages, s.width)
        x = _along(first.x.kind if first.x is not None else "k")
        return f"jitgen::DenseConfig<{_list(count, *tiles, *steps, x, *w)}>", f"jitgen::DenseWeight<{storage}>"
    tiles = (s.tokens, s.rows, schedule.block_k, *s.run)
    config = f"jitgen::SimtConfig<{_list(count, *tiles, schedule.split, s.width)}>"
    if first.described.format is not None:
        return config, f"jitgen::SimtQuant<{_quantised(first, 'jitgen::bfloat16')}>"
    return config, _simt_dense([part.weight[0] for part in region.contractions])


def _list(*values: Any) -> str:
    return ", ".join(str(value).lower() if isinstance(value, bool) else str(value) for value in values)


def _along(kind: str) -> str:
    return f"jitgen::Along::{ {'k': 'k', 'outer': 'outer'}.get(kind, 'neither') }"


def _quantised(part: ContractionContext, element: str) -> str:
    format = formats.find(part.described.format or "")
    values = (element, format.bits, format.zero_point, part.weight[1].storage, part.described.group_size or 0)
    return f"jitgen::QuantWeight<{_list(*values)}>"


def _weight(part: ContractionContext, region: GemmRegion, path: str) -> str:
    """How a weight's type is made from the kernel's parameters."""
    if part.described.format is None:
        (weight,) = part.weight
        if path in ("rows", "columns"):
            stride = weight.strides[0 if path == "rows" else 1]
            return f"{{{{{weight.pointer}, {stride}, int({region.columns}), int(k)}}}}"
        return f"{{{', '.join([str(weight.pointer), *weight.strides])}}}"
    codes, scales, *zeros = (str(operand.pointer) for operand in part.weight)
    made = f"{{reinterpret_cast<const uint4*>({codes}), {scales}, {zeros[0] if zeros else 'nullptr'}}}"
    return f"{{{made}}}" if path == "simt" else made
