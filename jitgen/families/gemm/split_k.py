"""Splits K over a temporary: a product with few tiles becomes two kernels, so that more blocks can share its K.

A product of few rows and few columns has too few tiles to occupy a GPU. Here several blocks share a tile; each computes
the sums over one range of K. The product's kernel stores the sums of every range to a temporary and has no epilogue. A
pointwise kernel after it adds the ranges in order and runs the epilogue once. Nothing is added atomically, so equal
calls give equal bits. CUTLASS calls this parallel split-K. (The cuda dialect also splits K within a cluster of blocks,
``WgmmaMainloop.cluster_k_splits``. That needs no second kernel, but has at most eight blocks for a tile.)

The rewrite is the same for every dialect, and happens before the layout of the two kernels. The temporary of a product
with ``splits`` ranges is ``[splits * M, N']``, of the accumulator's dtype, and the rows of one range follow those of
the one before. ``N'`` is N rounded up to ``ALIGNMENT`` elements, so that the rows of every range are aligned whatever M
is. The product's kernel gets the address of the first range's rows, and it stores range p ``p * M`` rows below.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jitgen.device import Device
from jitgen.families.family import ANY_FAMILY, KernelRewrite
from jitgen.families.gemm.layout import layout
from jitgen.families.gemm.schedule import DIALECTS_WITH_SPLIT_K, k_splits, may_split_k, problem
from jitgen.ir import symbols
from jitgen.ir.body import Body, Instruction, Operand
from jitgen.ir.graph import Movement, Shape
from jitgen.ir.program import Buffer, Kernel
from jitgen.ir.regions import Stage, grid_axes
from jitgen.kernel.operands import Call

ALIGNMENT = 4
"""Elements of float32 that one access moves at most; that is 16 bytes."""


@dataclass(frozen=True)
class Partials:
    """Describes the temporary of one product: its sums over each range of K.

    Attributes:
        number: of the buffer; -1 while it is not known.
        dtype: of the product's accumulator.
        shape: (rows, columns) of the product.
        splits: how many ranges K has.
    """

    number: int
    dtype: str
    shape: Shape
    splits: int

    @property
    def buffer(self) -> Buffer:
        rows, columns = self.shape
        padded = symbols.mul(symbols.floordiv(symbols.add(columns, ALIGNMENT - 1), ALIGNMENT), ALIGNMENT)
        return Buffer(self.dtype, (symbols.mul(rows, self.splits), padded), contiguous=True)  # type: ignore[arg-type]

    def operand(self, kind: str, split: int) -> Operand:
        """Returns the sums over range number ``split``, as a matrix of (rows, columns)."""
        rows, stored = self.shape[0], self.buffer.shape
        movements: tuple[Movement, ...] = (
            (("slice", 0, symbols.mul(rows, split), 1), (rows, stored[1])),
            (("slice", 1, 0, 1), self.shape),
        )
        return Operand(kind, self.number, self.dtype, stored, movements)


def split_k(kernel: Kernel, call: Call, device: Device) -> KernelRewrite | None:
    """Returns ``kernel`` as two kernels if its tiles are too few for the device at the sizes of this call; else
    None."""
    if device.uses_cutlass:
        return _kernel_of_each(kernel)
    if device.dialect not in DIALECTS_WITH_SPLIT_K or any(
        len(body.shape) > 2 or body.is_grouped or body.has_runs or body.has_blocks for body in kernel.bodies
    ):
        return None  # a batch of products has enough tiles, and so have groups; runs and blocks of columns need sums
    sizes = [symbols.evaluated(body.shape, call.environment) for body in kernel.bodies]
    length = symbols.evaluate(kernel.bodies[0].contractions[0].length, call.environment)
    if not may_split_k(sizes[0][0], [columns for _, columns in sizes], length, device):
        return None
    splits = k_splits(problem(kernel, *layout(kernel, call), device), device)
    return None if splits == 1 else _two_kernels(kernel, splits)


def _kernel_of_each(kernel: Kernel) -> KernelRewrite | None:
    """Returns a kernel for each region of ``kernel``: one of CUTLASS computes one product."""
    if len(kernel.bodies) == 1:
        return None

    def kernels(kernel: Kernel, first: int) -> tuple[Kernel, ...]:
        names = (f"{kernel.name}_{number}" if number else kernel.name for number in itertools.count())
        return tuple(
            replace(kernel, name=name, bodies=(body,)) for name, body in zip(names, kernel.bodies, strict=False)
        )

    return KernelRewrite((), kernels)


def _two_kernels(kernel: Kernel, splits: int) -> KernelRewrite:
    """Makes a kernel with the products of ``kernel``, and one that adds their sums and runs its epilogue."""
    partials = [[_partial(body, index, splits) for index in range(len(body.contractions))] for body in kernel.bodies]

    def kernels(kernel: Kernel, first: int) -> tuple[Kernel, Kernel]:
        numbers = itertools.count(first)
        numbered = [[replace(partial, number=next(numbers)) for partial in region] for region in partials]
        pairs = list(zip(kernel.bodies, numbered, strict=True))
        products = replace(kernel, bodies=tuple(_products(body, region) for body, region in pairs))
        sums = tuple(_sums_and_epilogue(body, region) for body, region in pairs)
        return products, replace(kernel, name=f"{kernel.name}_sum", family=ANY_FAMILY, bodies=sums)

    return KernelRewrite(tuple(partial.buffer for region in partials for partial in region), kernels)


def _partial(body: Body, index: int, splits: int) -> Partials:
    dtype = next(i.dtype for i in body.instructions if i.op == "contract" and i.attr == index)
    return Partials(-1, dtype, body.shape, splits)


def _products(body: Body, partials: Sequence[Partials]) -> Body:
    """Makes the contractions of ``body`` alone, whose accumulators are stored as they are."""
    read = {index for contraction in body.contractions for index in contraction.weight}
    read |= {i.attr for contraction in body.contractions for i in contraction.x if i.op in ("load", "iota")}
    renumbered = {index: number for number, index in enumerate(sorted(read))}
    contractions = tuple(
        replace(
            contraction,
            x=tuple(replace(i, attr=renumbered[i.attr]) if i.op in ("load", "iota") else i for i in contraction.x),
            weight=tuple(renumbered[index] for index in contraction.weight),
            k_splits=partials[0].splits,
        )
        for contraction in body.contractions
    )
    operands = [body.operands[index] for index in renumbered]
    instructions: list[Instruction] = []
    for index, partial in enumerate(partials):
        accumulator = len(instructions)
        instructions.append(Instruction("contract", (), partial.dtype, index))
        instructions.append(Instruction("store", (accumulator,), partial.dtype, len(operands)))
        operands.append(partial.operand("store", 0))
    stages = tuple(stage for stage in body.stages if stage.kind == "contract")
    return Body(body.axes, stages, tuple(operands), tuple(instructions), contractions, body.coarse)


def _sums_and_epilogue(body: Body, partials: Sequence[Partials]) -> Body:
    """Makes the epilogue of ``body``, which reads the sum over the ranges of K instead of each accumulator."""
    instructions: list[Instruction] = []
    operands: list[Operand] = []
    sums: list[int] = []  # the instruction that gives each contraction's sum
    for partial in partials:
        for split in range(partial.splits):
            instructions.append(Instruction("load", (), partial.dtype, len(operands)))
            operands.append(partial.operand("load", split))
            if split == 0:
                sums.append(len(instructions) - 1)
            else:
                instructions.append(Instruction("add", (sums[-1], len(instructions) - 1), partial.dtype))
                sums[-1] = len(instructions) - 1
    used = [index for index, operand in enumerate(body.operands) if operand.kind in ("load", "iota", "store")]
    new_operand = {index: len(operands) + number for number, index in enumerate(used)}
    operands += [body.operands[index] for index in used]
    new_position: dict[int, int] = {}
    for position, instruction in enumerate(body.instructions):
        if instruction.op == "contract":
            new_position[position] = sums[instruction.attr]
            continue
        touches_operand = instruction.op in ("load", "iota", "store")
        attr = new_operand[instruction.attr] if touches_operand else instruction.attr
        new_position[position] = len(instructions)
        instructions.append(replace(instruction, args=tuple(new_position[a] for a in instruction.args), attr=attr))
    return Body(grid_axes(body.shape), (Stage("map"),), tuple(operands), tuple(instructions), coarse=body.coarse)
