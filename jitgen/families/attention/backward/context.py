"""What the templates of attention's backward read: operands by role, products, and what is computed over a tile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Line, Printed, printed
from jitgen.families.attention.backward.launch import integer_names
from jitgen.families.attention.backward.layout import Layout, is_tile, results_of, stores_of
from jitgen.families.attention.rule.bounds import Bounds, Ends, Words, masks_of, vanishing_of, without_conditions
from jitgen.families.attention.rule.narrow import narrowed
from jitgen.ir.body import Body, Instruction, compute_dtype, identity_of
from jitgen.ir.ops import INTS
from jitgen.ir.program import Kernel


@dataclass(frozen=True)
class Operand:
    """One operand.

    Attributes:
        index: among the body's operands.
        role: ``"left"``, ``"right"``, ``"value"``, ``"score"``, ``"load"``, ``"iota"`` or ``"store"``.
        kind: of its strides; see ``Layout.operands``.
        dtype, storage, type: its dtype, that in memory in the dialect, and that of its value.
        value: the name of its value; of operands that no line reads, empty.
        batch, summed, own: strides, which are parameters.
        pointer: the parameter; None for an index, whose first value is the parameter ``offset``.
    """

    index: int
    role: str
    kind: str
    dtype: str
    storage: str
    type: str
    value: str
    batch: tuple[str, ...]
    summed: tuple[str, ...]
    own: tuple[str, str]
    pointer: str | None
    offset: str

    @property
    def is_integer(self) -> bool:
        return self.dtype in INTS


@dataclass(frozen=True)
class Product:
    """A product over a tile: ``accumulator`` [rows, streamed] is ``left`` [rows, depth] times the transposed ``right``
    [streamed, depth]."""

    number: int
    left: Operand
    right: Operand
    depth: str
    dtype: str
    precision: str
    accumulator: str


@dataclass(frozen=True)
class Result:
    """A result: the sum of a function [rows, streamed] times ``value`` [streamed, width].

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
class Tile:
    """What is computed over a tile of products.

    Attributes:
        operands: what it reads.
        lines: its statements, of the accumulators of products.
        levels: for each of these, what its value depends on: ``"task"``, ``"row"``, ``"key"`` or ``"both"``.
        values: for each result, the name of its function.
        instructions, names, roots: what the lines are printed from, and where the functions are in it.
    """

    operands: tuple[Operand, ...]
    lines: tuple[Line, ...]
    levels: tuple[str, ...]
    values: tuple[str, ...]
    instructions: tuple[Instruction, ...]
    names: Mapping[int, str]
    roots: tuple[int, ...]


@dataclass(frozen=True)
class Backward:
    """The kernel, as all dialects read it.

    Attributes:
        title: shape and operands in words.
        operands: all of them, in the order of the body.
        products, results: of a tile.
        tile: what is computed over one; ``unmasked`` the same where no mask hides anything.
        masked: whether the two differ.
        integers, scalars: parameters.
        accumulator: the dialect's type of sums.
    """

    title: str
    operands: tuple[Operand, ...]
    products: tuple[Product, ...]
    results: tuple[Result, ...]
    tile: Tile
    unmasked: Tile
    masked: bool
    integers: tuple[str, ...]
    scalars: tuple[tuple[str, str], ...]
    batch: tuple[str, ...]
    summed: tuple[str, ...]
    accumulator: str


def functions_of(body: Body, layout: Layout) -> list[tuple[Instruction, ...]]:
    """The instructions of the function of each result."""
    found = [body.contractions[number].x for number in results_of(body)]
    return found if layout.wide else [narrowed(each, body.operands) for each in found]


def merged(functions: Sequence[Sequence[Instruction]]) -> tuple[tuple[Instruction, ...], tuple[int, ...]]:
    """``functions`` as one sequence in which nothing is computed twice, and where the last of each is."""
    found: list[Instruction] = []
    known: dict[tuple[object, ...], int] = {}
    roots = []
    for function in functions:
        at: list[int] = []
        for instruction in function:
            moved = replace(instruction, args=tuple(at[argument] for argument in instruction.args))
            key = identity_of(moved)
            if key not in known:
                known[key] = len(found)
                found.append(moved)
            at.append(known[key])
        roots.append(at[-1])
    return tuple(found), tuple(roots)


