"""A kernel family outside jitgen: cumulative sums along the rows of a matrix, on the CPU, in 150 lines.

``registry.register(FAMILY)`` is all that it takes. What is not its own (other dtypes, other devices, anything before or
after the sum) it leaves to jitgen's families.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jitgen.device import Device
from jitgen.families.family import Claim, Family, Partition
from jitgen.ir import symbols
from jitgen.ir.graph import Node
from jitgen.ir.program import Kernel
from jitgen.ir.regions import Region, Store, row_axes
from jitgen.kernel.launch import LaunchShape, Work
from jitgen.kernel.operands import Call, base_of, locate
from jitgen.kernel.parameters import Integer, KernelParameters, RegionParameters, declared

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Layout:
    """Nothing of the strides decides the source: all of them are passed."""


@dataclass(frozen=True)
class Geometry:
    """Sizes of the matrix; strides (from row to row, along a row) and offset of both operands, in elements."""

    rows: int
    length: int
    strides: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class Schedule:
    """There is one way to do it."""


def claim(values: Sequence[Node], partition: Partition) -> Claim:
    mine = [
        partition.device.dialect == "cpp"
        and (node.op, node.dtype, len(node.shape)) == ("scan", "float32", 2)
        and node.attrs == ("sum", 1, False)
        for node in values
    ]
    regions = []
    for position, node in enumerate(values):
        if mine[position]:
            # What is summed may be computed from anything: where it is no tensor, it becomes one.
            (source,) = node.inputs
            read = source if source.op == "input" else partition.materialize(source)
            value = partition.mover.builder.like(node, [read])
            regions.append(Region("row_sums", row_axes(node.shape, 1), (Store(position, value),)))
    return Claim(regions, [None if own else node for own, node in zip(mine, values, strict=True)])


def layout(kernel: Kernel, call: Call) -> tuple[tuple[Layout, ...], tuple[Geometry, ...]]:
    (body,) = kernel.bodies
    rows, length = (symbols.evaluate(size, call.environment) for size in body.shape)
    views = [locate(o.movements, base_of(o, call.environment, call.buffers), call.environment) for o in body.operands]
    strides, offsets = tuple(view.strides for view in views), tuple(view.offset for view in views)
    return (Layout(),), (Geometry(rows, length, strides, offsets),)


def candidates(problem: Any, device: Device) -> tuple[Schedule, ...]:
    return (Schedule(),)


def render(
    templates: Path, kernel: Kernel, layouts: Sequence[Layout], schedule: Schedule, device: Device, compiler: str
) -> Any:
    from jitgen.kernel.render import source

    title = "a family of the tests"
    return source("row_sums", kernel, schedule, device, compiler, [title], ({}, {}), False, templates)


def launch(
    kernel: Kernel, layouts: Sequence[Layout], geometries: Sequence[Geometry], schedule: Schedule, device: Device
) -> LaunchShape:
    return LaunchShape(grid=(geometries[0].rows, 1, 1))


def parameters(kernel: Kernel, layouts: Sequence[Layout], device: Device) -> KernelParameters:
    (body,) = kernel.bodies
    sizes = Integer("rows", "rows"), Integer("length", "length")
    operands = tuple(declared(operand, index, ["", ""]) for index, operand in enumerate(body.operands))
    return KernelParameters((RegionParameters(sizes, operands),), wide=True)


def work(kernel: Kernel, geometries: Sequence[Geometry], schedule: Schedule) -> Work:
    elements = geometries[0].rows * geometries[0].length
    return Work(elements, 4 * elements, 8 * elements, elements)


def explain(kernel: Kernel, layouts: Sequence[Layout], schedule: Schedule, device: Device) -> list[str]:
    return ["cumulative sums of rows, by a family of the tests"]


def family(templates: Path = HERE / "templates") -> Family:
    return Family(
        name="row_sums",
        claim=claim,
        layout=layout,
        candidates=candidates,
        render=functools.partial(render, templates),
        launch=launch,
        parameters=parameters,
        work=work,
        explain=explain,
        templates=templates,
        code=HERE,
    )


FAMILY = family()
