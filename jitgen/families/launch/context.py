"""Renders the source of a launch: the user's module, and an entry that passes the arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jitgen.codegen.environment import Rendered, family_folder, user_mark
from jitgen.codegen.triton import SIGNATURE_TYPES
from jitgen.device import Device
from jitgen.errors import UnsupportedError
from jitgen.families.launch import NAME
from jitgen.families.launch.body import at_the_call
from jitgen.families.launch.layout import Layout, attrs_of, parameters, passed_integers
from jitgen.families.launch.schedule import Schedule, explain
from jitgen.ir.launches import CONFIG, CONSTANT, FLOAT, TENSOR
from jitgen.ir.program import Kernel
from jitgen.kernel.render import source
from jitgen.spec import KernelSource

POINTERS = SIGNATURE_TYPES | {"float8_e4m3fn": "fp8e4nv", "float8_e5m2": "fp8e5"}
"""Storage dtype to what a user's kernel has behind a pointer, as Triton's launcher tells it."""


def render(
    kernel: Kernel, layouts: Sequence[Layout], schedule: Schedule, device: Device, compiler: str
) -> tuple[KernelSource, Rendered]:
    """Renders the source of ``kernel``.

    Raises:
        UnsupportedError: the plan's kernels are in another language.
    """
    (body,), (layout,) = kernel.bodies, layouts
    attrs, location = attrs_of(body), body.instructions[0].location
    language, entry, text = attrs.kernel
    if device.dialect != language:
        where = f" at {location}" if location else ""
        remedy = (
            "pass CUDA tensors, or set TRITON_INTERPRET=1 before the program starts"
            if device.dialect == "cpp"
            else 'use backend="auto" or "triton"'
        )
        raise UnsupportedError(
            f"{entry}{where} is a kernel in {language.capitalize()}, and the plan's kernels are for {device.target} in "
            f"{device.dialect}; {remedy}"
        )
    declared = parameters(kernel, layouts, device)
    integers = {name: f"n{i}" for i, (name, _, _) in enumerate(passed_integers(attrs))}
    known = dict(zip(integers, layout.known, strict=True))
    numbers = {number: f"p{number}" for number in range(len(body.operands))}
    chosen = dict(schedule.constants)
    arguments = []
    for name, how, value in attrs.parameters:
        late = at_the_call(how, value)
        if how == TENSOR:
            argument = numbers[value]
        elif how == CONSTANT:
            argument = value
        elif how == CONFIG:
            argument = chosen[name]
        elif late is not None:
            argument = f"a{kernel.scalars.index(late)}"
        elif name in integers:
            argument = "1" if known[name] == 1 else integers[name]
        else:
            argument = _literal(how, value)
        arguments.append(f"{name}={argument}")
    passed = [position for position, fact in enumerate(layout.known) if fact != 1]
    signature = [f"*{POINTERS[operand.dtype]}" for operand in body.operands]
    signature += ["i64" if layout.wide else "i32"] * len(passed)
    signature += [SIGNATURE_TYPES[dtype] for _, dtype in kernel.scalars]
    multiples = [*layout.alignments, *(layout.known[position] or 1 for position in passed)]
    options: dict[str, Any] = {
        "signature": signature,
        "multiples": [*multiples, *[1] * len(kernel.scalars)],
        "num_warps": schedule.option("num_warps"),
        "num_stages": schedule.option("num_stages"),
        "enable_fp_fusion": True,
        **{name: number for name, number in schedule.options if name not in ("num_warps", "num_stages")},
    }
    context = {
        "module": text.rstrip(),
        "called": entry,
        "arguments": arguments,
        "parameters": [*numbers.values(), *declared.names, *(f"a{index}" for index in range(len(kernel.scalars)))],
        "mark": user_mark(location),
    }
    titles = [line for line in explain(kernel, layouts, schedule, device) if location is None or location not in line]
    return source(
        f"{NAME}_{entry}", kernel, schedule, device, compiler, titles, (context, options), False, family_folder(NAME)
    )


def _literal(how: str, value: Any) -> str:
    """Returns a number of the source as Triton's launcher would pass it: an integer that is 1 is a constant."""
    if how != FLOAT and value == 1:
        return "1"
    if how == FLOAT:
        number = repr(value) if value == value and abs(value) != float("inf") else f'float("{value}")'
        return f"tl.full((), {number}, tl.float32)"
    return f"tl.full((), {value}, {'tl.int32' if -(2**31) <= value < 2**31 else 'tl.int64'})"
