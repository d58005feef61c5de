"""Prints the struct of an entry in C++ (``kernel/entry.py``): its members, and the expressions that read them.

In CUDA C++ a member is an operand, and the struct the parameter of the entry. On a CPU each value has a member, in the
order in which a launch packs them, and the entry is a method.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jitgen.codegen.dialect import Dialect
from jitgen.errors import UnsupportedError
from jitgen.ir.body import Operand
from jitgen.ir.program import Kernel
from jitgen.kernel.entry import Member, places
from jitgen.kernel.parameters import Integer, KernelParameters

MOST_BYTES = 32764
"""Bytes of all parameters of a kernel: of PTX ISA 8.1, from sm_70 on (CUDA C++ Programming Guide, "Function
Parameters")."""
CHECK_WIDTH = 112
"""Characters of a line of assertions."""

_CODES = {"float32": "f", "float64": "d", "int64": "q"}
_ROLES = {"load": "input", "gather": "gathered", "store": "result", "iota": "index"}
"""Names of the roles that are no names for a tensor."""
_LOOSE = {"sizes": "size", "columns": "columns", "batch": "batch_size", "groups": "group_size"}
_LOOSE |= {"gathered_sizes": "chosen_size", "gathered_strides": "chosen_stride", "depths": "depth", "widths": "width"}
"""Names of the kernel's integers, by the attribute of the geometry that has one for each dimension."""


@dataclass(frozen=True)
class Params:
    """Describes the struct of a kernel, and how its expressions name what is in it.

    Attributes:
        members: those of ``KernelParameters``.
        declared: of each member, its type and its name.
        scalars: of each run-time scalar, its type and its name.
        scalar_codes: their ``struct`` codes.
        pointers: of each operand in memory, the type and the expression of its pointer, in the order of operands.
        integers: the expressions of the integers, in the order in which a launch passes them.
        spelled: the expression of each value, by the name of the parameter that it is in other dialects.
        runs: see ``KernelParameters``; (first region, regions, the members of the first region) of each run.
    """

    members: tuple[Member, ...]
    declared: tuple[tuple[str, str], ...]
    scalars: tuple[tuple[str, str], ...]
    scalar_codes: str
    pointers: tuple[tuple[str, str], ...]
    integers: tuple[str, ...]
    spelled: Mapping[str, str]
    runs: tuple[tuple[int, int, tuple[tuple[str, str], ...]], ...] = ()

    def printed(self, wide: bool, maps: Sequence[str] = ()) -> dict[str, Any]:
        """Returns what ``params.cu.j2`` prints.

        Args:
            wide: whether indices have 64 bits.
            maps: the names of its tensor maps.
        """
        lines = [f"jitgen::TensorMap {name};" for name in maps]
        members = self.declared
        if self.runs:
            members = tuple((f"Region{first}", f"run{first}[{count}]") for first, count, _ in self.runs)
        lines += [f"{kind} {name};" for kind, name in (*members, *self.scalars)]
        listed, size = places(len(maps), self.members, "q" if wide else "i", self.scalar_codes)
        if size > MOST_BYTES:
            raise UnsupportedError(
                f"a kernel of {len(self.members)} operands and sizes takes {size} bytes of parameters, and an entry in "
                f"CUDA C++ at most {MOST_BYTES}; compute fewer results at once, or use backend='triton'"
            )
        offsets = {(place.source, place.number): place.offset for place in listed}
        firsts = [(name, ("map", number)) for number, name in enumerate(maps)]
        if self.runs:
            starts = {m.operand[0]: m.first for m in reversed(self.members) if m.operand is not None}
            firsts += [(f"run{first}", starts[first]) for first, _, _ in self.runs]
        else:
            firsts += [(name, member.first) for member, (_, name) in zip(self.members, self.declared, strict=True)]
        firsts += [(name, ("scalar", number)) for number, (_, name) in enumerate(self.scalars)]
        checks = [f"sizeof(Params) == {size}"]
        checks += [f"JITGEN_OFFSET({name}) == {offsets[first]}" for name, first in firsts]
        structs = [(f"Region{first}", [f"{kind} {name};" for kind, name in own]) for first, _, own in self.runs]
        return {"members": lines, "checks": list(_wrapped(checks)), "structs": structs}

    @property
    def packed(self) -> dict[str, Any]:
        """Returns what ``params.cpp.j2`` prints: the struct that the entry on a CPU is a method of, in the order in
        which the launcher packs it. Members that may differ between two calls of one shape come first, so that the
        others are packed once."""
        lines = [f"{kind} {name};" for kind, name in self.pointers]
        lines += [f"alignas(8) {kind} {name};" for kind, name in self.scalars]
        lines.append("alignas(8) int32_t threads;")
        of_operands = itertools.groupby(self.integers, lambda name: name.rpartition("_")[0])
        lines += [f"int64_t {', '.join(names)};" for _, names in of_operands]
        lines.append("alignas(8) int32_t streaming;")
        return {"members": lines, "bytes": 8 * (len(self.pointers) + len(self.scalars) + len(self.integers) + 2)}


def local(expression: str) -> str:
    """Returns the name of a variable that begins as an operand's pointer or first value and is moved from there."""
    return f"{member_of(expression)}_of_matrix"


def map_names(pointers: Iterable[str]) -> list[str]:
    """Returns the names in the struct of the tensor maps of operands with these pointers, which are called after
    them."""
    names: list[str] = []
    for pointer in pointers:
        name = f"{member_of(pointer)}_map"
        names.append(f"{name}_{names.count(name) + 1}" if name in names else name)
    return names


def member_of(expression: str) -> str:
    """Returns the member of the struct that ``expression`` reads."""
    return expression.removeprefix("params.").partition(".")[0]


def _wrapped(checks: Sequence[str]) -> Iterator[str]:
    """Wraps ``checks`` into lines of a conjunction."""
    text = " && ".join(check.replace(" ", "\0") for check in checks)
    wrap = textwrap.TextWrapper(CHECK_WIDTH, break_long_words=False, break_on_hyphens=False)
    return (line.replace("\0", " ") for line in wrap.wrap(text))


@dataclass(frozen=True)
class Spelling:
    """Says how expressions name the values of a struct: format strings over a member's name, and a number.

    Attributes:
        pointer, first, stride, size: values of an operand.
        loose: a value of the kernel.
    """

    pointer: str
    first: str
    stride: str
    size: str
    loose: str


OF_RUNS = Spelling("own.{}.pointer", "own.{}.first", "own.{}.strides[{}]", "own.{}.sizes[{}]", "own.{}")
IN_CUDA = Spelling("params.{}.pointer", "params.{}.first", "params.{}.strides[{}]", "params.{}.sizes[{}]", "params.{}")
ON_CPU = Spelling("{}_pointer", "{}_first", "{}_stride{}", "{}_size{}", "{}")


def params_of(kernel: Kernel, parameters: KernelParameters, dialect: Dialect, spelling: Spelling = IN_CUDA) -> Params:
    """Makes the struct of ``kernel``, which has ``parameters``."""
    integers, members = parameters.integers, parameters.members
    of_kernel = spelling
    if parameters.runs:
        spelling = OF_RUNS
    taken = {integer.name for integer in integers if integer.operand < 0 and integer.field not in _LOOSE}
    taken |= {_scalar(number) for number in range(len(kernel.scalars))}
    spelled: dict[str, str] = {}
    declared: list[tuple[str, str]] = []
    regions = len(parameters.regions)

    def unique(name: str) -> str:
        number, free = 1, name
        while free in taken:
            number, free = number + 1, f"{name}_{number + 1}"
        taken.add(free)
        return free

    for member in members:
        if member.operand is None:
            integer = integers[member.integers[0]]
            name = unique(_loose(integer, regions)) if integer.field in _LOOSE else integer.name
            declared.append(("Index", name))
            spelled[integer.name] = spelling.loose.format(name)
            continue
        region, index = member.operand
        own = parameters.regions[region].operands[index]
        name = unique(own.name or _ROLES.get(own.operand.kind, own.operand.kind))
        values = [integers[position] for position in member.integers]
        strides = [value for value in values if not value.is_size and value.name != own.offset]
        spelled |= {value.name: spelling.stride.format(name, number) for number, value in enumerate(strides)}
        sizes = [value for value in values if value.is_size]
        spelled |= {value.name: spelling.size.format(name, number) for number, value in enumerate(sizes)}
        if own.pointer is None:
            spelled[own.offset] = spelling.first.format(name)
            declared.append((f"jitgen::Ramp<Index, {len(strides)}>", name))
            continue
        spelled[own.pointer] = spelling.pointer.format(name)
        element = _element(own.operand, dialect)
        chosen = f", {len(sizes)}" if sizes else ""
        declared.append((f"jitgen::Operand<{element}, Index, {len(strides)}{chosen}>", name))
    scalars = [(dialect.types[dtype], _scalar(number)) for number, (_, dtype) in enumerate(kernel.scalars)]
    codes = "".join(_CODES[dtype] for _, dtype in kernel.scalars)
    spelled |= {f"a{number}": of_kernel.loose.format(name) for number, (_, name) in enumerate(scalars)}
    pointers = [
        (f"{_element(own.operand, dialect)}*", spelled[own.pointer])
        for region in parameters.regions
        for own in region.operands
        if own.pointer is not None
    ]
    passed = tuple(spelled[name] for name in parameters.names)
    runs = tuple(_runs(parameters, tuple(declared)))
    return Params(members, tuple(declared), tuple(scalars), codes, tuple(pointers), passed, spelled, runs)


def _runs(
    parameters: KernelParameters, declared: Sequence[tuple[str, str]]
) -> Iterator[tuple[int, int, tuple[tuple[str, str], ...]]]:
    """Yields the ``runs`` of ``Params``."""
    first, of_region = 0, [list[tuple[str, str]]()]
    for member, own in zip(parameters.members, declared, strict=True):
        of_region[-1].append(own)
        if member.ends:
            of_region.append([])
    for count in parameters.runs:
        yield first, count, tuple(of_region[first])
        first += count


def _element(operand: Operand, dialect: Dialect) -> str:
    """Returns the type of an element of ``operand`` in memory."""
    return f"{'' if operand.kind == 'store' else 'const '}{dialect.storage_types[operand.dtype]}"


def _scalar(number: int) -> str:
    """Returns the name of a run-time scalar, as ``codegen/cuda.py`` reads it."""
    return f"scalar{number}"


def _loose(integer: Integer, regions: int) -> str:
    """Returns the name of an integer of the kernel, or of a region of several."""
    number = [str(index) for index in (integer.region, integer.dim) if index >= 0]
    return _LOOSE[integer.field] + "_".join(number if regions > 1 else number[1:])
