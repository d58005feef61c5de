"""Tabulates the launches of an operator at every size it is for, as tables of integers.

A traced program is lowered at each value of the size that may vary, the *key*. What it launches there is a ``Variant``,
and the integers that the launches take are one flat list; ``operators.hpp`` says in which order. Neighbouring keys of
one variant are one ``Segment`` where each integer is ``base + slope * key``: that is checked at every key, not assumed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from jitgen import pipeline
from jitgen.call.operator import Program
from jitgen.call.signature import environment_of
from jitgen.errors import UnsupportedError
from jitgen.ir import symbols
from jitgen.ir.program import Kernel
from jitgen.ir.symbols import Expr
from jitgen.ir.views import Memory, Strided, contiguous_strides
from jitgen.kernel.launch import LaunchShape
from jitgen.lowering import Lowered, Partitioned, Route
from jitgen.runtime import cpu
from jitgen.runtime.tensor_map import TensorMap

MAX_INTEGERS = 1 << 20
"""Integers of one operator's table, 16 MiB of C++ data; an operator that needs more is refused."""


@dataclass(frozen=True)
class KernelRef:
    """Identifies a compiled kernel.

    Attributes:
        symbol: its name in the package.
        entry: of a GPU kernel, the entry that is launched.
        shared: the shared memory in bytes that a kernel of Triton's takes; None where its launch says.
        any_cluster, overlaps: of a GPU kernel, attributes of its launches.
    """

    symbol: str
    entry: str = ""
    shared: int | None = None
    any_cluster: bool = False
    overlaps: bool = False

    def shared_bytes(self, shape: LaunchShape) -> int:
        return shape.shared_bytes if self.shared is None else self.shared


@dataclass(frozen=True)
class Step:
    """Describes one launch; ``regions`` says what an error calls each region that checks indices, ``operators.hpp``
    what the others are."""

    kernel: KernelRef
    arguments: str
    buffers: tuple[int, ...]
    regions: tuple[str, ...] = ()
    offsets: tuple[int, ...] = ()
    bytes: int = 0


@dataclass(frozen=True)
class Buffer:
    """Describes a tensor: how many dimensions, and torch's name of its dtype."""

    rank: int
    dtype: str


@dataclass(frozen=True)
class Variant:
    """Describes what a call allocates, launches and returns."""

    allocations: tuple[Buffer, ...]
    steps: tuple[Step, ...]
    results: tuple[int, ...]


@dataclass(frozen=True)
class Segment:
    """Describes keys from ``first`` on."""

    first: int
    variant: Variant
    base: tuple[int, ...]
    slope: tuple[int, ...]

    def at(self, key: int) -> tuple[int, ...]:
        return tuple(base + slope * key for base, slope in zip(self.base, self.slope, strict=True))


@dataclass(frozen=True)
class Table:
    """Describes one operator.

    Attributes:
        name: for messages.
        inputs: its tensors.
        key: (tensor, dimension) whose size is the key; None where no size varies.
        segments: in the order of their keys.
        last: the greatest key.
    """

    name: str
    inputs: tuple[Buffer, ...]
    key: tuple[int, int] | None
    segments: tuple[Segment, ...]
    last: int


@dataclass(frozen=True)
class Use:
    """Describes one call of an operator in an exported program.

    Attributes:
        program: what it computes.
        tensors: its tensors without memory, at a value of the size that varies.
        numbers: its numeric arguments.
    """

    program: Program
    tensors: Callable[[int], list[torch.Tensor]]
    numbers: tuple[int | float, ...]


Kernels = Callable[[Lowered, int], KernelRef]
"""Compiles kernel ``number`` of a program, if it is new, and names it."""


