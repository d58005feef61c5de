"""Lays out a launch: what the source knows of addresses and integers, and the numbers of a call.

A source is told, as Triton's own launcher tells it, which integers are 1 and which are multiples of 16, and which
addresses are multiples of 16 bytes. The integer parameters ``n0`` ... are the sizes and strides that the kernel gets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jitgen.codegen.triton import MULTIPLE
from jitgen.device import Device
from jitgen.families.launch.body import at_the_call
from jitgen.ir import symbols
from jitgen.ir.attributes import LaunchAttrs
from jitgen.ir.body import Body
from jitgen.ir.launches import INT, UNSPECIALIZED
from jitgen.ir.program import Kernel
from jitgen.ir.symbols import Expr
from jitgen.kernel import launch
from jitgen.kernel.geometry import Geometry
from jitgen.kernel.launch import Work
from jitgen.kernel.layout import views_of
from jitgen.kernel.operands import Call, item_size
from jitgen.kernel.parameters import Integer, KernelParameters, RegionParameters, declared

NARROW = 2**31
"""From here on an integer needs 64 bits."""


@dataclass(frozen=True)
class Layout:
    """Says what decides the source of a launch.

    Attributes:
        alignments: what the address of each operand is a multiple of, in bytes: 16, or 1.
        known: for each size or stride that is passed, 1 where it is 1, 16 where it is a multiple of that, else 0.
        wide: whether one of them needs 64 bits.
    """

    alignments: tuple[int, ...]
    known: tuple[int, ...]
    wide: bool


@dataclass(frozen=True, kw_only=True)
class LaunchGeometry(Geometry):
    """Holds the numbers of a launch.

    Attributes:
        numbers: the sizes and strides that are passed.
        grids: of each configuration.
        elements: of all that is written.
    """

    numbers: tuple[int, ...]
    grids: tuple[tuple[int, int, int], ...]
    elements: int


def attrs_of(body: Body) -> LaunchAttrs:
    """Returns the attributes of the launch that ``body`` is."""
    attrs: LaunchAttrs = body.instructions[0].attr
    return attrs


def passed_integers(attrs: LaunchAttrs) -> Iterator[tuple[str, Expr, bool]]:
    """Yields name, value and whether the source may know it, of each parameter that is an expression of sizes."""
    for name, how, value in attrs.parameters:
        if how in (INT, UNSPECIALIZED) and isinstance(value, Expr) and at_the_call(how, value) is None:
            yield name, value, how == INT


def layout(kernel: Kernel, call: Call) -> tuple[tuple[Layout, ...], tuple[LaunchGeometry, ...]]:
    """Computes layout and geometry of the kernel's one body."""
    (body,), environment = kernel.bodies, call.environment
    attrs, views = attrs_of(body), views_of(body, call)
    numbers = [int(symbols.evaluate(value, environment)) for _, value, _ in passed_integers(attrs)]
    specialized = [is_known for _, _, is_known in passed_integers(attrs)]
    known = tuple(_known(number) if use else 0 for number, use in zip(numbers, specialized, strict=True))
    alignments = []
    for operand, view in zip(body.operands, views, strict=True):
        assert operand.buffer is not None
        first = view.offset * item_size(operand.dtype)
        is_aligned = call.buffers[operand.buffer].alignment % MULTIPLE == 0 and first % MULTIPLE == 0
        alignments.append(MULTIPLE if is_aligned else 1)
    sizes = [math.prod(view.sizes) for view in views]
    geometry = LaunchGeometry(
        strides=((),) * len(views),
        offsets=tuple(view.offset for view in views),
        touched=tuple(sizes),
        numbers=tuple(numbers),
        grids=tuple(_evaluated(grid, environment) for _, _, grid in attrs.configs),
        elements=sum(sizes[number] for number in body.stores),
    )
    wide = any(not -NARROW <= number < NARROW for number in numbers)
    return (Layout(tuple(alignments), known, wide),), (geometry,)


def _known(number: int) -> int:
    return 1 if number == 1 else MULTIPLE if number % MULTIPLE == 0 else 0


def _evaluated(grid: Sequence[Any], environment: Any) -> tuple[int, int, int]:
    x, y, z = (int(symbols.evaluate(size, environment)) for size in grid)
    return x, y, z


def parameters(kernel: Kernel, layouts: Sequence[Layout], device: Device) -> KernelParameters:
    """Declares the parameters: the operands, and the integers that are not 1."""
    (layout_,), (body,) = layouts, kernel.bodies
    operands = tuple(declared(operand, number, ()) for number, operand in enumerate(body.operands))
    integers = (Integer(f"n{i}", "numbers", dim=i) for i, known in enumerate(layout_.known) if known != 1)
    return KernelParameters((RegionParameters(tuple(integers), operands),), layout_.wide)


def work(kernel: Kernel, geometries: Sequence[LaunchGeometry], schedule: Any) -> Work:
    """Counts the bytes of all operands; what a user's kernel computes nobody knows."""
    return launch.work(kernel, geometries, schedule)
