"""Prints what Triton kernels of attention and of its gradients have in common: values of a rule, loops over tiles, and
options.

A program has a block of rows. It first computes which tiles its rows see, and which of these no mask touches: ``[first,
last)`` and, within, ``[open_first, open_last)``; nothing but the rule's bounds is computed for that. Then it walks the
tiles in three loops, of which the middle one has no mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jitgen.codegen import triton
from jitgen.families.attention.rule.bounds import Bounds, Words
from jitgen.families.attention.rule.context import Frame, Operand, Rule
from jitgen.kernel.operands import ACCESS_BYTES, item_size

AT_ONCE, MOST_AT_ONCE = 1024, 128
"""Integers of a tensor whose ends a program finds at once, and tiles where it needs none: what its threads hold."""
WORDS = Words("False", "True", "tl.minimum", "tl.maximum")
Phase = dict[str, Any]
"""What one loop over tiles computes."""


def walk(frame: Frame, bounds: Bounds, schedule: Any, base: str, at_row: Callable[[Operand], str]) -> dict[str, Any]:
    """Builds what both templates read to find the tiles of a block of rows.

    Args:
        base: the name of where the batch of an operand begins.
        at_row: the offset of a row of an operand.
    """
    key_ends = frame.ends(bounds, "key")
    by_tensor = any(operand.pointer for operand in key_ends)
    return {
        "parameters": frame.triton_parameters,
        "index_cast": ".to(tl.int64)" if schedule.wide else "",
        "index_lines": [f"{name} = {text}" for name, text in frame.task_indices("task", "//")],
        "bases": [f"{base}{o.index} = {o.task_base}" for o in frame.operands],
        "tasks_of": [_named(o, f"at{o.index}") for o in frame.rule.reads("task")],
        "rows_of": [_named(o, at_row(o)) for o in frame.rule.reads("row")],
        "row_ends": frame.ends(bounds, "row"),
        "key_ends": key_ends,
        "at_once": AT_ONCE // schedule.block_n if by_tensor else MOST_AT_ONCE,
        "bounds": [(name, expression) for name, expression, _ in bounds.lines],
        "hidden": bounds.hidden,
        "open": bounds.open,
        "masked": frame.masked,
    }


def phases(edge: Phase, whole: Phase, masked: bool) -> list[Phase]:
    """Splits the loop over tiles in three: tiles with masked rows at the start, the ``whole`` ones without a mask,
    tiles with masked rows at the end."""
    edge, whole = {"edge": True, **edge}, {"edge": False, **whole}
    before = [{"range": "first, open_first", **edge}] if masked else []
    return [*before, {"range": "open_first, open_last", **whole}, {"range": "open_last, last", **edge}]


def rule_of_tile(rule: Rule, at_row: Callable[[Operand], str], key_index: str) -> Phase:
    """Writes the loads and the lines of ``rule``.

    Args:
        at_row: the offset of a row of an operand.
        key_index: a format string: how an index of streamed rows is written.
    """
    loads = []
    for operand in rule.operands:
        to = f".to({operand.type})" if operand.pointer is None else ""
        if operand.kind == "task":
            expression = f"x{operand.index}{to}"
            if operand.pointer is None:
                expression = f"(x{operand.index} + tl.zeros((1, 1), tl.int32)){to}"
        elif operand.kind == "row":
            expression = f"x{operand.index}[:, None]{to}"
        else:
            at, index = f"(at{operand.index} + column * {operand.own[1]})[None, :]", key_index
            if operand.kind == "both":
                at, index = f"({at_row(operand)})[:, None] + (column * {operand.own[1]})[None, :]", "({})"
            load = f"tl.load({operand.pointer} + {at}, mask=(column < keys)[None, :], other=0)"
            expression = triton.load_cast(load, operand.dtype) if operand.pointer else f"{index.format(at)}{to}"
        loads.append(f"{operand.value} = {expression}")
    return {"loads": loads, "lines": rule.lines}


def _named(operand: Operand, at: str) -> str:
    """Prints what the rule reads of a task or of rows: at offset ``at``, or that index itself."""
    value = triton.load_cast(f"tl.load({operand.pointer} + {at})", operand.dtype) if operand.pointer else at
    return f"x{operand.index} = {value}"


def inner(operand: Operand, index: str, stride: str) -> str:
    """Prints the offset of ``index`` along a row of ``operand``."""
    return index if operand.kind == "contiguous" else f"{index} * {stride}"


def tile_load(operand: Operand, along: str, size: str, strides: tuple[str, str], even: bool, edge: bool) -> str:
    """Prints the load of a tile [streamed rows, elements].

    Args:
        along: the indices along the elements; ``size`` is their number, ``even`` whether that is the tile's.
        strides: of streamed rows, as an expression, and of elements.
        edge: whether there may be streamed rows beyond the last.
    """
    rows, step = strides
    at = f"{operand.pointer} + at{operand.index} + ({rows})[:, None] + {inner(operand, along, step)}"
    live = " & ".join([*(["(column < keys)[:, None]"] if edge else []), *([] if even else [f"({along} < {size})"])])
    return f"tl.load({at}{f', mask={live}, other=0' if live else ''})"


def result_load(operand: Operand, at: str, mask: str) -> str:
    """Prints the line that reads an operand of results at offset ``at``."""
    if operand.pointer is None:
        return f"{operand.value} = ({at}).to({operand.type})"
    load = f"tl.load({operand.pointer} + {at}, mask={mask}, other=0)"
    return f"{operand.value} = {triton.load_cast(load, operand.dtype)}"


def result_store(operand: Operand, at: str, mask: str) -> dict[str, str]:
    """Describes the store of a result at offset ``at``."""
    stored = triton.store_cast(operand.value, operand.dtype)
    return {"target": f"{operand.pointer} + {at}", "stored": stored, "mask": mask}


def access_unit(operand: Operand, unit: int) -> int:
    """Returns the divisor of the strides of a contiguous ``operand``, as far as the width of an access depends on
    it."""
    return min(unit, ACCESS_BYTES // item_size(operand.dtype))


def options(frame: Frame, schedule: Any, unit: int, units: Mapping[str, int]) -> dict[str, Any]:
    """Returns the options of the source; ``units`` has the divisors of the sizes and strides that decide the width of
    an access."""
    alignments = [min(unit * item_size(o.dtype), ACCESS_BYTES) if o.kind == "contiguous" else 1 for o in frame.memory]
    return frame.triton_options(schedule.wide, schedule.warps, alignments, units, num_stages=schedule.stages)
