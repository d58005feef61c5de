"""The context of ``templates/cpp/reduction.cpp.j2``.

Rows are walked one by one, or, where neighbouring elements belong to neighbouring rows or rows are very short
(``schedule.rows`` above 1), in tiles of neighbours, with one accumulator for each row of a tile.

A value that costs much and that a later pass needs again is kept in a scratch row where the row is short enough for the
second-level cache, and computed again where it is not; a cheap one is always computed again. The second pass reads what
the first has brought into the cache, so it is then that the next row is fetched. Where something is kept, the last pass
of a row, which stores, is done together with the last but one of the next row, which computes: memory and processor
then work at the same time. Short rows are one block of fewer lanes each, and are walked several together
(``together.hpp``): what whole groups leave of a row is the end of one more group. Their results go past the cache
several rows at a time. Looking for NaN is left out where ``numbers.py`` can tell that no result changes by it.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Sequence
from typing import Any

from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Built, Line
from jitgen.families.layout import CPU_LANES, item_size
from jitgen.families.reduction.context import Pass, Reduction, RowContext, RowOperand, RowValues
from jitgen.families.reduction.layout import RowLayout
from jitgen.families.reduction.numbers import has_narrow_nan, is_exp_below, maxima_of_numbers
from jitgen.families.reduction.schedule import CPU_LONG, RowSchedule
from jitgen.ir.body import compute_dtype
from jitgen.ir.ops import OPS
from jitgen.ir.program import Kernel

BLOCK = 4096
"""Elements of a row that are walked at once: with its results and its scratch it fits the first-level cache."""
FETCHED_BYTES = 2**20
"""Of a row's operands, up to which the next row is fetched while this one is computed. What the second-level cache
cannot hold of it then waits in the next one, still far nearer than memory."""
FETCHED_BYTES_OF_ONE_PASS = 2**14
"""The same where there is one pass. In longer rows it is what comes ``AHEAD`` elements later that is fetched."""
AHEAD = 1024
"""Elements: about what a processor takes in while it waits for one line of memory. Of short rows it is the row that
far ahead that is fetched."""
COSTLY = 8
"""Operations from which on a value is kept rather than computed again: a function, not a few additions."""
LOAD_COSTS = {"float16": 6, "float8_e4m3fn": 8, "float8_e5m2": 8}
"""Operations to widen an element, where they are many: GCC has no vector conversion for these."""
GATHER_COST = 8

_KINDS = {
    "sum": "Sum",
    "prod": "Prod",
    "max": "Max",
    "min": "Min",
    "argmax": "ArgMax",
    "argmin": "ArgMin",
    "any": "Any",
    "all": "All",
}


def build(kernel: Kernel, layout: RowLayout, schedule: RowSchedule, rows: RowContext, dialect: Dialect) -> Built:
    """Template context and source options; see ``reduction/render.py``."""
    builder = _Builder(kernel, schedule, rows)
    # A group of a short row is one wide vector: of bfloat16, of which halves are taken, it would be put together from
    # two in memory, and what reads it there waits for both.
    return builder.context(), {"interleaved": True, "narrow": builder.short and builder.halved}


class _Builder:
    def __init__(self, kernel: Kernel, schedule: RowSchedule, rows: RowContext):
        (body,) = kernel.bodies
        self.instructions, self.rows = body.instructions, rows
        self.width, self.tiled, self.lanes = schedule.rows, schedule.rows > 1, schedule.vector
        self.row_loads = [o for o in rows.operands if o.role != "store" and o.kind in ("row", "broadcast")]
        self.short = self.lanes < CPU_LANES
        self.covered = self.short and self._is_covered()
        self.kept_place = "place + lane" if self.short else "start + i"
        self.kept: dict[str, tuple[str, str]] = self._kept() if schedule.kept else {}
        slots = itertools.count()
        of_numbers = {f"v{position}" for position in maxima_of_numbers(body.instructions)}
        self.reductions = [
            [_reduction(r, next(slots), r.result in of_numbers) for r in walk.reductions] for walk in rows.passes
        ]
        self.halved = not self.tiled and self._is_halved()
        self.narrow_nan = self.halved and has_narrow_nan(body)
        self.group = "GroupOfNarrowNan" if self.narrow_nan else "GroupOfHalves" if self.halved else "Group"
        self.coarse = body.coarse and not self.tiled
        self.fetched = self._fetched()
        self.row_values = [(o.type, o.value) for o in self.row_loads]
        for walk, reductions in zip(rows.passes, self.reductions, strict=True):
            self.row_values += [(line.type, line.value) for line in walk.before if not self._is_constant(line)]
            self.row_values += [(reduction["type"], reduction["result"]) for reduction in reductions]
        self.row_values += [(line.type, line.value) for line in rows.after if not self._is_constant(line)]
        self.of_rows = RowValues(self.instructions, self.row_values)

    def context(self) -> dict[str, Any]:
        rows = self.rows
        passes = [self._pass(walk, of) for walk, of in zip(rows.passes, self.reductions, strict=True)]
        streamed = [self._store(o) for walk in rows.passes for o in walk.stores if self._is_streamed(o)]
        outlets = [self._outlet(store) for store in streamed]
        scalars = [(kind, name) for name, kind in rows.scalars]
        scalar_arguments = [f"jitgen::with_narrow_nan({n})" if self.narrow_nan else n for n, _ in rows.scalars]
        fetched, beyond = (FETCHED_BYTES, 0) if len(passes) > 1 else (FETCHED_BYTES_OF_ONE_PASS, AHEAD)
        return {
            "tiled": self.tiled,
            "width": self.width,
            "lanes": self.lanes,
            "block": CPU_LONG if self.short else BLOCK,
            "short": self.short,
            "covered": self.covered,
            # Whether a short row's accumulators are its own until they are combined with other rows'. They stay in
            # registers then, but a copy of halves waits for them in memory, unless there is one pass only.
            "local": len(rows.passes) == 1 or not self.halved,
            "parameters": self._parameters(),
            "outer": list(rows.sizes),
            "walk_parameters": [" ".join(pair) for pair in (*self._row_parameters(), *scalars)],
            "walk_names": [name for _, name in (*self._row_parameters(), *scalars)],
            "walk_arguments": [*self._row_arguments(), *scalar_arguments],
            "row_parameters": [" ".join(pair) for pair in self._row_parameters()],
            "row_names": [name for _, name in self._row_parameters()],
            "row_arguments": list(self._row_arguments()),
            "scalar_parameters": "".join(f", {kind} {name}" for kind, name in scalars),
            "scalar_arguments": "".join(f", {argument}" for argument in scalar_arguments),
            "next_parameters": "".join(f", int64_t next{o.index}" for o in self.fetched),
            "next_arguments": "".join(f", fetches ? {o.strides[-1]} * ahead : {beyond}" for o in self.fetched),
            "fetched_elements": fetched // (sum(item_size(o.dtype) for o in self.fetched) or 1),
            "steps": [(f"t{o.index}", f"step{o.index}", _dense_step(o)) for o in rows.operands],
            "foldable": " && ".join(self._one_piece()),
            "dense": " && ".join(f"{o.strides[-1]} == {_dense_step(o)}" for o in rows.operands),
            "constants": [line for walk in rows.passes for line in walk.before if self._is_constant(line)],
            "row_values": self.row_values,
            "row_loads": [self._load(operand, False) for operand in self.row_loads],
            "passes": passes,
            "late": self._is_late(),
            "last_names": [name for _, name in passes[-1]["inputs"]],
            "reductions": [reduction for of_pass in self.reductions for reduction in of_pass],
            "after": self.of_rows.block(rows.after),
            "row_stores": [self._store(operand) for operand in rows.row_stores],
            "row_results": self.of_rows.read((), {operand.value for operand in rows.row_stores}),
            "streamed": streamed,
            "outlet_parameters": "".join(f", {kind}& {name}" for kind, name in outlets),
            "outlet_arguments": "".join(f", {name}" for _, name in outlets),
            "ahead": AHEAD,
            "kept": self._scratches(),
            "kept_bytes": self._kept_bytes(),
        }

    # ------------------------------------------------------------------------------------------------- parameters

    def _parameters(self) -> list[str]:
        """Of the entry, as the launcher passes them: what differs between calls of one shape comes first."""
        pointers = [f"{_pointer(o)} {o.pointer}" for o in self.rows.operands if o.pointer]
        scalars = [f"{kind} {name}" for name, kind in self.rows.scalars]
        integers = [f"int64_t {name}" for name in self.rows.integers]
        return [*pointers, *scalars, "int32_t threads", *integers, "int32_t streaming"]

    def _row_parameters(self) -> Iterator[tuple[str, str]]:
        """(type, name) of what says where a row, or a tile, lies."""
        for operand in self.rows.operands:
            yield _pointer(operand) if operand.pointer else "int64_t", _local(operand)
            if operand.kind == "strided":
                yield "int64_t", operand.inner
            if self.tiled:
                yield "int64_t", f"step{operand.index}"

    def _row_arguments(self) -> Iterator[str]:
        indices = [f"at.index[{dim}]" for dim in range(self.rows.outer)]
        if self.tiled:
            indices[-1] = "first"
        for operand in self.rows.operands:
            yield f"{operand.pointer} + {operand.base(indices)}" if operand.pointer else operand.base(indices)
            if operand.kind == "strided":
                yield f"{operand.inner} * folds" if self.tiled else operand.inner
            if self.tiled:
                yield operand.strides[-1]

    # ----------------------------------------------------------------------------------------------------- passes

    def _pass(self, walk: Pass, reductions: Sequence[dict[str, Any]]) -> dict[str, Any]:
        again = {operand.value for operand in walk.again} | {line.value for line in walk.repeated}
        needed = self._needed(walk, again)
        lines = sorted((*walk.lines, *walk.repeated), key=lambda line: line.position)
        lines = [line for line in lines if line.value in needed]
        loads = [o for o in (*walk.loads, *walk.again) if o.kind not in ("row", "broadcast") and o.value in needed]
        used = [line.position for line in lines if not (line.value in again and line.value in self.kept)]
        values = {reduction.value for reduction in walk.reductions} | {operand.value for operand in walk.stores}
        return {
            "number": walk.number,
            "cheap": self._is_cheap(walk),
            "fetched": self.fetched if walk.number == min(1, len(self.rows.passes) - 1) else [],
            "before": self.of_rows.block(walk.before),
            "inputs": self.of_rows.read(used, values),
            "loads": [self._load(operand, operand.value in again) for operand in loads],
            "lines": [self._line(line, line.value in again) for line in lines],
            "keeps": [
                {"value": name, "scratch": _scratch(name), "place": self.kept_place}
                for name in walk.keeps
                if name in self.kept
            ],
            "reductions": [reduction | {"taken": self._taken(reduction)} for reduction in reductions],
            "stores": [self._store(operand) for operand in walk.stores],
            "streamed": [self._store(operand) for operand in walk.stores if self._is_streamed(operand)],
        }

    def _needed(self, walk: Pass, again: Container[str]) -> set[str]:
        """The values of elements that a pass reads or computes: not what those that are kept were computed from."""
        stack = [reduction.value for reduction in walk.reductions] + [operand.value for operand in walk.stores]
        needed: set[str] = set()
        while stack:
            name = stack.pop()
            if name not in needed and name.startswith("v"):
                needed.add(name)
                if not (name in self.kept and name in again):
                    stack += [f"v{argument}" for argument in self.instructions[int(name[1:])].args]
        return needed

    def _load(self, operand: RowOperand, again: bool) -> dict[str, str]:
        place = self._place(operand)
        expression = f"{_local(operand)} + {place}"
        halves = f"{_local(operand)} + start" if self.halved and operand.kind == "contiguous" else ""
        if halves:
            expression = f"halves_{operand.value}.at(lane)"
        elif operand.pointer:
            expression = f"jitgen::load({_local(operand)}[{place}])"
        return {
            "type": operand.type,
            "value": operand.value,
            "halves": halves,
            "beside": _local(operand) if operand.pointer else "",
            "inner": operand.inner,
            "expression": self._or_kept(operand.value, expression, again),
        }

    def _line(self, line: Line, again: bool) -> dict[str, str]:
        expression = line.expression
        if is_exp_below(self.instructions, line.position):
            expression = expression.replace("exp(", "exp_below(")
        elif self.coarse and self._is_normalized(line.position):
            expression = expression.replace(" / ", " * (1.0f / ") + ")"
        expression = self._or_kept(line.value, expression, again)
        return {"type": line.type, "value": line.value, "expression": expression, "mark": line.mark}

    def _or_kept(self, name: str, expression: str, again: bool) -> str:
        return f"{_scratch(name)}[{self.kept_place}]" if again and name in self.kept else expression

    def _taken(self, reduction: dict[str, Any]) -> str:
        """An element as its reduction takes it: of the end of a short row, unless another group has it."""
        if not self.covered:
            return str(reduction["value"])
        element = "jitgen::Halves<decltype(size)>::element(lane)" if self.halved else "lane"
        return f"{reduction['value']}, those.has({element})"

    def _store(self, operand: RowOperand) -> dict[str, Any]:
        return {
            "index": operand.index,
            "local": _local(operand),
            "storage": operand.storage,
            "value": operand.value,
            "place": self._place(operand),
            "inner": operand.inner,
            "group": self.group,
            "past": "false" if self.short else f"output{operand.index}.past",
        }

    def _outlet(self, store: dict[str, Any]) -> tuple[str, str]:
        """(type, name) of what a thread keeps between rows of what it writes past the cache."""
        if self.short:
            return f"jitgen::Stage<{store['storage']}, block>", f"stage{store['index']}"
        return "jitgen::Seam", f"seam{store['index']}"

    def _place(self, operand: RowOperand) -> str:
        """Offset of an element from where its row begins (its tile, where rows are walked in tiles)."""
        element = "e" if self.tiled else "(start + i)"
        terms = [] if operand.inner == "0" else [element if operand.inner == "1" else f"{element} * {operand.inner}"]
        if self.tiled:
            terms.append(f"j * t{operand.index}")
        return " + ".join(terms) or "0"

    def _is_halved(self) -> bool:
        """Whether elements may come in another order than they lie in: where all are bfloat16 side by side."""
        alike = all(o.kind == "contiguous" and o.dtype == "bfloat16" for o in self._moving())
        return alike and not self._is_indexed()

    def _is_covered(self) -> bool:
        """Whether what whole groups leave of a short row may be taken by one more, which ends with the row.

        Where it is stored its results have to wait, and the first of equal elements must not be met last.
        """
        if not all(self._is_streamed(operand) for walk in self.rows.passes for operand in walk.stores):
            return False
        return not any(walk.stores and _finds_places(walk) for walk in self.rows.passes)

    def _one_piece(self) -> list[str]:
        """When rows of a dense tile lie in one piece, so that steps along them may be folded; nothing where they cannot
        be, as an index would not be known."""
        moving = self._moving()
        if self._is_indexed() or any(o.kind != "strided" or not o.pointer for o in moving):
            return []
        return [f"{o.inner} == inner" for o in moving]

    def _moving(self) -> list[RowOperand]:
        """The operands that are read or written element by element."""
        return [o for walk in self.rows.passes for o in (*walk.loads, *walk.stores) if o not in self.row_loads]

    def _is_indexed(self) -> bool:
        return any(map(_finds_places, self.rows.passes))

    def _fetched(self) -> list[RowOperand]:
        """What is read of every row anew: by the only pass, or by the first where a second leaves the memory idle.

        Short rows of one pass are read as they lie, one after another, which processors see by themselves.
        """
        if self.tiled or not self.rows.outer or (self.short and len(self.rows.passes) == 1):
            return []
        return [o for o in self.rows.passes[0].loads if o.kind == "contiguous" and o.pointer]

    def _is_late(self) -> bool:
        """Whether the last pass, which stores from what is kept, is left for the next row to do beside its computing:
        one waits for memory, the other for the processor."""
        last = self.rows.passes[-1]
        stores = bool(last.stores) and all(map(self._is_streamed, last.stores))
        return bool(self.kept) and stores and not self.short and not last.reductions and len(self.rows.passes) > 1

    def _is_streamed(self, operand: RowOperand) -> bool:
        return self.tiled or operand.kind == "contiguous"

    def _is_cheap(self, walk: Pass) -> bool:
        """Whether it only reduces, by few operations: then the accumulators' loads and stores are what it costs."""
        operations = sum(self._operations(line.position) for line in (*walk.lines, *walk.repeated))
        return not walk.stores and not _finds_places(walk) and operations < COSTLY

    def _is_normalized(self, position: int) -> bool:
        """Whether it is divided by a row's sum of such exponentials, whose reciprocal is as good: it is at least 1."""
        instruction = self.instructions[position]
        if instruction.op != "div":
            return False
        divisor = self.instructions[instruction.args[1]]
        return (divisor.op, divisor.attr) == ("reduce", "sum") and is_exp_below(self.instructions, divisor.args[0])

    def _is_constant(self, line: Line) -> bool:
        return self.instructions[line.position].op == "const"

    # ------------------------------------------------------------------------------------------------------ keeping

    def _kept(self) -> dict[str, tuple[str, str]]:
        """Values worth a scratch row (used by a later pass, and costly from what is kept so far): type and dtype."""
        kept: dict[str, tuple[str, str]] = {}
        for walk in self.rows.passes:
            types = {o.value: (o.type, compute_dtype(o.dtype)) for o in walk.loads}
            types |= {line.value: (line.type, line.dtype) for line in walk.lines}
            for name in walk.keeps:
                if self._cost(int(name[1:]), kept) >= COSTLY:
                    kept[name] = types[name]
        return kept

    def _kept_bytes(self) -> int:
        return sum(item_size(dtype) for _, dtype in self.kept.values())

    def _scratches(self) -> list[dict[str, Any]]:
        """The scratch rows one after another, the widest first, so that each is aligned; ``place`` in bytes a row."""
        place, rows = 0, []
        for name, (kind, dtype) in sorted(self.kept.items(), key=lambda item: -item_size(item[1][1])):
            rows.append({"name": _scratch(name), "type": kind, "place": place})
            place += item_size(dtype)
        return rows

    def _operations(self, position: int) -> int:
        operation = OPS.get(self.instructions[position].op)
        return operation.flops if operation else 1

    def _cost(self, position: int, kept: Container[str]) -> int:
        """Operations to compute the element at ``position`` again, from memory and from what is ``kept``."""
        total, stack, seen = 0, [position], {position}
        while stack:
            position = stack.pop()
            instruction = self.instructions[position]
            if instruction.op == "load":
                operand = self.rows.operands[instruction.attr]
                total += GATHER_COST if operand.kind == "strided" else LOAD_COSTS.get(operand.dtype, 1)
            else:
                total += self._operations(position)
            for argument in instruction.args:
                if not self.instructions[argument].row and argument not in seen and f"v{argument}" not in kept:
                    seen.add(argument)
                    stack.append(argument)
        return total


def _reduction(reduction: Reduction, slot: int, of_numbers: bool) -> dict[str, Any]:
    return {
        "result": reduction.result,
        "type": reduction.type,
        "value": reduction.value,
        "kind": f"jitgen::{_KINDS[reduction.kind]}{'OfNumbers' if of_numbers else ''}<{reduction.value_type}>",
        "slot": slot,
    }


def _finds_places(walk: Pass) -> bool:
    """Whether a reduction of the pass tells where an element is."""
    return any(reduction.kind.startswith("arg") for reduction in walk.reductions)


def _scratch(name: str) -> str:
    return f"kept_{name}"


def _pointer(operand: RowOperand) -> str:
    return f"{'' if operand.role == 'store' else 'const '}{operand.storage}*"


def _local(operand: RowOperand) -> str:
    """Its pointer (an iota's first value) where the row or the tile begins."""
    return f"x{operand.index}"


def _dense_step(operand: RowOperand) -> int:
    """Its stride from a row to the next in a tile that is walked as it lies: 0 for what varies along rows only."""
    return 0 if operand.role != "store" and operand.kind == "contiguous" else 1
