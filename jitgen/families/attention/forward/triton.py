"""The context of ``templates/attention/attention.py.j2``.

A program has a block of rows. It first computes which tiles of keys its rows see, and which of these no mask touches:
``[first, last)`` and, within, ``[open_first, open_last)``; nothing but the rule's bounds is computed for that. Then it
walks the tiles in three loops, of which the middle one has no mask.
"""

from __future__ import annotations

from typing import Any

from jitgen.codegen import environment, triton
from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Built, Line, Source, printed
from jitgen.families.attention.forward.addresses import base_of_task, row_indices, row_offset
from jitgen.families.attention.forward.context import Attention, Computed, Operand, Rule, bounds
from jitgen.families.attention.forward.layout import Layout
from jitgen.families.attention.forward.schedule import TritonSchedule
from jitgen.families.attention.rule.addresses import indices
from jitgen.families.attention.rule.bounds import Words, ends_of
from jitgen.families.operands import ACCESS_BYTES, item_size
from jitgen.ir.program import Kernel

AT_ONCE, MOST_AT_ONCE = 1024, 128
"""Integers of a tensor whose ends a program finds at once, and tiles where it needs none: what its threads hold."""
WORDS = Words("False", "True", "tl.minimum", "tl.maximum")


def build(kernel: Kernel, layout: Layout, schedule: TritonSchedule, of: Attention, dialect: Dialect) -> Built:
    """Template context and source options; see ``families/render.py``."""
    (body,) = kernel.bodies
    memory = [operand for operand in of.operands if operand.pointer]
    scores = list(of.rule.operands)
    known = {o.index: ends_of(o) for o in scores if o.is_integer and o.kind != "both"}
    found = bounds(body, layout, known, WORDS)
    key_ends = [o for o in scores if o.kind == "key" and found.reads(ends_of(o))]
    by_tensor = any(operand.pointer for operand in key_ends)
    precisions = [c.precision if c.dtype == "float32" else "ieee" for c in body.contractions]
    context: dict[str, Any] = {
        "parameters": [*(o.pointer for o in memory), *of.integers, *(name for name, _ in of.scalars)],
        "index_cast": ".to(tl.int64)" if schedule.wide else "",
        "splits": schedule.splits,
        "tasks": " * ".join(of.batch) or "1",
        "packed_rows": " * ".join([*of.packed, "rows"]),
        "index_lines": [f"{name} = {text}" for name, text in indices(of.batch, "task", "z", "//")],
        "row_lines_of": [f"{name} = {text}" for name, text in row_indices(of.packed, "//")],
        "bases": [f"at{o.index} = {base_of_task(o, layout)}" for o in of.operands],
        "query": [_query(o, layout, schedule) for o in of.query],
        "query_lines": of.query_lines,
        "query_value": triton.store_cast(of.query_value, of.key_dtype),
        "tasks_of": [_once(o) for o in scores if o.kind == "task"],
        "rows_of": [_row_value(o, layout) for o in scores if o.kind == "row"],
        "row_ends": [o for o in scores if o.kind == "row" and found.reads(ends_of(o))],
        "key_ends": key_ends,
        "at_once": AT_ONCE // schedule.block_n if by_tensor else MOST_AT_ONCE if schedule.splits > 1 else 0,
        "bounds": [(name, expression) for name, expression, _ in found.lines],
        "hidden": found.hidden,
        "open": found.open,
        "masked": of.masked,
        "phases": _phases(of, layout, schedule, dialect),
        "value_dtype": dialect.storage_types[of.value_dtype],
        "precisions": precisions,
        "row_loads": [_result_load(o, layout, schedule) for o in of.row_loads],
        "row_lines": of.row_lines,
        "loads": [_result_load(o, layout, schedule) for o in of.loads],
        "lines": of.lines,
        "row_stores": [_result_store(o, layout, schedule) for o in of.row_stores],
        "stores": [_result_store(o, layout, schedule) for o in of.stores],
        "tops": of.tops,
        "totals": of.totals,
    }
    context["include"] = _used(context, of)
    integer = "i64" if schedule.wide else "i32"
    units = _units(of, layout)
    options = {
        "signature": [
            *(f"*{triton.SIGNATURE_TYPES[o.dtype]}" for o in memory),
            *([integer] * len(of.integers)),
            *(triton.SIGNATURE_TYPES[dtype] for _, dtype in kernel.scalars),
        ],
        "multiples": [
            *(min(layout.unit * item_size(o.dtype), ACCESS_BYTES) if o.kind == "contiguous" else 1 for o in memory),
            *(min(units.get(name, 1), triton.MULTIPLE) for name in of.integers),
            *([1] * len(kernel.scalars)),
        ],
        "num_warps": schedule.warps,
        "num_stages": schedule.stages,
        "enable_fp_fusion": False,
    }
    return context, options


