"""Chooses how a pointwise kernel iterates over its elements: pure functions from layout and target to numbers, and to
words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from jitgen.device import Device
from jitgen.families.elementwise.layout import Layout
from jitgen.families.family import Problem
from jitgen.families.short_rows import LANE_ELEMENTS
from jitgen.ir.body import Body
from jitgen.ir.ops import flops_of
from jitgen.ir.program import Kernel
from jitgen.kernel.explain import count_operations
from jitgen.kernel.geometry import PointGeometry
from jitgen.kernel.launch import LaunchShape, blocks_of
from jitgen.kernel.operands import CPU_LANES, item_size
from jitgen.schedule.declared import DeclaredSchedule, about

CPU_BLOCK = 1024
"""The elements of a run on the CPU: 4 KiB of float32, so that a first-level cache holds the runs of a few operands."""
CPU_VECTORS = 4
"""Vectors of floats in a group on the CPU where a body calls functions. More of them would need more registers than
there are, and code that does not fit the cache of decoded instructions."""
CPU_FUNCTION_FLOPS = 8
"""Weight of an operation (``flops`` in ``ir/ops.py``) from which on it counts as such a function."""
GPU_THREADS = 128
"""The threads of a block."""
GPU_THREAD_BYTES = 32
"""The bytes of the widest operand that one thread moves in a step, in 16-byte accesses."""
GPU_IN_FLIGHT = 16
"""Bytes of loads and gathers that a thread should have in flight. On an H200 one access by each of as many threads as
possible is fastest: blocks start in the order of their addresses, so that all accesses in flight lie within a few
megabytes. Twice as many bytes per thread make a copy 3 % slower, four times as many 5 %, and persistent blocks 8 %."""
GPU_REGISTERS = 65536
"""32-bit registers of a multiprocessor (NVIDIA, all architectures in use)."""
GPU_BLOCKS_BY_LOADED_BYTES = ((32, 0), (96, 8), (192, 4))
"""(bytes, blocks): where a thread loads at most ``bytes``, a multiprocessor should hold ``blocks``; 0 leaves it to the
assembler. Left alone, the assembler prefers more blocks, which leaves too few registers to start all loads at once:
RoPE, with six operands, takes 136 us so on an H200, and 124 us with these entries. Few bytes need no limit, and with
more bytes than the last entry has registers would be spilled."""
GPU_MOST_BYTES_PER_STEP = 512
"""Bytes that one step of a thread moves at most, over all operands: half of the registers a thread can have."""


@dataclass(frozen=True)
class Schedule(DeclaredSchedule):
    """Says how a kernel's threads share its elements.

    Attributes:
        threads: threads of a block (GPU); 1 on the CPU.
        vectors: for each region, elements of one access step; on the CPU, elements of a run.
        unrolls: for each region, steps of a thread; on the CPU, elements of a group.
        wide: whether indices are 64-bit.
        blocks: blocks that the registers of a multiprocessor must suffice for; 0 leaves that to the compiler.
    """

    sentence: ClassVar[tuple[str, ...]] = (
        "{threads} threads a block",
        "{steps} a thread of {vector} elements",
        "blocks",
        "wide",
    )
    threads: int
    vectors: tuple[int, ...]
    unrolls: tuple[int, ...]
    wide: bool = field(metadata=about("64-bit indices"))
    blocks: int = field(default=0, metadata=about("{} blocks a multiprocessor", least=1))

    @property
    def vector(self) -> str:
        return _by_region(self.vectors)

    @property
    def unroll(self) -> str:
        return _by_region(self.unrolls)

    @property
    def steps(self) -> str:
        return "1 step" if self.unroll == "1" else f"{self.unroll} steps"

    def tile(self, region: int) -> int:
        """Returns the elements that one block computes in ``region``."""
        return self.threads * self.vectors[region] * self.unrolls[region]


@dataclass(frozen=True)
class CpuSchedule(Schedule):
    """Says how CPU threads share a kernel's elements: each computes a run at a time."""

    sentence = ("runs of {vector} elements, groups of {unroll} elements",)


def _by_region(numbers: tuple[int, ...]) -> str:
    """Writes one number if all regions have the same, else that of each region."""
    return str(numbers[0]) if len(set(numbers)) == 1 else f"({', '.join(map(str, numbers))})"


