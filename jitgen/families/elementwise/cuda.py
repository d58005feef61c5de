"""Builds the context of ``templates/elementwise/elementwise.cu.j2``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Built, fields
from jitgen.families.elementwise.context import PointwiseContext, RegionContext, condition
from jitgen.families.elementwise.layout import Layout
from jitgen.families.elementwise.schedule import Schedule
from jitgen.ir.program import Kernel


def build(
    kernel: Kernel, layouts: Sequence[Layout], schedule: Schedule, pointwise: PointwiseContext, dialect: Dialect
) -> Built:
    """Builds template context and source options; see ``kernel/render.py``."""
    regions = tuple(run[0] for run in pointwise.runs) or pointwise.regions
    bits = 64 if schedule.wide else 32
    return {
        "index": f"int{bits}_t",
        "unsigned": f"uint{bits}_t",
        "checked": bool(kernel.checked),
        "regions": [_region(region, len(regions), schedule) for region in regions],
        "runs": [_run(number, pointwise.runs) for number in range(len(pointwise.runs))],
    }, {}


def _run(number: int, runs: Sequence[Sequence[RegionContext]]) -> dict[str, Any]:
    """Returns what the entry reads to send blocks to the regions of a run, whose structs are an array."""
    first, last = runs[number][0].index, len(runs[number]) - 1
    array, end = f"params.run{first}", f"end{first}"
    before = runs[number - 1][0].index if number else 0
    return {
        "index": first,
        "array": array,
        "last": last,
        "end": end,
        "start": f"params.run{before}[{len(runs[number - 1]) - 1}].end{before}" if number else "0",
        "condition": f"if (Index(blockIdx.x) < {array}[{last}].{end}) " if number + 1 < len(runs) else "",
    }


def _region(region: RegionContext, regions: int, schedule: Schedule) -> dict[str, Any]:
    outer = [f"i{dim}" for dim in range(region.rank - 1)]
    lines = ["const Index column = step * width;"]
    if outer:
        # Neither side is negative, and unsigned division is cheaper.
        lines = ["const Index column = Index(Unsigned(step) % Unsigned(steps)) * width;"]
        rest = "Unsigned(step) / Unsigned(steps)"
        for dim in reversed(range(1, region.rank - 1)):
            lines.append(f"const Unsigned r{dim} = {rest};")
            lines.append(f"const Index i{dim} = Index(r{dim} % Unsigned({region.sizes[dim]}));")
            rest = f"r{dim} / Unsigned({region.sizes[dim]})"
        lines.append(f"const Index i0 = Index({rest});")
    operands = [fields(operand) | {"at": operand.position(outer, "column")} for operand in region.operands]
    used = {name for operand in operands for name in ("column", *outer) if name in operand["at"].split()}
    ragged = region.rank == 1 and region.vector > 1
    if region.rank > 1 or ragged:
        used.add("column")
    return fields(region) | {
        "condition": condition(region, regions, "if (Index(blockIdx.x) < {end}) ", "else "),
        "index_lines": [line for line in lines if not _unused(line, used)],
        "ragged": ragged,
        "inside": f"if (whole || column + j < {region.inner_size}) " if ragged else "",
        "tile": schedule.tile(region.index),
        "loads": [operand for operand in operands if operand["role"] in ("load", "iota")],
        "stores": [operand for operand in operands if operand["role"] == "store" and not operand["indices"]],
        "scatters": [
            operand | {"inside": described.inside("jitgen::is_within({0}, {1})", " && ")}
            for operand, described in zip(operands, region.operands, strict=True)
            if operand["indices"]
        ],
        "gathers": [operand for operand in operands if operand["role"] == "gather"],
    }


def _unused(line: str, used: set[str]) -> bool:
    """Returns whether ``line`` defines an index that no operand's position reads."""
    name = line.split()[2]
    return name.startswith(("i", "column")) and name not in used
