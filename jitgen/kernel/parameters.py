"""Declares the parameters of a kernel as data: axes, and operands that are walked along them.

A family declares them once (``Family.parameters``). What a launch passes follows from the declaration, and so do the
names that sources have for it: pointers of all operands in memory, then integers, then run-time scalars. On a CPU the
scalars come before the integers, because a launcher packs once what calls of one shape have in common.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jitgen.ir.body import Operand
from jitgen.kernel.entry import Member
from jitgen.kernel.launch import Arguments
from jitgen.kernel.operands import MappedTensor, item_size

LAUNCH = -1
"""The region of an integer that the settled schedule has, and no geometry."""


class Integer(NamedTuple):
    """Describes an integer parameter, which is a number of a call. (A tuple, because each call of new sizes makes
    some.)

    Attributes:
        name: in sources.
        field: the attribute of the geometry that has it.
        operand, dim: where it is there; -1 for none.
        region: whose geometry; ``LAUNCH`` for an attribute of the settled schedule.
    """

    name: str
    field: str
    operand: int = -1
    dim: int = -1
    region: int = 0

    @property
    def is_size(self) -> bool:
        return "size" in self.field

    def value(self, geometries: Sequence[Any], settled: Any) -> int:
        number = getattr(settled if self.region == LAUNCH else geometries[self.region], self.field)
        number = number[self.operand] if self.operand >= 0 else number
        return int(number[self.dim] if self.dim >= 0 else number)


class OperandParameters(NamedTuple):
    """Describes the parameters of an operand: a tensor in memory, or an index that counts along an axis.

    Attributes:
        operand: of the body.
        number: among the region's operands.
        pointer: the parameter with its address; None for an index.
        offset: the parameter with an index's first value; empty for tensors.
        strides: for each axis the parameter with its stride there, or the number that the layout fixes it to.
        gathered: (size, stride) of each dimension that a computed index chooses along, likewise.
        name: what the struct of an entry in CUDA calls it; empty for the name of its role.
    """

    operand: Operand
    number: int
    pointer: str | None
    offset: str
    strides: tuple[str, ...]
    gathered: tuple[tuple[str, str], ...] = ()
    name: str = ""

    def integers(self, region: int) -> Iterator[Integer]:
        """Yields the integer parameters in order: whatever is no number."""
        if self.offset:
            yield Integer(self.offset, "offsets", self.number, -1, region)
        for dim, name in enumerate(self.strides):
            if not name.isdigit():
                yield Integer(name, "strides", self.number, dim, region)
        for dim, names in enumerate(self.gathered):
            for field, name in zip(("gathered_sizes", "gathered_strides"), names, strict=True):
                if not name.isdigit():
                    yield Integer(name, field, self.number, dim, region)


def declared(
    operand: Operand,
    number: int,
    strides: Sequence[str],
    suffix: str = "",
    gathered: tuple[tuple[str, str], ...] = (),
    name: str = "",
) -> OperandParameters:
    """Declares the parameters of ``operand``, with the names that all families give to pointers and first values.

    Args:
        strides: see ``OperandParameters``; an empty one has the name that all families give to strides.
        suffix: what the names of its parameters end in; by default ``number``.
        gathered, name: see ``OperandParameters``.
    """
    suffix = suffix or str(number)
    return OperandParameters(
        operand,
        number,
        pointer=None if operand.buffer is None else f"p{suffix}",
        offset=f"o{suffix}" if operand.buffer is None else "",
        strides=tuple(stride or f"s{suffix}_{dim}" for dim, stride in enumerate(strides)),
        gathered=gathered,
        name=name,
    )


@dataclass(frozen=True)
class RegionParameters:
    """Describes the parameters of a region, which has axes and operands.

    Attributes:
        axes: the sizes that are parameters.
        operands: all of the body's, in order.
        last: integers behind those of operands.
    """

    axes: tuple[Integer, ...]
    operands: tuple[OperandParameters, ...]
    last: tuple[Integer, ...] = ()


@dataclass(frozen=True)
class KernelParameters:
    """Describes the parameters of a kernel, by its regions.

    Attributes:
        wide: whether integers are 64-bit on a GPU.
        spelled: what sources call a parameter, where that is another expression.
        runs: for a kernel that does the same to several tensors, how many regions, one after the other, are of one
            text; empty where each has its own. A source in CUDA C++ has an array of structs for each run.
    """

    regions: tuple[RegionParameters, ...]
    wide: bool
    spelled: Mapping[str, str] = dataclasses.field(default_factory=dict)
    runs: tuple[int, ...] = ()

    @property
    def operands(self) -> tuple[OperandParameters, ...]:
        return tuple(operand for region in self.regions for operand in region.operands)

    @property
    def integers(self) -> tuple[Integer, ...]:
        """Returns the integer parameters in order."""
        integers: list[Integer] = []
        for number, region in enumerate(self.regions):
            of_operands = (integer for operand in region.operands for integer in operand.integers(number))
            integers += [*region.axes, *of_operands, *region.last]
        return tuple(integers)

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the names of the integer parameters in order."""
        return tuple(integer.name for integer in self.integers)

    def arguments(self, geometries: Sequence[Any], settled: Any, maps: Iterable[MappedTensor]) -> Arguments:
        """Returns what one launch passes for these parameters, after tensor maps."""
        pointers = tuple(
            (declared.operand.buffer, geometry.offsets[declared.number] * item_size(declared.operand.dtype))
            for region, geometry in zip(self.regions, geometries, strict=True)
            for declared in region.operands
            if declared.operand.buffer is not None
        )
        integers = tuple(integer.value(geometries, settled) for integer in self.integers)
        return Arguments(pointers, integers, self.wide, tuple(maps), self.members)

    @property
    def members(self) -> tuple[Member, ...]:
        """Returns the members of the struct of an entry in CUDA C++: operands in their order, then integers of the
        kernel. In a kernel of ``runs`` each region's integers follow its operands."""
        integers = self.integers
        owned: dict[tuple[int, int], list[int]] = {}
        for position, integer in enumerate(integers):
            if integer.operand >= 0:
                owned.setdefault((integer.region, integer.operand), []).append(position)
        members: list[Member] = []
        pointers = 0
        for region, parameters in enumerate(self.regions):
            for declared in parameters.operands:
                own = owned.get((region, declared.number), [])
                own.sort(key=lambda position: integers[position].is_size)
                in_memory = declared.pointer is not None
                if in_memory or own:
                    sizes = sum(integers[position].is_size for position in own)
                    operand = (region, declared.number)
                    members.append(Member(operand, pointers if in_memory else None, tuple(own), sizes))
                pointers += in_memory
        loose = [position for position, integer in enumerate(integers) if integer.operand < 0]
        if self.runs:
            return tuple(self._by_region(members, loose))
        return (*members, *(Member(None, None, (position,)) for position in loose))

    def _by_region(self, operands: Sequence[Member], loose: Sequence[int]) -> Iterator[Member]:
        """Yields the members of one region after the other: its ``operands``, sizes and end."""
        waiting = iter(loose)
        for number, region in enumerate(self.regions):
            yield from (member for member in operands if member.operand and member.operand[0] == number)
            own = list(itertools.islice(waiting, len(region.axes) + len(region.last)))
            yield from (Member(None, None, (position,), ends=position == own[-1]) for position in own)

    def name(self, parameter: str) -> str:
        """Returns what sources call the parameter ``parameter``."""
        return self.spelled.get(parameter, parameter)

    def renamed(self, spelled: Mapping[str, str]) -> KernelParameters:
        """Renames these parameters to expressions; ``spelled`` has those of parameters that are called otherwise."""

        def named(name: str) -> str:
            return spelled.get(name, name)

        def operand(own: OperandParameters) -> OperandParameters:
            return own._replace(
                pointer=None if own.pointer is None else named(own.pointer),
                offset=named(own.offset),
                strides=tuple(map(named, own.strides)),
                gathered=tuple((named(size), named(stride)) for size, stride in own.gathered),
            )

        def axes(integers: Iterable[Integer]) -> tuple[Integer, ...]:
            return tuple(integer._replace(name=named(integer.name)) for integer in integers)

        regions = [
            RegionParameters(axes(region.axes), tuple(map(operand, region.operands)), axes(region.last))
            for region in self.regions
        ]
        return KernelParameters(tuple(regions), self.wide, spelled, self.runs)
