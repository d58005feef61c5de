"""Presents attention's backward to its templates: operands by role, products, and what is computed over a tile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Line, Printed, printed
from jitgen.families.attention.backward import NAME
from jitgen.families.attention.backward.layout import Layout, parameters, stores_of
from jitgen.families.attention.rule.bounds import Bounds, Ends, Words, masks_of, vanishing_of, without_conditions
from jitgen.families.attention.rule.context import Frame, Operand, Rule, frame_attributes, operand_of, rule_of
from jitgen.families.attention.rule.layout import is_tile, results_of
from jitgen.families.attention.rule.narrow import narrowed
from jitgen.ir.body import Body, Instruction, behind, identity_of
from jitgen.ir.program import Kernel
from jitgen.kernel.parameters import KernelParameters
from jitgen.kernel.render import renderer


@dataclass(frozen=True)
class Product:
    """Describes a product over a tile: ``accumulator`` [rows, streamed] is ``left`` [rows, depth] times the transposed
    ``right`` [streamed, depth]."""

    number: int
    left: Operand
    right: Operand
    depth: str
    dtype: str
    precision: str
    accumulator: str


@dataclass(frozen=True)
class Result:
    """Describes a result: the sum of a function [rows, streamed] times ``value`` [streamed, width].

    Attributes:
        number: among the results.
        shared: the number of the product whose right operand ``value`` is in memory; None where there is none.
        width: the parameter with its columns.
        dtype: to which the function is rounded.
        accumulator: the name of the sum in ``lines``.
        loads, lines, stores: what is computed of the sum.
    """

    number: int
    value: Operand
    shared: int | None
    width: str
    dtype: str
    precision: str
    accumulator: str
    loads: tuple[Operand, ...]
    lines: tuple[Line, ...]
    stores: tuple[Operand, ...]


@dataclass(frozen=True)
class Backward(Frame):
    """Presents the kernel as all dialects read it. Its ``rule`` has a value for each result: the function that is
    summed.

    Attributes:
        products, results: of a tile.
    """

    products: tuple[Product, ...]
    results: tuple[Result, ...]


def functions_of(body: Body, layout: Layout) -> list[tuple[Instruction, ...]]:
    """Returns the instructions of the function of each result."""
    functions = [body.contractions[number].x for number in results_of(body)]
    return functions if layout.wide else [narrowed(function) for function in functions]


def merged(functions: Sequence[Sequence[Instruction]]) -> tuple[tuple[Instruction, ...], tuple[int, ...]]:
    """Merges ``functions`` into one sequence in which nothing is computed twice; returns also where the last
    instruction of each is."""
    sequence: list[Instruction] = []
    known: dict[tuple[object, ...], int] = {}
    roots = []
    for function in functions:
        at: list[int] = []
        for instruction in function:
            moved = replace(instruction, args=tuple(at[argument] for argument in instruction.args))
            key = identity_of(moved)
            if key not in known:
                known[key] = len(sequence)
                sequence.append(moved)
            at.append(known[key])
        roots.append(at[-1])
    return tuple(sequence), tuple(roots)


def context(kernel: Kernel, layout: Layout, declared: KernelParameters, schedule: Any, dialect: Dialect) -> Backward:
    """Returns the context of ``kernel`` in ``dialect``."""
    (body,) = kernel.bodies
    functions = functions_of(body, layout)
    lines_ = printed(body.instructions, dialect, coarse=body.coarse)

    def operand(index: int, value: str = "") -> Operand:
        return operand_of(declared, index, layout, dialect, value)

    def rule(functions: Sequence[Sequence[Instruction]]) -> Rule:
        return rule_of(*merged(functions), dialect, operand)

    tiles = [number for number in range(len(body.contractions)) if is_tile(body, number)]
    operands = [operand(index, lines_.values.get(index, "")) for index in range(len(body.operands))]
    return Backward(
        **frame_attributes(kernel, layout, declared, operands, body.contractions[0].dtype, dialect),
        products=tuple(
            Product(
                number=number,
                left=operand(_left_of(body, position)),
                right=operand(body.contractions[position].weight[0]),
                depth=declared.name(f"depth{number}"),
                dtype=body.contractions[position].dtype,
                precision=body.contractions[position].precision,
                accumulator=f"acc{position}",
            )
            for number, position in enumerate(tiles)
        ),
        results=tuple(_results(body, layout, lines_, operand, declared)),
        rule=rule(functions),
        unmasked=rule([without_conditions(function) for function in functions]),
        masked=any(masks_of(function) for function in functions),
    )


render = renderer(NAME, "jitgen.families.attention.backward", parameters, context)


def _left_of(body: Body, position: int) -> int:
    (load,) = body.contractions[position].x
    return int(load.attr)


def _results(
    body: Body, layout: Layout, lines_: Printed, operand: Callable[..., Operand], declared: KernelParameters
) -> list[Result]:
    results = []
    needed = _needed(body)
    for number, position in enumerate(results_of(body)):
        contraction = body.contractions[position]
        mine = needed[position]
        loads = [i.attr for p, i in enumerate(body.instructions) if p in mine and i.op in ("load", "iota")]
        results.append(
            Result(
                number=number,
                value=operand(contraction.weight[0]),
                shared=layout.shared[number] if layout.shared[number] >= 0 else None,
                width=declared.name(f"width{number}"),
                dtype=contraction.dtype,
                precision=contraction.precision,
                accumulator=f"acc{position}",
                loads=tuple(operand(index, lines_.values[index]) for index in loads),
                lines=tuple(line for p, line in lines_.lines.items() if p in mine),
                stores=tuple(operand(i, lines_.values[i]) for i in stores_of(body)[number]),
            )
        )
    return results


def _needed(body: Body) -> dict[int, set[int]]:
    """Returns, for each result, the positions of the instructions that its stores are computed from."""
    positions: dict[int, set[int]] = {}
    for number, stores in zip(results_of(body), stores_of(body), strict=True):
        stored = [p for p, i in enumerate(body.instructions) if i.op == "store" and i.attr in stores]
        positions[number] = behind(body.instructions, stored)
    return positions


def bounds(rule: Rule, known: Mapping[int, Ends], words: Words) -> Bounds:
    """Computes the bounds of what is computed over a tile; see ``vanishing_of``."""
    return vanishing_of(rule.instructions, rule.roots, known, words)
