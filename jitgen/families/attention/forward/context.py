"""Presents attention to its templates: operands by role, and the lines of the query, of the rule and of the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Line, printed
from jitgen.families.attention.forward import NAME
from jitgen.families.attention.forward.layout import Layout, parameters
from jitgen.families.attention.forward.scales import Scaled, scaled
from jitgen.families.attention.rule.bounds import Bounds, Ends, Words, bounds_of, masks_of, without_masks
from jitgen.families.attention.rule.context import Frame, Operand, frame_attributes, of_scores, operand_of, rule_of
from jitgen.families.attention.rule.narrow import narrowed
from jitgen.ir.body import Body, Contraction, Instruction
from jitgen.ir.program import Kernel
from jitgen.kernel.parameters import KernelParameters
from jitgen.kernel.printed import indices
from jitgen.kernel.render import renderer

TAKE_FACTORS = ("cuda",)
"""Dialects whose templates multiply scores with a factor themselves, which the rule then does not."""


@dataclass(frozen=True)
class Computed:
    """Describes how an element of keys or values is computed, if these are no tensor.

    Attributes:
        instructions: the last one is its value.
        operands: that it reads, by their indices.
        shared: the positions of instructions that are the same for all elements of a key.
        dtype: of the element, as it meets the other operand of its product.
    """

    instructions: tuple[Instruction, ...]
    operands: Mapping[int, Operand]
    shared: frozenset[int]
    dtype: str


@dataclass(frozen=True)
class Attention(Frame):
    """Presents the kernel as all dialects read it.

    Attributes:
        factor: what the scores of ``rule`` are still to be multiplied with, computed by ``factor_lines``; empty for 1.
        linear: whether scores are accumulators and masks; see ``Scaled``.
        query: what an element of the query is computed from, ``query_lines`` and ``query_value``.
        key, value: the operands, or the first of those that they are computed from.
        computed_key, computed_value: how they are; None where they are tensors.
        key_dtype, value_dtype: of their elements.
        row_loads, row_lines: what is computed once for a row of results.
        loads, lines: what is computed for each element of it.
        row_stores, stores: results.
        row_maxima, row_sums: names of a row's greatest score and of its sum.
    """

    factor_lines: tuple[Line, ...]
    factor: str
    linear: bool
    query: tuple[Operand, ...]
    query_lines: tuple[Line, ...]
    query_value: str
    key: Operand
    value: Operand
    computed_key: Computed | None
    computed_value: Computed | None
    key_dtype: str
    value_dtype: str
    row_loads: tuple[Operand, ...]
    row_lines: tuple[Line, ...]
    loads: tuple[Operand, ...]
    lines: tuple[Line, ...]
    row_stores: tuple[Operand, ...]
    stores: tuple[Operand, ...]
    row_maxima: tuple[str, ...]
    row_sums: tuple[str, ...]

    @property
    def packed_rows(self) -> str:
        """Returns how many rows read the same keys, as an expression."""
        return " * ".join([*self.groups, "rows"])

    def row_indices(self, divide: str) -> list[tuple[str, str]]:
        """Returns (name, expression) of the indices of a row: those of packed dimensions, ``y0`` ..., and ``m``."""
        row = "row % rows" if self.groups else "row"
        return [*indices(self.groups, f"(row {divide} rows)", "y", divide), ("m", row)]


def narrowed_rule(body: Body, layout: Layout) -> tuple[Instruction, ...]:
    """Returns the instructions of the rule of scores."""
    rule = body.contractions[1].x
    return rule if layout.wide else narrowed(rule)


def context(kernel: Kernel, layout: Layout, declared: KernelParameters, schedule: Any, dialect: Dialect) -> Attention:
    """Returns the context of ``kernel`` in ``dialect``."""
    (body,) = kernel.bodies
    queries, probabilities = body.contractions
    whole = narrowed_rule(body, layout)
    scale = scaled(whole) if dialect.name in TAKE_FACTORS else Scaled(whole, (), False)
    rule, unmasked = scale.rule, without_masks(scale.rule)
    of_factor = printed(scale.factor, dialect, "f")
    lines_ = printed(body.instructions, dialect, coarse=body.coarse)
    of_query = printed(queries.x, dialect, "q")
    values = {**of_query.values, **lines_.values}

    def operand(index: int) -> Operand:
        return operand_of(declared, index, layout, dialect, values.get(index, ""))

    operands = tuple(map(operand, range(len(body.operands))))

    def computed(contraction: Contraction) -> Computed | None:
        if not contraction.w:
            return None
        read = {index: operands[index] for index in contraction.weight}
        return Computed(contraction.w, read, _shared(contraction.w, read), contraction.dtype)

    rows = {p for p, i in enumerate(body.instructions) if i.row}
    stores = [i.attr for i in body.instructions if i.op == "store"]
    loads = [i.attr for i in body.instructions if i.op in ("load", "iota")]

    def reduced(kind: str) -> tuple[str, ...]:
        return tuple(lines_.names[p] for p, i in enumerate(body.instructions) if (i.op, i.attr) == ("reduce", kind))

    return Attention(
        **frame_attributes(kernel, layout, declared, operands, probabilities.dtype, dialect),
        factor_lines=tuple(of_factor.lines.values()),
        factor=of_factor.names[len(scale.factor) - 1] if scale.factor else "",
        linear=scale.linear,
        query=tuple(operands[i.attr] for i in queries.x if i.op in ("load", "iota")),
        query_lines=tuple(of_query.lines.values()),
        query_value=of_query.names[len(queries.x) - 1],
        key=operands[queries.weight[0]],
        value=operands[probabilities.weight[0]],
        computed_key=computed(queries),
        computed_value=computed(probabilities),
        key_dtype=queries.dtype,
        value_dtype=probabilities.dtype,
        rule=rule_of(rule, (len(rule) - 1,), of_scores(dialect), operand),
        unmasked=rule_of(unmasked, (len(unmasked) - 1,), of_scores(dialect), operand),
        masked=bool(masks_of(rule)),
        row_loads=tuple(operands[index] for index in loads if body.operands[index].row),
        row_lines=tuple(line for p, line in lines_.lines.items() if p in rows),
        loads=tuple(operands[index] for index in loads if not body.operands[index].row),
        lines=tuple(line for p, line in lines_.lines.items() if p not in rows),
        row_stores=tuple(operands[index] for index in stores if body.operands[index].row),
        stores=tuple(operands[index] for index in stores if not body.operands[index].row),
        row_maxima=reduced("max"),
        row_sums=reduced("sum"),
    )


render = renderer(NAME, "jitgen.families.attention.forward", parameters, context)


def _shared(instructions: Sequence[Instruction], operands: Mapping[int, Operand]) -> frozenset[int]:
    """Computes ``Computed.shared``."""
    shared: set[int] = set()
    for position, instruction in enumerate(instructions):
        of_key = instruction.op not in ("load", "iota", "gather") or operands[instruction.attr].kind == "key"
        if of_key and shared.issuperset(instruction.args):
            shared.add(position)
    return frozenset(shared)


def bounds(body: Body, layout: Layout, known: Mapping[int, Ends], words: Words) -> Bounds:
    """Computes the bounds of the rule; see ``bounds_of``."""
    rule = narrowed_rule(body, layout)
    return bounds_of(rule, known, words)
