"""The context of ``templates/attention_backward/attention_backward.py.j2``.

A program has a block of rows. It computes first which tiles its rows see, and which of these no mask touches, and walks
them in three loops, of which the middle one has no mask.
"""

from __future__ import annotations

from typing import Any

from jitgen.codegen import environment, triton
from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Built
from jitgen.families.attention.backward.context import Backward, Operand, Tile, bounds
from jitgen.families.attention.backward.layout import Layout
from jitgen.families.attention.backward.schedule import TritonSchedule
from jitgen.families.attention.rule.addresses import indices, sum_of
from jitgen.families.attention.rule.bounds import Words, ends_of
from jitgen.families.operands import ACCESS_BYTES, item_size
from jitgen.ir.program import Kernel

AT_ONCE, MOST_AT_ONCE = 1024, 128
"""Integers of a tensor whose ends a program finds at once, and tiles where it needs none: what its threads hold."""
WORDS = Words("False", "True", "tl.minimum", "tl.maximum")


def build(kernel: Kernel, layout: Layout, schedule: TritonSchedule, of: Backward, dialect: Dialect) -> Built:
    """Template context and source options; see ``families/render.py``."""
    memory = [operand for operand in of.operands if operand.pointer]
    scores = of.tile.operands
    known = {o.index: ends_of(o) for o in scores if o.is_integer and o.kind != "both"}
    found = bounds(of.tile, known, WORDS)
    key_ends = [o for o in scores if o.kind == "key" and found.reads(ends_of(o))]
    by_tensor = any(operand.pointer for operand in key_ends)
    context: dict[str, Any] = {
        "parameters": [*(o.pointer for o in memory), *of.integers, *(name for name, _ in of.scalars)],
        "index_cast": ".to(tl.int64)" if schedule.wide else "",
        "groups": " * ".join(of.summed),
        "index_lines": [f"{name} = {text}" for name, text in indices(of.batch, "task", "z", "//")],
        "group_lines": [f"{name} = {text}" for name, text in indices(of.summed, "group", "h", "//")],
        "batch_bases": [f"batch{o.index} = {_base(o, layout)}" for o in of.operands],
        "group_bases": [f"at{o.index} = {_base_of_group(o, layout)}" for o in of.operands],
        "products": [
            {
                "number": p.number,
                "accumulator": p.accumulator,
                "left": _left(p.left, p.number, p.depth, schedule),
                "edge": _tile(p.right, f"d{p.number}", p.depth, schedule, True),
                "whole": _tile(p.right, f"d{p.number}", p.depth, schedule, False),
                "precision": p.precision if p.dtype == "float32" else "ieee",
            }
            for p in of.products
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
                "loads": [_result_load(o, r.number, r.width, schedule) for o in r.loads],
                "lines": r.lines,
                "stores": [_result_store(o, r.number, r.width, schedule) for o in r.stores],
            }
            for r in of.results
        ],
        "tasks_of": [_once(o) for o in scores if o.kind == "task"],
        "rows_of": [_row_value(o) for o in scores if o.kind == "row"],
        "row_ends": [o for o in scores if o.kind == "row" and found.reads(ends_of(o))],
        "key_ends": key_ends,
        "at_once": AT_ONCE // schedule.block_n if by_tensor else MOST_AT_ONCE,
        "bounds": [(name, expression) for name, expression, _ in found.lines],
        "hidden": found.hidden,
        "open": found.open,
        "masked": of.masked,
        "phases": _phases(of),
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


