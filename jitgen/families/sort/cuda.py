"""The contexts of ``templates/sort/sort.cu.j2``."""

from __future__ import annotations

from typing import Any

from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Built, fields
from jitgen.families.sort.context import Operand, Rows
from jitgen.families.sort.layout import Layout
from jitgen.families.sort.schedule import Schedule
from jitgen.ir.program import Kernel
from jitgen.kernel.row_operands import cuda_parameters


def build(kernel: Kernel, layout: Layout, schedule: Schedule, rows: Rows, dialect: Dialect) -> Built:
    """Template context and source options; see ``kernel/render.py``."""
    bits = 64 if schedule.wide else 32
    context: dict[str, Any] = {
        "parameters": cuda_parameters(rows.operands, rows.integers, rows.scalars),
        "index": f"int{bits}_t",
        "unsigned": f"uint{bits}_t",
        "chunk": rows.order.chunk,
        "descending": "true" if rows.order.descending else "false",
        "index_lines": _index_lines(rows),
        "row_loads": [_load(operand) for operand in rows.row_loads],
        "loads": [_load(operand) for operand in rows.loads],
        "stores": [_store(operand) for operand in rows.stores],
    }
    return context, {}


def _index_lines(rows: Rows) -> list[str]:
    """The outer indices of a row's number; unsigned division is the cheaper one, and nothing is negative."""
    lines, rest = [], "Unsigned(row)"
    for dim in reversed(range(1, rows.outer)):
        lines.append(f"const Index i{dim} = Index({rest} % Unsigned({rows.sizes[dim]}));")
        lines.append(f"const Unsigned q{dim} = {rest} / Unsigned({rows.sizes[dim]});")
        rest = f"q{dim}"
    lines.append(f"const Index i0 = Index({rest});")
    return lines


def _base(operand: Operand) -> str:
    return operand.base([f"i{dim}" for dim in range(len(operand.strides))])


def _load(operand: Operand) -> dict[str, Any]:
    """An operand with ``element``, its value at ``column`` of the row with outer indices ``i0`` ..."""
    at = f"{_base(operand)} + {operand.along('column')}"
    element = f"jitgen::load({operand.pointer}[{at}])" if operand.pointer else at
    return fields(operand) | {"element": element, "from_row": f"{operand.pointer} + {_base(operand)}"}


def _store(operand: Operand) -> dict[str, Any]:
    """An operand with the address of rank ``to``; ``found`` is the name of what is stored there."""
    return fields(operand) | {"at": f"{operand.pointer}[{_base(operand)} + {operand.along('to')}]"}
