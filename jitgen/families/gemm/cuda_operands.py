"""Operands of generated functors: the epilogue of a matmul kernel on a GPU, and the activation's prologue.

Both compute ``width`` neighbours of one row together: columns of the result, k's of the activation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jitgen.families.gemm.context import GemmOperand
from jitgen.families.layout import ACCESS_BYTES, item_size


def pointer_type(operand: GemmOperand) -> str:
    return f"{'' if operand.role == 'store' else 'const '}{operand.storage}*"


def members(operands: Iterable[GemmOperand], scalars: Iterable[tuple[str, str]]) -> tuple[list[str], list[str]]:
    """Fields for all that operands and scalars (name, type) need, and the parameters that fill them."""
    fields, names = [], []
    for operand in operands:
        if operand.pointer is not None:
            fields.append(f"{pointer_type(operand)} {operand.pointer}")
            names.append(operand.pointer)
        for name in (*operand.strides, operand.offset):
            if name and not name.isdigit():
                fields.append(f"Index {name}")
                names.append(name)
    for name, kind in scalars:
        fields.append(f"{kind} {name}")
        names.append(name)
    return fields, names


def reads(operands: Sequence[GemmOperand], width: int) -> dict[str, list[dict[str, Any]]]:
    """What is read, by how: neighbours side by side, one number for all of them, and each by itself."""
    return {
        "vectors": [vector(operand, width) for operand in operands if operand.kind in ("full", "column")],
        "singles": [_single(operand) for operand in operands if operand.kind in ("row", "scalar")],
        "elements": [_element(operand) for operand in operands if operand.kind == "strided"],
    }


def vector(operand: GemmOperand, width: int) -> dict[str, Any]:
    """An operand whose neighbouring columns are neighbours; ``access``: they move together."""
    elements = min(width, ACCESS_BYTES // item_size(operand.dtype))
    return {
        "index": operand.index,
        "storage": operand.storage,
        "type": operand.type,
        "value": operand.value,
        "place": f"{operand.pointer} + ({operand.position('m', 'n')})",
        "access": operand.strides[1] == "1" and operand.unit >= elements,
    }


def _single(operand: GemmOperand) -> dict[str, Any]:
    return {
        "type": operand.type,
        "value": operand.value,
        "expression": f"jitgen::load({operand.pointer}[{operand.position('m', 'n')}])",
    }


def _element(operand: GemmOperand) -> dict[str, Any]:
    position = operand.position("m", "column")
    expression = position if operand.pointer is None else f"jitgen::load({operand.pointer}[{position}])"
    return {"type": operand.type, "value": operand.value, "expression": expression}
