"""Presents a scan to its templates: what is computed once for a row, of its elements before they are scanned, and
after."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Line, printed
from jitgen.families.rows.scan import NAME
from jitgen.families.rows.scan.schedule import Schedule
from jitgen.ir.body import Body, Instruction
from jitgen.ir.graph import walked
from jitgen.ir.program import Kernel
from jitgen.ir.scans import EXTREMA, PLACES, carry_dtype
from jitgen.kernel.parameters import KernelParameters
from jitgen.kernel.printed_rows import RowContext, RowOperand, row_attributes
from jitgen.kernel.render import renderer
from jitgen.kernel.rows import RowLayout, row_parameters


@dataclass(frozen=True)
class Scan:
    """Describes what is combined along the row by one state.

    Attributes:
        number: from 0.
        kind: of ``ir/scans.py``; that of the indices where both the extrema and their indices are asked for.
        dtype, type: of the elements, which ``value`` names.
        result: the name of what a row has been combined to; empty where only indices are asked for.
        index_name: the name of the index of that extremum; empty where nobody asks.
        before: operands with the states of the row's chunks, one for each component.
        totals: operands that the states of the row's chunks go to, likewise.
    """

    number: int
    kind: str
    dtype: str
    type: str
    value: str
    result: str
    index_name: str
    before: tuple[RowOperand, ...]
    totals: tuple[RowOperand, ...]

    @property
    def carry_dtype(self) -> str:
        return carry_dtype(self.kind, self.dtype)

    @property
    def has_places(self) -> bool:
        return self.kind in PLACES


@dataclass(frozen=True)
class Rows(RowContext):
    """Presents the kernel as all dialects read it.

    Attributes:
        row_loads: operands with one element for a row.
        row_lines: what is computed from these once for a row.
        loads_before: operands whose elements the scanned values are computed from.
        lines_before: these computations.
        scans: the scans, in the order of the body.
        loads_after: operands whose elements the results are computed from.
        lines_after: these computations; some lines may be in ``lines_before`` as well.
        stores: operands that results are written to.
    """

    row_loads: tuple[RowOperand, ...]
    row_lines: tuple[Line, ...]
    loads_before: tuple[RowOperand, ...]
    lines_before: tuple[Line, ...]
    scans: tuple[Scan, ...]
    loads_after: tuple[RowOperand, ...]
    lines_after: tuple[Line, ...]
    stores: tuple[RowOperand, ...]

    @property
    def loads(self) -> tuple[RowOperand, ...]:
        """Returns every operand that is read element by element, in order."""
        wanted = {operand.index for operand in (*self.loads_before, *self.loads_after)}
        return tuple(operand for operand in self.operands if operand.index in wanted)


def grouped(body: Body) -> tuple[tuple[int, ...], ...]:
    """Groups the scans that share one state, by position: an extremum and its index, of the same elements."""
    groups: dict[tuple[str, int], list[int]] = {}
    for position, instruction in enumerate(body.instructions):
        if instruction.op == "scan":
            kind = EXTREMA.get(instruction.attr, instruction.attr)
            groups.setdefault((kind, instruction.args[0]), []).append(position)
    return tuple(map(tuple, groups.values()))


def kind_of(body: Body, group: Sequence[int]) -> str:
    """Returns the kind whose state has the results of all of ``group``."""
    kinds = [body.instructions[position].attr for position in group]
    return next((kind for kind in kinds if kind in PLACES), kinds[0])


def context(
    kernel: Kernel, layout: RowLayout, parameters: KernelParameters, schedule: Schedule, dialect: Dialect
) -> Rows:
    """Returns the context of ``kernel`` in ``dialect``."""
    (body,) = kernel.bodies
    instructions = body.instructions
    lines_ = printed(instructions, dialect, coarse=body.coarse)
    shared = row_attributes(kernel, layout, parameters, lines_.values, dialect)
    operands = shared["operands"]
    scans = tuple(
        _scan(number, body, group, operands, lines_.names, dialect) for number, group in enumerate(grouped(body))
    )
    states = {operand.index for scan in scans for operand in (*scan.before, *scan.totals)}
    stores = [p for p, i in enumerate(instructions) if i.op == "store" and i.attr not in states]
    before = _under(instructions, [p for p, i in enumerate(instructions) if i.op == "scan"])
    after = _under(instructions, stores)

    def bound(position: int) -> str:
        instruction = instructions[position]
        return str(instruction.attr) if instruction.op == "const" else lines_.names[position]

    within = {i.attr: (bound(i.args[1]), bound(i.args[2])) for i in map(instructions.__getitem__, stores) if i.args[1:]}

    def loads(positions: Iterable[int]) -> tuple[RowOperand, ...]:
        read = (instructions[p].attr for p in positions if instructions[p].op in ("load", "iota"))
        return tuple(operands[index] for index in dict.fromkeys(read) if not operands[index].is_once)

    def lines(positions: Iterable[int]) -> tuple[Line, ...]:
        return tuple(lines_.lines[p] for p in positions if p in lines_.lines)

    return Rows(
        **shared,
        row_loads=tuple(o for o in operands if o.is_once and o.index not in states),
        row_lines=lines(p for p, i in enumerate(instructions) if i.row),
        loads_before=loads(before),
        lines_before=lines(before),
        scans=scans,
        loads_after=loads(after),
        lines_after=lines(after),
        stores=tuple(replace(operands[i], within=within.get(i)) for i in (instructions[p].attr for p in stores)),
    )


render = renderer(NAME, "jitgen.families.rows.scan", row_parameters, context, "rows")


def _scan(
    number: int,
    body: Body,
    group: Sequence[int],
    operands: Sequence[RowOperand],
    names: dict[int, str],
    dialect: Dialect,
) -> Scan:
    instructions = body.instructions
    first = instructions[group[0]]
    stored = {i.args[0]: i.attr for i in instructions if i.op == "store"}
    states = [(i.attr, stored[p]) for p, i in enumerate(instructions) if i.op == "state" and i.args[0] in group]
    dtype = instructions[first.args[0]].dtype
    return Scan(
        number=number,
        kind=kind_of(body, group),
        dtype=dtype,
        type=dialect.types[dtype],
        value=names[first.args[0]],
        result=next((names[p] for p in group if instructions[p].attr not in PLACES), ""),
        index_name=next((names[p] for p in group if instructions[p].attr in PLACES), ""),
        before=tuple(operands[instructions[argument].attr] for argument in first.args[1:]),
        totals=tuple(operands[index] for _, index in sorted(states)),
    )


def _under(instructions: Sequence[Instruction], roots: Sequence[int]) -> tuple[int, ...]:
    """Returns the element instructions from which ``roots`` are computed, up to scans, in order."""

    def below(position: int) -> Iterator[int]:
        return (a for a in instructions[position].args if not instructions[a].row and instructions[a].op != "scan")

    return tuple(sorted(set(walked((argument for root in roots for argument in below(root)), below))))
