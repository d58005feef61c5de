"""Chooses among the configurations that a user gave a kernel: the one that was measured to be the best, else the
first."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from jitgen.device import Device
from jitgen.errors import UnsupportedError
from jitgen.families.family import Problem
from jitgen.families.launch.layout import LaunchGeometry, Layout, attrs_of, launched, parameter_of
from jitgen.ir.launches import Config
from jitgen.ir.program import Kernel
from jitgen.kernel.explain import operations_in
from jitgen.kernel.launch import LaunchShape
from jitgen.kernel.operands import WARP
from jitgen.schedule.declared import DeclaredSchedule
from jitgen.spec import digest

USUAL = {"num_warps": 4, "num_stages": 3, "num_ctas": 1}
"""The options of a launch that states none, as Triton has them."""
GRID_LIMITS = (2**31 - 1, 2**16 - 1, 2**16 - 1)
"""The most blocks in each dimension of a grid (CUDA C++ Programming Guide, "Technical Specifications")."""
BLOCK_LIMITS = (1024, 1024, 64)
"""The most threads in each dimension of a block, and the first the most of all (ibid.)."""


@dataclass(frozen=True)
class Schedule(DeclaredSchedule):
    """Holds a configuration, as rows of measured choices tell it from others.

    Attributes:
        chosen: JSON of the constants that it chooses, pairs of name and text.
        compiled: JSON of the compiler's options, pairs of name and number.
    """

    sentence = ("{words}",)
    template: ClassVar[str] = "launch"
    chosen: str
    compiled: str

    @property
    def constants(self) -> tuple[tuple[str, str], ...]:
        return tuple((name, text) for name, text in json.loads(self.chosen))

    @property
    def options(self) -> tuple[tuple[str, int], ...]:
        return tuple((name, number) for name, number in json.loads(self.compiled))

    @property
    def words(self) -> str:
        chosen = ", ".join(f"{name} {value}" for name, value in (*self.constants, *self.options))
        return f"as launched, with {chosen}" if chosen else "as launched"

    def option(self, name: str) -> int:
        return dict(self.options).get(name, USUAL[name])


def candidates(problem: Problem, device: Device) -> tuple[Schedule, ...]:
    """Returns a schedule for each configuration."""
    (body,) = problem.kernel.bodies
    listed = (Config(*config) for config in attrs_of(body).configs)
    return tuple(dict.fromkeys(Schedule(json.dumps(config.constants), json.dumps(config.options)) for config in listed))


def facts(problem: Problem, device: Device) -> Mapping[str, Any] | None:
    """Returns what measured configurations depend on: the kernel and its numbers. None where there is one alone."""
    (body,), (geometry,) = problem.kernel.bodies, problem.geometries
    attrs = attrs_of(body)
    if len(attrs.configs) == 1:
        return None
    dtypes = " ".join(operand.dtype for operand in body.operands)
    numbers = " ".join(map(str, geometry.numbers))
    return {"kernel": digest(list(attrs.kernel)), "dtypes": dtypes, "numbers": numbers}


def launch(
    kernel: Kernel, layouts: Sequence[Layout], geometries: Sequence[LaunchGeometry], schedule: Schedule, device: Device
) -> LaunchShape:
    """Launches the grid of the configuration.

    Raises:
        UnsupportedError: a size of the grid is 0 although there is something to write, or too large.
    """
    (geometry,), (body,) = geometries, kernel.bodies
    attrs = attrs_of(body)
    chosen = [config[:2] for config in attrs.configs].index((schedule.constants, schedule.options))
    grid, of_block = geometry.grids[chosen][:3], geometry.grids[chosen][3:]
    blocks = schedule.option("num_ctas")
    location = body.instructions[0].location
    where = f" at {location}" if location else ""
    if not all(0 < size <= most for size, most in zip(grid, GRID_LIMITS, strict=True)):
        raise UnsupportedError(
            f"the grid of {attrs.kernel.entry} is {grid}{where}; each size has to be at least 1, and at most "
            f"{GRID_LIMITS}"
        )
    if of_block:
        return _of_blocks(attrs.kernel.entry, where, grid, of_block, device)
    x, *others = grid
    threads = (schedule.option("num_warps") * WARP, 1, 1)
    return LaunchShape((x * blocks, *others), threads, cluster=blocks, any_cluster=blocks > 1)  # type: ignore[arg-type]


def _of_blocks(entry: str, where: str, grid: tuple[int, ...], of_block: tuple[int, ...], device: Device) -> LaunchShape:
    """Returns the launch of a kernel in CUDA C++."""
    *block, shared_bytes = of_block
    is_block = all(0 < size <= most for size, most in zip(block, BLOCK_LIMITS, strict=True))
    if not is_block or math.prod(block) > BLOCK_LIMITS[0]:
        raise UnsupportedError(
            f"the block of {entry} is {tuple(block)}{where}; each size has to be at least 1, and at most "
            f"{BLOCK_LIMITS}, and all together at most {BLOCK_LIMITS[0]} threads"
        )
    if not 0 <= shared_bytes <= device.target.shared_bytes:
        raise UnsupportedError(
            f"{entry} is launched with {shared_bytes} bytes of shared memory{where}; a block of {device.target} has at "
            f"most {device.target.shared_bytes}"
        )
    return LaunchShape(grid, tuple(block), shared_bytes=shared_bytes)  # type: ignore[arg-type]


def explain(kernel: Kernel, layouts: Sequence[Layout], schedule: Schedule, device: Device) -> list[str]:
    """Explains the kernel: a title, what it reads and writes, and among how many configurations it was chosen."""
    (body,) = kernel.bodies
    own = launched(body)
    attrs, location = own.attrs, body.instructions[0].location
    written = ", ".join(parameter_of(attrs, number) for number in attrs.written)
    read = ", ".join(parameter_of(attrs, n) for n in range(len(own.dtypes)) if n not in attrs.written)
    lines = [f"the kernel {attrs.kernel.entry}, written by you" + (f", launched at {location}" if location else "")]
    lines.append(f"writes {written}" + (f", reads {read}" if read else ""))
    for rules, where, verb in ((own.loads, "before", "loads"), (own.stores, "behind", "stores")):
        for rule in rules:
            count = len(operations_in(rule.instructions))
            lines.append(f"{count} operations {where} {parameter_of(attrs, rule.number)}, where the kernel {verb} it")
    if len(attrs.configs) > 1:
        lines.append(f"one of {len(attrs.configs)} configurations; jitgen tune measures them")
    return lines
