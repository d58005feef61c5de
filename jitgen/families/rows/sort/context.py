"""Presents a sort to its templates: the operands, what is computed once for a row and of each element, and the
stores."""

from __future__ import annotations

from dataclasses import dataclass

from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Line, printed
from jitgen.families.rows.sort import NAME
from jitgen.families.rows.sort.layout import is_merge, order_of, parameters
from jitgen.families.rows.sort.schedule import Schedule
from jitgen.ir.body import compute_dtype
from jitgen.ir.program import Kernel
from jitgen.ir.sorts import Order
from jitgen.kernel.parameters import KernelParameters
from jitgen.kernel.printed_rows import RowContext, RowOperand, row_attributes
from jitgen.kernel.render import renderer
from jitgen.kernel.rows import RowLayout


@dataclass(frozen=True)
class Rows(RowContext):
    """Describes the whole kernel.

    Attributes:
        row_loads: operands with one element for a row, and ``row_lines`` what follows from them.
        loads, lines: of each element.
        key: the name of the value that is sorted by; empty where chunks are merged.
        storage: the dialect's name of the dtype in which elements are compared; ``type`` that of its compute dtype.
        order: which ranks are stored; see ``ir/sorts.py``.
        merges: whether sorted chunks are merged; then ``loads`` are their values and indices.
        stores: results, with what each takes of a rank: ``"values"`` or ``"indices"``.
    """

    row_loads: tuple[RowOperand, ...]
    row_lines: tuple[Line, ...]
    loads: tuple[RowOperand, ...]
    lines: tuple[Line, ...]
    key: str
    storage: str
    type: str
    order: Order
    merges: bool
    stores: tuple[tuple[RowOperand, str], ...]


def context(
    kernel: Kernel, layout: RowLayout, declared: KernelParameters, schedule: Schedule, dialect: Dialect
) -> Rows:
    """Returns the context of ``kernel`` in ``dialect``."""
    (body,) = kernel.bodies
    instructions, order = body.instructions, order_of(body)
    lines_ = printed(instructions, dialect, coarse=body.coarse)
    stored = {i.attr: instructions[i.args[0]].attr[0] for i in instructions if i.op == "store"}
    merges = is_merge(body)
    rows = {position for position, instruction in enumerate(instructions) if instruction.row}
    key = "" if merges else next(lines_.names[i.args[0]] for i in instructions if i.op == "sort")
    shared = row_attributes(kernel, layout, declared, lines_.values, dialect)
    sources = tuple(operand for operand in shared["operands"] if operand.role != "store")
    return Rows(
        **shared,
        row_loads=() if merges else tuple(operand for operand in sources if operand.is_once),
        row_lines=tuple(line for position, line in lines_.lines.items() if position in rows),
        loads=sources if merges else tuple(operand for operand in sources if not operand.is_once),
        lines=tuple(line for position, line in lines_.lines.items() if position not in rows),
        key=key,
        storage=dialect.storage_types[order.dtype],
        type=dialect.types[compute_dtype(order.dtype)],
        order=order,
        merges=merges,
        stores=tuple((shared["operands"][index], what) for index, what in sorted(stored.items())),
    )


render = renderer(NAME, "jitgen.families.rows.sort", parameters, context, "rows")
