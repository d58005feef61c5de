"""Prints the instructions of a body: a name for every value, and a line for every instruction that computes one.

It is the same for every family and dialect. The family's template loads operands before these lines and stores results
after them.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jitgen.codegen.dialect import Dialect
from jitgen.codegen.environment import user_mark
from jitgen.ir.body import Instruction

Built = tuple[dict[str, Any], dict[str, Any]]
"""What a family's ``build`` for a dialect returns: the context of its template, and the options of ``KernelSource``."""

_AT_HAND = (
    *("load", "iota", "reduce", "blocked", "scan", "state", "sort", "merge", "limited", "taken"),
    *("scalar", "contract", "launch"),
)
"""Operations whose value exists before the first line."""


@dataclass(frozen=True)
class Source:
    """Describes the memory from which a gather is printed.

    Attributes:
        pointer: the expression of the memory's address.
        at: the expression of the element's offset from there by the coordinates alone, in elements.
        terms: (size, stride) of each gathered dimension, as expressions.
        dtype: in memory.
        mask: in Triton, the elements that are in range by their coordinates.
    """

    pointer: str
    at: str
    terms: tuple[tuple[str, str], ...]
    dtype: str
    mask: str = ""


@dataclass(frozen=True)
class Line:
    """Holds a printed instruction.

    Attributes:
        text: the line that defines the value, in the dialect.
        mark: the mark of the user's line (``environment.user_mark``).
        value: the name of the value.
        type: the dialect's name of its type.
        dtype: its compute dtype.
        expression: the right-hand side of ``text``.
        position: the instruction's position in its body.
    """

    text: str
    mark: str
    value: str
    type: str
    dtype: str
    expression: str
    position: int


@dataclass(frozen=True)
class Printed:
    """Holds the printed instructions of a body.

    Attributes:
        lines: the lines, by the positions of their instructions, in order.
        names: the name of every value, by position.
        values: for each operand that is loaded, gathered or stored, by its index, the name of the value.
        scalars: the numeric arguments that are used: name to type name.
    """

    lines: dict[int, Line]
    names: dict[int, str]
    values: dict[int, str]
    scalars: dict[str, str]


def printed(
    instructions: Sequence[Instruction],
    dialect: Dialect,
    prefix: str = "v",
    coarse: bool = False,
    sources: Mapping[int, Source] | None = None,
) -> Printed:
    """Prints ``instructions`` in ``dialect``.

    Args:
        prefix: what the names of values begin with.
        coarse: whether every result is a float of 16 bits or fewer; see ``Dialect.coarse``.
        sources: of the operands that are gathered, by their numbers.
    """
    result = Printed({}, {}, {}, {})
    dtypes = {position: instruction.dtype for position, instruction in enumerate(instructions)}
    gelus = _gelus(instructions) if coarse and dialect.coarse_gelu else {}
    within_gelus = {position for gelu in gelus.values() for position in gelu.within}
    for position, instruction in enumerate(instructions):
        if position in within_gelus:
            continue
        op, type_name = instruction.op, dialect.types[instruction.dtype]
        if op in ("store", "scatter"):
            operand = instruction.attr if op == "store" else instruction.attr[0]
            result.values[operand] = result.names[instruction.args[0]]
            continue
        # Numeric arguments and accumulators of products are there before the lines.
        there = {"scalar": dialect.scalar, "contract": "acc{0}"}.get(op)
        name = there.format(instruction.attr) if there else f"{prefix}{position}"
        result.names[position] = name
        if op in ("load", "iota"):
            result.values[instruction.attr] = name
        elif op == "scalar":
            result.scalars[name] = type_name
        elif op == "gather":
            result.values[instruction.attr] = name
        if op not in _AT_HAND:
            if op == "gather":
                indices = [result.names[argument] for argument in instruction.args]
                expression = _gathered((sources or {})[instruction.attr], indices, dialect)
            elif position in gelus:
                expression = dialect.coarse_gelu.format(result.names[gelus[position].argument])
            else:
                expression = dialect.expression(instruction, result.names, dtypes, coarse)
            text, mark = dialect.assign(type_name, name, expression), user_mark(instruction.location)
            result.lines[position] = Line(text, mark, name, type_name, instruction.dtype, expression, position)
    return result


@dataclass(frozen=True)
class _Gelu:
    """Says that a value is GELU of another.

    Attributes:
        argument: the position of that.
        within: the positions of what only this GELU reads: half of the argument, that times -sqrt(1/2), erfc of it, and
            constants.
    """

    argument: int
    within: frozenset[int]


def _gelus(instructions: Sequence[Instruction]) -> dict[int, _Gelu]:
    """Finds the float32 values that are GELU as ``trace/activations.py`` writes it, x / 2 * erfc(-sqrt(1/2) x)."""
    readers = Counter(argument for instruction in instructions for argument in instruction.args)
    gelus: dict[int, _Gelu] = {}
    for position, instruction in enumerate(instructions):
        if instruction.op != "mul" or instruction.dtype != "float32":
            continue
        half, tail = sorted(instruction.args, key=lambda argument: instructions[argument].op == "erfc")
        if instructions[tail].op != "erfc":
            continue
        (scaled,) = instructions[tail].args
        argument = _scaled(instructions, half, 0.5)
        same = argument is not None and argument == _scaled(instructions, scaled, -math.sqrt(0.5))
        if argument is None or not same or any(readers[own] > 1 for own in (half, scaled, tail)):
            continue
        constants = {*instructions[half].args, *instructions[scaled].args} - {argument}
        own = {half, scaled, tail, *(constant for constant in constants if readers[constant] == 1)}
        gelus[position] = _Gelu(argument, frozenset(own))
    return gelus


def _scaled(instructions: Sequence[Instruction], position: int, factor: float) -> int | None:
    """Returns the position of what the value at ``position`` is ``factor`` times, to a float32's precision."""
    if instructions[position].op != "mul":
        return None
    for value, constant in (instructions[position].args, instructions[position].args[::-1]):
        if instructions[constant].op == "const" and math.isclose(instructions[constant].attr, factor, rel_tol=1e-7):
            return value
    return None


def _gathered(source: Source, indices: Sequence[str], dialect: Dialect) -> str:
    """Prints the element of ``source`` that ``indices`` choose."""
    chosen = chosen_offset(indices, source.terms, dialect)
    offset = " + ".join(term for term in (source.at if source.at != "0" else "", chosen) if term)
    return dialect.gather(source.pointer, offset, source.dtype, source.mask)


def chosen_offset(indices: Sequence[str], terms: Sequence[tuple[str, str]], dialect: Dialect) -> str:
    """Prints the offset that ``indices`` make along dimensions of which ``terms`` has (size, stride) each."""
    offsets = []
    for index, (size, stride) in zip(indices, terms, strict=True):
        within = dialect.within.format(index, size)
        offsets.append(within if stride == "1" else f"{within} * {stride}")
    return " + ".join(offsets)


def fields(value: Any) -> dict[str, Any]:
    """Returns the attributes and properties of a context object, as a dict for a template's context."""
    names = [field.name for field in dataclasses.fields(value)]
    names += [name for name, member in inspect.getmembers(type(value)) if isinstance(member, property)]
    return {name: getattr(value, name) for name in names}
