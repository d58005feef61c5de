"""Integer parameters and launches that the kernels of attention and of its gradients share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jitgen.device import Device
from jitgen.ir.body import Body
from jitgen.kernel.launch import Integer, LaunchShape, attributes_of
from jitgen.kernel.operands import WARP


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


def programs(tasks: int, pieces: int, schedule: Any, device: Device) -> LaunchShape:
    """A program in Triton for each of ``pieces`` of each task; on a CPU a piece of work for each task."""
    if not device.is_gpu:
        return LaunchShape(grid=(max(tasks, 1), 1, 1))
    grid, block = (max(tasks * pieces, 1), 1, 1), (schedule.warps * WARP, 1, 1)
    return LaunchShape(grid=grid, block=block, attributes=attributes_of(device))
