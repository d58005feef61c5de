"""The context of ``templates/elementwise/elementwise.cpp.j2``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Built
from jitgen.families.elementwise.context import (
    OperandContext,
    RegionContext,
    const_prefix,
    pointer_parameters,
    region_parameters,
)
from jitgen.families.elementwise.schedule import Schedule
from jitgen.ir.program import Kernel


def build(
    kernel: Kernel, schedule: Schedule, regions: Sequence[RegionContext], names: Sequence[str], dialect: Dialect
) -> Built:
    """Template context and source options; see ``elementwise/render.py``."""
    parameters = pointer_parameters(regions)
    # Parameters that may differ between two calls of one shape come first, so that the others are packed once.
    parameters += [f"{dialect.types[dtype]} a{i}" for i, (_, dtype) in enumerate(kernel.scalars)]
    parameters += ["int32_t threads", *(f"int64_t {name}" for name in names), "int32_t streaming"]
    contexts = [_region(region) for region in regions]
    alike: dict[str, int] = {}
    for region in contexts:
        # Regions that differ only in their parameters, as those of a concatenation do, are calls of one function.
        region["function"] = alike.setdefault(_anonymous(region), region["index"])
    context = {"block": schedule.vectors[0], "lanes": min(schedule.unrolls), "parameters": parameters}
    context["checked"] = bool(kernel.checked)
    return {**context, "regions": contexts}, {"interleaved": True}


def _anonymous(region: dict[str, Any]) -> str:
    """The text of a region's context without the region's number, to compare regions by."""
    texts = repr([(key, value) for key, value in region.items() if key not in ("index", "title")])
    return re.sub(rf"\b([a-z]+){region['index']}_", r"\1_", texts)


def _region(region: RegionContext) -> dict[str, Any]:
    inner, parameters = region.inner_size, region_parameters(region, "int64_t")
    work = " * ".join([*region.outer_sizes, f"(({inner} + block - 1) / block)"])
    halved = _is_halved(region)
    stores = [_store(operand, halved) for operand in region.stores]
    return {
        "index": region.index,
        "title": region.title,
        "rank": region.rank,
        "inner": inner,
        "outer": list(region.outer_sizes),
        "work": work,
        "parameters": [f"{kind} {name}" for kind, name in parameters],
        "arguments": [name for _, name in parameters],
        "operands": [_operand(operand, region.rank) for operand in region.operands],
        "scalars": [_load(operand, False) for operand in region.loads if _is_constant(operand)],
        "fetched": [_fetched(o, region.rank) for o in region.loads if o.memory and o.kind == "contiguous"],
        "loads": [_load(operand, halved) for operand in region.loads if not _is_constant(operand)],
        "gathers": [{"index": operand.index, "offset": _offset(operand)} for operand in region.gathers],
        "lines": region.lines,
        "scratch_stores": [],
        "reductions": [],
        "stores": stores,
        "streamed": [store for store in stores if store["group"]],
    }


def _is_constant(operand: OperandContext) -> bool:
    """Whether a run of neighbours needs one element only, which is loaded before the loop."""
    return operand.memory and operand.constant_in_row


def _is_halved(region: RegionContext) -> bool:
    """Whether a group's elements may be computed in another order than that in memory (``Halves`` in group.hpp)."""
    if region.gathers:
        return False
    moving = [operand for operand in region.operands if not operand.constant_in_row]
    return all(operand.dtype == "bfloat16" and operand.kind == "contiguous" for operand in moving)


def _operand(operand: OperandContext, rank: int) -> dict[str, str]:
    kind = f"{const_prefix(operand)}{operand.storage}* const" if operand.memory else "const int64_t"
    return {"declaration": f"{kind} {operand.local}", "start": _start(operand, "at", rank)}


def _fetched(operand: OperandContext, rank: int) -> dict[str, Any]:
    return {"index": operand.index, "storage": operand.storage, "later": _start(operand, "later", rank)}


def _start(operand: OperandContext, walk: str, rank: int) -> str:
    """The expression of the address, or the iota's value, at which the run at position ``walk`` begins."""
    indices = [f"{walk}.index[{dim}]" for dim in range(rank - 1)]
    terms = [operand.pointer or operand.offset, operand.base(indices)]
    start = "start" if walk == "at" else f"{walk}.index[{rank - 1}] * block"
    if operand.inner != "0":
        terms.append(start if operand.inner == "1" else f"{start} * {operand.inner}")
    return " + ".join(term for term in terms if term)


def _load(operand: OperandContext, halved: bool) -> dict[str, str]:
    offset = _offset(operand)
    halves = operand.local if halved and operand.memory else ""
    if not operand.memory:
        expression = f"{operand.local} + {offset}"
    elif halves:
        expression = f"halves_{operand.value}.at(lane)"
    else:
        expression = f"jitgen::load({operand.local}[{offset}])"
    return {
        "type": operand.type,
        "value": operand.value,
        "local": operand.local,
        "halves": halves,
        "expression": expression,
    }


def _store(operand: OperandContext, halved: bool) -> dict[str, Any]:
    group = "GroupOfHalves" if halved else "Group"
    return {
        "index": operand.index,
        "local": operand.local,
        "storage": operand.storage,
        "value": operand.value,
        "offset": _offset(operand),
        "group": group if operand.kind == "contiguous" else "",
        "bypasses_cache": f"output{operand.index}.past",
    }


def _offset(operand: OperandContext) -> str:
    """The offset of element ``i`` from its run's beginning, in elements."""
    return {"0": "0", "1": "i"}.get(operand.inner, f"i * {operand.inner}")
