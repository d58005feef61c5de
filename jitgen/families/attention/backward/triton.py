"""Builds the context of ``templates/attention_backward/attention_backward.py.j2``; see ``rule/triton.py``."""

from __future__ import annotations

from typing import Any

from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Built
from jitgen.families.attention.backward.context import Backward, Result, bounds
from jitgen.families.attention.backward.layout import Layout
from jitgen.families.attention.backward.schedule import TritonSchedule
from jitgen.families.attention.rule.bounds import tile_ends
from jitgen.families.attention.rule.context import Operand, Rule
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
from jitgen.kernel.printed import indices


def build(kernel: Kernel, layout: Layout, schedule: TritonSchedule, backward: Backward, dialect: Dialect) -> Built:
    """Builds template context and source options; see ``kernel/render.py``."""
    tile_bounds = bounds(backward.rule, tile_ends(backward.rule.operands, dialect.name, forward=False), WORDS)
    context: dict[str, Any] = {
        **walk(backward, tile_bounds, schedule, "batch", _row),
        "groups": " * ".join(backward.groups),
        "group_lines": [f"{name} = {text}" for name, text in indices(backward.groups, "group", "h", "//")],
        "group_bases": [f"at{o.index} = {o.group_base}" for o in backward.operands],
        "products": [
            {
                "number": p.number,
                "accumulator": p.accumulator,
                "left": _left(p.left, p.number, p.depth, schedule),
                "edge": _tile(p.right, f"d{p.number}", p.depth, schedule, True),
                "whole": _tile(p.right, f"d{p.number}", p.depth, schedule, False),
                "precision": p.precision if p.dtype == "float32" else "ieee",
            }
            for p in backward.products
        ],
        "results": [
            {
                "number": r.number,
                "accumulator": r.accumulator,
                "shared": r.shared,
                "edge": _tile(r.value, f"e{r.number}", r.width, schedule, True),
                "whole": _tile(r.value, f"e{r.number}", r.width, schedule, False),
                "precision": r.precision if r.dtype == "float32" else "ieee",
                "dtype": dialect.storage_types[r.dtype],
                "loads": [result_load(o, _at_result(o, r), _live(r, schedule)) for o in r.loads],
                "lines": r.lines,
                "stores": [result_store(o, _at_result(o, r), _live(r, schedule)) for o in r.stores],
            }
            for r in backward.results
        ],
        "phases": phases(_phase(backward.rule), _phase(backward.unmasked), backward.masked),
    }
    return context, options(backward, schedule, layout.unit, _units(backward, layout))


def _units(backward: Backward, layout: Layout) -> dict[str, int]:
    """Returns the divisors of the sizes and strides that decide the width of an access."""
    units = dict.fromkeys((*(p.depth for p in backward.products), *(r.width for r in backward.results)), layout.unit)
    for operand in backward.operands:
        if operand.kind == "contiguous" and operand.pointer:
            strides = (*operand.batch, *operand.groups, operand.own[0])
            units |= dict.fromkeys(strides, access_unit(operand, layout.unit))
    return units


def _row(operand: Operand) -> str:
    return operand.row("row")


def _left(operand: Operand, number: int, depth: str, schedule: TritonSchedule) -> str:
    at = f"at{operand.index} + (row * {operand.own[0]})[:, None] + {inner(operand, f'd{number}', operand.own[1])}"
    mask = "" if schedule.even else f", mask=(d{number} < {depth}) & (row >= 0)[:, None], other=0"
    return f"tl.load({operand.pointer} + {at}{mask})"


def _tile(operand: Operand, along: str, size: str, schedule: TritonSchedule, edge: bool) -> str:
    row, step = operand.own
    return tile_load(operand, along, size, (f"column * {row}", step), schedule.even, edge)


def _phase(rule: Rule) -> dict[str, Any]:
    return {**rule_of_tile(rule, _row, "({})"), "values": rule.values}


def _at_result(operand: Operand, result: Result) -> str:
    row = f"({operand.row('row', 'batch')})[:, None]"
    return f"{row} + {inner(operand, f'e{result.number}', operand.own[1])}"


def _live(result: Result, schedule: TritonSchedule) -> str:
    return "live[:, None]" if schedule.even else f"live[:, None] & (e{result.number} < {result.width})"
