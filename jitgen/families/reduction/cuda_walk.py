"""Passes of a row kernel in CUDA C++: what each reads, keeps and combines, however rows are walked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from jitgen.codegen.cuda import constant
from jitgen.codegen.printing import Line, fields
from jitgen.families.reduction.context import Pass, Reduction, RowContext, RowOperand, identity
from jitgen.families.reduction.layout import RowLayout
from jitgen.families.reduction.online import DEVIATIONS, MEAN, SUM_EXP
from jitgen.families.reduction.residency import held
from jitgen.families.reduction.schedule import RowSchedule
from jitgen.ir.program import Kernel
from jitgen.spec import DTYPES

_OPS = {"sum": "Sum", "prod": "Prod", "max": "Max", "min": "Min", "any": "Any", "all": "All"}
_OPS |= {"argmax": "ArgMax", "argmin": "ArgMin"}

_STREAMED = {
    SUM_EXP: ("SumExp<{coarse}>", "Exponentials", "{{{lowest}, 0}}", ".sum"),
    DEVIATIONS: ("Deviations", "Spread", "{{0, 0, 0}}", ".squares"),
    MEAN: ("Deviations", "Shifted", "{{}}", ".mean()"),
}
"""Reductions whose state is no element: operation, state, its first value, and the member that is the result."""


@dataclass(frozen=True)
class Held:
    """What a thread has of a reduction on its way along a row: ``name`` of ``type``, at first ``first``.

    ``whole``: the function that makes the reduction's state of it; empty where it is the state.
    """

    name: str
    type: str
    first: str
    whole: str = ""


@dataclass(frozen=True)
class Walk:
    """One pass.

    Attributes:
        source: the pass.
        fetched: operands it reads from memory, and ``needed`` all whose elements its lines read.
        late: of ``fetched``, what is not kept beside a row that is.
        restored: (name, type) of computed values that earlier passes have kept.
        lines: what it computes, and ``saved`` (name, type) of what it keeps.
        reductions: at its end.
    """

    source: Pass
    needed: tuple[RowOperand, ...]
    fetched: tuple[RowOperand, ...]
    late: tuple[RowOperand, ...]
    restored: tuple[tuple[str, str], ...]
    lines: tuple[Line, ...]
    saved: tuple[tuple[str, str], ...]
    reductions: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Walks:
    """All passes, and what is kept between them where the row is: loads as they are stored, and computed values."""

    passes: tuple[Walk, ...]
    kept_loads: tuple[RowOperand, ...]
    kept_values: tuple[Line, ...]

    @property
    def reductions(self) -> Sequence[dict[str, Any]]:
        return [reduction for walk in self.passes for reduction in walk.reductions]


def walks(kernel: Kernel, layout: RowLayout, schedule: RowSchedule, rows: RowContext) -> Walks:
    place = "column" if layout.columns else "column + j"
    if not schedule.kept:
        return Walks(tuple(_again(p, place) for p in rows.passes), (), ())
    single = not layout.columns
    plans = _plans(rows, kernel, schedule)
    kept = {name for plan in plans for name in plan.kept}
    passes = tuple(_resident(p, plan, kept, rows, place, single) for p, plan in zip(rows.passes, plans, strict=True))
    loads = tuple(o for o in rows.operands if o.role == "load" and o.value in kept)
    return Walks(passes, loads, tuple(line for p in rows.passes for line in p.lines if line.value in kept))


@dataclass(frozen=True)
class _Plan:
    """What a pass over a resident row takes from earlier passes: values kept for it, and cheap ones computed anew."""

    kept: frozenset[str]
    rebuilt: tuple[Line, ...]


def _plans(rows: RowContext, kernel: Kernel, schedule: RowSchedule) -> list[_Plan]:
    resident = held(kernel.bodies[0], schedule.elements)
    lines = {line.position: line for p in rows.passes for line in p.lines}
    return [
        _Plan(frozenset(f"v{position}" for position in kept), tuple(lines[position] for position in rebuilt))
        for kept, rebuilt in zip(resident.kept, resident.rebuilt, strict=True)
    ]


def _again(p: Pass, place: str) -> Walk:
    """A pass that reads and computes all that it needs."""
    needed = (*p.loads, *p.again)
    lines = tuple(sorted((*p.repeated, *p.lines), key=lambda line: line.position))
    return Walk(p, needed, tuple(o for o in needed if o.pointer), (), (), lines, (), _reductions(p, place))


def _resident(p: Pass, plan: _Plan, kept: set[str], rows: RowContext, place: str, single: bool) -> Walk:
    """A pass over a row of which ``kept`` is kept, and what is in ``plan`` is there when the pass begins.

    ``single``: whether a thread has one row, not several side by side.
    """
    again = [o for o in rows.operands if o.role != "store" and (o.value in plan.kept or _is_index(o, p))]
    fetched = [o for o in p.loads if o.pointer]
    types = {line.value: line.type for other in rows.passes for line in other.lines}
    return Walk(
        source=p,
        needed=(*p.loads, *again),
        fetched=tuple(o for o in fetched if o.value in kept),
        # Weights of the last pass, the terms of a sum that is kept: holding them for the whole row would take the
        # registers that the row itself needs.
        late=tuple(o for o in fetched if o.value not in kept),
        restored=tuple((name, types[name]) for name in sorted(plan.kept) if name in types),
        lines=(*plan.rebuilt, *p.lines),
        saved=tuple((line.value, line.type) for line in p.lines if line.value in kept),
        reductions=_shifted(_reductions(p, place)) if single else _reductions(p, place),
    )


def _is_index(operand: RowOperand, p: Pass) -> bool:
    """Whether a place along the row, which is computed wherever it is needed, is needed again."""
    return operand.pointer is None and operand in p.again


def _reductions(p: Pass, place: str) -> tuple[dict[str, Any], ...]:
    found = [_reduction(r, place) for r in p.reductions]
    return tuple(r | {"held": Held(f"part_{r['result']}", r["state"], r["identity"]), "means": []} for r in found)


def _shifted(reductions: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """``reductions`` of what a thread holds of one row: squared deviations come of moments, which have the mean too."""
    found = []
    for r in reductions:
        if r["kind"] == DEVIATIONS:
            state = f"jitgen::Shifted<{r['value_type']}>"
            held = Held(f"shifted_{r['result']}", state, "{}", "jitgen::Deviations::centred")
            means = [mean for mean in reductions if mean["kind"] == MEAN and mean["value"] == r["value"]]
            found.append(r | {"state": state, "member": ".squares()", "held": held, "means": means})
        elif r["kind"] != MEAN:
            found.append(r)
    return tuple(found)


def _reduction(r: Reduction, place: str) -> dict[str, Any]:
    """``place``: of an element in its row."""
    found = fields(r) | {"streamed": r.kind in _STREAMED, "indexed": r.kind in ("argmax", "argmin"), "element": r.value}
    if found["streamed"]:
        op, state, first, member = _STREAMED[r.kind]
        op = f"jitgen::{op.format(coarse=str(r.coarse).lower())}"
        lowest = constant(torch.finfo(DTYPES[r.value_dtype]).min, r.value_dtype)
        found |= {
            "state": f"jitgen::{state}<{r.value_type}>",
            "identity": first.format(lowest=lowest),
            "member": member,
        }
        return found | {"op": op, "step": f"{op}::with({{part}}, {{{{{r.value}}}}})"}
    op, neutral = f"jitgen::{_OPS[r.kind]}", constant(identity(r.kind, r.value_dtype), r.value_dtype)
    if not found["indexed"]:
        step = f"{op}::combine({{part}}, {r.value})"
        return found | {"op": op, "state": r.type, "identity": neutral, "member": "", "step": step}
    state = f"jitgen::Indexed<{r.value_type}, Index>"
    return found | {
        "op": op,
        "state": state,
        "identity": f"{{{neutral}, {state}::nowhere}}",
        "member": ".index",
        "step": f"{op}::with({{part}}, {r.value}, Index({place}))",
        # In any order, of several at one place the first.
        "unordered": f"{op}::combine({{part}}, {state}{{{{{r.value}, Index({place})}}}})",
    }