def candidates(problem: Problem, device: Device) -> tuple[Schedule, ...]:
    """Returns one schedule: 16-byte accesses where they are aligned, and enough loads in flight. Both GPU dialects
    share it."""
    kernel, layouts, target = problem.kernel, problem.layouts, device.target
    wide = any(layout.wide for layout in layouts)
    if not device.is_gpu:
        lanes = tuple(_lanes(body, device) for body in kernel.bodies)
        return (CpuSchedule(1, (CPU_BLOCK,) * len(layouts), lanes, True),)
    vectors, unrolls, most = [], [], 0
    for body, layout in zip(kernel.bodies, layouts, strict=True):
        if layout.lanes:
            vectors.append(LANE_ELEMENTS)
            unrolls.append(1)
            continue
        sizes = [item_size(operand.dtype) for operand in body.operands if operand.buffer is not None]
        read = list(_read_bytes(body, layout))
        moved = read + [item_size(operand.dtype) for operand in body.operands if operand.kind == "store"]
        # Indices that are the same for a row are not moved with it.
        widest = max(moved if any(i.op == "gather" for i in body.instructions) else sizes)
        vector = max(1, min(layout.unit, GPU_THREAD_BYTES // widest, 16 // min(sizes)))
        while vector > 1 and vector * max(sum(sizes), sum(moved)) > GPU_MOST_BYTES_PER_STEP:
            vector //= 2
        loaded = vector * sum(read)
        unroll = 1
        while unroll < 4 and loaded * unroll * 2 <= GPU_IN_FLIGHT:
            unroll *= 2
        vectors.append(vector)
        unrolls.append(unroll)
        most = max(most, loaded * unroll)
    blocks = (
        next((count for size, count in GPU_BLOCKS_BY_LOADED_BYTES if most <= size), 0) if target.kind == "cuda" else 0
    )
    return (Schedule(GPU_THREADS, tuple(vectors), tuple(unrolls), wide, blocks),)


def _read_bytes(body: Body, layout: Layout) -> Iterator[int]:
    """Yields the bytes of each element that one result is computed of: of loads along a row, and of what indices
    choose, once for each choice."""
    for instruction in body.instructions:
        is_load = instruction.op == "load" and layout.operands[instruction.attr] in ("contiguous", "strided")
        if is_load or instruction.op == "gather":
            yield item_size(body.operands[instruction.attr].dtype)


def _lanes(body: Body, device: Device) -> int:
    """Returns the elements of a group on the CPU."""
    calls = any(flops_of(i.op) >= CPU_FUNCTION_FLOPS for i in body.instructions)
    return CPU_VECTORS * device.level.floats if calls else CPU_LANES


@dataclass(frozen=True)
class Launch:
    """Holds what one launch takes of a schedule.

    Attributes:
        threads: of a block.
        ends: for each region, the number of the block after its last one.
    """

    threads: int
    ends: tuple[int, ...]


def settle(kernel: Kernel, geometries: Sequence[PointGeometry], schedule: Schedule, device: Device) -> Launch:
    """Counts the blocks of each region, one region after the other."""
    ends, blocks = [], 0
    for region, geometry in enumerate(geometries):
        rows = geometry.elements // geometry.sizes[-1] if geometry.elements else 0
        steps = rows * -(-geometry.sizes[-1] // schedule.vectors[region])
        blocks += -(-steps // (schedule.threads * schedule.unrolls[region]))
        ends.append(blocks)
    return Launch(schedule.threads, tuple(ends))


def launch(
    kernel: Kernel, layouts: Sequence[Layout], geometries: Sequence[PointGeometry], settled: Launch, device: Device
) -> LaunchShape:
    """Returns a launch of blocks for the tiles of each region."""
    return blocks_of(settled.ends[-1], settled.threads, device)


def explain(kernel: Kernel, layouts: Sequence[Layout], schedule: Schedule, device: Device) -> list[str]:
    """Explains the kernel: a title, and a line for each region."""
    count = len(kernel.bodies)
    lines = [f"pointwise, {count} region{'s' * (count != 1)} in one pass"]
    for region, (body, layout) in enumerate(zip(kernel.bodies, layouts, strict=True)):
        width = f"{schedule.vectors[region]} wide" if device.is_gpu else "vectorised by the compiler"
        chosen = any(body.operands[index].gathered for index in body.stores)
        lines.append(
            f"region {region}: {count_operations(body)} operations over {layout.rank} collapsed dimension"
            f"{'s' * (layout.rank > 1)}, {width}; operands {', '.join(layout.operands)}"
            f"{f'; {layout.lanes} lanes of a warp reduce a row' if layout.lanes else ''}"
            f"{'; stored in place, where indices choose' if chosen else ''}"
        )
    return lines
