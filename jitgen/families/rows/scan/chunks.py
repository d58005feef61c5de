"""Cuts a few long rows on a GPU into chunks that blocks walk side by side: one kernel becomes two.

The first kernel combines every chunk by itself and stores the states (``ir/scans.py``), ``[rows..., chunks]``. The
second has the kernel's results: a block combines the states of all chunks before its own, in their order, and scans its
chunk from there. Elements are read twice, results written once ("reduce, then scan", as in Merrill and Grimshaw,
"Parallel Scan for Stream Architectures", 2009). A scan in one pass that looks back at what its neighbours have found so
far (Merrill and Garland, "Single-pass Parallel Prefix Scan with Decoupled Look-back", 2016) reads them once, but
combines in an order that depends on time, so that a sum would not have the same bits twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jitgen.device import Device
from jitgen.families.family import KernelRewrite, SizeBuckets
from jitgen.families.rows.scan.context import grouped, kind_of
from jitgen.families.rows.scan.schedule import CPU_SHORT_ROW
from jitgen.ir import symbols
from jitgen.ir.body import Body, Instruction, Operand, behind
from jitgen.ir.graph import Graph, topological
from jitgen.ir.nodes import SCAN
from jitgen.ir.program import Buffer, Kernel
from jitgen.ir.scans import PLACES, carry_dtype
from jitgen.kernel.operands import WARP, Call

CHUNKS = ((2, 512), (16, 64), (64, 16))
"""(blocks, chunks): so many blocks at most, one for each row, are too few to keep a GPU busy, and their rows are cut
into so many chunks. With that an H200, of 132 multiprocessors, has four blocks or more on each."""
LEAST_CHUNK = 2048
"""Elements of a chunk at least: two tiles of a block."""
LEAST_COLUMN_CHUNK = 128
"""The same where a block has neighbouring rows side by side."""


def chunks_of(rows: int, length: int, columns: bool) -> int:
    """Returns into how many chunks so many rows of so many elements are cut; ``columns`` is that of ``Layout``."""
    blocks = -(-rows // WARP) if columns else rows
    least = LEAST_COLUMN_CHUNK if columns else LEAST_CHUNK
    return next((chunks for most, chunks in CHUNKS if blocks <= most and length >= chunks * least), 1)


def buckets(graph: Graph, environment: Mapping[str, Any], device: Device) -> list[SizeBuckets]:
    """Returns the number of rows of each scan of ``graph``, and where the number of chunks of a row changes on a
    GPU."""
    buckets_ = []
    for node in topological(graph.results):
        if node.kind is SCAN:
            scanned = node.attrs.dim
            columns = scanned != len(node.shape) - 1
            length = symbols.evaluate(node.shape[scanned], environment)
            in_chunks = device.is_gpu and chunks_of(1, length, columns) > 1
            ends = tuple(most * (WARP if columns else 1) for most, _ in CHUNKS) if in_chunks else ()
            rows = symbols.product(size for dim, size in enumerate(node.shape) if dim != scanned)
            buckets_.append(SizeBuckets(rows, ends))
            if not device.is_gpu:
                buckets_.append(SizeBuckets(node.shape[scanned], (CPU_SHORT_ROW - 1,), varies=False))
    return buckets_


def in_chunks(kernel: Kernel, call: Call, device: Device) -> KernelRewrite | None:
    """Returns ``kernel`` as two if its rows are too few for a GPU at the sizes of this call."""
    (body,) = kernel.bodies
    if not device.is_gpu:
        return None
    *outer, length = symbols.evaluated(body.shape, call.environment)
    rows = math.prod(outer)
    chunks = chunks_of(rows, length, _are_columns(body))
    if chunks == 1:
        return None
    states = _states(body)
    shape = (*body.shape[:-1], chunks)
    temporaries = tuple(Buffer(dtype, shape, contiguous=True) for group in states for dtype in group)

    def kernels(kernel: Kernel, first: int) -> tuple[Kernel, Kernel]:
        (body,) = kernel.bodies
        totals = replace(kernel, name=f"{kernel.name}_totals", bodies=(_totals(body, states, chunks, first),))
        return totals, replace(kernel, bodies=(_scanned(body, states, chunks, first),))

    return KernelRewrite(temporaries, kernels)


def _are_columns(body: Body) -> bool:
    """Returns whether the scanned dimension was not the innermost one of the first tensor that is read: then in a dense
    tensor neighbouring elements belong to neighbouring rows."""
    for operand in body.operands:
        if operand.kind == "load" and not operand.row:
            permutations = [attrs[1] for attrs, _ in operand.movements if attrs[0] == "permute"]
            return any(order[-1] != len(order) - 1 for order in permutations)
    return False


def _states(body: Body) -> list[list[str]]:
    """Returns the dtypes of the components of each state that is carried along the row."""
    dtypes = []
    for group in grouped(body):
        kind = kind_of(body, group)
        dtype = body.instructions[body.instructions[group[0]].args[0]].dtype
        further = ["int64"] if kind in PLACES else [dtype] if kind == "logsumexp" else []
        dtypes.append([carry_dtype(kind, dtype), *further])
    return dtypes


def _operands(kind: str, body: Body, states: Sequence[Sequence[str]], chunks: int, first: int) -> list[Operand]:
    """Makes operands of the temporaries: a row of one has an element for each chunk."""
    shape = (*body.shape[:-1], chunks)
    dtypes = [dtype for group in states for dtype in group]
    return [Operand(kind, first + index, dtype, shape, row=True) for index, dtype in enumerate(dtypes)]


def _totals(body: Body, states: Sequence[Sequence[str]], chunks: int, first: int) -> Body:
    """Makes a body of the scans of ``body`` alone, and their results at the end of each chunk."""
    needed = behind(body.instructions, [position for position, i in enumerate(body.instructions) if i.op == "scan"])
    read = sorted({body.instructions[p].attr for p in needed if body.instructions[p].op in ("load", "iota")})
    instructions: list[Instruction] = []
    at: dict[int, int] = {}
    for position in sorted(needed):
        instruction = body.instructions[position]
        attr = read.index(instruction.attr) if instruction.op in ("load", "iota") else instruction.attr
        at[position] = len(instructions)
        instructions.append(replace(instruction, args=tuple(at[a] for a in instruction.args), attr=attr))
    stores = _operands("store", body, states, chunks, first)
    index = len(read)
    for group, dtypes in zip(grouped(body), states, strict=True):
        for component, dtype in enumerate(dtypes):
            instructions.append(Instruction("state", (at[group[0]],), dtype, component, None, True, 1))
            instructions.append(Instruction("store", (len(instructions) - 1,), dtype, index, None, True, 1))
            index += 1
    stages = [stage for number, stage in enumerate(body.stages) if any(s.kind == "scan" for s in body.stages[number:])]
    operands = (*(body.operands[index] for index in read), *stores)
    return replace(
        body, stages=tuple(stages), operands=operands, instructions=tuple(instructions), coarse=False, chunks=chunks
    )


def _scanned(body: Body, states: Sequence[Sequence[str]], chunks: int, first: int) -> Body:
    """Makes every scan of ``body`` start from the states of the chunks before."""
    loads = _operands("load", body, states, chunks, first)
    added = [Instruction("load", (), operand.dtype, index, None, True) for index, operand in enumerate(loads)]
    before: dict[int, tuple[int, ...]] = {}
    index = 0
    for group, dtypes in zip(grouped(body), states, strict=True):
        for position in group:
            before[position] = tuple(range(index, index + len(dtypes)))
        index += len(dtypes)
    moved = []
    for position, instruction in enumerate(body.instructions):
        attr = instruction.attr + len(loads) if instruction.op in ("load", "iota", "store") else instruction.attr
        arguments = (*(argument + len(added) for argument in instruction.args), *before.get(position, ()))
        moved.append(replace(instruction, args=arguments, attr=attr))
    return replace(body, operands=(*loads, *body.operands), instructions=(*added, *moved), chunks=chunks)
