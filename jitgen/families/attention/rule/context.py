"""Presents to the templates what attention and its gradients have in common: operands by role, and the rule of a
tile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jitgen.codegen.dialect import Dialect, Row
from jitgen.codegen.printing import Line, printed
from jitgen.families.attention.rule.bounds import Bounds, ends_of
from jitgen.families.attention.rule.layout import TileLayout
from jitgen.ir.body import Instruction, compute_dtype
from jitgen.ir.ops import INTS
from jitgen.ir.program import Kernel
from jitgen.kernel.parameters import KernelParameters
from jitgen.kernel.printed import (
    KernelContext,
    PrintedOperand,
    context_attributes,
    indices,
    printed_attributes,
    sum_of,
    title_of,
)
from jitgen.kernel.printed_entry import member_of

LEVELS = ("task", "row", "key", "both")
"""What a value of a tile may depend on besides the task: a row of the block, a streamed row, or both."""
SCORE_ROWS: Mapping[str, Mapping[str, Row]] = {
    "cuda": {"tanh": {"float32": "jitgen::tanh_of_score({0})", "float": "jitgen::tanh({0})"}}
}
"""Rows of a dialect in place of its own where a score is computed, whose absolute error counts."""


@dataclass(frozen=True)
class Operand(PrintedOperand):
    """Describes one operand.

    Attributes:
        batch, groups, own: strides, which are parameters: along the batch, along groups, and its own two.
    """

    batch: tuple[str, ...]
    groups: tuple[str, ...]
    own: tuple[str, str]

    @property
    def is_integer(self) -> bool:
        return self.dtype in INTS

    @property
    def at(self) -> str:
        """Returns the member of a task in CUDA with the offset at which the operand begins."""
        return f"{member_of(self.pointer or self.offset)}_at"

    @property
    def only(self) -> str:
        """Returns the member in CUDA with its only value in a task or a row."""
        return f"{member_of(self.pointer or self.offset)}_value"

    @property
    def task_base(self) -> str:
        """Returns the offset of the first element of the task with indices ``z0`` ..."""
        return sum_of([self.offset], self.batch, numbered("z", self.batch))

    @property
    def group_base(self) -> str:
        """Returns the offset where the dimensions of indices ``h0`` ... that results are summed over begin, after
        ``batch``."""
        return sum_of([f"batch{self.index}"], self.groups, numbered("h", self.groups))

    def packed_row(self, first: str = "") -> str:
        """Returns the offset of row ``m`` at packed indices ``y0`` ...; ``first`` is that at which the task begins,
        ``at<index>`` by default."""
        strides = [*self.groups, self.own[0]]
        return sum_of([first or f"at{self.index}"], strides, [*numbered("y", self.groups), "m"])

    def row(self, index: str, first: str = "at") -> str:
        """Returns the offset of row ``index`` where groups are no rows."""
        return f"{first}{self.index} + {index} * {self.own[0]}"


def numbered(name: str, dims: Sequence[object]) -> list[str]:
    """Returns the names of the indices of ``dims``."""
    return [f"{name}{dim}" for dim in range(len(dims))]


def operand_of(
    declared: KernelParameters, index: int, layout: TileLayout, dialect: Dialect, value: str = ""
) -> Operand:
    """Returns operand ``index`` of a kernel."""
    parameters = declared.operands[index]
    *outer, first, second = parameters.strides
    return Operand(
        **printed_attributes(parameters, layout.operands[index], value, dialect),
        batch=tuple(outer[: layout.batch]),
        groups=tuple(outer[layout.batch :]),
        own=(first, second),
    )


@dataclass(frozen=True)
class Rule:
    """Holds the printed rule of a tile: scores, or functions of several products.

    Attributes:
        operands: what it reads.
        lines: its statements, of the accumulators of products.
        levels: for each of these, what its value depends on, one of ``LEVELS``.
        values: the names of what it computes, at the positions ``roots``.
        scalars: run-time scalars: name to type.
        instructions, names, by_position: what the lines are printed from, the names of values, and the lines by the
            positions of instructions.
    """

    operands: tuple[Operand, ...]
    lines: tuple[Line, ...]
    levels: tuple[str, ...]
    values: tuple[str, ...]
    roots: tuple[int, ...]
    scalars: Mapping[str, str]
    instructions: tuple[Instruction, ...]
    names: dict[int, str]
    by_position: dict[int, Line]

    @property
    def score(self) -> str:
        """Returns the name of the one value."""
        (value,) = self.values
        return value

    def at(self, level: str) -> list[Line]:
        """Returns the lines of one level."""
        return [line for line, own in zip(self.lines, self.levels, strict=True) if own == level]

    def reads(self, kind: str) -> list[Operand]:
        """Returns the operands of one kind."""
        return [operand for operand in self.operands if operand.kind == kind]


def rule_of(
    instructions: Sequence[Instruction], roots: Sequence[int], dialect: Dialect, operand: Callable[[int], Operand]
) -> Rule:
    """Prints the rule ``instructions`` with values at ``roots``; ``operand`` makes the operand of a number."""
    text = printed(instructions, dialect, "s")
    types = {i.attr: dialect.types[i.dtype] for i in instructions if i.op in ("load", "iota")}
    operands = tuple(replace(operand(i), value=text.values[i], type=name) for i, name in types.items())
    levels = levels_of(instructions, {read.index: read.kind for read in operands})
    return Rule(
        operands=operands,
        lines=tuple(text.lines.values()),
        levels=tuple(levels[position] for position in text.lines),
        values=tuple(text.names[root] for root in roots),
        roots=tuple(roots),
        scalars=dict(text.scalars),
        instructions=tuple(instructions),
        names=text.names,
        by_position=text.lines,
    )


def levels_of(instructions: Sequence[Instruction], kinds: Mapping[int, str]) -> list[str]:
    """Returns what each instruction depends on, one of ``LEVELS``.

    Args:
        kinds: of the operands that are read, by their indices.
    """
    levels: list[str] = []
    for instruction in instructions:
        own = {"both"} if instruction.op == "contract" else {levels[argument] for argument in instruction.args}
        if instruction.op in ("load", "iota"):
            own = {kinds[instruction.attr]}
        own -= {"task"}
        levels.append("both" if len(own) > 1 else next(iter(own), "task"))
    return levels


def of_scores(dialect: Dialect) -> Dialect:
    """Returns ``dialect`` as it computes scores."""
    return replace(dialect, rows={**dialect.rows, **SCORE_ROWS.get(dialect.name, {})})


@dataclass(frozen=True)
class Frame(KernelContext):
    """Holds what the templates of every dialect read of a kernel of attention or of its gradients.

    Attributes:
        rule: of a tile; ``unmasked`` the same where no mask hides anything.
        masked: whether the two differ.
        batch, groups: the parameters that are sizes of the batch and of groups.
        accumulator: the dialect's type of sums.
    """

    rule: Rule
    unmasked: Rule
    masked: bool
    batch: tuple[str, ...]
    groups: tuple[str, ...]
    accumulator: str

    def task_indices(self, number: str, divide: str = "/") -> list[tuple[str, str]]:
        """Returns (name, expression) of the indices ``z0`` ... of task ``number``."""
        return indices(self.batch, number, "z", divide)

    @property
    def tasks(self) -> str:
        """Prints how many tasks there are."""
        return " * ".join(self.batch) or "1"

    def ends(self, bounds: Bounds, kind: str) -> list[Operand]:
        """Returns the operands of ``kind`` whose ends ``bounds`` reads."""
        return [operand for operand in self.rule.reads(kind) if bounds.reads(ends_of(operand))]


def frame_attributes(
    kernel: Kernel,
    layout: TileLayout,
    declared: KernelParameters,
    operands: Sequence[Operand],
    dtype: str,
    dialect: Dialect,
) -> dict[str, Any]:
    """Returns the attributes of a ``Frame``, but for its rules; products are of operands of ``dtype``."""
    (body,) = kernel.bodies
    return {
        **context_attributes(kernel, declared, operands, dialect, [title_of(body, layout.operands)]),
        "batch": tuple(declared.name(f"b{dim}") for dim in range(layout.batch)),
        "groups": tuple(declared.name(f"g{dim}") for dim in range(layout.groups)),
        "accumulator": dialect.types[compute_dtype(dtype)],
    }
