"""Split-K: a product whose K is dealt out to several blocks, as two kernels.

Few rows of few columns are too few tiles to keep a GPU busy. Then several blocks share a tile, each sums a part of K,
and somebody must add what they found. Here that is a rewrite of the program, the same for every dialect: the product's
kernel stores the sums of each part into a temporary and has no epilogue, and a pointwise kernel behind it adds the
parts in their order and runs the epilogue, once. (CUTLASS calls this form of split-K parallel, as opposed to serial.)
Nothing is added atomically, so the same call gives the same bits.

The temporary of a product in ``parts`` is ``[parts * M, N']`` of the accumulator's dtype, one part's rows after the
other's. ``N'`` is N rounded up to ``ALIGNMENT`` elements, so that where a part begins is aligned for every M. The
product's kernel is told where the first part lies, and stores part p ``p * M`` rows below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jitgen.ir import symbols
from jitgen.ir.body import Body, Instruction, Operand
from jitgen.ir.graph import Shape
from jitgen.ir.program import Buffer, Kernel, Program
from jitgen.ir.regions import Movement

ALIGNMENT = 4
"""Elements of float32 that one access moves at most: 16 bytes."""


@dataclass(frozen=True)
class Partials:
    """The temporary (buffer ``number``) that holds the sums of one product, of ``shape``, in ``parts``."""

    number: int
    dtype: str
    shape: Shape
    parts: int

    @property
    def buffer(self) -> Buffer:
        rows, columns = self.shape
        padded = symbols.mul(symbols.floordiv(symbols.add(columns, ALIGNMENT - 1), ALIGNMENT), ALIGNMENT)
        return Buffer(self.dtype, (symbols.mul(rows, self.parts), padded), contiguous=True)  # type: ignore[arg-type]

    def operand(self, kind: str, part: int) -> Operand:
        """One part, as the (rows, columns) it stands for."""
        rows, held = self.shape[0], self.buffer
        movements: tuple[Movement, ...] = (
            (("slice", 0, symbols.mul(rows, part), 1), (rows, held.shape[1])),
            (("slice", 1, 0, 1), self.shape),
        )
        return Operand(kind, self.number, self.dtype, held.shape, movements)


def split(program: Program, parts: Sequence[int]) -> Program:
    """``program`` with every kernel that is to compute several ``parts`` made two: of products, and of their sums."""
    first = len(program.inputs) + len(program.temporaries)
    split = [kernel for kernel, count in zip(program.kernels, parts, strict=True) if count > 1]
    added = sum(len(body.contractions) for kernel in split for body in kernel.bodies)
    temporaries: list[Buffer] = []
    kernels: list[Kernel] = []
    for kernel, count in zip(program.kernels, parts, strict=True):
        renumbered = _with_results_after(kernel, first, added)
        if count == 1:
            kernels.append(renumbered)
            continue
        products, sums = [], []
        for body in renumbered.bodies:
            partials = []
            for index in range(len(body.contractions)):
                dtype = next(i.dtype for i in body.instructions if i.op == "matmul" and i.attr == index)
                partials.append(Partials(first + len(temporaries), dtype, body.shape, count))
                temporaries.append(partials[-1].buffer)
            products.append(_products(body, partials))
            sums.append(_sums(body, partials))
        kernels.append(replace(renumbered, bodies=tuple(products)))
        kernels.append(replace(renumbered, name=f"{kernel.name}_sum", bodies=tuple(sums)))
    return replace(program, temporaries=(*program.temporaries, *temporaries), kernels=tuple(kernels))


def _with_results_after(kernel: Kernel, first: int, added: int) -> Kernel:
    """``kernel`` where buffers from ``first`` on, the results, have numbers ``added`` higher."""

    def moved(operand: Operand) -> Operand:
        behind = operand.buffer is not None and operand.buffer >= first
        return replace(operand, buffer=operand.buffer + added) if behind else operand  # type: ignore[operator]

    bodies = tuple(replace(body, operands=tuple(map(moved, body.operands))) for body in kernel.bodies)
    return replace(kernel, bodies=bodies)


def _products(body: Body, partials: Sequence[Partials]) -> Body:
    """The contractions of ``body`` alone, each stored as it is."""
    read = {index for part in body.contractions for index in part.weight}
    read |= {i.attr for part in body.contractions for i in part.x if i.op in ("load", "iota")}
    kept = {index: place for place, index in enumerate(sorted(read))}
    contractions = tuple(
        replace(
            part,
            x=tuple(replace(i, attr=kept[i.attr]) if i.op in ("load", "iota") else i for i in part.x),
            weight=tuple(kept[index] for index in part.weight),
        )
        for part in body.contractions
    )
    operands = [body.operands[index] for index in kept]
    instructions: list[Instruction] = []
    for index, partial in enumerate(partials):
        place = len(instructions)
        instructions.append(Instruction("matmul", (), partial.dtype, index))
        instructions.append(Instruction("store", (place,), partial.dtype, len(operands)))
        operands.append(partial.operand("store", 0))
    return replace(body, operands=tuple(operands), instructions=tuple(instructions), contractions=contractions)


def _sums(body: Body, partials: Sequence[Partials]) -> Body:
    """The epilogue of ``body``, with the sum of its parts where a contraction's accumulator was."""
    instructions: list[Instruction] = []
    operands: list[Operand] = []
    sums: list[int] = []
    for partial in partials:
        for part in range(partial.parts):
            instructions.append(Instruction("load", (), partial.dtype, len(operands)))
            operands.append(partial.operand("load", part))
            if part == 0:
                sums.append(len(instructions) - 1)
            else:
                instructions.append(Instruction("add", (sums[-1], len(instructions) - 1), partial.dtype))
                sums[-1] = len(instructions) - 1
    read = [index for index, operand in enumerate(body.operands) if operand.kind in ("load", "iota", "store")]
    kept = {index: len(operands) + place for place, index in enumerate(read)}
    operands += [body.operands[index] for index in read]
    places: dict[int, int] = {}
    for position, instruction in enumerate(body.instructions):
        if instruction.op == "matmul":
            places[position] = sums[instruction.attr]
            continue
        attr = kept[instruction.attr] if instruction.op in ("load", "iota", "store") else instruction.attr
        places[position] = len(instructions)
        instructions.append(replace(instruction, args=tuple(places[a] for a in instruction.args), attr=attr))
    return Body(body.shape, tuple(operands), tuple(instructions))
