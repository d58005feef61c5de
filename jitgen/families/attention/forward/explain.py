"""Explains an attention kernel in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jitgen.device import Device
from jitgen.families.attention.forward.decode import DecodeSchedule
from jitgen.families.attention.forward.layout import Layout
from jitgen.families.attention.rule.bounds import masks_of
from jitgen.families.attention.rule.explain import told, words_of
from jitgen.ir.body import Body, Instruction
from jitgen.ir.program import Kernel
from jitgen.kernel.explain import operations_in

_SIGNS = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "floor_divide": "//",
    "remainder": "%",
    "eq": "==",
    "ne": "!=",
}
_SIGNS |= {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "bitwise_and": "and", "bitwise_or": "or"}
MOST_WORDS = 120
"""Characters of a condition in words, at most."""


def explain(kernel: Kernel, layouts: Sequence[Layout], schedule: Any, device: Device) -> list[str]:
    """Explains the kernel: a title, the rule of scores, and how tiles are walked."""
    (layout,), (body,) = layouts, kernel.bodies
    rule = body.contractions[1].x
    masks = len(masks_of(rule))
    lines = ["attention, the keys of a row walked once; scores and probabilities stay in the kernel", str(schedule)]
    lines.append(f"scores by {', '.join(dict.fromkeys(operations_in(rule))) or 'the product alone'}")
    bounds_keys = isinstance(schedule, DecodeSchedule)
    skipping = told(rule, body, layout.operands, device.dialect, bounds_keys=bounds_keys)
    if masks:
        lines.append(f"{masks} mask{'s' * (masks > 1)}: {words_of(rule, skipping)}")
    for position, number in masks_of(rule).items():
        if position not in skipping:
            continue
        condition = _in_words(rule, rule[position].args[0], body, layout)
        lines.append(
            f"skipped: tiles where {condition if number == 1 else f'not ({condition})'} for every row i and key j"
        )
    if layout.groups:
        lines.append("heads that share keys are rows of one tile")
    return lines


def _in_words(rule: Sequence[Instruction], root: int, body: Body, layout: Layout) -> str:
    """Writes the value at ``root`` of the rule of scores as an expression, with i for rows and j for keys."""
    texts: list[str] = []
    for instruction in rule[: root + 1]:
        arguments = [texts[argument] for argument in instruction.args]
        if instruction.op == "iota":
            words = {"row": "i", "key": "j"}.get(layout.operands[instruction.attr], "an index")
        elif instruction.op == "load":
            where = {"row": "[i]", "key": "[j]", "both": "[i, j]"}.get(layout.operands[instruction.attr], "")
            words = f"{body.operands[instruction.attr].dtype} tensor{where}"
        elif instruction.is_number:
            words = str(instruction.attr) if instruction.op == "const" else f"number {instruction.attr}"
        elif instruction.is_conversion:
            words = arguments[0]
        elif instruction.op in _SIGNS:
            words = f"({f' {_SIGNS[instruction.op]} '.join(arguments)})"
        else:
            words = f"{'not' if instruction.op == 'bitwise_not' else instruction.op}({', '.join(arguments)})"
        texts.append(words if len(words) <= MOST_WORDS else "...")
    return texts[root]
