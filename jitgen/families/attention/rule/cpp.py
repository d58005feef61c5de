"""Prints what kernels of attention and of its gradients have in common on the host: a struct of operands that a
mainloop walks.

What the rule reads is loaded where it changes: once for a task, once for a row of a chunk, once for a streamed row, or
for each element.
"""

from __future__ import annotations

from typing import Any

from jitgen.families.attention.rule.bounds import Bounds, Words
from jitgen.families.attention.rule.context import LEVELS, Frame, Operand, Rule

WORDS = Words("false", "true", "min", "max", "jitgen::floor_divide(int64_t({0}), int64_t({1}))")
FLAGS = ["-O2"]
"""Mainloops are written with vector types, and loops over lanes are marked ``omp simd``."""


def struct_of(frame: Frame, bounds: Bounds) -> dict[str, Any]:
    """Builds what both templates read: parameters, fields of the struct, and the rule with and without masks."""
    return {
        "accumulator": frame.accumulator,
        "tasks": frame.tasks,
        "indices": frame.task_indices("task"),
        "of_row": frame.rule.reads("row"),
        "at_row": frame.rule.reads("both"),
        "of_task": frame.rule.reads("task"),
        "row_ends": frame.ends(bounds, "row"),
        "key_ends": frame.ends(bounds, "key"),
        "both_ends": frame.ends(bounds, "both"),
        "rules": [_rule(frame.unmasked, True), *([_rule(frame.rule, False)] if frame.masked else [])],
        "masked": frame.masked,
        "bounds": bounds,
    }


def _rule(rule: Rule, is_open: bool) -> dict[str, Any]:
    return {
        "open": is_open,
        **{f"by_{kind}": rule.reads(kind) for kind in LEVELS},
        **{f"of_{level}": rule.at(level) for level in LEVELS},
        "accumulators": [i.attr for i in rule.instructions if i.op == "contract"],
        "values": rule.values,
    }


def _step(operand: Operand, index: str) -> str:
    return index if operand.kind == "contiguous" or index == "0" else f"{index} * {operand.own[1]}"


def load(operand: Operand, row: str, index: str) -> dict[str, str]:
    """Describes a load at ``index`` of the row at offset ``row``, or an index there; ``start`` is computed once for the
    row."""
    name = f"from{operand.index}"
    expression = operand.neighbour(name, _step(operand, index))
    return {"start": operand.begin(name, row), "type": operand.type, "value": operand.value, "expression": expression}


def store(operand: Operand, row: str, index: str) -> dict[str, str]:
    """Describes a store at ``index`` of the row at offset ``row``; ``start`` is computed once for the row."""
    name = f"to{operand.index}"
    stored = f"{name}[{_step(operand, index)}] = jitgen::store<{operand.storage}>({operand.value})"
    return {"start": operand.begin(name, row), "stored": stored}
