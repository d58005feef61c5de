"""The context of the elementwise templates: names and expressions, so that templates need to work out nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Line, Source, printed
from jitgen.families.elementwise.launch import integer_names
from jitgen.families.elementwise.layout import Layout
from jitgen.families.elementwise.schedule import Schedule
from jitgen.ir.body import Body, Operand, compute_dtype
from jitgen.ir.program import Kernel
from jitgen.kernel.operands import ACCESS_BYTES, item_size


@dataclass(frozen=True)
class OperandContext:
    """One operand of a region.

    Attributes:
        index: in the region.
        role: load, gather, iota or store.
        kind: of its strides, from the layout.
        dtype: in memory.
        storage: the dialect's type of an element in memory.
        type: the dialect's type that the element is computed in.
        value: the name of the element's value.
        strides: expressions, one for each dimension.
        pointer: the parameter; None for an iota.
        local: the variable with the address at which a thread reads or writes, or with what it has loaded from there.
        offset: the parameter with an iota's first value; empty for others.
        alignment: what the address is a multiple of, in bytes.
        gathered: (size, stride) of each dimension that an index chooses along: parameters, or 1.
        indices: of a store, the names of the values that choose along these.
    """

    index: int
    role: str
    kind: str
    dtype: str
    storage: str
    type: str
    value: str
    strides: tuple[str, ...]
    pointer: str | None
    local: str
    offset: str = ""
    alignment: int = 1
    gathered: tuple[tuple[str, str], ...] = ()
    indices: tuple[str, ...] = ()

    @property
    def chosen(self) -> str:
        """Of a store, the offset that its indices make; empty where it has none."""
        terms = zip(self.indices, self.gathered, strict=False)
        return " + ".join(index if stride == "1" else f"{index} * {stride}" for index, (_, stride) in terms)

    def inside(self, within: str, conjunction: str) -> str:
        """Of a store, whether all its indices are in range.

        Args:
            within: the dialect's test of one, over ``{0}``, the index, and ``{1}``, the size.
            conjunction: between two.
        """
        terms = zip(self.indices, self.gathered, strict=False)
        return conjunction.join(within.format(index, size) for index, (size, _) in terms)

    @property
    def memory(self) -> bool:
        return self.pointer is not None

    @property
    def inner(self) -> str:
        """The expression of the innermost stride."""
        return self.strides[-1]

    @property
    def constant_in_row(self) -> bool:
        """Whether it has one element for all of the innermost dimension."""
        return self.kind in ("scalar", "broadcast")

    def base(self, indices: Sequence[str]) -> str:
        """The offset at ``indices`` of all dimensions but the innermost, in elements; empty where it is always 0."""
        terms = [f"{i} * {s}" for i, s in zip(indices, self.strides, strict=False) if s != "0"]
        return " + ".join(terms)

    def position(self, outer: Sequence[str], column: str) -> str:
        """The offset at the indices ``outer`` and ``column``, in elements; for an iota, its value."""
        inner = {"0": "", "1": column}.get(self.inner, f"{column} * {self.inner}")
        return " + ".join(term for term in (self.offset, self.base(outer), inner) if term) or "0"


@dataclass(frozen=True)
class RegionContext:
    """One region.

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

    @property
    def outer_sizes(self) -> tuple[str, ...]:
        return self.sizes[:-1]

    @property
    def inner_size(self) -> str:
        return self.sizes[-1]

    @property
    def loads(self) -> tuple[OperandContext, ...]:
        """What is there before the first line."""
        return tuple(operand for operand in self.operands if operand.role in ("load", "iota"))

    @property
    def gathers(self) -> tuple[OperandContext, ...]:
        """What lines read: at ``at`` and the number of the operand, a variable, and computed indices from there."""
        return tuple(operand for operand in self.operands if operand.role == "gather")

    @property
    def stores(self) -> tuple[OperandContext, ...]:
        return tuple(operand for operand in self.operands if operand.role == "store")


def integer_name(region: int, what: str, operand: int, dim: int) -> str:
    """The name of an integer parameter; ``what`` is as in ``launch.integer_names``."""
    return {
        "size": f"n{region}_{dim}",
        "stride": f"s{region}_{operand}_{dim}",
        "offset": f"o{region}_{operand}",
        "gathered size": f"b{region}_{operand}_{dim}",
        "gathered stride": f"g{region}_{operand}_{dim}",
        "end": f"end{region}",
    }[what]


def integers(kernel: Kernel, layouts: Sequence[Layout], tiled: bool) -> list[str]:
    """Names of the integer parameters, in order."""
    return [integer_name(*entry) for entry in integer_names(kernel, layouts, tiled)]


