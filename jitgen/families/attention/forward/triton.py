"""Builds the context of ``templates/attention/attention.py.j2``; see ``rule/triton.py``."""

from __future__ import annotations

from typing import Any

from jitgen.codegen import triton
from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Built, Source, printed
from jitgen.families.attention.forward.context import Attention, Computed, bounds
from jitgen.families.attention.forward.layout import Layout
from jitgen.families.attention.forward.schedule import TritonSchedule
from jitgen.families.attention.rule.bounds import tile_ends
from jitgen.families.attention.rule.context import Operand
from jitgen.families.attention.rule.triton import (
    WORDS,
    access_unit,
    inner,
    options,
    phases,
    result_load,
    result_store,
    rule_of_tile,
    tile_load,
    walk,
)
from jitgen.ir.program import Kernel


def build(kernel: Kernel, layout: Layout, schedule: TritonSchedule, attention: Attention, dialect: Dialect) -> Built:
    """Builds template context and source options; see ``kernel/render.py``."""
    (body,) = kernel.bodies
    operands = attention.rule.operands
    tile_bounds = bounds(body, layout, tile_ends(operands, dialect.name), WORDS)
    tiles = walk(attention, tile_bounds, schedule, "at", Operand.packed_row)
    tiles["at_once"] = tiles["at_once"] if schedule.splits > 1 or any(o.pointer for o in tiles["key_ends"]) else 0
    context: dict[str, Any] = {
        **tiles,
        "splits": schedule.splits,
        "tasks": attention.tasks,
        "packed_rows": attention.packed_rows,
        "row_lines_of": [f"{name} = {text}" for name, text in attention.row_indices("//")],
        "query": [_query(o, schedule) for o in attention.query],
        "query_lines": attention.query_lines,
        "query_value": triton.store_cast(attention.query_value, attention.key_dtype),
        "phases": phases(
            _phase(attention, schedule, dialect, True), _phase(attention, schedule, dialect, False), attention.masked
        ),
        "value_dtype": dialect.storage_types[attention.value_dtype],
        "precisions": [c.precision if c.dtype == "float32" else "ieee" for c in body.contractions],
        "row_loads": [_result_load(o, schedule) for o in attention.row_loads],
        "row_lines": attention.row_lines,
        "loads": [_result_load(o, schedule) for o in attention.loads],
        "lines": attention.lines,
        "row_stores": [_result_store(o, schedule) for o in attention.row_stores],
        "stores": [_result_store(o, schedule) for o in attention.stores],
        "row_maxima": attention.row_maxima,
        "row_sums": attention.row_sums,
    }
    return context, options(attention, schedule, layout.unit, _units(attention, layout))


def _units(attention: Attention, layout: Layout) -> dict[str, int]:
    """Returns the divisors of the sizes and strides that decide the width of an access."""
    units = {"depth": layout.unit, "width": layout.unit}
    for operand in attention.operands:
        if operand.kind == "contiguous" and operand.pointer:
            along = operand.own[0] if operand.role in ("value", "value_source") else operand.own[1]
            strides = (*operand.batch, *operand.groups, *operand.own, *(stride for _, stride in operand.gathered))
            units |= {name: access_unit(operand, layout.unit) for name in strides if name != along}
    return units


def _mask(*conditions: str) -> str:
    live = [condition for condition in conditions if condition]
    return f", mask={' & '.join(live)}, other=0.0" if live else ""


def _query(operand: Operand, schedule: TritonSchedule) -> str:
    at = f"({operand.packed_row()})[:, None] + {inner(operand, 'd', operand.own[1])}"
    if operand.pointer is None:
        return f"{operand.value} = ({at}).to({operand.type})"
    mask = "" if schedule.even_d else ", mask=(d < depth) & (row >= 0)[:, None], other=0"
    return f"{operand.value} = {triton.load_cast(f'tl.load({operand.pointer} + {at}{mask})', operand.dtype)}"