def _units(of: Attention, layout: Layout) -> dict[str, int]:
    """What the sizes and strides that decide the width of an access are multiples of."""
    units = {"depth": layout.unit, "width": layout.unit}
    for operand in of.operands:
        if operand.kind == "contiguous" and operand.pointer:
            unit = min(layout.unit, ACCESS_BYTES // item_size(operand.dtype))
            inner = operand.own[0] if operand.role in ("value", "value_source") else operand.own[1]
            strides = (*operand.batch, *operand.packed, *operand.own, *(stride for _, stride in operand.gathered))
            units |= {name: unit for name in strides if name != inner}
    return units


def _mask(*conditions: str) -> str:
    live = [condition for condition in conditions if condition]
    return f", mask={' & '.join(live)}, other=0.0" if live else ""


def _inner(operand: Operand, index: str, stride: str) -> str:
    return index if operand.kind == "contiguous" else f"{index} * {stride}"


def _query(operand: Operand, layout: Layout, schedule: TritonSchedule) -> str:
    at = f"({row_offset(operand, layout)})[:, None] + {_inner(operand, 'd', operand.own[1])}"
    if operand.pointer is None:
        return f"{operand.value} = ({at}).to({operand.type})"
    mask = "" if schedule.even_d else ", mask=(d < depth) & (row >= 0)[:, None], other=0"
    return f"{operand.value} = {triton.load_cast(f'tl.load({operand.pointer} + {at}{mask})', operand.dtype)}"


def _once(operand: Operand) -> str:
    at = f"at{operand.index}"
    value = triton.load_cast(f"tl.load({operand.pointer} + {at})", operand.dtype) if operand.pointer else at
    return f"x{operand.index} = {value}"


def _row_value(operand: Operand, layout: Layout) -> str:
    at = row_offset(operand, layout)
    value = triton.load_cast(f"tl.load({operand.pointer} + {at})", operand.dtype) if operand.pointer else at
    return f"x{operand.index} = {value}"


def _tile(operand: Operand, rows: str, inner: str, stride: str, size: str, even: bool) -> dict[str, str]:
    """The load of a tile [keys, elements], with and without keys beyond the last."""
    at = f"{operand.pointer} + at{operand.index} + ({rows})[:, None] + {_inner(operand, inner, stride)}"
    beyond = "" if even else f"({inner} < {size})"

    def load(*conditions: str) -> str:
        live = " & ".join(condition for condition in conditions if condition)
        return f"tl.load({at}{f', mask={live}, other=0' if live else ''})"

    return {"edge": load("(column < keys)[:, None]", beyond), "whole": load(beyond)}


def _computed(
    of: Computed, name: str, inner: str, size: str, even: bool, edge: bool, dialect: Dialect
) -> tuple[list[str], str]:
    """A tile of keys or values [keys, elements] that is computed: its lines, and the expression of its value.

    Args:
        name: what the names of values begin with.
        inner: the indices along the elements, ``size`` their number, ``even`` whether that is the tile's.
        edge: whether there may be keys beyond the last.
    """
    at, masks = {}, {}
    for index, operand in of.operands.items():
        row, step = operand.own if operand.role == "key_source" else reversed(operand.own)
        at[index] = f"at{index} + (column * {row})[:, None]"
        at[index] += "" if operand.kind == "key" else f" + {_inner(operand, inner, step)}"
        beyond = "" if even or operand.kind == "key" else f"({inner} < {size})"
        masks[index] = " & ".join(filter(None, ["(column < keys)[:, None]" if edge else "", beyond]))
    sources = {
        i: Source(o.pointer, at[i], o.gathered, o.dtype, masks[i])
        for i, o in of.operands.items()
        if o.gathered and o.pointer
    }
    found = printed(of.instructions, dialect, name, sources=sources)
    lines: list[str] = []
    for position, instruction in enumerate(of.instructions):
        line = found.lines.get(position)
        if line is not None:
            lines.append(f"{line.text}{line.mark}")
        elif instruction.op in ("load", "iota"):
            operand = of.operands[instruction.attr]
            load = f"tl.load({operand.pointer} + {at[operand.index]}{_mask(masks[operand.index])})"
            value = triton.load_cast(load, operand.dtype) if operand.pointer else f"({at[operand.index]}).to(tl.int64)"
            lines.append(f"{found.names[position]} = {value}")
    value = found.names[len(of.instructions) - 1]
    # What is loaded where nothing is may be any number, and times a weight of zero it must be zero.
    hidden = " & ".join(
        filter(None, ["(column < keys)[:, None]" if edge else "", "" if even else f"({inner} < {size})"])
    )
    value = f"tl.where({hidden}, {value}, 0)" if hidden else value
    return lines, triton.store_cast(value, of.dtype)


def _phases(of: Attention, layout: Layout, schedule: TritonSchedule, dialect: Dialect) -> list[dict[str, Any]]:
    """The three loops over tiles: those before the open ones, these, and those after."""

    def tiles(edge: bool) -> dict[str, Any]:
        lines: dict[str, list[str]] = {"key": [], "value": []}
        tile = {}
        for role, inner, size, even in (
            ("key", "d", "depth", schedule.even_d),
            ("value", "e", "width", schedule.even_e),
        ):
            operand, computed = (of.key, of.computed_key) if role == "key" else (of.value, of.computed_value)
            if computed is not None:
                lines[role], tile[role] = _computed(computed, role[0], inner, size, even, edge, dialect)
                continue
            row, step = operand.own if role == "key" else reversed(operand.own)
            tile[role] = _tile(operand, f"column * {row}", inner, step, size, even)["edge" if edge else "whole"]
        return {"key": tile["key"], "value": tile["value"], "key_lines": lines["key"], "value_lines": lines["value"]}

    edge = {"edge": True, **tiles(True), **_rule(of.rule, layout)}
    whole = {"edge": False, **tiles(False), **_rule(of.unmasked, layout)}
    before = [{"range": "first, open_first", **edge}] if of.masked else []
    return [
        *before,
        {"range": "open_first, open_last", **whole},
        {"range": "open_last, last", **edge},
    ]


def _rule(rule: Rule, layout: Layout) -> dict[str, Any]:
    loads = []
    for operand in rule.operands:
        to = f".to({operand.type})" if operand.pointer is None else ""
        if operand.kind == "task":
            expression = f"x{operand.index}{to}"
            if operand.pointer is None:
                expression = f"(x{operand.index} + tl.zeros((1, 1), tl.int32)){to}"
        elif operand.kind == "row":
            expression = f"x{operand.index}[:, None]{to}"
        elif operand.kind == "key":
            at = f"(at{operand.index} + column * {operand.own[1]})[None, :]"
            expression = (
                f"{at}{to}" if operand.pointer is None else _score_load(operand, at, "(column < keys)[None, :]")
            )
        else:
            at = f"({row_offset(operand, layout)})[:, None] + (column * {operand.own[1]})[None, :]"
            live = "(column < keys)[None, :]"
            expression = f"({at}){to}" if operand.pointer is None else _score_load(operand, at, live)
        loads.append(f"{operand.value} = {expression}")
    return {"loads": loads, "lines": rule.lines, "score": rule.value}


def _score_load(operand: Operand, at: str, live: str) -> str:
    return triton.load_cast(f"tl.load({operand.pointer} + {at}, mask={live}, other=0)", operand.dtype)


def _at_result(operand: Operand, layout: Layout) -> str:
    row = f"({row_offset(operand, layout)})[:, None]"
    return row if operand.kind == "row" else f"{row} + {_inner(operand, 'e', operand.own[1])}"


def _live_result(operand: Operand, schedule: TritonSchedule) -> str:
    return "live[:, None]" if operand.kind == "row" or schedule.even_e else "live[:, None] & (e < width)"


def _result_load(operand: Operand, layout: Layout, schedule: TritonSchedule) -> str:
    at = _at_result(operand, layout)
    if operand.pointer is None:
        return f"{operand.value} = ({at}).to({operand.type})"
    load = f"tl.load({operand.pointer} + {at}, mask={_live_result(operand, schedule)}, other=0)"
    return f"{operand.value} = {triton.load_cast(load, operand.dtype)}"


def _result_store(operand: Operand, layout: Layout, schedule: TritonSchedule) -> dict[str, str]:
    at = _at_result(operand, layout)
    if schedule.splits > 1:
        at += f" + key_range * {_range_elements(operand)}"
    return {
        "target": f"{operand.pointer} + {at}",
        "stored": triton.store_cast(operand.value, operand.dtype),
        "mask": _live_result(operand, schedule),
    }


def _range_elements(operand: Operand) -> str:
    """Elements of the temporary with one range's values."""
    return "(tasks * packed_rows)" if operand.kind == "row" else "(tasks * packed_rows * width)"


def _used(context: dict[str, Any], of: Attention) -> str:
    """The common header's functions that the kernel calls."""
    every: list[Line] = [*of.query_lines, *of.rule.lines, *of.unmasked.lines, *of.row_lines, *of.lines]
    lines = [line.text for line in every]
    for name in ("query", "tasks_of", "rows_of", "row_loads", "loads"):
        lines += context[name]
    for phase in context["phases"]:
        lines += [*phase["loads"], *phase["key_lines"], *phase["value_lines"], phase["key"], phase["value"]]
    lines += [store["stored"] for store in (*context["row_stores"], *context["stores"])]
    lines.append(context["query_value"])
    return environment.select_functions(environment.header("jitgen_triton.py", None), "\n".join(lines))
