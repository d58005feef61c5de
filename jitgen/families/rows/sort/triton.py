"""Builds the context of ``templates/sort/sort.py.j2``: a program sorts a block of rows, finds ranks in sorted chunks,
or counts numbers."""

from __future__ import annotations

from typing import Any

from jitgen.codegen import triton
from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Built, fields
from jitgen.families.rows.sort.context import Rows
from jitgen.families.rows.sort.schedule import Schedule
from jitgen.ir.program import Kernel
from jitgen.kernel.operands import WARP
from jitgen.kernel.printed_rows import RowOperand
from jitgen.kernel.rows import RowLayout

_COMPARED = {"float32": "tl.float32", "float64": "tl.float64", "float16": "tl.float32", "bfloat16": "tl.float32"}
"""The Triton type that elements of a dtype are compared as; integers are, as int32 or int64, by ``_INTEGERS``."""
_INTEGERS = {"int64": "tl.int64"}


def build(kernel: Kernel, layout: RowLayout, schedule: Schedule, rows: Rows, dialect: Dialect) -> Built:
    """Builds template context and source options; see ``kernel/render.py``."""
    compared = _COMPARED.get(rows.order.dtype) or _INTEGERS.get(rows.order.dtype, "tl.int32")
    live = "live" if rows.merges else "inside"
    store = _counted if rows.counts else _store
    context: dict[str, Any] = {
        "parameters": rows.triton_parameters,
        "index_cast": ".to(tl.int64)" if schedule.wide else "",
        "chunk": rows.order.chunk,
        "tile": schedule.tile,
        "block_rows": schedule.rows,
        "steps": schedule.steps,
        "descending": rows.order.descending,
        "compared": compared,
        "row_lines": rows.triton_indices,
        "row_loads": [_load(o, "row_live", "column") for o in rows.row_loads],
        "loads": [_load(o, live, "slot" if rows.merges else "column") for o in rows.loads],
        "list": f"{rows.loads[0].pointer} + {_at(rows.loads[0], 'other * ranks + middle')}" if rows.merges else "",
        "element": "" if rows.counts else _element(rows, compared),
        "listed": triton.load_cast("candidate", rows.order.dtype),
        "behind": [line for kind, what in rows.behind for line in _behind(kind, what, rows)],
        "stores": [store(o, what, rows.order.dtype) for o, what in rows.stores],
    }
    return context, rows.triton_options(schedule.wide, max(1, schedule.threads // WARP))


def _at(operand: RowOperand, index: str) -> str:
    """Returns the offset of an operand's elements at ``index`` of their rows."""
    base = operand.base([f"i{dim}" for dim in range(len(operand.outer_strides))])
    return base if operand.inner == "0" else f"{base} + {operand.along(f'({index})')}"


def _load(operand: RowOperand, live: str, index: str) -> dict[str, Any]:
    at = _at(operand, index)
    if operand.pointer is None:
        return fields(operand) | {"expression": f"({at}).to({triton.TYPES[operand.dtype]})"}
    loaded = f"tl.load({operand.pointer} + {at}, mask={live})"
    return fields(operand) | {"expression": triton.load_cast(loaded, operand.dtype)}


def _element(rows: Rows, compared: str) -> str:
    """Prints what is compared: the key as it is in memory, in a type that Triton compares."""
    value = rows.loads[0].value if rows.merges else triton.round_to(rows.key, rows.order.dtype)
    return f"({value}).to({compared})"


def _behind(kind: str, what: Any, rows: Rows) -> list[str]:
    """Prints a step of what is computed of ranks."""
    if kind == "rank":
        name, type_name, which = what
        return [f"{name} = {'element' if which == 'values' else 'place'}.to({type_name})"]
    if kind == "load":
        return [f"{what.value} = {_load(what, 'row_live', 'place')['expression']}"]
    if kind == "taken":
        loads = [f"{x.value} = {_load(x, 'live', 'place')['expression']}" for x in rows.loads]
        return [*loads, *(line.text + line.mark for line in what.lines), f"{what.name} = {what.value}"]
    return [what.text + what.mark]


def _store(operand: RowOperand, what: str, dtype: str) -> dict[str, Any]:
    if what == "ranks":
        value = triton.store_cast(operand.value, operand.dtype)
    elif what == "values":
        to = triton.TYPES.get(dtype)
        value = triton.store_cast("element" if to is None else f"element.to({to})", dtype)
    else:
        value = f"place.to({triton.TYPES[operand.dtype]})"
    base = operand.base([f"i{dim}" for dim in range(len(operand.outer_strides))])
    return fields(operand) | {"at": f"{base} + to * {operand.inner}", "stored": value, "live": "live"}


def _counted(operand: RowOperand, what: str, _: str) -> dict[str, Any]:
    to, value, live = {
        "values": ("rank", "number", "inside"),
        "indices": ("rank", "column", "inside"),
        "ranks": ("column", "rank", "inside"),
        "ends": ("bins", "ends", "is_first"),
    }[what]
    stored = f"{value}.to({triton.TYPES[operand.dtype]})"
    return fields(operand) | {"at": _at(operand, to), "stored": stored, "live": live}
