"""Builds the context of ``templates/attention/attention.cu.j2``: a struct of operands that ``attention_wgmma.cuh``,
``attention_resident.cuh`` or ``attention_decode.cuh`` walks.

Which tiles of keys a block of rows sees is computed from the rule's bounds: by the producer alone in the first, by
every warp in the last. What the rule reads is loaded where it changes: once for a task, once for a thread's rows,
once for a key, or for each score.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Built
from jitgen.families.attention.forward.context import Attention, bounds
from jitgen.families.attention.forward.decode import DecodeSchedule
from jitgen.families.attention.forward.elements import elements
from jitgen.families.attention.forward.layout import Layout
from jitgen.families.attention.forward.ramps import split
from jitgen.families.attention.forward.resident import ResidentSchedule
from jitgen.families.attention.forward.wgmma import WgmmaSchedule
from jitgen.families.attention.rule.bounds import Ends, mask_ends, tile_ends
from jitgen.families.attention.rule.context import Operand, Rule
from jitgen.families.attention.rule.cuda import RUN, WORDS, coordinates, parameters_of, run
from jitgen.ir.body import Body
from jitgen.ir.program import Kernel

Schedule = WgmmaSchedule | ResidentSchedule | DecodeSchedule


def build(kernel: Kernel, layout: Layout, schedule: Schedule, attention: Attention, dialect: Dialect) -> Built:
    """Builds template context and source options; see ``kernel/render.py``."""
    (body,) = kernel.bodies
    known = tile_ends(attention.rule.operands, dialect.name)
    tile_bounds = bounds(body, layout, known, WORDS)
    shown = _shown(body, layout, attention, known) if isinstance(schedule, DecodeSchedule) else None
    all_bounds = [tile_bounds, *([shown["bounds"]] if shown else [])]
    sources = {"query": attention.query[0] if attention.query else attention.key}
    sources |= {"key": attention.key, "value": attention.value}
    copied = dict(itertools.compress(sources.items(), schedule.copied))
    parameters = parameters_of(attention, list(copied.values()), schedule.wide)
    mainloop = _mainloop(attention, schedule, dialect)
    return {
        **parameters,
        "maps": dict(zip(copied, parameters["map_names"], strict=True)),
        **mainloop,
        "ranges": schedule.splits,
        "packed": bool(attention.groups),
        "packed_rows": attention.packed_rows,
        "task_indices": attention.task_indices("number"),
        "row_indices": attention.row_indices("/"),
        "bases": [{"name": o.at, "expression": o.task_base} for o in attention.operands],
        "of_task": [_value(o, f"task.{o.at}") for o in attention.rule.reads("task")],
        "of_row": [_value(o, o.packed_row(f"task.{o.at}")) for o in attention.rule.reads("row")],
        "at_row": [(o, o.packed_row(f"task.{o.at}")) for o in attention.rule.reads("both")],
        "row_ends": [
            _value(o, o.packed_row(f"task.{o.at}")) | {"is_index": not o.pointer}
            for o in dict.fromkeys(o for bounds_ in all_bounds for o in attention.ends(bounds_, "row"))
        ],
        "key_ends": attention.ends(tile_bounds, "key"),
        "task_ends": attention.ends(tile_bounds, "task"),
        "bounds": tile_bounds,
        "shown": shown,
        "factor_lines": attention.factor_lines,
        "factor": attention.factor,
        "is_checked": bool(attention.factor) and attention.linear,
        "rules": {
            "open": _rule(attention.unmasked, layout, mainloop["fragment"]["place"]),
            "masked": _rule(attention.rule, layout, mainloop["fragment"]["place"]),
        },
        "query": [_element(o, o.packed_row(f"task.{o.at}"), "d") for o in attention.query],
        "query_lines": attention.query_lines,
        "query_value": attention.query_value,
        "query_is_vector": _is_vector_query(attention, layout),
        "coordinates": {name: _coordinates(operand) for name, operand in copied.items()},
        "same_keys": _same_matrices([attention.key, attention.value]),
        "gathers": any(operand.gathered for operand in attention.operands),
        "key_storage": dialect.storage_types[attention.key_dtype],
        "value_storage": dialect.storage_types[attention.value_dtype],
        "elements": [
            elements("key", attention.key, attention.computed_key, attention.key_dtype, dialect),
            elements("value", attention.value, attention.computed_value, attention.value_dtype, dialect),
        ],
        **_results(attention, layout, schedule),
    }, {"fmad": True}


def _results(attention: Attention, layout: Layout, schedule: Schedule) -> dict[str, Any]:
    """Describes what is computed of the sums of a row, and what it reads and stores."""
    return {
        "row_loads": [_single(o) for o in attention.row_loads],
        "row_lines": attention.row_lines,
        "loads": [_run(o, layout, schedule) for o in attention.loads],
        "lines": attention.lines,
        "row_stores": [_single(o, schedule.splits) for o in attention.row_stores],
        "stores": [_run(o, layout, schedule) for o in attention.stores],
        "row_maxima": attention.row_maxima,
        "row_sums": attention.row_sums,
        "in_pairs": isinstance(schedule, ResidentSchedule) and schedule.in_pairs,
    }


def _shown(body: Body, layout: Layout, attention: Attention, known: Mapping[int, Ends]) -> dict[str, Any] | None:
    """Describes the mask in memory that bounds the keys of a block of rows, from the first that it shows to the last:
    that of a cache has a flag for each key, the same for all rows. None where scores read no such mask, or several."""
    masks = mask_ends(attention.rule.operands, ("key",))
    shown = bounds(body, layout, {**known, **masks}, WORDS).of_hidden()
    read = [o for o in attention.ends(shown, "key") if o.index in masks]
    if len(read) != 1:
        return None
    (mask,) = read
    return {
        "mask": mask,
        "bounds": shown,
        "key_ends": [o for o in attention.ends(shown, "key") if o is not mask],
        "task_ends": attention.ends(shown, "task"),
    }


def _mainloop(attention: Attention, schedule: Schedule, dialect: Dialect) -> dict[str, Any]:
    """Describes what differs between the mainloops: their Config, and which scores a thread has."""
    if isinstance(schedule, DecodeSchedule):
        of_lane = {
            "places": "2",
            "place": "8 * i",
            "certain": "",
            "rows": str(2 * schedule.row_tiles),
            "row": "r / 2 * 8 + r % 2",
            "row_words": "r and r + 1" if schedule.row_tiles == 1 else "r, r + 1, r + 8 and r + 9",
            "score": "r / 2 * 4 + i * 2 + r % 2",
        }
        return {
            "mainloop": "decode",
            "shape": "DecodeShape",
            "blocks": schedule.blocks,
            "members": schedule.members(masked=attention.masked),
            "fragment": of_lane,
        }
    of_thread = {
        "places": "n / 2",
        "place": "i / 2 * 8 + i % 2",
        "certain": "",
        "rows": "2",
        "row": "8 * r",
        "row_words": "r and r + 8",
        "score": "i / 2 * 4 + r * 2 + i % 2",
    }
    if isinstance(schedule, ResidentSchedule):
        return {
            "mainloop": "resident",
            "shape": "ResidentShape",
            "blocks": 1,
            "members": schedule.members(masked=attention.masked),
            # A thread's first column is at most 6.
            "fragment": of_thread | {"certain": f"{of_thread['place']} < Config::fewest - 6 || "},
        }
    copied = dict(zip(("query_copied", "key_copied", "value_copied"), schedule.copied, strict=True))
    return {
        "mainloop": "wgmma",
        "shape": "AttentionShape",
        "blocks": schedule.blocks,
        "members": schedule.members(**copied),
        "fragment": of_thread,
    }


def _is_vector_query(attention: Attention, layout: Layout) -> bool:
    """Returns whether eight neighbours of the query are 16 bytes of memory."""
    if len(attention.query) != 1 or attention.query_lines:
        return False
    (query,) = attention.query
    return (
        bool(query.pointer) and query.dtype == attention.key_dtype and query.kind == "contiguous" and layout.unit >= RUN
    )


def _coordinates(operand: Operand) -> str:
    return coordinates([(stride, f"task.z{dim}") for dim, stride in enumerate(operand.batch)])


def _same_matrices(operands: Sequence[Operand]) -> str:
    """Prints the condition that tasks ``one`` and ``other`` read the same matrices of ``operands``."""
    steps = dict.fromkeys((stride, dim) for operand in operands for dim, stride in enumerate(operand.batch))
    return " && ".join(f"({stride} == 0 || one.z{dim} == other.z{dim})" for stride, dim in steps) or "true"


def _value(operand: Operand, at: str) -> dict[str, Any]:
    """Describes a value that the rule reads at offset ``at``."""
    kind = operand.type if operand.pointer else "Index"
    return {"name": operand.only, "index": operand.index, "type": kind, "expression": operand.element(at)}


def _element(operand: Operand, row: str, column: str) -> dict[str, Any]:
    step = column if operand.kind == "contiguous" else f"{column} * {operand.own[1]}"
    at = f"{row} + {step}" if operand.kind not in ("row", "task") else row
    return {
        "type": operand.type,
        "value": operand.value,
        "expression": operand.element(at),
        "pointer": operand.pointer,
        "offset": row,
    }


def _rule(rule: Rule, layout: Layout, distance: str) -> dict[str, Any]:
    """Describes the lines of a rule, and where each of its operands comes from."""
    divided = split(rule, distance, layout.counts)
    sources: dict[str, list[dict[str, Any]]] = {"key": [], "row": [], "both": [], "task": []}
    starts: dict[str, list[dict[str, Any]]] = {"row": [], "task": []}
    for o in rule.operands:
        expression = {
            "key": f"{o.type}({o.element(f'task.{o.at} + column * {o.own[1]}')})",
            "row": f"{o.type}(of_rows.{o.only}[r])",
            "task": f"{o.type}(task.{o.only})",
            "both": f"{o.type}({o.element(f'of_rows.{o.at}[r] + column * {o.own[1]}')})",
        }[o.kind]
        source = {"type": o.type, "value": o.value, "expression": expression}
        if o.index in divided.operands:
            sources[o.kind].append(source)
        if o.index in divided.row_operands:
            starts[o.kind].append(source)
    return {
        **{f"by_{kind}": source for kind, source in sources.items()},
        "starts": [*starts["task"], *starts["row"]],
        "row_lines": divided.row_lines,
        "kept": divided.kept,
        "lines": divided.lines,
        "needs_column": divided.needs_column,
        "knows_existence": divided.knows_existence,
        "value": rule.score,
        "is_plain": not rule.lines and not rule.operands,
    }


def _single(operand: Operand, splits: int = 1) -> dict[str, Any]:
    """Describes an operand with one element for a row of results."""
    at = operand.packed_row(f"task.{operand.at}")
    if splits > 1:
        at += " + range * (int64_t(tasks()) * packed_rows())"
    return {
        "type": operand.type,
        "value": operand.value,
        "expression": operand.element(at),
        "target": f"{operand.pointer}[{at}]",
        "stored": f"jitgen::store<{operand.storage}>({operand.value})",
    }


def _run(operand: Operand, layout: Layout, schedule: Schedule) -> dict[str, Any]:
    at = operand.packed_row(f"task.{operand.at}")
    if schedule.splits > 1 and operand.role == "store":
        at += " + range * (int64_t(tasks()) * packed_rows() * width)"
    if operand.kind in ("row", "task"):
        return run(operand, at, "0", layout.unit)
    step = "1" if operand.kind == "contiguous" else operand.own[1]
    return run(operand, f"{at} + e" if step == "1" else f"{at} + e * {step}", step, layout.unit)
