"""Presents a sort to its templates: the operands, what is computed once for a row and of each element, and the
stores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Line, Printed, printed
from jitgen.families.row_passes import RowPass, lines_under, passes_of, row_lines, row_passes, row_reduction
from jitgen.families.rows.sort import NAME
from jitgen.families.rows.sort.layout import is_counted, is_merge, order_of, parameters
from jitgen.families.rows.sort.schedule import Schedule, SelectionSchedule
from jitgen.ir.body import Body, compute_dtype
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
        counts: whether numbers below a bound are counted.
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
    counts: bool
    merges: bool
    stores: tuple[tuple[RowOperand, str], ...]


@dataclass(frozen=True)
class SelectedRows(Rows):
    """Describes a kernel that selects ranks.

    Attributes:
        passes: those over the elements of a row, before ranks are selected; ``row_lines`` follow them.
        behind: what is computed of the ranks, in order: a line, a reduction of them, or (name, type, what) of a sort.
    """

    passes: tuple[RowPass, ...]
    behind: tuple[tuple[str, Any], ...]


def context(
    kernel: Kernel, layout: RowLayout, declared: KernelParameters, schedule: Schedule, dialect: Dialect
) -> Rows:
    """Returns the context of ``kernel`` in ``dialect``."""
    (body,) = kernel.bodies
    instructions, order = body.instructions, order_of(body)
    lines_ = printed(instructions, dialect, coarse=body.coarse)
    if isinstance(schedule, SelectionSchedule):
        return _selected(kernel, layout, declared, lines_, dialect)
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
        counts=is_counted(body),
        merges=merges,
        stores=tuple((shared["operands"][index], what) for index, what in sorted(stored.items())),
    )


def _selected(
    kernel: Kernel, layout: RowLayout, declared: KernelParameters, text: Printed, dialect: Dialect
) -> SelectedRows:
    (body,) = kernel.bodies
    instructions, order = body.instructions, order_of(body)
    behind: set[int] = set()  # what is computed of ranks
    for position, instruction in enumerate(instructions):
        if instruction.op == "sort" or not behind.isdisjoint(instruction.args):
            behind.add(position)
    (key,) = {i.args[0] for i in instructions if i.op == "sort"}
    shared = row_attributes(kernel, layout, declared, text.values, dialect)
    sources = tuple(operand for operand in shared["operands"] if operand.role != "store")
    after = row_lines(body, text, passes_of(body, behind), behind)
    return SelectedRows(
        **shared,
        row_loads=tuple(operand for operand in sources if operand.is_once),
        row_lines=after,
        loads=tuple(operand for operand in sources if not operand.is_once),
        lines=lines_under(body, text, [p for p, i in enumerate(instructions) if i.op == "sort"]),
        key=text.names[key],
        storage=dialect.storage_types[order.dtype],
        type=dialect.types[compute_dtype(order.dtype)],
        order=order,
        counts=False,
        merges=False,
        stores=tuple((o, "ranks") for o in shared["operands"] if o.role == "store"),
        passes=row_passes(body, text, dialect, behind),
        behind=tuple(_behind(body, text, position, dialect) for position in sorted(behind)),
    )


def _behind(body: Body, text: Printed, position: int, dialect: Dialect) -> tuple[str, Any]:
    instruction = body.instructions[position]
    if instruction.op == "sort":
        return "rank", (text.names[position], dialect.types[instruction.dtype], instruction.attr[0])
    if instruction.op == "reduce":
        return "reduce", row_reduction(body, text, position, dialect)
    return ("line", text.lines[position]) if position in text.lines else ("", None)


render = renderer(NAME, "jitgen.families.rows.sort", parameters, context, "rows")
