"""What the attention templates read: operands by role, and the lines of the query, of the rule and of the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jitgen.codegen.dialect import Dialect, Row
from jitgen.codegen.printing import Line, Printed, printed
from jitgen.families.attention.forward.launch import integer_names
from jitgen.families.attention.forward.layout import Layout
from jitgen.families.attention.forward.scales import Scaled, scaled
from jitgen.families.attention.rule.bounds import Bounds, Ends, Words, bounds_of, masks_of, without_masks
from jitgen.families.attention.rule.narrow import narrowed
from jitgen.ir.body import Body, Contraction, Instruction, compute_dtype
from jitgen.ir.ops import INTS
from jitgen.ir.program import Kernel

TAKE_FACTORS = ("cuda",)
"""Dialects whose templates multiply scores with a factor themselves, which the rule then does not."""
SCORE_ROWS: Mapping[str, Mapping[str, Row]] = {
    "cuda": {"tanh": {"float32": "jitgen::tanh_of_score({0})", "float": "jitgen::tanh({0})"}},
}
"""Rows of a dialect in place of its own where a score is computed, whose absolute error counts."""


@dataclass(frozen=True)
class Operand:
    """One operand.

    Attributes:
        index: among the body's operands.
        role: ``"query"``, ``"key"``, ``"value"``, ``"score"``, ``"load"`` or ``"store"``.
        kind: of its strides; see ``Layout.operands``.
        dtype, storage, type: its dtype, that in memory in the dialect, and that of its value.
        value: the name of its value; of operands that no line reads, empty.
        strides: parameters: along the batch, the packed dimensions, and its own two.
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
    packed: tuple[str, ...]
    own: tuple[str, str]
    pointer: str | None
    offset: str
    gathered: tuple[tuple[str, str], ...] = ()

    @property
    def is_integer(self) -> bool:
        return self.dtype in INTS


@dataclass(frozen=True)
class Rule:
    """The rule of scores.

    Attributes:
        operands: what it reads.
        lines: its statements, of the accumulator ``acc0``.
        levels: for each of these, what its value depends on: ``"task"``, ``"row"``, ``"key"`` or ``"both"``.
        value: the name of the score.
        scalars: run-time scalars: name to type.
        instructions, names, by_position: what the lines are printed from, the names of values, and the lines by the
            positions of instructions.
    """

    operands: tuple[Operand, ...]
    lines: tuple[Line, ...]
    levels: tuple[str, ...]
    value: str
    scalars: dict[str, str]
    instructions: tuple[Instruction, ...]
    names: dict[int, str]
    by_position: dict[int, Line]


