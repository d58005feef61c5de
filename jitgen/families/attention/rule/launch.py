"""Arguments and launches of the kernels of attention and of its gradients, from a call's sizes and strides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from jitgen.device import Device
from jitgen.ir.body import Body
from jitgen.kernel.launch import OVERLAPS, Arguments, LaunchShape
from jitgen.kernel.operands import WARP, MappedTensor, item_size

Integer = tuple[str, str, int, int]
"""An integer parameter: its name, the attribute of the geometry that has it, and there the operand and the dimension,
-1 for none."""


class _Geometry(Protocol):
    @property
    def offsets(self) -> tuple[int, ...]: ...


def integers_of_operands(body: Body, dims: int) -> Iterator[Integer]:
    """The integer parameters of operands: ``o<operand>``, the first value of an index; ``s<operand>_<dim>``, a stride
    along one of ``dims`` dimensions; ``n<operand>_<dim>`` and ``c<operand>_<dim>``, size and stride of a dimension that
    an index chooses along."""
    for index, operand in enumerate(body.operands):
        if operand.buffer is None:
            yield f"o{index}", "offsets", index, -1
        for dim in range(dims):
            yield f"s{index}_{dim}", "strides", index, dim
        for dim in range(operand.gathered):
            yield f"n{index}_{dim}", "gathered_sizes", index, dim
            yield f"c{index}_{dim}", "gathered_strides", index, dim


def arguments_of(
    body: Body, geometry: _Geometry, integers: Iterable[Integer], wide: bool, maps: Iterable[MappedTensor]
) -> Arguments:
    """The arguments of one launch: a pointer for each operand in memory, and ``integers``."""
    pointers = tuple(
        (operand.buffer, offset * item_size(operand.dtype))
        for operand, offset in zip(body.operands, geometry.offsets, strict=True)
        if operand.buffer is not None
    )

    def value(attribute: str, operand: int, dim: int) -> int:
        number = getattr(geometry, attribute)
        number = number[operand] if operand >= 0 else number
        return int(number[dim] if dim >= 0 else number)

    numbers = tuple(value(attribute, operand, dim) for _, attribute, operand, dim in integers)
    return Arguments(pointers, numbers, wide, tuple(maps))


def traffic(body: Body, strides: Sequence[Sequence[int]], extents: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Bytes that a launch moves and that it writes; an operand is read once along dimensions of stride 0.

    Args:
        extents: for each operand, its sizes along ``strides``.
    """
    moved = written = 0
    for operand, sizes, steps in zip(body.operands, extents, strides, strict=True):
        if operand.buffer is None:
            continue
        touched, is_store = item_size(operand.dtype), operand.kind == "store"
        for size, stride in zip(sizes, steps, strict=True):
            touched *= size if stride or is_store or operand.gathered else 1
        moved += touched
        written += touched if is_store else 0
    return moved, written


def attributes_of(device: Device) -> frozenset[str]:
    """The attributes of a launch on ``device``."""
    return frozenset({OVERLAPS} if device.overlaps_launches else ())


def programs(tasks: int, pieces: int, schedule: Any, device: Device) -> LaunchShape:
    """A program in Triton for each of ``pieces`` of each task; on a CPU a piece of work for each task."""
    if not device.is_gpu:
        return LaunchShape(grid=(max(tasks, 1), 1, 1))
    grid, block = (max(tasks * pieces, 1), 1, 1), (schedule.warps * WARP, 1, 1)
    return LaunchShape(grid=grid, block=block, attributes=attributes_of(device))
