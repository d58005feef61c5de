"""Builds the context of ``templates/elementwise/elementwise.py.j2``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jitgen.codegen import triton
from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Built, fields
from jitgen.families.elementwise.context import (
    OperandContext,
    PointwiseContext,
    RegionContext,
    condition,
    region_parameters,
)
from jitgen.families.elementwise.layout import Layout
from jitgen.families.elementwise.schedule import GPU_REGISTERS, Schedule
from jitgen.ir.program import Kernel
from jitgen.kernel.operands import ACCESS_BYTES, WARP, item_size


def build(
    kernel: Kernel, layouts: Sequence[Layout], schedule: Schedule, pointwise: PointwiseContext, dialect: Dialect
) -> Built:
    """Builds template context and source options; see ``kernel/render.py``."""
    regions = pointwise.regions
    contexts = [_region(region, len(regions), schedule) for region in regions]
    context = {
        "parameters": pointwise.triton_parameters,
        "index_cast": ".to(tl.int64)" if schedule.wide else "",
        "regions": contexts,
    }
    alignments = [operand.alignment for operand in pointwise.memory]
    units = {name: _unit(name, regions) for name in pointwise.integers}
    limit = {"maxnreg": GPU_REGISTERS // (schedule.threads * schedule.blocks)} if schedule.blocks else {}
    return context, pointwise.triton_options(schedule.wide, schedule.threads // WARP, alignments, units, **limit)


def _unit(name: str, regions: Sequence[RegionContext]) -> int:
    """Returns the known divisor of an integer parameter: of a collapsed row's size, or of a stride between such
    rows."""
    for region in regions:
        if region.rank > 1 and name == region.inner_size:
            return region.unit
        for operand in region.operands:
            if operand.kind == "contiguous" and name in operand.strides[:-1]:
                # A unit may be several accesses; then only their alignment is known, not that of the whole unit.
                return min(region.unit, ACCESS_BYTES // item_size(operand.dtype))
    return 1


def _region(region: RegionContext, regions: int, schedule: Schedule) -> dict[str, Any]:
    outer = [f"i{dim}" for dim in range(region.rank - 1)]
    lines, width = [], region.vector if outer else 1
    if outer:
        # A step is a vector of neighbours, or one element, so that indices are divided once for the whole vector.
        lines = [f"steps = {region.inner_size} // {width}", "column = step % steps"]
        if width > 1:
            lines[-1] += f" * {width} + tl.arange(0, {width})[None, :]"
        rest = "step // steps"
        for dim in reversed(range(1, region.rank - 1)):
            lines.append(f"r{dim} = {rest}")
            lines.append(f"i{dim} = r{dim} % {region.sizes[dim]}")
            rest = f"r{dim} // {region.sizes[dim]}"
        lines.append(f"i0 = {rest}")
    column = "column" if outer else "step"
    operands = [
        fields(operand) | {"at": operand.position(outer, column), "expression": _load(operand, outer, column)}
        for operand in region.operands
    ]
    for gather in operands:
        if gather["role"] == "gather" and gather["at"] == "0":  # a block, as the mask is
            gather["at"] = "step * 0"
    stores = [operand for operand in operands if operand["role"] == "store"]
    for store in stores:
        store["stored"] = triton.store_cast(store["value"], store["dtype"])
        store["at"] = " + ".join(term for term in (store["at"], store["chosen"]) if term)
    for operand, store in zip(region.stores, stores, strict=True):
        store["inside"] = operand.inside("({0} >= 0) & ({0} < {1})", " & ")
    return fields(region) | {
        "condition": condition(region, regions, "if block < {end}", "else", chain="el"),
        "parameters": [name for _, name in region_parameters(region, "")],
        "tile": schedule.tile(region.index),
        "width": width,
        "steps": schedule.tile(region.index) // width,
        "index_lines": lines,
        "loads": [operand for operand in operands if operand["role"] in ("load", "iota")],
        "gathers": [operand for operand in operands if operand["role"] == "gather"],
        "stores": stores,
    }


def _load(operand: OperandContext, outer: Sequence[str], column: str) -> str:
    at = operand.position(outer, column)
    if operand.role == "iota":
        return f"({at}).to({triton.TYPES[operand.dtype]})"
    if operand.kind == "scalar":
        return triton.load_cast(f"tl.load({operand.pointer})", operand.dtype)
    return triton.load_cast(f"tl.load({operand.pointer} + {at}, mask=live)", operand.dtype)
