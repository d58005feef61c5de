"""Builds the context of ``templates/elementwise/elementwise.cu.j2``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Built, Line, chosen_offset, fields
from jitgen.families.elementwise.context import PointwiseContext, RegionContext, condition
from jitgen.families.elementwise.layout import Layout
from jitgen.families.elementwise.schedule import Schedule
from jitgen.ir.body import Body
from jitgen.ir.program import Kernel
from jitgen.kernel.layout import constant_in_row
from jitgen.kernel.operands import ACCESS_BYTES, item_size


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
        "regions": [
            _region(region, len(regions), schedule, kernel.bodies[region.index], layouts[region.index], dialect)
            for region in regions
        ],
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


@dataclass(frozen=True)
class _Rows:
    """Holds the gathers whose indices are the same for a step of neighbours: a step's share of such a row is one
    access, ahead of the computation.

    Attributes:
        rows: for each, its value, the number of its operand, and the offset that its indices make.
        lines: what these offsets are computed by.
        gathers: the numbers of the operands that ``lines`` read.
        elements: the region's lines, which take elements of the rows.
        single: the numbers of the operands that are gathered element by element.
    """

    rows: tuple[tuple[str, int, str], ...]
    lines: tuple[Line, ...]
    gathers: frozenset[int]
    elements: tuple[Line, ...]
    single: frozenset[int]


def _rows(region: RegionContext, body: Body, layout: Layout, dialect: Dialect) -> _Rows:
    constant = constant_in_row(body, [kind not in ("scalar", "broadcast") for kind in layout.operands])
    named = {line.position: line.value for line in region.lines}

    def name_of(position: int) -> str:
        instruction = body.instructions[position]
        if instruction.op in ("load", "iota"):
            return region.operands[instruction.attr].value
        return named.get(position, dialect.scalar.format(instruction.attr))

    rows, elements = [], []
    needed: set[int] = set()
    for line in region.lines:
        instruction = body.instructions[line.position]
        if (
            instruction.op == "gather"
            and _is_row(region, layout, instruction.attr)
            and constant.issuperset(instruction.args)
        ):
            operand = region.operands[instruction.attr]
            indices = [name_of(argument) for argument in instruction.args]
            rows.append((line.value, operand.index, chosen_offset(indices, operand.gathered, dialect)))
            needed.update(instruction.args)
            line = replace(line, text=dialect.assign(line.type, line.value, f"jitgen::load(row_{line.value}[u][j])"))
        elements.append(line)
    for position in reversed(range(len(body.instructions))):
        needed.update(body.instructions[position].args if position in needed else ())
    gathers = {position: i.attr for position, i in enumerate(body.instructions) if i.op == "gather"}
    moved = {line.position for line, own in zip(elements, region.lines, strict=True) if line is not own}
    return _Rows(
        tuple(rows),
        tuple(line for line in region.lines if line.position in needed),
        frozenset(operand for position, operand in gathers.items() if position in needed),
        tuple(elements),
        frozenset(operand for position, operand in gathers.items() if position not in moved),
    )


def _is_row(region: RegionContext, layout: Layout, index: int) -> bool:
    """Returns whether a step's elements of the gathered operand ``index`` are neighbours that one access may move, or
    two of 16 bytes."""
    operand = region.operands[index]
    size, width = item_size(operand.dtype), region.vector
    aligned = bool(layout.rows) and layout.rows[index] * size >= min(ACCESS_BYTES, width * size)
    return operand.kind == "contiguous" and width > 1 and aligned and not region.lanes


def _region(
    region: RegionContext, regions: int, schedule: Schedule, body: Body, layout: Layout, dialect: Dialect
) -> dict[str, Any]:
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
    rows = _rows(region, body, layout, dialect)
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
        "gathers": [operand for operand in operands if operand["role"] == "gather" and operand["index"] in rows.single],
        "lines": rows.elements,
        "rows": [{"value": value, "operand": operands[index], "chosen": chosen} for value, index, chosen in rows.rows],
        "row_lines": rows.lines,
        "row_gathers": [operand for operand in operands if operand["index"] in rows.gathers],
    }


def _unused(line: str, used: set[str]) -> bool:
    """Returns whether ``line`` defines an index that no operand's position reads."""
    name = line.split()[2]
    return name.startswith(("i", "column")) and name not in used
