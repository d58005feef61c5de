"""Builds the context of ``templates/elementwise/elementwise.cpp.j2``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jitgen.codegen.cpp import CPP
from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Built, Line
from jitgen.families.elementwise.context import OperandContext, PointwiseContext, RegionContext, region_parameters
from jitgen.families.elementwise.layout import Layout
from jitgen.families.elementwise.schedule import Schedule
from jitgen.ir.body import Body
from jitgen.ir.program import Kernel


def build(
    kernel: Kernel, layouts: Sequence[Layout], schedule: Schedule, pointwise: PointwiseContext, dialect: Dialect
) -> Built:
    """Builds template context and source options; see ``kernel/render.py``."""
    contexts = [_region(region, body, dialect) for region, body in zip(pointwise.regions, kernel.bodies, strict=True)]
    alike: dict[str, int] = {}
    for region in contexts:
        # Regions that differ only in their parameters, as those of a concatenation do, are calls of one function.
        region["function"] = alike.setdefault(_anonymous(region), region["index"])
    context = {"block": schedule.vectors[0], "lanes": min(schedule.unrolls)}
    context["checked"] = bool(kernel.checked)
    return {**context, "regions": contexts}, {"interleaved": True}


def _anonymous(region: dict[str, Any]) -> str:
    """Prints a region's context without the region's number and the names of its parameters, to compare regions by."""
    texts = repr([(key, value) for key, value in region.items() if key not in ("index", "title")])
    numbers = {name: f"<{number}>" for number, name in enumerate(region["arguments"])}
    return re.sub(r"\w+", lambda word: numbers.get(word.group(), word.group()), texts)


def _region(region: RegionContext, body: Body, dialect: Dialect) -> dict[str, Any]:
    inner, parameters = region.inner_size, region_parameters(region, "int64_t")
    work = " * ".join([*region.outer_sizes, f"(({inner} + block - 1) / block)"])
    gathers = _gathers(region, body, dialect)
    halved = _is_halved(region, gathers)
    stores = [_store(operand, halved) for operand in region.stores]
    by_row = [o for o in region.stores if o.indices and o.kind == "contiguous"]
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
        "fetched": [_fetched(o, region.rank) for o in region.loads if o.pointer and o.kind == "contiguous"],
        "before": [*(_load(o, False) for o in region.loads if not o.pointer and o.constant_in_row), *gathers.before],
        "rows": gathers.rows,
        "loads": [
            *(_load(operand, halved) for operand in region.loads if not operand.constant_in_row),
            *(_loaded_row(row, halved) for row in gathers.rows),
        ],
        "gathers": [{"index": o.index, "offset": _offset(o)} for o in region.operands if o.index in gathers.single],
        "checked": bool(region.gathers or any(operand.indices for operand in region.stores)),
        "chosen_rows": [{"index": o.index, "storage": o.storage, **_chosen(o), "local": o.local} for o in by_row],
        "lines": gathers.lines,
        "scratch_stores": [],
        "reductions": [],
        "stores": stores,
        "scattered": [store for store in stores if store["spare"]],
        "streamed": [store for store in stores if store["group"]],
    }


def _is_constant(operand: OperandContext) -> bool:
    """Returns whether a run of neighbours needs one element only, which is loaded before the loop."""
    return bool(operand.pointer) and operand.constant_in_row


@dataclass(frozen=True)
class _Row:
    """Describes a gather whose indices are the same for a run of neighbours: a load from an address computed before the
    loop."""

    line: Line
    operand: OperandContext
    address: str


@dataclass(frozen=True)
class _Gathers:
    """Holds the lines of a region: ``before`` a run, and for each element; and which operands are gathered one by
    one. A line before a run is computed once where the compiler, which cannot move a call of ``pow``, would not."""

    before: tuple[Line, ...]
    rows: tuple[_Row, ...]
    lines: tuple[Line, ...]
    single: frozenset[int]  # and a store whose place differs from element to element


def _gathers(region: RegionContext, body: Body, dialect: Dialect) -> _Gathers:
    is_scatter = any(operand.indices for operand in region.stores)
    constant = _constant_in_run(region, body, is_scatter)
    gathered: dict[int, Line] = {}
    rows, lines, single = [], [], set()
    for line in region.lines:
        instruction = body.instructions[line.position]
        if instruction.op != "gather" or not constant.issuperset(instruction.args):
            lines += [] if line.position in constant else [line]
            single |= {instruction.attr} if instruction.op == "gather" else set()
            continue
        operand, terms = region.operands[instruction.attr], []
        for argument, (size, stride) in zip(instruction.args, operand.gathered, strict=True):
            within = f"jitgen::within({_name_of(argument, region, body)}, {size}, any_outside)"
            terms.append(within if stride == "1" else f"{within} * {stride}")
        address = " + ".join([operand.local, *terms])
        if line.position in constant:
            text = dialect.assign(line.type, line.value, f"jitgen::load(*({address}))")
            gathered[line.position] = replace(line, text=text)
        else:
            rows.append(_Row(line, operand, address))
    single |= {operand.index for operand in region.stores if operand.indices and operand.kind != "contiguous"}
    before = tuple(gathered.get(line.position, line) for line in region.lines if line.position in constant)
    return _Gathers(before, tuple(rows), tuple(lines), frozenset(single))


def _constant_in_run(region: RegionContext, body: Body, is_scatter: bool) -> set[int]:
    """Returns the positions of what is computed once for a run of neighbours: all that is the same for them where an
    address may depend on it, else what is computed of operands that are, and the numbers among its arguments."""
    constant: set[int] = set()
    loaded: set[int] = set()
    for position, instruction in enumerate(body.instructions):
        if instruction.op in ("load", "iota", "gather"):
            is_constant = region.operands[instruction.attr].constant_in_row
            if instruction.op != "gather" and is_constant:
                constant.add(position)
                loaded.add(position)
            elif instruction.op == "gather" and is_constant and is_scatter and constant.issuperset(instruction.args):
                constant.add(position)  # which the place of a row may depend on
        elif constant.issuperset(instruction.args):
            constant.add(position)
            loaded.update([position] if not loaded.isdisjoint(instruction.args) else [])
    if region.gathers or is_scatter:
        return constant
    stack = [position for position in loaded if body.instructions[position].args]
    while stack:
        arguments = set(body.instructions[stack.pop()].args) - loaded
        loaded |= arguments
        stack += arguments
    return loaded


def _chosen(operand: OperandContext) -> dict[str, str]:
    """Describes where the indices of a store choose, whether they are in range, and whether it is an error that they
    are not."""
    inside = operand.inside("jitgen::is_within({0}, {1})", " && ")
    return {"chosen": operand.chosen, "inside": inside, "reported": operand.inside("{0} != jitgen::left_out", " && ")}


def _name_of(position: int, region: RegionContext, body: Body) -> str:
    """Returns the name of an instruction's value."""
    instruction = body.instructions[position]
    if instruction.op == "load":
        return region.operands[instruction.attr].value
    named = {line.position: line.value for line in region.lines}
    return named.get(position, CPP.scalar.format(instruction.attr))