def table_of(use: Use, sizes: range, route: Route, kernels: Kernels) -> Table:
    """Makes the table of ``use`` at each of ``sizes``.

    Raises:
        UnsupportedError: a package cannot hold what it does, or a size is none that its trace is for.
    """
    program = use.program
    graph = program.launched
    key = _key(use, sizes)
    known: list[Partitioned] = []
    rows: list[Row] = []
    for size in sizes if key is not None else sizes[:1]:
        tensors = use.tensors(size)
        environment = environment_of(tensors, use.numbers)
        program.check(environment)
        memory = [Memory(Strided(tuple(tensor.shape), tuple(tensor.stride())), 16) for tensor in tensors]
        lowered = pipeline.lower(graph, environment, memory, route, _results(program, environment), known)
        if lowered.partitioned not in known:
            known.append(lowered.partitioned)
        variant, integers = _described(lowered, environment, kernels)
        rows.append((tensors[key[0]].shape[key[1]] if key is not None else 0, variant, integers))
    segments = tuple(segments_of(rows))
    if sum(2 * len(segment.base) for segment in segments) > MAX_INTEGERS:
        raise UnsupportedError(
            f"{program.graph.name}: the table of its launches at {len(sizes)} sizes is too large; export for fewer"
        )
    inputs = tuple(Buffer(len(spec.shape), spec.dtype) for spec in program.graph.inputs)
    return Table(program.graph.name, inputs, key, segments, rows[-1][0])


Row = tuple[int, Variant, tuple[int, ...]]
"""A key, and what is launched there."""