@dataclass(frozen=True)
class Computed:
    """How an element of keys or values is computed, where these are no tensor.

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
class Attention:
    """The kernel, as all dialects read it.

    Attributes:
        title: shape and operands in words.
        operands: all of them, in the order of the body.
        factor: what the scores of ``rule`` are still to be multiplied with, computed by ``factor_lines``; empty for 1.
        linear: whether scores are accumulators and masks; see ``Scaled``.
        query: what an element of the query is computed from, ``query_lines`` and ``query_value``.
        key, value: the operands, or the first of those that they are computed from.
        computed_key, computed_value: how they are; None where they are tensors.
        key_dtype, value_dtype: of their elements.
        rule: of scores; ``unmasked`` the same where no mask hides anything.
        masked: whether the two differ.
        row_loads, row_lines: what is computed once for a row of results.
        loads, lines: what is computed for each element of it.
        row_stores, stores: results.
        tops, totals: names of a row's greatest score and of its sum.
        integers, scalars: parameters.
        accumulator: the dialect's type of sums.
    """

    title: str
    operands: tuple[Operand, ...]
    factor_lines: tuple[Line, ...]
    factor: str
    factor_scalars: dict[str, str]
    linear: bool
    query: tuple[Operand, ...]
    query_lines: tuple[Line, ...]
    query_value: str
    query_scalars: dict[str, str]
    key: Operand
    value: Operand
    computed_key: Computed | None
    computed_value: Computed | None
    key_dtype: str
    value_dtype: str
    rule: Rule
    unmasked: Rule
    masked: bool
    row_loads: tuple[Operand, ...]
    row_lines: tuple[Line, ...]
    loads: tuple[Operand, ...]
    lines: tuple[Line, ...]
    row_stores: tuple[Operand, ...]
    stores: tuple[Operand, ...]
    tops: tuple[str, ...]
    totals: tuple[str, ...]
    integers: tuple[str, ...]
    scalars: tuple[tuple[str, str], ...]
    batch: tuple[str, ...]
    packed: tuple[str, ...]
    accumulator: str


def rule_of(body: Body, layout: Layout) -> tuple[Instruction, ...]:
    """The instructions of the rule of scores."""
    rule = body.contractions[1].x
    return rule if layout.wide else narrowed(rule, body.operands)


def context(kernel: Kernel, layout: Layout, dialect: Dialect) -> Attention:
    """The context of ``kernel`` in ``dialect``."""
    (body,) = kernel.bodies
    queries, weights = body.contractions
    whole = rule_of(body, layout)
    scale = scaled(whole) if dialect.name in TAKE_FACTORS else Scaled(whole, (), False)
    of_scores = replace(dialect, rows={**dialect.rows, **SCORE_ROWS.get(dialect.name, {})})
    rule, unmasked = scale.rule, without_masks(scale.rule)
    of_factor = printed(scale.factor, dialect, "f")
    found = printed(body.instructions, dialect, coarse=body.coarse)
    of_query = printed(queries.x, dialect, "q")
    of_rule, of_unmasked = (printed(each, of_scores, "s", coarse=False) for each in (rule, unmasked))
    values = {**of_query.values, **found.values}

    def operand(index: int, value: str) -> Operand:
        source = body.operands[index]
        strides = tuple(f"s{index}_{dim}" for dim in range(layout.batch + layout.packed + 2))
        return Operand(
            index=index,
            role=source.kind,
            kind=layout.operands[index],
            dtype=source.dtype,
            storage=dialect.storage_types[source.dtype],
            type=dialect.types[compute_dtype(source.dtype)],
            value=value,
            batch=strides[: layout.batch],
            packed=strides[layout.batch : -2],
            own=(strides[-2], strides[-1]),
            pointer=f"p{index}" if source.buffer is not None else None,
            offset=f"o{index}" if source.buffer is None else "",
            gathered=tuple((f"n{index}_{dim}", f"c{index}_{dim}") for dim in range(source.gathered)),
        )

    operands = tuple(operand(index, values.get(index, "")) for index in range(len(body.operands)))

    def printed_rule(instructions: Sequence[Instruction], text: Printed) -> Rule:
        read = tuple(dict.fromkeys(i.attr for i in instructions if i.op in ("load", "iota")))
        types = {i.attr: dialect.types[i.dtype] for i in instructions if i.op in ("load", "iota")}
        mine = tuple(replace(operand(index, text.values[index]), type=types[index]) for index in read)
        levels = _levels(instructions, {each.index: each.kind for each in mine})
        return Rule(
            operands=mine,
            lines=tuple(text.lines.values()),
            levels=tuple(levels[position] for position in text.lines),
            value=text.names[len(instructions) - 1],
            scalars=dict(text.scalars),
            instructions=tuple(instructions),
            names=text.names,
            by_position=text.lines,
        )

    def computed(contraction: Contraction) -> Computed | None:
        if not contraction.w:
            return None
        read = {index: operands[index] for index in contraction.weight}
        return Computed(contraction.w, read, _shared(contraction.w, read), contraction.dtype)

    rows = {p for p, i in enumerate(body.instructions) if i.row}
    stores = [i.attr for i in body.instructions if i.op == "store"]
    loads = [i.attr for i in body.instructions if i.op in ("load", "iota")]
    kinds = ", ".join(f"{o.role} {o.dtype} {o.kind}" for o in operands)

    def reduced(kind: str) -> tuple[str, ...]:
        return tuple(found.names[p] for p, i in enumerate(body.instructions) if (i.op, i.attr) == ("reduce", kind))

    return Attention(
        title=f"({', '.join(map(str, body.shape))}): {kinds}",
        operands=operands,
        factor_lines=tuple(of_factor.lines.values()),
        factor=of_factor.names[len(scale.factor) - 1] if scale.factor else "",
        factor_scalars=dict(of_factor.scalars),
        linear=scale.linear,
        query=tuple(operands[i.attr] for i in queries.x if i.op in ("load", "iota")),
        query_lines=tuple(of_query.lines.values()),
        query_value=of_query.names[len(queries.x) - 1],
        query_scalars=dict(of_query.scalars),
        key=operands[queries.weight[0]],
        value=operands[weights.weight[0]],
        computed_key=computed(queries),
        computed_value=computed(weights),
        key_dtype=queries.dtype,
        value_dtype=weights.dtype,
        rule=printed_rule(rule, of_rule),
        unmasked=printed_rule(unmasked, of_unmasked),
        masked=bool(masks_of(rule)),
        row_loads=tuple(operands[index] for index in loads if body.operands[index].row),
        row_lines=tuple(line for p, line in found.lines.items() if p in rows),
        loads=tuple(operands[index] for index in loads if not body.operands[index].row),
        lines=tuple(line for p, line in found.lines.items() if p not in rows),
        row_stores=tuple(operands[index] for index in stores if body.operands[index].row),
        stores=tuple(operands[index] for index in stores if not body.operands[index].row),
        tops=reduced("max"),
        totals=reduced("sum"),
        integers=tuple(name for name, *_ in integer_names(kernel, layout)),
        scalars=tuple((f"a{i}", dialect.types[dtype]) for i, (_, dtype) in enumerate(kernel.scalars)),
        batch=tuple(f"b{dim}" for dim in range(layout.batch)),
        packed=tuple(f"g{dim}" for dim in range(layout.packed)),
        accumulator=dialect.types[compute_dtype(weights.dtype)],
    )


def _levels(instructions: Sequence[Instruction], kinds: Mapping[int, str]) -> list[str]:
    """What each instruction of a rule depends on; see ``Rule.levels``.

    Args:
        kinds: of the operands that it reads, by their indices.
    """
    found: list[str] = []
    for instruction in instructions:
        own = {"both"} if instruction.op == "contract" else {found[argument] for argument in instruction.args}
        if instruction.op in ("load", "iota"):
            own = {kinds[instruction.attr]}
        own -= {"task"}
        found.append("both" if len(own) > 1 else next(iter(own), "task"))
    return found


def _shared(instructions: Sequence[Instruction], operands: Mapping[int, Operand]) -> frozenset[int]:
    """See ``Computed.shared``."""
    shared: set[int] = set()
    for position, instruction in enumerate(instructions):
        of_key = instruction.op not in ("load", "iota", "gather") or operands[instruction.attr].kind == "key"
        if of_key and shared.issuperset(instruction.args):
            shared.add(position)
    return frozenset(shared)


def bounds(body: Body, layout: Layout, known: Mapping[int, Ends], words: Words) -> Bounds:
    """The bounds of the rule; see ``bounds_of``."""
    rule = rule_of(body, layout)
    scalars = {position: f"a{i.attr}" for position, i in enumerate(rule) if i.op == "scalar"}
    return bounds_of(rule, known, scalars, words)
