"""The context of ``templates/cpp/elementwise.cpp.j2``."""

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
    # What may differ between two calls of one shape comes first, so that the rest is packed once.
    parameters += [f"{dialect.types[dtype]} a{i}" for i, (_, dtype) in enumerate(kernel.scalars)]
    parameters += ["int32_t threads", *(f"int64_t {name}" for name in names), "int32_t streaming"]
    contexts = [_region(region) for region in regions]
    alike: dict[str, int] = {}
    for region in contexts:
        # Regions that differ only in their parameters, as the parts of a concatenation do, are calls of one function.
        region["function"] = alike.setdefault(_anonymous(region), region["index"])
    return {"block": schedule.vectors[0], "parameters": parameters, "regions": contexts}, {}


def _anonymous(region: dict[str, Any]) -> str:
    """All of a region but its number."""
    texts = repr([(key, value) for key, value in region.items() if key not in ("index", "title")])
    return re.sub(rf"\b([a-z]+){region['index']}_", r"\1_", texts)


def _region(region: RegionContext) -> dict[str, Any]:
    run, arguments, streamed, operands = [], [], [], []
    for operand in region.operands:
        step = f"step{operand.index}"
        strided = operand.kind == "strided"
        if operand.memory:
            run.append(f"{const_prefix(operand)}{operand.storage}* {operand.local}")
        else:
            run.append(f"int64_t {operand.local}")
        local = operand.local
        if operand.role == "store" and operand.kind == "contiguous":
            local = f"target{operand.index}"
            streamed.append({"storage": operand.storage, "local": operand.local, "target": local})
            streamed[-1]["buffer"] = f"buffer{operand.index}"
        arguments.append(local)
        if strided:
            run.append(f"int64_t {step}")
            arguments.append(operand.inner)
        operands.append(
            {
                "declaration": f"{const_prefix(operand)}{operand.storage}* const {operand.local}"
                if operand.memory
                else f"const int64_t {operand.local}",
                "start": _start(operand, region.rank),
            }
        )
    run += [*(f"{kind} {name}" for name, kind in region.scalars), "int64_t count"]
    arguments += [*(name for name, _ in region.scalars), "count"]
    inner, parameters = region.inner_size, region_parameters(region, "int64_t")
    work = " * ".join([*region.outer_sizes, f"(({inner} + block - 1) / block)"])
    return {
        **_pairs(region),
        "index": region.index,
        "title": region.title,
        "rank": region.rank,
        "inner": inner,
        "outer": list(region.outer_sizes),
        "work": work,
        "lines": [(line.text, line.mark) for line in region.lines],
        "parameters": [f"{kind} {name}" for kind, name in parameters],
        "given": [name for _, name in parameters],
        "run_parameters": run,
        "arguments": arguments,
        "streamed": streamed,
        "operands": operands,
        "loads": [_load(operand) for operand in region.loads],
        "stores": [
            {
                "local": operand.local,
                "storage": operand.storage,
                "value": operand.value,
                "result": f"y{operand.index}",
                "index": f"i * step{operand.index}" if operand.kind == "strided" else "i",
            }
            for operand in region.stores
        ],
    }


def _pairs(region: RegionContext) -> dict[str, Any]:
    """How a run of bfloat16 neighbours is computed two at a time: an element's function, and its calls for both."""
    moving = [operand for operand in region.operands if not operand.constant_in_row]
    if not all(operand.dtype == "bfloat16" and operand.kind == "contiguous" for operand in moving):
        return {"pairs": False}
    parameters = [f"{operand.type} {operand.value}" for operand in region.loads]
    parameters += [f"{kind} {name}" for name, kind in region.scalars]
    scalars = [name for name, _ in region.scalars]
    calls = {
        half: [o.value if o.constant_in_row else f"{o.value}.{half}" for o in region.loads] + scalars
        for half in ("low", "high")
    }
    return {"pairs": True, "element_parameters": parameters, **calls}


def _start(operand: OperandContext, rank: int) -> str:
    indices = [f"at.index[{dim}]" for dim in range(rank - 1)]
    terms = [operand.pointer or operand.offset, operand.base(indices)]
    if operand.inner != "0":
        terms.append("start" if operand.inner == "1" else f"start * {operand.inner}")
    return " + ".join(term for term in terms if term)


def _load(operand: OperandContext) -> dict[str, Any]:
    if operand.role == "iota":
        expression = f"{operand.local} + i * step{operand.index}"
    elif operand.kind == "strided":
        expression = f"jitgen::load({operand.local}[i * step{operand.index}])"
    else:
        expression = f"jitgen::load({operand.local}[i])"
    kind = "scalar" if operand.constant_in_row else operand.kind
    return {
        "kind": kind,
        "type": operand.type,
        "value": operand.value,
        "local": operand.local,
        "expression": expression,
    }
