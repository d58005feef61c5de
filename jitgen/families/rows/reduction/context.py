"""Presents a row kernel to the templates of all dialects as a sequence of passes, with the lines of each.

``context`` prints the instructions of a body by a dialect's rules and sorts the lines into passes; ``cpp.py``,
``cuda.py`` and ``triton.py`` then decide for their templates what each pass loads, keeps and recomputes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Line, printed
from jitgen.device import Device
from jitgen.families.rows.reduction.forms import CudaRows, RowSchedule
from jitgen.families.rows.reduction.online import SUM_EXP, online, with_means
from jitgen.families.rows.reduction.powers import in_powers_of_two
from jitgen.families.rows.reduction.residency import first_needed
from jitgen.ir.body import Instruction, elements_under
from jitgen.ir.program import Kernel
from jitgen.kernel.parameters import KernelParameters
from jitgen.kernel.printed_rows import RowContext, RowOperand, row_attributes
from jitgen.kernel.render import renderer
from jitgen.kernel.rows import RowLayout, row_parameters
from jitgen.spec import DTYPES


@dataclass(frozen=True)
class Reduction:
    """Combines ``value`` of every element of the row into ``result`` by ``kind``.

    ``type`` and ``value_type`` are the types of result and value, ``value_dtype`` the value's dtype; ``coarse`` says
    that every result of the kernel is a float of 16 bits or fewer.
    """

    result: str
    kind: str
    type: str
    value: str
    value_type: str
    value_dtype: str
    coarse: bool


@dataclass(frozen=True)
class Blocked:
    """Combines ``value`` of every element of a block of ``size`` into ``result`` by ``kind``.

    ``type`` and ``dtype`` are those of both; ``after``: the positions of what is computed of the result.
    """

    result: str
    kind: str
    size: int
    type: str
    dtype: str
    value: str
    after: frozenset[int]


@dataclass(frozen=True)
class Pass:
    """Describes one pass over the row.

    Attributes:
        number: its number, from 0.
        before: lines of the row values that the pass before it made known, to compute before this one begins.
        loads: element operands that this pass is the first to need.
        reloads: element operands that it needs and an earlier pass has needed too.
        lines: element values that this pass is the first to need, in order.
        recomputed: element values of earlier passes that it needs, in order.
        reused: names of values among ``loads`` and ``lines`` that a later pass uses directly.
        reductions: what it reduces.
        stores: the operands whose elements it stores.
        blocked: what it combines of blocks of the row, before it computes what is after that.
        of_blocks: positions of the element values that are the same for all elements of a block.
    """

    number: int
    before: tuple[Line, ...]
    loads: tuple[RowOperand, ...]
    reloads: tuple[RowOperand, ...]
    lines: tuple[Line, ...]
    recomputed: tuple[Line, ...]
    reused: tuple[str, ...]
    reductions: tuple[Reduction, ...]
    stores: tuple[RowOperand, ...]
    blocked: tuple[Blocked, ...] = ()
    of_blocks: frozenset[int] = frozenset()


@dataclass(frozen=True)
class ReductionContext(RowContext):
    """Describes the whole kernel.

    Attributes:
        row_loads: operands that are read once a row, before the passes.
        passes: the passes over a row.
        after: lines of the row values that the last pass made known.
        row_stores: operands that are written once a row, behind all passes.
    """

    row_loads: tuple[RowOperand, ...]
    passes: tuple[Pass, ...]
    after: tuple[Line, ...]
    row_stores: tuple[RowOperand, ...]


@dataclass(frozen=True)
class RowValues:
    """Holds the values of which each row has its own where rows are walked together: arrays over rows.

    ``pairs``: (type, name) of each; ``instructions``: of the body.
    """

    instructions: Sequence[Instruction]
    pairs: Sequence[tuple[str, str]]

    @property
    def names(self) -> set[str]:
        return {name for _, name in self.pairs}

    def read(self, positions: Iterable[int], values: Collection[str]) -> list[tuple[str, str]]:
        """Returns the pairs that instructions at ``positions`` read, or whose names are among ``values``."""
        read = {f"v{argument}" for position in positions for argument in self.instructions[position].args}
        return [pair for pair in self.pairs if pair[1] in read or pair[1] in values]

    def block(self, lines: Sequence[Line]) -> dict[str, Any]:
        """Wraps ``lines`` that compute such values, with the pairs they read and do not compute as ``inputs``."""
        names = self.names
        own = [line for line in lines if line.value in names]
        computed = {line.value for line in own}
        inputs = [pair for pair in self.read([line.position for line in own], ()) if pair[1] not in computed]
        return {"lines": own, "inputs": inputs}


def identity(kind: str, dtype: str) -> bool | int | float:
    """Returns the neutral element of a reduction by ``kind`` of values of compute ``dtype``; of argmax and argmin, the
    value's."""
    if kind in ("sum", "prod", "any", "all"):
        return kind in ("prod", "all")
    low = kind.endswith("max") or kind == SUM_EXP
    if dtype == "bool":
        return not low
    if dtype.startswith("float"):
        return -math.inf if low else math.inf
    limits = torch.iinfo(DTYPES[dtype])
    return limits.min if low else limits.max


def context(
    kernel: Kernel, layout: RowLayout, parameters: KernelParameters, schedule: RowSchedule, dialect: Dialect
) -> ReductionContext:
    """Returns the context of ``kernel`` in ``dialect``."""
    return _Builder(kernel, layout, parameters, dialect).build()


