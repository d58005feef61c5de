"""Describes operands of the functors that the cuda dialect generates: the epilogue, and the activation's prologue.

One call of either computes ``width`` neighbours of one row: columns of the result, or k's of the activation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jitgen.families.gemm.context import GemmOperand
from jitgen.kernel.operands import ACCESS_BYTES, item_size


def base_of(operand: GemmOperand) -> tuple[str, str]:
    """Returns (type, name) of where the matrix of an operand begins: a pointer, or the first value of an iota."""
    return (operand.pointer_type, operand.pointer) if operand.pointer is not None else ("Index", operand.offset)


def members(operands: Iterable[GemmOperand], is_moved: bool = False) -> tuple[list[str], list[str]]:
    """Returns (fields, expressions): the fields of a functor with these operands, and what initialises them: the
    kernel's parameters and, in a batch or a group, where each operand's matrix begins.

    Args:
        is_moved: whether the functor itself moves to a matrix, and begins at the first one.
    """
    fields, names = ["const Params& params"], ["params"]
    for operand in operands:
        if operand.is_moved:
            kind, name = base_of(operand)
            fields.append(f"{kind} {name}")
            names.append(operand.source if is_moved else name)
    return fields, names


def reads(operands: Sequence[GemmOperand], width: int) -> dict[str, list[dict[str, Any]]]:
    """Groups operands by how a call reads them: a vector of neighbours, one number for the row, or element by
    element."""
    return {
        "vectors": [vector(operand, width) for operand in operands if operand.kind in ("full", "column")],
        "singles": [_read(operand, "n") for operand in operands if operand.kind in ("row", "scalar")],
        "elements": [_read(operand, "column") for operand in operands if operand.kind == "strided"],
    }


def matrices(operands: Sequence[GemmOperand], width: int) -> list[dict[str, Any]]:
    """Describes the operands that are matrices, of whose rows neighbouring columns are read."""
    return [vector(operand, width) for operand in operands if operand.kind == "full"]


def vector(operand: GemmOperand, width: int) -> dict[str, Any]:
    """Describes an operand that is contiguous along columns; ``access`` is whether one access may move all ``width`` of
    them."""
    elements = min(width, ACCESS_BYTES // item_size(operand.dtype))
    return {
        "index": operand.index,
        "storage": operand.storage,
        "type": operand.type,
        "value": operand.value,
        "address": f"{operand.pointer} + ({operand.position('m', 'n')})",
        "access": operand.own[1] == "1" and operand.unit >= elements,
    }


def _read(operand: GemmOperand, column: str) -> dict[str, Any]:
    expression = operand.element(operand.position("m", column))
    return {"type": operand.type, "value": operand.value, "expression": expression}