def context(kernel: Kernel, layout: Layout, dialect: Dialect) -> Backward:
    """The context of ``kernel`` in ``dialect``."""
    (body,) = kernel.bodies
    functions = functions_of(body, layout)
    found = printed(body.instructions, dialect, coarse=body.coarse)

    def operand(index: int, value: str = "", type_name: str = "") -> Operand:
        source = body.operands[index]
        strides = tuple(f"s{index}_{dim}" for dim in range(layout.batch + layout.summed + 2))
        return Operand(
            index=index,
            role=source.kind,
            kind=layout.operands[index],
            dtype=source.dtype,
            storage=dialect.storage_types[source.dtype],
            type=type_name or dialect.types[compute_dtype(source.dtype)],
            value=value,
            batch=strides[: layout.batch],
            summed=strides[layout.batch : -2],
            own=(strides[-2], strides[-1]),
            pointer=f"p{index}" if source.buffer is not None else None,
            offset=f"o{index}" if source.buffer is None else "",
        )

    def tile(functions: Sequence[Sequence[Instruction]]) -> Tile:
        instructions, roots = merged(functions)
        text = printed(instructions, dialect, "s")
        types = {i.attr: dialect.types[i.dtype] for i in instructions if i.op in ("load", "iota")}
        kinds = {index: layout.operands[index] for index in types}
        levels = _levels(instructions, kinds)
        return Tile(
            operands=tuple(operand(index, text.values[index], kind) for index, kind in types.items()),
            lines=tuple(text.lines.values()),
            levels=tuple(levels[position] for position in text.lines),
            values=tuple(text.names[root] for root in roots),
            instructions=instructions,
            names=text.names,
            roots=roots,
        )

    tiles = [number for number in range(len(body.contractions)) if is_tile(body, number)]
    kinds = ", ".join(f"{o.kind} {o.dtype} {kind}" for o, kind in zip(body.operands, layout.operands, strict=True))
    return Backward(
        title=f"({', '.join(map(str, body.shape))}): {kinds}",
        operands=tuple(operand(index, found.values.get(index, "")) for index in range(len(body.operands))),
        products=tuple(
            Product(
                number=number,
                left=operand(_left_of(body, position)),
                right=operand(body.contractions[position].weight[0]),
                depth=f"depth{number}",
                dtype=body.contractions[position].dtype,
                precision=body.contractions[position].precision,
                accumulator=f"acc{position}",
            )
            for number, position in enumerate(tiles)
        ),
        results=tuple(_results(body, layout, found, operand)),
        tile=tile(functions),
        unmasked=tile([without_conditions(function) for function in functions]),
        masked=any(masks_of(function) for function in functions),
        integers=tuple(name for name, *_ in integer_names(kernel, layout)),
        scalars=tuple((f"a{i}", dialect.types[dtype]) for i, (_, dtype) in enumerate(kernel.scalars)),
        batch=tuple(f"b{dim}" for dim in range(layout.batch)),
        summed=tuple(f"g{dim}" for dim in range(layout.summed)),
        accumulator=dialect.types[compute_dtype(body.contractions[0].dtype)],
    )


def _left_of(body: Body, position: int) -> int:
    (load,) = body.contractions[position].x
    return int(load.attr)


def _results(body: Body, layout: Layout, found: Printed, operand: Callable[..., Operand]) -> list[Result]:
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
                width=f"width{number}",
                dtype=contraction.dtype,
                precision=contraction.precision,
                accumulator=f"acc{position}",
                loads=tuple(operand(index, found.values[index]) for index in loads),
                lines=tuple(line for p, line in found.lines.items() if p in mine),
                stores=tuple(operand(i, found.values[i]) for i in stores_of(body)[number]),
            )
        )
    return results


def _needed(body: Body) -> dict[int, set[int]]:
    """For each result, the positions of the instructions that its stores are computed from."""
    found: dict[int, set[int]] = {}
    for number, stores in zip(results_of(body), stores_of(body), strict=True):
        needed = {p for p, i in enumerate(body.instructions) if i.op == "store" and i.attr in stores}
        for position in reversed(range(len(body.instructions))):
            if position in needed:
                needed.update(body.instructions[position].args)
        found[number] = needed
    return found


def _levels(instructions: Sequence[Instruction], kinds: Mapping[int, str]) -> list[str]:
    """What each instruction depends on; see ``Tile.levels``.

    Args:
        kinds: of the operands that are read, by their indices.
    """
    found: list[str] = []
    for instruction in instructions:
        own = {"both"} if instruction.op == "contract" else {found[argument] for argument in instruction.args}
        if instruction.op in ("load", "iota"):
            own = {kinds[instruction.attr]}
        own -= {"task"}
        found.append("both" if len(own) > 1 else next(iter(own), "task"))
    return found


def bounds(tile: Tile, known: Mapping[int, Ends], words: Words) -> Bounds:
    """The bounds of what is computed over a tile; see ``vanishing_of``."""
    scalars = {position: f"a{i.attr}" for position, i in enumerate(tile.instructions) if i.op == "scalar"}
    return vanishing_of(tile.instructions, tile.roots, known, scalars, words)
