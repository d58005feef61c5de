"""Describes the passes of a row kernel in CUDA C++: what each loads, recomputes, keeps and reduces, however rows are
dealt out.

``cuda_passes`` makes them of a ``ReductionContext``; the contexts of the templates (``cuda_rows.py``,
``cuda_columns.py``, ``cuda_persistent.py``) then say how each operand's elements are loaded and stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from jitgen.codegen.cuda import constant
from jitgen.codegen.printing import Line, fields
from jitgen.families.rows.reduction.context import Pass, Reduction, ReductionContext, identity
from jitgen.families.rows.reduction.forms import CudaSchedule
from jitgen.families.rows.reduction.online import DEVIATIONS, MEAN, SUM_EXP
from jitgen.families.rows.reduction.residency import residency_of_thread
from jitgen.ir.program import Kernel
from jitgen.kernel.printed_rows import RowOperand
from jitgen.kernel.rows import RowLayout
from jitgen.spec import DTYPES

OPS = {"sum": "Sum", "prod": "Prod", "max": "Max", "min": "Min", "any": "Any", "all": "All"}
OPS |= {"argmax": "ArgMax", "argmin": "ArgMin"}

_ONLINE = {
    SUM_EXP: ("SumExp<{coarse}>", "Exponentials", "{{{lowest}, 0}}", ".sum"),
    DEVIATIONS: ("Deviations", "Spread", "{{0, 0, 0}}", ".squares"),
    MEAN: ("Deviations", "Shifted", "{{}}", ".mean()"),
}
"""Reductions whose state is several numbers (``states.cuh``): the operation, the state's type, its initial value, and
the member that is the result."""


@dataclass(frozen=True)
class Accumulator:
    """Describes the variable in which a thread accumulates a reduction along a row.

    ``finish`` is the function that makes the reduction's state of it; empty where it is the state.
    """

    name: str
    type: str
    initial: str
    finish: str = ""


@dataclass(frozen=True)
class CudaPass:
    """Describes one pass.

    Attributes:
        source: the pass as every dialect has it.
        needed: operands whose elements its lines read.
        loaded: of those, operands that it loads from memory into the row's registers.
        deferred: operands of a resident row that it loads from memory and that do not stay in registers.
        resident_inputs: (name, type) of computed values that earlier passes leave in registers for it.
        lines: what it computes.
        resident_outputs: (name, type) of computed values that it keeps in registers for later passes.
        reductions: what it reduces.
    """

    source: Pass
    needed: tuple[RowOperand, ...]
    loaded: tuple[RowOperand, ...]
    deferred: tuple[RowOperand, ...]
    resident_inputs: tuple[tuple[str, str], ...]
    lines: tuple[Line, ...]
    resident_outputs: tuple[tuple[str, str], ...]
    reductions: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class CudaPasses:
    """Holds all passes, and what stays in registers between them: operands as they are stored, and computed values."""

    passes: tuple[CudaPass, ...]
    resident_loads: tuple[RowOperand, ...]
    resident_values: tuple[Line, ...]

    @property
    def reductions(self) -> Sequence[dict[str, Any]]:
        return [reduction for pass_ in self.passes for reduction in pass_.reductions]


def cuda_passes(kernel: Kernel, layout: RowLayout, schedule: CudaSchedule, rows: ReductionContext) -> CudaPasses:
    """Describes the passes of ``kernel``: over a row in registers, or over one that each pass reads from memory."""
    index = "column" if layout.columns else "column + j"
    if not schedule.resident:
        return CudaPasses(tuple(_rereading(p, index) for p in rows.passes), (), ())
    plans = _plans(rows, kernel, schedule)
    names = {name for plan in plans for name in plan.resident}
    passes = tuple(
        _resident(p, plan, names, rows, index, has_one_row=not layout.columns)
        for p, plan in zip(rows.passes, plans, strict=True)
    )
    loads = tuple(o for o in rows.operands if o.role == "load" and o.value in names)
    return CudaPasses(passes, loads, tuple(line for p in rows.passes for line in p.lines if line.value in names))


@dataclass(frozen=True)
class _Plan:
    """Says what a pass over a resident row takes from earlier passes: names in registers, and lines that it
    recomputes."""

    resident: frozenset[str]
    recomputed: tuple[Line, ...]


def _plans(rows: ReductionContext, kernel: Kernel, schedule: CudaSchedule) -> list[_Plan]:
    registers = residency_of_thread(kernel.bodies[0], schedule.elements_per_thread)
    lines = {line.position: line for p in rows.passes for line in p.lines}
    return [
        _Plan(frozenset(f"v{position}" for position in resident), tuple(lines[position] for position in recomputed))
        for resident, recomputed in zip(registers.resident, registers.recomputed, strict=True)
    ]


def _rereading(p: Pass, index: str) -> CudaPass:
    """Describes a pass that loads and computes all that it needs."""
    needed = (*p.loads, *p.reloads)
    lines = tuple(sorted((*p.recomputed, *p.lines), key=lambda line: line.position))
    return CudaPass(p, needed, tuple(o for o in needed if o.pointer), (), (), lines, (), _reductions(p, index))


def _resident(p: Pass, plan: _Plan, names: set[str], rows: ReductionContext, index: str, has_one_row: bool) -> CudaPass:
    """Describes a pass over a resident row, of which the values called ``names`` stay in registers.

    ``has_one_row``: whether a thread has one row, not several neighbours.
    """
    reused = [o for o in rows.operands if o.role != "store" and (o.value in plan.resident or _is_iota(o, p))]
    loads = [o for o in p.loads if o.pointer]
    types = {line.value: line.type for other in rows.passes for line in other.lines}
    return CudaPass(
        source=p,
        needed=(*p.loads, *reused),
        loaded=tuple(o for o in loads if o.value in names),
        # Such as weights of the last pass, or the terms of a sum of which the sum is resident. Registers for all of
        # their elements would be registers that the row itself needs.
        deferred=tuple(o for o in loads if o.value not in names),
        resident_inputs=tuple((name, types[name]) for name in sorted(plan.resident) if name in types),
        lines=(*plan.recomputed, *p.lines),
        resident_outputs=tuple((line.value, line.type) for line in p.lines if line.value in names),
        reductions=_shifted(_reductions(p, index)) if has_one_row else _reductions(p, index),
    )


def _is_iota(operand: RowOperand, p: Pass) -> bool:
    """Returns whether an operand is an index along the row that ``p`` needs again: it is computed wherever it is
    needed."""
    return operand.pointer is None and operand in p.reloads


def _reductions(p: Pass, index: str) -> tuple[dict[str, Any], ...]:
    described = [_reduction(r, index) for r in p.reductions]
    return tuple(
        r | {"accumulator": Accumulator(f"part_{r['result']}", r["state"], r["identity"]), "means": []}
        for r in described
    )


def _shifted(reductions: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Accumulates squared deviations among ``reductions`` as moments about a number near the mean.

    A thread can do so with one row that it holds (``Deviations`` in ``states.cuh``). The state has the mean too, so
    that reductions to the mean of the same values are its ``means`` instead.
    """
    replaced = []
    for r in reductions:
        if r["kind"] == DEVIATIONS:
            state = f"jitgen::Shifted<{r['value_type']}>"
            accumulator = Accumulator(f"shifted_{r['result']}", state, "{}", "jitgen::Deviations::centred")
            means = [mean for mean in reductions if mean["kind"] == MEAN and mean["value"] == r["value"]]
            shifted = {"state": state, "member": ".squares()", "accumulator": accumulator, "means": means}
            replaced.append(r | shifted)
        elif r["kind"] != MEAN:
            replaced.append(r)
    return tuple(replaced)


