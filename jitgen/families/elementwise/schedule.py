"""How a pointwise kernel walks its elements: pure functions from layout and target to numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jitgen.families.layout import CPU_LANES, Geometry, Layout, item_size
from jitgen.ir.body import Body
from jitgen.ir.ops import OPS
from jitgen.ir.program import Kernel
from jitgen.spec import Target

CPU_BLOCK = 1024
"""Elements of a run on the CPU: 4 KiB of float32, so that a few streams of them share a first-level cache."""
CPU_VECTORS = 4
"""Vectors of floats in a group where a body calls functions: more of them take more registers than there are, and code
that no longer fits where decoded instructions are kept."""
CPU_FUNCTION = 8
"""Operations from which on one is such a function."""
GPU_THREADS = 128
GPU_THREAD_BYTES = 32
"""Bytes of its widest operand one thread moves per vector step, in 16-byte accesses."""
GPU_IN_FLIGHT = 16
"""Bytes of loads a thread should have in flight. One access each of as many threads as there can be is best on an H200:
blocks are then handed out in the order of their addresses, a few megabytes of which are under way at a time. Twice as
many bytes a thread cost 3 % of a copy's speed, four times as many 5 %; blocks that stay and walk on, 8 %."""
GPU_REGISTERS = 65536
"""Registers of a multiprocessor."""
GPU_ROOMY = ((32, 0), (96, 8), (192, 4))
"""Blocks of a multiprocessor for loads of so many bytes a thread, so that there are registers for all to start at once;
0 leaves it to the assembler, as is right for few and for so many that they would be spilled. By itself it makes do with
fewer, for more threads, and puts loads behind one another: RoPE, of six operands, takes 136 us so on an H200, and 124
with its loads first."""
GPU_MOST_IN_FLIGHT = 512
"""Bytes of one vector step over all operands: half of a thread's registers."""


_FLOATS = {"x86-64-v4": 16, "x86-64-v3": 8}
"""Floats of a vector, where there are more than four."""


@dataclass(frozen=True)
class Schedule:
    """Attributes:
    threads: per block (GPU), or 1.
    vectors: for each region, elements per access step.
    unrolls: for each region, steps per thread; on the CPU, elements of a group.
    wide: 64-bit indices.
    blocks: that must fit a multiprocessor's registers together; 0 leaves that to the compiler.
    """

    threads: int
    vectors: tuple[int, ...]
    unrolls: tuple[int, ...]
    wide: bool
    blocks: int = 0
    pdl: ClassVar[bool] = True
    """A GPU's sources are made for programmatic dependent launch (see ``gemm/schedule.py``)."""

    @property
    def block_threads(self) -> int:
        return self.threads

    def tile(self, region: int) -> int:
        """Elements one block computes in ``region``."""
        return self.threads * self.vectors[region] * self.unrolls[region]


def schedule(
    kernel: Kernel, layouts: tuple[Layout, ...], geometries: tuple[Geometry, ...], target: Target, backend: str
) -> Schedule:
    """The schedule of ``kernel`` on ``target``: 16-byte accesses where legal, enough loads in flight.

    The same for every ``backend`` of a GPU.
    """
    wide = any(layout.wide for layout in layouts)
    if target.kind == "cpu":
        lanes = tuple(_lanes(body, target) for body in kernel.bodies)
        return Schedule(1, (CPU_BLOCK,) * len(layouts), lanes, True)
    vectors, unrolls, most = [], [], 0
    for body, layout in zip(kernel.bodies, layouts, strict=True):
        sizes = [item_size(operand.dtype) for operand in body.operands if operand.buffer is not None]
        vector = max(1, min(layout.unit, GPU_THREAD_BYTES // max(sizes), 16 // min(sizes)))
        while vector > 1 and vector * sum(sizes) > GPU_MOST_IN_FLIGHT:
            vector //= 2
        loaded = sum(
            vector * item_size(operand.dtype)
            for operand, kind in zip(body.operands, layout.operands, strict=True)
            if operand.kind == "load" and kind in ("contiguous", "strided")
        )
        unroll = 1
        while unroll < 4 and loaded * unroll * 2 <= GPU_IN_FLIGHT:
            unroll *= 2
        vectors.append(vector)
        unrolls.append(unroll)
        most = max(most, loaded * unroll)
    blocks = next((count for size, count in GPU_ROOMY if most <= size), 0) if target.kind == "cuda" else 0
    return Schedule(GPU_THREADS, tuple(vectors), tuple(unrolls), wide, blocks)


def _lanes(body: Body, target: Target) -> int:
    """Elements of a group on the CPU."""
    calls = any(OPS[i.op].flops >= CPU_FUNCTION for i in body.instructions if i.op in OPS)
    return CPU_VECTORS * _FLOATS.get(target.arch, 4) if calls else CPU_LANES
