"""Builds the context of ``templates/attention_backward/attention_backward.cu.j2``: a struct of operands that
``attention_backward.cuh`` walks.

Of what a tile computes, the values of one row are words: those of a streamed row are computed by the warps that copy,
those of a row of the block once by the threads that have it. See ``pairs.py`` for what pairs of rows compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Built, Printed, printed
from jitgen.families.attention.backward.context import Backward, Result, bounds, functions_of, merged
from jitgen.families.attention.backward.layout import Layout
from jitgen.families.attention.backward.pairs import BOTH, Rule, rule_of
from jitgen.families.attention.backward.wgmma import Roles, WgmmaSchedule, left_operands, roles, tile_operands
from jitgen.families.attention.rule.bounds import tile_ends, without_conditions
from jitgen.families.attention.rule.context import Operand, numbered, of_scores
from jitgen.families.attention.rule.cuda import WORDS, coordinates, parameters_of, run
from jitgen.families.attention.rule.layout import is_tile, results_of
from jitgen.ir.body import Body, behind
from jitgen.ir.program import Kernel
from jitgen.kernel.printed import indices, sum_of
from jitgen.schedule.declared import Member

PAIR_OF_WORDS = ("int64", "float64")
"""Dtypes of eight bytes."""


def rules(body: Body, layout: Layout, role: Roles) -> tuple[Rule, Rule]:
    """Returns the rules of a tile without masks and with them. Results get a factor after their tiles only where both
    rules have the same one: results are sums over tiles of either kind."""
    functions = functions_of(body, layout)
    kinds = dict(enumerate(layout.operands))

    def rule(computed: Sequence[Any], factored: bool) -> Rule:
        instructions, roots = merged(computed)
        at = dict(zip(results_of(body), roots, strict=True))
        results = [at[number] for number in role.results]
        first = results.pop() if role.early else None
        return rule_of(instructions, first, results, role.products[0], kinds, factored)

    def both(factored: bool) -> tuple[Rule, Rule]:
        return rule([without_conditions(function) for function in functions], factored), rule(functions, factored)

    narrow = body.contractions[role.products[0]].dtype == "float16"
    whole, masked = both(not narrow)
    return (whole, masked) if _factor_of(whole) == _factor_of(masked) else both(False)


def _factor_of(rule: Rule) -> object:
    return None if rule.factor is None else _identity(rule, rule.factor)


def words_of(body: Body, layout: Layout, role: Roles) -> tuple[int, int]:
    """Counts the words of a row of the block, and of a tile."""
    both = rules(body, layout, role)
    return _count(_positions(both, "row")), _count(_positions(both, "key"))


def _positions(both: tuple[Rule, Rule], level: str) -> list[tuple[Rule, int]]:
    """Lists the values that are words: those that either rule reads, each with the rule that says how it is
    computed."""
    words: dict[tuple[object, ...], tuple[Rule, int]] = {}
    for rule in both:
        for position in rule.words(level):
            words.setdefault(_identity(rule, position), (rule, position))
    return list(words.values())


def _identity(rule: Rule, position: int) -> tuple[object, ...]:
    """Returns a key that decides the value at ``position``, in whichever rule it is."""
    instruction = rule.instructions[position]
    return (
        instruction.op,
        instruction.dtype,
        str(instruction.attr),
        tuple(_identity(rule, argument) for argument in instruction.args),
    )


def _count(words: Sequence[tuple[Rule, int]]) -> int:
    return sum(2 if rule.instructions[p].dtype in PAIR_OF_WORDS else 1 for rule, p in words)


def build(kernel: Kernel, layout: Layout, schedule: WgmmaSchedule, backward: Backward, dialect: Dialect) -> Built:
    """Builds template context and source options; see ``kernel/render.py``."""
    (body,) = kernel.bodies
    role = roles(body, layout)
    lefts = zip(left_operands(body, role), schedule.block_copied, strict=True)
    rights = zip(tile_operands(body, role), schedule.tile_copied, strict=True)
    elements = [
        [(number, backward.operands[index], copied) for number, (index, copied) in enumerate(side) if index is not None]
        for side in (lefts, rights)
    ]
    of_maps = [operand for side in elements for _, operand, copied in side if copied]
    parameters = parameters_of(backward, of_maps, schedule.wide)
    maps = iter(parameters["map_names"])
    block_elements, tile_elements = (
        [_elements(operand, number, next(maps) if copied else "") for number, operand, copied in side]
        for side in elements
    )
    tile_bounds = bounds(backward.rule, tile_ends(backward.rule.operands, dialect.name, forward=False), WORDS)
    writer = _Writer(backward, layout, of_scores(dialect), rules(body, layout, role), role)
    ordered = [backward.results[results_of(body).index(number)] for number in role.results]
    first_of_tile = [number for number in range(len(body.contractions)) if is_tile(body, number)]
    depths = [backward.products[first_of_tile.index(number)].depth for number in role.products]
    widths = [result.width for result in ordered]
    slots = [*depths, "0"][:2]
    slots += [widths[number] if slot == 2 + number else "0" for number, slot in enumerate(role.slots)]
    return {
        **parameters,
        "element": dialect.storage_types[body.contractions[role.products[0]].dtype],
        "members": _config(schedule, backward, role),
        "heads": " * ".join(backward.groups) or "1",
        "task_indices": [*backward.task_indices("number"), *indices(backward.groups, "head", "y", "/")],
        "bases": [{"name": o.at, "expression": _base(o)} for o in backward.operands],
        "of_task": [
            {"name": o.only, "type": o.type, "expression": o.element(f"task.{o.at}")}
            for o in backward.rule.reads("task")
            if o.pointer
        ],
        "row_ends": [_ends(o, "a", 0) for o in backward.ends(tile_bounds, "row")],
        "key_ends": [_ends(o, "b", 1) for o in backward.ends(tile_bounds, "key")],
        "task_ends": [
            {"index": o.index, "name": o.only if o.pointer else o.at}
            for o in backward.ends(tile_bounds, "task")
            if o.is_integer
        ],
        "bounds": tile_bounds,
        "tile_words": writer.staged("key"),
        "block_words": writer.staged("row"),
        "rules": {"open": writer.rule(0), "masked": writer.rule(1)},
        "scores": f"acc{role.products[0]}",
        "gradients": f"acc{role.products[1]}" if len(role.products) > 1 else "unused",
        "block_elements": block_elements,
        "tile_elements": tile_elements,
        "columns": _choice(slots),
        "result_columns": _choice(widths),
        "factor": writer.factor(),
        "results": [_result(result, number, layout) for number, result in enumerate(ordered)],
    }, {"fmad": True}


def _choice(names: Sequence[str]) -> str:
    """Prints the one of ``names`` that the template parameter ``number`` chooses."""
    chosen = "".join(f"number == {number} ? {name} : " for number, name in enumerate(names[:-1]))
    return f"{chosen}{names[-1]}"


def _config(schedule: WgmmaSchedule, backward: Backward, role: Roles) -> list[Member]:
    """Returns the members of the Config of ``attention_backward.cuh``."""
    pairs = {"depth": (*schedule.depths, 0), "columns": (*schedule.columns, 0), "slot": (*schedule.slots, 1)}
    # Under most masks of indices the first keys are seen by most rows; results of keys read numbers of streamed rows.
    in_memory = {o.kind for o in backward.rule.operands if o.pointer and o.dtype == "float32"}
    return schedule.members(
        **{f"{name}{number}": values[number] for name, values in pairs.items() for number in (0, 1)},
        products=len(schedule.depths),
        block_copied=_bits(schedule.block_copied),
        tile_copied=_bits(schedule.tile_copied),
        early=role.early,
        masked=backward.masked,
        first_are_long="key" in in_memory and "row" not in in_memory,
    )


def _bits(flags: Sequence[bool]) -> int:
    return sum(1 << number for number, flag in enumerate(flags) if flag)


def _base(operand: Operand) -> str:
    """Prints the offset of the first element of a task with indices ``z0`` ... and ``y0`` ..."""
    if operand.role == "store":
        return operand.task_base
    names = [*numbered("z", operand.batch), *numbered("y", operand.groups)]
    return sum_of([operand.offset], [*operand.batch, *operand.groups], names)


def _ends(operand: Operand, where: str, own: int) -> dict[str, Any]:
    at = f"task.{operand.at} + {where} * {operand.own[own]}"
    names = {"index": operand.index, "name": operand.only}
    return names | {"expression": operand.element(at), "is_index": not operand.pointer}


def _elements(operand: Operand, number: int, map_name: str) -> dict[str, Any]:
    """Describes an operand of products: the coordinates of its matrix in its tensor map, or the expression of an
    element. ``map_name`` is empty where no tensor map copies it."""
    steps = [(step, f"task.z{dim}") for dim, step in enumerate(operand.batch)]
    steps += [(step, f"task.y{dim}") for dim, step in enumerate(operand.groups)]
    at = f"task.{operand.at} + row * {operand.own[0]} + column * {operand.own[1]}"
    return {
        "number": number,
        "is_copied": bool(map_name),
        "map": map_name,
        "coordinates": coordinates(steps),
        "element": f"{operand.pointer}[{at}]",
    }


def _result(result: Result, number: int, layout: Layout) -> dict[str, Any]:
    return {
        "number": number,
        "accumulator": result.accumulator,
        "loads": [_run(o, layout) for o in result.loads],
        "lines": result.lines,
        "stores": [_run(o, layout) for o in result.stores],
    }


def _run(operand: Operand, layout: Layout) -> dict[str, Any]:
    step = "1" if operand.kind == "contiguous" else operand.own[1]
    return run(operand, f"task.{operand.at} + a * {operand.own[0]} + e * {step}", step, layout.unit)


class _Writer:
    """Writes the two rules, whose words are the same.

    Attributes:
        both: the rules: without masks, and with them.
        words: by level, the values that are words and the first word of each.
    """

    def __init__(self, backward: Backward, layout: Layout, dialect: Dialect, both: tuple[Rule, Rule], role: Roles):
        self.backward, self.dialect, self.both, self.role = backward, dialect, both, role
        self.operands = {o.index: o for o in backward.operands}
        self.printed: list[Printed] = [printed(rule.instructions, dialect, "s") for rule in both]
        self.words: dict[str, dict[tuple[object, ...], tuple[Rule, int, int]]] = {}
        for level in ("row", "key"):
            number, first_words = 0, {}
            for rule, position in _positions(both, level):
                first_words[_identity(rule, position)] = rule, position, number
                number += 2 if rule.instructions[position].dtype in PAIR_OF_WORDS else 1
            self.words[level] = first_words

    def staged(self, level: str) -> dict[str, Any]:
        """Describes how the words of a row are computed: ``loads``, ``lines`` and the ``words``."""
        where = "a" if level == "row" else "b"
        loads: dict[str, dict[str, str]] = {}
        lines, words = {}, []
        for number, rule in enumerate(self.both):
            mine = [(p, first) for r, p, first in self.words[level].values() if r is rule]
            prefix = "" if number == 0 else "m"
            texts = self.printed[number] if number == 0 else printed(rule.instructions, self.dialect, "m")
            for position in sorted(behind(rule.instructions, [p for p, _ in mine])):
                instruction, name = rule.instructions[position], texts.names[position]
                if instruction.op in ("load", "iota"):
                    loads[name] = self._load(self.operands[instruction.attr], instruction.dtype, name, where)
                elif position in texts.lines:
                    lines[prefix, position] = texts.lines[position]
            for position, first in mine:
                name, dtype = texts.names[position], rule.instructions[position].dtype
                words += [{"number": first + n, "bits": text} for n, text in enumerate(_bits_of(name, dtype))]
        return {"loads": list(loads.values()), "lines": list(lines.values()), "words": words}

    def _load(self, operand: Operand, dtype: str, name: str, where: str = "") -> dict[str, str]:
        """Describes the value of an operand at row ``where`` of its side, or at a pair of rows."""
        kind = self.dialect.types[dtype]
        if operand.kind == "task":
            expression = f"task.{operand.only if operand.pointer else operand.at}"
            return {"type": kind, "value": name, "expression": f"{kind}({expression})"}
        steps = {"row": [("a", 0)], "key": [("b", 1)], "both": [("a", 0), ("b", 1)]}[operand.kind]
        at = " + ".join([f"task.{operand.at}", *(f"{row} * {operand.own[own]}" for row, own in steps)])
        return {"type": kind, "value": name, "expression": f"{kind}({operand.element(at)})"}

    def factor(self) -> dict[str, Any]:
        """Describes what sums of the first result are multiplied with: ``lines`` and a ``value``, which is empty for
        1."""
        rule, lines = self.both[0], self.printed[0]
        if rule.factor is None:
            return {"lines": [], "value": ""}
        positions = sorted(behind(rule.instructions, (rule.factor,)))
        return {"lines": [lines.lines[p] for p in positions if p in lines.lines], "value": lines.names[rule.factor]}

    def rule(self, number: int) -> dict[str, Any]:
        """Describes the two phases of one of the rules, the first of which returns the value ``kept``."""
        rule, lines = self.both[number], self.printed[number]
        last, *others = rule.second
        return {
            "kept": lines.names[rule.kept],
            "phases": [
                self._phase(number, rule.first_phase, rule.kept, rule.first, ends=False),
                self._phase(number, rule.second_phase, last, others[0] if others else None, ends=True),
            ],
        }

    def _phase(
        self, number: int, positions: Sequence[int], value: int, other: int | None, ends: bool
    ) -> dict[str, Any]:
        """Describes one phase.

        Args:
            ends: whether its value is the left operand of a product, and so zero where a row does not exist.
        """
        rule, texts = self.both[number], self.printed[number]
        words, loads, lines, pairs = [], [], [], False
        for position in positions:
            instruction, level = rule.instructions[position], rule.levels[position]
            name = texts.names[position]
            side = next((kind for kind in ("row", "key") if level == frozenset((kind,))), None)
            word = self.words[side].get(_identity(rule, position)) if side else None
            if side and word is not None:
                words.append(_word(name, instruction.dtype, side, word[2], self.dialect))
            elif instruction.op in ("load", "iota"):
                operand = self.operands[instruction.attr]
                if side is None or instruction.op == "iota":
                    loads.append(self._load(operand, instruction.dtype, name))
                    pairs |= level == BOTH and bool(operand.pointer)
            elif position in texts.lines and side is None:
                lines.append(texts.lines[position])
        return {
            "words": words,
            "loads": loads,
            "lines": lines,
            "pairs": pairs,
            "value": texts.names[value],
            "other": texts.names[other] if other is not None else "",
            "ends": ends,
        }


def _bits_of(name: str, dtype: str) -> list[str]:
    """Splits a value into words."""
    if dtype == "float32":
        return [f"uint32_t(__float_as_int({name}))"]
    if dtype in PAIR_OF_WORDS:
        bits = f"uint64_t(__double_as_longlong({name}))" if dtype == "float64" else f"uint64_t({name})"
        return [f"uint32_t({bits})", f"uint32_t({bits} >> 32)"]
    return [f"uint32_t({name})"]


def _word(name: str, dtype: str, level: str, first: int, dialect: Dialect) -> dict[str, str]:
    """Joins a value from its words."""
    words = "of_block" if level == "row" else "of_tile"
    kind, word = dialect.types[dtype], f"{words}[{first}]"
    if dtype == "float32":
        expression = f"__int_as_float(int({word}))"
    elif dtype in PAIR_OF_WORDS:
        bits = f"int64_t(uint64_t({words}[{first + 1}]) << 32 | {word})"
        expression = f"__longlong_as_double({bits})" if dtype == "float64" else bits
    else:
        expression = f"{kind}({word})"
    return {"type": kind, "value": name, "expression": expression}
