"""The context of the scatter templates of all dialects: names and expressions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jitgen.codegen import environment, triton
from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Built, Printed, printed
from jitgen.families.scatter.launch import integer_names
from jitgen.families.scatter.layout import Layout
from jitgen.families.scatter.schedule import Schedule
from jitgen.ir.body import Body, Instruction, compute_dtype
from jitgen.ir.program import Kernel
from jitgen.ir.scatters import combination
from jitgen.kernel.operands import WARP

_READS = ("load", "iota")


def build(kernel: Kernel, layout: Layout, schedule: Schedule, dialect: Dialect) -> tuple[str, Built]:
    """A title, and the template's context with the source's options."""
    (body,) = kernel.bodies
    found = printed(body.instructions, dialect, coarse=body.coarse)
    names = [name for name, *_ in integer_names(kernel, layout)]
    kinds = [f"{operand.kind} {operand.dtype}" for operand in body.operands]
    title = f"({', '.join(map(str, body.shape))}), {body.row_rank} dimensions in order: {', '.join(kinds)}"
    (scatter,) = (instruction for instruction in body.instructions if instruction.op == "scatter")
    coordinates = [*(f"i{dim}" for dim in range(layout.outer)), *(f"k{dim}" for dim in range(layout.walked))]
    coordinates += ["i"] if layout.inner else []
    operands = [_operand(index, kernel, layout, coordinates, found, dialect) for index in range(len(body.operands))]
    once = _constant(body, layout) if layout.inner else set()
    scalars = [f"a{number}" for number in range(len(kernel.scalars))]
    context: dict[str, Any] = {
        "pointers": [o for o in operands if o["pointer"]],
        "outer": [(f"i{dim}", f"n{dim}") for dim in range(layout.outer)],
        "walked": [(f"k{dim}", f"n{layout.outer + dim}") for dim in range(layout.walked)],
        "margin": "    " * layout.walked,
        "inner": f"n{layout.rank - 1}" if layout.inner else "",
        # What is the same for all of the inner dimension comes first.
        "constant_loads": [operands[i.attr] for p, i in enumerate(body.instructions) if p in once and i.op in _READS],
        "constant_lines": [line for position, line in found.lines.items() if position in once],
        "loads": [operands[i.attr] for p, i in enumerate(body.instructions) if p not in once and i.op in _READS],
        "lines": [line for position, line in found.lines.items() if position not in once],
        "is_one_row": layout.inner and once.issuperset(scatter.args[1:]),
        **_stored(scatter, operands, found, dialect),
    }
    typed = [f"{o['const']}{o['storage']}* {o['pointer']}" for o in context["pointers"]]
    numbers = [f"{dialect.types[dtype]} {name}" for name, (_, dtype) in zip(scalars, kernel.scalars, strict=True)]
    integers = [f"int64_t {name}" for name in names]
    if dialect.name == "cpp":
        context["parameters"] = [*typed, *numbers, "int32_t threads", *integers, "int32_t streaming"]
        return title, (context, {"interleaved": True})
    if dialect.name == "cuda":
        context["parameters"] = [*typed, *integers, *numbers]
        return title, (context, {})
    signature = [f"*{triton.SIGNATURE_TYPES[o['dtype']]}" for o in context["pointers"]]
    signature += ["i64"] * len(names) + [triton.SIGNATURE_TYPES[dtype] for _, dtype in kernel.scalars]
    used = [line.text for line in found.lines.values()] + [o["expression"] for o in operands]
    used += [context["old"], context["new"], context["stored"]]
    context["include"] = environment.select_functions(environment.header("jitgen_triton.py"), "\n".join(used))
    context["parameters"] = [*(o["pointer"] for o in context["pointers"]), *names, *scalars]
    options = {
        "signature": signature,
        "multiples": [1] * len(signature),
        "num_warps": schedule.threads // WARP,
        "enable_fp_fusion": False,
    }
    return title, (context, options)


def _constant(body: Body, layout: Layout) -> set[int]:
    """The positions of instructions whose results are the same for all of the last dimension."""
    constant: set[int] = set()
    for position, instruction in enumerate(body.instructions):
        if instruction.op in _READS:
            if layout.last[instruction.attr] == 0:
                constant.add(position)
        elif constant.issuperset(instruction.args):
            constant.add(position)
    return constant


def _operand(
    index: int, kernel: Kernel, layout: Layout, coordinates: Sequence[str], found: Printed, dialect: Dialect
) -> dict[str, Any]:
    (body,) = kernel.bodies
    operand = body.operands[index]
    terms = [f"{coordinate} * s{index}_{dim}" for dim, coordinate in enumerate(coordinates)]
    if layout.last[index] < 2:
        terms[-1:] = [coordinates[-1]] * layout.last[index]
    at = " + ".join(terms) or "0"
    pointer = f"p{index}" if operand.buffer is not None else ""
    is_triton = dialect.name == "triton"
    if pointer:
        at = f"{at} + element * 0" if is_triton else at  # a block, as the mask is
        expression = dialect.gather(pointer, at, operand.dtype, "live" if is_triton else "")
    else:
        type_name = dialect.types[operand.dtype]
        number = f"o{index} + {at}"
        expression = f"({number}).to({type_name})" if is_triton else number
    return {
        "index": index,
        "role": operand.kind,
        "pointer": pointer,
        "dtype": operand.dtype,
        "storage": dialect.storage_types[operand.dtype],
        "type": dialect.types[compute_dtype(operand.dtype)],
        "const": "" if operand.kind == "store" else "const ",
        "value": found.values[index],
        "at": at,
        "expression": expression,
    }


def _stored(
    scatter: Instruction, operands: Sequence[dict[str, Any]], found: Printed, dialect: Dialect
) -> dict[str, Any]:
    """How the chosen element is found, and what becomes of it."""
    number, kind = scatter.attr
    value, *indices = (found.names[position] for position in scatter.args)
    target = operands[number]
    chosen = [f"{index} * g{dim}" for dim, index in enumerate(indices)]
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
        "inside": " && ".join(f"jitgen::is_within({index}, b{dim})" for dim, index in enumerate(indices)) or "true",
        "combines": operation is not None,
        "new": new,
        "mark": environment.user_mark(scatter.location),
    }
    if dialect.name == "triton":
        context["inside"] = " & ".join(["live", *(f"({i} >= 0) & ({i} < b{dim})" for dim, i in enumerate(indices))])
        context["old"] = triton.load_cast("tl.load(to, mask=inside)", target["dtype"])
        context["stored"] = triton.store_cast("new", target["dtype"])
    return context
