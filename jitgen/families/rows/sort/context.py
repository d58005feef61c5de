"""Presents a sort to its templates: the operands, what is computed once for a row and of each element, and the
stores."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Line, Printed, printed
from jitgen.families.row_passes import (
    RowPass,
    RowReduction,
    lines_under,
    passes_of,
    row_lines,
    row_passes,
    row_reduction,
)
from jitgen.families.rows.sort import NAME
from jitgen.families.rows.sort.layout import is_counted, is_merge, order_of, parameters
from jitgen.families.rows.sort.schedule import CpuSchedule, Schedule, SelectionSchedule
from jitgen.families.rows.sort.selection import is_selection
from jitgen.ir.body import Body, behind, compute_dtype, elements_under
from jitgen.ir.graph import walked
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
        behind: what is computed of each rank that is stored, in order: a line, a ``load`` of a row's operand, (name,
            type, what) of a ``rank``, an element of the row that is ``taken`` at its place, or a reduction of ranks.
        stores: results, with what each takes of a rank: ``"values"`` or ``"indices"``, or of what is behind: its value.
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
    behind: tuple[tuple[str, Any], ...]
    stores: tuple[tuple[RowOperand, str], ...]


@dataclass(frozen=True)
class Limit:
    """Describes which ``groups`` of a row are kept: those that count most by ``value`` of their elements, which
    ``lines`` compute. ``name`` is of the element's value that says so."""

    name: str
    value: str
    lines: tuple[Line, ...]
    groups: int
    kept: int
    terms: int


@dataclass(frozen=True)
class Taken:
    """Describes an element of the row at a rank's place: ``value``, which ``lines`` compute, becomes ``name``."""

    name: str
    type: str
    value: str
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class RankPass:
    """Describes one pass over the ranks: values that are known ``before`` it, what is computed of each rank, and what
    is reduced from that."""

    before: tuple[Line, ...]
    of_ranks: tuple[tuple[str, Any], ...]
    reductions: tuple[RowReduction, ...]


@dataclass(frozen=True)
class SelectedRows(Rows):
    """Describes a kernel that selects ranks.

    Attributes:
        passes: those over the elements of a row, before ranks are selected; ``row_lines`` follow them.
        limits: the groups of the row that are found then.
        rank_passes: the same as passes over the ranks; the last one is of the results.
    """

    passes: tuple[RowPass, ...]
    limits: tuple[Limit, ...]
    rank_passes: tuple[RankPass, ...]


def context(
    kernel: Kernel, layout: RowLayout, declared: KernelParameters, schedule: Schedule, dialect: Dialect
) -> Rows:
    """Returns the context of ``kernel`` in ``dialect``."""
    (body,) = kernel.bodies
    instructions, order = body.instructions, order_of(body)
    lines_ = printed(instructions, dialect, coarse=body.coarse)
    computes = is_selection(body)
    if computes and isinstance(schedule, (CpuSchedule, SelectionSchedule)):
        return _selected(kernel, layout, declared, lines_, dialect)
    ends = {i.attr: i.args[0] for i in instructions if i.op == "store"}
    stored = {index: "ranks" if computes else instructions[end].attr[0] for index, end in ends.items()}
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
        lines=lines_under(body, lines_, [p for p, i in enumerate(instructions) if i.op == "sort"]),
        key=key,
        storage=dialect.storage_types[order.dtype],
        type=dialect.types[compute_dtype(order.dtype)],
        order=order,
        counts=is_counted(body),
        merges=merges,
        behind=_behind_rank(body, lines_, shared["operands"], list(ends.values()), dialect) if computes else (),
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
    limits = _limits(body, text, dialect)
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
        limits=limits,
        behind=_steps(body, text, behind, dialect),
        rank_passes=_rank_passes(body, text, dialect, behind),
    )


_IS_OPEN = {"cuda": "jitgen::is_open<{1}>(open_{0}, int(column), inverse_{0})", "cpp": "open_{0}[i]"}
"""Whether the element is of a group that is kept: a word has a bit for each group. A lane's columns behind the last one
are of none, and may have no bit."""