def _computed(
    computed: Computed, name: str, along: str, size: str, even: bool, edge: bool, dialect: Dialect
) -> tuple[list[str], str]:
    """Computes a tile of keys or values [keys, elements]: its lines, and the expression of its value.

    Args:
        name: what the names of values begin with.
        along: the indices along the elements, ``size`` their number, ``even`` whether that is the tile's.
        edge: whether there may be keys beyond the last.
    """
    at, masks = {}, {}
    for index, operand in computed.operands.items():
        row, step = operand.own if operand.role == "key_source" else reversed(operand.own)
        at[index] = f"at{index} + (column * {row})[:, None]"
        at[index] += "" if operand.kind == "key" else f" + {inner(operand, along, step)}"
        beyond = "" if even or operand.kind == "key" else f"({along} < {size})"
        masks[index] = " & ".join(filter(None, ["(column < keys)[:, None]" if edge else "", beyond]))
    sources = {
        i: Source(o.pointer, at[i], o.gathered, o.dtype, masks[i])
        for i, o in computed.operands.items()
        if o.gathered and o.pointer
    }
    result = printed(computed.instructions, dialect, name, sources=sources)
    lines: list[str] = []
    for position, instruction in enumerate(computed.instructions):
        line = result.lines.get(position)
        if line is not None:
            lines.append(f"{line.text}{line.mark}")
        elif instruction.op in ("load", "iota"):
            operand = computed.operands[instruction.attr]
            load = f"tl.load({operand.pointer} + {at[operand.index]}{_mask(masks[operand.index])})"
            value = triton.load_cast(load, operand.dtype) if operand.pointer else f"({at[operand.index]}).to(tl.int64)"
            lines.append(f"{result.names[position]} = {value}")
    value = result.names[len(computed.instructions) - 1]
    # What is loaded where nothing is may be any number, and times a weight of zero it must be zero.
    hidden = " & ".join(
        filter(None, ["(column < keys)[:, None]" if edge else "", "" if even else f"({along} < {size})"])
    )
    value = f"tl.where({hidden}, {value}, 0)" if hidden else value
    return lines, triton.store_cast(value, computed.dtype)


def _phase(attention: Attention, schedule: TritonSchedule, dialect: Dialect, edge: bool) -> dict[str, Any]:
    """Describes what a loop over tiles computes; with ``edge`` it has masks, and keys may be beyond the last."""
    rule = attention.rule if edge else attention.unmasked
    phase = {**rule_of_tile(rule, Operand.packed_row, "{}"), "score": rule.score}
    for role, operand, computed in (
        ("key", attention.key, attention.computed_key),
        ("value", attention.value, attention.computed_value),
    ):
        along, size, even = ("d", "depth", schedule.even_d) if role == "key" else ("e", "width", schedule.even_e)
        lines: list[str] = []
        if computed is not None:
            lines, tile = _computed(computed, role[0], along, size, even, edge, dialect)
        else:
            row, step = operand.own if role == "key" else reversed(operand.own)
            tile = tile_load(operand, along, size, (f"column * {row}", step), even, edge)
        phase |= {role: tile, f"{role}_lines": lines}
    return phase


def _at_result(operand: Operand) -> str:
    row = f"({operand.packed_row()})[:, None]"
    return row if operand.kind == "row" else f"{row} + {inner(operand, 'e', operand.own[1])}"


def _live_result(operand: Operand, schedule: TritonSchedule) -> str:
    return "live[:, None]" if operand.kind == "row" or schedule.even_e else "live[:, None] & (e < width)"


def _result_load(operand: Operand, schedule: TritonSchedule) -> str:
    return result_load(operand, _at_result(operand), _live_result(operand, schedule))


def _result_store(operand: Operand, schedule: TritonSchedule) -> dict[str, str]:
    at = _at_result(operand)
    if schedule.splits > 1:
        at += f" + key_range * {_range_elements(operand)}"
    return result_store(operand, at, _live_result(operand, schedule))


def _range_elements(operand: Operand) -> str:
    """Returns the elements of the temporary with one range's values."""
    return "(tasks * packed_rows)" if operand.kind == "row" else "(tasks * packed_rows * width)"