def _units(of: Backward, layout: Layout) -> dict[str, int]:
    """What the sizes and strides that decide the width of an access are multiples of."""
    units = dict.fromkeys((*(p.depth for p in of.products), *(r.width for r in of.results)), layout.unit)
    for operand in of.operands:
        if operand.kind == "contiguous" and operand.pointer:
            unit = min(layout.unit, ACCESS_BYTES // item_size(operand.dtype))
            units |= dict.fromkeys((*operand.batch, *operand.summed, operand.own[0]), unit)
    return units


def _base(operand: Operand, layout: Layout) -> str:
    return sum_of([operand.offset], operand.batch, [f"z{dim}" for dim in range(layout.batch)])


def _base_of_group(operand: Operand, layout: Layout) -> str:
    return sum_of([f"batch{operand.index}"], operand.summed, [f"h{dim}" for dim in range(layout.summed)])


def _inner(operand: Operand, index: str) -> str:
    return index if operand.kind == "contiguous" else f"{index} * {operand.own[1]}"


def _left(operand: Operand, number: int, depth: str, schedule: TritonSchedule) -> str:
    at = f"at{operand.index} + (row * {operand.own[0]})[:, None] + {_inner(operand, f'd{number}')}"
    mask = "" if schedule.even else f", mask=(d{number} < {depth}) & (row >= 0)[:, None], other=0"
    return f"tl.load({operand.pointer} + {at}{mask})"


def _tile(operand: Operand, inner: str, size: str, schedule: TritonSchedule, edge: bool) -> str:
    """The load of a tile [streamed, elements]; ``edge``: it may reach beyond the last streamed row."""
    at = f"{operand.pointer} + at{operand.index} + (column * {operand.own[0]})[:, None] + {_inner(operand, inner)}"
    live = ["(column < keys)[:, None]"] if edge else []
    live += [] if schedule.even else [f"({inner} < {size})"]
    mask = f", mask={' & '.join(live)}, other=0" if live else ""
    return f"tl.load({at}{mask})"


def _once(operand: Operand) -> str:
    at = f"at{operand.index}"
    value = triton.load_cast(f"tl.load({operand.pointer} + {at})", operand.dtype) if operand.pointer else at
    return f"x{operand.index} = {value}"


def _row_value(operand: Operand) -> str:
    at = f"at{operand.index} + row * {operand.own[0]}"
    value = triton.load_cast(f"tl.load({operand.pointer} + {at})", operand.dtype) if operand.pointer else at
    return f"x{operand.index} = {value}"


def _phases(of: Backward) -> list[dict[str, Any]]:
    """The three loops over tiles: those before the open ones, these, and those after."""
    edge = {"edge": True, **_tile_of(of.tile)}
    whole = {"edge": False, **_tile_of(of.unmasked)}
    before = [{"range": "first, open_first", **edge}] if of.masked else []
    return [*before, {"range": "open_first, open_last", **whole}, {"range": "open_last, last", **edge}]


def _tile_of(tile: Tile) -> dict[str, Any]:
    loads = []
    for operand in tile.operands:
        to = f".to({operand.type})" if operand.pointer is None else ""
        if operand.kind == "task":
            expression = f"x{operand.index}{to}"
            if operand.pointer is None:
                expression = f"(x{operand.index} + tl.zeros((1, 1), tl.int32)){to}"
        elif operand.kind == "row":
            expression = f"x{operand.index}[:, None]{to}"
        else:
            at = f"(at{operand.index} + column * {operand.own[1]})[None, :]"
            if operand.kind == "both":
                at = f"(at{operand.index} + row * {operand.own[0]})[:, None] + (column * {operand.own[1]})[None, :]"
            load = f"tl.load({operand.pointer} + {at}, mask=(column < keys)[None, :], other=0)"
            expression = triton.load_cast(load, operand.dtype) if operand.pointer else f"({at}){to}"
        loads.append(f"{operand.value} = {expression}")
    return {"loads": loads, "lines": tile.lines, "values": tile.values}


def _at_result(operand: Operand, number: int) -> str:
    return f"(batch{operand.index} + row * {operand.own[0]})[:, None] + {_inner(operand, f'e{number}')}"


def _live(number: int, width: str, schedule: TritonSchedule) -> str:
    return "live[:, None]" if schedule.even else f"live[:, None] & (e{number} < {width})"


def _result_load(operand: Operand, number: int, width: str, schedule: TritonSchedule) -> str:
    at = _at_result(operand, number)
    if operand.pointer is None:
        return f"{operand.value} = ({at}).to({operand.type})"
    load = f"tl.load({operand.pointer} + {at}, mask={_live(number, width, schedule)}, other=0)"
    return f"{operand.value} = {triton.load_cast(load, operand.dtype)}"


def _result_store(operand: Operand, number: int, width: str, schedule: TritonSchedule) -> dict[str, str]:
    return {
        "target": f"{operand.pointer} + {_at_result(operand, number)}",
        "stored": triton.store_cast(operand.value, operand.dtype),
        "mask": _live(number, width, schedule),
    }


def _used(context: dict[str, Any], of: Backward) -> str:
    """The common header's functions that the kernel calls."""
    lines = [line.text for line in (*of.tile.lines, *of.unmasked.lines)]
    lines += [*context["tasks_of"], *context["rows_of"]]
    for phase in context["phases"]:
        lines += phase["loads"]
    for result in context["results"]:
        lines += [*(line.text for line in result["lines"]), *result["loads"]]
        lines += [store["stored"] for store in result["stores"]]
    return environment.select_functions(environment.header("jitgen_triton.py", None), "\n".join(lines))
