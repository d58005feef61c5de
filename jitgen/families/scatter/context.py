"""Builds the context of the scatter templates of all dialects: names and expressions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jitgen.codegen import environment, triton
from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Built, Printed, fields, printed
from jitgen.families.scatter import NAME
from jitgen.families.scatter.layout import Layout, parameters
from jitgen.families.scatter.schedule import Schedule
from jitgen.ir.body import Instruction
from jitgen.ir.program import Kernel
from jitgen.ir.scatters import combination
from jitgen.kernel.layout import constant_in_row
from jitgen.kernel.operands import WARP
from jitgen.kernel.parameters import KernelParameters
from jitgen.kernel.printed import (
    BodyContext,
    PrintedOperand,
    context_attributes,
    printed_attributes,
    sum_of,
    title_of,
)
from jitgen.kernel.render import renderer

_READS = ("load", "iota")


def context(
    kernel: Kernel, layout: Layout, declared: KernelParameters, schedule: Schedule, dialect: Dialect
) -> BodyContext:
    """Returns the context of ``kernel`` in ``dialect``."""
    (body,) = kernel.bodies
    text = printed(body.instructions, dialect, coarse=body.coarse)
    operands = [
        PrintedOperand(**printed_attributes(operand, "", text.values[operand.number], dialect))
        for operand in declared.operands
    ]
    title = title_of(body, [""] * len(body.operands), f", {body.row_rank} dimensions in order")
    return BodyContext(**context_attributes(kernel, declared, operands, dialect, [title]), text=text)


def build(kernel: Kernel, layout: Layout, schedule: Schedule, scatter: BodyContext, dialect: Dialect) -> Built:
    """Builds the template's context with the source's options."""
    (body,) = kernel.bodies
    text = scatter.text
    (instruction,) = (instruction for instruction in body.instructions if instruction.op == "scatter")
    coordinates = [*(f"i{dim}" for dim in range(layout.outer)), *(f"k{dim}" for dim in range(layout.walked))]
    coordinates += ["i"] if layout.inner else []
    operands = [_operand(operand, coordinates, dialect) for operand in scatter.operands]
    once = constant_in_row(body, layout.last) if layout.inner else set()
    context: dict[str, Any] = {
        "outer": [(f"i{dim}", scatter.name(f"n{dim}")) for dim in range(layout.outer)],
        "walked": [(f"k{dim}", scatter.name(f"n{layout.outer + dim}")) for dim in range(layout.walked)],
        "margin": "    " * layout.walked,
        "inner": scatter.name(f"n{layout.rank - 1}") if layout.inner else "",
        # What is the same for all of the inner dimension comes first.
        "constant_loads": [operands[i.attr] for p, i in enumerate(body.instructions) if p in once and i.op in _READS],
        "constant_lines": [line for position, line in text.lines.items() if position in once],
        "loads": [operands[i.attr] for p, i in enumerate(body.instructions) if p not in once and i.op in _READS],
        "lines": [line for position, line in text.lines.items() if position not in once],
        "is_one_row": layout.inner and once.issuperset(instruction.args[1:]),
        **_stored(instruction, operands, text, dialect),
    }
    if dialect.name == "cpp":
        return context, {"interleaved": True}
    if dialect.name == "cuda":
        return context, {}
    context["parameters"] = scatter.triton_parameters
    return context, scatter.triton_options(True, schedule.threads // WARP)


render = renderer(NAME, "", parameters, context, build=build)


def _operand(operand: PrintedOperand, coordinates: Sequence[str], dialect: Dialect) -> dict[str, Any]:
    """Describes an operand with its offset, and the expression of its element."""
    at = sum_of([], operand.strides, coordinates)
    is_triton = dialect.name == "triton"
    if operand.pointer:
        at = f"{at} + element * 0" if is_triton else at  # a block, as the mask is
        expression = dialect.gather(operand.pointer, at, operand.dtype, "live" if is_triton else "")
    else:
        number = f"{operand.offset} + {at}"
        expression = f"({number}).to({dialect.types[operand.dtype]})" if is_triton else number
    return fields(operand) | {"at": at, "expression": expression}


def _stored(
    scatter: Instruction, operands: Sequence[dict[str, Any]], printed_: Printed, dialect: Dialect
) -> dict[str, Any]:
    """Describes how the chosen element is located, and what becomes of it."""
    number, kind = scatter.attr
    value, *indices = (printed_.names[position] for position in scatter.args)
    target = operands[number]
    chosen = [f"{index} * {stride}" for index, (_, stride) in zip(indices, target["gathered"], strict=True)]
    within = [(index, size) for index, (size, _) in zip(indices, target["gathered"], strict=True)]
    terms = target["at"].split(" + ")
    operation = combination(kind, scatter.dtype)
    new = value
    if operation is not None:
        combined = Instruction(operation, (0, 1), scatter.dtype)
        dtypes = {0: scatter.dtype, 1: scatter.dtype}
        new = dialect.expression(combined, {0: "old", 1: value}, dtypes)
    context = {
        "target": target,
        "to": " + ".join([target["pointer"], target["at"], *chosen]),
        "row": " + ".join([target["pointer"], *terms[:-1], *chosen]),
        "inside": " && ".join(f"jitgen::is_within({index}, {size})" for index, size in within) or "true",
        "combines": operation is not None,
        "new": new,
        "mark": environment.user_mark(scatter.location),
    }
    if dialect.name == "triton":
        context["inside"] = " & ".join(["live", *(f"({i} >= 0) & ({i} < b{dim})" for dim, i in enumerate(indices))])
        context["old"] = triton.load_cast("tl.load(to, mask=inside)", target["dtype"])
        context["stored"] = triton.store_cast("new", target["dtype"])
    return context