def rewritten(kernel: Kernel, layout: RowLayout, schedule: RowSchedule, device: Device) -> Kernel:
    """Rewrites ``kernel`` to compute its reductions as ``schedule`` does."""
    if schedule.online:
        kernel = online(kernel)
        if isinstance(schedule, CudaRows) and schedule.resident and not layout.columns:
            kernel = with_means(kernel)
    if not device.is_gpu:
        return kernel
    # In CUDA C++ only where clusters hold rows: elsewhere softmax is 1 to 2 % slower (H200, rows of 100, 16384 and
    # 32768) for the registers that direct exponents take.
    direct = not isinstance(schedule, CudaRows) or (schedule.cluster > 1 and schedule.rows_per_thread == 1)
    return in_powers_of_two(kernel, direct)


render = renderer("reduction", "jitgen.families.rows.reduction", row_parameters, context, "rows", rewritten=rewritten)


class _Builder:
    def __init__(self, kernel: Kernel, layout: RowLayout, parameters: KernelParameters, dialect: Dialect):
        (self.body,) = kernel.bodies
        self.dialect = dialect
        self.instructions = self.body.instructions
        self.coarse = self.body.coarse
        self.printed = printed(self.instructions, dialect, coarse=self.coarse)
        self.names, self.lines = self.printed.names, self.printed.lines
        self.shared = row_attributes(kernel, layout, parameters, self.printed.values, dialect)
        self.operands: tuple[RowOperand, ...] = self.shared["operands"]
        self.first = first_needed(self.body)

    def build(self) -> ReductionContext:
        last = max(self.first.values())
        passes = tuple(self._pass(number) for number in range(last + 1))
        return ReductionContext(
            **self.shared,
            row_loads=tuple(o for o in self.operands if o.role != "store" and o.kind == "row"),
            passes=passes,
            after=self._row_values(last + 1, 10**9),
            row_stores=tuple(o for o in self.operands if o.role == "store" and o.kind == "row"),
        )

    def _row_values(self, first: int, last: int) -> tuple[Line, ...]:
        """Returns the lines of row values (constants included) whose stage lies in [first, last]."""
        return tuple(
            line
            for position, line in self.lines.items()
            if self.instructions[position].row and first <= self.instructions[position].stage <= last
        )

    def _pass(self, number: int) -> Pass:
        here = [p for p, needed in self.first.items() if needed == number]
        roots = [p for p in here if self.instructions[p].op in ("reduce", "store")]
        needed = elements_under(self.body, roots)
        loads: list[RowOperand] = []
        reloads: list[RowOperand] = []
        lines: list[Line] = []
        recomputed: list[Line] = []
        for position in sorted(needed):
            instruction = self.instructions[position]
            is_new = self.first[position] == number
            if instruction.op in ("load", "iota"):
                (loads if is_new else reloads).append(self.operands[instruction.attr])
            elif position in self.lines:
                (lines if is_new else recomputed).append(self.lines[position])
        reused = [self.names[p] for p in sorted(here) if p in self.names and self._is_used_after(p, number)]
        return Pass(
            number=number,
            before=self._row_values(number, number),
            loads=tuple(loads),
            reloads=tuple(reloads),
            lines=tuple(lines),
            recomputed=tuple(recomputed),
            reused=tuple(reused),
            reductions=tuple(self._reduction(p) for p in sorted(here) if self.instructions[p].op == "reduce"),
            stores=tuple(
                self.operands[self.instructions[p].attr] for p in sorted(here) if self.instructions[p].op == "store"
            ),
            blocked=tuple(self._blocked(p) for p in sorted(needed) if self.instructions[p].op == "blocked"),
            of_blocks=self._of_blocks(),
        )

    def _of_blocks(self) -> frozenset[int]:
        """Returns the positions of values that are computed of blocks' and of rows' alone."""
        of_blocks = {position for position, one in enumerate(self.instructions) if one.op == "blocked"}
        for position, one in enumerate(self.instructions if of_blocks else ()):
            others = [argument for argument in one.args if argument not in of_blocks]
            if len(others) < len(one.args) and all(self.instructions[argument].row for argument in others):
                of_blocks.add(position)
        return frozenset(of_blocks)

    def _blocked(self, position: int) -> Blocked:
        instruction, after = self.instructions[position], {position}
        for number, other in enumerate(self.instructions):
            if not after.isdisjoint(other.args):
                after.add(number)
        kind, size = instruction.attr
        return Blocked(
            result=self.names[position],
            kind=kind,
            size=size,
            type=self.dialect.types[instruction.dtype],
            dtype=instruction.dtype,
            value=self.names[instruction.args[0]],
            after=frozenset(after),
        )

    def _is_used_after(self, position: int, number: int) -> bool:
        if self.instructions[position].op == "reduce":
            return False
        return any(
            position in instruction.args and self.first.get(user, -1) > number
            for user, instruction in enumerate(self.instructions)
        )

    def _reduction(self, position: int) -> Reduction:
        instruction = self.instructions[position]
        argument = instruction.args[0]
        source: Instruction = self.instructions[argument]
        return Reduction(
            result=self.names[position],
            kind=instruction.attr,
            type=self.dialect.types[instruction.dtype],
            value=self.names[argument],
            value_type=self.dialect.types[source.dtype],
            value_dtype=source.dtype,
            coarse=self.coarse,
        )
