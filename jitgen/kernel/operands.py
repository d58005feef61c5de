"""Locates operands in memory, as every family asks: concrete strides, merged dimensions, sizes of elements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jitgen.ir import symbols
from jitgen.ir.body import Instruction, Operand
from jitgen.ir.ops import flops_of
from jitgen.ir.views import ACCESS_BYTES, Memory, Strided, apply, contiguous_strides

__all__ = ["ACCESS_BYTES", "CPU_LANES", "INDEX_LIMIT", "MAX_UNIT", "WARP", "base_of", "collapse", "item_size", "locate"]
__all__ += ["addresses", "output_strides", "pointwise_flops"]

ITEM_SIZES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2}
"""The bytes of an element; every other dtype has one."""
CPU_LANES = 64
"""The number of elements that a CPU thread takes at once, whose vectors are computed side by side: a cache line or more
of each operand; in a reduction, each into an accumulator of its own."""
MAX_UNIT = 16
"""The most elements of an operand's unit: 16 bytes of the narrowest dtype."""
WARP = 32
"""The number of threads of a warp. AMD's wavefronts have 64, and Triton makes its blocks of them twice as large."""
SWIZZLE_BYTES = 128
"""Bytes over which a tensor map swizzles the rows of a box, as wgmma reads them."""
INDEX_LIMIT = 2**31 - 2**20
"""From here on indices are 64-bit: below it, even the last block's idle threads count within 32 bits."""


@dataclass(frozen=True)
class Call:
    """Holds the sizes and memory of one call.

    Attributes:
        environment: a value for every symbol.
        buffers: the memory of every buffer of the program.
        is_gpu: whether a source may depend on how many elements one access can move.
    """

    environment: Mapping[str, Any]
    buffers: Sequence[Memory]
    is_gpu: bool


@dataclass(frozen=True)
class MappedTensor:
    """Describes a matrix, or a batch of them, that a kernel copies by a tensor map; the fields are those of
    ``runtime/tensor_map.TensorMap``."""

    buffer: int
    offset: int
    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int


def mapped_tensor(
    operand: Operand,
    offset: int,
    batch: Sequence[tuple[int, int]],
    batch_rank: int,
    shape: tuple[int, int],
    row_stride: int,
    box: tuple[int, int],
) -> MappedTensor:
    """Makes the tensor map of ``operand``, matrices of ``shape`` whose rows are contiguous and swizzled over 128 bytes.

    Args:
        offset: of the first element from the buffer's pointer, in elements.
        batch: (size, stride) of each dimension before rows; along one of stride 0 there is one matrix.
        batch_rank: how many such dimensions the map has.
    """
    padded = [(1, 0)] * (batch_rank - len(batch)) + [(size if step else 1, step) for size, step in batch]
    assert operand.buffer is not None
    return MappedTensor(
        operand.buffer,
        offset * item_size(operand.dtype),
        operand.dtype,
        (*(size for size, _ in padded), *shape),
        (*(step for _, step in padded), row_stride, 1),
        (*(1,) * batch_rank, *box),
        SWIZZLE_BYTES,
    )


def item_size(dtype: str) -> int:
    return ITEM_SIZES.get(dtype, 1)


def power_of_two(number: int) -> int:
    """Rounds ``number`` up to a power of two, at least 1."""
    return 1 << max(number - 1, 0).bit_length()


def pointwise_flops(instructions: Iterable[Instruction], elements: int) -> int:
    """Counts the operations of ``instructions`` for so many elements; a reduction or a scan is one for each."""
    weights = (flops_of(i.op) or int(i.op in ("reduce", "blocked", "scan")) for i in instructions)
    return elements * sum(weights)


def addresses(instructions: Sequence[Instruction]) -> Iterator[Instruction]:
    """Yields those of ``instructions`` that only compute indices of what is read or written at indices, element by
    element."""
    valued = set(range(len(instructions))) - {arg for instruction in instructions for arg in instruction.args}
    for number in reversed(range(len(instructions))):
        instruction = instructions[number]
        if number in valued or instruction.op in ("reduce", "scan", "sort", "merge"):
            values = {"gather": 0, "scatter": 1}.get(instruction.op, len(instruction.args))
            valued.update(instruction.args[:values])
        else:
            yield instruction


