"""Operands of the functors that the cuda dialect generates: the epilogue, and the activation's prologue.

One call of either computes ``width`` neighbours of one row: columns of the result, or k's of the activation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jitgen.families.gemm.context import GemmOperand
from jitgen.kernel.operands import ACCESS_BYTES, item_size


def members(operands: Iterable[GemmOperand], scalars: Iterable[tuple[str, str]]) -> tuple[list[str], list[str]]:
    """(fields, names): the fields of a functor with these operands and scalars (name, type), and the parameters of the
    kernel that initialise them."""
    fields, names = [], []
    for operand in operands:
        if operand.pointer is not None:
            fields.append(f"{operand.pointer_type} {operand.pointer}")
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
    """Operands by how a call reads them: a vector of neighbours, one number for the row, or element by element."""
    return {
        "vectors": [vector(operand, width) for operand in operands if operand.kind in ("full", "column")],
        "singles": [_single(operand) for operand in operands if operand.kind in ("row", "scalar")],
        "elements": [_element(operand) for operand in operands if operand.kind == "strided"],
    }


def vector(operand: GemmOperand, width: int) -> dict[str, Any]:
    """An operand that is contiguous along columns; ``access`` is whether one access may move all ``width`` of them."""
    elements = min(width, ACCESS_BYTES // item_size(operand.dtype))
    return {
        "index": operand.index,
        "storage": operand.storage,
        "type": operand.type,
        "value": operand.value,
        "address": f"{operand.pointer} + ({operand.position('m', 'n')})",
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
