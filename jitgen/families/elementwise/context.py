"""Builds the context of the elementwise templates: names and expressions, so that templates need to work out
nothing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Line, Source, printed
from jitgen.families.elementwise import NAME
from jitgen.families.elementwise.layout import Layout, parameters
from jitgen.families.elementwise.schedule import Schedule
from jitgen.families.row_passes import RowPass, lines_under, passes_of, row_lines, row_passes
from jitgen.ir.body import Body
from jitgen.ir.program import Kernel
from jitgen.kernel.operands import ACCESS_BYTES, item_size
from jitgen.kernel.parameters import KernelParameters
from jitgen.kernel.printed import (
    KernelContext,
    PrintedOperand,
    context_attributes,
    printed_attributes,
    sum_of,
    title_of,
)
from jitgen.kernel.render import renderer


@dataclass(frozen=True)
class OperandContext(PrintedOperand):
    """Describes one operand of a region.

    Attributes:
        local: the variable with the address at which a thread reads or writes, or with what it has loaded from there.
        alignment: what the address is a multiple of, in bytes.
        indices: of a store, the names of the values that choose along ``gathered``.
    """

    local: str
    alignment: int
    indices: tuple[str, ...]

    @property
    def chosen(self) -> str:
        """Returns the offset that the indices of a store make; empty if it has none."""
        terms = zip(self.indices, self.gathered, strict=False)
        return " + ".join(index if stride == "1" else f"{index} * {stride}" for index, (_, stride) in terms)

    def inside(self, within: str, conjunction: str) -> str:
        """Returns the test whether all indices of a store are in range.

        Args:
            within: the dialect's test of one, over ``{0}``, the index, and ``{1}``, the size.
            conjunction: between two.
        """
        terms = zip(self.indices, self.gathered, strict=False)
        return conjunction.join(within.format(index, size) for index, (size, _) in terms)

    @property
    def constant_in_row(self) -> bool:
        """Returns whether the operand has one element for all of the innermost dimension."""
        return self.kind in ("scalar", "broadcast")

    def base(self, indices: Sequence[str]) -> str:
        """Returns the offset at ``indices`` of all dimensions but the innermost, in elements; empty where it is always
        0."""
        terms = [f"{i} * {s}" for i, s in zip(indices, self.strides, strict=False) if s != "0"]
        return " + ".join(terms)

    def position(self, outer: Sequence[str], column: str) -> str:
        """Returns the offset at the indices ``outer`` and ``column``, in elements; for an iota, its value."""
        return sum_of([self.offset], self.strides, [*outer, column])


@dataclass(frozen=True)
class RegionContext:
    """Describes one region.

    Attributes:
        index: in the kernel.
        title: its description, for a comment.
        rank: collapsed dimensions.
        sizes: the parameters with their sizes.
        operands: loads, iotas and gathers before stores.
        lines: the statements that compute the results.
        scalars: (name, type) of run-time scalars that the region reads.
        vector, unroll: elements of an access, and accesses of a thread (see ``Schedule``).
        first, end: the first block of the region in the grid, and the first one after it.
        unit: elements that one access may move, from the layout.
        lanes: lanes of a warp that share a row that is reduced; 0 where none is.
        passes: what is done over such a row before the last time, which computes ``lines``.
        after: lines of values that a row has one of, behind the passes.
    """

    index: int
    title: str
    rank: int
    sizes: tuple[str, ...]
    operands: tuple[OperandContext, ...]
    lines: tuple[Line, ...]
    scalars: tuple[tuple[str, str], ...]
    vector: int
    unroll: int
    end: str
    first: str
    unit: int
    lanes: int = 0
    passes: tuple[RowPass, ...] = ()
    after: tuple[Line, ...] = ()

    @property
    def outer_sizes(self) -> tuple[str, ...]:
        return self.sizes[:-1]

    @property
    def inner_size(self) -> str:
        return self.sizes[-1]

    @property
    def loads(self) -> tuple[OperandContext, ...]:
        """Returns the operands that are read before the first line."""
        return tuple(operand for operand in self.operands if operand.role in ("load", "iota"))

    @property
    def gathers(self) -> tuple[OperandContext, ...]:
        """Returns the operands that lines read: at ``at`` and the number of the operand, a variable, and computed
        indices from there."""
        return tuple(operand for operand in self.operands if operand.role == "gather")

    @property
    def stores(self) -> tuple[OperandContext, ...]:
        return tuple(operand for operand in self.operands if operand.role == "store")


@dataclass(frozen=True)
class PointwiseContext(KernelContext):
    """Describes the whole kernel: its regions.

    Attributes:
        runs: of a kernel that does the same to several tensors: the regions of one text, one after the other.
    """

    regions: tuple[RegionContext, ...]
    runs: tuple[tuple[RegionContext, ...], ...] = ()


def context(
    kernel: Kernel, layouts: Sequence[Layout], declared: KernelParameters, schedule: Schedule, dialect: Dialect
) -> PointwiseContext:
    """Returns the context of ``kernel`` in ``dialect``."""
    regions = tuple(
        _region(number, body, layouts[number], declared, schedule, dialect) for number, body in enumerate(kernel.bodies)
    )
    operands = [operand for region in regions for operand in region.operands]
    rest = iter(regions)
    runs = tuple(tuple(itertools.islice(rest, count)) for count in declared.runs)
    return PointwiseContext(**context_attributes(kernel, declared, operands, dialect), regions=regions, runs=runs)


render = renderer(NAME, "jitgen.families.elementwise", parameters, context, several=True)


def _region(
    number: int, body: Body, layout: Layout, parameters: KernelParameters, schedule: Schedule, dialect: Dialect
) -> RegionContext:
    declared = parameters.regions[number]
    sources = {
        index: Source(f"x{index}", f"at{index}", own.gathered, own.operand.dtype, "live")
        for index, own in enumerate(declared.operands)
        if own.operand.kind == "gather"
    }
    text = printed(body.instructions, dialect, coarse=body.coarse, sources=sources)
    chosen = {
        i.attr[0]: tuple(text.names[index] for index in i.args[1:]) for i in body.instructions if i.op == "scatter"
    }
    operands = []
    for index, (own, kind) in enumerate(zip(declared.operands, layout.operands, strict=True)):
        unit = layout.unit if kind == "contiguous" else 1
        operands.append(
            OperandContext(
                **printed_attributes(own, kind, text.values[index], dialect),
                local=f"x{index}",
                alignment=min(unit * item_size(own.operand.dtype), ACCESS_BYTES),
                indices=chosen.get(index, ()),
            )
        )
    return RegionContext(
        index=number,
        title=title_of(body, layout.operands, f" as {layout.rank} dimension{'s' * (layout.rank > 1)}"),
        rank=layout.rank,
        sizes=tuple(size.name for size in declared.axes),
        operands=tuple(operands),
        lines=lines_under(body, text, _stores(body)) if layout.lanes else tuple(text.lines.values()),
        scalars=tuple(text.scalars.items()),
        vector=schedule.vectors[number],
        unroll=schedule.unrolls[number],
        end=parameters.name(f"end{number}"),
        first=parameters.name(f"end{number - 1}") if number else "0",
        unit=layout.unit,
        lanes=layout.lanes,
        passes=row_passes(body, text, dialect),
        after=row_lines(body, text, passes_of(body)),
    )


def _stores(body: Body) -> list[int]:
    return [position for position, i in enumerate(body.instructions) if i.op in ("store", "scatter")]


def region_parameters(region: RegionContext, index: str) -> list[tuple[str, str]]:
    """Returns (type, name) of the kernel's parameters that a region uses; integers have the type ``index``."""
    strides = [stride for operand in region.operands for stride in operand.strides if not stride.isdigit()]
    offsets = [operand.offset for operand in region.operands if operand.offset]
    gathered = [name for operand in region.operands for pair in operand.gathered for name in pair if name != "1"]
    pointers = [(o.pointer_type, o.pointer) for o in region.operands if o.pointer]
    integers = [(index, name) for name in (*region.sizes, *offsets, *strides, *gathered)]
    return [*pointers, *integers, *((kind, name) for name, kind in region.scalars)]


def condition(region: RegionContext, regions: int, test: str, otherwise: str, chain: str = "else ") -> str:
    """Prints the branch that sends a block to ``region``: one of an if / else-if chain, or nothing for a single
    region."""
    if regions == 1:
        return ""
    if region.index == regions - 1:
        return otherwise
    return (chain if region.index else "") + test.format(end=region.end)
