"""Defines the parameter of an entry in CUDA C++: one struct, ``params``, with a member for each operand.

``kernel/printed_entry.py`` prints the struct, and a launch writes each value to its place in it. Both follow from the
members that ``KernelParameters.members`` lists, and a source asserts the offsets that a launch assumes, so that a
compiler that lays the struct out otherwise refuses it. On a CPU each value has a slot of eight bytes in the struct
(``kernel/printed.py``); Triton takes each as a parameter.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

SIZES = {"T": 128, "P": 8, "q": 8, "d": 8, "i": 4, "f": 4}
"""Bytes of a value by its ``struct`` code: a tensor map, a pointer, int64, float64, int32, float32."""
MAP_ALIGNMENT = 64


@dataclass(frozen=True)
class Member:
    """Describes one member of the struct: an operand, or an integer of the kernel.

    Attributes:
        operand: its region and its index there; None for an integer of the kernel.
        pointer: which of the launch's pointers it has; None where it is in no memory.
        integers: which of the launch's integers it has, in the order of C++.
        sizes: how many of these, the last, are sizes.
        ends: whether it is the last of a struct within the struct, which an address begins.
    """

    operand: tuple[int, int] | None
    pointer: int | None
    integers: tuple[int, ...]
    sizes: int = 0
    ends: bool = False

    @property
    def first(self) -> tuple[str, int]:
        """Returns the source and the number of its first value; see ``Place``."""
        return ("integer", self.integers[0]) if self.pointer is None else ("pointer", self.pointer)


@dataclass(frozen=True)
class Place:
    """Locates a value that a launch writes.

    Attributes:
        code: how it is written, as in ``struct``; see ``SIZES``.
        offset: in the struct, in bytes.
        source: what it is: ``"map"``, ``"pointer"``, ``"integer"`` or ``"scalar"``.
        number: which one.
    """

    code: str
    offset: int
    source: str
    number: int


def places(maps: int, members: Iterable[Member], index: str, scalars: str) -> tuple[tuple[Place, ...], int]:
    """Returns the places of a struct in order, and its size in bytes, as C++ lays it out.

    Args:
        maps: how many tensor maps come first.
        index: the code of its integers.
        scalars: the codes of run-time scalars, which come last.
    """
    listed: list[Place] = []
    at, widest = 0, 1

    def add(code: str, source: str, number: int) -> None:
        nonlocal at, widest
        alignment = MAP_ALIGNMENT if code == "T" else SIZES[code]
        at, widest = _aligned(at, alignment), max(widest, alignment)
        listed.append(Place(code, at, source, number))
        at += SIZES[code]

    for number in range(maps):
        add("T", "map", number)
    for member in members:
        if member.pointer is not None:
            add("P", "pointer", member.pointer)
        for number in member.integers:
            add(index, "integer", number)
        if member.pointer is not None or member.ends:
            at = _aligned(at, SIZES["P"])
    for number, code in enumerate(scalars):
        add(code, "scalar", number)
    return tuple(listed), _aligned(at, widest)


def _aligned(at: int, alignment: int) -> int:
    return -(-at // alignment) * alignment
