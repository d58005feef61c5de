"""Builds the context of ``templates/convolution/convolution.cpp.j2``: names and expressions of the epilogue."""

from __future__ import annotations

from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Built, printed
from jitgen.families.convolution import NAME
from jitgen.families.convolution.layout import COUNTS, DIMENSIONS, SIZES, Layout, convolution_of, parameters
from jitgen.families.convolution.schedule import Schedule
from jitgen.ir.program import Kernel
from jitgen.kernel.parameters import KernelParameters
from jitgen.kernel.printed import (
    BodyContext,
    PrintedOperand,
    context_attributes,
    printed_attributes,
    struct_members,
    sum_of,
)
from jitgen.kernel.render import renderer

FLAGS = ["-O2"]
"""The mainloop is written with vector types, and the epilogue is marked ``omp simd``, as those of products are."""
_AXES = ("n", "g", "o", "i0", "i1", "i2")
_COMPUTE = {"float32": "Singles", "float64": "Wide", "int32": "Whole", "int64": "WideWhole"}
"""By the accumulator's dtype, the arithmetic of ``gemm_compute.hpp``."""


def context(
    kernel: Kernel, layout: Layout, declared: KernelParameters, schedule: Schedule, dialect: Dialect
) -> BodyContext:
    """Returns the context of ``kernel``."""
    (body,) = kernel.bodies
    text = printed(body.instructions, dialect, coarse=body.coarse)
    operands = [
        PrintedOperand(
            **printed_attributes(operand, layout.operands[operand.number], text.values.get(operand.number, ""), dialect)
        )
        for operand in declared.operands
    ]
    kinds = (f"{operand.role} {operand.dtype} {operand.kind}" for operand in operands)
    title = f"(rows, groups, outputs, pixels): {', '.join(kinds)}"
    return BodyContext(**context_attributes(kernel, declared, operands, dialect, [title]), text=text)


def build(kernel: Kernel, layout: Layout, schedule: Schedule, convolution: BodyContext, dialect: Dialect) -> Built:
    """Builds the template's context with the source's options."""
    (body,), contraction = kernel.bodies, convolution_of(kernel)
    (accumulator,) = {i.dtype for i in body.instructions if i.op == "contract"}
    by_role = {operand.role: operand for operand in convolution.operands}
    stores = [operand for operand in convolution.operands if operand.role == "store"]
    loads = [operand for operand in convolution.operands if operand.role in ("load", "iota") and operand.value]
    fields, arguments = struct_members([*loads, *stores], _integers, convolution.text.scalars.items())
    name = convolution.name
    sizes = [name(count) for count in COUNTS]
    sizes += ["{" + ", ".join(name(f"{size}{dim}") for dim in range(DIMENSIONS)) + "}" for size in SIZES]
    assert contraction.window is not None
    context = {
        "title": convolution.titles[0],
        "sizes": sizes,
        "x": by_role["x"],
        "weight": by_role["weight"],
        "fields": fields,
        "arguments": arguments,
        "accumulator": dialect.types[accumulator],
        "compute": _COMPUTE[accumulator],
        "bases": [o.begin(f"from{o.index}", sum_of([o.offset], o.strides, _AXES)) for o in (*loads, *stores)],
        "loads": [
            {"type": o.type, "value": o.value, "expression": o.neighbour(f"from{o.index}", _step(o))} for o in loads
        ],
        "lines": list(convolution.text.lines.values()),
        "stores": [{"target": f"from{o.index}[{_step(o)}]", "storage": o.storage, "value": o.value} for o in stores],
    }
    return context, {"flags": FLAGS}


render = renderer(NAME, "", parameters, context, build=build)


def _step(operand: PrintedOperand) -> str:
    """Prints the offset of pixel number ``j`` from the first one."""
    return operand.along("j * step")


def _integers(operand: PrintedOperand) -> tuple[str, ...]:
    return (operand.offset, *operand.strides)