def locate(movements: Any, base: Strided, environment: Mapping[str, Any]) -> Strided:
    """Applies ``movements`` to ``base``."""
    view = base
    for attrs, shape in movements:
        concrete = symbols.evaluated(attrs, environment)
        view = apply(view, concrete, symbols.evaluated(shape, environment))
    return view


def base_of(operand: Operand, environment: Mapping[str, Any], buffers: Sequence[Memory]) -> Strided:
    """Returns the whole tensor that an operand sees through its movements; an iota's is its index space."""
    if operand.buffer is not None:
        return buffers[operand.buffer].view
    sizes = symbols.evaluated(operand.shape, environment)
    return Strided(sizes, tuple(int(dim == operand.dim) for dim in range(len(sizes))))


def view_of(operand: Operand, call: Call) -> Strided:
    """Returns what an operand sees of its tensor through its movements; NotViewable if one needs a copy first."""
    return locate(operand.movements, base_of(operand, call.environment, call.buffers), call.environment)


def collapse(
    sizes: tuple[int, ...], strides: Sequence[tuple[int, ...]], store: int
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Drops dimensions of 1 and merges neighbours, ordered by operand ``store``'s strides; returns sizes and
    strides."""
    dims = sorted(range(len(sizes)), key=lambda dim: -abs(strides[store][dim]))
    merged = merged_dimensions(sizes, strides, dims)
    merged = merged or [(1, tuple(int(position >= store) for position in range(len(strides))))]
    return tuple(size for size, _ in merged), tuple(zip(*(steps for _, steps in merged), strict=True))


def merged_dimensions(
    sizes: Sequence[int], strides: Sequence[Sequence[int]], dims: Sequence[int]
) -> list[tuple[int, tuple[int, ...]]]:
    """Merges neighbours among ``dims`` of more than one element that every operand walks without a gap: (size, stride
    of every operand)."""
    merged: list[tuple[int, tuple[int, ...]]] = []
    for dim in dims:
        if sizes[dim] == 1:
            continue
        steps = tuple(stride[dim] for stride in strides)
        if merged and all(outer == inner * sizes[dim] for outer, inner in zip(merged[-1][1], steps, strict=True)):
            merged[-1] = (merged[-1][0] * sizes[dim], steps)
        else:
            merged.append((sizes[dim], steps))
    return merged


def output_strides(sizes: Sequence[int], like: Sequence[Strided]) -> tuple[int, ...]:
    """Returns strides for a new output: dense, in the order of the inputs if every full-sized one agrees, else
    row-major.

    As eager torch does, so that ``x.t() * 2`` walks memory in order and a channels-last input gives a channels-last
    output.
    """
    order: tuple[int, ...] | None = None
    for view in like:
        if view.sizes != tuple(sizes):
            continue
        dims = [dim for dim, size in enumerate(sizes) if size != 1]
        by_stride = tuple(sorted(dims, key=lambda dim: -view.strides[dim]))
        step = 1
        for dim in reversed(by_stride):
            if view.strides[dim] != step:
                return _row_major(sizes)
            step *= sizes[dim]
        if order is not None and by_stride != order:
            return _row_major(sizes)
        order = by_stride
    if order is None:
        return _row_major(sizes)
    rest = [dim for dim in range(len(sizes)) if sizes[dim] == 1]
    strides = [1] * len(sizes)
    step = 1
    for dim in reversed([*rest, *order]):
        strides[dim] = step
        step *= max(sizes[dim], 1)
    return tuple(strides)


def ordered_like(
    sizes: Sequence[int], contiguous: bool, channels_last: bool, inputs: Sequence[Strided]
) -> Sequence[Strided]:
    """Returns the memory that a new output of ``sizes`` is laid out like: the inputs if no order is asked for."""
    if contiguous:
        return ()
    return (channels_last_memory(sizes),) if channels_last else inputs


def channels_last_memory(sizes: Sequence[int]) -> Strided:
    """Lays out dense memory whose innermost dimension is 1, as torch's for images and volumes; other tensors are
    row-major."""
    if len(sizes) not in (4, 5):
        return Strided(tuple(sizes), contiguous_strides(sizes))
    rows, channels, *rest = sizes
    first, *others, last = contiguous_strides((rows, *rest, channels))
    return Strided(tuple(sizes), (first, last, *others))


def _row_major(sizes: Sequence[int]) -> tuple[int, ...]:
    return contiguous_strides(sizes)