def _limits(body: Body, text: Printed, dialect: Dialect) -> tuple[Limit, ...]:
    """Returns the limits of ``body``, and adds the lines of elements that read them to ``text``."""
    limits = []
    for position, instruction in enumerate(body.instructions):
        if instruction.op == "limited":
            name, (groups, kept, terms) = text.names[position], instruction.attr
            lines = lines_under(body, text, [position])
            limits.append(Limit(name, text.names[instruction.args[0]], lines, groups, kept, terms))
            type_name = dialect.types[instruction.dtype]
            expression = f"{type_name}({_IS_OPEN[dialect.name].format(name, groups)})"
            assigned = dialect.assign(type_name, name, expression)
            text.lines[position] = Line(assigned, "", name, type_name, instruction.dtype, expression, position)
    return tuple(limits)


def _rank_passes(body: Body, text: Printed, dialect: Dialect, behind: Collection[int]) -> tuple[RankPass, ...]:
    instructions = body.instructions
    others = [position for position in range(len(instructions)) if position not in behind]
    first, last = passes_of(body, behind), passes_of(body, others)
    passes = []
    for number in range(first, last):
        before = row_lines(body, text, number, others)
        reduced = [p for p in behind if instructions[p].op == "reduce" and instructions[p].stage == number + 1]
        if before or reduced:
            of_ranks = _each_rank(body, text, dialect, reduced)
            passes.append(RankPass(before, of_ranks, tuple(row_reduction(body, text, p, dialect) for p in reduced)))
    stored = [position for position in behind if instructions[position].op == "store"]
    results = row_lines(body, text, max(first, last), others)
    return (*passes, RankPass(results, _each_rank(body, text, dialect, stored), ()))


def _each_rank(body: Body, text: Printed, dialect: Dialect, roots: Sequence[int]) -> tuple[tuple[str, Any], ...]:
    """Returns what is computed of each rank for the instructions at ``roots``."""

    def below(position: int) -> Iterator[int]:
        instruction = body.instructions[position]
        above = {"sort": (), "taken": instruction.args[1:]}.get(instruction.op, instruction.args)
        return (argument for argument in above if not body.instructions[argument].row)

    positions = set(walked((argument for root in roots for argument in below(root)), below))
    return _steps(body, text, positions, dialect)


def _behind_rank(
    body: Body, text: Printed, operands: Sequence[RowOperand], roots: Sequence[int], dialect: Dialect
) -> tuple[tuple[str, Any], ...]:
    """Returns what is computed of each rank for the instructions at ``roots``, with what a row has one of."""
    instructions = body.instructions

    def below(position: int) -> Collection[int]:
        instruction = instructions[position]
        if instruction.op == "taken":
            row = (p for p in behind(instructions, instruction.args[:1]) if instructions[p].row)
            return (*row, instruction.args[1])
        return () if instruction.op in ("sort", "merge") else instruction.args

    positions = set(walked(roots, below))
    loads = {instructions[p].attr: p for p in positions if instructions[p].op == "load"}
    row_loads = tuple(("load", operand) for operand in operands if operand.index in loads)
    return (*row_loads, *_steps(body, text, positions, dialect))


def _steps(body: Body, text: Printed, positions: Collection[int], dialect: Dialect) -> tuple[tuple[str, Any], ...]:
    steps = (_step(body, text, position, dialect) for position in sorted(positions))
    return tuple((kind, what) for kind, what in steps if kind)


def _step(body: Body, text: Printed, position: int, dialect: Dialect) -> tuple[str, Any]:
    instruction = body.instructions[position]
    if instruction.op in ("sort", "merge"):
        return "rank", (text.names[position], dialect.types[instruction.dtype], instruction.attr[0])
    if instruction.op == "reduce":
        return "reduce", row_reduction(body, text, position, dialect)
    if instruction.op == "taken":
        (source, _), (name, type_name) = instruction.args, (text.names[position], dialect.types[instruction.dtype])
        lines = tuple(text.lines[p] for p in sorted({*elements_under(body, [position]), source}) if p in text.lines)
        return "taken", Taken(name, type_name, text.names[source], tuple(x for x in lines if x.position <= source))
    return ("line", text.lines[position]) if position in text.lines else ("", None)


render = renderer(NAME, "jitgen.families.rows.sort", parameters, context, "rows")
