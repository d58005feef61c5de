"""Builds the context of the gemm templates: regions with their contractions, and the epilogue as printed lines.

The expressions and lines are in the dialect's language, so that templates need to work out nothing. What a dialect
needs beyond that is added by its module (``cuda``, ``cpp``, ``triton``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Line, Printed, printed
from jitgen.errors import UnsupportedError
from jitgen.families.gemm.layout import GemmLayout, parameters
from jitgen.families.gemm.mainloops import GemmSchedule
from jitgen.ir.body import Body, Contraction, behind, unvarying
from jitgen.ir.program import Kernel
from jitgen.kernel.parameters import KernelParameters
from jitgen.kernel.printed import (
    KernelContext,
    PrintedOperand,
    context_attributes,
    indices,
    printed_attributes,
    sum_of,
)
from jitgen.kernel.printed_entry import local
from jitgen.kernel.render import renderer

READ = ("load", "group_scales")
"""Kinds of operands in memory that an epilogue reads."""


@dataclass(frozen=True)
class GemmOperand(PrintedOperand):
    """Describes one operand of a region.

    Attributes:
        unit: how many elements one access may move.
        source: in a batch or of groups in CUDA C++, the parameter that the variable ``pointer`` or ``offset`` begins
            as.
        grouping: as of the layout.
        run: of a store, of how many neighbouring columns one element is the largest.
    """

    unit: int
    source: str
    grouping: str
    run: int = 1

    @property
    def own(self) -> tuple[str, ...]:
        """Returns the strides of a matrix: of rows and of columns; none where it has no such."""
        return self.strides[:2]

    @property
    def begins(self) -> str:
        """Returns how many elements, in an expression, the operand begins behind its first one in a group that begins
        at row, or at k, ``begin``; empty for none."""
        along = {"offsets": 0, "ids": 0, "lengths": 1}.get(self.grouping)
        walked = ("x", "weight") if self.grouping == "lengths" else ("x", "load", "store", "iota")
        if along is None or self.role not in walked or self.own[along] == "0":
            return ""
        return "begin" if self.own[along] == "1" else f"begin * {self.own[along]}"

    @property
    def batch_strides(self) -> tuple[str, ...]:
        """Returns the strides from one matrix to the next."""
        return self.strides[2:]

    @property
    def is_moved(self) -> bool:
        """Returns whether it begins elsewhere in another matrix of a batch, or in another group."""
        return bool(self.batch_strides or self.begins)

    def position(self, row: str, column: str) -> str:
        """Prints the operand's offset at two indices, in elements."""
        return sum_of([self.offset], self.own, (row, column))


@dataclass(frozen=True)
class ContractionContext:
    """Describes one product of a region.

    Attributes:
        index: in the region.
        accumulator: its name, ``acc<index>``.
        type: the accumulator's type.
        contraction: its description.
        x: the operand that is the activation; None where a prologue computes it.
        x_loads: operands that the prologue reads.
        x_lines: statements of the prologue.
        x_scalars: (name, type) of run-time scalars that the prologue reads.
        x_value: expression of the activation's value.
        weight: operands of the weight: one dense tensor, or the tensors of a quantised one.
    """

    index: int
    accumulator: str
    type: str
    contraction: Contraction
    x: GemmOperand | None
    x_loads: tuple[GemmOperand, ...]
    x_lines: tuple[Line, ...]
    x_scalars: tuple[tuple[str, str], ...]
    x_value: str
    weight: tuple[GemmOperand, ...]


@dataclass(frozen=True)
class BlockSteps:
    """Describes the epilogue of a region that is quantised in blocks of a row, in three steps.

    Attributes:
        kind: of the reduction of each block.
        before: statements that compute, for an element, ``kept`` and ``reduced``.
        kept: (name, type) of the values that the codes are computed of, besides that of the reduction.
        reduced: the name of the value that is reduced.
        extremum: (name, type) of the value of a block.
        of_block: statements that compute the scale.
        before_codes: statements that compute what all codes of a block are computed of.
        of_codes: statements that compute, for an element, its code.
        codes, scales: the operands that are written.
    """

    kind: str
    before: tuple[Line, ...]
    kept: tuple[tuple[str, str], ...]
    reduced: str
    extremum: tuple[str, str]
    of_block: tuple[Line, ...]
    before_codes: tuple[Line, ...]
    of_codes: tuple[Line, ...]
    codes: GemmOperand
    scales: GemmOperand


