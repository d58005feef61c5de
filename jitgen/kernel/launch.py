"""Defines what a launch is: its shape, what it passes and what it amounts to.

Neither a template nor a compiler nor a device is needed for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jitgen.device import Device
from jitgen.ir.program import Kernel
from jitgen.kernel.entry import Member, places
from jitgen.kernel.operands import addresses, item_size, pointwise_flops

Dim3 = tuple[int, int, int]

OVERLAPS = "programmatic_dependent_launch"
"""A launch attribute: the kernel may begin before the one ahead of it in the stream has ended, and waits for it where
it must (CUDA C++ Programming Guide, "Programmatic Dependent Launch")."""


@dataclass(frozen=True)
class Persistence:
    """Describes blocks that stay and take one piece of work after another, so that a grid has no more than a device
    holds.

    Attributes:
        scope: ``"clusters"``: as many clusters as the driver says are resident at once; ``"multiprocessors"``: a
            number for each multiprocessor.
        blocks: of a multiprocessor at once.
    """

    scope: str
    blocks: int = 1


@dataclass(frozen=True)
class LaunchShape:
    """Says how a kernel is launched on a GPU; on a CPU only ``grid`` means something, the pieces of work.

    Attributes:
        grid, block: in blocks and in threads.
        cluster: blocks of a cluster.
        any_cluster: whether the kernel takes clusters of any size, so that the launch must say which; else the size is
            compiled into the kernel.
        shared_bytes: dynamic shared memory of a block. A kernel that Triton compiled says itself what it takes.
        attributes: of the launch, such as ``OVERLAPS``.
        persistence: None where each block has one piece of work.
        entry: what follows the kernel's name in the name of the entry that is launched, where a source has several.
    """

    grid: Dim3
    block: Dim3 = (1, 1, 1)
    cluster: int = 1
    any_cluster: bool = False
    shared_bytes: int = 0
    attributes: frozenset[str] = frozenset()
    persistence: Persistence | None = None
    entry: str = ""


@dataclass(frozen=True)
class Arguments:
    """Holds what a launch passes besides run-time scalars.

    Attributes:
        pointers: (buffer, byte offset) of each pointer parameter.
        integers: values of the integer parameters.
        wide: whether integers are 64-bit on a GPU.
        maps: tensors that the kernel copies by tensor maps, its first parameters.
        members: how an entry in CUDA C++ has pointers and integers in its struct.
    """

    pointers: tuple[tuple[int, int], ...]
    integers: tuple[int, ...]
    wide: bool
    maps: tuple[Any, ...] = ()
    members: tuple[Member, ...] = ()

    def packing(self, scalars: str, in_struct: bool = True) -> Packing:
        """Returns how a GPU's kernel takes the arguments, and run-time scalars of the ``struct`` codes ``scalars``.

        Args:
            in_struct: whether it takes one struct, as entries in CUDA C++ do; those of a family without ``members``
                take parameters.
        """
        if not (in_struct and self.members):
            before = len(self.maps) + len(self.pointers)
            codes = "T" * len(self.maps) + "P" * len(self.pointers) + ("q" if self.wide else "i") * len(self.integers)
            return Packing(codes + scalars, (*(None,) * before, *self.integers, *(None,) * len(scalars)), None)
        listed, size = places(len(self.maps), self.members, "q" if self.wide else "i", scalars)
        values = tuple(self.integers[place.number] if place.source == "integer" else None for place in listed)
        return Packing("".join(place.code for place in listed), values, (tuple(place.offset for place in listed), size))


@dataclass(frozen=True)
class Packing:
    """Describes the parameters of a launch.

    Attributes:
        codes: the ``struct`` codes of its values, in order.
        values: the integers among these; None for others: tensor maps, pointers and run-time scalars, in this order.
        layout: in a struct, the offset of each value, and its bytes.
    """

    codes: str
    values: tuple[int | None, ...]
    layout: tuple[tuple[int, ...], int] | None


@dataclass(frozen=True)
class Work:
    """Counts what a launch amounts to.

    Attributes:
        elements: computed in all; a launch of none is skipped.
        written: bytes written.
        moved: bytes read and written, each once, whatever a kernel reads again.
        flops: operations, by the weights of ``ir/ops.py``; a multiply-add of a product is two.
        addressing: of these, operations that only say which elements are read or written.
    """

    elements: int
    written: int
    moved: int
    flops: int
    addressing: int = 0


def work(kernel: Kernel, geometries: Sequence[Any], schedule: Any, *, flops: int = 0, writes: int = 1) -> Work:
    """Counts the work of one launch: for each element of each region the operations of its instructions.

    Args:
        flops: operations of everything else.
        writes: how often each result is written.
    """
    from jitgen.kernel.geometry import elements_read

    addressing = written = 0
    for body, geometry in zip(kernel.bodies, geometries, strict=True):
        flops += pointwise_flops(body.instructions, geometry.elements)
        addressing += pointwise_flops(addresses(body.instructions), geometry.elements)
        for operand, stored in zip(body.operands, geometry.touched, strict=True):
            written += writes * stored.elements * item_size(operand.dtype) * (operand.kind == "store")
    read = sum(count * item_size(dtype) for (_, dtype), count in elements_read(kernel.bodies, geometries).items())
    return Work(sum(geometry.elements for geometry in geometries), written, read + written, flops, addressing)


def blocks_of(blocks: int, threads: int, device: Device, **others: Any) -> LaunchShape:
    """Makes the launch of a row of blocks, on a CPU of pieces of work; ``others`` are attributes of ``LaunchShape``."""
    return LaunchShape((blocks, 1, 1), (threads, 1, 1), **{"attributes": attributes_of(device), **others})


def attributes_of(device: Device) -> frozenset[str]:
    """Returns the attributes of a launch on ``device``."""
    return frozenset({OVERLAPS} if device.overlaps_launches else ())