def regions(
    kernel: Kernel, layouts: Sequence[Layout], schedule: Schedule, dialect: Dialect
) -> tuple[RegionContext, ...]:
    """The contexts of all regions of ``kernel``."""
    return tuple(
        _region(number, body, layout, kernel, schedule, dialect)
        for number, (body, layout) in enumerate(zip(kernel.bodies, layouts, strict=True))
    )


def _region(
    number: int, body: Body, layout: Layout, kernel: Kernel, schedule: Schedule, dialect: Dialect
) -> RegionContext:
    sources = {
        index: Source(f"x{index}", f"at{index}", _gathered(number, index, operand, layout), operand.dtype, "live")
        for index, operand in enumerate(body.operands)
        if operand.kind == "gather"
    }
    found = printed(body.instructions, dialect, coarse=body.coarse, sources=sources)
    chosen = {
        i.attr[0]: tuple(found.names[index] for index in i.args[1:]) for i in body.instructions if i.op == "scatter"
    }
    operands = tuple(
        replace(_operand(number, index, operand, layout, found.values[index], dialect), indices=chosen.get(index, ()))
        for index, operand in enumerate(body.operands)
    )
    shape = ", ".join(map(str, body.shape))
    kinds = ", ".join(f"{o.role} {o.dtype} {o.kind}" for o in operands)
    return RegionContext(
        index=number,
        title=f"({shape}) as {layout.rank} dimension{'s' * (layout.rank > 1)}: {kinds}",
        rank=layout.rank,
        sizes=tuple(integer_name(number, "size", -1, dim) for dim in range(layout.rank)),
        operands=operands,
        lines=tuple(found.lines.values()),
        scalars=tuple(found.scalars.items()),
        vector=schedule.vectors[number],
        unroll=schedule.unrolls[number],
        end=integer_name(number, "end", -1, -1),
        first=integer_name(number - 1, "end", -1, -1) if number else "0",
        unit=layout.unit,
    )


def _gathered(region: int, index: int, operand: Operand, layout: Layout) -> tuple[tuple[str, str], ...]:
    """The expressions of the size and the stride of each dimension that an index chooses along."""
    return tuple(
        (
            integer_name(region, "gathered size", index, dim),
            "1" if layout.neighbours[index][dim] else integer_name(region, "gathered stride", index, dim),
        )
        for dim in range(operand.gathered)
    )


def _operand(region: int, index: int, operand: Operand, layout: Layout, value: str, dialect: Dialect) -> OperandContext:
    kind = layout.operands[index]
    strides = [integer_name(region, "stride", index, dim) for dim in range(layout.rank)]
    if kind == "scalar":
        strides = ["0"] * layout.rank
    elif kind != "strided":
        strides[-1] = "1" if kind == "contiguous" else "0"
    return OperandContext(
        index=index,
        role=operand.kind,
        kind=kind,
        dtype=operand.dtype,
        storage=dialect.storage_types[operand.dtype],
        type=dialect.types[compute_dtype(operand.dtype)],
        value=value,
        strides=tuple(strides),
        pointer=f"p{region}_{index}" if operand.buffer is not None else None,
        local=f"x{index}",
        offset=integer_name(region, "offset", index, -1) if operand.kind == "iota" else "",
        alignment=min((layout.unit if kind == "contiguous" else 1) * item_size(operand.dtype), ACCESS_BYTES),
        gathered=_gathered(region, index, operand, layout),
    )


def const_prefix(operand: OperandContext) -> str:
    """C++'s ``const`` in front of the type of an operand that is only read."""
    return "" if operand.role == "store" else "const "


def pointer_parameters(regions: Sequence[RegionContext]) -> list[str]:
    """The pointer parameters of a C++ kernel, in order."""
    return [
        f"{const_prefix(operand)}{operand.storage}* {operand.pointer}"
        for region in regions
        for operand in region.operands
        if operand.memory
    ]


def region_parameters(region: RegionContext, index: str) -> list[tuple[str, str]]:
    """(type, name) of the kernel's parameters that a region uses; integers have the type ``index``."""
    strides = [stride for operand in region.operands for stride in operand.strides if not stride.isdigit()]
    offsets = [operand.offset for operand in region.operands if operand.offset]
    gathered = [name for operand in region.operands for pair in operand.gathered for name in pair if name != "1"]
    pointers = [(f"{const_prefix(o)}{o.storage}*", o.pointer) for o in region.operands if o.pointer]
    integers = [(index, name) for name in (*region.sizes, *offsets, *strides, *gathered)]
    return [*pointers, *integers, *((kind, name) for name, kind in region.scalars)]


def condition(region: RegionContext, regions: int, test: str, otherwise: str, chain: str = "else ") -> str:
    """The branch that sends a block to ``region``: one of an if / else-if chain, or nothing for a single region."""
    if regions == 1:
        return ""
    if region.index == regions - 1:
        return otherwise
    return (chain if region.index else "") + test.format(end=region.end)