def _loaded_row(row: _Row, halved: bool) -> dict[str, str]:
    name = f"row_{row.line.value}"
    return {
        "type": row.line.type,
        "value": row.line.value,
        "local": name,
        "halves": name if halved else "",
        "expression": f"halves_{row.line.value}.at(lane)"
        if halved
        else f"jitgen::load({name}[{_offset(row.operand)}])",
    }


def _is_halved(region: RegionContext, gathers: _Gathers) -> bool:
    """Returns whether a group's elements may be computed in another order than that in memory (``Halves`` in
    group.hpp)."""
    if gathers.single or any(row.operand.constant_in_row for row in gathers.rows):
        return False
    if any(operand.indices for operand in region.stores):
        return False
    moving = [operand for operand in region.operands if not operand.constant_in_row]
    return all(operand.dtype == "bfloat16" and operand.kind == "contiguous" for operand in moving)


def _operand(operand: OperandContext, rank: int) -> dict[str, str]:
    kind = f"{operand.pointer_type} const" if operand.pointer else "const int64_t"
    return {"declaration": f"{kind} {operand.local}", "start": _start(operand, "at", rank)}


def _fetched(operand: OperandContext, rank: int) -> dict[str, Any]:
    return {"index": operand.index, "storage": operand.storage, "later": _start(operand, "later", rank)}


def _start(operand: OperandContext, walk: str, rank: int) -> str:
    """Prints the address, or the iota's value, at which the run at position ``walk`` begins."""
    indices = [f"{walk}.index[{dim}]" for dim in range(rank - 1)]
    terms = [operand.pointer or operand.offset, operand.base(indices)]
    start = "start" if walk == "at" else f"{walk}.index[{rank - 1}] * block"
    if operand.inner != "0":
        terms.append(start if operand.inner == "1" else f"{start} * {operand.inner}")
    return " + ".join(term for term in terms if term)


def _load(operand: OperandContext, halved: bool) -> dict[str, str]:
    halves = operand.local if halved and operand.pointer else ""
    expression = f"halves_{operand.value}.at(lane)"
    if not halves:
        expression = operand.neighbour(operand.local, _offset(operand))
    return {
        "type": operand.type,
        "value": operand.value,
        "local": operand.local,
        "halves": halves,
        "expression": expression,
        "text": f"const {operand.type} {operand.value} = {expression};",
        "mark": "",
    }


def _store(operand: OperandContext, halved: bool) -> dict[str, Any]:
    group = "GroupOfHalves" if halved else "Group"
    store = {
        "index": operand.index,
        "local": operand.local,
        "storage": operand.storage,
        "value": operand.value,
        "offset": _offset(operand),
        "group": group if operand.kind == "contiguous" else "",
        "spare": "",
        "inside": "",
        "bypasses_cache": f"output{operand.index}.past",
    }
    if operand.indices and operand.kind == "contiguous":
        return {**store, "group": "", "local": f"chosen{operand.index}"}
    if operand.indices:
        chosen, spare = _chosen(operand), f"spare{operand.index}"
        address = f"{operand.local} + at{operand.index} + {chosen['chosen']}"
        address_of_value = f"jitgen::place({address}, {chosen['inside']}, {chosen['reported']}, &{spare}, outside)"
        return {**store, "spare": spare, "local": address_of_value, "offset": "0"}
    return store


def _offset(operand: OperandContext) -> str:
    """Prints the offset of element ``i`` from its run's beginning, in elements."""
    return {"0": "0", "1": "i"}.get(operand.inner, f"i * {operand.inner}")
