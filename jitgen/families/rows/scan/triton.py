"""Builds the context of ``templates/scan/scan.py.j2``.

A program holds a block of ``schedule.rows`` rows by ``schedule.items`` elements. The block is scanned by
``tl.associative_scan``, and the state of all tiles before it, ``[rows, 1]``, is combined with each of its elements; its
last element is combined into that state.
"""

from __future__ import annotations

from typing import Any

from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Built
from jitgen.families.rows.scan.context import Rows, Scan
from jitgen.families.rows.scan.schedule import CHUNK_UNIT, Schedule
from jitgen.ir.program import Kernel
from jitgen.ir.scans import PLACES, identity
from jitgen.kernel.operands import WARP
from jitgen.kernel.rows import RowLayout

_COMBINE = {
    "sum": "added",
    "prod": "multiplied",
    "max": "later_larger",
    "min": "later_smaller",
    "argmax": "later_larger_at",
    "argmin": "later_smaller_at",
    "logsumexp": "exponentials_added",
}
"""The header's function that combines two states of a kind."""


def build(kernel: Kernel, layout: RowLayout, schedule: Schedule, rows: Rows, dialect: Dialect) -> Built:
    """Builds template context and source options; see ``kernel/render.py``."""
    live = " & ".join((["row_live"] if schedule.rows > 1 else []) + ["inside"])
    row_live = "row_live" if schedule.rows > 1 else ""
    before = {line.value for line in rows.lines_before}
    context: dict[str, Any] = {
        "parameters": rows.triton_parameters,
        "index_cast": ".to(tl.int64)" if schedule.wide else "",
        "tile": schedule.items,
        "block_rows": schedule.rows,
        "chunks": schedule.chunks,
        "chunk_unit": CHUNK_UNIT,
        "loops": schedule.loops,
        "margin": " " * (8 if schedule.loops else 4),
        "row_lines": rows.triton_indices,
        "row_loads": [o.triton_access(row_live, layout.columns) for o in rows.row_loads],
        "loads": [o.triton_access(live, layout.columns) for o in rows.loads],
        "lines_after": [line for line in rows.lines_after if line.value not in before],
        "stores": [o.triton_access(live, layout.columns) for o in rows.stores],
        "scans": [_scan(scan, layout, schedule, row_live, dialect) for scan in rows.scans],
    }
    return context, rows.triton_row_options(schedule.wide, schedule.threads // WARP)


def _scan(scan: Scan, layout: RowLayout, schedule: Schedule, row_live: str, dialect: Dialect) -> dict[str, Any]:
    """Writes a scan's lines: ``start`` in front of the tiles, ``step`` for one of them, ``end`` behind them.

    ``state`` is of all tiles before one, ``own`` of its elements in it alone, ``now`` of both.
    """
    number, combine = scan.number, _COMBINE[scan.kind]
    shape = f"({schedule.rows}, {schedule.items})"
    index = "tl.int64" if schedule.wide else "tl.int32"
    types = [dialect.types[scan.dtype]]
    carried = [dialect.types[scan.carry_dtype]]
    neutral = [identity(scan.kind, scan.dtype)]
    elements = [_broadcast(scan.value, shape)]
    if scan.kind in PLACES:
        types, carried, neutral = [*types, index], [*carried, index], [*neutral, 0]
        elements.append(_broadcast("column", shape))
    elif scan.kind == "logsumexp":
        types, carried, neutral = types * 2, carried * 2, [*neutral, 0]
        elements.append(f"tl.full({shape}, 1, {types[0]})")
    count = range(len(types))
    none = [dialect.constant(neutral[component], _dtype(types[component], dialect)) for component in count]
    own, now, state = ([f"{name}{number}_{component}" for component in count] for name in ("own", "now", "state"))
    step = [
        f"own{number}_{component} = tl.where(inside, {elements[component]}, {none[component]})" for component in count
    ]
    step.append(f"{', '.join(own)} = {_scanned(own, combine)}")
    known = [s if c == t else f"{s}.to({t})" for s, c, t in zip(state, carried, types, strict=True)]
    carries = schedule.loops
    if carries:
        step.append(f"{', '.join(now)} = {combine}({', '.join((*known, *own))})")
        last = [f"last_of_row({name}, {schedule.items})" for name in own]
        last = [text if c == t else f"{text}.to({c})" for text, c, t in zip(last, carried, types, strict=True)]
        step.append(f"{', '.join(state)} = {combine}({', '.join((*state, *last))})")
    else:
        now = own
    if scan.kind == "logsumexp":
        step.append(f"{scan.result} = {now[0]} + libdevice.log({now[1]})")
    elif scan.result:
        step.append(f"{scan.result} = {now[0]}")
    if scan.index_name:
        step.append(f"{scan.index_name} = {now[1]}.to(tl.int64)")
    start = []
    for component in count if carries else ():
        none_carried = dialect.constant(neutral[component], _dtype(carried[component], dialect))
        start.append(f"state{number}_{component} = tl.broadcast_to({none_carried}, ({schedule.rows}, 1))")
    if scan.before:
        start = _states_before(scan, layout, schedule, row_live, carried, neutral, dialect)
    mask = f", mask={row_live}" if row_live else ""
    end = [
        f"tl.store({operand.pointer} + {operand.triton_block(layout.columns)} + chunk, {state[component]}{mask})"
        for component, operand in enumerate(scan.totals)
    ]
    return {"start": start, "step": step, "end": end}


def _states_before(
    scan: Scan,
    layout: RowLayout,
    schedule: Schedule,
    row_live: str,
    carried: list[str],
    neutral: list[Any],
    dialect: Dialect,
) -> list[str]:
    """Writes the lines that compute the state of all chunks of a row before the program's own."""
    names = [f"before{scan.number}_{component}" for component in range(len(carried))]
    live = " & ".join(([row_live] if row_live else []) + ["(other < chunk)"])
    lines = [f"other = tl.arange(0, {schedule.chunks})[None, :]"]
    for name, operand, kind, number in zip(names, scan.before, carried, neutral, strict=True):
        none = dialect.constant(number, _dtype(kind, dialect))
        at = f"{operand.pointer} + {operand.triton_block(layout.columns)} + other"
        lines.append(f"{name} = tl.where({live}, tl.load({at}, mask={live}).to({kind}), {none})")
    lines.append(f"{', '.join(names)} = {_scanned(names, _COMBINE[scan.kind])}")
    for component, name in enumerate(names):
        lines.append(f"state{scan.number}_{component} = last_of_row({name}, {schedule.chunks})")
    return lines


def _scanned(names: list[str], combine: str) -> str:
    operands = names[0] if len(names) == 1 else f"({', '.join(names)})"
    return f"tl.associative_scan({operands}, 1, {combine})"


def _broadcast(value: str, shape: str) -> str:
    return f"tl.broadcast_to({value}, {shape})"


def _dtype(kind: str, dialect: Dialect) -> str:
    """Returns the compute dtype of Triton's type ``kind``."""
    return next(dtype for dtype, name in dialect.types.items() if name == kind)