@dataclass(frozen=True)
class GemmRegion:
    """Describes one region.

    Attributes:
        index: in the kernel.
        title: its description, for a comment.
        columns: the parameter with its N.
        contractions: its products.
        operands: all of its operands.
        lines: statements of the epilogue, which compute from ``loads`` and the accumulators.
        scalars: (name, type) of run-time scalars that the epilogue reads.
        steps: of a region that is quantised in blocks; else None.
    """

    index: int
    title: str
    columns: str
    contractions: tuple[ContractionContext, ...]
    operands: tuple[GemmOperand, ...]
    lines: tuple[Line, ...]
    scalars: tuple[tuple[str, str], ...]
    steps: BlockSteps | None = None

    @property
    def loads(self) -> tuple[GemmOperand, ...]:
        """Returns the operands that the epilogue reads."""
        return tuple(operand for operand in self.operands if operand.role in (*READ, "iota") and operand.value)

    @property
    def stores(self) -> tuple[GemmOperand, ...]:
        """Returns the operands that the epilogue writes."""
        return tuple(operand for operand in self.operands if operand.role == "store")


@dataclass(frozen=True)
class GemmContext(KernelContext):
    """Describes the whole kernel. Its parameters ``m`` and ``k`` are M and K of all regions.

    Attributes:
        regions: its regions.
        batch: the parameters with the sizes of its batch.
        grouping, group_slots: as of the layouts.
    """

    regions: tuple[GemmRegion, ...]
    batch: tuple[str, ...]
    grouping: str
    group_slots: int

    @property
    def groups(self) -> GemmOperand | None:
        """Returns the operand that divides rows, or K, among groups."""
        return next((operand for operand in self.regions[0].operands if operand.role == "groups"), None)

    @property
    def group_steps(self) -> list[tuple[GemmOperand, str]]:
        """Returns the operands that begin elsewhere in each group, and how many elements behind their first one: in the
        group that begins at ``begin``, of the matrix ``group``."""
        operands = [operand for region in self.regions for operand in region.operands]
        steps = [
            (o, " + ".join(filter(None, [o.begins, *(f"group * {step}" for step in o.batch_strides)])))
            for o in operands
        ]
        return [(operand, step) for operand, step in steps if step]

    def indices(self, matrix: str) -> list[tuple[str, str]]:
        """Returns (name, expression) of the index of matrix number ``matrix`` in each dimension of the batch."""
        return indices(self.batch, matrix, "z", "/")[::-1]

    @property
    def batch_steps(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Returns pointers and first values of iotas that differ between the matrices of a batch, with their batch
        strides."""
        operands = (operand for region in self.regions for operand in region.operands if not self.grouping)
        return tuple((str(o.pointer or o.offset), o.batch_strides) for o in operands if o.batch_strides)


def context(
    kernel: Kernel, layouts: Sequence[GemmLayout], declared: KernelParameters, schedule: GemmSchedule, dialect: Dialect
) -> GemmContext:
    """Returns the context of ``kernel`` in ``dialect``."""
    ranges, stored = kernel.bodies[0].contractions[0].k_splits, getattr(schedule, "k_splits", 1)
    if stored != ranges:  # the sums of a range are stored where the product's kernel has memory for them
        raise UnsupportedError(
            f"{schedule} is no schedule of this product in the {dialect.name} dialect: it stores the sums of {stored} "
            f"ranges of K, and there is memory for {ranges}"
        )
    regions = tuple(
        _Region(number, body, layouts[number], declared, dialect).build() for number, body in enumerate(kernel.bodies)
    )
    operands = [operand for region in regions for operand in region.operands]
    titles = [region.title for region in regions]
    batch = tuple(declared.name(f"b{dim}") for dim in range(layouts[0].batch))
    attributes = context_attributes(kernel, declared, operands, dialect, titles)
    first = layouts[0]
    return GemmContext(
        **attributes, regions=regions, batch=batch, grouping=first.grouping, group_slots=first.group_slots
    )


render = renderer("gemm", "jitgen.families.gemm", parameters, context, "products", several=True)


class _Region:
    """Builds the context of region ``number``."""

    def __init__(
        self, number: int, body: Body, layout: GemmLayout, parameters: KernelParameters, dialect: Dialect
    ) -> None:
        self.number, self.body, self.layout, self.dialect = number, body, layout, dialect
        self.parameters = parameters

    def build(self) -> GemmRegion:
        epilogue = printed(self.body.instructions, self.dialect, coarse=self.body.coarse)
        contractions = [
            self._contraction(index, contraction) for index, contraction in enumerate(self.body.contractions)
        ]
        kinds = zip(self.body.operands, self.layout.operands, strict=True)
        described = ", ".join(f"{operand.kind} {operand.dtype} {kind}" for operand, kind in kinds)
        operands = tuple(self._operand(index, epilogue) for index in range(len(self.body.operands)))
        return GemmRegion(
            index=self.number,
            title=f"(rows, columns) over K: {described}",
            columns=self.parameters.name(f"n{self.number}"),
            contractions=tuple(contractions),
            operands=operands,
            lines=tuple(epilogue.lines.values()),
            scalars=tuple(epilogue.scalars.items()),
            steps=self._steps(epilogue, operands),
        )

    def _steps(self, text: Printed, operands: Sequence[GemmOperand]) -> BlockSteps | None:
        """Divides the epilogue before and after what it computes of blocks of a row, if it does."""
        instructions, types = self.body.instructions, self.dialect.types
        extremum = next((position for position, one in enumerate(instructions) if one.op == "blocked"), None)
        if extremum is None:
            return None
        scales, codes = sorted(
            (one for one in instructions if one.op == "store"), key=lambda one: not self.body.operands[one.attr].block
        )
        numbers = unvarying(instructions, lambda _: False)
        after = {extremum}
        for position, one in enumerate(instructions):
            if not after.isdisjoint(one.args):
                after.add(position)
        needed = behind(instructions, codes.args) & after - {extremum}
        kept = {argument for position in needed for argument in instructions[position].args} - after
        kept = {position for position in kept if not numbers[position]}
        stops = (extremum, *sorted(kept))
        varying = set(kept)
        for position, one in enumerate(instructions):
            if position != extremum and not varying.isdisjoint(one.args):
                varying.add(position)

        def lines(roots: Sequence[int], stops: Sequence[int] = ()) -> tuple[Line, ...]:
            positions = behind(instructions, roots, stops) - {*stops}
            return tuple(line for position, line in text.lines.items() if position in positions)

        def named(position: int) -> tuple[str, str]:
            return text.names[position], types[instructions[position].dtype]

        of_codes = lines(codes.args, stops)
        return BlockSteps(
            kind=instructions[extremum].attr[0],
            before=lines((*instructions[extremum].args, *kept)),
            kept=tuple(map(named, sorted(kept))),
            reduced=text.names[instructions[extremum].args[0]],
            extremum=named(extremum),
            of_block=lines(scales.args, stops),
            before_codes=tuple(line for line in of_codes if line.position not in varying),
            of_codes=tuple(line for line in of_codes if line.position in varying),
            codes=operands[codes.attr],
            scales=operands[scales.attr],
        )

    def _contraction(self, index: int, contraction: Contraction) -> ContractionContext:
        prologue = printed(contraction.x, self.dialect, f"x{index}_")  # a prefix, as the epilogue may read the same
        last = len(contraction.x) - 1
        loads = dict.fromkeys(i.attr for i in contraction.x if i.op in ("load", "iota"))
        accumulator = next(i.dtype for i in self.body.instructions if i.op == "contract" and i.attr == index)
        return ContractionContext(
            index=index,
            accumulator=f"acc{index}",
            type=self.dialect.types[accumulator],
            contraction=contraction,
            x=self._operand(contraction.activation, prologue) if contraction.activation is not None else None,
            x_loads=tuple(self._operand(operand, prologue) for operand in loads),
            x_lines=tuple(prologue.lines.values()),
            x_scalars=tuple(prologue.scalars.items()),
            x_value=prologue.names[last],
            weight=tuple(self._operand(operand, prologue) for operand in contraction.weight),
        )

    def _operand(self, index: int, text: Printed) -> GemmOperand:
        """Returns operand ``index``, whose value has the name that ``text`` gives it."""
        declared = self.parameters.regions[self.number].operands[index]
        source, value = declared.pointer or declared.offset, text.values.get(index, "")
        attributes = printed_attributes(declared, self.layout.operands[index], value, self.dialect)
        operand = GemmOperand(
            **attributes,
            unit=self.layout.units[index],
            source=source,
            grouping=self.layout.grouping,
            run=self.body.operands[index].run,
        )
        if not operand.is_moved or self.dialect.name != "cuda":
            return operand
        moved = local(source)
        return replace(operand, pointer=moved) if operand.pointer else replace(operand, offset=moved)
