"""The context of ``templates/cpp/gemm.cpp.j2``: structs for the activation and for each region.

The mainloop is ``templates/cpp/include/jitgen/gemm.hpp``. The weights of a region are described by types of that
header, its epilogue and the activation's prologue are loops over neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Built
from jitgen.families.gemm.context import ContractionContext, GemmContext, GemmOperand, GemmRegion
from jitgen.families.gemm.layout import GemmLayout
from jitgen.families.gemm.schedule import GemmSchedule
from jitgen.families.gemm.schedules.cpp import fewest_rows
from jitgen.ir.program import Kernel
from jitgen.quant import formats

FLAGS = ["-O2"]
"""The mainloops are written in vectors, and loops over neighbours ask for them: what -O3 does beyond -O2 takes a
quarter more time to compile, and gains nothing."""
OTHER_ROWS = 12
"""Of a tile, where the kernel is compiled a second time for processors without the dot product of bfloat16."""

_ALONG = {"k": "k", "outer": "n", "strided": "neither"}


def build(
    kernel: Kernel, layouts: Sequence[GemmLayout], schedule: GemmSchedule, products: GemmContext, dialect: Dialect
) -> Built:
    """Template context and source options; see ``gemm/render.py``."""
    contractions = [part for region in products.regions for part in region.contractions]
    dtype = contractions[0].described.dtype
    pairs = dtype == "bfloat16" and all(_in_pairs(part) for part in contractions)
    pointers = [f"{_pointer(operand)} {operand.pointer}" for operand in products.pointers]
    scalars = [f"{kind} {name}" for name, kind in products.scalars]
    integers = [f"int64_t {name}" for name in products.integers]
    return {
        # What may differ between two calls of one shape comes first, so that the rest is packed once.
        "parameters": [*pointers, *scalars, "int32_t threads", *integers, "int32_t streaming"],
        "x": _activation(contractions[0], dialect),
        "regions": [_region(region, products) for region in products.regions],
        "regions_given": "".join(f", region{region.index}" for region in products.regions),
        "accumulator": contractions[0].type,
        "compute": "Wide" if dtype == "float64" else "Singles",
        "pairs": pairs,
        "tile_rows": schedule.block_m,
        # Beside a mainloop of pairs, the one for processors without their dot product is compiled in fewer sizes.
        "other_rows": min(schedule.block_m, OTHER_ROWS) if pairs else schedule.block_m,
        "fewest": fewest_rows(schedule),
    }, {"flags": FLAGS}


def _in_pairs(part: ContractionContext) -> bool:
    """Whether its weights are bfloat16, exactly, two at a time."""
    return part.described.format is not None or part.weight[0].dtype == "bfloat16"


# -------------------------------------------------------------------------------------------------------- activation


def _activation(part: ContractionContext, dialect: Dialect) -> dict[str, Any]:
    storage = dialect.storage_types[part.described.dtype]
    operands = [part.x] if part.x is not None else list(part.x_loads)
    result = f"jitgen::store<{storage}>({part.x_value})"
    if part.x is not None:
        result = f"{_local(part.x)}[{_step(part.x, 'i')}]"
    fields, arguments = _members(operands, [(kind, name) for name, kind in part.x_scalars])
    return {
        "storage": storage,
        "fields": fields,
        "arguments": arguments,
        "bases": [_base(operand, "m", "k") for operand in operands],
        "loads": [] if part.x is not None else [_load(operand, "i") for operand in operands],
        "lines": [] if part.x is not None else part.x_lines,
        "result": result,
    }


# ----------------------------------------------------------------------------------------------------------- regions


def _region(region: GemmRegion, products: GemmContext) -> dict[str, Any]:
    operands = [*region.loads, *region.stores]
    fields, arguments = _members(operands, [(kind, name) for name, kind in region.scalars])
    weights = [_weight(part, region) for part in region.contractions]
    return {
        "index": region.index,
        "title": region.title,
        "weights": weights,
        "fields": fields,
        "arguments": [*(weight["made"] for weight in weights), *arguments, region.columns],
        "bases": [_base(operand, "m", "first") for operand in operands],
        "products": [{"name": part.accumulator, "index": part.index} for part in region.contractions],
        "loads": [_load(operand, "j") for operand in region.loads],
        "lines": region.lines,
        "stores": [
            {
                "place": f"{_local(operand)}[{_step(operand, 'j')}]",
                "storage": operand.storage,
                "value": operand.value,
            }
            for operand in region.stores
        ],
    }


def _weight(part: ContractionContext, region: GemmRegion) -> dict[str, Any]:
    """The type of a weight, of ``gemm.hpp``, and how one is made from the kernel's parameters."""
    described, pointers = part.described, [operand.pointer for operand in part.weight]
    if described.format is None:
        (weight,) = part.weight
        return {
            "index": part.index,
            "type": f"jitgen::gemm::Dense<{weight.storage}, jitgen::gemm::Along::{_ALONG[weight.kind]}>",
            "made": f"{{{weight.pointer}, {region.columns}, k, {', '.join(weight.strides)}}}",
        }
    format = formats.find(described.format)
    zeros = pointers[2] if format.zero_point else "nullptr"
    options = f"{format.bits}, {described.group_size or 0}, {str(format.zero_point).lower()}, {part.weight[1].storage}"
    return {
        "index": part.index,
        "type": f"jitgen::gemm::Quantised<{options}>",
        "made": f"{{{pointers[0]}, {pointers[1]}, {zeros}, k}}",
    }


# ---------------------------------------------------------------------------------------------------------- operands


def _members(operands: Iterable[GemmOperand], scalars: Iterable[tuple[str, str]]) -> tuple[list[str], list[str]]:
    """Fields of a struct for all that ``operands`` and ``scalars`` need, and the parameters that fill them."""
    fields, names = [], []
    for operand in operands:
        if operand.pointer is not None:
            fields.append(f"{_pointer(operand)} {operand.pointer}")
            names.append(operand.pointer)
        integers = [*operand.strides, operand.offset]
        for name in (name for name in integers if name and not name.isdigit()):
            fields.append(f"int64_t {name}")
            names.append(name)
    for kind, name in scalars:
        fields.append(f"{kind} {name}")
        names.append(name)
    return fields, names


def _pointer(operand: GemmOperand) -> str:
    return f"{'' if operand.role == 'store' else 'const '}{operand.storage}*"


def _local(operand: GemmOperand) -> str:
    """Where a run of neighbours begins: a pointer, or an iota's value there."""
    return f"from{operand.index}"


def _base(operand: GemmOperand, row: str, column: str) -> str:
    position = operand.position(row, column)
    if operand.pointer is None:
        return f"const int64_t {_local(operand)} = {position}"
    return f"{_pointer(operand)} const {_local(operand)} = {operand.pointer} + {position}"


def _step(operand: GemmOperand, index: str) -> str:
    """The offset of neighbour ``index`` of a run."""
    stride = operand.strides[1]
    return {"0": "0", "1": index}.get(stride, f"{index} * {stride}")


def _load(operand: GemmOperand, index: str) -> dict[str, str]:
    if operand.pointer is None:
        expression = f"{_local(operand)} + {_step(operand, index)}"
    else:
        expression = f"jitgen::load({_local(operand)}[{_step(operand, index)}])"
    return {"type": operand.type, "value": operand.value, "expression": expression}
