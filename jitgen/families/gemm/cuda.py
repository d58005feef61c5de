"""The context of ``templates/cuda/gemm.cu.j2``: each region's epilogue, weights and mainloop.

The mainloops are static headers, ``templates/cuda/include/jitgen/gemm_*.cuh``; what is generated is a functor for the
epilogue of each region, the types that describe its weights, and an entry that deals blocks out to the regions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jitgen.codegen.dialect import Dialect
from jitgen.families.elementwise.context import Built
from jitgen.families.gemm.context import ContractionContext, GemmContext, GemmOperand, GemmRegion
from jitgen.families.gemm.layout import GemmLayout
from jitgen.families.gemm.schedule import GemmSchedule
from jitgen.families.gemm.schedules.cuda import Shape, shape_of
from jitgen.families.layout import ACCESS_BYTES, item_size
from jitgen.ir.program import Kernel
from jitgen.quant import formats

SUMS_TOKENS = 16
"""Up to so many tokens the bias of 4-bit codes is removed through the sum of x, which costs one product for each eight
tokens and not four instructions for each eight codes."""


def build(
    kernel: Kernel, layouts: Sequence[GemmLayout], schedule: GemmSchedule, products: GemmContext, dialect: Dialect
) -> Built:
    """Template context and source options; see ``gemm/render.py``."""
    first = products.regions[0].contractions[0]
    shape = shape_of(schedule, len(products.regions[0].contractions), first.described.dtype)
    assert first.x is not None  # a prologue is a kernel of its own on GPUs
    parameters = [f"{_pointer(operand)} {operand.pointer}" for operand in products.pointers]
    parameters += [f"Index {name}" for name in products.integers]
    parameters += [f"{kind} {name}" for name, kind in products.scalars]
    regions = [
        _region(region, layout, schedule, shape) for region, layout in zip(products.regions, layouts, strict=True)
    ]
    return {
        "parameters": parameters,
        "index": "int64_t" if schedule.wide else "int32_t",
        "shape": shape,
        "mainloop": f"jitgen/gemm_{schedule.path}.cuh",
        "cluster_attribute": f"__cluster_dims__({schedule.split}, 1, 1) " if schedule.split > 1 else "",
        "regions": regions,
        "alike": len({(part["config"], part["weight_type"]) for part in regions}) == 1,
        "epilogues": [f"epilogue{part['index']}" for part in regions],
        "call": f"{schedule.path}_gemm",
        "shared_type": _SHARED[schedule.path].format(scalar=first.x.storage),
        "x": _activation(first.x, schedule.path),
    }, {}


_SHARED = {"mma": "MmaShared<Config0>", "dense": "DenseShared<Config0>", "simt": "SimtShared<Config0, {scalar}>"}


def _activation(x: GemmOperand, path: str) -> str:
    """The mainloop's arguments for x."""
    values = f"{x.pointer}, {', '.join(x.strides)}"
    return f"jitgen::SimtDense<{_list(x.storage, x.kind == 'k')}>{{{values}}}" if path == "simt" else values


# ----------------------------------------------------------------------------------------------------------- regions


def _region(region: GemmRegion, layout: GemmLayout, schedule: GemmSchedule, shape: Shape) -> dict[str, Any]:
    width = shape.width
    fields, arguments = _members(region)
    x = region.contractions[0].x
    assert x is not None
    weights = [_weight(part, schedule.path) for part in region.contractions]
    config, weight_type = _config(region, x, schedule, shape)
    return {
        "index": region.index,
        "title": region.title,
        "columns": region.columns,
        "fields": fields,
        "arguments": arguments,
        "contractions": len(weights),
        "config": config,
        "weight_type": weight_type,
        "weights": weights,
        "accumulator": region.contractions[0].type,
        "accumulators": [part.accumulator for part in region.contractions],
        "whole": layout.columns_unit >= width,
        "vectors": [_vector(operand, width) for operand in region.loads if operand.kind in ("full", "column")],
        "singles": [_single(operand) for operand in region.loads if operand.kind in ("row", "scalar")],
        "elements": [_element(operand) for operand in region.loads if operand.kind == "strided"],
        "lines": region.lines,
        "stores": [_vector(operand, width) | {"step": operand.strides[1]} for operand in region.stores],
    }