def _reduction(r: Reduction, index: str) -> dict[str, Any]:
    """Describes a reduction for the templates; ``index`` is the expression of an element's index in its row."""
    described = fields(r) | {"online": r.kind in _ONLINE, "indexed": r.kind in ("argmax", "argmin"), "element": r.value}
    if described["online"]:
        op, state, initial, member = _ONLINE[r.kind]
        op = f"jitgen::{op.format(coarse=str(r.coarse).lower())}"
        lowest = constant(torch.finfo(DTYPES[r.value_dtype]).min, r.value_dtype)
        described |= {
            "state": f"jitgen::{state}<{r.value_type}>",
            "identity": initial.format(lowest=lowest),
            "member": member,
        }
        return described | {"op": op, "step": f"{op}::with({{part}}, {{{{{r.value}}}}})"}
    op, neutral = f"jitgen::{OPS[r.kind]}", constant(identity(r.kind, r.value_dtype), r.value_dtype)
    if not described["indexed"]:
        step = f"{op}::combine({{part}}, {r.value})"
        return described | {"op": op, "state": r.type, "identity": neutral, "member": "", "step": step}
    state = f"jitgen::Indexed<{r.value_type}, Index>"
    return described | {
        "op": op,
        "state": state,
        "identity": f"{{{neutral}, {state}::nowhere}}",
        "member": ".index",
        "step": f"{op}::with({{part}}, {r.value}, Index({index}))",
        # The same for elements in any order, where the first of equal elements may come last.
        "unordered": f"{op}::combine({{part}}, {state}{{{{{r.value}, Index({index})}}}})",
    }
