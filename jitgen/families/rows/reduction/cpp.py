"""Builds the context of ``templates/reduction/reduction.cpp.j2``.

There are three kinds of loop, each with a template of its own:

- *tiled* (``cpp_tiles.j2``, ``schedule.tile_rows`` above 1): neighbouring rows are walked together, with one
  accumulator for each row of a tile, where their elements are neighbours or rows are very short;
- *short* (``cpp_short.j2``): each row is a single block, of fewer lanes, and eight rows are walked together
  (``together.hpp``). The elements behind the last whole group of a row are taken by one more group, which ends with the
  row. Results bypass the cache several rows at a time;
- rows one by one, in blocks (``cpp_rows.j2``).

A value that costs much and that a later pass needs again is stored in a *scratch* row where the row is short enough for
the second-level cache; any other is recomputed. The second pass reads what the first has brought into the cache, so it
is then that the next row is prefetched. Where there are scratch rows, the last pass of a row, which stores, is
*deferred*: it is done together with the last but one of the next row, which computes, so that memory and processor work
at the same time. Tests for NaN are left out where ``numbers.py`` can tell that no result changes by it.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Sequence
from typing import Any

from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Built, Line
from jitgen.families.rows.reduction.context import Pass, Reduction, ReductionContext, RowValues
from jitgen.families.rows.reduction.forms import HostRows
from jitgen.families.rows.reduction.numbers import has_narrow_nan, is_exp_below, maxima_of_numbers
from jitgen.families.rows.reduction.schedule import CPU_LONG_ROW
from jitgen.ir.body import compute_dtype
from jitgen.ir.graph import walked
from jitgen.ir.ops import OPS
from jitgen.ir.program import Kernel
from jitgen.kernel.operands import CPU_LANES, item_size
from jitgen.kernel.printed_rows import RowOperand
from jitgen.kernel.rows import RowLayout

BLOCK = 4096
"""Elements of a block of a row: with its results and its scratch rows it fits the first-level cache."""
PREFETCHED_BYTES = 2**20
"""Bytes of a row's operands up to which the next row is prefetched while this one is computed. What the second-level
cache cannot hold of it then waits in the third-level cache, still far nearer than memory."""
PREFETCHED_BYTES_OF_ONE_PASS = 2**14
"""The same where there is one pass. In longer rows the elements ``AHEAD`` of the current ones are prefetched."""
AHEAD = 1024
"""Elements that a processor takes in, roughly, while it waits for one line of memory. Of short rows, the row that far
ahead is prefetched."""
COSTLY = 8
"""Operations from which on a value is stored and not recomputed: a function, not a few additions."""
LOAD_COSTS = {"float16": 6, "float8_e4m3fn": 8, "float8_e5m2": 8}
"""Operations to widen an element of these dtypes, for which GCC has no vector conversion; 1 for any other."""
GATHER_COST = 8
"""Operations that a strided load counts for: its elements are loaded one by one."""
LONG = 96
"""Instructions from which on a body of short rows is compiled once for all lengths, and not once more for multiples of
a group: as in a loop that is unrolled."""

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


def build(kernel: Kernel, layout: RowLayout, schedule: HostRows, rows: ReductionContext, dialect: Dialect) -> Built:
    """Builds template context and source options; see ``kernel/render.py``."""
    builder = _Builder(kernel, schedule, rows)
    # The group of a short row is one wide vector. Of bfloat16, whose elements come in halves, it would be assembled
    # from two vectors in memory, and a load of it would wait for both stores; so vectors stay narrow there.
    return builder.context(), {"interleaved": True, "narrow": builder.short and builder.halved}


class _Builder:
    def __init__(self, kernel: Kernel, schedule: HostRows, rows: ReductionContext):
        (body,) = kernel.bodies
        self.instructions, self.rows = body.instructions, rows
        self.width, self.tiled, self.lanes = schedule.tile_rows, schedule.tile_rows > 1, schedule.group
        self.row_loads = [o for o in rows.operands if o.role != "store" and o.kind in ("row", "broadcast")]
        self.short = self.lanes < CPU_LANES
        self.overlaps_groups = self.short and self._may_overlap_groups()
        self.scratch_index = "place + lane" if self.short else "start + i"
        self.scratch_values: dict[str, tuple[str, str]] = self._scratch_values() if schedule.scratch else {}
        slots = itertools.count()
        of_numbers = {f"v{position}" for position in maxima_of_numbers(body.instructions)}
        self.reductions = [
            [_reduction(r, next(slots), r.result in of_numbers) for r in p.reductions] for p in rows.passes
        ]
        self.halved = not self.tiled and self._is_halved()
        self.narrow_nan = self.halved and has_narrow_nan(body)
        self.group = "GroupOfNarrowNan" if self.narrow_nan else "GroupOfHalves" if self.halved else "Group"
        self.coarse = body.coarse and not self.tiled
        self.prefetched = self._prefetched()
        self.row_values = [(o.type, o.value) for o in self.row_loads]
        for p, reductions in zip(rows.passes, self.reductions, strict=True):
            self.row_values += [(line.type, line.value) for line in p.before if not self._is_constant(line)]
            self.row_values += [(reduction["type"], reduction["result"]) for reduction in reductions]
        self.row_values += [(line.type, line.value) for line in rows.after if not self._is_constant(line)]
        self.of_rows = RowValues(self.instructions, self.row_values)

    def context(self) -> dict[str, Any]:
        rows = self.rows
        passes = [self._pass(p, reductions) for p, reductions in zip(rows.passes, self.reductions, strict=True)]
        streamed = [self._store(o) for p in rows.passes for o in p.stores if self._is_streamed(o)]
        outlets = [self._outlet(store) for store in streamed]
        scalars = [(kind, name) for name, kind in rows.scalars]
        scalar_arguments = [f"jitgen::with_narrow_nan({n})" if self.narrow_nan else n for n, _ in rows.scalars]
        row_bytes, ahead = (PREFETCHED_BYTES, 0) if len(passes) > 1 else (PREFETCHED_BYTES_OF_ONE_PASS, AHEAD)
        return {
            "tiled": self.tiled,
            "width": self.width,
            "lanes": self.lanes,
            "block": CPU_LONG_ROW if self.short else BLOCK,
            "short": self.short,
            "overlaps_groups": self.overlaps_groups,
            "is_long": len(self.instructions) >= LONG,
            # Whether a short row has accumulators of its own, in registers, until they are combined with those of other
            # rows. Where elements come in halves their copy would wait for stores, unless there is one pass only.
            "local": len(rows.passes) == 1 or not self.halved,
            "outer": list(rows.sizes),
            "function_parameters": [" ".join(pair) for pair in (*self._row_parameters(), *scalars)],
            "function_names": [name for _, name in (*self._row_parameters(), *scalars)],
            "function_arguments": [*self._row_arguments(), *scalar_arguments],
            "row_parameters": [" ".join(pair) for pair in self._row_parameters()],
            "row_names": [name for _, name in self._row_parameters()],
            "row_arguments": list(self._row_arguments()),
            "scalar_parameters": "".join(f", {kind} {name}" for kind, name in scalars),
            "scalar_arguments": "".join(f", {argument}" for argument in scalar_arguments),
            "next_parameters": "".join(f", int64_t next{o.index}" for o in self.prefetched),
            "next_arguments": "".join(f", fetches ? {o.outer_strides[-1]} * ahead : {ahead}" for o in self.prefetched),
            "prefetched_elements": row_bytes // (sum(item_size(o.dtype) for o in self.prefetched) or 1),
            "steps": [(f"t{o.index}", f"step{o.index}", _dense_step(o)) for o in rows.operands],
            "foldable": " && ".join(self._one_piece()),
            "dense": " && ".join(f"{o.outer_strides[-1]} == {_dense_step(o)}" for o in rows.operands),
            "constants": [line for p in rows.passes for line in p.before if self._is_constant(line)],
            "row_values": self.row_values,
            "row_loads": [self._load(operand, False) for operand in self.row_loads],
            "passes": passes,
            "deferred": self._has_deferred_pass(),
            "last_names": [name for _, name in passes[-1]["inputs"]],
            "reductions": [reduction for of_pass in self.reductions for reduction in of_pass],
            "after": self.of_rows.block(rows.after),
            "row_stores": [self._store(operand) for operand in rows.row_stores],
            "row_results": self.of_rows.read((), {operand.value for operand in rows.row_stores}),
            "streamed": streamed,
            "outlet_parameters": "".join(f", {kind}& {name}" for kind, name in outlets),
            "outlet_arguments": "".join(f", {name}" for _, name in outlets),
            "ahead": AHEAD,
            "scratch_rows": self._scratch_rows(),
            "scratch_bytes": sum(item_size(dtype) for _, dtype in self.scratch_values.values()),
        }

    # ------------------------------------------------------------------------------------------------- parameters

    def _row_parameters(self) -> Iterator[tuple[str, str]]:
        """Yields (type, name) of the parameters that say where a row, or a tile, begins."""
        for operand in self.rows.operands:
            yield operand.address_type, _local(operand)
            if operand.kind == "strided":
                yield "int64_t", operand.inner
            if self.tiled:
                yield "int64_t", f"step{operand.index}"

    def _row_arguments(self) -> Iterator[str]:
        indices = [f"at.index[{dim}]" for dim in range(self.rows.outer)]
        if self.tiled:
            indices[-1] = "first"
        for operand in self.rows.operands:
            yield operand.address(indices)
            if operand.kind == "strided":
                yield f"{operand.inner} * folds" if self.tiled else operand.inner
            if self.tiled:
                yield operand.outer_strides[-1]

    # ----------------------------------------------------------------------------------------------------- passes

    def _pass(self, p: Pass, reductions: Sequence[dict[str, Any]]) -> dict[str, Any]:
        again = {operand.value for operand in p.reloads} | {line.value for line in p.recomputed}
        needed = self._needed(p, again)
        lines = sorted((*p.lines, *p.recomputed), key=lambda line: line.position)
        lines = [line for line in lines if line.value in needed]
        loads = [o for o in (*p.loads, *p.reloads) if o.kind not in ("row", "broadcast") and o.value in needed]
        used = [line.position for line in lines if not (line.value in again and line.value in self.scratch_values)]
        values = {reduction.value for reduction in p.reductions} | {operand.value for operand in p.stores}
        return {
            "number": p.number,
            "cheap": self._is_cheap(p),
            "prefetched": self.prefetched if p.number == min(1, len(self.rows.passes) - 1) else [],
            "before": self.of_rows.block(p.before),
            "inputs": self.of_rows.read(used, values),
            "loads": [self._load(operand, operand.value in again) for operand in loads],
            "gathers": [],
            "lines": [self._line(line, line.value in again) for line in lines],
            "scratch_stores": [
                {"value": name, "scratch": _scratch(name), "index": self.scratch_index}
                for name in p.reused
                if name in self.scratch_values
            ],
            "reductions": [reduction | {"taken": self._taken(reduction)} for reduction in reductions],
            "stores": [self._store(operand) for operand in p.stores],
            "streamed": [self._store(operand) for operand in p.stores if self._is_streamed(operand)],
        }

    def _needed(self, p: Pass, again: Container[str]) -> set[str]:
        """Returns the values of elements that a pass reads or computes: not those that only values in scratch rows come
        from."""

        def below(name: str) -> Sequence[str]:
            if name in self.scratch_values and name in again:
                return ()
            return [f"v{argument}" for argument in self.instructions[int(name[1:])].args]

        roots = [reduction.value for reduction in p.reductions] + [operand.value for operand in p.stores]
        return set(walked((name for name in roots if name.startswith("v")), below))

    def _load(self, operand: RowOperand, again: bool) -> dict[str, str]:
        halves = f"{_local(operand)} + start" if self.halved and operand.kind == "contiguous" else ""
        expression = f"halves_{operand.value}.at(lane)"
        if not halves:
            expression = operand.neighbour(_local(operand), self._offset(operand))
        return {
            "type": operand.type,
            "value": operand.value,
            "halves": halves,
            "prefetched": _local(operand) if operand.pointer else "",
            "inner": operand.inner,
            "expression": self._or_scratch(operand.value, expression, again),
        }

    def _line(self, line: Line, again: bool) -> dict[str, str]:
        expression = line.expression
        if is_exp_below(self.instructions, line.position):
            expression = expression.replace("exp(", "exp_below(")
        elif self.coarse and self._is_normalized(line.position):
            expression = expression.replace(" / ", " * (1.0f / ") + ")"
        expression = self._or_scratch(line.value, expression, again)
        return {"type": line.type, "value": line.value, "expression": expression, "mark": line.mark}

    def _or_scratch(self, name: str, expression: str, again: bool) -> str:
        return f"{_scratch(name)}[{self.scratch_index}]" if again and name in self.scratch_values else expression

    def _taken(self, reduction: dict[str, Any]) -> str:
        """Returns an element as its reduction takes it: where groups of a short row overlap, unless another group has
        it."""
        if not self.overlaps_groups:
            return str(reduction["value"])
        element = "jitgen::Halves<decltype(size)>::element(lane)" if self.halved else "lane"
        return f"{reduction['value']}, those.has({element})"

    def _store(self, operand: RowOperand) -> dict[str, Any]:
        return {
            "index": operand.index,
            "local": _local(operand),
            "storage": operand.storage,
            "value": operand.value,
            "offset": self._offset(operand),
            "inner": operand.inner,
            "group": self.group,
            "inside": "",
            "bypasses_cache": "false" if self.short else f"output{operand.index}.past",
        }

    def _outlet(self, store: dict[str, Any]) -> tuple[str, str]:
        """Returns (type, name) of the buffer in which a thread keeps, between rows, results that bypass the cache."""
        if self.short:
            return f"jitgen::Stage<{store['storage']}, block>", f"stage{store['index']}"
        return "jitgen::Seam", f"seam{store['index']}"

    def _offset(self, operand: RowOperand) -> str:
        """Prints the offset of an element from the beginning of its row (or its tile)."""
        element = "e" if self.tiled else "(start + i)"
        terms = [] if operand.inner == "0" else [operand.along(element)]
        if self.tiled:
            terms.append(f"j * t{operand.index}")
        return " + ".join(terms) or "0"

    def _is_halved(self) -> bool:
        """Returns whether elements may come as halves of two-element words, the lower ones first: where all are
        contiguous bfloat16 and no index is asked for."""
        alike = all(o.kind == "contiguous" and o.dtype == "bfloat16" for o in self._moving())
        return alike and not self._is_indexed()

    def _may_overlap_groups(self) -> bool:
        """Returns whether the elements behind the last whole group of a short row may be taken by one more that ends
        with it.

        The results of the two groups overlap, so all stores must go through a buffer; and a pass that stores must not
        ask for the index of the first of equal elements, which would be met last.
        """
        if not all(self._is_streamed(operand) for p in self.rows.passes for operand in p.stores):
            return False
        return not any(p.stores and _finds_indices(p) for p in self.rows.passes)

    def _one_piece(self) -> list[str]:
        """Returns the conditions under which a dense tile is one run of memory, so that several elements of each row
        can be taken in one step; empty where they cannot, because an index is asked for."""
        moving = self._moving()
        if self._is_indexed() or any(o.kind != "strided" or not o.pointer for o in moving):
            return []
        return [f"{o.inner} == inner" for o in moving]

    def _moving(self) -> list[RowOperand]:
        """Returns the operands that are read or written element by element."""
        return [o for p in self.rows.passes for o in (*p.loads, *p.stores) if o not in self.row_loads]

    def _is_indexed(self) -> bool:
        return any(map(_finds_indices, self.rows.passes))

    def _prefetched(self) -> list[RowOperand]:
        """Returns the operands of a later row to prefetch: during the only pass, or during the second, which leaves the
        memory idle.

        Short rows of one pass are read in the order of memory, which processors prefetch by themselves.
        """
        if self.tiled or not self.rows.outer or (self.short and len(self.rows.passes) == 1):
            return []
        return [o for o in self.rows.passes[0].loads if o.kind == "contiguous" and o.pointer]

    def _has_deferred_pass(self) -> bool:
        """Returns whether the last pass of a row, which stores from scratch rows, is done together with the last but
        one of the next row: one waits for memory, the other for the processor."""
        last = self.rows.passes[-1]
        stores = bool(last.stores) and all(map(self._is_streamed, last.stores))
        return (
            bool(self.scratch_values)
            and stores
            and not self.short
            and not last.reductions
            and len(self.rows.passes) > 1
        )

    def _is_streamed(self, operand: RowOperand) -> bool:
        return self.tiled or operand.kind == "contiguous"

    def _is_cheap(self, p: Pass) -> bool:
        """Returns whether a pass only reduces, by few operations, so that loads and stores of its accumulators are what
        it costs."""
        operations = sum(self._operations(line.position) for line in (*p.lines, *p.recomputed))
        return not p.stores and not _finds_indices(p) and operations < COSTLY

    def _is_normalized(self, position: int) -> bool:
        """Returns whether a value is a quotient by a row's sum of exp(v - max v). The sum is at least 1, so its
        reciprocal is as good."""
        instruction = self.instructions[position]
        if instruction.op != "div":
            return False
        divisor = self.instructions[instruction.args[1]]
        return (divisor.op, divisor.attr) == ("reduce", "sum") and is_exp_below(self.instructions, divisor.args[0])

    def _is_constant(self, line: Line) -> bool:
        return self.instructions[line.position].op == "const"

    # ------------------------------------------------------------------------------------------------ scratch rows

    def _scratch_values(self) -> dict[str, tuple[str, str]]:
        """Returns type and dtype of each value worth a scratch row: a later pass uses it, and it costs much to
        recompute."""
        scratch: dict[str, tuple[str, str]] = {}
        for p in self.rows.passes:
            types = {o.value: (o.type, compute_dtype(o.dtype)) for o in p.loads}
            types |= {line.value: (line.type, line.dtype) for line in p.lines}
            for name in p.reused:
                if self._cost(int(name[1:]), scratch) >= COSTLY:
                    scratch[name] = types[name]
        return scratch

    def _scratch_rows(self) -> list[dict[str, Any]]:
        """Lays out the scratch rows one after another, the widest first, so that each is aligned; ``offset`` in bytes
        for one element of a row."""
        offset, rows = 0, []
        for name, (kind, dtype) in sorted(self.scratch_values.items(), key=lambda item: -item_size(item[1][1])):
            rows.append({"name": _scratch(name), "type": kind, "offset": offset})
            offset += item_size(dtype)
        return rows

    def _operations(self, position: int) -> int:
        operation = OPS.get(self.instructions[position].op)
        return operation.flops if operation else 1

    def _cost(self, position: int, scratch: Container[str]) -> int:
        """Counts the operations to recompute the element at ``position`` from memory and from values in ``scratch``
        rows."""

        def below(position: int) -> list[int]:
            arguments = self.instructions[position].args
            return [a for a in arguments if not self.instructions[a].row and f"v{a}" not in scratch]

        total = 0
        for needed in walked([position], below):
            instruction = self.instructions[needed]
            if instruction.op == "load":
                operand = self.rows.operands[instruction.attr]
                total += GATHER_COST if operand.kind == "strided" else LOAD_COSTS.get(operand.dtype, 1)
            else:
                total += self._operations(needed)
        return total


def _reduction(reduction: Reduction, slot: int, of_numbers: bool) -> dict[str, Any]:
    """Describes a reduction for the templates: ``slot`` numbers it among the kernel's; ``of_numbers`` lets it drop
    NaN."""
    return {
        "result": reduction.result,
        "type": reduction.type,
        "value": reduction.value,
        "kind": f"jitgen::{_KINDS[reduction.kind]}{'OfNumbers' if of_numbers else ''}<{reduction.value_type}>",
        "slot": slot,
    }


def _finds_indices(p: Pass) -> bool:
    """Returns whether a reduction of the pass gives an index."""
    return any(reduction.kind.startswith("arg") for reduction in p.reductions)


def _scratch(name: str) -> str:
    """Returns the name of the scratch row of a value."""
    return f"kept_{name}"


def _local(operand: RowOperand) -> str:
    """Returns the name of a pointer to the operand's first element (of an iota's first value) in the row or the
    tile."""
    return f"x{operand.index}"


def _dense_step(operand: RowOperand) -> int:
    """Returns the operand's stride from a row to the next in a dense tile: 0 if it varies along rows only."""
    return 0 if operand.role != "store" and operand.kind == "contiguous" else 1