def _config(region: GemmRegion, x: GemmOperand, schedule: GemmSchedule, s: Shape) -> tuple[str, str]:
    """The types of a region's mainloop configuration and of its weights."""
    first = region.contractions[0]
    count = len(region.contractions)
    x_vector = x.unit if x.kind == "k" else 1
    if schedule.path == "mma":
        format = formats.find(first.described.format or "")
        sums = format.bits == 4 and x.dtype == "bfloat16" and s.tokens <= SUMS_TOKENS
        numbers = (count, s.tokens, s.row_tiles, s.warps_n, s.warps_k, schedule.split, schedule.stages, s.window)
        config = f"jitgen::MmaConfig<{_list(*numbers, s.width, x_vector, sums)}>"
        return config, _quantised(first, x.storage)
    if schedule.path == "dense":
        # Neighbouring weights of one region may lie differently; then none is taken to lie well.
        kinds = {part.weight[0].kind for part in region.contractions}
        unit = min(part.weight[0].unit for part in region.contractions)
        numbers = (count, s.token_tiles, s.row_tiles, s.warps_m, s.warps_n, s.warps_k, schedule.split, schedule.stages)
        w = (_along(kinds.pop()), unit) if len(kinds) == 1 else (_along("strided"), 1)
        config = f"jitgen::DenseConfig<{_list(*numbers, s.width, _along(x.kind), x.unit, *w)}>"
        return config, f"jitgen::DenseWeight<{x.storage}>"
    numbers = (count, s.tokens, s.rows, *s.run, schedule.split)
    config = f"jitgen::SimtConfig<{_list(*numbers, s.width)}>"
    if first.described.format is not None:
        return config, f"jitgen::SimtQuant<{_quantised(first, 'jitgen::bfloat16')}>"
    along_k = all(part.weight[0].kind == "k" for part in region.contractions)
    return config, f"jitgen::SimtDense<{_list(x.storage, along_k)}>"


def _list(*values: Any) -> str:
    return ", ".join(str(value).lower() if isinstance(value, bool) else str(value) for value in values)


def _along(kind: str) -> str:
    return f"jitgen::Along::{ {'k': 'k', 'outer': 'outer'}.get(kind, 'neither') }"


def _quantised(part: ContractionContext, element: str) -> str:
    format = formats.find(part.described.format or "")
    values = (element, format.bits, format.zero_point, part.weight[1].storage, part.described.group_size or 0)
    return f"jitgen::QuantWeight<{_list(*values)}>"


def _weight(part: ContractionContext, path: str) -> str:
    """How a weight's type is made from the kernel's parameters."""
    if part.described.format is None:
        (weight,) = part.weight
        return f"{{{', '.join([str(weight.pointer), *weight.strides])}}}"
    codes, scales, *zeros = (str(operand.pointer) for operand in part.weight)
    made = f"{{reinterpret_cast<const uint4*>({codes}), {scales}, {zeros[0] if zeros else 'nullptr'}}}"
    return f"{{{made}}}" if path == "simt" else made


# ---------------------------------------------------------------------------------------------------------- operands


def _pointer(operand: GemmOperand) -> str:
    return f"{'' if operand.role == 'store' else 'const '}{operand.storage}*"


def _members(region: GemmRegion) -> tuple[list[str], list[str]]:
    """Fields of the epilogue for all that its operands and scalars need, and the parameters that fill them."""
    fields, names = [], []
    for operand in (*region.loads, *region.stores):
        if operand.pointer is not None:
            fields.append(f"{_pointer(operand)} {operand.pointer}")
            names.append(operand.pointer)
        for name in (*operand.strides, operand.offset):
            if name and not name.isdigit():
                fields.append(f"Index {name}")
                names.append(name)
    for name, kind in region.scalars:
        fields.append(f"{kind} {name}")
        names.append(name)
    return fields, names


def _vector(operand: GemmOperand, width: int) -> dict[str, Any]:
    """An operand whose neighbouring columns are neighbours; ``access``: they move together."""
    elements = min(width, ACCESS_BYTES // item_size(operand.dtype))
    return {
        "index": operand.index,
        "storage": operand.storage,
        "type": operand.type,
        "value": operand.value,
        "place": f"{operand.pointer} + ({operand.position('m', 'n')})",
        "access": operand.strides[1] == "1" and operand.unit >= elements,
    }


def _single(operand: GemmOperand) -> dict[str, Any]:
    return {
        "type": operand.type,
        "value": operand.value,
        "expression": f"jitgen::load({operand.pointer}[{operand.position('m', 'n')}])",
    }


def _element(operand: GemmOperand) -> dict[str, Any]:
    position = operand.position("m", "column")
    expression = position if operand.pointer is None else f"jitgen::load({operand.pointer}[{position}])"
    return {"type": operand.type, "value": operand.value, "expression": expression}
