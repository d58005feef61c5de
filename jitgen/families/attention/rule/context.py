"""What the templates of attention and of its gradients read alike: operands by role, and the rule of a tile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from jitgen.codegen.dialect import Dialect, Row
from jitgen.codegen.printing import Line, printed
from jitgen.families.attention.rule.bounds import Bounds, ends_of
from jitgen.ir.body import Body, Instruction, compute_dtype
from jitgen.ir.ops import INTS

LEVELS = ("task", "row", "key", "both")
"""What a value of a tile may depend on besides the task: a row of the block, a streamed row, or both."""
SCORE_ROWS: Mapping[str, Mapping[str, Row]] = {
    "cuda": {"tanh": {"float32": "jitgen::tanh_of_score({0})", "float": "jitgen::tanh({0})"}},
}
"""Rows of a dialect in place of its own where a score is computed, whose absolute error counts."""


@dataclass(frozen=True)
class Operand:
    """One operand.

    Attributes:
        index: among the body's operands.
        role: the kind that the body gives it, such as ``"key"``, ``"score"``, ``"load"`` or ``"store"``.
        kind: of its strides; see ``Layout.operands``.
        dtype, storage, type: its dtype, that in memory in the dialect, and that of its value.
        value: the name of its value; of operands that no line reads, empty.
        batch, groups, own: strides, which are parameters: along the batch, along packed or summed dimensions, and its
            own two.
        pointer: the parameter; None for an index, whose first value is the parameter ``offset``.
        gathered: (size, stride) of each dimension that an index chooses along: parameters.
    """

    index: int
    role: str
    kind: str
    dtype: str
    storage: str
    type: str
    value: str
    batch: tuple[str, ...]
    groups: tuple[str, ...]
    own: tuple[str, str]
    pointer: str | None
    offset: str
    gathered: tuple[tuple[str, str], ...] = ()

    @property
    def is_integer(self) -> bool:
        return self.dtype in INTS

    @property
    def pointer_type(self) -> str:
        """The type of ``pointer`` in C++."""
        return f"{'' if self.role == 'store' else 'const '}{self.storage}*"


def operand_of(
    body: Body, index: int, kinds: Sequence[str], batch: int, groups: int, dialect: Dialect, value: str = ""
) -> Operand:
    """Operand ``index`` of ``body``, with strides along so many dimensions of the batch and of groups."""
    source = body.operands[index]
    strides = tuple(f"s{index}_{dim}" for dim in range(batch + groups + 2))
    return Operand(
        index=index,
        role=source.kind,
        kind=kinds[index],
        dtype=source.dtype,
        storage=dialect.storage_types[source.dtype],
        type=dialect.types[compute_dtype(source.dtype)],
        value=value,
        batch=strides[:batch],
        groups=strides[batch:-2],
        own=(strides[-2], strides[-1]),
        pointer=f"p{index}" if source.buffer is not None else None,
        offset=f"o{index}" if source.buffer is None else "",
        gathered=tuple((f"n{index}_{dim}", f"c{index}_{dim}") for dim in range(source.gathered)),
    )


@dataclass(frozen=True)
class Rule:
    """What is computed over a tile: scores, or functions of several products.

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
        """The name of the one value."""
        (value,) = self.values
        return value

    def at(self, level: str) -> list[Line]:
        """The lines of one level."""
        return [line for line, own in zip(self.lines, self.levels, strict=True) if own == level]

    def reads(self, kind: str) -> list[Operand]:
        """The operands of one kind."""
        return [operand for operand in self.operands if operand.kind == kind]


def rule_of(
    instructions: Sequence[Instruction], roots: Sequence[int], dialect: Dialect, operand: Callable[[int], Operand]
) -> Rule:
    """The rule ``instructions`` with values at ``roots``; ``operand`` makes the operand of a number."""
    text = printed(instructions, dialect, "s")
    types = {i.attr: dialect.types[i.dtype] for i in instructions if i.op in ("load", "iota")}
    operands = tuple(replace(operand(i), value=text.values[i], type=name) for i, name in types.items())
    levels = levels_of(instructions, {each.index: each.kind for each in operands})
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
    """What each instruction depends on, one of ``LEVELS``.

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
    """``dialect`` as it computes scores."""
    return replace(dialect, rows={**dialect.rows, **SCORE_ROWS.get(dialect.name, {})})


@dataclass(frozen=True)
class Frame:
    """What all dialects read of a kernel, be it of attention or of its gradients.

    Attributes:
        title: shape and operands in words.
        operands: all of them, in the order of the body.
        rule: of a tile; ``unmasked`` the same where no mask hides anything.
        masked: whether the two differ.
        integers, scalars: parameters.
        batch, groups: the parameters that are sizes of the batch and of packed or summed dimensions.
        accumulator: the dialect's type of sums.
    """

    title: str
    operands: tuple[Operand, ...]
    rule: Rule
    unmasked: Rule
    masked: bool
    integers: tuple[str, ...]
    scalars: tuple[tuple[str, str], ...]
    batch: tuple[str, ...]
    groups: tuple[str, ...]
    accumulator: str

    @property
    def memory(self) -> list[Operand]:
        """The operands that have a pointer."""
        return [operand for operand in self.operands if operand.pointer]

    @property
    def tasks(self) -> str:
        """How many tasks there are, as an expression."""
        return " * ".join(self.batch) or "1"

    def ends(self, bounds: Bounds, kind: str) -> list[Operand]:
        """The operands of ``kind`` whose ends ``bounds`` reads."""
        return [operand for operand in self.rule.reads(kind) if bounds.reads(ends_of(operand))]