def segments_of(rows: Sequence[Row]) -> Iterator[Segment]:
    """Yields the fewest segments that have every row; ``rows`` are in the order of their keys."""
    start = 0
    while start < len(rows):
        key, variant, integers = rows[start]
        slope = (0,) * len(integers)
        if start + 1 < len(rows) and rows[start + 1][1] == variant:
            after, _, others = rows[start + 1]
            slope = tuple((other - value) // (after - key) for value, other in zip(integers, others, strict=True))
        segment = Segment(key, variant, tuple(i - s * key for i, s in zip(integers, slope, strict=True)), slope)
        end = start + 1
        while end < len(rows) and rows[end][1] == variant and rows[end][2] == segment.at(rows[end][0]):
            end += 1
        yield segment
        start = end


def _key(use: Use, sizes: range) -> tuple[int, int] | None:
    """Returns the dimension that tells ``sizes`` apart; None if all are alike to ``use``."""
    low, high = use.tensors(sizes[0]), use.tensors(sizes[-1])
    varying = [
        (index, dim)
        for index, (first, other) in enumerate(zip(low, high, strict=True))
        for dim in range(first.ndim)
        if first.shape[dim] != other.shape[dim]
    ]
    for index, dim in varying:
        values = [use.tensors(size)[index].shape[dim] for size in sizes]
        if all(a < b for a, b in pairwise(values)):
            return index, dim
    if varying:
        raise UnsupportedError(
            f"{use.program.graph.name}: none of its sizes grows with the one that the export left open"
        )
    return None


def _results(program: Program, environment: Mapping[str, Any]) -> list[Memory]:
    """Returns the memory of the results, which are contiguous."""
    shapes = [symbols.evaluated(node.shape, environment) for node in program.graph.outputs]
    return [Memory(Strided(shape, contiguous_strides(shape))) for shape in shapes]


def _described(lowered: Lowered, environment: Mapping[str, Any], kernels: Kernels) -> tuple[Variant, tuple[int, ...]]:
    """Returns what a call of ``lowered`` does, and the integers it takes."""
    program, inputs = lowered.program, len(lowered.program.inputs)
    first_result = inputs + len(program.temporaries)
    if program.mutated or not all(isinstance(output, int) for output in program.outputs):
        raise UnsupportedError(f"{program.name}: an operator of a package returns new tensors, and updates none")
    integers: list[int] = []
    for memory in lowered.memories:
        integers += [*memory.view.sizes, *memory.view.strides]
    allocations = [
        Buffer(len(memory.view.sizes), buffer.dtype)
        for buffer, memory in zip(program.buffers[inputs:], lowered.memories[inputs:], strict=True)
    ]
    steps = []
    for number in range(len(program.kernels)):
        if lowered.work(number).elements:
            step = _gpu_step if lowered.route.device.is_gpu else _cpu_step
            made, taken = step(lowered, number, kernels(lowered, number), environment)
            steps.append(made)
            integers += taken
    results = tuple(first_result + output for output in program.outputs if isinstance(output, int))
    return Variant(tuple(allocations), tuple(steps), results), tuple(integers)


def _cpu_step(
    lowered: Lowered, number: int, kernel: KernelRef, environment: Mapping[str, Any]
) -> tuple[Step, list[int]]:
    arguments, work = lowered.arguments(number), lowered.work(number)
    scalars = _scalars(lowered.program.kernels[number], environment)
    letters = "P" * len(arguments.pointers) + "v" * len(scalars) + "t" + "v" * len(arguments.integers) + "v"
    integers = [offset for _, offset in arguments.pointers]
    integers += [*scalars, int(cpu.worth_threads(work.moved, work.flops)), *arguments.integers]
    integers.append(int(work.moved > cpu.last_level_cache()))
    regions = tuple("; ".join(filter(None, lines)) for lines in lowered.program.kernels[number].checked)
    return Step(kernel, letters, tuple(buffer for buffer, _ in arguments.pointers), regions), integers


def _gpu_step(
    lowered: Lowered, number: int, kernel: KernelRef, environment: Mapping[str, Any]
) -> tuple[Step, list[int]]:
    arguments, shape = lowered.arguments(number), lowered.launch(number)
    scalars = _scalars(lowered.program.kernels[number], environment)
    persistence = shape.persistence
    kept = (0, 0) if persistence is None else (1 if persistence.scope == "clusters" else 2, persistence.blocks)
    integers = [*shape.grid, *shape.block, kernel.shared_bytes(shape), shape.cluster, *kept]
    buffers = [tensor_map.buffer for tensor_map in arguments.maps]
    for described in arguments.maps:
        integers += _map_integers(TensorMap(**vars(described)))
    buffers += [buffer for buffer, _ in arguments.pointers]
    offsets = [offset for _, offset in arguments.pointers]
    triton = lowered.route.backend == "triton"
    formats = "".join(_FORMATS[dtype][1] for _, dtype in lowered.program.kernels[number].scalars)
    packing = arguments.packing(formats, in_struct=not triton)
    varying = iter((*offsets, *scalars))
    values = zip(packing.codes, packing.values, strict=True)
    integers += [next(varying) if value is None else int(value) for code, value in values if code != "T"]
    letters = "".join(code if code in "TP" else "v" for code in packing.codes)
    if triton:  # its kernels take two addresses more, which may be null
        letters, integers = letters + "vv", [*integers, 0, 0]
    return Step(kernel, letters, tuple(buffers), (), *(packing.layout or ((), 0))), integers


def _map_integers(described: TensorMap) -> list[int]:
    """Returns the integers of a tensor map, innermost dimension first, with the driver's numbers of data types and
    swizzles."""
    return [
        _MAP_TYPES[described.dtype],
        len(described.sizes),
        (0, 32, 64, 128).index(described.swizzle),
        described.offset,
        *reversed(described.sizes),
        *reversed(described.byte_strides),
        *reversed(described.box),
    ]


_MAP_TYPES = {"uint8": 0, "uint32": 2, "int32": 3, "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9}


def _scalars(kernel: Kernel, environment: Mapping[str, Any]) -> list[int]:
    """Returns the run-time scalars of a kernel as the eight bytes that it reads."""
    scalars = []
    for expr, dtype in kernel.scalars:
        if isinstance(expr, Expr) and any(name in symbols.DRAWN for name in symbols.symbols_of(expr)):
            raise UnsupportedError(f"{kernel.name}: a package has no random numbers yet")
        value = symbols.evaluate(expr, environment) if isinstance(expr, Expr) else expr
        packed = struct.pack(_FORMATS[dtype], value)
        scalars.append(struct.unpack("<q", packed.ljust(8, b"\0"))[0])
    return scalars


_FORMATS = {"float32": "<f", "float64": "<d", "int64": "<q"}
